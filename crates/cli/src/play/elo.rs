//! Elo ratings of the checkpoints of a run: `levade play GAME --elo RUN`.
//!
//! Every two checkpoints play each other, in turn with each side of the game. Cards and roles are
//! the same for all pairs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use futures_util::{StreamExt, TryStreamExt, stream};
use levade_agent::game::{Contestant, GameOptions, MatchSeeds, play_versus};
use levade_game::{Game, PairedGame, Rating, elo};
use levade_policy::SamplingParams;
use levade_run::dir::RunDir;
use serde_json::json;

use super::players::{Players, SeatedAgent, checkpoint_steps, seat_agent_names, use_each_model};
use super::value::{game_options, select_temperature};
use crate::failure::unusable;
use crate::screen;

/// Options of `levade play GAME --elo`.
#[derive(clap::Args)]
pub struct EloArgs {
    /// Rate the checkpoints of this run by matches between them
    #[arg(long, value_name = "RUN", conflicts_with_all = ["seat", "value", "options"])]
    pub elo: Option<String>,

    /// Number of matches of each pair of checkpoints with each assignment of sides
    #[arg(long, value_name = "N", default_value_t = 50, requires = "elo", conflicts_with = "seat")]
    pub games: u64,

    /// Step of a rated checkpoint; 0 for the first version; can be repeated [default: the first
    /// version and all checkpoints]
    #[arg(long = "step", value_name = "STEP", requires = "elo", conflicts_with = "seat")]
    pub steps: Vec<u64>,
}

/// Number of bootstrap resamples for the intervals of the ratings.
const RESAMPLES: u32 = 1000;
/// Maximum number of matches that are played concurrently.
const CONCURRENCY: usize = 16;

/// Plays matches between the checkpoints of a run, and prints the rating of every checkpoint.
pub fn main(
    game: &dyn Game,
    run: &str,
    args: &EloArgs,
    sampling: (u64, Option<f32>, bool),
) -> anyhow::Result<ExitCode> {
    let (seed, wanted_temperature, json) = sampling;
    let mut steps = args.steps.clone();
    if steps.is_empty() {
        steps = checkpoint_steps(&RunDir::open(Path::new(run))?);
    }
    steps.sort_unstable();
    steps.dedup();
    if steps.len() < 2 || args.games == 0 {
        return Err(unusable(format!(
            "--elo compares at least two checkpoints in at least one match, but {run} has the \
             steps {steps:?} and --games is {}; `run.checkpoint_every` and `run.keep` determine \
             which steps have a checkpoint",
            args.games
        )));
    }
    let versions = steps.iter().map(|step| Players::find(&format!("{run}@{step}"), None));
    let versions = versions.collect::<anyhow::Result<Vec<Players>>>()?;
    let options = game_options(&versions[0].recipe, game.name())?;
    let temperature = select_temperature(wanted_temperature, &versions[0].recipe)?;
    let params = SamplingParams { temperature, ..SamplingParams::default() };
    let series = MatchSeries { options: &options, params, seed, games: args.games };
    let played = crate::create_runtime()?.block_on(series.play(game, &versions, &steps))?;
    let ratings = elo(steps.len(), &played, RESAMPLES, seed)?;
    if json {
        let mut rows = Vec::new();
        for (step, Rating { estimate, low, high }) in steps.iter().zip(&ratings) {
            rows.push(json!({"step": step, "elo": estimate, "low": low, "high": high}));
        }
        let report = json!({
            "game": game.name(),
            "run": run,
            "temperature": temperature,
            "matches": played.len(),
            "ratings": rows,
        });
        screen::print_line(&report.to_string());
    } else {
        screen::print(&format_table(&steps, &ratings, &played));
    }
    Ok(ExitCode::SUCCESS)
}

/// Settings of the matches between all pairs of versions.
struct MatchSeries<'a> {
    options: &'a GameOptions,
    params: SamplingParams,
    /// Seed of the sampled tokens. It is also the first game seed: the matches of a pair have
    /// consecutive game seeds from this number.
    seed: u64,
    games: u64,
}

impl MatchSeries<'_> {
    /// Plays the matches between all pairs of versions.
    ///
    /// # Errors
    /// Returns an error if a model cannot be opened or if a match fails.
    async fn play(
        &self,
        game: &dyn Game,
        versions: &[Players],
        steps: &[u64],
    ) -> anyhow::Result<Vec<PairedGame>> {
        let start = game.start(&self.options.options, self.seed)?;
        let agents = seat_agent_names(self.options, &start.seats)?;
        let contestant =
            |step: &u64| Contestant { name: format!("step-{step}"), agents: BTreeMap::new() };
        let mut contestants: Vec<Contestant> = steps.iter().map(contestant).collect();
        let all: Vec<&Players> = versions.iter().collect();
        use_each_model(&all, &agents, CONCURRENCY, async |seated: Vec<SeatedAgent>| {
            for SeatedAgent { players, agent } in seated {
                contestants[players].agents.insert(agent.name.clone(), agent);
            }
            Ok::<(), anyhow::Error>(())
        })
        .await?;
        let mut sides: Vec<&str> = start.seats.iter().map(|seat| seat.side.as_str()).collect();
        sides.sort_unstable();
        sides.dedup();
        let mut matches = Vec::new();
        for one in 0..steps.len() {
            for other in one + 1..steps.len() {
                for side in &sides {
                    for game_seed in self.seed..self.seed + self.games {
                        matches.push(([one, other], *side, game_seed));
                    }
                }
            }
        }
        let contestants = &contestants;
        let played = matches.into_iter().zip(0..).map(|(of_match, stream)| async move {
            let (players, side, game) = of_match;
            let pair = players.map(|index| &contestants[index]);
            let seeds = MatchSeeds { game, sampling: self.seed, stream };
            let score = play_versus(self.options, pair, side, seeds, &self.params).await;
            let score = score.map_err(anyhow::Error::msg).with_context(|| {
                format!("the match of {} and {} at seed {game}", pair[0].name, pair[1].name)
            })?;
            Ok::<_, anyhow::Error>(PairedGame { players, score })
        });
        stream::iter(played).buffered(CONCURRENCY).try_collect().await
    }
}

/// Formats one row for each checkpoint: its rating, the interval of the rating, and the results of
/// its matches.
fn format_table(steps: &[u64], ratings: &[Rating], played: &[PairedGame]) -> String {
    let mut table =
        format!("{:>8}{:>9}{:>20}{:>8}{:>8}{:>8}\n", "step", "elo", "95 %", "won", "drawn", "lost");
    for (index, (step, Rating { estimate, low, high })) in steps.iter().zip(ratings).enumerate() {
        let scores = played.iter().filter_map(|game| match game.players {
            [one, _] if one == index => Some(game.score),
            [_, other] if other == index => Some(1.0 - game.score),
            _ => None,
        });
        let scores: Vec<f64> = scores.collect();
        let count = |value: f64| scores.iter().filter(|score| **score == value).count();
        let interval = format!("{low:+.0} to {high:+.0}");
        let (won, drawn, lost) = (count(1.0), count(0.5), count(0.0));
        let _ =
            writeln!(table, "{step:>8}{estimate:>+9.0}{interval:>20}{won:>8}{drawn:>8}{lost:>8}");
    }
    table
}
