//! Unpacks tests in the format of LiveCodeBench's `private_test_cases`.
//!
//! The format has four layers: base64, zlib, a Python pickle, and JSON text. Only a pickle that
//! contains a single string is accepted, and no pickle operation that calls code is supported.

use std::io::Read;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::read::ZlibDecoder;

/// Maximum size of the unpacked tests of a task, in bytes.
const MAX_BYTES: u64 = 256 << 20;

/// Minimum length of packed tests, in characters. Code that consists only of base64 characters is
/// shorter.
const MIN_CHARS: usize = 24;

/// Returns whether a text consists only of base64, on one line or on lines of equal length (the
/// last one may be shorter).
pub(super) fn looks_packed(text: &str) -> bool {
    let is_base64 = |word: &str| {
        let body = word.trim_end_matches('=');
        word.len() - body.len() <= 2
            && body.bytes().all(|b| b.is_ascii_alphanumeric() || b"+/".contains(&b))
    };
    let mut words = text.split_whitespace();
    let Some(first) = words.next() else { return false };
    let mut last = first.len();
    let is_wrapped = words.by_ref().all(|word| {
        let fits = last == first.len() && word.len() <= first.len() && is_base64(word);
        last = word.len();
        fits
    });
    first.len() >= MIN_CHARS && is_base64(first) && is_wrapped
}

/// Unpacks the tests of a task to JSON text. The tests are base64 of zlib of a pickle. The pickle
/// layer, or the zlib and pickle layers, may be missing.
///
/// # Errors
/// Returns a message that names the layer that is invalid or too large.
pub(super) fn unpack_tests(text: &str) -> Result<String, String> {
    let joined: String = text.split_whitespace().collect();
    let bytes =
        STANDARD.decode(joined).map_err(|error| format!("the text is not base64: {error}"))?;
    // JSON directly in base64.
    if let Ok(text) = std::str::from_utf8(&bytes)
        && text.trim_start().starts_with(['[', '{'])
    {
        return Ok(text.to_owned());
    }
    let mut pickle = Vec::new();
    let read = ZlibDecoder::new(&bytes[..]).take(MAX_BYTES + 1).read_to_end(&mut pickle);
    read.map_err(|error| format!("the content of the base64 text is not zlib: {error}"))?;
    if pickle.len() as u64 > MAX_BYTES {
        return Err(format!("the unpacked tests are larger than {} MiB", MAX_BYTES >> 20));
    }
    match pickled_text(&pickle) {
        Some(text) => Ok(text),
        None => String::from_utf8(pickle)
            .ok()
            .filter(|text| text.trim_start().starts_with(['[', '{']))
            .ok_or_else(|| {
                "the decompressed content is neither JSON nor a pickle of one string".to_owned()
            }),
    }
}

/// Returns the string in a Python pickle, or `None` if the pickle contains anything except one
/// string.
fn pickled_text(pickle: &[u8]) -> Option<String> {
    let mut rest = pickle;
    let mut text = None;
    loop {
        let code = split_off_bytes(&mut rest, 1)?[0];
        let length = match code {
            // PROTO and FRAME.
            0x80 => split_off_bytes(&mut rest, 1).map(|_| None)?,
            0x95 => split_off_bytes(&mut rest, 8).map(|_| None)?,
            // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8.
            0x8C => Some(u64::from(split_off_bytes(&mut rest, 1)?[0])),
            b'X' => {
                Some(u64::from(u32::from_le_bytes(split_off_bytes(&mut rest, 4)?.try_into().ok()?)))
            }
            0x8D => Some(u64::from_le_bytes(split_off_bytes(&mut rest, 8)?.try_into().ok()?)),
            // MEMOIZE, BINPUT, LONG_BINPUT.
            0x94 if text.is_some() => None,
            b'q' if text.is_some() => split_off_bytes(&mut rest, 1).map(|_| None)?,
            b'r' if text.is_some() => split_off_bytes(&mut rest, 4).map(|_| None)?,
            // STOP.
            b'.' if rest.is_empty() => return text,
            _ => return None,
        };
        if let Some(length) = length {
            let bytes = split_off_bytes(&mut rest, usize::try_from(length).ok()?)?;
            let read = String::from_utf8(bytes.to_vec()).ok()?;
            if text.replace(read).is_some() {
                return None;
            }
        }
    }
}

/// Removes the first `count` bytes from `rest` and returns them. Returns `None` if `rest` has fewer
/// bytes.
fn split_off_bytes<'b>(rest: &mut &'b [u8], count: usize) -> Option<&'b [u8]> {
    let (taken, after) = rest.split_at_checked(count)?;
    *rest = after;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::ZlibEncoder;

    use super::*;

    fn pack_tests(pickle: &[u8]) -> String {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(pickle).unwrap();
        STANDARD.encode(encoder.finish().unwrap())
    }

    const JSON: &str = r#"[{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]"#;

    fn pickles(text: &str) -> Vec<Vec<u8>> {
        let size = text.len();
        let short =
            [&[0x80, 4, 0x95], &(size as u64 + 4).to_le_bytes()[..], &[0x8C, size as u8]].concat();
        let long = [&[0x80, 3, b'X'], &(size as u32).to_le_bytes()[..]].concat();
        let max_length = [&[0x80, 4, 0x8D], &(size as u64).to_le_bytes()[..]].concat();
        let ends: [&[u8]; 4] = [&[0x94, b'.'], &[b'q', 0, b'.'], b".", b"r\0\0\0\0."];
        let starts = [short, long.clone(), max_length, long];
        starts
            .iter()
            .zip(ends)
            .map(|(start, end)| [&start[..], text.as_bytes(), end].concat())
            .collect()
    }

    #[test]
    fn unpack_reads_pickled_and_plain_json() {
        for pickle in pickles(JSON) {
            let blob = pack_tests(&pickle);
            assert!(looks_packed(&blob));
            assert_eq!(unpack_tests(&blob).unwrap(), JSON);
            // Lines of equal length, as `base64.encodebytes` writes them.
            let lines: Vec<&str> =
                blob.as_bytes().chunks(40).map(|c| std::str::from_utf8(c).unwrap()).collect();
            assert!(looks_packed(&lines.join("\n")));
            assert_eq!(unpack_tests(&lines.join("\n")).unwrap(), JSON);
        }
        assert_eq!(unpack_tests(&pack_tests(JSON.as_bytes())).unwrap(), JSON);
        assert_eq!(unpack_tests(&STANDARD.encode(JSON)).unwrap(), JSON);
    }

    #[test]
    fn unpack_rejects_other_pickles() {
        // Loading cos\nsystem\n(S'true'\ntR. in Python runs the command `true`.
        let call = b"cos\nsystem\n(S'true'\ntR.".to_vec();
        let [short, long, ..] = &pickles(JSON)[..] else { panic!() };
        let mut damaged = vec![
            call,
            b"\x80\x04]\x94.".to_vec(),
            b"\x80\x04N.".to_vec(),
            b".".to_vec(),
            Vec::new(),
        ];
        // A memo operation is invalid before the string.
        damaged.extend([&b"\x94"[..], b"q\0", b"r\0\0\0\0"].map(|code| [code, &long[..]].concat()));
        damaged.push([&short[..], b"."].concat());
        damaged.push([&long[..long.len() - 1], &[0x8C, 1, b'a', b'.']].concat());
        damaged.extend((0..short.len()).map(|end| short[..end].to_vec()));
        for pickle in damaged {
            assert_eq!(pickled_text(&pickle), None, "{pickle:?}");
            assert!(
                unpack_tests(&pack_tests(&pickle))
                    .unwrap_err()
                    .contains("neither JSON nor a pickle")
            );
        }
        assert!(unpack_tests("AAAABBBBCCCCDDDDEEEEFFFF").unwrap_err().contains("not zlib"));
        assert!(unpack_tests("AAAABBBBCCCCDDDDEEEEFFFFG").unwrap_err().contains("not base64"));
    }

    #[test]
    fn looks_packed_rejects_code() {
        for code in [
            "assert f(1) == 2",
            "check(f)",
            "assert f",
            "abc",
            "",
            "import math\nassert f(1)",
            "x=1",
        ] {
            assert!(!looks_packed(code), "{code}");
        }
    }
}
