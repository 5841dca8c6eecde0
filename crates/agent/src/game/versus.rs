//! Matches between two sets of policies, such as two versions of a run, for ratings.

use std::collections::BTreeMap;
use std::sync::Arc;

use levade_policy::SamplingParams;
use levade_tasks::Task;
use serde_json::{Map, json};

use super::GameLoop;
use super::options::{GameOptions, GameRules};
use crate::agent_loop::{AgentLoop, AttemptContext};
use crate::roster::Agent;

/// Contestant in a comparison: the policies that play the seats of one side.
#[derive(Clone)]
pub struct Contestant {
    /// Name of the contestant, unique among the contestants. The name consists of letters, digits,
    /// `-` and `_`.
    pub name: String,
    /// Agents by their names in the recipe. Each agent has the policies of this contestant.
    pub agents: BTreeMap<String, Agent>,
}

impl Contestant {
    /// Returns the name that an agent of this contestant has in a match.
    fn agent_name(&self, agent: &str) -> String {
        format!("{agent}-{}", self.name)
    }

    /// Returns the agents of this contestant, renamed to their names in a match.
    fn renamed_agents(&self) -> impl Iterator<Item = Agent> {
        let agents = self.agents.iter();
        agents.map(|(name, agent)| Agent { name: self.agent_name(name), ..agent.clone() })
    }
}

/// Seeds of one match of a series.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatchSeeds {
    /// Seed of the game, which determines cards and roles.
    pub game: u64,
    /// Seed of the sampled tokens.
    pub sampling: u64,
    /// Random stream of the match, unique within the series.
    pub stream: u64,
}

/// Plays a match between two contestants. The first plays the seats of `side`, and the second plays
/// the remaining seats. Returns the score of the first contestant: 1 if the mean reward of its
/// seats is larger than that of the other seats, 0 if it is smaller, and 0.5 if both are equal.
/// Penalties for illegal completions do not count.
///
/// # Errors
/// Returns a message if the rules are not built in, if one of the contestants has no seat or lacks
/// the agent of a seat, or if the match fails.
pub async fn play_versus(
    options: &GameOptions,
    contestants: [&Contestant; 2],
    side: &str,
    seeds: MatchSeeds,
    params: &SamplingParams,
) -> Result<f64, String> {
    let GameRules::BuiltIn(game) = &options.rules else {
        return Err(format!("{} is no built-in game", options.rules.name()));
    };
    let start = game.start(&options.options, seeds.game).map_err(|error| error.to_string())?;
    let mut seated = BTreeMap::new();
    // Names of the agents of each contestant's seats.
    let mut names = [Vec::new(), Vec::new()];
    for seat in &start.seats {
        let index = usize::from(seat.side != side);
        let agent = options.find_agent_name(seat)?;
        let contestant = contestants[index];
        if !contestant.agents.contains_key(agent) {
            return Err(format!("the contestant {} has no agent {agent:?}", contestant.name));
        }
        let name = contestant.agent_name(agent);
        seated.insert(seat.name.clone(), name.clone());
        names[index].push(name);
    }
    let systems = options.systems.iter().flat_map(|(agent, system)| {
        contestants.map(|contestant| (contestant.agent_name(agent), system.clone()))
    });
    let policy_prompts = options.policy_prompts.iter().flat_map(|((agent, policy), prompts)| {
        contestants.map(|one| ((one.agent_name(agent), policy.clone()), prompts.clone()))
    });
    let match_options = GameOptions {
        agents: seated,
        other: None,
        systems: systems.collect(),
        policy_prompts: policy_prompts.collect(),
        ..options.clone()
    };
    let agents: Vec<Agent> = contestants.iter().flat_map(|one| one.renamed_agents()).collect();
    let [own, opponents] = &names;
    let first = own.first().filter(|_| !opponents.is_empty());
    let first = first.ok_or_else(|| format!("the side {side:?} has no seats, or all seats"))?;
    let leader = agents.iter().position(|agent| agent.name == *first).unwrap_or_default();
    let limits = agents[leader].limits;
    let row = Map::from_iter([("seed".to_owned(), json!(seeds.game))]);
    let context = AttemptContext {
        task: Task { id: format!("seed-{}", seeds.game), row: row.into(), ..Task::default() },
        seed: seeds.sampling,
        stream: seeds.stream,
        group_stream: seeds.stream,
        params: params.clone(),
        agent: first.clone(),
        limits,
        ..AttemptContext::new("match", agents)
    };
    let attempt = GameLoop { options: Arc::new(match_options) }.run(context).await;
    if let Some(error) = attempt.outcome.error {
        return Err(error);
    }
    let mean = |names: &[String]| {
        let metrics = &attempt.outcome.tool_metrics;
        let reward = |name: &String| metrics.get(&format!("game/{name}.reward")).copied();
        let sum: f64 = names.iter().filter_map(reward).sum();
        sum / names.len() as f64
    };
    let difference = mean(own) - mean(opponents);
    // Means of equal rewards can differ in their last bits.
    Ok(if difference.abs() < 1e-9 { 0.5 } else { f64::from(u8::from(difference > 0.0)) })
}
