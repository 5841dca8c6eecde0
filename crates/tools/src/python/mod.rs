//! Tools in Python: functions of the user's file, and classes with verl's tool interface.
//!
//! Worker processes of [`levade_process`] run the tools. The worker's modules are files of this
//! directory and need only Python 3.9. A worker serves calls of many attempts. The methods of a
//! class are tools that share one instance per attempt. The instances of an attempt stay in one
//! worker.
//!
//! # Guarantees
//! - **Isolation.** Processes have the user's rights, get only the named environment variables, and
//!   end with their supervisor.
//! - **Failures are contained.** If a process exits, its pending calls fail with the reason, and
//!   calls in other processes continue. Another process replaces it. Attempts whose instances were
//!   lost get an error.
//! - **`release` is called** for every instance whose process is still running.

mod session;
mod tool_schemas;
mod user;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use levade_process::{
    Handshake, Launch, Pool, PoolOptions, Supervisor, python_command, python_first_line,
};
use levade_text::ToolSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{OptionError, Session, ToolContext, ToolError, ToolOptions, Toolbox};
use session::{PinnedInstances, PythonSession, describe_error};
use tool_schemas::ToolSchemas;
pub use user::{PythonUser, PythonUserKeys, PythonUserResponse, PythonUsers};

/// Python modules of a worker, each after the modules that it imports.
const MODULES: [(&str, &str); 7] = [
    ("docstrings", include_str!("worker/docstrings.py")),
    ("schema", include_str!("worker/schema.py")),
    ("answers", include_str!("worker/answers.py")),
    ("shims", include_str!("worker/shims.py")),
    ("tools", include_str!("worker/tools.py")),
    ("load", include_str!("worker/load.py")),
    ("serve", include_str!("worker/serve.py")),
];

/// Time in which a worker must stop a cancelled call. A worker that takes longer is killed.
const CANCEL_GRACE: Duration = Duration::from_secs(2);

/// Maximum number of Python workers if the recipe does not set it, on a machine with many
/// processors.
const MAX_WORKERS: usize = 4;

/// Options of `[[tool]] kind = "python"`: functions and classes in Python. At least one of `file`
/// and `config` must be set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PythonKeys {
    /// Python file with the functions and classes.
    pub file: Option<PathBuf>,
    /// Tool configuration file in verl's format, in YAML or JSON.
    pub config: Option<PathBuf>,
    /// Names of the functions and classes of `file` that are tools. If empty, the functions and
    /// classes marked by the decorator are tools, or all public ones if none is marked.
    pub functions: Vec<String>,
    /// Python interpreter: a command name, or a path, such as the path of a virtual environment's
    /// interpreter.
    pub python: String,
    /// Names of environment variables that workers get in addition to the
    /// [usual ones](levade_policy::environment::CHILD_VARIABLES).
    pub environment: Vec<String>,
    /// Maximum number of workers. 0 means one per processor, but at most four.
    pub workers: usize,
    /// Maximum number of concurrent calls in one worker.
    pub worker_calls: usize,
    /// Timeout for a worker to load the file, in seconds, which must be positive.
    pub start_seconds: f64,
}

impl Default for PythonKeys {
    fn default() -> Self {
        PythonKeys {
            file: None,
            config: None,
            functions: Vec::new(),
            python: "python3".into(),
            environment: Vec::new(),
            workers: 0,
            worker_calls: 16,
            start_seconds: 120.0,
        }
    }
}

impl PythonKeys {
    /// Returns `file` and `config`, if they are set, and the start timeout.
    ///
    /// # Errors
    /// Returns an error if keys are missing, conflict or are out of range.
    fn parts(&self) -> Result<(Option<&Path>, Option<&Path>, Duration), String> {
        let [file, config] = [&self.file, &self.config]
            .map(|path| path.as_deref().filter(|path| !path.as_os_str().is_empty()));
        if file.is_none() && config.is_none() {
            return Err("neither `file` nor `config` is set; set at least one of them".into());
        }
        if file.is_none() && !self.functions.is_empty() {
            return Err("`functions` selects functions of a `file`, but `file` is not set".into());
        }
        if self.python.is_empty() || self.worker_calls == 0 {
            return Err(
                "`python` must name an interpreter, and `worker_calls` must be at least 1".into()
            );
        }
        let start =
            Duration::try_from_secs_f64(self.start_seconds).ok().filter(|start| !start.is_zero());
        Ok((
            file,
            config,
            start.ok_or_else(|| {
                format!("`start_seconds` is {}, but must be more than 0", self.start_seconds)
            })?,
        ))
    }
}

impl ToolOptions for PythonKeys {
    fn check(&self, _seconds: Option<f64>) -> Result<(), OptionError> {
        self.parts()?;
        Ok(())
    }

    fn toolbox(
        &self,
        name: String,
        _: Option<f64>,
        supervisor: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String> {
        Ok(Arc::new(PythonTools::new(name, self, supervisor.clone())?))
    }
}

/// Returns the maximum number of workers if the recipe does not set one.
fn default_workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MAX_WORKERS)
}

/// Toolbox of tools that are written in Python.
pub struct PythonTools {
    name: String,
    pool: Arc<Pool>,
    /// Tools of the toolbox, which are known after a worker has started.
    offered: Arc<OnceLock<Arc<ToolSchemas>>>,
}

impl PythonTools {
    /// Creates the toolbox `name` of the Python tools in `keys`. No process is started yet.
    ///
    /// # Errors
    /// Returns an error if keys are missing, conflict or are out of range.
    pub fn new(
        name: impl Into<String>,
        keys: &PythonKeys,
        supervisor: Supervisor,
    ) -> Result<Self, String> {
        let (file, config, start) = keys.parts()?;
        let max_workers = match keys.workers {
            0 => default_workers(),
            count => count,
        };
        let base_dir = file.or(config).and_then(Path::parent);
        let first = json!({
            "key": "id",
            "file": shown_path(file),
            "config": shown_path(config),
            "functions": keys.functions,
        });
        let name = name.into();
        let schemas = Arc::<OnceLock<Arc<ToolSchemas>>>::default();
        let known = Arc::clone(&schemas);
        let pool = Pool::new(PoolOptions {
            name: name.clone(),
            supervisor,
            launch: Launch {
                command: python_command(&keys.python),
                dir: base_dir.unwrap_or(Path::new("")).to_owned(),
                passes: keys.environment.clone(),
                variables: Vec::new(),
            },
            first: Some(python_first_line(&MODULES, first)),
            handshake: Some(Handshake {
                timeout: start,
                check: Arc::new(move |report| check_report(&known, report)),
            }),
            id_key: "id",
            max_workers,
            max_requests: keys.worker_calls,
            cancel_grace: CANCEL_GRACE,
        });
        Ok(PythonTools { name, pool: Arc::new(pool), offered: schemas })
    }

    fn open_error(&self, why: String) -> ToolError {
        ToolError::Open { tool: self.name.clone(), why }
    }
}

fn shown_path(path: Option<&Path>) -> Option<String> {
    path.map(|path| path.display().to_string())
}

/// Checks the start report of a worker, which lists the worker's tools.
///
/// # Errors
/// Returns an error if the report is malformed, or the tools differ from those of an earlier
/// worker.
fn check_report(known: &OnceLock<Arc<ToolSchemas>>, report: Value) -> Result<(), String> {
    let tools = serde_json::from_value(report["tools"].clone());
    let tools =
        tools.map_err(|error| format!("the first line is not a worker's start report: {error}"))?;
    let schemas = Arc::new(ToolSchemas::new(tools)?);
    if known.get_or_init(|| Arc::clone(&schemas)).tools == schemas.tools {
        Ok(())
    } else {
        Err("the tools differ from those of an earlier worker, because the file has changed; start the \
             run again"
            .into())
    }
}

#[async_trait]
impl Toolbox for PythonTools {
    fn name(&self) -> &str {
        &self.name
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        self.offered.get().map(|schemas| schemas.specs())
    }

    async fn check_ready(&self) -> Result<(), ToolError> {
        self.pool.slot().await.map(drop).map_err(|error| self.open_error(describe_error(error)))
    }

    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let slot =
            self.pool.slot().await.map_err(|error| self.open_error(describe_error(error)))?;
        let schemas = self.offered.get().cloned();
        let schemas = schemas.ok_or_else(|| self.open_error("no worker is ready".into()))?;
        let mut pinned = None;
        if schemas.has_state() {
            let task = &attempt.task;
            let attempt_data =
                json!({ "id": task.id, "question": task.question, "row": *task.row });
            let instances =
                PinnedInstances::open(slot.worker(), &attempt.attempt, attempt_data).await;
            pinned = Some(instances.map_err(|why| self.open_error(why))?);
        }
        let toolbox = self.name.clone();
        let pool = Arc::clone(&self.pool);
        Ok(Box::new(PythonSession { toolbox, pool, schemas, pinned }))
    }
}
