//! Tests as LiveCodeBench packs its `private_test_cases`: base64 of zlib of a pickle of JSON as text.
//!
//! Only a pickle that holds one text is read, and nothing of it is ever run.

use std::io::Read;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::read::ZlibDecoder;

/// Most bytes that packed tests may have once they are unpacked.
const MAX_BYTES: u64 = 256 << 20;

/// Fewest characters of packed tests: code without any sign in it is shorter.
const MIN_CHARS: usize = 24;

/// Returns whether a text is base64 and nothing else, in one piece or in lines of equal length.
pub(super) fn is_packed(text: &str) -> bool {
    let is_base64 = |word: &str| {
        let body = word.trim_end_matches('=');
        word.len() - body.len() <= 2 && body.bytes().all(|b| b.is_ascii_alphanumeric() || b"+/".contains(&b))
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

/// Unpacks tests to JSON as text.
///
/// # Errors
/// Says which layer is not what LiveCodeBench writes.
pub(super) fn unpack(text: &str) -> Result<String, String> {
    let joined: String = text.split_whitespace().collect();
    let bytes = STANDARD.decode(joined).map_err(|error| format!("no base64: {error}"))?;
    // In one layer fewer: the JSON itself.
    if let Ok(text) = std::str::from_utf8(&bytes)
        && text.trim_start().starts_with(['[', '{'])
    {
        return Ok(text.to_owned());
    }
    let mut pickle = Vec::new();
    let read = ZlibDecoder::new(&bytes[..]).take(MAX_BYTES + 1).read_to_end(&mut pickle);
    read.map_err(|error| format!("base64, but no zlib within: {error}"))?;
    if pickle.len() as u64 > MAX_BYTES {
        return Err(format!("larger than {} MiB once it is unpacked", MAX_BYTES >> 20));
    }
    match pickled_text(&pickle) {
        Some(text) => Ok(text),
        None => String::from_utf8(pickle)
            .ok()
            .filter(|text| text.trim_start().starts_with(['[', '{']))
            .ok_or_else(|| "base64 of zlib, but neither JSON nor a pickle of one text within".to_owned()),
    }
}

/// Reads a pickle that holds one text.
fn pickled_text(pickle: &[u8]) -> Option<String> {
    let mut rest = pickle;
    let mut text = None;
    loop {
        let code = take(&mut rest, 1)?[0];
        let length = match code {
            // PROTO and FRAME.
            0x80 => take(&mut rest, 1).map(|_| None)?,
            0x95 => take(&mut rest, 8).map(|_| None)?,
            // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8.
            0x8C => Some(u64::from(take(&mut rest, 1)?[0])),
            b'X' => Some(u64::from(u32::from_le_bytes(take(&mut rest, 4)?.try_into().ok()?))),
            0x8D => Some(u64::from_le_bytes(take(&mut rest, 8)?.try_into().ok()?)),
            // MEMOIZE, BINPUT, LONG_BINPUT.
            0x94 if text.is_some() => None,
            b'q' if text.is_some() => take(&mut rest, 1).map(|_| None)?,
            b'r' if text.is_some() => take(&mut rest, 4).map(|_| None)?,
            // STOP.
            b'.' if rest.is_empty() => return text,
            _ => return None,
        };
        if let Some(length) = length {
            let bytes = take(&mut rest, usize::try_from(length).ok()?)?;
            let read = String::from_utf8(bytes.to_vec()).ok()?;
            if text.replace(read).is_some() {
                return None;
            }
        }
    }
}

/// Takes bytes from the beginning of a slice.
fn take<'b>(rest: &mut &'b [u8], count: usize) -> Option<&'b [u8]> {
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

    fn packed(pickle: &[u8]) -> String {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(pickle).unwrap();
        STANDARD.encode(encoder.finish().unwrap())
    }

    const JSON: &str = r#"[{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]"#;

    fn pickles(text: &str) -> Vec<Vec<u8>> {
        let size = text.len();
        let short = [&[0x80, 4, 0x95], &(size as u64 + 4).to_le_bytes()[..], &[0x8C, size as u8]].concat();
        let long = [&[0x80, 3, b'X'], &(size as u32).to_le_bytes()[..]].concat();
        let longest = [&[0x80, 4, 0x8D], &(size as u64).to_le_bytes()[..]].concat();
        let ends: [&[u8]; 4] = [&[0x94, b'.'], &[b'q', 0, b'.'], b".", b"r\0\0\0\0."];
        let starts = [short, long.clone(), longest, long];
        starts.iter().zip(ends).map(|(start, end)| [&start[..], text.as_bytes(), end].concat()).collect()
    }

    #[test]
    fn pickled_texts_are_unpacked() {
        for pickle in pickles(JSON) {
            let blob = packed(&pickle);
            assert!(is_packed(&blob));
            assert_eq!(unpack(&blob).unwrap(), JSON);
            // As `base64.encodebytes` writes it.
            let lines: Vec<&str> =
                blob.as_bytes().chunks(40).map(|c| std::str::from_utf8(c).unwrap()).collect();
            assert!(is_packed(&lines.join("\n")));
            assert_eq!(unpack(&lines.join("\n")).unwrap(), JSON);
        }
        assert_eq!(unpack(&packed(JSON.as_bytes())).unwrap(), JSON);
        assert_eq!(unpack(&STANDARD.encode(JSON)).unwrap(), JSON);
    }

    #[test]
    fn other_pickles_are_rejected() {
        // cos\nsystem\n(S'true'\ntR. runs a command in Python.
        let call = b"cos\nsystem\n(S'true'\ntR.".to_vec();
        let [short, long, ..] = &pickles(JSON)[..] else { panic!() };
        let mut damaged =
            vec![call, b"\x80\x04]\x94.".to_vec(), b"\x80\x04N.".to_vec(), b".".to_vec(), Vec::new()];
        // Nothing can be kept before there is a text.
        damaged.extend([&b"\x94"[..], b"q\0", b"r\0\0\0\0"].map(|code| [code, &long[..]].concat()));
        damaged.push([&short[..], b"."].concat());
        damaged.push([&long[..long.len() - 1], &[0x8C, 1, b'a', b'.']].concat());
        damaged.extend((0..short.len()).map(|end| short[..end].to_vec()));
        for pickle in damaged {
            assert_eq!(pickled_text(&pickle), None, "{pickle:?}");
            assert!(unpack(&packed(&pickle)).unwrap_err().contains("neither JSON nor a pickle"));
        }
        assert!(unpack("AAAABBBBCCCCDDDDEEEEFFFF").unwrap_err().contains("no zlib"));
        assert!(unpack("AAAABBBBCCCCDDDDEEEEFFFFG").unwrap_err().contains("no base64"));
    }

    #[test]
    fn code_is_not_taken_for_packed_tests() {
        for code in ["assert f(1) == 2", "check(f)", "assert f", "abc", "", "import math\nassert f(1)", "x=1"]
        {
            assert!(!is_packed(code), "{code}");
        }
    }
}
