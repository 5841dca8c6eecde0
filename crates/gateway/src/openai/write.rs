//! Parts of responses that several of OpenAI's endpoints share.

use axum::http::StatusCode;
use axum::response::Response;
use levade_policy::FinishReason;
use levade_text::Chat;
use serde_json::{Value, json};

use crate::http::{CollectedCompletion, error_response, json_response};
use levade_call::{ApiError, ErrorKind};
use levade_call::{End, Token};

/// Returns the JSON body of an error response in OpenAI's format.
pub(crate) fn error_body(error: &ApiError) -> Value {
    let (kind, code) = match error.kind {
        ErrorKind::TooLong => ("invalid_request_error", Some("context_length_exceeded")),
        ErrorKind::Invalid | ErrorKind::TooLarge | ErrorKind::Method | ErrorKind::MediaType => {
            ("invalid_request_error", None)
        }
        ErrorKind::Unauthorized => ("authentication_error", Some("invalid_api_key")),
        ErrorKind::Limit => ("invalid_request_error", Some("attempt_limit_reached")),
        ErrorKind::Forbidden => ("permission_error", None),
        ErrorKind::NotFound if error.param.as_deref() == Some("model") => {
            ("invalid_request_error", Some("model_not_found"))
        }
        ErrorKind::NotFound => ("invalid_request_error", None),
        ErrorKind::AttemptEnded => ("invalid_request_error", Some("attempt_over")),
        ErrorKind::Busy(_) => ("rate_limit_error", Some("rate_limit_exceeded")),
        ErrorKind::Unavailable => ("server_error", Some("unavailable")),
        ErrorKind::Deadline => ("server_error", Some("deadline")),
        ErrorKind::Internal => ("server_error", None),
    };
    json!({ "error": { "message": error.message, "type": kind, "param": error.param, "code": code } })
}

/// Returns an HTTP response that is not streamed: the JSON document `found`, or an error in
/// OpenAI's format.
pub(crate) fn build_response(found: Result<Value, ApiError>) -> Response {
    match found {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(found) => error_response(&found, &error_body(&found)),
    }
}

/// Returns the finish reason of a completion in OpenAI's format. Aborted completions have vLLM's
/// value `abort`.
pub(crate) fn to_finish_reason(end: &End) -> &'static str {
    match end.finish {
        FinishReason::StopId | FinishReason::StopString if end.calls => "tool_calls",
        FinishReason::StopId | FinishReason::StopString => "stop",
        FinishReason::Length | FinishReason::Context => "length",
        FinishReason::Aborted => "abort",
    }
}

/// Returns the stop reason of a completion as in vLLM: the stop string that ended the completion,
/// or null.
pub(crate) fn to_stop_reason(end: &End) -> Value {
    end.stopped_by.as_deref().map_or(Value::Null, Value::from)
}

/// Returns the token counts of a call as OpenAI's `usage` object. `prompt` is the number of prompt
/// tokens. `completions` contains the number of tokens, and of reasoning tokens, of each
/// completion.
pub(crate) fn build_usage(prompt: usize, completions: &[(usize, usize)]) -> Value {
    let completion: usize = completions.iter().map(|(tokens, _)| tokens).sum();
    let reasoning: usize = completions.iter().map(|(_, reasoning_tokens)| reasoning_tokens).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": { "reasoning_tokens": reasoning },
    })
}

/// Returns the token counts of the completions of one prompt as OpenAI's `usage` object.
pub(crate) fn sum_usage(completions: &[CollectedCompletion]) -> Value {
    let prompt = completions.first().map_or(0, |completion| completion.end.prompt_tokens);
    let tokens: Vec<(usize, usize)> =
        completions.iter().map(|r| (r.end.tokens, r.end.reasoning_tokens)).collect();
    build_usage(prompt, &tokens)
}

/// Selection of the token data that a response reports in addition to the text.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TokenReport {
    /// Whether the response reports log-probabilities.
    pub logprobs: bool,
    /// Whether log-probabilities identify tokens as `token_id:ID` instead of by text.
    pub as_ids: bool,
    /// Whether the response reports token ids in addition to the text.
    pub ids: bool,
    /// Whether the response reports the versions of the weights that sampled the tokens.
    pub versions: bool,
}

/// Returns the versions of the weights that sampled `tokens`, in vLLM's format: a list of
/// contiguous spans. The first token has the index `start` in its completion.
pub(crate) fn weight_version_spans(tokens: &[Token], start: usize) -> Value {
    let mut start = start;
    let runs = tokens.chunk_by(|a, b| a.version == b.version).map(|run| {
        let end = start + run.len();
        let value = json!({ "version": run[0].version.to_string(), "start": start, "end": end });
        start = end;
        value
    });
    runs.collect::<Vec<Value>>().into()
}

impl TokenReport {
    /// Returns whether the response reports log-probabilities, token ids or weight versions.
    pub(crate) fn reports_any(self) -> bool {
        self.logprobs || self.ids || self.versions
    }

    /// Returns the text that identifies the token `id` in a list of log-probabilities.
    pub(crate) fn token_text(self, chat: &Chat, id: u32) -> String {
        if self.as_ids {
            format!("token_id:{id}")
        } else {
            String::from_utf8_lossy(chat.tokenizer().bytes_with_special(id)).into_owned()
        }
    }

    /// Returns the log-probabilities of `tokens` in OpenAI's format of chat completions.
    pub(crate) fn logprob_content(self, chat: &Chat, tokens: &[Token]) -> Value {
        let content = tokens.iter().map(|token| {
            let mut value = self.token_value(chat, token.id, token.logprob);
            let top: Vec<Value> = token
                .top
                .iter()
                .map(|(id, logprob)| self.token_value(chat, *id, *logprob))
                .collect();
            value["top_logprobs"] = top.into();
            value
        });
        json!({ "content": content.collect::<Vec<Value>>(), "refusal": null })
    }

    fn token_value(self, chat: &Chat, id: u32, logprob: f32) -> Value {
        json!({
            "token": self.token_text(chat, id),
            "token_id": id,
            "logprob": clamp_logprob(logprob),
            "bytes": chat.tokenizer().bytes_with_special(id),
        })
    }
}

/// Clamps a log-probability to a value that JSON can represent.
pub(crate) fn clamp_logprob(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
