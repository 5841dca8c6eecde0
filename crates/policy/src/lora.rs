//! Options of low-rank adapters (LoRA).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Options of a low-rank adapter (Hu et al. 2021): a linear map W x becomes W x + (alpha / rank) B
/// A x, and only A and B are trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraOptions {
    /// Rank of the adapter: the number of rows of A and of columns of B.
    pub rank: usize,
    /// Numerator of the scale alpha / rank by which the adapter's output is multiplied.
    pub alpha: f32,
    /// Projections that get an adapter: `q_proj` in every block, or a longer suffix of the module
    /// path, such as `layers.0.self_attn.q_proj`.
    pub targets: Vec<String>,
    /// Whether the scale is alpha / √rank instead (rsLoRA, Kalajdzievski 2023).
    #[serde(alias = "rank_stabilised")]
    pub rank_stabilized: bool,
    /// Ranks that differ from `rank`, by a name as in `targets`. The longest matching name applies.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ranks: BTreeMap<String, usize>,
    /// Values of alpha that differ from `alpha`, by a name as in `targets`. The longest matching
    /// name applies.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub alphas: BTreeMap<String, f32>,
}

impl Default for LoraOptions {
    fn default() -> Self {
        let targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        LoraOptions {
            rank: 16,
            alpha: 32.0,
            targets: targets.map(str::to_owned).to_vec(),
            rank_stabilized: false,
            ranks: BTreeMap::new(),
            alphas: BTreeMap::new(),
        }
    }
}

impl LoraOptions {
    /// Returns whether `name` is the path `module` or a suffix of it that starts at a path
    /// component.
    pub fn matches_module(name: &str, module: &str) -> bool {
        module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }

    /// Returns the rank and alpha of the adapter on the module with the full path `module`, or
    /// `None` if the module gets no adapter.
    pub fn rank_and_alpha(&self, module: &str) -> Option<(usize, f32)> {
        fn lookup<T: Copy>(by_name: &BTreeMap<String, T>, module: &str) -> Option<T> {
            let named =
                by_name.iter().filter(|(name, _)| LoraOptions::matches_module(name, module));
            named.max_by_key(|(name, _)| name.len()).map(|(_, value)| *value)
        }
        let is_target = self.targets.iter().any(|target| Self::matches_module(target, module));
        is_target.then(|| {
            (
                lookup(&self.ranks, module).unwrap_or(self.rank),
                lookup(&self.alphas, module).unwrap_or(self.alpha),
            )
        })
    }

    /// Returns the scale by which the adapter's output B A x is multiplied.
    pub fn scale(&self, rank: usize, alpha: f32) -> f32 {
        if self.rank_stabilized {
            (f64::from(alpha) / (rank as f64).sqrt()) as f32
        } else {
            alpha / rank as f32
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_and_alpha_match_full_components_and_prefer_longest_name() {
        let options = LoraOptions {
            rank: 8,
            targets: vec!["q_proj".into(), "layers.1.mlp.up_proj".into()],
            ranks: [("q_proj".into(), 4), ("layers.1.self_attn.q_proj".into(), 2)].into(),
            alphas: [("up_proj".into(), 3.0)].into(),
            ..LoraOptions::default()
        };
        assert_eq!(options.rank_and_alpha("model.layers.0.self_attn.q_proj"), Some((4, 32.0)));
        assert_eq!(options.rank_and_alpha("model.layers.1.self_attn.q_proj"), Some((2, 32.0)));
        assert_eq!(options.rank_and_alpha("model.layers.1.mlp.up_proj"), Some((8, 3.0)));
        assert_eq!(options.rank_and_alpha("model.layers.11.mlp.up_proj"), None);
        assert_eq!(options.rank_and_alpha("model.layers.0.self_attn.eq_proj"), None);
        assert_eq!(options.scale(4, 6.0), 1.5);
        assert_eq!(LoraOptions { rank_stabilized: true, ..options }.scale(4, 6.0), 3.0);
    }
}
