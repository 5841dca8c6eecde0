//! Responses in the format of the Responses API.

use levade_policy::FinishReason;
use levade_text::CompletionDelta;
use serde_json::{Map, Value, json};

use super::caller_memory::CallerMemory;
use super::items::encrypt_reasoning;
use super::memory::{StoredResponse, format_item_id};
use super::request::ReceivedItems;
use super::tools::CallItem;
use crate::http::{ApiDialect, CollectedCompletion, format_frame};
use crate::openai;
use levade_call::ApiError;
use levade_call::{End, Event, Head, MessageTokens, Token};

/// Returns the JSON body of an error response in the format of the Responses API.
pub(super) fn error_body(api_error: &ApiError) -> Value {
    let mut body = openai::error_body(api_error);
    let error = &mut body["error"];
    match api_error.param.as_deref() {
        Some("previous_response_id") => error["code"] = "previous_response_not_found".into(),
        // The Responses API has other names for these fields.
        Some("response_format") => error["param"] = "text.format".into(),
        Some("messages") => error["param"] = "input".into(),
        _ => {}
    }
    body
}

/// Type of the output item to which a stream currently appends text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenItem {
    Message,
    Reasoning,
}

/// Writer of complete and streamed responses in the format of the Responses API.
pub(super) struct ResponsesWriter {
    received: ReceivedItems,
    memory: CallerMemory,
    /// Sequence number of the next event.
    sequence: u64,
    /// Output items that are complete.
    output: Vec<Value>,
    /// Output item that the stream has started but not ended, and its text so far.
    open: Option<(OpenItem, String)>,
    /// Tokens of the message's text, from which its log-probabilities are computed.
    message: MessageTokens,
    /// Log-probabilities that no event has reported yet. The field `logprobs` contains the
    /// log-probabilities of the current item that events have reported.
    fresh: Vec<Value>,
    logprobs: Vec<Value>,
    end: Option<End>,
}

impl ResponsesWriter {
    pub(super) fn new(sent: ReceivedItems, memory: CallerMemory) -> Self {
        let (message, fresh, logprobs) = Default::default();
        ResponsesWriter {
            received: sent,
            memory,
            sequence: 0,
            output: Vec::new(),
            open: None,
            message,
            fresh,
            logprobs,
            end: None,
        }
    }

    /// Adds the log-probabilities of `tokens`, if the request asks for log-probabilities.
    fn add_logprobs(&mut self, tokens: &[Token]) {
        if let Some(chat) = &self.received.chat {
            let sent = openai::TokenReport { logprobs: true, ..Default::default() };
            let mut content = sent.logprob_content(chat, tokens);
            self.fresh
                .extend(content["content"].as_array_mut().into_iter().flat_map(std::mem::take));
        }
    }

    /// Returns a stream frame for an event of type `kind`, with the next sequence number.
    fn event_frame(&mut self, kind: &str, fields: Value) -> String {
        let mut data = Map::new();
        data.insert("type".into(), kind.into());
        data.insert("sequence_number".into(), self.sequence.into());
        if let Value::Object(fields) = fields {
            data.extend(fields);
        }
        self.sequence += 1;
        format_frame(Some(kind), &data.into())
    }

    /// Returns a stream frame for an event about the current output item.
    fn item_frame(
        &mut self,
        head: &Head,
        kind: &str,
        open: OpenItem,
        (list, field): (&str, &str),
        value: Value,
    ) -> String {
        let mut fields = json!({
            "item_id": self.current_item_id(head, open),
            "output_index": self.output.len(),
        });
        fields[list] = 0.into();
        fields[field] = value;
        self.event_frame(kind, fields)
    }

    fn current_item_id(&self, head: &Head, open: OpenItem) -> String {
        let kind = match open {
            OpenItem::Message => "msg",
            OpenItem::Reasoning => "rs",
        };
        format_item_id(kind, &head.id, self.output.len())
    }

    /// Returns the JSON of the current output item, with the text `text`.
    fn build_current_item(&self, head: &Head, open: OpenItem, text: &str, status: &str) -> Value {
        let id = self.current_item_id(head, open);
        let is_new = status == "in_progress";
        let part = |part: Value| if is_new { json!([]) } else { json!([part]) };
        match open {
            OpenItem::Message => json!({
                "id": id,
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": part(build_output_text(text, &self.logprobs)),
            }),
            OpenItem::Reasoning => {
                let summary =
                    if self.received.summary { part(build_summary_text(text)) } else { json!([]) };
                let mut item = json!({
                    "id": id,
                    "type": "reasoning",
                    "summary": summary,
                    "content": part(build_reasoning_text(text)),
                    "status": status,
                });
                if self.received.encrypted {
                    item["encrypted_content"] =
                        if is_new { "".into() } else { encrypt_reasoning(text).into() };
                }
                item
            }
        }
    }

    /// Returns the frames that start an output item of type `open`. Empty if the current item has
    /// this type.
    fn start_item(&mut self, head: &Head, open: OpenItem) -> String {
        if self.open.as_ref().is_some_and(|(now, _)| *now == open) {
            return String::new();
        }
        let mut frames = self.end_item(head, "completed");
        let item = self.build_current_item(head, open, "", "in_progress");
        frames += &self.event_frame(
            "response.output_item.added",
            json!({ "output_index": self.output.len(), "item": item }),
        );
        if open == OpenItem::Reasoning && self.received.summary {
            let at = ("summary_index", "part");
            let kind = "response.reasoning_summary_part.added";
            frames += &self.item_frame(head, kind, open, at, build_summary_text(""));
        }
        let part = match open {
            OpenItem::Message => build_output_text("", &[]),
            OpenItem::Reasoning => build_reasoning_text(""),
        };
        frames += &self.item_frame(
            head,
            "response.content_part.added",
            open,
            ("content_index", "part"),
            part,
        );
        self.open = Some((open, String::new()));
        frames
    }

    /// Appends a text to the current output item, or to a new item if the current item has another
    /// type. Returns the frames that report the text.
    fn append_text(&mut self, head: &Head, open: OpenItem, text: &str) -> String {
        let mut frames = self.start_item(head, open);
        if let Some((_, item_text)) = &mut self.open {
            *item_text += text;
        }
        let at = ("content_index", "delta");
        match open {
            OpenItem::Message => {
                let kind = "response.output_text.delta";
                let mut fields = json!({
                    "item_id": self.current_item_id(head, open),
                    "output_index": self.output.len(),
                    "content_index": 0,
                    "delta": text,
                });
                let fresh = std::mem::take(&mut self.fresh);
                fields["logprobs"] = fresh.as_slice().into();
                self.logprobs.extend(fresh);
                frames += &self.event_frame(kind, fields);
            }
            OpenItem::Reasoning => {
                if self.received.summary {
                    let kind = "response.reasoning_summary_text.delta";
                    frames +=
                        &self.item_frame(head, kind, open, ("summary_index", "delta"), text.into());
                }
                frames +=
                    &self.item_frame(head, "response.reasoning_text.delta", open, at, text.into());
            }
        }
        frames
    }

    /// Completes the current output item. Returns the frames that report its end; empty if no item
    /// is open.
    fn end_item(&mut self, head: &Head, status: &str) -> String {
        let Some((open, text)) = self.open.take() else { return String::new() };
        let mut frames = String::new();
        let item_text = text.as_str();
        let part = ("content_index", "part");
        match open {
            OpenItem::Message => {
                let fields = json!({
                    "item_id": self.current_item_id(head, open),
                    "output_index": self.output.len(),
                    "content_index": 0,
                    "text": item_text,
                    "logprobs": self.logprobs,
                });
                frames += &self.event_frame("response.output_text.done", fields);
                let full = build_output_text(item_text, &self.logprobs);
                frames += &self.item_frame(head, "response.content_part.done", open, part, full);
            }
            OpenItem::Reasoning => {
                if self.received.summary {
                    let kind = "response.reasoning_summary_text.done";
                    frames += &self.item_frame(
                        head,
                        kind,
                        open,
                        ("summary_index", "text"),
                        item_text.into(),
                    );
                    let kind = "response.reasoning_summary_part.done";
                    frames += &self.item_frame(
                        head,
                        kind,
                        open,
                        ("summary_index", "part"),
                        build_summary_text(item_text),
                    );
                }
                let kind = "response.reasoning_text.done";
                frames +=
                    &self.item_frame(head, kind, open, ("content_index", "text"), item_text.into());
                frames += &self.item_frame(
                    head,
                    "response.content_part.done",
                    open,
                    part,
                    build_reasoning_text(item_text),
                );
            }
        }
        let item = self.build_current_item(head, open, item_text, status);
        if open == OpenItem::Message {
            self.logprobs.clear();
        }
        frames + &self.complete_item(item)
    }

    /// Adds a complete item to the output. Returns the frame that reports its end.
    fn complete_item(&mut self, item: Value) -> String {
        let index = self.output.len();
        self.output.push(item);
        let item = &self.output[index];
        let fields = json!({ "output_index": index, "item": item });
        self.event_frame("response.output_item.done", fields)
    }

    fn write_call(&mut self, head: &Head, call: &levade_text::ToolCall) -> String {
        let mut frames = self.end_item(head, "completed");
        let index = self.output.len();
        let CallItem { item, input } =
            self.received.tools.to_call_item(call, |kind| format_item_id(kind, &head.id, index));
        let id = item["id"].clone();
        let name = item["name"].clone();
        let mut started = item.clone();
        started["status"] = "in_progress".into();
        if let Some((field, _)) = input {
            started[field] = "".into();
        }
        frames += &self.event_frame(
            "response.output_item.added",
            json!({ "output_index": index, "item": started }),
        );
        let Some((field, text)) = input else { return frames + &self.complete_item(item) };
        let kind = match field {
            "arguments" => "response.function_call_arguments",
            _ => "response.custom_tool_call_input",
        };
        let delta = json!({ "item_id": id, "output_index": index, "delta": text });
        frames += &self.event_frame(&format!("{kind}.delta"), delta);
        let mut full = json!({ "item_id": id, "output_index": index });
        full[field] = text.into();
        if field == "arguments" {
            full["name"] = name;
        }
        frames += &self.event_frame(&format!("{kind}.done"), full);
        frames + &self.complete_item(item)
    }

    fn delta_frames(&mut self, head: &Head, delta: &CompletionDelta) -> String {
        match delta {
            CompletionDelta::Speech(text) => self.append_text(head, OpenItem::Message, text),
            CompletionDelta::Reasoning(text) => self.append_text(head, OpenItem::Reasoning, text),
            CompletionDelta::Call(Ok(call)) => self.write_call(head, call),
            CompletionDelta::Call(Err(_)) | CompletionDelta::Aside(_) => String::new(),
        }
    }

    /// Completes the output. An empty completion becomes a message with an empty text. Returns the
    /// frames that report the end.
    fn end_output(&mut self, head: &Head, end: &End) -> String {
        let mut frames = String::new();
        if self.output.is_empty() && self.open.is_none() {
            frames += &self.start_item(head, OpenItem::Message);
        }
        let status = if is_incomplete(end) { "incomplete" } else { "completed" };
        frames += &self.end_item(head, status);
        self.end = Some(end.clone());
        frames
    }

    /// Returns the JSON body of the response so far. `error` is the error if the call failed.
    fn build_body(&self, head: &Head, error: Option<Value>) -> Value {
        let end = self.end.as_ref().filter(|_| error.is_none());
        let status = match (end, &error) {
            (_, Some(_)) => "failed",
            (None, None) => "in_progress",
            (Some(end), None) if is_incomplete(end) => "incomplete",
            (Some(_), None) => "completed",
        };
        let details = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
        let mut body = json!({
            "id": format_response_id(head),
            "object": "response",
            "created_at": head.created,
            "status": status,
            "background": false,
            "error": error,
            "incomplete_details": details,
            "model": head.model,
            "output": self.output,
            "usage": end.map(build_usage),
        });
        if let Value::Object(body) = &mut body {
            body.extend(self.received.echo.clone());
        }
        body
    }

    /// Returns the JSON body of the complete response. Stores the response if the request permits
    /// storage.
    fn finish_response(&mut self, head: &Head) -> Value {
        let body = self.build_body(head, None);
        if let Some(end) = self.end.as_ref().filter(|_| self.received.store) {
            let remembered = StoredResponse {
                previous: self.received.previous.clone(),
                input: self.received.input.clone(),
                items: assign_ids(&self.received.items, head),
                message: end.message.clone(),
                body: body.clone(),
            };
            self.memory.put(&format_response_id(head), remembered);
        }
        body
    }
}

/// Assigns ids to the input items that have no id.
fn assign_ids(items: &[Value], head: &Head) -> Vec<Value> {
    items
        .iter()
        .enumerate()
        .map(|(at, item)| {
            let mut item = item.clone();
            if item["id"].as_str().is_none() && item.is_object() {
                item["id"] = format!("in_{}i_{at}", head.id).into();
            }
            item
        })
        .collect()
}

fn format_response_id(head: &Head) -> String {
    format!("resp_{}", head.id)
}

fn build_output_text(text: &str, logprobs: &[Value]) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs })
}

fn build_reasoning_text(text: &str) -> Value {
    json!({ "type": "reasoning_text", "text": text })
}

fn build_summary_text(text: &str) -> Value {
    json!({ "type": "summary_text", "text": text })
}

/// Returns whether a completion ended before the model stopped: because it was truncated or
/// aborted.
fn is_incomplete(end: &End) -> bool {
    !matches!(end.finish, FinishReason::StopId | FinishReason::StopString)
}

fn build_usage(end: &End) -> Value {
    let prompt = end.prompt_tokens;
    json!({
        "input_tokens": prompt,
        "input_tokens_details": { "cached_tokens": 0 },
        "output_tokens": end.tokens,
        "output_tokens_details": { "reasoning_tokens": end.reasoning_tokens },
        "total_tokens": prompt + end.tokens,
    })
}

impl ApiDialect for ResponsesWriter {
    fn error_body(&self, found: &ApiError) -> Value {
        error_body(found)
    }

    fn complete_body(&mut self, head: &Head, completions: Vec<CollectedCompletion>) -> Value {
        for CollectedCompletion { end, message, .. } in &completions {
            let mut tokens = message.iter();
            let mut item_text =
                end.parts.iter().filter(|part| matches!(part, CompletionDelta::Speech(_))).count();
            for delta in &end.parts {
                if matches!(delta, CompletionDelta::Speech(_)) {
                    item_text -= 1;
                    let count = if item_text == 0 { tokens.len() } else { 1 };
                    tokens.by_ref().take(count).for_each(|tokens| self.add_logprobs(tokens));
                }
                self.delta_frames(head, delta);
            }
            self.end_output(head, end);
        }
        self.finish_response(head)
    }

    fn start_frames(&mut self, head: &Head) -> String {
        let response = self.build_body(head, None);
        let kinds = ["response.created", "response.in_progress"];
        kinds.map(|kind| self.event_frame(kind, json!({ "response": response }))).concat()
    }

    fn event_frames(&mut self, head: &Head, event: &Event) -> String {
        match event {
            Event::Prompt { .. } => String::new(),
            Event::Delta { deltas, tokens, .. } => {
                self.message.add(deltas, tokens);
                for tokens in self.message.take() {
                    self.add_logprobs(&tokens);
                }
                deltas.iter().map(|delta| self.delta_frames(head, delta)).collect()
            }
            Event::Ended { end, .. } => self.end_output(head, end),
            Event::Failed(found) => {
                let sent = error_body(found);
                let code = sent["error"]["code"].as_str().unwrap_or("server_error");
                let error = json!({ "code": code, "message": found.message });
                let response = self.build_body(head, Some(error));
                self.event_frame("response.failed", json!({ "response": response }))
            }
            Event::Done => {
                let response = self.finish_response(head);
                let kind = match response["status"].as_str() {
                    Some("incomplete") => "response.incomplete",
                    _ => "response.completed",
                };
                self.event_frame(kind, json!({ "response": response }))
            }
        }
    }
}
