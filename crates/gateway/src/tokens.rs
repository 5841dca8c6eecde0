//! `/tokenize` and `/detokenize`, in vLLM's format.

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::gateway::Gateway;
use crate::http::{IncomingRequest, parse_json_body};
use crate::openai::{self, build_response};
use levade_call::ApiError;

/// Request body of `/tokenize`: a text or a conversation.
#[derive(Deserialize)]
struct TokenizeRequest {
    #[serde(default, deserialize_with = "crate::http::or_default")]
    model: String,
    prompt: Option<String>,
    messages: Option<Vec<Value>>,
    tools: Option<Vec<Value>>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

/// Request body of `/detokenize`: token ids.
#[derive(Deserialize)]
struct DetokenizeRequest {
    #[serde(default, deserialize_with = "crate::http::or_default")]
    model: String,
    tokens: Vec<u32>,
}

/// Handles `POST /tokenize`.
pub(crate) async fn tokenize(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let work = tokio::task::spawn_blocking(move || tokenize_request(&gateway, incoming)).await;
    build_response(
        work.map_err(|error| {
            ApiError::new(
                levade_call::ErrorKind::Internal,
                format!("the text cannot be tokenized: {error}"),
            )
        })
        .and_then(|found| found),
    )
}

fn tokenize_request(gateway: &Gateway, incoming: IncomingRequest) -> Result<Value, ApiError> {
    let (caller, body) = incoming.into_call()?;
    let request: TokenizeRequest = parse_json_body(&body)?;
    let model = gateway.find_party_for_model(&caller, &request.model)?;
    let model = model.tokens()?;
    let chat = model.format.chat();
    let ids = match (request.prompt, request.messages) {
        (Some(text), None) if request.add_special_tokens == Some(false) => {
            chat.tokenizer().encode(&text)
        }
        (Some(text), None) => chat.tokenizer().encode_document(&text),
        (None, Some(messages)) => {
            let tools = openai::parse_tools(
                gateway,
                "tokenize",
                request.tools.as_deref().unwrap_or_default(),
            )?;
            chat.prompt(&openai::parse_messages(gateway, messages)?, &tools)?
        }
        _ => return Err(ApiError::field("prompt", "set either prompt or messages")),
    };
    let mut response = json!({ "count": ids.len(), "max_model_len": model.context, "tokens": ids });
    if request.return_token_strs == Some(true) {
        let texts: Vec<String> = ids.iter().map(|id| chat.tokenizer().token_text(*id)).collect();
        response["token_strs"] = texts.into();
    }
    Ok(response)
}

/// Handles `POST /detokenize`.
pub(crate) async fn detokenize(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    build_response(detokenize_request(&gateway, incoming))
}

fn detokenize_request(gateway: &Gateway, incoming: IncomingRequest) -> Result<Value, ApiError> {
    let (caller, body) = incoming.into_call()?;
    let request: DetokenizeRequest = parse_json_body(&body)?;
    let model = gateway.find_party_for_model(&caller, &request.model)?;
    let tokenizer = model.tokens()?.format.chat().tokenizer();
    let size = tokenizer.vocabulary();
    if let Some(id) = request.tokens.iter().find(|id| **id as usize >= size) {
        return Err(ApiError::field(
            "tokens",
            format!("token id {id} is outside of the vocabulary of {size} tokens"),
        ));
    }
    Ok(json!({ "prompt": tokenizer.decode_with_special(&request.tokens) }))
}
