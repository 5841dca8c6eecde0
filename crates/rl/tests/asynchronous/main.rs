//! Formulas of AgentRL, AReaL and slime, compared with vectors that their own functions computed in
//! f64. The tolerance is 1e-9, or 2e-7 if the reference takes a difference in f32.

#![allow(clippy::unwrap_used)] // clippy sees only what is inside #[test], not the helpers beside it

#[path = "../common/mod.rs"]
mod common;

mod losses;
mod rest;

use common::evaluate_exactly as evaluate;

const TOLERANCE: f64 = 1e-9;
