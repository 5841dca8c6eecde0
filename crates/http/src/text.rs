//! Decodes response bodies as text.

use std::borrow::Cow;

/// Characters of windows-1252 from 0x80 to 0x9F. Pages that are declared as Latin-1 or ASCII are
/// decoded as windows-1252, too (WHATWG Encoding).
const WINDOWS_1252_NAMES: &str = "€\u{81}‚ƒ„…†‡ˆ‰Š‹Œ\u{8d}Ž\u{8f}\u{90}‘’“”•–—˜™š›œ\u{9d}žŸ";

/// Charset names that are decoded as windows-1252.
const LATIN_1_NAMES: [&str; 6] =
    ["iso-8859-1", "latin1", "windows-1252", "cp1252", "us-ascii", "ascii"];

/// Decodes a response body with the `Content-Type` in `kind`, such as `text/html; charset=utf-8`.
pub(crate) fn decode(body: &[u8], kind: &str) -> String {
    match body {
        [0xEF, 0xBB, 0xBF, rest @ ..] => return decode_lossy(rest),
        [0xFF, 0xFE, rest @ ..] => return decode_utf16(rest, u16::from_le_bytes),
        [0xFE, 0xFF, rest @ ..] => return decode_utf16(rest, u16::from_be_bytes),
        _ => {}
    }
    let (name, rest) = kind.split_once(';').unwrap_or((kind, ""));
    let name = name.trim().to_ascii_lowercase();
    let charset = rest.split(';').find_map(|part| {
        let (key, value) = part.split_once('=')?;
        key.trim()
            .eq_ignore_ascii_case("charset")
            .then(|| value.trim().trim_matches('"').to_ascii_lowercase())
    });
    match charset.as_deref() {
        Some("utf-16" | "utf-16be") => decode_utf16(body, u16::from_be_bytes),
        Some("utf-16le") => decode_utf16(body, u16::from_le_bytes),
        Some(charset) if LATIN_1_NAMES.contains(&charset) => decode_latin(body).into_owned(),
        // In most other encodings, at least the ASCII characters are readable as UTF-8.
        Some(_) => decode_lossy(body),
        None => match std::str::from_utf8(body) {
            Ok(text) => text.to_owned(),
            Err(_) if is_text(&name) => decode_lossy(body),
            Err(_) => {
                let of = if name.is_empty() { String::new() } else { format!(" of {name}") };
                format!("[{} bytes{of} that are no text]", body.len())
            }
        },
    }
}

/// Returns whether a media type denotes text, such as `text/html` or `application/json`.
fn is_text(name: &str) -> bool {
    name.starts_with("text/")
        || ["json", "xml", "javascript", "yaml"].iter().any(|end| name.ends_with(end))
}

fn decode_lossy(body: &[u8]) -> String {
    String::from_utf8_lossy(body).into_owned()
}

/// Decodes windows-1252, unless the body is valid UTF-8, because many pages declare the wrong
/// charset.
fn decode_latin(body: &[u8]) -> Cow<'_, str> {
    if let Ok(text) = std::str::from_utf8(body) {
        return text.into();
    }
    body.iter()
        .map(|byte| match byte {
            0x80..=0x9F => WINDOWS_1252_NAMES
                .chars()
                .nth(usize::from(byte - 0x80))
                .unwrap_or(char::REPLACEMENT_CHARACTER),
            byte => char::from(*byte),
        })
        .collect::<String>()
        .into()
}

fn decode_utf16(body: &[u8], unit: fn([u8; 2]) -> u16) -> String {
    let (pairs, _) = body.as_chunks::<2>();
    let units = pairs.iter().map(|pair| unit(*pair));
    char::decode_utf16(units).map(|read| read.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_text_is_decoded_by_type_and_bytes() {
        for (body, kind, want) in [
            (&b"caf\xC3\xA9"[..], "", "café"),
            (b"caf\xC3\xA9", "text/html; charset=UTF-8", "café"),
            (b"\xEF\xBB\xBF{\"a\": 1}", "application/json", "{\"a\": 1}"),
            (b"caf\xE9 \x93x\x94 \x80", "text/plain; charset=ISO-8859-1", "café “x” €"),
            (b"caf\xC3\xA9", "text/plain;charset=\"latin1\"", "café"),
            (b"\xFF\xFEa\0\xE9\0", "text/plain", "aé"),
            (b"\0a\0\xE9", "text/plain; charset=utf-16be", "aé"),
            (b"caf\xE9", "text/plain", "caf\u{FFFD}"),
            (b"caf\xE9", "application/problem+json", "caf\u{FFFD}"),
            (b"\x89PNG\r\n\x1a\n", "image/png", "[8 bytes of image/png that are no text]"),
            (b"\x89PNG", "", "[4 bytes that are no text]"),
            (b"", "image/png", ""),
        ] {
            assert_eq!(decode(body, kind), want, "{kind}");
        }
        assert_eq!(WINDOWS_1252_NAMES.chars().count(), 32);
    }
}
