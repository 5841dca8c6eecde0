//! A tiny real tokenizer and chat, made in memory, for tests here and in other crates.
//!
//! One token for each byte (the id is the byte) and three special tokens. Slow in tokens, but exact: any text
//! encodes to its UTF-8 bytes, and back.

use dressage_model::{GgufTokenizer, TokenType};

use crate::{Chat, ChatOptions, TextError, Tokenizer, TokenizerSource, alphabet};

/// `<|endoftext|>`: ends a text.
pub const END_OF_TEXT: u32 = 256;
/// `<|im_start|>`: begins a turn.
pub const IM_START: u32 = 257;
/// `<|im_end|>`: ends a turn.
pub const IM_END: u32 = 258;
/// How many tokens there are.
pub const VOCABULARY: usize = 259;

/// The metadata of the tiny tokenizer, as a GGUF file would carry it.
pub fn tiny_gguf() -> GgufTokenizer {
    let bytes = (0..=255).map(|byte| alphabet::to_char(byte).to_string());
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from);
    GgufTokenizer {
        model: "gpt2".into(),
        pre: "gpt-2".into(),
        tokens: bytes.chain(specials).collect(),
        types: [vec![TokenType::Normal; 256], vec![TokenType::Control; 3]].concat(),
        eos: Some(END_OF_TEXT),
        ..GgufTokenizer::default()
    }
}

/// The tiny tokenizer.
///
/// # Errors
/// Never in practice; what [`Tokenizer::new`] says.
pub fn tiny_tokenizer() -> Result<Tokenizer, TextError> {
    Tokenizer::new(&TokenizerSource::Gguf(tiny_gguf()))
}

/// The tiny tokenizer with plain ChatML and the Hermes protocol.
///
/// # Errors
/// Never in practice; what [`Chat::new`] says.
pub fn tiny_chat() -> Result<Chat, TextError> {
    Chat::new(tiny_tokenizer()?, Some("chatml"), ChatOptions::default())
}
