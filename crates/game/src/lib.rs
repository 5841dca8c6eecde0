//! Rules of games for several seats, without models, clocks or I/O.
//!
//! A [`Game`] starts matches. A [`State`] is the position of one match: it reports which seats act
//! next ([`Next::Requests`]), applies their moves, and reports the outcome of every seat
//! ([`Next::Over`]). The moves come from the caller, such as the game loop of `levade-agent`, which
//! lets policies play the seats. A [`GameTree`] computes the exact values of strategies in a small
//! game, and [`elo`] rates players by their matches.
//!
//! # Guarantees
//! - **Determinism.** A match is a pure function of the game's options, the seed and the moves.
//! - **Fork and reset.** [`State::save`] returns the complete position as JSON at any turn, and
//!   [`State::load`] restores it. Equal moves after a restored position lead to equal outcomes.
//! - **Order of moves.** The order in which moves of one turn are passed has no effect.
//! - **Secrets.** Only the seats of an event's [`Audience`] may see it.
//!
//! # Example
//! ```
//! use levade_game::{Move, Next, find};
//! use serde_json::json;
//!
//! let game = find("tic_tac_toe")?;
//! let mut state = game.start(&json!({}), 7)?.state;
//! for cell in [1, 4, 2, 5, 3] {
//!     let Next::Requests(requests) = state.next() else { unreachable!() };
//!     state.apply(&[(requests[0].seat, Move::choice(json!(cell)))])?;
//! }
//! let Next::Over(outcomes) = state.next() else { unreachable!() };
//! assert_eq!([outcomes[0].reward, outcomes[1].reward], [1.0, -1.0]);
//! # Ok::<(), levade_game::GameError>(())
//! ```

mod elo;
mod kuhn;
mod move_request;
mod moves;
mod options;
mod shuffle;
mod tic_tac_toe;
mod tree;
mod werewolf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use elo::{PairedGame, Rating, elo};
pub use kuhn::Kuhn;
pub use move_request::{Choice, Move, MoveRequest};
pub use moves::moves_in_seat_order;
pub use options::read_options;
pub use shuffle::shuffle;
pub use tic_tac_toe::TicTacToe;
pub use tree::{GameTree, InformationSet, Strategy};
pub use werewolf::Werewolf;

/// Error of a game: of its rules, its positions, its tree, its ratings or its texts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GameError {
    /// There is no game of this name.
    #[error("there is no game {name:?}; available games: {available}")]
    UnknownGame {
        /// Requested name of a game.
        name: String,
        /// Names of all games, separated by commas.
        available: String,
    },
    /// An option of a game is unknown or out of range.
    #[error("options of the game {game}: {message}")]
    Options {
        /// Name of the game whose option is invalid.
        game: String,
        /// Name of the option, its value, and the permitted values.
        message: String,
    },
    /// A move does not belong to the turn, or the rules forbid it.
    #[error("seat {seat}: {message}")]
    Move {
        /// Index of the seat that moved.
        seat: usize,
        /// Reason why the move is rejected.
        message: String,
    },
    /// A saved position belongs to another game or is damaged.
    #[error("cannot restore a position of the game {game}: {message}")]
    Position {
        /// Name of the game that cannot restore the position.
        game: String,
        /// Error message of the parser of positions.
        message: String,
    },
    /// The complete tree of the game cannot be built.
    #[error("the game {game} cannot be enumerated: {message}")]
    Tree {
        /// Name of the game whose tree cannot be built.
        game: String,
        /// Reason why the tree cannot be built.
        message: String,
    },
    /// Ratings cannot be computed from these games.
    #[error("the ratings cannot be computed: {message}")]
    Ratings {
        /// Reason why the ratings cannot be computed.
        message: String,
    },
    /// The text file of a language lacks an entry.
    #[error("the texts in {language:?} have no entry {key:?}")]
    Text {
        /// Language of the texts.
        language: String,
        /// Name of the missing entry.
        key: String,
    },
}

/// Rules of a game, which start matches.
pub trait Game: Send + Sync {
    /// Returns the name of the game that recipes use.
    fn name(&self) -> &'static str;

    /// Starts a match with these options. The seed determines chance, such as cards and roles.
    ///
    /// # Errors
    /// Returns an error if an option is unknown or out of range.
    fn start(&self, options: &Value, seed: u64) -> Result<Start, GameError>;

    /// Returns all possible starts of a match, which are equally likely. Returns `None` if the game
    /// has too many starts to list them.
    ///
    /// # Errors
    /// Returns an error if an option is unknown or out of range.
    fn starts(&self, options: &Value) -> Result<Option<Vec<Start>>, GameError> {
        let _ = options;
        Ok(None)
    }

    /// Returns the probabilities of the choices in a saved position in one equilibrium of the game.
    /// The probabilities depend only on what the acting seat can observe. Returns `None` if the
    /// rules know no equilibrium.
    fn equilibrium(&self, position: &Value) -> Option<Vec<f64>> {
        let _ = position;
        None
    }
}

/// Current position of a match, to which moves are applied.
pub trait State: Send {
    /// Returns the requests to the seats that act next. If the match is over, returns the outcomes.
    fn next(&self) -> Next;

    /// Applies one move for each request of [`next`](Self::next), in any order. Returns the events
    /// that the seats observe.
    ///
    /// # Errors
    /// Returns an error if a move is missing, illegal or was not requested. The position then stays
    /// unchanged.
    fn apply(&mut self, moves: &[(usize, Move)]) -> Result<Vec<Event>, GameError>;

    /// Returns the complete position of the match as JSON.
    fn save(&self) -> Value;

    /// Restores a position of the same game that [`save`](Self::save) returned.
    ///
    /// # Errors
    /// Returns an error if `position` is not a position of this game.
    fn load(&mut self, position: &Value) -> Result<(), GameError>;
}

/// Start of a match: its seats, its first events and its position.
pub struct Start {
    /// Seats in order: the index of `seats[i]` is `i`.
    pub seats: Vec<Seat>,
    /// Events that the seats observe before the first turn.
    pub events: Vec<Event>,
    /// Position of the match at the first turn.
    pub state: Box<dyn State>,
}

/// Seat of a match, which one player takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Index of the seat, from 0.
    pub index: usize,
    /// Name by which players refer to the seat.
    pub name: String,
    /// Role of the seat in this match, such as `witch`.
    pub role: String,
    /// Name of the seat's side, which wins or loses together, such as `wolves`.
    pub side: String,
    /// Rules and guidance for the seat. Only the player of the seat may see them.
    #[serde(default)]
    pub instructions: String,
}

/// What happens next in a match: a turn or the end.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// The seats of these requests act simultaneously, without seeing each other's moves.
    Requests(Vec<MoveRequest>),
    /// The match is over, with one outcome for each seat, in order.
    Over(Vec<SeatOutcome>),
}

/// Audience of an event: the seats that observe the event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Audience {
    /// All seats observe the event.
    All,
    /// Only these seats observe the event.
    Seats(Vec<usize>),
}

impl Audience {
    /// Returns whether the seat with this index observes the event.
    pub fn contains(&self, seat: usize) -> bool {
        match self {
            Audience::All => true,
            Audience::Seats(seats) => seats.contains(&seat),
        }
    }
}

/// Event of a match: a text that some seats observe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Seats that observe the event.
    pub to: Audience,
    /// Index of the seat that caused the event. `None` if the moderator caused the event.
    #[serde(default)]
    pub from: Option<usize>,
    /// Complete text of the event, including the name of the speaker.
    pub text: String,
}

/// Outcome of a match for one seat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SeatOutcome {
    /// Index of the seat in the match.
    pub seat: usize,
    /// Reward of the seat for the complete match.
    pub reward: f64,
    /// Metrics of the seat by name, such as `won` or `survived`.
    #[serde(default)]
    pub parts: Vec<(String, f64)>,
    /// Rewards of single moves, each with the index of the rewarded move among the seat's moves.
    #[serde(default)]
    pub transitions: Vec<(u32, f64)>,
}

/// Returns the rules of all built-in games.
fn built_in_games() -> [Box<dyn Game>; 3] {
    [Box::new(TicTacToe), Box::new(Kuhn), Box::new(Werewolf)]
}

/// Returns the rules of the built-in game with this name.
///
/// # Errors
/// Returns [`GameError::UnknownGame`] if no game has this name.
pub fn find(name: &str) -> Result<Box<dyn Game>, GameError> {
    let available = built_in_games().map(|game| game.name()).join(", ");
    let unknown = || GameError::UnknownGame { name: name.to_owned(), available };
    built_in_games().into_iter().find(|game| game.name() == name).ok_or_else(unknown)
}
