//! Model files: configuration, safetensors, GGUF, and where they come from.
//!
//! [`ModelConfig`] says what a model is; [`TokenizerSource`] carries its tokenizer as the files have it;
//! [`ModelFiles`] opens a Hugging Face folder or a GGUF file and reads its weights as f32, one tensor at a
//! time, under Hugging Face names. [`write_safetensors`], [`ModelConfig::to_hf_json`] and
//! [`write_tokenizer_config`] write a folder that `transformers` loads. [`AdapterConfig`] reads what an
//! adapter in PEFT's layout is. [`EncoderFiles`] opens encoders for retrieval. [`Source`] and
//! [`fetch`] get a model onto this machine.
//!
//! Files are not trusted: whatever their bytes, opening and reading them ends in a model or in a
//! [`ModelError`], never in a panic or an allocation beyond the size of the file times a small constant.

mod adapter;
mod config;
mod encoder;
mod error;
mod family;
mod fetch;
mod files;
mod gguf;
mod hf_config;
mod keys;
mod names;
pub mod placeholder;
mod safetensors;
mod source;
mod tokenizer;

pub use adapter::{AdaptedModule, AdapterConfig, MERGE};
pub use config::{Activation, ModelConfig, Parameter, Pattern, Rope, RopeScaling};
pub use encoder::{EncoderConfig, EncoderFiles, Pooling};
pub use error::ModelError;
pub use family::{AttentionBias, Blocks, Family, Traits, Windows};
pub use fetch::{Progress, default_cache, fetch};
pub use files::{ModelFiles, Tensor};
pub use safetensors::{SafetensorsFile, write_safetensors, write_safetensors_with};
pub use source::Source;
pub use tokenizer::{
    AddedToken, GgufTokenizer, LLAMA3_PRE_TOKENIZERS, SpecialTokens, TokenType, TokenizerSource,
    added_tokens, write_json, write_tokenizer_config,
};
