//! External policies: creates the chat APIs that the gateway calls from the policies of a recipe.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use levade_agent::program::SessionEndpoint;
use levade_call::{
    ApiError, ChatApi, ChatCompletion, ChatDelta, ChatQuery, Constraint, ErrorKind,
    SamplingOptions, ToolChoice,
};
use levade_policy::FinishReason;
use levade_recipe::{ExternalKeys, Phase, PolicyKeys, Recipe};
use levade_remote::{
    ChatEvent, ChatParams, ChatRequest, ChatResponse, Endpoint, External, ExternalError,
    ExternalOptions, Finish,
};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::failure::unusable;

/// Chat APIs of the external policies, by the names of the policies. The concurrency limit of a
/// policy applies to all agents that use it together.
pub type ExternalApis = BTreeMap<String, Arc<dyn ChatApi>>;

/// Creates the chat APIs of a recipe's external policies that an agent uses or a phase imitates.
/// API keys are read from environment variables.
///
/// # Errors
/// Returns an error if an address of a policy is invalid, or if an API key is missing.
pub fn create_external_apis(recipe: &Recipe) -> anyhow::Result<ExternalApis> {
    let mut external_apis = ExternalApis::new();
    let requested = recipe.agents().into_iter().flat_map(|(_, agent)| recipe.policy_names(agent));
    let imitated = recipe.phase.iter().filter_map(Phase::teacher).map(str::to_owned);
    for name in requested.chain(imitated) {
        if let Some(PolicyKeys::External(keys)) = recipe.policy.get(&name)
            && !external_apis.contains_key(&name)
        {
            let api = create_chat_api(keys)
                .map_err(|error| unusable(format!("policy.{name}: {error}")))?;
            external_apis.insert(name, api);
        }
    }
    Ok(external_apis)
}

/// Creates the chat API that `keys` describe. Its API key is read from the environment.
///
/// # Errors
/// Returns an error if an address in `keys` is invalid, or if the API key is missing.
pub fn create_chat_api(keys: &ExternalKeys) -> Result<Arc<dyn ChatApi>, ExternalError> {
    let ExternalKeys { model, key_env, concurrency, requests_per_minute, seconds, .. } =
        keys.clone();
    let endpoint = |url: &str| Endpoint {
        base_url: url.to_owned(),
        model: model.clone(),
        key_env: key_env.clone(),
    };
    let options = ExternalOptions {
        endpoints: keys.urls().map(endpoint).collect(),
        max_running: concurrency,
        requests_per_minute,
        deadline: Duration::from_secs_f64(seconds),
        ..ExternalOptions::default()
    };
    Ok(Arc::new(StreamingApi(External::new(options)?)))
}

/// Creates the chat API that calls an attempt's endpoint. `timeout` limits each completion.
///
/// # Errors
/// Returns an error if the address of the endpoint is invalid.
pub fn create_session_api(
    endpoint: &SessionEndpoint,
    timeout: Duration,
) -> Result<Arc<dyn ChatApi>, ExternalError> {
    let SessionEndpoint { base_url, model, key, .. } = endpoint.clone();
    let options = ExternalOptions {
        endpoints: vec![Endpoint { base_url, model, key_env: None }],
        deadline: timeout,
        // While devices train, no completion starts.
        silence: timeout,
        ..ExternalOptions::default()
    };
    Ok(Arc::new(StreamingApi(External::with_key(options, &key)?)))
}

/// Chat API that streams its completions.
struct StreamingApi(External);

impl ChatApi for StreamingApi {
    fn respond(&self, query: ChatQuery) -> UnboundedReceiver<Result<ChatDelta, ApiError>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let api = self.0.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = sender.closed() => {}
                result = stream_completion(&api, query, &sender) => if let Err(error) = result {
                    // The receiver may have been dropped.
                    let _ = sender.send(Err(error));
                },
            }
        });
        receiver
    }

    fn check_reachable(&self) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send + '_>> {
        Box::pin(async move { self.0.check_reachable().await.map_err(|error| error.to_string()) })
    }
}

/// Creates a chat API that does not stream: each completion arrives complete, in one delta. A
/// failed call can therefore always be retried at the next endpoint. API keys are read from
/// environment variables.
///
/// # Errors
/// Returns an error if an address in `options` is invalid, or if an API key is missing.
pub fn create_complete_api(options: ExternalOptions) -> Result<Arc<dyn ChatApi>, ExternalError> {
    Ok(Arc::new(CompleteApi(External::new(options)?)))
}

/// Chat API that does not stream its completions.
struct CompleteApi(External);

impl ChatApi for CompleteApi {
    fn respond(&self, query: ChatQuery) -> UnboundedReceiver<Result<ChatDelta, ApiError>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let api = self.0.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = sender.closed() => {}
                // The receiver may have been dropped.
                completed = request_completion(&api, query) => drop(sender.send(completed)),
            }
        });
        receiver
    }
}

async fn request_completion(api: &External, query: ChatQuery) -> Result<ChatDelta, ApiError> {
    let mut response = api.chat(&to_chat_request(query)?).await.map_err(|error| {
        if is_request_rejected(&error) {
            ApiError::new(ErrorKind::Invalid, error.to_string())
        } else {
            to_api_error(error)
        }
    })?;
    // The text of a completion is used even if its tool calls are malformed.
    if response.message().is_err() {
        response.tool_calls.clear();
    }
    Ok(ChatDelta::Done(Box::new(to_completion(&response)?)))
}

/// Returns whether the error rejects the request itself at every endpoint, so that only a different
/// request can succeed.
pub fn is_request_rejected(error: &ExternalError) -> bool {
    let is_rejection = |error: &ExternalError| {
        matches!(
            error,
            ExternalError::Invalid(_)
                | ExternalError::Rejected { .. }
                | ExternalError::Protocol { .. }
        )
    };
    error.failures().iter().all(is_rejection)
}

/// Requests a completion from a chat API, and sends the completion's deltas to `sender`.
async fn stream_completion(
    api: &External,
    query: ChatQuery,
    sender: &UnboundedSender<Result<ChatDelta, ApiError>>,
) -> Result<(), ApiError> {
    let request = to_chat_request(query)?;
    let mut stream = api.stream(&request).await.map_err(to_api_error)?;
    while let Some(event) = stream.next().await {
        let deltas = match event.map_err(to_api_error)? {
            ChatEvent::Content(text) => ChatDelta::Text(text),
            ChatEvent::Reasoning(text) => ChatDelta::Reasoning(text),
            // Tool calls are reported with the complete message.
            ChatEvent::Call { .. } => continue,
            ChatEvent::Finished(response) => ChatDelta::Done(Box::new(to_completion(&response)?)),
        };
        if sender.send(Ok(deltas)).is_err() {
            break;
        }
    }
    Ok(())
}

/// Converts a query to a request to the chat API.
///
/// # Errors
/// Returns an error if the query has a constraint that chat APIs do not support.
fn to_chat_request(query: ChatQuery) -> Result<ChatRequest, ApiError> {
    let ChatQuery { messages, tools, tool_choice, parallel_calls, constraint, sampling, .. } =
        query;
    let mut extra = Map::new();
    let choice = match tool_choice {
        ToolChoice::Auto => None,
        ToolChoice::None => Some(json!("none")),
        ToolChoice::Required => Some(json!("required")),
        ToolChoice::Named(name) => {
            Some(json!({ "type": "function", "function": { "name": name } }))
        }
    };
    // Servers reject both fields if there are no tools.
    if !tools.is_empty() {
        extra.extend(choice.map(|choice| ("tool_choice".to_owned(), choice)));
        if !parallel_calls {
            extra.insert("parallel_tool_calls".into(), false.into());
        }
    }
    if let Some(response_format) = constraint.map(to_response_format).transpose()? {
        extra.insert("response_format".into(), response_format);
    }
    let SamplingOptions { max_tokens, temperature, top_p, stop, seed, .. } = sampling.clone();
    extra.extend(to_extra_params(&sampling));
    let params = ChatParams { max_tokens, temperature, top_p, stop, seed, extra };
    Ok(ChatRequest { messages, tools, params })
}

/// Returns the sampling options that [`ChatParams`] has no field for, as additional parameters of a
/// request.
fn to_extra_params(sampling: &SamplingOptions) -> Map<String, Value> {
    let SamplingOptions {
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        ..
    } = sampling;
    // Writes the short decimal form, such as 0.7, instead of all digits of the nearest `f32`.
    let decimal = |value: &f32| value.to_string().parse::<f64>().unwrap_or(f64::from(*value));
    let bias = sampling.logit_bias.as_ref().map(|bias| {
        bias.iter().map(|(id, bias)| (id.to_string(), json!(decimal(bias)))).collect::<Map<_, _>>()
    });
    let all = [
        ("top_k", json!(top_k)),
        ("min_p", json!(min_p.as_ref().map(decimal))),
        ("repetition_penalty", json!(repetition_penalty.as_ref().map(decimal))),
        ("presence_penalty", json!(presence_penalty.as_ref().map(decimal))),
        ("frequency_penalty", json!(frequency_penalty.as_ref().map(decimal))),
        ("logit_bias", json!(bias)),
        ("min_tokens", json!(sampling.min_tokens)),
        ("stop_token_ids", json!(Some(&sampling.stop_ids).filter(|ids| !ids.is_empty()))),
        ("ignore_eos", json!(Some(true).filter(|_| sampling.ignore_eos))),
    ];
    all.into_iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

fn to_response_format(constraint: Constraint) -> Result<Value, ApiError> {
    match constraint {
        Constraint::JsonObject => Ok(json!({ "type": "json_object" })),
        Constraint::JsonSchema(schema) => Ok(
            json!({ "type": "json_schema", "json_schema": { "name": "reply", "schema": schema } }),
        ),
        Constraint::Regex(_) | Constraint::Grammar(_) => {
            let message = "an external policy supports JSON constraints only, not regular \
                           expressions or grammars";
            Err(ApiError::field("structured_outputs", message))
        }
    }
}

fn to_completion(response: &ChatResponse) -> Result<ChatCompletion, ApiError> {
    let message = response.message().map_err(|why| ApiError::new(ErrorKind::Unavailable, why))?;
    let finish = match &response.finish {
        // A completion that was withheld counts as truncated.
        Some(Finish::Length | Finish::ContentFilter) => FinishReason::Length,
        _ => FinishReason::StopId,
    };
    let usage = response.usage.unwrap_or_default();
    Ok(ChatCompletion {
        message,
        finish,
        prompt_tokens: usage.prompt_tokens as usize,
        tokens: usage.completion_tokens as usize,
        reasoning_tokens: usage.reasoning_tokens as usize,
    })
}

/// Converts an error of an external API. If every endpoint rejects the request itself, the kind of
/// the result is [`ErrorKind::Invalid`].
fn to_api_error(error: ExternalError) -> ApiError {
    let failures = error.failures();
    let is_callers = |error: &ExternalError| {
        matches!(error, ExternalError::Invalid(_) | ExternalError::Rejected { .. })
    };
    let pause = |error: &ExternalError| match error {
        ExternalError::Busy { retry_after, .. } => Some(*retry_after),
        _ => None,
    };
    let kind = if failures.iter().all(is_callers) {
        ErrorKind::Invalid
    } else if let Some(pauses) = failures.iter().map(pause).collect::<Option<Vec<u64>>>() {
        ErrorKind::Busy(Duration::from_secs(pauses.into_iter().min().unwrap_or_default()))
    } else if failures.iter().all(|error| matches!(error, ExternalError::Deadline { .. })) {
        ErrorKind::Deadline
    } else if error.may_pass() {
        ErrorKind::Unavailable
    } else {
        ErrorKind::Internal
    };
    ApiError::new(kind, error.to_string())
}

#[cfg(test)]
mod tests {
    use levade_text::Message;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    fn query() -> ChatQuery {
        ChatQuery {
            messages: vec![Message::user("1?")],
            tools: Vec::new(),
            tool_choice: ToolChoice::Required,
            parallel_calls: true,
            constraint: None,
            sampling: SamplingOptions {
                temperature: Some(0.7),
                min_p: Some(0.1),
                ..SamplingOptions::default()
            },
            timeout: Duration::from_secs(5),
        }
    }

    /// Serves one connection with `completion`. The returned task yields the request.
    async fn server(completion: String) -> (String, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let served = tokio::spawn(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut read = vec![0; 1 << 16];
            let count = socket.read(&mut read).await.unwrap();
            socket.write_all(completion.as_bytes()).await.unwrap();
            String::from_utf8_lossy(&read[..count]).into_owned()
        });
        (url, served)
    }

    async fn deltas(url: String) -> Vec<Result<ChatDelta, ApiError>> {
        let mut parts = create_chat_api(&ExternalKeys::new(url, "m")).unwrap().respond(query());
        let mut all = Vec::new();
        while let Some(part) = parts.recv().await {
            all.push(part);
        }
        all
    }

    #[tokio::test]
    async fn completion_is_streamed_in_deltas() {
        let chunks = [
            json!({ "choices": [{ "index": 0, "delta": { "content": "So " } }] }),
            json!({ "choices": [{ "index": 0, "delta": { "content": "be it." }, "finish_reason": "length" }] }),
            json!({ "choices": [], "usage": { "prompt_tokens": 7, "completion_tokens": 2 } }),
        ];
        let body: String = chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect();
        let head =
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        let (url, served) = server(format!("{head}{body}data: [DONE]\n\n")).await;
        let parts = deltas(url).await;
        let texts: Vec<&str> = parts
            .iter()
            .filter_map(|part| match part {
                Ok(ChatDelta::Text(text)) => Some(text.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(texts, ["So ", "be it."]);
        let Some(Ok(ChatDelta::Done(completion))) = parts.last() else { panic!("{parts:?}") };
        assert_eq!(
            (completion.finish, completion.prompt_tokens, completion.tokens),
            (FinishReason::Length, 7, 2)
        );
        assert_eq!(completion.message.content.as_str(), "So be it.");
        let requested = served.await.unwrap();
        assert!(
            requested.contains("\"temperature\":0.7") && requested.contains("\"min_p\":0.1"),
            "{requested}"
        );
        assert!(!requested.contains("tool_choice"), "there are no tools: {requested}");
    }

    #[tokio::test]
    async fn rejection_is_invalid_request_error() {
        let body = json!({ "error": { "message": "too many words" } }).to_string();
        let head = format!("HTTP/1.1 400 Bad Request\r\ncontent-length: {}\r\n\r\n", body.len());
        let (url, _served) = server(format!("{head}{body}")).await;
        let parts = deltas(url).await;
        let [Err(api_error)] = &parts[..] else { panic!("{parts:?}") };
        assert_eq!(api_error.kind, ErrorKind::Invalid);
        assert!(api_error.message.contains("too many words"), "{api_error}");
    }

    #[tokio::test]
    async fn check_reachable_names_server_that_rejects_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let url = format!("http://127.0.0.1:{port}/v1");
        let api = create_chat_api(&ExternalKeys::new(url, "m")).unwrap();
        api.check_reachable().await.unwrap();
        drop(listener);
        let error = api.check_reachable().await.unwrap_err();
        assert!(error.contains(&format!("127.0.0.1:{port}/v1")), "{error}");
        assert!(error.contains("cannot connect") && error.contains("refused"), "{error}");
    }

    #[test]
    fn request_accepts_only_json_constraints() {
        let with =
            |constraint| to_chat_request(ChatQuery { constraint: Some(constraint), ..query() });
        let schema = json!({ "type": "object" });
        let requested = with(Constraint::JsonSchema(schema.clone())).unwrap();
        assert_eq!(requested.params.extra["response_format"]["json_schema"]["schema"], schema);
        assert!(with(Constraint::Regex("a".into())).is_err());
    }
}
