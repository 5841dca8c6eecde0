//! verl's formulas, compared with vectors that verl's own functions computed in f64. The tolerance
//! is 1e-9; verl's added 1e-8 are reproduced.

#![allow(clippy::unwrap_used)] // clippy sees only what is inside #[test], not the helpers beside it

#[path = "../common/mod.rs"]
mod common;

mod advantages;
mod corrections;
mod fixture;
mod losses;

use common::evaluate_exactly as evaluate;

const TOLERANCE: f64 = 1e-9;
