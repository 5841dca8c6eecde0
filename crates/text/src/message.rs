//! Messages, tools and tool calls, in the format of OpenAI's API.

use std::ops::{Deref, DerefMut};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

use crate::{Content, python_json};

/// Author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The author gives instructions to the model.
    System,
    /// The author gives instructions to the model, under the role name that newer OpenAI models
    /// use.
    Developer,
    /// The author is the human user, or the task.
    User,
    /// The author is the model. Demonstrations also have this role.
    Assistant,
    /// The author is a tool, and the message is its result. OpenAI's first function-calling API
    /// names this role `function`.
    #[serde(alias = "function")]
    Tool,
}

impl Role {
    /// Returns whether messages of this role contain instructions for the model.
    pub fn instructs(self) -> bool {
        matches!(self, Role::System | Role::Developer)
    }

    /// Returns the name of the role in chat templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message of a conversation.
///
/// An assistant message can be given in two ways, which render identically. Raw: the reasoning and
/// the calls are text in `content`. Parsed: the reasoning is in `reasoning_content` and the calls
/// are in `tool_calls`.
///
/// Deserialization accepts what clients of OpenAI's API send. `null` counts as absent, unknown
/// fields are ignored, and reasoning may also be named `reasoning`. A `function_call` becomes a
/// call without an id. A `refusal` without content becomes the content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "WireMessage")]
pub struct Message {
    /// Role of the message's author.
    pub role: Role,
    /// Content of the message. Absent and `null` are read as empty.
    pub content: Content,
    /// Reasoning before the content of an assistant message, without tags. Never `Some` with an
    /// empty string after deserialization.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Tool calls after the content of an assistant message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Id of the call that a tool message is the result of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the tool or of the participant that wrote the message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A message in the format that clients send.
#[derive(Deserialize)]
struct WireMessage {
    role: Role,
    #[serde(default)]
    content: Content,
    /// Reasoning, which can also be in `reasoning`. Some servers, and the clients that copy them,
    /// send both fields.
    reasoning_content: Option<String>,
    reasoning: Option<Value>,
    tool_calls: Option<Vec<ToolCall>>,
    function_call: Option<WireFunction>,
    refusal: Option<String>,
    tool_call_id: Option<String>,
    name: Option<String>,
}

impl From<WireMessage> for Message {
    fn from(wire: WireMessage) -> Self {
        let WireMessage { role, content, reasoning_content, reasoning, tool_call_id, name, .. } =
            wire;
        let calls = wire.tool_calls.unwrap_or_default();
        let first = wire
            .function_call
            .filter(|_| calls.is_empty())
            .map(|function| function.into_call(String::new()));
        Message {
            role,
            content: wire.refusal.filter(|_| content.is_empty()).map_or(content, Content::from),
            reasoning_content: reasoning_content.filter(|text| !text.is_empty()).or_else(|| {
                reasoning
                    .and_then(|value| value.as_str().map(str::to_owned))
                    .filter(|text| !text.is_empty())
            }),
            tool_calls: calls.into_iter().chain(first).collect(),
            tool_call_id,
            name,
        }
    }
}

impl Message {
    fn new(role: Role, content: impl Into<Content>) -> Self {
        Message {
            role,
            content: content.into(),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Creates a system message.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new(Role::System, content)
    }

    /// Creates a user message.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new(Role::User, content)
    }

    /// Creates an assistant message from text as the model wrote it.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// Creates an assistant message with tool calls.
    pub fn calls(content: impl Into<Content>, tool_calls: Vec<ToolCall>) -> Self {
        Message { tool_calls, ..Self::assistant(content) }
    }

    /// Checks that the arguments of every call are a JSON object, as imitation learning requires.
    ///
    /// # Errors
    /// Returns an error that names the first call whose arguments are not a JSON object.
    pub fn check_calls(&self) -> Result<(), String> {
        let mut unreadable =
            self.tool_calls.iter().filter_map(|call| Some((call, call.arguments.unreadable()?)));
        match unreadable.next() {
            None => Ok(()),
            Some((call, text)) => Err(format!(
                "\"arguments\" of the tool call {:?} is {text}, but must be a JSON object",
                call.name
            )),
        }
    }

    /// Appends another message of the same turn to this message. `separator` is inserted between
    /// the two contents if both are non-empty.
    pub fn append(&mut self, other: &Message, separator: &str) {
        if self.content.is_empty() {
            self.content.clone_from(&other.content);
        } else if !other.content.is_empty() {
            self.content = format!("{}{separator}{}", self.content, other.content).into();
        }
        self.tool_calls.extend(other.tool_calls.iter().cloned());
        if let Some(reasoning) = &other.reasoning_content {
            self.reasoning_content.get_or_insert_default().push_str(reasoning);
        }
    }

    /// Creates a message with the result of a tool call.
    pub fn tool(content: impl Into<Content>) -> Self {
        Self::new(Role::Tool, content)
    }
}

/// A call of a tool by the model.
///
/// Serialized in OpenAI's format: `{"id", "type": "function", "function": {"name", "arguments"}}`,
/// with the arguments as a JSON string. Deserialized from the same format, with the arguments read
/// by [`Arguments`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "WireCall", into = "WireCall")]
pub struct ToolCall {
    /// Id that links a tool result to this tool call. Unique within a conversation.
    pub id: String,
    /// Name of the tool that is called.
    pub name: String,
    /// Arguments of the tool call by parameter name.
    pub arguments: Arguments,
}

/// Arguments of a tool call. Dereferences to a JSON object.
///
/// A message history can contain calls whose arguments are not a JSON object: they were truncated
/// by a token limit, clipped to save context, or written by another model. The text of such
/// arguments is kept, and the object is empty. Such arguments never equal an object.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Value", into = "Value")]
pub struct Arguments {
    object: Map<String, Value>,
    unreadable: Option<String>,
}

impl Arguments {
    /// Returns the text of arguments that are not a JSON object, or `None` if they are a JSON
    /// object.
    pub fn unreadable(&self) -> Option<&str> {
        self.unreadable.as_deref()
    }

    /// Returns the arguments of the tool call as text: the object as one line of JSON, as templates
    /// print it, or the original text if it is not a JSON object.
    pub fn to_text(&self) -> String {
        self.unreadable
            .clone()
            .unwrap_or_else(|| python_json::dumps(&Value::Object(self.object.clone())))
    }
}

impl From<Map<String, Value>> for Arguments {
    fn from(object: Map<String, Value>) -> Self {
        Arguments { object, unreadable: None }
    }
}

impl From<Value> for Arguments {
    /// Reads arguments as clients send them: an object, or a string that contains an object as
    /// JSON. An empty string means no arguments; servers that concatenate streamed deltas send it.
    /// Any other value is kept as text.
    fn from(sent: Value) -> Self {
        match sent {
            Value::Object(object) => object.into(),
            Value::String(text) if text.trim().is_empty() => Arguments::default(),
            Value::String(text) => match serde_json::from_str(&text) {
                Ok(Value::Object(object)) => object.into(),
                _ => Arguments { unreadable: Some(text), ..Arguments::default() },
            },
            other => Arguments { unreadable: Some(other.to_string()), ..Arguments::default() },
        }
    }
}

impl From<Arguments> for Value {
    /// Converts the arguments to JSON: the object, or a string with the original text if the
    /// arguments are not an object.
    fn from(arguments: Arguments) -> Self {
        arguments.unreadable.map_or(Value::Object(arguments.object), Value::String)
    }
}

impl Deref for Arguments {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Map<String, Value> {
        &self.object
    }
}

impl DerefMut for Arguments {
    fn deref_mut(&mut self) -> &mut Map<String, Value> {
        &mut self.object
    }
}

impl PartialEq<Map<String, Value>> for Arguments {
    fn eq(&self, object: &Map<String, Value>) -> bool {
        self.unreadable.is_none() && self.object == *object
    }
}

#[derive(Serialize, Deserialize)]
struct WireCall {
    #[serde(default, deserialize_with = "or_default")]
    id: String,
    #[serde(rename = "type", default, deserialize_with = "or_default")]
    kind: String,
    function: WireFunction,
}

#[derive(Serialize, Deserialize)]
struct WireFunction {
    name: String,
    #[serde(default = "no_arguments")]
    arguments: Value,
}

/// Deserializes an optional text field; `null` counts as absent.
fn or_default<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

fn no_arguments() -> Value {
    json!({})
}

fn function_type() -> String {
    "function".into()
}

impl From<ToolCall> for WireCall {
    fn from(call: ToolCall) -> Self {
        let Arguments { object, unreadable } = call.arguments;
        let arguments = unreadable.unwrap_or_else(|| Value::Object(object).to_string()).into();
        WireCall {
            id: call.id,
            kind: function_type(),
            function: WireFunction { name: call.name, arguments },
        }
    }
}

impl WireFunction {
    /// Converts the function of a call in OpenAI's format into a tool call with this id.
    fn into_call(self, id: String) -> ToolCall {
        ToolCall { id, name: self.name, arguments: self.arguments.into() }
    }
}

impl From<WireCall> for ToolCall {
    fn from(wire: WireCall) -> Self {
        wire.function.into_call(wire.id)
    }
}

/// Parses the arguments of a tool call from a JSON object, or from a string that contains an object
/// as JSON.
pub(crate) fn arguments_object(arguments: Value) -> Result<Map<String, Value>, String> {
    match arguments {
        Value::Object(map) => Ok(map),
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(Value::Object(map)) => Ok(map),
            Ok(_) => Err(format!("\"arguments\" is a string that holds {text}, not an object")),
            Err(error) => Err(format!("\"arguments\" is a string that is not JSON: {error}")),
        },
        other => Err(format!("\"arguments\" is {other}, not an object")),
    }
}

/// A tool as it is described to the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    /// Name under which the model calls the tool.
    pub name: String,
    /// Purpose of the tool, in one sentence. Empty by default.
    #[serde(default)]
    pub description: String,
    /// JSON schema of the tool's arguments, of type `object`. The default has no properties.
    #[serde(default = "no_parameters")]
    pub parameters: Value,
}

fn no_parameters() -> Value {
    json!({ "type": "object", "properties": {} })
}

impl ToolSpec {
    /// Returns the description of the tool in OpenAI's format, which templates expect.
    pub fn to_openai(&self) -> Value {
        json!({
            "type": "function",
            "function": { "name": self.name, "description": self.description, "parameters": self.parameters },
        })
    }
}
