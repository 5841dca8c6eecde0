//! Common parts of the sinks' formats: protocol buffer fields and the current time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Appends a length-delimited protocol buffer field: bytes, a text or a message.
pub(super) fn write_bytes_field(to: &mut Vec<u8>, field: u32, content: &[u8]) {
    write_varint(to, u64::from(field << 3 | 2));
    write_varint(to, content.len() as u64);
    to.extend(content);
}

/// Appends an integer field of a protocol buffer.
pub(super) fn write_integer_field(to: &mut Vec<u8>, field: u32, value: u64) {
    write_varint(to, u64::from(field << 3));
    write_varint(to, value);
}

fn write_varint(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

/// Returns the time since the Unix epoch.
pub(super) fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #[test]
    fn fields_match_protobuf_encoding() {
        let mut out = Vec::new();
        super::write_integer_field(&mut out, 2, 300);
        super::write_bytes_field(&mut out, 16, b"x");
        assert_eq!(out, [0x10, 0xac, 0x02, 0x82, 0x01, 1, b'x']);
    }
}
