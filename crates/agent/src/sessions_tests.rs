//! Tests of sessions over HTTP, with clients of the test.

use std::net::SocketAddr;

use levade_call::{Backend, PartyLimits, SamplingRule};
use levade_conversation::{Format, Options as History};
use levade_gateway::{GatewayOptions, Model, serve};
use levade_policy::{SamplingParams, Simulator, SimulatorConfig};
use levade_store::{Memory, Sqlite};
use levade_text::testing::{VOCABULARY, tiny_chat};
use levade_tree::{Kind, Purpose, RunId};
use tokio::net::TcpListener;

use super::*;
use crate::testing::post_json;

/// Key of the server.
const KEY: &str = "sk-server";

/// A served model whose sessions are recorded.
struct Server {
    address: SocketAddr,
    store: Arc<dyn Store>,
    sessions: Arc<Sessions>,
}

/// Timeout of the sessions.
const TIMEOUT: Duration = Duration::from_secs(60);

impl Server {
    async fn new(timeout: Duration, records_traffic: bool) -> Self {
        let store = Arc::new(Memory::new(RunId("served-0".into())));
        Self::with_store(store, timeout, records_traffic).await
    }

    async fn with_store(store: Arc<dyn Store>, timeout: Duration, records_traffic: bool) -> Self {
        let config =
            SimulatorConfig { vocabulary: VOCABULARY, context: 4096, ..Default::default() };
        let party = Arc::new(Party::new(
            "tiny",
            Backend::Tokens(Arc::new(Simulator::new(config))),
            Some(Arc::new(Format::new(Arc::new(tiny_chat().unwrap()), History::default()))),
            PartyLimits { context: 4096, timeout: Duration::from_secs(30) },
            SamplingRule::Default(SamplingParams { max_tokens: 8, ..Default::default() }),
        ));
        let options = GatewayOptions { keys: vec![KEY.into()], ..GatewayOptions::default() };
        let model = Model { party: Arc::clone(&party), created: 1 };
        let gateway = Gateway::new(vec![model], options);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let served = gateway.clone();
        tokio::spawn(async move { serve(&served, listener, std::future::pending()).await });
        let sessions = Sessions::open(SessionsOptions {
            gateway,
            store: Arc::clone(&store),
            party,
            timeout,
            records_traffic,
        });
        Server { address, store, sessions }
    }

    /// Posts a document. `headers` are complete lines.
    async fn post_with(&self, path: &str, key: &str, headers: &str, body: &Value) -> (u16, Value) {
        post_json(self.address, path, key, headers, body).await
    }

    async fn post(&self, path: &str, key: &str, body: &Value) -> (u16, Value) {
        self.post_with(path, key, "", body).await
    }

    /// Posts a document that must be accepted.
    async fn ok(&self, path: &str, key: &str, body: &Value) -> Value {
        let (status, value) = self.post(path, key, body).await;
        assert_eq!(status, 200, "{path}: {value}");
        value
    }

    /// Waits until open sessions have passed their timeout and are recorded. A paused clock jumps
    /// to the next timer when all tasks wait.
    async fn pass_timeout(&self) {
        tokio::time::pause();
        tokio::time::sleep(2 * TIMEOUT).await;
        tokio::time::resume();
        assert_eq!(self.sessions.num_open(), 0);
    }

    async fn summaries(&self) -> Vec<levade_store::AttemptSummary> {
        self.store.summaries(Purpose::Session).await.unwrap()
    }
}

fn question(text: &str) -> Value {
    json!({ "model": "tiny", "messages": [{ "role": "user", "content": text }] })
}

#[tokio::test]
async fn session_records_calls_rewards_and_end() {
    let server = Server::new(TIMEOUT, false).await;
    let task = json!({ "task_id": "sum-1", "task": { "question": "1+1?", "answer": "2" } });
    let started = server.ok("/rl/start_session", KEY, &task).await;
    let key = started["api_key"].as_str().unwrap();
    let first = server.ok("/v1/chat/completions", key, &question("1+1?")).await;
    let message = &first["choices"][0]["message"];
    let messages = json!([{ "role": "user", "content": "1+1?" }, message,
        { "role": "user", "content": "Sure?" }]);
    let second = json!({ "model": "tiny", "messages": messages });
    let second = server.ok("/v1/chat/completions", key, &second).await;
    server.ok("/rl/set_reward", key, &json!({ "reward": 0.5, "interaction_id": null })).await;
    let named = json!({ "reward": 0.25, "turn": 0, "name": "form" });
    server.ok("/rl/set_reward", started["reward_key"].as_str().unwrap(), &named).await;
    let ended = server.ok("/rl/end_session", key, &json!({ "final_text": "2" })).await;
    assert_eq!(ended["interaction_count"], 2);

    let all = server.summaries().await;
    let [summary] = &all[..] else { panic!("{all:?}") };
    assert_eq!(ended["attempt"], summary.id.to_string());
    assert_eq!(summary.slot, AttemptSlot::for_session(key));
    let session = server.store.attempt(&summary.id).await.unwrap().unwrap();
    assert_eq!(
        (session.status, session.score, session.reward),
        (Status::Completed, Some(0.75), None)
    );
    let task: Task = serde_json::from_value(session.task.clone()).unwrap();
    assert_eq!((task.id.as_str(), task.question.as_str()), ("sum-1", "1+1?"));
    assert_eq!((task.answer, task.source.as_str()), (json!("2"), "sessions"));
    let outcome = &session.outcome;
    assert_eq!((outcome.finish, outcome.final_text.as_str()), (Finish::Answered, "2"));
    assert_eq!(outcome.turns, 2);
    let rewards = &outcome.scorer_inputs["program"]["rewards"];
    assert_eq!(rewards[0], json!({ "value": 0.5, "name": "reward", "agent": null, "turn": null }));
    assert_eq!((&rewards[1]["name"], &rewards[1]["turn"]), (&json!("form"), &json!(0)));
    // Every token that the clients were billed for is recorded, with its log-probability.
    let tokens = |response: &Value| response["usage"]["completion_tokens"].as_u64().unwrap();
    let segments = session.trajectory.segments();
    let sampled: Vec<_> = segments.iter().filter(|s| s.kind == Kind::Sampled).collect();
    assert_eq!(summary.sampled_tokens, tokens(&first) + tokens(&second));
    assert!(sampled.iter().all(|segment| segment.logprobs.len() == segment.tokens.len()));
    assert!(segments.iter().all(|s| s.agent == "default" && s.policy == "default"));
    // The second call continued the first one.
    assert_eq!(session.trajectory.leaves().len(), 1);

    for (path, body) in [
        ("/v1/chat/completions", question("again?")),
        ("/rl/set_reward", json!({ "reward": 1.0 })),
        ("/rl/end_session", json!({})),
    ] {
        let (status, error) = server.post(path, key, &body).await;
        assert_eq!(status, 410, "{path}: {error}");
    }
    assert_eq!(server.sessions.num_open(), 0);
}

#[tokio::test]
async fn unended_session_is_closed_at_time_limit() {
    let server = Server::new(TIMEOUT, false).await;
    let started = server.ok("/rl/start_session", KEY, &json!({})).await;
    let key = started["api_key"].as_str().unwrap();
    server.ok("/v1/chat/completions", key, &question("1+1?")).await;
    // An unused session leaves no attempt that counts.
    server.ok("/rl/start_session", KEY, &json!({})).await;
    server.pass_timeout().await;
    let all = server.summaries().await;
    assert_eq!((all.len(), all[0].slot), (1, AttemptSlot::for_session(key)));
    let session = server.store.attempt(&all[0].id).await.unwrap().unwrap();
    assert_eq!((session.status, session.outcome.finish), (Status::Completed, Finish::Deadline));
    assert_eq!(session.score, None, "no reward was posted");
    let why = &session.outcome.warnings[0].message;
    assert!(why.contains("was not ended within 60s"), "{why}");
    let (status, _) = server.post("/v1/chat/completions", key, &question("1+1?")).await;
    assert_eq!(status, 410);
    let failures = server.store.failures(Purpose::Session).await.unwrap();
    assert_eq!((failures.len(), failures[0].status), (1, Status::Abandoned));
}

#[tokio::test]
async fn failed_session_has_no_score() {
    let server = Server::new(TIMEOUT, false).await;
    let started = server.ok("/rl/start_session", KEY, &json!({})).await;
    let (id, key) = (&started["session_id"], started["api_key"].as_str().unwrap());
    server.ok("/v1/chat/completions", key, &question("1+1?")).await;
    // A key of the server names the session.
    server.ok("/rl/set_reward", KEY, &json!({ "reward": 1, "session_id": id })).await;
    let failed = json!({ "error": "the browser crashed", "session_id": id });
    server.ok("/rl/end_session", KEY, &failed).await;
    let id = server.summaries().await[0].id;
    let session = server.store.attempt(&id).await.unwrap().unwrap();
    assert_eq!((session.status, session.score), (Status::Failed, None));
    assert_eq!(session.outcome.error.as_deref(), Some("the browser crashed"));
}

#[tokio::test]
async fn invalid_session_requests_are_rejected_with_reason() {
    let server = Server::new(TIMEOUT, false).await;
    let started = server.ok("/rl/start_session", KEY, &json!({})).await;
    let key = started["api_key"].as_str().unwrap();
    let reward_key = started["reward_key"].as_str().unwrap();
    let other = server.ok("/rl/start_session", KEY, &json!({})).await;
    let reward = json!({ "reward": 1.0 });
    let unknown = json!({ "session_id": "x" });
    let by_id = json!({ "reward": 1.0, "interaction_id": "chatcmpl-1" });
    let foreign = json!({ "session_id": other["session_id"] });
    for (path, key, body, status, text) in [
        ("/rl/start_session", "sk-other", json!({}), 401, "key"),
        ("/rl/start_session", key, json!({}), 403, "with a key of the server"),
        ("/rl/start_session", KEY, json!({ "tsk": 1 }), 400, "tsk"),
        ("/rl/set_reward", KEY, reward, 400, "session_id is missing"),
        ("/rl/set_reward", key, json!({ "reward": "much" }), 400, "reward"),
        ("/rl/set_reward", key, json!({ "reward": 1.0, "turn": 3 }), 400, "the call 3"),
        ("/rl/set_reward", key, by_id, 400, "`turn`"),
        ("/rl/end_session", KEY, unknown, 404, "no open session \\\"x\\\""),
        ("/rl/end_session", key, foreign, 403, "another session"),
        ("/rl/end_session", reward_key, json!({}), 403, "only rewards"),
    ] {
        let (found, error) = server.post(path, key, &body).await;
        let error = error.to_string();
        assert_eq!(found, status, "{path} {body}: {error}");
        assert!(error.contains(text), "{path} {body}: {error}");
    }
    assert_eq!(server.sessions.num_open(), 2, "no request had an effect");
    // A gateway without a record has no sessions.
    let Server { address, store, sessions } = server;
    drop(sessions);
    let sessions = Server::new(TIMEOUT, false).await.sessions;
    let server = Server { address, store, sessions };
    let (status, error) = server.post("/rl/start_session", KEY, &json!({})).await;
    assert!(status == 404 && error.to_string().contains("--record"), "{status} {error}");
}

#[tokio::test]
async fn traffic_is_recorded_by_conversation_or_by_call() {
    let server = Server::new(TIMEOUT, true).await;
    let quiet = Server::new(TIMEOUT, false).await;
    let seeded = |text: &str| {
        let mut call = question(text);
        call["seed"] = json!(5);
        call
    };
    // A client that sets a seed gets the same completion again.
    let content = |response: &Value| response["choices"][0]["message"].clone();
    let first = server.ok("/v1/chat/completions", KEY, &seeded("a?")).await;
    let again = server.ok("/v1/chat/completions", KEY, &seeded("a?")).await;
    assert_eq!(content(&first), content(&again));
    quiet.ok("/v1/chat/completions", KEY, &seeded("a?")).await;
    let id = "x-session-id: chat-7\r\n";
    for text in ["b?", "c?"] {
        let path = "/v1/chat/completions";
        let (status, response) = server.post_with(path, KEY, id, &question(text)).await;
        assert_eq!(status, 200, "{response}");
    }
    let (status, _) = server
        .post(
            "/v1/chat/completions",
            KEY,
            &json!({
                "model": "other", "messages": [{ "role": "user", "content": "d?" }],
            }),
        )
        .await;
    assert_eq!(status, 404, "an unknown model is rejected as before");
    // A user's feedback on the conversation.
    server.ok("/rl/set_reward", KEY, &json!({ "reward": 1, "session_id": "chat-7" })).await;
    server.ok("/rl/end_session", KEY, &json!({ "session_id": "chat-7" })).await;
    let wait = async {
        while server.sessions.num_open() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        while server.summaries().await.len() < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap();
    let mut found = Vec::new();
    for summary in server.summaries().await {
        let session = server.store.attempt(&summary.id).await.unwrap().unwrap();
        found.push((session.outcome.turns, session.score));
    }
    found.sort_by_key(|(turns, _)| *turns);
    assert_eq!(found, [(1, None), (1, None), (2, Some(1.0))]);
    assert!(quiet.summaries().await.is_empty());
}

#[tokio::test]
async fn sessions_and_traffic_name_their_person() {
    let server = Server::new(TIMEOUT, true).await;
    let named = json!({ "task": { "person": "task", "question": "?" }, "person": "alice" });
    let started = server.ok("/rl/start_session", KEY, &named).await;
    let key = started["api_key"].as_str().unwrap();
    server.ok("/v1/chat/completions", key, &question("a?")).await;
    server.ok("/rl/end_session", key, &json!({})).await;
    let path = "/v1/chat/completions";
    for (person, text) in [("bob", "b?"), ("eve", "c?"), ("bob", "d?")] {
        let headers = format!("x-session-id: chat\r\nx-person-id: {person}\r\n");
        let (status, response) = server.post_with(path, KEY, &headers, &question(text)).await;
        assert_eq!(status, 200, "{response}");
    }
    // Two people have a conversation with this id.
    let reward = json!({ "reward": 1.0, "session_id": "chat" });
    assert_eq!(server.post("/rl/set_reward", KEY, &reward).await.0, 404);
    let headers = "x-person-id: \u{e9}ve\r\n";
    let (status, error) = server.post_with(path, KEY, headers, &question("e?")).await;
    assert!(status == 400 && error.to_string().contains("x-person-id"), "{status} {error}");
    server.pass_timeout().await;
    let mut found = Vec::new();
    for summary in server.summaries().await {
        let session = server.store.attempt(&summary.id).await.unwrap().unwrap();
        found.push((levade_tasks::persons(&session.task).concat(), session.outcome.turns));
    }
    found.sort();
    assert_eq!(found, [("alice".to_owned(), 1), ("bob".to_owned(), 2), ("eve".to_owned(), 1)]);
}

#[tokio::test]
async fn conversation_after_time_limit_starts_new_session() {
    let server = Server::new(TIMEOUT, true).await;
    let id = "x-session-id: chat\r\n";
    for num_sessions in 1..=2 {
        let path = "/v1/chat/completions";
        let (status, response) = server.post_with(path, KEY, id, &question("a?")).await;
        assert_eq!(status, 200, "{response}");
        server.pass_timeout().await;
        assert_eq!(server.summaries().await.len(), num_sessions);
    }
}

#[tokio::test]
async fn traffic_is_served_although_it_cannot_be_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.db");
    Sqlite::open(&file, &RunId("served-0".into())).await.unwrap();
    let read_only = Arc::new(Sqlite::open_existing(&file).await.unwrap());
    let server = Server::with_store(read_only, TIMEOUT, true).await;
    server.ok("/v1/chat/completions", KEY, &question("a?")).await;
    let (status, response) =
        server.post_with("/v1/chat/completions", KEY, "x-session-id: b\r\n", &question("b?")).await;
    assert_eq!(status, 200, "{response}");
    // A client that asks for a record gets an error.
    let (status, error) = server.post("/rl/start_session", KEY, &json!({})).await;
    assert!(status == 503 && error.to_string().contains("cannot be recorded"), "{status} {error}");
}

#[tokio::test]
async fn stopped_server_records_open_sessions() {
    let server = Server::new(TIMEOUT, false).await;
    let started = server.ok("/rl/start_session", KEY, &json!({})).await;
    let key = started["api_key"].as_str().unwrap();
    server.ok("/v1/chat/completions", key, &question("1+1?")).await;
    server.sessions.close_all().await;
    let id = server.summaries().await[0].id;
    let session = server.store.attempt(&id).await.unwrap().unwrap();
    assert_eq!((session.status, session.outcome.finish), (Status::Completed, Finish::Deadline));
    let why = &session.outcome.warnings[0].message;
    assert!(why.contains("before the server stopped"), "{why}");
}
