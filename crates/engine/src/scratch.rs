//! Scratch of linear maps and of the adapters over them, reused between calls.

use crate::buffer::Buffer;
use crate::gemm::Scratch;

/// Scratch of linear maps.
#[derive(Default)]
pub struct MapScratch {
    /// Scratch of matmul.
    pub gemm: Scratch,
    /// Low-rank rows of adapters.
    pub low: LowRankScratch,
}

/// Low-rank rows of adapters, reused between calls.
#[derive(Default)]
pub struct LowRankScratch {
    /// x Aᵀ, scaled.
    pub inner: Buffer,
    /// dy B, scaled.
    pub inner_gradient: Buffer,
}
