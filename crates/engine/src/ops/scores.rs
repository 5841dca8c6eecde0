//! Scores of a tile of attention's backward pass, and what its weights and slopes are made of.

/// Numbers that make one query's weights and slopes of its scores.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Largest score.
    pub max: f32,
    /// 1 / Σ exp(s − max).
    pub inverse: f32,
    /// D = dO · O.
    pub mean: f32,
    /// First position that it sees.
    pub first: usize,
    /// One past the last.
    pub own: usize,
}

/// The rows of a tile, `stride` values apart: scores in `p` and dO Vᵀ in `s`.
pub struct Scores<'a> {
    /// Rows of the tile.
    pub rows: &'a [Row],
    /// First position that any row sees, or the start of a block before it: what is before is left alone.
    pub begin: usize,
    /// Positions that its last row sees.
    pub seen: usize,
    /// Distance between rows.
    pub stride: usize,
    /// Scores; in f32, weights afterwards.
    pub p: &'a mut [f32],
    /// dO Vᵀ; in f32, slopes afterwards.
    pub s: &'a mut [f32],
    /// In bf16, weights and slopes afterwards as words of two rows, which lie as far apart.
    pub pairs: [&'a mut [f32]; 2],
}
