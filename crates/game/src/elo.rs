//! Elo ratings of players from games between pairs of them.
//!
//! The model of Bradley and Terry (1952) gives player i a strength γ, and says that i scores
//! γᵢ / (γᵢ + γⱼ) against j on average. A draw counts as half a win for both sides. The strengths
//! are fitted by the minorization of Hunter (2004), and a rating is 400 · log₁₀ γ.
//!
//! A player without a loss would have an infinite rating, so every player also gets one drawn game
//! against a virtual player of strength 1. Ratings are relative to that of the first player, which
//! is 0.

use levade_policy::uniform;

use crate::GameError;

/// Maximum number of iterations when Elo ratings are fitted.
const MAX_ITERATIONS: usize = 10_000;
/// Relative change of all strengths at which a fit has converged.
const TOLERANCE: f64 = 1e-10;

/// Result of a game between two players.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairedGame {
    /// Indices of the two players.
    pub players: [usize; 2],
    /// Score of the first player: 1 for a win, 0.5 for a draw, 0 for a loss.
    pub score: f64,
}

/// Elo rating of a player with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rating {
    /// Estimated Elo rating, relative to the first player.
    pub estimate: f64,
    /// Lower end of the rating's 95 % interval.
    pub low: f64,
    /// Upper end of the rating's 95 % interval.
    pub high: f64,
}

/// Computes the Elo rating of each player relative to the first player. The rating has a 95 %
/// percentile interval over `resamples` bootstraps of the games. The interval of the first player
/// is empty.
///
/// # Errors
/// Returns an error if there are no games or no resamples, if a score is not in 0..=1, or if a game
/// names a player twice or names a player that does not exist.
pub fn elo(
    num_players: usize,
    games: &[PairedGame],
    resamples: u32,
    seed: u64,
) -> Result<Vec<Rating>, GameError> {
    let error = |message: String| Err(GameError::Ratings { message });
    if games.is_empty() || resamples == 0 {
        return error("at least one game and one resample are required".to_owned());
    }
    for PairedGame { players: [one, other], score } in games {
        if !(0.0..=1.0).contains(score) {
            return error(format!("the score of a game is {score}, but must be in 0..=1"));
        }
        if one == other || *one.max(other) >= num_players {
            return error(format!(
                "a game has the players {one} and {other}, but must have two of {num_players}"
            ));
        }
    }
    let estimates = fit_ratings(num_players, games.iter());
    let mut samples = vec![Vec::with_capacity(resamples as usize); num_players];
    for resample in 0..u64::from(resamples) {
        let pick = |index: usize| {
            let u = uniform(seed, resample, index as u64);
            &games[(u * games.len() as f64) as usize]
        };
        let fitted = fit_ratings(num_players, (0..games.len()).map(pick));
        samples.iter_mut().zip(fitted).for_each(|(samples, rating)| samples.push(rating));
    }
    let interval = |(estimate, mut samples): (f64, Vec<f64>)| {
        samples.sort_by(f64::total_cmp);
        let low = quantile(&samples, 0.025).min(estimate);
        Rating { estimate, low, high: quantile(&samples, 0.975).max(estimate) }
    };
    Ok(estimates.into_iter().zip(samples).map(interval).collect())
}

/// Returns the quantile `q` of sorted, non-empty numbers. The quantile is interpolated between
/// neighbors.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (below, above) = (at.floor() as usize, at.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (at - at.floor())
}

/// Fits Elo ratings to the games by maximum likelihood.
fn fit_ratings<'g>(num_players: usize, games: impl Iterator<Item = &'g PairedGame>) -> Vec<f64> {
    // Sum of scores, and number of games, by player and opponent.
    let mut scores = vec![0.5; num_players];
    let mut counts = vec![0.0; num_players * num_players];
    for PairedGame { players: [one, other], score } in games {
        scores[*one] += score;
        scores[*other] += 1.0 - score;
        counts[one * num_players + other] += 1.0;
        counts[other * num_players + one] += 1.0;
    }
    let mut strengths = vec![1.0; num_players];
    for _ in 0..MAX_ITERATIONS {
        let mut change: f64 = 0.0;
        for player in 0..num_players {
            let own = strengths[player];
            let of_opponents: f64 = (0..num_players)
                .filter(|opponent| *opponent != player)
                .map(|opponent| {
                    counts[player * num_players + opponent] / (own + strengths[opponent])
                })
                .sum();
            let next = scores[player] / (of_opponents + 1.0 / (own + 1.0));
            change = change.max((next / own - 1.0).abs());
            strengths[player] = next;
        }
        if change < TOLERANCE {
            break;
        }
    }
    let rating = |strength: f64| 400.0 * strength.log10();
    let first = rating(strengths.first().copied().unwrap_or(1.0));
    strengths.into_iter().map(|strength| rating(strength) - first).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn games(pairs: &[([usize; 2], usize, usize)]) -> Vec<PairedGame> {
        let of_pair = |&(players, wins, losses): &([usize; 2], usize, usize)| {
            let game = move |score| PairedGame { players, score };
            std::iter::repeat_n(game(1.0), wins).chain(std::iter::repeat_n(game(0.0), losses))
        };
        pairs.iter().flat_map(of_pair).collect()
    }

    /// With many games, a player that scores 3/4 is 400 · log₁₀ 3 = 190.85 points ahead.
    #[test]
    fn rating_of_two_players_matches_logistic_curve() {
        let found = elo(2, &games(&[([1, 0], 75_000, 25_000)]), 2, 1).unwrap();
        assert_eq!((found[0].estimate, found[0].low, found[0].high), (0.0, 0.0, 0.0));
        assert!((found[1].estimate - 190.848_5).abs() < 0.01, "{:?}", found[1]);
    }

    /// At the optimum, every player's expected score equals its score, virtual game included.
    #[test]
    fn fit_reproduces_scores_of_players() {
        let games = games(&[([0, 1], 3, 7), ([1, 2], 6, 4), ([2, 0], 9, 1), ([2, 3], 5, 0)]);
        let ratings = fit_ratings(4, games.iter());
        // The virtual player's rating is fixed by its own score, which is the sum of the rest.
        let expected = |offset: f64| -> Vec<f64> {
            let wins = |a: f64, b: f64| 1.0 / (1.0 + 10f64.powf((b - a) / 400.0));
            let mut scores: Vec<f64> = ratings.iter().map(|r| wins(*r, offset)).collect();
            for game in &games {
                let [a, b] = game.players;
                scores[a] += wins(ratings[a], ratings[b]);
                scores[b] += wins(ratings[b], ratings[a]);
            }
            scores
        };
        // Bisection for the virtual player's rating.
        let (mut low, mut high) = (-2000.0, 2000.0);
        let total = games.len() as f64 + 2.0;
        for _ in 0..200 {
            let middle = (low + high) / 2.0;
            let sum: f64 = expected(middle).iter().sum();
            if sum > total { low = middle } else { high = middle }
        }
        let scores = [0.5 + 3.0 + 1.0, 0.5 + 7.0 + 6.0, 0.5 + 4.0 + 9.0 + 5.0, 0.5];
        for (found, want) in expected(low).iter().zip(scores) {
            assert!((found - want).abs() < 1e-6, "{found} instead of {want}");
        }
    }

    #[test]
    fn interval_shrinks_with_games_and_contains_difference() {
        let width = |times: usize| {
            let found = elo(2, &games(&[([1, 0], 6 * times, 4 * times)]), 400, 3).unwrap()[1];
            let want = 400.0 * 1.5f64.log10();
            assert!(found.low < want && want < found.high, "{found:?}");
            found.high - found.low
        };
        let ratio = width(10) / width(160);
        assert!((3.2..4.8).contains(&ratio), "{ratio}");
    }

    #[test]
    fn undefeated_player_has_finite_rating() {
        let found = elo(2, &games(&[([1, 0], 20, 0)]), 50, 1).unwrap();
        assert!(found[1].high.is_finite() && found[1].low > 200.0, "{:?}", found[1]);
    }

    #[test]
    fn elo_rejects_invalid_games() {
        let game = |players, score| [PairedGame { players, score }];
        assert!(elo(2, &game([0, 0], 1.0), 9, 1).is_err());
        assert!(elo(2, &game([0, 2], 1.0), 9, 1).is_err());
        assert!(elo(2, &game([0, 1], f64::NAN), 9, 1).is_err());
        assert!(elo(2, &[], 9, 1).is_err());
    }
}
