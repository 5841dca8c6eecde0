//! Scores attempts with an HTTP service, to which attempts are posted as JSON.

use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::services::{Service, parse_components};
use crate::{Component, ScoreError, Scorer, ScorerInput};

/// Recipe keys of a scoring service, to which attempts are posted individually or per group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpKeys {
    /// URL to which attempts are posted, with the scheme `http` or `https`.
    pub url: String,
    /// Name of the environment variable with the API key, which is sent as a bearer token.
    #[serde(default)]
    pub key_env: Option<String>,
    /// Whether all attempts of a group are posted in one request. Default: false.
    #[serde(default)]
    pub group: bool,
    /// Timeout for a response, including all retries, in seconds. Above 0 and at most 1e9. Default:
    /// 60.
    #[serde(default = "default_timeout_seconds")]
    pub seconds: f64,
    /// Maximum number of requests, with growing pauses, if the service is unavailable or busy. In
    /// 1..=10000. Default: 4.
    #[serde(default = "default_tries")]
    pub tries: usize,
    /// Maximum number of concurrent requests. In 1..=10000. Default: 16.
    #[serde(default = "default_concurrency")]
    pub concurrency: usize,
}

fn default_timeout_seconds() -> f64 {
    60.0
}

fn default_tries() -> usize {
    4
}

fn default_concurrency() -> usize {
    16
}

impl HttpKeys {
    /// Creates the keys of the scoring service at `url`, with defaults for all other keys.
    pub fn new(url: impl Into<String>) -> Self {
        HttpKeys {
            url: url.into(),
            key_env: None,
            group: false,
            seconds: default_timeout_seconds(),
            tries: default_tries(),
            concurrency: default_concurrency(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        let invalid = |what: String| Err(ScoreError::Unusable(what));
        if !["http://", "https://"].iter().any(|scheme| self.url.starts_with(scheme)) {
            return invalid(format!(
                "url = {:?}, but it must start with http:// or https://",
                self.url
            ));
        }
        if !(self.seconds > 0.0 && self.seconds <= 1e9) {
            return invalid(format!(
                "seconds = {}, but it must be more than 0 and at most 1e9",
                self.seconds
            ));
        }
        for (name, value) in [("tries", self.tries), ("concurrency", self.concurrency)] {
            if !(1..=10_000).contains(&value) {
                return invalid(format!("{name} = {value}, but it must be in 1..=10000"));
            }
        }
        Ok(())
    }
}

/// Scorer that posts attempts to a [`Service`].
#[derive(Debug)]
pub struct HttpScorer {
    keys: HttpKeys,
    service: Arc<dyn Service>,
}

impl HttpScorer {
    /// Creates a scorer that sends its requests through `service`.
    pub fn new(keys: HttpKeys, service: Arc<dyn Service>) -> Arc<Self> {
        Arc::new(HttpScorer { keys, service })
    }

    fn response_error(&self, what: &str) -> ScoreError {
        ScoreError::Unusable(format!("the scorer at {} responded with {what}", self.keys.url))
    }
}

/// Returns the JSON request for one attempt: all facts about the attempt except its tokens.
fn request_body(input: &ScorerInput) -> Value {
    json!({
        "attempt": input.attempt.to_string(),
        "task": input.task,
        "text": input.text(),
        "thought": input.reasoning(),
        "expected": input.expected_value(),
        "finish": input.outcome.finish,
        "turns": input.outcome.turns,
        "evidence": input.toolbox_data(),
    })
}

#[async_trait]
impl Scorer for HttpScorer {
    fn scores_groups(&self) -> bool {
        self.keys.group
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let response = self.service.request(&request_body(input)).await?;
        parse_components(&response).map_err(|what| self.response_error(&what))
    }

    async fn score_group(&self, group: &[ScorerInput]) -> Result<Vec<Vec<Component>>, ScoreError> {
        let requests: Vec<Value> = group.iter().map(request_body).collect();
        let response = self.service.request(&json!({ "group": requests })).await?;
        let each = response.as_array().filter(|each| each.len() == group.len());
        let each = each.ok_or_else(|| {
            let shown = crate::scorer::excerpt(&response.to_string());
            self.response_error(&format!(
                "{shown:?}, which is not a list of {} scores",
                group.len()
            ))
        })?;
        each.iter()
            .map(|response| parse_components(response).map_err(|what| self.response_error(&what)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::testing::scorer_input;

    /// A service that returns prepared responses in order, and records the requests.
    #[derive(Debug)]
    struct ScriptedService(Mutex<Vec<Result<Value, ScoreError>>>, Mutex<Vec<Value>>);

    #[async_trait]
    impl Service for ScriptedService {
        async fn request(&self, request: &Value) -> Result<Value, ScoreError> {
            self.1.lock().unwrap().push(request.clone());
            self.0.lock().unwrap().remove(0)
        }
    }

    fn scripted_scorer(
        responses: Vec<Result<Value, ScoreError>>,
    ) -> (Arc<ScriptedService>, Arc<HttpScorer>) {
        let service = Arc::new(ScriptedService(Mutex::new(responses), Mutex::default()));
        (service.clone(), HttpScorer::new(HttpKeys::new("http://h/score"), service))
    }

    #[tokio::test]
    async fn service_returns_number_or_components() {
        let unavailable = ScoreError::Unavailable("away".into());
        let responses = [
            Ok(json!(0.5)),
            Ok(json!({"score": 1, "style": 0.25, "why": "x"})),
            Err(unavailable.clone()),
        ];
        let (service, scorer) = scripted_scorer(responses.to_vec());
        let input = scorer_input("72", json!({ "answer": "72" }));
        assert_eq!(scorer.score(&input).await.unwrap(), [Component::score(0.5)]);
        let both = [Component::score(1.0), Component::new("style", 0.25)];
        assert_eq!(scorer.score(&input).await.unwrap(), both);
        assert_eq!(scorer.score(&input).await.unwrap_err(), unavailable);
        let seen = service.1.lock().unwrap()[0].clone();
        assert_eq!(
            (&seen["text"], &seen["expected"], &seen["finish"]),
            (&json!("72"), &json!("72"), &json!("answered"))
        );
    }

    #[tokio::test]
    async fn invalid_responses_are_rejected() {
        for response in [json!("good"), json!(null), json!({"value": 1}), json!([1])] {
            let (_, scorer) = scripted_scorer(vec![Ok(response.clone())]);
            let error = scorer.score(&scorer_input("", json!({}))).await.unwrap_err();
            assert!(
                error.to_string().starts_with("the scorer at http://h/score responded with"),
                "{error}"
            );
            assert!(!error.is_temporary());
        }
        let (_, scorer) = scripted_scorer(vec![Ok(json!([1, {"score": 0}])), Ok(json!([1]))]);
        let group = [scorer_input("a", json!({})), scorer_input("b", json!({}))];
        let components = scorer.score_group(&group).await.unwrap();
        assert_eq!(components, [[Component::score(1.0)], [Component::score(0.0)]]);
        assert!(
            scorer
                .score_group(&group)
                .await
                .unwrap_err()
                .to_string()
                .contains("not a list of 2 scores")
        );
    }
}
