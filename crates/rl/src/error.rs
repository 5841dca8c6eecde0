//! Errors in the input of a loss, an advantage or a statistic.

impl RlError {
    pub(crate) fn check_range(
        ok: bool,
        name: &'static str,
        value: f64,
        range: &'static str,
    ) -> Result<(), Self> {
        if ok { Ok(()) } else { Err(RlError::Parameter { name, value, range }) }
    }

    pub(crate) fn check_positive(name: &'static str, value: f64) -> Result<(), Self> {
        Self::check_range(value > 0.0 && value.is_finite(), name, value, "finite and more than 0")
    }

    pub(crate) fn check_non_negative(name: &'static str, value: f64) -> Result<(), Self> {
        Self::check_range(value >= 0.0 && value.is_finite(), name, value, "finite and at least 0")
    }

    pub(crate) fn check_fraction(name: &'static str, value: f64) -> Result<(), Self> {
        Self::check_range((0.0..=1.0).contains(&value), name, value, "in 0..=1")
    }
}

/// An error in the input of a loss, an advantage or a statistic.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RlError {
    /// A parameter is outside its valid range.
    #[error("{name} = {value}, but it must be {range}")]
    Parameter {
        /// Name of the parameter.
        name: &'static str,
        /// Value of the parameter.
        value: f64,
        /// Description of the valid range.
        range: &'static str,
    },
    /// The loss needs an importance ratio, but the token has no log-probability under the policy
    /// that sampled it.
    #[error(
        "term {term} (sequence {sequence}) has no behavior log-probability, which a loss with \
         importance ratios needs: train demonstrations with cross-entropy, or record the \
         log-probabilities of sampled tokens"
    )]
    NoBehavior {
        /// Index of the loss term in the batch.
        term: usize,
        /// Index of the term's sequence in the batch.
        sequence: u32,
    },
    /// The loss has a KL penalty, but the frozen reference was not evaluated.
    #[error(
        "term {term} (sequence {sequence}) has no reference log-probability, which the KL penalty \
         needs: evaluate the frozen reference on the batch first, or remove the penalty"
    )]
    NoReference {
        /// Index of the loss term in the batch.
        term: usize,
        /// Index of the term's sequence in the batch.
        sequence: u32,
    },
    /// The loss clips the change of a critic's value, but the earlier value was not recorded.
    #[error(
        "term {term} (sequence {sequence}) has no old value, which a clipped value loss needs: \
         evaluate the critic on the batch first, or remove the clip"
    )]
    NoValue {
        /// Index of the loss term in the batch.
        term: usize,
        /// Index of the term's sequence in the batch.
        sequence: u32,
    },
    /// The loss needs ratios of complete sequences, but they were not computed.
    #[error(
        "term {term} (sequence {sequence}) has no log-ratio of its sequence, which a \
         sequence-level loss needs"
    )]
    NoSequenceRatio {
        /// Index of the loss term in the batch.
        term: usize,
        /// Index of the term's sequence in the batch.
        sequence: u32,
    },
    /// A rollout lacks values that the advantage estimator needs.
    #[error(
        "the advantage needs {needed} {what}, one for each action token, but there are {found}"
    )]
    Missing {
        /// Description of the missing values, such as "positions".
        what: &'static str,
        /// Number of values that the estimator needs.
        needed: usize,
        /// Number of values that the rollout has.
        found: usize,
    },
    /// The number of components of a rollout's score differs from the number of weights.
    #[error(
        "there are weights for {needed} components of a score, but a rollout's score has {found}"
    )]
    Components {
        /// Number of weights, one for each component.
        needed: usize,
        /// Number of components of the rollout's score.
        found: usize,
    },
    /// The advantage estimator needs a score of another policy, but the rollout has none.
    #[error(
        "group {group} has no score of a greedy rollout, which this advantage needs: sample a \
         greedy rollout of each task as well"
    )]
    NoRival {
        /// Number of the rollout's group.
        group: u64,
    },
    /// A number in a loss term is infinite or NaN.
    #[error("term {term} (sequence {sequence}) has {what} {value}, but must be finite")]
    NotFinite {
        /// Index of the loss term in the batch.
        term: usize,
        /// Index of the term's sequence in the batch.
        sequence: u32,
        /// Name of the number that is not finite.
        what: &'static str,
        /// The number that is not finite.
        value: f32,
    },
    /// A score is infinite or NaN.
    #[error("score {index} is {value}: scores must be finite")]
    Score {
        /// Index, in the input, of the rollout, pair or score.
        index: usize,
        /// The score that is not finite.
        value: f64,
    },
    /// A proportion has more successes than trials.
    #[error("there are {successes} successes, but only {trials} trials")]
    Proportion {
        /// Number of successes.
        successes: u64,
        /// Number of trials.
        trials: u64,
    },
    /// A statistical estimate was requested without observations or without resamples.
    #[error("an estimate needs at least one observation and one resample")]
    NoObservations,
}
