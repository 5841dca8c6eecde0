//! Players of the seats of a game: the models of a run's policies, and the probabilities that they
//! assign to moves.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use levade_agent::game::{GameOptions, MoveProbabilities, compute_move_probabilities};
use levade_agent::{Agent, Player};
use levade_game::{GameTree, Seat};
use levade_recipe::{ModelKeys, Recipe};
use levade_run::dir::{RunDir, STATE, policy_dir};
use levade_run::model;
use levade_trainer::chat_options;
use levade_tree::DEFAULT;

use crate::failure::unusable;
use crate::{host, recipe, run};

/// Players of a game: the policies of a run at one version, or one model for all seats.
pub struct Players {
    /// Argument with which the user named the players.
    name: String,
    /// Recipe that contains the prompts of the game.
    pub recipe: Recipe,
    models: PlayerModels,
    /// Start of the run as a Unix timestamp, which chat templates see as the current time. If
    /// `None`, chat templates see the actual time.
    started_at: Option<u64>,
}

enum PlayerModels {
    /// One model plays all seats.
    One(ModelKeys),
    /// The policies of a run play the seats of their agents. `checkpoint` is `None` for the first
    /// version of the run.
    Run { own: Box<Recipe>, checkpoint: Option<PathBuf> },
}

impl Players {
    /// Finds the players that a command-line argument names. Their prompts come from the recipe at
    /// `path` if it is `Some`, and otherwise from the run's recipe.
    ///
    /// # Errors
    /// Returns an error if the run or its checkpoint does not exist, or if the players have no
    /// recipe.
    pub fn find(name: &str, path: Option<&Path>) -> anyhow::Result<Self> {
        let (run, models) = Self::resolve_models(name)?;
        let recipe = match (path, &models) {
            (Some(path), _) => recipe::load(path, &[])?,
            (None, PlayerModels::Run { own, .. }) => Recipe::clone(own),
            (None, PlayerModels::One(_)) => match &run {
                Some(run) => run.recipe()?,
                None => {
                    return Err(unusable(format!(
                        "{name} is not a run, which would contain the recipe of the game; name \
                         a recipe with --recipe"
                    )));
                }
            },
        };
        let started_at = run.as_ref().map(RunDir::started).transpose()?;
        Ok(Players { name: name.to_owned(), recipe, models, started_at })
    }

    /// Finds an opponent that a command-line argument names. The opponent gets the prompts of
    /// `recipe`.
    ///
    /// # Errors
    /// Returns an error if the run or its checkpoint does not exist.
    pub fn find_opponent(name: &str, recipe: &Recipe) -> anyhow::Result<Self> {
        let (run, models) = Self::resolve_models(name)?;
        let started_at = run.as_ref().map(RunDir::started).transpose()?;
        Ok(Players { name: name.to_owned(), recipe: recipe.clone(), models, started_at })
    }

    fn resolve_models(name: &str) -> anyhow::Result<(Option<RunDir>, PlayerModels)> {
        if let Some((run, step)) = parse_run_and_step(name) {
            let checkpoint = run.checkpoints().remove(&step);
            if checkpoint.is_none() && step > 0 {
                let steps: Vec<_> = checkpoint_steps(&run).iter().map(u64::to_string).collect();
                return Err(unusable(format!(
                    "{name}: the run has no checkpoint of step {step}; it has those of the steps \
                     {}, which `run.checkpoint_every` and `run.keep` determine",
                    steps.join(", ")
                )));
            }
            let own = Box::new(run.recipe()?);
            return Ok((Some(run), PlayerModels::Run { own, checkpoint }));
        }
        let (source, run) = run::model_source(name)?;
        let checkpoint = PathBuf::from(&source);
        if let Some(run) = run.as_ref().filter(|_| checkpoint.join(STATE).is_file()) {
            let models =
                PlayerModels::Run { own: Box::new(run.recipe()?), checkpoint: Some(checkpoint) };
            return Ok((Some(run.clone()), models));
        }
        let model = ModelKeys { source, base: None, context: None, lora: None };
        Ok((run, PlayerModels::One(model)))
    }

    /// Returns the name of the policy that plays for an agent, and the keys of its model. A policy
    /// of a run has its name in the recipe, which selects its own prompts.
    ///
    /// # Errors
    /// Returns an error if an external policy plays the agent.
    fn find_policy(&self, agent: &str) -> anyhow::Result<(String, ModelKeys)> {
        let (own, checkpoint) = match &self.models {
            PlayerModels::One(model) => return Ok((self.name.clone(), model.clone())),
            PlayerModels::Run { own, checkpoint } => (own, checkpoint),
        };
        let named = own.agent_named(agent).unwrap_or(&own.agent);
        let policy = own.policy_name(named).unwrap_or_else(|| DEFAULT.to_owned());
        let weights = own.weight_source(&policy).to_owned();
        let keys = own.policies().into_iter().find(|(name, _)| *name == weights);
        let first_version = keys.and_then(|(_, keys)| keys.model(&own.model));
        let first_version = first_version.ok_or_else(|| {
            unusable(format!(
                "{}: the policy {weights} of the agent {agent} is external, so its probabilities \
                 are unknown",
                self.name
            ))
        })?;
        let trained = own.trained_policies();
        let Some(dir) = checkpoint.as_ref().filter(|_| trained.contains(&weights)) else {
            return Ok((policy, ModelKeys { lora: None, ..first_version }));
        };
        let source = policy_dir(dir, &trained, &weights).to_string_lossy().into_owned();
        Ok((policy, ModelKeys { source, base: None, context: first_version.context, lora: None }))
    }
}

/// Parses the run and the step in `RUN@STEP`. Returns `None` if the text has another format.
fn parse_run_and_step(text: &str) -> Option<(RunDir, u64)> {
    let (run, step) = text.rsplit_once('@')?;
    Some((RunDir::find(Path::new(run))?, step.parse().ok()?))
}

/// Returns the steps for which a run has a checkpoint, in order. The list starts with step 0, the
/// first version.
pub fn checkpoint_steps(run: &RunDir) -> Vec<u64> {
    std::iter::once(0).chain(run.checkpoints().into_keys()).collect()
}

/// Agent that plays a seat, with its opened policy.
pub struct SeatedAgent {
    /// Index of the players to which the agent belongs.
    pub players: usize,
    /// Agent with the opened player that generates its moves.
    pub agent: Agent,
}

/// Agent that a model plays, before the model is opened.
struct PlannedAgent<'a> {
    /// Index of the players to which the agent belongs.
    players: usize,
    name: &'a str,
    /// Policy that plays the agent. It selects the prompts.
    policy: String,
}

/// Opens the models that play these agents for each of `all`, one model after another, and each
/// model once. Passes the agents that a model plays to `use_model`, ready to play.
///
/// # Errors
/// Returns an error if a model cannot be opened. Also returns the errors of `use_model`.
pub async fn use_each_model(
    all: &[&Players],
    agent_names: &BTreeSet<String>,
    running: usize,
    mut use_model: impl AsyncFnMut(Vec<SeatedAgent>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut models: Vec<(ModelKeys, Vec<PlannedAgent<'_>>)> = Vec::new();
    for (index, players) in all.iter().enumerate() {
        for name in agent_names {
            let (policy, model) = players.find_policy(name)?;
            let planned = PlannedAgent { players: index, name, policy };
            match models.iter_mut().find(|(known, _)| *known == model) {
                Some((_, agents)) => agents.push(planned),
                None => models.push((model, vec![planned])),
            }
        }
    }
    let Some(recipe) = all.first().map(|players| &players.recipe) else { return Ok(()) };
    let host = host::create_host()?;
    for (keys, agents) in models {
        let opened = model::open(&keys.source, keys.base.as_deref(), &host)?;
        let files = &opened.files;
        let context = keys.context.or(recipe.model.context);
        let options = model::sampling_options(
            &files.config,
            recipe.engine.threads,
            context.map(|context| context.min(files.config.context)),
            running,
            recipe.engine.precision,
        );
        let engine = model::start_sampling(&opened, &options, None, &host).await?;
        let context = engine.context();
        let sampler = Arc::new(engine);
        let mut seated = Vec::with_capacity(agents.len());
        for PlannedAgent { players, name, policy } in agents {
            let agent_keys = recipe.agent_named(name).unwrap_or(&recipe.agent);
            let chat = model::chat(files, chat_options(agent_keys, all[players].started_at))?;
            let format = agent_keys.format(Arc::new(chat));
            let player = Player::new(&policy, Arc::clone(&sampler) as _, format, context);
            let agent = Agent::new(name, player, agent_keys.limits());
            seated.push(SeatedAgent { players, agent });
        }
        use_model(seated).await?;
    }
    Ok(())
}

/// Returns the names of the agents that play the seats of a game.
///
/// # Errors
/// Returns an error if a seat has no agent.
pub fn seat_agent_names(options: &GameOptions, seats: &[Seat]) -> anyhow::Result<BTreeSet<String>> {
    let names = seats.iter().map(|seat| options.find_agent_name(seat).map(str::to_owned));
    names.collect::<Result<_, String>>().map_err(unusable)
}

/// Computes the probabilities of the choices at all information sets of a game, for each of `all`.
///
/// # Errors
/// Returns an error if a seat has no agent, if a model cannot be opened, or if a policy cannot
/// score a move.
pub async fn score_moves(
    all: &[&Players],
    (options, tree): (&GameOptions, &GameTree),
    temperature: f32,
) -> anyhow::Result<Vec<Vec<MoveProbabilities>>> {
    let mut found: Vec<BTreeMap<usize, MoveProbabilities>> = vec![BTreeMap::new(); all.len()];
    let agents = seat_agent_names(options, tree.seats())?;
    use_each_model(all, &agents, 1, async |seated| {
        for SeatedAgent { players, agent } in seated {
            let plays =
                |seat: &Seat| options.find_agent_name(seat).is_ok_and(|name| name == agent.name);
            let sets: Vec<usize> = (0..tree.information_sets().len())
                .filter(|set| plays(&tree.seats()[tree.information_sets()[*set].seat]))
                .collect();
            let seated = (&agent, &agent.players[0]);
            let scored =
                compute_move_probabilities(options, tree, &sets, seated, temperature).await;
            found[players].extend(sets.into_iter().zip(scored.map_err(anyhow::Error::msg)?));
        }
        Ok::<(), anyhow::Error>(())
    })
    .await?;
    Ok(found.into_iter().map(|of| of.into_values().collect()).collect())
}
