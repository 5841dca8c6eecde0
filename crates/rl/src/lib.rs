//! Advantages, losses and group statistics of reinforcement learning: pure functions, no I/O.
//!
//! A loss is a plain sum over [`Term`](dressage_tree::Term)s: every normaliser (per token, per sequence, per rollout,
//! global) is folded into the terms' explicit weights before a learner sees them, so gradients do not depend on packing,
//! micro-batch size or the number of workers. [`Loss::evaluate`] gives one term's value and its derivative with respect
//! to the token's log-probability; that is all a learner needs to know about an algorithm.

mod error;
mod loss;

pub use error::RlError;
pub use loss::{Evaluated, KlEstimator, KlPenalty, Loss, PolicyLoss};
