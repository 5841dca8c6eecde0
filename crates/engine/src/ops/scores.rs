//! Scores of a tile of attention's backward pass, and the values from which weights and gradients
//! are computed.

/// Per-query values from which the backward pass recomputes attention weights and score gradients.
#[derive(Debug, Clone, Copy)]
pub struct QueryRow {
    /// Largest attention score of the query.
    pub max: f32,
    /// Inverse of the softmax sum: 1 / Σ exp(s − max).
    pub inverse: f32,
    /// D = dO · O, the mean of dO Vᵀ over the attention weights.
    pub mean: f32,
    /// First position that the query attends to.
    pub first: usize,
    /// One past the last position that the query attends to.
    pub own: usize,
}

/// Rows of a tile, `stride` values apart: attention scores in `p` and dO Vᵀ in `s`.
pub struct ScoreRows<'a> {
    /// Queries of the tile's rows.
    pub rows: &'a [QueryRow],
    /// First position that any row attends to, or the start of a block before it. Earlier positions
    /// are not written.
    pub first_position: usize,
    /// Number of positions up to the last one that the tile's last row attends to.
    pub seen: usize,
    /// Distance between the starts of two rows, in values.
    pub stride: usize,
    /// Attention scores; in f32, overwritten by attention weights.
    pub p: &'a mut [f32],
    /// Products dO Vᵀ; in f32, overwritten by score gradients.
    pub s: &'a mut [f32],
    /// In bf16, weights and score gradients afterwards, as words of two rows each, `stride` apart.
    pub pairs: [&'a mut [f32]; 2],
}
