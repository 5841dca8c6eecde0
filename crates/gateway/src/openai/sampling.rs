//! Sampling fields that requests in the formats of OpenAI and vLLM share.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::gateway::Gateway;
use levade_call::ApiError;
use levade_call::SamplingOptions;

/// Stop strings of a request, sent as one string or as a list.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "must be a string or a list of strings")]
enum StopStrings {
    One(String),
    Many(Vec<String>),
}

/// Sampling parameters as a request sends them, before validation. Null counts as absent.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct SamplingFields {
    pub max_tokens: Option<i64>,
    pub max_completion_tokens: Option<i64>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Option<BTreeMap<String, f32>>,
    pub min_tokens: Option<i64>,
    stop: Option<StopStrings>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    pub include_stop_str_in_output: Option<bool>,
    pub seed: Option<i64>,
    pub n: Option<i64>,
}

/// Validates a request field that must be an integer of at least `minimum`. `None` means that the
/// field is absent.
fn validate_count(name: &str, value: Option<i64>, minimum: i64) -> Result<Option<usize>, ApiError> {
    value
        .map(|value: i64| match usize::try_from(value) {
            Ok(count) if value >= minimum => Ok(count),
            _ => Err(ApiError::field(
                name,
                format!("{name} = {value}, but it must be at least {minimum}"),
            )),
        })
        .transpose()
}

/// Validates `top_k` and returns it as in [`SamplingOptions`], where 0 stands for no limit. Clients
/// also send −1 for no limit, as vLLM does.
pub(crate) fn validate_top_k(value: Option<i64>) -> Result<Option<usize>, ApiError> {
    validate_count("top_k", value.map(|value| if value == -1 { 0 } else { value }), 0)
}

impl SamplingFields {
    /// Validates the fields and returns them as sampling options, which are the same for all APIs.
    pub(crate) fn to_sampling_options(&self) -> Result<SamplingOptions, ApiError> {
        let completion_limit =
            validate_count("max_completion_tokens", self.max_completion_tokens, 0)?;
        let max_tokens = completion_limit.or(validate_count("max_tokens", self.max_tokens, 0)?);
        let biases = self.logit_bias.iter().flatten().map(|(token, bias)| {
            let id = token.trim().parse::<u32>().map_err(|_| {
                ApiError::field(
                    "logit_bias",
                    format!("logit_bias has the key {token:?}, but keys must be token ids"),
                )
            })?;
            Ok((id, *bias))
        });
        let biases = biases.collect::<Result<BTreeMap<u32, f32>, ApiError>>()?;
        Ok(SamplingOptions {
            max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: validate_top_k(self.top_k)?,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.is_some().then_some(biases),
            min_tokens: validate_count("min_tokens", self.min_tokens, 0)?,
            stop: match &self.stop {
                None => Vec::new(),
                Some(StopStrings::One(text)) => vec![text.clone()],
                Some(StopStrings::Many(texts)) => texts.clone(),
            },
            stop_ids: self.stop_token_ids.clone().unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            keeps_stop: self.include_stop_str_in_output.unwrap_or(false),
            seed: self.seed.map(|seed| seed as u64),
            logprobs: None,
            prompt_logprobs: None,
        })
    }

    /// Returns the number of completions that the request asks for (`n`). Default: 1.
    pub(crate) fn num_completions(&self) -> Result<usize, ApiError> {
        Ok(validate_count("n", self.n, 1)?.unwrap_or(1))
    }
}

/// Request fields that are ignored, because they are hints or bookkeeping of providers.
const IGNORED_FIELDS: [&str; 31] = [
    "audio",
    "cache_salt",
    "detokenize",
    "extra_key",
    "flat_logprobs",
    "guided_decoding_backend",
    "kv_transfer_params",
    "metadata",
    "modalities",
    "output_kind",
    "prediction",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning",
    "reasoning_effort",
    "request_id",
    "return_token_ids",
    "routing_key",
    "safety_identifier",
    "service_tier",
    "session_id",
    "skip_reading_prefix_cache",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "store",
    "stream_interval",
    "user",
    "verbosity",
    "web_search_options",
];

/// Unsupported request fields that would change the prompt, the sampling or the response. Each has
/// the value that changes nothing and is therefore accepted.
const UNSUPPORTED_FIELDS: [(&str, Value); 33] = [
    ("add_generation_prompt", Value::Bool(true)),
    ("add_special_tokens", Value::Bool(false)),
    ("allowed_token_ids", Value::Null),
    ("audio_data", Value::Null),
    ("bad_words", Value::Null),
    ("chat_template", Value::Null),
    ("content_parts", Value::Null),
    ("continue_final_message", Value::Bool(false)),
    ("custom_logit_processor", Value::Null),
    ("documents", Value::Null),
    ("features", Value::Null),
    ("function_call", Value::Null),
    ("functions", Value::Null),
    ("image_data", Value::Null),
    ("input_embeds", Value::Null),
    ("length_penalty", Value::Null),
    ("logits_processors", Value::Null),
    ("mm_processor_kwargs", Value::Null),
    ("parse_context", Value::Null),
    ("prompt_logprobs", Value::Null),
    ("repetition_detection", Value::Null),
    ("return_entropy", Value::Bool(false)),
    ("return_hidden_states", Value::Bool(false)),
    ("return_routed_experts", Value::Bool(false)),
    ("return_sampling_mask", Value::Bool(false)),
    ("stop_regex", Value::Null),
    ("structural_tag", Value::Null),
    ("suffix", Value::Null),
    ("thinking_token_budget", Value::Null),
    ("token_ids_logprob", Value::Null),
    ("truncate_prompt_tokens", Value::Null),
    ("use_beam_search", Value::Bool(false)),
    ("video_data", Value::Null),
];

/// Checks the fields of a request that have not been parsed: rejects fields that request an
/// unsupported feature, and counts unknown fields.
pub(crate) fn check_fields(
    gateway: &Gateway,
    api: &str,
    rest: &Map<String, Value>,
) -> Result<(), ApiError> {
    for (field, value) in rest {
        if let Some((_, neutral)) = UNSUPPORTED_FIELDS.iter().find(|(name, _)| name == field) {
            let is_empty = value.as_array().is_some_and(Vec::is_empty);
            if !value.is_null() && value != neutral && !is_empty {
                let message = format!("{field} is not supported; leave it out");
                return Err(ApiError::field(field, message));
            }
        } else if !IGNORED_FIELDS.contains(&field.as_str()) {
            gateway.count_unknown_field(api, field);
        }
    }
    Ok(())
}
