//! Tic-tac-toe: two seats mark cells 1 to 9 in turn; three marks in a line win.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::options::read_position;
use crate::{
    Audience, Choice, Event, Game, GameError, Move, MoveRequest, Next, Seat, SeatOutcome, Start,
    State, moves_in_seat_order, read_options,
};

const NAME: &str = "tic_tac_toe";

/// Cells of each line of the board. A seat that marks all three cells of a line wins.
const LINES: [[usize; 3]; 8] =
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]];

/// Tic-tac-toe. Rewards are 1 for a win, 0 for a draw and −1 for a loss; the options set other
/// values.
pub struct TicTacToe;

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    win: f64,
    draw: f64,
    loss: f64,
}

impl Default for Options {
    fn default() -> Self {
        Options { win: 1.0, draw: 0.0, loss: -1.0 }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Board {
    options: Options,
    /// Seat that marked each cell. `None` if the cell is empty.
    cells: [Option<usize>; 9],
}

impl Game for TicTacToe {
    fn name(&self) -> &'static str {
        NAME
    }

    fn start(&self, options: &Value, _: u64) -> Result<Start, GameError> {
        let options: Options = read_options(NAME, options)?;
        let seats = [("X", "first"), ("O", "second")].into_iter().enumerate();
        let seats = seats.map(|(index, (name, order))| Seat {
            index,
            name: name.to_owned(),
            role: name.to_owned(),
            side: name.to_owned(),
            instructions: format!(
                "You play tic-tac-toe as {name} and move {order}. Players mark one empty cell in \
                 turn. Three marks in a row, column or diagonal win. The cells are numbered 1 to 9, \
                 row by row."
            ),
        });
        let state = Box::new(Board { options, cells: [None; 9] });
        Ok(Start { seats: seats.collect(), events: Vec::new(), state })
    }

    fn starts(&self, options: &Value) -> Result<Option<Vec<Start>>, GameError> {
        Ok(Some(vec![self.start(options, 0)?]))
    }
}

impl Board {
    /// Returns the index of the seat that acts next.
    fn next_seat(&self) -> usize {
        self.cells.iter().flatten().count() % 2
    }

    fn winner(&self) -> Option<usize> {
        let full = |line: &[usize; 3]| {
            let first = self.cells[line[0]]?;
            line.iter().all(|cell| self.cells[*cell] == Some(first)).then_some(first)
        };
        LINES.iter().find_map(full)
    }

    /// Formats the board as text. An empty cell shows its number.
    fn format_board(&self) -> String {
        let cell = |index: usize| match self.cells[index] {
            Some(0) => "X".to_owned(),
            Some(_) => "O".to_owned(),
            None => (index + 1).to_string(),
        };
        let row = |row: usize| (0..3).map(|column| cell(3 * row + column)).collect::<Vec<_>>();
        (0..3).map(|index| row(index).join(" ")).collect::<Vec<_>>().join("\n")
    }
}

impl State for Board {
    fn next(&self) -> Next {
        let winner = self.winner();
        let legal: Vec<Value> =
            (0..9).filter(|i| self.cells[*i].is_none()).map(|i| json!(i + 1)).collect();
        let Some(first) = legal.first().filter(|_| winner.is_none()) else {
            let outcome = |seat| {
                let reward = match winner {
                    None => self.options.draw,
                    Some(winner) if winner == seat => self.options.win,
                    Some(_) => self.options.loss,
                };
                let won = f64::from(u8::from(winner == Some(seat)));
                let drawn = f64::from(u8::from(winner.is_none()));
                let parts = vec![("won".to_owned(), won), ("drawn".to_owned(), drawn)];
                SeatOutcome { seat, reward, parts, transitions: Vec::new() }
            };
            return Next::Over((0..2).map(outcome).collect());
        };
        Next::Requests(vec![MoveRequest {
            prompt: format!("The board:\n{}\nChoose an empty cell.", self.format_board()),
            default: Move::choice(first.clone()),
            ..MoveRequest::new(self.next_seat(), "mark", Choice::OneOf(legal))
        }])
    }

    fn apply(&mut self, moves: &[(usize, Move)]) -> Result<Vec<Event>, GameError> {
        let Next::Requests(requests) = self.next() else {
            return moves_in_seat_order(&[], moves).map(|_| Vec::new());
        };
        let mut events = Vec::new();
        for (seat, played) in moves_in_seat_order(&requests, moves)? {
            let cell = played.choice.as_u64().unwrap_or_default() as usize;
            self.cells[cell - 1] = Some(seat);
            let name = ["X", "O"][seat];
            let text = format!("{name} marks cell {cell}.");
            events.push(Event { to: Audience::All, from: Some(seat), text });
        }
        Ok(events)
    }

    fn save(&self) -> Value {
        json!(self)
    }

    fn load(&mut self, position: &Value) -> Result<(), GameError> {
        *self = read_position(NAME, position)?;
        Ok(())
    }
}
