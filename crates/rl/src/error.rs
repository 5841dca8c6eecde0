//! Errors in the input of a loss, an advantage or a statistic.

impl RlError {
    pub(crate) fn range(ok: bool, name: &'static str, value: f64, range: &'static str) -> Result<(), Self> {
        if ok { Ok(()) } else { Err(RlError::Parameter { name, value, range }) }
    }

    pub(crate) fn positive(name: &'static str, value: f64) -> Result<(), Self> {
        Self::range(value > 0.0 && value.is_finite(), name, value, "finite and more than 0")
    }

    pub(crate) fn at_least_0(name: &'static str, value: f64) -> Result<(), Self> {
        Self::range(value >= 0.0 && value.is_finite(), name, value, "finite and at least 0")
    }

    pub(crate) fn share(name: &'static str, value: f64) -> Result<(), Self> {
        Self::range((0.0..=1.0).contains(&value), name, value, "in 0..=1")
    }
}

/// An error in the input of a loss, an advantage or a statistic.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RlError {
    /// A parameter lies outside its range.
    #[error("{name} = {value}, but it must be {range}")]
    Parameter {
        /// Which parameter.
        name: &'static str,
        /// Value of the option.
        value: f64,
        /// Range that the value must lie in.
        range: &'static str,
    },
    /// A ratio is asked for, but nobody recorded what the token was sampled with.
    #[error(
        "term {term} (path {path}) has no behaviour log-probability, which a loss of ratios needs: train \
         demonstrations with cross-entropy, or record the log-probabilities of sampled tokens"
    )]
    NoBehaviour {
        /// The term, by its place in the batch.
        term: usize,
        /// Path at fault.
        path: u32,
    },
    /// A divergence is asked for, but the reference was not evaluated.
    #[error(
        "term {term} (path {path}) has no reference log-probability, which the KL penalty needs: evaluate the frozen \
         reference on the batch first, or remove the penalty"
    )]
    NoReference {
        /// The term, by its place in the batch.
        term: usize,
        /// Path at fault.
        path: u32,
    },
    /// A change of value is bounded, but nobody recorded the value.
    #[error(
        "term {term} (path {path}) has no value from before, which a clipped value loss needs: evaluate the critic on the \
         batch first, or remove the clip"
    )]
    NoValue {
        /// The term, by its place in the batch.
        term: usize,
        /// Path at fault.
        path: u32,
    },
    /// A loss over whole paths is asked for, but the paths' ratios were not worked out.
    #[error("term {term} (path {path}) has no log-ratio of its path, which a loss over whole paths needs")]
    NoPathRatio {
        /// The term, by its place in the batch.
        term: usize,
        /// Path at fault.
        path: u32,
    },
    /// A rollout lacks what the estimator needs.
    #[error("the advantage needs {needed} {what}, one for each action token, but there are {found}")]
    Missing {
        /// Which numbers.
        what: &'static str,
        /// How many are needed.
        needed: usize,
        /// How many there are.
        found: usize,
    },
    /// A rollout's score has another number of parts than there are weights.
    #[error("there are weights for {needed} parts of a score, but a rollout's score has {found}")]
    Components {
        /// How many parts have a weight.
        needed: usize,
        /// How many the score has.
        found: usize,
    },
    /// There is nobody to compare with.
    #[error(
        "group {group} has no rival's score, which this advantage needs: roll each task out greedily as well"
    )]
    NoRival {
        /// The group.
        group: u64,
    },
    /// A number of a term is infinite or not a number.
    #[error("term {term} (path {path}) has {what} {value}: only finite numbers can be trained on")]
    NotFinite {
        /// The term, by its place in the batch.
        term: usize,
        /// Path at fault.
        path: u32,
        /// Which number.
        what: &'static str,
        /// Value that is no number.
        value: f32,
    },
    /// A score is infinite or not a number.
    #[error("score {index} is {value}: scores must be finite")]
    Score {
        /// The score, by its place in the input.
        index: usize,
        /// Value that is no number.
        value: f64,
    },
    /// More successes than trials.
    #[error("{successes} successes in {trials} trials")]
    Proportion {
        /// How many succeeded.
        successes: u64,
        /// How many were tried.
        trials: u64,
    },
    /// A statistic of nothing.
    #[error(
        "nothing was observed, so there is nothing to estimate: pass at least one observation and one resample"
    )]
    NoObservations,
}
