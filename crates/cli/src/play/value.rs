//! Exact expected values of policies in small games: `levade play GAME --value SOURCE`.
//!
//! The complete game tree is enumerated. At each information set, the policy that plays the seat
//! computes the probability of every legal move, so the value has no sampling error.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use levade_agent::game::{GameOptions, GameRules, MoveProbabilities};
use levade_game::{Game, GameTree, Strategy};
use levade_policy::SamplingParams;
use levade_recipe::{Phase, Recipe};
use serde_json::{Value, json};

use super::players::{Players, score_moves};
use crate::failure::unusable;
use crate::screen;

/// Options of `levade play GAME --value`.
#[derive(clap::Args)]
pub struct ValueArgs {
    /// Print the exact expected value of these policies: of a run (RUN for its newest checkpoint,
    /// RUN@STEP for another one, RUN@0 for its first version), of a checkpoint, or of a model
    #[arg(long, value_name = "SOURCE", conflicts_with_all = ["seat", "options"])]
    pub value: Option<String>,

    /// Opponent of --value: random, equilibrium, best_response, or a source like that of --value;
    /// can be repeated [default: each of the first three that the game has]
    #[arg(long, value_name = "OPPONENT", requires = "value", conflicts_with = "seat")]
    pub against: Vec<String>,

    /// Recipe with the prompts of the game [default: the run's recipe]
    #[arg(long, requires = "value", conflicts_with = "seat")]
    pub recipe: Option<PathBuf>,

    /// Sampling temperature of the policies [default: that of the recipe's first RL phase]
    #[arg(long, conflicts_with = "seat")]
    pub temperature: Option<f32>,

    /// Maximum number of information sets of the game
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10_000,
        requires = "value",
        conflicts_with = "seat"
    )]
    pub max_sets: usize,

    /// Print one JSON object instead of a table; with --value, it contains the probabilities of all
    /// moves
    #[arg(long, conflicts_with = "seat")]
    pub json: bool,
}

/// Name of the opponent that chooses random moves and needs no model.
const RANDOM: &str = "random";
/// Name of the opponent that plays the equilibrium, which the rules of some games know.
const EQUILIBRIUM: &str = "equilibrium";
/// Name of the opponent that knows the policy and plays the best response to it.
const BEST_RESPONSE: &str = "best_response";

/// Row of the table of values: the expected values of all seats against one opponent.
struct ValueRow {
    opponent: String,
    values: Vec<f64>,
}

/// Prints the expected values of the policies that `source` names, against each opponent.
pub fn main(game: &dyn Game, source: &str, args: &ValueArgs) -> anyhow::Result<ExitCode> {
    let players = Players::find(source, args.recipe.as_deref())?;
    let recipe = &players.recipe;
    let options = game_options(recipe, game.name())?;
    let tree = GameTree::new(game, &options.options, args.max_sets)
        .map_err(|error| unusable(format!("{error}; see --max-sets")))?;
    let temperature = select_temperature(args.temperature, recipe)?;
    let known = tree.equilibrium(game);
    let against = select_opponents(args, known.is_some(), tree.seats().len())?;
    // Opponents get the same prompts.
    let sources = against.iter().filter(|name| !is_built_in_opponent(name));
    let opponents = sources.map(|name| Players::find_opponent(name, recipe));
    let opponents = opponents.collect::<anyhow::Result<Vec<Players>>>()?;
    let all: Vec<&Players> = std::iter::once(&players).chain(&opponents).collect();
    let scored =
        crate::create_runtime()?.block_on(score_moves(&all, (&options, &tree), temperature))?;
    let strategies: Vec<Strategy> = scored
        .iter()
        .map(|of| of.iter().map(|probabilities| probabilities.choices.clone()).collect())
        .collect();
    let own = &strategies[0];
    let mut loaded = strategies[1..].iter();
    let mut rows = Vec::with_capacity(against.len());
    for opponent in against {
        let plays = match opponent.as_str() {
            RANDOM => Some(tree.uniform_strategy()),
            EQUILIBRIUM => known.clone(),
            BEST_RESPONSE => None,
            _ => loaded.next().cloned(),
        };
        let values = (0..tree.seats().len())
            .map(|seat| {
                let played = match &plays {
                    Some(plays) => tree.combine_strategies(seat, own, plays),
                    None => tree.best_response(1 - seat, own),
                };
                tree.values(&played)[seat]
            })
            .collect();
        rows.push(ValueRow { opponent, values });
    }
    let legal = legal_fractions(&tree, &scored[0]);
    if args.json {
        let mut report = json!({
            "game": game.name(),
            "source": source,
            "temperature": temperature,
            "seats": tree.seats().iter().map(|seat| &seat.role).collect::<Vec<_>>(),
            "legal": legal,
            "information_sets": describe_sets(&tree, &scored[0]),
        });
        let values: BTreeMap<String, Vec<f64>> =
            rows.into_iter().map(|row| (row.opponent, row.values)).collect();
        report["values"] = json!(values);
        screen::print_line(&report.to_string());
    } else {
        let sets = tree.information_sets().len();
        screen::print(&format!(
            "{} · {source} · {sets} information sets · temperature {temperature}\n{}",
            game.name(),
            format_table(&tree, &rows, &legal)
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn is_built_in_opponent(opponent: &str) -> bool {
    [RANDOM, EQUILIBRIUM, BEST_RESPONSE].contains(&opponent)
}

/// Returns the names of the opponents, in the order of the table.
///
/// # Errors
/// Returns an error if a requested opponent does not exist in the game.
fn select_opponents(
    args: &ValueArgs,
    has_equilibrium: bool,
    seats: usize,
) -> anyhow::Result<Vec<String>> {
    let words = [(RANDOM, true), (EQUILIBRIUM, has_equilibrium), (BEST_RESPONSE, seats == 2)];
    let known: Vec<String> =
        words.into_iter().filter(|(_, has)| *has).map(|(word, _)| word.to_owned()).collect();
    if args.against.is_empty() {
        return Ok(known);
    }
    if let Some(missing) =
        args.against.iter().find(|name| is_built_in_opponent(name) && !known.contains(name))
    {
        return Err(unusable(format!(
            "--against {missing}: the game has no such opponent; use {}, or a source of policies",
            known.join(", ")
        )));
    }
    Ok(args.against.clone())
}

/// Creates the options of the game that the recipe plays.
///
/// # Errors
/// Returns an error if the recipe plays another game, or a game whose rules run in another program.
pub fn game_options(recipe: &Recipe, game: &str) -> anyhow::Result<GameOptions> {
    let keys = &recipe.game;
    if keys.name != game || !keys.command.is_empty() {
        let plays = match keys.name.as_str() {
            "" => "no game".to_owned(),
            name if keys.command.is_empty() => format!("the game {name:?}"),
            name => format!("the program of {name:?}"),
        };
        return Err(unusable(format!(
            "the recipe plays {plays}, but the command needs the built-in game {game:?}; give its \
             recipe with --recipe"
        )));
    }
    let rules = GameRules::from_built_in_game(game).map_err(unusable)?;
    Ok(recipe.game_options(rules))
}

/// Returns the sampling temperature of the policies.
///
/// # Errors
/// Returns an error if the temperature is out of range.
pub fn select_temperature(wanted: Option<f32>, recipe: &Recipe) -> anyhow::Result<f32> {
    let of_phase = recipe.phase.iter().find_map(|phase| match phase {
        Phase::Rl(keys) => Some(keys.temperature),
        _ => None,
    });
    let temperature = wanted.or(of_phase).unwrap_or(1.0);
    if temperature == 0.0 {
        let why = "--temperature is 0, at which a policy has no probabilities; it must be in \
                   0.01..=100";
        return Err(unusable(why.to_owned()));
    }
    SamplingParams { temperature, ..SamplingParams::default() }.validate()?;
    Ok(temperature)
}

/// Computes, for each seat, the probability that a completion is one of the scored completions. The
/// probability is averaged over the moves of matches against random opponents.
fn legal_fractions(tree: &GameTree, scored: &[MoveProbabilities]) -> Vec<f64> {
    let own: Strategy = scored.iter().map(|of| of.choices.clone()).collect();
    let fraction = |seat: usize| {
        let reach = tree.reach(&tree.combine_strategies(seat, &own, &tree.uniform_strategy()));
        let sets = tree.information_sets().iter().zip(scored.iter().zip(reach));
        let of_seat = sets.filter(|(set, _)| set.seat == seat);
        let (legal, all) = of_seat.fold((0.0, 0.0), |(legal, all), (_, (scored, reach))| {
            (legal + reach * scored.legal, all + reach)
        });
        legal / all
    };
    (0..tree.seats().len()).map(fraction).collect()
}

/// Describes every information set in JSON, with the probabilities of its choices.
fn describe_sets(tree: &GameTree, scored: &[MoveProbabilities]) -> Vec<Value> {
    let sets = tree.information_sets().iter().zip(scored).enumerate();
    sets.map(|(index, (set, scored))| {
        let path = tree.path(index);
        let observed: Vec<&String> = path.iter().flat_map(|(set, _)| &set.observed).collect();
        json!({
            "seat": tree.seats()[set.seat].role,
            "observed": observed,
            "choices": set.choices,
            "probabilities": scored.choices,
            "legal": scored.legal,
        })
    })
    .collect()
}

/// Formats one row for each opponent, and a row with the fractions of legal completions.
fn format_table(tree: &GameTree, rows: &[ValueRow], legal: &[f64]) -> String {
    let mut table = format_line("value against", tree.seats().iter().map(|seat| seat.role.clone()));
    for ValueRow { opponent, values } in rows {
        table += &format_line(opponent, values.iter().map(|value| format!("{value:+.4}")));
    }
    let fractions = legal.iter().map(|fraction| format!("{:.1} %", 100.0 * fraction));
    table + &format_line("legal replies", fractions)
}

fn format_line(name: &str, cells: impl Iterator<Item = String>) -> String {
    let cells: String = cells.map(|cell| format!("{cell:>12}")).collect();
    format!("{name:<24}{cells}\n")
}
