//! Keys of context policies, which keep an agent's prompts within its context.

use levade_agent::{ContextPolicy, SummaryOptions};
use levade_conversation::{Budget, Overflow};
use serde::{Deserialize, Serialize};

/// `context`: what happens when a prompt exceeds `max_context_tokens`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextKeys {
    /// The model call fails, and the built-in loop ends the attempt.
    #[default]
    Fail,
    /// Long tool results and user messages in the middle of the conversation are truncated.
    TruncateMiddle(KeepKeys),
    /// The oldest turns are dropped.
    DropOldest(KeepKeys),
    /// The oldest turns are replaced by a summary.
    #[serde(alias = "summarise")]
    Summarize(SummarizeKeys),
}

/// Keys of context policies that drop turns or truncate texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KeepKeys {
    /// Number of newest turns that stay unchanged, at least 1 (default 2). A turn is a completion
    /// with everything before the next completion.
    pub keep: usize,
}

/// Keys of the context policy that summarizes the oldest turns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SummarizeKeys {
    /// Number of newest turns that stay unchanged, at least 1 (default 2).
    pub keep: usize,
    /// Name of the agent that writes the summaries. If empty, the agent writes its own summaries.
    pub agent: String,
    /// Whether the agent's own summaries are trained.
    pub train: bool,
    /// Maximum number of tokens in a summary, at least 1.
    pub tokens: usize,
    /// Instruction to the agent that writes a summary. It precedes the text to summarize.
    pub instruction: String,
}

impl Default for KeepKeys {
    fn default() -> Self {
        KeepKeys { keep: DEFAULT_KEEP }
    }
}

impl Default for SummarizeKeys {
    fn default() -> Self {
        SummarizeKeys {
            keep: DEFAULT_KEEP,
            agent: String::new(),
            train: false,
            tokens: 256,
            instruction:
                "Summarise this part of a conversation between an assistant, its user and its \
                 tools. Keep every fact, number and decision that may still be needed, and leave \
                 out the rest."
                    .into(),
        }
    }
}

/// Default number of newest turns that stay unchanged.
const DEFAULT_KEEP: usize = 2;

impl ContextKeys {
    /// Returns the number of newest turns that stay unchanged.
    pub fn keep(&self) -> usize {
        match self {
            ContextKeys::Fail => 1,
            ContextKeys::TruncateMiddle(keys) | ContextKeys::DropOldest(keys) => keys.keep,
            ContextKeys::Summarize(keys) => keys.keep,
        }
    }

    /// Returns the context policy for prompts of at most `max_prompt_tokens` tokens. If
    /// `max_prompt_tokens` is 0, a prompt leaves room for a completion of `max_tokens` in a context
    /// of `context` tokens, but can always use three quarters of the context.
    pub fn policy(
        &self,
        max_prompt_tokens: usize,
        max_tokens: usize,
        context: usize,
    ) -> ContextPolicy {
        let (overflow, summary) = match self {
            ContextKeys::Fail => (Overflow::Fail, None),
            ContextKeys::TruncateMiddle(_) => (Overflow::TruncateMiddle, None),
            ContextKeys::DropOldest(_) => (Overflow::DropOldest, None),
            ContextKeys::Summarize(keys) => (Overflow::Summarize, Some(keys)),
        };
        let max_prompt_tokens = match (max_prompt_tokens, overflow) {
            // The model itself rejects a prompt that is too long.
            (0, Overflow::Fail) => usize::MAX,
            (0, _) => context.saturating_sub(max_tokens.min(context / 4)).max(1),
            (max_prompt_tokens, Overflow::Fail) => max_prompt_tokens,
            // A prompt must leave room for at least one token.
            (max_prompt_tokens, _) => max_prompt_tokens.min(context.saturating_sub(1)),
        };
        let summary = summary.map_or(ContextPolicy::UNLIMITED.summary, |keys| SummaryOptions {
            agent: keys.agent.clone(),
            train: keys.train,
            tokens: keys.tokens,
            instruction: keys.instruction.clone(),
        });
        ContextPolicy {
            budget: Budget { max_tokens: max_prompt_tokens, overflow, keep: self.keep() },
            summary,
        }
    }

    /// Returns whether the agent writes its own summaries and is trained on them.
    pub(super) fn trains_summaries(&self) -> bool {
        matches!(self, ContextKeys::Summarize(keys) if keys.train)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_leaves_room_for_completion() {
        let max_prompt_tokens = |keys: &ContextKeys, max_prompt_tokens| {
            keys.policy(max_prompt_tokens, 300, 1000).budget.max_tokens
        };
        assert_eq!(max_prompt_tokens(&ContextKeys::Fail, 0), usize::MAX);
        assert_eq!(max_prompt_tokens(&ContextKeys::Fail, 5000), 5000);
        let drop = ContextKeys::DropOldest(KeepKeys::default());
        assert_eq!(max_prompt_tokens(&drop, 0), 750);
        assert_eq!(max_prompt_tokens(&drop, 400), 400);
        assert_eq!(max_prompt_tokens(&drop, 5000), 999);
        assert_eq!(
            drop.policy(0, 100, 1000).budget,
            Budget { max_tokens: 900, overflow: Overflow::DropOldest, keep: 2 }
        );
    }
}
