//! Pending requests to a server, and normalization of its messages for the SDK.
//!
//! The SDK drops a message that does not match its types, and the request then waits until its
//! timeout. The ledger therefore parses each message first, leniently (see [`lenient`]). A response
//! that cannot be parsed becomes an error response to its request, with the reason. Results of
//! `tools/call` pass through unchanged, because [`call_result`](super::call_result) accepts all
//! formats. Tool descriptions are reduced to the fields that are used.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rmcp::model::{
    CallToolResult, ClientJsonRpcMessage, ClientNotification, ClientRequest, DiscoverResult,
    ErrorCode, ErrorData, InitializeResult, JsonRpcMessage, ListToolsResult, ProtocolVersion,
    RequestId, ServerJsonRpcMessage, ServerResult,
};
use serde_json::{Map, Value, json};
use tracing::{debug, warn};

use super::lenient;

/// Error code for a response that could not be parsed or did not arrive. No server sends this code,
/// because the codes of JSON-RPC and MCP are small.
pub(super) const UNREADABLE_RESPONSE: ErrorCode = ErrorCode(i32::MIN + 47);

/// Key in `structuredContent` that holds the result of a call as the server sent it.
pub(super) const RAW_RESULT_KEY: &str = "raw";

/// Maximum number of characters of a server's message in logs and errors.
const MAX_SHOWN_CHARS: usize = 200;

/// Record of the pending requests to an MCP server, with other observations about the server.
#[derive(Debug, Default)]
pub(super) struct RequestLedger(Mutex<LedgerState>);

#[derive(Debug, Default)]
struct LedgerState {
    pending: BTreeMap<i64, RequestMethod>,
    /// Id of the last request. Earlier requests have smaller ids.
    last: Option<i64>,
    /// Id of the discovery request of the newer protocol generation.
    discovery: Option<i64>,
    was_discovered_late: bool,
    /// Whether the client has started a handshake.
    has_shaken_hands: bool,
    rejection: Option<String>,
    noise: Option<String>,
    /// Reason for the last wait before a request was sent again; `None` if none waited since the
    /// last call began.
    wait: Option<String>,
    /// Defect of a message that may be the response to the pending request, such as a wrong id or
    /// text around the JSON. `None` if there is no such message.
    doubt: Option<String>,
    list_changed: bool,
    has_ended: bool,
    /// Whether a request has been cancelled. A message without an id may be the response to it.
    has_cancelled: bool,
}

/// Method of a request. It determines how the result is converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestMethod {
    Discover,
    Initialize,
    ListTools,
    CallTool,
    Other,
}

impl RequestLedger {
    fn state(&self) -> MutexGuard<'_, LedgerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a message that is sent to the server.
    pub fn register(&self, message: &ClientJsonRpcMessage) {
        match message {
            JsonRpcMessage::Request(request) => {
                let RequestId::Number(id) = request.id else { return };
                let method = match &request.request {
                    ClientRequest::DiscoverRequest(_) => RequestMethod::Discover,
                    ClientRequest::InitializeRequest(_) => RequestMethod::Initialize,
                    ClientRequest::ListToolsRequest(_) => RequestMethod::ListTools,
                    ClientRequest::CallToolRequest(_) => RequestMethod::CallTool,
                    _ => RequestMethod::Other,
                };
                let mut state = self.state();
                match method {
                    RequestMethod::Discover => state.discovery = Some(id),
                    RequestMethod::Initialize => {
                        (state.rejection, state.has_shaken_hands) = (None, true);
                        // The SDK would accept a late response to `server/discover` as the response
                        // to this request.
                        state.pending.retain(|_, method| *method != RequestMethod::Discover);
                    }
                    _ => {}
                }
                state.pending.insert(id, method);
                (state.last, state.doubt) = (Some(id), None);
                if method == RequestMethod::CallTool {
                    (state.noise, state.wait) = (None, None);
                }
            }
            JsonRpcMessage::Notification(notification) => {
                if let ClientNotification::CancelledNotification(cancelled) =
                    &notification.notification
                    && let Some(RequestId::Number(id)) = cancelled.params.request_id
                {
                    let mut state = self.state();
                    state.has_cancelled |= state.pending.remove(&id).is_some();
                }
            }
            _ => {}
        }
    }

    /// Returns whether the client has started a handshake. If so, the server does not support the
    /// protocol without a handshake.
    pub fn has_shaken_hands(&self) -> bool {
        self.state().has_shaken_hands
    }

    /// Returns whether the server supports the newer protocol generation, as shown by a response to
    /// discovery that arrived after the handshake was started.
    pub fn was_discovered_late(&self) -> bool {
        self.state().was_discovered_late
    }

    /// Returns why the server rejected the start of the connection, or `None` if the server did not
    /// reject it.
    pub fn rejection(&self) -> Option<String> {
        self.state().rejection.clone()
    }

    /// Returns the last text from the server that is not a protocol message, truncated; `None` if
    /// there is none.
    pub fn last_noise(&self) -> Option<String> {
        self.state().noise.clone()
    }

    /// Records the reason why a request must wait before it is sent again.
    pub fn note_wait(&self, why: String) {
        self.state().wait = Some(why);
    }

    /// Describes what the server did instead of responding, as a suffix for an error. The text is
    /// empty if nothing is known.
    pub fn describe_activity(&self) -> String {
        let state = self.state();
        match (&state.wait, &state.noise) {
            (Some(wait), _) => format!("; {wait}"),
            (None, Some(noise)) => {
                format!("; the server's last output is not a response: {noise:?}")
            }
            (None, None) => String::new(),
        }
    }

    /// Returns whether the server has announced changed tools since the last call of this function.
    pub fn take_list_changed(&self) -> bool {
        std::mem::take(&mut self.state().list_changed)
    }

    /// Records that the tools of the server have changed since its last listing.
    pub fn note_list_changed(&self) {
        self.state().list_changed = true;
    }

    /// Records that the server has closed its output.
    pub fn mark_ended(&self) {
        self.state().has_ended = true;
    }

    /// Returns whether the server has closed its output.
    pub fn has_ended(&self) -> bool {
        self.state().has_ended
    }

    /// Returns whether the request with the id `id` still waits for its response.
    pub fn is_pending(&self, id: &RequestId) -> bool {
        matches!(id, RequestId::Number(id) if self.state().pending.contains_key(id))
    }

    /// Parses bytes from a server: a message, a list of messages, or text that is not a message.
    /// If the bytes are the body of an HTTP response, `request` is the request of that response.
    pub fn read(&self, bytes: &[u8], request: Option<&RequestId>) -> Vec<ServerJsonRpcMessage> {
        match lenient::parse(bytes) {
            Ok(Value::Array(messages)) => messages
                .into_iter()
                .filter_map(|message| self.process_message(message, request))
                .collect(),
            Ok(message) => self.process_message(message, request).into_iter().collect(),
            Err(why) => match lenient::parse_concatenated(bytes) {
                Some(messages) => messages
                    .into_iter()
                    .filter_map(|message| self.process_message(message, request))
                    .collect(),
                None => self.process_invalid(bytes, &why, request).into_iter().collect(),
            },
        }
    }

    /// Completes the request `id`, which has no readable response, and returns an error response
    /// with the reason `why`.
    pub fn fail_request(&self, id: &RequestId, why: impl Into<String>) -> ServerJsonRpcMessage {
        let why = why.into();
        if let RequestId::Number(id) = id {
            let mut state = self.state();
            if let Some(RequestMethod::Discover | RequestMethod::Initialize) =
                state.pending.remove(id)
            {
                state.rejection = Some(why.clone());
            }
        }
        ServerJsonRpcMessage::error(
            ErrorData::new(UNREADABLE_RESPONSE, why, None),
            Some(id.clone()),
        )
    }

    /// Completes all requests to which an oversized line may respond, and returns error responses
    /// to them.
    pub fn fail_oversized(&self, start: &[u8], max_bytes: usize) -> Vec<ServerJsonRpcMessage> {
        let named = lenient::find_outer_id(start).and_then(|id| self.pending_id(&id));
        let ids = match named {
            Some(id) => vec![id],
            None => self.state().pending.keys().copied().collect(),
        };
        let why = format!("the server's message is longer than {max_bytes} bytes");
        ids.into_iter().map(|id| self.fail_request(&RequestId::Number(id), why.as_str())).collect()
    }

    /// Returns whether a defective message may be the response to the pending request. The message
    /// counts as the response if no further message follows.
    pub fn is_doubtful(&self) -> bool {
        self.state().doubt.is_some()
    }

    /// Returns an error response to the pending request, if a defective message may be the response
    /// to this request.
    pub fn fail_doubtful(&self) -> Option<ServerJsonRpcMessage> {
        let why = self.state().doubt.take()?;
        let id = self.single_pending_id()?;
        Some(self.fail_request(&RequestId::Number(id), why))
    }

    fn note_noise(&self, text: &str) {
        debug!("an MCP server printed text that is not a message: {text}");
        self.state().noise = Some(text.to_owned());
    }

    /// Returns the pending request with the id `id`. Servers send ids as numbers or strings.
    fn pending_id(&self, id: &Value) -> Option<i64> {
        let to_integer = |id: f64| (id.fract() == 0.0).then_some(id as i64);
        let id = id
            .as_i64()
            .or_else(|| to_integer(id.as_f64()?))
            .or_else(|| id.as_str()?.trim().parse().ok())?;
        self.state().pending.contains_key(&id).then_some(id)
    }

    /// Returns the id of the pending request, if exactly one request is pending.
    fn single_pending_id(&self) -> Option<i64> {
        let state = self.state();
        let mut ids = state.pending.keys();
        ids.next().copied().filter(|_| ids.next().is_none())
    }

    /// Returns the id of the only request to which a message without an id can respond: exactly one
    /// request is pending, and none was cancelled.
    fn single_possible_id(&self) -> Option<i64> {
        self.single_pending_id().filter(|_| !self.state().has_cancelled)
    }

    /// Processes one message that is valid JSON.
    fn process_message(
        &self,
        message: Value,
        request: Option<&RequestId>,
    ) -> Option<ServerJsonRpcMessage> {
        let Value::Object(mut fields) = message else {
            self.note_noise(&shorten(&message.to_string()));
            return None;
        };
        let is_error = fields.get("error").is_some_and(|error| !error.is_null());
        let is_response = is_error || fields.contains_key("result");
        if !is_response && fields.get("method").is_some_and(Value::is_string) {
            return self.read_server_message(fields);
        }
        let id = fields.get("id").cloned().unwrap_or_default();
        let has_version = fields.contains_key("jsonrpc");
        if !is_response {
            let text = shorten(&Value::Object(fields).to_string());
            self.note_noise(&text);
            let id = self.pending_id(&id).filter(|_| request.is_none() && has_version)?;
            return Some(self.fail_request(
                &RequestId::Number(id),
                format!("the server's response has no result: {text}"),
            ));
        }
        // An error response to an unreadable request has no id, or an id of the server's own. A log
        // line of a process may look like it, but has no version.
        let is_nameless = id.is_null() || (is_error && !id.is_number());
        let meant = match request {
            Some(RequestId::Number(request)) if is_nameless => Some(*request),
            _ => self.single_possible_id().filter(|_| is_nameless && has_version),
        };
        let id = match self.pending_id(&id).or(meant) {
            Some(id) => id,
            None => {
                debug!(%id, "an MCP server responded to a request that is not pending");
                let mut state = self.state();
                state.noise = Some(format!("a response to the id {id}"));
                state.was_discovered_late |=
                    !is_error && id.is_number() && id.as_i64() == state.discovery;
                let was_sent = id.as_i64().is_some_and(|id| id >= 0 && Some(id) <= state.last);
                if request.is_none() && has_version && !was_sent {
                    state.doubt = Some(if id.is_null() {
                        "the server's response has no id, and may belong to a cancelled request"
                            .to_owned()
                    } else {
                        format!("the server's response has the id {id}, which no request had")
                    });
                }
                return None;
            }
        };
        let method = {
            let mut state = self.state();
            state.doubt = None;
            state.pending.remove(&id).unwrap_or(RequestMethod::Other)
        };
        let id = RequestId::Number(id);
        if is_error {
            let error = parse_error_data(fields.remove("error").unwrap_or_default());
            if matches!(method, RequestMethod::Discover | RequestMethod::Initialize) {
                self.state().rejection = Some(error_text(&error));
            }
            return Some(ServerJsonRpcMessage::error(error, Some(id)));
        }
        let result = fields.remove("result").unwrap_or_default();
        let read = match crate::nested::depth_error(&result) {
            None => to_typed(method, result, &id),
            Some(why) => Err(why),
        };
        Some(read.unwrap_or_else(|why| {
            if matches!(method, RequestMethod::Discover | RequestMethod::Initialize) {
                self.state().rejection =
                    Some(format!("the server's response to the handshake is invalid: {why}"));
            }
            self.fail_request(&id, format!("the server's response cannot be parsed: {why}"))
        }))
    }

    /// Parses a request or notification from the server. An unreadable request is replaced by a
    /// request with an unknown method, so that the server gets an error and does not wait.
    fn read_server_message(&self, mut fields: Map<String, Value>) -> Option<ServerJsonRpcMessage> {
        if fields["method"] == "notifications/tools/list_changed" {
            self.note_list_changed();
        }
        fields.insert("jsonrpc".into(), "2.0".into());
        let id = fields.get("id").filter(|id| !id.is_null()).cloned();
        let read = serde_json::from_value(Value::Object(fields));
        let read = read.inspect_err(
            |error| debug!(%error, "an MCP server sent a message that cannot be parsed"),
        );
        read.ok().or_else(|| {
            let unknown = json!({ "jsonrpc": "2.0", "id": id?, "method": "unreadable" });
            serde_json::from_value(unknown).ok()
        })
    }

    /// Processes one message that is invalid JSON. If it responds to a request, the request fails.
    fn process_invalid(
        &self,
        bytes: &[u8],
        why: &str,
        request: Option<&RequestId>,
    ) -> Option<ServerJsonRpcMessage> {
        let text = String::from_utf8_lossy(bytes);
        let text = lenient::trim_whitespace(&text);
        let excerpt = shorten(text);
        let only = || self.single_pending_id();
        let is_message = text.contains("\"jsonrpc\"");
        let id = match request {
            Some(request) if text.starts_with(['{', '[']) => Some(request.clone()),
            None if text.starts_with(['{', '[']) => lenient::find_outer_id(text.as_bytes())
                .and_then(|id| self.pending_id(&id))
                .or_else(|| only().filter(|_| is_message))
                .map(RequestId::Number),
            // This is a line of a message that is spread over several lines.
            _ => only().filter(|_| text.starts_with("\"jsonrpc\"")).map(RequestId::Number),
        };
        let Some(id) = id else {
            if !text.is_empty() {
                self.note_noise(&excerpt);
            }
            // This may be a response after log text, printed as a Python dictionary, or in UTF-16.
            let plain = text.replace('\0', "");
            let has = |word: &str| plain.contains(word);
            let is_like = plain.starts_with('{') || has("result") || has("error");
            if request.is_none() && has("jsonrpc") && is_like && !has("method") {
                self.state().doubt =
                    Some(format!("the server's response is not JSON: {why}: {excerpt}"));
            }
            return None;
        };
        let hint =
            if text.starts_with("\"jsonrpc\"") { " (each message must be one line)" } else { "" };
        Some(self.fail_request(
            &id,
            format!("the server's response is not JSON: {why}{hint}: {excerpt}"),
        ))
    }
}

/// Converts the result of a request into the type that the SDK expects.
fn to_typed(
    method: RequestMethod,
    result: Value,
    id: &RequestId,
) -> Result<ServerJsonRpcMessage, String> {
    let respond = |result| Ok(ServerJsonRpcMessage::response(result, id.clone()));
    match method {
        RequestMethod::CallTool => {
            let mut wrapped = CallToolResult::default();
            wrapped.structured_content = Some(json!({ RAW_RESULT_KEY: result }));
            respond(ServerResult::CallToolResult(wrapped))
        }
        RequestMethod::ListTools => respond(ServerResult::ListToolsResult(to_list_result(result)?)),
        RequestMethod::Initialize => {
            respond(ServerResult::InitializeResult(to_initialize_result(result)?))
        }
        // Any other response means that the server does not support the newer protocol generation.
        RequestMethod::Discover => match to_discover_result(result) {
            Ok(read) => respond(ServerResult::DiscoverResult(read)),
            Err(why) => {
                let error = ErrorData::new(ErrorCode::METHOD_NOT_FOUND, why, None);
                Ok(ServerJsonRpcMessage::error(error, Some(id.clone())))
            }
        },
        RequestMethod::Other => {
            let message = json!({ "jsonrpc": "2.0", "id": id, "result": result });
            serde_json::from_value(message).map_err(|error| error.to_string())
        }
    }
}

/// Parses the discovery result of a server of the newer generation.
fn to_discover_result(result: Value) -> Result<DiscoverResult, String> {
    let read: DiscoverResult = serde_json::from_value(result).map_err(|error| error.to_string())?;
    if read.supported_versions.contains(&ProtocolVersion::V_2026_07_28) {
        Ok(read)
    } else {
        Err("the server supports only other versions of the protocol".into())
    }
}

/// Parses the result of a handshake. Only the protocol version is required; defaults replace other
/// missing fields.
fn to_initialize_result(result: Value) -> Result<InitializeResult, String> {
    if let Ok(read) = serde_json::from_value(result.clone()) {
        return Ok(read);
    }
    let version =
        result["protocolVersion"].as_str().ok_or("the result has no `protocolVersion`")?;
    let text = |name: &str| result["serverInfo"][name].as_str().unwrap_or("unknown").to_owned();
    let minimal = json!({
        "protocolVersion": version,
        "capabilities": { "tools": {} },
        "serverInfo": { "name": text("name"), "version": text("version") },
    });
    serde_json::from_value(minimal).map_err(|error| error.to_string())
}

/// Parses the list of a server's tools. A tool without a usable schema gets a schema without
/// arguments. A tool without a name is left out.
fn to_list_result(mut result: Value) -> Result<ListToolsResult, String> {
    let Some(tools) = result.get_mut("tools").and_then(Value::as_array_mut).map(std::mem::take)
    else {
        return Err("the result has no list `tools`".into());
    };
    let mut kept = Vec::with_capacity(tools.len());
    for tool in tools {
        let Some(name) = tool["name"].as_str().filter(|name| !name.is_empty()) else {
            warn!(
                tool = %shorten(&tool.to_string()),
                "ignored a tool without a name of an MCP server"
            );
            continue;
        };
        let description = ["description", "title"].into_iter().find_map(|key| tool[key].as_str());
        let schema = match &tool["inputSchema"] {
            schema @ Value::Object(_) => schema.clone(),
            _ => {
                warn!(
                    tool = name,
                    "a tool of an MCP server has no inputSchema; offering it without arguments"
                );
                json!({ "type": "object", "properties": {} })
            }
        };
        kept.push(json!({ "name": name, "description": description, "inputSchema": schema }));
    }
    let next = match &result["nextCursor"] {
        Value::Number(next) => Some(next.to_string()),
        next => next.as_str().map(str::to_owned),
    };
    let list = json!({ "tools": kept, "nextCursor": next });
    serde_json::from_value(list).map_err(|error| error.to_string())
}

/// Parses a JSON-RPC error. Servers may omit the error's message, or send a plain string.
fn parse_error_data(error: Value) -> ErrorData {
    let Value::Object(mut fields) = error else {
        let text = error.as_str().map_or_else(|| error.to_string(), str::to_owned);
        return ErrorData::new(ErrorCode::INTERNAL_ERROR, text, None);
    };
    let code =
        fields.get("code").and_then(|code| code.as_i64().or_else(|| code.as_str()?.parse().ok()));
    let code = code.and_then(|code| i32::try_from(code).ok());
    let raw_message = fields.remove("message");
    let has_message =
        raw_message.as_ref().is_some_and(|message| !message.is_null() && message != "");
    let message = match raw_message {
        Some(Value::String(message)) if !message.trim().is_empty() => message,
        Some(Value::Null | Value::String(_)) | None => {
            format!(
                "an error without a message, code {}",
                fields.get("code").unwrap_or(&Value::Null)
            )
        }
        Some(message) => message.to_string(),
    };
    fields.remove("code");
    let data = fields.remove("data").filter(|data| !data.is_null());
    // Without a message, the remaining fields are the only information.
    let data =
        data.or_else(|| (!has_message && !fields.is_empty()).then_some(Value::Object(fields)));
    ErrorData::new(ErrorCode(code.unwrap_or(ErrorCode::INTERNAL_ERROR.0)), message, data)
}

/// Formats a JSON-RPC error: its message, followed by its data unless the message contains the
/// data.
pub(super) fn error_text(error: &ErrorData) -> String {
    let data = error
        .data
        .as_ref()
        .map(|data| data.as_str().map_or_else(|| data.to_string(), str::to_owned));
    match data.filter(|data| !data.trim().is_empty() && !error.message.contains(data.as_str())) {
        Some(data) => format!("{} ({})", error.message, data.trim()),
        None => error.message.to_string(),
    }
}

/// Truncates a text to [`MAX_SHOWN_CHARS`] characters.
pub(super) fn shorten(text: &str) -> String {
    match text.trim().char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text.trim()[..end]),
        None => text.trim().to_owned(),
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
