//! Tests of the sampling requests that calls of an attempt cause, for any client options, and of
//! the agents that the tokens are recorded for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use levade_call::{Backend, Party, PartyLimits, Recording, SamplingRule};
use levade_conversation::{Format, Options as History};
use levade_policy::{
    FinishReason, Load, PolicyError, SampleEvent, SampleRequest, SampleStream, Sampler,
    SamplingParams,
};
use levade_text::testing::{IM_END, tiny_chat};
use levade_tree::Kind;
use serde_json::{Value, json};

use crate::testing::{CONTEXT, LIMITS, Limits, OUTSIDE_KEY, TestGateway};
use crate::{CallPattern, Gateway, GatewayOptions, Model, Route, SessionOptions};

const CHAT: &str = "/v1/chat/completions";

/// Sampler that records its requests and returns two tokens for each. The `n`th request is sampled
/// with version `n` of the weights, from 1.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<SampleRequest>>);

#[async_trait]
impl Sampler for Recorder {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        let version = {
            let mut requests = self.0.lock().unwrap();
            requests.push(request);
            requests.len() as u64
        };
        let (sender, stream) = SampleStream::channel();
        let tokens = vec![97, IM_END];
        let logprobs = vec![-0.5; 2];
        let top = Vec::new();
        let _ = sender.send(Ok(SampleEvent::Tokens { tokens, logprobs, top, version }));
        let _ = sender.send(Ok(SampleEvent::Finished(FinishReason::StopId)));
        Ok(stream)
    }

    async fn abort(&self, _stream: Option<u64>) -> Result<usize, PolicyError> {
        Ok(0)
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        Ok(Load::default())
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        Ok(0)
    }
}

/// Returns the sampling parameters that a recipe fixes.
fn fixed_params() -> SamplingParams {
    SamplingParams { max_tokens: 50, temperature: 0.7, top_p: 0.9, ..SamplingParams::default() }
}

/// An attempt with two agents, `solver` and `critic`, and fixed sampling parameters.
struct Bench {
    served: TestGateway,
    sampler: Arc<Recorder>,
}

impl Bench {
    fn new(limits: Limits, stream: u64) -> Self {
        let sampler = Arc::new(Recorder::default());
        let format =
            Arc::new(Format::without_probe(Arc::new(tiny_chat().unwrap()), History::default()));
        let party = Party::new(
            "tiny",
            Backend::Tokens(Arc::clone(&sampler) as Arc<dyn Sampler>),
            Some(Arc::clone(&format)),
            PartyLimits { context: CONTEXT, timeout: limits.timeout },
            SamplingRule::Default(SamplingParams { max_tokens: 1000, ..Default::default() }),
        );
        let party = Party { policy: "own".into(), ..party };
        let model = Model { party: Arc::new(party.clone()), created: 1 };
        let route = |agent: &str| Route {
            party: Arc::new(Party {
                agent: agent.into(),
                sampling: SamplingRule::Fixed(fixed_params()),
                ..party.clone()
            }),
            pattern: CallPattern::default(),
        };
        let gateway = Gateway::new(vec![model], GatewayOptions::default());
        let session = gateway.open_session(SessionOptions {
            rollout: "r".into(),
            attempt: "a".into(),
            routes: vec![route("solver"), route("critic")],
            recorder: gateway.new_recorder("a", (11, stream), (limits.calls, limits.tokens)),
            rewards: true,
        });
        Bench { served: TestGateway { gateway, session, format }, sampler }
    }

    async fn send_request(&self, path: &str, body: &Value) -> Value {
        self.served.post(path, body).await.json()
    }

    fn requests(&self) -> Vec<SampleRequest> {
        self.sampler.0.lock().unwrap().clone()
    }

    async fn close(self) -> Recording {
        self.served.session.close(Duration::from_secs(5)).await.0
    }
}

fn question(text: &str, more: Value) -> Value {
    let mut body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": text }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn recipe_overrides_client_sampling_options() {
    let bench = Bench::new(LIMITS, 2);
    let wishes = json!({
        "temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "logit_bias": { "97": 5 }, "min_tokens": 3, "ignore_eos": true, "seed": 5,
        "response_format": { "type": "json_object" }, "stop": ["x"], "stop_token_ids": [98], "max_tokens": 20,
    });
    let requested: Vec<String> = wishes.as_object().unwrap().keys().cloned().collect();
    bench.send_request(CHAT, &question("Hi", wishes)).await;
    let [request] = &bench.requests()[..] else { panic!() };
    // The client can add stop conditions and lower the maximum length. The end-of-turn tokens
    // remain.
    let chat = bench.served.format.chat();
    let want = SamplingParams {
        max_tokens: 20,
        stop_strings: vec!["x".into()],
        stop_ids: [chat.stop_ids(), &[98]].concat(),
        ..fixed_params()
    };
    assert_eq!(request.params, want);
    assert_eq!((request.seed, request.policy.as_str()), (11, "own"));
    let recorded = bench.close().await;
    let overridden: Vec<&String> = recorded.overridden.keys().collect();
    let kept = ["max_tokens", "stop", "stop_token_ids"];
    let mut want: Vec<&String> =
        requested.iter().filter(|name| !kept.contains(&name.as_str())).collect();
    want.sort_unstable();
    assert_eq!(overridden, want);
    assert!(recorded.overridden.values().all(|count| *count == 1));
}

#[tokio::test]
async fn options_equal_to_recipe_are_not_overridden() {
    let bench = Bench::new(LIMITS, 2);
    let fixed = fixed_params();
    let same =
        json!({ "temperature": fixed.temperature, "top_p": fixed.top_p, "max_tokens": 5000 });
    bench.send_request(CHAT, &question("Hi", same)).await;
    assert_eq!(bench.requests()[0].params.max_tokens, fixed.max_tokens);
    assert!(bench.close().await.overridden.is_empty());
}

#[tokio::test]
async fn client_sets_sampling_outside_attempts() {
    let bench = Bench::new(LIMITS, 2);
    let wishes = json!({ "temperature": 0.25, "seed": 5, "ignore_eos": true, "max_tokens": 7 });
    let send = async |body: &Value| {
        bench.served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await.json()
    };
    send(&question("Hi", wishes)).await;
    send(&question("Hi", json!({}))).await;
    send(&question("Hi", json!({}))).await;
    let requests = bench.requests();
    let params = &requests[0].params;
    assert_eq!((params.temperature, params.max_tokens, params.stop_ids.len()), (0.25, 7, 0));
    assert_eq!(requests[0].seed, 5);
    assert_eq!(requests[1].params.stop_ids, bench.served.format.chat().stop_ids());
    // Calls without a seed get distinct seeds.
    assert_ne!(requests[1].seed, requests[2].seed);
}

#[tokio::test]
async fn each_call_has_unique_reproducible_stream() {
    let first = streams_of(2).await;
    let distinct: std::collections::BTreeSet<&u64> = first.iter().collect();
    assert_eq!(distinct.len(), first.len(), "{first:?}");
    // Streams are functions of the attempt and the prompt, so a replay has the same streams.
    assert_eq!(streams_of(2).await, first);
    assert!(streams_of(3).await.iter().all(|stream| !first.contains(stream)));
}

async fn streams_of(stream: u64) -> Vec<u64> {
    let bench = Bench::new(LIMITS, stream);
    for body in [
        question("Hi", json!({})),
        question("Ho", json!({})),
        // The same prompt again, and several choices for one prompt.
        question("Hi", json!({})),
        question("Hey", json!({ "n": 2 })),
    ] {
        bench.send_request(CHAT, &body).await;
    }
    let path = "/rollout/r/attempt/a/agent/critic/v1/chat/completions";
    bench.send_request(path, &question("Hi", json!({}))).await;
    let streams: Vec<u64> = bench.requests().iter().map(|request| request.stream).collect();
    assert_eq!(streams.len(), 6);
    streams
}

#[tokio::test]
async fn tokens_are_recorded_for_calling_agent() {
    let bench = Bench::new(LIMITS, 2);
    let prefix = "/rollout/r/attempt/a/agent/critic";
    let ids = json!({ "prompt": [1, 2, 3] });
    bench.send_request(&format!("{prefix}/v1/completions"), &ids).await;
    bench.send_request("/v1/completions", &json!({ "prompt": [4, 5] })).await;
    bench.send_request(&format!("{prefix}/v1/chat/completions"), &question("Hi", json!({}))).await;
    bench.send_request(CHAT, &question("Hi", json!({}))).await;
    let recorded = bench.close().await;
    let of = |kind: Kind| {
        let segments =
            recorded.trajectory.segments().iter().filter(move |segment| segment.kind == kind);
        segments
            .map(|segment| (segment.agent.as_str(), segment.policy.as_str()))
            .collect::<Vec<_>>()
    };
    let want = [("critic", "own"), ("solver", "own"), ("critic", "own"), ("solver", "own")];
    assert_eq!((of(Kind::Sampled), of(Kind::Context)), (want.to_vec(), want.to_vec()));
    let called: Vec<&str> = recorded.calls.iter().map(|call| call.agent.as_str()).collect();
    assert_eq!(called, ["critic", "solver", "critic", "solver"]);
}

#[tokio::test]
async fn reward_rejects_unknown_agents_and_calls() {
    let bench = Bench::new(LIMITS, 2);
    bench.send_request(CHAT, &question("Hi", json!({}))).await;
    let key = bench.served.session.reward_key().to_owned();
    let post = async |body: Value| {
        let response =
            bench.served.send("POST", "/rollout/r/attempt/a/reward", &key, &body.to_string()).await;
        (response.status.as_u16(), response.json()["error"]["param"].as_str().map(str::to_owned))
    };
    assert_eq!(post(json!({ "value": 1 })).await, (200, None));
    assert_eq!(post(json!({ "value": 0.5, "agent": "critic", "turn": 0 })).await, (200, None));
    for (body, param) in [
        (json!({ "value": 1, "agent": "nobody" }), "agent"),
        (json!({ "value": 1, "agent": "" }), "agent"),
        (json!({ "value": 1, "turn": 1 }), "turn"),
        (json!({ "value": 1, "turn": -1 }), "turn"),
        (json!({ "value": "1" }), "value"),
        (json!({ "value": 1, "agents": "solver" }), "agents"),
    ] {
        assert_eq!(post(body.clone()).await, (400, Some(param.to_owned())), "{body}");
    }
    let (_, rewards) = bench.served.session.close(Duration::from_secs(5)).await;
    let values: Vec<f64> = rewards.iter().map(|reward| reward.value).collect();
    assert_eq!(values, [1.0, 0.5]);
}

#[tokio::test]
async fn max_tokens_respects_attempt_and_context() {
    // Each completion samples two tokens, and the attempt permits five.
    let bench = Bench::new(Limits { tokens: 5, ..LIMITS }, 2);
    for text in ["a", "b", "c", "d"] {
        bench.send_request(CHAT, &question(text, json!({}))).await;
    }
    let max_requested: Vec<usize> =
        bench.requests().iter().map(|request| request.params.max_tokens).collect();
    assert_eq!(max_requested, [5, 3, 1]);
    assert_eq!(bench.close().await.rejected.get("limit"), Some(&1));

    let bench = Bench::new(LIMITS, 2);
    let prompt: Vec<u32> = vec![97; CONTEXT - 3];
    bench
        .send_request(
            "/v1/completions",
            &json!({ "prompt": prompt, "max_tokens": 10, "min_tokens": 9 }),
        )
        .await;
    assert_eq!(bench.requests()[0].params.max_tokens, 3);
}

#[tokio::test]
async fn later_calls_require_no_older_weights() {
    let bench = Bench::new(LIMITS, 2);
    for text in ["a", "b", "c"] {
        bench.send_request(CHAT, &question(text, json!({}))).await;
    }
    let min_versions: Vec<u64> =
        bench.requests().iter().map(|request| request.min_version).collect();
    assert_eq!(min_versions, [0, 1, 2]);
}
