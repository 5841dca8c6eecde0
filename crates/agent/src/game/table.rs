//! Matches in progress, whose rules run in this process or in a worker.
//!
//! A worker answers two requests, each in one line of JSON. Positions are part of the requests, so
//! any worker can answer any request, and a restarted worker continues a match.

use std::time::Duration;

use levade_game::{Event, Move, Next, Seat, SeatOutcome, Start, State};
use levade_process::{Launch, Pool, Request, Supervisor};
use serde::Deserialize;
use serde_json::{Value, json};

use super::options::Rules;
use crate::program::workers;

/// Workers that know the rules of one game.
pub struct GameWorkers {
    /// Name of the game in messages.
    pub name: String,
    pool: Pool,
    timeout: Duration,
}

impl GameWorkers {
    /// Creates at most `count` workers, which are started on demand. `timeout` is the timeout of
    /// one request.
    pub fn new(
        name: &str,
        supervisor: &Supervisor,
        launch: Launch,
        count: usize,
        timeout: Duration,
    ) -> Self {
        let pool = workers(supervisor, launch, None, (count, 1));
        GameWorkers { name: name.to_owned(), pool, timeout }
    }

    async fn request(&self, body: Value) -> Result<Response, String> {
        let name = &self.name;
        let request = Request::new("game", body);
        let response = self.pool.request(request, self.timeout).await;
        let response = response.map_err(|error| format!("the game {name}: {error}"))?;
        if let Some(error) = response["error"].as_str() {
            return Err(format!("the game {name}: {error}"));
        }
        serde_json::from_value(response)
            .map_err(|error| format!("the game {name} sent an invalid response: {error}"))
    }
}

/// Response of a worker.
#[derive(Deserialize)]
struct Response {
    #[serde(default)]
    seats: Vec<Seat>,
    #[serde(default)]
    events: Vec<Event>,
    next: WorkerNext,
    state: Value,
}

/// Next turn in a response.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum WorkerNext {
    Ask(Vec<levade_game::Ask>),
    Over(Vec<SeatOutcome>),
}

impl From<WorkerNext> for Next {
    fn from(next: WorkerNext) -> Self {
        match next {
            WorkerNext::Ask(asks) => Next::Ask(asks),
            WorkerNext::Over(outcomes) => Next::Over(outcomes),
        }
    }
}

/// A match in progress.
pub(super) enum Table {
    BuiltIn(Box<dyn State>),
    Worker { workers: std::sync::Arc<GameWorkers>, position: Value, next: Next },
}

impl Table {
    /// Starts a match. Returns it with its seats and the first events.
    ///
    /// # Errors
    /// Returns a message if the rules reject the options, or if the worker fails.
    pub async fn start(
        rules: &Rules,
        options: &Value,
        seed: u64,
    ) -> Result<(Self, Vec<Seat>, Vec<Event>), String> {
        match rules {
            Rules::BuiltIn(game) => {
                let Start { seats, events, state } =
                    game.start(options, seed).map_err(|error| error.to_string())?;
                Ok((Table::BuiltIn(state), seats, events))
            }
            Rules::Workers(workers) => {
                let body = json!({"start": {"options": options, "seed": seed}});
                let Response { seats, events, next, state } = workers.request(body).await?;
                if seats.is_empty() || seats.iter().enumerate().any(|(i, seat)| seat.index != i) {
                    return Err(format!(
                        "the game {} must report at least one seat, with the indices 0, 1, …",
                        workers.name
                    ));
                }
                let workers = std::sync::Arc::clone(workers);
                let table = Table::Worker { workers, position: state, next: next.into() };
                Ok((table, seats, events))
            }
        }
    }

    /// Returns the next turn.
    pub fn next(&self) -> Next {
        match self {
            Table::BuiltIn(state) => state.next(),
            Table::Worker { next, .. } => next.clone(),
        }
    }

    /// Applies the moves of a turn.
    ///
    /// # Errors
    /// Returns a message if the rules reject a move, or if the worker fails.
    pub async fn apply(&mut self, moves: &[(usize, Move)]) -> Result<Vec<Event>, String> {
        match self {
            Table::BuiltIn(state) => state.apply(moves).map_err(|error| error.to_string()),
            Table::Worker { workers, position, next } => {
                let body = json!({"state": position, "apply": moves});
                let response = workers.request(body).await?;
                *position = response.state;
                *next = response.next.into();
                Ok(response.events)
            }
        }
    }

    /// Returns the complete position.
    pub fn save(&self) -> Value {
        match self {
            Table::BuiltIn(state) => state.save(),
            Table::Worker { position, .. } => position.clone(),
        }
    }
}
