//! Answers of servers, as the model reads them.

use dressage_text::ContentPart;
use rmcp::ServiceError;
use rmcp::model::{CallToolResult, ContentBlock, ErrorCode, ResourceContents};
use serde_json::{Map, Value, json};

use super::super::{CallError, ToolOutput};
use super::connection::Failed;

/// The answer to a call.
pub(super) fn output(server: &str, answer: Result<CallToolResult, Failed>) -> ToolOutput {
    match answer {
        Ok(result) => told(result),
        Err(Failed { error: ServiceError::McpError(error), .. }) => {
            let kind = match error.code {
                ErrorCode::INVALID_PARAMS => CallError::BadArguments,
                _ => CallError::Failed,
            };
            ToolOutput::error(kind, error.message.to_string())
        }
        Err(Failed { error: ServiceError::UnexpectedResponse, .. }) => unavailable(
            server,
            "its answer is none that a call here may have: it asks the user for something, goes on in the background, \
             or has a content that this protocol does not know",
        ),
        Err(Failed { error, over }) => {
            unavailable(server, &format!("{}{over}", dressage_http::causes(&error)))
        }
    }
}

/// No answer, since the server has none.
pub(super) fn unavailable(server: &str, why: &str) -> ToolOutput {
    ToolOutput::error(CallError::Unavailable, format!("the server {server:?} does not answer: {why}"))
}

fn told(result: CallToolResult) -> ToolOutput {
    let mut parts: Vec<ContentPart> = result.content.into_iter().map(part).collect();
    if !parts.iter().any(|part| matches!(part, ContentPart::Text(_)))
        && let Some(structured) = &result.structured_content
    {
        parts.push(ContentPart::Text(structured.to_string()));
    }
    // Blocks are paragraphs of their own.
    for at in 1..parts.len() {
        let (before, after) = parts.split_at_mut(at);
        if let (Some(ContentPart::Text(text)), Some(ContentPart::Text(_))) =
            (before.last_mut(), after.first())
            && !text.ends_with('\n')
        {
            text.push('\n');
        }
    }
    let error = result.is_error.unwrap_or(false).then_some(CallError::Failed);
    ToolOutput { parts, error, ..ToolOutput::default() }
}

fn part(block: ContentBlock) -> ContentPart {
    let other = |value: Value| match value {
        Value::Object(part) => ContentPart::Other(part),
        _ => ContentPart::Other(Map::new()),
    };
    match block {
        ContentBlock::Text(text) => ContentPart::Text(text.text),
        // Without what is in them: nobody who reads the record could make use of it.
        ContentBlock::Image(image) => other(json!({ "type": "image", "mime_type": image.mime_type })),
        ContentBlock::Audio(audio) => other(json!({ "type": "audio", "mime_type": audio.mime_type })),
        ContentBlock::ResourceLink(link) => ContentPart::Text(format!("[{}]({})", link.name, link.uri)),
        ContentBlock::Resource(resource) => match resource.resource {
            ResourceContents::TextResourceContents { text, .. } => ContentPart::Text(text),
            ResourceContents::BlobResourceContents { uri, mime_type, .. } => {
                other(json!({ "type": "resource", "uri": uri, "mime_type": mime_type }))
            }
            _ => other(json!({ "type": "resource" })),
        },
        _ => other(json!({ "type": "unknown" })),
    }
}
