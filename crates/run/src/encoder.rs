//! Opens text encoders by name.

use std::sync::Arc;

use levade_engine::TextEncoder;
use levade_model::EncoderFiles;
use levade_policy::Embedder;
use levade_text::EncoderTokenizer;

use crate::host::Host;
use crate::model;

/// Prefixes of the texts that an encoder embeds. They replace the prefixes in the encoder's files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prefixes {
    /// Text that precedes each query. If `None`, the prefix in the encoder's files is used.
    pub query: Option<String>,
    /// Text that precedes each passage. If `None`, the prefix in the encoder's files is used.
    pub passage: Option<String>,
}

/// Loads an encoder, and downloads it first if it is not on this machine. `threads` is the number
/// of compute threads; 0 uses all cores.
///
/// # Errors
/// Returns an error if the encoder cannot be downloaded, or if its type is not supported.
pub fn open(
    source: &str,
    prefixes: Prefixes,
    threads: usize,
    host: &Host,
) -> anyhow::Result<Arc<dyn Embedder>> {
    let path = model::fetch_model(source, host)?;
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
