//! Choosing a token from a row of logits.

use dressage_policy::SamplingParams;

use crate::ops::softmax::{Distribution, argmax, exponentiate, scale};
use crate::simd::Isa;

/// The next token and its behaviour log-probability, given logits (which are scaled in place), the tokens before it, and a
/// uniform number `u`; `None` where logits are not finite, so that no token can be drawn.
///
/// The log-probability is that of the whole distribution at the request's temperature (at 1 for greedy decoding), whatever
/// the filters: the very number that training computes.
pub fn choose(
    isa: Isa,
    logits: &mut [f32],
    params: &SamplingParams,
    before: &[u32],
    u: f64,
) -> Option<(u32, f32)> {
    let greedy = params.temperature == 0.0;
    let temperature = if greedy { 1.0 } else { params.temperature };
    let candidates = params.is_filtered().then(|| {
        let mut candidates = logits.to_vec();
        penalise(&mut candidates, params.repetition_penalty, before);
        scale(isa, &mut candidates, temperature);
        candidates
    });
    scale(isa, logits, temperature);
    let distribution = Distribution::of(isa, logits);
    if !distribution.normaliser.sum.is_finite() {
        return None;
    }
    let token = match candidates {
        Some(candidates) if greedy => argmax(&candidates),
        Some(mut candidates) => draw_filtered(isa, &mut candidates, params, u)?,
        None if greedy => argmax(logits),
        None => distribution.draw(isa, u),
    };
    Some((token as u32, distribution.normaliser.log_probability(logits[token])))
}

/// Repetition penalty (Keskar et al. 2019): positive logits of tokens already present are divided, negative ones multiplied.
fn penalise(logits: &mut [f32], penalty: f32, before: &[u32]) {
    if penalty == 1.0 {
        return;
    }
    let mut seen = before.to_vec();
    seen.sort_unstable();
    seen.dedup();
    for token in seen {
        if let Some(z) = logits.get_mut(token as usize) {
            *z = if *z > 0.0 { *z / penalty } else { *z * penalty };
        }
    }
}

/// Draws from what top-k, then top-p, then min-p leave, renormalised. Equal logits are ranked by token. `None` where a
/// penalty has made logits infinite.
fn draw_filtered(isa: Isa, z: &mut [f32], params: &SamplingParams, u: f64) -> Option<usize> {
    let (normaliser, _) = exponentiate(isa, z);
    if !normaliser.sum.is_finite() {
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
        // The token that reaches the mass is kept, so that at least one remains.
        let kept = order.iter().take_while(|t| {
            let wanted = mass < f64::from(params.top_p) * total;
            mass += f64::from(z[**t]);
            wanted
        });
        let kept = kept.count();
        order.truncate(kept.max(1));
    }
    let least = params.min_p * z[order[0]];
    order.retain(|t| z[*t] >= least);
    let goal = u * order.iter().map(|t| f64::from(z[*t])).sum::<f64>();
    let mut below = 0.0;
    // The first of them is the most likely one, so that there is one to fall back on.
    let drawn = order.iter().copied().filter(|t| z[*t] > 0.0).find(|t| {
        below += f64::from(z[*t]);
        below > goal
    });
    Some(drawn.unwrap_or(order[0]))
}

#[cfg(test)]
mod tests {
    use dressage_policy::uniform;

    use super::*;

    fn counts(params: &SamplingParams, before: &[u32], logits: &[f32]) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        for i in 0..3000 {
            let chosen = choose(Isa::detect(), &mut logits.to_vec(), params, before, uniform(1, 1, i));
            let (token, logp) = chosen.expect("finite logits");
            counts[token as usize] += 1;
            let t = if params.temperature == 0.0 { 1.0 } else { f64::from(params.temperature) };
            let total: f64 = logits.iter().map(|z| (f64::from(*z) / t).exp()).sum();
            let exact = f64::from(logits[token as usize]) / t - total.ln();
            assert!((f64::from(logp) - exact).abs() < 1e-6, "the log-probability ignores filters");
        }
        counts
    }

    #[test]
    fn filters_keep_what_they_say() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits: Vec<f32> = [8f32, 4.0, 2.0, 2.0].iter().map(|p| p.ln()).collect();
        let plain = SamplingParams::default();
        let all = counts(&plain, &[], &logits);
        assert!(all[0] > 1350 && all[0] < 1650 && all[2] > 250 && all[3] > 250, "{all:?}");
        let top_k = counts(&SamplingParams { top_k: 2, ..plain.clone() }, &[], &logits);
        assert!(top_k[2] + top_k[3] == 0 && top_k[1] > 850, "{top_k:?}");
        let top_p = counts(&SamplingParams { top_p: 0.7, ..plain.clone() }, &[], &logits);
        assert!(top_p[2] + top_p[3] == 0 && top_p[1] > 850, "{top_p:?}");
        let min_p = counts(&SamplingParams { min_p: 0.3, ..plain.clone() }, &[], &logits);
        assert!(min_p[2] + min_p[3] == 0 && min_p[1] > 850, "{min_p:?}");
        let greedy = counts(&SamplingParams { temperature: 0.0, ..plain.clone() }, &[], &logits);
        assert_eq!(greedy, [3000, 0, 0, 0]);
        let penalty = SamplingParams { temperature: 0.0, repetition_penalty: 2.0, ..plain.clone() };
        assert_eq!(counts(&penalty, &[0], &logits), [0, 3000, 0, 0]);
        let hot = counts(&SamplingParams { temperature: 50.0, ..plain }, &[], &logits);
        assert!(hot.iter().all(|c| *c > 600), "{hot:?}");
    }

    #[test]
    fn nothing_is_drawn_from_what_is_not_finite() {
        let plain = SamplingParams::default();
        let filtered = SamplingParams { top_p: 0.9, min_p: 0.1, ..plain.clone() };
        let greedy = SamplingParams { temperature: 0.0, ..plain.clone() };
        let penalised = SamplingParams { repetition_penalty: 1e-38, ..plain.clone() };
        for params in [plain, filtered, greedy, penalised.clone()] {
            for bad in [f32::NAN, f32::INFINITY] {
                for mut logits in [vec![bad; 40], [vec![1.0; 40], vec![bad]].concat()] {
                    assert_eq!(choose(Isa::detect(), &mut logits, &params, &[3], 0.5), None, "{params:?}");
                }
            }
        }
        assert_eq!(choose(Isa::detect(), &mut [30.0; 40], &penalised, &[3], 0.5), None);
    }
}
