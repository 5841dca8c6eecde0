//! verl's formulas, from vectors that its own functions computed in f64: to 1e-9, its additions of 1e-8
//! included where it has them.

#![allow(clippy::unwrap_used)] // clippy sees only what is inside #[test], not the helpers beside it

#[path = "../common/mod.rs"]
mod common;

mod advantages;
mod corrections;
mod fixture;
mod losses;

use common::exactly as evaluate;

const TOLERANCE: f64 = 1e-9;
