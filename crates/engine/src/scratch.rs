//! Scratch of linear maps and of the adapters over them, kept between products.

use crate::buffer::Buffer;
use crate::product::Scratch;

/// Scratch of linear maps.
#[derive(Default)]
pub struct MapScratch {
    /// That of products.
    pub product: Scratch,
    /// Rows within adapters.
    pub low: Low,
}

/// Low-rank rows on their way, kept between products.
#[derive(Default)]
pub struct Low {
    /// x Aᵀ, scaled.
    pub inner: Buffer,
    /// dy B, scaled.
    pub slope: Buffer,
}
