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

/// Error of a game's rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GameError {
    /// There is no game of this name.
    #[error("there is no game {name:?}; available games: {available}")]
    UnknownGame {
        /// Requested name.
        name: String,
        /// Names of all games, separated by commas.
        available: String,
    },
    /// An option is unknown or out of range.
    #[error("options of the game {game}: {message}")]
    Options {
        /// Name of the game.
        game: String,
        /// Name of the option, its value, and the permitted values.
        message: String,
    },
    /// A move does not belong to the turn, or the rules forbid it.
    #[error("seat {seat}: {message}")]
    Move {
        /// Seat that moved.
        seat: usize,
        /// Reason why the move is rejected.
        message: String,
    },
    /// A saved position belongs to another game or is damaged.
    #[error("cannot restore a position of the game {game}: {message}")]
    Position {
        /// Name of the game.
        game: String,
        /// Error message of the parser.
        message: String,
    },
    /// The complete tree of the game cannot be built.
    #[error("the game {game} cannot be enumerated: {message}")]
    Tree {
        /// Name of the game.
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

/// Rules of a game, from which matches are started.
pub trait Game: Send + Sync {
    /// Returns the name of the game in recipes.
    fn name(&self) -> &'static str;

    /// Starts a match.
    ///
    /// # Errors
    /// Returns an error if an option is unknown or out of range.
    fn start(&self, options: &Value, seed: u64) -> Result<Start, GameError>;

    /// Returns all starts of a match, which are equally likely. Returns `None` if the game has too
    /// many to list.
    ///
    /// # Errors
    /// Returns an error if an option is unknown or out of range.
    fn starts(&self, options: &Value) -> Result<Option<Vec<Start>>, GameError> {
        let _ = options;
        Ok(None)
    }

    /// Returns the probabilities of the choices in a saved position in one equilibrium of the game.
    /// They depend only on what the acting seat can observe. Returns `None` if no equilibrium is
    /// known.
    fn equilibrium(&self, position: &Value) -> Option<Vec<f64>> {
        let _ = position;
        None
    }
}

/// Position of a match.
pub trait State: Send {
    /// Returns the seats that act next, or the outcomes if the match is over.
    fn next(&self) -> Next;

    /// Applies one move for each request of [`next`](Self::next), in any order, and returns what
    /// the seats observe.
    ///
    /// # Errors
    /// Returns an error if a move is missing, illegal or was not requested. The position then stays
    /// unchanged.
    fn apply(&mut self, moves: &[(usize, Move)]) -> Result<Vec<Event>, GameError>;

    /// Returns the complete position as JSON.
    fn save(&self) -> Value;

    /// Restores a position that [`save`](Self::save) returned in a match of the same game.
    ///
    /// # Errors
    /// Returns an error if `position` is not a position of this game.
    fn load(&mut self, position: &Value) -> Result<(), GameError>;
}

/// Start of a match.
pub struct Start {
    /// Seats in order: `seats[i].index` is `i`.
    pub seats: Vec<Seat>,
    /// Events that the seats observe before the first turn.
    pub events: Vec<Event>,
    /// Position at the first turn.
    pub state: Box<dyn State>,
}

/// Seat of a match.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Index of the seat, from 0.
    pub index: usize,
    /// Name by which players refer to the seat.
    pub name: String,
    /// Role in this match, such as `witch`.
    pub role: String,
    /// Side that wins or loses together, such as `wolves`.
    pub side: String,
    /// Rules and guidance for the seat. Only its player may see them.
    #[serde(default)]
    pub instructions: String,
}

/// Next turn of a match.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// These seats act simultaneously, without seeing each other's moves.
    Requests(Vec<MoveRequest>),
    /// The match is over. Contains one outcome for each seat, in order.
    Over(Vec<SeatOutcome>),
}

/// Seats that observe an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Audience {
    /// All seats.
    All,
    /// These seats only.
    Seats(Vec<usize>),
}

impl Audience {
    /// Returns whether a seat observes the event.
    pub fn contains(&self, seat: usize) -> bool {
        match self {
            Audience::All => true,
            Audience::Seats(seats) => seats.contains(&seat),
        }
    }
}

/// Observation of some seats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Seats that observe the event.
    pub to: Audience,
    /// Seat that caused the event. `None` if the moderator did.
    #[serde(default)]
    pub from: Option<usize>,
    /// Complete text, with the name of its speaker.
    pub text: String,
}

/// Outcome of one seat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SeatOutcome {
    /// Index of the seat.
    pub seat: usize,
    /// Reward of the seat for the complete match.
    pub reward: f64,
    /// Metrics by name, such as `won` or `survived`.
    #[serde(default)]
    pub parts: Vec<(String, f64)>,
    /// Rewards of single moves, each with the index of the move among the moves of the seat.
    #[serde(default)]
    pub transitions: Vec<(u32, f64)>,
}

/// Returns all games.
fn games() -> [Box<dyn Game>; 3] {
    [Box::new(TicTacToe), Box::new(Kuhn), Box::new(Werewolf)]
}

/// Returns the game with the name `name`.
///
/// # Errors
/// Returns [`GameError::UnknownGame`] if no game has this name.
pub fn find(name: &str) -> Result<Box<dyn Game>, GameError> {
    let available = games().map(|game| game.name()).join(", ");
    let unknown = || GameError::UnknownGame { name: name.to_owned(), available };
    games().into_iter().find(|game| game.name() == name).ok_or_else(unknown)
}
