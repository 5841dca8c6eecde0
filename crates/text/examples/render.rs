//! Renders chat templates for `conformance/templates.py`.
//!
//! Reads one request per line as JSON: `template`, `messages`, `tools`, `add_generation_prompt`,
//! `variables`, and `now` as a Unix timestamp in seconds. Writes one line of JSON per request, with
//! `text` or `error`.

use std::io::{BufRead, Write, stdin, stdout};

use anyhow::Result;
use levade_text::{ChatTemplate, TemplateInput};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    template: String,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: bool,
    variables: Map<String, Value>,
    now: u64,
}

fn main() -> Result<()> {
    let mut out = stdout().lock();
    for line in stdin().lock().lines() {
        let request: Request = serde_json::from_str(&line?)?;
        let rendering = TemplateInput {
            messages: &request.messages,
            tools: request.tools.as_deref(),
            add_generation_prompt: request.add_generation_prompt,
            variables: &request.variables,
        };
        let text = ChatTemplate::at(&request.template, request.now)
            .and_then(|template| template.render(rendering));
        let ids = match text {
            Ok(text) => json!({ "text": text }),
            Err(error) => json!({ "error": error.to_string() }),
        };
        writeln!(out, "{ids}")?;
    }
    Ok(())
}
