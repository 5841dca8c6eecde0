//! Finds tags in a text that may be incomplete, and the white space and headers before the text
//! that they start.
//!
//! # Guarantees
//! A result does not change when more text arrives. At most [`MAX_HEADER`] bytes are examined
//! again.

use std::ops::Range;

use super::{CallTrailer, MAX_HEADER, TagEffect};

/// Returns the length in bytes of the white space at the start of a text. Returns `None` if it has
/// more than [`MAX_HEADER`](super::MAX_HEADER) characters.
pub(crate) fn skip_blank(text: &str) -> Option<usize> {
    let window = text.char_indices().take(MAX_HEADER + 1);
    let end = window.clone().find(|(_, c)| !c.is_whitespace()).map(|(at, _)| at);
    end.or_else(|| (window.count() <= MAX_HEADER).then_some(text.len()))
}

/// Returns the length of the white space and the following `tag` at the start of a text. Returns
/// `None` if more text is needed to decide, and `Some(None)` if the text starts with anything else.
/// `ended` is whether the text is complete.
pub(crate) fn match_opening_tag(text: &str, tag: &str, ended: bool) -> Option<Option<usize>> {
    let Some(blank) = skip_blank(text) else { return Some(None) };
    let after = &text[blank..];
    if after.starts_with(tag) {
        Some(Some(blank + tag.len()))
    } else if tag.starts_with(after) && !ended {
        None
    } else {
        Some(None)
    }
}

/// Returns the offset of the first of `tags` in a call's header, and this tag. Returns `None` if
/// more text is needed to decide, and `Some(None)` if the header contains no such tag or is too
/// long. `ended` is whether the text is complete.
pub(crate) fn find_header_end<'a>(
    text: &str,
    tags: &[&'a str],
    ended: bool,
) -> Option<Option<(usize, &'a str)>> {
    let max_tag_len = tags.iter().map(|tag| tag.len()).max().unwrap_or_default();
    let is_long = text.len() > MAX_HEADER + max_tag_len;
    // Limits the text that is examined again as it grows.
    let end = (MAX_HEADER + max_tag_len..=text.len()).find(|&end| text.is_char_boundary(end));
    let text = &text[..end.unwrap_or(text.len())];
    let found = tags.iter().filter_map(|tag| Some((text.find(tag)?, *tag))).min();
    match found {
        Some((at, tag)) => Some(Some((at, tag)).filter(|_| at <= MAX_HEADER)),
        None if ended || is_long => Some(None),
        None => None,
    }
}

/// Parses the white space and the closing tag `close` after the JSON of a call.
pub(crate) fn parse_closing_tag(rest: &str, close: &str, ended: bool) -> CallTrailer {
    let after = rest.trim_start();
    if after.starts_with(close) {
        CallTrailer::Complete(rest.len() - after.len() + close.len())
    } else if close.starts_with(after) && !ended {
        CallTrailer::More
    } else {
        CallTrailer::Broken
    }
}

/// A set of tags to find in a text. Of the tags that start at the same offset, the longest one
/// matches.
#[derive(Debug, Clone)]
pub(crate) struct TagTable {
    tags: Vec<(String, TagEffect)>,
    /// Whether any tag starts with a byte, by the byte's value.
    first: [bool; 256],
}

/// The result of searching for the first tag in a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TagMatch {
    Tag(Range<usize>, TagEffect),
    /// A tag may start at this offset; more text is needed to decide.
    Partial(usize),
    None,
}

impl TagTable {
    /// Creates a table of tags. If two tags have the same text, the first one counts.
    pub(crate) fn new<'a>(tags: impl IntoIterator<Item = (&'a str, TagEffect)>) -> Self {
        let mut table = TagTable { tags: Vec::new(), first: [false; 256] };
        for (tag, effect) in tags {
            let Some(&byte) = tag.as_bytes().first() else { continue };
            if table.tags.iter().all(|(known, _)| known != tag) {
                table.first[usize::from(byte)] = true;
                table.tags.push((tag.to_owned(), effect));
            }
        }
        table.tags.sort_by_key(|(tag, _)| std::cmp::Reverse(tag.len()));
        table
    }

    /// Returns the first tag at or after offset `from` of a text. `ended` is whether the text is
    /// complete.
    pub(crate) fn find_tag(&self, text: &str, from: usize, ended: bool) -> TagMatch {
        let bytes = text.as_bytes();
        for at in from..bytes.len() {
            if !self.first[usize::from(bytes[at])] {
                continue;
            }
            let rest = &bytes[at..];
            for (tag, effect) in &self.tags {
                let tag = tag.as_bytes();
                if rest.starts_with(tag) {
                    return TagMatch::Tag(at..at + tag.len(), *effect);
                }
                if !ended && tag.starts_with(rest) {
                    return TagMatch::Partial(at);
                }
            }
        }
        TagMatch::None
    }
}
