//! Decodes GGUF's number formats, including quantized ones, to f32.
//!
//! Rows are split into blocks. A block of the plain formats (`Q4_0` … `Q8_0`) has 32 values with
//! one f16 scale; the `_1` formats add one f16 offset. A block of the K formats has 256 values in
//! sub-blocks, whose scales are quantized too. Within a block, the order of values is not the order
//! of bits: the low halves of bytes come first, then the high halves.

use half::{bf16, f16};

/// Number format in which a GGUF file stores a tensor.
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
    pub(super) const NAMES: &'static str =
        "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";

    /// Returns the encoding with the GGUF type number `kind`, or `None` if Levade does not support
    /// it.
    pub(super) fn from_type_number(kind: u32) -> Option<Self> {
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

    /// Returns the name of the unsupported encoding with the GGUF type number `kind`, for error
    /// messages.
    pub(super) fn unsupported_name(kind: u32) -> String {
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

    /// Returns the number of values in one block of the encoding, and the size of a block in bytes.
    pub(super) fn block_size(self) -> (usize, usize) {
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

    /// Returns the size in bytes of a tensor of this shape (slowest dimension first). Returns a
    /// description of the error if a row is not a whole number of blocks, or if the size overflows
    /// `usize`.
    pub(super) fn tensor_bytes(self, shape: &[usize]) -> Result<usize, String> {
        let (values, bytes) = self.block_size();
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(values) {
            return Err(format!("rows of {row} values cannot be split into blocks of {values}"));
        }
        shape
            .iter()
            .try_fold(1usize, |product, &size| product.checked_mul(size))
            .and_then(|elements| (elements / values).checked_mul(bytes))
            .ok_or_else(|| "the size in bytes exceeds the address space".to_string())
    }

    /// Decodes complete blocks from `data` into `out`. `data` must contain exactly the blocks of
    /// the values of `out`.
    pub(super) fn decode(self, data: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => decode_blocks(data, out, |bytes: &[u8; 4], out: &mut [f32; 1]| {
                out[0] = f32::from_le_bytes(*bytes)
            }),
            Self::F16 => {
                decode_blocks(data, out, |bytes: &[u8; 2], out: &mut [f32; 1]| {
                    out[0] = f16::from_le_bytes(*bytes).to_f32()
                });
            }
            Self::Bf16 => {
                decode_blocks(data, out, |bytes: &[u8; 2], out: &mut [f32; 1]| {
                    out[0] = bf16::from_le_bytes(*bytes).to_f32()
                });
            }
            Self::Q4_0 => decode_blocks(data, out, decode_q4_0),
            Self::Q4_1 => decode_blocks(data, out, decode_q4_1),
            Self::Q5_0 => decode_blocks(data, out, decode_q5_0),
            Self::Q5_1 => decode_blocks(data, out, decode_q5_1),
            Self::Q8_0 => decode_blocks(data, out, decode_q8_0),
            Self::Q4K => decode_blocks(data, out, decode_q4_k),
            Self::Q5K => decode_blocks(data, out, decode_q5_k),
            Self::Q6K => decode_blocks(data, out, decode_q6_k),
        }
    }
}

fn decode_blocks<const BYTES: usize, const VALUES: usize>(
    data: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    for (block, values) in data.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<VALUES>().0) {
        decode(block, values);
    }
}

/// Returns the f16 number at byte offset `at` of a block, as f32.
fn read_f16(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Decodes a block of `Q4_0`: scale; 16 bytes of nibbles. A value is a nibble minus 8, times the
/// scale.
fn decode_q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = read_f16(block, 0);
    let (low, high) = out.split_at_mut(16);
    for (i, &byte) in block[2..].iter().enumerate() {
        low[i] = scale * (f32::from(byte & 15) - 8.0);
        high[i] = scale * (f32::from(byte >> 4) - 8.0);
    }
}

/// Decodes a block of `Q4_1`: scale, minimum; 16 bytes of nibbles.
fn decode_q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let scale = read_f16(block, 0);
    let minimum = read_f16(block, 2);
    let (low, high) = out.split_at_mut(16);
    for (i, &byte) in block[4..].iter().enumerate() {
        low[i] = scale * f32::from(byte & 15) + minimum;
        high[i] = scale * f32::from(byte >> 4) + minimum;
    }
}

/// Decodes the five-bit numbers of a block and calls `put` with each index and number. `fifth`
/// contains the highest bit of every number, `nibbles` the four lower bits.
fn decode_five_bits(fifth: &[u8], nibbles: &[u8], mut put: impl FnMut(usize, f32)) {
    let fifth = u32::from_le_bytes([fifth[0], fifth[1], fifth[2], fifth[3]]);
    let bit = |i: usize| ((fifth >> i & 1) << 4) as u8;
    for (i, &byte) in nibbles.iter().enumerate() {
        put(i, f32::from(byte & 15 | bit(i)));
        put(i + 16, f32::from(byte >> 4 | bit(i + 16)));
    }
}

/// Decodes a block of `Q5_0`: scale; 32 fifth bits; 16 bytes of nibbles. A value is a five-bit
/// number minus 16, times the scale.
fn decode_q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = read_f16(block, 0);
    decode_five_bits(&block[2..6], &block[6..], |i, value| out[i] = scale * (value - 16.0));
}

/// Decodes a block of `Q5_1`: scale, minimum; 32 fifth bits; 16 bytes of nibbles.
fn decode_q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let scale = read_f16(block, 0);
    let minimum = read_f16(block, 2);
    decode_five_bits(&block[4..8], &block[8..], |i, value| out[i] = scale * value + minimum);
}

/// Decodes a block of `Q8_0`: scale; 32 signed bytes.
fn decode_q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = read_f16(block, 0);
    for (value, &byte) in out.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(byte as i8);
    }
}

/// Returns the six-bit scale and minimum of sub-block `j` (0..8), which are packed in twelve bytes.
/// For the first four sub-blocks, the lower six bits of bytes 0..4 are the scales, and those of
/// bytes 4..8 the minima. For the other four, bytes 8..12 contain the lower four bits (scale in the
/// low nibble, minimum in the high nibble), and the top two bits of the first eight bytes are the
/// upper two bits.
fn scale_and_minimum(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, minimum) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let low = packed[j + 4];
        (low & 15 | packed[j - 4] >> 6 << 4, low >> 4 | packed[j] >> 6 << 4)
    };
    (f32::from(scale), f32::from(minimum))
}

/// Decodes a block of `Q4_K`: scale of scales, scale of minima; eight six-bit scales and minima;
/// 128 bytes of nibbles. Each run of 32 bytes has one sub-block in its low nibbles and the next in
/// its high nibbles.
fn decode_q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    decode_k_nibbles(block, &block[4..16], &block[16..], |_, _| 0, out);
}

/// Decodes a block of `Q5_K`: like `Q4_K`, with 32 bytes of fifth bits before the nibbles. Bit j of
/// byte i belongs to value i of sub-block j.
fn decode_q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    decode_k_nibbles(block, &block[4..16], &block[48..], |j, i| (block[16 + i] >> j & 1) << 4, out);
}

fn decode_k_nibbles(
    block: &[u8],
    packed: &[u8],
    nibbles: &[u8],
    fifth: impl Fn(usize, usize) -> u8,
    out: &mut [f32; 256],
) {
    let scale = read_f16(block, 0);
    let minimum = read_f16(block, 2);
    for (j, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (s, m) = scale_and_minimum(packed, j);
        let scale = scale * s;
        let minimum = minimum * m;
        let bytes = &nibbles[j / 2 * 32..];
        for (i, value) in values.iter_mut().enumerate() {
            let nibble = if j % 2 == 0 { bytes[i] & 15 } else { bytes[i] >> 4 };
            *value = scale * f32::from(nibble | fifth(j, i)) - minimum;
        }
    }
}

/// Decodes a block of `Q6_K`: 128 bytes of nibbles, 64 bytes of upper bit pairs, sixteen signed
/// scales, and their scale. A value is a six-bit number minus 32, times both scales. Each half of
/// 128 values is four runs of 32: the low nibbles of its 64 bytes, then the high nibbles, with the
/// bit pairs of its 32 bytes from the lowest up. A scale covers 16 values.
fn decode_q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = read_f16(block, 208);
    for (run, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let half = run / 4;
        let quarter = run % 4;
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const QUANTISED: [(u32, Encoding); 8] = [
        (2, Encoding::Q4_0),
        (3, Encoding::Q4_1),
        (6, Encoding::Q5_0),
        (7, Encoding::Q5_1),
        (8, Encoding::Q8_0),
        (12, Encoding::Q4K),
        (13, Encoding::Q5K),
        (14, Encoding::Q6K),
    ];

    /// The table of model sources in `docs/models.md` lists every supported encoding.
    #[test]
    fn page_of_models_lists_every_encoding() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/models.md");
        let page = std::fs::read_to_string(path).unwrap();
        let line = page.lines().find(|line| line.starts_with("| a `.gguf` file |")).unwrap();
        let listed = line.rsplit('|').nth(1).unwrap().split(';').next().unwrap();
        assert_eq!(sorted_names(listed), sorted_names(Encoding::NAMES));
    }

    fn sorted_names(names: &str) -> Vec<String> {
        let mut names: Vec<_> = names.split(',').map(|name| name.trim().to_owned()).collect();
        names.sort();
        names
    }

    /// Returns the byte offsets of the f16 numbers of a block.
    fn scales(encoding: Encoding) -> &'static [usize] {
        match encoding {
            Encoding::Q4_0 | Encoding::Q5_0 | Encoding::Q8_0 => &[0],
            Encoding::Q6K => &[208],
            _ => &[0, 2],
        }
    }

    /// Computes value `i` of a block directly from the format's definition, by reading each bit at
    /// its address.
    fn reference(encoding: Encoding, block: &[u8], i: usize) -> f32 {
        let bits = |byte: usize, shift: usize, count: usize| {
            (block[byte] as usize >> shift) & ((1 << count) - 1)
        };
        let signed = |byte: usize| block[byte] as i8 as f32;
        let f16_at =
            |at: usize| f16::from_bits(block[at] as u16 + 256 * block[at + 1] as u16).to_f32();
        let d = f16_at(scales(encoding)[0]);
        // In blocks of 32, value i < 16 is the low nibble of byte i, and value i + 16 the high
        // nibble.
        let nibble = |start: usize| bits(start + i % 16, i / 16 * 4, 4);
        let fifth = |start: usize| bits(start + i / 8, i % 8, 1) * 16;
        // In K blocks of nibbles, two sub-blocks of 32 values share 32 bytes.
        let sub = i / 32;
        let within = i % 32;
        let six_bits = |is_minimum: usize| {
            let byte = 4 + sub % 4 + 4 * is_minimum;
            if sub < 4 {
                bits(byte, 0, 6)
            } else {
                bits(12 + sub % 4, 4 * is_minimum, 4) + 16 * bits(byte, 6, 2)
            }
        };
        let k_nibble = |start: usize| bits(start + sub / 2 * 32 + within, sub % 2 * 4, 4);
        let k = |q: usize| d * six_bits(0) as f32 * q as f32 - f16_at(2) * six_bits(1) as f32;
        match encoding {
            Encoding::Q4_0 => d * (nibble(2) as f32 - 8.0),
            Encoding::Q4_1 => d * nibble(4) as f32 + f16_at(2),
            Encoding::Q5_0 => d * ((nibble(6) + fifth(2)) as f32 - 16.0),
            Encoding::Q5_1 => d * (nibble(8) + fifth(4)) as f32 + f16_at(2),
            Encoding::Q8_0 => d * signed(2 + i),
            Encoding::Q4K => k(k_nibble(16)),
            Encoding::Q5K => k(k_nibble(48) + 16 * bits(16 + within, sub, 1)),
            Encoding::Q6K => {
                let half = i / 128;
                let quarter = i % 128 / 32;
                let low = bits(64 * half + i % 64, quarter / 2 * 4, 4);
                let high = bits(128 + 32 * half + within, 2 * quarter, 2);
                d * signed(192 + i / 16) * ((low + 16 * high) as f32 - 32.0)
            }
            _ => unreachable!("not quantized"),
        }
    }

    proptest! {
        /// Three blocks of arbitrary bytes decode to bit-identical values of the reference.
        #[test]
        fn decode_matches_reference_bit_for_bit(
            which in 0..QUANTISED.len(),
            mut data in prop::collection::vec(any::<u8>(), 3 * 210),
            numbers in prop::collection::vec(-100.0f32..100.0, 6),
        ) {
            let (kind, encoding) = QUANTISED[which];
            prop_assert_eq!(Encoding::from_type_number(kind), Some(encoding));
            let (values, bytes) = encoding.block_size();
            data.truncate(3 * bytes);
            for (block, numbers) in data.chunks_exact_mut(bytes).zip(numbers.chunks(2)) {
                for (&at, number) in scales(encoding).iter().zip(numbers) {
                    block[at..at + 2].copy_from_slice(&f16::from_f32(*number).to_le_bytes());
                }
            }
            let mut out = vec![0.0; 3 * values];
            encoding.decode(&data, &mut out);
            for (i, found) in out.iter().enumerate() {
                let expected = reference(encoding, &data[i / values * bytes..], i % values);
                prop_assert_eq!(found.to_bits(), expected.to_bits(), "{:?} value {}", encoding, i);
            }
        }
    }

    /// Compares with values that the Python package `gguf` 0.19 decodes from a block whose byte i
    /// is (73 i + 29) mod 256, with the scale 0x2E66 and the minimum 0x3266: the values at 0, 1,
    /// 15, 16, n/2 + 3, n − 2 and n − 1, and Σ (i + 1) · value.
    #[test]
    fn decode_matches_python_gguf_package() {
        #[rustfmt::skip]
        let expected: [([f32; 7], f64); 8] = [
            ([0.6998291, 0.0, -0.19995117, 0.19995117, 0.0, 0.19995117, 0.6998291], 16.6959228515625),
            ([0.29992676, 1.199707, 0.99975586, 0.5998535, 0.29992676, 0.49987793, 0.99975586],
             525.4716796875),
            ([0.29992676, 1.199707, 0.99975586, 1.2996826, -0.5998535, -0.29992676, 0.099975586],
             -79.4805908203125),
            ([2.2994385, 1.5996094, 2.9992676, 2.399414, 0.5998535, 0.7998047, 1.199707],
             895.581298828125),
            ([-8.098022, -0.7998047, -0.99975586, 6.298462, 2.5993652, 6.0985107, -12.1970215],
             -702.228515625),
            ([-6.0985107, -6.79834, -6.998291, -6.0985107, 15.196289, -0.7998047, 1.199707],
             453670.013671875),
            ([-4.4989014, -6.79834, -6.998291, -4.4989014, 15.196289, 0.0, 1.9995117],
             1132502.642578125),
            ([10.497437, -20.994873, 97.976074, -11.397217, -88.77832, -57.585938, 17.995605],
             217354.1220703125),
        ];
        for ((_, encoding), (values, sum)) in QUANTISED.into_iter().zip(expected) {
            let (n, bytes) = encoding.block_size();
            let mut block: Vec<u8> = (0..bytes).map(|i| (i * 73 + 29) as u8).collect();
            for (&at, bits) in scales(encoding).iter().zip([0x2E66u16, 0x3266]) {
                block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            }
            let mut out = vec![0.0f32; n];
            encoding.decode(&block, &mut out);
            let found = [0, 1, 15, 16, n / 2 + 3, n - 2, n - 1].map(|i| out[i]);
            assert_eq!(found, values, "{encoding:?}");
            let weighted: f64 =
                out.iter().enumerate().map(|(i, &value)| (i + 1) as f64 * f64::from(value)).sum();
            assert!(
                (weighted - sum).abs() <= 1e-9 * sum.abs(),
                "{encoding:?}: {weighted} instead of {sum}"
            );
        }
    }

    #[test]
    fn decode_converts_float_formats_exactly() {
        let mut out = [0.0; 2];
        Encoding::F32.decode(&[0, 0, 0x80, 0x3f, 1, 0, 0, 0], &mut out);
        assert_eq!(out.map(f32::to_bits), [0x3f80_0000, 1]);
        Encoding::F16.decode(&[0, 0x3c, 1, 0x80], &mut out);
        assert_eq!(out, [1.0, -(2.0f32.powi(-24))]);
        Encoding::Bf16.decode(&[0x80, 0x3f, 0x49, 0x40], &mut out);
        assert_eq!(out, [1.0, 3.140625]);
    }

    #[test]
    fn tensor_bytes_rejects_partial_blocks_and_overflow() {
        assert_eq!(Encoding::Q4_1.tensor_bytes(&[3, 64]), Ok(3 * 2 * 20));
        assert_eq!(Encoding::F16.tensor_bytes(&[5]), Ok(10));
        assert!(Encoding::Q4K.tensor_bytes(&[4, 128]).unwrap_err().contains("blocks of 256"));
        assert!(Encoding::F32.tensor_bytes(&[usize::MAX, 2]).is_err());
        assert!(Encoding::F32.tensor_bytes(&[usize::MAX / 2]).is_err());
    }
}
