//! Checks the moves of a turn against its asks.

use crate::{Ask, GameError, Move};

/// Returns one legal move for each ask, in the order of the asks.
///
/// # Errors
/// Returns [`GameError::Move`] if a move is missing, illegal, duplicated or not asked for.
pub fn moves_in_seat_order<'a>(
    asks: &[Ask],
    moves: &'a [(usize, Move)],
) -> Result<Vec<(usize, &'a Move)>, GameError> {
    let error = |seat, message: &str| GameError::Move { seat, message: message.to_owned() };
    if let Some((seat, _)) = moves.iter().find(|(seat, _)| asks.iter().all(|a| a.seat != *seat)) {
        return Err(error(*seat, "this seat does not act in this turn"));
    }
    let find = |ask: &Ask| {
        let mut own = moves.iter().filter(|(seat, _)| *seat == ask.seat);
        let (seat, played) = own.next().ok_or_else(|| error(ask.seat, "the move is missing"))?;
        if own.next().is_some() {
            return Err(error(*seat, "there are several moves for one turn"));
        }
        ask.check(played).map_err(|message| GameError::Move { seat: *seat, message })?;
        Ok((*seat, played))
    };
    asks.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Choice;

    #[test]
    fn moves_must_match_asks() {
        let ask = |seat| Ask {
            seat,
            kind: "vote".to_owned(),
            prompt: String::new(),
            has_speech: false,
            choice: Choice::OneOf(vec![json!(1)]),
            default: Move::choice(json!(1)),
        };
        let asks = [ask(0), ask(2)];
        let one = |seat| (seat, Move::choice(json!(1)));
        let seats = |moves: &[(usize, Move)]| {
            moves_in_seat_order(&asks, moves)
                .map(|found| found.into_iter().map(|(seat, _)| seat).collect::<Vec<_>>())
                .map_err(|error| error.to_string())
        };
        assert_eq!(seats(&[one(2), one(0)]), Ok(vec![0, 2]));
        assert_eq!(seats(&[one(0)]), Err("seat 2: the move is missing".to_owned()));
        assert!(seats(&[one(0), one(2), one(2)]).is_err());
        assert!(seats(&[one(0), one(2), one(1)]).is_err());
        assert!(seats(&[one(0), (2, Move::choice(json!(2)))]).is_err());
    }
}
