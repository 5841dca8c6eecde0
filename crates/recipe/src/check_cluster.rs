//! Checks the external learner and the placement: keys that must be set together, and keys that
//! exclude each other.

use std::path::Path;

use super::RecipeError;
use super::check::{Checker, display_url, is_http};
use super::cluster::{InFlightKey, LearnerKeys, Placement, TorchKeys};
use super::keys::{Phase, Recipe};

impl Checker<'_> {
    /// Checks the keys of `[cluster.learner]`.
    pub(super) fn check_learner(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let Some(LearnerKeys::Torch(keys)) = &recipe.cluster.learner else { return Ok(()) };
        let key = |name: &str| format!("cluster.learner.{name}");
        let quoted = |text: &str| format!("\"{text}\"");
        let has_url = !keys.url.is_empty();
        self.check(
            has_url != keys.start,
            key("start"),
            keys.start,
            "true (the run starts the group), unless `url` is set (the group already runs)",
        )?;
        let range = "an address with http:// or https://, without a user name";
        let fits = !has_url || (is_http(&keys.url) && !keys.url.contains('@'));
        self.check(fits, key("url"), display_url(&keys.url), range)?;
        let has_token = !keys.token_env.is_empty();
        let range = "the name of the environment variable with the group's token if `url` is set, \
                     and left out otherwise";
        self.check(has_url == has_token, key("token_env"), quoted(&keys.token_env), range)?;
        let defaults = TorchKeys::default();
        for (name, is_set) in [
            ("python", keys.python != defaults.python),
            ("threads", keys.threads != defaults.threads),
            ("args", keys.args != defaults.args),
            ("environment", keys.environment != defaults.environment),
        ] {
            let range = "left out if `url` is set: only a group that the run starts uses it";
            self.check(!(has_url && is_set), key(name), "set", range)?;
        }
        self.check_interpreter(key("python"), &keys.python)?;
        let group_size = keys.processes_per_node().saturating_mul(keys.nodes);
        let parallel_size = keys.tp.saturating_mul(keys.cp).saturating_mul(keys.pp);
        self.check(
            group_size.is_multiple_of(parallel_size),
            key("processes"),
            keys.processes_per_node(),
            format!(
                "such that the {group_size} processes of the group are a multiple of `tp` × `cp` × \
                 `pp` = {parallel_size}, the number of processes that share a sequence"
            ),
        )?;
        self.check(
            keys.gpus == 0 || keys.processes_per_node() <= keys.gpus,
            key("processes"),
            keys.processes_per_node(),
            format!("at most the {} GPUs of a machine", keys.gpus),
        )?;
        self.check(
            keys.ep == 1
                || keys.ep.is_multiple_of(keys.tp)
                    && (group_size / keys.pp).is_multiple_of(keys.ep),
            key("ep"),
            keys.ep,
            format!(
                "a multiple of `tp` = {}, and a divisor of the {} processes of a pipeline stage",
                keys.tp,
                group_size / keys.pp
            ),
        )?;
        let adapters = recipe.has_adapter();
        for (name, value) in [("tp", keys.tp), ("ep", keys.ep)] {
            let range = "1 if an adapter is trained (`model.lora`): its ranks share a base model \
                         only by FSDP2 and `cp`";
            self.check(value == 1 || !adapters, key(name), value, range)?;
        }
        self.check_learner_args(keys)?;
        self.check_one_trained_policy(
            recipe,
            "cluster.learner",
            "left out unless the recipe trains exactly one policy: a group can train only one",
        )
    }

    /// Checks, if learner and samplers are colocated, that both can share the same devices.
    pub(super) fn check_placement(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let cluster = &recipe.cluster;
        if cluster.placement == Placement::Disaggregated {
            return Ok(());
        }
        let key = "cluster.placement";
        let value = "\"colocated\"";
        self.check(
            cluster.learner.is_some(),
            key,
            value,
            "\"disaggregated\"; or set a `cluster.learner` of kind \"torch\": the embedded engine \
             trains on CPUs, and has no devices to share",
        )?;
        let Some(samplers) = &cluster.samplers else {
            let range = "\"disaggregated\"; or set `cluster.samplers`: its servers sleep while the \
                         learner trains";
            return self.check(false, key, value, range);
        };
        for (i, phase) in recipe.phase.iter().enumerate() {
            let Phase::Rl(keys) = phase else { continue };
            self.check(
                keys.staleness == 0,
                format!("phase.{i}.staleness"),
                keys.staleness,
                "0 with `cluster.placement` \"colocated\": attempts cannot run ahead while the \
                 learner uses the devices; leave it out, or set `cluster.placement` to \
                 \"disaggregated\"",
            )?;
        }
        let keys = samplers.servers();
        self.check(
            keys.in_flight == InFlightKey::Recompute,
            "cluster.samplers.in_flight",
            "\"keep\"",
            "\"recompute\" with `cluster.placement` \"colocated\": sleeping servers lose their KV \
             cache",
        )?;
        self.check(
            keys.urls_file.as_os_str().is_empty(),
            "cluster.samplers.urls_file",
            keys.urls_file.display(),
            "left out with `cluster.placement` \"colocated\": a server that joins while the \
             learner trains would occupy its devices; name servers in `urls`, or let the run start \
             them (`start`, `count`)",
        )?;
        self.check(
            !recipe.has_adapter(),
            key,
            value,
            "\"disaggregated\" if an adapter is trained (`model.lora`): sleeping servers lose its \
             base model",
        )
    }

    /// Checks that a recipe trains exactly one policy, which the table `key` of the cluster
    /// requires. `range` describes the requirement in the error.
    pub(super) fn check_one_trained_policy(
        &self,
        recipe: &Recipe,
        key: &str,
        range: &str,
    ) -> Result<(), RecipeError> {
        let trained = recipe.trained_policies().len();
        self.check(trained == 1, key, format!("set, and {trained} policies are trained"), range)
    }

    /// Checks that the key `key` names a Python interpreter.
    pub(super) fn check_interpreter(&self, key: String, python: &Path) -> Result<(), RecipeError> {
        self.check(!python.as_os_str().is_empty(), key, "empty", "a program or its path")
    }
}
