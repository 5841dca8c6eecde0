//! `/tokenize` and `/detokenize`, in vLLM's format.

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::gateway::Gateway;
use crate::http::{IncomingRequest, read};
use crate::openai::{self, respond};
use levade_call::ApiError;

/// Request body of `/tokenize`: a text or a conversation.
#[derive(Deserialize)]
struct Tokenize {
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
struct Detokenize {
    #[serde(default, deserialize_with = "crate::http::or_default")]
    model: String,
    tokens: Vec<u32>,
}

/// Handles `POST /tokenize`.
pub(crate) async fn tokenize(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let work = tokio::task::spawn_blocking(move || tokens_of(&gateway, incoming)).await;
    respond(
        work.map_err(|error| {
            ApiError::new(
                levade_call::ErrorKind::Internal,
                format!("the text cannot be tokenized: {error}"),
            )
        })
        .and_then(|found| found),
    )
}

fn tokens_of(gateway: &Gateway, incoming: IncomingRequest) -> Result<Value, ApiError> {
    let (caller, body) = incoming.into_call()?;
    let request: Tokenize = read(&body)?;
    let model = gateway.party_of_model(&caller, &request.model)?;
    let model = model.tokens()?;
    let chat = model.format.chat();
    let ids = match (request.prompt, request.messages) {
        (Some(text), None) if request.add_special_tokens == Some(false) => {
            chat.tokenizer().encode(&text)
        }
        (Some(text), None) => chat.tokenizer().encode_document(&text),
        (None, Some(messages)) => {
            let tools =
                openai::tools(gateway, "tokenize", request.tools.as_deref().unwrap_or_default())?;
            chat.prompt(&openai::messages(gateway, messages)?, &tools)?
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
    respond(text_of(&gateway, incoming))
}

fn text_of(gateway: &Gateway, incoming: IncomingRequest) -> Result<Value, ApiError> {
    let (caller, body) = incoming.into_call()?;
    let request: Detokenize = read(&body)?;
    let model = gateway.party_of_model(&caller, &request.model)?;
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
