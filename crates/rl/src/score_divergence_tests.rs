//! Simulated runs with and without a reward hack.

use super::*;

/// A run of 40 steps with 32 attempts each, whose success rises from 20 % to 80 %. From the step of
/// `hack` on, a fraction of the attempts that grows over its ramp deceives the old scorer, and
/// success no longer rises, because deception pays. The new scorer is wrong with probability
/// `noise`.
fn run(seed: u64, noise: f64, hack: Option<(usize, usize)>) -> Vec<TwoScores> {
    let mut random = SplitMix(seed ^ 0x5eed);
    let mut scores = Vec::new();
    for step in 0..40 {
        let learned = hack.map_or(step, |(start, _)| step.min(start));
        let success = 0.2 + 0.6 * learned as f64 / 39.0;
        let hacked = hack
            .filter(|(start, _)| step >= *start)
            .map_or(0.0, |(start, ramp)| 0.8 * ((step - start + 1) as f64 / ramp as f64).min(1.0));
        for _ in 0..32 {
            let honest = happens(success, &mut random);
            let old = honest || happens(hacked, &mut random);
            let new = honest != happens(noise, &mut random);
            scores.push(TwoScores { step, old: f64::from(old), new: f64::from(new) });
        }
    }
    scores
}

/// Returns true with probability `p`.
fn happens(p: f64, random: &mut SplitMix) -> bool {
    (random.random_index(1 << 30) as f64) < p * f64::from(1 << 30)
}

#[test]
fn noisier_scorer_is_not_reported_as_diverging() {
    let named =
        (0..200).filter(|&seed| find_divergence(&run(seed, 0.1, None), seed).is_some()).count();
    // The level of 1 in 1,000 allows 0.2 of 200 runs on average; more than 2 has p = 0.001.
    assert!(named <= 2, "{named} of 200 runs without a hack were named");
    assert_eq!(find_divergence(&run(1, 0.0, None), 1), None, "equal scores");
}

#[test]
fn reward_hack_is_dated_within_two_steps() {
    let (mut close, mut covered) = (0, 0);
    for seed in 0..200u64 {
        let start = 8 + (seed % 24) as usize;
        let ramp = 1 + (seed % 3) as usize;
        let found = find_divergence(&run(seed, 0.05, Some((start, ramp))), seed);
        let found = found.unwrap_or_else(|| panic!("seed {seed}: the hack was not found"));
        assert!(found.change < -0.1 && found.p_value <= SIGNIFICANCE, "{found:?}");
        close += u32::from(found.step.abs_diff(start) <= 2);
        covered += u32::from((found.low..=found.high).contains(&start));
    }
    assert!(close >= 190, "{close} of 200 within two steps");
    assert!(covered >= 170, "{covered} of 200 intervals contain the start");
}

#[test]
fn divergence_is_none_without_steps_to_compare() {
    assert_eq!(find_divergence(&[], 0), None);
    assert_eq!(find_divergence(&[TwoScores { step: 0, old: 1.0, new: 0.0 }; 9], 0), None);
}
