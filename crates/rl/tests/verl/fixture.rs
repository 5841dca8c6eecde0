//! The shared fixture, and comparison of results with the vectors.

use levade_rl::*;
use serde_json::Value;

use crate::common::{Vectors, assert_close};
use crate::evaluate;

pub fn vectors() -> Vectors {
    Vectors::new(include_str!("../verl.json"))
}

/// Returns the values of the action tokens, row by row.
pub fn masked_values(rows: &[Vec<f64>], mask: &[Vec<f64>]) -> Vec<Vec<f64>> {
    rows.iter()
        .zip(mask)
        .map(|(row, mask)| row.iter().zip(mask).filter(|(_, m)| **m == 1.0).map(|(v, _)| *v))
        .map(Iterator::collect)
        .collect()
}

/// Returns a number of a case.
pub fn number(case: &Value, name: &str) -> f64 {
    case[name].as_f64().unwrap()
}

/// Returns the weight of the tokens of each row of `mask`, as in verl's aggregation.
pub fn row_weights(normalizer: Normalizer, mask: &[Vec<f64>]) -> Vec<f64> {
    let rollouts: Vec<RolloutTokens> = mask
        .iter()
        .map(|row| RolloutTokens { group: 0, tokens: row.iter().sum::<f64>() as u64 })
        .collect();
    normalizer.weights_counted(&rollouts, Counting::Verl)
}

/// The fixture of most vectors: four rollouts, the first three of one task.
pub struct Fixture {
    pub v: Vectors,
    pub mask: Vec<Vec<f64>>,
}

impl Fixture {
    pub fn new() -> Self {
        let v = vectors();
        let mask = v.rows("anchor/fixture/response_mask");
        Fixture { v, mask }
    }

    pub fn masked_rows(&self, keys: &str) -> Vec<Vec<f64>> {
        masked_values(&self.v.rows(keys), &self.mask)
    }

    pub fn values_of(&self, name: &str) -> Vec<Vec<f64>> {
        self.masked_rows(&format!("anchor/fixture/{name}"))
    }

    /// Returns the lengths of a row's turns, which are runs of action tokens.
    pub fn turn_lengths(&self, row: usize) -> Vec<usize> {
        self.mask[row].split(|m| *m == 0.0).map(<[f64]>::len).filter(|len| *len > 0).collect()
    }

    pub fn rollouts(&self) -> Vec<Rollout> {
        let uid = self.v.list("anchor/fixture/uid");
        let all = self.v.rows("anchor/fixture/token_level_rewards");
        let rewards = self.values_of("token_level_rewards");
        let values = self.values_of("values");
        let behavior = self.values_of("old_log_prob");
        let concentration = self.masked_rows("anchor/otb/sum_pi_squared");
        (0..4)
            .map(|i| Rollout {
                group: uid[i] as u64,
                score: all[i].iter().sum(),
                sequences: vec![Sequence {
                    turns: self.turn_lengths(i),
                    turns_before: 0,
                    truncation_value: None,
                    rewards: rewards[i].clone(),
                    values: values[i].clone(),
                    behavior: behavior[i].clone(),
                    concentration: concentration[i].clone(),
                    positions: (0..6).filter(|t| self.mask[i][*t] == 1.0).collect(),
                    masked: Vec::new(),
                }],
                ..Rollout::default()
            })
            .collect()
    }

    /// Compares the advantages, and the returns if `returns` is given.
    #[track_caller]
    pub fn expect(&self, estimator: &Estimator, advantages: &str, returns: Option<&str>) {
        let got = estimator.advantages(&self.rollouts()).unwrap();
        self.compare(&got, advantages, |sequence| &sequence.advantages);
        if let Some(returns) = returns {
            self.compare(&got, returns, |sequence| &sequence.returns);
        }
    }

    #[track_caller]
    pub fn compare(
        &self,
        got: &[Vec<SequenceAdvantages>],
        keys: &str,
        of: impl Fn(&SequenceAdvantages) -> &Vec<f64>,
    ) {
        for (i, (got, want)) in got.iter().zip(self.masked_rows(keys)).enumerate() {
            assert_eq!(of(&got[0]).len(), want.len());
            for (t, (got, want)) in of(&got[0]).iter().zip(want).enumerate() {
                assert_close(*got, want, &format!("{keys}, row {i}, action token {t}"));
            }
        }
    }

    /// Compares one advantage per rollout.
    #[track_caller]
    pub fn expect_scalars(&self, baseline: GroupBaseline, keys: &str) {
        let got = Estimator::Group(baseline).advantages(&self.rollouts()).unwrap();
        for (i, (got, want)) in got.iter().zip(self.v.list(keys)).enumerate() {
            assert!(got[0].advantages.iter().all(|a| *a == got[0].advantages[0]));
            assert_close(got[0].advantages[0], want, &format!("{keys}, row {i}"));
        }
    }

    pub fn points(&self) -> Vec<Vec<Point>> {
        let old = self.values_of("old_log_prob");
        let new = self.values_of("log_prob");
        let reference = self.values_of("ref_log_prob");
        let advantages = self.masked_rows("anchor/policy_advantages");
        let point = |i: usize, t: usize| Point {
            logp: new[i][t],
            old: Some(old[i][t]),
            reference: Some(reference[i][t]),
            advantage: advantages[i][t],
            ..Point::default()
        };
        (0..4).map(|i| (0..new[i].len()).map(|t| point(i, t)).collect()).collect()
    }

    /// Returns the weight of the tokens of each row, as in verl's aggregation.
    pub fn weights(&self, normalizer: Normalizer) -> Vec<f64> {
        row_weights(normalizer, &self.mask)
    }

    /// Compares a policy loss as [`Fixture::expect_loss`] does.
    #[track_caller]
    pub fn expect_policy(
        &self,
        policy: PolicyLoss,
        points: &[Vec<Point>],
        normalizer: Normalizer,
        keys: &str,
    ) {
        self.expect_loss(Loss::new(policy), points, normalizer, keys);
    }

    /// Compares the sum and the gradient of a loss over points with `keys`/loss and
    /// `keys`/grad_log_prob.
    #[track_caller]
    pub fn expect_loss(
        &self,
        loss: Loss,
        points: &[Vec<Point>],
        normalizer: Normalizer,
        keys: &str,
    ) {
        loss.check_parameters().unwrap();
        self.expect_sum(
            loss,
            points,
            normalizer,
            &format!("{keys}/grad_log_prob"),
            &format!("{keys}/loss"),
        );
    }

    /// Compares a loss and its derivatives with the vectors under the two keys.
    #[track_caller]
    pub fn expect_sum(
        &self,
        loss: Loss,
        points: &[Vec<Point>],
        normalizer: Normalizer,
        gradients: &str,
        sum: &str,
    ) {
        let weights = self.weights(normalizer);
        let weights: Vec<Vec<f64>> =
            points.iter().zip(weights).map(|(row, weight)| vec![weight; row.len()]).collect();
        let (got, got_gradients) = evaluate(loss, points, &weights);
        for (i, (got, want)) in got_gradients.iter().zip(self.masked_rows(gradients)).enumerate() {
            for (t, (got, want)) in got.iter().zip(want).enumerate() {
                assert_close(*got, want, &format!("{gradients} {i} {t}"));
            }
        }
        assert_close(got, self.v.number(sum), sum);
    }

    pub fn log_ratios(&self) -> Vec<Vec<f64>> {
        let old = self.values_of("old_log_prob");
        let rollout = self.values_of("rollout_log_prob");
        old.iter()
            .zip(rollout)
            .map(|(o, r)| o.iter().zip(r).map(|(o, r)| o - r).collect())
            .collect()
    }
}

pub const SCORE: GroupBaseline = GroupBaseline {
    compare: Compare::Mean,
    scale_by_std: false,
    singleton: Singleton::Score,
    scale: 1.0,
    success: None,
};
