//! Opens text encoders by name.

use std::sync::Arc;

use levade_engine::TextEncoder;
use levade_model::EncoderFiles;
use levade_policy::Embedder;
use levade_text::EncoderTokenizer;

use crate::host::Host;
use crate::model;

/// Prefixes of queries and passages. They replace the prefixes in the model's files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prefixes {
    /// Prefix of queries. `None` uses the prefix in the model's files.
    pub query: Option<String>,
    /// Prefix of passages. `None` uses the prefix in the model's files.
    pub passage: Option<String>,
}

/// Fetches an encoder to this machine if necessary, and loads it. `threads` is the number of
/// threads; 0 uses all cores.
///
/// # Errors
/// Returns an error if the encoder cannot be fetched, or if its type is not supported.
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
    let tokenizer = EncoderTokenizer::new(&files.tokenizer, files.config.max_tokens)?;
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = if threads == 0 { cores() } else { threads };
    Ok(Arc::new(TextEncoder::new(&files, Arc::new(tokenizer), threads)?))
}
