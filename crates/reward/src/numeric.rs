//! Scores a numeric answer against the expected number.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::box_context::{answer_in_context, is_boxed_answer_retracted};
use crate::boxed::{last_box_content, last_box_with_range, parse_only_number};
use crate::characters::normalize_characters;
use crate::context::without_latex;
use crate::maths::{
    extract_statement, first_sentence_of_line, last_boxes_content, text_after_announcement,
    to_readable_text,
};
use crate::numbers::{self, NumberMatch};
use crate::scorer::{answer_components, expected};
use crate::unsettled::{is_unsettled_after, is_unsettled_before};
use crate::{Component, Rational, Score, ScoreError, Scorer, ScorerInput};

/// Location of a numeric answer in the completion's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumberLocation {
    /// The answer is the last number of the text.
    #[default]
    LastNumber,
    /// The answer is the first number after the last `####`, on the same line (the format of
    /// GSM8K).
    Hashes,
    /// The answer is the number in the last `\boxed{…}`. A box with several numbers, or with an
    /// expression that would have to be computed, has no answer.
    Boxed,
    /// The answer is the first number after the last "answer is", including in other languages, on
    /// the same line or the next.
    AnswerIs,
}

/// Criterion by which a number matches the expected number. An expected integer must always be
/// matched exactly.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Tolerance {
    /// The values must be equal: 0.5, .50 and 1/2 are the same number.
    #[default]
    Exact,
    /// The answer, rounded to the decimals of the expected number, must equal the expected number:
    /// 3.1416 matches 3.14.
    AsWritten,
    /// The difference must be small: |answer − expected| ≤ max(absolute, relative × |expected|).
    Within {
        /// Maximum absolute difference from the expected number, at least 0.
        absolute: f64,
        /// Maximum difference relative to the expected number, at least 0.
        relative: f64,
    },
}

/// Scores 1 if the text's final number is the expected one, else 0.
///
/// The caller passes only the text of the final assistant message, so numbers in tool calls and
/// tool results never count.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NumericScorer {
    /// Location of the number in the completion's text.
    pub extract: NumberLocation,
    /// Criterion by which the number matches the expected number.
    pub tolerance: Tolerance,
}

#[async_trait]
impl Scorer for NumericScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        self.grade("", expected(task)).map(drop)
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        answer_components(input, self.grade(input.text(), input.expected()))
    }
}

impl NumericScorer {
    /// Grades a final text against the expected answer: a JSON number, a text that contains one
    /// number (`"1,234"`), or a list of these, any of which is correct.
    ///
    /// # Errors
    /// Returns an error if an expected answer is not a single number that can be compared exactly,
    /// or if a tolerance is negative or not finite. The content of `text` never causes an error: if
    /// it cannot be parsed, the score is 0.
    pub fn grade(&self, text: &str, expected: &Value) -> Result<Score, ScoreError> {
        self.check()?;
        let targets = parse_expected_numbers(expected)?;
        let Some(found) = self.find_answer_number(text) else {
            return Ok(Score { value: 0.0, extracted: None });
        };
        let is_correct = targets.iter().any(|target| self.accepts_number(&found, target));
        Ok(Score { value: if is_correct { 1.0 } else { 0.0 }, extracted: Some(found.text) })
    }

    /// Checks the tolerances of the scorer.
    ///
    /// # Errors
    /// Returns [`ScoreError::Tolerance`] if a tolerance is negative or not finite.
    pub fn check(&self) -> Result<(), ScoreError> {
        if let Tolerance::Within { absolute, relative } = self.tolerance {
            for (name, value) in [("absolute", absolute), ("relative", relative)] {
                if !(value.is_finite() && value >= 0.0) {
                    return Err(ScoreError::Tolerance { name, value });
                }
            }
        }
        Ok(())
    }

    fn find_answer_number(&self, text: &str) -> Option<NumberMatch> {
        match self.extract {
            NumberLocation::LastNumber => numbers::last_number(text),
            NumberLocation::Hashes => {
                first_stated_number(&text[text.rfind("####")? + "####".len()..])
            }
            NumberLocation::AnswerIs => {
                let text = to_readable_text(text);
                let stated = text_after_announcement(&text)?;
                // The answer may be on the next line.
                let is_next =
                    stated.lines().next().is_some_and(|line| !line.contains(char::is_alphanumeric));
                first_stated_number(if is_next {
                    stated.trim_start_matches([':', ' ', '*', '\n'])
                } else {
                    stated
                })
            }
            NumberLocation::Boxed => {
                let (inside, range) = last_box_with_range(text)?;
                if is_boxed_answer_retracted(text, &range)
                    || last_boxes_content(text)? != inside.trim()
                {
                    return None;
                }
                let stated = answer_in_context(text, inside, &range)?;
                let is_digit = |c: char| c.is_ascii_digit();
                match stated.strip_suffix('k').filter(|amount| amount.ends_with(is_digit)) {
                    Some(amount) => parse_only_number(&format!("{amount} thousand")),
                    None => {
                        parse_only_number(&stated).filter(|found| is_number_settled(&stated, found))
                    }
                }
            }
        }
    }

    fn accepts_number(&self, found: &NumberMatch, expected: &NumberMatch) -> bool {
        let (Some(value), Some(target)) = (&found.value, &expected.value) else { return false };
        if !found.about.agrees_with(&expected.about) {
            return false;
        }
        if value == target {
            return true;
        }
        let decimals = expected.decimals;
        if target.is_integer() && decimals == 0 {
            return false;
        }
        let Some(distance) = value.minus(target).map(Rational::abs) else { return false };
        match self.tolerance {
            Tolerance::Exact => false,
            Tolerance::AsWritten => {
                // Half a unit of the last decimal, in either direction.
                let power =
                    i32::try_from(decimals).ok().and_then(|power| Rational::from(10).power(-power));
                let bound = power.and_then(|unit| unit.divide(&Rational::from(2)));
                decimals > 0 && bound.is_some_and(|bound| distance.compare(&bound).is_le())
            }
            Tolerance::Within { absolute, relative } => {
                distance.to_f64() <= absolute.max(relative * target.to_f64().abs())
            }
        }
    }
}

/// Returns whether the words next to the number in a `\boxed{…}` leave the number's value settled.
fn is_number_settled(inside: &str, found: &NumberMatch) -> bool {
    let inside = normalize_characters(inside);
    let Some((before, after)) = inside.split_once(&found.text) else { return true };
    !is_unsettled_before(&without_latex(before)) && !is_unsettled_after(&without_latex(after))
}

/// Parses one or several expected numbers.
fn parse_expected_numbers(expected: &Value) -> Result<Vec<NumberMatch>, ScoreError> {
    match expected {
        Value::Array(several) if !several.is_empty() => {
            several.iter().map(parse_expected_number).collect()
        }
        one => parse_expected_number(one).map(|one| vec![one]),
    }
}

/// Parses one expected number. A number without a value is an error.
fn parse_expected_number(expected: &Value) -> Result<NumberMatch, ScoreError> {
    let to_error = || ScoreError::Expected { expected: expected.to_string() };
    let text = match expected {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return Err(to_error()),
    };
    match parse_only_number(last_box_content(&text).unwrap_or(&text)) {
        Some(found) if found.value.is_some() => Ok(found),
        _ => Err(to_error()),
    }
}

/// Returns the first number of the first line. The number has no value if its sentence states more
/// than this number.
fn first_stated_number(text: &str) -> Option<NumberMatch> {
    let mut found = numbers::first_number_on_line(text)?;
    let line = text.lines().next()?;
    let sentence = first_sentence_of_line(line.trim_start_matches([':', ' ', '*', '_']));
    let sentence = truncate_at_addition(sentence);
    let stated = extract_statement(sentence);
    // In 12 = 3 × 4 and 2/3 ≈ 0.67, the number is the left side.
    let is_first = |at: &usize| stated[..*at].contains(|c: char| c.is_ascii_digit());
    let sign = stated.find(['=', '≈']).filter(is_first).unwrap_or(stated.len());
    // In 9 × 2 = 18, the number is the right side.
    let left = &stated[..sign];
    if numbers::count_numbers(left) > 1
        && !left.contains(char::is_alphabetic)
        && !left.contains(", ")
        && let Some((_, right)) = stated.rsplit_once('=')
        && numbers::count_numbers(right) == 1
    {
        return numbers::last_number(&stated);
    }
    // The context of the number does not include the text before the line.
    let start = line.trim_start_matches([':', ' ', '*', '_', '$']);
    let is_compared = start.starts_with("> ") || start.starts_with("< ");
    found.value.take_if(|_| is_compared || numbers::count_numbers(left) > 1);
    Some(found)
}

/// Truncates a sentence at a comma before another quantity: "72, 5 more" becomes "72".
fn truncate_at_addition(sentence: &str) -> &str {
    let adds = |text: &str| {
        let mut words = text.split_whitespace();
        let is_number =
            words.next().is_some_and(|word| word.starts_with(|c: char| c.is_ascii_digit()));
        let next = words.next().map(|word| word.trim_end_matches(['.', ',', '!', ')']));
        is_number
            && next
                .is_some_and(|next| ["more", "fewer", "less", "remaining", "each"].contains(&next))
    };
    let end = sentence.match_indices(", ").find(|(at, _)| adds(&sentence[at + 2..]));
    end.map_or(sentence, |(at, _)| &sentence[..at])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(
        extract: NumberLocation,
        tolerance: Tolerance,
        text: &str,
        expected: Value,
        value: f64,
        extracted: Option<&str>,
    ) {
        let score = NumericScorer { extract, tolerance }.grade(text, &expected).unwrap();
        assert_eq!(
            (score.value, score.extracted.as_deref()),
            (value, extracted),
            "{text:?} for {expected}"
        );
    }

    #[test]
    fn last_number_is_extracted() {
        let check = |text: &str, expected: Value, value: f64, extracted: Option<&str>| {
            check(NumberLocation::LastNumber, Tolerance::Exact, text, expected, value, extracted);
        };
        check("The answer is 1,234.50.", json!(1234.5), 1.0, Some("1,234.50"));
        check("48 + 24 = 72", json!("72"), 1.0, Some("72"));
        check("72, I think, not 71", json!("72"), 0.0, Some("71"));
        check("It is -7.", json!(-7), 1.0, Some("-7"));
        check("That makes $1,000!", json!("1,000"), 1.0, Some("$1,000"));
        check("3 / 4 of it", json!(0.75), 1.0, Some("3 / 4"));
        check("I do not know.", json!(3), 0.0, None);
        check("", json!(0), 0.0, None);
        check("7.0", json!(7), 1.0, Some("7.0"));
        check("9007199254740993", json!("9007199254740993"), 1.0, Some("9007199254740993"));
        check("9007199254740992", json!("9007199254740993"), 0.0, Some("9007199254740992"));
        check("5/0", json!(0), 0.0, Some("5/0"));
    }

    #[test]
    fn number_after_hashes_is_extracted() {
        let check = |text: &str, value: f64, extracted: Option<&str>| {
            check(NumberLocation::Hashes, Tolerance::Exact, text, json!(72), value, extracted);
        };
        check("48+24 = 72\n#### 72", 1.0, Some("72"));
        check("#### 71\nno:\n#### 72 clips (not 71)", 1.0, Some("72"));
        check("72", 0.0, None);
        check("####\n72", 0.0, None);
        check("72 ####", 0.0, None);
        check("#### $72.00", 1.0, Some("$72.00"));
    }

    #[test]
    fn boxed_number_is_extracted() {
        let check = |text: &str, expected: Value, value: f64, extracted: Option<&str>| {
            check(NumberLocation::Boxed, Tolerance::Exact, text, expected, value, extracted);
        };
        check("so \\boxed{72} and 5", json!(72), 1.0, Some("72"));
        check("\\boxed{1} then \\boxed{\\frac{3}{4}}", json!(0.75), 1.0, Some("\\frac{3}{4}"));
        check("\\boxed{x = 5}", json!(5), 1.0, Some("5"));
        check("\\boxed{3, 4}", json!(4), 0.0, None);
        check("\\boxed{1{,}234}", json!(1234), 1.0, Some("1{,}234"));
        check("\\boxed{5\\text{ cm}^2}", json!(5), 1.0, Some("5"));
        check("\\boxed{\\sqrt{2}}", json!(2), 0.0, None);
        check("\\boxed{72", json!(72), 0.0, None);
        check("72", json!(72), 0.0, None);
    }

    #[test]
    fn number_after_answer_phrase_is_extracted() {
        let check = |text: &str, value: f64, extracted: Option<&str>| {
            check(NumberLocation::AnswerIs, Tolerance::Exact, text, json!(72), value, extracted);
        };
        check("The Answer is: **72** clips, 5 more", 1.0, Some("72"));
        check("the answer is 71. Wait, the answer is 72.", 1.0, Some("72"));
        check("72 is the answer", 0.0, None);
        check("İİİ. THE ANSWER IS 7.2E1", 1.0, Some("7.2E1"));
    }

    #[test]
    fn tolerances_accept_close_non_integers() {
        let number = NumberLocation::LastNumber;
        check(number, Tolerance::Exact, "2.4649", json!(2.46), 0.0, Some("2.4649"));
        check(number, Tolerance::AsWritten, "2.4649", json!(2.46), 1.0, Some("2.4649"));
        check(number, Tolerance::AsWritten, "3.15", json!("3.14"), 0.0, Some("3.15"));
        check(number, Tolerance::AsWritten, "2.999", json!("3.00"), 1.0, Some("2.999"));
        check(number, Tolerance::AsWritten, "3.1", json!(3), 0.0, Some("3.1"));
        let within = Tolerance::Within { absolute: 0.01, relative: 0.001 };
        check(number, within, "1000.9", json!(1000.5), 1.0, Some("1000.9"));
        check(number, within, "1002", json!(1000.5), 0.0, Some("1002"));
        check(number, within, "0.509", json!(0.5), 1.0, Some("0.509"));
        check(number, within, "7.001", json!(7), 0.0, Some("7.001"));
    }

    #[test]
    fn expected_answer_parses_latex() {
        for (expected, answer) in [
            ("1{,}234", "1,234"),
            ("$1\\frac12$", "1.5"),
            ("Thus \\boxed{5\\text{ cm}^2}, from 25 and 5.", "5"),
            ("\\$18.50", "37/2"),
            ("-\\dfrac{3}{4}", "-0.75"),
        ] {
            let score = NumericScorer::default().grade(answer, &json!(expected)).unwrap();
            assert_eq!(score.value, 1.0, "{expected}");
        }
    }

    #[test]
    fn any_listed_expected_answer_is_accepted() {
        let scorer = NumericScorer { tolerance: Tolerance::AsWritten, ..NumericScorer::default() };
        let expected = json!(["1{,}234", 5, "0.33"]);
        for (answer, value) in
            [("1234", 1.0), ("5.0", 1.0), ("1/3", 1.0), ("6", 0.0), ("5.001", 0.0)]
        {
            assert_eq!(scorer.grade(answer, &expected).unwrap().value, value, "{answer}");
        }
        let error = scorer.grade("5", &json!([5, "five"])).unwrap_err().to_string();
        assert!(error.starts_with("the expected answer \"five\" is not one number"), "{error}");
    }

    #[test]
    fn invalid_expected_answers_and_tolerances_are_rejected() {
        let scorer = NumericScorer::default();
        for expected in [
            json!(null),
            json!("many"),
            json!("3 or 4"),
            json!([]),
            json!([[3]]),
            json!("5/0"),
            json!("1e9999"),
            json!("at least 3"),
            json!("\\sqrt{3}"),
        ] {
            let result = scorer.grade("3", &expected);
            assert!(matches!(result, Err(ScoreError::Expected { .. })), "{expected}");
        }
        let tolerance = Tolerance::Within { absolute: -1.0, relative: 0.0 };
        let result = NumericScorer { tolerance, ..scorer }.grade("3", &json!(3));
        assert_eq!(result, Err(ScoreError::Tolerance { name: "absolute", value: -1.0 }));
    }
}
