//! Adjusts logits before a token is sampled: penalties, biases, and stop tokens that are not
//! allowed yet.
//!
//! An adjustment is a function only of the raw logits, the sequence and the parameters. So it
//! depends neither on other sequences in the batch nor on how a prompt was divided. The order is
//! fixed: repetition penalty, frequency and presence penalty, biases, stop tokens. vLLM adds biases
//! before the repetition penalty, SGLang after it; all other orders commute. Presence and frequency
//! penalties count the tokens of the completion, including those in
//! [`SamplingParams::sampled_before`](crate::SamplingParams::sampled_before).

use crate::SamplingParams;

impl SamplingParams {
    /// Returns whether penalties, biases or `min_tokens` can change the logits, so that tokens are
    /// sampled from another distribution than the model's.
    pub fn has_adjustments(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.logit_bias.values().any(|bias| *bias != 0.0)
            || (self.min_tokens > self.sampled_before && !self.stop_ids.is_empty())
    }

    /// Adjusts raw logits, one for each token of the vocabulary, by penalties, biases and
    /// `min_tokens`. `sequence` is the prompt followed by the completion so far, which is its last
    /// `num_sampled` tokens.
    ///
    /// Repetition penalty θ (Keskar et al. 2019, over prompt and completion): z / θ if z > 0, and
    /// otherwise z θ. Frequency and presence penalty (OpenAI's definition): for a token that occurs
    /// c > 0 times in the completion, z − c α_frequency − α_presence. As in vLLM and SGLang, the
    /// prompt does not count.
    pub fn adjust(&self, logits: &mut [f32], sequence: &[u32], num_sampled: usize) {
        if self.repetition_penalty != 1.0 {
            for (token, _) in count_occurrences(sequence) {
                if let Some(z) = logits.get_mut(token as usize) {
                    let penalty = self.repetition_penalty;
                    *z = if *z > 0.0 { *z / penalty } else { *z * penalty };
                }
            }
        }
        if self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 {
            for (token, count) in
                count_occurrences(&sequence[sequence.len().saturating_sub(num_sampled)..])
            {
                if let Some(z) = logits.get_mut(token as usize) {
                    *z -= self.frequency_penalty * count as f32 + self.presence_penalty;
                }
            }
        }
        for (token, bias) in &self.logit_bias {
            if let Some(z) = logits.get_mut(*token as usize) {
                *z += bias;
            }
        }
        if num_sampled < self.min_tokens {
            for token in &self.stop_ids {
                if let Some(z) = logits.get_mut(*token as usize) {
                    *z = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// Returns every distinct token in `tokens` with the number of its occurrences.
fn count_occurrences(tokens: &[u32]) -> Vec<(u32, usize)> {
    let mut sorted = tokens.to_vec();
    sorted.sort_unstable();
    sorted.chunk_by(|a, b| a == b).map(|same| (same[0], same.len())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All values are exact in binary floating point.
    #[test]
    fn adjust_matches_hand_computed_logits() {
        let logits = [1.0, -1.0, 0.5, 2.0, 0.25];
        let sequence = [0, 3, 99, 1, 1, 2];
        let adjusted = |params: SamplingParams| {
            assert!(params.is_filtered() && params.has_adjustments(), "{params:?}");
            let mut adjusted = logits;
            params.adjust(&mut adjusted, &sequence, 3);
            adjusted
        };
        let plain = SamplingParams::default();
        let repetition = SamplingParams { repetition_penalty: 2.0, ..plain.clone() };
        assert_eq!(adjusted(repetition.clone()), [0.5, -2.0, 0.25, 1.0, 0.25]);
        // The completion contains token 1 twice and token 2 once; tokens of the prompt do not
        // count.
        let frequency = SamplingParams { frequency_penalty: 0.5, ..plain.clone() };
        assert_eq!(adjusted(frequency), [1.0, -2.0, 0.0, 2.0, 0.25]);
        let presence = SamplingParams { presence_penalty: -0.25, ..plain.clone() };
        assert_eq!(adjusted(presence), [1.0, -0.75, 0.75, 2.0, 0.25]);
        let bias =
            SamplingParams { logit_bias: [(3, -1.5), (4, 8.0), (7, 1.0)].into(), ..plain.clone() };
        assert_eq!(adjusted(bias), [1.0, -1.0, 0.5, 0.5, 8.25]);
        let all = SamplingParams {
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            logit_bias: [(3, -1.5)].into(),
            ..repetition
        };
        assert_eq!(adjusted(all), [0.5, -3.25, -0.5, -0.5, 0.25]);
        let early = |min_tokens| SamplingParams { min_tokens, stop_ids: vec![2], ..plain.clone() };
        assert_eq!(adjusted(early(3)), logits);
        assert_eq!(adjusted(early(4)), [1.0, -1.0, f32::NEG_INFINITY, 2.0, 0.25]);
    }

    #[test]
    fn params_without_effect_are_not_filtered() {
        let plain = SamplingParams::default();
        for params in [
            plain.clone(),
            SamplingParams { logit_bias: [(3, 0.0)].into(), ..plain.clone() },
            SamplingParams { min_tokens: 3, ..plain.clone() },
            SamplingParams { min_tokens: 3, sampled_before: 3, stop_ids: vec![1], ..plain.clone() },
            SamplingParams { top_logprobs: 5, ..plain.clone() },
        ] {
            assert!(!params.is_filtered(), "{params:?}");
        }
        assert!(!SamplingParams { top_p: 0.5, ..plain }.has_adjustments());
    }
}
