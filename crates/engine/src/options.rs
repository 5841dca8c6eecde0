//! How an engine is to run.

use levade_policy::LoraOptions;
use serde::{Deserialize, Serialize};

use crate::limits::available_memory;
use crate::precision::Precision;
use crate::simd::Isa;
use crate::{Compute, EngineError};

/// An adapter that is to be made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedAdapter {
    /// Form of the adapter.
    pub lora: LoraOptions,
    /// Whether it will be trained.
    pub learns: bool,
}

/// How to run a model. The defaults suit a small model on a laptop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineOptions {
    /// Threads; 0 takes one for every processor.
    pub threads: usize,
    /// Longest path in tokens; 0 takes the model's own context.
    pub context: usize,
    /// Packed tokens of a batch that go through the model at once; larger batches take several passes. 0 for
    /// an engine that is only sampled from.
    pub batch_tokens: usize,
    /// Whether it will be trained; if not, batches are only evaluated, and gradients refused.
    pub trains: bool,
    /// The adapters that there will be, for the memory plan; where there are any, the weights themselves are
    /// not trained.
    pub adapters: Vec<PlannedAdapter>,
    /// Whether there will be a value head, for the memory plan.
    pub critic: bool,
    /// Most memory to use, in MiB; 0 for what is free. Where it is short, training computes activations
    /// again.
    pub memory_mb: usize,
    /// Memory for keys and values of sampling, in MiB.
    pub kv_memory_mb: usize,
    /// Sequences sampled at the same time.
    pub running: usize,
    /// Rows of one sampling step: running sequences and chunks of prompts.
    pub step_rows: usize,
    /// Whether sequences that are being drawn keep their keys and values when the weights change. They then
    /// go on at once instead of being computed again, but what they draw from then on is not what training
    /// will find for it. Others start afresh in any case.
    pub keep_cache: bool,
    /// Rounding of the operands of products, keys and values included.
    pub precision: Precision,
    /// Vector instructions; the best there are by default.
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
    /// Bytes that the engine may take.
    pub fn budget(&self) -> u64 {
        let free = available_memory().unwrap_or(u64::MAX);
        if self.memory_mb == 0 { free } else { free.min((self.memory_mb as u64).saturating_mul(1 << 20)) }
    }

    /// Threads to start.
    pub(crate) fn threads(&self) -> usize {
        let found = std::thread::available_parallelism().map_or(1, |n| n.get());
        if self.threads == 0 { found } else { self.threads }
    }

    /// Where to compute.
    ///
    /// # Errors
    /// When the processor has not the instructions that are asked for.
    pub(crate) fn compute(&self) -> Result<Compute, EngineError> {
        let isa = self.isa.unwrap_or_else(Isa::detect);
        if !Isa::available().contains(&isa) {
            return Err(EngineError::Options(format!(
                "engine.isa = {isa:?}, but this processor runs {:?}; leave it out to take the best",
                Isa::available()
            )));
        }
        Ok(Compute::with(self.threads(), isa, self.precision))
    }
}
