//! Kuhn poker: two seats, three cards, one bet (Kuhn, "A simplified two-person poker", 1950).
//!
//! Each seat pays an ante of 1 and gets one of the cards J < Q < K. Seat 0 checks or bets 1. After
//! a bet, the opponent calls or folds. After a check, the opponent checks or bets, and seat 0 calls
//! or folds a bet. The higher card wins the pot. Rewards are chips won or lost.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::options::read_position;
use crate::{
    Audience, Choice, Event, Game, GameError, Move, MoveRequest, Next, Seat, SeatOutcome, Start,
    State, moves_in_seat_order, read_options, shuffle,
};

const NAME: &str = "kuhn";

/// Names of the cards, from the lowest to the highest.
const CARDS: [&str; 3] = ["J", "Q", "K"];

/// Kuhn poker, a game of two seats. The seed determines the cards.
pub struct Kuhn;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Action {
    Check,
    Bet,
    Call,
    Fold,
}

impl Action {
    fn name(self) -> &'static str {
        match self {
            Action::Check => "check",
            Action::Bet => "bet",
            Action::Call => "call",
            Action::Fold => "fold",
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Deal {
    /// Card of each seat, as an index into [`CARDS`].
    cards: [usize; 2],
    /// Actions of the match so far, in order. The seats act alternately.
    actions: Vec<Action>,
}

impl Game for Kuhn {
    fn name(&self) -> &'static str {
        NAME
    }

    fn start(&self, options: &Value, seed: u64) -> Result<Start, GameError> {
        let Options {} = read_options(NAME, options)?;
        let mut deck = [0, 1, 2];
        shuffle(seed, &mut deck);
        Ok(start_with_cards([deck[0], deck[1]]))
    }

    fn starts(&self, options: &Value) -> Result<Option<Vec<Start>>, GameError> {
        let Options {} = read_options(NAME, options)?;
        let deals = (0..3).flat_map(|own| (0..3).map(move |other| [own, other]));
        Ok(Some(deals.filter(|[own, other]| own != other).map(start_with_cards).collect()))
    }

    /// Returns Kuhn's equilibrium in which the opener never bets. The opener calls with Q at 1/3
    /// and with K always. The responder bets after a check with J at 1/3 and with K always, and
    /// calls with Q at 1/3 and with K always.
    fn equilibrium(&self, position: &Value) -> Option<Vec<f64>> {
        let Deal { cards, actions } = read_position(NAME, position).ok()?;
        let third = 1.0 / 3.0;
        let aggressive = match (&actions[..], cards[actions.len() % 2]) {
            ([], _) => 0.0,
            ([Action::Check], card) => [third, 0.0, 1.0][card],
            ([.., Action::Bet], card) => [0.0, third, 1.0][card],
            _ => return None,
        };
        Some(vec![1.0 - aggressive, aggressive])
    }
}

/// Creates the start of a match in which the seats have these cards.
fn start_with_cards(cards: [usize; 2]) -> Start {
    let seat = |index: usize| Seat {
        index,
        name: format!("Player{}", index + 1),
        role: ["opener", "responder"][index].to_owned(),
        side: format!("Player{}", index + 1),
        instructions: format!(
            "You are Player{} in Kuhn poker. Each of the two players pays 1 chip and gets one of \
             the cards J < Q < K. Player1 checks or bets 1 chip. A bet is called or folded. After \
             a check, Player2 checks or bets. After two checks or a call, the higher card wins the \
             pot.",
            index + 1
        ),
    };
    let event = |seat: usize| Event {
        to: Audience::Seats(vec![seat]),
        from: None,
        text: format!("Your card is {}.", CARDS[cards[seat]]),
    };
    Start {
        seats: (0..2).map(seat).collect(),
        events: (0..2).map(event).collect(),
        state: Box::new(Deal { cards, actions: Vec::new() }),
    }
}

impl Deal {
    /// Returns the legal actions, with the default action first. The list is empty if the deal is
    /// over.
    fn legal_actions(&self) -> &'static [Action] {
        match self.actions[..] {
            [] | [Action::Check] => &[Action::Check, Action::Bet],
            [.., Action::Bet] => &[Action::Fold, Action::Call],
            _ => &[],
        }
    }

    /// Returns the number of chips that seat 0 wins. The number is negative if seat 0 loses.
    fn chips_won(&self) -> f64 {
        let bettor = self.actions.iter().position(|action| *action == Action::Bet);
        match (self.actions.last(), bettor) {
            (Some(Action::Fold), Some(bettor)) => [1.0, -1.0][bettor % 2],
            (_, bettor) => {
                let pot = if bettor.is_some() { 2.0 } else { 1.0 };
                if self.cards[0] > self.cards[1] { pot } else { -pot }
            }
        }
    }
}

impl State for Deal {
    fn next(&self) -> Next {
        let legal = self.legal_actions();
        let Some(default) = legal.first() else {
            let outcome = |seat: usize| {
                let reward = if seat == 0 { self.chips_won() } else { -self.chips_won() };
                let won = f64::from(u8::from(reward > 0.0));
                let parts = vec![("won".to_owned(), won)];
                SeatOutcome { seat, reward, parts, transitions: Vec::new() }
            };
            return Next::Over((0..2).map(outcome).collect());
        };
        let names: Vec<&str> = legal.iter().map(|action| action.name()).collect();
        let choice = Choice::OneOf(names.iter().map(|name| json!(name)).collect());
        Next::Requests(vec![MoveRequest {
            prompt: format!("Your turn: {}?", names.join(" or ")),
            default: Move::choice(json!(default.name())),
            ..MoveRequest::new(self.actions.len() % 2, default.name(), choice)
        }])
    }

    fn apply(&mut self, moves: &[(usize, Move)]) -> Result<Vec<Event>, GameError> {
        let Next::Requests(requests) = self.next() else {
            return moves_in_seat_order(&[], moves).map(|_| Vec::new());
        };
        let mut events = Vec::new();
        for (seat, played) in moves_in_seat_order(&requests, moves)? {
            let chosen = self.legal_actions().iter().find(|action| played.choice == action.name());
            self.actions.extend(chosen);
            let action = chosen.map(|action| action.name()).unwrap_or_default();
            let text = format!("Player{}: {action}.", seat + 1);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_match_payoff_table() {
        use Action::{Bet, Call, Check, Fold};
        let chips =
            |cards, actions: &[Action]| Deal { cards, actions: actions.to_vec() }.chips_won();
        for (actions, high, low) in [
            (&[Check, Check][..], 1.0, -1.0),
            (&[Bet, Fold], 1.0, 1.0),
            (&[Bet, Call], 2.0, -2.0),
            (&[Check, Bet, Fold], -1.0, -1.0),
            (&[Check, Bet, Call], 2.0, -2.0),
        ] {
            assert_eq!(
                (chips([2, 0], actions), chips([0, 1], actions)),
                (high, low),
                "{actions:?}"
            );
        }
    }
}
