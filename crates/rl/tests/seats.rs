//! Advantages of seats of a game, in which all seats of a side win or lose together.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]
use levade_rl::{Estimator, GroupBaseline, Rollout, Sequence};

/// Number of matches from one seed.
const MATCHES: u64 = 8;
/// Number of wolves in a match.
const WOLVES: u64 = 2;

/// Returns whether the wolves of a match play the better line, which always wins. Both lines occur
/// in every eight matches.
fn plays_better_line(seed: u64, game: u64) -> bool {
    match game {
        0 => true,
        1 => false,
        _ => (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (game + 7)) & 1 == 1,
    }
}

/// Returns the advantage of each wolf's move in all matches from a seed. `group` returns the group
/// of a match and a seat.
fn advantages(seed: u64, group: impl Fn(u64, u64) -> u64) -> Vec<(bool, f64)> {
    let mut lines = Vec::new();
    let mut rollouts = Vec::new();
    for game in 0..MATCHES {
        let is_better = plays_better_line(seed, game);
        let score = f64::from(u8::from(is_better));
        for seat in 0..WOLVES {
            let sequence = Sequence { turns: vec![1], rewards: vec![score], ..Sequence::default() };
            let group = group(game, seat);
            let sequences = vec![sequence];
            rollouts.push(Rollout { group, score, sequences, ..Rollout::default() });
            lines.push(is_better);
        }
    }
    let found = Estimator::Group(GroupBaseline::default()).advantages(&rollouts).unwrap();
    lines.into_iter().zip(found).map(|(line, found)| (line, found[0].advantages[0])).collect()
}

#[test]
fn grouping_by_seat_rewards_better_line_for_every_seed() {
    for seed in 0..100 {
        for (is_better, advantage) in advantages(seed, |_, seat| seat) {
            assert!(if is_better { advantage > 0.0 } else { advantage < 0.0 }, "{seed}");
        }
    }
}

/// All wolves of a match have the same outcome, so the outcome cancels in its mean.
#[test]
fn group_of_one_game_has_no_gradient() {
    for seed in 0..100 {
        let found = advantages(seed, |game, _| game);
        assert!(found.iter().all(|(_, advantage)| *advantage == 0.0), "{seed}");
    }
}
