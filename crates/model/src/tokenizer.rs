//! A tokenizer as model files carry it, before `dressage-text` makes it work.

/// Where the tokenizer of a model is.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenizerSource {
    /// The contents of a Hugging Face `tokenizer.json`.
    Json(Vec<u8>),
    /// The metadata of a GGUF file.
    Gguf(GgufTokenizer),
}

/// The `tokenizer.ggml.*` metadata of a GGUF file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GgufTokenizer {
    /// `model`: the algorithm, `gpt2` for byte-level BPE.
    pub model: String,
    /// `pre`: the name of the pre-tokenizer (`smollm`, `qwen2`, `llama-bpe`, …); empty where absent.
    pub pre: String,
    /// Every token's text, in the byte-level alphabet for `gpt2`.
    pub tokens: Vec<String>,
    /// Every token's type; empty where absent.
    pub types: Vec<TokenType>,
    /// Merge rules, "left right", best first.
    pub merges: Vec<String>,
    /// Beginning of text.
    pub bos: Option<u32>,
    /// End of text (for chat models, usually end of turn).
    pub eos: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Unknown.
    pub unknown: Option<u32>,
    /// Whether `bos` is put before every text.
    pub add_bos: bool,
    /// Whether a space is put before every text.
    pub add_space_prefix: bool,
}

/// The type of a token in a GGUF vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// A piece of text.
    Normal,
    /// Stands for what cannot be encoded.
    Unknown,
    /// Has a meaning but no text.
    Control,
    /// Text that is matched before the algorithm runs.
    UserDefined,
    /// Never used.
    Unused,
    /// A single byte.
    Byte,
}
