//! Parses the options of tasks: their texts, and the labels that a model sees next to them.
//!
//! If options have labels, only these labels name them.

use std::collections::HashSet;
use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

use super::{LETTERS, letter_index, value_to_text};
use crate::pattern::pattern;
use crate::scorer::task_field;

/// Names of the JSON fields that can contain an option's label. The first field that is present is
/// used.
pub const OPTION_LABELS: [&str; 3] = ["label", "key", "letter"];
/// Names of the JSON fields that can contain an option's text. The first field that is present is
/// used.
pub const OPTION_TEXTS: [&str; 3] = ["text", "content", "value"];

/// The options of a multiple-choice task.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ChoiceOptions {
    /// Texts of all options; empty if the task does not list its options.
    pub texts: Vec<String>,
    /// Labels of all options, if they differ from A, B, C… in this order; otherwise empty. If there
    /// are labels, only they name options.
    pub labels: Vec<String>,
    /// Whether the question asks for the wrong option ("all of these EXCEPT").
    pub wants_wrong_option: bool,
    /// Whether the question asks for the false statement. Then "A is correct" is not an answer.
    pub wants_false_statement: bool,
}

impl ChoiceOptions {
    /// Parses the options in the field `choices` or `options` of a task. The field is a list of
    /// texts, a list of objects with a label and a text, an object that maps labels to texts, or an
    /// object with the lists `text` and `label`, as in published datasets.
    pub fn from_task(task: &Value) -> Self {
        let found = task_field(task, "choices").or_else(|| task_field(task, "options"));
        let (mut texts, mut labels) = parse_options(found.unwrap_or(&Value::Null));
        if labels.is_empty()
            && let Some((own, rest)) = split_letters(&texts)
        {
            (texts, labels) = (rest, own);
        }
        // The labels A, B, C… in this order are the default.
        if labels.iter().enumerate().all(|(at, label)| letter_at(at).as_ref() == Some(label)) {
            labels.clear();
        }
        let question = task_field(task, "question").and_then(Value::as_str).unwrap_or_default();
        let wants_wrong_option = WRONG_OPTION_WANTED.is_match(question);
        let wants_false_statement = FALSE_STATEMENT_WANTED.is_match(question);
        ChoiceOptions { wants_wrong_option, wants_false_statement, texts, labels }
    }

    /// Returns the number of options, or `unlisted` if the task does not list its options.
    pub fn count_or(&self, unlisted: usize) -> usize {
        match self.texts.len() {
            0 => unlisted,
            count if self.labels.is_empty() => count.min(LETTERS),
            count => count,
        }
    }

    /// Returns the index of the option that a single letter names: by the option's label if the
    /// options have labels, otherwise by the letter's position in the alphabet.
    pub fn index_of_letter(&self, text: &str) -> Option<usize> {
        let position = letter_index(text)?;
        if self.labels.is_empty() { Some(position) } else { self.index_of_label(text) }
    }

    /// Returns the index of the only option with the label `name`. If no label matches exactly, the
    /// comparison ignores case.
    pub fn index_of_label(&self, name: &str) -> Option<usize> {
        let only = |is_it: &dyn Fn(&str) -> bool| {
            let mut found =
                self.labels.iter().enumerate().filter(|(_, label)| is_it(label)).map(|(at, _)| at);
            found.next().filter(|_| found.next().is_none())
        };
        only(&|label| label == name)
            .or_else(|| only(&|label| label.to_lowercase() == name.to_lowercase()))
    }

    /// Returns the index of the option with the label `name`, unless the label is a single letter.
    /// ARC has questions with options from 1 to 4.
    pub fn index_of_non_letter_label(&self, name: &str) -> Option<usize> {
        self.index_of_label(name).filter(|_| letter_index(name).is_none())
    }
}

/// Returns the texts of a task's options, and their labels if they have any.
fn parse_options(options: &Value) -> (Vec<String>, Vec<String>) {
    let texts = |list: &[Value]| -> Vec<String> { list.iter().map(value_to_text).collect() };
    match options {
        Value::Array(list) => {
            let field = |item: &Value, names: &[&str]| {
                let scalar = |value: &&Value| value.is_string() || value.is_number();
                names.iter().find_map(|name| item.get(*name).filter(scalar)).map(value_to_text)
            };
            let shown = list
                .iter()
                .map(|item| field(item, &OPTION_TEXTS).unwrap_or_else(|| value_to_text(item)));
            let labels: Option<Vec<String>> =
                list.iter().map(|item| field(item, &OPTION_LABELS)).collect();
            (shown.collect(), labels.unwrap_or_default())
        }
        Value::Object(table) => match (table.get("text"), table.get("label")) {
            (Some(Value::Array(list)), Some(Value::Array(labels))) => (texts(list), texts(labels)),
            (Some(Value::Array(list)), _) => (texts(list), Vec::new()),
            _ => {
                let mut by_label: Vec<_> =
                    table.iter().filter(|(_, text)| !text.is_null()).collect();
                by_label.sort_by(|a, b| a.0.cmp(b.0));
                by_label
                    .into_iter()
                    .map(|(label, text)| (value_to_text(text), label.trim().to_owned()))
                    .unzip()
            }
        },
        _ => (Vec::new(), Vec::new()),
    }
}

/// Splits texts of options into their letters and the remaining texts, such as `B) 21` into `B` and
/// `21`. Returns `None` unless each text starts with a letter and the letters differ.
pub fn split_letters(texts: &[String]) -> Option<(Vec<String>, Vec<String>)> {
    let label = |text: &String| Some(LETTERED.captures(text)?[1].to_owned());
    let labels: Vec<String> = texts.iter().map(label).collect::<Option<_>>()?;
    let is_distinct = labels.iter().collect::<HashSet<_>>().len() == labels.len();
    let rest = texts.iter().map(|text| LETTERED.replace(text, "").into_owned());
    is_distinct.then(|| (labels, rest.collect()))
}

/// Returns the capital letter at an index of the alphabet, from 0.
fn letter_at(at: usize) -> Option<String> {
    u8::try_from(at)
        .ok()
        .filter(|at| usize::from(*at) < LETTERS)
        .map(|at| char::from(b'A' + at).to_string())
}

static WRONG_OPTION_WANTED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:incorrect|false|wrong|untrue|invalid|not|except|exception|least|un\w+ly|\w+n't)\b",
    )
});
static FALSE_STATEMENT_WANTED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)\b(?:incorrect|false|wrong|untrue|invalid)\b"));
/// Matches the letter that some datasets write before the text of an option: "B) cheesecake".
pub(super) static LETTERED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^\(?([A-Z])(?:\)\s*|[.:]\s+)"));

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ChoiceScorer;

    /// Labels can be in any order and script.
    #[test]
    fn only_labels_of_task_row_select_options() {
        let listed = |labels: &[&str]| {
            let texts = ["red", "green", "blue", "grey"];
            json!({ "text": &texts[..labels.len()], "label": labels })
        };
        for (choices, expected, stated, due) in [
            (listed(&["C", "A", "B", "D"]), "C", "A", Some(0.0)),
            (listed(&["C", "A", "B", "D"]), "C", "C", Some(1.0)),
            (listed(&["C", "A", "B", "D"]), "C", "red", Some(1.0)),
            (listed(&["B", "C", "D", "E"]), "D", "C", Some(0.0)),
            (listed(&["B", "C", "D", "E"]), "D", "D", Some(1.0)),
            (listed(&["B", "C", "D", "E"]), "D", "E", Some(0.0)),
            (listed(&["B", "C", "D", "E"]), "A", "A", None),
            (listed(&["F", "G", "H", "J"]), "H", "H", Some(1.0)),
            (listed(&["F", "G", "H", "J"]), "H", "C", Some(0.0)),
            (listed(&["F", "G", "H", "J"]), "(h)", "\\boxed{H}", Some(1.0)),
            (listed(&["i", "ii", "iii", "iv"]), "i", "i", Some(1.0)),
            (listed(&["i", "ii", "iii", "iv"]), "i", "I", Some(1.0)),
            (listed(&["i", "ii", "iii", "iv"]), "ii", "ii", Some(1.0)),
            (listed(&["i", "ii", "iii", "iv"]), "i", "A", Some(0.0)),
            (listed(&["1", "2", "3", "4"]), "2", "B", Some(0.0)),
            (listed(&["1", "2", "3", "4"]), "B", "B", None),
            (listed(&["0", "1"]), "1", "1", Some(1.0)),
            (listed(&["A", "B", "A"]), "A", "A", None),
            (json!({"1": "red", "2": "green"}), "1", "green", Some(0.0)),
            (json!({"1": "red", "2": "green"}), "1", "1", Some(1.0)),
            (json!({"0": "red", "1": "green"}), "0", "0", Some(1.0)),
            (json!({"0": "red", "1": "green"}), "0", "1", Some(0.0)),
            (json!({"B": "red", "C": "green", "E": null}), "C", "C", Some(1.0)),
            (json!({"B": "red", "C": "green", "E": null}), "E", "E", None),
            (
                json!([{"key": "2", "value": "red"}, {"key": "1", "value": "green"}]),
                "1",
                "1",
                Some(1.0),
            ),
            (
                json!([{"label": "B", "text": "red"}, {"label": "A", "text": "green"}]),
                "A",
                "B",
                Some(0.0),
            ),
            (json!(["A)21", "B)22", "C)23"]), "B", "22", Some(1.0)),
            (json!(["A)21", "B)22", "C)23"]), "B", "B)22", Some(1.0)),
            (json!(["B) 21", "A) 22"]), "B", "B", Some(1.0)),
            (json!(["B) 21", "A) 22"]), "B", "22", Some(0.0)),
            (json!({"A": "red", "B": "green"}), "B", "B", Some(1.0)),
        ] {
            let options = ChoiceOptions::from_task(&json!({ "row": { "choices": &choices } }));
            let text = format!("The answer is {stated}.");
            let score = ChoiceScorer::default().grade(&text, &json!(expected), &options);
            assert_eq!(
                score.ok().map(|score| score.value),
                due,
                "{choices} expects {expected}: {text}"
            );
        }
        // An expected number is a label if the labels are numbers, else an index.
        let number = |choices: Value| {
            let options = ChoiceOptions::from_task(&json!({ "choices": choices }));
            ChoiceScorer::default().grade("green", &json!(1), &options).unwrap().value
        };
        assert_eq!(number(json!({"1": "red", "2": "green"})), 0.0);
        assert_eq!(number(listed(&["F", "G"])), 1.0);
    }
}
