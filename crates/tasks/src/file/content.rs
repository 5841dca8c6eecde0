//! Reads the content of a file with any supported compression and text encoding.

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::path::Path;

use crate::TaskError;

/// Content of a data file after decompression.
pub(super) enum FileContent {
    /// Text in UTF-8, without a byte-order mark.
    Text(String),
    /// Bytes of a Parquet file.
    Parquet(Vec<u8>),
}

const PARQUET: &[u8] = b"PAR1";
const GZIP: &[u8] = &[0x1F, 0x8B];
const ZSTD: &[u8] = &[0x28, 0xB5, 0x2F, 0xFD];
/// Bytes that follow a first byte of 0x50 to 0x5F in a skippable zstd frame. pzstd starts its files
/// with such a frame, which contains no data.
const ZSTD_SKIPPED: &[u8] = &[0x2A, 0x4D, 0x18];
/// Offset and bytes of the magic number that identifies a tar archive.
const TAR: (usize, &[u8]) = (257, b"ustar");

/// First bytes of file formats that cannot be read, each with an error message that says what to
/// do.
const UNSUPPORTED: [(&[u8], &str); 15] = [
    (
        b"version https://git-lfs.github.com/spec/",
        "the file is a Git LFS pointer, not the data: fetch the data with `git lfs pull`",
    ),
    (b"PK\x03\x04", "the file is a ZIP archive or a spreadsheet: unpack it, or save it as CSV"),
    (b"\xFD7zXZ\0", "the file is compressed with xz: unpack it, or compress it with gzip or zstd"),
    (b"BZh", "the file is compressed with bzip2: unpack it, or compress it with gzip or zstd"),
    (
        b"\x04\x22\x4D\x18",
        "the file is compressed with lz4: unpack it, or compress it with gzip or zstd",
    ),
    (b"7z\xBC\xAF\x27\x1C", "the file is a 7z archive: unpack it"),
    (b"PARE", "the file is an encrypted Parquet file: save it without encryption"),
    (b"ARROW1", "the file is an Arrow file: save it as Parquet or JSON lines"),
    (
        b"\xFF\xFF\xFF\xFF",
        "the file is an Arrow stream, as `datasets` saves it: save it with to_parquet or to_json \
         instead",
    ),
    (b"SQLite format 3\0", "the file is an SQLite database: export its rows as CSV or JSON lines"),
    (b"\xFF\xFE\0\0", "the file is UTF-32: save it as UTF-8"),
    (b"\0\0\xFE\xFF", "the file is UTF-32: save it as UTF-8"),
    (b"\x80\x03", PICKLE),
    (b"\x80\x04", PICKLE),
    (b"\x80\x05", PICKLE),
];
const PICKLE: &str = "the file is a Python pickle, which is never loaded: save it as JSON lines";

/// Reads a data file, and decompresses it if it is compressed.
///
/// # Errors
/// Returns an error if the file cannot be read, is damaged, or has an unsupported format.
pub(super) fn read_file(path: &Path) -> Result<FileContent, TaskError> {
    let mut bytes = Vec::new();
    let opened = File::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
    opened.map_err(|why| TaskError::Read { path: path.to_owned(), why })?;
    decode_content(bytes).map_err(|why| TaskError::Format { path: path.to_owned(), why })
}

/// Decompresses and decodes the bytes of a file. Returns a description of the problem if the file
/// is damaged or its format is not supported.
fn decode_content(mut bytes: Vec<u8>) -> Result<FileContent, String> {
    loop {
        let unpacked = if bytes.starts_with(GZIP) {
            decompress("gzip", GzipMembers(flate2::bufread::GzDecoder::new(&bytes[..])))?
        } else if bytes.starts_with(ZSTD)
            || matches!(bytes[..], [0x50..0x60, ref rest @ ..] if rest.starts_with(ZSTD_SKIPPED))
        {
            decompress(
                "zstd",
                zstd::stream::read::Decoder::new(&bytes[..]).map_err(|error| error.to_string())?,
            )?
        } else {
            break;
        };
        bytes = unpacked;
    }
    if bytes.starts_with(PARQUET) {
        return Ok(FileContent::Parquet(bytes));
    }
    if let Some((_, why)) = UNSUPPORTED.iter().find(|(magic, _)| bytes.starts_with(magic)) {
        return Err((*why).to_owned());
    }
    if bytes.get(TAR.0..).is_some_and(|rest| rest.starts_with(TAR.1)) {
        return Err("the file is a tar archive: unpack it".into());
    }
    let text = match bytes[..] {
        [0xEF, 0xBB, 0xBF, ..] => decode_utf8(bytes.split_off(3))?,
        [0xFF, 0xFE, ..] => decode_utf16(&bytes[2..], u16::from_le_bytes)?,
        [0xFE, 0xFF, ..] => decode_utf16(&bytes[2..], u16::from_be_bytes)?,
        [0, second, ..] if second != 0 => return Err(missing_mark_error("BE")),
        [first, 0, ..] if first != 0 => return Err(missing_mark_error("LE")),
        _ => decode_utf8(bytes)?,
    };
    let start = text.trim_start();
    if start.starts_with('<') {
        let start: String = start.chars().take(20).collect();
        return Err(format!(
            "the file contains a web page or XML, not rows (it starts with {start:?}): a page \
             about the file, or an error page, may have been fetched instead of the file; fetch \
             the file itself"
        ));
    }
    Ok(FileContent::Text(text))
}

/// Decompressing reader of consecutive gzip members. Zero padding after the last member, as on
/// tapes, is ignored.
struct GzipMembers<'b>(flate2::bufread::GzDecoder<&'b [u8]>);

impl Read for GzipMembers<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.0.read(into)?;
            let remaining = self.0.get_mut();
            if read > 0 || into.is_empty() {
                return Ok(read);
            }
            let zeros = remaining.iter().take_while(|byte| **byte == 0).count();
            remaining.consume(zeros);
            if remaining.is_empty() {
                return Ok(0);
            }
            self.0 = flate2::bufread::GzDecoder::new(*remaining);
        }
    }
}

fn decompress(name: &str, mut packed: impl Read) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    match packed.read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(format!(
            "the file is truncated: the {name} stream ends after {} unpacked bytes; copy or fetch \
             it again",
            bytes.len()
        )),
        Err(error) => Err(format!(
            "the file is damaged: the {name} stream cannot be unpacked ({error}); copy or fetch it \
             again"
        )),
    }
}

fn decode_utf8(bytes: Vec<u8>) -> Result<String, String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let line = 1 + bytes[..at].iter().filter(|byte| **byte == b'\n').count();
        format!(
            "the file is not UTF-8: line {line} has the byte 0x{:02X}; save it as UTF-8 (for \
             Latin-1: iconv -f LATIN1 -t UTF-8)",
            bytes[at]
        )
    })
}

fn decode_utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, String> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(
            "the file is UTF-16 that ends in the middle of a character: the file is truncated; \
             copy or fetch it again"
                .into(),
        );
    }
    let mut text = String::with_capacity(pairs.len());
    for character in char::decode_utf16(pairs.iter().map(|pair| unit(*pair))) {
        text.push(character.map_err(|error| {
            let line = 1 + text.matches('\n').count();
            format!(
                "the file is UTF-16 with half a surrogate pair (0x{:04X}) in line {line}: the file \
                 is damaged; copy or fetch it again",
                error.unpaired_surrogate()
            )
        })?);
    }
    Ok(text)
}

fn missing_mark_error(order: &str) -> String {
    format!(
        "the file looks like UTF-16{order} without a byte-order mark: save it as UTF-8 (iconv -f \
         UTF-16{order} -t UTF-8), or with a byte-order mark"
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const ROW: &str = "{\"question\": \"1 + 1 𝄞?\", \"answer\": 2}\n";

    fn text(bytes: &[u8]) -> Result<String, String> {
        match decode_content(bytes.to_vec())? {
            FileContent::Text(text) => Ok(text),
            FileContent::Parquet(_) => Err("Parquet".into()),
        }
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        packer.write_all(bytes).unwrap();
        packer.finish().unwrap()
    }

    #[test]
    fn read_decodes_all_text_encodings() {
        assert_eq!(text(ROW.as_bytes()).unwrap(), ROW);
        assert_eq!(text(format!("\u{feff}{ROW}").as_bytes()).unwrap(), ROW);
        let marked: Vec<u16> = format!("\u{feff}{ROW}").encode_utf16().collect();
        let little: Vec<u8> = marked.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        let big: Vec<u8> = marked.iter().flat_map(|unit| unit.to_be_bytes()).collect();
        assert_eq!(text(&little).unwrap(), ROW);
        assert_eq!(text(&big).unwrap(), ROW);
        assert_eq!(text(&gzip(&little)).unwrap(), ROW);
        assert_eq!(text(&zstd::stream::encode_all(ROW.as_bytes(), 1).unwrap()).unwrap(), ROW);
        // Two consecutive streams, as in the output of `cat a.gz b.gz`.
        assert_eq!(
            text(&[gzip(ROW.as_bytes()), gzip(ROW.as_bytes())].concat()).unwrap(),
            ROW.repeat(2)
        );
        // Padding with zeros; for zstd, with a frame that contains the length of the next frame.
        assert_eq!(text(&[gzip(ROW.as_bytes()), vec![0; 9]].concat()).unwrap(), ROW);
        let frame = zstd::stream::encode_all(ROW.as_bytes(), 1).unwrap();
        let sized =
            [&b"\x50\x2A\x4D\x18\x04\0\0\0"[..], &(frame.len() as u32).to_le_bytes(), &frame]
                .concat();
        assert_eq!(text(&sized.repeat(2)).unwrap(), ROW.repeat(2));
        assert_eq!(text(b"").unwrap(), "");
    }

    #[test]
    fn unsupported_formats_are_rejected_by_name() {
        let little: Vec<u8> = ROW.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let big: Vec<u8> = ROW.encode_utf16().flat_map(u16::to_be_bytes).collect();
        let packed = gzip(ROW.repeat(99).as_bytes());
        let zstd = zstd::stream::encode_all(ROW.repeat(99).as_bytes(), 1).unwrap();
        let mut damaged = packed.clone();
        damaged[20] ^= 0xFF;
        for (bytes, why) in [
            (&little[..], "looks like UTF-16LE without a byte-order mark"),
            (&big, "looks like UTF-16BE without a byte-order mark"),
            (b"\xFF\xFE{\0\n", "is UTF-16 that ends in the middle of a character"),
            (b"\xFF\xFE{\0\n\0\x3D\xD8", "is UTF-16 with half a surrogate pair (0xD83D) in line 2"),
            (b"{}\n{\"a\": \"caf\xE9\"}", "is not UTF-8: line 2 has the byte 0xE9"),
            (&packed[..packed.len() - 9], "is truncated: the gzip stream ends after"),
            (&zstd[..zstd.len() - 9], "is truncated: the zstd stream ends after"),
            (&damaged, "is damaged: the gzip stream cannot be unpacked"),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
                "`git lfs pull`",
            ),
            (
                b"\n <!DOCTYPE html><html>",
                "contains a web page or XML, not rows (it starts with \"<!DOCTYPE html><html\")",
            ),
            (b"PK\x03\x04\x14\0", "is a ZIP archive or a spreadsheet"),
            (b"\x80\x05\x95", "is a Python pickle"),
            (b"\xFF\xFF\xFF\xFF\x10\x01\0\0", "is an Arrow stream"),
            (&gzip(&[&[b'a'; 257], &b"ustar\0"[..]].concat()), "is a tar archive: unpack it"),
            (&[&packed[..], b"rest"].concat(), "gzip stream"),
        ] {
            let error = text(bytes).unwrap_err();
            assert!(error.contains(why), "gave: {error}\nwant: {why}");
        }
        assert_eq!(text(&gzip(b"PAR1...")).unwrap_err(), "Parquet");
    }
}
