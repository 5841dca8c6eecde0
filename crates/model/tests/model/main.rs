//! Models on disk, sound and damaged: one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

mod checkpoints;
mod damage;
mod open;
mod support;
