//! Context policies of agents: how long their prompts may be, and who sums up what no longer fits.

use levade_conversation::{Budget, Overflow};

/// How an agent is kept within its context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextPolicy {
    /// Most tokens of a prompt, and what happens to longer ones.
    pub budget: Budget,
    /// Way to ask for summaries, with [`Overflow::Summarise`].
    pub summary: SummaryOptions,
}

/// Way to ask for a summary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SummaryOptions {
    /// The agent that is asked, by name; the agent itself, as `NAME.summary`, where it is empty.
    pub agent: String,
    /// Whether summaries that the agent writes itself are trained.
    pub train: bool,
    /// Most tokens of a summary.
    pub tokens: usize,
    /// Words before the text to be summarised.
    pub instruction: String,
}

impl ContextPolicy {
    /// No policy: the model refuses what is longer than its context.
    pub const NONE: ContextPolicy = ContextPolicy {
        budget: Budget::NONE,
        summary: SummaryOptions { agent: String::new(), train: false, tokens: 0, instruction: String::new() },
    };

    /// Whether summaries are asked for.
    pub fn summarises(&self) -> bool {
        self.budget.overflow == Overflow::Summarise
    }

    /// The name of the agent that writes the summaries for `agent`.
    pub fn summariser(&self, agent: &str) -> String {
        match self.summary.agent.as_str() {
            "" => summary_agent(agent),
            named => named.to_owned(),
        }
    }
}

/// The name under which an agent summarises for itself.
pub fn summary_agent(agent: &str) -> String {
    format!("{agent}.summary")
}
