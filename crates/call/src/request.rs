//! Requests for completions, independent of any API's format.

use levade_policy::SamplingParams;
use levade_text::{Message, ToolSpec};
use serde::{Deserialize, Serialize};

/// Input of a model call: messages, text or token ids.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A conversation, rendered by the model's chat template.
    Messages(Vec<Message>),
    /// A text, encoded without a chat template.
    Text(String),
    /// A prompt of token ids.
    Tokens(Vec<u32>),
}

/// Rule for the tool calls of a completion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides whether to call a tool.
    #[default]
    Auto,
    /// The model may not call a tool. The syntax of a tool call counts as text.
    None,
    /// The completion must contain at least one tool call.
    Required,
    /// The completion must call the tool with this name.
    Named(String),
}

/// Output format that a completion must have.
#[derive(Debug, Clone, PartialEq)]
pub enum Constraint {
    /// The completion must be a JSON object.
    JsonObject,
    /// The completion must be JSON that matches this schema.
    JsonSchema(serde_json::Value),
    /// The completion must be a text that this regular expression matches completely.
    Regex(String),
    /// The completion must be a text of this grammar in llguidance's notation.
    Grammar(String),
}

/// Sampling options of a request. `None` means that the client does not set the option.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingOptions {
    /// Maximum number of sampled tokens of a completion.
    pub max_tokens: Option<usize>,
    /// Sampling temperature, by which logits are divided.
    pub temperature: Option<f32>,
    /// Probability mass of nucleus sampling (top-p), in (0, 1].
    pub top_p: Option<f32>,
    /// Number of most likely tokens to sample from (top-k). 0 disables the limit.
    pub top_k: Option<usize>,
    /// Minimum probability of a token relative to the most likely token (min-p).
    pub min_p: Option<f32>,
    /// Factor by which tokens of the prompt and the completion are penalized.
    pub repetition_penalty: Option<f32>,
    /// Penalty that is subtracted from the logits of tokens in the completion.
    pub presence_penalty: Option<f32>,
    /// Penalty that is subtracted from the logits of tokens in the completion, times the token's
    /// count.
    pub frequency_penalty: Option<f32>,
    /// Values added to logits, by token id.
    pub logit_bias: Option<std::collections::BTreeMap<u32, f32>>,
    /// Minimum number of sampled tokens of a completion.
    pub min_tokens: Option<usize>,
    /// Stop strings, at which the completion ends. The completion's text excludes them unless
    /// `keeps_stop` is true.
    pub stop: Vec<String>,
    /// Whether the completion's text includes the stop string that ended it.
    pub keeps_stop: bool,
    /// Stop token ids in addition to the model's own.
    pub stop_ids: Vec<u32>,
    /// Whether the model's own stop tokens are ignored.
    pub ignore_eos: bool,
    /// Random seed of the sampling.
    pub seed: Option<u64>,
    /// Number of alternatives per sampled token that are reported with log-probabilities. `None`
    /// reports no log-probabilities.
    pub logprobs: Option<usize>,
    /// Number of alternatives per prompt token that are reported with log-probabilities. `None`
    /// reports no prompt log-probabilities.
    pub prompt_logprobs: Option<usize>,
}

impl SamplingOptions {
    /// Returns the sampling parameters. Options that the client does not set have the values of
    /// `defaults`.
    pub fn with_defaults(&self, defaults: &SamplingParams) -> SamplingParams {
        SamplingParams {
            max_tokens: self.max_tokens.unwrap_or(defaults.max_tokens),
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            logit_bias: self.logit_bias.clone().unwrap_or_else(|| defaults.logit_bias.clone()),
            min_tokens: self.min_tokens.unwrap_or(defaults.min_tokens),
            top_logprobs: self.logprobs.unwrap_or(0),
            prompt_logprobs: self.prompt_logprobs,
            grammar: None,
            sampled_before: 0,
            stop_ids: Vec::new(),
            stop_strings: self.stop.clone(),
        }
    }

    /// Returns the names of the client's options that differ from the recipe's `fixed` parameters
    /// and would change the sampling distribution.
    pub fn overridden_options(&self, fixed: &SamplingParams) -> Vec<&'static str> {
        let bias = self.logit_bias.as_ref().is_some_and(|requested| *requested != fixed.logit_bias);
        [
            ("temperature", differs(self.temperature, fixed.temperature)),
            ("top_p", differs(self.top_p, fixed.top_p)),
            ("top_k", self.top_k.is_some_and(|requested| requested != fixed.top_k)),
            ("min_p", differs(self.min_p, fixed.min_p)),
            ("repetition_penalty", differs(self.repetition_penalty, fixed.repetition_penalty)),
            ("presence_penalty", differs(self.presence_penalty, fixed.presence_penalty)),
            ("frequency_penalty", differs(self.frequency_penalty, fixed.frequency_penalty)),
            ("logit_bias", bias),
            ("min_tokens", self.min_tokens.is_some_and(|requested| requested != fixed.min_tokens)),
            ("ignore_eos", self.ignore_eos),
            ("seed", self.seed.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, differs)| differs.then_some(name))
        .collect()
    }
}

fn differs(requested: Option<f32>, fixed: f32) -> bool {
    requested.is_some_and(|requested| requested != fixed)
}

/// Limit of the first prompt of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpeningLimit {
    /// Maximum number of tokens of the prompt.
    pub max_tokens: usize,
    /// Way in which a longer prompt is truncated.
    pub truncation: Truncation,
}

/// Way in which a prompt that is too long is truncated or rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// The prompt is not truncated: the call fails with an error.
    #[default]
    #[serde(rename = "refuse")]
    Reject,
    /// The start of the prompt is removed, instructions first.
    Left,
    /// The end of the prompt is removed, including the header of the completion.
    Right,
    /// The middle of the prompt is removed.
    Middle,
}

impl Truncation {
    /// Truncates a prompt to `max_tokens`. Returns `None` if the prompt is longer and must be
    /// rejected.
    pub fn truncate(self, mut prompt: Vec<u32>, max_tokens: usize) -> Option<Vec<u32>> {
        let excess = prompt.len().saturating_sub(max_tokens);
        let start = match self {
            _ if excess == 0 => 0,
            Truncation::Reject => return None,
            Truncation::Left => 0,
            Truncation::Right => max_tokens,
            Truncation::Middle => max_tokens / 2,
        };
        prompt.drain(start..start + excess);
        Some(prompt)
    }
}

/// Request to a model for one or several completions.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Prompt of the completions, as messages, text or token ids.
    pub input: Input,
    /// Tools that the model can call.
    pub tools: Vec<ToolSpec>,
    /// Names of strict tools. Forced calls of these tools must satisfy every keyword of their
    /// schema.
    pub strict: Vec<String>,
    /// Rule for the tool calls of the completions.
    pub tool_choice: ToolChoice,
    /// Whether a completion can contain several tool calls. If false, only the first tool call is
    /// returned.
    pub parallel_calls: bool,
    /// Sampling options of the completions.
    pub sampling: SamplingOptions,
    /// Output format that the completions must have. `None` if it is free.
    pub constraint: Option<Constraint>,
    /// Number of completions. Must be at least 1.
    pub n: usize,
    /// Limit of the first prompt of an attempt, with the way to truncate a longer prompt. If
    /// `None`, a prompt that exceeds the party's context budget is rejected.
    pub opening: Option<OpeningLimit>,
}

impl Request {
    /// Creates a request for one completion of `input`, with default options.
    pub fn new(input: Input) -> Self {
        Request {
            input,
            tools: Vec::new(),
            strict: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_calls: true,
            sampling: SamplingOptions::default(),
            constraint: None,
            n: 1,
            opening: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_removes_excess_at_its_position() {
        for (truncation, max_tokens, want) in [
            (Truncation::Left, 4, Some(&[3, 4, 5, 6][..])),
            (Truncation::Right, 4, Some(&[0, 1, 2, 3])),
            (Truncation::Middle, 4, Some(&[0, 1, 5, 6])),
            (Truncation::Middle, 5, Some(&[0, 1, 4, 5, 6])),
            (Truncation::Reject, 6, None),
            (Truncation::Left, 0, Some(&[])),
        ] {
            let found = truncation.truncate((0..7).collect(), max_tokens);
            assert_eq!(found.as_deref(), want, "{truncation:?} {max_tokens}");
        }
    }

    #[test]
    fn prompt_within_limit_is_kept_by_every_truncation() {
        for truncation in
            [Truncation::Reject, Truncation::Left, Truncation::Right, Truncation::Middle]
        {
            for max_tokens in [3, 9] {
                assert_eq!(
                    truncation.truncate(vec![7, 8, 9], max_tokens),
                    Some(vec![7, 8, 9]),
                    "{truncation:?}"
                );
            }
        }
    }
}
