//! Patterns of the words around the name of an option.

use std::sync::LazyLock;

use regex::Regex;

use crate::pattern::pattern;

/// Marks around a letter.
pub(super) const OPENS: [char; 11] = [':', ' ', '*', '$', '"', '`', '(', '[', '{', '_', '\''];
pub(super) const CLOSES: [char; 8] = ['*', '$', '"', '`', ')', ']', '}', '_'];

/// What stands behind a letter that names an option; behind "A" anything else makes it a word.
pub(super) const BEHIND: [&str; 19] = [
    "because",
    "since",
    "as ",
    "is correct",
    "is right",
    "is the correct",
    "is the right",
    "is the best",
    "is the answer",
    "- ",
    "– ",
    "— ",
    "(",
    "given ",
    "due to",
    "rather than",
    "instead of",
    "based on",
    "|",
];

pub(super) static SENTENCE_END: LazyLock<Regex> = LazyLock::new(|| pattern(r"[.!?;]+\s+|\n|[。！？]"));
pub(super) static COUNTERFACTUAL: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)\b(?:had|if|were|unless|without|otherwise)\b|\bin\s+that\s+case\b"));
/// A condition under which a statement holds: "With the other sign, the answer is".
pub(super) static CONDITION: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)^\W*(?:with|without|for|under|in|by)\s[^,]*\b(?:other|another|different|opposite|wrong)\b")
});
/// What denies a statement in its sentence: "but this ignores the sign".
pub(super) static IGNORES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:but|though|which)\s+(?:(?:this|that|it)\s+)?(?:ignores|overlooks|forgets|neglects|misses)\b",
    )
});
pub(super) static LETTER: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b[A-Z]\b"));
/// A label behind the text of its option.
pub(super) static LABEL_BEHIND: LazyLock<Regex> = LazyLock::new(|| pattern(r"\s*\(([A-Z])\)\.?$"));
pub(super) static BEHIND_CAPITAL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)^(?:which|for|here|in\s+this|by|from|i\s+(?:think|believe)|it\s+is|indeed|according|so|though|while|and\s+(?:not|it|this|that|i|we|the\s+others?)|not)\b",
    )
});
pub(super) static LEAD: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)^(?:the\s+)?(?:correct\s+|right\s+|final\s+)?(?:option|choice|letter|answer|alternative)(?:\s+is)?[\s:*_]+",
    )
});
/// "not B but", before the option that is meant.
pub(super) static INSTEAD: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^(?i:not)\s+\(?[A-Z]\)?\s*,?\s+but\s+(?:rather\s+)?"));
/// What makes another option in a later sentence none that is stated: "C is too small", "rather than C".
pub(super) static DENIES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:not|\w+n't|cannot|neither|nor|eliminat\w+|exclud\w+|rul\w+\s+out|reject\w*|instead\s+of|rather\s+than|unlike|wrong|incorrect|false|without|except)\b",
    )
});
/// What joins two boxes.
pub(super) static JOINS: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^[\s$,.()]*(?i:or|and|,|/|;)?[\s$()]*$"));
pub(super) static BOUNDARY: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)[.!?\n;:,。，；]|\b(?:so|therefore|thus|hence|but|then|because|and|since)\b|所以|因此|故|但",
    )
});
/// Denials that deny nothing.
pub(super) static SURE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)\b(?:there\s+is\s+)?(?:no|without(?:\s+a)?)\s+doubt(?:\s+that)?\b|\bnot\s+only\b")
});
pub(super) static AGAINST: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i),?\s+(?:not|rather\s+than|instead\s+of)\s+"));
pub(super) static SENTENCE: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)[.!?](?:[\s*_\x22`]|$)|,?\s+(?:because|since)\b|[*_`\x22}\])]+[.!?]?$"));
pub(super) static ALONE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"^(?:####\s)?[*_\x22'(\[{`$\s]*(?:(?i:option|answer|choice)\s+)?([A-Z])[)\]}*_\x22'`$.\s!。]*$")
});
pub(super) static ITEM: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^[*_\x22(\[{`$\s-]*([A-Z])[*_`]*(?:[)\].:]|\s[-–—])[*_`]*\s*\S"));
pub(super) static ITEMS: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?:^|[\s*_(\[])([A-Z])[*_]*(?:[)\]]|[.:](?:\s|$))"));
pub(super) static BRACKETED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\(\s*\*{0,2}([A-Za-z])\*{0,2}\s*\)"));
pub(super) static IS_RIGHT: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^(?i:is)\s+(?i:correct|right)\W*(?:$|[.,;\n])"));
