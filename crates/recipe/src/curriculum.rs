//! Keys of curricula: `[phase.curriculum]`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// `[phase.curriculum]`: how an RL phase selects its training tasks, by pool and by measured
/// success.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CurriculumKeys {
    /// Property that divides the tasks into pools: `source`, `kind`, or the name of a field in
    /// their rows. If empty, all tasks form one pool.
    pub pool_by: String,
    /// Sampling weight of each pool, by value of `pool_by`. If empty, every task is sampled equally
    /// often.
    pub weights: BTreeMap<String, f64>,
    /// Values of `pool_by` in the order of their stages. A pool is sampled while the gates of all
    /// earlier pools are open. If empty, all pools are sampled.
    pub stages: Vec<String>,
    /// Success rate in a pool at which its gate opens, in 0..=1. An open gate allows the next
    /// stage.
    pub gate: f64,
    /// Success rate in a pool below which its gate closes again, at most `gate`.
    pub back: f64,
    /// Minimum and maximum success rate of the tasks that are sampled. Tasks of medium success are
    /// sampled most often. `None` samples all tasks of a pool equally often.
    pub band: Option<[f64; 2]>,
    /// Fraction of the samples that measure tasks outside of `band` again, in 0..=1.
    pub retest: f64,
    /// Factor by which the weight of earlier attempts at a task is multiplied with each new group,
    /// in 0..=1 but not 1. If 0, only the newest group counts.
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
