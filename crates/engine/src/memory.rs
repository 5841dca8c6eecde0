//! What an engine will need, computed before it starts.

use dressage_model::ModelConfig;

use crate::EngineError;
use crate::head;
use crate::layout::Layout;
use crate::ops::attention_backward::PIECES;
use crate::ops::kv::BLOCK;
use crate::precision::Precision;
use crate::weights::attention_shape;

/// Bytes by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Master and packed copy of the weights.
    pub weights: u64,
    /// Gradient and both moments of the optimiser; 0 for an engine that never trains.
    pub optimiser: u64,
    /// Activations of one training batch and its logits; 0 for an engine that never trains.
    pub training: u64,
    /// Keys and values of sampling, at most.
    pub cache: u64,
    /// Rows of one sampling step and their logits.
    pub sampling: u64,
}

impl MemoryPlan {
    /// The plan of an engine for `config`: `batch_tokens` packed tokens a training batch (0: no training), `cache` bytes of keys
    /// and values, `rows` rows a sampling step of which `running` get logits.
    pub fn new(
        config: &ModelConfig,
        precision: Precision,
        batch_tokens: usize,
        cache: usize,
        rows: usize,
        running: usize,
    ) -> Self {
        let layout = Layout::new(config);
        let shape = attention_shape(config);
        // Saturating throughout: an absurd option must end in "too much", not wrap around to little.
        let bytes = |values: usize| (values as u64).saturating_mul(size_of::<f32>() as u64);
        let (hidden, wide) = (config.hidden, config.intermediate);
        // One row of one block: input, queries/keys/values (twice with per-head norms), statistics, attention, middle, gate/up.
        let qkv = shape.qkv() * if config.qk_norm { 2 } else { 1 };
        let state = 2 * hidden + qkv + 2 * shape.heads + shape.query() + 2 * wide;
        let temporary = 4 * hidden + wide + 2 * BLOCK;
        let training = if batch_tokens == 0 {
            0
        } else {
            // A token of a long path is seen by half of the path's pieces on average.
            let shares = (PIECES + 1) * shape.kv_heads * shape.padded();
            let back = 2 * hidden + wide + shape.query() + shape.qkv() + shares;
            let chunk = batch_tokens.min(head::CHUNK) * (config.vocabulary + 4 * hidden);
            let row = state * config.layers + temporary + back + shape.block(precision) / BLOCK;
            batch_tokens.saturating_mul(row).saturating_add(chunk)
        };
        let packed =
            bytes(layout.len + if config.tied { 0 } else { layout.head.len() }) / precision.per_word() as u64;
        MemoryPlan {
            weights: bytes(layout.len).saturating_add(packed),
            optimiser: if batch_tokens == 0 { 0 } else { bytes(3 * layout.len) },
            training: bytes(training),
            cache: cache as u64,
            sampling: bytes(
                rows.saturating_mul(state + temporary + 2 * hidden)
                    .saturating_add(running.saturating_mul(config.vocabulary)),
            ),
        }
    }

    /// Everything together.
    pub fn total(&self) -> u64 {
        [self.optimiser, self.training, self.cache, self.sampling]
            .into_iter()
            .fold(self.weights, u64::saturating_add)
    }

    /// Checks the plan against the memory that is free now.
    ///
    /// # Errors
    /// When it does not fit, with the plan and the ways out.
    pub fn check(&self) -> Result<(), EngineError> {
        match available() {
            Some(available) if self.total() > available => {
                Err(EngineError::Memory { plan: *self, available })
            }
            _ => Ok(()),
        }
    }
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        write!(
            f,
            "{} MiB (weights {}, optimiser {}, training {}, key-value cache up to {}, sampling {})",
            mib(self.total()),
            mib(self.weights),
            mib(self.optimiser),
            mib(self.training),
            mib(self.cache),
            mib(self.sampling)
        )
    }
}

/// Bytes of memory that can be had without swapping, as far as the system tells: what is free in the machine and, where a
/// control group limits it, in the group.
pub fn available() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let info = read("/proc/meminfo")?;
    let line = info.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let machine = line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10;
    let number = |path: &str| read(path)?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .map(|max| max.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    Some(group.map_or(machine, |group| group.min(machine)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tiny_config;

    #[test]
    fn what_cannot_fit_is_refused_with_the_plan() {
        let plan = MemoryPlan::new(&tiny_config(), Precision::F32, 100, 1 << 20, 64, 8);
        assert!(plan.check().is_ok());
        assert_eq!(MemoryPlan::new(&tiny_config(), Precision::F32, 0, 1 << 20, 64, 8).optimiser, 0);
        let absurd = MemoryPlan::new(&tiny_config(), Precision::F32, usize::MAX / 2, 1 << 20, 64, 8);
        assert!(absurd.check().is_err());
        let giant = ModelConfig { layers: 2000, hidden: 8192, intermediate: 65536, ..tiny_config() };
        let error =
            MemoryPlan::new(&giant, Precision::F32, 100, 1 << 20, 64, 8).check().expect_err("terabytes");
        let text = error.to_string();
        assert!(text.contains("optimiser") && text.contains("smaller model"), "{text}");
    }
}
