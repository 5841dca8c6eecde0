//! Context policies of agents: the maximum length of prompts, and the agent that summarizes removed
//! turns.

use levade_conversation::{Budget, Overflow};

/// Context policy: keeps the prompts of an agent within the model's context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextPolicy {
    /// Maximum number of prompt tokens, and what happens to longer prompts.
    pub budget: Budget,
    /// Options of summaries, which [`Overflow::Summarize`] requires.
    pub summary: SummaryOptions,
}

/// Options for the summaries of removed turns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SummaryOptions {
    /// Name of the agent that writes the summaries. If empty, the summarized agent writes them
    /// itself, under the name `NAME.summary`.
    pub agent: String,
    /// Whether summaries that an agent writes of its own turns are training targets.
    pub train: bool,
    /// Maximum number of tokens of a summary.
    pub tokens: usize,
    /// Text that precedes the text to be summarized.
    pub instruction: String,
}

impl ContextPolicy {
    /// Context policy that does nothing. The model then rejects prompts that are longer than its
    /// context.
    pub const UNLIMITED: ContextPolicy = ContextPolicy {
        budget: Budget::NONE,
        summary: SummaryOptions {
            agent: String::new(),
            train: false,
            tokens: 0,
            instruction: String::new(),
        },
    };

    /// Returns whether the context policy requests summaries of removed turns.
    pub fn is_summarizing(&self) -> bool {
        self.budget.overflow == Overflow::Summarize
    }

    /// Returns the name of the agent that writes the summaries of `agent`'s removed turns.
    pub fn summarizer_name(&self, agent: &str) -> String {
        match self.summary.agent.as_str() {
            "" => own_summarizer_name(agent),
            named => named.to_owned(),
        }
    }
}

/// Returns the name under which an agent writes its own summaries: `AGENT.summary`.
pub fn own_summarizer_name(agent: &str) -> String {
    format!("{agent}.summary")
}
