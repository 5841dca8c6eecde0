//! Extracts answers in `\boxed{…}`, and the only number in a short formula.

use std::ops::Range;
use std::sync::LazyLock;

use regex::Regex;

use crate::characters::normalize_characters;
use crate::numbers::{NumberMatch, NumberReader};
use crate::pattern::pattern;

/// Returns the content of the last `\boxed{…}` or `\fbox{…}`. Without braces (`\boxed 5`), the
/// content extends to white space or to the end of the formula. Returns `None` if there is no box,
/// or if the last box is not closed.
pub(crate) fn last_box_content(text: &str) -> Option<&str> {
    last_box_with_range(text).map(|(inside, _)| inside)
}

/// Returns the content of the last `\boxed{…}`, and the byte range from its command to its end.
pub(crate) fn last_box_with_range(text: &str) -> Option<(&str, Range<usize>)> {
    let find = |name: &str| text.rfind(name).map(|at| (at, at + name.len()));
    let (start, after) = find("\\boxed").max(find("\\fbox"))?;
    let rest = text[after..].trim_start();
    let Some(inside) = rest.strip_prefix('{') else {
        let end = rest.find(|c: char| c.is_whitespace() || c == '$').unwrap_or(rest.len());
        let end = text.len() - rest.len() + end;
        return Some((&text[text.len() - rest.len()..end], start..end))
            .filter(|(inside, _)| !inside.is_empty());
    };
    let mut depth = 1;
    let mut escaped = false;
    for (at, c) in inside.char_indices() {
        match c {
            '{' if !escaped => depth += 1,
            '}' if !escaped => depth -= 1,
            _ => {}
        }
        escaped = c == '\\' && !escaped;
        if depth == 0 {
            return Some((&inside[..at], start..text.len() - inside.len() + at + 1));
        }
    }
    None
}

/// Removes text and font commands from the content of a `\boxed{…}` (`\text{Paris}`,
/// `\textbf{Paris}`), and the backslashes that LaTeX needs before some characters (`C\#`, `a\_b`).
pub(crate) fn without_text_commands(inside: &str) -> String {
    let mut text = inside.to_owned();
    loop {
        let plain = TEXT.replace_all(&text, "$1").into_owned();
        if plain == text {
            break;
        }
        text = plain;
    }
    let text = ESCAPED.replace_all(&text, "$1");
    THIN_SPACE.replace_all(&text, " ").trim().to_owned()
}

static TEXT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"\\(?:text(?:bf|it|rm|sf|tt|sc|normal)?|math(?:rm|bf|it|sf|tt)|mbox|emph|operatorname)\s*\{([^{}]*)\}",
    )
});
static ESCAPED: LazyLock<Regex> = LazyLock::new(|| pattern(r"\\([#$%&_])"));
static THIN_SPACE: LazyLock<Regex> = LazyLock::new(|| pattern(r"\\[,;: ]|~"));

/// LaTeX commands that turn an adjacent number into another value, or an equation into another
/// relation.
const COMPUTES: [&str; 42] = [
    "sqrt", "pi", "log", "ln", "lg", "exp", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin",
    "arccos", "arctan", "binom", "dbinom", "tbinom", "choose", "sum", "prod", "int", "infty", "lt",
    "gt", "le", "leq", "ge", "geq", "ne", "neq", "bmod", "pmod", "mod", "lfloor", "lceil", "lvert",
    "vert", "gcd", "lcm", "max", "min",
];

/// LaTeX commands that have arguments, with their number of arguments. In a unit (`\frac{m}{s^2}`),
/// the arguments contain no numbers except exponents.
const WRAPS: [(&str, u32); 6] =
    [("frac", 2), ("dfrac", 2), ("tfrac", 2), ("cfrac", 2), ("overline", 1), ("bar", 1)];

/// Letters that are not units. Directly after a number, they multiply the number.
const FACTORS: [&str; 15] = [
    "x", "y", "z", "n", "k", "e", "i", "π", "√", "alpha", "beta", "gamma", "theta", "phi", "lambda",
];

/// Kind of the token that was parsed last, ignoring white space.
#[derive(PartialEq)]
enum LastToken {
    Nothing,
    Number,
    Operator,
    Other,
}

/// Returns the number that a short text states, such as `x = 5`, `\$1{,}234.`, `5\text{ cm}^2` or
/// `about 72 clips`. Returns `None` if the text has no number or several, if a value would have to
/// be computed (`3 + x`, `\sqrt{2}`, `2\pi`, `5!`), or if the text is an inequality (`x > 3`).
pub(crate) fn parse_only_number(text: &str) -> Option<NumberMatch> {
    let mut reader = NumberReader::new(normalize_characters(text.trim()).trim(), true);
    let mut only = None;
    let mut last = LastToken::Nothing;
    loop {
        reader.skip_spaces();
        let Some(next) = reader.peek(0) else {
            return only.map(|found| reader.apply_context(found));
        };
        if let Some(found) = reader.parse_number() {
            if only.is_some() || last == LastToken::Operator {
                return None;
            }
            (only, last) = (Some(found), LastToken::Number);
            continue;
        }
        let after_number = last == LastToken::Number;
        let before = reader.previous_char();
        let word = reader.skipped_text(NumberReader::skip_word);
        last = if is_operator(&word) && !(word == "/" && is_unit_after_slash(&mut reader)) {
            LastToken::Operator
        } else {
            LastToken::Other
        };
        let name = word.strip_prefix('\\').unwrap_or(&word);
        let computes = match next {
            '\\' => COMPUTES.contains(&name),
            '<' | '>' | '|' | '≤' | '≥' | '≠' | '±' => true,
            // An exponent of a number or of a bracket. The exponent of a unit follows a word.
            '^' => {
                (after_number && !is_degree_or_ordinal(&word)) || matches!(before, Some(')' | ']'))
            }
            '!' => after_number,
            // A superscript digit or a fraction character, as in 5² and 3½. The superscript of cm²
            // follows a word.
            _ => after_number && next.is_numeric(),
        };
        if computes || (after_number && (last == LastToken::Operator || FACTORS.contains(&name))) {
            return None;
        }
        let arguments =
            WRAPS.iter().find(|(wrap, _)| next == '\\' && *wrap == name).map_or(0, |(_, n)| *n);
        for _ in 0..arguments {
            if has_digits_outside_exponent(&reader.skipped_text(NumberReader::skip_argument)) {
                return None;
            }
        }
    }
}

fn is_operator(word: &str) -> bool {
    let operators =
        ["+", "-", "−", "*", "/", "×", "·", "÷", "\\cdot", "\\times", "\\div", "\\pm", "\\mp"];
    operators.contains(&word)
}

/// Returns whether a unit follows a slash, as in `12/hour`.
fn is_unit_after_slash(reader: &mut NumberReader) -> bool {
    reader.skip_spaces();
    let letters = |c: Option<char>| c.is_some_and(char::is_alphabetic);
    reader.command_name().is_some_and(|name| name.starts_with("text") || name.starts_with("math"))
        || (letters(reader.peek(0)) && letters(reader.peek(1)))
}

/// Returns whether a superscript leaves the value of its number unchanged: a degree sign, or the
/// suffix of an ordinal.
fn is_degree_or_ordinal(raised: &str) -> bool {
    ["circ", "degree", "°", "th", "st", "nd", "rd"].iter().any(|mark| raised.contains(mark))
}

/// Returns whether a text has digits that are not an exponent.
fn has_digits_outside_exponent(text: &str) -> bool {
    let mut exponent = false;
    text.chars().any(|c| {
        match c {
            '^' => exponent = true,
            '{' | '-' | '−' => {}
            _ if c.is_ascii_digit() => return !exponent,
            _ => exponent = false,
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rational;

    #[test]
    fn content_of_last_box_is_extracted() {
        for (text, want) in [
            ("so \\boxed{72} and 5", Some("72")),
            ("\\boxed{1} then \\fbox{\\frac{3}{4}}.", Some("\\frac{3}{4}")),
            ("\\boxed {a{b}\\}c}", Some("a{b}\\}c")),
            ("\\boxed{\\boxed{5}}", Some("5")),
            ("$\\boxed 5$ of 7", Some("5")),
            ("\\boxed\\frac12 of it", Some("\\frac12")),
            ("\\boxed{1} or \\boxed{72", None),
            ("\\boxed", None),
            ("{72}", None),
        ] {
            assert_eq!(last_box_content(text), want, "{text}");
        }
    }

    #[test]
    fn single_numbers_are_parsed() {
        for (text, value) in [
            ("1{,}234", "1234"),
            ("12{,}345{,}678", "12345678"),
            ("1,\\!234", "1234"),
            ("1\\,234", "1234"),
            ("\\$1{,}234.50", "1234.5"),
            ("\\text{\\$}5", "5"),
            ("\\$\\,5", "5"),
            ("5 \\mathrm{~cm}^{2}", "5"),
            ("\\textbf{(B)}\\ 5", "5"),
            ("\\SI{5}{cm^2}", "5"),
            ("$-\\frac{1}{2}$", "-0.5"),
            ("- 7", "-7"),
            ("5\\text{ cm}^2", "5"),
            ("5 \\text{ cm}^{2}.", "5"),
            ("5~\\mathrm{cm^3}", "5"),
            ("5\\,\\mathrm{m}\\,\\mathrm{s}^{-2}", "5"),
            ("9.8\\ \\frac{\\text{m}}{\\text{s}^2}", "9.8"),
            ("9.8 m/s^2", "9.8"),
            ("60\\text{ miles}/\\text{hour}", "60"),
            ("\\$12/hour", "12"),
            ("5\\,\\text{N}\\cdot\\text{m}", "5"),
            ("90^\\circ", "90"),
            ("90^{\\circ}\\text{C}", "90"),
            ("25\\%", "25"),
            ("x = 5", "5"),
            ("x_{1} = \\dfrac12", "0.5"),
            ("f(x) = \\left(5\\right)", "5"),
            ("1\\frac{1}{2}\\text{ cups}", "1.5"),
            ("1.2\\times10^{3}", "1200"),
            ("3 \\cdot 10^5", "300000"),
            ("2^{10}", "1024"),
            ("\\mathbf{42}", "42"),
            ("\\text{about } 72 \\text{ clips}", "72"),
            ("the 5^{\\text{th}}", "5"),
            ("12345678901234567890123456789", "12345678901234567890123456789"),
            ("5 cm²", "5"),
            ("1 1/2", "1.5"),
            ("3½", "3.5"),
            ("5²", "25"),
            ("minus 5", "-5"),
            ("5 million", "5000000"),
            ("\\$1.5\\text{ billion}", "1500000000"),
            ("101_2", "5"),
            // A final backslash whose command was truncated.
            ("5\\", "5"),
            ("1 000 000", "1000000"),
            ("5\\ ", "5"),
        ] {
            let found = parse_only_number(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(found.value, Rational::parse(value), "{text}");
        }
    }

    #[test]
    fn repeating_decimals_are_parsed() {
        for (text, fraction) in [("0.\\overline{3}", "1/3"), ("0.1(6)", "1/6"), ("0.(27)", "3/11")]
        {
            let values =
                [text, fraction].map(|text| parse_only_number(text).and_then(|found| found.value));
            assert!(values[0].is_some() && values[0] == values[1], "{text}");
        }
    }

    #[test]
    fn expressions_and_lists_are_not_single_numbers() {
        for text in [
            "",
            "x",
            "3, 4",
            "3{,}14",
            "2 + 3 = 5",
            "3 + x",
            "x + 5",
            "5 - x",
            "3 \\cdot 4",
            "2x",
            "3x^2",
            "2\\pi",
            "\\sqrt{2}",
            "3\\sqrt2",
            "5!",
            "2^x",
            "2^{n}",
            "(3)^2",
            "|-5|",
            "x > 3",
            "x \\le 5",
            "5 \\pm 1",
            "\\frac{x}{2}",
            "5\\frac{x}{2}",
            "\\frac{\\sqrt{3}}{2}",
            "\\log_2 8",
            "\\binom{5}{2}",
            "3i",
            "2\\theta",
            "\\",
            "5\\sqrt",
            "\\ ",
        ] {
            assert_eq!(parse_only_number(text), None, "{text}");
        }
    }
}
