//! Takes a recorded session as an attempt of a run.

use std::sync::Arc;

use async_trait::async_trait;
use levade_store::{Status, Store};
use levade_tree::AttemptId;

use crate::sessions::SOURCE;
use crate::{AgentLoop, Attempt, AttemptContext};

/// Agent loop that samples nothing: its attempt is a copy of a recorded session. The copied tokens
/// are attributed to the attempt's own agent and to the policy that plays this agent.
pub struct TakenSession {
    /// Store that contains the recorded session.
    pub store: Arc<dyn Store>,
    /// Id of the session's attempt.
    pub id: AttemptId,
}

#[async_trait]
impl AgentLoop for TakenSession {
    async fn run(&self, context: AttemptContext) -> Attempt {
        match self.copy_session(&context).await {
            Ok(attempt) => attempt,
            Err(why) => Attempt::failed(SOURCE, why),
        }
    }
}

impl TakenSession {
    async fn copy_session(&self, context: &AttemptContext) -> Result<Attempt, String> {
        let TakenSession { store, id } = self;
        let recorded = store.attempt(id).await.map_err(|error| error.to_string())?;
        let recorded = recorded.filter(|session| session.status == Status::Completed);
        let recorded = recorded.ok_or_else(|| {
            format!("{} has no completed session {id}; it was withdrawn", store.location())
        })?;
        let agent = context.find_own_agent()?;
        let policy = &context.select_player(agent)?.policy;
        let trajectory = recorded.trajectory.with_names(&agent.name, policy);
        Ok(Attempt::new(trajectory, recorded.outcome))
    }
}
