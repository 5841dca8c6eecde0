//! Messages and tools made ready for a template: calls as text, tools described where the template does not, guards set.

use serde_json::{Map, Value, json};

use crate::chat::ToolSupport;
use crate::hermes::{self, ToolPrompt};
use crate::thought::{Part, Thoughts};
use crate::{Message, Role, TextError, Tokenizer, ToolSpec};

/// What a template is given.
pub(crate) struct Prepared {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
}

/// How to make it ready.
pub(crate) struct Preparation<'a> {
    pub tokenizer: &'a Tokenizer,
    pub thoughts: &'a Thoughts,
    pub tool_support: ToolSupport,
    /// Whether the template prints messages of role `tool`.
    pub tool_role: bool,
    pub tool_prompt: ToolPrompt,
    /// The character that keeps special tokens from beginning in text from outside.
    pub guard: char,
}

/// A message whose text is ready.
struct Turn<'a> {
    role: Role,
    content: String,
    /// Where it came from, unless it is written here.
    source: Option<&'a Message>,
}

impl Preparation<'_> {
    pub(crate) fn run(&self, messages: &[Message], tools: &[ToolSpec]) -> Result<Prepared, TextError> {
        let native = match self.tool_support {
            _ if tools.is_empty() => None,
            ToolSupport::Foreign => return Err(TextError::ForeignTools),
            ToolSupport::Hermes => Some(tools.iter().map(|tool| self.guarded(&tool.to_openai())).collect()),
            ToolSupport::None => None,
        };
        let mut turns: Vec<Turn> = Vec::with_capacity(messages.len() + 1);
        let mut rest = messages;
        if !tools.is_empty() && native.is_none() {
            let mut section = hermes::describe_tools(tools, self.tool_prompt, |text| self.quoted(text));
            if let Some((first, others)) = messages.split_first()
                && first.role == Role::System
            {
                section = format!("{}\n\n{section}", self.quoted(&first.content));
                rest = others;
            }
            turns.push(Turn { role: Role::System, content: section, source: None });
        }
        // Whether the last turn holds tool results under the user's name.
        let mut results_open = false;
        for message in rest {
            let is_result = message.role == Role::Tool && !self.tool_role;
            match turns.last_mut() {
                // Results of one turn share a message, since templates often insist that roles alternate.
                Some(last) if is_result && results_open => {
                    last.content = format!("{}\n{}", last.content, self.response(&message.content));
                }
                _ if is_result => {
                    let content = self.response(&message.content);
                    turns.push(Turn { role: Role::User, content, source: None });
                }
                _ => {
                    let content = match message.role {
                        Role::Assistant => self.written(message, false),
                        Role::System | Role::User | Role::Tool => self.quoted(&message.content),
                    };
                    turns.push(Turn { role: message.role, content, source: Some(message) });
                }
            }
            results_open = is_result;
        }
        Ok(Prepared { messages: turns.iter().map(|turn| self.value(turn)).collect(), tools: native })
    }

    fn value(&self, turn: &Turn<'_>) -> Value {
        let mut value = json!({ "role": turn.role.as_str(), "content": turn.content });
        let Some(message) = turn.source else { return value };
        for (key, text) in [("name", &message.name), ("tool_call_id", &message.tool_call_id)] {
            if let Some(text) = text {
                value[key] = self.quoted(text).into();
            }
        }
        value
    }

    /// Text from outside, in which nothing is a special token.
    fn quoted(&self, text: &str) -> String {
        self.tokenizer.guard(text, self.guard, true)
    }

    /// Text that an assistant wrote, in which the tags of thoughts and calls are the tokens that the model
    /// writes them with.
    pub(crate) fn written(&self, message: &Message, in_thought: bool) -> String {
        let text = hermes::render_turn(&message.content, &message.tool_calls);
        let spans = self.thoughts.spans(&text, in_thought);
        let shown = spans.into_iter().map(|(part, span)| match part {
            Part::ThoughtTag | Part::CallTag => span.to_owned(),
            Part::Speech | Part::Thought | Part::Call => self.quoted(span),
        });
        shown.collect()
    }

    fn response(&self, content: &str) -> String {
        let [open, close] = hermes::RESPONSE;
        format!("{open}\n{}\n{close}", self.quoted(content))
    }

    /// Guards every string, keys included. Templates compare strings of a schema (`type == "array"`), so these are only
    /// touched where they hold a whole special token; the quotes around them keep them from being part of a longer one.
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
