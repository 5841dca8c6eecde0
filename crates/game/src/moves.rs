//! Checks the moves of a turn against its requests.

use crate::{GameError, Move, MoveRequest};

/// Checks that `moves` contains one legal move for each request. Returns the moves with their
/// seats, in the order of the requests.
///
/// # Errors
/// Returns [`GameError::Move`] if a move is missing, illegal, duplicated or was not requested.
pub fn moves_in_seat_order<'a>(
    requests: &[MoveRequest],
    moves: &'a [(usize, Move)],
) -> Result<Vec<(usize, &'a Move)>, GameError> {
    let error = |seat, message: &str| GameError::Move { seat, message: message.to_owned() };
    if let Some((seat, _)) = moves.iter().find(|(seat, _)| requests.iter().all(|a| a.seat != *seat))
    {
        return Err(error(*seat, "the seat does not act in this turn"));
    }
    let find = |request: &MoveRequest| {
        let mut own = moves.iter().filter(|(seat, _)| *seat == request.seat);
        let (seat, played) =
            own.next().ok_or_else(|| error(request.seat, "the move is missing"))?;
        if own.next().is_some() {
            return Err(error(*seat, "the seat has several moves in one turn"));
        }
        request.check(played).map_err(|message| GameError::Move { seat: *seat, message })?;
        Ok((*seat, played))
    };
    requests.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Choice;

    #[test]
    fn moves_must_match_requests() {
        let choice = Choice::OneOf(vec![json!(1)]);
        let requests = [0, 2].map(|seat| MoveRequest::new(seat, "vote", choice.clone()));
        let one = |seat| (seat, Move::choice(json!(1)));
        let seats = |moves: &[(usize, Move)]| {
            moves_in_seat_order(&requests, moves)
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
