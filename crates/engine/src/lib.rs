//! The embedded engine: kernels, transformer, sampling and training on this machine.

pub mod buffer;
pub mod head;
pub mod layout;
pub mod learning;
pub mod ops;
pub mod packing;
pub mod pool;
pub mod product;
#[cfg(test)]
mod reference;
pub mod simd;
pub mod testing;
pub mod transformer;
pub mod weights;

/// Where the engine computes: its threads and instruction set.
pub struct Compute {
    /// The one pool of threads.
    pub pool: pool::Pool,
    /// The vector instructions in use.
    pub isa: simd::Isa,
}

impl Compute {
    /// `threads` threads with the best instructions there are.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, simd::Isa::detect())
    }

    /// `threads` threads with the instructions named, which must be available.
    pub fn with_isa(threads: usize, isa: simd::Isa) -> Self {
        Compute { pool: pool::Pool::new(threads), isa }
    }
}
