//! Removes typographic variants and styling from texts, and finds their last sentence and clause.

use std::sync::LazyLock;

use regex::{Captures, Regex};

use super::patterns::BOUNDARY;
use crate::characters::is_decoration;
use crate::pattern::pattern;

/// Replaces full-width and typographic characters by ASCII characters, and removes markup that only
/// changes the appearance of a text.
pub(super) fn strip_markup(text: &str) -> String {
    let narrow = |c: char| match c {
        'Ａ'..='Ｚ'
        | 'ａ'..='ｚ'
        | '０'..='９'
        | '：'
        | '（'
        | '）'
        | '．'
        | '，'
        | '＝'
        | '！'
        | '？'
        | '；' => char::from_u32(c as u32 - 0xfee0).unwrap_or(c),
        '’' | '‘' => '\'',
        '“' | '”' | '„' | '「' | '」' | '«' | '»' | '『' | '』' => '"',
        '【' | '［' | '〔' => '[',
        '】' | '］' | '〕' => ']',
        '\u{a0}' => ' ',
        c if is_decoration(c) => ' ',
        c => c,
    };
    let text: String = text.chars().map(narrow).collect();
    let text = ANSWER_TAG.replace_all(&text, |tag: &Captures<'_>| tag[0].to_lowercase());
    let text = TAG.replace_all(&text, "");
    let text = COMMAND.replace_all(&text, "{");
    let text = STYLE.replace_all(&text, " ");
    ESCAPE.replace_all(&text, "$1").into_owned()
}

static TAG: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)</?(?:b|i|u|em|strong|span|p|mark|code|center|font|sub|sup)(?:\s[^<>]*)?>|<br\s*/?>",
    )
});
static COMMAND: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"\\(?:text(?:bf|it|rm|sf|tt|sc)?|math(?:rm|bf|it|sf|tt|cal|bb)|operatorname|bold|bm|underline)\s*\{",
    )
});
/// Returns the last 200 characters of a text. Earlier text belongs to other sentences. This bound
/// keeps the search for options linear in the length of a line.
pub(super) fn last_200_chars(text: &str) -> &str {
    let start = text.char_indices().rev().nth(200).map_or(0, |(at, _)| at);
    &text[start..]
}

/// Returns the part of a text after its last sentence boundary.
pub(super) fn last_sentence(text: &str) -> &str {
    text.rsplit(['.', '!', '?', ';', '\n']).next().unwrap_or_default()
}

/// Returns the part of a text after its last clause boundary.
pub(super) fn last_clause(text: &str) -> &str {
    let boundary = BOUNDARY.find_iter(text).last();
    boundary.map_or(text, |found| &text[found.end()..])
}

/// Matches LaTeX commands for fonts, sizes and spaces.
static STYLE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"\\(?:(?:rm|bf|sf|it|tt|large|Large|LARGE|huge|Huge|displaystyle|quad|qquad)\b|[,;! ])",
    )
});
static ANSWER_TAG: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)</?answer>"));
/// Matches the backslash that Markdown or LaTeX puts before punctuation.
static ESCAPE: LazyLock<Regex> = LazyLock::new(|| pattern(r"\\(?:left|right)?([.()\[\]*_:!?,;])"));
