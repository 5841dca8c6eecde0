//! `/v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use dressage_text::{Chat, Piece};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::split;
use super::write::{Tokens, fault, finish, finite, stop_reason, usage};
use super::{Asked, notice};
use crate::call::{Call, Input};
use crate::exchange::Caller;
use crate::fault::Fault;
use crate::gateway::Gateway;
use crate::http::{Dialect, Gathered, Incoming, answer, frame, read};
use crate::transcript::{Event, Head, Token};

/// A request.
#[derive(Deserialize)]
struct Request {
    #[serde(default)]
    model: String,
    prompt: Prompts,
    echo: Option<bool>,
    logprobs: Option<usize>,
    best_of: Option<i64>,
    stream: Option<bool>,
    stream_options: Option<Value>,
    return_token_ids: Option<bool>,
    return_tokens_as_token_ids: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Prompts, in text or in ids, one or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

impl Prompts {
    fn inputs(self) -> Vec<Input> {
        match self {
            Prompts::Text(text) => vec![Input::Text(text)],
            Prompts::Ids(ids) => vec![Input::Tokens(ids)],
            Prompts::Texts(texts) => texts.into_iter().map(Input::Text).collect(),
            Prompts::Lists(lists) => lists.into_iter().map(Input::Tokens).collect(),
        }
    }
}

/// Answers `POST /v1/completions`.
pub(crate) async fn completions(State(gateway): State<Gateway>, incoming: Incoming) -> Response {
    let _ = (gateway, incoming);
    let found = Fault::new(crate::fault::Kind::NotFound, "not yet");
    crate::http::failed(&found, &fault(&found))
}
