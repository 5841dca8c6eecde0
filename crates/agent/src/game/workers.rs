//! Workers that implement the rules of a game, and respond to requests in lines of JSON.
//!
//! Positions are part of the requests, so any worker can serve any request, and a restarted worker
//! continues a match. `docs/games.md` describes the protocol.

use std::time::Duration;

use levade_game::{Event, MoveRequest, Next, Seat, SeatOutcome};
use levade_process::{Launch, Pool, Request, Supervisor};
use serde::Deserialize;
use serde_json::Value;

use crate::program::create_worker_pool;

/// Pool of worker processes that implement the rules of one game.
pub struct GameWorkers {
    /// Name of the game, for error messages.
    pub name: String,
    pool: Pool,
    timeout: Duration,
}

impl GameWorkers {
    /// Creates a pool of at most `count` workers, which are started on demand. `timeout` limits
    /// each request.
    pub fn new(
        name: &str,
        supervisor: &Supervisor,
        launch: Launch,
        count: usize,
        timeout: Duration,
    ) -> Self {
        let pool = create_worker_pool(supervisor, launch, None, (count, 1));
        GameWorkers { name: name.to_owned(), pool, timeout }
    }

    /// Sends a request to a worker, and waits for its response.
    ///
    /// # Errors
    /// Returns a message that names the game if the worker fails, reports an error, or sends an
    /// invalid response.
    pub(super) async fn send_request(&self, body: Value) -> Result<GameWorkerResponse, String> {
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

/// Response of a worker to a request.
#[derive(Deserialize)]
pub(super) struct GameWorkerResponse {
    #[serde(default)]
    pub seats: Vec<Seat>,
    #[serde(default)]
    pub events: Vec<Event>,
    pub next: WorkerNextTurn,
    pub state: Value,
}

/// Next turn of a match, as a worker's response describes it.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum WorkerNextTurn {
    #[serde(rename = "ask")]
    Requests(Vec<MoveRequest>),
    Over(Vec<SeatOutcome>),
}

impl From<WorkerNextTurn> for Next {
    fn from(next: WorkerNextTurn) -> Self {
        match next {
            WorkerNextTurn::Requests(requests) => Next::Requests(requests),
            WorkerNextTurn::Over(outcomes) => Next::Over(outcomes),
        }
    }
}
