//! Confidence intervals of differences over clusters of unequal sizes.

use levade_rl::{ScorePair, paired_difference};

/// Half of the clusters have nine pairs with a difference of 1, the other half one pair with a
/// difference of 0. The mean over pairs is 0.9; the mean over the means of clusters would be 0.5.
#[test]
fn bootstrap_weights_clusters_by_pairs() {
    let pairs: Vec<ScorePair> = (0..400u64)
        .flat_map(|cluster| {
            let (count, after) = if cluster % 2 == 0 { (9, 1.0) } else { (1, 0.0) };
            (0..count).map(move |_| ScorePair { cluster, before: 0.0, after })
        })
        .collect();
    let found = paired_difference(&pairs, 1000, 7).unwrap();
    assert!((found.estimate - 0.9).abs() < 1e-12, "{found:?}");
    assert!(found.low > 0.85 && found.high < 0.95, "{found:?}");
}
