//! Samples a token from a row of logits.

use levade_policy::{SamplingParams, TokenSet, TopLogprobs};

use crate::ops::softmax::{
    SoftmaxNormalizer, TokenDistribution, argmax, exponentiate, scale_logits,
};
use crate::simd::Isa;

/// A sampled token, or a token of a scored prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    pub token: u32,
    /// Behavior log-probability: under the complete distribution at the request's temperature (1
    /// for greedy decoding), without filters, penalties and biases. It is the same number that
    /// training computes.
    pub logprob: f32,
    /// Most likely tokens of that distribution, as many as the request asks for.
    pub top: TopLogprobs,
}

/// Samples the next token. `logits` are scaled in place. `history` is the sequence before the
/// token, and its last `num_sampled` tokens belong to the completion. `allowed` are the tokens that
/// a grammar allows, if there is one. `u` is a uniform number in [0, 1). Returns `None` if logits
/// are not finite, so that no token can be sampled.
pub fn sample_token(
    isa: Isa,
    logits: &mut [f32],
    params: &SamplingParams,
    (history, num_sampled): (&[u32], usize),
    allowed: Option<&TokenSet>,
    u: f64,
) -> Option<SampledToken> {
    let greedy = params.temperature == 0.0;
    let temperature = params.behavior_temperature();
    let candidates = params.is_filtered().then(|| {
        let mut candidates = logits.to_vec();
        params.adjust(&mut candidates, history, num_sampled);
        if let Some(allowed) = allowed {
            allowed.restrict(&mut candidates, logits);
        }
        scale_logits(isa, &mut candidates, temperature);
        candidates
    });
    scale_logits(isa, logits, temperature);
    let distribution = TokenDistribution::from_logits(isa, logits);
    if !distribution.normalizer.sum.is_finite() {
        return None;
    }
    let token = match candidates {
        Some(candidates) if greedy => argmax(&candidates),
        Some(mut candidates) if params.has_truncation() => {
            sample_truncated(isa, &mut candidates, params, u)?
        }
        Some(candidates) => {
            let adjusted = TokenDistribution::from_logits(isa, &candidates);
            // A penalty can make logits infinite.
            adjusted.normalizer.sum.is_finite().then(|| adjusted.sample(isa, u))?
        }
        None if greedy => argmax(logits),
        None => distribution.sample(isa, u),
    };
    Some(to_sampled_token(&distribution.normalizer, logits, token, params.top_logprobs))
}

/// Scores a known token: returns it with its log-probability and the `top` most likely tokens at
/// its position. `logits` are scaled in place. Returns `None` if they are not finite.
pub fn score_token(
    isa: Isa,
    logits: &mut [f32],
    temperature: f32,
    token: u32,
    top: usize,
) -> Option<SampledToken> {
    scale_logits(isa, logits, temperature);
    let normalizer = TokenDistribution::from_logits(isa, logits).normalizer;
    normalizer.sum.is_finite().then(|| to_sampled_token(&normalizer, logits, token as usize, top))
}

/// Returns a token of a row of scaled logits, with the `top` most likely tokens.
fn to_sampled_token(
    normalizer: &SoftmaxNormalizer,
    logits: &[f32],
    token: usize,
    top: usize,
) -> SampledToken {
    let logprob = |token: usize| (token as u32, normalizer.log_probability(logits[token]));
    let top = most_likely(logits, top).into_iter().map(logprob).collect();
    SampledToken { token: token as u32, logprob: logprob(token).1, top }
}

/// Returns the indices of the `count` largest logits, largest first; among equal logits, the lower
/// index comes first.
fn most_likely(logits: &[f32], count: usize) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::new();
    if count == 0 {
        return best;
    }
    for (token, z) in logits.iter().enumerate() {
        if best.len() < count || *z > logits[best[count - 1]] {
            best.truncate(count - 1);
            best.insert(best.partition_point(|other| logits[*other] >= *z), token);
        }
    }
    best
}

/// Samples from the renormalized distribution that remains after top-k, then top-p, then min-p.
/// Equal logits are ranked by token id. Returns `None` if a penalty has made logits infinite.
fn sample_truncated(isa: Isa, z: &mut [f32], params: &SamplingParams, u: f64) -> Option<usize> {
    let (normalizer, _) = exponentiate(isa, z);
    if !normalizer.sum.is_finite() {
        return None;
    }
    let mut order: Vec<usize> = (0..z.len()).collect();
    order.sort_by(|a, b| z[*b].total_cmp(&z[*a]).then(a.cmp(b)));
    if params.top_k > 0 {
        order.truncate(params.top_k);
    }
    if params.top_p < 1.0 {
        let total: f64 = order.iter().map(|t| f64::from(z[*t])).sum();
        let mut mass = 0.0;
        // The token that reaches the mass is kept, so that at least one token remains.
        let kept = order.iter().take_while(|t| {
            let wanted = mass < f64::from(params.top_p) * total;
            mass += f64::from(z[**t]);
            wanted
        });
        let kept = kept.count();
        order.truncate(kept.max(1));
    }
    let min_probability = params.min_p * z[order[0]];
    order.retain(|t| z[*t] >= min_probability);
    let goal = u * order.iter().map(|t| f64::from(z[*t])).sum::<f64>();
    let mut below = 0.0;
    // The most likely token is first, and serves as fallback if rounding leaves `goal` unreached.
    let sampled = order.iter().copied().filter(|t| z[*t] > 0.0).find(|t| {
        below += f64::from(z[*t]);
        below > goal
    });
    Some(sampled.unwrap_or(order[0]))
}

#[cfg(test)]
mod tests {
    use levade_policy::uniform;

    use super::*;

    fn sampled_counts(params: &SamplingParams, before: &[u32], logits: &[f32]) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        for i in 0..3000 {
            let history = (before, before.len());
            let sampled = sample_token(
                Isa::detect(),
                &mut logits.to_vec(),
                params,
                history,
                None,
                uniform(1, 1, i),
            );
            let SampledToken { token, logprob: logp, .. } = sampled.expect("finite logits");
            counts[token as usize] += 1;
            let t = if params.temperature == 0.0 { 1.0 } else { f64::from(params.temperature) };
            let total: f64 = logits.iter().map(|z| (f64::from(*z) / t).exp()).sum();
            let exact = f64::from(logits[token as usize]) / t - total.ln();
            assert!((f64::from(logp) - exact).abs() < 1e-6, "the log-probability ignores filters");
        }
        counts
    }

    #[test]
    fn sample_token_applies_filters_and_temperature() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits: Vec<f32> = [8f32, 4.0, 2.0, 2.0].iter().map(|p| p.ln()).collect();
        let plain = SamplingParams::default();
        let all = sampled_counts(&plain, &[], &logits);
        assert!(all[0] > 1350 && all[0] < 1650 && all[2] > 250 && all[3] > 250, "{all:?}");
        let top_k = sampled_counts(&SamplingParams { top_k: 2, ..plain.clone() }, &[], &logits);
        assert!(top_k[2] + top_k[3] == 0 && top_k[1] > 850, "{top_k:?}");
        let top_p = sampled_counts(&SamplingParams { top_p: 0.7, ..plain.clone() }, &[], &logits);
        assert!(top_p[2] + top_p[3] == 0 && top_p[1] > 850, "{top_p:?}");
        let min_p = sampled_counts(&SamplingParams { min_p: 0.3, ..plain.clone() }, &[], &logits);
        assert!(min_p[2] + min_p[3] == 0 && min_p[1] > 850, "{min_p:?}");
        let greedy =
            sampled_counts(&SamplingParams { temperature: 0.0, ..plain.clone() }, &[], &logits);
        assert_eq!(greedy, [3000, 0, 0, 0]);
        let penalty = SamplingParams { temperature: 0.0, repetition_penalty: 2.0, ..plain.clone() };
        assert_eq!(sampled_counts(&penalty, &[0], &logits), [0, 3000, 0, 0]);
        let hot = sampled_counts(&SamplingParams { temperature: 50.0, ..plain }, &[], &logits);
        assert!(hot.iter().all(|c| *c > 600), "{hot:?}");
    }

    /// Compares tokens, log-probabilities and top tokens with a naive computation in f64, over more
    /// than one block.
    #[test]
    fn adjusted_samples_match_f64_reference() {
        let logits: Vec<f32> = (0..3000).map(|i| (16.0 * uniform(3, 1, i) - 8.0) as f32).collect();
        let history: Vec<u32> =
            (0..300).map(|i| (3000.0 * uniform(3, 2, i).powi(3)) as u32).collect();
        let plain =
            SamplingParams { temperature: 0.7, top_logprobs: 4, ..SamplingParams::default() };
        let all = SamplingParams {
            repetition_penalty: 1.2,
            presence_penalty: 0.5,
            frequency_penalty: 1.5,
            logit_bias: (0..3000).step_by(7).map(|token| (token, 1.5)).collect(),
            min_tokens: 101,
            stop_ids: vec![1, 2, 8],
            ..plain.clone()
        };
        let adjusted = |token: usize| {
            let z = f64::from(logits[token]);
            let count = |history: &[u32]| {
                history.iter().filter(|other| **other as usize == token).count() as f64
            };
            let penalty = if count(&history) == 0.0 { 1.0 } else { f64::from(1.2f32) };
            let c = count(&history[200..]);
            let z = if z > 0.0 { z / penalty } else { z * penalty } - 1.5 * c - 0.5 * c.min(1.0);
            let z = z + if token.is_multiple_of(7) { 1.5 } else { 0.0 };
            if [1, 2, 8].contains(&token) { 0.0 } else { (z / f64::from(0.7f32)).exp() }
        };
        let masses: Vec<f64> = (0..3000).map(adjusted).collect();
        let total: f64 = masses.iter().sum();
        let plain_total: f64 =
            logits.iter().map(|z| (f64::from(*z) / f64::from(0.7f32)).exp()).sum();
        let exact =
            |token: u32| f64::from(logits[token as usize]) / f64::from(0.7f32) - plain_total.ln();
        let mut order: Vec<u32> = (0..3000).collect();
        order.sort_by(|a, b| exact(*b).total_cmp(&exact(*a)));
        let mut checked = 0;
        let mut same = 0;
        for i in 0..400 {
            let u = uniform(1, 2, i);
            let sample = |params| {
                sample_token(Isa::detect(), &mut logits.clone(), params, (&history, 100), None, u)
                    .expect("finite logits")
            };
            let sampled = sample(&all);
            assert!(
                (f64::from(sampled.logprob) - exact(sampled.token)).abs() < 1e-5,
                "plain log-probabilities"
            );
            assert_eq!(sampled.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), order[..4]);
            assert!(
                sampled.top.iter().all(|(t, p)| (f64::from(*p) - exact(*t)).abs() < 1e-5),
                "{sampled:?}"
            );
            let below: f64 = masses[..sampled.token as usize].iter().sum();
            let above = below + masses[sampled.token as usize];
            assert!(below / total < u + 1e-6 && above / total > u - 1e-6, "{i}: {sampled:?}");
            checked += usize::from(above / total > u && below / total <= u);
            // Adjustments without effect sample the same tokens as the plain distribution.
            let no_op = SamplingParams { min_tokens: 101, stop_ids: vec![5000], ..plain.clone() };
            assert!(no_op.has_adjustments());
            assert_eq!(sample(&no_op), sample(&plain));
            same += usize::from(sample(&plain).token == sampled.token);
        }
        assert!(checked > 395 && same < 200, "{checked} {same}");
    }

    /// A grammar keeps the tokens it allows, renormalized, with every filter; log-probabilities
    /// stay those of the model.
    #[test]
    fn sample_token_respects_grammar_mask() {
        let logits: Vec<f32> = (0..70).map(|i| (6.0 * uniform(3, 1, i) - 3.0) as f32).collect();
        let allowed: TokenSet = [3, 40, 69].into_iter().collect();
        let plain = SamplingParams {
            grammar: Some(levade_policy::Grammar::JsonObject),
            stop_ids: vec![69],
            ..SamplingParams::default()
        };
        let total: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum();
        let mass: f64 = [3, 40, 69].iter().map(|t: &usize| f64::from(logits[*t]).exp()).sum();
        for (params, num_possible) in [
            (plain.clone(), 3),
            (SamplingParams { top_k: 2, ..plain.clone() }, 2),
            (SamplingParams { temperature: 0.0, ..plain.clone() }, 1),
            // The end is not allowed yet, unless no other token is allowed.
            (SamplingParams { min_tokens: 9, ..plain.clone() }, 2),
        ] {
            let mut counts = [0; 70];
            for i in 0..2000 {
                let u = uniform(1, 1, i);
                let sample = |set: &TokenSet| {
                    let history = (&[5][..], 1);
                    sample_token(Isa::detect(), &mut logits.clone(), &params, history, Some(set), u)
                        .expect("finite")
                };
                let sampled = sample(&allowed);
                counts[sampled.token as usize] += 1;
                let exact = f64::from(logits[sampled.token as usize]) - total.ln();
                assert!((f64::from(sampled.logprob) - exact).abs() < 1e-5, "the model's own");
                assert_eq!(sample(&[69].into_iter().collect()).token, 69);
            }
            assert_eq!(
                counts.iter().filter(|count| **count > 0).count(),
                num_possible,
                "{counts:?}"
            );
            if num_possible == 3 {
                for token in [3, 40, 69] {
                    let expected = 2000.0 * f64::from(logits[token]).exp() / mass;
                    assert!((f64::from(counts[token]) - expected).abs() < 120.0, "{counts:?}");
                }
            }
        }
    }

    #[test]
    fn most_likely_sorts_by_logit_then_index() {
        assert_eq!(most_likely(&[1.0, 3.0, 3.0, -1.0, 3.0, 7.0], 4), [5, 1, 2, 4]);
        assert_eq!(most_likely(&[1.0, 2.0], 4), [1, 0]);
        assert!(most_likely(&[1.0, 2.0], 0).is_empty());
    }

    #[test]
    fn sample_token_rejects_nonfinite_logits() {
        let plain = SamplingParams::default();
        let filtered = SamplingParams { top_p: 0.9, min_p: 0.1, ..plain.clone() };
        let greedy = SamplingParams { temperature: 0.0, ..plain.clone() };
        let penalized = SamplingParams { repetition_penalty: 1e-38, ..plain.clone() };
        for params in [plain, filtered, greedy, penalized.clone()] {
            for bad in [f32::NAN, f32::INFINITY] {
                for mut logits in [vec![bad; 40], [vec![1.0; 40], vec![bad]].concat()] {
                    assert_eq!(
                        sample_token(Isa::detect(), &mut logits, &params, (&[3], 1), None, 0.5),
                        None,
                        "{params:?}"
                    );
                }
            }
        }
        assert_eq!(
            sample_token(Isa::detect(), &mut [30.0; 40], &penalized, (&[3], 1), None, 0.5),
            None
        );
    }
}
