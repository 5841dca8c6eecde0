//! Splits sentences into chunks: words, values and signs, separated by white space.

use crate::words;

/// Maximum number of characters of a sentence that are examined.
pub(crate) const MAX_CHARS: usize = 2000;

/// A part of a sentence between two white spaces: a word, a value or a sign.
#[derive(Debug)]
pub(crate) struct Chunk<'t> {
    /// Characters of the chunk without surrounding markup and punctuation.
    pub text: &'t str,
    /// Byte offset of `text` in the sentence.
    pub start: usize,
    /// Byte offset of the end of `text` in the sentence.
    pub end: usize,
    pub kind: ChunkKind,
    /// Punctuation after the chunk.
    pub stop: Option<char>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ChunkKind {
    /// A value: digits, a formula, a LaTeX command, or a bracket that contains one of these.
    Value,
    /// An operator sign between two values.
    Operator,
    Word,
    /// A remark: a bracket that starts with a word.
    Remark,
}

impl Chunk<'_> {
    pub fn is_word(&self, word: &str) -> bool {
        self.kind == ChunkKind::Word && self.text.eq_ignore_ascii_case(word)
    }

    pub fn is_any_word(&self, words: &[&str]) -> bool {
        words.iter().any(|word| self.is_word(word))
    }

    /// Returns whether the chunk is a value: a [`ChunkKind::Value`], or a number that is written in
    /// words.
    pub fn is_value(&self) -> bool {
        self.kind == ChunkKind::Value || self.is_number_word()
    }

    /// Returns whether the chunk is a number that is written in words.
    pub fn is_number_word(&self) -> bool {
        self.kind == ChunkKind::Word
            && self.text.split('-').all(|word| {
                words::word_to_number(word).is_some()
                    || words::magnitude_factor(word).is_some()
                    || words::denominator_of_word(word).is_some_and(|_| word != "second")
            })
    }

    /// Returns whether a bracket after a value derives or explains the value: (3 × 4) and ($3 each)
    /// do, but (x + 1) does not.
    pub fn explains_value(&self) -> bool {
        let is_word = |word: &str| word.chars().count() > 1;
        let mut words = self
            .text
            .split(|c: char| !c.is_alphabetic())
            .filter(|word| !word.is_empty())
            .peekable();
        self.text.starts_with('(')
            && !self.text.contains('\\')
            && match self.text.contains(',') {
                true => words.filter(|word| is_word(word)).count() > 3,
                false => words.peek().is_none() || words.any(is_word),
            }
    }

    /// Returns whether a word belongs to the number before it, such as a unit or a magnitude.
    pub fn belongs_to_value(&self) -> bool {
        let lower = self.text.to_lowercase();
        let word = lower.replace('.', "");
        words::parse_units(self.text).is_some()
            || words::parse_units(&word).is_some()
            || words::magnitude_factor(&word).is_some()
            || words::fraction_after_number(&word).is_some()
            || words::word_to_number(&word).is_some()
            || words::denominator_of_word(&word).is_some()
            || words::direction_kind(&word).is_some()
            || [
                "am", "pm", "noon", "midnight", "percent", "per", "square", "cubic", "o'clock",
                "sq", "cu",
            ]
            .contains(&word.as_str())
            || [
                "squared",
                "cubed",
                "factorial",
                "doubled",
                "tripled",
                "halved",
                "celsius",
                "fahrenheit",
                "c",
                "f",
            ]
            .contains(&word.as_str())
    }
}

/// Splits a sentence at white space outside of brackets and formulas.
pub(crate) fn split_into_chunks(sentence: &str) -> Vec<Chunk<'_>> {
    let mut found: Vec<Chunk> = Vec::new();
    let mut at = 0;
    while at < sentence.len() {
        let rest = &sentence[at..];
        let trimmed = rest.trim_start();
        at += rest.len() - trimmed.len();
        if trimmed.is_empty() {
            break;
        }
        let length = chunk_length(trimmed);
        found.push(parse_chunk(&trimmed[..length], at));
        at += length;
    }
    // In 3 x 4, the x is a multiplication sign.
    for at in 1..found.len().saturating_sub(1) {
        let is_sign = matches!(found[at].text, "x" | "X") && found[at].stop.is_none();
        if is_sign
            && found[at - 1].kind == ChunkKind::Value
            && found[at + 1].kind == ChunkKind::Value
        {
            found[at].kind = ChunkKind::Operator;
        }
    }
    // 5! = 120 has a factorial, but "12!" at the end of a sentence does not.
    for at in 0..found.len() {
        let followed = found.get(at + 1).is_some_and(|next| next.kind == ChunkKind::Operator);
        let chunk = &mut found[at];
        if chunk.stop == Some('!') && followed {
            (chunk.text, chunk.end, chunk.stop) =
                (&sentence[chunk.start..chunk.end + 1], chunk.end + 1, None);
        }
    }
    found
}

/// Returns the length, in bytes, of the chunk at the start of a text.
fn chunk_length(text: &str) -> usize {
    let plain = text.find(char::is_whitespace).unwrap_or(text.len());
    // A formula does not end directly before a digit: a dollar sign there starts an amount of
    // money.
    for (open, close) in [("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")] {
        let Some(inside) = text.strip_prefix(open) else { continue };
        let Some(end) = inside.find(close).map(|end| open.len() + end + close.len()) else {
            continue;
        };
        let is_amount = open == "$" && text[end..].starts_with(|c: char| c.is_ascii_digit());
        if end > open.len() + close.len() && !is_amount {
            let more = text[end..].find(char::is_whitespace).unwrap_or(text.len() - end);
            return end + more;
        }
    }
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            c if c.is_whitespace() && depth == 0 => return at,
            _ => {}
        }
    }
    if depth == 0 { text.len() } else { plain }
}

fn parse_chunk(raw: &str, at: usize) -> Chunk<'_> {
    let is_formula =
        formula_content(raw.trim_end_matches(['.', ',', ';', ':', '!', '?'])).is_some();
    let mut text = raw;
    let mut stop = None;
    if raw.len() > 1 || !raw.starts_with(|c: char| !c.is_alphanumeric()) {
        let kept = text.trim_end_matches(['.', ',', ';', ':', '!', '?']);
        if kept.len() < text.len() && !kept.is_empty() {
            stop = text[kept.len()..].chars().find(|c| *c != '.').or(Some('.'));
            // The period of an abbreviation.
            let is_short = |word: &str| word.contains('.') || words::parse_units(word).is_some();
            if stop == Some('.')
                && is_short(kept)
                && kept.chars().all(|c| c.is_alphabetic() || c == '.')
            {
                stop = None;
            }
            text = kept;
        }
    }
    let mark = |c: char| matches!(c, '*' | '_' | '`' | '\'' | '"' | '#');
    let mut start = at;
    if text.chars().count() > 1 && !is_formula {
        let kept = text.trim_start_matches(mark);
        start += text.len() - kept.len();
        text = kept.trim_end_matches(mark);
    }
    let first = text.chars().next();
    let starts_word = |text: &str| {
        let letters = text.chars().take_while(|c| c.is_alphabetic()).count();
        // Remarks such as (A dog has 4 legs) and (I know).
        letters > 1 || ["A ", "I "].iter().any(|word| text.starts_with(word))
    };
    let kind = if first == Some('(') && starts_word(&text[1..]) {
        ChunkKind::Remark
    } else if is_formula || text.contains(|c: char| c.is_ascii_digit() || c == '\\') {
        ChunkKind::Value
    } else if !text.is_empty()
        && text.chars().all(|c| !c.is_alphanumeric() && (!matches!(c, '(' | ')') || text.len() > 1))
    {
        ChunkKind::Operator
    } else {
        ChunkKind::Word
    };
    Chunk { text, start, end: start + text.len(), kind, stop }
}

/// Returns the content of a formula without its delimiters, or `None` if the text has no
/// delimiters.
pub(crate) fn formula_content(text: &str) -> Option<&str> {
    [("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")].iter().find_map(|(open, close)| {
        let inside = text.strip_prefix(open)?.strip_suffix(close)?;
        (!inside.trim().is_empty()).then_some(inside)
    })
}

/// Removes Markdown and HTML markup around the words of a sentence.
pub(crate) fn strip_text_markup(sentence: &str) -> String {
    let mut out = String::with_capacity(sentence.len());
    let mut rest = sentence;
    while let Some(c) = rest.chars().next() {
        let before = out.chars().last();
        let is_markup = |mark: &str| {
            let after = rest[mark.len()..].chars().next();
            let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == ')');
            // 2 == 3 is a relation, but ==3== is highlighted text.
            let is_sign = mark == "==" && is_part(before) == is_part(after);
            !(is_sign || is_part(before) && is_part(after))
        };
        if let Some(mark) = ["**", "__", "==", "`", "\""]
            .iter()
            .find(|mark| rest.starts_with(**mark) && is_markup(mark))
        {
            rest = &rest[mark.len()..];
            continue;
        }
        // A special token such as <|im_end|>.
        let near = &rest[..rest.char_indices().nth(24).map_or(rest.len(), |(at, _)| at)];
        if near.starts_with("<|")
            && let Some(end) = near.find("|>")
        {
            rest = &rest[end + "|>".len()..];
            continue;
        }
        // A tag as in <b>12</b>, but not x < 3 and y > 5.
        if let Some((tag, _)) = near.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
            let name = tag.strip_prefix('/').unwrap_or(tag);
            if !name.is_empty()
                && name.len() < 20
                && name.chars().all(|c| c.is_ascii_alphanumeric())
            {
                rest = &rest[tag.len() + "<>".len()..];
                // Struck text stays marked.
                if ["s", "del", "strike"].contains(&name) {
                    out.push_str("~~");
                }
                continue;
            }
        }
        out.push(c);
        rest = &rest[c.len_utf8()..];
    }
    out
}
