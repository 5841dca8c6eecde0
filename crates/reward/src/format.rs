//! Scores the format of a completion: tags in order, a pattern, and the length.

use async_trait::async_trait;
use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::python::SolutionText;
use crate::{Component, ScoreError, Scorer, ScorerInput};

/// Scorer that gives 1 if a completion has the required format, else 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FormatScorer {
    /// Text that the scorer checks. Default: the final assistant message with its reasoning.
    pub text: SolutionText,
    /// Names of tags, such as `think`. Each tag must open and close exactly once, in this order,
    /// and tags must not be nested.
    pub tags: Vec<String>,
    /// Whether only white space is allowed outside of the tags in `tags`. Default: false.
    pub only: bool,
    /// Regular expression that must match somewhere in the text. `^` and `$` match the beginning
    /// and end of the text, and `.` also matches a line break.
    pub pattern: Option<String>,
    /// Minimum number of characters. 0 (the default) disables the limit.
    #[serde(alias = "least_chars")]
    pub min_chars: usize,
    /// Maximum number of characters. 0 (the default) disables the limit.
    #[serde(alias = "most_chars")]
    pub max_chars: usize,
    /// Whether the score is the fraction of conditions that hold. Each tag is one condition. If
    /// false (the default), the score is 1 only if all conditions hold.
    pub partial: bool,
}

impl Default for FormatScorer {
    fn default() -> Self {
        FormatScorer {
            text: SolutionText::Full,
            tags: Vec::new(),
            only: false,
            pattern: None,
            min_chars: 0,
            max_chars: 0,
            partial: false,
        }
    }
}

#[async_trait]
impl Scorer for FormatScorer {
    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        Ok(vec![Component::score(self.grade(&self.text.text_of(input))?)])
    }
}

impl FormatScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        let invalid = |what: String| Err(ScoreError::Unusable(what));
        self.compile_pattern()?;
        if self.tags.is_empty()
            && self.pattern.is_none()
            && self.min_chars == 0
            && self.max_chars == 0
        {
            return invalid(
                "no condition is set: set tags, pattern, min_chars or max_chars".into(),
            );
        }
        if self.only && self.tags.is_empty() {
            return invalid(
                "only = true forbids text outside of tags, but tags is empty: set tags".into(),
            );
        }
        match self.tags.iter().find(|tag| tag.is_empty() || tag.contains(['<', '>', '/'])) {
            Some(tag) => {
                invalid(format!("tags has {tag:?}, but a tag is a name, such as \"think\""))
            }
            None => Ok(()),
        }
    }

    fn compile_pattern(&self) -> Result<Option<Regex>, ScoreError> {
        let Some(pattern) = &self.pattern else { return Ok(None) };
        let expression = Regex::new(&format!("(?s){pattern}"));
        let invalid = |error| {
            ScoreError::Unusable(format!("pattern is not a valid regular expression: {error}"))
        };
        expression.map(Some).map_err(invalid)
    }

    /// Computes the score of a text, in 0..=1.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unusable`] if the pattern is not a regular expression.
    pub fn grade(&self, text: &str) -> Result<f64, ScoreError> {
        let mut conditions = Vec::new();
        // Byte offset after the last closing tag, and the text outside of the tags.
        let mut end = 0;
        let mut outside = String::new();
        for tag in &self.tags {
            let open = format!("<{tag}>");
            let close = format!("</{tag}>");
            let once = text.matches(&open).count() == 1 && text.matches(&close).count() == 1;
            let span = text
                .find(&open)
                .zip(text.find(&close))
                .filter(|(open, close)| *open >= end && close > open);
            conditions.push(once && span.is_some());
            if let Some((start, last)) = span {
                outside.push_str(&text[end..start]);
                end = last + close.len();
            }
        }
        outside.push_str(&text[end..]);
        if self.only {
            conditions.push(outside.trim().is_empty());
        }
        if let Some(expression) = self.compile_pattern()? {
            conditions.push(expression.is_match(text));
        }
        let chars = text.chars().count();
        if self.min_chars > 0 {
            conditions.push(chars >= self.min_chars);
        }
        if self.max_chars > 0 {
            conditions.push(chars <= self.max_chars);
        }
        let num_met = conditions.iter().filter(|is_met| **is_met).count();
        Ok(if self.partial {
            num_met as f64 / conditions.len().max(1) as f64
        } else {
            f64::from(u8::from(num_met == conditions.len()))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::testing::scorer_input;

    fn scorer_with_tags() -> FormatScorer {
        FormatScorer { tags: vec!["think".into(), "answer".into()], ..FormatScorer::default() }
    }

    #[test]
    fn tags_must_occur_once_and_in_order() {
        let right = "<think>a</think> so\n<answer>b</answer>";
        for (text, full_score, partial) in [
            (right, 1.0, 1.0),
            ("<answer>b</answer><think>a</think>", 0.0, 0.5),
            ("<think>a<answer>b</answer></think>", 0.0, 0.5),
            ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, 0.5),
            ("<think>a</think><answer>b", 0.0, 0.5),
            ("</think><think><answer></answer>", 0.0, 0.5),
            ("", 0.0, 0.0),
        ] {
            assert_eq!(scorer_with_tags().grade(text).unwrap(), full_score, "{text}");
            assert_eq!(
                FormatScorer { partial: true, ..scorer_with_tags() }.grade(text).unwrap(),
                partial,
                "{text}"
            );
        }
        let only = FormatScorer { only: true, ..scorer_with_tags() };
        assert_eq!(only.grade(right).unwrap(), 0.0);
        assert_eq!(only.grade(" <think>a</think>\n<answer>b</answer>\n").unwrap(), 1.0);
    }

    #[test]
    fn format_score_checks_pattern_and_length() {
        let scorer = FormatScorer {
            pattern: Some("^So .*\\d$".into()),
            max_chars: 9,
            ..FormatScorer::default()
        };
        for (text, value) in [("So\u{20}it\n5", 1.0), ("so it 5", 0.0), ("So it is 5 5", 0.0)] {
            assert_eq!(scorer.grade(text).unwrap(), value, "{text}");
        }
        assert_eq!(
            FormatScorer { min_chars: 2, ..FormatScorer::default() }.grade("é").unwrap(),
            0.0
        );
    }

    #[tokio::test]
    async fn reasoning_is_part_of_checked_text() {
        let mut input = scorer_input("<answer>b</answer>", json!({}));
        assert_eq!(scorer_with_tags().score(&input).await.unwrap()[0].value, 0.0);
        input.outcome.reasoning = "a".into();
        assert_eq!(scorer_with_tags().score(&input).await.unwrap()[0].value, 1.0);
    }

    #[test]
    fn check_rejects_invalid_options() {
        for (scorer, want) in [
            (FormatScorer::default(), "no condition is set"),
            (
                FormatScorer { pattern: Some("(".into()), ..FormatScorer::default() },
                "not a valid regular expression",
            ),
            (
                FormatScorer { only: true, pattern: Some("a".into()), ..FormatScorer::default() },
                "only = true",
            ),
            (
                FormatScorer { tags: vec!["<think>".into()], ..FormatScorer::default() },
                "a tag is a name",
            ),
        ] {
            assert!(scorer.check().unwrap_err().to_string().contains(want), "{want}");
        }
    }

    proptest! {
        #[test]
        fn format_grading_never_panics(text in "(<think>|</think>|<answer>|</answer>|é|a){0,12}") {
            let value = FormatScorer { partial: true, only: true, ..scorer_with_tags() }.grade(&text).unwrap();
            prop_assert!((0.0..=1.0).contains(&value));
        }
    }
}
