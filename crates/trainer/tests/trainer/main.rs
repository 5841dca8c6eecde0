//! Tests of complete runs on the simulated policy, in one program so that it is linked only once.

#![allow(clippy::unwrap_used)] // clippy allows unwrap only inside #[test], not in the helpers next to it

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
mod past;
#[cfg(unix)]
mod policies;
mod prompts;
mod retries;
#[cfg(unix)]
mod rewind;
mod run;
mod scorers;
mod stores;
mod teacher;
mod troubles;
mod withdrawals;
