//! Machines of a run other than the one that trains: [`join()`] runs a machine's processes of the
//! learner, and [`Environment`] installs the Python packages that they need.
//!
//! # Guarantees
//! - A machine that has joined restarts its processes whenever the run restarts its learner, and
//!   leaves when the run ends.
//! - If two processes take the same part of a run, the later one keeps it. The earlier one leaves.
//! - Every wait has a timeout, whose error names what was awaited.
//!
//! # Example
//! Takes part in a run as machine 1.
//! ```no_run
//! use levade_cluster::{MachinePart, join};
//! use levade_process::Supervisor;
//! use levade_run::Host;
//!
//! # async fn example() -> anyhow::Result<()> {
//! let host = Host::new(Supervisor::from_current_exe()?, |event| println!("{event:?}"));
//! let part = MachinePart {
//!     run: "/shared/runs/math".into(),
//!     node: 1,
//!     wait: std::time::Duration::from_secs(900),
//! };
//! let (_stop, stops) = tokio::sync::mpsc::unbounded_channel();
//! println!("{:?}", join(&part, &host, stops).await?);
//! # Ok(()) }
//! ```
//!
//! Out of scope: the machine that trains, and the files through which machines find each other
//! (`levade-run`).

mod environment;
mod join;

pub use environment::{Environment, PACKAGE, find_package};
pub use join::{JoinOutcome, MachinePart, join};
