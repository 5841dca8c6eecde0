//! Policies: who writes replies, and which of them learn.

use std::collections::BTreeSet;

use dressage_policy::LoraOptions;
use dressage_tree::DEFAULT;
use serde::{Deserialize, Serialize};

use super::agent::AgentKeys;
use super::keys::{ModelKeys, Phase, Recipe};

/// `[policy.NAME]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKeys {
    /// Its weights learn.
    Trained(PolicyModel),
    /// Its weights stay as they are.
    Frozen(PolicyModel),
    /// A model behind an API, which is never trained.
    External(ExternalKeys),
}

/// `[policy.NAME] kind = "trained"` or `"frozen"`: the model, where it is not that of `[model]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyModel {
    /// As `model.source`; that of `[model]` where not given.
    pub source: Option<String>,
    /// As `model.base`.
    pub base: Option<String>,
    /// As `model.context`; that of `[model]` where not given.
    pub context: Option<usize>,
    /// As `model.lora`; that of `[model]` where not given. For a policy that is trained.
    pub lora: Option<LoraOptions>,
}

/// `[policy.NAME] kind = "external"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExternalKeys {
    /// Where the API is, such as `http://127.0.0.1:8000/v1`.
    pub url: String,
    /// The name that the model has there.
    pub model: String,
    /// The environment variable with the key; none where not given.
    #[serde(default)]
    pub key_env: Option<String>,
}

impl PolicyKeys {
    /// The model of a policy that runs here, with what `[model]` says where its own keys do not.
    pub fn model(&self, model: &ModelKeys) -> Option<ModelKeys> {
        let (own, trained) = match self {
            PolicyKeys::Trained(own) => (own, true),
            PolicyKeys::Frozen(own) => (own, false),
            PolicyKeys::External(_) => return None,
        };
        let is_own = own.source.is_some();
        let inherited = |value: &Option<String>| value.clone().filter(|_| !is_own);
        Some(ModelKeys {
            source: own.source.clone().unwrap_or_else(|| model.source.clone()),
            base: own.base.clone().or_else(|| inherited(&model.base)),
            context: own.context.or(model.context),
            lora: own.lora.clone().or_else(|| model.lora.clone()).filter(|_| trained),
        })
    }

    /// Whether its weights learn.
    pub fn is_trained(&self) -> bool {
        matches!(self, PolicyKeys::Trained(_))
    }
}

impl Recipe {
    /// Every policy by name, in the order of their names: those of the recipe, or the only one.
    pub fn policies(&self) -> Vec<(String, PolicyKeys)> {
        if self.policy.is_empty() {
            return vec![(DEFAULT.to_owned(), PolicyKeys::Trained(PolicyModel::default()))];
        }
        self.policy.iter().map(|(name, keys)| (name.clone(), keys.clone())).collect()
    }

    /// Every agent by name: that of `[agent]` first, which does what no other is asked to.
    pub fn agents(&self) -> Vec<(&str, &AgentKeys)> {
        let named = self.agents.iter().map(|(name, keys)| (name.as_str(), keys));
        let first = (!self.agents.contains_key(DEFAULT)).then_some((DEFAULT, &self.agent));
        first.into_iter().chain(named).collect()
    }

    /// The keys of an agent.
    pub fn agent_named(&self, name: &str) -> Option<&AgentKeys> {
        self.agents.get(name).or((name == DEFAULT).then_some(&self.agent))
    }

    /// The name of the policy that writes an agent's replies; `None` where it says none and there are several.
    pub fn policy_of(&self, agent: &AgentKeys) -> Option<String> {
        let policies = self.policies();
        if !agent.policy.is_empty() {
            return policies.into_iter().map(|(name, _)| name).find(|name| *name == agent.policy);
        }
        match &policies[..] {
            [(only, _)] => Some(only.clone()),
            _ => policies.into_iter().map(|(name, _)| name).find(|name| name == DEFAULT),
        }
    }

    /// Names of the policies that a phase trains, in order: those that it names, or all that are trained.
    pub fn trained_in(&self, phase: &Phase) -> Vec<String> {
        let named: BTreeSet<&String> = phase.policies().iter().collect();
        let policies =
            self.policies().into_iter().filter(|(_, keys)| keys.is_trained()).map(|(name, _)| name);
        policies.filter(|name| named.is_empty() || named.contains(name)).collect()
    }

    /// Names of the agents whose replies are no targets.
    pub(crate) fn untrained_agents(&self) -> Vec<String> {
        let untrained = self.agents().into_iter().filter(|(_, keys)| !keys.train);
        untrained.map(|(name, _)| name.to_owned()).collect()
    }
}
