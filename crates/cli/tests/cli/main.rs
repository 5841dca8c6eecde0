//! Tests of the `levade` binary from outside: its output, the files that it writes, and its exit
//! codes.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

mod adapters;
mod audit;
mod bad_input;
mod crash;
mod data;
mod elsewhere;
mod environments;
mod export;
mod first_steps;
mod games;
mod life;
mod logging;
mod outages;
mod policies;
mod programs;
mod runners;
mod sessions;
mod started;
mod store_server;
mod supervise;
mod support;
mod traces;
