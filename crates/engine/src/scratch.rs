//! Scratch of linear maps and of the adapters over them, reused between calls.

use crate::buffer::Buffer;
use crate::gemm::GemmScratch;

/// Scratch buffers of linear maps and their adapters.
#[derive(Default)]
pub struct MapScratch {
    /// Scratch of matmul.
    pub gemm: GemmScratch,
    /// Low-rank rows of adapters.
    pub low: LowRankScratch,
}

/// Low-rank rows of adapters, reused between calls.
#[derive(Default)]
pub struct LowRankScratch {
    /// Scaled product x Aᵀ of an adapter.
    pub inner: Buffer,
    /// Scaled product dy B of an adapter.
    pub inner_gradient: Buffer,
}
