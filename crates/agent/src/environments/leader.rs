//! Attempts that an environment leads.

use std::sync::Arc;

use async_trait::async_trait;

use super::Environments;
use crate::{Agent, AgentLoop, Attempt, AttemptContext, Program};

/// Has the environment of a task lead the attempt: it asks the model through the attempt's endpoint, and says
/// at the end what the attempt is worth.
#[derive(Clone)]
pub struct Leader {
    /// The endpoint. The command is not used.
    pub program: Program,
    /// The environments of the run.
    pub environments: Environments,
}

#[async_trait]
impl AgentLoop for Leader {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let source = &context.task.source;
        let Some(environment) = self.environments.find(source).filter(|found| found.options.leads()) else {
            let id = &context.task.id;
            let why = format!("no environment leads attempts at the task {id}, which is of {source:?}");
            return Attempt::broken("environment", why);
        };
        let program = Program {
            command: vec![environment.name().to_owned()],
            workers: Some(Arc::clone(&environment.workers)),
            ..self.program.clone()
        };
        program.run(context).await
    }

    fn can_be_taught(&self, agent: &Agent) -> bool {
        self.program.can_be_taught(agent)
    }
}
