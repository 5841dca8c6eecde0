//! How GGUF stores numbers, and back to f32.
//!
//! Rows are cut into blocks. A block of the plain kinds (`Q4_0` … `Q8_0`) has 32 values with one f16 scale, and one f16
//! offset in the `_1` kinds. A block of the K kinds has 256 values in sub-blocks, whose scales are quantised themselves.
//! Within a block the order of values is not the order of bits: low halves of bytes come first, then high halves.

use half::{bf16, f16};

/// A way of storing numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl Encoding {
    pub(super) const NAMES: &'static str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";

    /// The encoding with this number in the format.
    pub(super) fn of(kind: u32) -> Option<Self> {
        Some(match kind {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// What to call an encoding that is not read.
    pub(super) fn foreign_name(kind: u32) -> String {
        let name = match kind {
            9 => "Q8_1",
            10 => "Q2_K",
            11 => "Q3_K",
            15 => "Q8_K",
            16..=23 | 29 => "an IQ type",
            24..=27 => "integers",
            28 => "F64",
            34 | 35 => "a ternary type",
            39 => "MXFP4",
            _ => "an unknown type",
        };
        format!("{name} (type {kind})")
    }

    /// Values and bytes of a block.
    pub(super) fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 2 + 16),
            Self::Q4_1 => (32, 4 + 16),
            Self::Q5_0 => (32, 2 + 4 + 16),
            Self::Q5_1 => (32, 4 + 4 + 16),
            Self::Q8_0 => (32, 2 + 32),
            Self::Q4K => (256, 4 + 12 + 128),
            Self::Q5K => (256, 4 + 12 + 32 + 128),
            Self::Q6K => (256, 128 + 64 + 16 + 2),
        }
    }

    /// Bytes of a tensor of this shape (slowest dimension first).
    pub(super) fn bytes(self, shape: &[usize]) -> Result<usize, String> {
        let (values, bytes) = self.block();
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(values) {
            return Err(format!("its rows of {row} values cannot be cut into blocks of {values}"));
        }
        shape
            .iter()
            .try_fold(1usize, |product, &size| product.checked_mul(size))
            .and_then(|elements| (elements / values).checked_mul(bytes))
            .ok_or_else(|| "it is larger than any memory".to_string())
    }

    /// Decodes whole blocks. `data` has the bytes of as many values as `out` holds.
    pub(super) fn decode(self, data: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => {
                each(data, out, |bytes: &[u8; 4], out: &mut [f32; 1]| out[0] = f32::from_le_bytes(*bytes))
            }
            Self::F16 => {
                each(data, out, |bytes: &[u8; 2], out: &mut [f32; 1]| {
                    out[0] = f16::from_le_bytes(*bytes).to_f32()
                });
            }
            Self::Bf16 => {
                each(data, out, |bytes: &[u8; 2], out: &mut [f32; 1]| {
                    out[0] = bf16::from_le_bytes(*bytes).to_f32()
                });
            }
            Self::Q4_0 => each(data, out, q4_0),
            Self::Q4_1 => each(data, out, q4_1),
            Self::Q5_0 => each(data, out, q5_0),
            Self::Q5_1 => each(data, out, q5_1),
            Self::Q8_0 => each(data, out, q8_0),
            Self::Q4K => each(data, out, q4_k),
            Self::Q5K => each(data, out, q5_k),
            Self::Q6K => each(data, out, q6_k),
        }
    }
}

fn each<const BYTES: usize, const VALUES: usize>(
    data: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    for (block, values) in data.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<VALUES>().0) {
        decode(block, values);
    }
}

/// The f16 at a position of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Scale; 16 bytes of nibbles that count from −8.
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let (low, high) = out.split_at_mut(16);
    for (i, &byte) in block[2..].iter().enumerate() {
        low[i] = scale * (f32::from(byte & 15) - 8.0);
        high[i] = scale * (f32::from(byte >> 4) - 8.0);
    }
}

/// Scale, minimum; 16 bytes of nibbles.
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = out.split_at_mut(16);
    for (i, &byte) in block[4..].iter().enumerate() {
        low[i] = scale * f32::from(byte & 15) + minimum;
        high[i] = scale * f32::from(byte >> 4) + minimum;
    }
}

/// The five-bit numbers of a block: `fifth` holds the highest bit of every value, `nibbles` the others.
fn five_bits(fifth: &[u8], nibbles: &[u8], mut put: impl FnMut(usize, f32)) {
    let fifth = u32::from_le_bytes([fifth[0], fifth[1], fifth[2], fifth[3]]);
    let bit = |i: usize| ((fifth >> i & 1) << 4) as u8;
    for (i, &byte) in nibbles.iter().enumerate() {
        put(i, f32::from(byte & 15 | bit(i)));
        put(i + 16, f32::from(byte >> 4 | bit(i + 16)));
    }
}

/// Scale; 32 fifth bits; 16 bytes of nibbles; the values count from −16.
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    five_bits(&block[2..6], &block[6..], |i, value| out[i] = scale * (value - 16.0));
}

/// Scale, minimum; 32 fifth bits; 16 bytes of nibbles.
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    five_bits(&block[4..8], &block[8..], |i, value| out[i] = scale * value + minimum);
}

/// Scale; 32 signed bytes.
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (value, &byte) in out.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(byte as i8);
    }
}

/// The six-bit scale and minimum of sub-block `j` (0..8), packed in twelve bytes: bytes 0..4 have the scales and 4..8 the minima
/// of the first four in their lower six bits; the other four have their lower nibbles in bytes 8..12 and their upper two
/// bits on top of the first eight bytes.
fn scale_and_minimum(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, minimum) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let low = packed[j + 4];
        (low & 15 | packed[j - 4] >> 6 << 4, low >> 4 | packed[j] >> 6 << 4)
    };
    (f32::from(scale), f32::from(minimum))
}

/// Scale of scales, scale of minima; eight six-bit scales and minima; 128 bytes of nibbles. Each run of 32 bytes has one
/// sub-block in its low nibbles and the next in its high ones.
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    k_nibbles(block, &block[4..16], &block[16..], |_, _| 0, out);
}

/// Like `Q4_K` with 32 bytes of fifth bits: bit j of byte i belongs to value i of sub-block j.
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    k_nibbles(block, &block[4..16], &block[48..], |j, i| (block[16 + i] >> j & 1) << 4, out);
}

fn k_nibbles(
    block: &[u8],
    packed: &[u8],
    nibbles: &[u8],
    fifth: impl Fn(usize, usize) -> u8,
    out: &mut [f32; 256],
) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for (j, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (s, m) = scale_and_minimum(packed, j);
        let (scale, minimum) = (scale * s, minimum * m);
        let bytes = &nibbles[j / 2 * 32..];
        for (i, value) in values.iter_mut().enumerate() {
            let nibble = if j % 2 == 0 { bytes[i] & 15 } else { bytes[i] >> 4 };
            *value = scale * f32::from(nibble | fifth(j, i)) - minimum;
        }
    }
}

/// 128 bytes of nibbles, 64 bytes of upper bit pairs, sixteen signed scales, their scale; the values count from −32. Each half
/// of 128 values is four runs of 32: the low nibbles of its 64 bytes, then the high nibbles, with the bit pairs of its 32
/// bytes from the lowest up. A scale covers 16 values.
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = half_at(block, 208);
    for (run, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, quarter) = (run / 4, run % 4);
        let nibbles = &block[half * 64 + quarter % 2 * 32..];
        let pairs = &block[128 + half * 32..];
        for (i, value) in values.iter_mut().enumerate() {
            let nibble = if quarter < 2 { nibbles[i] & 15 } else { nibbles[i] >> 4 };
            let pair = pairs[i] >> (2 * quarter) & 3;
            let sub_scale = f32::from(block[192 + run * 2 + i / 16] as i8);
            *value = scale * sub_scale * (f32::from(nibble | pair << 4) - 32.0);
        }
    }
}
