//! Agent loop of games: the rules request moves from seats, and the policies of agents make them.
//!
//! Each seat has a conversation of its own, in which its player reads what the seat may observe. A
//! completion is a JSON object with private `reasoning`, a public statement `say`, and a `move`.
//! After a completion that is not a legal move, the player reads the reason and tries again. After
//! `retries` such completions, the default move of the rules is played.
//!
//! # Guarantees
//! - **Names.** A seat acts under the recorded name `AGENT@SEAT`, with seats counted from 1.
//!   Conversations and random streams of two seats of one agent are independent.
//! - **Secrets.** `reasoning` stays in the conversation of its seat.
//! - **Replay.** The scorer input `game` has the seed, the moves and the position after each turn.
//!   With the rules, they reproduce the match or continue it from any turn.
//! - **Deadline.** A match that is not over in time fails, and its error names the seats that it
//!   waited for. A failed match has no rewards.

mod move_format;
mod options;
mod player;
mod probabilities;
mod record;
mod running_match;
mod versus;
mod workers;

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::join_all;
use levade_call::{Backend, Cast, Party, SamplingRule};
use levade_game::{Event, Move, Next, Seat, SeatOutcome};
use levade_tasks::Task;
use levade_tree::{Finish, Outcome, seat_name};
use tracing::{Instrument, debug_span};

pub use options::{DEFAULT_FORMAT, GameOptions, GameRules, INSTRUCTIONS, PolicyPrompts};
pub use probabilities::{MoveProbabilities, compute_move_probabilities};
pub use versus::{Contestant, MatchSeeds, play_versus};
pub use workers::GameWorkers;

use crate::cast::{CallerKind, PartyBuilder};
use crate::recorded_calls::{CLOSE_TIMEOUT, add_recorded_calls};
use crate::roster::Player;
use crate::teacher_demonstrations::{ImitatingPolicy, create_attempt};
use crate::{Agent, AgentLoop, Attempt, AttemptContext};

use player::SeatPlayer;
use record::MatchRecord;
use running_match::RunningMatch;

/// Agent loop that plays matches of one game. Each match is an attempt.
#[derive(Clone)]
pub struct GameLoop {
    /// Game of the run with its options, and the agents that play the seats.
    pub options: Arc<GameOptions>,
}

#[async_trait]
impl AgentLoop for GameLoop {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let span = debug_span!("game", id = %context.name);
        self.run_attempt(context).instrument(span).await
    }

    /// Returns true: a teacher can play all seats whose policies are sampled in this run.
    fn can_be_taught(&self, _: &Agent) -> bool {
        true
    }
}

/// State of a match that the game loop plays.
struct GameMatch<'a> {
    options: &'a GameOptions,
    running: RunningMatch,
    players: Vec<SeatPlayer>,
    cast: Cast,
    record: MatchRecord,
    /// Trained policies whose seats a teacher plays.
    imitating: Vec<ImitatingPolicy>,
    /// Names of the seats whose moves the match waits for. The error of a timeout quotes them.
    waiting: String,
}

/// Returns the seed of the match that a task requests.
///
/// # Errors
/// Returns a message if the task has no seed.
fn read_match_seed(task: &Task) -> Result<u64, String> {
    task.row.get("seed").and_then(serde_json::Value::as_u64).ok_or_else(|| {
        let id = &task.id;
        format!("the task {id} has no `seed`; take tasks of kind \"seeds\"")
    })
}

impl GameLoop {
    /// Starts a match at a task in the same way as an attempt, and drops it before the first move.
    /// Returns the seats of the match.
    ///
    /// # Errors
    /// Returns a message if the task has no seed, if the rules fail or reject the options, or if no
    /// agent plays a seat.
    pub async fn dry_start(&self, task: &Task) -> Result<Vec<Seat>, String> {
        let GameOptions { rules, options: keys, .. } = &*self.options;
        let (_, seats, _) = RunningMatch::start(rules, keys, read_match_seed(task)?).await?;
        seats.iter().try_for_each(|seat| self.options.find_agent_name(seat).map(|_| ()))?;
        Ok(seats)
    }

    async fn run_attempt(&self, context: AttemptContext) -> Attempt {
        let own = context.find_own_agent().and_then(|agent| context.select_player(agent));
        let own = match own {
            Ok(player) => player,
            Err(why) => return Attempt::failed("policies", why),
        };
        let timeout = context.limits.attempt_timeout;
        let name = self.options.rules.name();
        let opening = own.wait_within(timeout, self.open_match(&context)).await;
        let mut played = match opening {
            Some(Ok(opened)) => opened,
            Some(Err(why)) => return Attempt::failed("game", why),
            None => {
                let why = format!("the game {name} did not start within {timeout:?}");
                return Attempt::failed("game", why);
            }
        };
        let result = own.wait_within(timeout, played.play_to_end()).await;
        let result = result.unwrap_or_else(|| {
            let waiting = &played.waiting;
            Err(format!("the game {name} was not over within {timeout:?}: waiting for {waiting}"))
        });
        let GameMatch { players, cast, record, imitating, .. } = played;
        let recorded = cast.recorder().close(CLOSE_TIMEOUT).await;
        let mut outcome = Outcome::initial();
        add_recorded_calls(&mut outcome, &recorded);
        outcome.cast = players.iter().map(|p| (p.name.clone(), p.policy.clone())).collect();
        let result =
            result.and_then(|outcomes| record.apply_to_outcome(&players, &outcomes, &mut outcome));
        match result {
            Ok(()) => outcome.finish = Finish::Ended,
            Err(why) => {
                outcome.add_warning("game", why.as_str());
                outcome.error = Some(why);
            }
        }
        if context.teacher.is_some() {
            return create_attempt(outcome, imitating, recorded.external).await;
        }
        Attempt::new(recorded.trajectory, outcome)
    }

    /// Starts the match of an attempt, and creates the players of its seats.
    ///
    /// # Errors
    /// Returns a message if the task has no seed, if the rules reject the options, or if a seat has
    /// no agent.
    async fn open_match(&self, context: &AttemptContext) -> Result<GameMatch<'_>, String> {
        let options = &*self.options;
        let seed = read_match_seed(&context.task)?;
        let (running, seats, events) =
            RunningMatch::start(&options.rules, &options.options, seed).await?;
        let parties = PartyBuilder::new(context, CallerKind::ToolLoop)?;
        let mut players = Vec::with_capacity(seats.len());
        let mut cast = Vec::with_capacity(seats.len());
        let mut imitating = Vec::new();
        for seat in &seats {
            let agent_name = options.find_agent_name(seat)?;
            let agent = context.roster.find(agent_name).ok_or_else(|| {
                format!(
                    "the seat {} has the agent {agent_name:?}, which does not run here",
                    seat.name
                )
            })?;
            let name = seat_name(agent_name, seat.index + 1);
            let player = context.select_player_for_role(agent, &name)?;
            let mut party = parties.create_party(agent, player)?;
            let is_constrained = options.constrained && can_constrain_completions(&party, player);
            if let (true, SamplingRule::Fixed(params)) = (is_constrained, &party.sampling) {
                // With fixed parameters, the format that a call requests is ignored.
                party.sampling = SamplingRule::Default(params.clone());
            }
            if context.teacher.is_some() && player.is_trained {
                imitating.extend(ImitatingPolicy::new(&name, player));
            }
            cast.push(Arc::new(party.in_seat(seat.index + 1)));
            let mut player = SeatPlayer::new(name, seat, (agent, player), options);
            player.limits = *context.agent_limits(agent);
            player.is_constrained = is_constrained;
            players.push(player);
        }
        let mut opened = GameMatch {
            options,
            record: MatchRecord::new(options.rules.name(), seed, seats, &running),
            running,
            players,
            // Every seat has its own limit of tokens.
            cast: Cast::new(cast, context.create_recorder(usize::MAX)),
            imitating,
            waiting: String::new(),
        };
        opened.deliver_events(&events);
        Ok(opened)
    }
}

/// Returns whether the completions of a seat can be constrained. Completions that a trained policy
/// samples are not, because tokens that a grammar restricts are never trained.
fn can_constrain_completions(party: &Party, player: &Player) -> bool {
    !player.is_trained || matches!(party.backend, Backend::Messages(_))
}

impl GameMatch<'_> {
    /// Plays the match to its end.
    ///
    /// # Errors
    /// Returns a message that names the seat if a call fails, or the game if its rules fail.
    async fn play_to_end(&mut self) -> Result<Vec<SeatOutcome>, String> {
        loop {
            let requests = match self.running.next() {
                Next::Over(outcomes) => return Ok(outcomes),
                Next::Requests(requests) => requests,
            };
            self.waiting = self.describe_waiting_seats(&requests);
            let cast = &self.cast;
            let options = self.options;
            let decisions = self.players.iter_mut().enumerate().filter_map(|(index, player)| {
                let request = requests.iter().find(|request| request.seat == index)?;
                Some(async move {
                    player.request_move(cast, options, request).await.map(|played| (index, played))
                })
            });
            let moves: Vec<(usize, Move)> =
                join_all(decisions).await.into_iter().collect::<Result<_, String>>()?;
            if moves.len() != requests.len() {
                return Err(format!(
                    "the game {} requested a move from a seat that does not exist, or two moves \
                     from one seat",
                    options.rules.name()
                ));
            }
            self.waiting = format!("the rules of {}", options.rules.name());
            let events = self.running.apply_moves(&moves).await?;
            self.deliver_events(&events);
            self.record.add_turn(moves, self.running.save());
        }
    }

    /// Returns the names of the seats that have to move, each with the kind of its move.
    fn describe_waiting_seats(&self, requests: &[levade_game::MoveRequest]) -> String {
        let name = |seat: usize| self.players.get(seat).map_or("?", |player| player.name.as_str());
        let seats =
            requests.iter().map(|request| format!("{} ({})", name(request.seat), request.kind));
        seats.collect::<Vec<_>>().join(", ")
    }

    /// Delivers each event to the players of the seats that may observe the event.
    fn deliver_events(&mut self, events: &[Event]) {
        for (index, player) in self.players.iter_mut().enumerate() {
            let seen = events.iter().filter(|event| event.to.contains(index));
            player.observe_events(seen.map(|event| event.text.as_str()));
        }
    }
}

#[cfg(test)]
#[path = "game_tests.rs"]
mod tests;
