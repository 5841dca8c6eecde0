//! Context policies of agents: the maximum length of prompts, and the agent that summarizes removed
//! turns.

use levade_conversation::{Budget, Overflow};

/// Policy that keeps an agent within its context.
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
    /// Name of the agent that writes the summaries. If empty, the agent itself writes them, as
    /// `NAME.summary`.
    pub agent: String,
    /// Whether summaries that the agent itself writes are trained.
    pub train: bool,
    /// Maximum number of tokens of a summary.
    pub tokens: usize,
    /// Text that precedes the text to be summarized.
    pub instruction: String,
}

impl ContextPolicy {
    /// No policy: the model rejects prompts that are longer than its context.
    pub const UNLIMITED: ContextPolicy = ContextPolicy {
        budget: Budget::NONE,
        summary: SummaryOptions {
            agent: String::new(),
            train: false,
            tokens: 0,
            instruction: String::new(),
        },
    };

    /// Returns whether the policy requests summaries.
    pub fn is_summarizing(&self) -> bool {
        self.budget.overflow == Overflow::Summarize
    }

    /// Returns the name of the agent that writes the summaries for `agent`.
    pub fn summarizer_name(&self, agent: &str) -> String {
        match self.summary.agent.as_str() {
            "" => summary_agent(agent),
            named => named.to_owned(),
        }
    }
}

/// Returns the name under which an agent writes its own summaries: `AGENT.summary`.
pub fn summary_agent(agent: &str) -> String {
    format!("{agent}.summary")
}
