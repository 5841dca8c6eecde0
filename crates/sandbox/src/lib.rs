//! Sandboxed execution of untrusted code: code that a model wrote, or a program of unknown origin.
//!
//! A [`Sandbox`] runs Python and shell code behind isolation mechanisms of the Linux kernel. Each
//! mechanism is called a wall and has a name ([`Protection`]). If a wall is missing, no code runs
//! unless the caller accepts that. A [`Run`] starts with its own files and leaves nothing behind. A
//! [`Session`] keeps an interpreter between cells, as a notebook does. Starting either takes two
//! forks of an interpreter that is already running (`zygote`), and each gets its own jail.
//!
//! # Example
//! ```
//! use levade_sandbox::{Demand, EndReason, Language, Options, Run, Sandbox};
//!
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
//! // `Demand::Full`, the default, runs nothing if a wall is missing.
//! let options = Options { protection: Demand::BestEffort, ..Options::default() };
//! let sandbox = Sandbox::start(options).await?;
//! let outcome = sandbox.run(&Run::new(Language::Python, "print(6 * 7)")).await?;
//! assert_eq!(outcome.ended, EndReason::Exit(0));
//! assert_eq!(outcome.stdout.text(), "42\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **The host is invisible.** Code sees the interpreter and libraries, read-only, and five
//!   harmless devices. It sees no other file, process, network, abstract socket, terminal,
//!   environment variable or descriptor.
//! - **Runs are isolated from each other**, and cannot see the memory of the service.
//! - **Complete cleanup.** Processes, files, mounts and descriptors of a run are removed when its
//!   outcome is returned, when the run is dropped, or when this process is killed.
//! - **Limits are enforced** on wall-clock time, memory, processes, files and output. Output beyond
//!   its limit is truncated; a run that exceeds another limit is ended. Both are reported.
//! - **Output of any length is read.** Its start and end are kept, and it never delays a run.
//! - **Code cannot cause a sandbox error.** Everything that it does is an outcome.
//!
//! Out of scope: virtual machines. Code and host share a kernel, so a kernel vulnerability can
//! break the sandbox; the list of system calls (`filter.rs`) excludes those with the most
//! vulnerabilities. The runs of one sandbox share the memory layout of their interpreter. The
//! sandbox needs Linux; other systems can use [`service`] on a Linux machine.

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
pub use output::CapturedOutput;
pub use protection::{Demand, MissingWall, Protection, WALLS};
pub use remote::Remote;
pub use run::{EndReason, Language, Outcome, Run};
pub use sandbox::{Options, Sandbox};
pub use session::{Cell, CellError, Session, SessionOptions};
