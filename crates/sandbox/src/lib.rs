//! Running code that nobody trusts: what a model wrote, or a stranger's program.
//!
//! A [`Sandbox`] runs Python and shell code behind walls that the Linux kernel has, and says by name which of
//! them stand ([`Protection`]); where one is missing, it runs nothing unless it was told to make do.
//! A run ([`Run`]) begins with its own files and ends with nothing left of it; a [`Session`] keeps an
//! interpreter between cells, as a notebook does. Both begin in milliseconds, as they are forked from an
//! interpreter that has started already, in a jail of its own.
//!
//! Guarantees:
//! - **Code sees nothing of the machine** but interpreter and libraries, read-only, and five harmless
//!   devices:
//!   no file, process, network, abstract socket, terminal, environment variable or descriptor of others.
//! - **Runs see nothing of each other**, nor of what the service holds.
//! - **Nothing is left**: processes, files, mounts and descriptors of a run are gone when its outcome is
//!   there,
//!   or when it is given up, or when this process is killed.
//! - **Limits hold**: time by the clock, memory, processes, files, output. What is over is cut or ended, and
//!   said.
//! - **Output of any length is read**, and its beginning and end are kept; it never makes a run late.
//! - **What code does is an outcome**, never an error of the sandbox.
//!
//! Not here: virtual machines. Code and this machine share a kernel, so a hole in the kernel is a hole in the
//! sandbox; the list of calls (`filter.rs`) keeps away what had most of them. Runs of one sandbox share the
//! memory layout of the interpreter that they are forked from. Elsewhere than on Linux there is no sandbox;
//! [`service`] on a Linux machine can be used from there.

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
