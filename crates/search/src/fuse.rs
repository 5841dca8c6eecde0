//! Combines ranked lists by reciprocal-rank fusion (Cormack, Clarke and Büttcher 2009). The score
//! of a row is Σ 1 / (60 + rank) over the lists that contain the row, with ranks from 1.

use std::collections::HashMap;

/// Constant of reciprocal-rank fusion, as in the paper. It prevents the first ranks of a single
/// list from dominating the result.
const RANK_CONSTANT: f32 = 60.0;

/// Fuses ranked lists by reciprocal-rank fusion, and returns the `count` best rows with their
/// scores. Each list must be sorted by rank, the best row first. Rows with equal scores are in
/// ascending order.
pub fn fuse_rankings(lists: &[&[(u32, f32)]], count: usize) -> Vec<(u32, f32)> {
    let mut scores: HashMap<u32, f32> = HashMap::new();
    for list in lists {
        for (rank, (row, _)) in list.iter().enumerate() {
            *scores.entry(*row).or_default() += 1.0 / (RANK_CONSTANT + rank as f32 + 1.0);
        }
    }
    let mut fused: Vec<(u32, f32)> = scores.into_iter().collect();
    fused.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    fused.truncate(count);
    fused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fusion_ranks_rows_of_both_lists_first() {
        let one = [(7, 9.0), (3, 8.0)];
        let other = [(3, 0.5), (5, 0.4)];
        let fused = fuse_rankings(&[&one, &other], 3);
        assert_eq!(fused.iter().map(|(row, _)| *row).collect::<Vec<_>>(), [3, 7, 5]);
        assert_eq!(fused[0].1, 1.0 / 62.0 + 1.0 / 61.0);
        assert_eq!(fuse_rankings(&[&one, &[]], 1), [(7, 1.0 / 61.0)]);
        assert_eq!(
            fuse_rankings(&[&[(9, 1.0)], &[(2, 1.0)]], 2),
            [(2, 1.0 / 61.0), (9, 1.0 / 61.0)]
        );
    }
}
