//! Checks the game of a recipe, and creates its loop.

use std::time::Duration;

use levade_agent::MixtureSeats;
use levade_agent::game::{
    GameLoop, GameOptions, GameRules, GameWorkers, INSTRUCTIONS, PolicyPrompts,
};
use levade_tree::DEFAULT;

use super::RecipeError;
use super::agent::{AgentKeys, AgentKind};
use super::check::Checker;
use super::check_agents::format_choices;
use super::game::{GameKeys, OTHER};
use super::keys::{Phase, Recipe, TaskSource};
use super::read::ReadError;
use super::rl::{GroupBy, RlKeys};

impl Recipe {
    /// Creates the agent loop that plays the recipe's game. `workers` starts the program of a game
    /// that is not built in.
    ///
    /// # Errors
    /// Returns a message if no built-in game has the name in the recipe.
    pub fn game_loop(
        &self,
        workers: impl FnOnce(&GameKeys, Duration) -> GameWorkers,
    ) -> Result<GameLoop, String> {
        let keys = &self.game;
        let rules = if keys.command.is_empty() {
            GameRules::from_built_in_game(&keys.name)?
        } else {
            GameRules::Workers(workers(keys, Duration::from_secs_f64(keys.seconds)).into())
        };
        Ok(GameLoop { options: self.game_options(rules).into() })
    }

    /// Returns the options of the recipe's game loop. `rules` are the rules of the game.
    pub fn game_options(&self, rules: GameRules) -> GameOptions {
        let keys = &self.game;
        let mut agents = keys.agents.clone();
        let other = agents.remove(OTHER).unwrap_or_else(|| DEFAULT.to_owned());
        let prompts = self.agents().into_iter().filter(|(_, keys)| !keys.system.is_empty());
        let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let policy_prompts = self.agents().into_iter().flat_map(|(agent, keys)| {
            let own = keys.policy.weights().iter().filter(|policy| policy.has_prompts());
            own.map(move |policy| {
                let (system, format) = (text(&policy.system), text(&policy.format));
                let key = (agent.to_owned(), policy.name.clone());
                (key, PolicyPrompts { system, format })
            })
        });
        GameOptions {
            agents,
            systems: prompts.map(|(name, keys)| (name.to_owned(), keys.system.clone())).collect(),
            policy_prompts: policy_prompts.collect(),
            retries: keys.retries,
            illegal_reward: keys.illegal,
            default_reward: keys.default,
            move_tokens: keys.move_tokens,
            constrained: keys.constrained,
            has_reasoning: keys.reasoning,
            format: keys.format.clone(),
            ..GameOptions::new(rules, keys.options(), &other)
        }
    }
}

impl Checker<'_> {
    /// Checks the keys of the game, the agents of its seats, and that the tasks of these agents are
    /// seeds.
    pub(super) fn check_game(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let keys = &recipe.game;
        let agents = recipe.agents();
        let leads = agents.iter().any(|(_, keys)| keys.kind == AgentKind::Game);
        self.check(
            leads || keys.is_empty(),
            "agent.kind",
            format!("\"{}\"", recipe.agent.kind.name()),
            "\"game\" if the recipe has a table [game]",
        )?;
        for (name, keys) in &agents {
            self.check_seated_agent(name, keys, &recipe.phase)?;
        }
        self.check_agent_name(recipe, &recipe.reward.of, "reward.of")?;
        for (index, source) in recipe.tasks.iter().enumerate() {
            let TaskSource::Seeds(seeds) = source else { continue };
            let wanted = if seeds.agent.is_empty() { DEFAULT } else { &seeds.agent };
            let found = agents.iter().any(|(name, _)| *name == wanted);
            let range = format_choices(agents.iter().map(|(name, _)| name));
            let key = format!("tasks.{index}.agent");
            self.check(found, key, format!("\"{}\"", seeds.agent), range)?;
        }
        if !leads {
            return Ok(());
        }
        let only_seeds = recipe.tasks.iter().all(|source| matches!(source, TaskSource::Seeds(_)));
        let range = "\"seeds\" for every source: a game is played from a seed";
        self.check(only_seeds, "tasks", "another kind", range)?;
        self.check(!keys.name.is_empty(), "game.name", "\"\"", "the name of the game")?;
        self.check(
            keys.format.contains(FORMAT),
            "game.format",
            format!("{:?}", keys.format),
            format!("a text that contains {FORMAT}"),
        )?;
        let trained = recipe.trained_policies();
        let is_trained = |keys: &AgentKeys| {
            keys.train && recipe.policy_names(keys).iter().all(|policy| trained.contains(policy))
        };
        self.check(
            !keys.constrained || !agents.iter().all(|(_, keys)| is_trained(keys)),
            "game.constrained",
            true,
            "false if all policies are trained: tokens that a grammar restricts are never trained",
        )?;
        for (seat, agent) in &keys.agents {
            self.check_agent_name(recipe, agent, &format!("game.agents.{seat}"))?;
        }
        for (name, keys) in agents.iter().filter(|(_, keys)| !keys.system.is_empty()) {
            let table = if *name == DEFAULT { "agent".into() } else { format!("agent.{name}") };
            self.check(
                keys.system.contains(INSTRUCTIONS),
                format!("{table}.system"),
                format!("{:?}", keys.system),
                format!("a text that contains {INSTRUCTIONS}, the rules and the role of the seat"),
            )?;
        }
        if !keys.command.is_empty() {
            return Ok(());
        }
        let seats = GameRules::from_built_in_game(&keys.name)
            .and_then(|rules| rules.seats(&keys.options()));
        match seats {
            Err(why) => {
                let source = ReadError::at_path(["game"], why);
                Err(RecipeError::Key { file: self.file().to_owned(), source })
            }
            Ok(seats) => {
                let known = seats.iter().flat_map(|seat| [&seat.name, &seat.role, &seat.side]);
                let mut known: Vec<&str> = known.map(String::as_str).chain([OTHER]).collect();
                known.sort_unstable();
                known.dedup();
                let unknown = keys.agents.keys().find(|seat| !known.contains(&seat.as_str()));
                let unknown = unknown.map_or("", String::as_str);
                let range = format!("a seat, role or side of the game: {}", format_choices(&known));
                self.check(unknown.is_empty(), format!("game.agents.{unknown}"), "set", range)
            }
        }
    }

    /// Checks the keys of an agent that have another meaning in a game, or that exist only for
    /// games.
    fn check_seated_agent(
        &self,
        name: &str,
        agent: &AgentKeys,
        phases: &[Phase],
    ) -> Result<(), RecipeError> {
        let table = if name == DEFAULT { "agent".into() } else { format!("agent.{name}") };
        let is_game = agent.kind == AgentKind::Game;
        self.check(
            is_game || agent.mixture_seats == MixtureSeats::Each,
            format!("{table}.mixture_seats"),
            "\"together\"",
            "left out for an agent that plays no game",
        )?;
        for (at, policy) in agent.policy.weights().iter().enumerate() {
            let texts =
                [("system", &policy.system, INSTRUCTIONS), ("format", &policy.format, FORMAT)];
            for (key, text, slot) in texts.into_iter().filter(|(_, text, _)| !text.is_empty()) {
                let range = if is_game {
                    format!("a text that contains {slot}")
                } else {
                    "left out for an agent that plays no game".to_owned()
                };
                let key = format!("{table}.policy.{at}.{key}");
                self.check(is_game && text.contains(slot), key, format!("{text:?}"), range)?;
            }
        }
        let by_seat =
            |phase: &Phase| matches!(phase, Phase::Rl(keys) if keys.group_by == GroupBy::Agent);
        self.check(
            !is_game || !agent.context.trains_summaries() || !phases.iter().any(by_seat),
            format!("{table}.context.train"),
            true,
            "false in a game with `group_by = \"agent\"`: the reward of a seat reaches only the \
             tokens of its moves",
        )
    }

    /// Checks that groups have at least two attempts if advantages compare a seat with the same
    /// seat of other attempts.
    pub(super) fn check_seat_groups(&self, phase: usize, keys: &RlKeys) -> Result<(), RecipeError> {
        self.check(
            keys.group_by != GroupBy::Agent || keys.group_size >= 2,
            format!("phase.{phase}.group_size"),
            keys.group_size,
            "at least 2 with `group_by = \"agent\"`: a seat is compared with the same seat of the \
             other attempts at the task",
        )
    }

    /// Checks that `name`, the value of the recipe key `key`, is empty or the name of an agent.
    fn check_agent_name(&self, recipe: &Recipe, name: &str, key: &str) -> Result<(), RecipeError> {
        let agents = recipe.agents();
        let found = name.is_empty() || agents.iter().any(|(agent, _)| *agent == name);
        let range = format_choices(agents.iter().map(|(agent, _)| agent));
        self.check(found, key, format!("\"{name}\""), range)
    }
}

/// Placeholder in `game.format` for the description of the output format.
const FORMAT: &str = "{format}";
