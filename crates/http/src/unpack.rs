//! Decompresses bodies with gzip, up to a maximum size.

use std::io::Read;

use bytes::Bytes;

/// Reason why an HTTP body cannot be decompressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnpackError {
    /// The content encoding is not supported.
    Unknown,
    /// The body does not match its content encoding.
    Broken,
    /// The decompressed body exceeds the maximum size.
    TooLarge,
}

/// Decompresses a body by its `Content-Encoding`, which is gzip or none. Memory use is bounded by
/// `max` plus a small constant, so a small body that expands to a huge size does no harm.
///
/// # Errors
/// Returns an [`UnpackError`] if the body cannot be decompressed, or exceeds `max` bytes after
/// decompression.
pub fn unpack(encoding: &str, body: Bytes, max: usize) -> Result<Bytes, UnpackError> {
    match encoding.trim().to_ascii_lowercase().as_str() {
        "" | "identity" => Ok(body),
        _ if body.is_empty() => Ok(body),
        "gzip" | "x-gzip" => {
            let mut all = Vec::new();
            let unpacked = flate2::read::MultiGzDecoder::new(&body[..]);
            unpacked.take(max as u64 + 1).read_to_end(&mut all).map_err(|_| UnpackError::Broken)?;
            if all.len() > max { Err(UnpackError::TooLarge) } else { Ok(all.into()) }
        }
        _ => Err(UnpackError::Unknown),
    }
}
