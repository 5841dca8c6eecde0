//! Tests of the tool loop, with a scripted sampler and with the simulated policy.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use levade_conversation::{Format, History, Options};
use levade_policy::{
    CallStreams, FinishReason, Learner, Load, PolicyError, SampleEvent, SampleRequest,
    SampleStream, Sampler, SamplingParams, Simulator, SimulatorConfig, with_sampler_timeout,
};
use levade_rl::Loss;
use levade_tasks::Task;
use levade_text::testing::{ALWAYS_THINKS, IM_END, IM_START, VOCABULARY, tiny_tokenizer};
use levade_text::{Chat, ChatOptions, Message, ToolSpec};
use levade_tools::{Calculator, Session, ToolContext, ToolError, ToolOutput, ToolSet, Toolbox};
use levade_tree::{Kind, Segment, SequenceInput, SequenceTarget, Term, Trajectory, TreeBatch};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep};

use super::*;
use crate::demonstrate::{DemonstrationError, demonstrate};
use crate::roster::Player;
use crate::testing;
use crate::{Backend, OpeningLimit, Truncation};

#[path = "attempt_tools_tests.rs"]
mod tools;

#[path = "helper_agent_tests.rs"]
mod helped;

#[path = "fitting_tests.rs"]
mod fitting;

#[path = "user/user_tests.rs"]
mod users;

/// Scripted completion.
#[derive(Clone)]
pub(super) enum ScriptedCompletion {
    /// Exact tokens, even beyond the limit.
    Tokens(Vec<u32>, FinishReason),
    /// The sampler fails.
    Breaks,
    /// The sampler never responds.
    Hangs,
    /// The sampler sends these tokens, and then no more.
    Stalls(Vec<u32>),
    /// The sampler rejects the prompt as too long.
    TooLong,
}

pub(super) fn text_completion(text: &str) -> ScriptedCompletion {
    let tokens = text.bytes().map(u32::from).chain([IM_END]).collect();
    ScriptedCompletion::Tokens(tokens, FinishReason::StopId)
}

#[derive(Default)]
pub(super) struct ScriptedSampler {
    completions: Vec<ScriptedCompletion>,
    next: AtomicUsize,
    pub requests: Mutex<Vec<SampleRequest>>,
    stalled: Mutex<Vec<UnboundedSender<Result<SampleEvent, PolicyError>>>>,
}

#[async_trait]
impl Sampler for ScriptedSampler {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        self.requests.lock().unwrap().push(request);
        let (sender, stream) = SampleStream::channel();
        match self.completions[self.next.fetch_add(1, Ordering::SeqCst)].clone() {
            ScriptedCompletion::Tokens(tokens, finish) => {
                let logprobs = vec![-0.5; tokens.len()];
                sender
                    .send(Ok(SampleEvent::Tokens { tokens, logprobs, top: Vec::new(), version: 4 }))
                    .unwrap();
                sender.send(Ok(SampleEvent::Finished(finish))).unwrap();
            }
            ScriptedCompletion::Breaks => {
                sender.send(Err(PolicyError::Stopped("the scripted sampler".into()))).unwrap()
            }
            ScriptedCompletion::Hangs => std::future::pending().await,
            ScriptedCompletion::Stalls(tokens) => {
                let logprobs = vec![-0.5; tokens.len()];
                sender
                    .send(Ok(SampleEvent::Tokens { tokens, logprobs, top: Vec::new(), version: 4 }))
                    .unwrap();
                self.stalled.lock().unwrap().push(sender);
            }
            ScriptedCompletion::TooLong => {
                return Err(PolicyError::PromptTooLong { prompt: 9, context: 8 });
            }
        }
        Ok(stream)
    }

    async fn abort(&self, _: Option<u64>) -> Result<usize, PolicyError> {
        Ok(0)
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        Err(PolicyError::Stopped("the scripted sampler".into()))
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        Err(PolicyError::Stopped("the scripted sampler".into()))
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        Ok(4)
    }
}

/// Tool that counts its open sessions. The arguments of its calls specify their rewards and final
/// answers, and its evidence has the data of the attempt.
struct CountingToolbox(Arc<AtomicUsize>);

struct CountedSession {
    open: Arc<AtomicUsize>,
    attempt: ToolContext,
}

/// Returns the specification of a tool of this name, without arguments.
fn spec(name: &str) -> ToolSpec {
    let parameters = json!({ "type": "object" });
    ToolSpec { name: name.into(), description: String::new(), parameters }
}

#[async_trait]
impl Toolbox for CountingToolbox {
    fn name(&self) -> &str {
        "counted"
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![spec("counted")])
    }

    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(CountedSession { open: self.0.clone(), attempt: attempt.clone() }))
    }
}

#[async_trait]
impl Session for CountedSession {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![spec("counted")]
    }

    async fn call(&self, _tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        ToolOutput {
            reward: arguments.get("reward").and_then(Value::as_f64),
            metrics: [("moves".to_owned(), 1.0)].into(),
            ends: arguments.get("answer").and_then(Value::as_str).map(str::to_owned),
            ..ToolOutput::text("counted")
        }
    }

    async fn scorer_input(&mut self) -> Result<Map<String, Value>, ToolError> {
        let ToolContext { attempt, task, seed, stream, .. } = &self.attempt;
        let known = json!({ "attempt": attempt, "question": task.question, "seed": seed, "stream": stream });
        Ok(known.as_object().unwrap().clone())
    }

    async fn close(&mut self) -> Result<(), ToolError> {
        self.open.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}

pub(super) struct Bench {
    pub agent: Agent,
    pub sampler: Arc<ScriptedSampler>,
    open: Arc<AtomicUsize>,
}

pub(super) fn bench(completions: &[ScriptedCompletion]) -> Bench {
    let sampler = Arc::new(ScriptedSampler {
        completions: completions.to_vec(),
        ..ScriptedSampler::default()
    });
    let open = Arc::new(AtomicUsize::new(0));
    let tools: Vec<Arc<dyn Toolbox>> =
        vec![Arc::new(Calculator::default()), Arc::new(CountingToolbox(open.clone()))];
    let mut agent = testing::agent("solver", testing::player("student", sampler.clone()), tools);
    agent.limits.completion_timeout = Duration::from_millis(200);
    Bench { agent, sampler, open }
}

impl Bench {
    pub fn player(&mut self) -> &mut Player {
        &mut self.agent.players[0]
    }

    pub fn format(&self) -> Arc<Format> {
        self.agent.players[0].format.clone().unwrap()
    }

    fn context(&self) -> AttemptContext {
        let task = Task { question: "2+3?".into(), ..Task::default() };
        AttemptContext { task, messages: messages(), ..testing::context(vec![self.agent.clone()]) }
    }

    pub async fn run(&self) -> Attempt {
        let attempt = BuiltInLoop.run(self.context()).await;
        assert_eq!(self.open.load(Ordering::SeqCst), 0, "a tool session was left open");
        attempt
    }

    fn text(&self, tokens: &[u32]) -> String {
        self.format().chat().tokenizer().decode_with_special(tokens)
    }
}

fn messages() -> Vec<Message> {
    vec![Message::system("Use tools."), Message::user("2+3?")]
}

pub(super) const CALL: &str = "<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\": \"2+3\"}}\n</tool_call>";

#[tokio::test]
async fn tool_call_gets_result_and_tokens_are_recorded() {
    let bench = bench(&[text_completion(CALL), text_completion("It is 5.")]);
    let Attempt { trajectory, outcome, .. } = bench.run().await;
    assert_eq!(outcome.final_text, "It is 5.");
    assert_eq!((outcome.finish, outcome.turns, outcome.calls.ok), (Finish::Answered, 2, 1));
    assert_eq!((outcome.calls.total(), outcome.error.as_deref()), (1, None));
    let shape: Vec<_> = trajectory.segments().iter().map(|s| (s.kind, s.turn)).collect();
    assert_eq!(
        shape,
        [(Kind::Context, 0), (Kind::Sampled, 0), (Kind::Context, 1), (Kind::Sampled, 1)]
    );
    assert_eq!(trajectory.leaves().len(), 1);
    let full_tokens = trajectory.sequence_tokens(trajectory.leaves()[0]);
    let text = bench.text(&full_tokens);
    assert!(
        text.contains(&format!("2+3?<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n")),
        "{text}"
    );
    assert!(text.ends_with("\n<|im_start|>assistant\nIt is 5.<|im_end|>"), "{text}");
    assert_eq!(outcome.sampled_tokens, trajectory.sampled_tokens());
    let sampled = &trajectory.segments()[1];
    assert_eq!((sampled.temperature, sampled.filtered), (0.9, false));
    assert_eq!(sampled.versions[0].version, 4);
    // The recorded tokens are those that the sampler received, and sampled tokens reduce the
    // budget.
    let requests = bench.sampler.requests.lock().unwrap();
    assert_eq!(full_tokens[..requests[1].prompt.len()], requests[1].prompt);
    let mut streams = CallStreams::new(11);
    for request in requests.iter() {
        assert_eq!(
            (request.seed, request.stream),
            (7, streams.next_stream("solver", &request.prompt))
        );
    }
    assert_eq!(requests[1].params.max_tokens, 1000 - sampled.tokens.len());
    assert_eq!(requests[0].params.stop_ids, bench.format().chat().stop_ids());
}

#[tokio::test]
async fn invalid_calls_become_observations() {
    let bench = bench(&[
        text_completion(
            "<tool_call>{oops</tool_call><tool_call>{\"name\": \"abacus\"}</tool_call>\
             <tool_call>{\"name\": \"calculator\", \"arguments\": {}}</tool_call>\
             <tool_call>{\"name\": \"calculator\", \"arguments\": {\"expression\": \"1/0\"}}</tool_call>",
        ),
        text_completion("Sorry."),
    ]);
    let Attempt { trajectory, outcome, .. } = bench.run().await;
    let calls = outcome.calls;
    assert_eq!(
        (calls.malformed, calls.unknown_tool, calls.bad_arguments, calls.failed, calls.ok),
        (1, 1, 2, 0, 0)
    );
    assert_eq!(outcome.calls_by_turn, [(0, calls)]);
    assert_eq!((outcome.finish, outcome.final_text.as_str()), (Finish::Answered, "Sorry."));
    let context = bench.text(&trajectory.segments()[2].tokens);
    let position =
        |text: &str| context.find(text).unwrap_or_else(|| panic!("{text} not in {context}"));
    assert!(position("cannot be read") < position("no tool \"abacus\""));
    assert!(position("no tool \"abacus\"") < position("\"expression\" is missing"));
    assert!(position("\"expression\" is missing") < position("division by zero"));
}

#[tokio::test]
async fn turn_and_token_limits_end_attempt() {
    let bench = bench(&[
        text_completion(CALL),
        text_completion(CALL),
        text_completion(&format!("Now: {CALL}<tool_call>{{")),
    ]);
    let outcome = bench.run().await.outcome;
    assert_eq!((outcome.finish, outcome.turns), (Finish::MaxTurns, 3));
    // Calls whose results no turn would read are not made, but malformed calls still count.
    assert_eq!((outcome.calls.ok, outcome.calls.malformed), (2, 1));
    let by_turn: Vec<_> =
        outcome.calls_by_turn.iter().map(|(turn, calls)| (*turn, calls.total())).collect();
    assert_eq!(by_turn, [(0, 1), (1, 1), (2, 1)]);
    assert_eq!(outcome.final_text, "");

    for (finish, want) in
        [(FinishReason::Length, Finish::MaxTokens), (FinishReason::Context, Finish::Context)]
    {
        let bench =
            self::bench(&[text_completion(CALL), ScriptedCompletion::Tokens(vec![65, 66], finish)]);
        let attempt = bench.run().await;
        assert_eq!((attempt.outcome.finish, attempt.outcome.turns), (want, 2));
        assert_eq!(attempt.outcome.final_text, "", "what was cut is no answer");
        assert_eq!(attempt.trajectory.segments().len(), 4);
    }

    let mut short = self::bench(&[text_completion(CALL), text_completion("5")]);
    short.agent.limits.max_tokens = CALL.len() + 1;
    assert_eq!(short.run().await.outcome.finish, Finish::MaxTokens);

    let full = self::bench(&[text_completion(CALL), ScriptedCompletion::TooLong]);
    assert_eq!(full.run().await.outcome.finish, Finish::Context);
}

#[tokio::test]
async fn first_prompt_is_truncated_by_opening_limit() {
    let full_tokens =
        bench(&[text_completion("5")]).run().await.trajectory.segments()[0].tokens.clone();
    let n = full_tokens.len();
    let kept = |truncation| {
        let mut bench = bench(&[text_completion("5")]);
        bench.player().opening = OpeningLimit { max_tokens: 10, truncation };
        async move { bench.run().await }
    };
    for (truncation, want) in [
        (Truncation::Left, full_tokens[n - 10..].to_vec()),
        (Truncation::Right, full_tokens[..10].to_vec()),
        (Truncation::Middle, [&full_tokens[..5], &full_tokens[n - 5..]].concat()),
    ] {
        let attempt = kept(truncation).await;
        assert_eq!(attempt.trajectory.segments()[0].tokens, want);
        assert!(attempt.outcome.prompt_truncated && attempt.outcome.finish == Finish::Answered);
    }
    let rejected = kept(Truncation::Reject).await.outcome;
    let error = rejected.error.unwrap();
    assert!(
        error.contains(&format!("{n} tokens")) && error.contains("agent.truncation"),
        "{error}"
    );
    assert!(!bench(&[text_completion("5")]).run().await.outcome.prompt_truncated);
}

#[tokio::test]
async fn sampler_failure_is_reported_in_outcome() {
    let attempt = bench(&[text_completion(CALL), ScriptedCompletion::Breaks]).run().await;
    assert_eq!(attempt.outcome.finish, Finish::Failed);
    assert_eq!(
        attempt.outcome.error.as_deref(),
        Some("the scripted sampler stopped; see its log for the reason")
    );
    // Everything before the failure is kept.
    assert_eq!((attempt.trajectory.segments().len(), attempt.outcome.calls.ok), (3, 1));

    let attempt = bench(&[ScriptedCompletion::Hangs]).run().await;
    let error = attempt.outcome.error.unwrap();
    assert!(
        error.contains("200ms") && error.contains("the sampler to accept a request"),
        "{error}"
    );

    let attempt = bench(&[ScriptedCompletion::TooLong]).run().await;
    assert_eq!(attempt.outcome.finish, Finish::Failed);
    let error = attempt.outcome.error.unwrap();
    assert!(error.contains("the prompt has 9 tokens, but the context holds 8"), "{error}");
}

#[tokio::test]
async fn tokens_sampled_before_timeout_are_kept() {
    // The timeout of a completion fails the attempt.
    let attempt = bench(&[ScriptedCompletion::Stalls(vec![65, 66])]).run().await;
    assert_eq!(attempt.outcome.finish, Finish::Failed);
    assert_eq!(attempt.trajectory.segments()[1].tokens, [65, 66]);

    // The timeout of the attempt ends it, like any other limit that truncates attempts.
    let mut bench = bench(&[text_completion(CALL), ScriptedCompletion::Stalls(vec![67, 68, 69])]);
    bench.agent.limits.completion_timeout = Duration::from_secs(60);
    bench.agent.limits.attempt_timeout = Duration::from_millis(200);
    let Attempt { trajectory, outcome, .. } = bench.run().await;
    assert_eq!((outcome.finish, outcome.turns), (Finish::Deadline, 2));
    let sampled: Vec<&Segment> =
        trajectory.segments().iter().filter(|segment| segment.kind == Kind::Sampled).collect();
    assert_eq!((sampled[1].tokens.as_slice(), sampled[1].turn), (&[67, 68, 69][..], 1));
    assert_eq!(outcome.sampled_tokens, trajectory.sampled_tokens());
    assert_eq!(sampled[1].versions, [levade_tree::VersionRun { version: 4, len: 3 }]);
}

/// Sampler whose device trains during the first second.
struct TrainingSampler(Instant);

#[async_trait]
impl Sampler for TrainingSampler {
    async fn sample(&self, _: SampleRequest) -> Result<SampleStream, PolicyError> {
        Err(PolicyError::Stopped("a sampler that only trains".into()))
    }

    async fn abort(&self, _: Option<u64>) -> Result<usize, PolicyError> {
        Ok(0)
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        Ok(Load::default())
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        Ok(self.0.elapsed().min(Duration::from_secs(1)))
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        Ok(0)
    }
}

#[tokio::test(start_paused = true)]
async fn timeout_excludes_time_of_device_training() {
    let waits = async |millis| {
        let sampler = TrainingSampler(Instant::now());
        with_sampler_timeout(
            &sampler,
            Duration::from_millis(100),
            sleep(Duration::from_millis(millis)),
        )
        .await
        .is_some()
    };
    assert!(waits(90).await && waits(1090).await);
    assert!(!waits(1110).await);
}

#[tokio::test]
async fn arbitrary_sampled_tokens_are_recorded() {
    let odd = vec![65, IM_START, 0xff, 0xfe, 66];
    let mut tokens: Vec<u32> = CALL.bytes().map(u32::from).collect();
    tokens.extend(&odd);
    tokens.push(IM_END);
    let bench = bench(&[
        ScriptedCompletion::Tokens(tokens.clone(), FinishReason::StopId),
        text_completion("5"),
    ]);
    let Attempt { trajectory, outcome, .. } = bench.run().await;
    assert_eq!(trajectory.segments()[1].tokens, tokens);
    assert_eq!(outcome.finish, Finish::Answered);
    let requests = bench.sampler.requests.lock().unwrap();
    let start = trajectory.segments()[0].tokens.len();
    assert_eq!(requests[1].prompt[start..start + tokens.len()], tokens);
}

#[tokio::test]
async fn demonstration_has_tokens_of_equivalent_attempt() {
    let bench = bench(&[text_completion(CALL), text_completion("It is 5.")]);
    let attempt = bench.run().await;
    let mut conversation = messages();
    conversation.push(Message::calls("", vec![levade_tasks::calculation("2+3")]));
    let mut result = Message::tool("5");
    result.name = Some("calculator".into());
    result.tool_call_id = Some("call_0".into());
    conversation.extend([result, Message::assistant("It is 5.")]);
    let specs = bench.agent.tools.specs(&Task::default());
    let demonstration =
        demonstrate(bench.format().chat(), &specs, &conversation, messages().len()).unwrap();
    let parts = |t: &Trajectory| {
        t.segments().iter().map(|s| (s.turn, bench.text(&s.tokens))).collect::<Vec<_>>()
    };
    assert_eq!(parts(&demonstration), parts(&attempt.trajectory));
    let kinds: Vec<_> = demonstration.segments().iter().map(|s| s.kind).collect();
    assert_eq!(kinds, [Kind::Context, Kind::Demonstrated, Kind::Context, Kind::Demonstrated]);

    // Messages that open the task are context, including those of the assistant.
    let shown = [
        Message::user("1+1?"),
        Message::assistant("2"),
        Message::user("2+3?"),
        Message::assistant("5"),
    ];
    let demonstration = demonstrate(bench.format().chat(), &specs, &shown, 3).unwrap();
    let [context, imitated] = demonstration.segments() else { panic!("{demonstration:?}") };
    assert_eq!((context.kind, imitated.kind), (Kind::Context, Kind::Demonstrated));
    assert!(
        bench.text(&context.tokens).contains("2+3?")
            && bench.text(&imitated.tokens).starts_with('5')
    );

    let rejected = |conversation: &[Message]| {
        demonstrate(bench.format().chat(), &specs, conversation, 0).unwrap_err()
    };
    assert_eq!(rejected(&messages()), DemonstrationError::MissingCompletion);
    assert_eq!(rejected(&[Message::assistant("Hi")]), DemonstrationError::MissingCompletion);
    conversation.push(Message::user("Thanks"));
    assert_eq!(rejected(&conversation), DemonstrationError::Trailing("user"));
}

#[path = "attempt_templates_tests.rs"]
mod templates;
