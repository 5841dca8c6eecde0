//! Writes test vectors of every loss at random terms, and of merging, as JSON to stdout. Learners
//! in other languages are tested with them (`python/levade_torch/tests/vectors.json`).
//!
//! `cargo run -p levade-rl --example loss_vectors > python/levade_torch/tests/vectors.json`

#![allow(clippy::unwrap_used)]

use levade_rl::correction::Bound;
use levade_rl::{
    Divergence, InterpolatedProximal, Interpolation, KeepGradient, KlEstimator, KlPenalty, Loss,
    PolicyLoss, TrustRegion,
};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};
use serde_json::{Value, json};

/// Generator of numbers in [0, 1): SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn uniform_in(&mut self, low: f64, high: f64) -> f32 {
        (low + (high - low) * self.next()) as f32
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() * f64::from(n)) as u32
    }

    fn sometimes(&mut self, value: f32) -> Option<f32> {
        (self.next() < 0.7).then_some(value)
    }
}

fn losses() -> Vec<Loss> {
    let clip = |dual, trust, keep| PolicyLoss::Clip { low: 0.2, high: 0.28, dual, trust, keep };
    let trust = TrustRegion { cap: 2.0, strict: false, age_decay: 0.1 };
    let strict = TrustRegion { strict: true, ..trust };
    let keep = |in_value_only| Some(KeepGradient { below: 0.5, above: 0.25, in_value_only });
    let divergence =
        |measure| PolicyLoss::Divergence { measure, below: 0.1, above: 0.15, cap: 1.5 };
    let mut losses: Vec<Loss> = [
        PolicyLoss::CrossEntropy,
        PolicyLoss::Reinforce,
        PolicyLoss::ImportanceSampling,
        clip(None, None, None),
        clip(Some(2.0), None, None),
        clip(None, Some(trust), None),
        clip(Some(2.0), Some(strict), None),
        clip(None, None, keep(false)),
        clip(None, Some(trust), keep(true)),
        PolicyLoss::MiniRl { low: 0.2, high: 0.28, trust },
        PolicyLoss::MiniRl { low: 0.2, high: 0.28, trust: strict },
        PolicyLoss::Cispo { low: 0.2, high: 0.28 },
        PolicyLoss::Gspo { low: 0.2, high: 0.28 },
        PolicyLoss::GeometricMean { low: 0.4, high: 0.4 },
        PolicyLoss::SoftGate { positive: 1.0, negative: 1.05 },
        PolicyLoss::Direct { beta: 0.5 },
        divergence(Divergence::TotalVariation),
        divergence(Divergence::Kl),
        PolicyLoss::KlCov { coefficient: 0.5, fraction: 0.2 },
        PolicyLoss::ClipCov { low: 0.2, high: 0.28, fraction: 0.2, lower: 0.1, upper: 5.0 },
        PolicyLoss::Value { clip: None },
        PolicyLoss::Value { clip: Some(0.2) },
    ]
    .map(Loss::new)
    .to_vec();
    use KlEstimator::*;
    for estimator in [K1, K2, K3, Absolute, K1WithK2Gradient, K3WithK2Gradient] {
        for importance_weighted in [false, true] {
            let kl = Some(KlPenalty { estimator, coefficient: 0.3, importance_weighted });
            losses.push(Loss { kl, ..Loss::new(clip(Some(2.0), None, None)) });
        }
    }
    let bounds = [Bound::Clamp { low: 0.5, high: 2.0 }, Bound::Mask { low: 0.7, high: 1.5 }];
    for by in [Interpolation::LogLinear, Interpolation::Linear] {
        for bound in bounds {
            let interpolated = Some(InterpolatedProximal { by, bound });
            losses.push(Loss { interpolated, ..Loss::new(clip(None, None, None)) });
        }
    }
    losses.push(Loss { entropy: 0.01, ..Loss::new(clip(None, None, None)) });
    losses
}

/// Returns a term, and the log-probability (or value) at which it is evaluated. Some are extreme.
fn term(random: &mut Random) -> (f32, Term) {
    let logp = random.uniform_in(-6.0, -0.01);
    let spread = if random.next() < 0.1 { 30.0 } else { 1.0 };
    let [behavior, proximal, reference] =
        [(); 3].map(|()| logp + random.uniform_in(-spread, spread));
    let term = Term {
        sequence: random.below(5),
        weight: if random.next() < 0.1 { 0.0 } else { random.uniform_in(0.001, 0.02) },
        advantage: if random.next() < 0.1 { 0.0 } else { random.uniform_in(-2.0, 2.0) },
        returns: random.uniform_in(-2.0, 2.0),
        value: Some(logp + random.uniform_in(-0.5, 0.5)),
        behavior: random.sometimes(behavior),
        proximal: random.sometimes(proximal),
        reference: random.sometimes(reference),
        sequence_log_ratio: if random.next() < 0.1 {
            Some(12.0)
        } else {
            Some(random.uniform_in(-0.6, 0.6))
        },
        selected: random.next() < 0.5,
        correction: if random.next() < 0.2 {
            Some(0.0)
        } else {
            Some(1.5).filter(|_| random.next() < 0.5)
        },
        age: random.below(4),
        version: 0,
    };
    (logp, term)
}

/// Evaluates a loss at all points.
fn evaluated(loss: &Loss, points: &[(f32, Term)]) -> Value {
    let found = points.iter().map(|(logp, term)| loss.evaluate(*logp, term));
    let rows: Vec<Value> = found
        .map(|e| {
            json!([e.loss, e.derivative, e.ratio, e.log_ratio, e.clipped, e.dual, e.dropped, e.kl])
        })
        .collect();
    json!({ "loss": loss, "evaluated": rows })
}

fn evaluated_terms(random: &mut Random) -> Vec<Value> {
    let mut points: Vec<(f32, Term)> = (0..48).map(|_| term(random)).collect();
    // A token with probability 1, and a token exactly on its old policy.
    points[0].1.proximal = Some(0.0);
    points[1].1.proximal = Some(points[1].0);
    points[1].1.behavior = Some(points[1].0);
    let losses: Vec<Value> = losses().iter().map(|loss| evaluated(loss, &points)).collect();
    let points: Vec<Value> =
        points.iter().map(|(at, term)| json!({ "at": at, "term": term })).collect();
    vec![json!(points), json!(losses)]
}

/// Returns a sequence of up to 14 tokens below `letters`.
fn sequence(random: &mut Random, letters: u32) -> SequenceInput {
    let tokens: Vec<u32> = (0..1 + random.below(14)).map(|_| random.below(letters)).collect();
    let chosen = (1..tokens.len() as u32).filter(|_| random.next() < 0.6).collect::<Vec<_>>();
    let targets = chosen.into_iter().map(|index| SequenceTarget {
        index,
        temperature: if random.next() < 0.3 { 0.7 } else { 1.0 },
        term: term(random).1,
    });
    SequenceInput { targets: targets.collect(), tokens: tokens.into() }
}

fn merged_batch(random: &mut Random) -> Value {
    let letters = 2 + random.below(3);
    let sequences: Vec<SequenceInput> =
        (0..1 + random.below(9)).map(|_| sequence(random, letters)).collect();
    let merged = TreeBatch::merge(&sequences).unwrap();
    json!({ "paths": sequences, "merged": merged })
}

fn main() {
    let mut random = Random(7);
    let [points, losses] = evaluated_terms(&mut random).try_into().unwrap();
    let merged: Vec<Value> = (0..12).map(|_| merged_batch(&mut random)).collect();
    let vectors = json!({ "points": points, "losses": losses, "merged": merged });
    println!("{vectors}");
}
