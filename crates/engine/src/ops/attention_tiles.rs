//! Selects the queries that go through attention together.
//!
//! A tile is a few rows, each a query and one of the heads that share a key head. Most tiles hold
//! neighboring queries of one sequence. While attempts at one task are sampled, each sequence has
//! one query only, and the sequences share most of their blocks. A tile then holds the queries of
//! several sequences, so their shared blocks are read once for all of them. A chain of sums that a
//! shared block interrupts continues from its stored value, so no bit changes (see `attention`).

use super::kv::{BLOCK, TokenSpan};

/// Number of positions in a stretch, the unit of the sums over values.
pub const STRETCH: usize = 256;
/// Maximum number of rows in a tile of several sequences: half of a large tile, so that a group of
/// attempts makes tasks for several threads.
const TOGETHER: usize = 16;

/// Sequences share a tile only if they share at least one block in this many. Tiles of several
/// sequences make fewer tasks, which distribute less evenly over threads.
const WORTH: usize = 8;

/// Queries of one span in a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryRun {
    /// Index of the span.
    pub span: usize,
    /// First row of the run, counted from the span's first row.
    pub from: usize,
    /// Number of rows in the run.
    pub rows: usize,
}

/// Rows whose attention is computed together, for each key head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttentionTile {
    /// Runs of rows in the tile: either one run, or several complete spans.
    pub runs: Vec<QueryRun>,
    /// Number of leading blocks that all sequences of the tile share and all its queries attend to
    /// completely; 0 for a single run.
    pub shared: usize,
}

/// Divides spans into tiles of at most `max_rows` rows, with `group` rows per query.
pub fn divide_into_tiles(spans: &[TokenSpan], group: usize, max_rows: usize) -> Vec<AttentionTile> {
    let room = max_rows.min(TOGETHER);
    let (mut small, large): (Vec<usize>, Vec<usize>) =
        (0..spans.len()).partition(|&i| 2 * spans[i].len * group <= room);
    let mut tiles = Vec::new();
    for span in large {
        let rows = spans[span].len * group;
        let run = |from| QueryRun { span, from, rows: max_rows.min(rows - from) };
        tiles.extend(
            (0..rows)
                .step_by(max_rows)
                .map(|from| AttentionTile { runs: vec![run(from)], shared: 0 }),
        );
    }
    // Sorted so that sequences with long shared prefixes are neighbors.
    small.sort_by(|&a, &b| spans[a].blocks.cmp(&spans[b].blocks));
    let mut tile = AttentionTile::default();
    let mut rows = 0;
    for span in small {
        let run = QueryRun { span, from: 0, rows: spans[span].len * group };
        let shared = tile
            .runs
            .last()
            .map_or(0, |last| shared_leading_blocks(&spans[last.span], &spans[span]));
        // A sequence with a much shorter shared prefix would make the other sequences of the tile
        // process the rest separately.
        let fits = rows + run.rows <= room && shared > 0 && 2 * shared >= tile.shared;
        if !fits && !tile.runs.is_empty() {
            tiles.push(std::mem::take(&mut tile));
            rows = 0;
        }
        tile.shared = match tile.runs.len() {
            0 => 0,
            1 => shared,
            _ => shared.min(tile.shared),
        };
        tile.runs.push(run);
        rows += run.rows;
    }
    tiles.extend(Some(tile).filter(|tile| !tile.runs.is_empty()));
    tiles
}

/// Returns the number of leading blocks that the sequences of two spans share, before the queries
/// of either; 0 if too few blocks are shared to justify a common tile.
fn shared_leading_blocks(a: &TokenSpan, b: &TokenSpan) -> usize {
    let seen = a.position.min(b.position) / BLOCK;
    let same = a.blocks.iter().zip(&b.blocks).take(seen).take_while(|(a, b)| a == b).count();
    if same * WORTH < a.blocks.len().max(b.blocks.len()) { 0 } else { same }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(position: usize, len: usize, own: u32, shared: usize) -> TokenSpan {
        let blocks = 0..(position + len).div_ceil(BLOCK) as u32;
        let blocks =
            blocks.map(|i| if (i as usize) < shared { i } else { own * 1000 + i }).collect();
        TokenSpan { row: 0, len, position, blocks, inherits: None }
    }

    #[test]
    fn only_sequences_with_shared_prefix_share_tiles() {
        let attempts = (1..=7).map(|i| span(1000 + i as usize, 1, i, 31));
        let strangers = (8..=9).map(|i| span(1000, 1, i, 0));
        let spans: Vec<TokenSpan> = attempts.chain(strangers).collect();
        let tiles = divide_into_tiles(&spans, 3, 32);
        let found: Vec<(usize, usize)> =
            tiles.iter().map(|tile| (tile.runs.len(), tile.shared)).collect();
        assert_eq!(found, [(5, 31), (2, 31), (1, 0), (1, 0)]);
    }

    proptest! {
        /// Every row is in one tile, no tile is too tall, and the shared blocks of a tile are in
        /// all of its sequences, before all of its queries.
        #[test]
        fn attention_tiles_cover_all_rows_once(
            spans in prop::collection::vec((0usize..1500, 1usize..40, 0u32..4, 0usize..50), 1..20),
            group in 1usize..8, max_rows in 14usize..33,
        ) {
            let spans: Vec<TokenSpan> = spans.into_iter().map(|(at, len, own, shared)| span(at, len, own, shared)).collect();
            let mut rows: Vec<Vec<bool>> = spans.iter().map(|span| vec![false; span.len * group]).collect();
            for tile in divide_into_tiles(&spans, group, max_rows) {
                prop_assert!(tile.runs.iter().map(|run| run.rows).sum::<usize>() <= max_rows);
                prop_assert!(tile.runs.len() > 1 || tile.shared == 0);
                let first = &spans[tile.runs[0].span];
                for run in &tile.runs {
                    let span = &spans[run.span];
                    prop_assert!(tile.shared * BLOCK <= span.position);
                    prop_assert_eq!(&span.blocks[..tile.shared], &first.blocks[..tile.shared]);
                    for row in &mut rows[run.span][run.from..run.from + run.rows] {
                        prop_assert!(!*row);
                        *row = true;
                    }
                }
            }
            prop_assert!(rows.iter().flatten().all(|row| *row));
        }
    }
}
