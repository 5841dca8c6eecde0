//! Records of calls of chat APIs.

use std::collections::HashMap;

use levade_policy::FinishReason;
use levade_text::{Message, ToolSpec};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Recorded call of a [`ChatApi`](crate::ChatApi). Messages that repeat the history of an earlier
/// call are stored only once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExternalCall {
    /// Name of the agent that made the call.
    pub agent: String,
    /// Name of the policy that answered the call.
    pub policy: String,
    /// Index of the earlier call whose history this call continues. `None` if it continues no call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<usize>,
    /// Number of messages of the earlier call's history, including its completion, with which this
    /// call starts.
    #[serde(default)]
    #[serde(rename = "shared")]
    pub shared_messages: usize,
    /// Messages of the request after the shared messages.
    pub messages: Vec<Message>,
    /// Tools of the request. `None` if they equal the tools of the previous call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<ToolSpec>>,
    /// Assistant message of the response. It can be incomplete.
    #[serde(rename = "reply")]
    pub message: Message,
    /// Reason why the completion ended.
    pub finish: FinishReason,
    /// Number of prompt tokens. 0 if the API does not report it.
    pub prompt_tokens: usize,
    /// Number of completion tokens. 0 if the API does not report it.
    pub tokens: usize,
    /// Error that ended the call. `None` if the call did not fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "fault")]
    pub error: Option<String>,
}

impl ExternalCall {
    /// Returns the full message history of the call at index `at`, including its completion. Empty
    /// if there is no such call.
    pub fn history(calls: &[ExternalCall], at: usize) -> Vec<Message> {
        let Some(call) = calls.get(at) else { return Vec::new() };
        // A call only continues an earlier one.
        let after = call.after.filter(|after| *after < at);
        let mut messages = after.map(|after| Self::history(calls, after)).unwrap_or_default();
        messages.truncate(call.shared_messages);
        messages.extend(call.messages.iter().cloned());
        messages.push(call.message.clone());
        messages
    }

    /// Returns the tools of the request of the call at index `at`.
    pub fn tools(calls: &[ExternalCall], at: usize) -> &[ToolSpec] {
        let upto = &calls[..calls.len().min(at + 1)];
        upto.iter().rev().find_map(|call| call.tools.as_deref()).unwrap_or_default()
    }
}

/// Message histories of an attempt's chat API calls, by the hash of each prefix.
#[derive(Debug, Default)]
pub(crate) struct CallHistories(HashMap<u128, (usize, usize)>);

impl CallHistories {
    /// Returns the index of the call that `messages` continue, or `None`, and the number of shared
    /// messages. Then stores `messages` and `assistant_message` as the history of the call at index
    /// `at`.
    pub(crate) fn note(
        &mut self,
        at: usize,
        messages: &[Message],
        assistant_message: &Message,
    ) -> (Option<usize>, usize) {
        let mut key = 0;
        let mut keys = Vec::with_capacity(messages.len() + 1);
        for message in messages.iter().chain([assistant_message]) {
            let text = serde_json::to_vec(message).unwrap_or_default();
            key = xxh3_128_with_seed(&text, key as u64 ^ (key >> 64) as u64);
            keys.push(key);
        }
        let known = keys[..messages.len()].iter().rev().find_map(|key| self.0.get(key).copied());
        for (key, length) in keys.into_iter().zip(1..) {
            self.0.entry(key).or_insert((at, length));
        }
        known.map_or((None, 0), |(call, length)| (Some(call), length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(
        after: Option<usize>,
        shared_count: usize,
        texts: &[&str],
        tools: Option<&str>,
    ) -> ExternalCall {
        let (assistant_message, messages) = texts.split_last().unwrap();
        let tool = |name: &str| ToolSpec {
            name: name.into(),
            description: String::new(),
            parameters: serde_json::Value::Null,
        };
        ExternalCall {
            agent: "judge".into(),
            policy: "api".into(),
            after,
            shared_messages: shared_count,
            messages: messages.iter().map(|text| Message::user(*text)).collect(),
            tools: tools.map(|name| vec![tool(name)]),
            message: Message::assistant(*assistant_message),
            finish: FinishReason::StopId,
            prompt_tokens: 0,
            tokens: 0,
            error: None,
        }
    }

    fn texts(calls: &[ExternalCall], at: usize) -> Vec<String> {
        let history = ExternalCall::history(calls, at);
        history.iter().map(|message| message.content.as_str().to_owned()).collect()
    }

    #[test]
    fn history_joins_shared_and_own_messages() {
        let calls = [
            call(None, 0, &["a", "b", "c"], None),
            call(Some(0), 3, &["d", "e"], None),
            call(Some(0), 1, &["f", "g"], None),
        ];
        assert_eq!(texts(&calls, 1), ["a", "b", "c", "d", "e"]);
        assert_eq!(texts(&calls, 2), ["a", "f", "g"]);
        assert!(texts(&calls, 3).is_empty());
    }

    #[test]
    fn history_ignores_call_that_is_not_earlier() {
        // A damaged record must not cause an endless recursion.
        let calls = [call(Some(0), 1, &["a", "b"], None), call(Some(2), 1, &["c", "d"], None)];
        assert_eq!(texts(&calls, 0), ["a", "b"]);
        assert_eq!(texts(&calls, 1), ["c", "d"]);
    }

    #[test]
    fn external_call_tools_come_from_last_listing() {
        let calls = [
            call(None, 0, &["a"], None),
            call(None, 0, &["b"], Some("add")),
            call(None, 0, &["c"], None),
        ];
        let calls = [&calls[..], &[call(None, 0, &["d"], Some("sub"))]].concat();
        let name = |at| ExternalCall::tools(&calls, at).first().map(|tool| tool.name.as_str());
        assert_eq!(
            [0, 1, 2, 3, 9].map(name),
            [None, Some("add"), Some("add"), Some("sub"), Some("sub")]
        );
    }

    #[test]
    fn histories_find_longest_known_prefix() {
        let mut histories = CallHistories::default();
        let assistant_message = Message::assistant("r");
        assert_eq!(
            histories.note(0, &[Message::user("a"), Message::user("b")], &assistant_message),
            (None, 0)
        );
        let next =
            [Message::user("a"), Message::user("b"), assistant_message.clone(), Message::user("c")];
        assert_eq!(histories.note(1, &next, &assistant_message), (Some(0), 3));
        assert_eq!(
            histories.note(
                2,
                &[&next[..], &[assistant_message.clone(), Message::user("d")]].concat(),
                &assistant_message
            ),
            (Some(1), 5)
        );
        assert_eq!(
            histories.note(3, &[Message::user("a"), Message::user("x")], &assistant_message),
            (Some(0), 1)
        );
        // The same messages in another order are another prefix.
        assert_eq!(
            histories.note(4, &[Message::user("b"), Message::user("a")], &assistant_message),
            (None, 0)
        );
    }
}
