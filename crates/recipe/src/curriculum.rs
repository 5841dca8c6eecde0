//! Keys of curricula: `[phase.curriculum]`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// `[phase.curriculum]`: which tasks an RL phase trains on, by pool and by measured success.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CurriculumKeys {
    /// Property that divides the tasks into pools: `source`, `kind`, or a field of their rows. All
    /// tasks are one pool if empty.
    pub pool_by: String,
    /// Weights with which the pools are sampled, by value of `pool_by`. If empty, every task is
    /// sampled equally often.
    pub weights: BTreeMap<String, f64>,
    /// Values of `pool_by` in the order of their stages. A pool is sampled while the gates of all
    /// earlier pools are open. If empty, all pools are sampled.
    pub stages: Vec<String>,
    /// Success in a pool at which its gate opens, in 0..=1.
    pub gate: f64,
    /// Success in a pool below which its gate closes again, at most `gate`.
    pub back: f64,
    /// Minimum and maximum success of the tasks that are sampled. Tasks of medium success are
    /// sampled most often. If not set, the tasks of a pool are sampled equally often.
    pub band: Option<[f64; 2]>,
    /// Fraction of the samples that measure tasks outside of the band again, in 0..=1.
    pub retest: f64,
    /// Weight of the earlier attempts at a task with each new group, in 0..=1 but not 1. 0 counts
    /// only the last group.
    pub memory: f64,
}

impl Default for CurriculumKeys {
    fn default() -> Self {
        CurriculumKeys {
            pool_by: String::new(),
            weights: BTreeMap::new(),
            stages: Vec::new(),
            gate: 0.7,
            back: 0.4,
            band: None,
            retest: 0.1,
            memory: 0.5,
        }
    }
}
