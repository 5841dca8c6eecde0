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
    /// Returns every policy by name, in the order of the names. Without `[policy]`, returns the
    /// only policy.
    pub fn policies(&self) -> Vec<(String, PolicyKeys)> {
        if self.policy.is_empty() {
            return vec![(DEFAULT.to_owned(), PolicyKeys::Trained(PolicyModel::default()))];
        }
        self.policy.iter().map(|(name, keys)| (name.clone(), keys.clone())).collect()
    }

    /// Returns whether a policy trains an adapter.
    pub(super) fn has_adapter(&self) -> bool {
        let adapts =
            |keys: &PolicyKeys| keys.model(&self.model).is_some_and(|model| model.lora.is_some());
        self.policies().iter().any(|(_, keys)| adapts(keys))
    }

    /// Returns every agent by name. The agent of `[agent]` is first; it acts when no other agent is
    /// requested.
    pub fn agents(&self) -> Vec<(&str, &AgentKeys)> {
        let named = self.agents.iter().map(|(name, keys)| (name.as_str(), keys));
        let first = (!self.agents.contains_key(DEFAULT)).then_some((DEFAULT, &self.agent));
        first.into_iter().chain(named).collect()
    }

    /// Returns the keys of the agent named `name`.
    pub fn agent_named(&self, name: &str) -> Option<&AgentKeys> {
        self.agents.get(name).or((name == DEFAULT).then_some(&self.agent))
    }

    /// Sets a text of the agent named `name`, if there is one.
    pub fn set_text(&mut self, name: &str, target: &PromptTarget, text: &str) {
        let keys = match self.agents.get_mut(name) {
            None if name == DEFAULT => Some(&mut self.agent),
            named => named,
        };
        if let Some(keys) = keys {
            target.set(keys, text);
        }
    }

    /// Returns the name of an agent's policy. Of a mixture, returns the first policy. Returns
    /// `None` if the agent names no policy and there are several, or if it names an unknown policy.
    pub fn policy_of(&self, agent: &AgentKeys) -> Option<String> {
        let policies = self.policies();
        if let Some(first) = agent.policy.weights().first() {
            return policies.into_iter().map(|(name, _)| name).find(|name| *name == first.name);
        }
        match &policies[..] {
            [(only, _)] => Some(only.clone()),
            _ => policies.into_iter().map(|(name, _)| name).find(|name| name == DEFAULT),
        }
    }

    /// Returns the names of all policies of an agent, in the order of the recipe.
    pub fn policies_of(&self, agent: &AgentKeys) -> Vec<String> {
        match agent.policy.weights() {
            [] => self.policy_of(agent).into_iter().collect(),
            weights => weights.iter().map(|policy| policy.name.clone()).collect(),
        }
    }

    /// Returns the pools of past versions by name, in name order.
    pub fn past_policies(&self) -> impl Iterator<Item = (&str, &PastKeys)> {
        self.policy.iter().filter_map(|(name, keys)| match keys {
            PolicyKeys::Past(keys) => Some((name.as_str(), keys)),
            _ => None,
        })
    }

    /// Removes the policies that no agent uses, except those whose past versions an agent uses.
    pub fn keep_policies_in_use(&mut self) {
        let agents = self.agents();
        let in_use: BTreeSet<String> =
            agents.iter().flat_map(|(_, keys)| self.policies_of(keys)).collect();
        let weights: BTreeSet<String> =
            in_use.iter().map(|policy| self.weights_of(policy).to_owned()).collect();
        self.policy.retain(|name, _| in_use.contains(name) || weights.contains(name));
    }

    /// Returns the policy that a policy gets its weights from: for past versions, the trained
    /// policy, and otherwise the policy itself.
    pub fn weights_of<'a>(&'a self, policy: &'a str) -> &'a str {
        match self.policy.get(policy) {
            Some(PolicyKeys::Past(keys)) => &keys.of,
            _ => policy,
        }
    }

    /// Returns whether an agent's policies include an external policy.
    pub fn may_be_external(&self, agent: &AgentKeys) -> bool {
        let external =
            |name: &String| matches!(self.policy.get(name), Some(PolicyKeys::External(_)));
        self.policies_of(agent).iter().any(external)
    }

    /// Returns the API that generates an agent's completions, or `None` if its policy is not
    /// external.
    pub fn external_of(&self, agent: &AgentKeys) -> Option<&ExternalKeys> {
        match self.policy.get(&self.policy_of(agent)?)? {
            PolicyKeys::External(keys) => Some(keys),
            _ => None,
        }
    }

    /// Returns the names of the trained policies, in order.
    pub fn trained_policies(&self) -> Vec<String> {
        self.policies()
            .into_iter()
            .filter(|(_, keys)| keys.is_trained())
            .map(|(name, _)| name)
            .collect()
    }

    /// Returns the names of the policies that a phase trains, in order: those that it names, or all
    /// trained policies.
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
