//! Marks that only change how the reply of a judge looks.

use std::sync::LazyLock;

use regex::Regex;

use crate::pattern::pattern;

/// Returns a reply without tags and LaTeX commands around its words. A tag that names a verdict becomes its
/// label, "<score>7</score>" a line "score: 7". Struck text keeps its tags, so that it is no verdict.
pub(super) fn without_marks(reply: &str) -> String {
    let text = COMMAND.replace_all(reply, "{");
    let text = LABEL.replace_all(&text, "\n$1: ");
    TAG.replace_all(&text, "").replace(['’', '‘'], "'")
}

/// Returns whether a text has no letters and digits.
pub(super) fn is_mark(text: &str) -> bool {
    !text.chars().any(char::is_alphanumeric)
}

static COMMAND: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\\(?:boxed|fbox|text|textbf|textit|mathrm|mathbf|emph|underline)\s*\{"));
static LABEL: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)<(verdict|grade|judge?ment|final|decision|result|score|rating)>"));
static TAG: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)</?(?:b|i|u|em|strong|p|span|verdict|grade|judge?ment|final|decision|result|score|rating)>",
        r"|<br\s*/?>",
    ))
});
