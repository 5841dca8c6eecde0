//! Plans the memory of an engine before the engine starts.
//!
//! The engine allocates no more than the plan. The input of every layer is stored. For as many
//! layers as fit, all values are stored that the backward pass needs; the other layers recompute
//! them, which changes no bit. The plan is compared with the memory that `limits` finds.

use levade_model::ModelConfig;

use crate::adapter::AdapterLayout;
use crate::gemm::{MAX_ROWS, NR, SLAB, SLAB_A};
use crate::layout::{LinearMap, ParameterLayout, attention_shape};
use crate::ops::attention_backward;
use crate::ops::kv::BLOCK;
use crate::options::{EngineOptions, PlannedAdapter};
use crate::precision::words;
use crate::{EngineError, head, row_sampling, transposed};

/// Memory of an engine, in bytes by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Master and packed copies of the weights, and the rotary embedding tables.
    pub weights: u64,
    /// Gradient and both moments of the optimizer, and adapter weights; 0 for an engine that never
    /// trains.
    pub optimizer: u64,
    /// Activations of one training batch and its logits; 0 for an engine without training batches.
    pub training: u64,
    /// Maximum memory for the keys and values of a sequence that is longer than a batch, and for
    /// their gradients.
    pub sequence: u64,
    /// Maximum memory for keys and values during sampling.
    pub cache: u64,
    /// Rows of one sampling step, and their logits.
    pub sampling: u64,
    /// Number of layers whose activations training stores. Training recomputes the activations of
    /// the other layers.
    pub kept: usize,
    /// Number of layers (transformer blocks) of the model.
    pub layers: usize,
}

/// Purpose of memory: one of the fields of a [`MemoryPlan`] that are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields of MemoryPlan document them")]
pub enum MemoryPurpose {
    Weights,
    Optimizer,
    Training,
    Sequence,
    Cache,
    Sampling,
}

impl MemoryPurpose {
    /// Returns advice for reducing the memory of this purpose, with keys of [`EngineOptions`].
    fn advice(self) -> &'static str {
        match self {
            MemoryPurpose::Weights => "use a smaller model",
            MemoryPurpose::Optimizer => "train an adapter or a smaller model",
            MemoryPurpose::Training => "lower batch_tokens",
            MemoryPurpose::Sequence => "lower context",
            MemoryPurpose::Cache => "lower kv_memory_mb",
            MemoryPurpose::Sampling => "lower context, threads or running",
        }
    }
}

/// Number of values in memory, each an f32 or a packed word of 4 bytes. Arithmetic saturates: an
/// absurd option must result in "too much" instead of wrapping around to a small number.
#[derive(Clone, Copy)]
struct ValueCount(u64);

impl ValueCount {
    fn new(count: usize) -> Self {
        ValueCount(count as u64)
    }

    fn times(self, count: usize) -> Self {
        ValueCount(self.0.saturating_mul(count as u64))
    }

    fn plus(self, other: Self) -> Self {
        ValueCount(self.0.saturating_add(other.0))
    }

    fn bytes(self) -> u64 {
        self.0.saturating_mul(size_of::<f32>() as u64)
    }
}

impl MemoryPlan {
    /// Plans the memory of an engine for `config` with `threads` threads, on a machine with
    /// `budget` free bytes. If the budget requires it, layers recompute their activations.
    pub fn new(config: &ModelConfig, options: &EngineOptions, threads: usize, budget: u64) -> Self {
        let layout = ParameterLayout::new(config);
        let plan = |kept| Self::plan_with_kept_layers(config, &layout, options, threads, kept);
        let full = plan(config.layers);
        if full.total() <= budget || options.batch_tokens == 0 || !options.trains {
            return full;
        }
        // Memory grows with the number of layers that store their activations.
        let fitting = (0..config.layers).rev().map(plan).find(|plan| plan.total() <= budget);
        fitting.unwrap_or_else(|| plan(0))
    }

    fn plan_with_kept_layers(
        config: &ModelConfig,
        layout: &ParameterLayout,
        options: &EngineOptions,
        threads: usize,
        kept: usize,
    ) -> Self {
        let shape = attention_shape(config);
        let precision = options.precision;
        let rows = options.batch_tokens;
        let hidden = config.hidden;
        let wide = config.intermediate;
        let layers = config.layers;
        let context = if options.context == 0 { config.context } else { options.context };
        let packed = |inputs: usize, outputs: usize| {
            ValueCount::new(outputs.next_multiple_of(NR)).times(words(precision, inputs))
        };
        let tables = 1 + usize::from(config.pattern.local_rope.is_some());
        let mut weights = ValueCount::new(layout.tensors.len)
            .plus(packed(hidden, config.vocabulary))
            .plus(ValueCount::new(context).times(config.head_dim * tables));
        for linear in LinearMap::all(layers).map(|map| layout.linear(map)) {
            weights = weights.plus(packed(linear.inputs, linear.outputs));
        }

        // Weights packed for the backward pass.
        if rows > 0 && options.trains {
            for (depth, columns) in transposed::matrix_shapes(layout, layers, precision) {
                weights = weights.plus(packed(depth, columns));
            }
        }

        // Row of one layer: queries, keys and values (twice with per-head norms), statistics,
        // attention, middle, gate and up; inputs of the norms after attention and the feed-forward
        // part.
        let qkv = shape.qkv_width() * if config.qk_norm { 2 } else { 1 };
        let post_norms = if config.has_post_norms() { 2 * hidden } else { 0 };
        let state = qkv + 2 * shape.heads + shape.query_width() + hidden + 2 * wide + post_norms;
        let temporary = hidden + wide;
        // Scratch of one attention thread for a sequence of `n` positions: scores and their
        // weights, and transposed keys and values.
        let attention = |n: usize, rows: usize| {
            ValueCount::new(n).times(2 * rows + 2 * shape.padded_head_dim())
        };
        let mut training = ValueCount(0);
        if rows > 0 && options.trains {
            let states = kept + usize::from(kept < layers);
            let back = 2 * hidden + wide + shape.query_width() + shape.qkv_width() + post_norms / 2;
            let max_len = rows.min(context);
            let row = states.saturating_mul(state) + (layers + 1) * hidden + temporary + back;
            let chunk =
                ValueCount::new(rows.min(head::CHUNK)).times(config.vocabulary + 4 * hidden);
            // Rows of a value head, which are not divided into chunks; a copy of a row of logits
            // for an entropy bonus.
            let row = row + if options.critic { 4 * hidden } else { 0 };
            training = ValueCount::new(rows)
                .times(row)
                .plus(chunk)
                .plus(ValueCount::new(threads).times(config.vocabulary))
                .plus(ValueCount::new(attention_backward::max_partial_sums(shape, rows, max_len)))
                .plus(attention(max_len, attention_backward::QUERIES).times(threads));
        } else if rows > 0 {
            let chunk =
                ValueCount::new(rows.min(head::CHUNK)).times(config.vocabulary + 2 * hidden);
            training = ValueCount::new(rows).times(state + 2 * hidden + temporary).plus(chunk);
        }
        if rows > 0 {
            // Nodes of a forest rarely end at a block boundary.
            let blocks = ValueCount::new(2 * shape.block(precision) / BLOCK).times(rows);
            training = training.plus(blocks).plus(gemm_scratch(config, rows, options.trains));
        }
        let sequence = if rows > 0 && context > rows {
            let gradient = if options.trains { 2 * shape.key_width() } else { 0 };
            ValueCount::new(context).times(layers).times(shape.block(precision) / BLOCK + gradient)
        } else {
            ValueCount(0)
        };
        let logits = row_sampling::max_logits_rows(options.running, options.step_rows);
        let sampling = ValueCount::new(options.step_rows)
            .times(state + temporary + 2 * hidden)
            .plus(ValueCount::new(logits).times(config.vocabulary + 2 * hidden))
            .plus(attention(context, MAX_ROWS).times(threads));
        MemoryPlan {
            weights: weights.bytes(),
            optimizer: match &options.adapters[..] {
                _ if !options.trains => 0,
                [] => ValueCount::new(layout.tensors.len).times(3).bytes(),
                adapters => {
                    let adapter_bytes = |PlannedAdapter { lora, learns }: &PlannedAdapter| {
                        // An invalid adapter is rejected when it is created.
                        let Ok(adapter) = AdapterLayout::new(layout, lora) else { return 0 };
                        let own = ValueCount::new(adapter.tensors.len);
                        let trained = own.times(if *learns { 3 } else { 0 });
                        own.plus(ValueCount::new(adapter.packed_words(precision)))
                            .plus(trained)
                            .bytes()
                    };
                    adapters.iter().map(adapter_bytes).fold(0, u64::saturating_add)
                }
            },
            training: training.bytes(),
            sequence: sequence.bytes(),
            cache: (options.kv_memory_mb as u64).saturating_mul(1 << 20),
            sampling: sampling.bytes(),
            kept,
            layers,
        }
    }

    /// Returns the planned bytes for each purpose.
    fn bytes_by_purpose(&self) -> [(MemoryPurpose, u64); 6] {
        [
            (MemoryPurpose::Weights, self.weights),
            (MemoryPurpose::Optimizer, self.optimizer),
            (MemoryPurpose::Training, self.training),
            (MemoryPurpose::Sequence, self.sequence),
            (MemoryPurpose::Cache, self.cache),
            (MemoryPurpose::Sampling, self.sampling),
        ]
    }

    /// Returns the total planned memory in bytes.
    pub fn total(&self) -> u64 {
        self.bytes_by_purpose().into_iter().fold(0, |total, (_, bytes)| total.saturating_add(bytes))
    }

    /// Returns the purposes that take more than a third of the largest part, largest first. These
    /// must shrink if memory is short.
    pub fn largest_purposes(&self) -> Vec<MemoryPurpose> {
        let mut parts = self.bytes_by_purpose();
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let largest_bytes = parts[0].1;
        parts
            .into_iter()
            .take_while(|(_, bytes)| *bytes > largest_bytes / 3)
            .map(|(purpose, _)| purpose)
            .collect()
    }

    /// Returns advice for reducing the memory if the plan does not fit.
    pub(crate) fn advice_text(&self) -> String {
        let ways: Vec<&str> =
            self.largest_purposes().into_iter().map(MemoryPurpose::advice).collect();
        ways.join(", or ")
    }

    /// Checks the plan against the available bytes.
    ///
    /// # Errors
    /// Returns [`EngineError::Memory`] with the plan and advice if the plan does not fit.
    pub fn check(&self, budget: u64) -> Result<(), EngineError> {
        if self.total() > budget {
            return Err(EngineError::Memory { plan: *self, available: budget });
        }
        Ok(())
    }
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} MiB (weights {}", to_mib(self.total()), to_mib(self.weights))?;
        for (name, bytes) in [
            ("optimizer", self.optimizer),
            ("training", self.training),
            ("long sequences up to", self.sequence),
            ("key-value cache up to", self.cache),
            ("sampling", self.sampling),
        ] {
            if bytes > 0 {
                write!(f, ", {name} {}", to_mib(bytes))?;
            }
        }
        write!(f, ")")?;
        if self.training > 0 && self.kept < self.layers {
            write!(
                f,
                ", activations of {} of {} blocks recomputed",
                self.layers - self.kept,
                self.layers
            )?;
        }
        Ok(())
    }
}

fn to_mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Returns the number of values that the packed operands of the largest matmul take.
fn gemm_scratch(config: &ModelConfig, rows: usize, trains: bool) -> ValueCount {
    let widest = config.intermediate.max(config.hidden).max(attention_shape(config).query_width());
    // Operands are packed slab by slab. The rhs of dX is a weight matrix; the rhs of dW has as many
    // rows as there are activations.
    let rhs = if trains {
        ValueCount::new(rows.max(2 * config.intermediate).min(SLAB)).times(widest)
    } else {
        ValueCount(0)
    };
    ValueCount::new(SLAB_A).plus(rhs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tiny_config;

    fn plan(config: &ModelConfig, options: &EngineOptions, budget: u64) -> MemoryPlan {
        MemoryPlan::new(config, options, 2, budget)
    }

    #[test]
    fn memory_plan_over_budget_is_rejected() {
        let options =
            EngineOptions { batch_tokens: 100, kv_memory_mb: 1, ..EngineOptions::default() };
        assert!(plan(&tiny_config(), &options, 1 << 30).check(1 << 30).is_ok());
        assert_eq!(
            plan(&tiny_config(), &EngineOptions { trains: false, ..options.clone() }, 0).optimizer,
            0
        );
        let absurd = EngineOptions { batch_tokens: usize::MAX / 2, ..options.clone() };
        assert!(plan(&tiny_config(), &absurd, 1 << 40).check(1 << 40).is_err());
        let giant =
            ModelConfig { layers: 2000, hidden: 8192, intermediate: 65536, ..tiny_config() };
        let error = plan(&giant, &options, 1 << 36).check(1 << 36).expect_err("terabytes");
        let text = error.to_string();
        assert!(text.contains("optimizer") && text.contains("smaller model"), "{text}");
        assert!(!text.contains("batch_tokens"), "that would not help: {text}");
    }

    /// Advice names large parts, and following it helps.
    #[test]
    fn memory_error_suggests_option_of_largest_part() {
        let config = ModelConfig { context: 1 << 24, ..tiny_config() };
        let options = EngineOptions {
            batch_tokens: 100,
            kv_memory_mb: 1,
            context: 256,
            ..EngineOptions::default()
        };
        for (large, purpose, way_out) in [
            (
                EngineOptions { batch_tokens: 1 << 22, ..options.clone() },
                MemoryPurpose::Training,
                "batch_tokens",
            ),
            (
                EngineOptions { context: 1 << 24, ..options.clone() },
                MemoryPurpose::Sequence,
                "context",
            ),
            (
                EngineOptions { kv_memory_mb: 1 << 14, ..options.clone() },
                MemoryPurpose::Cache,
                "kv_memory_mb",
            ),
            (
                EngineOptions { running: 1 << 22, step_rows: 1 << 22, ..options.clone() },
                MemoryPurpose::Sampling,
                "running",
            ),
        ] {
            let plan = plan(&config, &large, 1 << 20);
            assert_eq!(plan.largest_purposes()[0], purpose);
            assert!(plan.check(1 << 20).expect_err("too much").to_string().contains(way_out));
        }
    }

    #[test]
    fn memory_plan_includes_rotary_tables() {
        let mut config = ModelConfig { context: 1 << 20, ..tiny_config() };
        for tables in [1, 2] {
            let [short, long] = [1, 1 << 20].map(|context| {
                plan(&config, &EngineOptions { context, ..EngineOptions::default() }, u64::MAX)
                    .weights
            });
            assert_eq!(long - short, ((1 << 20) - 1) * tables * config.head_dim as u64 * 4);
            config.pattern.local_rope = Some(config.rope.clone());
        }
    }

    #[test]
    fn stored_layers_decrease_with_memory_budget() {
        let config = ModelConfig { layers: 10, ..tiny_config() };
        let options =
            EngineOptions { batch_tokens: 4000, kv_memory_mb: 1, ..EngineOptions::default() };
        let full = plan(&config, &options, u64::MAX);
        assert_eq!((full.kept, full.to_string().contains("recomputed")), (10, false));
        let minimal = plan(&config, &options, 0);
        assert_eq!(minimal.kept, 0);
        assert!(minimal.to_string().contains("activations of 10 of 10 blocks recomputed"));
        let budget = (full.total() + minimal.total()) / 2;
        let some = plan(&config, &options, budget);
        assert!(
            some.kept > 2
                && some.kept < 9
                && some.total() <= budget
                && budget < some.total() * 11 / 10
        );
    }
}
