//! Model files: configuration, safetensors, GGUF, and where they come from.
//!
//! [`ModelConfig`] says what a model is; [`TokenizerSource`] carries its tokenizer as the files have it.

mod config;
mod tokenizer;

pub use config::{Family, ModelConfig, Rope, RopeScaling};
pub use tokenizer::{GgufTokenizer, TokenType, TokenizerSource};
