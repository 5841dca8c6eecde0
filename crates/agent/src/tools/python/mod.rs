//! Tools of a user's own in Python: functions of a file, and classes as verl has them.
//!
//! Worker processes run them, in an environment of their own. A worker is a Python program of ours, in
//! files beside this one, which needs Python 3.9 and nothing else; it reads orders and prints answers, one
//! line of JSON each.
//!
//! Guarantees: the user's code runs with the user's rights, in processes that get named environment variables
//! only, under a keeper, so that whatever they start ends with them. Whatever the code does to its process
//! fails the calls that this process had, each of which says why, and no others; another process takes its
//! place. An attempt whose instances were in it is told so. `release` is called for every instance whose
//! process lives.

mod offered;
mod pool;
mod session;
mod worker;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_text::ToolSpec;
use serde_json::json;

use super::{Session, ToolContext, ToolError, Toolbox};
use crate::Keeper;
use pool::Pool;
use session::{Pinned, PythonSession};
pub(crate) use worker::START;

/// The most workers that are started where their number is not given.
const MOST_WORKERS: usize = 4;

/// Which tools, and how they run.
#[derive(Debug, Clone, PartialEq)]
pub struct PythonOptions {
    /// File with functions and classes.
    pub file: Option<PathBuf>,
    /// Configuration of tools as verl has it.
    pub config: Option<PathBuf>,
    /// Names of the functions and classes of the file that are tools; those that are marked, or else all that
    /// are public, where empty.
    pub functions: Vec<String>,
    /// The interpreter, by its name or path.
    pub python: String,
    /// Names of environment variables that workers get besides the [usual ones](crate::PASSED).
    pub passes: Vec<String>,
    /// Most workers; one for each processor, and at most four, where 0.
    pub workers: usize,
    /// Most calls at once for each worker.
    pub worker_calls: usize,
    /// Longest time in which a worker may load the file.
    pub start: Duration,
}

/// Tools in Python.
pub struct PythonTools {
    name: String,
    pool: Arc<Pool>,
}

impl PythonTools {
    /// Tools of this name. Nothing is started yet.
    pub fn new(name: impl Into<String>, mut options: PythonOptions, keeper: Keeper) -> Self {
        if options.workers == 0 {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            options.workers = processors.min(MOST_WORKERS);
        }
        let name = name.into();
        PythonTools { pool: Arc::new(Pool::new(name.clone(), options, keeper)), name }
    }

    fn cannot_open(&self, why: String) -> ToolError {
        ToolError::Open { tool: self.name.clone(), why }
    }
}

#[async_trait]
impl Toolbox for PythonTools {
    fn name(&self) -> &str {
        &self.name
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        self.pool.offered().map(|offered| offered.specs())
    }

    async fn ready(&self) -> Result<(), ToolError> {
        self.pool.ready().await.map(drop).map_err(|why| self.cannot_open(why))
    }

    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let worker = self.pool.ready().await.map_err(|why| self.cannot_open(why))?;
        let offered = self.pool.offered().ok_or_else(|| self.cannot_open("no worker is ready".into()))?;
        let mut pinned = None;
        if offered.has_state() {
            let task = &attempt.task;
            let told = json!({ "id": task.id, "question": task.question, "row": *task.row });
            let place = Pinned::open(worker, &attempt.attempt, told).await;
            pinned = Some(place.map_err(|why| self.cannot_open(why))?);
        }
        let (toolbox, pool) = (self.name.clone(), Arc::clone(&self.pool));
        Ok(Box::new(PythonSession { toolbox, pool, offered, pinned }))
    }
}
