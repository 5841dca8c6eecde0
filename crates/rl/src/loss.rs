//! Losses and their derivatives with respect to a token's log-probability.
//!
//! All arithmetic is in f64. [`Loss::check`] checks once per batch that every term has what the
//! loss needs; after that [`Loss::evaluate`] cannot fail. [`prepare`](crate::prepare) computes the
//! values of a complete sequence or update that a loss needs (the ratio of a sequence, tokens to
//! mark or drop), and the terms store them: a learner computes only sums over tokens.

use levade_tree::{Term, TreeBatch};
use serde::{Deserialize, Serialize};

use crate::RlError;
use crate::kl::KlPenalty;
use crate::proximal::InterpolatedProximal;
use crate::surrogate::{self, Surrogate, bounded_exp};

/// A learner's objective: the learner minimizes the sum of `weight × loss` over all terms of a
/// batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct Loss {
    /// Part of the loss that imitates or reinforces tokens, or trains a critic.
    pub policy: PolicyLoss,
    /// Penalty for the divergence from the frozen reference policy. If set, terms must have
    /// `reference`. `None` means no penalty.
    #[serde(default)]
    pub kl: Option<KlPenalty>,
    /// Coefficient of an entropy bonus: it is multiplied by the entropy, in nats, of the
    /// distribution that the token was sampled from, and subtracted from the term's loss. 0 means
    /// no bonus.
    #[serde(default)]
    pub entropy: f64,
    /// Interpolated proximal policy that replaces the terms' `proximal`. `None` uses the terms' own
    /// values.
    #[serde(default)]
    pub interpolated: Option<InterpolatedProximal>,
}

/// Part of a loss that imitates or reinforces tokens, or trains a critic. The formulas are the loss
/// of one term, with ratio ρ, advantage A and log-probability log p.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PolicyLoss {
    /// Cross-entropy −log p: supervised learning.
    CrossEntropy,
    /// Policy gradient −A log p: REINFORCE, and GPG.
    Reinforce,
    /// Importance-sampled policy gradient −A ρ: REINFORCE, corrected for the policy that sampled
    /// the token.
    ImportanceSampling,
    /// PPO's clipped surrogate (Schulman et al. 2017), which GRPO shares, with separate bounds
    /// below and above 1 and, for negative advantages, the dual clip of Ye et al. 2020.
    Clip {
        /// The ratio is clipped below at 1 − `low`.
        low: f64,
        /// The ratio is clipped above at 1 + `high`.
        high: f64,
        /// For a negative advantage A, the loss is at most −`dual` × A. Greater than 1; `None`
        /// means no bound.
        #[serde(default)]
        dual: Option<f64>,
        /// Trust region of the ratio. Tokens outside this region have no loss. `None` means no
        /// region.
        #[serde(default)]
        trust: Option<TrustRegion>,
        /// Fraction of the gradient that is kept when clipping removes it. `None` means 0.
        #[serde(default)]
        keep: Option<KeepGradient>,
    },
    /// MiniRL's loss −sg(ρ) A log p: REINFORCE weighted by the ratio, in a trust region.
    MiniRl {
        /// Lower bound, as for [`PolicyLoss::Clip`]. Only the trust region uses it.
        low: f64,
        /// Upper bound, as for [`PolicyLoss::Clip`]. Only the trust region uses it.
        high: f64,
        /// Trust region of the ratio. Tokens outside this region have no loss.
        trust: TrustRegion,
    },
    /// CISPO's loss −sg(clip(ρ)) A log p: a clipped token keeps a bounded gradient.
    Cispo {
        /// The weight is clipped below at 1 − `low`.
        low: f64,
        /// The weight is clipped above at 1 + `high`.
        high: f64,
    },
    /// GSPO: PPO's clip on the ratio of the complete sequence. Needs
    /// [`prepare::set_sequence_ratios`](crate::prepare::set_sequence_ratios).
    Gspo {
        /// Lower bound of the sequence's ratio, as for [`PolicyLoss::Clip`].
        low: f64,
        /// Upper bound of the sequence's ratio, as for [`PolicyLoss::Clip`].
        high: f64,
    },
    /// GMPO: clips each ratio of a sequence, and takes the geometric mean. Requires
    /// [`prepare::set_geometric_means`](crate::prepare::set_geometric_means).
    GeometricMean {
        /// Log-ratios of tokens with a negative advantage are clipped below at −`low`.
        low: f64,
        /// Log-ratios of tokens with a positive advantage are clipped above at `high`.
        high: f64,
    },
    /// SAPO: replaces PPO's clip by a sigmoid gate.
    SoftGate {
        /// Temperature of the sigmoid gate for positive advantages.
        positive: f64,
        /// Temperature of the sigmoid gate for all other advantages.
        negative: f64,
    },
    /// DRO: −(A log p − ½ β x²), which is REINFORCE with a squared penalty on the log-ratio x.
    Direct {
        /// Coefficient β of the squared penalty.
        beta: f64,
    },
    /// DPPO: −A sg(min(ρ, cap)) log p, and no loss if the token's probability has diverged too far
    /// from the probability under the old policy.
    Divergence {
        /// Measure of the divergence of the token's probability.
        measure: Divergence,
        /// Maximum decrease of the token's probability, in that measure, for negative advantages.
        below: f64,
        /// Maximum increase of the token's probability, in that measure, for positive advantages.
        above: f64,
        /// Upper bound of the weight min(ρ, cap).
        cap: f64,
    },
    /// KL-Cov: −A ρ, plus `coefficient` × |x| for marked tokens. Needs
    /// [`prepare::mark_covarying`](crate::prepare::mark_covarying).
    KlCov {
        /// Coefficient of the penalty |x| on marked tokens.
        coefficient: f64,
        /// Fraction of an update's tokens to mark, at least one token.
        #[serde(rename(serialize = "share"), alias = "share")]
        fraction: f64,
    },
    /// Clip-Cov: PPO's clip, with no loss for marked tokens (Cui et al. 2025). Needs
    /// [`prepare::select_covarying`](crate::prepare::select_covarying).
    ClipCov {
        /// Lower bound of the ratio, as for [`PolicyLoss::Clip`].
        low: f64,
        /// Upper bound of the ratio, as for [`PolicyLoss::Clip`].
        high: f64,
        /// Fraction of an update's tokens to mark, at least one token.
        #[serde(rename(serialize = "share"), alias = "share")]
        fraction: f64,
        /// Lower bound, exclusive, of the covariance of tokens that can be marked.
        lower: f64,
        /// Upper bound, exclusive, of the covariance of tokens that can be marked.
        upper: f64,
    },
    /// Regression of a critic's value head: ½ (V − R)², with R the return. `logp` is then the value
    /// V.
    Value {
        /// Bound of PPO's value clipping (Schulman et al. 2017, as in the authors' code): the loss
        /// is at least the loss of V clamped to `value` ± this bound. `None` disables the clipping.
        #[serde(default)]
        clip: Option<f64>,
    },
}

/// Trust region: a token has no loss if its ratio has left [1 − low·cap·decay, 1 + high·cap·decay]
/// in the direction of its advantage (AgentRL).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrustRegion {
    /// Factor by which the bounds of the loss are widened. Default 4.
    #[serde(default = "default_cap")]
    pub cap: f64,
    /// Whether the trust region has the bounds of the loss, without widening: cap × decay = 1.
    #[serde(default)]
    pub strict: bool,
    /// Rate in decay = exp(−`age_decay` × age). The age is the number of versions between the
    /// weights that sampled the token and those being trained.
    #[serde(default)]
    pub age_decay: f64,
}

fn default_cap() -> f64 {
    4.0
}

impl Default for TrustRegion {
    fn default() -> Self {
        TrustRegion { cap: default_cap(), strict: false, age_decay: 0.0 }
    }
}

impl TrustRegion {
    fn check(&self) -> Result<(), RlError> {
        RlError::check_positive("cap of the trust region", self.cap)?;
        RlError::check_non_negative("age_decay of the trust region", self.age_decay)
    }

    /// Returns the lower and the upper bound of the ratio in the trust region. `low` and `high` are
    /// the bounds of the loss, and `age` is the age of the token in versions.
    pub fn bounds(&self, low: f64, high: f64, age: f64) -> (f64, f64) {
        let scale =
            if self.strict { 1.0 } else { self.cap * (-self.age_decay * age).min(0.0).exp() };
        (1.0 - low * scale, 1.0 + high * scale)
    }

    /// Returns whether the token's ratio is outside the trust region in the direction of its
    /// advantage.
    fn drops_token(&self, low: f64, high: f64, ratio: f64, at: &Point) -> bool {
        let (lower, upper) = self.bounds(low, high, at.age);
        (ratio > upper && at.advantage > 0.0) || (ratio < lower && at.advantage < 0.0)
    }
}

/// Fraction of the gradient that is kept when clipping would remove it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeepGradient {
    /// Fraction of the gradient that is kept below the lower bound, for negative advantages.
    pub below: f64,
    /// Fraction of the gradient that is kept above the upper bound, for positive advantages.
    pub above: f64,
    /// Whether the kept part of the loss has a value but no gradient, as in AgentRL's code. For
    /// comparisons only.
    #[serde(default)]
    pub in_value_only: bool,
}

/// Measure of the divergence of a token's probability from its probability under the old policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Divergence {
    /// Total variation distance for the event "this token".
    TotalVariation,
    /// KL divergence for the event "this token".
    Kl,
}

/// Point at which a loss is evaluated: a term in f64, and the model's current output.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Point {
    /// Current log-probability of the token, or the critic's current value for a loss of values.
    pub logp: f64,
    /// Log-probability under the policy in the denominator of ratios: the proximal policy if there
    /// is one, otherwise the policy that sampled the token. `None` means the current policy (ratio
    /// 1).
    pub old: Option<f64>,
    /// Log-probability under the policy that sampled the token. `None` means the same as `old`.
    pub behavior: Option<f64>,
    /// Log-probability under the frozen reference. `None` if it was not evaluated.
    pub reference: Option<f64>,
    /// Advantage of the token.
    pub advantage: f64,
    /// Target of the critic's value of the state before the token.
    pub returns: f64,
    /// Earlier value of the critic. `None` unless the loss clips the change of the value.
    pub value: Option<f64>,
    /// Log-ratio of the complete sequence. `None` unless the loss needs it.
    pub sequence_log_ratio: Option<f64>,
    /// Whether a function of [`prepare`](crate::prepare) has selected this token.
    pub marked: bool,
    /// Whether the token is not trained: its weight is 0, and statistics of its sequence or update
    /// ignore it.
    pub masked: bool,
    /// Number of versions between the weights that sampled the token and those being trained.
    pub age: f64,
    /// Importance weight of the policy part of the loss. `None` without a correction.
    pub correction: Option<f64>,
}

impl Point {
    /// Creates the point of a loss term at log-probability (or critic value) `logp`.
    pub fn new(logp: f32, term: &Term) -> Self {
        Point {
            logp: logp.into(),
            old: term.proximal.or(term.behavior).map(f64::from),
            behavior: term.behavior.map(f64::from),
            reference: term.reference.map(f64::from),
            advantage: term.advantage.into(),
            returns: term.returns.into(),
            value: term.value.map(f64::from),
            sequence_log_ratio: term.sequence_log_ratio.map(f64::from),
            marked: term.selected,
            masked: term.weight == 0.0,
            age: term.age.into(),
            correction: term.correction.map(f64::from),
        }
    }

    /// Returns the log-ratio x = log p − log p_old, or 0 without an old policy.
    pub fn log_ratio(&self) -> f64 {
        self.old.map_or(0.0, |old| self.logp - old)
    }
}

/// Loss of one term, before it is multiplied by the term's weight.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TermLoss {
    /// The loss of the term, without the entropy bonus.
    pub loss: f64,
    /// Derivative of the loss with respect to the token's log-probability, or to the critic's
    /// value.
    pub derivative: f64,
    /// Ratio exp(log p − log p_old); 1 without an old policy.
    pub ratio: f64,
    /// Log-ratio log p − log p_old; 0 without an old policy.
    pub log_ratio: f64,
    /// Whether a bound of the loss was active, so that the gradient of the policy part is smaller
    /// or 0.
    pub clipped: bool,
    /// Whether the active bound was the dual clip.
    pub dual: bool,
    /// Whether the policy part of the loss was dropped. Penalty and bonus remain.
    pub dropped: bool,
    /// Estimated KL divergence from the reference; 0 without a penalty.
    pub kl: f64,
}

impl From<PolicyLoss> for Loss {
    fn from(policy: PolicyLoss) -> Self {
        Loss::new(policy)
    }
}

impl Loss {
    /// Creates a loss without KL penalty and entropy bonus.
    pub const fn new(policy: PolicyLoss) -> Self {
        Loss { policy, kl: None, entropy: 0.0, interpolated: None }
    }

    /// Creates PPO's clipped loss, without dual clip and trust region.
    pub const fn clip(low: f64, high: f64) -> Self {
        Loss::new(PolicyLoss::Clip { low, high, dual: None, trust: None, keep: None })
    }

    /// Returns whether the loss trains a critic's values rather than log-probabilities.
    pub fn trains_values(&self) -> bool {
        matches!(self.policy, PolicyLoss::Value { .. })
    }

    /// Returns whether the loss uses ratios to the policy that sampled the token.
    pub fn uses_ratios(&self) -> bool {
        !matches!(
            self.policy,
            PolicyLoss::CrossEntropy | PolicyLoss::Reinforce | PolicyLoss::Value { .. }
        )
    }

    /// Checks the parameters of the loss, and that every term of the batch has the values that the
    /// loss needs. Learners call this function once per batch, before any work.
    ///
    /// # Errors
    /// Returns an error that names the parameter if one is out of range, or the first term that
    /// lacks a value or has one that is not finite.
    pub fn check(&self, batch: &TreeBatch) -> Result<(), RlError> {
        self.check_parameters()?;
        let needs_value = matches!(self.policy, PolicyLoss::Value { clip: Some(_) });
        let weighs = self.kl.is_some_and(|kl| kl.importance_weighted);
        let needs_sequence_ratio =
            matches!(self.policy, PolicyLoss::Gspo { .. } | PolicyLoss::GeometricMean { .. });
        for (index, term) in batch.terms.iter().enumerate() {
            let sequence = term.sequence;
            if (self.uses_ratios() || weighs) && term.behavior.is_none() && term.proximal.is_none()
            {
                return Err(RlError::NoBehavior { term: index, sequence });
            }
            if self.kl.is_some() && term.reference.is_none() {
                return Err(RlError::NoReference { term: index, sequence });
            }
            if needs_value && term.value.is_none() {
                return Err(RlError::NoValue { term: index, sequence });
            }
            if needs_sequence_ratio && term.sequence_log_ratio.is_none() {
                return Err(RlError::NoSequenceRatio { term: index, sequence });
            }
            let values = [
                ("return", Some(term.returns)),
                ("value", term.value),
                ("weight", Some(term.weight)),
                ("advantage", Some(term.advantage)),
                ("behavior log-probability", term.behavior),
                ("proximal log-probability", term.proximal),
                ("reference log-probability", term.reference),
                ("log-ratio of its sequence", term.sequence_log_ratio),
            ];
            for (what, value) in values {
                if let Some(value) = value.filter(|v| !v.is_finite()) {
                    return Err(RlError::NotFinite { term: index, sequence, what, value });
                }
            }
        }
        Ok(())
    }

    /// Checks the parameters of the loss, independently of a batch.
    ///
    /// # Errors
    /// Returns an error that names the parameter if one is out of range.
    pub fn check_parameters(&self) -> Result<(), RlError> {
        let check_range = RlError::check_range;
        let check_fraction = RlError::check_fraction;
        let check_positive = RlError::check_positive;
        let check_non_negative = RlError::check_non_negative;
        match self.policy {
            PolicyLoss::CrossEntropy | PolicyLoss::Reinforce | PolicyLoss::ImportanceSampling => {}
            PolicyLoss::Clip { low, high, dual, trust, keep } => {
                check_fraction("clip low", low)?;
                check_non_negative("clip high", high)?;
                if let Some(dual) = dual {
                    check_range(dual > 1.0, "dual clip", dual, "more than 1")?;
                    check_range(
                        keep.is_none(),
                        "dual clip",
                        dual,
                        "omitted if a fraction of the clipped gradient is kept",
                    )?;
                }
                if let Some(trust) = &trust {
                    trust.check()?;
                }
                if let Some(keep) = keep {
                    check_non_negative("gradient kept below", keep.below)?;
                    check_non_negative("gradient kept above", keep.above)?;
                }
            }
            PolicyLoss::MiniRl { low, high, trust } => {
                check_fraction("clip low", low)?;
                check_non_negative("clip high", high)?;
                trust.check()?;
            }
            PolicyLoss::Cispo { low, high } | PolicyLoss::Gspo { low, high } => {
                check_fraction("clip low", low)?;
                check_non_negative("clip high", high)?;
            }
            PolicyLoss::GeometricMean { low, high } => {
                check_non_negative("clip low", low)?;
                check_non_negative("clip high", high)?;
            }
            PolicyLoss::SoftGate { positive: above, negative } => {
                check_positive("temperature of the gate", above)?;
                check_positive("temperature of the gate", negative)?;
            }
            PolicyLoss::Direct { beta } => check_non_negative("beta", beta)?,
            PolicyLoss::Divergence { below, above, cap, .. } => {
                check_non_negative("divergence below", below)?;
                check_non_negative("divergence above", above)?;
                check_positive("cap of the weight", cap)?;
            }
            PolicyLoss::KlCov { coefficient, fraction: marked } => {
                check_non_negative("coefficient", coefficient)?;
                check_fraction("fraction of tokens", marked)?;
            }
            PolicyLoss::ClipCov { low, high, fraction: marked, lower, upper } => {
                check_fraction("clip low", low)?;
                check_non_negative("clip high", high)?;
                check_fraction("fraction of tokens", marked)?;
                check_range(
                    lower < upper,
                    "lower bound of the covariance",
                    lower,
                    "less than the upper bound",
                )?;
            }
            PolicyLoss::Value { clip } => {
                if let Some(clip) = clip {
                    check_positive("value clip", clip)?;
                }
                let beta = self.kl.map_or(0.0, |kl| kl.coefficient);
                check_range(
                    self.kl.is_none(),
                    "KL coefficient",
                    beta,
                    "omitted: a value loss has no divergence",
                )?;
                check_range(
                    self.entropy == 0.0,
                    "entropy coefficient",
                    self.entropy,
                    "0: a value loss has no entropy",
                )?;
            }
        }
        check_range(self.entropy.is_finite(), "entropy coefficient", self.entropy, "finite")?;
        self.kl.map_or(Ok(()), |kl| check_non_negative("KL coefficient", kl.coefficient))
    }

    /// Returns one term's loss and its derivative at log-probability `logp` of the token, or at the
    /// value `logp` for a loss of values. The weight of the term is not applied.
    ///
    /// [`Loss::check`] must have accepted the batch. Otherwise a term without its old
    /// log-probability counts as on-policy (ratio 1), and a term without its reference has no
    /// penalty.
    pub fn evaluate(&self, logp: f32, term: &Term) -> TermLoss {
        self.at(&self.point(logp, term))
    }

    /// Returns the point at which a term's loss is evaluated, with the interpolated proximal policy
    /// if the loss has one.
    pub fn point(&self, logp: f32, term: &Term) -> Point {
        let point = Point::new(logp, term);
        match self
            .interpolated
            .and_then(|interpolated| interpolated.proximal_and_weight(logp, term))
        {
            Some((proximal, weight)) => {
                Point { old: Some(proximal), correction: Some(weight), ..point }
            }
            None => point,
        }
    }

    /// Returns the loss and its derivative at a point, computed in f64.
    pub fn at(&self, at: &Point) -> TermLoss {
        let x = at.log_ratio();
        let ratio = bounded_exp(x).0;
        let dropped = match self.policy {
            PolicyLoss::Clip { low, high, trust: Some(trust), .. }
            | PolicyLoss::MiniRl { low, high, trust } => trust.drops_token(low, high, ratio, at),
            PolicyLoss::ClipCov { .. } => at.marked,
            _ => false,
        };
        let policy = if dropped { Surrogate::DROPPED } else { self.evaluate_surrogate(at, x) };
        let (penalty, kl, derivative) = match (self.kl, at.reference) {
            (Some(penalty), Some(reference)) => {
                let to_behavior = at.behavior.map_or(x, |behavior| at.logp - behavior);
                let (kl, derivative) = penalty.evaluate(at.logp - reference, to_behavior);
                (penalty.coefficient, kl, derivative)
            }
            _ => (0.0, 0.0, 0.0),
        };
        let correction = at.correction.unwrap_or(1.0);
        let left_out = correction == 0.0;
        TermLoss {
            loss: correction * policy.loss + penalty * kl,
            derivative: correction * policy.derivative + penalty * derivative,
            ratio,
            log_ratio: x,
            clipped: policy.clipped || left_out,
            dual: policy.dual && !left_out,
            dropped: dropped || left_out,
            kl,
        }
    }

    /// Returns whether a token with advantage 0 can have a gradient.
    pub fn has_gradient_without_advantage(&self) -> bool {
        let policy = matches!(
            self.policy,
            PolicyLoss::CrossEntropy
                | PolicyLoss::Direct { .. }
                | PolicyLoss::KlCov { .. }
                | PolicyLoss::ClipCov { .. }
                | PolicyLoss::Value { .. }
        );
        policy || self.kl.is_some() || self.entropy != 0.0
    }

    fn evaluate_surrogate(&self, at: &Point, x: f64) -> Surrogate {
        let Point { logp, advantage, .. } = *at;
        let sequence_log_ratio = at.sequence_log_ratio.unwrap_or(x);
        match self.policy {
            PolicyLoss::CrossEntropy => surrogate::reinforce_loss(logp, 1.0),
            PolicyLoss::Reinforce => surrogate::reinforce_loss(logp, advantage),
            PolicyLoss::ImportanceSampling => surrogate::importance_sampling_loss(x, advantage),
            PolicyLoss::Clip { low, high, keep: Some(keep), .. } => {
                let beyond = (keep.below, keep.above);
                surrogate::partly_clipped_loss(x, advantage, low, high, beyond, keep.in_value_only)
            }
            PolicyLoss::ClipCov { low, high, .. } => {
                surrogate::clipped_loss(x, advantage, low, high, None)
            }
            PolicyLoss::Clip { low, high, dual, .. } => {
                surrogate::clipped_loss(x, advantage, low, high, dual)
            }
            PolicyLoss::MiniRl { .. } => surrogate::weighted_reinforce_loss(logp, x, advantage),
            PolicyLoss::Cispo { low, high } => surrogate::cispo_loss(logp, x, advantage, low, high),
            PolicyLoss::Gspo { low, high } => {
                surrogate::sequence_clipped_loss(sequence_log_ratio, advantage, low, high)
            }
            PolicyLoss::GeometricMean { .. } => {
                surrogate::geometric_mean_loss(sequence_log_ratio, advantage, at.marked)
            }
            PolicyLoss::SoftGate { positive, negative } => {
                surrogate::soft_gate_loss(x, advantage, positive, negative)
            }
            PolicyLoss::Direct { beta } => surrogate::direct_loss(logp, x, advantage, beta),
            PolicyLoss::Divergence { measure, below, above, cap } => {
                let old = at.old.unwrap_or(logp);
                let divergence = match measure {
                    Divergence::TotalVariation => surrogate::total_variation(logp, old),
                    Divergence::Kl => surrogate::binary_kl(logp, old),
                };
                surrogate::divergence_masked_loss(logp, x, advantage, cap, divergence, below, above)
            }
            PolicyLoss::KlCov { coefficient, .. } => {
                surrogate::penalized_loss(x, advantage, if at.marked { coefficient } else { 0.0 })
            }
            PolicyLoss::Value { clip } => {
                surrogate::value_loss(logp, at.returns, clip.zip(at.value))
            }
        }
    }
}

#[cfg(test)]
#[path = "loss_tests.rs"]
mod tests;
