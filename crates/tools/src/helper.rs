//! Agents that toolboxes call, as tools or to summarize long tool results.
//!
//! A helper is another agent of the run. Each request to it is a conversation of its own, made by the same
//! loop, which becomes a [`Branch`] of the attempt: it is recorded with the attempt, and trained or not as
//! the recipe says of that agent. Its random numbers depend on the attempt, the agent that asks and the text
//! of the request, not on concurrent calls.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{CallStreams, SamplingParams};
use levade_tasks::Task;
use tokio::time::Instant;

use super::ToolContext;
use super::output::Branch;

/// Agent that can be asked.
#[async_trait]
pub trait Helper: Send + Sync {
    /// Has it answer. What breaks is in the outcome of the branch.
    async fn help(&self, request: HelpRequest) -> Branch;
}

/// A request to a helper.
#[derive(Debug, Clone, PartialEq)]
pub struct HelpRequest {
    /// A name for logs and for the helper's own tools.
    pub id: String,
    /// The task of the attempt, with what is asked as its question.
    pub task: Task,
    /// Seed of the run.
    pub seed: u64,
    /// Stream of random numbers, of this request alone.
    pub stream: u64,
    /// How replies of the one who asks are sampled.
    pub params: SamplingParams,
    /// Longest time that it may take.
    pub deadline: Duration,
}

/// The place of an agent that toolboxes ask by name. It is empty until the agents of a run are there: they
/// have toolboxes, too. Clones share it.
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
    /// An empty one, for the agent of this name.
    pub fn new(agent: impl Into<String>) -> Self {
        HelperSlot { agent: agent.into(), helper: Arc::default() }
    }

    /// Name of the agent.
    pub fn agent(&self) -> &str {
        &self.agent
    }

    /// Puts the agent in.
    pub fn set(&self, helper: Arc<dyn Helper>) {
        *self.helper.write().unwrap_or_else(PoisonError::into_inner) = Some(helper);
    }

    fn get(&self) -> Option<Arc<dyn Helper>> {
        self.helper.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A helper in use by one toolbox of an attempt.
pub(super) struct Asking {
    slot: HelperSlot,
    /// Name of the toolbox that asks.
    toolbox: String,
    context: ToolContext,
    opened: Instant,
    streams: Mutex<CallStreams>,
}

/// Time before the end of an attempt at which its helpers end, so that they are in its record.
const BEFORE_THE_END: Duration = Duration::from_secs(1);

impl Asking {
    pub fn new(slot: HelperSlot, toolbox: &str, context: &ToolContext) -> Self {
        let streams = Mutex::new(CallStreams::new(context.stream));
        let (toolbox, mut context) = (toolbox.to_owned(), context.clone());
        // Tools that the task selects are those of its own agent.
        context.task = context.task.selecting_no_tools();
        Asking { slot, toolbox, context, opened: Instant::now(), streams }
    }

    /// Asks, for at most so long.
    ///
    /// # Errors
    /// When the agent is not there, in words.
    pub async fn ask(&self, question: String, longest: Option<Duration>) -> Result<Branch, String> {
        let Some(helper) = self.slot.get() else {
            return Err(format!("the agent {} is not running here", self.slot.agent));
        };
        // Two toolboxes that ask the same share no draws, nor do equal questions of one.
        let bytes: Vec<u32> = question.bytes().map(u32::from).collect();
        let asked = format!("{}/{}", self.toolbox, self.slot.agent);
        let stream = self.streams.lock().unwrap_or_else(PoisonError::into_inner).admit(&asked, &bytes);
        let ToolContext { attempt, task, seed, params, deadline, .. } = &self.context;
        let left = deadline.saturating_sub(self.opened.elapsed());
        let left = left.saturating_sub(BEFORE_THE_END.min(left / 10));
        let request = HelpRequest {
            id: format!("{attempt}/{asked}"),
            task: Task { question, messages: Vec::new(), agent: None, ..task.clone() },
            seed: *seed,
            stream,
            params: params.clone(),
            deadline: longest.map_or(left, |longest| left.min(longest)),
        };
        Ok(helper.help(request).await)
    }
}
