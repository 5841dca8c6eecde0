//! Compares mathematical answers by their meaning.
//!
//! Answers are LaTeX or plain text: fractions, mixed numbers, decimals, powers, roots, π, e and i,
//! polynomials and other expressions in variables, percent, units, ±, lists, sets, tuples,
//! intervals and their unions, matrices, equations and inequalities, choices, words.
//!
//! The answer and the expected answer pass the same stages: characters, tokens, phrases (`phrases`:
//! numbers in words, magnitudes, signs), quantities (`quantity`: a value without its bounds, units
//! and names), shapes (`answer`), equality (`equal`). Values that can be computed exactly are
//! compared in a finite field ([`field`]). That comparison is exact except for a probability of
//! 2^-50, and its time does not grow with the expansion of an expression. Other values are compared
//! in floating point at fixed points.
//!
//! # Guarantees
//! - **Bounded.** Time and memory are bounded by the length of an answer, whatever its content.
//! - **Unparsed answers** are correct only if they are written like the expected answer.

mod answer;
mod approximate;
mod clock;
mod digits;
mod equal;
mod expression;
mod extract;
mod field;
mod lexer;
mod matrix;
mod members;
mod names;
mod parser;
mod phrases;
mod plus_minus;
mod quantity;
mod region;
mod series;
mod statement;
mod time;

use std::sync::LazyLock;

use async_trait::async_trait;
use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::characters::normalize_characters;
use crate::chunks::strip_text_markup;
use crate::languages;
use crate::pattern::pattern;
use crate::scorer::{answer_components, expected};
use crate::{Component, Score, ScoreError, Scorer, ScorerInput};
use answer::parse_interpretations;
use equal::ComparisonRules;
pub use extract::MathsLocation;
pub(crate) use extract::{
    first_sentence_of_line, last_boxes_content, text_after_announcement, to_readable_text,
};
pub(crate) use statement::extract_statement;

/// Scores 1 if the answer means the same as an expected answer, else 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MathsScorer {
    /// Location of the answer in the completion's text.
    #[serde(alias = "place")]
    pub location: MathsLocation,
    /// Treatment of units and other words next to a value in the comparison.
    pub units: Units,
    /// Treatment of percent signs in the comparison.
    pub percent: Percent,
    /// Number of decimals for comparing a number with a decimal point, in 0..=12. The number is
    /// correct if its error is at most half a unit of this decimal, and at most a thousandth of its
    /// value. 0 requires equality. The default is 6.
    pub decimals: u32,
}

/// Treatment of units and other words next to a value, when two answers are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Units {
    /// Units are ignored: 5 cm equals 5, and 90° equals 90.
    #[default]
    Strip,
    /// Units are compared by name: 5 cm differs from 5 m.
    Compare,
}

/// Treatment of percent signs when two answers are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Percent {
    /// 50% equals both 0.5 and 50.
    #[default]
    Either,
    /// 50% equals only 0.5.
    Value,
}

impl Default for MathsScorer {
    fn default() -> Self {
        MathsScorer {
            location: MathsLocation::default(),
            units: Units::default(),
            percent: Percent::default(),
            decimals: 6,
        }
    }
}

/// Maximum value of `decimals`, given the precision of floating point.
const DECIMALS: u32 = 12;

#[async_trait]
impl Scorer for MathsScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        self.grade("", expected(task)).map(drop)
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        answer_components(input, self.grade(input.text(), input.expected()))
    }
}

impl MathsScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        if self.decimals <= DECIMALS {
            return Ok(());
        }
        let what = format!("decimals = {}, but it must be in 0..={DECIMALS}", self.decimals);
        Err(ScoreError::Unusable(what))
    }

    /// Grades a final text against the expected answer: a text in LaTeX or plain text (its
    /// `\boxed{…}`, else the text after its `####`, else all of it), a number, or a list of these,
    /// any of which is correct.
    ///
    /// # Errors
    /// Returns an error if `expected` has no answer, or if `decimals` is out of range. The content
    /// of `text` never causes an error.
    pub fn grade(&self, text: &str, expected: &Value) -> Result<Score, ScoreError> {
        self.check()?;
        let golds = expected_texts(expected)?;
        let Some(found) = self.location.extract_answer(text) else {
            return Ok(Score { value: 0.0, extracted: None });
        };
        let is_correct = golds.iter().any(|gold| {
            if is_score_or_range(gold) {
                are_written_alike(gold, &found)
            } else {
                self.is_same(gold, &found)
            }
        });
        Ok(Score { value: f64::from(u8::from(is_correct)), extracted: Some(found) })
    }

    /// Returns whether an answer means the same as an expected answer.
    pub fn is_same(&self, expected: &str, answer: &str) -> bool {
        let expected = strip_text_markup(&normalize_characters(expected));
        let answer = strip_text_markup(&normalize_characters(answer));
        let plain_expected = strip_formula_markup(&expected);
        if plain_expected == strip_formula_markup(&answer) {
            return !plain_expected.is_empty();
        }
        // The constant of integration can be written in lower case: x^2 + c.
        if plain_expected.ends_with("+C")
            && strip_formula_markup(&answer).ends_with("+c")
            && let Some((before, after)) = answer.rsplit_once('c')
        {
            return self.is_same(&expected, &format!("{before}C{after}"));
        }
        let rules = ComparisonRules {
            decimals: Some(self.decimals).filter(|decimals| *decimals > 0),
            percent_or_number: self.percent == Percent::Either,
            units: self.units == Units::Compare,
        };
        let is_read = {
            let expected = parse_interpretations(&expected);
            let answer = parse_interpretations(&answer);
            expected
                .iter()
                .any(|expected| answer.iter().any(|answer| rules.is_same_answer(expected, answer)))
        };
        // Parses numbers in Chinese words, and amounts such as 40k if the expected answer has no
        // variables.
        let written = |text: &str| languages::chinese_number_to_digits(&strip_formula_markup(text));
        let short = || {
            expand_magnitude_letter(&strip_formula_markup(&answer))
                .filter(|_| !expected.contains(char::is_alphabetic))
        };
        // In a list or a pair, C(10,3) is a point.
        let counted = |text: &str, other: &str| {
            combinations_to_binomials(text).filter(|_| !other.contains(','))
        };
        if !is_read && let Some(counted) = counted(&answer, &expected) {
            return self.is_same(&expected, &counted);
        }
        if !is_read && let Some(counted) = counted(&expected, &answer) {
            return self.is_same(&counted, &answer);
        }
        is_read
            || match (written(&expected), written(&answer).or_else(short)) {
                (None, None) => false,
                (gold, own) => self.is_same(
                    gold.as_deref().unwrap_or(&expected),
                    own.as_deref().unwrap_or(&answer),
                ),
            }
    }
}

/// Rewrites the numbers of combinations in a text as binomials: C(10,3), `_{10}C_3` and 10C3 become
/// `\binom{10}{3}`. Returns `None` if the text has no combinations.
fn combinations_to_binomials(text: &str) -> Option<String> {
    let binomial = |found: &Captures<'_>| {
        let mut numbers = found.iter().skip(1).flatten().map(|number| number.as_str());
        format!("\\binom{{{}}}{{{}}}", numbers.next().unwrap_or(""), numbers.next().unwrap_or(""))
    };
    COMBINATIONS.is_match(text).then(|| COMBINATIONS.replace_all(text, binomial).into_owned())
}

static COMBINATIONS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"\bC\(\s*(\d+)\s*,\s*(\d+)\s*\)|(?:\{\}\s*)?[_^]\{?(\d+)\}?\s*C_\{?(\d+)\}?",
        r"|\b(\d+)\s*C\s*\{?(\d+)\}?",
    ))
});

/// Returns whether a text is two integers joined by a hyphen or a dash: the score of a match, a
/// range of years, a phone number. As an expected answer, such a text is not a difference.
fn is_score_or_range(text: &str) -> bool {
    let is_integer =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.trim()
        .split_once(['-', '–'])
        .is_some_and(|(first, last)| is_integer(first) && is_integer(last))
}

/// Returns whether two texts are equal except for the kind of dash.
fn are_written_alike(expected: &str, answer: &str) -> bool {
    let dashed = |text: &str| {
        strip_formula_markup(&strip_text_markup(&normalize_characters(text)))
            .replace(['–', '−'], "-")
    };
    dashed(expected) == dashed(answer)
}

/// Expands a number with a magnitude letter, such as 40k or 2.5M, to its digits. Returns `None` for
/// any other text.
fn expand_magnitude_letter(text: &str) -> Option<String> {
    let power = match text.chars().next_back()? {
        'k' | 'K' => 3,
        // 1M without a decimal point may have another meaning.
        'M' if text.contains('.') => 6,
        _ => return None,
    };
    let digits = &text[..text.len() - 1];
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit())
        && digits.ends_with(|c: char| c.is_ascii_digit())
        && digits.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    is_number.then(|| format!("{digits}e{power}"))
}

/// Returns an answer as it is written, without spaces, formula delimiters and LaTeX text commands.
fn strip_formula_markup(text: &str) -> String {
    let mut text = text.trim().trim_end_matches('.').replace("\\left", "").replace("\\right", "");
    while let Some((before, (inside, after))) =
        text.split_once("\\text{").and_then(|(before, rest)| Some((before, rest.split_once('}')?)))
    {
        text = format!("{before}{inside}{after}");
    }
    let mut out = String::with_capacity(text.len());
    let mut spaced = false;
    for c in text.chars().filter(|c| *c != '$') {
        if c.is_whitespace() {
            spaced = true;
            continue;
        }
        // Keeps two numbers separate.
        if spaced && c.is_ascii_digit() && out.ends_with(|c: char| c.is_ascii_digit()) {
            out.push(' ');
        }
        spaced = false;
        out.push(c);
    }
    out
}

/// Returns the texts of the expected answers of a task.
fn expected_texts(expected: &Value) -> Result<Vec<String>, ScoreError> {
    let text = |value: &Value| match value {
        Value::String(text) => {
            let after_hashes =
                || text.rfind("####").map_or(text.as_str(), |at| &text[at + "####".len()..]);
            Some(
                extract::last_boxes_content(text)
                    .unwrap_or_else(|| after_hashes().trim().to_owned()),
            )
        }
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    };
    let found: Option<Vec<String>> = match expected {
        Value::Array(several) => several.iter().map(text).collect(),
        one => text(one).map(|text| vec![text]),
    };
    found
        .filter(|found| !found.is_empty() && found.iter().all(|gold| !gold.is_empty()))
        .ok_or_else(|| ScoreError::ExpectedText { expected: expected.to_string() })
}

#[cfg(test)]
mod tests;
