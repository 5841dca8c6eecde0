//! Runs the program of an attempt: in a separate process, or as a request to a worker.
//!
//! A worker reads one line of JSON for each attempt, with all data that a program finds in its
//! environment. When the attempt is done, it prints one line:
//! `{"attempt": NAME, "answer": …, "reward": …}`, or with `"error"`. Other lines are ignored.

use std::time::Duration;

use levade_process::{Launch, Pool, PoolOptions, ProgramRun, Request, RunOutput, Supervisor, Tail};
use serde_json::{Value, json};

use super::environment::{NO_PROXY_VARIABLES, task_to_json};
use super::{Program, SessionEndpoint};
use crate::AttemptContext;
use crate::roster::Player;

/// Placeholder of the task's question in the arguments of a program.
const QUESTION: &str = "{question}";

/// Maximum time in which a worker must end a cancelled attempt. A worker that exceeds this time is
/// stopped.
const CANCEL_GRACE: Duration = Duration::from_secs(5);

/// Creates a pool of at most `count` worker processes of a program, each with at most `attempts`
/// concurrent attempts. Workers are started on demand. The line `first` is sent to each worker
/// before its attempts.
pub fn create_worker_pool(
    supervisor: &Supervisor,
    mut launch: Launch,
    first: Option<Value>,
    (count, attempts): (usize, usize),
) -> Pool {
    launch.variables.extend(NO_PROXY_VARIABLES.map(|(name, value)| (name.into(), value.into())));
    Pool::new(PoolOptions {
        name: launch.command.first().cloned().unwrap_or_default(),
        supervisor: supervisor.clone(),
        launch,
        first,
        handshake: None,
        id_key: "attempt",
        max_workers: count,
        max_requests: attempts,
        cancel_grace: CANCEL_GRACE,
    })
}

impl Program {
    /// Runs the program of an attempt until the program ends, `stop` completes or the timeout
    /// expires. The output of a program that was stopped has no exit code. The clock of `player`
    /// measures the timeout.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started, or if its worker ends.
    pub(crate) async fn execute_program(
        &self,
        context: &AttemptContext,
        endpoint: &SessionEndpoint,
        player: &Player,
        stop: impl Future<Output = ()>,
    ) -> Result<RunOutput, String> {
        let task = task_to_json(context);
        let timeout = context.limits.attempt_timeout;
        let variables = self.environment_variables(endpoint, context);
        let Some(workers) = &self.workers else {
            let mut run = self.start_process(variables, &task)?;
            let output = tokio::select! {
                output = player.wait_within(timeout, run.wait()) => output,
                () = stop => None,
            };
            return match output {
                Some(output) => output,
                None => Ok(run.stop().await),
            };
        };
        let request = Request::with_id(
            &context.name,
            create_worker_request(&variables, context, endpoint, &task),
        );
        let mut call = workers.send(request).await.map_err(|error| error.to_string())?;
        let response = tokio::select! {
            answer = player.wait_within(timeout, call.response()) => answer,
            () = stop => None,
        };
        match response {
            Some(response) => response.map(to_output).map_err(|error| error.to_string()),
            None => {
                call.cancel().await;
                Ok(RunOutput { code: None, stdout: Tail::default(), stderr: Tail::default() })
            }
        }
    }

    fn start_process(
        &self,
        variables: Vec<(String, String)>,
        task: &Value,
    ) -> Result<ProgramRun, String> {
        let question = task["question"].as_str().unwrap_or_default();
        let command = self.command.iter().map(|argument| argument.replace(QUESTION, question));
        let launch = Launch { dir: self.dir.clone(), variables, ..Launch::new(command) };
        ProgramRun::start(&self.supervisor, &launch, format!("{task}\n"), Tail::default())
    }
}

/// Creates the request that sends an attempt to a worker. A worker makes many attempts, so the
/// request contains the `variables` that the process of a single attempt has in its environment,
/// and the limits and agents of the attempt.
fn create_worker_request(
    variables: &[(String, String)],
    context: &AttemptContext,
    endpoint: &SessionEndpoint,
    task: &Value,
) -> Value {
    let variable = |name: &str| {
        variables.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    };
    json!({
        "attempt": context.name,
        "base_url": variable("OPENAI_BASE_URL"),
        "anthropic_base_url": variable("ANTHROPIC_BASE_URL"),
        "api_key": variable("LEVADE_API_KEY"),
        "model": variable("LEVADE_MODEL"),
        "reward_url": variable("LEVADE_REWARD_URL"),
        "reward_key": variable("LEVADE_REWARD_KEY"),
        "max_turns": context.limits.max_turns,
        "agents": endpoint.agents,
        "task": task,
    })
}

/// Converts the response of a worker into the output of a program.
fn to_output(response: Value) -> RunOutput {
    match response["error"].as_str() {
        Some(error) => RunOutput { code: Some(1), stdout: Tail::default(), stderr: error.into() },
        None => RunOutput {
            code: Some(0),
            stdout: (&*response.to_string()).into(),
            stderr: Tail::default(),
        },
    }
}
