//! `textwrap.wrap` of Python, as the filter `wordwrap` uses it.

use super::strings::is_space;

/// Lines of at most `width` characters, cut at white space, at hyphens, and, where nothing else helps, in
/// words.
pub(crate) fn wrap(line: &str, width: usize, break_words: bool, break_hyphens: bool) -> Vec<String> {
    let width = width.max(1);
    let mut chunks = chunks(line, break_hyphens);
    chunks.reverse();
    let blank = |chunk: &str| chunk.chars().all(is_space);
    let mut lines: Vec<String> = Vec::new();
    while let Some(chunk) = chunks.last() {
        if !lines.is_empty() && blank(chunk) {
            chunks.pop();
        }
        let (mut current, mut length): (Vec<String>, usize) = (Vec::new(), 0);
        while let Some(chunk) = chunks.pop() {
            let size = chunk.chars().count();
            if length + size <= width {
                length += size;
                current.push(chunk);
                continue;
            }
            // A word that fits on no line is cut, or gets a line of its own.
            if size > width && break_words {
                let room = width - length;
                let head: String = chunk.chars().take(room).collect();
                let hyphen =
                    head.rfind('-').filter(|&at| break_hyphens && head[..at].chars().any(|c| c != '-'));
                let end = hyphen.map_or(head.len(), |at| at + 1);
                current.push(chunk[..end].to_string());
                chunks.push(chunk[end..].to_string());
            } else if size > width && current.is_empty() {
                current.push(chunk);
            } else {
                chunks.push(chunk);
            }
            break;
        }
        if current.last().is_some_and(|chunk| blank(chunk)) {
            current.pop();
        }
        if !current.is_empty() {
            lines.push(current.concat());
        }
    }
    lines
}

/// Words and the white space between them; words with hyphens in parts, where those are asked for.
fn chunks(line: &str, break_hyphens: bool) -> Vec<String> {
    let chars: Vec<char> = line.chars().collect();
    let is_word = |at: usize| chars.get(at).is_some_and(|c| c.is_alphanumeric() || *c == '_');
    let is_letter = |at: usize| is_word(at) && !chars[at].is_numeric();
    let mut chunks: Vec<String> = Vec::new();
    for (at, &c) in chars.iter().enumerate() {
        let follows = at > 0 && {
            let hyphen = break_hyphens && at > 2 && chars[at - 1] == '-';
            let parts = hyphen && is_letter(at - 2) && is_word(at - 3) && is_word(at) && is_letter(at + 1);
            is_space(chars[at - 1]) == is_space(c) && !parts
        };
        match chunks.last_mut() {
            Some(chunk) if follows => chunk.push(c),
            _ => chunks.push(c.to_string()),
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps_as_python_does() {
        // textwrap.wrap(text, width=width, expand_tabs=False, replace_whitespace=False) in CPython.
        assert_eq!(wrap("the quick  brown fox", 10, true, true), ["the quick", "brown fox"]);
        assert_eq!(wrap("a well-known fact", 7, true, true), ["a well-", "known", "fact"]);
        assert_eq!(wrap("a well-known fact", 7, true, false), ["a well-", "known", "fact"]);
        assert_eq!(wrap("abcdefgh ij", 3, true, true), ["abc", "def", "gh", "ij"]);
        assert_eq!(wrap("abcdefgh ij", 3, false, true), ["abcdefgh", "ij"]);
        assert_eq!(wrap("", 3, true, true), Vec::<String>::new());
    }
}
