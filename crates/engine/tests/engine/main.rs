//! Tests of the engine through its traits, in one binary so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a failed step of a test should stop it")]

mod files;
mod grammars;
mod guarantees;
mod parity;
mod prompts;
mod updates;
