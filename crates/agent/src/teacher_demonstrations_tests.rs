use std::sync::Mutex;

use levade_call::{ApiError, ChatApi, ChatCompletion, ChatDelta, ChatQuery, ErrorKind};
use levade_policy::{Simulator, SimulatorConfig};
use levade_text::ToolCall;
use levade_text::testing::VOCABULARY;
use levade_tools::Calculator;
use levade_tree::Kind;
use serde_json::json;
use tokio::sync::mpsc::{self, UnboundedReceiver};

use super::*;
use crate::{Agent, AgentLoop, AttemptContext, BuiltInLoop, Teacher, testing};

/// Chat API that returns these messages, one for each query, and stores the queries.
struct Script(Mutex<Vec<Message>>, Mutex<Vec<ChatQuery>>);

impl ChatApi for Script {
    fn respond(&self, query: ChatQuery) -> UnboundedReceiver<Result<ChatDelta, ApiError>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.1.lock().unwrap().push(query);
        let mut remaining = self.0.lock().unwrap();
        let delta = if remaining.is_empty() {
            Err(ApiError::new(ErrorKind::Unavailable, "the teacher is gone"))
        } else {
            Ok(ChatDelta::Done(Box::new(ChatCompletion {
                message: remaining.remove(0),
                finish: FinishReason::StopId,
                prompt_tokens: 0,
                tokens: 0,
                reasoning_tokens: 0,
            })))
        };
        sender.send(delta).unwrap();
        receiver
    }
}

fn agent() -> Agent {
    let config = SimulatorConfig { vocabulary: VOCABULARY, ..SimulatorConfig::default() };
    let player = testing::player("student", Arc::new(Simulator::new(config)));
    testing::agent("solver", player, vec![Arc::new(Calculator::default())])
}

fn format() -> Arc<Format> {
    agent().players[0].format.clone().unwrap()
}

fn call(expression: &str) -> Message {
    let arguments = json!({ "expression": expression }).as_object().unwrap().clone();
    Message::calls(
        "",
        vec![ToolCall { id: "x1".into(), name: "calculator".into(), arguments: arguments.into() }],
    )
}

async fn run_with_script(script: Vec<Message>) -> (Attempt, Vec<ChatQuery>) {
    let script = Arc::new(Script(Mutex::new(script), Mutex::default()));
    let context = AttemptContext {
        messages: vec![Message::user("2+3?")],
        teacher: Some(Teacher::Api(script.clone())),
        ..testing::context(vec![agent()])
    };
    let attempt = BuiltInLoop.run(context).await;
    let requested = script.1.lock().unwrap().clone();
    (attempt, requested)
}

#[tokio::test]
async fn teacher_completions_become_demonstrations_in_pupil_format() {
    let (Attempt { trajectory, outcome, .. }, requested) =
        run_with_script(vec![call("2+3"), Message::assistant("It is 5.")]).await;
    assert_eq!((outcome.finish, outcome.final_text.as_str()), (Finish::Answered, "It is 5."));
    assert_eq!((outcome.turns, outcome.calls.ok, outcome.error.as_deref()), (2, 1, None));
    let last = requested[1].messages.last().unwrap();
    assert_eq!((last.content.as_str(), last.tool_call_id.as_deref()), ("5", Some("x1")));
    assert_eq!(requested[0].tools[0].name, "calculator");
    let kinds: Vec<Kind> = trajectory.segments().iter().map(|segment| segment.kind).collect();
    assert_eq!(kinds, [Kind::Context, Kind::Demonstrated, Kind::Context, Kind::Demonstrated]);
    assert!(trajectory.segments().iter().all(|s| (&*s.agent, &*s.policy) == ("solver", "student")));
    let chat = format().chat().clone();
    let text =
        chat.tokenizer().decode_with_special(&trajectory.sequence_tokens(trajectory.leaves()[0]));
    let written = "<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\": \"2+3\"}}\n</tool_call>";
    assert!(text.contains(&format!("assistant\n{written}<|im_end|>")), "{text}");
    assert!(text.ends_with("assistant\nIt is 5.<|im_end|>"), "{text}");
    let demonstrated = trajectory.segments().iter().filter(|s| s.kind == Kind::Demonstrated);
    assert_eq!(outcome.sampled_tokens, demonstrated.map(|s| s.tokens.len()).sum::<usize>());
}

#[tokio::test]
async fn unavailable_teacher_fails_only_its_attempt() {
    let (Attempt { trajectory, outcome, .. }, _) = run_with_script(vec![call("2+3")]).await;
    assert_eq!(outcome.finish, Finish::Failed);
    assert_eq!(outcome.error.as_deref(), Some("the teacher is gone"));
    assert_eq!(trajectory.segments().len(), 2, "what was said until then stays");
}

#[tokio::test]
async fn external_calls_become_demonstration_tree() {
    let external_call =
        |after, shared_messages, messages: &[&str], completion: &str| ExternalCall {
            agent: "solver".into(),
            policy: "student".into(),
            after,
            shared_messages,
            messages: messages.iter().map(|text| Message::user(*text)).collect(),
            tools: None,
            message: Message::assistant(completion),
            finish: FinishReason::StopId,
            prompt_tokens: 0,
            tokens: 0,
            error: None,
        };
    let mut calls = vec![
        external_call(None, 0, &["1+1?"], "2"),
        external_call(Some(0), 2, &["And 1?"], "3"),
        external_call(Some(0), 2, &["And 2?"], "4"),
        external_call(Some(0), 2, &["And 3?"], "cut"),
        ExternalCall { agent: "judge".into(), ..external_call(None, 0, &["Good?"], "Yes") },
    ];
    calls[3].finish = FinishReason::Length;
    let format = format();
    let (agent, policy) = ("solver".to_owned(), "student".to_owned());
    let imitating = ImitatingPolicy { format: Arc::clone(&format), agent, policy };
    let (trajectory, _) = demonstrate_calls(&[imitating], &calls).unwrap();
    let texts: Vec<String> = trajectory
        .leaves()
        .into_iter()
        .map(|leaf| {
            format.chat().tokenizer().decode_with_special(&trajectory.sequence_tokens(leaf))
        })
        .collect();
    assert_eq!(texts.len(), 2);
    assert!(texts[0].contains("And 1?") && texts[0].ends_with("3<|im_end|>"), "{texts:?}");
    assert!(texts[1].contains("And 2?") && texts[1].ends_with("4<|im_end|>"), "{texts:?}");
    let demonstrated =
        trajectory.segments().iter().filter(|s| s.kind == Kind::Demonstrated).count();
    assert_eq!(demonstrated, 3, "the beginning is shared");
}
