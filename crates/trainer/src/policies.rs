//! The policies of a run: whom agents call, and which models of a trained policy learn.
//!
//! A policy is trained or frozen. Each trained policy has its own learner, optimizer, reference, critic and
//! versions, and its own part of every plan (`PolicyPlan`). It learns from the segments with its name, with
//! the same bits as if it were the only policy (`tests/trainer/policies.rs`). Segments of other policies are
//! context to it: they are not targets, do not age a group, and are in a batch only if a sequence of the
//! policy goes through them. A group in which only other policies acted does not count for a policy.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_policy::{Learner, Sampler, adopt_all};
use levade_recipe::{EngineKeys, Phase, RlKeys};

use crate::TrainerError;

/// Writes what a model folder needs beside the weights (tokenizer, chat template) into a checkpoint.
pub type Companions = Arc<dyn Fn(&Path) -> io::Result<()> + Send + Sync>;

/// A policy of a run.
#[derive(Clone)]
pub struct Policy {
    /// Name in the recipe.
    pub name: String,
    /// Samples replies; of a policy that is trained, from the weights that its learner publishes.
    pub sampler: Arc<dyn Sampler>,
    /// Longest sequence of the model, in tokens.
    pub context: usize,
    /// Learner and critic; `None` for a policy that is not trained.
    pub learns: Option<Learns>,
}

/// The models behind a policy that is trained.
#[derive(Clone)]
pub struct Learns {
    /// Holds the weights. It starts with those of the policy's model.
    pub learner: Arc<dyn Learner>,
    /// A second model for phases with a KL penalty, with the same weights.
    pub reference: Option<Arc<dyn Learner>>,
    /// A third, with a value head, for phases whose advantage needs a critic.
    pub critic: Option<Arc<dyn Learner>>,
    /// Completes a checkpoint to a model folder.
    pub companions: Companions,
}

/// Models that a plan is run with.
#[derive(Clone, Copy)]
pub(crate) struct Models<'a> {
    /// The policy.
    pub policy: &'a dyn Learner,
    /// The frozen reference, where the loss has a penalty.
    pub reference: Option<&'a dyn Learner>,
    /// The critic, where the advantage needs one.
    pub critic: Option<&'a dyn Learner>,
}

impl Policy {
    /// Bounds every call by the time that the recipe allows.
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
    /// Has all models hold what a checkpoint has of them at `place`, and the others what they began with: a
    /// learner elsewhere may have trained before.
    pub(crate) async fn recall(&self, place: Option<&Path>) -> Result<(), TrainerError> {
        match place {
            Some(place) => self.learner.load(place, true).await?,
            None => self.learner.begin_again().await?,
        }
        if let Some(critic) = &self.critic {
            match place.map(|place| place.join(CRITIC)).filter(|place| place.is_dir()) {
                Some(place) => critic.load(&place, true).await?,
                None => critic.begin_again().await?,
            }
        }
        if let Some(reference) = &self.reference {
            reference.begin_again().await?;
        }
        Ok(())
    }

    /// The models that a phase uses.
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
    /// Policies, those that are trained first.
    all: Vec<Policy>,
    /// Longest wait for samplers to adopt weights.
    longest: Duration,
}

impl Policies {
    /// The policies, no call of which takes longer than the recipe allows.
    pub fn new(policies: Vec<Policy>, engine: &EngineKeys) -> Self {
        let mut policies: Vec<Policy> = policies.into_iter().map(|policy| policy.timely(engine)).collect();
        policies.sort_by_key(|policy| policy.learns.is_none());
        Policies { all: policies, longest: engine.longest_call() }
    }

    /// Policies that are trained, by name, in order.
    pub fn trained(&self) -> impl Iterator<Item = (&str, &Learns)> {
        self.all.iter().filter_map(|policy| Some((policy.name.as_str(), policy.learns.as_ref()?)))
    }

    /// Policies of these names that are trained, in order.
    pub fn among<'a>(&'a self, names: &'a [String]) -> impl Iterator<Item = (&'a str, &'a Learns)> {
        self.trained().filter(|(name, _)| names.iter().any(|among| among == name))
    }

    /// The policy of this name.
    pub fn get(&self, name: &str) -> Option<&Policy> {
        self.all.iter().find(|policy| policy.name == name)
    }

    /// The models behind a policy that is trained.
    ///
    /// # Errors
    /// When there is no such policy, or nothing of it learns.
    pub fn learns(&self, name: &str) -> Result<&Learns, TrainerError> {
        let learns = self.get(name).and_then(|policy| policy.learns.as_ref());
        learns.ok_or_else(|| TrainerError::NoPart(format!("the learner of the policy {name}")))
    }

    /// Publishes the weights of a policy as `version`, and has its samplers adopt them.
    ///
    /// # Errors
    /// When the learner fails, or a sampler does not adopt them in time: which.
    pub async fn publish(&self, name: &str, version: u64) -> Result<(), TrainerError> {
        let weights = self.learns(name)?.learner.publish(version).await?;
        let samplers =
            self.get(name).map(|policy| (format!("the sampler of {name}"), policy.sampler.clone()));
        Ok(adopt_all(samplers.into_iter().collect(), &weights, self.longest).await?)
    }

    /// Longest sequence of a policy, in tokens.
    pub fn context(&self, name: &str) -> usize {
        self.get(name).map_or(0, |policy| policy.context)
    }

    /// Where the weights of a policy are in a checkpoint: those of the first that is trained are the folder
    /// itself, so that it is a model folder.
    pub fn place(&self, checkpoint: &Path, name: &str) -> PathBuf {
        match self.trained().next() {
            Some((first, _)) if first == name => checkpoint.to_owned(),
            _ => checkpoint.join(POLICIES).join(name),
        }
    }
}

/// The folder beside a policy's weights that holds its critic.
pub(crate) const CRITIC: &str = "critic";
/// The folder beside a policy's weights that holds a reference with weights of its own.
pub(crate) const REFERENCE: &str = "reference";
/// The folder in a checkpoint that holds further policies.
pub(crate) const POLICIES: &str = "policies";
