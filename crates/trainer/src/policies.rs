//! The policies of a run: the models that agents sample from, and the models that learn.
//!
//! A policy is trained or frozen. Each trained policy has its own learner, optimizer, reference,
//! critic and versions, and its own part of every plan (`PolicyPlan`). It learns from the segments
//! with its name, with the same bits as if it were the only policy (`tests/trainer/policies.rs`).
//! Segments of other policies are context to it: they are not targets, do not age a group, and are
//! in a batch only if a sequence of the policy goes through them. A group in which only other
//! policies acted does not count for a policy.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_policy::{Learner, Sampler, update_sampler_weights};
use levade_recipe::{EngineKeys, Phase, RlKeys};

use crate::TrainerError;

/// Writes the files of a model directory other than the weights (tokenizer, chat template) into a
/// checkpoint.
pub type Companions = Arc<dyn Fn(&Path) -> io::Result<()> + Send + Sync>;

/// A policy of a run.
#[derive(Clone)]
pub struct Policy {
    /// Name in the recipe.
    pub name: String,
    /// Sampler of completions. For a trained policy, it uses the weights that the learner
    /// publishes.
    pub sampler: Arc<dyn Sampler>,
    /// Context size: maximum length of a sequence, in tokens.
    pub context: usize,
    /// Learner and critic. `None` if the policy is frozen.
    pub learns: Option<Learns>,
}

/// The models of a trained policy.
#[derive(Clone)]
pub struct Learns {
    /// The model that is trained. It starts with the weights of the policy's model.
    pub learner: Arc<dyn Learner>,
    /// A second model with the same initial weights, for phases with a KL penalty.
    pub reference: Option<Arc<dyn Learner>>,
    /// A third model with a value head, for phases whose advantage estimator needs a critic.
    pub critic: Option<Arc<dyn Learner>>,
    /// Adds the remaining files of a model directory to a checkpoint.
    pub companions: Companions,
}

/// The models that execute a plan.
#[derive(Clone, Copy)]
pub(crate) struct Models<'a> {
    /// The learner of the policy.
    pub policy: &'a dyn Learner,
    /// The frozen reference, if the loss has a KL penalty.
    pub reference: Option<&'a dyn Learner>,
    /// The critic, if the advantage estimator needs one.
    pub critic: Option<&'a dyn Learner>,
}

impl Policy {
    /// Adds the recipe's timeouts to every call.
    fn timely(self, engine: &EngineKeys) -> Self {
        let learns = self.learns.map(|learns| Learns {
            learner: engine.learner(learns.learner),
            reference: learns.reference.map(|reference| engine.learner(reference)),
            critic: learns.critic.map(|critic| engine.learner(critic)),
            companions: learns.companions,
        });
        Policy { sampler: engine.sampler(self.sampler), learns, ..self }
    }
}

impl Learns {
    /// Restores all models: loads those that the checkpoint contains at `place`, and resets the
    /// remaining ones to their initial weights, because a remote learner may have trained before.
    pub(crate) async fn recall(&self, place: Option<&Path>) -> Result<(), TrainerError> {
        match place {
            Some(place) => self.learner.load(place, true).await?,
            None => self.learner.reset().await?,
        }
        if let Some(critic) = &self.critic {
            match place.map(|place| place.join(CRITIC)).filter(|place| place.is_dir()) {
                Some(place) => critic.load(&place, true).await?,
                None => critic.reset().await?,
            }
        }
        if let Some(reference) = &self.reference {
            reference.reset().await?;
        }
        Ok(())
    }

    /// Returns the models that a phase uses.
    pub(crate) fn models(&self, phase: &Phase) -> Models<'_> {
        let needs = |needs: fn(&RlKeys) -> bool| matches!(phase, Phase::Rl(keys) if needs(keys));
        Models {
            policy: &*self.learner,
            reference: self.reference.as_deref().filter(|_| needs(RlKeys::needs_reference)),
            critic: self.critic.as_deref().filter(|_| needs(RlKeys::needs_critic)),
        }
    }
}

/// All policies of a run.
#[derive(Clone)]
pub(crate) struct Policies {
    /// All policies. Trained policies come first.
    all: Vec<Policy>,
    /// Timeout for samplers to load new weights.
    longest: Duration,
}

impl Policies {
    /// Creates the policies, with the recipe's timeouts on every call.
    pub fn new(policies: Vec<Policy>, engine: &EngineKeys) -> Self {
        let mut policies: Vec<Policy> = policies.into_iter().map(|policy| policy.timely(engine)).collect();
        policies.sort_by_key(|policy| policy.learns.is_none());
        Policies { all: policies, longest: engine.max_call_timeout() }
    }

    /// Returns the trained policies with their names, in order.
    pub fn trained(&self) -> impl Iterator<Item = (&str, &Learns)> {
        self.all.iter().filter_map(|policy| Some((policy.name.as_str(), policy.learns.as_ref()?)))
    }

    /// Returns the trained policies among `names`, in order.
    pub fn among<'a>(&'a self, names: &'a [String]) -> impl Iterator<Item = (&'a str, &'a Learns)> {
        self.trained().filter(|(name, _)| names.iter().any(|among| among == name))
    }

    /// Returns the policy with this name.
    pub fn get(&self, name: &str) -> Option<&Policy> {
        self.all.iter().find(|policy| policy.name == name)
    }

    /// Returns the models of a trained policy.
    ///
    /// # Errors
    /// Returns an error if the policy does not exist or is not trained.
    pub fn learns(&self, name: &str) -> Result<&Learns, TrainerError> {
        let learns = self.get(name).and_then(|policy| policy.learns.as_ref());
        learns.ok_or_else(|| TrainerError::NoPart(format!("the learner of the policy {name}")))
    }

    /// Publishes the weights of a policy as `version`, and waits until its samplers have loaded
    /// them.
    ///
    /// # Errors
    /// Returns an error if the learner fails, or if a sampler does not load the weights in time.
    /// The error names the sampler.
    pub async fn publish(&self, name: &str, version: u64) -> Result<(), TrainerError> {
        let weights = self.learns(name)?.learner.publish(version).await?;
        let samplers =
            self.get(name).map(|policy| (format!("the sampler of {name}"), policy.sampler.clone()));
        Ok(update_sampler_weights(samplers.into_iter().collect(), &weights, self.longest).await?)
    }

    /// Returns the context size of a policy, in tokens. 0 if the policy does not exist.
    pub fn context(&self, name: &str) -> usize {
        self.get(name).map_or(0, |policy| policy.context)
    }

    /// Returns the directory of a policy's weights in a checkpoint. The first trained policy uses
    /// the checkpoint directory itself, so that the checkpoint is a model directory.
    pub fn place(&self, checkpoint: &Path, name: &str) -> PathBuf {
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
/// Name of the directory of further policies in a checkpoint.
pub(crate) const POLICIES: &str = "policies";
