//! Small random models for tests, here and in dependent crates, and internals of the engine for
//! tests and examples. All of it requires the feature `testing` and is not a stable API.

pub mod parity;

use levade_model::{
    AttentionBias, AttentionPattern, Family, ModelConfig, Rope, RopeScaling, Windows,
};
use levade_policy::uniform;

pub use crate::buffer::Buffer;
pub use crate::cache::KvCache;
pub use crate::compute::Compute;
pub use crate::gemm::{GemmScratch, Matrix, OutputMode, PackedMatrix, RhsOperand, gemm};
pub use crate::learning::{TrainingLimits, TrainingState};
pub use crate::ops::kv::Blocks;
pub use crate::packing::{BatchUnit, UnitPacking, check};
pub use crate::precision::Kernel;
pub use crate::transformer::{InferencePass, TokenRows, Transformer};
pub use crate::value_head::ValueHead;
pub use crate::weights::Weights;

/// Returns a Llama-like configuration with two small layers, grouped queries and a tied head.
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
        pattern: AttentionPattern::default(),
        query_scalar: None,
        bos: Some(0),
        eos: vec![1],
        pad: None,
    }
}

/// Returns two small configurations for every family: one with the parts that all its models have,
/// and one that adds the optional parts. Sizes and the tying of the head vary.
pub fn family_configs() -> Vec<ModelConfig> {
    let all = Family::all().enumerate().flat_map(|(index, family)| {
        let traits = family.traits();
        let mut plain = ModelConfig {
            tied: index.is_multiple_of(2),
            heads: if index.is_multiple_of(3) { 6 } else { 4 },
            head_dim: [12, 20, 16][index % 3],
            ..tiny_config().with_family(family)
        };
        // Differs from the value that follows from the width of a head. The rotation is visible in
        // a window of few tokens.
        plain.query_scalar = plain.query_scalar.map(|_| 30.0);
        if let Some(rope) = &mut plain.pattern.local_rope {
            rope.theta = 300.0;
        }
        let mut full = ModelConfig { layers: 3, tied: !plain.tied, kv_heads: 1, ..plain.clone() };
        full.pattern = AttentionPattern { window: Some(9 + 24 * (index % 2)), ..full.pattern };
        full.pattern.windowed = match traits.windows {
            Windows::Never => [].into(),
            Windows::Every => [0, 1, 2].into(),
            Windows::AllExceptEveryNth(_) | Windows::Last | Windows::Unrotated => [0, 2].into(),
        };
        if traits.unrotated_interval.is_some() {
            plain.pattern.unrotated = [1].into();
            full.pattern.unrotated = [0, 2].into();
        }
        // Without rotation, a key bias adds the same to all scores of a query, so its gradient is
        // only rounding error.
        let is_biased =
            traits.attention_bias == AttentionBias::Configured && full.pattern.unrotated.is_empty();
        if is_biased {
            (full.qkv_bias, full.output_bias) = (true, true);
        }
        full.mlp_bias = traits.mlp_bias;
        [plain, full]
    });
    all.collect()
}

/// Creates random weights: projections uniform with standard deviation 0.7 / √inputs, norm factors
/// around 1, biases around 0.
pub fn random_weights(compute: &Compute, config: &ModelConfig, seed: u64) -> Weights {
    let mut weights = Weights::zeroed(config, compute.precision);
    for (stream, entry) in weights.layout.tensors.entries.iter().enumerate() {
        let shape = &entry.parameter.shape;
        let (centre, spread) = match shape.len() {
            1 if entry.parameter.name.ends_with("bias") => (0.0, 0.3),
            1 => (1.0 - f64::from(config.norm_offset()), 0.3),
            _ => (0.0, 2.4 / (shape[1] as f64).sqrt()),
        };
        for (i, value) in weights.master[entry.range.clone()].iter_mut().enumerate() {
            *value = (centre + spread * (uniform(seed, stream as u64, i as u64) - 0.5)) as f32;
        }
    }
    weights.parameters().pack(compute);
    weights
}
