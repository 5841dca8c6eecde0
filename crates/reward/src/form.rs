//! Scores the format of a completion: tags in order, a pattern, and the length.

use async_trait::async_trait;
use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::python::Solution;
use crate::{Component, Evidence, ScoreError, Scorer};

/// Scorer that gives 1 if a completion has the required format, else 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FormScorer {
    /// Text that is checked. Default: the final assistant message with its reasoning.
    pub text: Solution,
    /// Names of tags, such as `think`. Each tag must open and close exactly once, in this order, and tags
    /// must not be nested.
    pub tags: Vec<String>,
    /// Whether only white space is allowed outside of the tags.
    pub only: bool,
    /// Regular expression that must match somewhere in the text. `^` and `$` match the beginning and end
    /// of the text, and `.` also matches a line break.
    pub pattern: Option<String>,
    /// Minimum number of characters. 0 (the default) disables the limit.
    pub least_chars: usize,
    /// Maximum number of characters. 0 (the default) disables the limit.
    pub most_chars: usize,
    /// Whether the score is the fraction of conditions that hold. Each tag is one condition. If false
    /// (the default), the score is 1 only if all conditions hold.
    pub partial: bool,
}

impl Default for FormScorer {
    fn default() -> Self {
        FormScorer {
            text: Solution::Whole,
            tags: Vec::new(),
            only: false,
            pattern: None,
            least_chars: 0,
            most_chars: 0,
            partial: false,
        }
    }
}

#[async_trait]
impl Scorer for FormScorer {
    async fn score(&self, evidence: &Evidence) -> Result<Vec<Component>, ScoreError> {
        Ok(vec![Component::score(self.grade(&self.text.of(evidence))?)])
    }
}

impl FormScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        let refuse = |what: String| Err(ScoreError::Unusable(what));
        self.expression()?;
        if self.tags.is_empty() && self.pattern.is_none() && self.least_chars == 0 && self.most_chars == 0 {
            return refuse("no form is asked for: give tags, a pattern, least_chars or most_chars".into());
        }
        if self.only && self.tags.is_empty() {
            return refuse("only = true says that there is nothing outside of tags: give tags".into());
        }
        match self.tags.iter().find(|tag| tag.is_empty() || tag.contains(['<', '>', '/'])) {
            Some(tag) => refuse(format!("tags has {tag:?}, but a tag is a name, such as \"think\"")),
            None => Ok(()),
        }
    }

    fn expression(&self) -> Result<Option<Regex>, ScoreError> {
        let Some(pattern) = &self.pattern else { return Ok(None) };
        let expression = Regex::new(&format!("(?s){pattern}"));
        let invalid = |error| ScoreError::Unusable(format!("pattern is no regular expression: {error}"));
        expression.map(Some).map_err(invalid)
    }

    /// Computes the score of a text, in 0..=1.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unusable`] if the pattern is not a regular expression.
    pub fn grade(&self, text: &str) -> Result<f64, ScoreError> {
        let mut held = Vec::new();
        // Byte offset after the last closing tag, and the text outside of the tags.
        let (mut end, mut outside) = (0, String::new());
        for tag in &self.tags {
            let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
            let once = text.matches(&open).count() == 1 && text.matches(&close).count() == 1;
            let place =
                text.find(&open).zip(text.find(&close)).filter(|(open, close)| *open >= end && close > open);
            held.push(once && place.is_some());
            if let Some((start, last)) = place {
                outside.push_str(&text[end..start]);
                end = last + close.len();
            }
        }
        outside.push_str(&text[end..]);
        if self.only {
            held.push(outside.trim().is_empty());
        }
        if let Some(expression) = self.expression()? {
            held.push(expression.is_match(text));
        }
        let chars = text.chars().count();
        if self.least_chars > 0 {
            held.push(chars >= self.least_chars);
        }
        if self.most_chars > 0 {
            held.push(chars <= self.most_chars);
        }
        let right = held.iter().filter(|held| **held).count();
        Ok(match self.partial {
            true => right as f64 / held.len().max(1) as f64,
            false => f64::from(u8::from(right == held.len())),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::testing::evidence;

    fn tags() -> FormScorer {
        FormScorer { tags: vec!["think".into(), "answer".into()], ..FormScorer::default() }
    }

    #[test]
    fn tags_must_occur_once_and_in_order() {
        let right = "<think>a</think> so\n<answer>b</answer>";
        for (text, whole, partial) in [
            (right, 1.0, 1.0),
            ("<answer>b</answer><think>a</think>", 0.0, 0.5),
            ("<think>a<answer>b</answer></think>", 0.0, 0.5),
            ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, 0.5),
            ("<think>a</think><answer>b", 0.0, 0.5),
            ("</think><think><answer></answer>", 0.0, 0.5),
            ("", 0.0, 0.0),
        ] {
            assert_eq!(tags().grade(text).unwrap(), whole, "{text}");
            assert_eq!(FormScorer { partial: true, ..tags() }.grade(text).unwrap(), partial, "{text}");
        }
        let only = FormScorer { only: true, ..tags() };
        assert_eq!(only.grade(right).unwrap(), 0.0);
        assert_eq!(only.grade(" <think>a</think>\n<answer>b</answer>\n").unwrap(), 1.0);
    }

    #[test]
    fn grade_checks_pattern_and_length() {
        let scorer =
            FormScorer { pattern: Some("^So .*\\d$".into()), most_chars: 9, ..FormScorer::default() };
        for (text, value) in [("So\u{20}it\n5", 1.0), ("so it 5", 0.0), ("So it is 5 5", 0.0)] {
            assert_eq!(scorer.grade(text).unwrap(), value, "{text}");
        }
        assert_eq!(FormScorer { least_chars: 2, ..FormScorer::default() }.grade("é").unwrap(), 0.0);
    }

    #[tokio::test]
    async fn reasoning_is_part_of_checked_text() {
        let mut evidence = evidence("<answer>b</answer>", json!({}));
        assert_eq!(tags().score(&evidence).await.unwrap()[0].value, 0.0);
        evidence.outcome.thought = "a".into();
        assert_eq!(tags().score(&evidence).await.unwrap()[0].value, 1.0);
    }

    #[test]
    fn check_rejects_invalid_options() {
        for (scorer, want) in [
            (FormScorer::default(), "no form is asked for"),
            (FormScorer { pattern: Some("(".into()), ..FormScorer::default() }, "no regular expression"),
            (FormScorer { only: true, pattern: Some("a".into()), ..FormScorer::default() }, "only = true"),
            (FormScorer { tags: vec!["<think>".into()], ..FormScorer::default() }, "a tag is a name"),
        ] {
            assert!(scorer.check().unwrap_err().to_string().contains(want), "{want}");
        }
    }

    proptest! {
        #[test]
        fn grade_never_panics(text in "(<think>|</think>|<answer>|</answer>|é|a){0,12}") {
            let value = FormScorer { partial: true, only: true, ..tags() }.grade(&text).unwrap();
            prop_assert!((0.0..=1.0).contains(&value));
        }
    }
}
