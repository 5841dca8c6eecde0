//! Users in Python: classes of the user's file, and verl's interactions, that play the user of a
//! conversation.
//!
//! They run in worker processes like Python tools, with the same isolation. Each attempt has its
//! own conversation, which stays in one worker.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_process::{
    Affinity, Handshake, Launch, Pool, PoolOptions, Request, Supervisor, python_command,
    python_first_line,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::session::{check_response, describe_error, next_session, parse_number};
use super::{CANCEL_GRACE, MODULES, default_workers};
use crate::{OptionError, ToolContext};

/// Name under which users' Python modules import the server of Python tools.
const SERVER: &str = "server";

/// Options of `[user.NAME] kind = "python"`: a Python class that plays the user in conversations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PythonUserKeys {
    /// Python file with the class; empty if `config` is set.
    pub file: PathBuf,
    /// Configuration file of verl's interactions, in YAML or JSON; empty if `file` is set.
    pub config: PathBuf,
    /// Name of the class in `file`, or of the interaction in `config`. If empty, the only class or
    /// interaction is used. With several interactions in `config`, each dataset row names one.
    pub class: String,
    /// Arguments of the class by name, or the configuration of verl's class. Requires `file`.
    pub options: Map<String, Value>,
    /// Python interpreter: a command name or a path.
    pub python: String,
    /// Names of environment variables that workers get in addition to the
    /// [usual ones](levade_policy::environment::CHILD_VARIABLES).
    pub environment: Vec<String>,
    /// Maximum number of workers. 0 means one per processor, but at most four.
    pub workers: usize,
    /// Maximum number of concurrent requests for a user's response in one worker.
    pub worker_calls: usize,
    /// Timeout for a worker to load the file, in seconds, which must be positive.
    pub start_seconds: f64,
}

impl Default for PythonUserKeys {
    fn default() -> Self {
        PythonUserKeys {
            file: PathBuf::new(),
            config: PathBuf::new(),
            class: String::new(),
            options: Map::new(),
            python: "python3".into(),
            environment: Vec::new(),
            workers: 0,
            worker_calls: 16,
            start_seconds: 120.0,
        }
    }
}

impl PythonUserKeys {
    /// Checks the keys without starting anything.
    ///
    /// # Errors
    /// Returns an error that names the key whose value is wrong.
    pub fn check(&self) -> Result<(), OptionError> {
        let [has_file, has_config] = [&self.file, &self.config].map(|path| !is_empty(path));
        let file = self.file.display();
        let range = "set to the file with the class, unless `config` is set";
        OptionError::ensure(has_file || has_config, "file", format!("\"{file}\""), range)?;
        let range = "left out if `config` is set, which names the files";
        OptionError::ensure(!has_file || !has_config, "file", format!("\"{file}\""), range)?;
        let range = "left out with `config`, which has the options of its classes";
        OptionError::ensure(self.options.is_empty() || has_file, "options", "set", range)?;
        OptionError::ensure(!self.python.is_empty(), "python", "\"\"", "an interpreter")?;
        OptionError::ensure(self.worker_calls > 0, "worker_calls", 0, "at least 1")?;
        let start = self.start_seconds;
        let is_duration = Duration::try_from_secs_f64(start).is_ok_and(|start| !start.is_zero());
        OptionError::ensure(is_duration, "start_seconds", start, "more than 0")
    }
}

fn is_empty(path: &Path) -> bool {
    path.as_os_str().is_empty()
}

/// Simulated users in Python, with the worker processes that play them.
pub struct PythonUsers {
    pool: Pool,
}

impl PythonUsers {
    /// Creates the simulated users `name`. No process is started yet.
    pub fn new(name: &str, keys: &PythonUserKeys, supervisor: Supervisor) -> Self {
        let source = if is_empty(&keys.file) { &keys.config } else { &keys.file };
        let first = json!({
            "key": "id",
            "file": shown_path(&keys.file),
            "config": shown_path(&keys.config),
            "class": keys.class,
            "options": keys.options,
        });
        let shared = MODULES.map(|(name, source)| match name {
            "serve" => (SERVER, source),
            name => (name, source),
        });
        let mut modules = shared.to_vec();
        modules.push(("serve", include_str!("worker/users.py")));
        let pool = Pool::new(PoolOptions {
            name: name.to_owned(),
            supervisor,
            launch: Launch {
                command: python_command(&keys.python),
                dir: source.parent().unwrap_or(Path::new("")).to_owned(),
                passes: keys.environment.clone(),
                variables: Vec::new(),
            },
            first: Some(python_first_line(&modules, first)),
            handshake: Some(Handshake {
                timeout: Duration::from_secs_f64(keys.start_seconds),
                check: Arc::new(|_| Ok(())),
            }),
            id_key: "id",
            max_workers: if keys.workers == 0 { default_workers() } else { keys.workers },
            max_requests: keys.worker_calls,
            cancel_grace: CANCEL_GRACE,
        });
        PythonUsers { pool }
    }

    /// Starts the conversation of an attempt with a simulated user. `opens` is whether the user
    /// writes the first message.
    ///
    /// # Errors
    /// Returns an error message if no worker can be started, or if the class rejects the task.
    pub async fn open(&self, attempt: &ToolContext, opens: bool) -> Result<PythonUser, String> {
        let slot = self.pool.slot().await.map_err(describe_error)?;
        let session = next_session(&attempt.attempt);
        let user = PythonUser { worker: slot.worker().affinity(), session, is_closed: false };
        let task = &attempt.task;
        let task = json!({ "id": task.id, "question": task.question, "row": *task.row });
        user.send_order("open", json!({ "task": task, "opens": opens })).await?;
        Ok(user)
    }
}

fn shown_path(path: &Path) -> Option<String> {
    (!is_empty(path)).then(|| path.display().to_string())
}

/// Response of a simulated user to a message of the agent.
#[derive(Debug, Clone, PartialEq)]
pub struct PythonUserResponse {
    /// Text of the user's message. `None` if the class only ends the conversation.
    pub text: Option<String>,
    /// Whether the user ends the conversation.
    pub ends: bool,
    /// Score that a class of verl's interactions gives the agent's last message; `None` if the
    /// class gives no score.
    pub score: Option<f64>,
}

/// Simulated user of one attempt. When the value is dropped, the worker releases the user's Python
/// object.
pub struct PythonUser {
    worker: Affinity,
    session: String,
    is_closed: bool,
}

impl PythonUser {
    /// Returns the user's response to a conversation: a list of messages with `role` and `content`.
    ///
    /// # Errors
    /// Returns an error message if the class fails, or if its process has exited.
    pub async fn respond_to(&self, messages: Value) -> Result<PythonUserResponse, String> {
        let response = self.send_order("respond", json!({ "messages": messages })).await?;
        Ok(PythonUserResponse {
            text: response["text"].as_str().map(str::to_owned),
            ends: response["ends"] == true,
            score: parse_number(&response["score"]),
        })
    }

    /// Ends the conversation. Returns the score that the class gives the conversation, if it gives
    /// one.
    ///
    /// # Errors
    /// Returns an error message if the class fails, or if its process has exited.
    pub async fn finish(mut self) -> Result<Option<f64>, String> {
        let response = self.send_order("finish", json!({})).await;
        let closed = self.send_order("close", json!({})).await;
        self.is_closed = true;
        let score = parse_number(&response?["score"]);
        closed.map(|_| score)
    }

    async fn send_order(&self, verb: &str, mut order: Value) -> Result<Value, String> {
        (order["do"], order["session"]) = (json!(verb), json!(self.session));
        let response = self.worker.request(Request::new(verb, order)).await;
        response.map_err(describe_error).and_then(check_response)
    }
}

impl Drop for PythonUser {
    fn drop(&mut self) {
        if !self.is_closed {
            let order = json!({ "do": "close", "session": self.session });
            self.worker.notify(Request::new("close", order));
        }
    }
}
