//! Prepares messages and tools for a template.
//!
//! Calls become text unless the template prints calls itself. Tools are described in the system
//! prompt unless the template describes them. Guards are inserted into external text.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use crate::calls::{RESPONSE, Syntax};
use crate::completion_parser::{
    CompletionParser, ParserEvent, SpanKind, TagTables, collect_reasoning, split_at_tags,
};
use crate::describe::{ToolPrompt, describe_tools};
use crate::protocol::ToolSupport;
use crate::reasoning_tags::ReasoningTags;
use crate::systems::SystemMessageSupport;
use crate::{
    Arguments, ContentPart, Message, ParsedCompletion, Role, TextError, Tokenizer, ToolCall,
    ToolSpec, python_json,
};

/// Messages and tools in the format that a chat template receives.
pub(crate) struct PreparedPrompt {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
}

/// Settings that determine how messages and tools are prepared for a chat template.
pub(crate) struct Preparation<'a> {
    pub tokenizer: &'a Tokenizer,
    pub tags: &'a TagTables,
    pub tool_support: ToolSupport,
    /// Whether the chat template prints messages of role `tool`.
    pub tool_role: bool,
    /// Message formats that the chat template supports.
    pub message_format: &'a MessageFormat,
    pub tool_prompt: ToolPrompt,
    /// The character that prevents special tokens from starting in external text.
    pub guard: char,
}

/// Message formats that a chat template supports in addition to plain text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MessageFormat {
    /// Whether the chat template accepts message content as a list of text parts, and renders the
    /// list like the concatenated text.
    pub parts: bool,
    /// Name of the message field from which the chat template reads reasoning, or `None` if it
    /// reads no such field.
    pub reasoning: Option<&'static str>,
    /// Tags around reasoning in the content, used if the chat template does not read reasoning from
    /// a field.
    pub tags: Option<ReasoningTags>,
    /// Whether the chat template prints no white space between the reasoning tags and the text
    /// around them.
    pub tight: bool,
    /// Whether the chat template supports the role `developer`.
    pub developer: bool,
    /// Positions at which the chat template prints instruction messages.
    pub systems: SystemMessageSupport,
    /// Format in which the chat template takes tool calls. `None` if calls are rendered as text.
    pub calls: Option<CallMessageFormat>,
    /// Representation of tool calls whose arguments are not a JSON object. Used if the chat
    /// template prints calls itself.
    pub unreadable: UnreadableCallFormat,
}

/// Representation of a tool call whose arguments are not a JSON object, for a chat template that
/// prints calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum UnreadableCallFormat {
    /// The original text stands in the place of the arguments.
    #[default]
    Text,
    /// The call is part of the message's text, in the tool-call format.
    Written,
    /// The original text is the value of the only argument.
    Entry,
    /// The call is rendered without arguments.
    Empty,
}

/// Format in which a chat template takes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallMessageFormat {
    /// Whether arguments must be a JSON string rather than an object.
    text: bool,
    /// Whether the content of a message with calls must be `null` if it is empty.
    null: bool,
}

impl CallMessageFormat {
    /// All formats in which templates take tool calls, the most common format first.
    pub(crate) const ALL: [CallMessageFormat; 4] = [
        CallMessageFormat { text: false, null: false },
        CallMessageFormat { text: true, null: false },
        CallMessageFormat { text: false, null: true },
        CallMessageFormat { text: true, null: true },
    ];

    /// Returns a tool call in the format that the chat template receives.
    pub(crate) fn make_call(self, id: &str, name: &str, arguments: Value) -> Value {
        let is_object = arguments.is_object();
        let arguments =
            if self.text && is_object { python_json::dumps(&arguments).into() } else { arguments };
        json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
    }

    /// Returns an assistant message with tool calls in the format that the chat template receives.
    pub(crate) fn make_message(self, content: Value, calls: Vec<Value>) -> Value {
        let is_empty = content.as_str().is_some_and(str::is_empty);
        let content = if self.null && is_empty { Value::Null } else { content };
        json!({ "role": "assistant", "content": content, "tool_calls": calls })
    }
}

/// Assigns ids to tool calls, for a chat template that accepts only ids of its own format.
#[derive(Default)]
struct CallIds {
    count: usize,
    /// Ids of the tool calls in the last turn: the original id, and the id that the template
    /// receives.
    last: Vec<(String, String)>,
    num_results: usize,
}

impl CallIds {
    fn assign_ids(&mut self, calls: &[ToolCall], syntax: &dyn Syntax) -> Vec<String> {
        let call_ids = calls.iter().map(|call| {
            let id = syntax.call_id(&call.name, self.count);
            self.count += 1;
            id.unwrap_or_else(|| {
                if call.id.is_empty() { format!("call_{}", self.count) } else { call.id.clone() }
            })
        });
        let call_ids: Vec<String> = call_ids.collect();
        self.last =
            calls.iter().map(|call| call.id.clone()).zip(call_ids.iter().cloned()).collect();
        self.num_results = 0;
        call_ids
    }

    /// Returns the id of the tool call that a tool result belongs to: the call with the original id
    /// `id`, or else the next call of the turn.
    fn next_call_id(&mut self, id: Option<&str>) -> Option<String> {
        let named = self.last.iter().find(|(known, _)| Some(known.as_str()) == id);
        let found = named.or(self.last.get(self.num_results)).map(|(_, call_ids)| call_ids.clone());
        self.num_results += 1;
        found
    }
}

impl MessageFormat {
    /// Moves the reasoning of a message to the start of its content, in tags, as models write it.
    pub(crate) fn with_inline_reasoning<'a>(&self, message: &'a Message) -> Cow<'a, Message> {
        let (Some(reasoning), Some(ReasoningTags { open, close })) =
            (&message.reasoning_content, &self.tags)
        else {
            return Cow::Borrowed(message);
        };
        let (line, lines) = if self.tight { ("", "") } else { ("\n", "\n\n") };
        let content =
            format!("{open}{line}{reasoning}{line}{close}{lines}{}", message.content.as_str());
        Cow::Owned(Message { content: content.into(), reasoning_content: None, ..message.clone() })
    }
}

/// A message whose content is prepared for the chat template.
struct PreparedMessage<'a> {
    role: Role,
    content: Value,
    /// Original message, or `None` if the content was generated here.
    source: Option<Cow<'a, Message>>,
}

impl Preparation<'_> {
    pub(crate) fn prepare(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<PreparedPrompt, TextError> {
        check_text_only(messages)?;
        let messages = &*self.message_format.systems.arrange(messages);
        let native = match self.tool_support {
            _ if tools.is_empty() => None,
            ToolSupport::Foreign => return Err(TextError::ForeignTools),
            ToolSupport::Native => {
                Some(tools.iter().map(|tool| self.guard_value(&tool.to_openai())).collect())
            }
            ToolSupport::None => None,
        };
        let mut prepared_messages: Vec<PreparedMessage> = Vec::with_capacity(messages.len() + 1);
        let mut rest = messages;
        if !tools.is_empty() && native.is_none() {
            let mut section = describe_tools(tools, self.tool_prompt, self.tags.syntax, |text| {
                self.guard_text(text)
            });
            if let Some((first, remaining)) = messages.split_first()
                && self.is_opening(first.role)
            {
                section = format!("{}\n\n{section}", self.guard_text(&first.content));
                rest = remaining;
            }
            let role = messages.first().map_or(Role::System, |first| first.role);
            let role = if self.is_opening(role) { role } else { Role::System };
            prepared_messages.push(PreparedMessage { role, content: section.into(), source: None });
        }
        // Whether the last turn contains tool results in a user message.
        let mut results_open = false;
        for message in rest {
            let is_result = message.role == Role::Tool && !self.tool_role;
            match prepared_messages.last_mut() {
                // Tool results of one turn share a message, because templates often require
                // alternating roles.
                Some(PreparedMessage { content: Value::String(last), .. })
                    if is_result && results_open =>
                {
                    last.push('\n');
                    last.push_str(&self.render_tool_result(&message.content));
                }
                // A question after tool results shares their message if the template requires
                // alternating roles.
                Some(PreparedMessage { content: Value::String(last), .. })
                    if results_open
                        && message.role == Role::User
                        && !self.message_format.systems.users =>
                {
                    last.push_str("\n\n");
                    last.push_str(&self.guard_text(&message.content));
                }
                _ if is_result => {
                    let content = self.render_tool_result(&message.content);
                    prepared_messages.push(PreparedMessage {
                        role: Role::User,
                        content: content.into(),
                        source: None,
                    });
                }
                _ => {
                    let source = self.parse_assistant(message, tools);
                    let content = match message.role {
                        Role::Assistant if self.message_format.reasoning.is_some() => {
                            self.assistant_content(&source).into()
                        }
                        Role::Assistant => self
                            .assistant_content(&self.message_format.with_inline_reasoning(&source))
                            .into(),
                        Role::System | Role::Developer | Role::User | Role::Tool => {
                            self.template_content(message)
                        }
                    };
                    prepared_messages.push(PreparedMessage {
                        role: message.role,
                        content,
                        source: Some(source),
                    });
                }
            }
            results_open = is_result;
        }
        let mut ids = CallIds::default();
        let messages = prepared_messages
            .iter()
            .map(|prepared| self.template_message(prepared, &mut ids))
            .collect();
        Ok(PreparedPrompt { messages, tools: native })
    }

    fn is_opening(&self, role: Role) -> bool {
        role.instructs() || (role == Role::User && !self.message_format.systems.leading)
    }

    /// Returns an assistant message with its reasoning and calls parsed into their fields. The
    /// message is unchanged unless the template prints calls itself and all of them can be parsed.
    fn parse_assistant<'a>(&self, message: &'a Message, tools: &[ToolSpec]) -> Cow<'a, Message> {
        if self.message_format.calls.is_none() || message.role != Role::Assistant {
            return Cow::Borrowed(message);
        }
        let (found, _) =
            CompletionParser::parse_complete(self.tags, &message.content, false, tools);
        let parsed = ParsedCompletion::from_events(found.clone());
        let parsed_reasoning = collect_reasoning(&found);
        let written: Option<Vec<ToolCall>> = parsed.calls.into_iter().map(Result::ok).collect();
        let Some(mut calls) = written.filter(|_| {
            !found.iter().all(|found| matches!(found, ParserEvent::Text(SpanKind::Speech, _)))
        }) else {
            return Cow::Borrowed(message);
        };
        calls.extend(message.tool_calls.iter().cloned());
        // A template prints all text before all calls. Text is otherwise shown where it was
        // written, unless the template needs calls in their own field.
        let needs_calls = self.tags.syntax.syntax_tags().reasoning_tags.is_some()
            || self.tags.syntax.call_id("", 0).is_some();
        let is_text = |found: &ParserEvent| match found {
            ParserEvent::Text(SpanKind::Speech, text) => !text.trim().is_empty(),
            _ => false,
        };
        let mut behind_call =
            found.iter().skip_while(|found| !matches!(found, ParserEvent::Call(_)));
        if !needs_calls && behind_call.any(is_text) {
            return Cow::Borrowed(message);
        }
        // Without calls, reasoning is left to the template, unless content must not contain its
        // tags.
        if calls.is_empty() && self.tags.syntax.syntax_tags().reasoning_tags.is_none() {
            return Cow::Borrowed(message);
        }
        let parsed_reasoning =
            Some(parsed_reasoning).filter(|parsed_reasoning| !parsed_reasoning.is_empty());
        let mut content = parsed.content;
        let mut reasoning = message.reasoning_content.clone().or(parsed_reasoning);
        // Templates that print reasoning as separate messages accept only one of reasoning and
        // content before a call.
        if let (Some(parsed_reasoning), true, true) = (
            &mut reasoning,
            !calls.is_empty() && !content.is_empty(),
            self.tags.syntax.syntax_tags().reasoning_tags.is_some(),
        ) {
            parsed_reasoning.push_str(&format!("\n{content}"));
            content.clear();
        }
        Cow::Owned(Message {
            content: content.into(),
            reasoning_content: reasoning,
            tool_calls: calls,
            ..message.clone()
        })
    }

    /// Returns the content of an assistant message, including its tool calls only if calls are
    /// text.
    fn assistant_content(&self, message: &Message) -> String {
        match self.message_format.calls.filter(|_| !self.writes_calls(message)) {
            Some(_) if self.tags.syntax.syntax_tags().reasoning_tags.is_some() => {
                self.guard_text(&message.content)
            }
            Some(_) => self.mark_tags(&message.content, false),
            None => self.write_assistant(message, false),
        }
    }

    /// Returns whether the tool calls of a message are part of its text.
    fn writes_calls(&self, message: &Message) -> bool {
        self.message_format.calls.is_none()
            || (self.message_format.unreadable == UnreadableCallFormat::Written
                && message.tool_calls.iter().any(|call| call.arguments.unreadable().is_some()))
    }

    /// Returns the arguments of a tool call in the format that the chat template receives.
    fn template_arguments(&self, arguments: &Arguments) -> Value {
        match (arguments.unreadable(), self.message_format.unreadable) {
            (Some(text), UnreadableCallFormat::Text) => return self.guard_text(text).into(),
            (Some(text), UnreadableCallFormat::Entry) => {
                return json!({ "arguments": self.guard_text(text) });
            }
            _ => {}
        }
        let arguments = arguments.iter().map(|(key, value)| {
            let value = match value {
                Value::String(text) => self.guard_text(text).into(),
                other => self.guard_value(other),
            };
            (self.tokenizer.guard(key, self.guard, false), value)
        });
        Value::Object(arguments.collect())
    }

    fn template_message(&self, prepared: &PreparedMessage<'_>, ids: &mut CallIds) -> Value {
        let role = match prepared.role {
            Role::Developer if !self.message_format.developer => Role::System,
            role => role,
        };
        let mut value = json!({ "role": role.as_str(), "content": prepared.content });
        let Some(message) = prepared.source.as_deref() else { return value };
        let calls = self
            .message_format
            .calls
            .filter(|_| !message.tool_calls.is_empty() && !self.writes_calls(message));
        if let Some(format) = calls {
            let call_ids = ids.assign_ids(&message.tool_calls, self.tags.syntax);
            let calls = message.tool_calls.iter().zip(&call_ids).map(|(call, id)| {
                format.make_call(
                    &self.guard_text(id),
                    &self.guard_text(&call.name),
                    self.template_arguments(&call.arguments),
                )
            });
            value = format.make_message(prepared.content.clone(), calls.collect());
        }
        if let (Role::Assistant, Some(field), Some(reasoning)) =
            (message.role, self.message_format.reasoning, &message.reasoning_content)
        {
            value[field] = self.guard_text(reasoning).into();
        }
        let is_result = self.message_format.calls.filter(|_| message.role == Role::Tool);
        let is_result = is_result.and_then(|_| ids.next_call_id(message.tool_call_id.as_deref()));
        let id = is_result.or_else(|| message.tool_call_id.clone());
        for (key, text) in [("name", &message.name), ("tool_call_id", &id)] {
            if let Some(text) = text {
                value[key] = self.guard_text(text).into();
            }
        }
        value
    }

    /// Returns the guarded content of an external message: a list of parts if the content is one
    /// and the template supports lists, otherwise a text.
    fn template_content(&self, message: &Message) -> Value {
        match message.content.parts() {
            Some(parts) if self.message_format.parts => parts
                .iter()
                .filter_map(|part| match part {
                    ContentPart::Text(text) => {
                        Some(json!({ "type": "text", "text": self.guard_text(text) }))
                    }
                    ContentPart::Other(_) => None,
                })
                .collect(),
            _ => self.guard_text(&message.content).into(),
        }
    }

    /// Guards an external text, so that no part of it becomes a special token.
    fn guard_text(&self, text: &str) -> String {
        self.tokenizer.guard(text, self.guard, true)
    }

    /// Returns the text of an assistant message, in which reasoning and call tags become the tokens
    /// with which the model writes them.
    pub(crate) fn write_assistant(&self, message: &Message, in_reasoning: bool) -> String {
        self.mark_tags(
            &self.tags.syntax.render_message(&message.content, &message.tool_calls),
            in_reasoning,
        )
    }

    /// Marks the tags in a text, so that they become the tokens with which the model writes them.
    fn mark_tags(&self, text: &str, in_reasoning: bool) -> String {
        let spans = split_at_tags(self.tags, text, in_reasoning);
        let shown = spans.into_iter().map(|(part, span)| match part {
            SpanKind::ReasoningTag | SpanKind::CallTag => span,
            SpanKind::Speech | SpanKind::Reasoning | SpanKind::Call => self.guard_text(&span),
        });
        shown.collect()
    }

    fn render_tool_result(&self, content: &str) -> String {
        let [open, close] = RESPONSE;
        format!("{open}\n{}\n{close}", self.guard_text(content))
    }

    /// Guards every string in a JSON value, including keys. Templates compare strings of a schema
    /// (`type == "array"`), so a string is changed only if it contains a complete special token.
    /// The quotes around a string prevent it from being part of a longer token.
    fn guard_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.tokenizer.guard(text, self.guard, false).into(),
            Value::Array(items) => items.iter().map(|item| self.guard_value(item)).collect(),
            Value::Object(map) => Value::Object(
                map.iter()
                    .map(|(key, item)| {
                        (self.tokenizer.guard(key, self.guard, false), self.guard_value(item))
                    })
                    .collect::<Map<String, Value>>(),
            ),
            other => other.clone(),
        }
    }
}

/// Checks that messages contain only text.
fn check_text_only(messages: &[Message]) -> Result<(), TextError> {
    for Message { role, content, .. } in messages {
        if let Some(part) = content.non_text_parts().next() {
            return Err(TextError::Part { role: role.as_str(), kind: part.kind().to_owned() });
        }
    }
    Ok(())
}
