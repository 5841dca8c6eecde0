//! Embeds texts for `conformance/encoder.py`: `encode FOLDER NAME`. Texts are lines of JSON on
//! standard input, each `{"text", "role"}`, and vectors are lines of JSON on standard output.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use levade_engine::TextEncoder;
use levade_model::EncoderFiles;
use levade_policy::{Embedder, TextRole};
use levade_text::EncoderTokenizer;
use serde_json::Value;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().context("usage: encode DIR NAME < TEXTS")?;
    let name = arguments.next().unwrap_or_else(|| dir.clone());
    let files = EncoderFiles::open(Path::new(&dir), &name)?;
    let tokenizer = EncoderTokenizer::new(&files.tokenizer, files.config.max_tokens)?;
    let encoder = TextEncoder::new(&files, Arc::new(tokenizer), 2)?;
    let mut queries = Vec::new();
    let mut passages = Vec::new();
    let mut roles = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let row: Value = serde_json::from_str(&line?)?;
        let text = row["text"].as_str().context("a row has no text")?.to_owned();
        let is_query = row["role"] == "query";
        roles.push(is_query);
        if is_query { queries.push(text) } else { passages.push(text) }
    }
    let mut queries = encoder.embed(&queries, TextRole::Query).await?.into_iter();
    let mut passages = encoder.embed(&passages, TextRole::Passage).await?.into_iter();
    let mut out = std::io::stdout().lock();
    for is_query in roles {
        let vector = if is_query { queries.next() } else { passages.next() };
        writeln!(out, "{}", serde_json::to_string(&vector.context("a vector is missing")?)?)?;
    }
    Ok(())
}
