//! Attempts that an environment leads.

use std::sync::Arc;

use async_trait::async_trait;
use levade_tasks::Task;

use super::Environments;
use crate::{Agent, AgentLoop, Attempt, AttemptContext, Program};

/// Agent loop of attempts that the task's environment leads. The environment calls the model
/// through the attempt's endpoint, and reports the reward at the end.
#[derive(Clone)]
pub struct EnvironmentLoop {
    /// Program whose options open the endpoint of an attempt. The command of the program is not
    /// used.
    pub program: Program,
    /// Environments of the run, one of which leads each attempt.
    pub environments: Environments,
}

impl EnvironmentLoop {
    /// Returns the environment of a task as the program that makes an attempt.
    ///
    /// # Errors
    /// Returns a message if the task's source is not an environment that leads attempts.
    pub(crate) fn create_program(&self, task: &Task) -> Result<Program, String> {
        let Task { id, source, .. } = task;
        let found = self.environments.find(source).filter(|found| found.options.leads_attempts());
        let environment = found.ok_or_else(|| {
            format!("no environment runs attempts at the task {id} of the source {source:?}")
        })?;
        Ok(Program {
            command: vec![environment.name().to_owned()],
            workers: Some(Arc::clone(&environment.workers)),
            ..self.program.clone()
        })
    }
}

#[async_trait]
impl AgentLoop for EnvironmentLoop {
    async fn run(&self, context: AttemptContext) -> Attempt {
        match self.create_program(&context.task) {
            Ok(program) => program.run(context).await,
            Err(why) => Attempt::failed("environment", why),
        }
    }

    fn can_be_taught(&self, agent: &Agent) -> bool {
        self.program.can_be_taught(agent)
    }
}
