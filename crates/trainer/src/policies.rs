//! The policies of a run: the models that agents sample from, and the models that learn.
//!
//! A policy is trained or frozen. Each trained policy has its own learner, optimizer, reference,
//! critic and versions, and its own part of every plan (`PolicyPlan`). A policy learns only from
//! the segments that it sampled, with the same bits as if it were the only policy
//! (`tests/trainer/policies.rs`). Segments of other policies are context: they are not targets, do
//! not count in the age of a group, and are in a batch only if a sequence of the policy contains
//! them. A group in which only other policies acted does not count for a policy.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_policy::{Learner, Sampler, update_sampler_weights};
use levade_recipe::{EngineKeys, Phase, RlKeys};

use crate::TrainerError;

/// Function that writes the files of a model directory other than the weights, such as the
/// tokenizer and the chat template, into a checkpoint directory.
pub type ExtraFiles = Arc<dyn Fn(&Path) -> io::Result<()> + Send + Sync>;

/// A policy of a run: its sampler and, if it is trained, its learner.
#[derive(Clone)]
pub struct Policy {
    /// Name of the policy in the recipe. Each slot of a pool of past versions is a policy with the
    /// name of the pool.
    pub name: String,
    /// Sampler of completions. The sampler of a trained policy uses the weights that its learner
    /// publishes.
    pub sampler: Arc<dyn Sampler>,
    /// Context size: maximum length of a sequence, in tokens.
    pub context: usize,
    /// Models that train the policy. `None` if the policy is frozen.
    pub learner: Option<PolicyLearner>,
}

/// The models of a trained policy.
#[derive(Clone)]
pub struct PolicyLearner {
    /// The model that is trained. Its initial weights are those of the policy's model files.
    pub learner: Arc<dyn Learner>,
    /// Reference model with the same initial weights, for phases with a KL penalty. `None` if no
    /// phase needs a reference.
    pub reference: Option<Arc<dyn Learner>>,
    /// Critic: a model with a value head, for phases whose advantage estimator needs a critic.
    /// `None` if no phase needs a critic.
    pub critic: Option<Arc<dyn Learner>>,
    /// Writes the files of a model directory other than the weights into a checkpoint.
    pub extra_files: ExtraFiles,
}

/// The models that train one policy in a phase.
#[derive(Clone, Copy)]
pub(crate) struct PhaseModels<'a> {
    /// The learner of the policy.
    pub policy: &'a dyn Learner,
    /// The frozen reference model. `None` if the phase has no KL penalty.
    pub reference: Option<&'a dyn Learner>,
    /// The critic. `None` if the advantage estimator needs no critic.
    pub critic: Option<&'a dyn Learner>,
}

impl Policy {
    /// Wraps the policy's sampler and models so that every call has the recipe's timeouts.
    fn with_timeouts(self, engine: &EngineKeys) -> Self {
        let policy_learner = self.learner.map(|policy_learner| PolicyLearner {
            learner: engine.wrap_learner(policy_learner.learner),
            reference: policy_learner.reference.map(|reference| engine.wrap_learner(reference)),
            critic: policy_learner.critic.map(|critic| engine.wrap_learner(critic)),
            extra_files: policy_learner.extra_files,
        });
        Policy { sampler: engine.wrap_sampler(self.sampler), learner: policy_learner, ..self }
    }
}

impl PolicyLearner {
    /// Restores all models: loads the models that `checkpoint_dir` contains, and resets the other
    /// models to their initial weights. The reset is needed because a remote learner may have
    /// trained before.
    pub(crate) async fn restore(&self, checkpoint_dir: Option<&Path>) -> Result<(), TrainerError> {
        match checkpoint_dir {
            Some(checkpoint_dir) => self.learner.load(checkpoint_dir, true).await?,
            None => self.learner.reset().await?,
        }
        if let Some(critic) = &self.critic {
            match checkpoint_dir
                .map(|checkpoint_dir| checkpoint_dir.join(CRITIC))
                .filter(|checkpoint_dir| checkpoint_dir.is_dir())
            {
                Some(checkpoint_dir) => critic.load(&checkpoint_dir, true).await?,
                None => critic.reset().await?,
            }
        }
        if let Some(reference) = &self.reference {
            reference.reset().await?;
        }
        Ok(())
    }

    /// Returns the models that `phase` uses.
    pub(crate) fn models(&self, phase: &Phase) -> PhaseModels<'_> {
        let needs = |needs: fn(&RlKeys) -> bool| matches!(phase, Phase::Rl(keys) if needs(keys));
        PhaseModels {
            policy: &*self.learner,
            reference: self.reference.as_deref().filter(|_| needs(RlKeys::needs_reference)),
            critic: self.critic.as_deref().filter(|_| needs(RlKeys::needs_critic)),
        }
    }
}

/// All policies of a run.
#[derive(Clone)]
pub(crate) struct Policies {
    /// All policies of the run. Trained policies come first.
    all: Vec<Policy>,
    /// Timeout for a sampler to load new weights.
    call_timeout: Duration,
}

impl Policies {
    /// Creates the collection of a run's policies, and applies the recipe's timeouts to every call.
    pub fn new(policies: Vec<Policy>, engine: &EngineKeys) -> Self {
        let mut policies: Vec<Policy> =
            policies.into_iter().map(|policy| policy.with_timeouts(engine)).collect();
        policies.sort_by_key(|policy| policy.learner.is_none());
        Policies { all: policies, call_timeout: engine.max_call_timeout() }
    }

    /// Returns the trained policies with their names. The order is fixed.
    pub fn trained(&self) -> impl Iterator<Item = (&str, &PolicyLearner)> {
        self.all.iter().filter_map(|policy| Some((policy.name.as_str(), policy.learner.as_ref()?)))
    }

    /// Returns the trained policies whose names are among `names`. The order is fixed.
    pub fn trained_among<'a>(
        &'a self,
        names: &'a [String],
    ) -> impl Iterator<Item = (&'a str, &'a PolicyLearner)> {
        self.trained().filter(|(name, _)| names.iter().any(|among| among == name))
    }

    /// Returns the policy called `name`.
    pub fn get(&self, name: &str) -> Option<&Policy> {
        self.all.iter().find(|policy| policy.name == name)
    }

    /// Returns the samplers of the policy called `name`. A pool of past versions has one sampler
    /// for each slot. Any other policy has one sampler.
    pub fn samplers(&self, name: &str) -> impl Iterator<Item = Arc<dyn Sampler>> {
        self.all.iter().filter(move |policy| policy.name == name).map(|p| Arc::clone(&p.sampler))
    }

    /// Returns the learner and the further models of a trained policy.
    ///
    /// # Errors
    /// Returns an error if the policy does not exist or is not trained.
    pub fn policy_learner(&self, name: &str) -> Result<&PolicyLearner, TrainerError> {
        let policy_learner = self.get(name).and_then(|policy| policy.learner.as_ref());
        policy_learner
            .ok_or_else(|| TrainerError::MissingPart(format!("the learner of the policy {name}")))
    }

    /// Publishes the weights of a policy as `version`, and waits until its samplers have loaded
    /// them.
    ///
    /// # Errors
    /// Returns an error if the learner fails, or if a sampler does not load the weights in time.
    /// The error names the sampler.
    pub async fn publish(&self, name: &str, version: u64) -> Result<(), TrainerError> {
        let weights = self.policy_learner(name)?.learner.publish(version).await?;
        let samplers =
            self.get(name).map(|policy| (format!("the sampler of {name}"), policy.sampler.clone()));
        Ok(update_sampler_weights(samplers.into_iter().collect(), &weights, self.call_timeout)
            .await?)
    }

    /// Returns the context size of a policy in tokens, or 0 if the policy does not exist.
    pub fn context(&self, name: &str) -> usize {
        self.get(name).map_or(0, |policy| policy.context)
    }

    /// Returns the directory of a policy's weights in a checkpoint. The first trained policy uses
    /// the checkpoint directory itself, so that the checkpoint is a model directory.
    pub fn policy_dir(&self, checkpoint: &Path, name: &str) -> PathBuf {
        match self.trained().next() {
            Some((first, _)) if first == name => checkpoint.to_owned(),
            _ => checkpoint.join(POLICIES).join(name),
        }
    }
}

/// Name of the critic's directory, next to the policy's weights.
pub(crate) const CRITIC: &str = "critic";
/// Name of the directory of a reference with separate weights, next to the policy's weights.
pub(crate) const REFERENCE: &str = "reference";
/// Name of the directory that contains all policies of a checkpoint except the first.
pub(crate) const POLICIES: &str = "policies";
