//! Replies of a chat API, assembled from a complete response or from chunks.

use levade_text::{Content, Message, ToolCall};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Complete response of a chat API: one assistant message with its token counts.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ChatResponse {
    /// Text of the assistant message.
    pub content: String,
    /// Reasoning before the text. Empty if the server returns no reasoning.
    pub reasoning: String,
    /// Tool calls of the message, in order.
    pub tool_calls: Vec<CalledTool>,
    /// Reason why the completion ended. `None` if the server reports no reason.
    pub finish: Option<Finish>,
    /// Token counts of the call. `None` if the server reports no counts.
    pub usage: Option<Usage>,
    /// Name of the model, as the server reports it.
    pub model: String,
}

/// A tool call as the model wrote it; its arguments may be invalid JSON.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CalledTool {
    /// Id that links a tool result to its call. Empty if the server sent no id.
    pub id: String,
    /// Name of the called tool.
    pub name: String,
    /// Arguments as the model wrote them. They should be a JSON object.
    pub arguments: String,
}

/// Reason why a completion ended, as the chat API reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended the completion, or a stop string occurred.
    Stop,
    /// The completion reached the maximum number of tokens.
    Length,
    /// The model calls tools, and waits for their results.
    ToolCalls,
    /// A content filter of the server withheld content.
    ContentFilter,
    /// The server reported another reason. Contains the server's name for the reason.
    #[serde(untagged)]
    Other(String),
}

impl From<&str> for Finish {
    fn from(reason: &str) -> Self {
        match reason {
            "stop" => Finish::Stop,
            // The names other than `length` come from third-party servers.
            "length" | "max_tokens" | "MAX_TOKENS" | "model_length" => Finish::Length,
            // `function_call` comes from older servers.
            "tool_calls" | "function_call" => Finish::ToolCalls,
            "content_filter" => Finish::ContentFilter,
            other => Finish::Other(other.into()),
        }
    }
}

/// Token counts of a chat call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Number of prompt tokens.
    pub prompt_tokens: u64,
    /// Number of prompt tokens that the server took from its prefix cache.
    pub cached_tokens: u64,
    /// Number of completion tokens, including reasoning tokens.
    pub completion_tokens: u64,
    /// Number of reasoning tokens.
    pub reasoning_tokens: u64,
}

/// Event of a streamed completion.
#[derive(Debug, Clone, PartialEq)]
pub enum ChatEvent {
    /// Further text of the assistant message.
    Content(String),
    /// Further text of the reasoning.
    Reasoning(String),
    /// Further text of the arguments of a tool call.
    Call {
        /// Index of the tool call in [`ChatResponse::tool_calls`].
        index: usize,
        /// Name of the tool. Only present in the first event of the tool call.
        name: Option<String>,
        /// Text to append to the arguments of the tool call.
        arguments: String,
    },
    /// The completion has ended. Contains the complete response. This is the last event.
    Finished(ChatResponse),
}

impl ChatResponse {
    /// Converts the response to the next message of its conversation.
    ///
    /// # Errors
    /// Returns an error message that names the tool call if its arguments are not a JSON object.
    pub fn message(&self) -> Result<Message, String> {
        let calls = self
            .tool_calls
            .iter()
            .enumerate()
            .map(convert_call)
            .collect::<Result<Vec<_>, String>>()?;
        let reasoning = Some(self.reasoning.clone()).filter(|reasoning| !reasoning.is_empty());
        Ok(Message { reasoning_content: reasoning, ..Message::calls(self.content.clone(), calls) })
    }
}

fn convert_call((i, call): (usize, &CalledTool)) -> Result<ToolCall, String> {
    let text = call.arguments.trim();
    let arguments = match text {
        "" => Ok(Map::new()),
        text => serde_json::from_str::<Map<String, Value>>(text),
    };
    let id = if call.id.is_empty() { format!("call_{i}") } else { call.id.clone() };
    match arguments {
        Ok(arguments) => Ok(ToolCall { id, name: call.name.clone(), arguments: arguments.into() }),
        Err(error) => Err(format!(
            "the arguments of tool call {:?} are not a JSON object: {error}",
            call.name
        )),
    }
}

/// JSON of a complete completion or of one chunk, as servers send it.
#[derive(Debug, Deserialize)]
pub(crate) struct WireCompletion {
    #[serde(default)]
    choices: Vec<WireChoice>,
    usage: Option<WireUsage>,
    model: Option<String>,
    pub error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct WireChoice {
    #[serde(default)]
    index: u64,
    #[serde(alias = "message")]
    delta: Option<WireDelta>,
    finish_reason: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct WireDelta {
    content: Option<Content>,
    reasoning_content: Option<String>,
    reasoning: Option<Value>,
    tool_calls: Option<Vec<WireCall>>,
}

#[derive(Debug, Deserialize)]
struct WireCall {
    index: Option<u64>,
    id: Option<String>,
    function: Option<WireFunction>,
}

#[derive(Debug, Default, Deserialize)]
struct WireFunction {
    name: Option<String>,
    arguments: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
struct WireUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<WireDetails>,
    completion_tokens_details: Option<WireDetails>,
}

#[derive(Debug, Default, Deserialize)]
struct WireDetails {
    cached_tokens: Option<u64>,
    reasoning_tokens: Option<u64>,
}

impl From<WireUsage> for Usage {
    fn from(wire: WireUsage) -> Self {
        let prompt = wire.prompt_tokens_details;
        let response = wire.completion_tokens_details;
        Usage {
            prompt_tokens: wire.prompt_tokens.unwrap_or_default(),
            cached_tokens: prompt.and_then(|details| details.cached_tokens).unwrap_or_default(),
            completion_tokens: wire.completion_tokens.unwrap_or_default(),
            reasoning_tokens: response
                .and_then(|details| details.reasoning_tokens)
                .unwrap_or_default(),
        }
    }
}

/// A completion that is assembled from streamed chunks.
#[derive(Debug, Default)]
pub(crate) struct CompletionAssembly {
    pub response: ChatResponse,
    /// Index that the server assigned to each tool call. `None` if the server sent no index.
    indices: Vec<Option<u64>>,
    /// Whether any choice has arrived, even an empty one.
    pub has_choice: bool,
    /// Whether any content, reasoning or tool call has arrived, even an empty text.
    pub has_content: bool,
}

impl CompletionAssembly {
    /// Adds a chunk to the completion, and appends an event for each of its parts to `events`.
    /// Ignores all choices except the first.
    pub fn add_chunk(&mut self, wire: WireCompletion, events: &mut Vec<ChatEvent>) {
        if let Some(usage) = wire.usage {
            self.response.usage = Some(usage.into());
        }
        if let Some(model) = wire.model {
            self.response.model = model;
        }
        for choice in wire.choices.into_iter().filter(|choice| choice.index == 0) {
            self.has_choice = true;
            if let Some(reason) = choice.finish_reason {
                self.response.finish = Some(reason.as_str().into());
            }
            let delta = choice.delta.unwrap_or_default();
            // Some servers send the reasoning under both names.
            let filled = |text: &String| !text.is_empty();
            if let Some(reasoning) = delta.reasoning_content.filter(filled).or_else(|| {
                delta.reasoning.as_ref().and_then(Value::as_str).map(str::to_owned).filter(filled)
            }) {
                self.has_content = true;
                self.response.reasoning += &reasoning;
                events.push(ChatEvent::Reasoning(reasoning));
            }
            self.has_content |=
                delta.content.is_some() || delta.tool_calls.as_ref().is_some_and(|c| !c.is_empty());
            if let Some(content) = delta.content.filter(|content| !content.is_empty()) {
                self.response.content += &content;
                events.push(ChatEvent::Content(content.to_string()));
            }
            events.extend(
                delta.tool_calls.into_iter().flatten().map(|call| self.add_call_chunk(call)),
            );
        }
    }

    /// Adds a chunk of a tool call. The chunk belongs to the call with the same index or, if the
    /// chunk has no index, to the last call. If its id differs from this call's id, the chunk
    /// starts a new call.
    fn add_call_chunk(&mut self, wire: WireCall) -> ChatEvent {
        let WireFunction { name, arguments } = wire.function.unwrap_or_default();
        let id = wire.id.unwrap_or_default();
        let known_call = match wire.index {
            Some(_) => self.indices.iter().rposition(|known| *known == wire.index),
            None => self.indices.len().checked_sub(1),
        };
        // Without index and ID, the chunk continues the last call, unless it names a tool and so is
        // complete.
        let is_complete_call = wire.index.is_none()
            && id.is_empty()
            && name.as_ref().is_some_and(|name| !name.is_empty());
        let at = known_call
            .filter(|at| {
                let call = &self.response.tool_calls[*at];
                id.is_empty() || call.id.is_empty() || call.id == id
            })
            .filter(|_| !is_complete_call)
            .unwrap_or_else(|| {
                self.indices.push(wire.index);
                self.response.tool_calls.push(CalledTool::default());
                self.response.tool_calls.len() - 1
            });
        let call = &mut self.response.tool_calls[at];
        if call.id.is_empty() {
            call.id = id;
        }
        let new = name.filter(|name| call.name.is_empty() && !name.is_empty());
        if let Some(name) = &new {
            call.name.clone_from(name);
        }
        let arguments = match arguments {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text,
            Some(object) => object.to_string(),
        };
        call.arguments += &arguments;
        ChatEvent::Call { index: at, name: new, arguments }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn assembled(chunks: &[Value]) -> (ChatResponse, Vec<ChatEvent>) {
        let mut assembly = CompletionAssembly::default();
        let mut events = Vec::new();
        for chunk in chunks {
            assembly.add_chunk(serde_json::from_value(chunk.clone()).unwrap(), &mut events);
        }
        (assembly.response, events)
    }

    fn delta(delta: Value) -> Value {
        json!({"choices": [{"index": 0, "delta": delta}]})
    }

    fn calls(deltas: &[Value]) -> Vec<(String, String, String)> {
        let chunks: Vec<Value> =
            deltas.iter().map(|call| delta(json!({ "tool_calls": [call] }))).collect();
        let (response, events) = assembled(&chunks);
        // The events contain the same calls.
        let mut collected: Vec<(String, String)> = Vec::new();
        for event in events {
            let ChatEvent::Call { index, name, arguments } = event else { panic!("{event:?}") };
            if index == collected.len() {
                collected.push(Default::default());
            }
            collected[index].0 += &name.unwrap_or_default();
            collected[index].1 += &arguments;
        }
        let calls: Vec<_> = response
            .tool_calls
            .into_iter()
            .map(|call| (call.id, call.name, call.arguments))
            .collect();
        assert_eq!(
            collected,
            calls
                .iter()
                .map(|(_, name, arguments)| (name.clone(), arguments.clone()))
                .collect::<Vec<_>>()
        );
        calls
    }

    fn call(id: &str, name: &str, arguments: &str) -> (String, String, String) {
        (id.into(), name.into(), arguments.into())
    }

    #[test]
    fn tool_calls_are_assembled_from_chunks() {
        // By index, as OpenAI does, two calls interleaved.
        let found = calls(&[
            json!({"index": 0, "id": "x", "type": "function", "function": {"name": "add", "arguments": ""}}),
            json!({"index": 1, "id": "y", "type": "function", "function": {"name": "mul", "arguments": "{\"b\""}}),
            json!({"index": 0, "function": {"arguments": "{\"a\":"}}),
            json!({"index": 1, "function": {"arguments": ": 2}"}}),
            json!({"index": 0, "id": "x", "function": {"name": "add", "arguments": "1}"}}),
        ]);
        assert_eq!(found, [call("x", "add", "{\"a\":1}"), call("y", "mul", "{\"b\": 2}")]);
        // All under index 0 with IDs of their own, or without any index; arguments as an object.
        let found = calls(&[
            json!({"index": 0, "id": "x", "function": {"name": "add", "arguments": {"a": 1}}}),
            json!({"index": 0, "id": "y", "function": {"name": "mul", "arguments": "{}"}}),
        ]);
        assert_eq!(found, [call("x", "add", "{\"a\":1}"), call("y", "mul", "{}")]);
        let found = calls(&[
            json!({"function": {"name": "add", "arguments": "{"}}),
            json!({"function": {"arguments": "}"}}),
            json!({"function": {"name": "mul"}}),
        ]);
        assert_eq!(found, [call("", "add", "{}"), call("", "mul", "")]);
    }

    #[test]
    fn content_reasoning_and_usage_parse_under_all_names() {
        let (response, events) = assembled(&[
            json!({"model": "m-1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": null}}]}),
            delta(json!({"reasoning_content": "so", "reasoning": "so"})),
            delta(json!({"reasoning": ", well"})),
            delta(json!({"reasoning": {"effort": "low"}, "content": "An"})),
            json!({"choices": [{"index": 1, "delta": {"content": "of another choice"}}]}),
            delta(json!({"content": "swer"})),
            json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
            json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
                "prompt_tokens_details": {"cached_tokens": 8}, "completion_tokens_details": null}}),
        ]);
        assert_eq!(
            (&*response.content, &*response.reasoning, &*response.model),
            ("Answer", "so, well", "m-1")
        );
        assert_eq!(response.finish, Some(Finish::Stop));
        let usage =
            Usage { prompt_tokens: 9, cached_tokens: 8, completion_tokens: 4, reasoning_tokens: 0 };
        assert_eq!(response.usage, Some(usage));
        assert_eq!(events.len(), 4);
        let complete = json!({"choices": [{"message": {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            "finish_reason": "end_turn"}]});
        let (response, _) = assembled(&[complete]);
        assert_eq!(
            (&*response.content, response.finish),
            ("a", Some(Finish::Other("end_turn".into())))
        );
    }

    #[test]
    fn response_converts_to_message() {
        let message = response_with_call("{\"a\": 1}").message().unwrap();
        assert_eq!(
            (&*message.tool_calls[0].id, &message.tool_calls[0].arguments["a"]),
            ("call_0", &json!(1))
        );
        assert_eq!(message.reasoning_content.as_deref(), Some("hm"));
        assert!(response_with_call(" ").message().unwrap().tool_calls[0].arguments.is_empty());
        assert!(
            response_with_call("{\"a\": ")
                .message()
                .unwrap_err()
                .contains("tool call \"add\" are not a JSON object")
        );
        assert!(response_with_call("[1]").message().is_err());
        let finishes = [Finish::Stop, Finish::ToolCalls, Finish::Other("x".into())];
        assert_eq!(serde_json::to_string(&finishes).unwrap(), r#"["stop","tool_calls","x"]"#);
    }

    fn response_with_call(arguments: &str) -> ChatResponse {
        ChatResponse {
            reasoning: "hm".into(),
            tool_calls: vec![CalledTool {
                name: "add".into(),
                arguments: arguments.into(),
                id: String::new(),
            }],
            ..ChatResponse::default()
        }
    }
}
