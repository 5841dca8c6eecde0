//! Parser of message contents, shared by all APIs. It produces messages of text, reasoning and tool
//! calls.
//!
//! Clients send the content parts of one API to another API, so every part is accepted in every API.
//! A textual document or search result is rendered as its fields, one per line. If a tool returned a
//! part that a text model cannot read, a line that names the type replaces the part, so that the
//! attempt continues. The built-in agent loop does the same for results of MCP servers. The gateway
//! counts such parts.

use levade_call::ApiError;
use levade_text::{Arguments, Message, ToolCall};
use serde_json::Value;

use crate::gateway::Gateway;

/// Text of a tool result that only reports that the tool failed.
pub(crate) const FAILED: &str = "The tool failed.";

/// Text of a message, joined from its parts.
#[derive(Debug, Default)]
struct PartsText {
    text: String,
    /// Whether the last part was a document. A blank line separates a document from the text after
    /// it.
    after_document: bool,
}

impl PartsText {
    /// Appends a text part.
    fn text(&mut self, text: &str) {
        if std::mem::take(&mut self.after_document) && !text.is_empty() {
            self.text.push_str("\n\n");
        }
        self.text.push_str(text);
    }

    /// Appends a document. Fields that are `None` or empty are omitted.
    fn document<'a>(&mut self, fields: impl IntoIterator<Item = Option<&'a str>>) {
        let fields: Vec<&str> = fields.into_iter().flatten().filter(|field| !field.is_empty()).collect();
        if !self.text.is_empty() && !self.after_document {
            self.text.push_str("\n\n");
        }
        self.text(&fields.join("\n"));
        self.after_document = true;
    }
}

/// Parser of message contents in the requests of one API.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub gateway: &'a Gateway,
    /// Name of the API under which unknown fields are counted.
    pub api: &'static str,
}

impl Parts<'_> {
    /// Returns the content if it is a string. Otherwise calls `each` for every part, with the part's
    /// type and path in the request, and returns `None`.
    pub(crate) fn each(
        self,
        content: &Value,
        place: &str,
        mut each: impl FnMut(&str, &Value, &str) -> Result<(), ApiError>,
    ) -> Result<Option<String>, ApiError> {
        let parts = match content {
            Value::String(text) => return Ok(Some(text.clone())),
            Value::Array(parts) => parts,
            other => {
                let message = format!("{place} is {other}; it is a text or a list of parts");
                return Err(ApiError::field(place, message));
            }
        };
        for (at, part) in parts.iter().enumerate() {
            let kind = if part.is_string() { "text" } else { part["type"].as_str().unwrap_or_default() };
            // Each provider has its own notation for paths in errors.
            let place =
                if self.api == "messages" { format!("{place}.{at}") } else { format!("{place}[{at}]") };
            each(kind, part, &place)?;
        }
        Ok(None)
    }

    /// Parses a content of text, documents and search results.
    pub(crate) fn text(self, content: &Value, place: &str) -> Result<String, ApiError> {
        let mut all = PartsText::default();
        let whole = self.each(content, place, |kind, part, place| {
            if self.add(kind, part, place, &mut all, false)? {
                Ok(())
            } else {
                Err(refused(kind, place, "text"))
            }
        })?;
        Ok(whole.unwrap_or(all.text))
    }

    /// Parses the content of a tool result. A part that cannot be shown is counted and replaced by a
    /// line that names its type.
    pub(crate) fn result(self, content: &Value, place: &str) -> Result<String, ApiError> {
        let mut all = PartsText::default();
        let whole = self.each(content, place, |kind, part, place| {
            match kind {
                "" => return Err(refused(kind, place, "text")),
                _ if self.add(kind, part, place, &mut all, true)? => {}
                _ => self.hide(kind, &mut all),
            }
            Ok(())
        })?;
        Ok(whole.unwrap_or(all.text))
    }

    /// Parses a user message: first the tool results in their order, then the user's text.
    pub(crate) fn user(self, content: &Value, place: &str, read: &mut Vec<Message>) -> Result<(), ApiError> {
        let mut said = None::<PartsText>;
        let whole = self.each(content, place, |kind, part, place| {
            match kind {
                "tool_result" => read.push(self.tool_result(part, place)?),
                _ if self.add(kind, part, place, said.get_or_insert_default(), false)? => {}
                "document" => {
                    let message = format!(
                        "the source of {place} is of type {}, but this model, which reads text alone, is shown \
                         documents whose source is of type text or content",
                        part["source"]["type"]
                    );
                    return Err(ApiError::field(place, message));
                }
                _ => return Err(refused(kind, place, "text or tool_result")),
            }
            Ok(())
        })?;
        read.extend(whole.or(said.map(|said| said.text)).map(Message::user));
        Ok(())
    }

    fn tool_result(self, part: &Value, place: &str) -> Result<Message, ApiError> {
        let id = field(part, "tool_use_id", place)?.to_owned();
        let content = match &part["content"] {
            Value::Null => String::new(),
            content => self.result(content, &format!("{place}.content"))?,
        };
        let failed = content.is_empty() && part["is_error"] == true;
        let content = if failed { FAILED.to_owned() } else { content };
        Ok(Message { tool_call_id: Some(id), ..Message::tool(content) })
    }

    /// Parses an assistant message: reasoning, text and tool calls, in any order. Parts that belong
    /// to hosted tools are omitted and counted.
    pub(crate) fn assistant(self, content: &Value, place: &str) -> Result<Message, ApiError> {
        let (mut thoughts, mut said, mut calls) = (String::new(), String::new(), Vec::new());
        let whole = self.each(content, place, |kind, part, place| {
            match kind {
                "thinking" if !part[kind].is_array() => thoughts += field(part, kind, place)?,
                "thinking" | "reasoning" => thoughts += &thought(part),
                // Only the provider that wrote this part can read it.
                "redacted_thinking" => {}
                "tool_use" => calls.push(call(part, place)?),
                hosted if is_hosted_part(hosted) => {
                    self.gateway.unknown_field(self.api, &format!("content[type={hosted}]"));
                }
                _ => match text_of(kind, part, place)? {
                    Some(text) => said += text,
                    None => {
                        return Err(refused(kind, place, "text, thinking, redacted_thinking or tool_use"));
                    }
                },
            }
            Ok(())
        })?;
        let reasoning_content = (!thoughts.is_empty()).then_some(thoughts);
        Ok(Message { reasoning_content, ..Message::calls(whole.unwrap_or(said), calls) })
    }

    /// Appends a part that is a text, a textual document or a search result. Returns whether the part
    /// is one of these. If `hides` is true, nested parts that cannot be shown are counted and
    /// replaced by a line that names their type.
    fn add(
        self,
        kind: &str,
        part: &Value,
        place: &str,
        all: &mut PartsText,
        hides: bool,
    ) -> Result<bool, ApiError> {
        if let Some(text) = text_of(kind, part, place)? {
            all.text(text);
            return Ok(true);
        }
        let of = |name: &str| part[name].as_str();
        let inner = |content: &Value, place: &str| match hides {
            true => self.result(content, place),
            false => self.text(content, place),
        };
        match (kind, part["source"]["type"].as_str()) {
            ("document", Some("text")) => {
                let data = field(&part["source"], "data", &format!("{place}.source"))?;
                all.document([of("title"), of("context"), Some(data)]);
            }
            ("document", Some("content")) => {
                let content = inner(&part["source"]["content"], &format!("{place}.source.content"))?;
                all.document([of("title"), of("context"), Some(&content)]);
            }
            ("search_result", _) => {
                let content = inner(&part["content"], &format!("{place}.content"))?;
                all.document([of("title"), of("source"), Some(&content)]);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Counts a part that cannot be shown, and appends a line that names its type.
    fn hide(self, kind: &str, all: &mut PartsText) {
        self.gateway.unknown_field(self.api, &format!("tool_result[type={kind}]"));
        all.text("");
        if !all.text.is_empty() && !all.text.ends_with('\n') {
            all.text.push('\n');
        }
        all.text.push_str(&format!("[a part of type {kind:?}, which cannot be shown]\n"));
    }
}

/// Returns whether chat completions do not define the type of a part, but [`Parts::user`] or
/// [`Parts::assistant`] can parse it.
pub(crate) fn is_foreign(part: &Value) -> bool {
    const KINDS: [&str; 7] = [
        "document",
        "reasoning",
        "redacted_thinking",
        "search_result",
        "thinking",
        "tool_result",
        "tool_use",
    ];
    let kind = part["type"].as_str().unwrap_or_default();
    KINDS.contains(&kind) || is_hosted_part(kind)
}

/// Returns whether a part of an assistant message belongs to a tool that Anthropic hosts.
fn is_hosted_part(kind: &str) -> bool {
    matches!(kind, "server_tool_use" | "mcp_tool_use" | "container_upload")
        || kind.ends_with("_tool_result") && kind != "tool_result"
}

/// Returns the reasoning text that a client sends as a string, a list of parts or a single part.
pub(crate) fn thought(value: &Value) -> String {
    const FIELDS: [&str; 5] = ["thinking", "text", "reasoning", "content", "summary"];
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(thought).collect(),
        Value::Object(fields) => {
            let mut found = FIELDS.iter().filter_map(|name| fields.get(*name)).map(thought);
            found.find(|text| !text.is_empty()).unwrap_or_default()
        }
        _ => String::new(),
    }
}

/// Returns a field of a part or an item. The field must be a string.
pub(crate) fn field<'a>(part: &'a Value, name: &str, place: &str) -> Result<&'a str, ApiError> {
    part[name].as_str().ok_or_else(|| {
        let param = format!("{place}.{name}");
        let message = format!("{param} is {}, not a text", part[name]);
        ApiError::field(&param, message)
    })
}

/// Returns the text of a part, or `None` if the part has another type.
pub(crate) fn text_of<'a>(kind: &str, part: &'a Value, place: &str) -> Result<Option<&'a str>, ApiError> {
    match (part, kind) {
        (Value::String(text), _) => Ok(Some(text)),
        (_, "text" | "input_text" | "output_text" | "summary_text") => field(part, "text", place).map(Some),
        (_, "refusal") => field(part, "refusal", place).map(Some),
        _ => Ok(None),
    }
}

/// Returns the error for a part whose type is not supported. `known` lists the supported types.
pub(crate) fn refused(kind: &str, place: &str, known: &str) -> ApiError {
    let is_media = ["image", "audio", "video", "file", "screenshot"].iter().any(|media| kind.contains(media));
    let message = match kind {
        "" => format!("{place} has no type; it is {known}"),
        _ if is_media => {
            format!(
                "{place} is of type {kind:?}, which cannot be shown to this model, which reads text alone"
            )
        }
        _ => format!("{place} is of type {kind:?}, which is not supported here; it is {known}"),
    };
    ApiError::field(place, message)
}

fn call(part: &Value, place: &str) -> Result<ToolCall, ApiError> {
    let arguments = part.get("input").cloned().map(Arguments::from).unwrap_or_default();
    let [id, name] = ["id", "name"].map(|name| field(part, name, place).map(str::to_owned));
    Ok(ToolCall { id: id?, name: name?, arguments })
}
