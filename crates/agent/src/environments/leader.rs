//! Attempts that an environment leads.

use std::sync::Arc;

use async_trait::async_trait;

use super::Environments;
use crate::{Agent, AgentLoop, Attempt, AttemptContext, Program};

/// Agent loop of attempts that the environment of the task leads. The environment calls the model
/// through the attempt's endpoint, and reports the reward at the end.
#[derive(Clone)]
pub struct LedLoop {
    /// Program that opens the endpoint. Its command is not used.
    pub program: Program,
    /// Environments of the run.
    pub environments: Environments,
}

#[async_trait]
impl AgentLoop for LedLoop {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let source = &context.task.source;
        let Some(environment) =
            self.environments.find(source).filter(|found| found.options.leads_attempts())
        else {
            let id = &context.task.id;
            let why =
                format!("no environment runs attempts at the task {id} of the source {source:?}");
            return Attempt::failed("environment", why);
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
