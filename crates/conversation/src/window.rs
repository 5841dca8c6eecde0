//! Context policies: select the messages to keep when a conversation exceeds the model's context.
//!
//! # Guarantees
//! - **Instructions and the newest turns stay**: everything before the first completion, and the
//!   newest turns. A turn is a completion with the tool results and questions after it. It is
//!   removed completely, so no tool result stands without its call, and roles keep alternating.
//! - **A truncation is a function** of the messages, the length of their prompt and the budget.
//!   Bytes stand for tokens when messages are selected; only the rendered prompt is compared with
//!   the budget.
//! - **A truncation reaches half of the budget**, so between two truncations at least as many
//!   tokens are new as are rendered again.
//!
//! Summaries of removed turns are calls of an agent of their own (`levade-call`).

use std::collections::BTreeMap;
use std::ops::Range;

use levade_text::{Message, Role, ToolSpec};
use serde::{Deserialize, Serialize};

use crate::origin::Reason;

/// Context policy: the treatment of prompts that exceed their token budget.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// The call fails, as if the prompt exceeded the model's context.
    #[default]
    Fail,
    /// The longest tool results and user messages are truncated in the middle. If that is not
    /// enough, the oldest turns are omitted.
    TruncateMiddle,
    /// The oldest turns are omitted.
    DropOldest,
    /// The oldest turns are omitted, and a summary of them is added after the task.
    #[serde(rename = "summarise")]
    Summarize,
}

/// Maximum length of a prompt in tokens, and the policy for longer prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Maximum number of tokens of a prompt.
    pub max_tokens: usize,
    /// Context policy for prompts with more tokens.
    pub overflow: Overflow,
    /// Number of the newest turns that are never changed. Must be at least 1.
    pub keep: usize,
}

impl Budget {
    /// Budget without a limit: only the model itself rejects prompts that are too long.
    pub const NONE: Budget = Budget { max_tokens: usize::MAX, overflow: Overflow::Fail, keep: 1 };

    /// Returns the number of tokens to which a prompt is shortened.
    fn target(&self) -> usize {
        self.max_tokens / 2
    }
}

impl Overflow {
    /// Returns the reason of the forks that this context policy causes.
    pub(crate) fn reason(self) -> Reason {
        match self {
            Overflow::TruncateMiddle => Reason::ContextTruncated,
            Overflow::Summarize => Reason::ContextSummarized,
            Overflow::DropOldest | Overflow::Fail => Reason::ContextDropped,
        }
    }
}

/// Minimum number of bytes that remain of a truncated message.
const MIN_BYTES: usize = 128;
/// Upper bound on the length in bytes of the note that replaces omitted text.
const MAX_NOTE_BYTES: usize = 64;
/// Estimated number of bytes that a chat template renders around a message.
const MESSAGE_OVERHEAD: usize = 24;

/// Heading before the summary of omitted turns.
const SUMMARY_HEADING: &str = "Summary of the part of this conversation that was left out:";

/// Truncation of a message history: the messages to omit and to shorten, by their indices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Truncation {
    /// Index at which the omitted messages end. They start after the opening; the message at this
    /// index is kept. 0 if no message is omitted.
    pub upto: usize,
    /// Maximum number of content bytes of shortened messages, by message index.
    pub shortened: BTreeMap<usize, usize>,
    /// Summary that replaces the omitted messages. `None` if no text replaces them.
    pub summary: Option<String>,
}

/// Returns the number of messages before the first assistant message (the opening).
pub(crate) fn opening(messages: &[Message]) -> usize {
    messages.iter().position(|message| message.role == Role::Assistant).unwrap_or(messages.len())
}

/// Returns the indices at which the turns after the opening start. A turn consists of a completion,
/// in one or several messages, and all messages up to the next completion.
fn turn_starts(messages: &[Message]) -> Vec<usize> {
    let completions = |at: usize| messages[at].role == Role::Assistant;
    (0..messages.len()).filter(|&at| completions(at) && (at == 0 || !completions(at - 1))).collect()
}

impl Truncation {
    /// Returns whether the truncation changes no message.
    pub(crate) fn is_none(&self) -> bool {
        self.upto == 0 && self.shortened.is_empty()
    }

    /// Returns the messages that remain after the truncation.
    pub(crate) fn apply(&self, messages: &[Message]) -> Vec<Message> {
        let opening = opening(messages);
        let mut kept = messages[..opening].to_vec();
        if let Some(summary) = &self.summary {
            match kept.last_mut() {
                Some(last) => {
                    last.content =
                        format!("{}\n\n{SUMMARY_HEADING}\n{summary}", last.content.as_str()).into();
                }
                None => kept.push(Message::user(format!("{SUMMARY_HEADING}\n{summary}"))),
            }
        }
        for (at, message) in messages.iter().enumerate().skip(self.upto.max(opening)) {
            kept.push(match self.shortened.get(&at) {
                Some(&max_bytes) => Message {
                    content: shorten_text(&message.content, max_bytes).into(),
                    ..message.clone()
                },
                None => message.clone(),
            });
        }
        kept
    }

    /// Returns the estimated size of a message after the truncation, in bytes.
    fn size(&self, at: usize, message: &Message) -> usize {
        let content = self
            .shortened
            .get(&at)
            .map_or(message.content.len(), |max_bytes| max_bytes + MAX_NOTE_BYTES);
        let calls = message.tool_calls.iter();
        let calls = calls
            .map(|call| {
                call.name.len()
                    + 32
                    + json_length(&*call.arguments)
                    + call.arguments.unreadable().map_or(0, str::len)
            })
            .sum::<usize>();
        content
            + calls
            + message.reasoning_content.as_ref().map_or(0, String::len)
            + MESSAGE_OVERHEAD
    }

    /// Extends the truncation of a history whose prompt still has `found` tokens. Returns the range
    /// of newly omitted messages, and the number of bytes that is about half of the budget. Returns
    /// `None` if no other message can be omitted or shortened.
    pub(crate) fn extend(
        &mut self,
        messages: &[Message],
        tools: &[ToolSpec],
        found: usize,
        budget: &Budget,
    ) -> Option<(Range<usize>, usize)> {
        let opening = opening(messages);
        let turn_starts = turn_starts(messages);
        let from = self.upto.max(opening);
        // End of the messages that can be omitted.
        let newest = turn_starts
            .len()
            .checked_sub(budget.keep.max(1))
            .map_or(from, |at| turn_starts[at].max(from));
        let size = |truncation: &Truncation, at: usize| truncation.size(at, &messages[at]);
        let kept = (0..opening).chain(from..messages.len()).map(|at| size(self, at)).sum::<usize>();
        let tools_bytes: usize = tools.iter().map(|tool| json_length(&tool.to_openai())).sum();
        let summary = self.summary.as_ref().map_or(0, String::len);
        let all = kept + tools_bytes + summary;
        // Bytes are converted to tokens by the ratio of the complete prompt.
        let target = (all as u128 * budget.target() as u128 / found.max(1) as u128) as usize;
        let mut excess = all.saturating_sub(target).max(1);
        let mut changed = false;
        if budget.overflow == Overflow::TruncateMiddle {
            let saved = self.shorten(messages, from..newest, excess);
            changed = saved > 0;
            excess = excess.saturating_sub(saved);
        }
        let mut upto = from;
        for end in turn_starts.iter().copied().filter(|&end| end > from && end <= newest) {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub((upto..end).map(|at| size(self, at)).sum());
            upto = end;
        }
        if upto > from {
            self.upto = upto;
            self.shortened.retain(|&at, _| at >= upto);
            changed = true;
        }
        changed.then_some((from..upto, target))
    }

    /// Shortens the longest contents in a range of messages to the same length, to save `excess`
    /// bytes if possible. Returns the number of bytes saved.
    fn shorten(&mut self, messages: &[Message], range: Range<usize>, excess: usize) -> usize {
        let mut long: Vec<(usize, usize)> = range
            .filter_map(|at: usize| {
                let message = &messages[at];
                let now = self.shortened.get(&at);
                let now = now
                    .copied()
                    .unwrap_or_else(|| message.content.len().saturating_sub(MAX_NOTE_BYTES));
                let may = matches!(message.role, Role::Tool | Role::User) && now > MIN_BYTES;
                may.then_some((now, at))
            })
            .collect();
        long.sort_unstable_by(|a, b| b.cmp(a));
        // As many of the longest contents as needed are shortened, to the length of the next one or
        // less.
        let mut level = MIN_BYTES;
        let mut sum = 0;
        for count in 1..=long.len() {
            sum += long[count - 1].0;
            let next = long.get(count).map_or(MIN_BYTES, |next| next.0);
            if sum - count * next >= excess {
                level = ((sum - excess) / count).max(MIN_BYTES);
                break;
            }
        }
        let mut saved = 0;
        for (now, at) in long.into_iter().take_while(|(now, _)| *now > level) {
            saved += now - level;
            self.shortened.insert(at, level);
        }
        saved
    }
}

/// Returns the length of a value's JSON text, in bytes.
fn json_length(value: &impl Serialize) -> usize {
    serde_json::to_string(value).map_or(0, |text| text.len())
}

/// Shortens a text to its start and its end, together `max_bytes` bytes, around a note about the
/// omitted characters.
fn shorten_text(text: &str, max_bytes: usize) -> String {
    if text.len() <= max_bytes + MAX_NOTE_BYTES {
        return text.to_owned();
    }
    let head = text.floor_char_boundary(max_bytes / 2);
    let tail = text.ceil_char_boundary(text.len() - (max_bytes - max_bytes / 2));
    let omitted_count = text[head..tail].chars().count();
    format!("{}\n[{omitted_count} characters left out]\n{}", &text[..head], &text[tail..])
}

/// Formats messages as one text of at most about `max_bytes` bytes, which a model summarizes.
/// `before` is the summary of earlier messages.
pub(crate) fn transcript(before: Option<&str>, messages: &[Message], max_bytes: usize) -> String {
    let mut text = before
        .map_or_else(String::new, |before| format!("summary of what came before: {before}\n\n"));
    for message in messages {
        text += message.role.as_str();
        text += ": ";
        text += message.content.as_str();
        for call in &message.tool_calls {
            let arguments = match call.arguments.unreadable() {
                Some(text) => text.to_owned(),
                None => serde_json::to_string(&*call.arguments).unwrap_or_default(),
            };
            text += &format!("\ncalls {}({arguments})", call.name);
        }
        text += "\n\n";
    }
    shorten_text(text.trim_end(), max_bytes)
}

#[cfg(test)]
mod tests {
    use levade_text::ToolCall;

    use super::*;

    fn messages_from(pattern: &str) -> Vec<Message> {
        pattern
            .chars()
            .map(|role| match role {
                's' => Message::system("s"),
                'u' => Message::user("u"),
                'a' => Message::assistant("a"),
                _ => Message::tool("t"),
            })
            .collect()
    }

    #[test]
    fn turns_start_with_completions() {
        assert_eq!(
            (opening(&messages_from("suattauat")), turn_starts(&messages_from("suattauat"))),
            (2, vec![2, 5, 7])
        );
        // A completion in several messages is one turn.
        assert_eq!(turn_starts(&messages_from("uaatta")), [1, 5]);
        assert_eq!((opening(&messages_from("au")), opening(&messages_from("su"))), (0, 2));
    }

    #[test]
    fn shortened_text_keeps_both_ends() {
        let text = format!("{}{}", "ä".repeat(300), "z".repeat(300));
        let shortened_text = shorten_text(&text, 200);
        assert!(shortened_text.len() <= 200 + MAX_NOTE_BYTES, "{}", shortened_text.len());
        assert!(
            shortened_text.starts_with("ää")
                && shortened_text.ends_with("zz")
                && shortened_text.contains("[450 characters left out]"),
            "{shortened_text}"
        );
        assert_eq!(shorten_text("short", 2), "short");
    }

    #[test]
    fn size_counts_all_message_parts() {
        let arguments = serde_json::from_str("{\"a\":1}").unwrap();
        let call = ToolCall { id: String::new(), name: "look".into(), arguments };
        let message = Message {
            reasoning_content: Some("thing".into()),
            ..Message::calls("0123456789", vec![call])
        };
        let mut truncation = Truncation::default();
        assert_eq!(truncation.size(3, &message), 10 + (4 + 32 + 7) + 5 + MESSAGE_OVERHEAD);
        truncation.shortened.insert(3, 200);
        assert_eq!(
            truncation.size(3, &message),
            200 + MAX_NOTE_BYTES + (4 + 32 + 7) + 5 + MESSAGE_OVERHEAD
        );
    }

    #[test]
    fn is_none_holds_for_empty_truncation() {
        assert!(Truncation::default().is_none());
        assert!(!Truncation { upto: 2, ..Truncation::default() }.is_none());
        assert!(!Truncation { shortened: [(2, 128)].into(), ..Truncation::default() }.is_none());
    }

    #[test]
    fn shorten_saves_requested_bytes() {
        let mut messages = messages_from("uatat");
        for (at, length) in [(2, 1000), (4, 600)] {
            messages[at].content = "x".repeat(length + MAX_NOTE_BYTES).into();
        }
        for (excess, saved, levels) in [
            (300, 300, vec![(2, 700)]),
            (400, 400, vec![(2, 600)]),
            (500, 500, vec![(2, 550), (4, 550)]),
            (9000, 1600 - 2 * MIN_BYTES, vec![(2, MIN_BYTES), (4, MIN_BYTES)]),
        ] {
            let mut truncation = Truncation::default();
            assert_eq!(truncation.shorten(&messages, 1..5, excess), saved, "{excess}");
            assert_eq!(truncation.shortened, levels.into_iter().collect(), "{excess}");
        }
    }

    #[test]
    fn extend_returns_half_of_budget_in_bytes() {
        let messages = messages_from("uatata");
        let tool = ToolSpec {
            name: "look".into(),
            description: "Looks.".into(),
            parameters: serde_json::json!({}),
        };
        let budget = Budget { max_tokens: 500, overflow: Overflow::Summarize, keep: 1 };
        let mut truncation =
            Truncation { summary: Some("It was said.".into()), ..Truncation::default() };
        let all = 6 * (1 + MESSAGE_OVERHEAD) + json_length(&tool.to_openai()) + 12;
        // A prompt of 1,000 tokens must shrink to 250.
        let (omitted, bytes) = truncation.extend(&messages, &[tool], 1000, &budget).unwrap();
        assert_eq!((omitted, bytes), (1..5, all / 4));
    }

    #[test]
    fn dropped_turns_keep_other_messages_shortened() {
        let mut messages = messages_from("uatatata");
        for at in [2, 4, 6] {
            messages[at].content = "x".repeat(1000).into();
        }
        let budget = Budget { max_tokens: 1000, overflow: Overflow::TruncateMiddle, keep: 1 };
        let mut truncation = Truncation::default();
        // A prompt of 3,000 tokens must shrink to 500. Shortened to the minimum, it still has a few
        // hundred bytes too many.
        let (omitted, _) = truncation.extend(&messages, &[], 3000, &budget).unwrap();
        assert_eq!((omitted, truncation.upto), (1..3, 3));
        assert_eq!(truncation.shortened, [(4, MIN_BYTES), (6, MIN_BYTES)].into());
    }

    #[test]
    fn longest_messages_are_shortened_first() {
        let mut messages = messages_from("uatatat");
        for (at, length) in [(2, 1000), (4, 400), (6, 5000)] {
            messages[at].content = "x".repeat(length).into();
        }
        let budget = Budget { max_tokens: 1000, overflow: Overflow::TruncateMiddle, keep: 1 };
        let mut truncation = Truncation::default();
        // The newest message is the longest, and is not changed.
        assert_eq!(
            truncation
                .extend(&messages, &[], 1010, &Budget { max_tokens: 1900, ..budget })
                .unwrap()
                .0,
            1..1
        );
        assert_eq!(truncation.shortened.keys().collect::<Vec<_>>(), [&2]);
        let longer = truncation.apply(&messages);
        assert!(
            longer[2].content.len() < 1000 && longer[4] == messages[4] && longer[6] == messages[6]
        );
        // If shortening is not enough, the oldest turns are dropped.
        assert!(
            truncation
                .extend(&messages, &[], 3000, &budget)
                .is_some_and(|(omitted, _)| omitted.end == 5)
        );
        assert_eq!(truncation.extend(&messages, &[], 3000, &budget), None);
    }
}
