//! Gateways over scripted and simulated samplers, called without a network.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use levade_call::{Backend, Party, PartyLimits, SamplingRule, Summarizer};
use levade_conversation::{Budget, Format, Options as History, Origin};
use levade_policy::{Sampler, SamplingParams, Simulator, SimulatorConfig};
use levade_text::Vocabulary;
use levade_text::testing::{IM_END, VOCABULARY, tiny_chat};
use serde_json::Value;
use tower::ServiceExt;

use crate::http::build_router;
use crate::scripted::ScriptedSampler;
use crate::session::Session;
use crate::{CallPattern, Gateway, GatewayOptions, Model, Route, SessionOptions};

/// Key of callers outside of the attempt.
pub(crate) const OUTSIDE_KEY: &str = "sk-test";

/// Completions with unusual structure: text after a call, no text, only reasoning, unfinished
/// reasoning, only whitespace.
pub(crate) const UNUSUAL_COMPLETIONS: [&str; 5] = [
    "One.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\nTwo.",
    "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>",
    "<think>\nAll of it.\n</think>",
    "<think>\nWithout an end",
    " \n",
];

/// Completion with a tool call that cannot be parsed.
pub(crate) const UNREADABLE: &str = "So: <tool_call>\n{oops}\n</tool_call> and on.";

/// Maximum number of tokens of a prompt and its completion together.
pub(crate) const CONTEXT: usize = 4096;

/// Limits of an attempt.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Maximum number of calls.
    pub calls: u32,
    /// Maximum number of sampled tokens.
    pub tokens: usize,
    /// Timeout of a call.
    pub timeout: Duration,
}

/// Limits that no test reaches by chance.
pub(crate) const LIMITS: Limits =
    Limits { calls: 100, tokens: 10_000, timeout: Duration::from_secs(30) };

/// Context budget of the attempt's party, and the summarizer if the budget requests summaries.
pub(crate) type ContextPolicy = (Budget, Option<Arc<Summarizer>>);

/// Response of a gateway.
#[derive(Debug)]
pub(crate) struct TestResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl TestResponse {
    /// Returns the response as a JSON document.
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.headers["content-type"], "application/json", "{}", self.text);
        serde_json::from_str(&self.text).unwrap()
    }

    /// Returns the events of a streamed response. Checks that each event has the name of its type.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(
            self.headers["content-type"], "text/event-stream; charset=utf-8",
            "{}",
            self.text
        );
        let frames = self.text.split("\n\n").filter(|frame| !frame.is_empty());
        frames
            .map(|frame| {
                let (name, data) = frame.split_once("\ndata: ").unwrap();
                let data: Value = serde_json::from_str(data).unwrap();
                assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap()));
                data
            })
            .collect()
    }
}

/// Chat format of the test model, created once.
static FORMAT: LazyLock<Arc<Format>> =
    LazyLock::new(|| Arc::new(Format::new(Arc::new(tiny_chat().unwrap()), History::default())));

/// Returns the configuration of a small simulator with the vocabulary of the test chat.
fn simulator() -> SimulatorConfig {
    SimulatorConfig { vocabulary: VOCABULARY, context: CONTEXT, rows: 64, ..Default::default() }
}

/// A gateway with one model and one attempt.
pub(crate) struct TestGateway {
    pub gateway: Gateway,
    pub session: Arc<Session>,
    pub format: Arc<Format>,
}

impl TestGateway {
    /// Creates a gateway whose model returns `texts`, one per call.
    pub(crate) fn scripted(texts: &[&str]) -> Self {
        Self::new(Arc::new(ScriptedSampler::new(texts, IM_END)), 1000, GatewayOptions::default())
    }

    /// Creates a gateway whose model samples random tokens, at most `tokens` per completion.
    pub(crate) fn simulated(tokens: usize) -> Self {
        Self::new(Arc::new(Simulator::new(simulator())), tokens, GatewayOptions::default())
    }

    /// Creates a gateway whose model samples random tokens, at most `tokens` per completion, within
    /// the grammar of the call.
    pub(crate) fn with_grammars(tokens: usize) -> Self {
        let vocabulary = Vocabulary::new(FORMAT.chat().tokenizer());
        let simulator = Simulator::new(simulator()).with_grammars(Arc::new(vocabulary));
        Self::new(Arc::new(simulator), tokens, GatewayOptions::default())
    }

    /// Creates a gateway whose model fails after the first token.
    pub(crate) fn failing() -> Self {
        let config = SimulatorConfig { failures: 1.0, ..simulator() };
        Self::new(Arc::new(Simulator::new(config)), 60, GatewayOptions::default())
    }

    /// Creates a gateway whose model is slow, so that clients receive keep-alive data.
    pub(crate) fn slow() -> Self {
        let config = SimulatorConfig { latency: Duration::from_millis(20), ..simulator() };
        let options =
            GatewayOptions { ping: Duration::from_millis(2), ..GatewayOptions::default() };
        Self::new(Arc::new(Simulator::new(config)), 20, options)
    }

    /// Creates a gateway whose model waits for `pace` before each token.
    pub(crate) fn paced(texts: &[&str], pace: Duration) -> Self {
        Self::paced_with(texts, pace, GatewayOptions::default())
    }

    /// Like [`TestGateway::paced`], with the options `options`.
    pub(crate) fn paced_with(texts: &[&str], pace: Duration, options: GatewayOptions) -> Self {
        Self::with_sampler(
            Arc::new(ScriptedSampler::new(texts, IM_END).paced(pace)),
            4000,
            options,
            LIMITS,
        )
    }

    /// Creates a gateway whose attempt has other limits.
    pub(crate) fn with_limits(texts: &[&str], limits: Limits) -> Self {
        Self::with_sampler(
            Arc::new(ScriptedSampler::new(texts, IM_END)),
            1000,
            GatewayOptions::default(),
            limits,
        )
    }

    /// Creates a gateway whose model returns `texts`, with a context policy for the attempt.
    pub(crate) fn with_context_policy(
        texts: &[&str],
        context: impl Fn(&Arc<Party>) -> ContextPolicy,
    ) -> Self {
        let sampler = Arc::new(ScriptedSampler::new(texts, IM_END));
        Self::with_limits_and_policy(sampler, 1000, GatewayOptions::default(), LIMITS, context)
    }

    fn new(sampler: Arc<dyn Sampler>, max_tokens: usize, options: GatewayOptions) -> Self {
        Self::with_sampler(sampler, max_tokens, options, LIMITS)
    }

    fn with_sampler(
        sampler: Arc<dyn Sampler>,
        max_tokens: usize,
        options: GatewayOptions,
        limits: Limits,
    ) -> Self {
        Self::with_limits_and_policy(sampler, max_tokens, options, limits, |_| (Budget::NONE, None))
    }

    fn with_limits_and_policy(
        sampler: Arc<dyn Sampler>,
        max_tokens: usize,
        options: GatewayOptions,
        limits: Limits,
        context: impl Fn(&Arc<Party>) -> ContextPolicy,
    ) -> Self {
        Self::build(Arc::clone(&FORMAT), sampler, max_tokens, options, limits, context)
    }

    /// Creates a gateway whose model returns `texts` and renders conversations in `format`.
    pub(crate) fn with_format(texts: &[&str], format: Format) -> Self {
        let sampler = Arc::new(ScriptedSampler::new(texts, IM_END));
        Self::build(Arc::new(format), sampler, 1000, GatewayOptions::default(), LIMITS, |_| {
            (Budget::NONE, None)
        })
    }

    fn build(
        format: Arc<Format>,
        sampler: Arc<dyn Sampler>,
        max_tokens: usize,
        options: GatewayOptions,
        limits: Limits,
        context: impl Fn(&Arc<Party>) -> ContextPolicy,
    ) -> Self {
        let party = Party::new(
            "tiny",
            Backend::Tokens(sampler),
            Some(Arc::clone(&format)),
            PartyLimits { context: CONTEXT, timeout: limits.timeout },
            SamplingRule::Default(SamplingParams { max_tokens, ..Default::default() }),
        );
        let served = Arc::new(party.clone());
        let (budget, summarizer) = context(&served);
        let party = Arc::new(Party { agent: "default".into(), budget, summarizer, ..party });
        let gateway = Gateway::new(vec![Model { party: served, created: 1 }], options);
        let session = gateway.open_session(SessionOptions {
            rollout: "r".into(),
            attempt: "a".into(),
            routes: vec![Route { party, pattern: CallPattern::default() }],
            recorder: gateway.new_recorder("a", (1, 2), (limits.calls, limits.tokens)),
            rewards: false,
        });
        TestGateway { gateway, session, format }
    }

    /// Returns the routes of the gateway.
    pub(crate) fn router(&self) -> Router {
        build_router(&self.gateway, self.gateway.0.options.access.clone())
    }

    /// Sends a request with the key `key`.
    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        key: &str,
        body: &str,
    ) -> TestResponse {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .header("authorization", format!("Bearer {key}"))
            .body(Body::from(body.to_owned()))
            .unwrap();
        let response = self.router().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        TestResponse { status: parts.status, headers: parts.headers, text }
    }

    /// Posts a document with the attempt's key.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> TestResponse {
        self.send("POST", path, self.session.key(), &body.to_string()).await
    }

    /// Returns the origins of the prompts of the attempt's calls, in order.
    pub(crate) fn origins(&self) -> Vec<Origin> {
        self.session.recorder().origins().into_iter().map(Option::unwrap).collect()
    }

    /// Closes the attempt and returns the text of each sequence of its trajectory.
    pub(crate) async fn paths(&self) -> Vec<String> {
        let recorded = self.session.close(Duration::from_secs(10)).await.0;
        let trajectory = recorded.trajectory;
        let ids = trajectory.leaves().into_iter().map(|leaf| trajectory.sequence_tokens(leaf));
        ids.map(|ids| self.format.chat().tokenizer().decode_with_special(&ids)).collect()
    }
}
