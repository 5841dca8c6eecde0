//! Means, variances and whitening (mean 0, standard deviation 1).

use serde::{Deserialize, Serialize};

/// Term added to the variance before its square root, as in common implementations.
const VARIANCE_EPSILON: f64 = 1e-8;

/// Denominator with which a mean is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Counting {
    /// The denominator is the number of values.
    #[default]
    Exact,
    /// The denominator is the number of values plus 10⁻⁸, like in verl. Results change by a
    /// relative difference of at most 10⁻⁸.
    Verl,
}

impl Counting {
    /// Returns the denominator of a mean over `n` values.
    pub fn denominator(self, n: f64) -> f64 {
        match self {
            Counting::Exact => n,
            Counting::Verl => n + 1e-8,
        }
    }

    /// Returns the mean of the values, or 0 if there are no values.
    pub fn mean(self, values: impl Iterator<Item = f64>) -> f64 {
        let (sum, n) = values.fold((0.0, 0.0), |(sum, n), value| (sum + value, n + 1.0));
        if n == 0.0 { 0.0 } else { sum / self.denominator(n) }
    }

    /// Returns the variance of the values around `mean`, with denominator n − 1. Returns 0 for
    /// fewer than two values.
    pub fn variance(self, values: impl Iterator<Item = f64>, mean: f64) -> f64 {
        let (sum, n) =
            values.fold((0.0, 0.0), |(sum, n), v| (sum + (v - mean) * (v - mean), n + 1.0));
        if n < 2.0 { 0.0 } else { sum / self.denominator(n) * n / (n - 1.0) }
    }
}

/// An affine map of values to mean 0 and standard deviation 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Whitening {
    mean: f64,
    /// 1 / standard deviation of the values. `None` if all values are equal.
    scale: Option<f64>,
}

impl Whitening {
    /// Creates the whitening map from the mean and standard deviation of `values`.
    pub fn from_values(values: &[f64], counting: Counting) -> Self {
        let mean = counting.mean(values.iter().copied());
        let vary = values.windows(2).any(|pair| pair[0] != pair[1]);
        let scale = vary.then(|| {
            let variance = counting.variance(values.iter().copied(), mean);
            1.0 / (variance + VARIANCE_EPSILON).sqrt()
        });
        Whitening { mean, scale }
    }

    /// Returns a map that only divides by the standard deviation.
    pub fn without_mean(self) -> Self {
        Whitening { mean: 0.0, ..self }
    }

    /// Whitens one value. Returns 0 if all values were equal.
    pub fn apply(self, value: f64) -> f64 {
        self.scale.map_or(0.0, |scale| (value - self.mean) * scale)
    }
}

/// Whitens values in place: subtracts their mean and divides by their standard deviation. If all
/// values are equal, they become 0.
pub fn whiten<'a>(values: impl Iterator<Item = &'a mut f64>, counting: Counting) {
    let values: Vec<&mut f64> = values.collect();
    let whitening =
        Whitening::from_values(&values.iter().map(|v| **v).collect::<Vec<_>>(), counting);
    values.into_iter().for_each(|value| *value = whitening.apply(*value));
}

/// Returns the fraction of the returns' variance that a critic's values explain, as in verl: 1 −
/// var(R − V) / (var R + 1e-5).
pub fn explained_variance(returns: &[f64], values: &[f64]) -> f64 {
    let errors: Vec<f64> = returns.iter().zip(values).map(|(r, v)| r - v).collect();
    1.0 - variance(&errors) / (variance(returns) + 1e-5)
}

fn variance(values: &[f64]) -> f64 {
    let mean = Counting::Exact.mean(values.iter().copied());
    Counting::Exact.variance(values.iter().copied(), mean)
}
