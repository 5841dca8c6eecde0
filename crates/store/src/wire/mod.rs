//! Wire format of records and errors between a store server and its client.
//!
//! A record is a JSON head and binary columns. Values per token (token ids, log-probabilities,
//! versions, advantages) are little-endian columns. Scores and rewards are sent as the bits of
//! their floats, so that every bit survives, including the bits of a NaN, which JSON cannot
//! represent. [`encode`] and [`decode`] convert a record. [`WireError`] is the serialized form of a
//! [`StoreError`].
//!
//! # Format
//! `LVR`, the version byte 1, the length of the head as `u32`, the head, and the columns in the
//! order in which the head mentions their lengths.
//!
//! Out of scope: HTTP, which the crates `levade-store-server` and `levade-store-client` implement.
//!
//! [`StoreError`]: crate::StoreError

mod columns;
mod error;
mod lease;
mod records;
#[cfg(test)]
mod tests;

pub use columns::{ColumnReader, ColumnWriter};
pub use error::WireError;
pub use lease::{OpenRequest, OpenedRun, RunEntry, Trainer};
pub use records::Record;

/// First bytes of an encoded record: the name of the format, and its version.
const MAGIC: [u8; 4] = *b"LVR\x01";

/// Media type of an encoded record in HTTP.
pub const MEDIA_TYPE: &str = "application/vnd.levade.record";

/// Encodes a record as a JSON head, followed by binary columns.
///
/// # Errors
/// Returns a message if the head is larger than 4 GiB.
pub fn encode(record: &impl Record) -> Result<Vec<u8>, String> {
    let mut columns = ColumnWriter::default();
    let head = record.to_head(&mut columns);
    let head = serde_json::to_vec(&head).map_err(|error| error.to_string())?;
    let len = u32::try_from(head.len())
        .map_err(|_| format!("the head has {} bytes, but at most 4 GiB can be sent", head.len()))?;
    let mut all = Vec::with_capacity(8 + head.len() + columns.0.len());
    all.extend_from_slice(&MAGIC);
    all.extend_from_slice(&len.to_le_bytes());
    all.extend_from_slice(&head);
    all.extend_from_slice(&columns.0);
    Ok(all)
}

/// Error message for a record that ends too early.
const TRUNCATED: &str = "the record is truncated";

/// Decodes the output of [`encode`].
///
/// # Errors
/// Returns a message if the bytes are not a record of this type and version.
pub fn decode<T: Record>(bytes: &[u8]) -> Result<T, String> {
    let (magic, rest) = bytes.split_first_chunk::<4>().ok_or(TRUNCATED)?;
    if *magic != MAGIC {
        return Err(format!(
            "the record starts with the bytes {magic:?}, but must start with {MAGIC:?}"
        ));
    }
    let (len, rest) = rest.split_first_chunk::<4>().ok_or(TRUNCATED)?;
    let len = u32::from_le_bytes(*len) as usize;
    let (head, rest) = rest.split_at_checked(len).ok_or(TRUNCATED)?;
    let head = serde_json::from_slice(head).map_err(|error| format!("the head: {error}"))?;
    let mut columns = ColumnReader(rest);
    let record = T::from_head(head, &mut columns)?;
    match columns.0.len() {
        0 => Ok(record),
        len => Err(format!("{len} unexpected bytes follow the last column of the record")),
    }
}
