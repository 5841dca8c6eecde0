//! Scorers that call services or start processes, with the clients, sandboxes and supervisors that
//! they need.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_agent::environments::{EnvironmentScorer, Environments};
use levade_call::{
    Backend, CallOptions, ErrorKind, Input, Party, PartyLimits, Recorder, Request, SamplingOptions,
    SamplingRule, call,
};
use levade_policy::{FinishReason, SamplingParams};
use levade_recipe::RewardKeys;
use levade_remote::{Endpoint, ExternalError, ExternalOptions, Service, ServiceOptions};
use levade_reward::{
    self as reward, ChatText, CommandScorer, HttpKeys, HttpScorer, JudgeKeys, JudgeScorer,
    PythonScorer, ScoreError, Scorer, ScorerKind,
};
use levade_text::Message;
use levade_trainer::CustomScorers;
use serde_json::Value;

use crate::failure::unusable;
use crate::host::Host;
use crate::{external, testbed};

/// Creates the scorers of a recipe that need a client, a sandbox, a process supervisor or the
/// recipe's environments. API keys are read from environment variables.
///
/// # Errors
/// Returns an error that names the scorer if an address or a setting is invalid, or if an API key
/// is missing.
pub fn custom_scorers(
    keys: &RewardKeys,
    environments: &Environments,
    host: &Host,
) -> anyhow::Result<CustomScorers> {
    let only = [keys.single_scorer()];
    let supervisor = host.supervisor();
    let all = if keys.scorers.is_empty() { &only[..] } else { &keys.scorers[..] };
    let mut scorers = CustomScorers::new();
    for scorer in all {
        let made: Result<Arc<dyn Scorer>, String> = match &scorer.scorer {
            ScorerKind::Http(keys) => create_http_scorer(keys).map_err(|error| error.to_string()),
            ScorerKind::Judge(keys) => create_judge_scorer(keys).map_err(|error| error.to_string()),
            ScorerKind::Code(keys) => testbed::create_code_scorer(keys),
            ScorerKind::Command(keys) => {
                Ok(Arc::new(CommandScorer::new(keys.clone(), supervisor.clone())))
            }
            ScorerKind::Python(keys) => Ok(PythonScorer::new(keys.clone(), supervisor.clone())),
            ScorerKind::Environment(_) => {
                Ok(Arc::new(EnvironmentScorer::new(environments.clone())))
            }
            _ => continue,
        };
        let made = made.map_err(|why| unusable(format!("the scorer {}: {why}", scorer.name)))?;
        scorers.insert(scorer.name.clone(), made);
    }
    Ok(scorers)
}

fn create_http_scorer(keys: &HttpKeys) -> Result<Arc<dyn Scorer>, ExternalError> {
    let HttpKeys { url, key_env, seconds, tries, concurrency, .. } = keys.clone();
    let service = Service::new(ServiceOptions {
        key_env,
        tries,
        max_running: concurrency,
        deadline: Duration::from_secs_f64(seconds),
        ..ServiceOptions::new(url)
    })?;
    Ok(HttpScorer::new(keys.clone(), Arc::new(HttpService(service))))
}

/// Returns warnings about scorers that work but are unsafe. Each warning names a remedy.
pub fn safety_warnings(keys: &RewardKeys) -> Vec<&'static str> {
    let kinds = keys.scorers.iter().map(|scorer| &scorer.scorer).chain([&keys.scorer]);
    let note =
        |kind: &ScorerKind| if let ScorerKind::Judge(keys) = kind { keys.warning() } else { None };
    kinds.filter_map(note).collect()
}

fn create_judge_scorer(keys: &JudgeKeys) -> anyhow::Result<Arc<dyn Scorer>> {
    let endpoint = |keys_endpoint: &reward::JudgeEndpoint| Endpoint {
        base_url: keys_endpoint.url.clone(),
        model: keys_endpoint.model.clone(),
        key_env: keys_endpoint.key_env.clone(),
    };
    let timeout = Duration::from_secs_f64(keys.seconds);
    let api = external::create_complete_api(ExternalOptions {
        endpoints: keys.endpoints.iter().map(endpoint).collect(),
        max_running: keys.concurrency,
        requests_per_minute: keys.requests_per_minute,
        deadline: timeout,
        ..ExternalOptions::default()
    })?;
    let sampling = SamplingParams {
        max_tokens: keys.max_tokens,
        temperature: keys.temperature,
        ..Default::default()
    };
    let party = Party::new(
        "judge",
        Backend::Messages(api),
        None,
        // The API has its own timeouts for each endpoint, and for the queue before them.
        PartyLimits { context: usize::MAX, timeout: Duration::MAX },
        SamplingRule::Default(sampling),
    );
    Ok(JudgeScorer::new(keys.clone(), Arc::new(JudgeModel(Arc::new(party))))?)
}

/// Converts an error of a scoring service. A rejection means that the request is unusable. Any
/// other error is an outage, after which the run waits for the service.
fn to_score_error(error: &ExternalError) -> ScoreError {
    if external::is_request_rejected(error) {
        ScoreError::Unusable(error.to_string())
    } else {
        ScoreError::Unavailable(error.to_string())
    }
}

/// Client of a scoring service.
#[derive(Debug)]
struct HttpService(Service);

#[async_trait]
impl reward::Service for HttpService {
    async fn request(&self, question: &Value) -> Result<Value, ScoreError> {
        self.0.send(question).await.map_err(|error| to_score_error(&error))
    }
}

/// Party that answers for the judge model.
struct JudgeModel(Arc<Party>);

impl fmt::Debug for JudgeModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("JudgeModel").field(&self.0.model).finish()
    }
}

#[async_trait]
impl reward::Chat for JudgeModel {
    async fn complete(
        &self,
        system: &str,
        prompt: &str,
        seed: u64,
    ) -> Result<ChatText, ScoreError> {
        let system = Some(system).filter(|system| !system.is_empty()).map(Message::system);
        let messages = system.into_iter().chain([Message::user(prompt)]).collect();
        let mut request = Request::new(Input::Messages(messages));
        let (SamplingRule::Default(params) | SamplingRule::Fixed(params)) = &self.0.sampling;
        request.sampling = SamplingOptions {
            max_tokens: Some(params.max_tokens),
            temperature: Some(params.temperature),
            // Some servers reject a seed of more than 63 bits.
            seed: Some(seed & i64::MAX as u64),
            ..SamplingOptions::default()
        };
        let recorder = Recorder::standalone(Some(seed), Arc::default());
        let called = async {
            call(&recorder, &self.0, request, CallOptions::default()).await?.completion().await
        };
        let end = called.await.map_err(|error| match error.kind {
            // If the server rejects this prompt, another prompt may succeed. Any other error is an
            // outage, after which the run waits for the server.
            ErrorKind::Invalid => ScoreError::Unusable(error.message),
            _ => ScoreError::Unavailable(error.message),
        })?;
        let is_truncated = end.finish == FinishReason::Length;
        Ok(ChatText { text: end.message.content.as_str().to_owned(), is_truncated })
    }
}

#[cfg(test)]
mod tests {
    use levade_recipe::ScorerKeys;
    use levade_reward::ScorerInput;
    use levade_tree::{AttemptId, Component, Outcome};
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Starts a server that sends the same response to all requests. Returns its address.
    async fn server(status: &'static str, body: Value) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            loop {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut read = vec![0; 1 << 16];
                let _ = socket.read(&mut read).await;
                let body = body.to_string();
                let head = "content-type: application/json\r\nconnection: close\r\ncontent-length:";
                let response = format!("HTTP/1.1 {status}\r\n{head} {}\r\n\r\n{body}", body.len());
                let _ = socket.write_all(response.as_bytes()).await;
            }
        });
        url
    }

    fn scorer_input() -> ScorerInput {
        ScorerInput {
            attempt: AttemptId::from_bytes([1; 16]),
            task: json!({ "question": "2 + 3?", "answer": "5" }),
            outcome: Outcome::demonstrated("5"),
            trajectory: Arc::default(),
        }
    }

    fn named(name: &str, scorer: ScorerKind) -> ScorerKeys {
        ScorerKeys {
            name: name.into(),
            ..RewardKeys { scorer, ..RewardKeys::default() }.single_scorer()
        }
    }

    #[tokio::test]
    async fn scorers_call_configured_endpoints() {
        let url = server("200 OK", json!({ "score": 0.5, "style": 1 })).await;
        let judge_response = json!({ "choices": [{ "message": { "role": "assistant", "content": "Correct." }, "finish_reason": "stop" }] });
        let judge = server("200 OK", judge_response).await;
        // The first endpoint is unreachable.
        let mut keys = JudgeKeys::new("http://127.0.0.1:9/v1", "m");
        keys.endpoints.push(reward::JudgeEndpoint { url: judge, model: "m".into(), key_env: None });
        let scorers = vec![
            named("service", ScorerKind::Http(HttpKeys::new(format!("{url}/score")))),
            named("judge", ScorerKind::Judge(keys)),
            named("numbers", ScorerKind::default()),
        ];
        let made = custom_scorers(
            &RewardKeys { scorers, ..RewardKeys::default() },
            &Environments::default(),
            &Host::default(),
        )
        .unwrap();
        assert_eq!(made.len(), 2, "one is built in");
        let components = made["service"].score(&scorer_input()).await.unwrap();
        assert_eq!(components, [Component::score(0.5), Component::new("style", 1.0)]);
        assert_eq!(made["judge"].score(&scorer_input()).await.unwrap(), [Component::score(1.0)]);
    }

    #[tokio::test]
    async fn outage_is_retryable_and_rejection_is_not() {
        for (status, may_pass) in [("500 Oh", true), ("401 Who", true), ("400 No", false)] {
            let url = server(status, json!({ "error": "oh" })).await;
            let keys = HttpKeys { tries: 1, ..HttpKeys::new(url) };
            let error =
                create_http_scorer(&keys).unwrap().score(&scorer_input()).await.unwrap_err();
            assert_eq!(error.is_temporary(), may_pass, "{error}");
        }
        let keys = JudgeKeys {
            endpoints: vec![reward::JudgeEndpoint {
                url: "http://h".into(),
                model: "m".into(),
                key_env: Some("LEVADE_NO_SUCH_KEY".into()),
            }],
            ..JudgeKeys::new("", "")
        };
        let only = RewardKeys { scorer: ScorerKind::Judge(keys), ..RewardKeys::default() };
        let error = custom_scorers(&only, &Environments::default(), &Host::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("the scorer judge: ") && error.contains("LEVADE_NO_SUCH_KEY"),
            "{error}"
        );
    }
}
