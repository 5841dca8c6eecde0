//! Options of the game loop.

use std::collections::BTreeMap;
use std::sync::Arc;

use levade_game::{Game, Seat};
use levade_text::Message;
use serde_json::Value;

use super::workers::GameWorkers;

/// Default text that describes the format of a completion to the player.
pub const DEFAULT_FORMAT: &str = "Reply with one JSON object: {format}";

/// Placeholder in a system prompt for the rules' instructions of a seat.
pub const INSTRUCTIONS: &str = "{instructions}";

/// Rules of a game, which run in this process or in workers of another language.
#[derive(Clone)]
pub enum GameRules {
    /// A built-in game of `levade-game`.
    BuiltIn(Arc<dyn Game>),
    /// A game whose rules run in worker processes, which speak the line protocol.
    Workers(Arc<GameWorkers>),
}

impl GameRules {
    /// Returns the rules of the built-in game `name`.
    ///
    /// # Errors
    /// Returns a message with the names of all games if no game has this name.
    pub fn from_built_in_game(name: &str) -> Result<Self, String> {
        let found = levade_game::find(name).map_err(|error| error.to_string())?;
        Ok(GameRules::BuiltIn(found.into()))
    }

    /// Returns the seats of a match with these options of the rules. If the rules run in workers,
    /// the list is empty, because this function starts no worker.
    ///
    /// # Errors
    /// Returns a message if the rules reject the options.
    pub fn seats(&self, options: &Value) -> Result<Vec<Seat>, String> {
        match self {
            GameRules::BuiltIn(game) => {
                let start = game.start(options, 0).map_err(|error| error.to_string())?;
                Ok(start.seats)
            }
            GameRules::Workers(_) => Ok(Vec::new()),
        }
    }

    /// Returns the name of the game.
    pub fn name(&self) -> &str {
        match self {
            GameRules::BuiltIn(game) => game.name(),
            GameRules::Workers(workers) => &workers.name,
        }
    }
}

/// Prompts for one policy of an agent. They replace the prompts of the agent and of the game.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyPrompts {
    /// System prompt. `{instructions}` is replaced by the rules' instructions for the seat. `None`
    /// keeps the prompt of the agent.
    pub system: Option<String>,
    /// Text after every request for a move. `{format}` is replaced by the format of the completion.
    /// `None` keeps the text of the game.
    pub format: Option<String>,
}

/// Game of a run, with its options and the agents that play it.
#[derive(Clone)]
pub struct GameOptions {
    /// Rules of the game.
    pub rules: GameRules,
    /// Options of the rules, as a JSON object.
    pub options: Value,
    /// Name of the agent that plays a seat, by the name, role or side of the seat. The first of
    /// these three that has an entry counts.
    pub agents: BTreeMap<String, String>,
    /// Name of the agent that plays the seats without an entry in `agents`. If `None`, matches with
    /// such a seat are rejected.
    pub other: Option<String>,
    /// System prompts by agent. `{instructions}` is replaced by the rules' instructions for the
    /// seat. Agents without an entry have only these instructions.
    pub systems: BTreeMap<String, String>,
    /// Prompts that replace those of the agent and the game, by the names of agent and policy.
    pub policy_prompts: BTreeMap<(String, String), PolicyPrompts>,
    /// Maximum number of additional completions to one request, after a completion without a legal
    /// move.
    pub retries: u32,
    /// Reward of a completion that is not a legal move.
    pub illegal_reward: f64,
    /// Reward of a turn in which the default move was played, because the player made no legal
    /// move.
    pub default_reward: f64,
    /// Maximum number of tokens of one completion. 0 leaves the limit to the agent.
    pub move_tokens: usize,
    /// Whether the sampler restricts completions to the schema of the request, except those of
    /// trained policies.
    pub constrained: bool,
    /// Whether the described format of a completion has a field for private reasoning.
    pub has_reasoning: bool,
    /// Text after every request for a move. `{format}` is replaced by the format of the completion.
    pub format: String,
}

impl GameOptions {
    /// Creates options in which `agent` plays every seat.
    pub fn new(rules: GameRules, options: Value, agent: &str) -> Self {
        GameOptions {
            rules,
            options,
            agents: BTreeMap::new(),
            other: Some(agent.to_owned()),
            systems: BTreeMap::new(),
            policy_prompts: BTreeMap::new(),
            retries: 2,
            illegal_reward: 0.0,
            default_reward: -0.1,
            move_tokens: 0,
            constrained: false,
            has_reasoning: true,
            format: DEFAULT_FORMAT.to_owned(),
        }
    }

    /// Returns the system prompt and the format text of an agent when `policy` plays it. The system
    /// prompt is `None` if it consists only of the rules' instructions.
    pub(super) fn find_prompts(&self, agent: &str, policy: &str) -> (Option<&str>, &str) {
        let own = self.policy_prompts.get(&(agent.to_owned(), policy.to_owned()));
        let system = own.and_then(|own| own.system.as_ref()).or_else(|| self.systems.get(agent));
        let format = own.and_then(|own| own.format.as_ref()).unwrap_or(&self.format);
        (system.map(String::as_str), format)
    }

    /// Returns the messages with which every conversation of a seat starts: the system prompt,
    /// unless it is empty, and a message with the format text of the first request.
    pub fn fixed_messages(&self, agent: &str, policy: &str, seat: &Seat) -> Vec<Message> {
        let system = self.system_prompt(agent, policy, seat);
        let system = (!system.is_empty()).then(|| Message::system(system));
        system.into_iter().chain([Message::user(self.find_prompts(agent, policy).1)]).collect()
    }

    /// Returns the system prompt that an agent's policy gets when it plays the seat.
    pub(super) fn system_prompt(&self, agent: &str, policy: &str, seat: &Seat) -> String {
        match self.find_prompts(agent, policy).0 {
            Some(system) => system.replace(INSTRUCTIONS, &seat.instructions),
            None => seat.instructions.clone(),
        }
    }

    /// Returns the name of the agent that plays a seat.
    ///
    /// # Errors
    /// Returns a message if no entry names the seat, its role or its side.
    pub fn find_agent_name(&self, seat: &Seat) -> Result<&str, String> {
        let keys = [&seat.name, &seat.role, &seat.side];
        let named = keys.iter().find_map(|key| self.agents.get(*key)).or(self.other.as_ref());
        named.map(String::as_str).ok_or_else(|| {
            let Seat { name, role, side, .. } = seat;
            format!(
                "no agent plays the seat {name}; name one in game.agents under {name:?}, its role \
                 {role:?} or its side {side:?}"
            )
        })
    }
}
