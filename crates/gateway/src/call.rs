//! A call, in no API's shape: what every dialect is read into.

use std::sync::OnceLock;

use levade_policy::SamplingParams;
use levade_text::{Message, ToolSpec};

/// Input of a model.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A conversation, which the model's template prints.
    Messages(Vec<Message>),
    /// A text, encoded as it stands.
    Text(String),
    /// Token ids, as they stand.
    Tokens(Vec<u32>),
}

/// Which tools the model may or must call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// None: calls are text.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// Form that a reply must have.
#[derive(Debug, Clone, PartialEq)]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema(serde_json::Value),
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// A grammar in the notation of llguidance.
    Grammar(String),
}

/// Wishes about sampling; `None` where the client is silent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// Most tokens of the reply.
    pub max_tokens: Option<usize>,
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Share of the probability that is kept.
    pub top_p: Option<f32>,
    /// Number of tokens that are kept.
    pub top_k: Option<usize>,
    /// Least probability relative to the likeliest token.
    pub min_p: Option<f32>,
    /// Penalty on tokens of prompt and reply.
    pub repetition_penalty: Option<f32>,
    /// Penalty on tokens of the reply.
    pub presence_penalty: Option<f32>,
    /// Penalty on tokens of the reply by their number.
    pub frequency_penalty: Option<f32>,
    /// Added to logits, by token id.
    pub logit_bias: Option<std::collections::BTreeMap<u32, f32>>,
    /// Least tokens of the reply.
    pub min_tokens: Option<usize>,
    /// Texts that end the reply, and do not belong to it.
    pub stop: Vec<String>,
    /// Whether a client is told the stop string that ends a reply nevertheless.
    pub keeps_stop: bool,
    /// Further tokens that end the reply.
    pub stop_ids: Vec<u32>,
    /// Whether tokens that end a turn do not end the reply.
    pub ignore_eos: bool,
    /// Seed of the draws.
    pub seed: Option<u64>,
    /// Whether the client asks for log-probabilities, and of how many alternatives.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
}

impl Sampling {
    /// The parameters that result, over `defaults` for what the client is silent on.
    pub fn over(&self, defaults: &SamplingParams) -> SamplingParams {
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
            drawn_before: 0,
            stop_ids: Vec::new(),
            stop_strings: self.stop.clone(),
        }
    }

    /// Names of the wishes that a recipe decides instead where a policy is trained, as far as they would
    /// change the distribution that tokens come from.
    pub fn overridden_by(&self, fixed: &SamplingParams) -> Vec<&'static str> {
        let differs = |asked: Option<f32>, fixed: f32| asked.is_some_and(|asked| asked != fixed);
        let bias = self.logit_bias.as_ref().is_some_and(|asked| *asked != fixed.logit_bias);
        [
            ("temperature", differs(self.temperature, fixed.temperature)),
            ("top_p", differs(self.top_p, fixed.top_p)),
            ("top_k", self.top_k.is_some_and(|asked| asked != fixed.top_k)),
            ("min_p", differs(self.min_p, fixed.min_p)),
            ("repetition_penalty", differs(self.repetition_penalty, fixed.repetition_penalty)),
            ("presence_penalty", differs(self.presence_penalty, fixed.presence_penalty)),
            ("frequency_penalty", differs(self.frequency_penalty, fixed.frequency_penalty)),
            ("logit_bias", bias),
            ("min_tokens", self.min_tokens.is_some_and(|asked| asked != fixed.min_tokens)),
            ("ignore_eos", self.ignore_eos),
            ("seed", self.seed.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, differs)| differs.then_some(name))
        .collect()
    }
}

/// A request for replies.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The model, by the name that the client knows.
    pub model: String,
    /// Input of the model.
    pub input: Input,
    /// Tools that it is told of.
    pub tools: Vec<ToolSpec>,
    /// Names of the tools whose calls must keep to every keyword of their schemas if they are forced.
    pub strict: Vec<String>,
    /// Which of them it may call.
    pub tool_choice: ToolChoice,
    /// Whether it may call several at once; else those after the first are left out.
    pub parallel_calls: bool,
    /// Wishes about sampling.
    pub sampling: Sampling,
    /// Form that the reply must have.
    pub constraint: Option<Constraint>,
    /// Number of replies, at least 1.
    pub n: usize,
    /// The route that was chosen for it, by its place.
    pub(crate) chosen: OnceLock<usize>,
}

impl Call {
    /// A call with nothing but an input.
    pub fn new(model: impl Into<String>, input: Input) -> Self {
        Call {
            model: model.into(),
            input,
            tools: Vec::new(),
            strict: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_calls: true,
            sampling: Sampling::default(),
            constraint: None,
            n: 1,
            chosen: OnceLock::new(),
        }
    }
}
