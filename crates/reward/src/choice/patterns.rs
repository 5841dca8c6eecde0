//! Regular expressions for the words around the name of an option.

use std::sync::LazyLock;

use regex::Regex;

use crate::pattern::pattern;

/// Characters that can precede the letter of an option.
pub(super) const OPENING_MARKS: [char; 11] =
    [':', ' ', '*', '$', '"', '`', '(', '[', '{', '_', '\''];
/// Characters that can follow the letter of an option.
pub(super) const CLOSING_MARKS: [char; 8] = ['*', '$', '"', '`', ')', ']', '}', '_'];

/// Words that can follow the letter of an option. Before any other word, "A" is an article.
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

/// Matches the end of a sentence or a line.
pub(super) static SENTENCE_END: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"[.!?;]+\s+|\n|[。！？]"));
/// Matches words that make a statement hypothetical: "if", "otherwise".
pub(super) static COUNTERFACTUAL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:had|if|were|unless|without|otherwise|assum\w+|provided)\b|\bin\s+that\s+case\b",
    )
});
/// Matches a condition under which a statement holds: "With the other sign, the answer is".
pub(super) static CONDITION: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)^\W*(?:with|without|for|under|in|by)\s[^,]*\b(?:other|another|different|opposite|wrong)\b",
    )
});
/// Matches words that negate a statement later in its sentence: "but this ignores the sign".
pub(super) static IGNORES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:but|though|which)\s+(?:(?:this|that|it)\s+)?(?:ignores|overlooks|forgets|neglects|misses)\b",
    )
});
/// Matches an affirmation, such as "yes", at the start of a text.
pub(super) static YES: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)^\W*(?:yes|yep|yeah|correct|right|indeed|ja|oui|sí|是)\b"));
/// Matches a single capital letter.
pub(super) static LETTER: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b[A-Z]\b"));
/// Matches the label of an option after the option's text: "Paris (C)".
pub(super) static LABEL_BEHIND: LazyLock<Regex> = LazyLock::new(|| pattern(r"\s*\(([A-Z])\)\.?$"));
/// Matches words that can follow the letter of an option without punctuation: "C which", "A not B".
pub(super) static BEHIND_CAPITAL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)^(?:which|for|here|in\s+this|by|from|i\s+(?:think|believe)|it\s+is|indeed|according|so|though|while|and\s+(?:not|it|this|that|i|we|the\s+others?)|not)\b",
    )
});
/// Matches words that introduce an option: "the correct answer is".
pub(super) static LEAD: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)^(?:the\s+)?(?:correct\s+|right\s+|final\s+)?(?:option|choice|letter|answer|alternative)(?:\s+is)?[\s:*_]+",
    )
});
/// Matches a rejected option before the stated option: "not B but".
pub(super) static INSTEAD: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^(?i:not)\s+\(?[A-Z]\)?\s*,?\s+but\s+(?:rather\s+)?"));
/// Matches words that reject another option in a later sentence: "C is too small", "rather than C".
pub(super) static DENIES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:not|\w+n't|cannot|neither|nor|eliminat\w+|exclud\w+|rul\w+\s+out|reject\w*|instead\s+of|rather\s+than|unlike|wrong|incorrect|false|without|except)\b",
    )
});
/// Matches text between two boxes that form one answer: "or", "and", or a comma.
pub(super) static JOINS: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^[\s$,.()]*(?i:or|and|,|/|;)?[\s$()]*$"));
/// Matches the boundary between two clauses.
pub(super) static BOUNDARY: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)[.!?\n;:,。，；]|\b(?:so|therefore|thus|hence|but|then|because|and|since)\b|所以|因此|故|但",
    )
});
/// Matches phrases that contain a negation but affirm a statement: "no doubt", "not only".
pub(super) static SURE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)\b(?:there\s+is\s+)?(?:no|without(?:\s+a)?)\s+doubt(?:\s+that)?\b|\bnot\s+only\b")
});
/// Matches words after an option that introduce a rejected option: the "not" of "C, not B".
pub(super) static AGAINST: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i),?\s+(?:not|rather\s+than|instead\s+of)\s+"));
/// Matches the end of a statement, including a following reason and closing marks.
pub(super) static SENTENCE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)[.!?](?:[\s*_\x22`]|$)|,?\s+(?:because|since)\b|[*_`\x22}\])]+[.!?]?$")
});
/// Matches a text that is one letter with marks around it.
pub(super) static SINGLE_LETTER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"^(?:####\s)?[*_\x22'(\[{`$\s]*(?:(?i:option|answer|choice)\s+)?([A-Z])[)\]}*_\x22'`$.\s!。]*$",
    )
});
/// Matches a line that starts with the letter of an option and the option's text: "B) Paris".
pub(super) static ITEM: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^[*_\x22(\[{`$\s-]*([A-Z])[*_`]*(?:[)\].:]|\s[-–—])[*_`]*\s*\S"));
/// Matches the letter of an option with a closing parenthesis, followed by a number or a formula:
/// "D) 5".
pub(super) static ITEM_IN_BOX: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^[*_(\[{\s]*([A-Z])\)[*_}]*\s*[\d$\\-]"));
/// Matches letters that start the items of a list, including several items on one line.
pub(super) static ITEMS: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?:^|[\s*_(\[])([A-Z])[*_]*(?:[)\]]|[.:](?:\s|$))"));
/// Matches a letter in parentheses.
pub(super) static BRACKETED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\(\s*\*{0,2}([A-Za-z])\*{0,2}\s*\)"));
/// Matches words that call the preceding option right: "is correct".
pub(super) static IS_RIGHT: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^(?i:is)\s+(?i:correct|right)\W*(?:$|[.,;\n])"));
