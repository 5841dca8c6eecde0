//! Seeded matches against naive rules, replays and forks.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

mod naive_werewolf;

use levade_game::{Choice, Event, Move, MoveRequest, Next, SeatOutcome, Start, find};
use naive_werewolf::{Decision, pick};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Maximum number of turns of a match. A match that takes more hangs.
const MAX_TURNS: usize = 5000;

/// Returns the move of a scripted player: a function of the seed, the seat and its earlier
/// requests.
fn scripted(seed: u64, request: &MoveRequest, num_requests: &mut [u64]) -> Move {
    let count = num_requests[request.seat];
    num_requests[request.seat] += 1;
    let say = if request.has_speech { format!("s{count}") } else { String::new() };
    let choice = match &request.choice {
        Choice::None => Value::Null,
        Choice::OneOf(values) => values[pick(seed, request.seat, count, values.len())].clone(),
        Choice::Schema(_) => panic!("these games have no free choices"),
    };
    Move { say, choice }
}

/// A match that has been played.
#[derive(Debug, Clone, PartialEq)]
struct Played {
    decisions: Vec<Decision>,
    moves: Vec<Vec<(usize, Move)>>,
    events: Vec<Event>,
    positions: Vec<Value>,
    outcomes: Vec<SeatOutcome>,
}

/// Plays a match with scripted players. `shuffled` passes the moves of each turn in reverse.
fn play(game: &str, options: &Value, seed: u64, shuffled: bool) -> Played {
    let Start { seats, events, mut state } = find(game).unwrap().start(options, seed).unwrap();
    let mut num_requests = vec![0; seats.len()];
    let mut played = Played {
        decisions: Vec::new(),
        moves: Vec::new(),
        events,
        positions: vec![state.save()],
        outcomes: Vec::new(),
    };
    for _ in 0..MAX_TURNS {
        let requests = match state.next() {
            Next::Requests(requests) => requests,
            Next::Over(outcomes) => return Played { outcomes, ..played },
        };
        assert!(!requests.is_empty());
        let mut moves: Vec<(usize, Move)> = Vec::new();
        for request in &requests {
            request.check(&request.default).unwrap();
            let own = scripted(seed, request, &mut num_requests);
            played.decisions.push(Decision {
                seat: request.seat,
                kind: request.kind.clone(),
                choice: own.choice.clone(),
            });
            moves.push((request.seat, own));
        }
        if shuffled {
            moves.reverse();
        }
        played.events.extend(state.apply(&moves).unwrap());
        played.moves.push(moves);
        played.positions.push(state.save());
    }
    panic!("{game} with {options} and seed {seed} does not end");
}

fn variants() -> Vec<(&'static str, Value)> {
    let mut variants = vec![("tic_tac_toe", json!({})), ("kuhn", json!({}))];
    for players in [7, 9, 12] {
        variants.push(("werewolf", json!({"players": players})));
    }
    let unusual = json!({
        "players": 12, "language": "zh", "ties": "random", "wolf_ties": "random",
        "discussion_rounds": 1, "self_heal": true,
    });
    variants.push(("werewolf", unusual));
    variants.push((
        "werewolf",
        json!({"players": 9, "ties": "first", "wolf_ties": "first", "max_days": 2}),
    ));
    variants
}

#[test]
fn werewolf_matches_naive_rules_in_1000_games_of_each_variant() {
    let mut winners = std::collections::BTreeMap::new();
    for (game, options) in variants().into_iter().filter(|(game, _)| *game == "werewolf") {
        for seed in 0..1000 {
            let played = play(game, &options, seed, false);
            let naive = naive_werewolf::play(&options, seed);
            assert_eq!(played.decisions, naive.decisions, "{options} {seed}");
            let part = |name: &str| -> Vec<f64> {
                let value = |outcome: &SeatOutcome| {
                    outcome.parts.iter().find(|(part, _)| part == name).unwrap().1
                };
                played.outcomes.iter().map(value).collect()
            };
            assert_eq!(part("won"), naive.won, "{options} {seed}");
            assert_eq!(part("survived"), naive.survived, "{options} {seed}");
            let rewards: Vec<f64> = played.outcomes.iter().map(|o| o.reward).collect();
            assert_eq!(rewards, naive.won, "{options} {seed}");
            *winners.entry(naive.winner).or_insert(0) += 1;
        }
    }
    // All kinds of ends occur.
    assert!(["wolves", "good", "nobody"].iter().all(|side| winners[side] > 50), "{winners:?}");
}

#[test]
fn small_games_end_in_1000_games() {
    for (game, options) in &variants()[..2] {
        for seed in 0..1000 {
            let rewards = play(game, options, seed, false).outcomes;
            assert_eq!(rewards[0].reward, -rewards[1].reward, "{game} {seed}");
        }
    }
}

/// A naive rule for tic-tac-toe: lines as sums in a magic square.
#[test]
fn tic_tac_toe_matches_magic_square() {
    const MAGIC: [u64; 9] = [2, 7, 6, 9, 5, 1, 4, 3, 8];
    for seed in 0..1000 {
        let played = play("tic_tac_toe", &json!({}), seed, false);
        let mut own: [Vec<u64>; 2] = Default::default();
        let mut winner = None;
        for (turn, Decision { seat, choice, .. }) in played.decisions.iter().enumerate() {
            assert!(winner.is_none() && *seat == turn % 2);
            let cells = &mut own[*seat];
            cells.push(MAGIC[choice.as_u64().unwrap() as usize - 1]);
            let sums = |a: usize, b: usize, c: usize| {
                a < b && b < c && cells[a] + cells[b] + cells[c] == 15
            };
            let n = cells.len();
            if (0..n).any(|a| (0..n).any(|b| (0..n).any(|c| sums(a, b, c)))) {
                winner = Some(*seat);
            }
        }
        assert!(winner.is_some() || played.decisions.len() == 9);
        let want = winner.map_or([0.0, 0.0], |w| if w == 0 { [1.0, -1.0] } else { [-1.0, 1.0] });
        assert_eq!([played.outcomes[0].reward, played.outcomes[1].reward], want, "{seed}");
    }
}

#[test]
fn secrets_reach_only_their_audience() {
    for seed in 0..200 {
        let options = json!({"players": 12});
        let start = find("werewolf").unwrap().start(&options, seed).unwrap();
        let played = play("werewolf", &options, seed, false);
        for event in &played.events {
            let is_for = |role: &dyn Fn(&str, &str) -> bool| {
                start
                    .seats
                    .iter()
                    .all(|seat| !event.to.contains(seat.index) || role(&seat.role, &seat.side))
            };
            if event.text.starts_with("[Werewolves only]") {
                assert!(is_for(&|_, side| side == "wolves"), "{event:?}");
            } else if event.text.starts_with("[Seer only]") {
                assert!(is_for(&|role, _| role == "seer"), "{event:?}");
            } else {
                assert!(!event.text.starts_with('['), "{event:?}");
            }
        }
        let partners: Vec<&str> = start
            .seats
            .iter()
            .filter(|s| s.side == "good")
            .map(|s| s.instructions.as_str())
            .collect();
        assert!(partners.iter().all(|text| !text.contains("fellow werewolves are")));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Replayed moves, in any order within a turn, lead to bit-equal positions and events.
    #[test]
    fn replay_of_recorded_moves_is_bit_equal(variant in 0usize..7, seed: u64) {
        let (game, options) = &variants()[variant];
        let played = play(game, options, seed, false);
        let reversed = play(game, options, seed, true);
        prop_assert_eq!(&played.positions, &reversed.positions);
        let mut start = find(game).unwrap().start(options, seed).unwrap();
        let mut events = start.events;
        // Records are JSON text.
        let text = serde_json::to_string(&played.moves).unwrap();
        let recorded: Vec<Vec<(usize, Move)>> = serde_json::from_str(&text).unwrap();
        for (moves, position) in recorded.iter().zip(&played.positions[1..]) {
            events.extend(start.state.apply(moves).unwrap());
            prop_assert_eq!(serde_json::to_string(&start.state.save()).unwrap(), serde_json::to_string(position).unwrap());
        }
        prop_assert_eq!(events, played.events);
        prop_assert_eq!(start.state.next(), Next::Over(played.outcomes));
    }

    /// A match forked at any turn, in a fresh match of another seed, ends as the first one did.
    #[test]
    fn fork_at_any_turn_preserves_outcome(variant in 0usize..7, seed: u64, at in 0.0f64..1.0) {
        let (game, options) = &variants()[variant];
        let played = play(game, options, seed, false);
        let turn = (at * played.moves.len() as f64) as usize;
        let mut fork = find(game).unwrap().start(options, seed.wrapping_add(1)).unwrap().state;
        let text = serde_json::to_string(&played.positions[turn]).unwrap();
        fork.load(&serde_json::from_str(&text).unwrap()).unwrap();
        for moves in &played.moves[turn..] {
            fork.apply(moves).unwrap();
        }
        prop_assert_eq!(fork.next(), Next::Over(played.outcomes));
        let damaged = fork.load(&json!({"no": "position"}));
        prop_assert!(damaged.is_err());
    }

    /// A rejected move leaves the position unchanged.
    #[test]
    fn illegal_moves_leave_position_unchanged(variant in 0usize..7, seed: u64, at in 0.0f64..1.0) {
        let (game, options) = &variants()[variant];
        let played = play(game, options, seed, false);
        let turn = (at * played.moves.len() as f64) as usize;
        let mut state = find(game).unwrap().start(options, seed).unwrap().state;
        state.load(&played.positions[turn]).unwrap();
        let mut moves = played.moves[turn].clone();
        moves[0].1.choice = json!("nonsense");
        prop_assert!(state.apply(&moves).is_err());
        prop_assert!(state.apply(&[]).is_err());
        prop_assert_eq!(&state.save(), &played.positions[turn]);
    }
}

#[test]
fn unknown_options_are_rejected() {
    let start = |game: &str, options: Value| {
        find(game).unwrap().start(&options, 0).map(|_| ()).unwrap_err().to_string()
    };
    let error = start("werewolf", json!({"players": 8}));
    assert!(error.contains("players is 8") && error.contains("7, 9 or 12"), "{error}");
    assert!(start("werewolf", json!({"player": 7})).contains("`player`"));
    assert!(start("kuhn", json!({"cards": 4})).contains("`cards`"));
    let error = find("chess").map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("chess") && error.contains("werewolf"), "{error}");
}

#[test]
fn seeds_put_every_role_on_every_seat() {
    let seats = |seed| find("werewolf").unwrap().start(&json!(null), seed).unwrap().seats;
    let witches: std::collections::BTreeSet<usize> = (0..100)
        .map(|seed| seats(seed).iter().position(|seat| seat.role == "witch").unwrap())
        .collect();
    assert_eq!(witches.len(), 7);
}

#[test]
fn werewolf_options_out_of_range_are_rejected_by_name() {
    let game = find("werewolf").unwrap();
    for (options, why) in [
        (json!({"players": 8}), "players is 8, but must be 7, 9 or 12"),
        (json!({"max_days": 0}), "max_days is 0, but must be in 1..=100"),
        (json!({"max_days": 101}), "max_days is 101, but must be in 1..=100"),
        (json!({"discussion_rounds": 21}), "discussion_rounds is 21, but must be in 0..=20"),
        (json!({"discussion_rounds": -1}), "`discussion_rounds` is -1: "),
        (json!({"ties": "many"}), "`ties` is \"many\": unknown variant"),
    ] {
        let error = game.start(&options, 1).err().unwrap().to_string();
        assert!(error.contains(why), "{error}");
    }
    for options in [json!({"max_days": 100}), json!({"discussion_rounds": 0})] {
        assert!(game.start(&options, 1).is_ok(), "{options}");
    }
}
