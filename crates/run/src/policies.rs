//! Starts the engines of a recipe's policies.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use levade_agent::environments::Environments;
use levade_agent::{PolicyPicker, Teacher};
use levade_engine::{Engine, EngineOptions, Fingerprint, PlannedAdapter};
use levade_policy::LoraOptions;
use levade_recipe::{AgentKeys, ModelKeys, Phase, PolicyKeys, Recipe, RlKeys};
use levade_remote::{Colocation, Mixture, RemoteLearner};
use levade_text::Chat;
use levade_tools::ToolSet;
use levade_trainer::{AgentSpec, ChatBackend, Policy, PolicyLearner, Toolboxes, chat_options};

use crate::child::ChildTask;
use crate::cluster_learner::{self, Handles, Requirements};
use crate::cluster_samplers;
use crate::external;
use crate::failure::unusable;
use crate::gpus::GpuAllocation;
use crate::host::Host;
use crate::model::{self, ResolvedModel};
use crate::programs;

mod evaluation;
mod planned;

pub use evaluation::start_evaluation;
pub use planned::{EnginePlan, PlannedModels};

/// Policies and agents of a recipe, after they have been started.
pub struct StartedPolicies {
    /// Policies of the recipe, trained or not.
    pub policies: Vec<Policy>,
    /// Agents of the recipe, each with the policies that play it.
    pub agents: Vec<AgentSpec>,
    /// Fingerprint of the properties on which the numerical results of the engines depend.
    pub fingerprint: Fingerprint,
    /// Paths of the files from which the models were read.
    pub model_files: Vec<PathBuf>,
    /// External policies that phases imitate, by their names.
    pub teachers: BTreeMap<String, Teacher>,
}

/// Model that one or more policies start from.
struct PlannedModel {
    keys: ModelKeys,
    found: ResolvedModel,
    /// Policies that start from the model. A trained policy contains the options of its adapter if
    /// it has an adapter.
    policies: Vec<PolicySpec>,
}

/// Specification of a policy that will be started.
struct PolicySpec {
    name: String,
    trained: bool,
    lora: Option<LoraOptions>,
    reference: bool,
    critic: bool,
    /// Pools of past versions of the policy, each with its name and its number of samplers.
    past: Vec<(String, usize)>,
    /// Whether an external learner trains the policy. The engine in this process then only samples
    /// from the policy.
    elsewhere: bool,
}

/// Starts the policies of a recipe: engines or adapters for sampling and training, and frozen
/// copies for penalties. First checks that the memory suffices, and reports the memory that the
/// engines take. `now` is the start of the run as a Unix timestamp in seconds.
///
/// Processes that this function starts, such as a learner and servers, are added to `children`,
/// even if a later step fails.
///
/// # Errors
/// Returns an error if a model cannot be fetched, if the options do not fit it, or if the memory
/// does not suffice.
pub async fn start(
    recipe: &Recipe,
    now: u64,
    environments: &Environments,
    host: &Host,
    children: &mut Vec<ChildTask>,
) -> anyhow::Result<StartedPolicies> {
    // Missing API keys are reported first, because the steps below can take minutes.
    let external_apis = external::create_external_apis(recipe)?;
    let planned = PlannedModels::open(recipe, host)?;
    planned.memory(recipe)?;
    let models = planned.into_models();
    let elsewhere = start_external_learner(recipe, &models, host, children).await?;
    let colocation = elsewhere
        .as_ref()
        .and_then(|elsewhere| cluster_samplers::colocation(recipe, elsewhere.group()));
    // With colocated devices, every user of the learner's devices waits for their handoff.
    let colocate = |learner| match &colocation {
        Some(colocation) => colocation.learner(learner),
        None => learner,
    };
    let mut policies = Vec::new();
    let mut fingerprint = None;
    let mut model_files = Vec::new();
    // Start the models in order: the memory of earlier models counts for later ones.
    for model in &models {
        let chat = model::chat(&model.found.files, chat_options(&recipe.agent, Some(now)))?;
        let started = model.start(recipe, &chat, host).await?;
        model_files.extend(model.found.list_read_files()?);
        let companions = model::create_extra_files(&model.found.files, &chat)?;
        for (wanted, engines) in model.policies.iter().zip(started) {
            let PolicyEngines { policy, reference, critic, past } = engines;
            fingerprint.get_or_insert_with(|| policy.fingerprint().clone());
            let learner = |engine: Engine| Arc::new(engine) as _;
            let mut policy = Policy {
                name: wanted.name.clone(),
                context: Engine::context(&policy),
                sampler: Arc::new(policy.clone()),
                learner: wanted.trained.then(|| {
                    match elsewhere.as_ref().filter(|_| wanted.elsewhere) {
                        Some(elsewhere) => PolicyLearner {
                            learner: colocate(elsewhere.policy()),
                            reference: wanted.reference.then(|| colocate(elsewhere.reference())),
                            critic: wanted.critic.then(|| colocate(elsewhere.critic())),
                            extra_files: companions.clone(),
                        },
                        None => PolicyLearner {
                            learner: Arc::new(policy),
                            reference: reference.map(learner),
                            critic: critic.map(learner),
                            extra_files: companions.clone(),
                        },
                    }
                }),
            };
            let group = elsewhere.as_ref().filter(|_| wanted.elsewhere).map(Handles::group);
            let of_group = (group, colocation.as_ref());
            start_external_samplers(
                recipe,
                model,
                wanted,
                &chat,
                of_group,
                &mut policy,
                (host, children),
            )
            .await?;
            let context = policy.context;
            policies.push(policy);
            let names = wanted.past.iter().flat_map(|(name, slots)| vec![name; *slots]);
            policies.extend(names.zip(past).map(|(name, engine)| Policy {
                name: name.clone(),
                sampler: Arc::new(engine),
                context,
                learner: None,
            }));
        }
    }
    let toolboxes = Toolboxes::new(&recipe.tool, host.supervisor().clone());
    let mut agents = Vec::new();
    for (name, keys) in recipe.agents() {
        let mut backends = Vec::new();
        let mut first = None;
        for policy in recipe.policy_names(keys) {
            if let Some(other) = external_apis.get(&policy) {
                backends.push(ChatBackend::Api(Arc::clone(other)));
                continue;
            }
            let weights_of = recipe.weight_source(&policy);
            let owner = models
                .iter()
                .find(|model| model.policies.iter().any(|wanted| wanted.name == weights_of));
            let nowhere =
                || unusable(format!("no model serves the policy {policy:?} of the agent {name:?}"));
            let files = &owner.ok_or_else(nowhere)?.found.files;
            let chat = Arc::new(model::chat(files, chat_options(keys, Some(now)))?);
            first.get_or_insert_with(|| Arc::clone(&chat));
            backends.push(ChatBackend::Policy(chat));
        }
        // External policies return messages, and have no tokenizer to count tokens with.
        let tools = match &first {
            Some(chat) => toolboxes.tools_for(keys, Some(chat))?,
            None => ToolSet::default(),
        };
        let pick = create_policy_picker(keys)?;
        let when = programs::create_call_pattern(name, keys)?;
        agents.push(AgentSpec {
            name: name.to_owned(),
            backends,
            pick,
            tools,
            when,
            user: None,
            custom: None,
        });
    }
    programs::replace_agent_loops(recipe, &mut agents, environments, host).await?;
    let fingerprint = fingerprint.ok_or_else(|| unusable("the recipe has no policy".to_owned()))?;
    let teachers = recipe.phase.iter().filter_map(Phase::teacher).filter_map(|name| {
        let teacher = Teacher::Api(Arc::clone(external_apis.get(name)?));
        Some((name.to_owned(), teacher))
    });
    let teachers = teachers.collect();
    Ok(StartedPolicies { policies, agents, fingerprint, model_files, teachers })
}

/// Starts the external learner of the trained policy. Returns `None` if the recipe has no external
/// learner.
async fn start_external_learner(
    recipe: &Recipe,
    models: &[PlannedModel],
    host: &Host,
    children: &mut Vec<ChildTask>,
) -> anyhow::Result<Option<Handles>> {
    for PlannedModel { keys, found, policies } in models {
        let Some(wanted) = policies.iter().find(|wanted| wanted.elsewhere) else { continue };
        let wants = Requirements {
            files: &found.files,
            context: keys.context.unwrap_or(found.files.config.context),
            lora: wanted.lora.as_ref(),
            reference: wanted.reference,
            critic: wanted.critic,
        };
        return cluster_learner::start(recipe, &wants, host, children).await;
    }
    Ok(None)
}

/// Replaces the sampler of a trained policy with servers if the recipe has servers.
async fn start_external_samplers(
    recipe: &Recipe,
    model: &PlannedModel,
    wanted: &PolicySpec,
    chat: &Chat,
    (group, colocation): (Option<&RemoteLearner>, Option<&Arc<Colocation>>),
    policy: &mut Policy,
    (host, children): (&Host, &mut Vec<ChildTask>),
) -> anyhow::Result<()> {
    let Some(learns) = &mut policy.learner else { return Ok(()) };
    let wants = cluster_samplers::Requirements {
        name: &wanted.name,
        files: &model.found.files,
        context: policy.context,
        lora: wanted.lora.as_ref(),
        chat,
        companions: &learns.extra_files,
        group,
        colocation,
        gpus: GpuAllocation::of(recipe),
    };
    let started =
        cluster_samplers::start(recipe, &wants, learns.learner.clone(), host, children).await?;
    let Some(cluster_samplers::Handles { sampler, learner }) = started else { return Ok(()) };
    policy.sampler = sampler;
    learns.learner = learner;
    Ok(())
}

/// Creates the picker that chooses the policy of an agent for an attempt. Returns `None` if the
/// agent has fewer than two policies. The picker chooses in proportion to the policies' weights, as
/// a function of the run's seed, the attempt's stream and the recorded name of the agent.
fn create_policy_picker(keys: &AgentKeys) -> anyhow::Result<Option<PolicyPicker>> {
    let policy_weights = keys.policy.weights();
    if policy_weights.len() < 2 {
        return Ok(None);
    }
    let mixture = Mixture::new(
        policy_weights
            .iter()
            .map(|policy_weight| (policy_weight.name.clone(), policy_weight.weight)),
    )?;
    let names: Vec<String> =
        policy_weights.iter().map(|policy_weight| policy_weight.name.clone()).collect();
    Ok(Some(Arc::new(move |seed, stream, role| {
        let picked = mixture.pick_policy(seed, stream, role);
        names.iter().position(|name| name == picked).unwrap_or(0)
    })))
}

/// Opens the models of a recipe, each with its policies. The order of the models is the order of
/// their first policies.
fn open_models(recipe: &Recipe, host: &Host) -> anyhow::Result<Vec<PlannedModel>> {
    let mut models: Vec<PlannedModel> = Vec::new();
    for (name, keys) in recipe.policies() {
        let Some(own) = keys.model(&recipe.model) else { continue };
        let trains = |phase: &&Phase| recipe.trained_policies_in(phase).contains(&name);
        let needs = |needs: fn(&RlKeys) -> bool| {
            recipe
                .phase
                .iter()
                .filter(trains)
                .any(|phase| matches!(phase, Phase::Rl(keys) if needs(keys)))
        };
        let pools = recipe.past_policies().filter(|(_, keys)| keys.of == name);
        let wanted = PolicySpec {
            past: pools.map(|(pool, keys)| (pool.to_owned(), keys.keep as usize)).collect(),
            trained: matches!(keys, PolicyKeys::Trained(_)),
            lora: own.lora.clone(),
            reference: needs(RlKeys::needs_reference),
            critic: needs(RlKeys::needs_critic),
            elsewhere: recipe.cluster.learner.is_some() && matches!(keys, PolicyKeys::Trained(_)),
            name,
        };
        let key = ModelKeys { lora: None, ..own };
        if let Some(model) = models.iter_mut().find(|model| model.keys == key) {
            model.policies.push(wanted);
            continue;
        }
        let found = model::open(&key.source, key.base.as_deref(), host)?;
        host.setup("model", format!("{}: {}", key.source, model::describe(&found.files)));
        models.push(PlannedModel { keys: key, found, policies: vec![wanted] });
    }
    Ok(models)
}

/// Engine options of a policy that shares no weights with other policies, with a description of the
/// memory of its reference and critic.
struct FullModelPlan {
    policy: EngineOptions,
    reference: Option<EngineOptions>,
    critic: Option<EngineOptions>,
    /// Engine options of each past version.
    past: Vec<EngineOptions>,
    also: String,
}

impl PolicySpec {
    /// Returns whether the engine in this process only samples from the policy.
    fn only_samples(&self) -> bool {
        !self.trained || self.elsewhere
    }

    /// Returns the total number of past versions in all pools of the policy.
    fn num_past(&self) -> usize {
        self.past.iter().map(|(_, slots)| slots).sum()
    }
}

/// Engines that sample from a policy and train it.
struct PolicyEngines {
    policy: Engine,
    reference: Option<Engine>,
    critic: Option<Engine>,
    /// Engines of past versions, in the order of the policy's pools.
    past: Vec<Engine>,
}

impl PlannedModel {
    /// Starts the engines of this model's policies, in order.
    async fn start(
        &self,
        recipe: &Recipe,
        chat: &Chat,
        host: &Host,
    ) -> anyhow::Result<Vec<PolicyEngines>> {
        self.check_not_adapter()?;
        let mut started: BTreeMap<&str, PolicyEngines> = BTreeMap::new();
        let (full, adapter_policies) = self.split_by_adapter();
        // Policies with full weights start first, because the adapters get the remaining memory.
        for wanted in full {
            started.insert(
                &wanted.name,
                self.start_full(recipe, wanted, chat, host)?.with_value_head().await?,
            );
        }
        if !adapter_policies.is_empty() {
            self.start_adapters(recipe, &adapter_policies, (chat, host), &mut started).await?;
        }
        Ok(self.policies.iter().filter_map(|wanted| started.remove(wanted.name.as_str())).collect())
    }

    /// Starts the engines of a policy that shares no weights with other policies.
    fn start_full(
        &self,
        recipe: &Recipe,
        wanted: &PolicySpec,
        chat: &Chat,
        host: &Host,
    ) -> anyhow::Result<PolicyEngines> {
        let files = &self.found.files;
        let FullModelPlan { policy, reference, critic, past, also } =
            self.full_engine_options(recipe, wanted, None)?;
        let policy = model::start(files, &policy, Some(chat), &also, host)?;
        let start = |options: EngineOptions| Engine::start(files, &options, None);
        let reference = reference.map(start).transpose()?;
        let critic = critic.map(start).transpose()?;
        let past = past.iter().map(|options| model::start(files, options, Some(chat), "", host));
        let past = past.collect::<anyhow::Result<_>>()?;
        Ok(PolicyEngines { policy, reference, critic, past })
    }

    /// Returns the engine options of a policy that shares no weights with other policies. If
    /// `context` is set, it replaces the context of the recipe.
    fn full_engine_options(
        &self,
        recipe: &Recipe,
        wanted: &PolicySpec,
        context: Option<usize>,
    ) -> anyhow::Result<FullModelPlan> {
        let config = &self.found.files.config;
        let context = context.or(self.keys.context);
        let policy = model::options_without_cache(recipe, context, Vec::new(), config);
        let only_samples = wanted.only_samples();
        let policy = if only_samples {
            EngineOptions { trains: false, batch_tokens: 0, ..policy }
        } else {
            policy
        };
        // Only the policy's engine samples.
        let silent = EngineOptions { kv_memory_mb: 1, running: 1, step_rows: 1, ..policy.clone() };
        let frozen = EngineOptions { trains: false, ..silent.clone() };
        let silent = EngineOptions { critic: true, ..silent };
        let reference = (wanted.reference && !only_samples).then_some(frozen);
        let critic = (wanted.critic && !only_samples).then_some(silent);
        let past = vec![self.past_engine_options(&policy); wanted.num_past()];
        let mut also = String::new();
        let mut taken = 0u64;
        let copies = [(&reference, "the frozen copy"), (&critic, "the critic")];
        let copies =
            copies.into_iter().filter_map(|(options, name)| Some((options.as_ref()?, name)));
        for (options, name) in copies.chain(past.iter().map(|options| (options, "a past version")))
        {
            let total = Engine::plan(config, options)?.total();
            taken = taken.saturating_add(total);
            also += &format!(", and {} MiB for {name}", total.div_ceil(1 << 20));
        }
        let policy = if taken == 0 {
            policy
        } else {
            // The policy's engine gets the memory that the other engines leave.
            let remaining_mb = policy.budget().saturating_sub(taken) >> 20;
            EngineOptions { memory_mb: remaining_mb.max(1) as usize, ..policy }
        };
        let policy = model::with_cache(recipe, config, policy);
        Ok(FullModelPlan { policy, reference, critic, past, also })
    }

    /// Returns the engine options of a past version of a policy that shares no weights with other
    /// policies. The KV cache has room for a fraction of the policy's sequences, and for at least
    /// one sequence of the full context.
    fn past_engine_options(&self, policy: &EngineOptions) -> EngineOptions {
        let config = &self.found.files.config;
        let options = EngineOptions { trains: false, batch_tokens: 0, ..policy.clone() };
        // A small budget gives a small cache.
        let small = EngineOptions { memory_mb: 1, ..options.clone() };
        EngineOptions { kv_memory_mb: model::default_cache_mb(config, &small), ..options }
    }

    /// Returns the options of the engine that all policies over the model's original weights share.
    fn base_engine_options(
        &self,
        recipe: &Recipe,
        policies: &[&PolicySpec],
        context: Option<usize>,
    ) -> EngineOptions {
        let mut adapters = Vec::new();
        for wanted @ PolicySpec { lora, reference, critic, .. } in policies {
            let frozen = self.found.adapter.as_ref().map(|(lora, _)| lora);
            let Some(lora) = lora.as_ref().or(frozen) else { continue };
            let past = std::iter::repeat_n((true, false), wanted.num_past());
            let learns = !wanted.only_samples();
            let all = [(true, learns), (*reference && learns, false), (*critic && learns, true)];
            let planned = |(_, learns)| PlannedAdapter { lora: lora.clone(), learns };
            adapters.extend(all.into_iter().chain(past).filter(|(needed, _)| *needed).map(planned));
        }
        let trains = adapters.iter().any(|adapter| adapter.learns);
        let config = &self.found.files.config;
        let context = context.or(self.keys.context);
        let options = model::options_without_cache(recipe, context, adapters, config);
        let critic = policies.iter().any(|wanted| wanted.critic && !wanted.elsewhere);
        let batch_tokens = if trains { options.batch_tokens } else { 0 };
        model::with_cache(recipe, config, EngineOptions { trains, critic, batch_tokens, ..options })
    }

    /// Splits the policies into policies with weights of their own, and policies over the model's
    /// original weights. A policy with past versions that are not adapters has its own weights.
    fn split_by_adapter(&self) -> (Vec<&PolicySpec>, Vec<&PolicySpec>) {
        let has_own = |wanted: &&PolicySpec| {
            let no_adapter = wanted.lora.is_none() && self.found.adapter.is_none();
            no_adapter && (wanted.trained || !wanted.past.is_empty())
        };
        self.policies.iter().partition(has_own)
    }

    /// Checks that the recipe does not train a model that is an adapter.
    fn check_not_adapter(&self) -> anyhow::Result<()> {
        if self.found.adapter.is_some() && self.policies.iter().any(|wanted| wanted.trained) {
            return Err(unusable(format!(
                "{} contains an adapter; merge it into its base with `levade merge`, and train \
                 the result",
                self.found.path.display()
            )));
        }
        Ok(())
    }

    /// Starts the policies that share the model's original weights: the adapters over these
    /// weights, and the frozen policies that use the weights unchanged.
    async fn start_adapters<'a>(
        &self,
        recipe: &Recipe,
        policies: &[&'a PolicySpec],
        (chat, host): (&Chat, &Host),
        started: &mut BTreeMap<&'a str, PolicyEngines>,
    ) -> anyhow::Result<()> {
        let options = self.base_engine_options(recipe, policies, None);
        let engine = if options.trains {
            model::start(&self.found.files, &options, Some(chat), "", host)?
        } else {
            model::start_sampling(&self.found, &options, Some(chat), host).await?
        };
        let seed = recipe.run.seed;
        let source = &self.keys.source;
        for wanted @ PolicySpec { name, lora, reference, critic, elsewhere, .. } in policies {
            let Some(lora) = lora else {
                let mut past = Vec::with_capacity(wanted.num_past());
                if let Some((lora, base)) = &self.found.adapter {
                    for _ in 0..wanted.num_past() {
                        past.push(engine.lora(lora.clone(), seed, base).await?);
                    }
                }
                let (reference, critic) = (None, None);
                let engines = PolicyEngines { policy: engine.clone(), reference, critic, past };
                started.insert(name, engines);
                continue;
            };
            let policy = engine.lora(lora.clone(), seed, source).await?;
            let other = async |needed| {
                if needed {
                    engine.lora(lora.clone(), seed, source).await.map(Some)
                } else {
                    Ok(None)
                }
            };
            let here = |needed: bool| needed && !elsewhere;
            let reference = other(here(*reference)).await?;
            let critic = other(here(*critic)).await?;
            let mut past = Vec::with_capacity(wanted.num_past());
            for _ in 0..wanted.num_past() {
                past.push(engine.lora(lora.clone(), seed, source).await?);
            }
            let engines = PolicyEngines { policy, reference, critic, past };
            started.insert(name, engines.with_value_head().await?);
        }
        Ok(())
    }
}

impl PolicyEngines {
    async fn with_value_head(self) -> anyhow::Result<Self> {
        if let Some(critic) = &self.critic {
            critic.add_value_head().await?;
        }
        Ok(self)
    }
}
