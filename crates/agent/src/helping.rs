//! Agents of the built-in kind as helpers of others.

use std::sync::Arc;

use async_trait::async_trait;
use levade_policy::SamplingParams;
use levade_text::Message;
use levade_tree::{Outcome, Trajectory};

use crate::{Agent, AttemptRequest, Limits, Pick};
use levade_tasks::Task;
use levade_tools::{Branch, HelpRequest, Helper};

/// Opens a conversation about a task.
pub type Opens = Arc<dyn Fn(&Task) -> Vec<Message> + Send + Sync>;

/// Changes how replies are sampled.
pub type Samples = Arc<dyn Fn(SamplingParams) -> SamplingParams + Send + Sync>;

/// An agent that toolboxes of others ask.
#[derive(Clone)]
pub struct HelperAgent {
    /// The policies that play it: the first one, where `pick` does not say which.
    pub agents: Vec<Agent>,
    /// The place of the policy that plays it, by seed and stream of the request.
    pub pick: Option<Pick>,
    /// Messages that open a conversation about a task.
    pub opens: Opens,
    /// How it is sampled, where the one who asks is sampled so.
    pub samples: Samples,
}

#[async_trait]
impl Helper for HelperAgent {
    async fn help(&self, request: HelpRequest) -> Branch {
        let HelpRequest { id, task, seed, stream, params, deadline } = request;
        let place = self.pick.as_ref().map_or(0, |pick| pick(seed, stream));
        let Some(agent) = self.agents.get(place) else {
            let outcome = Outcome { error: Some("none of its policies is here".into()), ..Outcome::begun() };
            return Branch { agent: String::new(), trajectory: Trajectory::new(), outcome };
        };
        let limits = Limits { attempt: agent.limits.attempt.min(deadline), ..agent.limits };
        let agent = Agent { limits, ..agent.clone() };
        let (messages, params) = ((self.opens)(&task), (self.samples)(params));
        let made = agent.run(AttemptRequest { id, task, messages, seed, stream, params }).await;
        Branch { agent: agent.name, trajectory: made.trajectory, outcome: made.outcome }
    }
}
