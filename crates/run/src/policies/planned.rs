//! The models of a recipe, opened but not started: their descriptions, and the memory that their
//! engines will take.

use std::fmt::Write as _;

use levade_engine::{Engine, MemoryPlan};
use levade_model::ModelFiles;
use levade_recipe::Recipe;

use super::{FullModelPlan, PlannedModel, open_models};
use crate::failure::unusable;
use crate::host::Host;
use crate::model;

/// Minimum of the values of `model.context` and `engine.micro_batch_tokens` that an error proposes,
/// in tokens.
const MIN_PROPOSED: usize = 128;

/// Models of a recipe that are opened, but whose engines are not started.
pub struct PlannedModels(Vec<PlannedModel>);

/// Memory plan of one engine of a run.
pub struct EnginePlan {
    /// Role of the engine: `reference`, `critic`, or `past version`. Empty for the policy's own
    /// engine.
    pub what: &'static str,
    /// Memory that the engine will take, by purpose.
    pub plan: MemoryPlan,
    /// Number of bytes that the engines of earlier models leave for this engine.
    available: u64,
}

impl PlannedModels {
    /// Opens the models of a recipe. Models that are not on this machine are downloaded.
    ///
    /// # Errors
    /// Returns an error if a model cannot be downloaded or read.
    pub fn open(recipe: &Recipe, host: &Host) -> anyhow::Result<Self> {
        let models = open_models(recipe, host)?;
        models.iter().try_for_each(PlannedModel::check_not_adapter)?;
        Ok(PlannedModels(models))
    }

    /// Returns the opened models.
    pub(super) fn into_models(self) -> Vec<PlannedModel> {
        self.0
    }

    /// Returns the source of each model with a description of the model.
    pub fn describe_models(&self) -> impl Iterator<Item = (&str, String)> {
        self.0.iter().map(|model| (model.keys.source.as_str(), model::describe(&model.found.files)))
    }

    /// Returns the files of the model that a policy starts from. Returns `None` if there is no such
    /// policy.
    pub fn policy_files(&self, policy: &str) -> Option<&ModelFiles> {
        let is_of =
            |model: &&PlannedModel| model.policies.iter().any(|wanted| wanted.name == policy);
        self.0.iter().find(is_of).map(|model| &model.found.files)
    }

    /// Returns the maximum sequence length that every model supports, in tokens.
    pub fn context(&self) -> usize {
        self.0.iter().map(PlannedModel::context).min().unwrap_or(0)
    }

    /// Returns the maximum sequence length of a policy, in tokens. Returns `None` if there is no
    /// such policy.
    pub fn policy_context(&self, policy: &str) -> Option<usize> {
        let is_of =
            |model: &&PlannedModel| model.policies.iter().any(|wanted| wanted.name == policy);
        self.0.iter().find(is_of).map(PlannedModel::context)
    }

    /// Returns the memory that each engine of a run will take.
    ///
    /// # Errors
    /// Returns an error if the options do not fit a model. If the memory is not sufficient, the
    /// error proposes values of recipe keys with which the run fits.
    pub fn memory(&self, recipe: &Recipe) -> anyhow::Result<Vec<MemoryPlan>> {
        let plans = self.plans(recipe, None)?;
        if plans_fit(&plans) {
            return Ok(plans.into_iter().map(|one| one.plan).collect());
        }
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let total = plans.iter().fold(0u64, |total, one| total.saturating_add(one.plan.total()));
        let mut text = format!("the run takes at least {} MiB of memory: ", mib(total));
        for (i, EnginePlan { what, plan, .. }) in plans.iter().enumerate() {
            let owner = if what.is_empty() { "model" } else { what };
            let _ = write!(text, "{}{owner} {plan}", if i > 0 { "; " } else { "" });
        }
        let allowed = plans.iter().map(|one| one.available).max().unwrap_or_default();
        let _ = write!(text, "\nOnly {} MiB may be used. ", allowed >> 20);
        let smaller = self.propose_smaller_values(recipe);
        if smaller.is_empty() {
            text += "No smaller `model.context` or `engine.micro_batch_tokens` suffices: use a \
                     smaller model, or train an adapter (`model.lora`). ";
        } else {
            let _ = write!(text, "The run would fit with {}. ", smaller.join(", or with "));
        }
        match self.find_min_memory_mb(recipe) {
            Some(min_memory_mb) => {
                let _ =
                    write!(text, "It would also fit with `engine.memory_mb = {min_memory_mb}`.");
            }
            None => text += "Or free memory on this machine.",
        }
        Err(unusable(text))
    }

    /// Proposes smaller values of recipe keys with which the run fits: the largest
    /// `engine.kv_memory_mb`, and the largest `model.context` and `engine.micro_batch_tokens` that
    /// repeated halving finds. Proposes each key by itself if that is sufficient, and otherwise
    /// both together.
    fn propose_smaller_values(&self, recipe: &Recipe) -> Vec<String> {
        let context = self.context();
        let halves = |from: usize| {
            let halved = std::iter::successors(Some(from / 2), |value| Some(value / 2));
            halved.take_while(|value| *value >= MIN_PROPOSED)
        };
        let fits = |context: Option<usize>, batch: Option<usize>| {
            let mut changed = recipe.clone();
            changed.engine.micro_batch_tokens = batch.unwrap_or(recipe.engine.micro_batch_tokens);
            self.plans(&changed, context).is_ok_and(|plans| plans_fit(&plans))
        };
        let context_key = |value: usize| format!("`model.context = {value}`");
        let batch_key = |value: usize| format!("`engine.micro_batch_tokens = {value}`");
        let batches = || halves(recipe.engine.micro_batch_tokens);
        let single_changes = [
            halves(context).find(|value| fits(Some(*value), None)).map(context_key),
            batches().find(|value| fits(None, Some(*value))).map(batch_key),
        ];
        let cache = self.find_max_kv_memory_mb(recipe);
        let cache = cache.map(|value| format!("`engine.kv_memory_mb = {value}`"));
        let found = cache.into_iter().chain(single_changes.into_iter().flatten());
        let found: Vec<String> = found.collect();
        if !found.is_empty() {
            return found;
        }
        let both = halves(context).find_map(|context| {
            let batch = batches().find(|batch| fits(Some(context), Some(*batch)))?;
            Some(format!("{} and {}", context_key(context), batch_key(batch)))
        });
        both.into_iter().collect()
    }

    /// Returns the maximum `engine.kv_memory_mb` with which the run fits. Returns `None` if the
    /// recipe does not set this key, or if no smaller value is sufficient.
    fn find_max_kv_memory_mb(&self, recipe: &Recipe) -> Option<usize> {
        let fits = |kv_memory_mb: usize| {
            let mut changed = recipe.clone();
            changed.engine.kv_memory_mb = kv_memory_mb;
            self.plans(&changed, None).is_ok_and(|plans| plans_fit(&plans))
        };
        let (mut enough, mut over) = (1, recipe.engine.kv_memory_mb);
        if over <= enough || !fits(enough) {
            return None;
        }
        while enough + 1 < over {
            let middle = enough + (over - enough) / 2;
            if fits(middle) { enough = middle } else { over = middle }
        }
        Some(enough)
    }

    /// Returns the minimum `engine.memory_mb` with which the run fits. Returns `None` if no larger
    /// value is available on this machine.
    fn find_min_memory_mb(&self, recipe: &Recipe) -> Option<usize> {
        let fits = |memory_mb: usize| {
            let mut changed = recipe.clone();
            changed.engine.memory_mb = memory_mb;
            self.plans(&changed, None).is_ok_and(|plans| plans_fit(&plans))
        };
        let free =
            levade_engine::available_memory().map_or(1 << 30, |bytes| (bytes >> 20) as usize);
        let mut short = recipe.engine.memory_mb;
        let mut enough = free;
        if short == 0 || short >= enough || !fits(enough) {
            return None;
        }
        while short + 1 < enough {
            let middle = short + (enough - short) / 2;
            if fits(middle) { enough = middle } else { short = middle }
        }
        Some(enough)
    }

    /// Returns the memory plan of each engine of a run, whether or not the memory is available. If
    /// `context` is set, it replaces the context of every model.
    ///
    /// # Errors
    /// Returns an error if options do not fit a model.
    pub fn plans(
        &self,
        recipe: &Recipe,
        context: Option<usize>,
    ) -> anyhow::Result<Vec<EnginePlan>> {
        let mut plans: Vec<EnginePlan> = Vec::new();
        for model in &self.0 {
            let (full, adapter_policies) = model.split_by_adapter();
            let mut all = Vec::new();
            for wanted in full {
                let FullModelPlan { policy, reference, critic, past, .. } =
                    model.full_engine_options(recipe, wanted, context)?;
                let named = [("", Some(policy)), ("reference", reference), ("critic", critic)];
                all.extend(named.into_iter().filter_map(|(what, options)| Some((what, options?))));
                all.extend(past.into_iter().map(|options| ("past version", options)));
            }
            if !adapter_policies.is_empty() {
                all.push(("", model.base_engine_options(recipe, &adapter_policies, context)));
            }
            // The memory of a model's engines is not available to later models.
            let taken: u64 = plans.iter().map(|one| one.plan.total()).sum();
            for (what, options) in all {
                let plan = Engine::plan(&model.found.files.config, &options)?;
                plans.push(EnginePlan {
                    what,
                    plan,
                    available: options.budget().saturating_sub(taken),
                });
            }
        }
        Ok(plans)
    }
}

impl PlannedModel {
    /// Returns the maximum sequence length of the model, in tokens.
    fn context(&self) -> usize {
        self.keys.context.unwrap_or(self.found.files.config.context)
    }
}

/// Returns whether the plan of every engine fits into its available memory.
fn plans_fit(plans: &[EnginePlan]) -> bool {
    plans.iter().all(|EnginePlan { plan, available, .. }| plan.total() <= *available)
}
