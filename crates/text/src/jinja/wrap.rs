//! Implements Python's `textwrap.wrap` for the filter `wordwrap`.

use super::strings::is_space;

/// Splits a line into lines of at most `width` characters. Splits at white space and hyphens, and
/// within a word only if necessary.
pub(crate) fn wrap_line(
    line: &str,
    width: usize,
    break_words: bool,
    break_hyphens: bool,
) -> Vec<String> {
    let width = width.max(1);
    let mut chunks = split_chunks(line, break_hyphens);
    chunks.reverse();
    let mut lines: Vec<String> = Vec::new();
    while let Some(chunk) = chunks.last() {
        if !lines.is_empty() && is_blank(chunk) {
            chunks.pop();
        }
        let (mut current, mut length): (Vec<&str>, usize) = (Vec::new(), 0);
        while let Some(chunk) = chunks.pop() {
            let Some(room) = byte_offset(chunk, width - length) else {
                length += chunk.chars().count();
                current.push(chunk);
                continue;
            };
            // A word that fits on no line is split, or gets a line of its own.
            let too_long = byte_offset(chunk, width).is_some();
            if too_long && break_words {
                let head = &chunk[..room];
                let hyphen = head
                    .rfind('-')
                    .filter(|&at| break_hyphens && head[..at].chars().any(|c| c != '-'));
                let (head, rest) = chunk.split_at(hyphen.map_or(room, |at| at + 1));
                current.push(head);
                chunks.push(rest);
            } else if too_long && current.is_empty() {
                current.push(chunk);
            } else {
                chunks.push(chunk);
            }
            break;
        }
        if current.last().is_some_and(|chunk| is_blank(chunk)) {
            current.pop();
        }
        if !current.is_empty() {
            lines.push(current.concat());
        }
    }
    lines
}

fn is_blank(chunk: &str) -> bool {
    chunk.chars().all(is_space)
}

/// Returns the byte offset at which a chunk exceeds `max_len` characters, or `None` if it does not.
/// The search stops there.
fn byte_offset(chunk: &str, max_len: usize) -> Option<usize> {
    chunk.char_indices().nth(max_len).map(|(at, _)| at)
}

/// Splits a line into words and the white space between them. Hyphenated words are split if
/// `break_hyphens` is set.
fn split_chunks(line: &str, break_hyphens: bool) -> Vec<&str> {
    let chars: Vec<char> = line.chars().collect();
    let is_word = |at: usize| chars.get(at).is_some_and(|c| c.is_alphanumeric() || *c == '_');
    let is_letter = |at: usize| is_word(at) && !chars[at].is_numeric();
    let mut chunks = Vec::new();
    let mut start = 0;
    for (at, (byte, c)) in line.char_indices().enumerate() {
        let follows = at > 0 && {
            let hyphen = break_hyphens && at > 2 && chars[at - 1] == '-';
            let parts =
                hyphen && is_letter(at - 2) && is_word(at - 3) && is_word(at) && is_letter(at + 1);
            is_space(chars[at - 1]) == is_space(c) && !parts
        };
        if !follows {
            chunks.push(&line[start..byte]);
            start = byte;
        }
    }
    chunks.push(&line[start..]);
    chunks.retain(|chunk| !chunk.is_empty());
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrap_matches_python_textwrap() {
        // textwrap.wrap(text, width=width, expand_tabs=False, replace_whitespace=False) in CPython.
        assert_eq!(wrap_line("the quick  brown fox", 10, true, true), ["the quick", "brown fox"]);
        assert_eq!(wrap_line("a well-known fact", 7, true, true), ["a well-", "known", "fact"]);
        assert_eq!(wrap_line("a well-known fact", 7, true, false), ["a well-", "known", "fact"]);
        assert_eq!(wrap_line("abcdefgh ij", 3, true, true), ["abc", "def", "gh", "ij"]);
        assert_eq!(wrap_line("abcdefgh ij", 3, false, true), ["abcdefgh", "ij"]);
        assert_eq!(wrap_line("", 3, true, true), Vec::<String>::new());
    }
}
