//! Helpers: agents of the tool loop that toolboxes of other agents call.

use std::sync::{Arc, Weak};

use async_trait::async_trait;
use levade_tasks::Task;
use levade_text::Message;
use levade_tools::{Branch, HelpRequest, Helper};
use levade_tree::{Outcome, Trajectory};

use crate::roster::{AttemptLimits, Roster};
use crate::{AgentLoop, AttemptContext, BuiltInLoop};

/// Function that returns the initial messages of a conversation about a task.
pub type PromptBuilder = Arc<dyn Fn(&Task) -> Vec<Message> + Send + Sync>;

/// Helper: an agent that the toolboxes of other agents call.
#[derive(Clone)]
pub struct HelperAgent {
    /// Name of the called agent.
    pub agent: String,
    /// Agents of the run. The reference is weak, because the tools of these agents own this helper.
    pub roster: Weak<Roster>,
    /// Function that returns the initial messages of the helper's conversation about a task.
    pub build_prompt: PromptBuilder,
}

#[async_trait]
impl Helper for HelperAgent {
    async fn help(&self, request: HelpRequest) -> Branch {
        let HelpRequest { id, task, seed, stream, params, deadline } = request;
        let roster = self.roster.upgrade().unwrap_or_default();
        let Some(agent) = roster.find(&self.agent) else {
            let why = format!("the agent {} is not running in this process", self.agent);
            let outcome = Outcome { error: Some(why), ..Outcome::initial() };
            return Branch { agent: self.agent.clone(), trajectory: Trajectory::new(), outcome };
        };
        let made = BuiltInLoop.run(AttemptContext {
            name: id,
            messages: (self.build_prompt)(&task),
            task,
            seed,
            stream,
            group_stream: stream,
            is_evaluation: false,
            // Parameters of the calling agent, which this agent's sampling rules modify.
            params,
            has_own_sampling: true,
            agent: self.agent.clone(),
            limits: AttemptLimits {
                attempt_timeout: agent.limits.attempt_timeout.min(deadline),
                ..agent.limits
            },
            roster: Arc::clone(&roster),
            teacher: None,
        });
        let made = made.await;
        Branch { agent: self.agent.clone(), trajectory: made.trajectory, outcome: made.outcome }
    }
}
