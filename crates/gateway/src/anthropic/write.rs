//! Responses in Anthropic's format.

use levade_policy::FinishReason;
use levade_text::{CompletionDelta, ToolCall};
use serde_json::{Value, json};

use crate::http::{ApiDialect, CollectedCompletion, format_frame};
use levade_call::{ApiError, ErrorKind};
use levade_call::{End, Event, Head};

/// Signature of every reasoning block in responses. Clients send the signature back, and the
/// gateway accepts any value.
const SIGNATURE: &str = "ZHJlc3NhZ2U=";

/// Returns the JSON body of an error response in Anthropic's format. `request` is the id of the
/// request.
pub(crate) fn error_body(error: &ApiError, request: &str) -> Value {
    let kind = match error.kind {
        ErrorKind::Invalid
        | ErrorKind::TooLong
        | ErrorKind::Limit
        | ErrorKind::Method
        | ErrorKind::MediaType => "invalid_request_error",
        ErrorKind::TooLarge => "request_too_large",
        ErrorKind::Unauthorized => "authentication_error",
        ErrorKind::Forbidden | ErrorKind::AttemptEnded => "permission_error",
        ErrorKind::NotFound => "not_found_error",
        ErrorKind::Busy(_) => "rate_limit_error",
        ErrorKind::Unavailable => "overloaded_error",
        ErrorKind::Deadline => "timeout_error",
        ErrorKind::Internal => "api_error",
    };
    // Clients recognize a full context by this message, and then shorten the conversation.
    let message = match error.kind {
        ErrorKind::TooLong => format!("prompt is too long: {}", error.message),
        _ => error.message.clone(),
    };
    json!({ "type": "error", "error": { "type": kind, "message": message }, "request_id": request })
}

/// Returns Anthropic's stop reason of a completion, and the stop string that ended the completion,
/// or null.
fn to_stop_reason(end: &End) -> (&'static str, Value) {
    match end.finish {
        FinishReason::StopId | FinishReason::StopString if end.calls => ("tool_use", Value::Null),
        FinishReason::StopString => ("stop_sequence", end.stopped_by.as_deref().into()),
        FinishReason::StopId => ("end_turn", Value::Null),
        FinishReason::Length | FinishReason::Context | FinishReason::Aborted => {
            ("max_tokens", Value::Null)
        }
    }
}

fn build_usage(prompt: usize, tokens: usize) -> Value {
    json!({
        "input_tokens": prompt,
        "output_tokens": tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    })
}

fn build_message(head: &Head) -> Value {
    json!({
        "id": format!("msg_{}", head.id),
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": build_usage(head.prompt.len(), 0),
    })
}

fn build_thinking_block(text: &str) -> Value {
    json!({ "type": "thinking", "thinking": text, "signature": SIGNATURE })
}

fn build_tool_use_block(call: &ToolCall, input: Value) -> Value {
    json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input })
}

/// Type of the content block that a stream has started but not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenBlock {
    Text,
    Thinking,
}

/// Writer of complete and streamed responses in the format of Anthropic's Messages API.
pub(super) struct MessagesWriter {
    /// Id of the request, which error responses contain.
    request: String,
    /// Number of content blocks that the response has started.
    blocks: usize,
    open: Option<OpenBlock>,
}

impl MessagesWriter {
    pub(super) fn new(request: String) -> Self {
        MessagesWriter { request, blocks: 0, open: None }
    }

    fn start_block(&mut self, block: &Value) -> String {
        self.blocks += 1;
        let index = self.blocks - 1;
        let kind = "content_block_start";
        format_frame(Some(kind), &json!({ "type": kind, "index": index, "content_block": block }))
    }

    fn write_delta(&self, delta: &Value) -> String {
        let index = self.blocks - 1;
        let kind = "content_block_delta";
        format_frame(Some(kind), &json!({ "type": kind, "index": index, "delta": delta }))
    }

    fn stop_block(&self) -> String {
        let index = self.blocks - 1;
        let kind = "content_block_stop";
        format_frame(Some(kind), &json!({ "type": kind, "index": index }))
    }

    /// Returns the frames that end the current content block. Empty if no block is open.
    fn close_block(&mut self) -> String {
        match self.open.take() {
            None => String::new(),
            Some(OpenBlock::Text) => self.stop_block(),
            Some(OpenBlock::Thinking) => {
                let signed = json!({ "type": "signature_delta", "signature": SIGNATURE });
                self.write_delta(&signed) + &self.stop_block()
            }
        }
    }

    /// Returns the frames that end the current content block and start one of type `kind`. Empty if
    /// the current block has this type.
    fn open_block(&mut self, kind: OpenBlock) -> String {
        if self.open == Some(kind) {
            return String::new();
        }
        let closed = self.close_block();
        self.open = Some(kind);
        let empty = match kind {
            OpenBlock::Text => json!({ "type": "text", "text": "" }),
            OpenBlock::Thinking => json!({ "type": "thinking", "thinking": "", "signature": "" }),
        };
        closed + &self.start_block(&empty)
    }

    fn delta_frames(&mut self, completion_delta: &CompletionDelta) -> String {
        match completion_delta {
            CompletionDelta::Speech(text) => {
                self.open_block(OpenBlock::Text)
                    + &self.write_delta(&json!({ "type": "text_delta", "text": text }))
            }
            CompletionDelta::Reasoning(text) => {
                let delta = json!({ "type": "thinking_delta", "thinking": text });
                self.open_block(OpenBlock::Thinking) + &self.write_delta(&delta)
            }
            CompletionDelta::Call(Ok(call)) => {
                let input = Value::from(call.arguments.clone()).to_string();
                let delta = json!({ "type": "input_json_delta", "partial_json": input });
                let frames = [
                    self.close_block(),
                    self.start_block(&build_tool_use_block(call, json!({}))),
                    self.write_delta(&delta),
                    self.stop_block(),
                ];
                frames.concat()
            }
            CompletionDelta::Call(Err(_)) | CompletionDelta::Aside(_) => String::new(),
        }
    }
}

impl ApiDialect for MessagesWriter {
    fn error_body(&self, found: &ApiError) -> Value {
        error_body(found, &self.request)
    }

    fn complete_body(&mut self, head: &Head, completions: Vec<CollectedCompletion>) -> Value {
        let mut body = build_message(head);
        for CollectedCompletion { end, .. } in &completions {
            let content = end.parts.iter().filter_map(|part| match part {
                CompletionDelta::Reasoning(text) => Some(build_thinking_block(text)),
                CompletionDelta::Speech(text) => Some(json!({ "type": "text", "text": text })),
                CompletionDelta::Call(Ok(call)) => {
                    Some(build_tool_use_block(call, Value::from(call.arguments.clone())))
                }
                CompletionDelta::Call(Err(_)) | CompletionDelta::Aside(_) => None,
            });
            let content: Vec<Value> = content.collect();
            let (reason, sequence) = to_stop_reason(end);
            body["content"] = content.into();
            body["stop_reason"] = reason.into();
            body["stop_sequence"] = sequence;
            body["usage"] = build_usage(end.prompt_tokens, end.tokens);
        }
        body
    }

    fn start_frames(&mut self, head: &Head) -> String {
        let kind = "message_start";
        format_frame(Some(kind), &json!({ "type": kind, "message": build_message(head) }))
    }

    fn event_frames(&mut self, _head: &Head, event: &Event) -> String {
        match event {
            Event::Prompt { .. } => String::new(),
            Event::Delta { deltas, .. } => {
                deltas.iter().map(|delta| self.delta_frames(delta)).collect()
            }
            Event::Ended { end, .. } => {
                let (reason, sequence) = to_stop_reason(end);
                let kind = "message_delta";
                let data = json!({
                    "type": kind,
                    "delta": { "stop_reason": reason, "stop_sequence": sequence },
                    "usage": build_usage(end.prompt_tokens, end.tokens),
                });
                self.close_block() + &format_frame(Some(kind), &data)
            }
            Event::Failed(found) => format_frame(Some("error"), &error_body(found, &self.request)),
            Event::Done => format_frame(Some("message_stop"), &json!({ "type": "message_stop" })),
        }
    }

    fn ping_frame(&self) -> String {
        format_frame(Some("ping"), &json!({ "type": "ping" }))
    }
}
