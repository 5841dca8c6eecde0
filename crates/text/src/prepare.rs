//! Messages and tools made ready for a template: calls as text, tools described where the template does not,
//! guards set.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use crate::calls::RESPONSE;
use crate::chat::ToolSupport;
use crate::describe::{ToolPrompt, describe_tools};
use crate::reader::{Part, Tags, spans};
use crate::thought::ThoughtTags;
use crate::{ContentPart, Message, Role, TextError, Tokenizer, ToolSpec};

/// Messages and tools in the form that a template is given.
pub(crate) struct Prepared {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
}

/// How to make it ready.
pub(crate) struct Preparation<'a> {
    pub tokenizer: &'a Tokenizer,
    pub tags: &'a Tags,
    pub tool_support: ToolSupport,
    /// Whether the template prints messages of role `tool`.
    pub tool_role: bool,
    /// How the template takes what messages say.
    pub form: &'a MessageForm,
    pub tool_prompt: ToolPrompt,
    /// The character that keeps special tokens from beginning in text from outside.
    pub guard: char,
}

/// How a template takes what messages say, besides texts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MessageForm {
    /// Whether content may be a list of text parts, printed as the same text is.
    pub parts: bool,
    /// The name of the field that reasoning is read from, where one is.
    pub reasoning: Option<&'static str>,
    /// Tags that reasoning is written in where it is not.
    pub tags: Option<ThoughtTags>,
    /// Whether it knows the role `developer`.
    pub developer: bool,
}

impl MessageForm {
    /// The message with its reasoning as a thought at the beginning of its content, as models write it.
    pub(crate) fn written_out<'a>(&self, message: &'a Message) -> Cow<'a, Message> {
        let (Some(thought), Some(ThoughtTags { open, close })) = (&message.reasoning_content, &self.tags)
        else {
            return Cow::Borrowed(message);
        };
        let content = format!("{open}\n{thought}\n{close}\n\n{}", message.content.as_str());
        Cow::Owned(Message { content: content.into(), reasoning_content: None, ..message.clone() })
    }
}

/// A message whose text is ready.
struct Turn<'a> {
    role: Role,
    content: Value,
    /// Where it came from, unless it is written here.
    source: Option<&'a Message>,
}

impl Preparation<'_> {
    pub(crate) fn run(&self, messages: &[Message], tools: &[ToolSpec]) -> Result<Prepared, TextError> {
        takes_all(messages)?;
        let native = match self.tool_support {
            _ if tools.is_empty() => None,
            ToolSupport::Foreign => return Err(TextError::ForeignTools),
            ToolSupport::Native => Some(tools.iter().map(|tool| self.guarded(&tool.to_openai())).collect()),
            ToolSupport::None => None,
        };
        let mut turns: Vec<Turn> = Vec::with_capacity(messages.len() + 1);
        let mut rest = messages;
        if !tools.is_empty() && native.is_none() {
            let mut section =
                describe_tools(tools, self.tool_prompt, self.tags.syntax, |text| self.quoted(text));
            if let Some((first, others)) = messages.split_first()
                && first.role.instructs()
            {
                section = format!("{}\n\n{section}", self.quoted(&first.content));
                rest = others;
            }
            let role = messages.first().map_or(Role::System, |first| first.role);
            let role = if role.instructs() { role } else { Role::System };
            turns.push(Turn { role, content: section.into(), source: None });
        }
        // Whether the last turn holds tool results under the user's name.
        let mut results_open = false;
        for message in rest {
            let is_result = message.role == Role::Tool && !self.tool_role;
            match turns.last_mut() {
                // Results of one turn share a message, since templates often insist that roles alternate.
                Some(Turn { content: Value::String(last), .. }) if is_result && results_open => {
                    last.push('\n');
                    last.push_str(&self.response(&message.content));
                }
                _ if is_result => {
                    let content = self.response(&message.content);
                    turns.push(Turn { role: Role::User, content: content.into(), source: None });
                }
                _ => {
                    let content = match message.role {
                        Role::Assistant if self.form.reasoning.is_some() => {
                            self.written(message, false).into()
                        }
                        Role::Assistant => self.written(&self.form.written_out(message), false).into(),
                        Role::System | Role::Developer | Role::User | Role::Tool => self.content(message),
                    };
                    turns.push(Turn { role: message.role, content, source: Some(message) });
                }
            }
            results_open = is_result;
        }
        Ok(Prepared { messages: turns.iter().map(|turn| self.value(turn)).collect(), tools: native })
    }

    fn value(&self, turn: &Turn<'_>) -> Value {
        let role = match turn.role {
            Role::Developer if !self.form.developer => Role::System,
            role => role,
        };
        let mut value = json!({ "role": role.as_str(), "content": turn.content });
        let Some(message) = turn.source else { return value };
        if let (Role::Assistant, Some(field), Some(thought)) =
            (message.role, self.form.reasoning, &message.reasoning_content)
        {
            value[field] = self.quoted(thought).into();
        }
        for (key, text) in [("name", &message.name), ("tool_call_id", &message.tool_call_id)] {
            if let Some(text) = text {
                value[key] = self.quoted(text).into();
            }
        }
        value
    }

    /// Content from outside: a text, or a list of parts where it is one and the template takes such.
    fn content(&self, message: &Message) -> Value {
        match message.content.parts() {
            Some(parts) if self.form.parts => {
                let text = |part: &ContentPart| match part {
                    ContentPart::Text(text) => Some(json!({ "type": "text", "text": self.quoted(text) })),
                    ContentPart::Other(_) => None,
                };
                parts.iter().filter_map(text).collect()
            }
            _ => self.quoted(&message.content).into(),
        }
    }

    /// Text from outside, in which nothing is a special token.
    fn quoted(&self, text: &str) -> String {
        self.tokenizer.guard(text, self.guard, true)
    }

    /// Text that an assistant wrote, in which the tags of thoughts and calls are the tokens that the model
    /// writes them with.
    pub(crate) fn written(&self, message: &Message, in_thought: bool) -> String {
        let text = self.tags.syntax.render(&message.content, &message.tool_calls);
        let spans = spans(self.tags, &text, in_thought);
        let shown = spans.into_iter().map(|(part, span)| match part {
            Part::ThoughtTag | Part::CallTag => span,
            Part::Speech | Part::Thought | Part::Call => self.quoted(&span),
        });
        shown.collect()
    }

    fn response(&self, content: &str) -> String {
        let [open, close] = RESPONSE;
        format!("{open}\n{}\n{close}", self.quoted(content))
    }

    /// Guards every string, keys included. Templates compare strings of a schema (`type == "array"`), so
    /// these are only touched where they hold a whole special token; the quotes around them keep them from
    /// being part of a longer one.
    fn guarded(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.tokenizer.guard(text, self.guard, false).into(),
            Value::Array(items) => items.iter().map(|item| self.guarded(item)).collect(),
            Value::Object(map) => Value::Object(
                map.iter()
                    .map(|(key, item)| (self.tokenizer.guard(key, self.guard, false), self.guarded(item)))
                    .collect::<Map<String, Value>>(),
            ),
            other => other.clone(),
        }
    }
}

/// Checks that messages hold nothing but text.
fn takes_all(messages: &[Message]) -> Result<(), TextError> {
    for Message { role, content, .. } in messages {
        if let Some(part) = content.others().next() {
            return Err(TextError::Part { role: role.as_str(), kind: part.kind().to_owned() });
        }
    }
    Ok(())
}
