//! Advantages, losses and group statistics of reinforcement learning, as pure functions.
//!
//! A loss is a plain sum over [`Term`](levade_tree::Term)s. Every normalizer (per token, per
//! sequence, per rollout, global) is folded into the terms' explicit weights before a learner
//! receives them. Therefore gradients do not depend on packing, micro-batch size or the number of
//! workers. [`Loss::evaluate`] returns one term's value and its derivative with respect to the
//! token's log-probability; a learner needs nothing else of an algorithm. [`prepare`] and
//! [`correction`] compute the values of a complete sequence or update that a loss needs first.
//!
//! # Example
//! ```
//! use levade_rl::{Estimator, GroupBaseline, Normalizer, Rollout, RolloutTokens, Sequence};
//!
//! // Three rollouts of one task; the first has succeeded. Each token gets an advantage and a
//! // weight.
//! let rollout = |score, tokens: usize| Rollout {
//!     score,
//!     sequences: vec![Sequence {
//!         turns: vec![tokens],
//!         rewards: vec![0.0; tokens],
//!         ..Sequence::default()
//!     }],
//!     ..Rollout::default()
//! };
//! let rollouts = [rollout(1.0, 10), rollout(0.0, 20), rollout(0.0, 20)];
//! let advantages = Estimator::Group(GroupBaseline::default()).advantages(&rollouts)?;
//! let rollouts = [10, 20, 20].map(|tokens| RolloutTokens { group: 0, tokens });
//! let weights = Normalizer::TokenMean.weights(&rollouts);
//! assert!((advantages[0][0].advantages[3] - 2.0 / 3.0).abs() < 1e-15);
//! assert_eq!(weights, [0.02, 0.02, 0.02]);
//! # Ok::<(), levade_rl::RlError>(())
//! ```
//!
//! # Guarantees
//! - **Sources.** Formulas name their source, and pass the vectors in `tests/` if there are any. If
//!   a reference is wrong, the default is right, and a named option reproduces the reference.
//! - **Pure.** No I/O and no clock.

mod advantage;
mod attempts;
pub mod correction;
mod error;
mod formula;
mod kl;
mod loss;
mod moments;
pub mod prepare;
mod proximal;
mod score_divergence;
pub mod shaping;
mod stats;
mod surrogate;
mod weights;

pub use advantage::{
    Alignment, Compare, Estimator, GroupBaseline, GroupStats, Rollout, STD_EPSILON, Sequence,
    SequenceAdvantages, Singleton, gae, returns,
};
pub use attempts::{expected_best_score, expected_majority_score, expected_worst_score};
pub use error::RlError;
pub use kl::{AdaptiveKl, KlEstimator, KlPenalty};
pub use loss::{Divergence, KeepGradient, Loss, Point, PolicyLoss, TermLoss, TrustRegion};
pub use moments::{Counting, explained_variance, whiten};
pub use proximal::{InterpolatedProximal, Interpolation};
pub use score_divergence::{SIGNIFICANCE, ScoreDivergence, TwoScores, find_divergence};
pub use stats::{Interval, ScorePair, mean_score, paired_difference, wilson_interval};
pub use weights::{Normalizer, RolloutTokens};
