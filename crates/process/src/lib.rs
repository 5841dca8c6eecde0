//! Starts child processes that end with this process, and pools of workers that respond in JSON
//! lines.
//!
//! Every program that a run starts (agents, tools, environments, scorers, MCP servers, samplers,
//! learners) runs in its own process. Such a process must not outlive the run, even if the run is
//! killed. Its output must neither block it nor fill the memory. It must not see the secrets in the
//! environment of the run.
//!
//! A [`Supervisor`] starts a program behind a small supervisor process ([`supervise`]), which runs
//! the same binary and holds one end of a pipe. When the pipe closes, the supervisor process ends
//! the program and everything that the program started. This includes detached processes, because
//! the supervisor process is their subreaper. A [`ProgramRun`] is a program that reads one text and
//! exits. A [`Child`] is a program whose input and output the caller handles. A [`Pool`] has
//! workers: programs that stay alive, read requests and write responses, one JSON object per line,
//! and handle several requests concurrently. Workers in Python share their side of the protocol
//! (`src/python`). Output that is not parsed is kept in a [`Tail`].
//!
//! # Example
//! ```
//! # use std::time::Duration;
//! # use levade_process::{Launch, Pool, PoolOptions, Request, Supervisor, WorkerError};
//! # use serde_json::json;
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
//! // A worker that responds to each request with the request itself.
//! let pool = Pool::new(PoolOptions {
//!     name: "echo".into(),
//!     supervisor: Supervisor::default(), // in a binary: Supervisor::from_current_exe()?
//!     launch: Launch::new(["cat"]),
//!     first: None,
//!     handshake: None,
//!     id_key: "id",
//!     max_workers: 2,
//!     max_requests: 8,
//!     cancel_grace: Duration::from_secs(5),
//! });
//! let answer = pool
//!     .request(Request::new("add", json!({ "a": 2, "b": 3 })), Duration::from_secs(60))
//!     .await?;
//! assert_eq!(answer["b"], 3);
//! # Ok::<(), WorkerError>(())
//! # }).unwrap();
//! ```
//!
//! # Guarantees
//! - **No child outlives this process**, even if this process is killed, provided that a supervisor
//!   process runs the child.
//! - **A program gets only named environment variables** ([`Launch`]).
//! - **Output is read to its end and kept up to a limit.**
//! - **A worker that exits fails only its own requests, each with the reason.** The next request
//!   starts another worker.
//! - **A dropped request is cancelled.** The worker gets a line with `"stop": true`. If it does not
//!   respond within the pool's grace period, it is terminated.
//!
//! Out of scope: untrusted code (`levade-sandbox`).

mod options;
mod pool;
mod python;
mod request;
mod supervise;
mod supervisor;
mod tail;
mod worker;

pub use options::{Handshake, PoolOptions, ReadyCheck};
pub use pool::Pool;
pub use python::{python_command, python_first_line};
pub use request::{Request, WorkerError};
pub use supervise::supervise;
pub use supervisor::{
    Child, Input, Launch, ProgramRun, RunOutput, Supervisor, describe_exit, exit_status,
};
pub use tail::{DEFAULT_TAIL_BYTES, Tail, TailReader, explaining_lines};
pub use worker::{Affinity, Call, Slot, Worker};
