//! Determines how the text around a number changes its value, in prose and in formulas.
//!
//! A magnitude word multiplies the number, and a sign word negates it. Units and directions are
//! collected. The number has no value of its own if it is
//!
//! - bounded (at least 5),
//! - one of several guesses (5 or 6),
//! - an operand of an unevaluated expression (3 × 4), or
//! - a part of a pair, a matrix, a ratio or a time.

mod operations;

use std::ops::Range;
use std::sync::LazyLock;

use regex::Regex;

use self::operations::{
    add_leading_units, denominator_in_words, ends_with_function, ends_with_operand,
    ends_with_unsolved_side, starts_with_ordinal_suffix,
};
pub(crate) use self::operations::{
    ends_with_relation, starts_factor, starts_operation, starts_relation, without_latex,
};
use crate::Rational;
use crate::languages::{self, NumberChange};
use crate::pattern::pattern;
use crate::words::{self, NumberDescription};
use crate::{bounds, doubts};

/// Number of characters that are inspected on either side of a number.
const REACH: usize = 80;

/// A number and its position in a text.
pub(crate) struct NumberContext<'t> {
    pub chars: &'t [char],
    /// Character range of the number in the text, including its sign and currency.
    pub range: Range<usize>,
    /// Whether the text consists of a single formula.
    pub formula: bool,
}

/// Effect of the surrounding text on the value of a number.
#[derive(Debug)]
pub(crate) struct NumberEffect {
    /// Factor of the number's value, 1 by default. `None` if the surrounding text leaves the number
    /// without a value.
    pub factor: Option<Rational>,
    /// Base of the digits, from a subscript; `None` for base 10.
    pub base: Option<u32>,
    /// Character range of the number, including words of sign and magnitude.
    pub range: Range<usize>,
    pub about: NumberDescription,
}

/// Words that join a number to an adjacent number.
const JOINS: [&str; 10] =
    ["times", "plus", "minus", "divided", "to", "or", "over", "versus", "choose", "modulo"];

/// Matches a quotient before its remainder: the `3 R` of `3 R 42`, `3 remainder 42`.
static QUOTIENT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\d[\s$,*)]*(?:(?:with|and)?\s*(?:an?\s+)?(?:remainder|rest|reste|resto)(?:\s+of)?|r|rem\.?|余|余り|あまり)[\s$:]*$",
    )
});

/// Matches a remainder after its quotient.
static REMAINDER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)^[\s$,*)\\]*(?:(?:with\s+)?(?:an?\s+)?(?:remainder|rest|reste|resto)(?:\s+(?:of|is|von|de))?|r|rem\.?|余|余り|あまり|⋯⋯|……)[\s$:=]*([1-9])",
    )
});

/// Matches a measure in a larger unit, before a measure in a smaller unit: `1 hour and`, `$1 and`.
static MEASURE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?:([$€£])\s*\d[\d.,]*|\d[\d.,]*\s*(\p{L}+|°))[$*]*\s*,?\s*(?:and|und|et|y|e|и|又)?\s*$",
    )
});

/// Matches the left side of an equation for a function of one unknown: `log x =`, `sqrt(x) =`.
static FUNCTION_OF: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?:log|ln|lg|exp|sin|cos|tan|cot|sqrt|√)(?:_\S+)?\s*[({]?\s*[a-zA-Z]\s*[)}]?\s*=$")
});

/// Matches a number word with a hyphen or a space: the `ten-thousands` of `42 ten-thousands`.
static LARGE_PART: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)^\s*(?:ten|hundred)[- ](?:thousand|million|billion)"));

/// Matches a word after a number, which can be a denominator: the `hundredths` of `42 hundredths`.
static PART: LazyLock<Regex> = LazyLock::new(|| pattern(r"^[\s]*(\p{L}+)"));

/// Matches text before the last of several solutions: `the solutions are 43 and`.
static SEVERAL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:solutions|roots|zeros|zeroes|answers|values|lösungen|soluciones|racines)\b[^.;!?\n]*\d[\s$\\)*]*,?",
        r"\s*(?:and|or|und|oder|et|ou|y|o)[\s$\\(*]+(?:[a-z]\s*=\s*)?[\s$\\(*-]*$"
    ))
});

/// Matches the first numbers of a line that is a list: the `41, ` of `41, 42`.
static LISTED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^\s*(?:[$*]*[-−]?\d[\d.]*[$*]*[,;]\s+)+[$*]*$"));

/// Matches text before a number that is part of a name, a range or a table row, or is one of
/// several values: `F-`, `17~`, `| 17 |`, `17 `, `x = 17 or x =`, `x_1 = 17, x_2 =`.
static ADJACENT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"\p{L}-$|\d\s*[~∼]\s*$|\|\s*[-\d.,$]+\s*\|\s*$|^\s*[-\d.,$]+\s*\|\s*$|^\s*\$?\d+(?:,\d{3})*\s+\$?$",
        r"|\d[\s$)]*,?\s*(?:or|oder|ou)[\s$(]+[a-z][_\d{}]*\s*=\s*$|\bx_\{?\d\}?\s*=.*\d.*\bx_\{?\d\}?\s*=\s*$",
    ))
});

/// Closing marks after a number: the second `**` of `**42** million`.
const CLOSERS: [&str; 14] =
    ["**", "__", "\\)", "\\]", "*", "_", "$", "}", "\"", "”", "»", "`", "」", "』"];

/// Counts the characters at the start of `after` that close marks which were opened in `before`.
fn count_closing_marks(before: &str, after: &str) -> usize {
    let mut rest = after;
    let mut before = before;
    loop {
        // An HTML tag.
        if let Some(tag) = rest.strip_prefix("</")
            && let Some((name, more)) = tag.split_once('>')
            && name.chars().all(|c| c.is_ascii_alphanumeric())
        {
            rest = more;
            continue;
        }
        let Some(mark) = CLOSERS.iter().find(|mark| rest.starts_with(**mark)) else { break };
        let opener = match *mark {
            "\\)" => "\\(",
            "\\]" => "\\[",
            "}" => "{",
            "”" => "“",
            "»" => "«",
            "」" => "「",
            "』" => "『",
            same => same,
        };
        // The opening `$` of a formula can have been parsed as a currency sign, so it is not
        // required.
        if opener != "$" {
            let Some(at) = before.rfind(opener).filter(|at| before.len() - at < 40) else { break };
            before = &before[..at];
        }
        rest = &rest[mark.len()..];
    }
    after[..after.len() - rest.len()].chars().count()
}

/// Returns whether the number after `before` is one of several solutions: "the solutions are 43
/// and".
pub(crate) fn is_one_of_several(before: &str) -> bool {
    SEVERAL.is_match(before)
}

impl NumberContext<'_> {
    /// Returns the effect of the surrounding text on the value of the number.
    pub fn find_effect(&self) -> NumberEffect {
        let mut change = NumberEffect {
            factor: Some(Rational::from(1)),
            base: None,
            range: self.range.clone(),
            about: NumberDescription::default(),
        };
        let before = self.apply_text_before(&mut change);
        let after = self.apply_text_after(&mut change);
        if !before || !after || self.is_in_tuple() || self.is_in_matrix() {
            change.factor = None;
        }
        change
    }

    fn char_at(&self, at: usize) -> Option<char> {
        self.chars.get(at).copied()
    }

    fn number_text(&self) -> String {
        self.chars[self.range.clone()].iter().collect()
    }

    /// Applies the text before the number to `change`. Returns whether the number keeps a value.
    fn apply_text_before(&self, change: &mut NumberEffect) -> bool {
        let start = self.range.start.saturating_sub(REACH);
        let line: String = self.chars[start..self.range.start].iter().collect();
        let line = line.rsplit('\n').next().unwrap_or_default();
        let raw = line.trim_end_matches([' ', '~', '{', '$', '(']);
        let text = self.text_before();
        if ends_with_relation(raw)
            || ends_with_operand(raw, self.number_text().starts_with(['-', '−']))
            || ends_with_function(raw)
            || ends_with_unsolved_side(raw)
            || FUNCTION_OF.is_match(raw)
            || self.is_argument()
            || (!self.formula && is_one_of_several(&text))
            || LISTED.is_match(line)
            || line.trim_end().ends_with("-(")
            || ADJACENT.is_match(line)
            || self.is_joined_to_digits(-1)
        {
            return false;
        }
        if QUOTIENT.is_match(line) || self.continues_measure(line) {
            return false;
        }
        // A part of a ratio or a time: `3 : 42`, `3:42`, but not "3: 42".
        let ends_in_digit = |text: &str| text.ends_with(|c: char| c.is_ascii_digit());
        if line.trim_end().strip_suffix(" :").is_some_and(ends_in_digit)
            || (line.ends_with(':') && ends_in_digit(line.trim_end_matches(':')))
        {
            return false;
        }
        let plain = without_latex(line);
        if doubts::effect_of_preceding_words(&plain).is_some()
            || doubts::states_failure_before(&text)
            || doubts::is_number_supposed(&text, &self.text_after(self.range.end))
        {
            return false;
        }
        let sentence = plain.rsplit(['.', ';', '!', '?', ',']).next().unwrap_or_default();
        match languages::change_before_number(sentence) {
            Some(NumberChange::NoValue) => return false,
            Some(NumberChange::Negates) => {
                change.factor = change.factor.take().map(Rational::negate)
            }
            None => {}
        }
        // Words belong to the number only if spaces, quotes, brackets or hyphens separate them from
        // it.
        if !sentence.is_empty() && !sentence.ends_with([' ', '*', '(', '"', '\'', '-']) {
            return true;
        }
        let words: Vec<&str> = sentence
            .split(|c: char| c.is_whitespace() || c == '*')
            .filter(|w| !w.is_empty())
            .collect();
        let lower: Vec<String> = words
            .iter()
            .map(|word| word.trim_matches(|c: char| !c.is_alphanumeric()).to_lowercase())
            .collect();
        let lower: Vec<&str> = lower.iter().map(String::as_str).collect();
        let Some((last, rest)) = lower.split_last() else { return true };
        let is_number = |word: Option<&&str>| {
            word.is_some_and(|word| {
                word.contains(|c: char| c.is_ascii_digit()) || words::word_to_number(word).is_some()
            })
        };
        if ["minus", "negative"].contains(last) {
            // `5 minus 3` is an unevaluated expression.
            if is_number(rest.last()) {
                return false;
            }
            change.factor = change.factor.take().map(Rational::negate);
            let sentence = line.to_lowercase();
            let back = sentence.rfind(last).map_or(0, |at| line[at..].chars().count());
            change.range.start = self.range.start - back;
            return true;
        }
        if let Some(factor) = words::multiplier_factor(last) {
            change.factor =
                change.factor.take().and_then(|one| one.times(&Rational::from(factor as i64)));
            return true;
        }
        let is_part = |word: &&str| {
            word.rsplit('-').next().is_some_and(|part| words::denominator_of_word(part).is_some())
        };
        if *last == "of" && rest.last().is_some_and(is_part) {
            return false;
        }
        if JOINS.contains(last) && is_number(rest.last()) {
            return false;
        }
        // `5 to the 42` is a power.
        if *last == "the" && rest.ends_with(&["to"]) && is_number(rest.iter().rev().nth(1)) {
            return false;
        }
        // Guesses: `5 or maybe 6`; `4, 5, or 6`.
        let line_words: Vec<&str> = plain.split_whitespace().collect();
        let is_guess = |pair: &[&str]| {
            pair[1].trim_end_matches(',').eq_ignore_ascii_case("or")
                && pair[0].trim_end_matches([',', ';', '$']).ends_with(|c: char| c.is_ascii_digit())
        };
        let is_other = |word: &&str| word.ends_with([';', ':', '.']);
        let own = line_words
            .iter()
            .rposition(is_other)
            .filter(|at| line_words[at + 1..].first() != Some(&"or"));
        if line_words[own.map_or(0, |at| at + 1)..].windows(2).rev().take(3).any(is_guess) {
            return false;
        }
        if *last == "by" && rest.last() == Some(&"divided") {
            return false;
        }
        if *last == "of" && rest.ends_with(&["out"]) && is_number(rest.iter().rev().nth(1)) {
            return false;
        }
        if *last == "and" && rest.iter().rev().take(5).any(|word| *word == "between") {
            return false;
        }
        if !is_number(rest.last()) {
            return true;
        }
        // A ratio or an operand: `1 in 6`, `the sum of 3 and 5`.
        let is_operation = |word: &&str| {
            ["sum", "product", "difference", "quotient", "ratio", "lcm", "gcd"].contains(word)
        };
        let reach = lower.len().saturating_sub(6);
        let is_operand = *last == "and" && lower[reach..].iter().any(is_operation);
        *last != "in" && !is_operand
    }

    /// Applies the text after the number to `change`. Returns whether the number keeps a value.
    fn apply_text_after(&self, change: &mut NumberEffect) -> bool {
        let mut end = self.range.end;
        if self.char_at(end) == Some('_')
            && self.char_at(end + 1).is_some_and(|c| c.is_ascii_digit() || c == '{')
        {
            let braced = usize::from(self.char_at(end + 1) == Some('{'));
            let digits: String = self.chars[end + 1 + braced..]
                .iter()
                .take_while(|c| c.is_ascii_digit())
                .take(3)
                .collect();
            change.base = digits.parse().ok();
            return change.base.is_some();
        }
        let number = self.number_text();
        // In `$42$`, the sign marks a formula.
        let is_formula = self.char_at(end) == Some('$');
        let currency = number.chars().find(|c| "$€£¥₹".contains(*c)).filter(|_| !is_formula);
        if let Some(units) = currency.and_then(|sign| words::parse_units(&sign.to_string())) {
            units.into_iter().for_each(|(unit, power)| change.about.add_unit(unit, power));
        }
        // Suffixes of magnitude: `5k`, `$5M`.
        if let Some(letter) = self.char_at(end).filter(|c| "kKMBmbT".contains(*c))
            && !self.char_at(end + 1).is_some_and(|c| c.is_alphanumeric() || c == '^')
        {
            let is_amount = currency.is_some() || letter == 'k';
            if let (true, Some(factor)) = (is_amount, words::money_factor(&letter.to_string())) {
                change.range.end = end + 1;
                return self.multiply_value(change, factor);
            }
            if "KMBT".contains(letter) {
                return false;
            }
        }
        let stop = (end + REACH).min(self.chars.len());
        let line: String = self.chars[end..stop].iter().take_while(|c| **c != '\n').collect();
        if line.starts_with(':') && line[1..].starts_with(|c: char| c.is_ascii_digit()) {
            return false;
        }
        if starts_operation(&line)
            || starts_relation(&line)
            || starts_factor(&line)
            || self.is_joined_to_digits(1)
        {
            return false;
        }
        if REMAINDER.is_match(&line) || (!self.formula && starts_with_ordinal_suffix(&line)) {
            return false;
        }
        // Closing marks do not separate the number from the words after it.
        let opened: String =
            self.chars[self.range.start.saturating_sub(REACH)..self.range.end].iter().collect();
        end += count_closing_marks(&opened, &line);
        let line: String =
            self.chars[end.min(stop)..stop].iter().take_while(|c| **c != '\n').collect();
        if LARGE_PART.is_match(&line) || REMAINDER.is_match(&line) {
            return false;
        }
        let part = PART.captures(&line).map(|found| found[1].to_lowercase());
        if let Some(bottom) = part.as_deref().and_then(denominator_in_words) {
            let part = Rational::from(1).divide(&Rational::from(bottom));
            change.factor = change.factor.take().zip(part).and_then(|(own, part)| own.times(&part));
        }
        // Words of magnitude.
        while let Some((word, next)) = self.next_word(end) {
            let length = word.chars().count();
            let full_magnitude = words::magnitude_factor(&word).map(|factor| (factor, length));
            let leading = || languages::leading_magnitude_factor(&word).map(|factor| (factor, 1));
            let Some((factor, used)) = full_magnitude.or_else(leading) else { break };
            if !self.multiply_value(change, factor) {
                return false;
            }
            end = next - (length - used);
            change.range.end = end;
        }
        let rest: String =
            self.chars[end.min(stop)..stop].iter().take_while(|c| **c != '\n').collect();
        if let Some((bottom, used)) = words::fraction_after_number(rest.trim_start()) {
            let part = Rational::from(1).divide(&Rational::from(bottom));
            change.factor = change.factor.take().zip(part).and_then(|(own, part)| own.times(&part));
            let used = &rest[..rest.len() - rest.trim_start().len() + used];
            change.range.end = end + used.chars().count();
            return change.factor.is_some()
                && !doubts::is_retracted_after(&rest[used.len()..], true);
        }
        let plain = without_latex(&rest);
        let is_mil = plain.trim_start().split(|c: char| !c.is_alphabetic()).next() == Some("mil");
        if is_mil
            || languages::starts_with_joined_number(&plain)
            || bounds::unspaced_bound_after_number(plain.trim_start()).is_some()
            || doubts::is_retracted_after(&self.text_after(end), true)
            || doubts::is_doubted_after(&rest)
        {
            return false;
        }
        let sentence = plain.split(". ").next().unwrap_or_default();
        add_leading_units(sentence, &mut change.about);
        let words: Vec<String> = sentence
            .split(|c: char| !c.is_alphanumeric() && c != '\'')
            .filter(|word| !word.is_empty())
            .map(str::to_lowercase)
            .take(6)
            .collect();
        for word in words.iter().take(3) {
            if let Some(direction) = words::direction_kind(word) {
                change.about.directions.push(direction);
            }
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let is_guess = |at: usize| {
            let next = words.get(at + 1);
            words[at] == "or"
                && next.is_some_and(|next| {
                    next.starts_with(|c: char| c.is_ascii_digit())
                        || words::word_to_number(next).is_some()
                })
        };
        // Bounds: `5 or more`, `5 people at least`. A single word after a noun is ignored, because
        // it can belong to the text that follows.
        let reach = sentence.split([',', ';', '(', ':', '=']).next().unwrap_or_default();
        let reach = reach
            .split(|c: char| !c.is_alphanumeric() && c != '\'')
            .filter(|word| !word.is_empty())
            .count();
        let bounds = (0..words.len().min(3)).any(|at| {
            let bound = bounds::bound_phrase_after_number(&words[at..]).filter(|_| at < reach);
            bound.is_some_and(|(_, length)| at == 0 || length > 1) || is_guess(at)
        });
        let is_half = words.len() > 2
            && words[0] == "and"
            && (words::denominator_of_word(words[2]).is_some() || words[1] == "half");
        let is_function = ["squared", "cubed", "factorial", "doubled", "tripled", "halved"]
            .contains(words.first().unwrap_or(&""))
            || words.first() == Some(&"pi")
            || (words.first() == Some(&"in")
                && words
                    .get(1)
                    .is_some_and(|base| ["binary", "octal", "hexadecimal"].contains(base)));
        let times = ["am", "pm", "a", "p"].contains(words.first().unwrap_or(&""))
            && (words[0].len() == 2 || words.get(1) == Some(&"m"));
        let below = words.windows(2).take(3).any(|pair| pair == ["below", "zero"]);
        if below {
            change.factor = change.factor.take().map(Rational::negate);
        }
        !bounds && !times && !is_function && !is_half
    }

    /// Returns up to 320 characters before the number: its sentence and the previous sentence.
    fn text_before(&self) -> String {
        self.chars[self.range.start.saturating_sub(4 * REACH)..self.range.start].iter().collect()
    }

    /// Returns whether the number is the argument of a function with a one-letter name, or a factor
    /// in brackets: `f(42)`, `2(42)`.
    fn is_argument(&self) -> bool {
        let mut at = self.range.start;
        while at > 0 && matches!(self.chars[at - 1], ' ' | '$') {
            at -= 1;
        }
        let Some(open) = at.checked_sub(1).filter(|open| self.chars[*open] == '(') else {
            return false;
        };
        let before =
            |steps: usize| open.checked_sub(steps).and_then(|at| self.char_at(at)).unwrap_or(' ');
        let closes =
            self.chars[self.range.end..].iter().find(|c| !matches!(c, ' ' | '$')) == Some(&')');
        let is_letter =
            before(1).is_ascii_alphabetic() && !before(2).is_alphanumeric() && before(2) != '\\';
        closes && (is_letter || before(1) == ')' || before(1).is_ascii_digit())
    }

    /// Returns whether the number continues a measure in a larger unit: `1 hour and 42 minutes`.
    fn continues_measure(&self, line: &str) -> bool {
        let found = MEASURE.captures(line);
        let Some(large) = found.and_then(|found| {
            found.get(1).or_else(|| found.get(2)).map(|unit| unit.as_str().to_owned())
        }) else {
            return false;
        };
        let after: String =
            self.chars[self.range.end..].iter().take(REACH).take_while(|c| **c != '\n').collect();
        let after = without_latex(&after);
        let after = after.trim_start_matches([' ', '*']);
        // Degrees and minutes of arc, such as 1°42'.
        if large == "°" && after.starts_with(['\'', '"']) {
            return true;
        }
        let small: String = after.chars().take_while(|c| c.is_alphabetic()).collect();
        words::can_follow_in_measure(&small, &large)
    }

    /// Returns up to 320 characters of the text from the index `end`.
    fn text_after(&self, end: usize) -> String {
        self.chars[end..self.chars.len().min(end + 4 * REACH)].iter().collect()
    }

    /// Returns whether a comma or a point joins the number to other digits without a space, as in a
    /// decimal comma, a list or a version. `side` is -1 for digits before the number and 1 for
    /// digits after it.
    fn is_joined_to_digits(&self, side: isize) -> bool {
        let edge = if side < 0 { self.range.start } else { self.range.end.saturating_sub(1) };
        let neighbor = |steps: isize| self.char_at(edge.checked_add_signed(steps * side)?);
        matches!(neighbor(1), Some(',' | '.')) && neighbor(2).is_some_and(|c| c.is_ascii_digit())
    }

    fn multiply_value(&self, change: &mut NumberEffect, factor: u64) -> bool {
        let factor = Rational::new(i128::from(factor), 1);
        change.factor =
            change.factor.take().zip(factor).and_then(|(own, factor)| own.times(&factor));
        change.factor.is_some()
    }

    /// Returns the word at or after the index `at`, and the index of its end. Spaces, hyphens and
    /// LaTeX markup before the word are skipped.
    fn next_word(&self, at: usize) -> Option<(String, usize)> {
        let rest: String = self.chars[at..self.chars.len().min(at + REACH)].iter().collect();
        let mut text = rest.as_str();
        loop {
            let before = text;
            for space in [
                " ",
                "~",
                "\\,",
                "\\ ",
                "\\;",
                "\\text{",
                "\\textrm{",
                "\\mathrm{",
                "\\mbox{",
                "$",
                "-",
                "}",
            ] {
                text = text.strip_prefix(space).unwrap_or(text);
            }
            if text == before {
                break;
            }
        }
        // In Hindi, nukta and virama are parts of a word.
        let is_letter = |c: &char| c.is_alphabetic() || matches!(c, '\u{93c}' | '\u{94d}');
        let word: String = text.chars().take_while(is_letter).collect();
        let skipped = rest.chars().count() - text.chars().count();
        (!word.is_empty()).then(|| (word.clone(), at + skipped + word.chars().count()))
    }

    /// Returns whether the number is one of several numbers in brackets: a pair (also `(1,234)`),
    /// an interval or a set.
    fn is_in_tuple(&self) -> bool {
        let inner = |c: &char| c.is_ascii_digit() || " .,;-−+/\\{}$^_∞πfractdqopi".contains(*c);
        let before = self.chars[..self.range.start].iter().rev().take(REACH);
        let open = before.enumerate().find(|(_, c)| !inner(c) || "{".contains(**c));
        let close = self.chars[self.range.end..]
            .iter()
            .take(REACH)
            .enumerate()
            .find(|(_, c)| !inner(c) || "}".contains(**c));
        let (Some((back, open)), Some((ahead, close))) = (open, close) else { return false };
        let is_bracket = matches!((open, close), ('(' | '[', ')' | ']') | ('{', '}'));
        let from = self.range.start - back;
        let to = self.range.end + ahead;
        // The braces enclose a set, not an argument.
        let is_braced = || from < 2 || self.chars[from - 2] == '\\' || self.chars[from - 2] == ' ';
        let is_set = *open != '{' || is_braced();
        let inside: String = self.chars[from..to].iter().collect();
        is_bracket && is_set && inside.contains([',', ';'])
    }

    /// Returns whether the number is an element of a LaTeX matrix, next to `&` or `\\`.
    fn is_in_matrix(&self) -> bool {
        let before: String = self.chars[..self.range.start].iter().rev().take(REACH).collect();
        let before = before.trim_start();
        let after: String = self.chars[self.range.end..].iter().take(REACH).collect();
        let after = after.trim_start();
        before.starts_with('&')
            || before.starts_with("\\\\")
            || after.starts_with('&')
            || after.starts_with("\\\\")
    }
}

#[cfg(test)]
#[path = "context_tests.rs"]
mod tests;
