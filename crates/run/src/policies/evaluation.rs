//! Policies of an evaluation outside of training: engines that only sample.

use std::collections::BTreeMap;

use levade_agent::environments::Environments;
use levade_recipe::{ClusterKeys, PolicyKeys, PolicyModel, Recipe};

use super::{StartedPolicies, start};
use crate::host::Host;

/// Starts the policies of a recipe as [`start`] does, but without training. Each policy of
/// `measured` has the weights of its model in this map, and the embedded engine samples. `now` is
/// the current time in chat templates, as a Unix timestamp in seconds.
///
/// # Errors
/// Returns the errors of [`start`].
pub async fn start_evaluation(
    recipe: &Recipe,
    measured: &BTreeMap<String, PolicyModel>,
    now: u64,
    environments: &Environments,
    host: &Host,
) -> anyhow::Result<StartedPolicies> {
    let mut frozen = recipe.clone();
    frozen.policy = recipe.policies().into_iter().collect();
    for (name, keys) in &mut frozen.policy {
        let own = match (measured.get(name), &*keys) {
            (Some(model), _) => model.clone(),
            (None, PolicyKeys::Trained(own)) => PolicyModel { lora: None, ..own.clone() },
            (None, _) => continue,
        };
        *keys = PolicyKeys::Frozen(own);
    }
    // References, critics, teachers and processes elsewhere are those of training.
    frozen.phase = Vec::new();
    frozen.cluster = ClusterKeys::default();
    start(&frozen, now, environments, host, &mut Vec::new()).await
}
