//! Exact values of games against known values and naive second computations.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

use levade_game::{GameTree, Kuhn, Strategy, TicTacToe, Werewolf, find};
use serde_json::{Value, json};

fn kuhn() -> GameTree {
    GameTree::new(&Kuhn, &Value::Null, 100).unwrap()
}

fn assert_close(found: f64, want: f64) {
    assert!((found - want).abs() < 1e-12, "{found} instead of {want}");
}

/// Returns the opener's value in Kuhn poker, from the payoff table. `bets[seat][history][card]` is
/// the probability of a bet or call; histories are 0 for the first move of the seat, or after a
/// check, and 1 after a bet.
fn naive_kuhn(bets: [[[f64; 3]; 2]; 2]) -> f64 {
    let mut sum = 0.0;
    for own in 0..3 {
        for other in (0..3).filter(|other| *other != own) {
            let showdown = if own > other { 1.0 } else { -1.0 };
            let [first, second] = bets[0].map(|by_card| by_card[own]);
            let [after_check, after_bet] = bets[1].map(|by_card| by_card[other]);
            let bet = first * (after_bet * 2.0 * showdown + (1.0 - after_bet));
            let checked_bet = second * 2.0 * showdown - (1.0 - second);
            let check = (1.0 - after_check) * showdown + after_check * checked_bet;
            sum += bet + (1.0 - first) * check;
        }
    }
    sum / 6.0
}

/// Returns probabilities of bets and calls as a strategy of the tree.
fn to_strategy(tree: &GameTree, bets: [[[f64; 3]; 2]; 2]) -> Strategy {
    let probabilities = tree.information_sets().iter().map(|set| {
        let cards = set.position["cards"].as_array().unwrap();
        let card = cards[set.seat].as_u64().unwrap() as usize;
        let after_bet = usize::from(set.choices.contains(&json!("fold")));
        let p = bets[set.seat][after_bet][card];
        vec![1.0 - p, p]
    });
    probabilities.collect()
}

#[test]
fn kuhn_tree_has_twelve_information_sets() {
    let tree = kuhn();
    assert_eq!(tree.information_sets().len(), 12);
    // The opener's second decision follows its check, and shows the responder's bet.
    let sets = tree.information_sets();
    let second = sets.iter().position(|set| set.seat == 0 && set.previous.is_some()).unwrap();
    let path = tree.path(second);
    assert_eq!(path.len(), 2);
    assert_eq!((path[0].1, path[1].1), (Some(0), None));
    assert_eq!(path[1].0.observed, ["Player1: check.", "Player2: bet."]);
    assert!(path[0].0.observed[0].starts_with("Your card is "));
}

#[test]
fn kuhn_equilibrium_has_value_minus_one_eighteenth() {
    let tree = kuhn();
    let equilibrium = tree.equilibrium(&Kuhn).unwrap();
    let values = tree.values(&equilibrium);
    assert_close(values[0], -1.0 / 18.0);
    assert_close(values[1], 1.0 / 18.0);
    // No strategy gains against it.
    for (seat, value) in [(0, -1.0 / 18.0), (1, 1.0 / 18.0)] {
        let best = tree.best_response(seat, &equilibrium);
        assert_close(tree.values(&best)[seat], value);
    }
}

#[test]
fn kuhn_values_match_payoff_table() {
    let tree = kuhn();
    assert_close(naive_kuhn([[[0.5; 3]; 2]; 2]), 0.125);
    assert_close(tree.values(&tree.uniform_strategy())[0], 0.125);
    let bets = [[[0.1, 0.25, 0.7], [0.05, 0.4, 0.9]], [[0.3, 0.2, 0.8], [0.15, 0.45, 0.95]]];
    let strategy = to_strategy(&tree, bets);
    assert_close(tree.values(&strategy)[0], naive_kuhn(bets));
    let mixed = tree.combine_strategies(1, &strategy, &tree.uniform_strategy());
    assert_close(tree.values(&mixed)[0], naive_kuhn([[[0.5; 3]; 2], bets[1]]));
}

/// The best response equals the best of all 64 pure strategies of a seat.
#[test]
fn best_response_matches_best_pure_strategy() {
    let tree = kuhn();
    let bets = [[[0.1, 0.25, 0.7], [0.05, 0.4, 0.9]], [[0.3, 0.2, 0.8], [0.15, 0.45, 0.95]]];
    let strategy = to_strategy(&tree, bets);
    for seat in 0..2 {
        let pure = (0..64u32).map(|bits| {
            let bet = |bit: usize| f64::from(bits >> bit & 1);
            let mut all = bets;
            all[seat] = [[bet(0), bet(1), bet(2)], [bet(3), bet(4), bet(5)]];
            [1.0, -1.0][seat] * naive_kuhn(all)
        });
        let best = tree.best_response(seat, &strategy);
        assert_close(tree.values(&best)[seat], pure.fold(f64::MIN, f64::max));
    }
}

#[test]
fn reach_adds_up_at_first_moves() {
    let tree = kuhn();
    let reach = tree.reach(&tree.uniform_strategy());
    let sum = |seat: usize, is_first: bool| -> f64 {
        let sets = tree.information_sets().iter().zip(&reach);
        sets.filter(|(set, _)| set.seat == seat && set.previous.is_none() == is_first)
            .map(|(_, reach)| reach)
            .sum()
    };
    assert_close(sum(0, true), 1.0);
    assert_close(sum(1, true), 1.0);
    // The opener acts again after a check and a bet.
    assert_close(sum(0, false), 0.25);
}

/// Returns X's value between two random players. Marks are bits of the two boards.
fn naive_tic_tac_toe(boards: [u16; 2], seat: usize) -> f64 {
    const LINES: [u16; 8] = [0o7, 0o70, 0o700, 0o111, 0o222, 0o444, 0o421, 0o124];
    if LINES.iter().any(|line| boards[1 - seat] & line == *line) {
        return if seat == 1 { 1.0 } else { -1.0 };
    }
    let free: Vec<u16> =
        (0..9).map(|cell| 1 << cell).filter(|bit| (boards[0] | boards[1]) & bit == 0).collect();
    let values = free.iter().map(|bit| {
        let mut next = boards;
        next[seat] |= bit;
        naive_tic_tac_toe(next, 1 - seat)
    });
    if free.is_empty() { 0.0 } else { values.sum::<f64>() / free.len() as f64 }
}

#[test]
fn tic_tac_toe_values_match_naive_enumeration() {
    let tree = GameTree::new(&TicTacToe, &Value::Null, usize::MAX).unwrap();
    // Every sequence of moves that does not end the match is a set: 549,946 − 255,168.
    assert_eq!(tree.information_sets().len(), 294_778);
    let values = tree.values(&tree.uniform_strategy());
    assert_close(naive_tic_tac_toe([0, 0], 0), 374.0 / 1260.0);
    assert_close(values[0], 374.0 / 1260.0);
    assert_close(values[1], -374.0 / 1260.0);
}

#[test]
fn tree_of_large_game_is_rejected() {
    let error = |game: &dyn levade_game::Game, max_sets: usize| {
        GameTree::new(game, &Value::Null, max_sets).err().unwrap().to_string()
    };
    let too_many = error(&TicTacToe, 100);
    assert!(too_many.contains("tic_tac_toe") && too_many.contains("more than 100"), "{too_many}");
    let unlisted = error(&Werewolf, 100);
    assert!(unlisted.contains("use kuhn or tic_tac_toe"), "{unlisted}");
    assert!(GameTree::new(&*find("kuhn").unwrap(), &json!({"x": 1}), 100).is_err());
}
