//! Advantages, losses and group statistics of reinforcement learning: pure functions, no I/O.
//!
//! A loss is a plain sum over [`Term`](dressage_tree::Term)s: every normaliser (per token, per sequence, per rollout,
//! global) is folded into the terms' explicit weights before a learner sees them, so gradients do not depend on packing,
//! micro-batch size or the number of workers. [`Loss::evaluate`] gives one term's value and its derivative with respect
//! to the token's log-probability; that is all a learner needs to know about an algorithm.
//!
//! ```
//! use dressage_rl::{GroupBaseline, Normaliser, RolloutTokens};
//!
//! // Three rollouts of one task, the first of which succeeded; each token of theirs gets advantage and weight.
//! let advantages = GroupBaseline::default().advantages(&[1.0, 0.0, 0.0])?;
//! let weights = Normaliser::TokenMean.weights(&[10, 20, 20].map(|tokens| RolloutTokens { group: 0, tokens }));
//! assert!((advantages[0] - 2.0 / 3.0).abs() < 1e-15);
//! assert_eq!(weights, [0.02, 0.02, 0.02]);
//! # Ok::<(), dressage_rl::RlError>(())
//! ```

mod advantage;
mod error;
mod loss;
mod stats;
mod weights;

pub use advantage::{GroupBaseline, GroupStats, STD_EPSILON, Singleton};
pub use error::RlError;
pub use loss::{Evaluated, KlEstimator, KlPenalty, Loss, PolicyLoss};
pub use stats::{Interval, Paired, paired_difference, wilson};
pub use weights::{Normaliser, RolloutTokens};
