//! Scratch of linear maps and of the adapters over them, reused between calls.

use crate::buffer::Buffer;
use crate::product::Scratch;

/// Scratch of linear maps.
#[derive(Default)]
pub struct MapScratch {
    /// Scratch of matmul.
    pub product: Scratch,
    /// Low-rank rows of adapters.
    pub low: Low,
}

/// Low-rank rows of adapters, reused between calls.
#[derive(Default)]
pub struct Low {
    /// x Aᵀ, scaled.
    pub inner: Buffer,
    /// dy B, scaled.
    pub slope: Buffer,
}
