//! Where the engine computes.

use crate::pool::Pool;
use crate::precision::{Kernel, Precision};
use crate::simd::Isa;

/// Threads, instruction set and precision that the engine computes with.
pub struct Compute {
    /// The one pool of threads.
    pub(crate) pool: Pool,
    /// The vector instructions in use, which the processor has.
    pub(crate) isa: Isa,
    /// Rounding of operands of products.
    pub(crate) precision: Precision,
}

impl Compute {
    /// `threads` threads with the best instructions there are, in f32.
    pub fn new(threads: usize) -> Self {
        Self::with(threads, Isa::detect(), Precision::F32)
    }

    /// `threads` threads with the instructions named.
    ///
    /// # Panics
    /// When the processor does not have them ([`Isa::available`]).
    pub fn with(threads: usize, isa: Isa, precision: Precision) -> Self {
        // All calls of functions compiled for an instruction set rest on this.
        assert!(Isa::available().contains(&isa), "this processor does not run {isa:?}");
        Compute { pool: Pool::new(threads), isa, precision }
    }

    /// Rounding of operands of products.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Choice of inner loops of products.
    pub fn kernel(&self) -> Kernel {
        Kernel { isa: self.isa, precision: self.precision }
    }
}
