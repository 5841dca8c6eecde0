//! Messages, tools and calls, in the shape that OpenAI's API gives them.

use std::ops::{Deref, DerefMut};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

use crate::{Content, python_json};

/// Role of a speaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The instructions.
    System,
    /// Instructions, under the name that newer models of OpenAI know them by.
    Developer,
    /// The person, or the task.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call; `function` in OpenAI's first API of calls.
    #[serde(alias = "function")]
    Tool,
}

impl Role {
    /// Whether it instructs the model.
    pub fn instructs(self) -> bool {
        matches!(self, Role::System | Role::Developer)
    }

    /// Name in templates.
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

/// One turn of a conversation.
///
/// What an assistant wrote may be given as it was written, with thought and calls as text in `content`, or
/// parsed, with the thought in `reasoning_content` and the calls in `tool_calls`; both print the same.
///
/// Read from what clients of OpenAI's API send: null is absent, unknown fields are ignored, and reasoning may
/// also be called `reasoning`. A `function_call` is a call without an id, and a `refusal` beside no content
/// is the content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "WireMessage")]
pub struct Message {
    /// Role of the speaker.
    pub role: Role,
    /// Content of the message. Absent and null read as empty.
    pub content: Content,
    /// The thought before the content, of an assistant, without tags; never empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls that follow the content, of an assistant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that this is the result of, of a tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Which tool, or which participant, speaks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A message as it is sent.
#[derive(Deserialize)]
struct WireMessage {
    role: Role,
    #[serde(default)]
    content: Content,
    /// Some servers, and clients after them, write reasoning under both names.
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
        let WireMessage { role, content, reasoning_content, reasoning, tool_call_id, name, .. } = wire;
        let calls = wire.tool_calls.unwrap_or_default();
        let first =
            wire.function_call.filter(|_| calls.is_empty()).map(|function| function.of(String::new()));
        let filled = |text: &String| !text.is_empty();
        let other = || reasoning.and_then(|value| value.as_str().map(str::to_owned)).filter(filled);
        Message {
            role,
            content: wire.refusal.filter(|_| content.is_empty()).map_or(content, Content::from),
            reasoning_content: reasoning_content.filter(filled).or_else(other),
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

    /// Instructions.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new(Role::System, content)
    }

    /// A turn of the user.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new(Role::User, content)
    }

    /// A turn of the model, as it was written.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// A turn of the model that calls tools.
    pub fn calls(content: impl Into<Content>, tool_calls: Vec<ToolCall>) -> Self {
        Message { tool_calls, ..Self::assistant(content) }
    }

    /// Checks that the arguments of every call are a JSON object, as in a message that is to be imitated.
    ///
    /// # Errors
    /// Returns an error that names the first call whose arguments are not one.
    pub fn check_calls(&self) -> Result<(), String> {
        let mut unreadable =
            self.tool_calls.iter().filter_map(|call| Some((call, call.arguments.unreadable()?)));
        match unreadable.next() {
            None => Ok(()),
            Some((call, text)) => {
                Err(format!("tool call {:?}: \"arguments\" is {text}, not a JSON object", call.name))
            }
        }
    }

    /// Appends what another message of the same turn says, its text after `separator` if both have one.
    pub fn append(&mut self, piece: &Message, separator: &str) {
        if self.content.is_empty() {
            self.content.clone_from(&piece.content);
        } else if !piece.content.is_empty() {
            self.content = format!("{}{separator}{}", self.content, piece.content).into();
        }
        self.tool_calls.extend(piece.tool_calls.iter().cloned());
        if let Some(thought) = &piece.reasoning_content {
            self.reasoning_content.get_or_insert_default().push_str(thought);
        }
    }

    /// The result of a tool call.
    pub fn tool(content: impl Into<Content>) -> Self {
        Self::new(Role::Tool, content)
    }
}

/// A call of a tool.
///
/// Serialized in OpenAI's shape: `{"id", "type": "function", "function": {"name", "arguments"}}` with the
/// arguments as a string of JSON. Read from the same, the arguments as [`Arguments`] reads them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "WireCall", into = "WireCall")]
pub struct ToolCall {
    /// Ties a result to its call; unique within a conversation.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Arguments by name.
    pub arguments: Arguments,
}

/// Arguments of a call: an object, which is what it dereferences to.
///
/// A history may hold calls whose arguments are no JSON object: cut by a limit on tokens, clipped to save
/// room, or written so by another model. Their text is kept, and the object is empty. They equal no object.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Value", into = "Value")]
pub struct Arguments {
    object: Map<String, Value>,
    unreadable: Option<String>,
}

impl Arguments {
    /// Returns the text of arguments that are no JSON object, or `None` if they are one.
    pub fn unreadable(&self) -> Option<&str> {
        self.unreadable.as_deref()
    }

    /// Returns the arguments as text: the object on one line, as templates print it, or the text that stands
    /// in its place.
    pub fn to_text(&self) -> String {
        self.unreadable.clone().unwrap_or_else(|| python_json::dumps(&Value::Object(self.object.clone())))
    }
}

impl From<Map<String, Value>> for Arguments {
    fn from(object: Map<String, Value>) -> Self {
        Arguments { object, unreadable: None }
    }
}

impl From<Value> for Arguments {
    /// Reads what a client sends as arguments: an object, or a string that holds one as JSON. An empty string
    /// is a call without arguments, from servers that join what their model streamed. Anything else is kept
    /// as text.
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
    /// The object, or the text in its place.
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

/// Reads a field that may be absent: null is absent.
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
        WireCall { id: call.id, kind: function_type(), function: WireFunction { name: call.name, arguments } }
    }
}

impl WireFunction {
    /// Returns the call with this id.
    fn of(self, id: String) -> ToolCall {
        ToolCall { id, name: self.name, arguments: self.arguments.into() }
    }
}

impl From<WireCall> for ToolCall {
    fn from(wire: WireCall) -> Self {
        wire.function.of(wire.id)
    }
}

/// Arguments from an object, or from a string that holds one as JSON.
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

/// A tool as the model is told of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    /// Name that calls use.
    pub name: String,
    /// Purpose of the tool, in a sentence.
    #[serde(default)]
    pub description: String,
    /// A JSON schema of the arguments, of type `object`.
    #[serde(default = "no_parameters")]
    pub parameters: Value,
}

fn no_parameters() -> Value {
    json!({ "type": "object", "properties": {} })
}

impl ToolSpec {
    /// The tool in OpenAI's shape, which templates expect.
    pub fn to_openai(&self) -> Value {
        json!({
            "type": "function",
            "function": { "name": self.name, "description": self.description, "parameters": self.parameters },
        })
    }
}
