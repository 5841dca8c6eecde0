//! Rewards of parts of an attempt: turns, agents and seats.

use std::collections::{BTreeMap, BTreeSet};

use levade_recipe::RewardKeys;
use levade_store::{CreditTarget, StepReward};
use levade_tree::{Component, Outcome, agent_of};

/// Returns the weighted sum of score components.
pub(crate) fn sum_of_components(components: &[Component]) -> f64 {
    components.iter().map(Component::weighted_value).fold(0.0, |sum, fraction| sum + fraction)
}

/// Returns the score of one agent: the components without a credit target, plus the mean over the
/// agent's seats of the components that the seats earned.
pub(super) fn agent_score(agent: &str, components: &[Component]) -> f64 {
    let mut seats = BTreeSet::new();
    let (mut own, mut common) = (0.0, 0.0);
    for component in components {
        match &component.credit_target {
            None => common += component.weighted_value(),
            Some(CreditTarget::Agent(name)) if agent_of(name) == agent => {
                seats.insert(name);
                own += component.weighted_value();
            }
            Some(_) => {}
        }
    }
    common + own / seats.len().max(1) as f64
}

/// Returns the reward of a component that belongs to a part of an attempt, with that part as credit
/// target. Returns `None` if the component belongs to the complete attempt, or if its reward is 0.
pub(super) fn component_reward(component: &Component) -> Option<StepReward> {
    let by = component.credit_target.clone()?;
    let reward = component.weighted_value();
    (reward != 0.0).then_some(StepReward { credit_target: by, reward })
}

/// Returns the rewards of turns, without those that are 0: rewards (usually negative) for malformed
/// and failed tool calls, plus rewards that tools assigned.
pub(super) fn call_rewards(keys: &RewardKeys, outcome: &Outcome) -> Vec<StepReward> {
    let mut rewards_by_turn: BTreeMap<u32, f64> = outcome
        .calls_by_turn
        .iter()
        .map(|(turn, calls)| {
            let malformed = f64::from(calls.malformed);
            let failed = f64::from(calls.errors()) - malformed;
            (*turn, keys.malformed_call * malformed + keys.failed_call * failed)
        })
        .collect();
    for (turn, reward) in &outcome.rewards_by_turn {
        *rewards_by_turn.entry(*turn).or_default() += reward;
    }
    rewards_by_turn
        .into_iter()
        .filter_map(|(turn, reward)| {
            (reward != 0.0)
                .then_some(StepReward { credit_target: CreditTarget::Turn(turn), reward })
        })
        .collect()
}
