//! Removes turn markers, HTML tags and HTML character references from a text.
//!
//! Tags of turns and blocks become line breaks; tags that only change the look of words are
//! removed. `<` and `[` that start no tag are kept.

use std::borrow::Cow;
use std::collections::HashSet;

use super::{ANSWER_NAMES, QUESTION_NAMES, is_label_text};

/// Maximum length of a markup tag, in bytes.
const MAX_TAG: usize = 200;
/// Names of tags that are replaced by a line break even if they are not closed: turns and ends of
/// chat templates, and HTML tags.
const LINE_BREAK_TAGS: [&str; 19] = [
    "bos",
    "eos",
    "pad",
    "unk",
    "br",
    "hr",
    "p",
    "think",
    "no_think",
    "nothink",
    "image",
    "img",
    "audio",
    "video",
    "start_of_turn",
    "end_of_turn",
    "start_of_image",
    "end_of_text",
    "endoftext",
];
/// Names of tags that are replaced by a line break and can also be in square brackets.
const LINE_BREAK_BRACKET_TAGS: [&str; 3] = ["inst", "examples", "s"];
/// Names of HTML tags that only change the look of the words between them.
const INLINE: [&str; 20] = [
    "b", "i", "u", "em", "strong", "span", "font", "a", "mark", "small", "big", "tt", "code",
    "del", "ins", "center", "cite", "kbd", "var", "abbr",
];
/// Words that switch a model's reasoning on or off in a prompt.
const SWITCHES: [&str; 3] = ["/no_think", "/nothink", "/think"];

/// Names of HTML character references, each with the character that it stands for.
const REFERENCES: [(&str, char); 38] = [
    ("quot", '"'),
    ("apos", '\''),
    ("lt", '<'),
    ("gt", '>'),
    ("nbsp", ' '),
    ("amp", '&'),
    ("lsquo", '‘'),
    ("rsquo", '’'),
    ("ldquo", '“'),
    ("rdquo", '”'),
    ("laquo", '«'),
    ("raquo", '»'),
    ("ndash", '–'),
    ("mdash", '—'),
    ("minus", '−'),
    ("hellip", '…'),
    ("times", '×'),
    ("divide", '÷'),
    ("middot", '·'),
    ("le", '≤'),
    ("ge", '≥'),
    ("ne", '≠'),
    ("frac12", '½'),
    ("frac14", '¼'),
    ("sup2", '²'),
    ("sup3", '³'),
    ("deg", '°'),
    ("pi", 'π'),
    ("auml", 'ä'),
    ("ouml", 'ö'),
    ("uuml", 'ü'),
    ("szlig", 'ß'),
    ("eacute", 'é'),
    ("egrave", 'è'),
    ("agrave", 'à'),
    ("ccedil", 'ç'),
    ("ntilde", 'ñ'),
    ("shy", '\u{AD}'),
];

/// Replaces tags that mark turns, questions, answers and blocks by line breaks, and HTML character
/// references by their characters.
pub(super) fn replace_markup(text: &str) -> Cow<'_, str> {
    let text = replace_reasoning_switches(text);
    if !text.contains(['<', '[', '&']) {
        return text;
    }
    let (opened, closed) = collect_tag_names(&text);
    let mut found = String::with_capacity(text.len());
    let mut rest = &*text;
    while let Some(at) = rest.find(['<', '[']) {
        let (before, tag) = rest.split_at(at);
        found.push_str(before);
        let replaced = find_tag_content(tag)
            .and_then(|inside| Some((replace_tag(inside, tag, &opened, &closed)?, inside)));
        match replaced {
            Some((mark, inside)) => {
                found.push_str(mark);
                rest = &tag[inside.len() + 2..];
            }
            None => {
                found.push_str(&tag[..1]);
                rest = &tag[1..];
            }
        }
    }
    found.push_str(rest);
    Cow::Owned(replace_character_references(&found))
}

/// Returns the content of the tag at the start of a text, or `None` if the tag is not closed.
fn find_tag_content(tag: &str) -> Option<&str> {
    let end = if tag.starts_with('<') { '>' } else { ']' };
    let at = tag.char_indices().take(MAX_TAG).find(|(_, c)| *c == end)?.0;
    Some(&tag[1..at])
}

/// Parses the content of a tag. Returns the tag's name in lower case, and whether it is a closing
/// tag.
fn parse_tag_name(inside: &str) -> Option<(String, bool)> {
    let (name, closes) = inside.strip_prefix('/').map_or((inside, false), |name| (name, true));
    let end =
        name.find(|c: char| !(c.is_ascii_alphanumeric() || "_-".contains(c))).unwrap_or(name.len());
    let (name, attributes) = name.split_at(end);
    let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic());
    let is_tag = attributes.is_empty() || attributes == "/" || attributes.starts_with(' ');
    (is_name && is_tag).then(|| (name.to_lowercase(), closes))
}

/// Returns the names of all opening tags in a text, and the names of all closing tags.
fn collect_tag_names(text: &str) -> (HashSet<String>, HashSet<String>) {
    let mut opened = HashSet::new();
    let mut closed = HashSet::new();
    for (at, _) in text.match_indices(['<', '[']) {
        if let Some((name, closes)) = find_tag_content(&text[at..]).and_then(parse_tag_name) {
            if closes {
                closed.insert(name)
            } else {
                opened.insert(name)
            };
        }
    }
    (opened, closed)
}

/// Returns the text that replaces a tag, or `None` if the text between the brackets is not a tag.
fn replace_tag(
    inside: &str,
    tag: &str,
    opened: &HashSet<String>,
    closed: &HashSet<String>,
) -> Option<&'static str> {
    if inside.chars().count() > 2 && inside.starts_with(is_bar) && inside.ends_with(is_bar) {
        return Some("\n");
    }
    let lower = inside.trim_start_matches('/').to_lowercase();
    let is_label =
        |names: &str| inside.len() <= 40 && lower.len() > 1 && is_label_text(&lower, names);
    if is_label(QUESTION_NAMES) || is_label(ANSWER_NAMES) {
        return Some("\n");
    }
    let (name, _) = parse_tag_name(inside)?;
    let is_pair = opened.contains(&name) && closed.contains(&name);
    match &*name {
        "sup" if is_pair && tag.starts_with('<') => {
            Some(if inside.starts_with('/') { "" } else { "^" })
        }
        "sub" if is_pair && tag.starts_with('<') => {
            Some(if inside.starts_with('/') { "" } else { "_" })
        }
        name if is_pair && INLINE.contains(&name) => Some(""),
        name => {
            let is_line_break = LINE_BREAK_BRACKET_TAGS.contains(&name)
                || tag.starts_with('<') && LINE_BREAK_TAGS.contains(&name);
            (is_pair || is_line_break).then_some("\n")
        }
    }
}

fn is_bar(c: char) -> bool {
    c == '|' || c == '｜'
}

/// Replaces the words that switch a model's reasoning on or off by line breaks.
fn replace_reasoning_switches(text: &str) -> Cow<'_, str> {
    if !text.contains("think") {
        return Cow::Borrowed(text);
    }
    let mut found = text.to_owned();
    for switch in SWITCHES {
        let mut from = 0;
        while let Some(at) = found[from..].find(switch).map(|at| from + at) {
            let end = at + switch.len();
            let is_word = (at == 0 || found[..at].ends_with(char::is_whitespace))
                && (end == found.len() || found[end..].starts_with(char::is_whitespace));
            if is_word {
                found.replace_range(at..end, "\n");
            }
            from = if is_word { at + 1 } else { end };
        }
    }
    Cow::Owned(found)
}

/// Replaces HTML character references such as `&#39;`, `&#x27;` and `&eacute;` by their characters.
fn replace_character_references(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        let (before, reference) = rest.split_at(at);
        found.push_str(before);
        let named = reference[1..]
            .split_once(';')
            .and_then(|(name, after)| Some((find_referenced_char(name)?, after)));
        match named {
            Some((character, after)) => {
                found.push(character);
                rest = after;
            }
            None => {
                found.push('&');
                rest = &reference[1..];
            }
        }
    }
    found + rest
}

/// Returns the character of an HTML character reference with this name or number, or `None` if it
/// is unknown.
fn find_referenced_char(name: &str) -> Option<char> {
    let Some(number) = name.strip_prefix('#') else {
        return REFERENCES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, character)| *character);
    };
    let code = match number.strip_prefix(['x', 'X']) {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => number.parse(),
    };
    char::from_u32(code.ok()?)
}
