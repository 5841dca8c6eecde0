//! Agents that toolboxes call, as tools or to summarize long tool results.
//!
//! A helper is another agent of the run. Each request to it starts a separate conversation in the
//! same agent loop, which becomes a [`Branch`] of the attempt. The branch is recorded with the
//! attempt and trained if the recipe trains that agent. Its random numbers depend on the attempt,
//! the calling toolbox, the called agent and the text of the request, not on concurrent calls.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{CallStreams, SamplingParams};
use levade_tasks::Task;
use tokio::time::Instant;

use super::ToolContext;
use super::output::Branch;

/// Agent that toolboxes can call.
#[async_trait]
pub trait Helper: Send + Sync {
    /// Runs a conversation of the agent for `request` and returns the conversation. An error is
    /// reported in the outcome of the branch.
    async fn help(&self, request: HelpRequest) -> Branch;
}

/// Request of a toolbox to a helper, which is another agent.
#[derive(Debug, Clone, PartialEq)]
pub struct HelpRequest {
    /// Name of the request, used in logs and by the helper's own tools.
    pub id: String,
    /// Task of the attempt, with the text of the request as its question.
    pub task: Task,
    /// Seed of the run.
    pub seed: u64,
    /// Random-number stream, unique to this request.
    pub stream: u64,
    /// Sampling parameters of the attempt that makes the request.
    pub params: SamplingParams,
    /// Maximum duration of the conversation.
    pub deadline: Duration,
}

/// Slot for an agent that toolboxes call by name. The slot is empty until the agents of the run
/// exist, because agents need their toolboxes first. Clones share the slot.
#[derive(Clone)]
pub struct HelperSlot {
    agent: String,
    helper: Arc<RwLock<Option<Arc<dyn Helper>>>>,
}

impl fmt::Debug for HelperSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HelperSlot").field("agent", &self.agent).finish_non_exhaustive()
    }
}

impl HelperSlot {
    /// Creates an empty slot for the agent with the name `agent`.
    pub fn new(agent: impl Into<String>) -> Self {
        HelperSlot { agent: agent.into(), helper: Arc::default() }
    }

    /// Returns the name of the agent that the slot is for.
    pub fn agent(&self) -> &str {
        &self.agent
    }

    /// Fills the slot with the agent `helper`.
    pub fn set(&self, helper: Arc<dyn Helper>) {
        *self.helper.write().unwrap_or_else(PoisonError::into_inner) = Some(helper);
    }

    fn get(&self) -> Option<Arc<dyn Helper>> {
        self.helper.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Caller of a helper on behalf of one toolbox of an attempt.
pub(super) struct HelperCaller {
    slot: HelperSlot,
    /// Name of the calling toolbox.
    toolbox: String,
    context: ToolContext,
    opened: Instant,
    streams: Mutex<CallStreams>,
}

/// Time before the end of the attempt at which its helpers must finish, so that their conversations
/// are recorded with the attempt.
const END_GRACE: Duration = Duration::from_secs(1);

impl HelperCaller {
    pub fn new(slot: HelperSlot, toolbox: &str, context: &ToolContext) -> Self {
        let streams = Mutex::new(CallStreams::new(context.stream));
        let toolbox = toolbox.to_owned();
        let mut context = context.clone();
        // The tools that the task selects belong to its own agent, not to the helper.
        context.task = context.task.selecting_no_tools();
        HelperCaller { slot, toolbox, context, opened: Instant::now(), streams }
    }

    /// Sends `question` to the helper and waits for the helper's conversation, for at most
    /// `timeout` and until shortly before the attempt's deadline.
    ///
    /// # Errors
    /// Returns an error if the slot is empty.
    pub async fn request_help(
        &self,
        question: String,
        timeout: Option<Duration>,
    ) -> Result<Branch, String> {
        let Some(helper) = self.slot.get() else {
            return Err(format!("the agent {} is not running in this process", self.slot.agent));
        };
        // Requests of two toolboxes, and repeated requests of one toolbox, get different random
        // streams even if their texts are equal.
        let bytes: Vec<u32> = question.bytes().map(u32::from).collect();
        let requested = format!("{}/{}", self.toolbox, self.slot.agent);
        let stream = self
            .streams
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .next_stream(&requested, &bytes);
        let ToolContext { attempt, task, seed, params, deadline, .. } = &self.context;
        let remaining = deadline.saturating_sub(self.opened.elapsed());
        let remaining = remaining.saturating_sub(END_GRACE.min(remaining / 10));
        let request = HelpRequest {
            id: format!("{attempt}/{requested}"),
            // Earlier attempts are those of the calling agent, not answers to this question.
            task: Task {
                question,
                messages: Vec::new(),
                agent: None,
                experience: None,
                ..task.clone()
            },
            seed: *seed,
            stream,
            params: params.clone(),
            deadline: timeout.map_or(remaining, |timeout| remaining.min(timeout)),
        };
        Ok(helper.help(request).await)
    }
}

#[cfg(test)]
mod tests {
    use levade_tree::{Outcome, Trajectory};

    use crate::testing::context;

    use super::*;

    /// Helper that keeps the tasks of its requests.
    #[derive(Default)]
    struct TaskLog(Mutex<Vec<Task>>);

    #[async_trait]
    impl Helper for TaskLog {
        async fn help(&self, request: HelpRequest) -> Branch {
            self.0.lock().unwrap().push(request.task);
            let agent = "clerk".to_owned();
            Branch { agent, trajectory: Trajectory::new(), outcome: Outcome::initial() }
        }
    }

    #[tokio::test]
    async fn help_request_omits_experience_of_calling_agent() {
        let mut context = context("a");
        context.task.experience = Some("Attempt 1: 7".to_owned());
        let slot = HelperSlot::new("clerk");
        let log = Arc::new(TaskLog::default());
        slot.set(log.clone());
        let caller = HelperCaller::new(slot, "ask", &context);
        caller.request_help("3 + 5?".to_owned(), None).await.unwrap();
        let tasks = log.0.lock().unwrap();
        assert_eq!((tasks[0].id.as_str(), tasks[0].question.as_str()), ("a", "3 + 5?"));
        assert_eq!(tasks[0].experience, None);
    }
}
