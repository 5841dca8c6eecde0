//! Multiple choice: the letter of an option, or its text.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::answer::normalise;
use crate::boxed::last_box;
use crate::scorer::{expected, of_answer, task_field};
use crate::{Component, Evidence, Score, ScoreError, Scorer};

/// Scores 1 where the option that an answer names is the expected one, else 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChoiceScorer {
    /// How many options there are, from A on, where the task does not list its own.
    pub options: usize,
}

impl Default for ChoiceScorer {
    fn default() -> Self {
        ChoiceScorer { options: 4 }
    }
}

/// Options at most: one for each letter.
const LETTERS: usize = 26;

#[async_trait]
impl Scorer for ChoiceScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        self.grade("", &labelled(task), &options(task)).map(drop)
    }

    async fn score(&self, evidence: &Evidence) -> Result<Vec<Component>, ScoreError> {
        let options = options(&evidence.task);
        of_answer(evidence, self.grade(evidence.text(), &labelled(&evidence.task), &options))
    }
}

/// Texts of the options of a task: its field `choices` or `options`, a list of texts, or a table by letter.
/// As data sets have them, either may be in a table `choices` with `text` and `label`.
fn options(task: &Value) -> Vec<String> {
    let found = task_field(task, "choices").or_else(|| task_field(task, "options"));
    let texts = |list: &[Value]| -> Vec<String> {
        list.iter().map(|text| text.as_str().map_or_else(|| text.to_string(), str::to_owned)).collect()
    };
    match found {
        Some(Value::Array(list)) => texts(list),
        Some(Value::Object(table)) => match table.get("text").and_then(Value::as_array) {
            Some(list) => texts(list),
            None => {
                let mut by_letter: Vec<_> = table.iter().collect();
                by_letter.sort_by(|a, b| a.0.cmp(b.0));
                texts(&by_letter.into_iter().map(|(_, text)| text.clone()).collect::<Vec<_>>())
            }
        },
        _ => Vec::new(),
    }
}

/// The expected option, by its number where the task labels its options and it is one of the labels: ARC has
/// questions with options from 1 to 4.
fn labelled(task: &Value) -> Value {
    let expected = expected(task);
    let plain =
        |value: &Value| value.as_str().map_or_else(|| value.to_string(), |text| text.trim().to_owned());
    let labels = task_field(task, "choices").and_then(|choices| choices.get("label")?.as_array());
    let at = labels.and_then(|labels| labels.iter().position(|label| plain(label) == plain(expected)));
    at.map_or_else(|| expected.clone(), Value::from)
}

impl ChoiceScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        match (2..=LETTERS).contains(&self.options) {
            true => Ok(()),
            false => Err(ScoreError::Unusable(format!(
                "options = {}, but it must be in 2..={LETTERS}",
                self.options
            ))),
        }
    }

    /// Grades a final text against the expected option: its letter, its number from 0 on, or its text, where
    /// the texts of `options` are known.
    ///
    /// # Errors
    /// When the expected answer names no option.
    pub fn grade(&self, text: &str, expected: &Value, options: &[String]) -> Result<Score, ScoreError> {
        self.check()?;
        let count = if options.is_empty() { self.options } else { options.len().min(LETTERS) };
        let want = match expected {
            Value::Number(number) => number.as_u64().map(|at| at as usize),
            Value::String(text) => {
                let alone = text.trim().trim_matches(['(', ')', '.']).trim();
                // Tables have numbers as texts.
                let number = || alone.parse::<usize>().ok();
                letter(alone).or_else(|| option_of(alone, options)).or_else(number)
            }
            _ => None,
        };
        let want = want.filter(|want| *want < count).ok_or_else(|| {
            ScoreError::Unusable(format!(
                "the expected answer {expected} is none of {count} options: give its letter"
            ))
        })?;
        let Some((found, extracted)) = named(text, count, options) else {
            return Ok(Score { value: 0.0, extracted: None });
        };
        Ok(Score { value: f64::from(u8::from(found == want)), extracted: Some(extracted) })
    }
}

/// The number of an option by its letter, which stands alone.
fn letter(text: &str) -> Option<usize> {
    let mut chars = text.chars();
    let first = chars.next()?.to_ascii_uppercase();
    (first.is_ascii_uppercase() && chars.next().is_none()).then(|| (first as u8 - b'A') as usize)
}

/// The number of the one option with this text.
fn option_of(text: &str, options: &[String]) -> Option<usize> {
    let normal = normalise(text);
    let mut same = options.iter().enumerate().filter(|(_, option)| normalise(option) == normal);
    let found = same.next().filter(|_| !normal.is_empty())?;
    same.next().is_none().then_some(found.0)
}

/// The option that a text names last, and how: in a box or a tag, behind "answer is" or "answer:", alone on
/// its last line, or in brackets.
fn named(text: &str, count: usize, options: &[String]) -> Option<(usize, String)> {
    let tagged = || {
        let (before, _) = text.rsplit_once("</answer>")?;
        before.rsplit_once("<answer>").map(|(_, inside)| inside)
    };
    if let Some(inside) = last_box(text).or_else(tagged) {
        return of_short(inside, count, options);
    }
    // Lower-casing ASCII alone moves no byte.
    let lower = text.to_ascii_lowercase();
    let after =
        ["answer is", "answer:", "answer -"].iter().filter_map(|mark| Some(lower.rfind(mark)? + mark.len()));
    if let Some(at) = after.max()
        && let Some(found) = of_short(text[at..].lines().next()?, count, options)
    {
        return Some(found);
    }
    let last = text.lines().rfind(|line| !line.trim().is_empty())?;
    of_short(last, count, options).or_else(|| {
        // The last letter in brackets, anywhere.
        let mut bracketed = text.char_indices().filter(|(_, c)| *c == '(').filter_map(|(at, _)| {
            let inside = text[at + 1..].split(')').next()?;
            let found = letter(inside).filter(|found| *found < count)?;
            text[at + 1 + inside.len()..].starts_with(')').then(|| (found, inside.to_owned()))
        });
        bracketed.next_back()
    })
}

/// The option that a short text names: by its letter at the beginning, in whatever marks, or by its text.
fn of_short(text: &str, count: usize, options: &[String]) -> Option<(usize, String)> {
    let mut plain = text.trim().trim_start_matches([':', ' ', '*', '$', '"', '`']);
    for wrap in ["\\text{", "\\textbf{", "\\mathrm{"] {
        plain = plain.strip_prefix(wrap).unwrap_or(plain);
    }
    let is_bracketed = plain.starts_with('(');
    let plain = plain.trim_start_matches(['(', '[']);
    for lead in ["option ", "Option ", "choice "] {
        if let Some(rest) = plain.strip_prefix(lead) {
            return of_short(rest, count, options);
        }
    }
    let mut chars = plain.chars();
    let (first, second) = (chars.next()?, chars.next());
    let whole = option_of(plain, options);
    let ends = match second {
        None | Some(')' | ']' | '.' | ':' | ',' | '*' | '}' | '$' | '"' | '`') => true,
        // "A dog" is the text of an option, not the first one.
        Some(' ') => is_bracketed || plain.trim().chars().nth(1).is_none(),
        _ => false,
    };
    match letter(&first.to_string()).filter(|found| *found < count && ends) {
        Some(found) => Some((found, first.to_ascii_uppercase().to_string())),
        None => whole.map(|found| (found, plain.trim().to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_option_is_found() {
        let options: Vec<String> = ["a dog", "a cat", "the fish", "none"].map(str::to_owned).to_vec();
        for (text, want) in [
            ("The answer is (B).", Some("B")),
            ("the answer is B", Some("B")),
            ("Answer: **C**", Some("C")),
            ("so \\boxed{D}, not A", Some("D")),
            ("so \\boxed{\\text{(D)}}", Some("D")),
            ("<answer> b </answer>", Some("B")),
            ("<answer>a cat</answer>", Some("a cat")),
            ("It cannot be (A), so it is (C), I think", Some("C")),
            ("Reasons.\nB) a cat", Some("B")),
            ("Reasons.\nB", Some("B")),
            ("The final answer is: the fish", Some("the fish")),
            ("A dog barks", None),
            ("The answer is option C.", Some("C")),
            ("The answer is (Z)", None),
            ("\\boxed{7}", None),
            ("", None),
        ] {
            let score = ChoiceScorer::default().grade(text, &json!("B"), &options).unwrap();
            assert_eq!(score.extracted.as_deref(), want, "{text}");
        }
    }

    #[test]
    fn expected_options_are_letters_numbers_or_texts() {
        let options = vec!["red".to_owned(), "green".into(), "blue".into()];
        for expected in [json!("B"), json!("(b)"), json!(1), json!("1"), json!("Green")] {
            let grade = |text: &str| ChoiceScorer::default().grade(text, &expected, &options).unwrap().value;
            assert_eq!((grade("(B)"), grade("green"), grade("(C)")), (1.0, 1.0, 0.0), "{expected}");
        }
        for expected in [json!("D"), json!(3), json!("purple"), json!(null)] {
            let refused = ChoiceScorer::default().grade("", &expected, &options).unwrap_err();
            assert!(refused.to_string().contains("none of 3 options"), "{refused}");
        }
        let wrong = ChoiceScorer { options: 1 };
        assert!(wrong.check().unwrap_err().to_string().contains("options = 1"));
    }

    #[test]
    fn labels_say_which_option_is_expected() {
        let choices = json!({ "text": ["10 g", "2 kg", "3"], "label": ["1", "2", "3"] });
        for (expected, want) in [(json!("1"), json!(0)), (json!(3), json!(2)), (json!("B"), json!("B"))] {
            assert_eq!(labelled(&json!({ "answer": expected, "row": { "choices": choices } })), want);
        }
    }

    #[test]
    fn options_are_read_as_data_sets_have_them() {
        for task in [
            json!({"row": {"choices": ["x", "y"]}}),
            json!({"row": {"options": {"B": "y", "A": "x"}}}),
            json!({"row": {"choices": {"label": ["A", "B"], "text": ["x", "y"]}}}),
        ] {
            assert_eq!(options(&task), ["x", "y"], "{task}");
        }
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text: String) {
            ChoiceScorer::default().grade(&text, &json!("A"), &["é".into()]).unwrap();
        }
    }
}
