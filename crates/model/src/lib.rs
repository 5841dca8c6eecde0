//! Downloads, reads and writes model files: configuration, safetensors and GGUF.
//!
//! [`Source`] parses where a model comes from, and [`fetch`] downloads it to this machine.
//! [`ModelFiles`] opens a Hugging Face directory or a GGUF file. It reads the weights as f32, one
//! tensor at a time, under their Hugging Face names. [`ModelConfig`] describes the model, and
//! [`TokenizerSource`] contains its tokenizer in the format of the files. [`write_safetensors`],
//! [`ModelConfig::to_hf_json`] and [`write_tokenizer_config`] write a directory that `transformers`
//! loads. [`AdapterConfig`] reads adapters in PEFT's layout, and [`EncoderFiles`] opens encoders
//! for retrieval.
//!
//! # Example
//! ```
//! use std::path::Path;
//!
//! use levade_model::{Family, ModelConfig, Source};
//!
//! let source = Source::parse("Qwen/Qwen3-0.6B@main")?;
//! assert_eq!(source.to_string(), "Qwen/Qwen3-0.6B");
//!
//! let json = br#"{
//!     "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
//!     "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 1000,
//!     "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": true
//! }"#;
//! let config = ModelConfig::from_hf_json(Path::new("config.json"), json)?;
//! assert_eq!((config.family, config.layers), (Family::Qwen3, 2));
//! let embedding = &config.parameters()[0];
//! assert_eq!(embedding.name, "model.embed_tokens.weight");
//! assert_eq!(embedding.shape, [1000, 64]);
//!
//! let error = ModelConfig::from_hf_json(Path::new("config.json"), b"{").unwrap_err();
//! assert!(error.to_string().contains("not a JSON object"));
//! # Ok::<(), levade_model::ModelError>(())
//! ```
//!
//! # Guarantees
//! - **Files are untrusted.** For any bytes, opening and reading a file returns a model or a
//!   [`ModelError`]. It never panics, and never allocates more than a small constant times the size
//!   of the file.
//!
//! Out of scope: computing with weights (`levade-engine`) and with tokenizers (`levade-text`).

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
pub use config::{AttentionPattern, ModelConfig, Parameter, Rope, RopeScaling};
pub use encoder::{EncoderConfig, EncoderFiles, Pooling};
pub use error::ModelError;
pub use family::{Activation, AttentionBias, BlockTraits, Family, FamilyTraits, Windows};
pub use fetch::{Progress, default_cache, fetch};
pub use files::{ModelFiles, Tensor};
pub use safetensors::{SafetensorsFile, write_safetensors, write_safetensors_with};
pub use source::Source;
pub use tokenizer::{
    AddedToken, GgufTokenizer, LLAMA3_PRE_TOKENIZERS, SpecialTokens, TokenType, TokenizerSource,
    added_tokens, write_json, write_tokenizer_config,
};
