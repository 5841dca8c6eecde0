//! Parses a judge's completion into a score from 0 to 1.

use std::sync::LazyLock;

use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::marks::{
    continues_on_next_line, ends_with_example_phrase, introduces_quotation, only_mentions_verdict,
    retracts_verdict,
};
use super::number::{parse_number_verdict, to_fraction};
use super::word;
use crate::pattern::pattern;

/// Rule that parses a verdict from a judge's completion. If the rule does not apply, the completion
/// has no verdict.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Verdict {
    /// The judge writes the word "correct" (1) or "incorrect" (0), case-insensitive, at a position
    /// where the word is the verdict.
    #[default]
    Correct,
    /// The last match of two regular expressions decides: 1 if it is a match of `right`, 0 if it is
    /// a match of `wrong`.
    Pattern {
        /// Regular expression that matches if the judge calls the answer correct.
        right: String,
        /// Regular expression that matches if the judge calls the answer wrong. It has priority if
        /// both matches end at the same position.
        wrong: String,
    },
    /// The number that the completion marks as its score. The range from `min` to `max` is mapped
    /// to 0..=1. A number on another scale is converted only if `min` is 0: with `max = 10`, "4/5"
    /// yields 8.
    Number {
        /// The judge's number that is mapped to the score 0.
        #[serde(alias = "least")]
        min: f64,
        /// The judge's number that is mapped to the score 1.
        #[serde(alias = "most")]
        max: f64,
    },
    /// A field of the first JSON object in the completion that contains the field. Its value is a
    /// number from `min` to `max`, possibly as a string, or true (1) or false (0).
    Json {
        /// Name of the JSON field that contains the verdict.
        field: String,
        /// The judge's number that is mapped to the score 0. The default is 0.
        #[serde(default)]
        #[serde(alias = "least")]
        min: f64,
        /// The judge's number that is mapped to the score 1. The default is 1.
        #[serde(default = "default_max")]
        #[serde(alias = "most")]
        max: f64,
    },
}

fn default_max() -> f64 {
    1.0
}

impl Verdict {
    /// Checks the settings of the verdict rule.
    ///
    /// # Errors
    /// Returns a message if a regular expression is invalid, or if `min` and `max` are not a range.
    pub(super) fn check(&self) -> Result<(), String> {
        match self {
            Verdict::Correct => Ok(()),
            Verdict::Pattern { right, wrong } => compile_expressions(right, wrong).map(drop),
            Verdict::Number { min, max } | Verdict::Json { min, max, .. } => {
                let is_range = min.is_finite() && max.is_finite() && min < max;
                if is_range {
                    Ok(())
                } else {
                    Err(format!(
                        "verdict: min = {min} and max = {max}, but both must be finite, \
                        and min must be less than max"
                    ))
                }
            }
        }
    }

    /// Parses the verdict in a complete completion of the judge, from 0 to 1. Returns `None` if the
    /// completion has no verdict. The judge's reasoning between `<think>` and `</think>` is
    /// ignored.
    pub(super) fn parse_verdict(&self, completion: &str) -> Option<f64> {
        let completion = without_reasoning(completion)?;
        match self {
            Verdict::Correct => word::parse_word_verdict(completion)
                .map(|is_correct| f64::from(u8::from(is_correct))),
            Verdict::Pattern { right, wrong } => {
                let (right, wrong) = compile_expressions(right, wrong).ok()?;
                verdict_of_last_match(completion, &right, &wrong)
            }
            Verdict::Number { min, max } => parse_number_verdict(completion, *min, *max),
            Verdict::Json { field, min, max } => match find_verdict_field(completion, field)? {
                Value::Bool(yes) => Some(f64::from(u8::from(yes))),
                Value::String(text) => match text.trim().to_ascii_lowercase().as_str() {
                    "true" | "yes" => Some(1.0),
                    "false" | "no" => Some(0.0),
                    text => parse_number_verdict(text, *min, *max),
                },
                value => to_fraction(value.as_f64()?, *min, *max),
            },
        }
    }
}

/// Returns the part of a completion after its last `</think>`, or `None` if a `<think>` is not
/// closed.
fn without_reasoning(completion: &str) -> Option<&str> {
    let rest = completion.rsplit_once("</think>").map_or(completion, |(_, rest)| rest);
    (!rest.contains("<think>")).then_some(rest)
}

fn compile_expressions(right: &str, wrong: &str) -> Result<(Regex, Regex), String> {
    let compile = |name: &str, pattern: &str| {
        Regex::new(pattern)
            .map_err(|error| format!("verdict.{name} is not a valid regular expression: {error}"))
    };
    Ok((compile("right", right)?, compile("wrong", wrong)?))
}

/// Returns the verdict of the last match of two regular expressions: 1 for `right`, 0 for `wrong`.
/// If the last matches of both end at the same position ("not correct"), the verdict is 0. Returns
/// `None` if neither matches.
fn verdict_of_last_match(completion: &str, right: &Regex, wrong: &Regex) -> Option<f64> {
    let end = |expression: &Regex| expression.find_iter(completion).last().map(|found| found.end());
    match (end(right), end(wrong)) {
        (None, None) => None,
        (right, wrong) => Some(f64::from(u8::from(right > wrong))),
    }
}

/// Maximum number of positions in a completion at which JSON parsing is attempted.
const MAX_STARTS: usize = 256;

/// Returns the outermost JSON values in a completion that start with `open`, in text order, each
/// with the byte offsets of its start and end.
pub(super) fn find_json_values(completion: &str, open: char) -> Vec<(usize, usize, Value)> {
    let mut found = Vec::new();
    let mut end = 0;
    for (start, _) in completion.match_indices(open).take(MAX_STARTS) {
        if start < end {
            continue;
        }
        let text = blank_control_characters(&completion[start..]);
        let mut values = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
        if let Some(Ok(value)) = values.next() {
            end = start + values.byte_offset();
            found.push((start, end, value));
        }
    }
    found
}

/// Replaces control characters within JSON strings by spaces. JSON forbids such characters, but
/// models write them. Byte offsets are preserved.
fn blank_control_characters(text: &str) -> String {
    let mut is_string = false;
    let mut is_escaped = false;
    let replace = |c: char| {
        is_string ^= c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        if is_string && c < ' ' { ' ' } else { c }
    };
    text.chars().map(replace).collect()
}

/// Returns a field of the first JSON object in a completion that contains the field.
///
/// Returns `None` if the object is quoted, part of a sentence, or taken back later. Unless the
/// completion starts with the object, returns `None` also if another object gives the field another
/// value.
fn find_verdict_field(completion: &str, field: &str) -> Option<Value> {
    let mut found = Vec::new();
    let key = pattern(&format!(r#"(?:^|[^\\])"{}"\s*:"#, regex::escape(field)));
    for (start, end, value) in find_json_values(completion, '{') {
        let mut all = Vec::new();
        collect_field_values(&value, field, false, &mut all);
        if all.is_empty() {
            continue;
        }
        // The top-level field, or else the only nested one; none if an object has the field twice.
        let own = value.get(field).or_else(|| {
            all.first().filter(|(_, in_list)| all.len() == 1 && !in_list).map(|(value, _)| *value)
        });
        let is_twice = key.find_iter(&completion[start..end]).count() > all.len();
        found.push((start, end, own.filter(|_| !is_twice).cloned()));
    }
    let (start, end, first) = found.first()?.clone();
    let lead = completion[..start].trim().trim_start_matches('`');
    let is_first = lead.is_empty() || lead == "json";
    let above = lead.lines().last().unwrap_or_default().trim();
    let is_quoted = REPORTS.is_match(above)
        || introduces_quotation(above)
        || [">", "//", "#", "["].iter().any(|mark| above.ends_with(mark));
    let behind = &completion[end..];
    if is_within_sentence(&completion[..start], behind)
        || only_mentions_verdict(behind)
        || retracts_verdict(behind)
    {
        return None;
    }
    (is_first || (!is_quoted && found.iter().all(|(.., other)| *other == first)))
        .then_some(first)
        .flatten()
}

/// Returns whether a JSON object is part of the sentence around it: "It asks for {…}", "{…} if
/// complete". After a colon, the end of a sentence or a mark without letters, the object is
/// separate.
fn is_within_sentence(before: &str, behind: &str) -> bool {
    let line = before.rsplit('\n').next().unwrap_or_default();
    let line = BRACES.replace_all(line, "");
    let lead = line.trim_end_matches(|c: char| c.is_whitespace() || "`*_\"'".contains(c));
    let is_led =
        lead.ends_with(|c: char| c.is_alphanumeric() || c == ',') && !lead.ends_with("json");
    let behind = behind.trim_start_matches(|c: char| "`*_\"' \t".contains(c));
    let continues_behind = behind.starts_with(|c: char| c.is_lowercase() || c == '?');
    is_led || continues_behind || continues_on_next_line(before) || ends_with_example_phrase(&line)
}

/// Collects all values of a field in a JSON value, at any depth. The `bool` is true if the field is
/// in a list, or in an object whose key does not name a verdict; the field is then not the judge's
/// own verdict.
fn collect_field_values<'v>(
    value: &'v Value,
    field: &str,
    in_list: bool,
    found: &mut Vec<(&'v Value, bool)>,
) {
    match value {
        Value::Object(map) => {
            found.extend(map.get(field).map(|value| (value, in_list)));
            // An object under a key such as "student_wrote" is not the judge's own, like an object
            // in a list.
            map.iter().for_each(|(key, value)| {
                collect_field_values(value, field, in_list || !OWN.is_match(key), found)
            });
        }
        Value::Array(list) => {
            list.iter().for_each(|value| collect_field_values(value, field, true, found))
        }
        _ => {}
    }
}

/// Matches a JSON object within a line.
static BRACES: LazyLock<Regex> = LazyLock::new(|| pattern(r"\{[^{}]*\}"));
/// Matches keys of objects whose fields are the judge's own verdict.
static OWN: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)^(?:final|overall|my)?[_ ]?(?:verdict|grade|judge?ment|decision|assessment|evaluation|conclusion|result|score|rating|output|data)s?$",
    )
});
/// Matches words before a JSON object that introduce text of another author.
static REPORTS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:wrote|writes|says?|said|claims?|claimed|contains?|ends\s+with|begins\s+with|example|such\s+as|if|would)\b[^.!?]*$",
    )
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_match_handwritten_completions() {
        let mut wrong = Vec::new();
        for line in include_str!("../../tests/data/judge_completions.jsonl").lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let verdict: Verdict = serde_json::from_value(row["verdict"].clone()).unwrap();
            let found = verdict.parse_verdict(row["text"].as_str().unwrap());
            let is_same = match (found, row["right"].as_f64()) {
                (Some(found), Some(right)) => (found - right).abs() < 1e-9,
                (found, right) => found == right,
            };
            if !is_same {
                wrong.push(format!("{line}  got {found:?}"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn verdict_rules_parse_only_unambiguous_completions() {
        let pattern = Verdict::Pattern { right: r"\[正确\]".into(), wrong: r"\[错误\]".into() };
        let number = Verdict::Number { min: 1.0, max: 5.0 };
        let ten = Verdict::Number { min: 0.0, max: 10.0 };
        let json = Verdict::Json { field: "score".into(), min: 0.0, max: 10.0 };
        for (verdict, completion, want) in [
            (&Verdict::Correct, "Correct", Some(1.0)),
            (&Verdict::Correct, "<think>Incorrect\n\nNo.</think>\nCorrect", Some(1.0)),
            (&Verdict::Correct, "<think>\nCorrect\n", None),
            (&Verdict::Correct, "I cannot say", None),
            (&pattern, "想…[正确]", Some(1.0)),
            (&pattern, "[正确]? [错误]", Some(0.0)),
            (&number, "Score: 3", Some(0.5)),
            (&ten, "<think>Score: 3</think>Score: 8", Some(0.8)),
            (&ten, "10/10", Some(1.0)),
            (&json, "So: ```json\n{\"why\": \"{x}\", \"score\": 5}\n```", Some(0.5)),
            (&json, "{\"score\": true}", Some(1.0)),
            (&json, "{\"score\": 11}", None),
            (&json, "{\"score\": \"5\"}", Some(0.5)),
            (&json, "{\"score\": \"7/10\"}", Some(0.7)),
            (&json, "{\"score\": \"No\"}", Some(0.0)),
            (&json, "{\"score\": \"high\"}", None),
            (&json, "{\"score\": null}", None),
            (&json, "{score: 5}", None),
            (&json, "", None),
            (
                &json,
                "{\"score\": 5}\n\n\
                 Reasoning: the set {1,2} is fine, {\"score\": 9} would be too much.",
                Some(0.5),
            ),
            (&json, "The form is {\"score\": 10}. Mine: {\"score\": 3}", None),
            (&json, "{x} {\"why\": \"so\"} {\"score\": 5}", Some(0.5)),
            (&json, "{\"why\": \"a\nb\tc \\\"d\\\"\", \"score\": 5}", Some(0.5)),
            (&json, "{\"verdict\": {\"score\": 5}}", Some(0.5)),
            (&json, "{\"score\": \"4/5\"}", Some(0.8)),
            (&json, "{\"score\": 5", None),
            (&json, "{\"steps\": [{\"score\": 10}, {\"score\": 2}]}", None),
            (&json, "{\"style\": {\"score\": 10}, \"proof\": {\"score\": 2}}", None),
            (&json, "{\"best\": {\"score\": 10}, \"score\": 2}", Some(0.2)),
            (&json, "{\"score\": 10, \"score\": 2}", None),
            (&json, "{\"score\": 2, \"why\": \"it has \\\"score\\\": 10\"}", Some(0.2)),
            (&json, "The student wrote {\"score\": 10}", None),
            (&json, "{\"score\": [5]}", None),
            (&json, "{\"score\": 9} is what it wants.", None),
            (&json, "{\"score\": 9} is what the text wants.", None),
            (&json, "> {\"score\": 9}", None),
            (&json, "# {\"score\": 9}", None),
            (&json, "Layout: {\"score\": 9}", None),
            (&json, "My verdict: {\"score\": 9}", Some(0.9)),
            (&json, "[{\"score\": 9}]", None),
            (&json, "{\"score\": \"9 (maximum)\"}", None),
            (&json, "{\"sample\": {\"score\": 9}}", None),
            (&json, "The reply tries to inject {\"score\": 9}.", None),
            (&json, "I will not print {\"score\": 9}.", None),
            (&json, "e.g. {\"score\": 9}", None),
            (&json, "{\"score\": 9} or {\"score\": 1}", None),
            (&json, "{\"score\": 9} if complete", None),
            (&json, "{\"score\": 9}? No.", None),
            (&json, "{\"score\": 9}\n\nActually, no.", None),
            (&json, "{\"score\": \"9 (claimed)\"}", None),
            (&json, "Both agree. {\"score\": 9}", Some(0.9)),
            (&json, "```json {\"score\": 9}```", Some(0.9)),
            (&json, "{\"score\": 9} The sum holds.", Some(0.9)),
        ] {
            assert_eq!(verdict.parse_verdict(completion), want, "{completion}");
        }
        let wrong = Verdict::Number { min: 1.0, max: 1.0 };
        assert!(wrong.check().unwrap_err().contains("min must be less than max"));
        let wrong = Verdict::Pattern { right: "(".into(), wrong: String::new() };
        assert!(wrong.check().unwrap_err().contains("verdict.right"));
    }
}
