//! Checks external samplers: keys that must be set together, and keys that exclude each other.

use super::RecipeError;
use super::check::{Checker, display_url, is_http};
use super::cluster::{LearnerKeys, Placement, WeightsKey};
use super::keys::Recipe;

impl Checker<'_> {
    /// Checks the keys of `[cluster.samplers]`.
    pub(super) fn check_samplers(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let Some(samplers) = &recipe.cluster.samplers else { return Ok(()) };
        let keys = samplers.servers();
        let key = |name: &str| format!("cluster.samplers.{name}");
        let has_urls = !keys.urls.is_empty() || !keys.urls_file.as_os_str().is_empty();
        self.check(
            keys.start != has_urls,
            key("start"),
            keys.start,
            "true (the run starts the servers), unless `urls` or `urls_file` is set (the servers \
             already run)",
        )?;
        for (i, url) in keys.urls.iter().enumerate() {
            let range = "an address with http:// or https://, without a user name, and listed once";
            let once = !keys.urls[..i].contains(url);
            let fits = is_http(url) && once && !url.contains('@');
            self.check(fits, key(&format!("urls.{i}")), display_url(url), range)?;
        }
        self.check_server_args(samplers)?;
        // A server that uses all visible GPUs would also use the GPUs of the learner.
        let learner_takes_gpus = recipe.cluster.placement == Placement::Disaggregated
            && matches!(&recipe.cluster.learner, Some(LearnerKeys::Torch(keys)) if keys.start && keys.gpus > 0);
        self.check(
            !(keys.start && learner_takes_gpus) || keys.gpus > 0,
            key("gpus"),
            keys.gpus,
            "at least 1 with a learner that has GPUs (`cluster.learner.gpus`): servers get the \
             GPUs after the learner's; to use the same GPUs alternately, set `cluster.placement` \
             to \"colocated\"",
        )?;
        let quoted = "\"group\"";
        let uses_group = keys.weights == WeightsKey::Group;
        self.check(
            !uses_group || recipe.cluster.learner.is_some(),
            key("weights"),
            quoted,
            "\"folder\"; or set a `cluster.learner` of kind \"torch\": only its processes can join \
             a process group with servers",
        )?;
        self.check(
            !(uses_group && recipe.has_adapter()),
            key("weights"),
            quoted,
            "\"folder\" if an adapter is trained (`model.lora`): servers load adapters from a \
             directory",
        )?;
        self.check_interpreter(key("python"), &keys.python)?;
        self.check_one_trained_policy(
            recipe,
            "cluster.samplers",
            "left out unless the recipe trains exactly one policy: servers sample for only one",
        )
    }
}
