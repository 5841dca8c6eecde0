//! Whole runs on the simulated policy: one program, so that it is linked once.

#![allow(clippy::unwrap_used)] // clippy sees only what is inside #[test], not the helpers beside it

mod ahead;
mod common;
mod conversation;
#[cfg(unix)]
mod crash;
mod exact;
mod helpers;
mod longer;
mod mixture;
mod options;
#[cfg(unix)]
mod policies;
mod retries;
mod run;
mod scorers;
mod stores;
mod teacher;
mod troubles;
