//! Access to the reference vectors: nested numbers under the reference's own keys.

use levade_rl::{Loss, Point};
use serde_json::Value;

pub struct Vectors(Value);

impl Vectors {
    pub fn new(text: &str) -> Self {
        Vectors(serde_json::from_str(text).unwrap())
    }

    /// Returns the value under a path of keys, joined by `/`.
    pub fn value_at(&self, keys: &str) -> &Value {
        let found = keys.split('/').try_fold(&self.0, |value, key| value.get(key));
        found.unwrap_or_else(|| panic!("the vectors have nothing under {keys}"))
    }

    pub fn number(&self, keys: &str) -> f64 {
        self.value_at(keys).as_f64().unwrap()
    }

    pub fn list(&self, keys: &str) -> Vec<f64> {
        serde_json::from_value(self.value_at(keys).clone()).unwrap()
    }

    pub fn rows(&self, keys: &str) -> Vec<Vec<f64>> {
        serde_json::from_value(self.value_at(keys).clone()).unwrap()
    }
}

#[track_caller]
pub fn assert_close(got: f64, want: f64, what: &str) {
    assert_near(got, want, crate::TOLERANCE, what);
}

#[track_caller]
pub fn assert_near(got: f64, want: f64, tolerance: f64, what: &str) {
    assert!(
        (got - want).abs() <= tolerance.max(crate::TOLERANCE),
        "{what}: {got}, expected {want}"
    );
}

/// Computes Σ weight · loss over points, and its derivative with respect to each log-probability,
/// in f64.
pub fn evaluate_exactly(
    loss: Loss,
    rows: &[Vec<Point>],
    weights: &[Vec<f64>],
) -> (f64, Vec<Vec<f64>>) {
    let mut sum = 0.0;
    let mut gradients = Vec::new();
    for (row, weights) in rows.iter().zip(weights) {
        let mut gradient = Vec::new();
        for (point, weight) in row.iter().zip(weights) {
            let got = loss.at(point);
            sum += weight * got.loss;
            gradient.push(weight * got.derivative);
        }
        gradients.push(gradient);
    }
    (sum, gradients)
}
