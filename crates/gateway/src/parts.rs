//! Parts of messages beside plain text: those that are text all the same, and those that cannot be shown.
//!
//! A document or a search result of text is shown as its fields, one below the other. A part that a model of
//! text cannot read ends no attempt if a tool returned it: a line names it, as the built-in loop does for
//! results of MCP servers, and the gateway counts it.

use levade_text::{Content, ContentPart};

use crate::gateway::Gateway;

/// Text of a message, put together from its parts.
#[derive(Debug, Default)]
pub(crate) struct PartsText {
    text: String,
    /// Whether the last part was a document, from which a blank line separates what follows.
    after_document: bool,
}

impl PartsText {
    /// Adds a part of text.
    pub(crate) fn text(&mut self, text: &str) {
        if std::mem::take(&mut self.after_document) && !text.is_empty() {
            self.text.push_str("\n\n");
        }
        self.text.push_str(text);
    }

    /// Adds a document, by those of its fields that are there.
    pub(crate) fn document<'a>(&mut self, fields: impl IntoIterator<Item = Option<&'a str>>) {
        let fields: Vec<&str> = fields.into_iter().flatten().filter(|field| !field.is_empty()).collect();
        if !self.text.is_empty() && !self.after_document {
            self.text.push_str("\n\n");
        }
        self.text(&fields.join("\n"));
        self.after_document = true;
    }

    /// Adds a line that names a part which cannot be shown, and counts the part.
    pub(crate) fn hidden(&mut self, gateway: &Gateway, api: &str, kind: &str) {
        gateway.unknown_field(api, &format!("tool_result[type={kind}]"));
        self.text("");
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        self.text.push_str(&format!("[a part of type {kind:?}, which cannot be shown]\n"));
    }

    /// Returns all of the text.
    pub(crate) fn into_text(self) -> String {
        self.text
    }
}

/// Returns the content of a tool's result with lines in the place of parts that cannot be shown.
pub(crate) fn shown_result(gateway: &Gateway, api: &str, content: &Content) -> Option<Content> {
    content.others().next()?;
    let mut text = PartsText::default();
    for part in content.parts().into_iter().flatten() {
        match part {
            ContentPart::Text(more) => text.text(more),
            ContentPart::Other(_) => text.hidden(gateway, api, part.kind()),
        }
    }
    Some(text.into_text().into())
}
