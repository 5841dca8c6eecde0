use std::collections::VecDeque;

use levade_call::{ApiError, ChatApi, ChatCompletion, ChatDelta, ChatQuery, ErrorKind};
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::roster::Roster;
use crate::user::{SimulatedUser, USER_GREETING, USER_PROMPT, UserAgent, UserSpeaker};

fn user() -> SimulatedUser {
    SimulatedUser {
        name: "customer".into(),
        opens: true,
        max_turns: 3,
        stop: "###STOP###".into(),
        timeout: Duration::from_secs(5),
        speaker: UserSpeaker::Agent(UserAgent {
            agent: "shopper".into(),
            prompt: USER_PROMPT.into(),
            greeting: USER_GREETING.into(),
            instruction: "wish.text".into(),
        }),
    }
}

#[test]
fn instruction_is_field_of_row_or_question() {
    let UserSpeaker::Agent(mut keys) = user().speaker else { panic!("an agent plays the user") };
    let row = json!({ "wish": { "text": "a pen" }, "count": 3, "none": null });
    let task = Task {
        id: "t-1".into(),
        question: "Hello?".into(),
        row: row.as_object().unwrap().clone().into(),
        ..Task::default()
    };
    for (field, expected) in [
        ("wish.text", Ok("a pen")),
        ("count", Ok("3")),
        ("", Ok("Hello?")),
        ("none", Err("the row of the task t-1 has no field `none`")),
        ("wish.color", Err("the row of the task t-1 has no field `wish.color`")),
    ] {
        keys.instruction = field.to_owned();
        let found = keys.find_instruction(&task);
        assert_eq!(found.as_deref().map_err(String::as_str), expected);
    }
}

/// Returns the context of an attempt in which `solver` talks to the user that `shopper` plays.
fn context(mut solver: Bench, shopper: Agent, user: SimulatedUser) -> (Bench, AttemptContext) {
    solver.agent.user = Some(Arc::new(user));
    let row = json!({ "wish": { "text": "You want a pen." } });
    let task = Task {
        question: "2+3?".into(),
        row: row.as_object().unwrap().clone().into(),
        ..Task::default()
    };
    let roster = Arc::new(Roster::new(vec![solver.agent.clone(), shopper]));
    let context = AttemptContext { task, roster, ..solver.context() };
    (solver, context)
}

fn shopper(completions: &[ScriptedCompletion]) -> Bench {
    let mut shopper = bench(completions);
    shopper.agent.name = "shopper".into();
    shopper.player().policy = "frozen".into();
    shopper.player().is_trained = false;
    shopper
}

async fn talk(
    solver: &[ScriptedCompletion],
    shopper: &Bench,
    user: SimulatedUser,
) -> (Bench, Attempt) {
    let (solver, context) = context(bench(solver), shopper.agent.clone(), user);
    let attempt = BuiltInLoop.run(context).await;
    assert_eq!(solver.open.load(Ordering::SeqCst), 0, "a tool session was left open");
    (solver, attempt)
}

#[tokio::test]
async fn user_opens_answers_and_ends_conversation() {
    let shopper = shopper(&[
        text_completion("A pen, please."),
        text_completion("The blue one."),
        text_completion("Thanks ###STOP###"),
    ]);
    let completions = ["Which?", CALL, "Done."].map(text_completion);
    let (solver, attempt) = talk(&completions, &shopper, user()).await;
    let outcome = &attempt.outcome;
    assert_eq!(outcome.error, None);
    assert_eq!((outcome.finish, outcome.final_text.as_str()), (Finish::Ended, "Done."));
    assert_eq!((outcome.turns, outcome.calls.ok), (3, 1));
    assert_eq!(
        outcome.scorer_inputs["user"],
        json!({ "name": "customer", "turns": 2, "ended": true, "policy": "frozen" })
    );
    // The agent reads its instructions and the user, but neither the task nor the user's wish.
    let requests = solver.sampler.requests.lock().unwrap();
    let read = solver.text(&requests[2].prompt);
    assert!(
        read.contains("Use tools.") && read.contains("user\nA pen, please.<|im_end|>"),
        "{read}"
    );
    assert!(
        read.contains("assistant\nWhich?<|im_end|>\n<|im_start|>user\nThe blue one."),
        "{read}"
    );
    assert!(!read.contains("2+3?<|im_end|>") && !read.contains("You want a pen."), "{read}");
    // The user reads its wish and the agent's replies, but no tools and calls.
    let requests = shopper.sampler.requests.lock().unwrap();
    let read = shopper.text(&requests[2].prompt);
    assert!(read.contains("You want a pen.") && read.contains("###STOP###"), "{read}");
    assert!(read.contains(USER_GREETING) && read.contains("user\nDone.<|im_end|>"), "{read}");
    assert!(!read.contains("tool_call") && !read.contains("Use tools."), "{read}");
    // The user's tokens are recorded under its own names, and do not count as those of the agent.
    let sampled = |name: &str| {
        let segments = attempt.trajectory.segments().iter();
        let own = segments.filter(|s| s.agent == name && s.kind == Kind::Sampled);
        own.map(|s| (s.policy.as_str(), s.tokens.len())).collect::<Vec<_>>()
    };
    let spoken = sampled("shopper");
    assert_eq!(spoken.iter().map(|(policy, _)| *policy).collect::<Vec<_>>(), ["frozen"; 3]);
    let own: usize = sampled("solver").iter().map(|(_, tokens)| tokens).sum();
    assert_eq!(outcome.sampled_tokens, own);
    assert_eq!(attempt.trajectory.leaves().len(), 2, "two conversations");
    let mut turns: Vec<u32> = attempt.trajectory.segments().iter().map(|s| s.turn).collect();
    turns.sort_unstable();
    turns.dedup();
    assert_eq!(turns, [0, 1, 2, 3, 4, 5]);
}

#[tokio::test]
async fn question_is_first_message_of_user_who_does_not_open() {
    let shopper = shopper(&[text_completion("###STOP###")]);
    let user = SimulatedUser { opens: false, ..user() };
    let (solver, attempt) = talk(&[text_completion("It is 5.")], &shopper, user).await;
    assert_eq!(attempt.outcome.finish, Finish::Ended);
    let read = solver.text(&solver.sampler.requests.lock().unwrap()[0].prompt);
    assert!(read.contains("user\n2+3?<|im_end|>"), "{read}");
    let read = shopper.text(&shopper.sampler.requests.lock().unwrap()[0].prompt);
    assert!(read.contains("assistant\n2+3?<|im_end|>\n<|im_start|>user\nIt is 5."), "{read}");
}

#[tokio::test]
async fn conversation_ends_at_limits_of_user_and_agent() {
    // The user writes its three messages, and would write a fourth.
    let lines = ["a", "b", "c", "d"].map(text_completion);
    let completions = ["1", "2", "3", "4"].map(text_completion);
    let limited = SimulatedUser { max_turns: 2, ..user() };
    let (_, attempt) = talk(&completions, &shopper(&lines), limited).await;
    assert_eq!((attempt.outcome.finish, attempt.outcome.turns), (Finish::MaxTurns, 2));
    assert_eq!(attempt.outcome.scorer_inputs["user"]["turns"], 2);
    assert_eq!(attempt.outcome.scorer_inputs["user"]["ended"], false);
    // The agent may write three completions.
    let unlimited = || SimulatedUser { max_turns: 9, ..user() };
    let (_, attempt) = talk(&completions, &shopper(&lines), unlimited()).await;
    assert_eq!((attempt.outcome.finish, attempt.outcome.turns), (Finish::MaxTurns, 3));
    // The last completion is answered: the user may be content.
    let content = ["a", "b", "c", "###STOP###"].map(text_completion);
    let (_, attempt) = talk(&completions, &shopper(&content), unlimited()).await;
    assert_eq!((attempt.outcome.finish, attempt.outcome.turns), (Finish::Ended, 3));
}

/// Behavior of a scripted chat API for one call.
#[derive(Clone)]
enum Line {
    Text(&'static str),
    Fails(ErrorKind, &'static str),
    /// Writes until the limit of tokens.
    Endless,
    Calls,
    Hangs,
}

struct ScriptedApi(Mutex<VecDeque<Line>>);

impl ChatApi for ScriptedApi {
    fn respond(&self, _: ChatQuery) -> UnboundedReceiver<Result<ChatDelta, ApiError>> {
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        let done = |message, finish| {
            let (prompt_tokens, tokens, reasoning_tokens) = (0, 7, 0);
            let done = ChatCompletion { message, finish, prompt_tokens, tokens, reasoning_tokens };
            Ok(ChatDelta::Done(Box::new(done)))
        };
        let delta = match self.0.lock().unwrap().pop_front().unwrap_or(Line::Hangs) {
            Line::Text(text) => done(Message::assistant(text), FinishReason::StopId),
            Line::Fails(kind, why) => Err(ApiError::new(kind, why)),
            Line::Endless => done(Message::assistant("la la"), FinishReason::Length),
            Line::Calls => {
                let call = levade_tasks::calculation("2+3");
                done(Message::calls("", vec![call]), FinishReason::StopId)
            }
            Line::Hangs => {
                tokio::spawn(async move { sender.closed().await });
                return receiver;
            }
        };
        sender.send(delta).unwrap();
        receiver
    }
}

fn external(lines: &[Line]) -> Agent {
    let api = ScriptedApi(Mutex::new(lines.iter().cloned().collect()));
    let mut shopper = shopper(&[]).agent;
    shopper.players[0] = Player {
        backend: Backend::Messages(Arc::new(api)),
        format: None,
        policy: "gpt".into(),
        ..shopper.players[0].clone()
    };
    shopper
}

#[tokio::test(start_paused = true)]
async fn failed_user_fails_attempt_and_is_named_in_error() {
    let busy = ErrorKind::Busy(Duration::from_secs(1));
    let timeout = Duration::from_millis(50);
    for (lines, why) in [
        (vec![Line::Fails(ErrorKind::Unavailable, "connection refused")], "connection refused"),
        (vec![Line::Text("Hi."), Line::Fails(busy, "429 Too Many Requests")], "429"),
        (vec![Line::Text("Hi."), Line::Text(" \n")], "wrote an empty message"),
        (vec![Line::Text("Hi."), Line::Endless], "had not ended after 7 tokens"),
        (vec![Line::Calls], "called a tool"),
        (vec![Line::Text("Hi."), Line::Hangs], "50ms"),
        (vec![Line::Text("###STOP###")], "before its first message"),
    ] {
        let user = SimulatedUser { timeout, ..user() };
        let solver_bench = bench(&[text_completion("Yes?"), text_completion("?")]);
        let (solver, context) = context(solver_bench, external(&lines), user);
        let attempt = tokio::time::timeout(Duration::from_secs(5), BuiltInLoop.run(context));
        let outcome = attempt.await.unwrap().outcome;
        let error = outcome.error.unwrap();
        assert!(error.contains(why), "{error}");
        assert!(error.starts_with("the policy gpt failed as the user customer: "), "{error}");
        assert_eq!(outcome.finish, Finish::Failed);
        assert_eq!(outcome.warnings[0].source, "user");
        assert_eq!(solver.open.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test]
async fn external_user_talks_without_recorded_tokens() {
    let lines = [Line::Text("A pen."), Line::Text("###STOP###")];
    let (_, context) = context(bench(&[text_completion("Done.")]), external(&lines), user());
    let Attempt { trajectory, outcome, .. } = BuiltInLoop.run(context).await;
    assert_eq!((outcome.finish, outcome.error), (Finish::Ended, None));
    assert!(trajectory.segments().iter().all(|segment| segment.agent == "solver"));
    assert_eq!(outcome.cast["shopper"], "gpt");
    assert_eq!(outcome.sampled_tokens, trajectory.sampled_tokens());
}

#[tokio::test(start_paused = true)]
async fn timeout_of_attempt_while_user_hangs_is_failure() {
    let user = SimulatedUser { timeout: Duration::from_secs(60), ..user() };
    let solver_bench = bench(&[text_completion("Yes?")]);
    let lines = [Line::Text("Hi."), Line::Hangs];
    let (_, mut context) = context(solver_bench, external(&lines), user);
    context.limits.attempt_timeout = Duration::from_millis(100);
    let outcome = BuiltInLoop.run(context).await.outcome;
    assert_eq!(outcome.finish, Finish::Failed);
    let error = outcome.error.unwrap();
    assert!(error.contains("the user customer had not answered"), "{error}");
}

#[tokio::test]
async fn row_without_instruction_fails_attempt() {
    let (_, mut context) = context(bench(&[]), shopper(&[]).agent, user());
    context.task.row = Default::default();
    let error = BuiltInLoop.run(context).await.outcome.error.unwrap();
    assert!(
        error.contains("the user customer cannot start") && error.contains("`wish.text`"),
        "{error}"
    );
}

#[tokio::test]
async fn teacher_replaces_agent_but_not_user() {
    let lines = [Line::Text("A pen."), Line::Text("Blue."), Line::Text("###STOP###")];
    let (_, mut context) = context(bench(&[]), external(&lines), user());
    let completions = json!({ "wish": { "text": "x" }, "demo": ["Which?", "Done."] });
    context.task.row = completions.as_object().unwrap().clone().into();
    context.teacher = Some(crate::Teacher::RowField("demo".into()));
    let Attempt { trajectory, outcome, .. } = BuiltInLoop.run(context).await;
    assert_eq!((outcome.finish, outcome.error.as_deref()), (Finish::Ended, None));
    assert_eq!(outcome.final_text, "Done.");
    let shown = trajectory.segments().iter().filter(|s| s.kind == Kind::Demonstrated).count();
    assert_eq!(shown, 2);
    assert!(trajectory.segments().iter().all(|segment| segment.agent == "solver"));
}
