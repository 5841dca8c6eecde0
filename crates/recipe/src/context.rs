//! Keys of context policies: how an agent's prompts are kept within its context.

use levade_agent::{ContextPolicy, SummaryOptions};
use levade_conversation::{Budget, Overflow};
use serde::{Deserialize, Serialize};

/// `context`: what happens to a prompt that is longer than `max_context_tokens`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextKeys {
    /// The call fails, and the built-in loop ends there.
    #[default]
    Fail,
    /// Long answers of tools and words of users in the middle are shortened.
    TruncateMiddle(KeepKeys),
    /// The oldest turns are dropped.
    DropOldest(KeepKeys),
    /// The oldest turns are dropped, and a summary takes their place.
    Summarise(SummariseKeys),
}

/// Keys of policies that drop or shorten.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KeepKeys {
    /// Newest turns that stay as they are; a turn is a reply with all up to the next.
    pub keep: usize,
}

/// Keys of the policy that summarises.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SummariseKeys {
    /// Newest turns that stay as they are.
    pub keep: usize,
    /// The agent that writes summaries, by name; the agent itself where not given.
    pub agent: String,
    /// Whether summaries that the agent writes itself are trained.
    pub train: bool,
    /// Most tokens of a summary.
    pub tokens: usize,
    /// Words before the text to be summarised.
    pub instruction: String,
}

impl Default for KeepKeys {
    fn default() -> Self {
        KeepKeys { keep: KEEP }
    }
}

impl Default for SummariseKeys {
    fn default() -> Self {
        SummariseKeys {
            keep: KEEP,
            agent: String::new(),
            train: false,
            tokens: 256,
            instruction:
                "Summarise this part of a conversation between an assistant, its user and its tools. Keep \
                          every fact, number and decision that may still be needed, and leave out the rest."
                    .into(),
        }
    }
}

/// Turns that stay where the recipe does not say how many.
const KEEP: usize = 2;

impl ContextKeys {
    /// Newest turns that stay.
    pub fn keep(&self) -> usize {
        match self {
            ContextKeys::Fail => 1,
            ContextKeys::TruncateMiddle(keys) | ContextKeys::DropOldest(keys) => keys.keep,
            ContextKeys::Summarise(keys) => keys.keep,
        }
    }

    /// The policy, for prompts of at most `most` tokens, or of as many as leave room for a reply of
    /// `max_tokens` in a context of `context`, at least three quarters of it.
    pub fn policy(&self, most: usize, max_tokens: usize, context: usize) -> ContextPolicy {
        let (overflow, summary) = match self {
            ContextKeys::Fail => (Overflow::Fail, None),
            ContextKeys::TruncateMiddle(_) => (Overflow::TruncateMiddle, None),
            ContextKeys::DropOldest(_) => (Overflow::DropOldest, None),
            ContextKeys::Summarise(keys) => (Overflow::Summarise, Some(keys)),
        };
        let most = match (most, overflow) {
            // The model itself refuses what is too long.
            (0, Overflow::Fail) => usize::MAX,
            (0, _) => context.saturating_sub(max_tokens.min(context / 4)).max(1),
            (most, Overflow::Fail) => most,
            // A prompt without room for a reply is none.
            (most, _) => most.min(context.saturating_sub(1)),
        };
        let summary = summary.map_or(ContextPolicy::NONE.summary, |keys| SummaryOptions {
            agent: keys.agent.clone(),
            train: keys.train,
            tokens: keys.tokens,
            instruction: keys.instruction.clone(),
        });
        ContextPolicy { budget: Budget { most, overflow, keep: self.keep() }, summary }
    }

    /// Whether an agent summarises for itself, and those summaries are trained.
    pub(super) fn trains_summaries(&self) -> bool {
        matches!(self, ContextKeys::Summarise(keys) if keys.train)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_leave_room_for_a_reply() {
        let most = |keys: &ContextKeys, most| keys.policy(most, 300, 1000).budget.most;
        assert_eq!(most(&ContextKeys::Fail, 0), usize::MAX);
        assert_eq!(most(&ContextKeys::Fail, 5000), 5000);
        let drop = ContextKeys::DropOldest(KeepKeys::default());
        assert_eq!(most(&drop, 0), 750);
        assert_eq!(most(&drop, 400), 400);
        assert_eq!(most(&drop, 5000), 999);
        assert_eq!(
            drop.policy(0, 100, 1000).budget,
            Budget { most: 900, overflow: Overflow::DropOldest, keep: 2 }
        );
    }
}
