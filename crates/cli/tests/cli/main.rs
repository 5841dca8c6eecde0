//! The binary from outside: what it prints, what it leaves behind, and with which code it ends.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

mod adapters;
mod bad_input;
mod crash;
mod data;
mod elsewhere;
mod environments;
mod first_steps;
mod life;
mod logging;
mod outages;
mod policies;
mod programs;
mod started;
mod supervise;
mod support;
