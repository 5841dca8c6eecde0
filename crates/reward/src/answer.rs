//! Scores short text answers as question-answering datasets do.
//!
//! Normalization and exact match follow the evaluation script of SQuAD (Rajpurkar et al. 2016),
//! which Search-R1, verl and Agent-R1 also use. In addition, equal answers must have equal numbers
//! and symbols: the punctuation that normalization removes may be a sign, a decimal point or an
//! operator.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::boxed::{last_box_content, without_text_commands};
use crate::contained::states_answer;
use crate::scorer::{answer_components, expected, task_field};
use crate::short::ShortAnswer;
use crate::{Component, Score, ScoreError, Scorer, ScorerInput};

/// Compares a short text answer with one or several accepted answers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AnswerScorer {
    /// Criterion by which an answer is scored against the expected answers.
    pub compare: Comparison,
    /// Location of the answer in the completion's text.
    #[serde(alias = "place")]
    pub location: AnswerLocation,
    /// Score of an answer that is present but wrong, in 0..=1. The default is 0.
    pub wrong: f64,
    /// Maximum number of `<answer>` tags, and of `</answer>` tags. If a text has more of either, a
    /// correct answer keeps a quarter of its score, because a model that emits tags at random is
    /// sometimes correct by chance. Applies only to [`AnswerLocation::Tag`]. The default is 10.
    #[serde(alias = "most_tags")]
    pub max_tags: usize,
}

impl Default for AnswerScorer {
    fn default() -> Self {
        AnswerScorer {
            compare: Comparison::default(),
            location: AnswerLocation::default(),
            wrong: 0.0,
            max_tags: 10,
        }
    }
}

/// Criterion by which a short text answer is scored: equality, containment or word overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Comparison {
    /// The answer equals an expected answer after both are normalized.
    #[default]
    Exact,
    /// The answer contains an expected answer as separate words.
    Contains,
    /// The score is the F1 of the word overlap with the best expected answer.
    F1,
}

/// Location of a short answer in the completion's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerLocation {
    /// The answer is the text inside the last `<answer>…</answer>`.
    #[default]
    Tag,
    /// The completion's complete text is the answer.
    Text,
    /// The field `answer_schema` of the task's row specifies the location: `boxed` selects the last
    /// `\boxed{…}`, and any other name selects the last pair of tags of that name. The default is
    /// `answer`.
    Schema,
}

const OPEN: &str = "<answer>";
const CLOSE: &str = "</answer>";

/// Returns the word F1, 2 · precision · recall / (precision + recall), of two normalized texts. If
/// either text is `yes`, `no` or `noanswer`, the texts must be equal, because sharing words with
/// these means nothing (as in HotpotQA's script).
pub fn word_f1(found: &str, expected: &str) -> f64 {
    let closed = |text: &str| matches!(text, "yes" | "no" | "noanswer");
    if closed(found) || closed(expected) {
        return f64::from(u8::from(found == expected));
    }
    let (found, mut expected): (Vec<&str>, Vec<&str>) =
        (found.split_whitespace().collect(), expected.split_whitespace().collect());
    let num_found = found.len() as f64;
    let num_expected = expected.len() as f64;
    let mut common = 0.0;
    for word in found {
        if let Some(at) = expected.iter().position(|other| *other == word) {
            expected.swap_remove(at);
            common += 1.0;
        }
    }
    if common == 0.0 { 0.0 } else { 2.0 * common / (num_found + num_expected) }
}

#[async_trait]
impl Scorer for AnswerScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        self.grade_for_task("", task).map(drop)
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        answer_components(input, self.grade_for_task(input.text(), &input.task))
    }
}

impl AnswerScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        if (0.0..=1.0).contains(&self.wrong) {
            Ok(())
        } else {
            Err(ScoreError::Range { name: "wrong", value: self.wrong })
        }
    }

    /// Scores a text as the answer to a task, against the task's expected answer.
    fn grade_for_task(&self, text: &str, task: &Value) -> Result<Score, ScoreError> {
        let schema = match self.location {
            AnswerLocation::Schema => Some(answer_schema(task)?),
            _ => None,
        };
        self.grade_with_schema(text, expected(task), schema.as_deref())
    }

    #[cfg(test)]
    fn grade(&self, text: &str, expected: &Value) -> Result<Score, ScoreError> {
        self.grade_with_schema(text, expected, None)
    }

    fn grade_with_schema(
        &self,
        text: &str,
        expected: &Value,
        schema: Option<&str>,
    ) -> Result<Score, ScoreError> {
        self.check()?;
        let expected = parse_expected(expected)?;
        let found = match schema {
            Some("boxed") => last_box_content(text).map(str::trim),
            Some(tag) => text_in_tag(text, tag),
            None => self.location.extract_answer(text),
        };
        let Some(found) = found else { return Ok(Score { value: 0.0, extracted: None }) };
        let grade = |found: &str| {
            let own = ShortAnswer::new(found, false);
            let agrees = |want: &ShortAnswer| match self.compare {
                _ if own.text == want.text => f64::from(u8::from(own.matches_expected(want))),
                _ if want.closed => 0.0,
                Comparison::Exact => 0.0,
                Comparison::Contains => f64::from(u8::from(states_answer(found, want))),
                Comparison::F1 => word_f1(&own.text, &want.text),
            };
            expected.iter().map(agrees).fold(0.0, f64::max)
        };
        let plain = (schema == Some("boxed")).then(|| without_text_commands(found));
        let best = plain.map_or(0.0, |plain| grade(&plain)).max(grade(found));
        let tags = text.matches(OPEN).count().max(text.matches(CLOSE).count());
        let scale =
            if self.location == AnswerLocation::Tag && tags > self.max_tags { 0.25 } else { 1.0 };
        let value = if best > 0.0 { best * scale } else { self.wrong };
        Ok(Score { value, extracted: Some(found.to_owned()) })
    }
}

impl AnswerLocation {
    fn extract_answer(self, text: &str) -> Option<&str> {
        match self {
            AnswerLocation::Text => Some(text.trim()),
            AnswerLocation::Tag | AnswerLocation::Schema => text_in_tag(text, "answer"),
        }
    }
}

/// Returns the answer schema of a task, or `answer` if the task's row does not name a schema.
pub(crate) fn answer_schema(task: &Value) -> Result<String, ScoreError> {
    let is_name = |name: &str| !name.is_empty() && !name.contains(['<', '>', '/']);
    match task_field(task, "answer_schema") {
        None => Ok("answer".into()),
        Some(Value::String(name)) if is_name(name.trim()) => Ok(name.trim().to_owned()),
        Some(other) => Err(ScoreError::Unusable(format!(
            "the field answer_schema is {other}, but must be \"boxed\" or the name of a tag"
        ))),
    }
}

/// Returns the text between the last opening tag that is closed and its closing tag. Tags that the
/// text only mentions before the answer (`I answer in <answer>`) are ignored.
pub(crate) fn text_in_tag<'t>(text: &'t str, tag: &str) -> Option<&'t str> {
    let open = format!("<{tag}>");
    let close = format!("</{tag}>");
    let (before, _) = text.rsplit_once(&close)?;
    let start = before.rfind(&open)? + open.len();
    text[start..].split_once(&close).map(|(inside, _)| inside.trim())
}

/// Parses the expected answers of a task: one text or a list of texts. The JSON value `true`
/// accepts `yes` or `true`, and `false` accepts `no` or `false`.
fn parse_expected(expected: &Value) -> Result<Vec<ShortAnswer>, ScoreError> {
    let open = |text: &str| vec![ShortAnswer::new(text, false)];
    let texts = |value: &Value| match value {
        Value::String(text) => Some(open(text)),
        Value::Number(number) => Some(open(number.as_str())),
        Value::Bool(truth) => {
            let names = if *truth { ["yes", "true"] } else { ["no", "false"] };
            Some(names.map(|name| ShortAnswer::new(name, true)).into())
        }
        _ => None,
    };
    let found: Option<Vec<ShortAnswer>> = match expected {
        Value::Array(several) => several
            .iter()
            .map(texts)
            .collect::<Option<Vec<_>>>()
            .map(|all| all.into_iter().flatten().collect()),
        one => texts(one),
    };
    // Every answer would contain an empty text.
    let is_valid = |found: &Vec<ShortAnswer>| {
        !found.is_empty() && found.iter().all(|one| !one.text.is_empty())
    };
    found
        .filter(is_valid)
        .ok_or_else(|| ScoreError::ExpectedText { expected: expected.to_string() })
}

/// Partial rewards for the output format, as in Search-R1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FormatScore {
    /// Reward for a well-formed text with a wrong answer, and the deduction for a correct answer in
    /// a malformed text.
    pub structure: f64,
    /// Reward for a malformed text with a wrong answer.
    pub last: f64,
    /// Additional reward for a well-formed text with a wrong answer if the retrieved documents
    /// contain the answer.
    pub retrieval: f64,
}

impl FormatScore {
    /// Returns the score of a text: `is_correct` is whether its answer is correct, `is_well_formed`
    /// whether the text is well-formed, and `retrieved` whether the retrieved documents contain the
    /// answer.
    pub fn score(&self, is_correct: bool, is_well_formed: bool, retrieved: bool) -> f64 {
        match (is_correct, is_well_formed) {
            (true, true) => 1.0,
            (true, false) => 1.0 - self.structure,
            (false, true) if retrieved => self.structure + self.retrieval,
            (false, true) => self.structure,
            (false, false) => self.last,
        }
    }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
