//! Tests of opening and writing models on disk, valid and damaged. All modules form one test
//! binary, so that it is linked only once.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

mod checkpoints;
mod damage;
mod open;
mod support;
