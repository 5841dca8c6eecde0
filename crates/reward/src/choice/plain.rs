//! Removes typographic variants and styling from texts.

use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::characters::is_decoration;
use crate::pattern::pattern;

/// Replaces full-width and typographic characters by ASCII characters, and removes markup that only
/// changes the appearance of a text.
pub(super) fn plain(text: &str) -> String {
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
/// Matches LaTeX commands for fonts, sizes and spaces.
static STYLE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"\\(?:(?:rm|bf|sf|it|tt|large|Large|LARGE|huge|Huge|displaystyle|quad|qquad)\b|[,;! ])",
    )
});
static ANSWER_TAG: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)</?answer>"));
/// Matches the backslash that Markdown or LaTeX puts before punctuation.
static ESCAPE: LazyLock<Regex> = LazyLock::new(|| pattern(r"\\(?:left|right)?([.()\[\]*_:!?,;])"));
