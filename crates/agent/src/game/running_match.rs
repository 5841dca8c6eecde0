//! Matches in progress, whose rules run in this process or in a worker.

use std::sync::Arc;

use levade_game::{Event, Move, Next, Seat, Start, State};
use serde_json::{Value, json};

use super::options::GameRules;
use super::workers::{GameWorkerResponse, GameWorkers};

/// Running match with its current position. The rules are built in, or run in a worker process.
pub(super) enum RunningMatch {
    BuiltIn(Box<dyn State>),
    Worker { workers: Arc<GameWorkers>, position: Value, next: Next },
}

impl RunningMatch {
    /// Starts a match. Returns the match, its seats, and the events at its start.
    ///
    /// # Errors
    /// Returns a message if the rules reject the options, or if the worker fails.
    pub async fn start(
        rules: &GameRules,
        options: &Value,
        seed: u64,
    ) -> Result<(Self, Vec<Seat>, Vec<Event>), String> {
        match rules {
            GameRules::BuiltIn(game) => {
                let Start { seats, events, state } =
                    game.start(options, seed).map_err(|error| error.to_string())?;
                Ok((RunningMatch::BuiltIn(state), seats, events))
            }
            GameRules::Workers(workers) => {
                let body = json!({"start": {"options": options, "seed": seed}});
                let GameWorkerResponse { seats, events, next, state } =
                    workers.send_request(body).await?;
                if seats.is_empty() || seats.iter().enumerate().any(|(i, seat)| seat.index != i) {
                    return Err(format!(
                        "the game {} must report at least one seat, with the indices 0, 1, …",
                        workers.name
                    ));
                }
                let workers = Arc::clone(workers);
                let running = RunningMatch::Worker { workers, position: state, next: next.into() };
                Ok((running, seats, events))
            }
        }
    }

    /// Returns what happens next in the match: requests for moves, or its end.
    pub fn next(&self) -> Next {
        match self {
            RunningMatch::BuiltIn(state) => state.next(),
            RunningMatch::Worker { next, .. } => next.clone(),
        }
    }

    /// Applies the moves of a turn, each with the index of its seat. Returns the events that
    /// follow.
    ///
    /// # Errors
    /// Returns a message if the rules reject a move, or if the worker fails.
    pub async fn apply_moves(&mut self, moves: &[(usize, Move)]) -> Result<Vec<Event>, String> {
        match self {
            RunningMatch::BuiltIn(state) => state.apply(moves).map_err(|error| error.to_string()),
            RunningMatch::Worker { workers, position, next } => {
                let body = json!({"state": position, "apply": moves});
                let response = workers.send_request(body).await?;
                *position = response.state;
                *next = response.next.into();
                Ok(response.events)
            }
        }
    }

    /// Returns the complete position of the match, as JSON for the record.
    pub fn save(&self) -> Value {
        match self {
            RunningMatch::BuiltIn(state) => state.save(),
            RunningMatch::Worker { position, .. } => position.clone(),
        }
    }
}
