//! Random selection of opponents and judges among several policies.

use levade_policy::{PolicyError, uniform};

/// Several policies with weights, one of which is selected for each role of an attempt. The
/// selection is a function of the run's seed, the attempt's random stream and the role. So a
/// repeated attempt gets the same policies, and the selections for two roles of an attempt are
/// independent.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// Names of the policies, each with the sum of the weights up to and including its own.
    policies: Vec<(String, f64)>,
}

impl Mixture {
    /// Creates a mixture of named policies. The probability of a policy is proportional to its
    /// weight; the sum of the weights need not be 1.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] if there are no policies, a name occurs twice, a weight is
    /// negative or not finite, or all weights are 0.
    pub fn new<N: Into<String>>(
        policies: impl IntoIterator<Item = (N, f64)>,
    ) -> Result<Self, PolicyError> {
        let mut sum = 0.0;
        let mut known = Vec::<(String, f64)>::new();
        for (name, weight) in policies {
            let name = name.into();
            if !(weight >= 0.0 && weight.is_finite()) {
                return Err(PolicyError::Invalid(format!(
                    "the mixture of policies gives {name:?} the weight {weight}; weights must be 0 \
                     or more"
                )));
            }
            if known.iter().any(|(other, _)| *other == name) {
                return Err(PolicyError::Invalid(format!(
                    "the mixture of policies contains {name:?} twice; add up its weights"
                )));
            }
            sum += weight;
            known.push((name, sum));
        }
        if sum > 0.0 && sum.is_finite() {
            Ok(Mixture { policies: known })
        } else {
            Err(PolicyError::Invalid(
                "the mixture of policies has no policy with a weight above 0".into(),
            ))
        }
    }

    /// Returns the name of the policy that plays `role` in the attempt with the random stream
    /// `stream`. `seed` is the run's seed.
    pub fn pick_policy(&self, seed: u64, stream: u64, role: &str) -> &str {
        let sum = self.policies.last().map_or(0.0, |(_, sum)| *sum);
        let sample = uniform(seed, stream, role_counter(role)) * sum;
        let index = self.policies.partition_point(|(_, upto)| *upto <= sample);
        // Rounding may reach the sum; then the last policy with a positive weight is selected.
        let last = self.policies.partition_point(|(_, upto)| *upto < sum);
        self.policies.get(index.min(last)).map_or("", |(name, _)| name)
    }
}

/// Returns the counter of the random generator for a role: the FNV-1a hash of its name, in the
/// upper half of the counters, which token positions do not use.
fn role_counter(role: &str) -> u64 {
    role.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte: u8| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    }) | 1 << 63
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pick_follows_weights_independently_per_role() {
        let mixture =
            Mixture::new([("never", 0.0), ("policy", 4.0), ("external", 1.0), ("nor", 0.0)])
                .unwrap();
        let picks = |role: &str| -> Vec<bool> {
            (0..10_000).map(|stream| mixture.pick_policy(7, stream, role) == "policy").collect()
        };
        let one = picks("opponent");
        let other = picks("judge");
        let fraction = one.iter().filter(|policy| **policy).count() as f64 / 1e4;
        assert!((fraction - 0.8).abs() < 0.02, "{fraction}");
        let both = one.iter().zip(&other).filter(|(a, b)| **a && **b).count() as f64 / 1e4;
        assert!((both - 0.64).abs() < 0.02, "{both}");
    }

    /// Recorded runs depend on these picks.
    #[test]
    fn picked_policies_are_stable_across_levade_versions() {
        let mixture = Mixture::new([("a", 1.0), ("b", 1.0)]).unwrap();
        let picks: String =
            (0..16).map(|stream| mixture.pick_policy(1, stream, "opponent")).collect();
        assert_eq!(picks, "babbaaabbaaaaaab");
    }

    #[test]
    fn mixture_new_rejects_invalid_weights_and_names() {
        assert!(creation_error(&[]).contains("no policy with a weight above 0"));
        assert!(creation_error(&[("a", 0.0)]).contains("no policy with a weight above 0"));
        assert!(creation_error(&[("a", -1.0)]).contains("\"a\" the weight -1;"));
        assert!(creation_error(&[("a", f64::NAN)]).contains("NaN"));
        assert!(creation_error(&[("a", 1.0), ("a", 1.0)]).contains("\"a\" twice"));
    }

    fn creation_error(policies: &[(&str, f64)]) -> String {
        Mixture::new(policies.iter().map(|(name, weight)| (*name, *weight)))
            .unwrap_err()
            .to_string()
    }

    proptest! {
        #[test]
        fn pick_returns_policy_with_positive_weight(
            weights in prop::collection::vec(prop_oneof![Just(0.0), 1e-9f64..1e9], 1..6),
            seed: u64, stream: u64, role in ".{0,8}",
        ) {
            let named = weights.iter().enumerate().map(|(i, weight)| (i.to_string(), *weight));
            if let Ok(mixture) = Mixture::new(named) {
                let picked: usize = mixture.pick_policy(seed, stream, &role).parse().unwrap();
                prop_assert!(weights[picked] > 0.0);
            }
        }
    }
}
