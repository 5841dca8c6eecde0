//! Converts attempts to spans of OpenTelemetry.
//!
//! An attempt is a trace. Its root span is an invocation of the agent; model calls and tool calls
//! are its children. If several agents act, each has a span of its own between the root and its
//! calls. Names and attributes follow OpenTelemetry's semantic conventions for generative AI
//! (<https://github.com/open-telemetry/semantic-conventions-genai>), others start with `levade.`.

use levade_store::Attempt;
use levade_tree::{CreditTarget, Finish, TimeInterval, TimedPart};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{
    AnyValue, ArrayValue, InstrumentationScope, KeyValue,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::{Event, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use serde_json::{Value, json};

use crate::call_tree::{CallNode, CallTree, ToolNode};
use crate::chats::Chats;
use crate::ids::{span_id, trace_id};
use crate::times::TimeSource;

/// Options for the content of OpenTelemetry traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceOptions {
    /// Whether spans contain the text of prompts, completions, tool calls and results.
    pub text: bool,
    /// Maximum number of characters of each text in a span.
    pub max_text_chars: usize,
    /// Whether root spans have the attributes that MLflow converts to tags, by which its users
    /// filter traces.
    pub mlflow_tags: bool,
}

/// Converter of a run's attempts to OpenTelemetry traces.
#[derive(Debug, Clone)]
pub struct TraceBuilder {
    /// Name of the run in the traces.
    pub run: String,
    /// Start of the run as a Unix timestamp, in seconds.
    pub started_at: u64,
    /// Chat formats of the run, by which recorded tokens are decoded.
    pub chats: Chats,
    /// Options for the content of traces.
    pub options: TraceOptions,
}

/// Trace of one attempt under construction: its spans so far.
struct AttemptTrace<'a> {
    builder: &'a TraceBuilder,
    attempt: &'a Attempt,
    id: [u8; 16],
    /// Start of the next span whose time is unknown, in nanoseconds since 1970.
    unknown: u64,
    spans: Vec<Span>,
}

impl TraceBuilder {
    /// Converts an attempt to its spans, with their resource and scope.
    pub fn trace(&self, attempt: &Attempt) -> ResourceSpans {
        let measured = attempt.outcome.timings.find(|part| *part == TimedPart::Attempt);
        let unknown = measured.map_or(self.started_at * 1_000_000_000, |interval| interval.start);
        let id = trace_id(&attempt.id, self.started_at);
        let mut trace = AttemptTrace { builder: self, attempt, id, unknown, spans: Vec::new() };
        trace.add_spans(measured);
        let resource = [
            ("service.name", text("levade")),
            ("service.version", text(env!("CARGO_PKG_VERSION"))),
            ("levade.run", text(&self.run)),
        ];
        let scope = InstrumentationScope {
            name: "levade".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            ..InstrumentationScope::default()
        };
        ResourceSpans {
            resource: Some(Resource { attributes: key_values(resource), ..Resource::default() }),
            scope_spans: vec![ScopeSpans {
                scope: Some(scope),
                spans: trace.spans,
                schema_url: String::new(),
            }],
            schema_url: String::new(),
        }
    }

    /// Returns a text as an attribute value, truncated to the maximum length, or `None` if the
    /// options exclude texts.
    fn content(&self, content: &str) -> Option<Any> {
        let TraceOptions { text: is_wanted, max_text_chars, .. } = self.options;
        is_wanted.then(|| text(&truncate(content, max_text_chars)))
    }

    /// Returns a list of one message in the JSON format of OpenTelemetry's conventions for
    /// generative AI, or `None` if the options exclude texts.
    fn messages(&self, role: &str, parts: Vec<Value>, finish: Option<&str>) -> Option<Any> {
        let mut message = json!({ "role": role, "parts": parts });
        if let Some(finish) = finish {
            message["finish_reason"] = json!(finish);
        }
        self.options.text.then(|| text(&json!([message]).to_string()))
    }

    fn text_part(&self, content: &str) -> Value {
        json!({ "type": "text", "content": truncate(content, self.options.max_text_chars) })
    }
}

impl AttemptTrace<'_> {
    /// Adds the spans of the attempt, its model calls and its tool calls. The root span is first.
    /// `measured` is the time interval of the attempt, if known.
    fn add_spans(&mut self, measured: Option<TimeInterval>) {
        let attempt = self.attempt;
        let tree = CallTree::new(attempt, &self.builder.chats);
        let agents: Vec<&str> = tree.agents();
        let scoring = attempt.outcome.timings.find(|part| *part == TimedPart::Scoring);
        // The root span ends when the scorers have ended.
        let interval = measured.map(|measured| {
            let end = scoring.map_or(0, |scoring| scoring.end()).max(measured.end());
            TimeInterval { duration: end - measured.start, ..measured }
        });
        let agent = agents.first().copied().unwrap_or_default();
        let mut root = self.span("attempt", None, interval.map(|it| (it, TimeSource::Measured)));
        root.name = format!("attempt {}", attempt.slot.name());
        root.attributes.extend(self.attempt_attributes(agent));
        root.events = self.score_events(root.end_time_unix_nano);
        if let Some(error) = &attempt.outcome.error {
            root.status = Some(error_status(error));
            root.attributes.extend(key_values([("error.type", text("attempt"))]));
        }
        let root_id = root.span_id.clone();
        self.spans.push(root);
        for agent in agents.iter().filter(|_| agents.len() > 1) {
            let calls = || tree.calls.iter().filter(|call| call.agent == *agent);
            let of_agent = calls().filter_map(|call| call.interval);
            let start = of_agent.clone().map(|interval| interval.start).min();
            let end = of_agent.map(|interval| interval.end()).max();
            let interval =
                start.zip(end).map(|(start, end)| TimeInterval { start, duration: end - start });
            let name = format!("agent/{agent}");
            let time = interval.map(|interval| (interval, TimeSource::Derived));
            let mut span = self.span(&name, Some(&root_id), time);
            span.name = format!("invoke_agent {agent}");
            span.attributes.extend(key_values([
                ("gen_ai.operation.name", text("invoke_agent")),
                ("gen_ai.agent.name", text(agent)),
            ]));
            let id = span.span_id.clone();
            self.spans.push(span);
            for (index, call) in
                tree.calls.iter().enumerate().filter(|(_, call)| call.agent == *agent)
            {
                self.add_call(index, call, &id);
            }
        }
        for (index, call) in tree.calls.iter().enumerate().filter(|_| agents.len() <= 1) {
            self.add_call(index, call, &root_id);
        }
        if let Some(scoring) = scoring {
            let time = Some((scoring, TimeSource::Measured));
            let mut span = self.span("scoring", Some(&root_id), time);
            span.name = "score".into();
            span.attributes.extend(score_attributes(attempt));
            self.spans.push(span);
        }
    }

    /// Creates a span. `name` must be unique in the trace and determines the id of the span. If
    /// `time` is `None`, the span's time is unknown.
    fn span(
        &mut self,
        name: &str,
        parent: Option<&[u8]>,
        time: Option<(TimeInterval, TimeSource)>,
    ) -> Span {
        let (interval, source) = time.unwrap_or_else(|| {
            let interval = TimeInterval { start: self.unknown, duration: 0 };
            self.unknown += 1000;
            (interval, TimeSource::Unknown)
        });
        Span {
            trace_id: self.id.to_vec(),
            span_id: span_id(&self.id, name).to_vec(),
            parent_span_id: parent.map(<[u8]>::to_vec).unwrap_or_default(),
            kind: SpanKind::Internal as i32,
            start_time_unix_nano: interval.start,
            end_time_unix_nano: interval.end(),
            attributes: key_values([("levade.time", text(source.name()))]),
            ..Span::default()
        }
    }

    /// Returns the attributes of the attempt's root span.
    fn attempt_attributes(&self, agent: &str) -> Vec<KeyValue> {
        let Attempt { id, slot, number, task, outcome, status, reward, .. } = self.attempt;
        let builder = self.builder;
        let group = format!("{}/{}/{}/{}", slot.purpose.name(), slot.phase, slot.step, slot.group);
        let session = format!("{} {group}", builder.run);
        let mut attributes = vec![
            ("gen_ai.operation.name", text("invoke_agent")),
            ("gen_ai.agent.name", text(agent)),
            ("session.id", text(&session)),
            ("levade.attempt.id", text(&id.to_string())),
            ("levade.attempt", text(&slot.name())),
            ("levade.purpose", text(slot.purpose.name())),
            ("levade.phase", int(slot.phase)),
            ("levade.step", int(slot.step)),
            ("levade.group", int(slot.group)),
            ("levade.sample", int(slot.sample)),
            ("levade.try", int(*number)),
            ("levade.status", text(status.name())),
            ("levade.finish", text(finish_name(outcome.finish))),
            ("levade.turns", int(outcome.turns)),
            ("levade.sampled_tokens", int(outcome.sampled_tokens as u64)),
            ("levade.tool_calls", int(outcome.calls.total())),
            ("levade.tool_errors", int(outcome.calls.errors())),
        ];
        let task_id = task["id"].as_str().map(str::to_owned);
        attributes.extend(task_id.map(|id| ("levade.task.id", text(&id))));
        attributes.extend(reward.map(|reward| ("levade.reward", Any::DoubleValue(reward))));
        let question = task["question"].as_str().unwrap_or_default();
        let input = builder.messages("user", vec![builder.text_part(question)], None);
        attributes.extend(input.map(|input| ("gen_ai.input.messages", input)));
        let answer = vec![builder.text_part(&outcome.final_text)];
        let output = builder.messages("assistant", answer, Some(finish_name(outcome.finish)));
        attributes.extend(output.map(|output| ("gen_ai.output.messages", output)));
        let mut attributes = key_values(attributes);
        attributes.extend(score_attributes(self.attempt));
        if builder.options.mlflow_tags {
            let tags = [
                ("run", builder.run.clone()),
                ("attempt", slot.name()),
                ("purpose", slot.purpose.name().to_owned()),
                ("phase", slot.phase.to_string()),
                ("step", slot.step.to_string()),
                ("group", slot.group.to_string()),
                ("sample", slot.sample.to_string()),
                ("finish", finish_name(outcome.finish).to_owned()),
            ];
            let score = self.attempt.score.map(|score| ("score", score.to_string()));
            let tags = tags.into_iter().chain(score);
            attributes.extend(tags.map(|(name, value)| KeyValue {
                key: format!("mlflow.traceTag.levade.{name}"),
                value: Some(AnyValue { value: Some(text(&value)) }),
                ..KeyValue::default()
            }));
        }
        attributes
    }

    /// Returns a span event for each component of the attempt's score, at the time `time`.
    fn score_events(&self, time: u64) -> Vec<Event> {
        let events = self.attempt.outcome.components.iter().map(|component| {
            let mut attributes = vec![
                ("gen_ai.evaluation.name", text(&component.name)),
                ("gen_ai.evaluation.score.value", Any::DoubleValue(component.value)),
            ];
            let weight = component.weight.map(Any::DoubleValue);
            attributes.extend(weight.map(|weight| ("levade.weight", weight)));
            let extracted = component.extracted.as_deref();
            let extracted = extracted.and_then(|extracted| self.builder.content(extracted));
            attributes.extend(extracted.map(|extracted| ("levade.extracted", extracted)));
            Event {
                time_unix_nano: time,
                name: "gen_ai.evaluation.result".into(),
                attributes: key_values(attributes),
                dropped_attributes_count: 0,
            }
        });
        events.collect()
    }

    /// Adds the span of a model call, and the spans of its tool calls.
    fn add_call(&mut self, index: usize, call: &CallNode, parent: &[u8]) {
        let builder = self.builder;
        let time = call.interval.map(|interval| (interval, TimeSource::Measured));
        let mut span = self.span(&format!("call/{index}"), Some(parent), time);
        span.name = format!("chat {}", call.policy);
        span.kind = SpanKind::Client as i32;
        let history = match (call.parent, call.is_fork) {
            (None, _) => "started",
            (Some(_), false) => "continued",
            (Some(_), true) => "forked",
        };
        let mut attributes = vec![
            ("gen_ai.operation.name", text("chat")),
            ("gen_ai.provider.name", text("levade")),
            ("gen_ai.request.model", text(&call.policy)),
            ("gen_ai.response.model", text(&call.policy)),
            ("gen_ai.agent.name", text(&call.agent)),
            ("gen_ai.usage.input_tokens", int(call.prompt_tokens as u64)),
            ("gen_ai.usage.output_tokens", int(call.tokens as u64)),
            ("gen_ai.response.finish_reasons", list([text(call.finish)])),
            ("levade.history", text(history)),
            ("levade.new_tokens", int(call.new_tokens as u64)),
        ];
        attributes.extend(call.turn.map(|turn| ("levade.turn", int(turn))));
        let temperature = call.temperature.map(|it| Any::DoubleValue(f64::from(it)));
        attributes.extend(temperature.map(|it| ("gen_ai.request.temperature", it)));
        if !call.versions.is_empty() {
            let versions = call.versions.iter().map(|version| int(*version));
            attributes.push(("levade.weight_versions", list(versions)));
        }
        let step_rewards =
            self.attempt.step_rewards.iter().filter(|reward| match &reward.credit_target {
                CreditTarget::Turn(turn) => Some(*turn) == call.turn,
                CreditTarget::Segment(segment) => Some(*segment) == call.completion,
                CreditTarget::Agent(_) => false,
            });
        let step_reward =
            step_rewards.map(|reward| reward.reward).reduce(|sum, reward| sum + reward);
        attributes
            .extend(step_reward.map(|reward| ("levade.step_reward", Any::DoubleValue(reward))));
        let input = builder.messages("user", vec![builder.text_part(&call.prompt)], None);
        attributes.extend(input.map(|input| ("gen_ai.input.messages", input)));
        let output = builder.messages("assistant", output_parts(builder, call), Some(call.finish));
        attributes.extend(output.map(|output| ("gen_ai.output.messages", output)));
        span.attributes.extend(key_values(attributes));
        if call.finish == "error" {
            span.status = Some(error_status("the call failed"));
        }
        self.spans.push(span);
        for (at, tool) in call.tools.iter().enumerate() {
            self.add_tool(&format!("tool/{index}/{at}"), tool, call, parent);
        }
    }

    /// Adds the span of a tool call below the span of its model call.
    fn add_tool(&mut self, id: &str, tool: &ToolNode, call: &CallNode, parent: &[u8]) {
        let builder = self.builder;
        let time = tool.interval.map(|interval| (interval, tool.time));
        let mut span = self.span(id, Some(parent), time);
        let name = if tool.name.is_empty() { "unreadable call" } else { &tool.name };
        span.name = format!("execute_tool {name}");
        let mut attributes = vec![
            ("gen_ai.operation.name", text("execute_tool")),
            ("gen_ai.tool.name", text(name)),
            ("gen_ai.tool.type", text("function")),
            ("gen_ai.agent.name", text(&call.agent)),
        ];
        if !tool.id.is_empty() {
            attributes.push(("gen_ai.tool.call.id", text(&tool.id)));
        }
        attributes.extend(call.turn.map(|turn| ("levade.turn", int(turn))));
        let status = tool.status.as_deref().filter(|_| tool.is_error());
        if tool.is_error() {
            attributes.push(("error.type", text(status.unwrap_or("_OTHER"))));
            span.status = Some(error_status(status.unwrap_or("the tool returned an error")));
        }
        let arguments = builder.content(&tool.arguments);
        attributes.extend(arguments.map(|it| ("gen_ai.tool.call.arguments", it)));
        let result = tool.result.as_deref().and_then(|result| builder.content(result));
        attributes.extend(result.map(|result| ("gen_ai.tool.call.result", result)));
        span.attributes.extend(key_values(attributes));
        self.spans.push(span);
    }
}

/// Returns the parts of a completion in the JSON format of OpenTelemetry's conventions for
/// generative AI.
fn output_parts(builder: &TraceBuilder, call: &CallNode) -> Vec<Value> {
    let limit = builder.options.max_text_chars;
    let mut parts = Vec::new();
    if !call.reasoning.is_empty() {
        parts.push(json!({ "type": "reasoning", "content": truncate(&call.reasoning, limit) }));
    }
    if !call.content.is_empty() {
        parts.push(builder.text_part(&call.content));
    }
    parts.extend(call.tools.iter().map(|tool| {
        let arguments = truncate(&tool.arguments, limit);
        let arguments = serde_json::from_str(&arguments).unwrap_or(Value::String(arguments));
        json!({ "type": "tool_call", "id": tool.id, "name": tool.name, "arguments": arguments })
    }));
    parts
}

/// Returns the score of an attempt, and the value of each scorer, as attributes.
fn score_attributes(attempt: &Attempt) -> Vec<KeyValue> {
    let components = attempt.outcome.components.iter();
    let components =
        components.map(|component| (format!("levade.score.{}", component.name), component.value));
    let score = attempt.score.map(|score| ("levade.score".to_owned(), score));
    let attributes = score.into_iter().chain(components).map(|(key, value)| KeyValue {
        key,
        value: Some(AnyValue { value: Some(Any::DoubleValue(value)) }),
        ..KeyValue::default()
    });
    attributes.collect()
}

/// Returns the name of a finish reason as the store records it, such as `max_tokens`.
fn finish_name(finish: Finish) -> &'static str {
    match finish {
        Finish::Answered => "answered",
        Finish::Ended => "ended",
        Finish::MaxTurns => "max_turns",
        Finish::MaxTokens => "max_tokens",
        Finish::Context => "context",
        Finish::Deadline => "deadline",
        Finish::Failed => "failed",
    }
}

/// Truncates a text to `max_chars` characters. Appends a note with the number of omitted
/// characters.
fn truncate(content: &str, max_chars: usize) -> String {
    match content.char_indices().nth(max_chars) {
        Some((end, _)) => {
            let omitted = content[end..].chars().count();
            format!("{}… [{omitted} characters omitted]", &content[..end])
        }
        None => content.to_owned(),
    }
}

fn error_status(message: &str) -> Status {
    Status { message: message.to_owned(), code: StatusCode::Error as i32 }
}

fn key_values<'a>(attributes: impl IntoIterator<Item = (&'a str, Any)>) -> Vec<KeyValue> {
    let attributes = attributes.into_iter().map(|(key, value)| KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    });
    attributes.collect()
}

fn text(value: &str) -> Any {
    Any::StringValue(value.to_owned())
}

fn int(value: impl Into<u64>) -> Any {
    Any::IntValue(i64::try_from(value.into()).unwrap_or(i64::MAX))
}

fn list(values: impl IntoIterator<Item = Any>) -> Any {
    let values = values.into_iter().map(|value| AnyValue { value: Some(value) });
    Any::ArrayValue(ArrayValue { values: values.collect() })
}

#[cfg(test)]
#[path = "spans_tests.rs"]
mod tests;
