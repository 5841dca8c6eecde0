//! APIs of vLLM and SGLang: routes, fields, and the order of steps that replaces weights.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use hyper::Method;
use levade_policy::{Load, PolicyError, SampleRequest, SamplingParams, TopLogprobs};
use serde_json::{Map, Value, json};

use super::http::Http;
use super::options::{InFlight, ServerOptions};
use super::receive::ReceiveWeights;

/// Run of a completion's tokens that were sampled from weights with one label. It starts at the end
/// of the previous span (or at 0) and ends before the token `end`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WeightSpan {
    pub label: String,
    pub end: usize,
}

/// Reason why a server ended a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CompletionEnd {
    /// The model sampled one of `stop_ids`.
    Stop,
    /// The model sampled this token: one of `stop_ids`, or an end-of-text token of the model's own
    /// files.
    Token(u32),
    /// The completion has the maximum number of tokens that the request allows.
    Length,
    /// A client aborted the request.
    Abort,
    /// The request failed. Contains the server's message.
    Failed(String),
}

impl CompletionEnd {
    /// Parses the finish reason in a server's response. An unknown reason counts as a failure.
    pub fn from_reason(reason: &str) -> Self {
        match reason {
            "stop" => CompletionEnd::Stop,
            "length" => CompletionEnd::Length,
            "abort" => CompletionEnd::Abort,
            other => CompletionEnd::Failed(format!(
                "the server ended a completion for the reason {other:?}"
            )),
        }
    }
}

/// Part of a streamed completion, as one event contains it.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct StreamChunk {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
    /// Most likely tokens at each position, with their log-probabilities. Empty unless requested.
    pub top: Vec<TopLogprobs>,
    /// Weight labels of all tokens so far. `None` if the event contains no labels.
    pub spans: Option<Vec<WeightSpan>>,
    pub end: Option<CompletionEnd>,
}

impl StreamChunk {
    /// Returns a chunk that ends the completion as failed, if the event contains an error.
    pub fn from_error_event(event: &Value) -> Option<Self> {
        let error = event.get("error").filter(|error| !error.is_null())?;
        let message = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
        Some(StreamChunk { end: Some(CompletionEnd::Failed(message)), ..StreamChunk::default() })
    }
}

/// Log-probabilities of a prompt's tokens except the first, and the most likely tokens at each of
/// these positions.
pub(super) type PromptScores = (Vec<f32>, Vec<TopLogprobs>);

/// Properties of an inference server, found by its inspection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// Name under which the server serves its model.
    pub model: String,
    /// Version of the server program, as text.
    pub program: String,
    /// Whether the server reports the labels of its current weights and of the weights from which
    /// each token was sampled.
    pub labels: bool,
    /// Whether requests may contain seeds.
    pub seeds: bool,
}

/// Parts of a request that depend on the weights that the server has loaded.
#[derive(Debug, Clone)]
pub(super) struct RequestTarget<'a> {
    /// Name of the model or of the LoRA adapter.
    pub model: &'a str,
    /// Label of the weights. Cached prefixes of different labels are kept separate.
    pub label: &'a str,
    /// Sampling seed. `None` if the request contains no seed.
    pub seed: Option<u64>,
}

/// HTTP API of one kind of inference server.
#[async_trait]
pub(super) trait ServerDialect: ReceiveWeights {
    /// Inspects a server, and checks that it was started with the required options.
    ///
    /// # Errors
    /// Returns an error that names the missing flag or the limit that is too small, and an error if
    /// the server is unreachable.
    async fn inspect(&self, http: &Http, options: &ServerOptions) -> Result<Facts, PolicyError>;

    /// Returns the URL path of sampling requests.
    fn sampling_route(&self) -> &'static str;

    /// Returns the reason why the server cannot serve requests with the sampling parameters
    /// `params`, or `None` if it can. The reason names the parameter.
    fn rejection_reason(&self, params: &SamplingParams) -> Option<String>;

    /// Builds the JSON body of a request for a streamed completion.
    fn generate_body(&self, request: &SampleRequest, target: &RequestTarget<'_>) -> Value;

    /// Parses an event of a streamed completion. `seen` is the number of tokens in earlier events,
    /// and `top` the number of alternatives per position.
    ///
    /// # Errors
    /// Returns an error message if the event is malformed.
    fn parse_chunk(&self, event: &Value, seen: usize, top: usize) -> Result<StreamChunk, String>;

    /// Builds the JSON body of a request for the log-probabilities of a prompt. `top` is the number
    /// of alternatives per position.
    fn score_body(&self, prompt: &[u32], top: usize, target: &RequestTarget<'_>) -> Value;

    /// Parses the response to a request from [`score_body`](Self::score_body).
    ///
    /// # Errors
    /// Returns an error message if the response is malformed.
    fn parse_scores(
        &self,
        response: &Value,
        prompt: &[u32],
        top: usize,
    ) -> Result<PromptScores, String>;

    /// Pauses sampling on the server, so that its weights can be replaced. `in_flight` determines
    /// what happens to running requests.
    ///
    /// # Errors
    /// Returns an error if the server rejects the request or is unreachable.
    async fn pause(
        &self,
        http: &Http,
        in_flight: InFlight,
        within: Duration,
    ) -> Result<(), PolicyError>;

    /// Resumes sampling on the server.
    ///
    /// # Errors
    /// Returns an error if the server rejects the request or is unreachable.
    async fn resume(&self, http: &Http, within: Duration) -> Result<(), PolicyError>;

    /// Makes a paused server read all weights from a directory and label them. The server drops
    /// what it has cached for earlier weights, except the KV caches of frozen requests.
    ///
    /// # Errors
    /// Returns an error if the server rejects the weights or is unreachable.
    async fn load_weights(
        &self,
        http: &Http,
        dir: &Path,
        load: &LoadSpec<'_>,
    ) -> Result<(), PolicyError>;

    /// Returns the label of the server's weights. For a server without labels, returns a value that
    /// changes when the server is restarted.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable.
    async fn query_label(
        &self,
        http: &Http,
        facts: &Facts,
        within: Duration,
    ) -> Result<String, PolicyError>;

    /// Loads a LoRA adapter in addition to those that the server has loaded, under a name of its
    /// own.
    ///
    /// # Errors
    /// Returns an error if the server rejects the adapter or is unreachable.
    async fn load_adapter(
        &self,
        http: &Http,
        dir: &Path,
        load: &LoadSpec<'_>,
    ) -> Result<(), PolicyError>;

    /// Unloads the LoRA adapter `name`. Succeeds if the adapter is not loaded.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable.
    async fn drop_adapter(
        &self,
        http: &Http,
        name: &str,
        within: Duration,
    ) -> Result<(), PolicyError>;

    /// Returns the load of the server, or `None` if the server does not report it.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable.
    async fn query_load(&self, http: &Http, within: Duration) -> Result<Option<Load>, PolicyError>;

    /// Returns whether the server reports that a client has paused it.
    async fn is_paused(&self, http: &Http, within: Duration) -> bool;

    /// Checks that the server was started with the option that makes sleep free device memory.
    ///
    /// # Errors
    /// Returns an error that names the missing flag. Returns an error if the server is unreachable.
    async fn check_sleeps(&self, http: &Http, within: Duration) -> Result<(), PolicyError>;

    /// Puts a paused server to sleep: it releases the device memory of its weights and KV cache,
    /// and labels the released weights [`ASLEEP`].
    ///
    /// # Errors
    /// Returns an error if the server rejects the request or is unreachable.
    async fn sleep(&self, http: &Http, within: Duration) -> Result<(), PolicyError>;

    /// Makes a sleeping server allocate the memory of `part` again, without its contents. The
    /// server samples again once all parts are allocated.
    ///
    /// # Errors
    /// Returns an error if the server rejects the request or is unreachable.
    async fn wake(&self, http: &Http, part: Part, within: Duration) -> Result<(), PolicyError>;

    /// Returns whether any part of the server's memory is asleep.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable.
    async fn is_asleep(&self, http: &Http, within: Duration) -> Result<bool, PolicyError>;

    /// Makes a server read the weights that it was started with. Called if its weight memory has no
    /// contents.
    ///
    /// # Errors
    /// Returns an error if the server rejects the weights or is unreachable.
    async fn load_initial_weights(&self, http: &Http, within: Duration) -> Result<(), PolicyError>;
}

/// Label that a server has while its weights are discarded because it sleeps.
pub(super) const ASLEEP: &str = "levade-asleep";

/// Returns whether a label marks weights that were discarded in sleep. Servers that still run may
/// have the label that was used before the project was renamed to Levade.
pub(super) fn is_asleep_label(label: &Value) -> bool {
    label == ASLEEP || label == "dressage-asleep"
}

/// Part of a server's device memory that can be woken separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Memory of the model's weights.
    Weights,
    /// Memory of the KV cache.
    Cache,
}

impl Part {
    /// Returns the tag by which vLLM and SGLang name this part of memory.
    pub fn tag(self) -> &'static str {
        match self {
            Part::Weights => "weights",
            Part::Cache => "kv_cache",
        }
    }
}

/// Parameters of loading new weights into a server.
#[derive(Debug, Clone)]
pub(super) struct LoadSpec<'a> {
    pub facts: &'a Facts,
    /// Label that the server gives to the new weights.
    pub label: &'a str,
    /// Whether the server keeps its KV cache, because requests are frozen in it or no cache is
    /// allocated.
    pub keeps: bool,
    /// Timeout for loading the weights.
    pub within: Duration,
}

/// Returns the reason why no supported kind of server can serve requests with the sampling
/// parameters `params`, or `None` if such a server can. `program` names the server in the reason.
pub(super) fn unservable_reason(params: &SamplingParams, program: &str) -> Option<String> {
    let counts = params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
    if params.grammar.is_some() {
        return Some("servers do not support a grammar; remove it from the request".into());
    }
    if counts && params.sampled_before > 0 {
        return Some(format!(
            "presence_penalty and frequency_penalty count the completion, but {program} cannot \
             count the part that was sampled before (drawn_before); remove them from the request, \
             or set in_flight = \"keep\""
        ));
    }
    (params.prompt_logprobs.is_some() && params.behavior_temperature() != 1.0).then(|| {
        format!(
            "prompt_logprobs at temperature {}: {program} returns them at 1 only",
            params.temperature
        )
    })
}

/// Returns the logit biases of a request as a JSON object by token id, or `None` if there are no
/// biases.
pub(super) fn logit_bias(params: &SamplingParams) -> Option<Value> {
    let bias = params.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias)));
    (!params.logit_bias.is_empty()).then(|| bias.collect::<Map<_, _>>().into())
}

/// Checks that the context length `length` of a server is at least the recipe's. If the server
/// reports no length (`None`), the check passes.
///
/// # Errors
/// Returns an error message that names the start option `flag` if the server's context is shorter.
pub(super) fn compare_context(
    length: Option<u64>,
    flag: &str,
    options: &ServerOptions,
) -> Result<(), String> {
    let context = options.context;
    match length.filter(|length| *length < context as u64) {
        None => Ok(()),
        Some(length) => Err(format!(
            "the server's context holds {length} tokens, fewer than the {context} of the recipe; \
             start it with {flag} {context}, or lower model.context"
        )),
    }
}

/// Unloads the LoRA adapter `name` with a request to the URL path `route`. Succeeds if the adapter
/// is not loaded.
///
/// # Errors
/// Returns an error if the server is unreachable or fails with a 5xx status.
pub(super) async fn unload_adapter(
    http: &Http,
    route: &str,
    name: &str,
    within: Duration,
) -> Result<(), PolicyError> {
    match http.send(Method::POST, route, Some(&json!({ "lora_name": name })), within).await? {
        response if response.status.is_server_error() => {
            Err(http.stopped_error(&response.error_message()))
        }
        _ => Ok(()),
    }
}

/// Returns the `top` most likely tokens of `all`, most likely first. Ties are ordered by token id.
pub(super) fn most_likely(mut all: TopLogprobs, top: usize) -> TopLogprobs {
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.dedup_by_key(|(id, _)| *id);
    all.truncate(top);
    all
}

/// Parses a JSON number as a token id.
pub(super) fn parse_token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Parses a log-probability in a server's response. Some servers send −9999 instead of a value that
/// is not a number.
///
/// # Errors
/// Returns an error message if the value is not a log-probability.
pub(super) fn parse_logprob(value: &Value) -> Result<f32, String> {
    match value.as_f64() {
        Some(logprob) if logprob > -9000.0 && logprob <= 1e-3 => Ok(logprob as f32),
        _ => Err(format!("{value} is not a log-probability")),
    }
}

/// Parses the labels of sampled tokens in the format of vLLM and SGLang: `[{"version", "start",
/// "end"}]`. Returns `None` if the response has no labels.
///
/// # Errors
/// Returns an error message if the spans are not contiguous.
pub(super) fn parse_spans(value: &Value) -> Result<Option<Vec<WeightSpan>>, String> {
    // Some servers return an empty list if the weights did not change.
    let Some(all) = value.as_array().filter(|all| !all.is_empty()) else { return Ok(None) };
    let mut spans: Vec<WeightSpan> = Vec::new();
    for span in all {
        let number = |key: &str| span[key].as_u64().map(|number| number as usize);
        let start = spans.last().map_or(0, |before: &WeightSpan| before.end);
        match (span["version"].as_str(), number("start"), number("end")) {
            (Some(label), Some(from), Some(end)) if from == start && end >= start => {
                spans.push(WeightSpan { label: label.to_owned(), end });
            }
            _ => {
                return Err(format!(
                    "weight_versions is {value}, but its spans must be contiguous"
                ));
            }
        }
    }
    Ok(Some(spans))
}

/// Compares the server's tokens of the probe text with the tokens of the run's own tokenizer.
///
/// # Errors
/// Returns an error message that names the first difference.
pub(super) fn compare_tokens(options: &ServerOptions, response: &Value) -> Result<(), String> {
    let expected = &options.tokenizer.tokens;
    let Some(tokens) = response["tokens"].as_array() else { return Ok(()) };
    let tokens: Vec<u32> = tokens.iter().filter_map(parse_token_id).collect();
    // Some servers add a beginning-of-text token even if the request disables it.
    if tokens == *expected || tokens.get(1..) == Some(expected) {
        return Ok(());
    }
    let at = tokens
        .iter()
        .zip(expected)
        .position(|(a, b)| a != b)
        .unwrap_or(expected.len().min(tokens.len()));
    Err(format!(
        "the server has a different tokenizer: token {at} of {:?} is {:?} there, but {:?} here; \
         start it with the model of the recipe, or with --tokenizer and the directory of that \
         model",
        options.tokenizer.text,
        tokens.get(at),
        expected.get(at)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_spans_rejects_noncontiguous_spans() {
        let good = json!([{ "version": "a", "start": 0, "end": 3 }, { "version": "b", "start": 3, "end": 5 }]);
        let spans = parse_spans(&good).unwrap().unwrap();
        assert_eq!(spans[1], WeightSpan { label: "b".into(), end: 5 });
        assert_eq!(parse_spans(&Value::Null).unwrap(), None);
        for bad in [
            json!([{ "version": "a", "start": 1, "end": 3 }]),
            json!([{ "version": "a", "start": 0, "end": 3 }, { "version": "b", "start": 2, "end": 5 }]),
            json!([{ "start": 0, "end": 3 }]),
        ] {
            assert!(parse_spans(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn asleep_label_is_recognized_under_both_names() {
        assert!(is_asleep_label(&json!(ASLEEP)) && is_asleep_label(&json!("dressage-asleep")));
        assert!(!is_asleep_label(&json!("levade-7-000000ab")) && !is_asleep_label(&Value::Null));
    }

    #[test]
    fn parse_logprob_rejects_non_logprobs() {
        assert_eq!(parse_logprob(&json!(-0.5)).unwrap(), -0.5);
        for bad in [json!(-9999.0), json!(0.2), Value::Null] {
            assert!(parse_logprob(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn most_likely_sorts_and_truncates_alternatives() {
        let all = vec![(7, -2.0), (3, -1.0), (5, -1.0), (9, -3.0)];
        assert_eq!(most_likely(all, 3), [(3, -1.0), (5, -1.0), (7, -2.0)]);
    }
}
