//! From an encoder's name to what embeds texts.

use std::sync::Arc;

use levade_engine::TextEncoder;
use levade_model::EncoderFiles;
use levade_policy::Embedder;
use levade_text::EncoderTokenizer;

use crate::host::Host;
use crate::model;

/// Text put before queries and passages, where it is not what the model's files say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prefixes {
    /// Before queries.
    pub query: Option<String>,
    /// Before passages.
    pub passage: Option<String>,
}

/// Gets an encoder onto this machine, and loads it.
///
/// # Errors
/// When it cannot be had, or is none that is run here.
pub fn open(
    source: &str,
    prefixes: Prefixes,
    threads: usize,
    host: &Host,
) -> anyhow::Result<Arc<dyn Embedder>> {
    let path = model::get(source, host)?;
    let mut files = EncoderFiles::open(&path, source)?;
    if let Some(query) = prefixes.query {
        files.config.query_prefix = query;
    }
    if let Some(passage) = prefixes.passage {
        files.config.passage_prefix = passage;
    }
    let tokenizer = EncoderTokenizer::new(&files.tokenizer, files.config.most_tokens)?;
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = if threads == 0 { cores() } else { threads };
    Ok(Arc::new(TextEncoder::new(&files, Arc::new(tokenizer), threads)?))
}
