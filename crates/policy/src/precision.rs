//! Number formats of matrix multiplications.

use serde::{Deserialize, Serialize};

/// Number format in which a policy multiplies numbers. Sums and trained weights are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32-bit floating-point numbers.
    #[default]
    F32,
    /// bfloat16 with 8 bits of mantissa. It halves the memory, and doubles the speed if the
    /// processor multiplies pairs.
    Bf16,
}

impl Precision {
    /// Returns the size of one number of this precision, in bytes.
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
