//! Options of an engine.

use levade_policy::LoraOptions;
use serde::{Deserialize, Serialize};

use crate::limits::available_memory;
use crate::precision::Precision;
use crate::simd::Isa;
use crate::{Compute, EngineError};

/// Options of an adapter that will be created later. The memory plan includes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedAdapter {
    /// Rank, scaling and target modules of the adapter.
    pub lora: LoraOptions,
    /// Whether the adapter will be trained.
    pub learns: bool,
}

/// Options for running a model. The defaults suit a small model on a laptop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineOptions {
    /// Number of threads; 0 starts one per processor.
    pub threads: usize,
    /// Maximum sequence length in tokens; 0 uses the model's own context length.
    pub context: usize,
    /// Maximum number of packed tokens of a training batch that go through the model at once;
    /// larger batches take several passes. 0 for an engine that only samples.
    pub batch_tokens: usize,
    /// Whether the engine will be trained. If not, batches are only evaluated, and gradients are
    /// rejected.
    pub trains: bool,
    /// Adapters that will be created later, for the memory plan. If there are any, the base weights
    /// are not trained.
    pub adapters: Vec<PlannedAdapter>,
    /// Whether a value head will be added, for the memory plan.
    pub critic: bool,
    /// Memory limit in MiB; 0 uses all free memory. If memory is short, training recomputes
    /// activations.
    pub memory_mb: usize,
    /// Memory for keys and values of sampling, in MiB.
    pub kv_memory_mb: usize,
    /// Maximum number of sequences sampled at the same time.
    pub running: usize,
    /// Maximum number of rows in one sampling step: running sequences and prefill chunks.
    pub step_rows: usize,
    /// Whether running sequences keep their keys and values when the weights change. The sequences
    /// then continue at once without recomputation, but log-probabilities of tokens sampled after
    /// the change differ from the values that training computes. New sequences never reuse keys and
    /// values of old weights.
    pub keep_cache: bool,
    /// Rounding of matmul operands, including keys and values.
    pub precision: Precision,
    /// Vector instruction set; `None` uses the best one available.
    pub isa: Option<Isa>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            threads: 0,
            context: 0,
            batch_tokens: 4096,
            trains: true,
            adapters: Vec::new(),
            critic: false,
            memory_mb: 0,
            kv_memory_mb: 1024,
            running: 64,
            step_rows: 256,
            keep_cache: false,
            precision: Precision::F32,
            isa: None,
        }
    }
}

impl EngineOptions {
    /// Returns the number of bytes that the engine may use.
    pub fn budget(&self) -> u64 {
        let free = available_memory().unwrap_or(u64::MAX);
        if self.memory_mb == 0 {
            free
        } else {
            free.min((self.memory_mb as u64).saturating_mul(1 << 20))
        }
    }

    /// Returns the number of threads to start.
    pub(crate) fn threads(&self) -> usize {
        let found = std::thread::available_parallelism().map_or(1, |n| n.get());
        if self.threads == 0 { found } else { self.threads }
    }

    /// Creates the thread pool and kernels.
    ///
    /// # Errors
    /// Returns an error if the processor lacks the requested instruction set.
    pub(crate) fn compute(&self) -> Result<Compute, EngineError> {
        let isa = self.isa.unwrap_or_else(Isa::detect);
        if !Isa::available().contains(&isa) {
            return Err(EngineError::Options(format!(
                "engine.isa = {isa:?}, but this processor supports {:?}; omit the key to use the \
                 best",
                Isa::available()
            )));
        }
        Ok(Compute::with_isa(self.threads(), isa, self.precision))
    }
}
