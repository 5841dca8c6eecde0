//! Statistics of complete sequences and updates that some losses need before they are sums over
//! tokens.
//!
//! Each function reads points with known current log-probabilities, and writes its results into the
//! points. The log-probabilities come from a forward pass before the training pass, or from the
//! store if the weights that sampled the tokens are those being trained. No gradient flows through
//! the results: they are constants during an evaluation, and the learner's forward pass yields the
//! same log-probabilities again.

use crate::loss::Point;
use crate::moments::Counting;

/// Returns the mean of a number over the trained points, or 0 if no point is trained.
fn trained_mean(points: &[Point], number: impl Fn(&Point) -> f64) -> f64 {
    Counting::Exact.mean(points.iter().filter(|point| !point.masked).map(number))
}

/// Prepares GSPO: sets `sequence_log_ratio` of each point to the mean log-ratio over the sequence's
/// trained points.
pub fn set_sequence_ratios(sequence: &mut [Point]) {
    let mean = trained_mean(sequence, Point::log_ratio);
    sequence.iter_mut().for_each(|point| point.sequence_log_ratio = Some(mean));
}

/// Prepares GMPO: sets `sequence_log_ratio` of each point to the sequence's mean of log-ratios,
/// each clipped in the direction of the point's advantage. Marks the points that were not clipped,
/// and sets advantages to their mean. Means are over trained points.
pub fn set_geometric_means(sequence: &mut [Point], low: f64, high: f64) {
    let mean = trained_mean(sequence, |point| clipped_log_ratio(point, low, high));
    let advantage = trained_mean(sequence, |point| point.advantage);
    for point in sequence {
        let is_clipped = clipped_log_ratio(point, low, high) != point.log_ratio();
        point.marked = !point.masked && point.advantage != 0.0 && !is_clipped;
        point.sequence_log_ratio = Some(mean);
        point.advantage = advantage;
    }
}

/// Returns the log-ratio of a point, clipped at `high` or −`low` in the direction of its advantage.
/// Returns 0 if the advantage is 0.
fn clipped_log_ratio(point: &Point, low: f64, high: f64) -> f64 {
    if point.advantage > 0.0 {
        point.log_ratio().min(high)
    } else if point.advantage < 0.0 {
        point.log_ratio().max(-low)
    } else {
        0.0
    }
}

/// Returns the covariance (A − mean A) (log p − mean log p) of every point of an update. The means
/// are over trained points.
fn covariances(points: &[Point]) -> Vec<f64> {
    let advantage = trained_mean(points, |point| point.advantage);
    let logp = trained_mean(points, |point| point.logp);
    points.iter().map(|point| (point.advantage - advantage) * (point.logp - logp)).collect()
}

/// Returns the indices of the trained points, and how many of these points the fraction `fraction`
/// selects, at least 1.
fn trained_indices(points: &[Point], fraction: f64) -> (Vec<usize>, usize) {
    let indices: Vec<usize> = (0..points.len()).filter(|i| !points[*i].masked).collect();
    let count = ((indices.len() as f64 * fraction) as usize).max(1);
    (indices, count)
}

/// Prepares KL-Cov: marks the fraction `fraction` of an update's trained points, at least one,
/// whose log-probability and advantage have the largest covariance.
pub fn mark_covarying(points: &mut [Point], fraction: f64) {
    let covariances = covariances(points);
    let (mut order, count) = trained_indices(points, fraction);
    order.sort_by(|a, b| covariances[*b].total_cmp(&covariances[*a]).then(a.cmp(b)));
    order.into_iter().take(count).for_each(|i| points[i].marked = true);
}

/// Selects the tokens of Clip-Cov: returns the indices of the points that lose their gradient. They
/// are a fraction `fraction` of an update's trained points, at least one, from those that are not
/// `clipped` already and whose covariance is strictly between `lower` and `upper`. `random` returns
/// a number for each index; points with the smallest numbers are selected.
pub fn select_covarying(
    points: &[Point],
    clipped: impl Fn(&Point) -> bool,
    fraction: f64,
    lower: f64,
    upper: f64,
    random: impl Fn(usize) -> f64,
) -> Vec<usize> {
    let covariances = covariances(points);
    let eligible =
        |&i: &usize| lower < covariances[i] && covariances[i] < upper && !clipped(&points[i]);
    let (indices, count) = trained_indices(points, fraction);
    let mut chosen: Vec<usize> = indices.into_iter().filter(eligible).collect();
    chosen.sort_by(|a, b| random(*a).total_cmp(&random(*b)).then(a.cmp(b)));
    chosen.truncate(count);
    chosen
}

/// Returns the entropy threshold that selects the fraction `fraction` of tokens with the highest
/// entropies, at least one token. Training only the tokens with at least this entropy trains the
/// decisions in a text (Wang et al. 2025, "Beyond the 80/20 rule"). Infinite if there are no
/// tokens.
pub fn entropy_threshold(entropies: &[f64], fraction: f64) -> f64 {
    let mut falling = entropies.to_vec();
    falling.sort_by(|a, b| b.total_cmp(a));
    let count = ((falling.len() as f64 * fraction).round() as usize).max(1);
    falling.get(count - 1).copied().unwrap_or(f64::INFINITY)
}

/// Computes the mask of M2PO: drops the tokens with the largest absolute log-ratios until the mean
/// square of the remaining log-ratios is at most `threshold`. Returns whether each token is kept.
pub fn second_moment_mask(log_ratios: &[f64], threshold: f64) -> Vec<bool> {
    let squares: Vec<f64> = log_ratios.iter().map(|x| x * x).collect();
    let mut order: Vec<usize> = (0..squares.len()).collect();
    order.sort_by(|a, b| squares[*b].total_cmp(&squares[*a]).then(a.cmp(b)));
    let mut sum: f64 = order.iter().map(|i| squares[*i]).sum();
    let mut kept = vec![true; log_ratios.len()];
    for (dropped, i) in order.iter().enumerate() {
        if sum / (log_ratios.len() - dropped) as f64 <= threshold {
            break;
        }
        kept[*i] = false;
        sum -= squares[*i];
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_threshold_selects_highest_fraction() {
        let entropies: Vec<f64> = (1..=10).rev().map(|i| f64::from(i) / 10.0).collect();
        // The paper's fraction: two of ten. Also 7 of 10, although 0.7 in f64 is less than seven
        // tenths.
        for (fraction, want) in [(0.2, 2), (0.7, 7), (1.0, 10), (0.0, 1)] {
            let threshold = entropy_threshold(&entropies, fraction);
            let kept = entropies.iter().filter(|entropy| **entropy >= threshold).count();
            assert_eq!(kept, want, "{fraction}");
        }
        assert_eq!(entropy_threshold(&[0.5, 0.5, 0.25], 0.4), 0.5);
        assert_eq!(entropy_threshold(&[], 0.2), f64::INFINITY);
    }

    #[test]
    fn clip_cov_selects_tokens_by_covariance() {
        // Advantages of −1 and 1, log-probabilities of −1 and −3: covariances of ±1 with the mean
        // of −2.
        let points = [(1.0, -1.0), (1.0, -3.0), (-1.0, -3.0), (-1.0, -1.0)]
            .map(|(advantage, logp)| point(advantage, logp, 0.0));
        let chosen = |fraction, lower, upper, clipped: &[usize]| {
            let is_clipped = |p: &Point| clipped.iter().any(|i| points[*i] == *p);
            select_covarying(&points, is_clipped, fraction, lower, upper, |i| 1.0 - i as f64)
        };
        // The first and the third have a covariance of 1; the later has the smaller random number.
        assert_eq!(chosen(0.5, 0.5, 1.5, &[]), [2, 0]);
        assert_eq!(chosen(0.0, 0.5, 1.5, &[]), [2], "at least one");
        assert_eq!(chosen(0.5, 0.5, 1.5, &[2]), [0]);
        assert_eq!(chosen(0.5, 1.0, 1.5, &[]), [0usize; 0], "strictly between");
        assert_eq!(chosen(0.5, 0.5, 1.0, &[]), [0usize; 0], "strictly between");
        assert_eq!(chosen(1.0, -2.0, 0.0, &[]), [3, 1]);
    }

    /// Without an advantage there is no direction to clip in: the token's ratio counts as 1.
    #[test]
    fn geometric_means_ignore_ratio_without_advantage() {
        let mut sequence = [(2.0, 0.25), (0.0, 0.5), (0.0, -0.5), (-4.0, -0.05)]
            .map(|(advantage, x)| point(advantage, x, x));
        set_geometric_means(&mut sequence, 0.1, 0.2);
        // (0.2 + 0 + 0 − 0.05) / 4, and a sum of advantages of −2.
        assert!(
            sequence.iter().all(|p| (p.sequence_log_ratio.unwrap() - 0.0375).abs() < 1e-12),
            "{sequence:?}"
        );
        assert_eq!(sequence.map(|p| p.advantage), [-0.5; 4]);
        assert_eq!(sequence.map(|p| p.marked), [false, false, false, true]);
    }

    /// Squares of 0.25, 1, 4 and 0.01: means of 1.315, of 0.42 without the third and of 0.13
    /// without the second.
    #[test]
    fn second_moment_mask_drops_largest_log_ratios() {
        for (threshold, want) in [
            (1.4, [true; 4]),
            (1.3, [true, true, false, true]),
            (0.3, [true, false, false, true]),
            (0.2, [true, false, false, true]),
            (0.001, [false; 4]),
        ] {
            let kept = second_moment_mask(&[0.5, -1.0, 2.0, 0.1], threshold);
            assert_eq!(kept, want, "{threshold}");
        }
        assert!(second_moment_mask(&[], 1.0).is_empty());
    }

    /// Returns a point with a log-ratio of `x`.
    fn point(advantage: f64, logp: f64, x: f64) -> Point {
        Point { advantage, logp, old: Some(logp - x), ..Point::default() }
    }

    fn masked_point() -> Point {
        Point { masked: true, ..point(-50.0, -9.0, 7.0) }
    }

    /// Returns `points` with a masked point before, between and after them.
    fn with_masked(points: &[Point]) -> Vec<Point> {
        let masked = masked_point();
        std::iter::once(masked).chain(points.iter().flat_map(|p| [*p, masked])).collect()
    }

    /// Returns whether each trained point is marked.
    fn trained_marks(points: &[Point]) -> Vec<bool> {
        points.iter().filter(|point| !point.masked).map(|point| point.marked).collect()
    }

    /// Untrained points do not change means, fractions or marks, wherever they are.
    #[test]
    fn statistics_ignore_masked_points() {
        let sequence = [point(2.0, -1.0, 0.5), point(-1.0, -2.0, -0.2), point(2.0, -1.5, 0.3)];
        let mut ratios = with_masked(&sequence);
        set_sequence_ratios(&mut ratios);
        // (0.5 − 0.2 + 0.3) / 3.
        assert!(
            ratios.iter().all(|p| (p.sequence_log_ratio.unwrap() - 0.2).abs() < 1e-12),
            "{ratios:?}"
        );

        let mut means = with_masked(&sequence);
        set_geometric_means(&mut means, 0.1, 0.4);
        // (0.4 − 0.1 + 0.3) / 3, and advantages of 2, −1 and 2.
        assert!(
            means.iter().all(|p| (p.sequence_log_ratio.unwrap() - 0.2).abs() < 1e-12),
            "{means:?}"
        );
        assert!(means.iter().all(|p| (p.advantage - 1.0).abs() < 1e-12), "{means:?}");
        assert_eq!(means.iter().filter(|p| p.masked && p.marked).count(), 0);
        assert_eq!(trained_marks(&means), [false, false, true]);

        // Advantages of 1 and 3, log-probabilities of −1 and −3: covariances of 1, −1, 1 and −1;
        // half of four.
        let update = [
            point(3.0, -1.0, 0.0),
            point(3.0, -3.0, 0.0),
            point(1.0, -3.0, 0.0),
            point(1.0, -1.0, 0.0),
        ];
        let mut marked = with_masked(&update);
        mark_covarying(&mut marked, 0.5);
        assert_eq!(marked.iter().filter(|p| p.masked && p.marked).count(), 0);
        assert_eq!(trained_marks(&marked), [true, false, true, false]);
        // A quarter is one, the first of two equal ones. All nine positions would have yielded two.
        let chosen =
            select_covarying(&with_masked(&update), |_| false, 0.25, 0.5, 1.5, |i| i as f64);
        assert_eq!(chosen, [1]);
        let chosen = select_covarying(
            &with_masked(&update),
            |_| false,
            1.0,
            0.5,
            f64::INFINITY,
            |i| i as f64,
        );
        assert_eq!(chosen, [1, 5]);

        let mut nothing = [masked_point()];
        set_sequence_ratios(&mut nothing);
        mark_covarying(&mut nothing, 0.5);
        assert_eq!((nothing[0].sequence_log_ratio, nothing[0].marked), (Some(0.0), false));
    }
}
