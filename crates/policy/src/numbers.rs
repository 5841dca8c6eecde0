//! Reads and writes the number files of the simulated policy.

use std::io::Write;
use std::path::Path;

use crate::PolicyError;

/// Writes numbers to `file` as little-endian f32, preceded by the step count if `steps` contains
/// one.
pub(crate) fn write_numbers(
    file: &Path,
    numbers: &[f32],
    steps: Option<u64>,
) -> Result<(), PolicyError> {
    let mut bytes: Vec<u8> = steps.iter().flat_map(|steps| steps.to_le_bytes()).collect();
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    let save = || {
        let mut out = std::fs::File::create(file)?;
        out.write_all(&bytes)?;
        out.sync_all()
    };
    save().map_err(|e| PolicyError::Storage(format!("cannot write {}: {e}", file.display())))
}

/// Reads `numbers` f32 numbers from `file`, and the step count before them if `with_steps` is set.
/// Without it, the returned count is 0.
pub(crate) fn read_numbers(
    file: &Path,
    numbers: usize,
    with_steps: bool,
) -> Result<(Vec<f32>, u64), PolicyError> {
    let bytes = std::fs::read(file)
        .map_err(|e| PolicyError::Storage(format!("cannot read {}: {e}", file.display())))?;
    let header = if with_steps { 8 } else { 0 };
    if bytes.len() != header + 4 * numbers {
        let found = bytes.len();
        let want = header + 4 * numbers;
        return Err(PolicyError::Storage(format!(
            "the file {} has {found} bytes instead of {want}; continue from an earlier checkpoint",
            file.display()
        )));
    }
    let steps = bytes[..header].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
    Ok((bytes[header..].as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(), steps))
}
