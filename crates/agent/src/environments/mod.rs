//! Runs third-party environments: reasoning-gym, verifiers, gymnasium, OpenEnv.
//!
//! An environment is a source of tasks that also scores attempts. There are two kinds:
//! - Some environments control their attempts ([`EnvironmentLoop`]). They call the model through
//!   the attempt's endpoint, like programs, so that every token is recorded. The last line of the
//!   attempt contains the rewards, each with the turn or the agent that earned it.
//! - For other environments (reasoning-gym), any agent makes the attempts, and the environment
//!   scores the final answers ([`EnvironmentScorer`]).
//!
//! Each environment runs in the user's Python (3.10 or later, with the environment's own packages),
//! in worker processes of [`levade_process`], from the Python modules in the directory `worker`.
//! One process runs many attempts concurrently.
//!
//! # Guarantees
//! - **Any process scores any answer.** A task is identified by the values that reproduce it (data
//!   set, seed, index), never by the memory of a process.
//! - **Processes** have the user's rights, receive only named environment variables, and end with
//!   their supervisor.
//! - **Loading, listing, scoring and attempts have timeouts.** A process that does not cancel a
//!   late request is stopped, and its other requests fail.
//! - **A reward that is not a finite number** fails its attempt.

mod leader;
mod options;
mod scorer;
mod task_list;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use levade_process::{
    Launch, Pool, Request, Supervisor, WorkerError, python_command, python_first_line,
};
use serde_json::{Value, json};

use crate::program::create_worker_pool;

pub use leader::EnvironmentLoop;
pub use options::{
    CommonOptions, DatasetOptions, EnvironmentOptions, GymnasiumOptions, OpenEnvOptions,
    ReasoningGymOptions, VerifiersOptions, WorkerOptions,
};
pub use scorer::EnvironmentScorer;
pub use task_list::TaskList;

/// Placeholder of the data set's answer in the template of demonstrations.
const ANSWER: &str = "{answer}";

/// Name and source text of each Python module of a worker process. A module follows the modules
/// that it imports.
const MODULES: [(&str, &str); 8] = [
    ("numbers", include_str!("worker/numbers.py")),
    ("chat", include_str!("worker/chat.py")),
    ("episode", include_str!("worker/episode.py")),
    ("reasoning", include_str!("worker/reasoning.py")),
    ("worlds", include_str!("worker/worlds.py")),
    ("servers", include_str!("worker/servers.py")),
    ("rubrics", include_str!("worker/rubrics.py")),
    ("serve", include_str!("worker/serve.py")),
];

/// Environments of a run, each with its worker processes. Clones share the processes.
#[derive(Clone, Default)]
pub struct Environments(Arc<Vec<Environment>>);

/// Environment with its worker processes. A process is started when it is first needed.
pub struct Environment {
    options: EnvironmentOptions,
    workers: Arc<Pool>,
}

/// Error of an environment or its process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the environment {name}: {why}")]
pub struct EnvironmentError {
    /// Name of the environment.
    pub name: String,
    /// Error message of the environment, or a description of how its process ended.
    pub why: String,
}

impl fmt::Debug for Environments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|one| &one.options)).finish()
    }
}

impl Environments {
    /// Creates one environment for each of the `options`, without starting a process.
    pub fn new(
        options: impl IntoIterator<Item = EnvironmentOptions>,
        supervisor: &Supervisor,
    ) -> Self {
        let all = options.into_iter().map(|options| Environment::new(options, supervisor));
        Environments(Arc::new(all.collect()))
    }

    /// Returns the environment with this name, or `None` if the run has no such environment.
    pub fn find(&self, name: &str) -> Option<&Environment> {
        self.0.iter().find(|one| one.name() == name)
    }
}

impl Environment {
    fn new(options: EnvironmentOptions, supervisor: &Supervisor) -> Self {
        let worker = options.common_options().worker;
        let launch = Launch {
            command: python_command(&worker.python),
            dir: worker.dir.clone(),
            passes: worker.environment.clone(),
            // Iteration over a set then has the same order in every process.
            variables: vec![("PYTHONHASHSEED".into(), "0".into())],
        };
        let first = json!({ "key": "attempt", "source": options.worker_options() });
        let first = Some(python_first_line(&MODULES, first));
        let workers = Arc::new(create_worker_pool(
            supervisor,
            launch,
            first,
            (worker.processes, worker.attempts),
        ));
        Environment { options, workers }
    }

    /// Returns the name of the environment, which is the source of its tasks.
    pub fn name(&self) -> &str {
        self.options.common_options().name
    }

    fn create_error(&self, why: impl Into<String>) -> EnvironmentError {
        EnvironmentError { name: self.name().to_owned(), why: why.into() }
    }

    /// Sends the request `verb` with the fields of `order` to a worker process, and waits for the
    /// response. Attempts are requested elsewhere.
    ///
    /// # Errors
    /// Returns an error if the process cannot be started or ends, if the environment rejects the
    /// request, or if it does not respond within `worker.seconds`.
    async fn send_query(&self, verb: &str, mut order: Value) -> Result<Value, EnvironmentError> {
        order["do"] = json!(verb);
        let limit = Duration::from_secs_f64(self.options.common_options().worker.seconds);
        let response =
            self.workers.request(Request::new(verb, order), limit).await.map_err(|error| {
                match error {
                    WorkerError::Timeout(_) => self.create_error(format!(
                        "the process did not respond to the request {verb:?} within {limit:?} \
                         (worker.seconds)"
                    )),
                    error => self.create_error(error.to_string()),
                }
            })?;
        match response["error"].as_str() {
            Some(why) => Err(self.create_error(why)),
            None => Ok(response),
        }
    }
}
