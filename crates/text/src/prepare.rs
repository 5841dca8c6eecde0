//! Messages and tools made ready for a template: calls as text, tools described where the template does not, guards set.

use serde_json::{Map, Value, json};

use crate::chat::ToolSupport;
use crate::hermes::{self, ToolPrompt};
use crate::{Message, Role, TextError, Tokenizer, ToolSpec};

/// What a template is given.
pub(crate) struct Prepared {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
}

/// How to make it ready.
pub(crate) struct Preparation<'a> {
    pub tokenizer: &'a Tokenizer,
    pub tool_support: ToolSupport,
    /// Whether the template prints messages of role `tool`.
    pub tool_role: bool,
    pub tool_prompt: ToolPrompt,
    /// The character that keeps special tokens from beginning in text from outside.
    pub guard: char,
}

impl Preparation<'_> {
    pub(crate) fn run(&self, messages: &[Message], tools: &[ToolSpec]) -> Result<Prepared, TextError> {
        let native = match self.tool_support {
            _ if tools.is_empty() => None,
            ToolSupport::Foreign => return Err(TextError::ForeignTools),
            ToolSupport::Hermes => Some(tools.iter().map(|tool| self.guarded(&tool.to_openai())).collect()),
            ToolSupport::None => None,
        };
        let mut turns: Vec<Message> = Vec::with_capacity(messages.len() + 1);
        let mut rest = messages;
        if !tools.is_empty() && native.is_none() {
            let mut section = hermes::describe_tools(tools, self.tool_prompt);
            if let Some((first, others)) = messages.split_first()
                && first.role == Role::System
            {
                section = format!("{}\n\n{section}", first.content);
                rest = others;
            }
            turns.push(Message::system(section));
        }
        // Whether the last turn holds tool results under the user's name.
        let mut results_open = false;
        for message in rest {
            let is_result = message.role == Role::Tool && !self.tool_role;
            match turns.last_mut() {
                // Results of one turn share a message, since templates often insist that roles alternate.
                Some(last) if is_result && results_open => {
                    last.content = format!("{}\n{}", last.content, response(&message.content));
                }
                _ if is_result => turns.push(Message::user(response(&message.content))),
                _ => turns.push(message.clone()),
            }
            results_open = is_result;
        }
        Ok(Prepared { messages: turns.iter().map(|turn| self.turn(turn)).collect(), tools: native })
    }

    fn turn(&self, message: &Message) -> Value {
        let text = hermes::render_turn(&message.content, &message.tool_calls);
        let mut turn = json!({ "role": message.role.as_str(), "content": self.tokenizer.guard(&text, self.guard, true) });
        for (key, value) in [("name", &message.name), ("tool_call_id", &message.tool_call_id)] {
            if let Some(value) = value {
                turn[key] = self.tokenizer.guard(value, self.guard, true).into();
            }
        }
        turn
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

fn response(content: &str) -> String {
    format!("<tool_response>\n{content}\n</tool_response>")
}
