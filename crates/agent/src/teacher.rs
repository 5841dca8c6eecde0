//! Teachers, which write the completions that a policy imitates: a chat API, or the authors of the
//! tasks.
//!
//! In the second case the row of a task has the completions of an attempt, and nothing else: the
//! tools of the attempt answer every call in them, and every attempt is scored. A demonstration
//! that fails its task is therefore detected and left out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use levade_call::{ApiError, ChatApi, ChatCompletion, ChatDelta, ChatQuery, ErrorKind};
use levade_policy::FinishReason;
use levade_text::{Message, Role};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use levade_tasks::Task;

/// Teacher: a source of completions that trained policies imitate.
#[derive(Clone)]
pub enum Teacher {
    /// A chat API of an external policy writes the completions.
    Api(Arc<dyn ChatApi>),
    /// The field of this name in each task's row contains the completions.
    RowField(String),
}

impl Teacher {
    /// Creates a teacher that answers each conversation with the function `rule`. The function
    /// returns an error message if it has no answer.
    pub fn from_rule(
        rule: impl Fn(&[Message]) -> Result<Message, String> + Send + Sync + 'static,
    ) -> Self {
        Teacher::Api(Arc::new(RuleChatApi(rule)))
    }

    /// Returns the chat API that supplies the teacher's completions for one attempt at a task.
    ///
    /// # Errors
    /// Returns a message if the completions come from the task's row, but the row does not contain
    /// them.
    pub(crate) fn create_responder(&self, task: &Task) -> Result<Arc<dyn ChatApi>, String> {
        match self {
            Teacher::Api(responder) => Ok(Arc::clone(responder)),
            Teacher::RowField(field) => create_row_responder(task, field),
        }
    }
}

/// Chat API that answers conversations by calling the function `F`.
struct RuleChatApi<F>(F);

impl<F: Fn(&[Message]) -> Result<Message, String> + Send + Sync> ChatApi for RuleChatApi<F> {
    fn respond(&self, query: ChatQuery) -> UnboundedReceiver<Result<ChatDelta, ApiError>> {
        let (sender, receiver) = unbounded_channel();
        let finish = FinishReason::StopId;
        let prompt_tokens = 0;
        let tokens = 0;
        let reasoning_tokens = 0;
        let delta = (self.0)(&query.messages)
            .map(|message| {
                ChatDelta::Done(Box::new(ChatCompletion {
                    message,
                    finish,
                    prompt_tokens,
                    tokens,
                    reasoning_tokens,
                }))
            })
            .map_err(|why| ApiError::new(ErrorKind::Unavailable, why));
        // The channel is open and unbounded, so sending does not fail.
        let _ = sender.send(delta);
        receiver
    }
}

/// Parses the completions in a field of a task's row, in order. The field is a list of texts, or of
/// messages in the format of chat APIs. Messages of tools and users in the list are ignored,
/// because the attempt has its own messages of tools and users. Tool calls without an id get a
/// generated id.
///
/// # Errors
/// Returns a message if the row has no such field, or if the field is not a list of completions.
pub fn parse_row_completions(task: &Task, field: &str) -> Result<Vec<Message>, String> {
    let found =
        task.row.get(field).ok_or_else(|| format!("the task's row has no field `{field}`"))?;
    let wrong = |why: String| format!("the field `{field}` of the task's row {why}");
    let items = found.as_array().ok_or_else(|| wrong("is not a list of completions".to_owned()))?;
    let mut completions = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        let message = parse_message(item)
            .map_err(|why| wrong(format!("has an invalid message {at}: {why}")))?;
        completions.extend((message.role == Role::Assistant).then_some(message));
    }
    for (turn, completion) in completions.iter_mut().enumerate() {
        for (index, call) in
            completion.tool_calls.iter_mut().enumerate().filter(|(_, call)| call.id.is_empty())
        {
            call.id = format!("call_{turn}_{index}");
        }
    }
    if completions.is_empty() {
        Err(wrong("has no completion".to_owned()))
    } else {
        Ok(completions)
    }
}

fn parse_message(item: &Value) -> Result<Message, String> {
    let mut item = match item {
        Value::String(text) => json!({ "content": text }),
        other => other.clone(),
    };
    if let Some(fields) = item.as_object_mut() {
        fields.entry("role").or_insert_with(|| "assistant".into());
    }
    let message: Message = serde_json::from_value(item).map_err(|error| error.to_string())?;
    message.check_calls().map(|()| message)
}

/// Creates a chat API that replays the completions in a task's row: each query gets the next
/// completion.
///
/// # Errors
/// Returns the errors of [`parse_row_completions`].
fn create_row_responder(task: &Task, field: &str) -> Result<Arc<dyn ChatApi>, String> {
    let completions = parse_row_completions(task, field)?;
    let next = AtomicUsize::new(0);
    let field = field.to_owned();
    let rule = move |_: &[Message]| {
        let at = next.fetch_add(1, Ordering::Relaxed);
        let used_up = || {
            format!(
                "the agent requested more than the {} completions in `{field}`",
                completions.len()
            )
        };
        completions.get(at).cloned().ok_or_else(used_up)
    };
    Ok(Arc::new(RuleChatApi(rule)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(completions: Value) -> Task {
        let row = json!({ "replies": completions }).as_object().unwrap().clone();
        Task { row: row.into(), ..Task::default() }
    }

    #[test]
    fn parse_row_completions_accepts_texts_and_messages() {
        let call = json!({ "function": { "name": "python", "arguments": { "code": "print(1)" } } });
        let task = task(json!([
            { "role": "assistant", "content": "Let me see.", "tool_calls": [call.clone(), call] },
            { "role": "tool", "content": "1" },
            "It is 1.",
        ]));
        let completions = parse_row_completions(&task, "replies").unwrap();
        assert_eq!(completions.len(), 2, "what a tool said is left out");
        let ids: Vec<&str> =
            completions[0].tool_calls.iter().map(|call| call.id.as_str()).collect();
        assert_eq!(ids, ["call_0_0", "call_0_1"]);
        assert_eq!(completions[0].tool_calls[0].arguments["code"], "print(1)");
        assert_eq!(completions[1], Message::assistant("It is 1."));
    }

    #[test]
    fn parse_row_completions_names_invalid_field() {
        for (completions, why) in [
            (json!("one"), "is not a list of completions"),
            (json!([]), "has no completion"),
            (json!([{ "role": "tool", "content": "1" }]), "has no completion"),
            (json!([3]), "has an invalid message 0"),
            (
                json!([{ "tool_calls": [{ "function": { "name": "f", "arguments": "{\"a\": " } }] }]),
                "invalid message 0: \"arguments\" of the tool call \"f\" is {\"a\": , but must be a JSON \
                 object",
            ),
            (json!(["a", { "role": "wizard", "content": "b" }]), "has an invalid message 1"),
        ] {
            let error = parse_row_completions(&task(completions), "replies").unwrap_err();
            assert!(
                error.starts_with("the field `replies` of the task's row ") && error.contains(why),
                "{error}"
            );
        }
        assert_eq!(
            parse_row_completions(&task(json!([])), "demo").unwrap_err(),
            "the task's row has no field `demo`"
        );
    }
}
