//! Scores multiple choice: the answer is the letter of an option, or its text.

mod called;
#[cfg(test)]
mod metamorphic_tests;
mod named;
mod options;
mod patterns;
mod plain;
mod words;

use std::sync::LazyLock;

use async_trait::async_trait;
use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::options::ChoiceOptions;
pub use self::options::{OPTION_LABELS, OPTION_TEXTS, split_letters};
use crate::pattern::pattern;
use crate::scorer::{answer_components, expected};
use crate::short::normalize;
use crate::{Component, Score, ScoreError, Scorer, ScorerInput};

/// Scores 1 if the option that the answer names is the expected one, else 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChoiceScorer {
    /// Number of options, labeled from A on, for tasks that do not list their own. In 2..=26; the
    /// default is 4.
    pub options: usize,
}

impl Default for ChoiceScorer {
    fn default() -> Self {
        ChoiceScorer { options: 4 }
    }
}

/// Maximum number of options without labels: one for each letter of the alphabet.
const LETTERS: usize = 26;

#[async_trait]
impl Scorer for ChoiceScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        let options = ChoiceOptions::from_task(task);
        self.grade("", expected(task), &options).map(drop)
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let options = ChoiceOptions::from_task(&input.task);
        answer_components(input, self.grade(input.text(), input.expected(), &options))
    }
}

/// Converts a JSON value to text. A string is trimmed, and any other value becomes JSON text.
fn value_to_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), |text| text.trim().to_owned())
}

impl ChoiceScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        if (2..=LETTERS).contains(&self.options) {
            Ok(())
        } else {
            Err(ScoreError::Unusable(format!(
                "options = {}, but it must be in 2..={LETTERS}",
                self.options
            )))
        }
    }

    /// Grades a final text against the expected option, which is given as its letter, its index
    /// from 0, or its text if `options` has texts. If the options have labels, only these labels
    /// name options.
    ///
    /// # Errors
    /// Returns an error if the expected answer does not name an option.
    pub(crate) fn grade(
        &self,
        text: &str,
        expected: &Value,
        options: &ChoiceOptions,
    ) -> Result<Score, ScoreError> {
        self.check()?;
        let count = options.count_or(self.options);
        let want = match expected {
            Value::Number(number) => {
                let is_numbered = options.labels.iter().any(|label| label.parse::<f64>().is_ok());
                let position = || number.as_u64().filter(|_| !is_numbered).map(|at| at as usize);
                options.index_of_label(number.as_str()).or_else(position)
            }
            Value::String(text) => {
                let bare = text.trim().trim_matches(['(', ')', '.']).trim();
                // Datasets store numbers as text.
                let number = || bare.parse::<usize>().ok().filter(|_| options.labels.is_empty());
                let label = options.index_of_label(bare).or_else(|| options.index_of_letter(bare));
                label.or_else(|| find_option_by_text(bare, &options.texts)).or_else(number)
            }
            _ => None,
        };
        let want = want.filter(|want| *want < count).ok_or_else(|| {
            ScoreError::Unusable(format!(
                "the expected answer {expected} is not one of the {count} options: give its {}",
                if options.labels.is_empty() { "letter" } else { "label" }
            ))
        })?;
        let Some((found, extracted)) = named::find_named_option(text, count, options) else {
            return Ok(Score { value: 0.0, extracted: None });
        };
        Ok(Score { value: f64::from(u8::from(found == want)), extracted: Some(extracted) })
    }
}

/// Returns the index of the option that a letter names: 0 for A. Returns `None` unless the text is
/// a single letter.
fn letter_index(text: &str) -> Option<usize> {
    let mut chars = text.chars();
    let first = chars.next()?.to_ascii_uppercase();
    (first.is_ascii_uppercase() && chars.next().is_none()).then(|| (first as u8 - b'A') as usize)
}

/// Returns the index of the option whose text equals `text`, if there is exactly one such option.
fn find_option_by_text(text: &str, options: &[String]) -> Option<usize> {
    let normal = normalize(text);
    let exact = normalize_number_text(text);
    // "C++" and "C" are equal after normalization.
    let mut written =
        options.iter().enumerate().filter(|(_, option)| normalize_number_text(option) == exact);
    if let (Some((found, _)), None) = (written.next().filter(|_| !exact.is_empty()), written.next())
    {
        return Some(found);
    }
    let is_same = |option: &String| {
        // Signs and decimal points, which normalization removes, belong to numbers.
        let has_digits = option.contains(|c: char| c.is_ascii_digit());
        normalize(option) == normal && (!has_digits || normalize_number_text(option) == exact)
    };
    let mut same = options.iter().enumerate().filter(|(_, option)| is_same(option));
    let found = same.next().filter(|_| !normal.is_empty())?;
    same.next().is_none().then_some(found.0)
}

/// Returns the index of the only option that consists of this number and a unit, if all options are
/// numbers with the same unit: 20 names the option "20 m".
fn find_option_by_number(text: &str, options: &[String]) -> Option<usize> {
    let is_digit = |c: char| c.is_ascii_digit() || matches!(c, '-' | '.');
    let number = normalize_number_text(text);
    let split = |option: &String| {
        let option = normalize_number_text(option);
        let end = option.find(|c: char| !is_digit(c))?;
        Some((option[..end].to_owned(), option[end..].to_owned()))
    };
    let split: Vec<(String, String)> = options.iter().map(split).collect::<Option<_>>()?;
    let (_, unit) = split.first()?;
    let is_unit = unit.chars().all(|c| c.is_alphabetic() || matches!(c, '%' | '°' | '.'))
        && split.iter().all(|(_, other)| other == unit);
    let is_number = number.contains(|c: char| c.is_ascii_digit()) && number.chars().all(is_digit);
    let mut same = split.iter().enumerate().filter(|(_, (own, _))| *own == number);
    let (found, _) = same.next().filter(|_| is_number && is_unit)?;
    same.next().is_none().then_some(found)
}

/// Returns a text in lower case, without thousands separators, without spaces (except between
/// digits), and without characters that mean nothing next to a number.
fn normalize_number_text(text: &str) -> String {
    let text = text.trim().trim_end_matches('.').replace(['−', '–'], "-").to_lowercase();
    let text = THOUSANDS.replace_all(&text, |found: &Captures<'_>| found[0].replace(',', ""));
    let kept = text.char_indices().filter(|(at, c)| {
        let is_digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
        let parts = || {
            is_digit(text[..*at].trim_end().chars().last())
                && is_digit(text[*at..].trim_start().chars().next())
        };
        (!c.is_whitespace() || parts())
            && !matches!(c, '$' | '{' | '}' | '*' | '`' | '"' | '(' | ')')
    });
    kept.map(|(_, c)| c).collect()
}

static THOUSANDS: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b\d{1,3}(?:,\d{3})+\b"));

#[cfg(test)]
mod tests;
