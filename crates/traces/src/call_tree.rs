//! The calls of an attempt, found in its record.
//!
//! A record contains segments of tokens, not messages. A call consists of a completion and the
//! context tokens between it and the completion that its prompt continues. The tool calls are
//! parsed from the tokens of the completion, and their results from the context tokens after it. To
//! find the results, the chat template renders placeholders, which show the positions of the
//! results.

use std::collections::BTreeMap;

use levade_call::ExternalCall;
use levade_store::Attempt;
use levade_text::{Chat, MalformedCall, Message, ToolCall};
use levade_tree::{Kind, Segment, SegmentId, TimeInterval, TimedPart};
use serde_json::Value;

use crate::chats::{ChatFormat, Chats};
use crate::times::TimeSource;

/// Tree of the model calls of an attempt. The parent of a call is the call whose history it
/// continues.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CallTree {
    /// Model calls in the order of the record, each after the call whose history it continues.
    /// Calls to chat APIs are last.
    pub calls: Vec<CallNode>,
}

/// A model call in the call tree, with its tool calls.
#[derive(Debug, Clone, PartialEq)]
pub struct CallNode {
    /// Name of the agent that made the call.
    pub agent: String,
    /// Name of the policy that answered the call.
    pub policy: String,
    /// Turn of the call in the attempt. `None` for a call to a chat API.
    pub turn: Option<u32>,
    /// Index of the call whose history this call continues. `None` if it starts a conversation.
    pub parent: Option<usize>,
    /// Whether the prompt differs from the history of `parent` before the history's end.
    pub is_fork: bool,
    /// Segments of the prompt that no earlier call contains. Empty for a call to a chat API.
    pub context: Vec<SegmentId>,
    /// Segment of the completion. `None` for a call to a chat API, and for a failed call.
    pub completion: Option<SegmentId>,
    /// Number of tokens in the complete prompt.
    pub prompt_tokens: usize,
    /// Number of prompt tokens that no earlier call contains.
    pub new_tokens: usize,
    /// Number of tokens of the completion.
    pub tokens: usize,
    /// Distinct weight versions that sampled the completion, in order.
    pub versions: Vec<u64>,
    /// Sampling temperature. `None` if unknown.
    pub temperature: Option<f32>,
    /// Text of the part of the prompt that no earlier call contains, as the chat template renders
    /// it.
    pub prompt: String,
    /// Reasoning of the completion.
    pub reasoning: String,
    /// Text of the completion, without reasoning and tool calls.
    pub content: String,
    /// Reason why the completion ended: `stop`, `length`, `tool_call` or `error`.
    pub finish: &'static str,
    /// Tool calls of the completion, with their results.
    pub tools: Vec<ToolNode>,
    /// Time interval of the model call. `None` if it was not measured.
    pub interval: Option<TimeInterval>,
}

/// A tool call of a completion, with its result.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolNode {
    /// Id of the tool call, unique in its conversation.
    pub id: String,
    /// Name of the called tool. Empty if the tool call cannot be parsed.
    pub name: String,
    /// Arguments as JSON, or the complete text of a tool call that cannot be parsed.
    pub arguments: String,
    /// Text of the tool result. `None` if the record does not contain it.
    pub result: Option<String>,
    /// Category of the tool result, such as `ok` or `timeout`. `None` if unknown.
    pub status: Option<String>,
    /// Time interval of the tool call. `None` if unknown.
    pub interval: Option<TimeInterval>,
    /// Origin of `interval`: measured, derived or unknown.
    pub time: TimeSource,
}

impl ToolNode {
    /// Returns whether the tool call is known to have failed.
    pub fn is_error(&self) -> bool {
        match &self.status {
            Some(status) => status != "ok",
            None => {
                self.result.as_ref().is_some_and(|text| text.trim_start().starts_with("Error:"))
            }
        }
    }
}

impl CallTree {
    /// Builds the tree of an attempt's model calls. `chats` decodes and parses the tokens of the
    /// attempt. If it has no format for a policy, the calls of that policy have neither texts nor
    /// tool calls.
    pub fn new(attempt: &Attempt, chats: &Chats) -> Self {
        let mut tree = CallTree::default();
        tree.add_recorded(attempt, chats);
        tree.add_external(attempt);
        tree.add_times(attempt);
        tree
    }

    /// Returns the names of the agents, in the order of their first calls.
    pub fn agents(&self) -> Vec<&str> {
        let mut agents: Vec<&str> = Vec::new();
        for call in &self.calls {
            if !agents.contains(&call.agent.as_str()) {
                agents.push(&call.agent);
            }
        }
        agents
    }

    /// Adds the model calls that are recorded as tokens.
    fn add_recorded(&mut self, attempt: &Attempt, chats: &Chats) {
        let segments = attempt.trajectory.segments();
        // For each segment, the call that the segment belongs to or, for context, that precedes it.
        let mut call_of: Vec<Option<usize>> = vec![None; segments.len()];
        for segment in segments {
            let parent = segment.parent.map(|parent| &segments[parent.0 as usize]);
            call_of[segment.id.0 as usize] =
                parent.and_then(|parent| call_of[parent.id.0 as usize]);
            if segment.kind != Kind::Context {
                let call = self.new_call(segment, attempt, &call_of, chats);
                call_of[segment.id.0 as usize] = Some(self.calls.len());
                self.calls.push(call);
            }
        }
        // A prompt without a completion belongs to a failed call.
        for leaf in attempt.trajectory.leaves() {
            let segment = &segments[leaf.0 as usize];
            let has_call = self.calls.iter().any(|call| call.turn == Some(segment.turn));
            if segment.kind == Kind::Context && !has_call {
                let call = self.new_call(segment, attempt, &call_of, chats);
                self.calls.push(call);
            }
        }
        for index in 0..self.calls.len() {
            let next = self.calls.iter().position(|call| call.parent == Some(index));
            let Some(completion) = self.calls[index].completion else { continue };
            let segment = &segments[completion.0 as usize];
            if let (Some(format), Some(next)) = (chats.find(&segment.agent, &segment.policy), next)
            {
                let following = self.calls[next].prompt.clone();
                let tools = &mut self.calls[index].tools;
                let results = tool_results(&format.chat, &segment.tokens, tools.len(), &following);
                for (tool, result) in tools.iter_mut().zip(results) {
                    tool.result = Some(result);
                }
            }
        }
    }

    /// Creates the node of the model call whose last segment is `last`. This segment is a
    /// completion, or the prompt of a failed call.
    fn new_call(
        &self,
        last: &Segment,
        attempt: &Attempt,
        call_of: &[Option<usize>],
        chats: &Chats,
    ) -> CallNode {
        let sequence = attempt.trajectory.sequence(last.id);
        let parent = last.parent.and_then(|parent| call_of[parent.0 as usize]);
        let start = parent.and_then(|parent| {
            let completion = self.calls[parent].completion?;
            sequence.iter().position(|part| part.segment.id == completion)
        });
        let own = &sequence[start.map_or(0, |start| start + 1)..];
        let is_completion = last.kind != Kind::Context;
        let (prompt, _) = own.split_at(own.len() - usize::from(is_completion));
        let new_tokens = prompt.iter().map(|part| part.len).sum();
        let total: usize = sequence.iter().map(|part| part.len).sum();
        let tokens = if is_completion { last.tokens.len() } else { 0 };
        let mut versions: Vec<u64> = last.versions.iter().map(|run| run.version).collect();
        versions.dedup();
        let mut call = CallNode {
            agent: last.agent.clone(),
            policy: last.policy.clone(),
            turn: Some(last.turn),
            parent,
            is_fork: own.iter().any(|part| part.segment.after.is_some()),
            context: prompt.iter().map(|part| part.segment.id).collect(),
            completion: is_completion.then_some(last.id),
            prompt_tokens: total - tokens,
            new_tokens,
            tokens,
            versions,
            temperature: (last.kind == Kind::Sampled).then_some(last.temperature),
            prompt: String::new(),
            reasoning: String::new(),
            content: String::new(),
            finish: if is_completion { "stop" } else { "error" },
            tools: Vec::new(),
            interval: None,
        };
        if let Some(format) = chats.find(&last.agent, &last.policy) {
            let ids: Vec<u32> = prompt.iter().flat_map(|part| part.tokens()).copied().collect();
            call.prompt = format.chat.tokenizer().decode_with_special(&ids);
            if is_completion {
                parse_completion(&mut call, last, format);
            }
        }
        call
    }

    /// Adds the model calls to chat APIs, which are recorded as messages.
    fn add_external(&mut self, attempt: &Attempt) {
        let recorded = attempt.outcome.scorer_inputs.get("program");
        let recorded = recorded.map_or(Value::Null, |program| program["external"].clone());
        let calls: Vec<ExternalCall> = serde_json::from_value(recorded).unwrap_or_default();
        let first = self.calls.len();
        for call in &calls {
            let answer = |id: &str| {
                let messages = calls.iter().flat_map(|other| &other.messages);
                let mut results = messages.filter(|message| {
                    message.tool_call_id.as_deref() == Some(id) && !id.is_empty()
                });
                results.next().map(|message| message.content.as_str().to_owned())
            };
            let text = |message: &Message| {
                format!("{}: {}", message.role.as_str(), message.content.as_str())
            };
            self.calls.push(CallNode {
                agent: call.agent.clone(),
                policy: call.policy.clone(),
                turn: None,
                parent: call.after.map(|after| first + after),
                is_fork: false,
                context: Vec::new(),
                completion: None,
                prompt_tokens: call.prompt_tokens,
                new_tokens: call.prompt_tokens,
                tokens: call.tokens,
                versions: Vec::new(),
                temperature: None,
                prompt: call.messages.iter().map(text).collect::<Vec<_>>().join("\n\n"),
                reasoning: call.message.reasoning_content.clone().unwrap_or_default(),
                content: call.message.content.as_str().to_owned(),
                finish: match (&call.error, call.message.tool_calls.is_empty()) {
                    (Some(_), _) => "error",
                    (None, false) => "tool_call",
                    (None, true) => "stop",
                },
                tools: call
                    .message
                    .tool_calls
                    .iter()
                    .map(|tool| ToolNode { result: answer(&tool.id), ..ToolNode::new(tool) })
                    .collect(),
                interval: None,
            });
        }
    }

    /// Adds the time intervals that the outcome of the attempt contains. A program executes a tool
    /// call between two model calls, so the interval of such a tool call is derived from the
    /// intervals of the model calls.
    fn add_times(&mut self, attempt: &Attempt) {
        let timings = &attempt.outcome.timings;
        let mut externals = 0..;
        for call in &mut self.calls {
            let external = if call.turn.is_none() { externals.next() } else { None };
            call.interval = timings.find(|part| match part {
                TimedPart::Call { turn } => call.turn == Some(*turn),
                TimedPart::External { index } => external == Some(*index),
                _ => false,
            });
            for (index, tool) in call.tools.iter_mut().enumerate() {
                let mut found = timings.0.iter().filter_map(|timing| match &timing.part {
                    TimedPart::Tool { turn, index: at, result }
                        if Some(*turn) == call.turn && *at as usize == index =>
                    {
                        Some((timing.interval, result.clone()))
                    }
                    _ => None,
                });
                if let Some((interval, result)) = found.next() {
                    tool.interval = Some(interval);
                    tool.status = Some(result);
                    tool.time = TimeSource::Measured;
                }
            }
        }
        for index in 0..self.calls.len() {
            let next = self.calls.iter().find(|call| call.parent == Some(index));
            let next = next.and_then(|next| next.interval);
            let (Some(own), Some(next)) = (self.calls[index].interval, next) else { continue };
            let gap =
                TimeInterval { start: own.end(), duration: next.start.saturating_sub(own.end()) };
            for tool in self.calls[index].tools.iter_mut().filter(|tool| tool.interval.is_none()) {
                tool.interval = Some(gap);
                tool.time = TimeSource::Derived;
            }
        }
    }
}

/// Names and arguments of the tool calls in an attempt, by agent, in the order of the record.
pub type AgentCalls = BTreeMap<String, Vec<(String, String)>>;

/// Returns the tool calls of an attempt, without their results. An agent that made no tool call has
/// an empty list. `chats` decodes and parses the tokens. If it has no format for a policy, the tool
/// calls in that policy's completions are not found.
pub fn tool_calls(attempt: &Attempt, chats: &Chats) -> AgentCalls {
    let mut calls = AgentCalls::new();
    let mut add = |agent: &str, tools: Vec<ToolNode>| {
        let tools = tools.into_iter().map(|tool| (tool.name, tool.arguments));
        calls.entry(agent.to_owned()).or_default().extend(tools);
    };
    for segment in attempt.trajectory.segments() {
        if segment.kind != Kind::Context {
            let format = chats.find(&segment.agent, &segment.policy);
            add(&segment.agent, format.map_or_else(Vec::new, |format| tools_of(segment, format)));
        }
    }
    let mut external = CallTree::default();
    external.add_external(attempt);
    for call in external.calls {
        add(&call.agent, call.tools);
    }
    calls
}

/// Returns the tool calls of a completion.
fn tools_of(completion: &Segment, format: &ChatFormat) -> Vec<ToolNode> {
    let text = format.chat.decode_completion(&completion.tokens);
    let parsed = format.chat.parse(&text, format.opens_reasoning, &[]);
    parsed.calls.iter().map(ToolNode::from_parsed).collect()
}

impl ToolNode {
    fn from_parsed(parsed: &Result<ToolCall, MalformedCall>) -> Self {
        match parsed {
            Ok(parsed) => ToolNode::new(parsed),
            Err(malformed) => ToolNode {
                id: String::new(),
                name: String::new(),
                arguments: malformed.raw.clone(),
                result: None,
                status: Some("malformed".to_owned()),
                interval: None,
                time: TimeSource::Unknown,
            },
        }
    }

    fn new(call: &ToolCall) -> Self {
        ToolNode {
            id: call.id.clone(),
            name: call.name.clone(),
            arguments: call.arguments.to_text(),
            result: None,
            status: None,
            interval: None,
            time: TimeSource::Unknown,
        }
    }
}

/// Parses a completion into reasoning, text and tool calls, and stores them in `call`.
fn parse_completion(call: &mut CallNode, completion: &Segment, format: &ChatFormat) {
    let ChatFormat { chat, opens_reasoning } = format;
    let text = chat.decode_completion(&completion.tokens);
    let parsed = chat.parse(&text, *opens_reasoning, &[]);
    call.reasoning = chat.reasoning(&text, *opens_reasoning);
    call.content = parsed.content;
    call.tools = parsed.calls.iter().map(ToolNode::from_parsed).collect();
    let has_ended = completion.tokens.last().is_some_and(|last| chat.stop_ids().contains(last));
    call.finish = match (has_ended || completion.kind == Kind::Demonstrated, &call.tools[..]) {
        (false, _) => "length",
        (true, []) => "stop",
        (true, _) => "tool_call",
    };
}

/// Returns the texts of `count` tool results in the context that follows a completion. Returns an
/// empty list if the chat template would render that many results differently.
fn tool_results(chat: &Chat, completion: &[u32], count: usize, following: &str) -> Vec<String> {
    if count == 0 {
        return Vec::new();
    }
    let placeholder = |index: usize| format!("levade-result-{index}");
    let results: Vec<Message> = (0..count).map(|index| Message::tool(placeholder(index))).collect();
    let history = [Message::user("Hi")];
    let Ok(rendered) = chat.continuation(&history, completion, &results, &[]) else {
        return Vec::new();
    };
    let rendered = chat.tokenizer().decode_with_special(&rendered);
    let mut rest = following;
    let mut form = rendered.as_str();
    let mut found = Vec::new();
    for index in 0..count {
        let Some((before, after)) = form.split_once(&placeholder(index)) else {
            return Vec::new();
        };
        let Some(stripped) = rest.strip_prefix(before) else { return Vec::new() };
        // A result ends at the text that the template prints before the next one.
        let end = match after.split_once(&placeholder(index + 1)) {
            Some((between, _)) => stripped.find(between),
            None => stripped.rfind(after),
        };
        let Some(end) = end else { return Vec::new() };
        found.push(stripped[..end].to_owned());
        (rest, form) = (&stripped[end..], after);
    }
    found
}

#[cfg(test)]
mod tests {
    use levade_text::testing::sampled;
    use serde_json::json;

    use super::*;
    use crate::testing::{attempt, chats, completion, seconds};

    #[test]
    fn tree_finds_calls_with_tools_and_results() {
        let (chat, chats) = chats();
        let tree = CallTree::new(&attempt(&chat), &chats);
        let [first, second] = &tree.calls[..] else { panic!("{tree:?}") };
        assert!(first.prompt.contains("What is 2 + 3?<|im_end|>"), "{}", first.prompt);
        assert_eq!((first.content.as_str(), first.finish), ("Let me add.", "tool_call"));
        assert_eq!(first.versions, [2, 3]);
        assert_eq!((first.parent, second.parent), (None, Some(0)));
        assert_eq!((second.content.as_str(), second.finish), ("It is 5.", "stop"));
        let tools: Vec<_> = first
            .tools
            .iter()
            .map(|tool| (tool.name.as_str(), tool.arguments.as_str(), tool.result.as_deref()))
            .collect();
        let expected =
            [("add", r#"{"a": 2}"#, Some("5")), ("add", r#"{"a": 3}"#, Some("Error: 3 is taken"))];
        assert_eq!(tools, expected);
        assert!(!first.tools[0].is_error() && first.tools[1].is_error());
        // The prompt of the second call contains everything before.
        let all = first.prompt_tokens + first.tokens + second.new_tokens;
        assert_eq!(second.prompt_tokens, all);
    }

    #[test]
    fn unmeasured_tool_gets_interval_between_calls() {
        let (chat, chats) = chats();
        let tree = CallTree::new(&attempt(&chat), &chats);
        let [first, second] = &tree.calls[0].tools[..] else { panic!("{tree:?}") };
        assert_eq!((first.interval, first.time), (Some(seconds(12, 3)), TimeSource::Derived));
        assert_eq!((second.interval, second.time), (Some(seconds(13, 1)), TimeSource::Measured));
        // Without times, none is invented.
        let mut attempt = attempt(&chat);
        attempt.outcome.timings = Default::default();
        let tree = CallTree::new(&attempt, &chats);
        assert_eq!(tree.calls[0].interval, None);
        assert_eq!(tree.calls[0].tools[0].time, TimeSource::Unknown);
    }

    #[test]
    fn tool_calls_lists_names_and_arguments_by_agent() {
        let (chat, chats) = chats();
        let mut attempt = attempt(&chat);
        let leaf = attempt.trajectory.leaves()[0];
        let broken = completion(leaf, sampled(&chat, "<tool_call>{oops}</tool_call>"), 2);
        attempt.trajectory.push(Segment { agent: "checker".into(), ..broken }).unwrap();
        let external = json!([
            {"agent": "judge", "policy": "api", "messages": [{"role": "user", "content": "Hi"}],
             "reply": {"role": "assistant", "content": "Good."}, "finish": "stop_id",
             "prompt_tokens": 3, "tokens": 4},
        ]);
        attempt.outcome.scorer_inputs.insert("program".into(), json!({ "external": external }));
        let found = tool_calls(&attempt, &chats);
        let call = |name: &str, arguments: &str| (name.to_owned(), arguments.to_owned());
        let expected = [
            ("checker", vec![call("", "<tool_call>{oops}</tool_call>")]),
            ("default", vec![call("add", r#"{"a": 2}"#), call("add", r#"{"a": 3}"#)]),
            ("judge", vec![]),
        ];
        let expected = expected.map(|(agent, calls)| (agent.to_owned(), calls));
        assert_eq!(found, AgentCalls::from(expected));
        // The tree has the same calls.
        let tree = CallTree::new(&attempt, &chats);
        let tools = tree.calls.iter().flat_map(|call| &call.tools);
        let tools: Vec<_> = tools.map(|tool| call(&tool.name, &tool.arguments)).collect();
        assert_eq!(tools, [&found["default"][..], &found["checker"]].concat());
    }

    #[test]
    fn fork_and_failed_prompt_name_parent_call() {
        let (chat, chats) = chats();
        let mut attempt = attempt(&chat);
        // Leaves the first completion after 3 tokens.
        let context = Segment {
            after: Some(3),
            ..Segment::context(Some(SegmentId(1)), chat.tokenizer().encode("no"), 2)
        };
        let fork = attempt.trajectory.push(context).unwrap();
        let tokens = sampled(&chat, "6");
        attempt.trajectory.push(completion(fork, tokens[..1].to_vec(), 2)).unwrap();
        let lost = Segment::context(Some(SegmentId(3)), chat.tokenizer().encode("and?"), 3);
        attempt.trajectory.push(lost).unwrap();
        let tree = CallTree::new(&attempt, &chats);
        let [_, _, fork, lost] = &tree.calls[..] else { panic!("{tree:?}") };
        assert_eq!((fork.parent, fork.is_fork, fork.finish), (Some(0), true, "length"));
        assert_eq!((fork.content.as_str(), fork.prompt.as_str()), ("6", "no"));
        assert_eq!((lost.parent, lost.is_fork, lost.finish), (Some(1), false, "error"));
        assert_eq!((lost.completion, lost.new_tokens), (None, 4));
    }

    #[test]
    fn external_calls_follow_with_results_of_their_tools() {
        let (chat, chats) = chats();
        let mut attempt = attempt(&chat);
        let call = json!({"id": "c1", "type": "function",
            "function": {"name": "look", "arguments": "{}"}});
        let external = json!([
            {"agent": "judge", "policy": "api", "messages": [{"role": "user", "content": "Hi"}],
             "reply": {"role": "assistant", "content": "", "tool_calls": [call]},
             "finish": "stop_id", "prompt_tokens": 3, "tokens": 4},
            {"agent": "judge", "policy": "api", "after": 0, "shared": 2,
             "messages": [{"role": "tool", "content": "seen", "tool_call_id": "c1"}],
             "reply": {"role": "assistant", "content": "Good."}, "finish": "stop_id",
             "prompt_tokens": 9, "tokens": 1},
        ]);
        attempt.outcome.scorer_inputs.insert("program".into(), json!({ "external": external }));
        let timing = TimedPart::External { index: 1 };
        attempt.outcome.timings.add(timing, seconds(20, 1));
        let tree = CallTree::new(&attempt, &chats);
        assert_eq!(tree.agents(), ["default", "judge"]);
        let [_, _, first, second] = &tree.calls[..] else { panic!("{tree:?}") };
        assert_eq!(first.tools[0].result.as_deref(), Some("seen"));
        assert_eq!((first.parent, second.parent), (None, Some(2)));
        assert_eq!((first.interval, second.interval), (None, Some(seconds(20, 1))));
        assert_eq!((second.prompt.as_str(), second.content.as_str()), ("tool: seen", "Good."));
    }
}
