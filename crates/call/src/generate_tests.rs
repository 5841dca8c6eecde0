//! Tests of calls over a sampler with scripted events: its requests, the events of readers, and the
//! record.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use levade_conversation::{Format, Options};
use levade_policy::{
    FinishReason, Grammar, Load, PolicyError, SampleEvent, SampleRequest, SampleStream, Sampler,
    SamplingParams,
};
use levade_text::testing::{ALWAYS_THINKS, IM_END, tiny_chat, tiny_tokenizer};
use levade_text::{Chat, ChatOptions, CompletionDelta, Message, ToolSpec};

use crate::{
    Backend, CallMetrics, Cast, Constraint, End, Event, Input, Party, PartyLimits, PromptRecording,
    Recorder, RecorderOptions, Request, SamplingRule, ToolCallIds, ToolChoice,
};

type Events = Vec<Result<SampleEvent, PolicyError>>;

/// Sampler that sends the same events for every request, with a pause before each, and stores the
/// requests.
#[derive(Default)]
struct Script {
    events: Events,
    /// Whether the stream stays open after the events, without an end.
    hangs: bool,
    requests: Mutex<Vec<SampleRequest>>,
}

#[async_trait]
impl Sampler for Script {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        self.requests.lock().unwrap().push(request);
        let (sender, stream) = SampleStream::channel();
        let events = self.events.clone();
        let hangs = self.hangs;
        tokio::spawn(async move {
            for event in events {
                tokio::time::sleep(Duration::from_millis(2)).await;
                let _ = sender.send(event);
            }
            if hangs {
                sender.closed().await;
            }
        });
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

/// Returns the events of a completion, in three parts.
fn completion(text: &str, finish: FinishReason) -> Events {
    let mut ids: Vec<u32> = text.bytes().map(u32::from).collect();
    if finish == FinishReason::StopId {
        ids.push(IM_END);
    }
    let (first, rest) = ids.split_at(ids.len() / 3);
    let (second, third) = rest.split_at(rest.len() / 2);
    let tokens = [first, second, third].map(|ids| {
        Ok(SampleEvent::Tokens {
            tokens: ids.to_vec(),
            logprobs: vec![-0.5; ids.len()],
            top: Vec::new(),
            version: 0,
        })
    });
    tokens.into_iter().chain([Ok(SampleEvent::Finished(finish))]).collect()
}

/// An attempt of one agent.
struct Attempt {
    cast: Cast,
    sampler: Arc<Script>,
    metrics: Arc<CallMetrics>,
}

impl Attempt {
    fn new(sampler: Script, sampling: SamplingRule) -> Self {
        Self::with_chat(tiny_chat().unwrap(), sampler, sampling)
    }

    fn with_chat(chat: Chat, sampler: Script, sampling: SamplingRule) -> Self {
        let sampler = Arc::new(sampler);
        let metrics = Arc::new(CallMetrics::default());
        let party = Party::new(
            "tiny",
            Backend::Tokens(Arc::clone(&sampler) as Arc<dyn Sampler>),
            Some(Arc::new(Format::without_probe(Arc::new(chat), Options::default()))),
            PartyLimits { context: 4096, timeout: Duration::from_secs(30) },
            sampling,
        );
        let recorder = Recorder::new(RecorderOptions {
            name: "a".into(),
            seed: 1,
            stream: 2,
            max_calls: 100,
            max_tokens: 100_000,
            grace: Duration::from_secs(60),
            tool_call_ids: ToolCallIds::FromStream,
            prompt_recording: PromptRecording::WithCompletion,
            metrics: Arc::clone(&metrics),
        });
        let party = Party { agent: "solver".into(), ..party };
        Attempt { cast: Cast::new([Arc::new(party)], recorder), sampler, metrics }
    }

    /// Creates an attempt whose model writes `text` in every call.
    fn with_text(text: &str, finish: FinishReason) -> Self {
        Self::with_script(Script { events: completion(text, finish), ..Script::default() })
    }

    fn with_script(sampler: Script) -> Self {
        Self::new(sampler, SamplingRule::Default(SamplingParams::default()))
    }

    /// Makes a call. Returns its end and all deltas that readers received.
    async fn call(&self, request: Request) -> (End, Vec<CompletionDelta>) {
        let mut received = Vec::new();
        let reader = self.cast.call("solver", request).await.unwrap();
        let observe = |event: &Event| {
            if let Event::Delta { deltas, .. } = event {
                received.extend_from_slice(deltas);
            }
        };
        (reader.completion_with(observe).await.unwrap(), received)
    }
}

fn question() -> Request {
    Request::new(Input::Messages(vec![Message::user("What is 12 * 3?")]))
}

fn tools() -> Vec<ToolSpec> {
    let parameters =
        serde_json::json!({ "type": "object", "properties": { "a": { "type": "number" } } });
    vec![ToolSpec { name: "add".into(), description: String::new(), parameters }]
}

#[tokio::test]
async fn empty_completion_is_recorded_only_if_complete() {
    for (events, hangs, has_tokens, segments) in [
        (vec![Ok(SampleEvent::Finished(FinishReason::StopId))], false, false, 2),
        (vec![Ok(SampleEvent::Finished(FinishReason::Length))], false, false, 2),
        (vec![stopped()], false, false, 0),
        (Vec::new(), false, false, 0),
        (Vec::new(), true, false, 0),
        (vec![completion("So.", FinishReason::Length).swap_remove(1), stopped()], false, true, 2),
    ] {
        let attempt =
            Attempt::with_script(Script { events: events.clone(), hangs, ..Script::default() });
        let reader = attempt.cast.call("solver", question()).await.unwrap();
        if !hangs {
            let _ = reader.completion().await;
        }
        let recorded = attempt.cast.recorder().close(Duration::from_secs(5)).await;
        let found = recorded.trajectory.segments();
        assert!(
            found.len() <= segments && found.is_empty() == (segments == 0),
            "{events:?}: {found:?}"
        );
        assert_eq!(
            (recorded.calls.len(), recorded.calls[0].tokens > 0),
            (1, has_tokens),
            "{events:?}"
        );
        assert_eq!(recorded.calls[0].turn.is_some(), segments > 0, "{events:?}");
    }
}

fn stopped() -> Result<SampleEvent, PolicyError> {
    Err(PolicyError::Stopped("a sampler".into()))
}

#[tokio::test]
async fn prompt_logprobs_arrive_in_parts() {
    let prompt: Vec<u32> = (1..=8).collect();
    let known: Vec<f32> = (1..8).map(|index| -(index as f32)).collect();
    for parts in [vec![7], vec![3, 4], vec![1, 1, 5]] {
        let mut remaining = known.clone();
        let mut events: Events = Vec::new();
        for part in parts.clone() {
            let logprobs = remaining.drain(..part).collect();
            events.push(Ok(SampleEvent::Prompt { logprobs, top: Vec::new() }));
        }
        events.extend(completion("So.", FinishReason::StopId));
        let attempt = Attempt::with_script(Script { events, ..Script::default() });
        let mut reader =
            attempt.cast.call("solver", Request::new(Input::Tokens(prompt.clone()))).await.unwrap();
        let mut ids = Vec::new();
        let mut logprobs = Vec::new();
        while let Some(event) = reader.next().await {
            if let Event::Prompt { tokens, .. } = &*event {
                ids.extend(tokens.iter().map(|token| token.id));
                logprobs.extend(tokens.iter().map(|token| token.logprob));
            }
        }
        assert_eq!(ids, prompt, "{parts:?}");
        // The first token has no log-probability.
        assert!(logprobs[0].is_nan() && logprobs[1..] == known[..], "{parts:?}: {logprobs:?}");
    }
}

#[tokio::test]
async fn metrics_count_each_call_once() {
    let attempt = Attempt::with_text("So be it.", FinishReason::StopId);
    let (end, _) = attempt.call(question()).await;
    attempt.call(question()).await;
    let metrics = &attempt.metrics;
    let values = [
        &metrics.calls,
        &metrics.prompt_tokens,
        &metrics.sampled_tokens,
        &metrics.failed,
        &metrics.running,
    ];
    let values = values.map(|counter| counter.load(Ordering::Relaxed));
    assert_eq!(values, [2, 2 * end.prompt_tokens as u64, 2 * end.tokens as u64, 0, 0]);
    for histogram in [&metrics.first_token, &metrics.duration] {
        let mut out = String::new();
        histogram.write("h", "", &mut out);
        assert!(out.ends_with("\nh_count 2\n"), "{out}");
    }
    // The same prompt twice is a fork.
    assert_eq!(
        (metrics.forked.load(Ordering::Relaxed), metrics.truncated.load(Ordering::Relaxed)),
        (1, 0)
    );
}

#[tokio::test]
async fn tool_call_ids_number_calls_of_completion() {
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let text = [call, call, "<tool_call>\n{oops}\n</tool_call>", call].join("\n");
    let attempt = Attempt::with_text(&text, FinishReason::StopId);
    let (end, received) = attempt.call(Request { tools: tools(), ..question() }).await;
    let ids: Vec<&str> = end.message.tool_calls.iter().map(|call| call.id.as_str()).collect();
    let prefix = &ids[0][..8];
    // The third call is malformed.
    assert_eq!(ids, [0, 1, 3].map(|index| format!("{prefix}{index}")));
    let streamed = received.iter().filter_map(|delta| match delta {
        CompletionDelta::Call(Ok(call)) => Some(call.id.as_str()),
        _ => None,
    });
    assert_eq!(streamed.collect::<Vec<_>>(), ids);
    let stream = attempt.sampler.requests.lock().unwrap()[0].stream;
    assert_eq!(prefix, format!("{:08x}", stream as u32));
}

#[tokio::test]
async fn message_includes_stop_string_on_request() {
    for keeps_stop in [false, true] {
        let attempt = Attempt::with_text("So. STOP", FinishReason::StopString);
        let mut request = question();
        (request.sampling.stop, request.sampling.keeps_stop) = (vec!["STOP".into()], keeps_stop);
        let (end, received) = attempt.call(request).await;
        let want = if keeps_stop { "So. STOP" } else { "So. " };
        let streamed: String = received
            .iter()
            .filter_map(|delta| match delta {
                CompletionDelta::Speech(text) => Some(text.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!((end.message.content.as_str(), &*end.text, &*streamed), (want, want, want));
        assert_eq!(
            (end.stopped_by.as_deref(), end.finish),
            (Some("STOP"), FinishReason::StopString)
        );
    }
}

#[tokio::test]
async fn history_matches_completion_with_optional_stop_string() {
    for content in ["So. ", "So. STOP"] {
        let attempt = Attempt::with_text("So. STOP", FinishReason::StopString);
        let mut request = question();
        request.sampling.stop = vec!["STOP".into()];
        attempt.call(request).await;
        let history = vec![
            Message::user("What is 12 * 3?"),
            Message::calls(content.to_owned(), Vec::new()),
            Message::user("And?"),
        ];
        attempt.call(Request::new(Input::Messages(history))).await;
        let forked = attempt.metrics.forked.load(Ordering::Relaxed);
        assert_eq!(forked, 0, "the conversation forks at the assistant message {content:?}");
    }
}

#[tokio::test]
async fn tokens_of_reasoning_are_counted() {
    let text = "<think>Hm, so be it.</think>So.";
    let (end, _) = Attempt::with_text(text, FinishReason::StopId).call(question()).await;
    assert_eq!(end.tokens, text.len() + 1);
    assert_eq!(end.message.reasoning_content.as_deref(), Some("Hm, so be it."));
    assert!((8..=28).contains(&end.reasoning_tokens), "{}", end.reasoning_tokens);
    let (end, _) = Attempt::with_text("So.", FinishReason::StopId).call(question()).await;
    assert_eq!((end.reasoning_tokens, end.message.reasoning_content), (0, None));
}

#[tokio::test]
async fn tags_of_empty_reasoning_are_not_content() {
    for text in ["<think></think>So.", "\n<think>\n\n</think>\n\nSo.", " <think></think>So."] {
        let (end, received) = Attempt::with_text(text, FinishReason::StopId).call(question()).await;
        let streamed = received.iter().filter_map(|delta| match delta {
            CompletionDelta::Speech(text) => Some(text.as_str()),
            _ => None,
        });
        assert_eq!(
            (end.message.content.as_str(), streamed.collect::<String>().as_str()),
            ("So.", "So.")
        );
        assert_eq!(end.message.reasoning_content, None, "{text:?}");
    }
}

#[tokio::test]
async fn completion_continues_reasoning_that_prompt_opens() {
    let script = Script {
        events: completion("Hm.\n</think>\n\nSo.", FinishReason::StopId),
        ..Script::default()
    };
    let sampling = SamplingRule::Default(SamplingParams::default());
    let chat =
        Chat::new(tiny_tokenizer().unwrap(), Some(ALWAYS_THINKS), ChatOptions::default()).unwrap();
    let attempt = Attempt::with_chat(chat, script, sampling);
    let (end, _) = attempt.call(question()).await;
    assert_eq!(end.message.reasoning_content.as_deref().map(str::trim), Some("Hm."));
    assert_eq!(end.message.content.as_str().trim(), "So.");
    // No grammar allows the end of the reasoning.
    let request = Request { constraint: Some(Constraint::JsonObject), ..question() };
    let error = attempt.cast.call("solver", request).await.unwrap_err();
    assert!(
        error.param.as_deref() == Some("response_format") && error.message.contains("reasoning"),
        "{error}"
    );
}

#[tokio::test]
async fn fixed_sampling_drops_forced_calls_and_keeps_logprobs() {
    let fixed = SamplingRule::Fixed(SamplingParams { max_tokens: 50, ..SamplingParams::default() });
    let script = Script { events: completion("So.", FinishReason::StopId), ..Script::default() };
    let attempt = Attempt::new(script, fixed);
    let mut request = Request { tools: tools(), tool_choice: ToolChoice::Required, ..question() };
    request.sampling.logprobs = Some(2);
    attempt.call(request).await;
    let params = attempt.sampler.requests.lock().unwrap()[0].params.clone();
    assert_eq!((params.top_logprobs, params.grammar, params.max_tokens), (2, None, 50));
    let recorded = attempt.cast.recorder().close(Duration::from_secs(5)).await;
    let overridden: Vec<(&str, u32)> =
        recorded.overridden.iter().map(|(name, count)| (name.as_str(), *count)).collect();
    assert_eq!(overridden, [("tool_choice", 1)]);
}

#[tokio::test]
async fn only_required_choice_permits_several_calls() {
    let attempt = Attempt::with_text("So.", FinishReason::StopId);
    for (tool_choice, parallel_calls) in [
        (ToolChoice::Required, true),
        (ToolChoice::Required, false),
        (named_choice(), true),
        (named_choice(), false),
    ] {
        attempt.call(Request { tools: tools(), tool_choice, parallel_calls, ..question() }).await;
    }
    let requests = attempt.sampler.requests.lock().unwrap();
    let grammars: Vec<&Grammar> =
        requests.iter().filter_map(|request| request.params.grammar.as_ref()).collect();
    let [several, single, named_choice, named_single] = grammars[..] else {
        panic!("{grammars:?}")
    };
    assert!(several != single && named_choice == single && named_single == single, "{grammars:?}");
}

fn named_choice() -> ToolChoice {
    ToolChoice::Named("add".into())
}

#[tokio::test]
async fn contradictory_requests_are_rejected_by_field() {
    let attempt = Attempt::with_text("So.", FinishReason::StopId);
    for (request, param, message) in [
        (
            Request { tools: tools(), tool_choice: ToolChoice::Named("sub".into()), ..question() },
            "tool_choice",
            "names \"sub\", which is not among the tools",
        ),
        (
            Request { tool_choice: ToolChoice::Required, ..question() },
            "tool_choice",
            "there are no tools",
        ),
        (
            Request {
                tools: tools(),
                tool_choice: ToolChoice::Required,
                constraint: Some(Constraint::JsonObject),
                ..question()
            },
            "response_format",
            "cannot be both a tool call and another output format",
        ),
        (Request::new(Input::Messages(Vec::new())), "messages", "messages is empty"),
        (Request::new(Input::Tokens(Vec::new())), "prompt", "the prompt is empty"),
        (Request::new(Input::Text(String::new())), "prompt", "the prompt is empty"),
    ] {
        let error = attempt.cast.call("solver", request).await.unwrap_err();
        assert!(
            error.param.as_deref() == Some(param) && error.message.contains(message),
            "{error:?}"
        );
    }
    assert_eq!(attempt.cast.recorder().ended_calls(), 0);
}
