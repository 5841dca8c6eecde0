//! Small random models for tests, here and in the crates above, and the insides of the engine that tests and
//! examples look at. All of it behind the feature `testing`, and without any promise.

pub mod parity;

use levade_model::{Family, ModelConfig, Pattern, Rope, RopeScaling};
use levade_policy::uniform;

pub use crate::buffer::Buffer;
pub use crate::cache::Cache;
pub use crate::compute::Compute;
pub use crate::learning::{Learning, Limits};
pub use crate::ops::kv::Blocks;
pub use crate::packing::{Packing, Unit, check};
pub use crate::precision::Kernel;
pub use crate::product::{Matrix, Mode, Packed, Right, Scratch, product};
pub use crate::transformer::{Inference, Rows, Transformer};
pub use crate::value_head::ValueHead;
pub use crate::weights::Weights;

/// A Llama-like configuration with two small layers, grouped queries and a tied head.
pub fn tiny_config() -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        hidden: 48,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 12,
        intermediate: 80,
        vocabulary: 300,
        context: 256,
        norm_epsilon: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        tied: true,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        pattern: Pattern::default(),
        query_scalar: None,
        bos: Some(0),
        eos: vec![1],
        pad: None,
    }
}

/// One small configuration for every family, with and without tied heads and biases.
pub fn family_configs() -> Vec<ModelConfig> {
    let tiny = tiny_config();
    vec![
        tiny.clone(),
        ModelConfig { family: Family::Qwen2, qkv_bias: true, tied: false, head_dim: 20, ..tiny.clone() },
        ModelConfig { family: Family::Qwen3, qk_norm: true, heads: 6, head_dim: 16, ..tiny.clone() },
        ModelConfig { output_bias: true, mlp_bias: true, qkv_bias: true, kv_heads: 1, ..tiny.clone() },
        ModelConfig {
            family: Family::Gemma3,
            qk_norm: true,
            layers: 3,
            head_dim: 20,
            query_scalar: Some(30.0),
            pattern: Pattern {
                window: Some(9),
                windowed: [0, 2].into(),
                local_rope: Some(Rope { theta: 300.0, scaling: RopeScaling::None }),
                ..Pattern::default()
            },
            ..tiny.clone()
        },
        ModelConfig {
            family: Family::SmolLm3,
            pattern: Pattern { unrotated: [1].into(), ..Pattern::default() },
            ..tiny.clone()
        },
        ModelConfig {
            family: Family::SmolLm3,
            layers: 3,
            tied: false,
            pattern: Pattern {
                window: Some(33),
                windowed: [0, 1].into(),
                unrotated: [0, 2].into(),
                ..Pattern::default()
            },
            ..tiny.clone()
        },
        ModelConfig {
            family: Family::Mistral,
            pattern: Pattern { window: Some(5), windowed: [0, 1].into(), ..Pattern::default() },
            ..tiny
        },
    ]
}

/// Random weights: projections uniform with standard deviation 0.7 / √inputs, factors of norms around 1,
/// biases around 0.
pub fn random_weights(compute: &Compute, config: &ModelConfig, seed: u64) -> Weights {
    let mut weights = Weights::zeroed(config, compute.precision);
    for (stream, place) in weights.layout.tensors.places.iter().enumerate() {
        let shape = &place.parameter.shape;
        let (centre, spread) = match shape.len() {
            1 if place.parameter.name.ends_with("bias") => (0.0, 0.3),
            1 => (1.0 - f64::from(config.norm_offset()), 0.3),
            _ => (0.0, 2.4 / (shape[1] as f64).sqrt()),
        };
        for (i, value) in weights.master[place.range.clone()].iter_mut().enumerate() {
            *value = (centre + spread * (uniform(seed, stream as u64, i as u64) - 0.5)) as f32;
        }
    }
    weights.parameters().pack(compute);
    weights
}
