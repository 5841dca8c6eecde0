//! Measures the mismatch between sampler and learner, by the age of the weights that sampled a
//! token and by the token's position.
//!
//! A difference that grows with age comes from training. A difference at age 0 comes from numerics.
//! A difference that grows with position accumulates along a sequence: in keys and values of an
//! earlier version, or in position encodings that the two sides compute differently.

use crate::metrics::Metrics;

/// Number of token ages (in weight versions) with a separate class. Older tokens share the last
/// class.
const AGES: u32 = 4;

/// First position of each position class, in tokens from the start of the sequence.
const POSITION_BOUNDS: [u32; 5] = [0, 64, 256, 1024, 4096];

/// Absolute differences between the log-probabilities of sampler and learner, by age and by
/// position of the token.
#[derive(Debug, Clone, Default)]
pub(crate) struct MismatchBreakdown {
    ages: [MismatchClass; AGES as usize + 1],
    by_position: [MismatchClass; POSITION_BOUNDS.len()],
}

/// Number, sum and maximum of the absolute log-probability differences in one class of tokens.
#[derive(Debug, Clone, Copy, Default)]
struct MismatchClass {
    count: u64,
    sum: f64,
    max: f64,
}

impl MismatchClass {
    fn add(&mut self, difference: f64) {
        self.count += 1;
        self.sum += difference;
        self.max = self.max.max(difference);
    }
}

impl MismatchBreakdown {
    /// Adds a token: its age in versions, its position in the sequence, and the difference
    /// |log p_proximal − log p_behavior|.
    pub(crate) fn add(&mut self, age: u32, position: u32, difference: f64) {
        self.ages[age.min(AGES) as usize].add(difference);
        let after = POSITION_BOUNDS.partition_point(|&start| start <= position);
        self.by_position[after - 1].add(difference);
    }

    /// Adds the mean and maximum of every non-empty class to the metrics of a step.
    pub(crate) fn report(&self, metrics: &mut Metrics) {
        let ages = self.ages.iter().zip(0..).map(|(class, age)| {
            let and_older = if age == AGES { "_up" } else { "" };
            (class, format!("age_{age}{and_older}"))
        });
        let by_position = self
            .by_position
            .iter()
            .zip(POSITION_BOUNDS)
            .map(|(class, start)| (class, format!("from_{start}")));
        for (class, name) in ages.chain(by_position).filter(|(class, _)| class.count > 0) {
            metrics
                .add(format!("rollout_corr/log_diff_mean_{name}"), class.sum / class.count as f64);
            metrics.add(format!("rollout_corr/log_diff_max_{name}"), class.max);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mismatch_is_classified_by_age_and_position() {
        let mut breakdown = MismatchBreakdown::default();
        for (age, position, difference) in
            [(0, 0, 0.5), (0, 63, 1.5), (1, 64, 2.0), (4, 4095, 3.0), (9, 9000, 5.0)]
        {
            breakdown.add(age, position, difference);
        }
        let mut metrics = Metrics::default();
        breakdown.report(&mut metrics);
        let of = |name: &str| metrics.get(&format!("rollout_corr/log_diff_{name}"));
        for (name, value) in [
            ("mean_age_0", Some(1.0)),
            ("max_age_0", Some(1.5)),
            ("mean_age_1", Some(2.0)),
            ("mean_age_2", None),
            ("mean_age_4_up", Some(4.0)),
            ("max_age_4_up", Some(5.0)),
            ("mean_from_0", Some(1.0)),
            ("mean_from_64", Some(2.0)),
            ("mean_from_256", None),
            ("mean_from_1024", Some(3.0)),
            ("mean_from_4096", Some(5.0)),
        ] {
            assert_eq!(of(name), value, "{name}");
        }
    }
}
