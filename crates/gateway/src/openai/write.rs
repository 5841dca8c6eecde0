//! Parts of answers that several of OpenAI's endpoints share.

use axum::http::StatusCode;
use axum::response::Response;
use levade_policy::FinishReason;
use levade_text::Chat;
use serde_json::{Value, json};

use crate::http::{Gathered, failed, json as json_document};
use levade_call::{ApiError, ErrorKind};
use levade_call::{End, Token};

/// An error in OpenAI's shape.
pub(crate) fn fault(fault: &ApiError) -> Value {
    let (kind, code) = match fault.kind {
        ErrorKind::TooLong => ("invalid_request_error", Some("context_length_exceeded")),
        ErrorKind::Invalid | ErrorKind::TooLarge | ErrorKind::Method | ErrorKind::MediaType => {
            ("invalid_request_error", None)
        }
        ErrorKind::Unauthorized => ("authentication_error", Some("invalid_api_key")),
        ErrorKind::Limit => ("invalid_request_error", Some("attempt_limit_reached")),
        ErrorKind::Forbidden => ("permission_error", None),
        ErrorKind::NotFound if fault.param.as_deref() == Some("model") => {
            ("invalid_request_error", Some("model_not_found"))
        }
        ErrorKind::NotFound => ("invalid_request_error", None),
        ErrorKind::Gone => ("invalid_request_error", Some("attempt_over")),
        ErrorKind::Busy(_) => ("rate_limit_error", Some("rate_limit_exceeded")),
        ErrorKind::Unavailable => ("server_error", Some("unavailable")),
        ErrorKind::Deadline => ("server_error", Some("deadline")),
        ErrorKind::Internal => ("server_error", None),
    };
    json!({ "error": { "message": fault.message, "type": kind, "param": fault.param, "code": code } })
}

/// An answer that is there at once: a document, or an error in OpenAI's shape.
pub(crate) fn respond(found: Result<Value, ApiError>) -> Response {
    match found {
        Ok(value) => json_document(StatusCode::OK, &value),
        Err(found) => failed(&found, &fault(&found)),
    }
}

/// The reason for an end, in OpenAI's words.
pub(crate) fn finish(end: &End) -> &'static str {
    match end.finish {
        FinishReason::StopId | FinishReason::StopString if end.calls => "tool_calls",
        FinishReason::StopId | FinishReason::StopString => "stop",
        FinishReason::Length | FinishReason::Context => "length",
        FinishReason::Aborted => "abort",
    }
}

/// What ended a reply, as vLLM says it.
pub(crate) fn stop_reason(end: &End) -> Value {
    end.stopped_by.as_deref().map_or(Value::Null, Value::from)
}

/// Numbers of tokens.
pub(crate) fn usage(prompt: usize, replies: &[(usize, usize)]) -> Value {
    let completion: usize = replies.iter().map(|(tokens, _)| tokens).sum();
    let reasoning: usize = replies.iter().map(|(_, thought)| thought).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": { "reasoning_tokens": reasoning },
    })
}

/// Numbers of tokens of whole replies.
pub(crate) fn usage_of(replies: &[Gathered]) -> Value {
    let prompt = replies.first().map_or(0, |reply| reply.end.prompt_tokens);
    let tokens: Vec<(usize, usize)> = replies.iter().map(|r| (r.end.tokens, r.end.thought_tokens)).collect();
    usage(prompt, &tokens)
}

/// How tokens are told of.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tokens {
    /// Whether log-probabilities are told.
    pub logprobs: bool,
    /// Whether tokens stand as `token_id:ID` in place of their text.
    pub as_ids: bool,
    /// Whether ids are told beside the text.
    pub ids: bool,
    /// Whether it is told which weights drew them.
    pub versions: bool,
}

/// Versions of the weights that drew `tokens`, the first of which is number `start` of its reply: runs, as
/// vLLM tells of them.
pub(crate) fn weight_versions(tokens: &[Token], start: usize) -> Value {
    let mut start = start;
    let runs = tokens.chunk_by(|a, b| a.version == b.version).map(|run| {
        let end = start + run.len();
        let value = json!({ "version": run[0].version.to_string(), "start": start, "end": end });
        start = end;
        value
    });
    runs.collect::<Vec<Value>>().into()
}

impl Tokens {
    /// Whether anything is told of tokens.
    pub(crate) fn any(self) -> bool {
        self.logprobs || self.ids || self.versions
    }

    /// Text of a token in a list of log-probabilities.
    pub(crate) fn text(self, chat: &Chat, id: u32) -> String {
        match self.as_ids {
            true => format!("token_id:{id}"),
            false => String::from_utf8_lossy(chat.tokenizer().bytes_with_special(id)).into_owned(),
        }
    }

    /// Log-probabilities as chats have them.
    pub(crate) fn content(self, chat: &Chat, tokens: &[Token]) -> Value {
        let one = |id: u32, logprob: f32| {
            json!({
                "token": self.text(chat, id),
                "token_id": id,
                "logprob": finite(logprob),
                "bytes": chat.tokenizer().bytes_with_special(id),
            })
        };
        let content = tokens.iter().map(|token| {
            let mut value = one(token.id, token.logprob);
            let top: Vec<Value> = token.top.iter().map(|(id, logprob)| one(*id, *logprob)).collect();
            value["top_logprobs"] = top.into();
            value
        });
        json!({ "content": content.collect::<Vec<Value>>(), "refusal": null })
    }
}

/// A log-probability that JSON can hold.
pub(crate) fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
