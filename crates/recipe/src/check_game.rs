//! Checks the game of a recipe, and creates its loop.

use std::time::Duration;

use levade_agent::game::{GameLoop, GameOptions, GameWorkers, INSTRUCTIONS, Rules};
use levade_tree::DEFAULT;

use super::RecipeError;
use super::agent::{AgentKeys, AgentKind};
use super::check::Checker;
use super::check_agents::format_choices;
use super::game::{GameKeys, OTHER};
use super::keys::{Recipe, TaskSource};
use super::read::ReadError;
use super::rl::{GroupBy, RlKeys};

impl Recipe {
    /// Returns the loop that plays the recipe's game. `workers` starts the program of a game that
    /// is not built in.
    ///
    /// # Errors
    /// Returns a message if there is no built-in game of this name.
    pub fn game_loop(
        &self,
        workers: impl FnOnce(&GameKeys, Duration) -> GameWorkers,
    ) -> Result<GameLoop, String> {
        let keys = &self.game;
        let rules = if keys.command.is_empty() {
            Rules::built_in(&keys.name)?
        } else {
            Rules::Workers(workers(keys, Duration::from_secs_f64(keys.seconds)).into())
        };
        Ok(GameLoop { options: self.game_options(rules).into() })
    }

    /// Returns the options of the recipe's game loop with these rules.
    pub fn game_options(&self, rules: Rules) -> GameOptions {
        let keys = &self.game;
        let mut agents = keys.agents.clone();
        let other = agents.remove(OTHER).unwrap_or_else(|| DEFAULT.to_owned());
        let prompts = self.agents().into_iter().filter(|(_, keys)| !keys.system.is_empty());
        GameOptions {
            agents,
            systems: prompts.map(|(name, keys)| (name.to_owned(), keys.system.clone())).collect(),
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
    /// Checks the game, the agents of its seats, and that tasks of its agents are seeds.
    pub(super) fn game(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let keys = &recipe.game;
        let agents = recipe.agents();
        let leads = agents.iter().any(|(_, keys)| keys.kind == AgentKind::Game);
        self.check(
            leads || keys.is_empty(),
            "agent.kind",
            format!("\"{}\"", recipe.agent.kind.name()),
            "\"game\" if the recipe has a table [game]",
        )?;
        self.seats_of(recipe, &recipe.reward.of, "reward.of")?;
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
            keys.train && recipe.policies_of(keys).iter().all(|policy| trained.contains(policy))
        };
        self.check(
            !keys.constrained || !agents.iter().all(|(_, keys)| is_trained(keys)),
            "game.constrained",
            true,
            "false if all policies are trained: tokens that a grammar restricts are never trained",
        )?;
        for (seat, agent) in &keys.agents {
            self.seats_of(recipe, agent, &format!("game.agents.{seat}"))?;
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
        let seats = Rules::built_in(&keys.name).and_then(|rules| rules.seats(&keys.options()));
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

    /// Checks that a group of seats can be compared.
    pub(super) fn seat_groups(&self, phase: usize, keys: &RlKeys) -> Result<(), RecipeError> {
        self.check(
            keys.group_by != GroupBy::Agent || keys.group_size >= 2,
            format!("phase.{phase}.group_size"),
            keys.group_size,
            "at least 2 with `group_by = \"agent\"`: a seat is compared with the same seat of the \
             other attempts at the task",
        )
    }

    /// Checks the name of an agent, which may be left out.
    fn seats_of(&self, recipe: &Recipe, name: &str, key: &str) -> Result<(), RecipeError> {
        let agents = recipe.agents();
        let found = name.is_empty() || agents.iter().any(|(agent, _)| *agent == name);
        let range = format_choices(agents.iter().map(|(agent, _)| agent));
        self.check(found, key, format!("\"{name}\""), range)
    }
}

/// Placeholder in `game.format`.
const FORMAT: &str = "{format}";
