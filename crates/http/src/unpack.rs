//! Bodies that are packed with gzip, unpacked up to a number of bytes.

use std::io::Read;

use bytes::Bytes;

/// Reason for a body to stay packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unpack {
    /// The encoding is not known.
    Unknown,
    /// The body is not of its encoding.
    Broken,
    /// The unpacked body has more bytes than it can have.
    TooLarge,
}

/// Unpacks a body of a `Content-Encoding`: gzip, or none. Memory stays within `max` bytes and a little more,
/// so that a small body that unpacks to a large one does no harm.
///
/// # Errors
/// Returns an [`Unpack`] if the body cannot be unpacked, or has more than `max` bytes then.
pub fn unpack(encoding: &str, body: Bytes, max: usize) -> Result<Bytes, Unpack> {
    match encoding.trim().to_ascii_lowercase().as_str() {
        "" | "identity" => Ok(body),
        _ if body.is_empty() => Ok(body),
        "gzip" | "x-gzip" => {
            let mut all = Vec::new();
            let unpacked = flate2::read::MultiGzDecoder::new(&body[..]);
            unpacked.take(max as u64 + 1).read_to_end(&mut all).map_err(|_| Unpack::Broken)?;
            if all.len() > max { Err(Unpack::TooLarge) } else { Ok(all.into()) }
        }
        _ => Err(Unpack::Unknown),
    }
}
