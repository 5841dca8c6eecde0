//! Thread pool, instruction set and precision of the engine.

use crate::pool::ThreadPool;
use crate::precision::{Kernel, Precision};
use crate::simd::Isa;

/// Threads, instruction set and precision that the engine computes with.
pub struct Compute {
    /// The only thread pool of the engine.
    pub(crate) pool: ThreadPool,
    /// Vector instruction set in use, which the processor supports.
    pub(crate) isa: Isa,
    /// Rounding of matmul operands.
    pub(crate) precision: Precision,
}

impl Compute {
    /// Creates a pool of `threads` threads with the best available instruction set, in f32.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::detect(), Precision::F32)
    }

    /// Creates a pool of `threads` threads with the given instruction set and precision.
    ///
    /// # Panics
    /// Panics if the processor does not support the instruction set ([`Isa::available`]).
    pub fn with_isa(threads: usize, isa: Isa, precision: Precision) -> Self {
        // The safety of all functions compiled for an instruction set rests on this check.
        assert!(Isa::available().contains(&isa), "this processor does not support {isa:?}");
        Compute { pool: ThreadPool::new(threads), isa, precision }
    }

    /// Returns the rounding of matmul operands.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns the instruction set and precision, which select the inner loops of matmul.
    pub fn kernel(&self) -> Kernel {
        Kernel { isa: self.isa, precision: self.precision }
    }
}
