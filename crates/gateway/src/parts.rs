//! Parser of message contents, shared by all APIs. It produces messages of text, reasoning and tool
//! calls.
//!
//! Clients send the content parts of one API to another API, so every part is accepted in every
//! API. A textual document or search result is rendered as its fields, one per line. If a tool
//! returned a part that a text model cannot read, a line that names the type replaces the part, so
//! that the attempt continues. The built-in agent loop does the same for results of MCP servers.
//! The gateway counts such parts.

use levade_call::ApiError;
use levade_text::{Arguments, Message, ToolCall};
use serde_json::Value;

use crate::gateway::Gateway;

/// Text of a tool result that reports only that the tool failed, without a reason.
pub(crate) const FAILED_RESULT: &str = "The tool failed.";

/// Text of a message content, joined from its parts.
#[derive(Debug, Default)]
struct ContentText {
    text: String,
    /// Whether the last part was a document. A blank line separates a document from the text after
    /// it.
    after_document: bool,
}

impl ContentText {
    /// Appends the text of a text part.
    fn push_text(&mut self, text: &str) {
        if std::mem::take(&mut self.after_document) && !text.is_empty() {
            self.text.push_str("\n\n");
        }
        self.text.push_str(text);
    }

    /// Appends a document, whose `fields` are joined by line breaks. Fields that are `None` or
    /// empty are omitted.
    fn push_document<'a>(&mut self, fields: impl IntoIterator<Item = Option<&'a str>>) {
        let fields: Vec<&str> =
            fields.into_iter().flatten().filter(|field| !field.is_empty()).collect();
        if !self.text.is_empty() && !self.after_document {
            self.text.push_str("\n\n");
        }
        self.push_text(&fields.join("\n"));
        self.after_document = true;
    }
}

/// Parser of message contents in the requests of one API.
#[derive(Clone, Copy)]
pub(crate) struct ContentParser<'a> {
    pub gateway: &'a Gateway,
    /// Name of the API in the counters of unknown request fields.
    pub api: &'static str,
}

impl ContentParser<'_> {
    /// Returns `content` if it is a string. Otherwise calls `each` for every part, with the part's
    /// type, the part and its path in the request, and returns `None`.
    pub(crate) fn for_each_part(
        self,
        content: &Value,
        field_path: &str,
        mut each: impl FnMut(&str, &Value, &str) -> Result<(), ApiError>,
    ) -> Result<Option<String>, ApiError> {
        let parts = match content {
            Value::String(text) => return Ok(Some(text.clone())),
            Value::Array(parts) => parts,
            other => {
                let message =
                    format!("{field_path} is {other}, but must be a string or a list of parts");
                return Err(ApiError::field(field_path, message));
            }
        };
        for (at, part) in parts.iter().enumerate() {
            let kind =
                if part.is_string() { "text" } else { part["type"].as_str().unwrap_or_default() };
            // Each provider has its own notation for paths in errors.
            let field_path = if self.api == "messages" {
                format!("{field_path}.{at}")
            } else {
                format!("{field_path}[{at}]")
            };
            each(kind, part, &field_path)?;
        }
        Ok(None)
    }

    /// Parses a message content that may have only texts, text documents and search results.
    pub(crate) fn parse_text(self, content: &Value, field_path: &str) -> Result<String, ApiError> {
        let mut all = ContentText::default();
        let plain_text = self.for_each_part(content, field_path, |kind, part, field_path| {
            if self.add_text_part(kind, part, field_path, &mut all, false)? {
                Ok(())
            } else {
                Err(unsupported_part(kind, field_path, "text"))
            }
        })?;
        Ok(plain_text.unwrap_or(all.text))
    }

    /// Parses the content of a tool result. A part that a text model cannot read is counted and
    /// replaced by a line that names its type.
    pub(crate) fn parse_tool_result(
        self,
        content: &Value,
        field_path: &str,
    ) -> Result<String, ApiError> {
        let mut all = ContentText::default();
        let plain_text = self.for_each_part(content, field_path, |kind, part, field_path| {
            match kind {
                "" => return Err(unsupported_part(kind, field_path, "text")),
                _ if self.add_text_part(kind, part, field_path, &mut all, true)? => {}
                _ => self.add_hidden_part(kind, &mut all),
            }
            Ok(())
        })?;
        Ok(plain_text.unwrap_or(all.text))
    }

    /// Parses a user message and appends its messages to `read`: first the tool results in their
    /// order, then the user's text.
    pub(crate) fn parse_user(
        self,
        content: &Value,
        field_path: &str,
        read: &mut Vec<Message>,
    ) -> Result<(), ApiError> {
        let mut user_text = None::<ContentText>;
        let plain_text = self.for_each_part(content, field_path, |kind, part, field_path| {
            match kind {
                "tool_result" => read.push(self.parse_tool_result_part(part, field_path)?),
                _ if self.add_text_part(
                    kind,
                    part,
                    field_path,
                    user_text.get_or_insert_default(),
                    false,
                )? => {}
                "document" => {
                    let message = format!(
                        "the source of {field_path} is of type {}, but this model reads only \
                         text; send documents whose source is of type text or content",
                        part["source"]["type"]
                    );
                    return Err(ApiError::field(field_path, message));
                }
                _ => return Err(unsupported_part(kind, field_path, "text or tool_result")),
            }
            Ok(())
        })?;
        read.extend(
            plain_text.or(user_text.map(|result_text| result_text.text)).map(Message::user),
        );
        Ok(())
    }

    fn parse_tool_result_part(self, part: &Value, field_path: &str) -> Result<Message, ApiError> {
        let id = string_field(part, "tool_use_id", field_path)?.to_owned();
        let content = match &part["content"] {
            Value::Null => String::new(),
            content => self.parse_tool_result(content, &format!("{field_path}.content"))?,
        };
        let failed = content.is_empty() && part["is_error"] == true;
        let content = if failed { FAILED_RESULT.to_owned() } else { content };
        Ok(Message { tool_call_id: Some(id), ..Message::tool(content) })
    }

    /// Parses an assistant message, which contains reasoning, text and tool calls in any order.
    /// Parts that belong to hosted tools are omitted and counted.
    pub(crate) fn parse_assistant(
        self,
        content: &Value,
        field_path: &str,
    ) -> Result<Message, ApiError> {
        let mut reasoning = String::new();
        let mut spoken_text = String::new();
        let mut calls = Vec::new();
        let plain_text = self.for_each_part(content, field_path, |kind, part, field_path| {
            match kind {
                "thinking" if !part[kind].is_array() => {
                    reasoning += string_field(part, kind, field_path)?
                }
                "thinking" | "reasoning" => reasoning += &extract_reasoning(part),
                // Only the provider that wrote this part can read it.
                "redacted_thinking" => {}
                "tool_use" => calls.push(parse_tool_call(part, field_path)?),
                hosted if is_hosted_part(hosted) => {
                    self.gateway.count_unknown_field(self.api, &format!("content[type={hosted}]"));
                }
                _ => match text_of_part(kind, part, field_path)? {
                    Some(text) => spoken_text += text,
                    None => {
                        return Err(unsupported_part(
                            kind,
                            field_path,
                            "text, thinking, redacted_thinking or tool_use",
                        ));
                    }
                },
            }
            Ok(())
        })?;
        let reasoning_content = (!reasoning.is_empty()).then_some(reasoning);
        Ok(Message {
            reasoning_content,
            ..Message::calls(plain_text.unwrap_or(spoken_text), calls)
        })
    }

    /// Appends a part that is a text, a text document or a search result to `all`. Returns whether
    /// the part has one of these types. If `hides` is true, nested parts that a text model cannot
    /// read are counted and replaced by a line that names their type.
    fn add_text_part(
        self,
        kind: &str,
        part: &Value,
        field_path: &str,
        all: &mut ContentText,
        hides: bool,
    ) -> Result<bool, ApiError> {
        if let Some(text) = text_of_part(kind, part, field_path)? {
            all.push_text(text);
            return Ok(true);
        }
        let of = |name: &str| part[name].as_str();
        let inner = |content: &Value, field_path: &str| {
            if hides {
                self.parse_tool_result(content, field_path)
            } else {
                self.parse_text(content, field_path)
            }
        };
        match (kind, part["source"]["type"].as_str()) {
            ("document", Some("text")) => {
                let data = string_field(&part["source"], "data", &format!("{field_path}.source"))?;
                all.push_document([of("title"), of("context"), Some(data)]);
            }
            ("document", Some("content")) => {
                let content =
                    inner(&part["source"]["content"], &format!("{field_path}.source.content"))?;
                all.push_document([of("title"), of("context"), Some(&content)]);
            }
            ("search_result", _) => {
                let content = inner(&part["content"], &format!("{field_path}.content"))?;
                all.push_document([of("title"), of("source"), Some(&content)]);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Counts a part that a text model cannot read, and appends a line that names its type to
    /// `all`.
    fn add_hidden_part(self, kind: &str, all: &mut ContentText) {
        self.gateway.count_unknown_field(self.api, &format!("tool_result[type={kind}]"));
        all.push_text("");
        if !all.text.is_empty() && !all.text.ends_with('\n') {
            all.text.push('\n');
        }
        all.text.push_str(&format!("[a part of type {kind:?}, which cannot be shown]\n"));
    }
}

/// Returns whether the type of a content part is unknown in OpenAI's chat completions but known to
/// [`ContentParser::parse_user`] or [`ContentParser::parse_assistant`].
pub(crate) fn is_foreign_part(part: &Value) -> bool {
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

/// Returns the reasoning text in `value`, which is a string, a part, or a list of parts.
pub(crate) fn extract_reasoning(value: &Value) -> String {
    const FIELDS: [&str; 5] = ["thinking", "text", "reasoning", "content", "summary"];
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(extract_reasoning).collect(),
        Value::Object(fields) => {
            let mut found =
                FIELDS.iter().filter_map(|name| fields.get(*name)).map(extract_reasoning);
            found.find(|text| !text.is_empty()).unwrap_or_default()
        }
        _ => String::new(),
    }
}

/// Returns the field `name` of a content part or item.
///
/// # Errors
/// Returns an error if the field is not a string.
pub(crate) fn string_field<'a>(
    part: &'a Value,
    name: &str,
    field_path: &str,
) -> Result<&'a str, ApiError> {
    part[name].as_str().ok_or_else(|| {
        let param = format!("{field_path}.{name}");
        let message = format!("{param} is {}, but must be a string", part[name]);
        ApiError::field(&param, message)
    })
}

/// Returns the text of a content part, or `None` if the part is not a text part.
pub(crate) fn text_of_part<'a>(
    kind: &str,
    part: &'a Value,
    field_path: &str,
) -> Result<Option<&'a str>, ApiError> {
    match (part, kind) {
        (Value::String(text), _) => Ok(Some(text)),
        (_, "text" | "input_text" | "output_text" | "summary_text") => {
            string_field(part, "text", field_path).map(Some)
        }
        (_, "refusal") => string_field(part, "refusal", field_path).map(Some),
        _ => Ok(None),
    }
}

/// Returns the error for a content part whose type is not supported. `known` lists the supported
/// types.
pub(crate) fn unsupported_part(kind: &str, field_path: &str, known: &str) -> ApiError {
    let is_media =
        ["image", "audio", "video", "file", "screenshot"].iter().any(|media| kind.contains(media));
    let message = match kind {
        "" => format!("{field_path} has no type; the type must be {known}"),
        _ if is_media => {
            format!(
                "{field_path} is of type {kind:?}, but this model reads only text; remove the part"
            )
        }
        _ => {
            format!(
                "{field_path} is of type {kind:?}, which is not supported here; the type must be \
                 {known}"
            )
        }
    };
    ApiError::field(field_path, message)
}

fn parse_tool_call(part: &Value, field_path: &str) -> Result<ToolCall, ApiError> {
    let arguments = part.get("input").cloned().map(Arguments::from).unwrap_or_default();
    let [id, name] =
        ["id", "name"].map(|name| string_field(part, name, field_path).map(str::to_owned));
    Ok(ToolCall { id: id?, name: name?, arguments })
}
