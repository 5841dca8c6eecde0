//! Runs untrusted code: what a model wrote, or a program of unknown origin.
//!
//! A [`Sandbox`] runs Python and shell code behind walls of the Linux kernel, each of which has a name
//! ([`Protection`]). If a wall is missing, nothing runs unless the caller accepts that. A [`Run`] starts with
//! its own files and leaves nothing behind; a [`Session`] keeps an interpreter between cells, as a notebook
//! does. Both start in the time of two forks, from an interpreter that has already started (`zygote`), in a
//! jail of their own.
//!
//! # Example
//! ```
//! use levade_sandbox::{Demand, Ended, Language, Options, Run, Sandbox};
//!
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
//! // `Demand::Full`, the default, runs nothing if a wall is missing.
//! let options = Options { protection: Demand::BestEffort, ..Options::default() };
//! let sandbox = Sandbox::start(options).await?;
//! let outcome = sandbox.run(&Run::new(Language::Python, "print(6 * 7)")).await?;
//! assert_eq!(outcome.ended, Ended::Exit(0));
//! assert_eq!(outcome.stdout.text(), "42\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **Code sees nothing of the machine** except interpreter and libraries, read-only, and five harmless
//!   devices: no other file, process, network, abstract socket, terminal, environment variable or descriptor.
//! - **Runs see nothing of each other**, nor of the memory of the service.
//! - **Nothing is left**: processes, files, mounts and descriptors of a run are removed when its outcome is
//!   returned, the run is dropped, or this process is killed.
//! - **Limits hold**: wall-clock time, memory, processes, files, output. What exceeds them is truncated or
//!   ended, and reported.
//! - **Output of any length is read**, its beginning and end are kept, and it never delays a run.
//! - **The behavior of code is an outcome**, never an error of the sandbox.
//!
//! Out of scope: virtual machines. Code and this machine share a kernel, so a hole in the kernel is a hole in
//! the sandbox; the list of system calls (`filter.rs`) excludes those that had most holes. Runs of one
//! sandbox share the memory layout of their interpreter. The sandbox needs Linux; other systems can use
//! [`service`] on a Linux machine.

mod cgroup;
mod error;
mod filter;
mod jail;
mod limits;
mod memory;
mod output;
mod protection;
mod python;
mod remote;
mod run;
mod sandbox;
pub mod service;
mod session;
mod wire;
mod zygote;

pub use error::SandboxError;
pub use limits::Limits;
pub use output::Captured;
pub use protection::{Demand, Missing, Protection, WALLS};
pub use remote::Remote;
pub use run::{Ended, Language, Outcome, Run};
pub use sandbox::{Options, Sandbox};
pub use session::{Cell, CellError, Session, SessionOptions};
