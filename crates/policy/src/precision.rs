//! Number formats.

use serde::{Deserialize, Serialize};

/// In what form a policy multiplies numbers. Sums, and weights as they are learnt, are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Computes in f32.
    #[default]
    F32,
    /// Rounded to bfloat16: 8 bits of mantissa, half the memory, twice the speed where the processor
    /// multiplies pairs.
    Bf16,
}

impl Precision {
    /// Bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            Precision::F32 => 4,
            Precision::Bf16 => 2,
        }
    }
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        })
    }
}
