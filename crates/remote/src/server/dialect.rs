//! Differences between servers: routes, fields, and in which order weights are replaced.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use hyper::Method;
use levade_policy::{Load, PolicyError, SampleRequest, SamplingParams, TopLogprobs};
use serde_json::{Map, Value, json};

use super::http::Http;
use super::options::{InFlight, ServerOptions};
use super::receive::Receives;

/// Tokens of a reply that were drawn under one label of the weights: all up to `end`, from the end of the
/// span before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    pub label: String,
    pub end: usize,
}

/// Why a server ended a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// One of `stop_ids` was drawn.
    Stop,
    /// This token was drawn: one of `stop_ids`, or one that ends texts by the model's own files.
    Token(u32),
    /// As many tokens as it was asked for.
    Length,
    /// Somebody aborted it.
    Abort,
    /// It failed: in the server's words.
    Failed(String),
}

impl End {
    /// The end of a reply, by the reason as servers name it.
    pub fn of(reason: &str) -> Self {
        match reason {
            "stop" => End::Stop,
            "length" => End::Length,
            "abort" => End::Abort,
            other => End::Failed(format!("it ended a reply for the reason {other:?}")),
        }
    }
}

/// What an event of a stream adds to a reply.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Chunk {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
    /// The most likely tokens in the place of each, where they were asked for.
    pub top: Vec<TopLogprobs>,
    /// Labels of all tokens so far, where the event tells them.
    pub spans: Option<Vec<Span>>,
    pub end: Option<End>,
}

impl Chunk {
    /// The end of a reply that failed, where an event tells of an error.
    pub fn failed(event: &Value) -> Option<Self> {
        let error = event.get("error").filter(|error| !error.is_null())?;
        let said = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
        Some(Chunk { end: Some(End::Failed(said)), ..Chunk::default() })
    }
}

/// Log-probabilities of a prompt's tokens but the first, and the most likely ones in the place of each.
pub(super) type Scored = (Vec<f32>, Vec<TopLogprobs>);

/// Facts about a server that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// The name of its model there.
    pub model: String,
    /// Version of the program.
    pub program: String,
    /// Whether it tells labels of weights: of those that it has, and of tokens.
    pub labels: bool,
    /// Whether requests may have seeds.
    pub seeds: bool,
}

/// What a request is asked under.
#[derive(Debug, Clone)]
pub(super) struct Under<'a> {
    /// The name of the model, or of the adapter.
    pub model: &'a str,
    /// Label of the weights, which cached prefixes are kept apart by.
    pub label: &'a str,
    /// Seed of the draws, where there is one.
    pub seed: Option<u64>,
}

/// The API of a kind of server.
#[async_trait]
pub(super) trait Dialect: Receives {
    /// Looks at a server, and finds out whether it was started as it needs to be.
    ///
    /// # Errors
    /// Names the flag that is missing, or what is too short.
    async fn look(&self, http: &Http, options: &ServerOptions) -> Result<Facts, PolicyError>;

    /// Route that draws.
    fn route(&self) -> &'static str;

    /// The reason why a request cannot be served, by the name of the parameter.
    fn refuses(&self, params: &SamplingParams) -> Option<String>;

    /// A request for a reply that is streamed.
    fn draw(&self, request: &SampleRequest, under: &Under<'_>) -> Value;

    /// The next part of a reply of which `seen` tokens have come.
    ///
    /// # Errors
    /// When the event is not what it should be: in words.
    fn chunk(&self, event: &Value, seen: usize, top: usize) -> Result<Chunk, String>;

    /// A request for the log-probabilities of a prompt, with `top` alternatives.
    fn score(&self, prompt: &[u32], top: usize, under: &Under<'_>) -> Value;

    /// The answer to it.
    ///
    /// # Errors
    /// When it is not what it should be: in words.
    fn scored(&self, answer: &Value, prompt: &[u32], top: usize) -> Result<Scored, String>;

    /// Stops drawing, so that weights can be replaced.
    ///
    /// # Errors
    /// When the server refuses or is gone.
    async fn pause(&self, http: &Http, in_flight: InFlight, within: Duration) -> Result<(), PolicyError>;

    /// Draws again.
    ///
    /// # Errors
    /// When the server refuses or is gone.
    async fn resume(&self, http: &Http, within: Duration) -> Result<(), PolicyError>;

    /// Has a server that stands still read all weights from a folder, calls them `label`, and forgets what
    /// earlier ones computed.
    ///
    /// # Errors
    /// When it does not take them, or is gone.
    async fn read(&self, http: &Http, folder: &Path, load: &Loading<'_>) -> Result<(), PolicyError>;

    /// The label of the weights that a server has; of one that has no labels, something that changes when it
    /// is started again.
    ///
    /// # Errors
    /// When the server is gone.
    async fn label(&self, http: &Http, facts: &Facts, within: Duration) -> Result<String, PolicyError>;

    /// Loads an adapter beside others, under a name of its own.
    ///
    /// # Errors
    /// When it does not take it, or is gone.
    async fn load_adapter(&self, http: &Http, folder: &Path, load: &Loading<'_>) -> Result<(), PolicyError>;

    /// Drops an adapter. One that is not there has been dropped.
    ///
    /// # Errors
    /// When the server is gone.
    async fn drop_adapter(&self, http: &Http, name: &str, within: Duration) -> Result<(), PolicyError>;

    /// How much the server has to do, where it tells.
    ///
    /// # Errors
    /// When it is gone.
    async fn load(&self, http: &Http, within: Duration) -> Result<Option<Load>, PolicyError>;

    /// Whether it says that somebody has paused it.
    async fn is_paused(&self, http: &Http, within: Duration) -> bool;

    /// Checks that it was started so that sleep frees the memory of its devices.
    ///
    /// # Errors
    /// Names the flag; when the server is gone.
    async fn check_sleeps(&self, http: &Http, within: Duration) -> Result<(), PolicyError>;

    /// Has a server that stands still give back the memory of its devices, with its weights and its cache,
    /// and calls the weights that it has no more [`ASLEEP`].
    ///
    /// # Errors
    /// When the server refuses or is gone.
    async fn sleep(&self, http: &Http, within: Duration) -> Result<(), PolicyError>;

    /// Has a server that sleeps take memory again, without what was in it. With all of it, it draws again.
    ///
    /// # Errors
    /// When the server refuses or is gone.
    async fn wake(&self, http: &Http, part: Part, within: Duration) -> Result<(), PolicyError>;

    /// Whether it sleeps, as a whole or in part.
    ///
    /// # Errors
    /// When the server is gone.
    async fn is_asleep(&self, http: &Http, within: Duration) -> Result<bool, PolicyError>;

    /// Has a server that has nothing in the place of its weights read those that it was started with.
    ///
    /// # Errors
    /// When it does not take them, or is gone.
    async fn read_first(&self, http: &Http, within: Duration) -> Result<(), PolicyError>;
}

/// The label of weights that a server has forgotten in its sleep.
pub(super) const ASLEEP: &str = "levade-asleep";

/// Returns whether a server's label says that its weights are forgotten. Servers that still run may have the
/// label of before the project was called Levade.
pub(super) fn says_asleep(label: &Value) -> bool {
    label == ASLEEP || label == "dressage-asleep"
}

/// A part of the memory of a server's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// The place of its weights.
    Weights,
    /// The keys and values that it computes.
    Cache,
}

impl Part {
    /// The name by which servers of both kinds know it.
    pub fn tag(self) -> &'static str {
        match self {
            Part::Weights => "weights",
            Part::Cache => "kv_cache",
        }
    }
}

/// Weights on their way into a server.
#[derive(Debug, Clone)]
pub(super) struct Loading<'a> {
    pub facts: &'a Facts,
    /// What they will be called.
    pub label: &'a str,
    /// Whether replies stand still meanwhile, and hold their part of the cache, or there is no cache: it is
    /// not to be touched then.
    pub keeps: bool,
    /// How long it may take.
    pub within: Duration,
}

/// The reason why a server of any kind cannot serve a request; `program` is this one.
pub(super) fn unservable(params: &SamplingParams, program: &str) -> Option<String> {
    let counts = params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
    if params.grammar.is_some() {
        return Some("a grammar is not passed on to servers; ask without one".into());
    }
    if counts && params.drawn_before > 0 {
        return Some(format!(
            "presence_penalty and frequency_penalty count the reply, and {program} cannot be told of the part that was \
             drawn before (drawn_before); ask without them, or set in_flight = \"keep\""
        ));
    }
    (params.prompt_logprobs.is_some() && params.behaviour_temperature() != 1.0).then(|| {
        format!("prompt_logprobs at temperature {}: {program} tells them at 1 only", params.temperature)
    })
}

/// Biases of a request, by token id; `None` where there are none.
pub(super) fn bias_of(params: &SamplingParams) -> Option<Value> {
    let bias = params.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias)));
    (!params.logit_bias.is_empty()).then(|| bias.collect::<Map<_, _>>().into())
}

/// Compares the context of a server with that of the recipe.
///
/// # Errors
/// When it is shorter: names the `flag` to start it with.
pub(super) fn compare_context(
    length: Option<u64>,
    flag: &str,
    options: &ServerOptions,
) -> Result<(), String> {
    let context = options.context;
    match length.filter(|length| *length < context as u64) {
        None => Ok(()),
        Some(length) => Err(format!(
            "its context holds {length} tokens, fewer than the {context} of the recipe; start it with {flag} {context}, \
             or lower model.context"
        )),
    }
}

/// Drops an adapter by a route. One that is not there has been dropped.
///
/// # Errors
/// When the server is gone.
pub(super) async fn unload(
    http: &Http,
    route: &str,
    name: &str,
    within: Duration,
) -> Result<(), PolicyError> {
    match http.ask(Method::POST, route, Some(&json!({ "lora_name": name })), within).await? {
        answer if answer.status.is_server_error() => Err(http.gone(&answer.said())),
        _ => Ok(()),
    }
}

/// Sorts alternatives, most likely first, of equals the one with the lower id, and keeps as many as were
/// asked for.
pub(super) fn most_likely(mut all: TopLogprobs, top: usize) -> TopLogprobs {
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.dedup_by_key(|(id, _)| *id);
    all.truncate(top);
    all
}

/// A number of JSON as a token id.
pub(super) fn id_of(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// A log-probability as servers tell it. Some write −9999 for what is no number.
///
/// # Errors
/// When it is none.
pub(super) fn logprob_of(value: &Value) -> Result<f32, String> {
    match value.as_f64() {
        Some(logprob) if logprob > -9000.0 && logprob <= 1e-3 => Ok(logprob as f32),
        _ => Err(format!("{value} is no log-probability")),
    }
}

/// Spans as both kinds of servers tell them: `[{"version", "start", "end"}]`.
///
/// # Errors
/// When they do not follow each other.
pub(super) fn spans_of(value: &Value) -> Result<Option<Vec<Span>>, String> {
    // Some tell of none where nothing was changed.
    let Some(all) = value.as_array().filter(|all| !all.is_empty()) else { return Ok(None) };
    let mut spans: Vec<Span> = Vec::new();
    for span in all {
        let number = |key: &str| span[key].as_u64().map(|number| number as usize);
        let start = spans.last().map_or(0, |before: &Span| before.end);
        match (span["version"].as_str(), number("start"), number("end")) {
            (Some(label), Some(from), Some(end)) if from == start && end >= start => {
                spans.push(Span { label: label.to_owned(), end });
            }
            _ => return Err(format!("weight_versions {value} are no spans that follow each other")),
        }
    }
    Ok(Some(spans))
}

/// Looks for a server's tokens of a text that differ from those of the tokenizer that prompts are made with.
///
/// # Errors
/// Names the first difference.
pub(super) fn compare_tokens(options: &ServerOptions, answer: &Value) -> Result<(), String> {
    let expected = &options.tokenizer.tokens;
    let Some(tokens) = answer["tokens"].as_array() else { return Ok(()) };
    let tokens: Vec<u32> = tokens.iter().filter_map(id_of).collect();
    // Some add a token that begins the text, whatever they are told.
    if tokens == *expected || tokens.get(1..) == Some(expected) {
        return Ok(());
    }
    let at =
        tokens.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(expected.len().min(tokens.len()));
    Err(format!(
        "it has another tokenizer: token {at} of {:?} is {:?} there and {:?} here; start it with the model of the \
         recipe, or with --tokenizer and the folder of that",
        options.tokenizer.text,
        tokens.get(at),
        expected.get(at)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_follow_each_other() {
        let good =
            json!([{ "version": "a", "start": 0, "end": 3 }, { "version": "b", "start": 3, "end": 5 }]);
        let spans = spans_of(&good).unwrap().unwrap();
        assert_eq!(spans[1], Span { label: "b".into(), end: 5 });
        assert_eq!(spans_of(&Value::Null).unwrap(), None);
        for bad in [
            json!([{ "version": "a", "start": 1, "end": 3 }]),
            json!([{ "version": "a", "start": 0, "end": 3 }, { "version": "b", "start": 2, "end": 5 }]),
            json!([{ "start": 0, "end": 3 }]),
        ] {
            assert!(spans_of(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sleeping_label_is_read_under_both_names() {
        assert!(says_asleep(&json!(ASLEEP)) && says_asleep(&json!("dressage-asleep")));
        assert!(!says_asleep(&json!("levade-7-000000ab")) && !says_asleep(&Value::Null));
    }

    #[test]
    fn no_number_is_no_logprob() {
        assert_eq!(logprob_of(&json!(-0.5)).unwrap(), -0.5);
        for bad in [json!(-9999.0), json!(0.2), Value::Null] {
            assert!(logprob_of(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn alternatives_are_sorted_and_counted() {
        let all = vec![(7, -2.0), (3, -1.0), (5, -1.0), (9, -3.0)];
        assert_eq!(most_likely(all, 3), [(3, -1.0), (5, -1.0), (7, -2.0)]);
    }
}
