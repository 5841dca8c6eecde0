//! The alphabet of byte-level BPE: every byte has a printable character.
//!
//! Bytes that are printable in Latin-1 keep their character. The other 68 bytes are mapped to
//! U+0100 and following, in order (Radford et al. 2019, GPT-2).

/// Returns the printable character that stands for a byte in the vocabulary of a byte-level
/// tokenizer.
pub(crate) fn byte_to_char(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        0..=0x20 => char_from_code(0x100 + u32::from(byte)),
        0x7F..=0xA0 => char_from_code(0x121 + u32::from(byte - 0x7F)),
        0xAD => char_from_code(0x143),
    }
}

fn char_from_code(code: u32) -> char {
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Returns the byte for which a character of the byte-level alphabet stands. Returns `None` if the
/// character is not in the alphabet.
fn char_to_byte(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Returns the bytes of a token of a byte-level vocabulary. A token that is not written in the
/// byte-level alphabet yields its UTF-8 bytes.
pub(crate) fn token_to_bytes(token: &str) -> Vec<u8> {
    token
        .chars()
        .map(char_to_byte)
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| token.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_maps_bytes_to_printable_characters() {
        let characters: std::collections::BTreeSet<char> = (0..=255).map(byte_to_char).collect();
        assert_eq!(characters.len(), 256);
        assert!(characters.iter().all(|c| !c.is_whitespace() && !c.is_control()));
        assert!((0..=255).all(|byte| char_to_byte(byte_to_char(byte)) == Some(byte)));
        // Known entries of the published table.
        assert_eq!(
            (byte_to_char(b' '), byte_to_char(b'\n'), byte_to_char(0), byte_to_char(0xAD)),
            ('Ġ', 'Ċ', 'Ā', 'Ń')
        );
    }

    #[test]
    fn tokens_outside_the_alphabet_keep_their_text() {
        assert_eq!(token_to_bytes("Ġa"), b" a");
        assert_eq!(token_to_bytes("日"), "日".as_bytes());
    }
}
