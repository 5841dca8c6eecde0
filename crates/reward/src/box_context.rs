//! Interprets the text around a box or a formula, which can change the answer in it.
//!
//! A sign, a bound and a word of magnitude belong to the answer: `-\boxed{5}` is -5, `x >
//! \boxed{5}` is x > 5 and `\boxed{5}` million is 5000000. A box does not state an answer if it is
//! a factor, a part of a fraction or an operand, or if the words before it negate or bound its
//! content.

use std::ops::Range;
use std::sync::LazyLock;

use regex::Regex;

use crate::context::{
    ends_with_relation, starts_factor, starts_operation, starts_relation, without_latex,
};
use crate::pattern::pattern;
use crate::retraction::{gives_up_statement, starts_with_retraction};
use crate::unsettled::{is_marked_value_unsettled, is_unsettled_before};
use crate::{bounds, doubts, languages, words};

/// Maximum number of characters before and after a `\boxed{…}` that are examined.
const REACH: usize = 300;

/// White space and LaTeX commands that only change the layout of a formula.
const SPACES: [&str; 12] = [
    " ",
    "\\,",
    "\\;",
    "\\:",
    "\\!",
    "\\ ",
    "~",
    "\\quad",
    "\\qquad",
    "\\displaystyle",
    "\\left",
    "\\right",
];

/// LaTeX commands whose argument is an operand of the command's operation.
const OPERATIONS: [&str; 8] =
    ["frac", "dfrac", "tfrac", "cfrac", "sqrt", "binom", "overline", "log"];

/// LaTeX commands for operators and for factors of a product.
const FACTORS: [&str; 16] = [
    "cdot", "times", "div", "pm", "mp", "sqrt", "pi", "log", "ln", "sin", "cos", "tan", "exp",
    "alpha", "theta", "ast",
];

/// LaTeX commands whose argument is text. A `\boxed{…}` after such a command is not multiplied by
/// the argument.
const TEXTS: [&str; 14] = [
    "text",
    "textbf",
    "textit",
    "textrm",
    "mathrm",
    "mathbf",
    "mbox",
    "color",
    "textcolor",
    "begin",
    "tag",
    "label",
    "operatorname",
    "emph",
];

/// Nouns for an extreme value. "a maximum of 5" states the value 5 rather than a bound.
const EXTREMES: [&str; 8] =
    ["minimum", "maximum", "min", "max", "limit", "bound", "minimal", "maximal"];

/// Prepositions that do not bound the value of a `\boxed{…}` directly after them: "from above
/// \\boxed{5}".
const PREPOSITIONS: [&str; 12] = [
    "above", "below", "before", "from", "over", "under", "past", "to", "until", "within", "till",
    "but",
];

/// Effects of the words before a `\boxed{…}` with which its content is not an answer.
const CHANGES: [&str; 20] = [
    "≠",
    "≈",
    "maybe",
    "might",
    "power",
    "≥",
    "≤",
    ">",
    "<",
    "between",
    "next",
    "divisible",
    "factorial",
    "square",
    "cube",
    "root",
    "multiple",
    "factor",
    "divisor",
    "reciprocal",
];

/// Returns the answer that a `\boxed{…}` states together with the surrounding text. `inside` is the
/// box's content, and `range` is the box's position in `text`. Returns `None` if the surrounding
/// text shows that the content is not an answer.
pub(crate) fn answer_in_context(text: &str, inside: &str, range: &Range<usize>) -> Option<String> {
    let start = text[..range.start].char_indices().rev().nth(REACH).map_or(0, |(at, _)| at);
    let before = text[start..range.start].rsplit('\n').next().unwrap_or_default();
    let after = &text[range.end..];
    let after = &after[..after.char_indices().nth(REACH).map_or(after.len(), |(at, _)| at)];
    let prefixed = apply_text_before_box(before, inside)?;
    if is_box_denied(before)
        || is_box_operand(before, after)
        || is_unsettled_before(before)
        || is_marked_value_unsettled(&without_latex(after))
    {
        return None;
    }
    let is_positive = inside.starts_with(|c: char| c.is_ascii_digit());
    let prefixed =
        if is_positive && NEGATIVE.is_match(before) { format!("-{prefixed}") } else { prefixed };
    apply_text_after_box(after, prefixed)
}

/// Returns whether the text after the `\boxed{…}` at `range` denies or retracts the answer in the
/// box.
pub(crate) fn is_boxed_answer_retracted(text: &str, range: &Range<usize>) -> bool {
    let after = &text[range.end..];
    let behind = after.trim_start_matches(|c: char| c.is_whitespace() || "$.!)]*\\。".contains(c));
    starts_with_retraction(behind)
        || gives_up_statement(behind)
        || doubts::is_retracted_after(after, true)
}

/// Returns whether words or digits next to a `\boxed{…}` make its content a part of another value:
/// "half of", "squared", the `12` of `12,000`.
fn is_box_operand(before: &str, after: &str) -> bool {
    let line = after.split('\n').next().unwrap_or_default();
    let plain = without_latex(line);
    OPERAND_BEFORE.is_match(&without_latex(before))
        || DIGITS_BEFORE.is_match(before)
        || EXAMPLE.is_match(before)
        || plain.to_lowercase().contains("below zero")
        || DIGITS_AFTER.is_match(line)
        || OPERAND_AFTER.is_match(&plain)
        || bounds::starts_with_multiple(plain.trim_start())
}

/// Matches words before a `\boxed{…}` that change its value.
static OPERAND_BEFORE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(?:\b(?:half|twice|thrice|double|triple)(?:\s+of)?|\b(?:third|quarter|fifth|tenth|percent)s?\s+of|%\s+of)\s*$",
        r"|\b(?:suppose|assume|imagine|if)\s+(?:that\s+)?(?:the\s+(?:\w+\s+)?(?:answer|result|value)|it)\s+(?:is|was|were)\s*$",
    ))
});
/// Matches words before a `\boxed{…}` that is an example, or a member of a pair or an interval.
static EXAMPLE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:e\.\s?g\.,?|(?:for\s+(?:example|instance)|(?:format|template)\s+(?:is|like)|please\s+(?:put|write|place|give|enter|enclose|box|provide|use|answer|reply)|(?:put|write|place)\s+your)\b)[^.!?]*$",
        r"|[(\[{]\s*-?\d[\d.]*\s*,\s*$",
    ))
});
/// Matches digits whose number continues in the following box: `0.\boxed{12}`.
static DIGITS_BEFORE: LazyLock<Regex> = LazyLock::new(|| pattern(r"\d[.,]$"));
/// Matches digits that continue the number in the preceding box: `\boxed{12}.5`, `\boxed{12}\,000`,
/// `\boxed{1}½`.
static DIGITS_AFTER: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^(?:(?:\\,|\{,\}|[.,:])?\d|[eE][+-]?\d|[¼½¾⅓⅔⅛]|\\[dt]?frac)"));
/// Matches words after a `\boxed{…}` that change its value.
static OPERAND_AFTER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[\s*)\\\]]*(?:(?:squared|cubed|factorial)\b|(?:more|less|fewer|greater|higher|lower)\s+than\s+[$\\]?\d",
        r"|or\s+(?:maybe\s+|perhaps\s+|possibly\s+)?\d)",
    ))
});
/// Matches a word for a negative sign before a `\boxed{…}`.
static NEGATIVE: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)(?:^|[^\d\s$})])\s*\b(?:minus|negative)[\s$]*$"));

/// Returns the name of the LaTeX command at the end of a text, without its backslash. Returns an
/// empty text if there is no command.
fn trailing_command(text: &str) -> &str {
    let letters = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    if letters.ends_with('\\') { &text[letters.len()..] } else { "" }
}

/// Removes white space and LaTeX spacing commands from the end of a text.
fn trim_latex_spaces(text: &str) -> &str {
    let mut text = text;
    while let Some(rest) = SPACES.iter().find_map(|space| text.strip_suffix(space)) {
        text = rest;
    }
    text
}

/// Returns the index of the opening brace of the LaTeX group that ends a text.
fn trailing_group_start(text: &str) -> Option<usize> {
    let mut depth = 0;
    text.char_indices().rev().find_map(|(at, c)| {
        depth += match c {
            '}' => 1,
            '{' => -1,
            _ => 0,
        };
        (depth == 0).then_some(at)
    })
}

/// Returns the boxed answer together with a sign or relation before the box. Returns `None` if the
/// box is an operand of a larger expression.
fn apply_text_before_box(before: &str, inside: &str) -> Option<String> {
    let opener =
        ["$", "\\(", "\\["].iter().filter_map(|open| Some((before.rfind(open)?, open.len()))).max();
    let is_formula = before.matches('$').count() % 2 == 1
        || before.rfind("\\(") > before.rfind("\\)")
        || before.rfind("\\[") > before.rfind("\\]");
    let own = opener.map_or(before, |(at, length)| &before[at + length..]);
    let mut text = trim_latex_spaces(own);
    // A group around the box belongs to a color or size command, or makes the box an operand.
    while let Some(head) = text.strip_suffix('{') {
        let mut head = head.trim_end();
        if head.ends_with(['^', '_', ']']) {
            return None;
        }
        if head.ends_with('}') {
            head = &head[..trailing_group_start(head)?];
        }
        let command = trailing_command(head);
        if OPERATIONS.contains(&command) {
            return None;
        }
        let end = if command.is_empty() { head.len() } else { head.len() - command.len() - 1 };
        text = trim_latex_spaces(&head[..end]);
    }
    let is_adjacent = text.len() == own.len();
    let kept = Some(inside.to_owned());
    let command = trailing_command(text);
    if FACTORS.contains(&command) {
        return None;
    }
    if ends_with_relation(text) {
        let tokens: Vec<&str> = text.split_whitespace().collect();
        let sides = if is_formula {
            text.to_owned()
        } else {
            tokens[tokens.len().saturating_sub(2)..].join(" ")
        };
        return Some(format!("{sides} {inside}"));
    }
    if !command.is_empty() {
        return kept;
    }
    let Some(last) = text.chars().next_back() else { return kept };
    let rest = text[..text.len() - last.len_utf8()].trim_end();
    let previous = rest.chars().next_back();
    let follows_operand = previous.is_some_and(|c| {
        c.is_ascii_digit() || matches!(c, ')' | '}') || (is_formula && c.is_alphabetic())
    });
    match last {
        '-' | '−' if follows_operand => None,
        '-' | '−' if is_formula || is_adjacent || previous == Some('=') => {
            let is_simple = inside.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | ','));
            let is_word = previous.is_some_and(char::is_alphabetic);
            match (is_word, is_simple) {
                (true, _) => kept,
                (_, true) => Some(format!("-{inside}")),
                _ => Some(format!("-({inside})")),
            }
        }
        '+' | '/' | '^' | '_' | '±' | '×' | '·' | '÷' | '√' if is_formula || follows_operand => {
            if last == '+' && !follows_operand {
                kept
            } else {
                None
            }
        }
        '*' if follows_operand && !rest.ends_with('*') => None,
        _ if last.is_ascii_digit() || last == ')' => {
            if is_formula || (is_adjacent && last.is_ascii_digit()) { None } else { kept }
        }
        '}' if is_formula => {
            let head = &text[..trailing_group_start(text)?];
            if TEXTS.contains(&trailing_command(head)) { kept } else { None }
        }
        c if c.is_alphabetic() && is_formula && is_adjacent => {
            let letters = text.chars().rev().take_while(|c| c.is_alphabetic()).count();
            if letters > 2 { kept } else { None }
        }
        _ => kept,
    }
}

/// Returns whether the words before a `\boxed{…}` negate or bound its content: "not", "at least".
fn is_box_denied(before: &str) -> bool {
    let plain = without_latex(before);
    let plain = plain.trim_end();
    let list: Vec<String> = plain
        .split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let last = |by: usize| list.iter().rev().nth(by).map_or("", String::as_str);
    let is_extreme = ["of", "is"].contains(&last(0)) && EXTREMES.contains(&last(1));
    if is_extreme || PREPOSITIONS.contains(&last(0)) {
        return false;
    }
    if doubts::effect_of_preceding_words(plain).is_some_and(|effect| CHANGES.contains(&effect)) {
        return true;
    }
    // An unreal condition: "If x were 2, the answer would be 5."
    let sentence = plain.rsplit(['.', '!', '?', ';']).next().unwrap_or_default().to_lowercase();
    let words: Vec<&str> = sentence.split_whitespace().collect();
    words.first() == Some(&"if") && words.contains(&"were") && words.contains(&"would")
}

/// Returns the boxed answer together with a magnitude or unit after the box. Returns `None` if the
/// box is an operand of a larger expression.
fn apply_text_after_box(after: &str, inside: String) -> Option<String> {
    let line = after.split('\n').next().unwrap_or_default();
    let end =
        ["$", "\\)", "\\]"].iter().filter_map(|close| line.find(close)).min().unwrap_or(line.len());
    let own = line[..end].trim_start_matches('}');
    if let Some(raised) = own.trim_start().strip_prefix('^') {
        let is_mark = ["\\circ", "{\\circ", "°", "{°", "{\\text", "{th", "\\text", "\\degree"];
        return is_mark.iter().any(|mark| raised.starts_with(mark)).then_some(inside);
    }
    if own.starts_with('_') && own[1..].starts_with(|c: char| c.is_ascii_digit() || c == '{') {
        let close =
            if own[1..].starts_with('{') { own.find('}').map(|at| at + 1) } else { Some(2) };
        return Some(format!("{inside}{}", &own[..close?]));
    }
    // In `\boxed{12}\% of 50`, the box is an operand.
    let plain = without_latex(line);
    let percent = plain.trim_start().trim_start_matches('\\').strip_prefix('%');
    if percent
        .and_then(|rest| rest.trim_start().strip_prefix("of "))
        .is_some_and(|rest| rest.trim_start().starts_with(|c: char| c.is_ascii_digit()))
    {
        return None;
    }
    let is_factorial = own.starts_with('!') && end < line.len();
    if is_factorial || starts_operation(own) || starts_relation(own) || starts_factor(own) {
        return None;
    }
    let mut rest = line;
    loop {
        let shorter =
            ["}", "$", "\\)", "\\]", "**", "\\text{", "\\mathrm{", "\\textrm{", "\\mbox{"]
                .iter()
                .chain(&SPACES)
                .find_map(|mark| rest.strip_prefix(mark));
        match shorter {
            Some(shorter) => rest = shorter,
            None => break,
        }
    }
    let word: String = rest.chars().take_while(|c| c.is_alphabetic()).collect();
    let lower = word.to_lowercase();
    if word.is_empty() {
        return Some(inside);
    }
    if words::magnitude_factor(&word).is_some()
        || (lower.ends_with("ths") && words::denominator_of_word(&word).is_some())
    {
        return Some(format!("{inside} {word}"));
    }
    if word == "k" && line.starts_with('k') {
        return Some(format!("{inside}k"));
    }
    if languages::leading_magnitude_factor(&word).is_some() {
        return Some(format!("{inside}{word}"));
    }
    let noon = rest.to_lowercase().replace('.', "");
    if inside.contains(':')
        && ["am", "pm"].iter().any(|half| noon == *half || noon.starts_with(&format!("{half} ")))
    {
        return Some(format!("{inside} {}", &noon[..2]));
    }
    let is_bare = inside.chars().all(|c| c.is_ascii_digit() || "-.,%\\{}$/".contains(c));
    let is_change = words::direction_kind(&lower).is_some_and(|(kind, _)| kind == "change");
    let is_unit = word.len() > 1 && words::parse_units(&word).is_some()
        || ["m", "g", "s"].contains(&word.as_str());
    if is_bare && (is_change || is_unit) && !["in", "second"].contains(&lower.as_str()) {
        Some(format!("{inside}\\text{{ {word}}}"))
    } else {
        Some(inside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boxed::last_box_with_range;

    #[test]
    fn boxed_value_includes_surrounding_text() {
        for (text, want) in [
            ("The answer is $\\boxed{5}$.", Some("5")),
            ("x = \\boxed{5}", Some("5")),
            ("$$2x = 10 \\Rightarrow x = \\boxed{5}.$$", Some("5")),
            ("- \\boxed{5}", Some("5")),
            ("**\\boxed{5}**", Some("5")),
            ("> \\boxed{5}", Some("5")),
            ("\\boxed{5}!", Some("5")),
            ("\\boxed{5} - that is all", Some("5")),
            ("\\text{Answer: }\\boxed{5}", Some("5")),
            ("$\\color{red}{\\boxed{5}}$", Some("5")),
            ("$\\boxed{5}^\\circ$", Some("5")),
            ("\\boxed{5} in total", Some("5")),
            ("\\boxed{5} may be right", Some("5")),
            ("It is not hard to see that the answer is \\boxed{5}", Some("5")),
            ("This gives a maximum of \\boxed{5}", Some("5")),
            ("-\\boxed{5}", Some("-5")),
            ("$x = -\\boxed{\\frac12}$", Some("-(\\frac12)")),
            ("In the required format: \\boxed{5}", Some("5")),
            ("So I put the final answer in a box: \\boxed{5}", Some("5")),
            ("There are $\\boxed{5}$ ways to choose 2 books.", Some("5")),
            ("$\\boxed{5}$ million", Some("5 million")),
            ("\\boxed{5}万元", Some("5万元")),
            ("$x > \\boxed{5}$", Some("x > 5")),
            ("\\boxed{5:00} p.m.", Some("5:00 pm")),
            ("\\boxed{5} inches", Some("5\\text{ inches}")),
            ("$2\\boxed{5}$", None),
            ("$\\frac{\\boxed{5}}{6}$", None),
            ("$\\frac{1}{\\boxed{5}}$", None),
            ("\\boxed{5}/6", None),
            ("$\\boxed{5}\\sqrt{2}$", None),
            ("$\\boxed{5}x + 3$", None),
            ("$\\boxed{5}^2$", None),
            ("\\boxed{5}k", Some("5k")),
            ("It is minus \\boxed{5}", Some("-5")),
            ("\\boxed{5} is more than enough", Some("5")),
            ("twice \\boxed{5}", None),
            ("the square of $\\boxed{5}$", None),
            ("Write the result, e.g. \\boxed{5}", None),
            ("Please put the answer in \\boxed{5}", None),
            ("If it were \\boxed{5}, it would be odd.", None),
            ("\\boxed{5} squared", None),
            ("\\boxed{5} more than 3", None),
            ("$\\boxed{5}$ or maybe 6", None),
            ("\\boxed{5},000", None),
            ("0.\\boxed{5}", None),
            ("\\boxed{5}的一半", None),
            ("$\\boxed{5}\\%$ of 20", None),
            ("$\\boxed{5}\\%$ of them", Some("5")),
            ("<s>\\boxed{5}</s>", Some("<s> 5")),
            ("The answer is not \\boxed{5}.", None),
            ("at least $\\boxed{5}$", None),
        ] {
            let (inside, range) = last_box_with_range(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(answer_in_context(text, inside, &range).as_deref(), want, "{text}");
        }
    }
}
