//! Finds the policies and agents of a recipe, and the policy that generates the completions of each
//! agent.

use std::collections::BTreeSet;

use levade_agent::{own_summarizer_name, probe_agent};
use levade_tree::DEFAULT;

use super::agent::AgentKeys;
use super::keys::{Phase, Recipe};
use super::policy::{ExternalKeys, PastKeys, PolicyKeys, PolicyModel};
use super::prompt::PromptTarget;

impl Recipe {
    /// Returns the policies of the recipe with their names, in name order. If the recipe has no
    /// `[policy]`, returns the default policy.
    pub fn policies(&self) -> Vec<(String, PolicyKeys)> {
        if self.policy.is_empty() {
            return vec![(DEFAULT.to_owned(), PolicyKeys::Trained(PolicyModel::default()))];
        }
        self.policy.iter().map(|(name, keys)| (name.clone(), keys.clone())).collect()
    }

    /// Returns whether a policy of the recipe trains a low-rank adapter.
    pub(super) fn has_adapter(&self) -> bool {
        let adapts =
            |keys: &PolicyKeys| keys.model(&self.model).is_some_and(|model| model.lora.is_some());
        self.policies().iter().any(|(_, keys)| adapts(keys))
    }

    /// Returns the agents of the recipe with their names. The first is the agent of `[agent]`,
    /// which acts when no other agent is requested.
    pub fn agents(&self) -> Vec<(&str, &AgentKeys)> {
        let named = self.agents.iter().map(|(name, keys)| (name.as_str(), keys));
        let first = (!self.agents.contains_key(DEFAULT)).then_some((DEFAULT, &self.agent));
        first.into_iter().chain(named).collect()
    }

    /// Returns the keys of the agent called `name`, or `None` if there is no such agent.
    pub fn agent_named(&self, name: &str) -> Option<&AgentKeys> {
        self.agents.get(name).or((name == DEFAULT).then_some(&self.agent))
    }

    /// Sets the text of an agent that `target` selects. Does nothing if there is no agent called
    /// `name`.
    pub fn set_text(&mut self, name: &str, target: &PromptTarget, text: &str) {
        let keys = match self.agents.get_mut(name) {
            None if name == DEFAULT => Some(&mut self.agent),
            named => named,
        };
        if let Some(keys) = keys {
            target.set(keys, text);
        }
    }

    /// Returns the name of an agent's policy, or the first one of a mixture. Returns `None` if the
    /// policy is unknown, or if the agent names no policy and the recipe has several.
    pub fn policy_name(&self, agent: &AgentKeys) -> Option<String> {
        let policies = self.policies();
        if let Some(first) = agent.policy.weights().first() {
            return policies.into_iter().map(|(name, _)| name).find(|name| *name == first.name);
        }
        match &policies[..] {
            [(only, _)] => Some(only.clone()),
            _ => policies.into_iter().map(|(name, _)| name).find(|name| name == DEFAULT),
        }
    }

    /// Returns the names of all policies that may play an agent, in the order of the recipe.
    pub fn policy_names(&self, agent: &AgentKeys) -> Vec<String> {
        match agent.policy.weights() {
            [] => self.policy_name(agent).into_iter().collect(),
            weights => weights.iter().map(|policy| policy.name.clone()).collect(),
        }
    }

    /// Returns the pools of past versions with their names, in name order.
    pub fn past_policies(&self) -> impl Iterator<Item = (&str, &PastKeys)> {
        self.policy.iter().filter_map(|(name, keys)| match keys {
            PolicyKeys::Past(keys) => Some((name.as_str(), keys)),
            _ => None,
        })
    }

    /// Removes the policies that no agent uses. Keeps trained policies whose past versions are
    /// used.
    pub fn keep_policies_in_use(&mut self) {
        let agents = self.agents();
        let in_use: BTreeSet<String> =
            agents.iter().flat_map(|(_, keys)| self.policy_names(keys)).collect();
        let weights: BTreeSet<String> =
            in_use.iter().map(|policy| self.weight_source(policy).to_owned()).collect();
        self.policy.retain(|name, _| in_use.contains(name) || weights.contains(name));
    }

    /// Returns the name of the policy that provides a policy's weights: the trained policy for a
    /// pool of past versions, otherwise the policy itself.
    pub fn weight_source<'a>(&'a self, policy: &'a str) -> &'a str {
        match self.policy.get(policy) {
            Some(PolicyKeys::Past(keys)) => &keys.of,
            _ => policy,
        }
    }

    /// Returns whether an external policy may play an agent.
    pub fn may_be_external(&self, agent: &AgentKeys) -> bool {
        let external =
            |name: &String| matches!(self.policy.get(name), Some(PolicyKeys::External(_)));
        self.policy_names(agent).iter().any(external)
    }

    /// Returns the external API that generates an agent's completions, or `None` if the agent's
    /// policy is not external.
    pub fn external_of(&self, agent: &AgentKeys) -> Option<&ExternalKeys> {
        match self.policy.get(&self.policy_name(agent)?)? {
            PolicyKeys::External(keys) => Some(keys),
            _ => None,
        }
    }

    /// Returns the names of the trained policies, in name order.
    pub fn trained_policies(&self) -> Vec<String> {
        self.policies()
            .into_iter()
            .filter(|(_, keys)| keys.is_trained())
            .map(|(name, _)| name)
            .collect()
    }

    /// Returns the names of the policies that a phase trains, in name order: the policies that the
    /// phase names, or all trained policies.
    pub fn trained_policies_in(&self, phase: &Phase) -> Vec<String> {
        let Some(policies) = phase.policies() else { return Vec::new() };
        let named: BTreeSet<&String> = policies.iter().collect();
        let mut policies = self.trained_policies();
        policies.retain(|name| named.is_empty() || named.contains(name));
        policies
    }

    /// Returns the names of the agents whose completions are not training targets.
    pub fn untrained_agents(&self) -> Vec<String> {
        let agents = self.agents();
        let is_trained = |(name, keys): &&(&str, &AgentKeys)| keys.train && !self.plays_user(name);
        let untrained =
            agents.iter().filter(|agent| !is_trained(agent)).map(|(name, _)| (*name).to_owned());
        let silent =
            agents.iter().filter(|agent| !is_trained(agent) || !agent.1.context.trains_summaries());
        let silent = silent.map(|(name, _)| own_summarizer_name(name));
        // Only attempts of programs contain probe calls.
        let is_program = self.agent.kind.calls_over_http();
        let probes = agents.iter().filter(|_| is_program).map(|(name, _)| probe_agent(name));
        untrained.chain(silent).chain(probes).collect()
    }
}
