//! Options of a source of files, and the conversion of rows to tasks.

use std::fmt;

use levade_text::Message;
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Number, Value};

use super::fields::{self, AGENT, QUERY_PROMPT, RowLayout, SYSTEM_PROMPT};
use super::json_text;
use super::messages::messages;
use super::template::{self, TemplatePart};
use super::{DemonstrationCounts, Paths, SourceRow};
use crate::person::{PERSON, read_person_keys};
use crate::{Task, TaskError, parse_annotations};

/// Options of a source of data files: which files to read, and which fields contain question and
/// answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileOptions {
    /// Files to read: a file, a directory of files, a pattern such as `train-*.parquet`, or a list
    /// of these.
    pub path: Paths,
    /// Field that contains the question, as a string or a list of messages. A path such as
    /// `extra_info.question` selects nested fields. A template such as `"{Body} {Question}"`
    /// combines several fields. If rows in verl's layout have no field `question`, the question is
    /// read from `prompt`.
    #[serde(default = "default_question_field")]
    pub question: String,
    /// Field that contains the expected answer, or a list of right answers. Empty if scorers need
    /// no answer. If rows in verl's layout have no field `answer`, the answer is read from
    /// `reward_model.ground_truth`.
    #[serde(default = "default_answer_field")]
    pub answer: String,
    /// Part of the answer field that contains the expected answer.
    #[serde(default)]
    pub answer_from: AnswerPart,
    /// Number of questions that are held out from training, or `"all"` if the source is used only
    /// for evaluation. A question that any source holds out is never trained on.
    #[serde(default)]
    pub held_out: HeldOutCount,
    /// Maximum number of training rows. `None` sets no limit.
    #[serde(default)]
    pub limit: Option<usize>,
    /// Number of repetitions of each training row in one pass over the tasks, at least 1. With
    /// repetitions, a small file can have the weight of a large one.
    #[serde(default = "default_repeat")]
    pub repeat: usize,
    /// Maximum number of tool calls in a demonstration that is read from the calculator annotations
    /// of the answer field (see [`parse_annotations`]). `None` does not read annotations.
    #[serde(default)]
    pub annotated_calls: Option<usize>,
    /// Field that contains the key of the person whom the row came from, as a path like `question`.
    /// Attempts at the row are found and withdrawn by this key. `None` uses the row's own field
    /// [`PERSON`].
    #[serde(default)]
    pub person: Option<String>,
}

fn default_repeat() -> usize {
    1
}

fn default_question_field() -> String {
    "question".to_owned()
}

fn default_answer_field() -> String {
    "answer".to_owned()
}

/// Part of the answer field that contains the expected answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerPart {
    /// The expected answer is the complete field.
    #[default]
    #[serde(alias = "whole")]
    Full,
    /// The expected answer is the text after the last `####`, up to the end of its line. The text
    /// before it is the solution, as in GSM8K.
    Hashes,
}

/// Number of a source's questions that are held out from training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldOutCount {
    /// This number of questions is held out.
    Count(usize),
    /// All questions are held out: the source is used only for evaluation. Written as `"all"`.
    All,
}

impl Default for HeldOutCount {
    fn default() -> Self {
        HeldOutCount::Count(0)
    }
}

impl Serialize for HeldOutCount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            HeldOutCount::Count(count) => count.serialize(serializer),
            HeldOutCount::All => "all".serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for HeldOutCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CountOrAll;
        impl Visitor<'_> for CountOrAll {
            type Value = HeldOutCount;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, at least 0, or \"all\"")
            }

            fn visit_u64<E: Error>(self, count: u64) -> Result<HeldOutCount, E> {
                let count = usize::try_from(count);
                count.map(HeldOutCount::Count).map_err(|_| {
                    E::invalid_value(Unexpected::Other("a number that is too large"), &self)
                })
            }

            fn visit_i64<E: Error>(self, count: i64) -> Result<HeldOutCount, E> {
                let found = u64::try_from(count)
                    .map_err(|_| E::invalid_value(Unexpected::Signed(count), &self))?;
                self.visit_u64(found)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<HeldOutCount, E> {
                if text == "all" {
                    Ok(HeldOutCount::All)
                } else {
                    Err(E::invalid_value(Unexpected::Str(text), &self))
                }
            }
        }
        deserializer.deserialize_any(CountOrAll)
    }
}

impl FileOptions {
    /// Creates options for the files at `path` with the default fields. All questions are for
    /// training.
    pub fn new(path: impl Into<Paths>) -> Self {
        FileOptions {
            path: path.into(),
            question: default_question_field(),
            answer: default_answer_field(),
            answer_from: AnswerPart::default(),
            held_out: HeldOutCount::default(),
            limit: None,
            repeat: default_repeat(),
            annotated_calls: None,
            person: None,
        }
    }

    /// Converts a row to a task, without the field [`Task::row`]. Updates the counts of
    /// demonstrations. Increments `blanks` if the list of right answers has empty items.
    pub(super) fn build_task(
        &self,
        row: &SourceRow<'_>,
        layout: &RowLayout,
        demonstrations: &mut DemonstrationCounts,
        blanks: &mut usize,
    ) -> Result<Task, TaskError> {
        let (question, messages) = read_question(row, &layout.question)?;
        let nothing = Value::Null;
        let field = match layout.answer.as_str() {
            "" => &nothing,
            path => row.field("answer", path)?,
        };
        let spelled = row.spelled.as_ref().and_then(Value::as_object);
        let spelled =
            spelled.and_then(|fields| fields::find_field(fields, &layout.answer)).unwrap_or(field);
        let answer = match self.answer_from {
            _ if layout.answer.is_empty() => Value::Null,
            AnswerPart::Full => convert_full_answer(field, spelled, blanks).ok_or_else(|| {
                row.type_error(
                    &layout.answer,
                    field,
                    "a number, a string, or a list of correct answers, and not empty; if scorers \
                     need no answer, set `answer = \"\"`",
                )
            })?,
            AnswerPart::Hashes => {
                field.as_str().and_then(find_text_after_hashes).map(Value::from).ok_or_else(
                    || {
                        row.type_error(
                            &layout.answer,
                            field,
                            "a string that contains an answer after ####",
                        )
                    },
                )?
            }
        };
        let answer_number = match (field, &answer) {
            (Value::Number(number), Value::String(_)) => Some(number.clone()),
            _ => None,
        };
        let demonstration = match (field, self.annotated_calls) {
            (Value::String(solution), Some(max_calls)) => {
                let demonstration = parse_annotations(solution, max_calls);
                demonstrations.add(demonstration.as_ref().err().copied());
                demonstration.ok()
            }
            _ => None,
        };
        let agent = match row.fields.get(AGENT) {
            None | Some(Value::Null) => None,
            Some(Value::String(name)) => Some(name.clone()),
            Some(other) => return Err(row.type_error(AGENT, other, "the name of an agent")),
        };
        Ok(Task {
            question,
            messages,
            answer,
            answer_number,
            agent,
            demonstration,
            ..Task::default()
        })
    }
}

impl SourceRow<'_> {
    /// Copies the key of the person whom the row came from, in the field at `path`, to the field
    /// [`PERSON`].
    pub(super) fn set_person(&mut self, path: &str) -> Result<(), TaskError> {
        let found = self.field("person", path)?.clone();
        if read_person_keys(&found).is_none() {
            let expected = "the key of a person (a string or a number), or a list of keys";
            return Err(self.type_error(path, &found, expected));
        }
        self.fields.insert(PERSON.to_owned(), found);
        Ok(())
    }
}

/// Returns the question of a row. Also returns the messages if the question is a conversation;
/// otherwise, the list of messages is empty.
fn read_question(row: &SourceRow<'_>, path: &str) -> Result<(String, Vec<Message>), TaskError> {
    if let Some(parts) = parse_template(row, path)? {
        let question = fill_template(row, &parts)?;
        return if question.is_empty() {
            Err(row.type_error(path, &Value::from(""), "a template that yields a non-empty string"))
        } else {
            Ok((question, Vec::new()))
        };
    }
    let found = row.field("question", path)?;
    let opened;
    let found = match found {
        Value::String(text) => {
            match json_text::parse_message_text(text)
                .map_err(|must| row.type_error(path, found, must))?
            {
                Some(messages) => {
                    opened = messages;
                    &opened
                }
                None => found,
            }
        }
        other => other,
    };
    match found {
        Value::String(question) if !question.trim().is_empty() => {
            let system = row.fields.get(SYSTEM_PROMPT).and_then(Value::as_str);
            let messages =
                match system.filter(|system| path == QUERY_PROMPT && !system.trim().is_empty()) {
                    Some(system) => vec![Message::system(system), Message::user(question.as_str())],
                    None => Vec::new(),
                };
            Ok((question.clone(), messages))
        }
        Value::Array(items) => {
            let mut messages = messages(items).map_err(|why| {
                row.type_error(
                    path,
                    found,
                    &format!("a string, or messages that end with a user message: {why}"),
                )
            })?;
            let question = messages.last().map(|last| last.content.to_string()).unwrap_or_default();
            if messages == [Message::user(question.as_str())] {
                messages.clear();
            }
            Ok((question, messages))
        }
        other => Err(row.type_error(path, other, "a non-empty string, or a list of messages")),
    }
}

/// Parses `question` as a template. Returns `None` if `question` is a single field of the row.
fn parse_template<'t>(
    row: &SourceRow<'_>,
    question: &'t str,
) -> Result<Option<Vec<TemplatePart<'t>>>, TaskError> {
    if row.fields.contains_key(question) {
        return Ok(None);
    }
    template::parse_parts(question).map_err(|why| TaskError::Format {
        path: row.path.to_owned(),
        why: format!("the rows cannot be read with question = {question:?}: {why}"),
    })
}

/// Fills a question template with the fields of a row. White space at both ends of the template is
/// removed, and so are line breaks next to empty fields at both ends.
fn fill_template(row: &SourceRow<'_>, parts: &[TemplatePart<'_>]) -> Result<String, TaskError> {
    let spelled = row.spelled.as_ref().and_then(Value::as_object);
    let mut question = String::new();
    let mut end = 0;
    for part in parts {
        match part {
            TemplatePart::Text(text) => {
                let text = if question.is_empty() { text.trim_start() } else { text };
                question.push_str(text);
                if !text.trim().is_empty() {
                    end = question.trim_end().len();
                }
            }
            TemplatePart::Field(path) => {
                let value = row.field("question", path)?;
                let value =
                    spelled.and_then(|fields| fields::find_field(fields, path)).unwrap_or(value);
                let shown = match value {
                    Value::String(text)
                        if template::CHOICES.contains(path)
                            && json_text::is_printed_list(text, '[', ']') =>
                    {
                        Err("a list of options, not a list as Python prints it: save the list \
                             with json.dumps")
                    }
                    value => template::to_question_text(value),
                };
                let shown = shown.map_err(|must| row.type_error(path, value, must))?;
                if !shown.trim().is_empty() {
                    question.push_str(&shown);
                    end = question.len();
                }
            }
        }
    }
    question.truncate(end);
    Ok(question)
}

/// Returns the expected answer if it is the complete field, or `None` if the field is empty. Within
/// lists and objects, numbers stay numbers. A single number becomes a string with its original
/// digits (from `spelled`) if an f64 or a 64-bit integer would print it differently. Increments
/// `blanks` for a list with empty items.
fn convert_full_answer(field: &Value, spelled: &Value, blanks: &mut usize) -> Option<Value> {
    match field {
        value if is_blank(value) => None,
        // With an empty string among the right answers, an empty completion would be right.
        Value::Array(items)
            if items.iter().all(|value| !value.is_array() && !value.is_object()) =>
        {
            let answers: Vec<Value> =
                items.iter().filter(|item| !is_blank(item)).cloned().collect();
            *blanks += usize::from(answers.len() < items.len() && !answers.is_empty());
            (!answers.is_empty()).then_some(Value::Array(answers))
        }
        Value::Object(fields) => (!fields.is_empty()).then(|| field.clone()),
        Value::Number(number) if !is_portable(number) => {
            Some(Value::from(spelled.as_str().unwrap_or(number.as_str())))
        }
        value => Some(value.clone()),
    }
}

fn is_blank(value: &Value) -> bool {
    value.is_null() || value.as_str().is_some_and(|text| text.trim().is_empty())
}

/// Returns whether the number keeps its digits if another program reads and prints it.
fn is_portable(number: &Number) -> bool {
    let integer = number.as_u64().map(Number::from).or_else(|| number.as_i64().map(Number::from));
    integer
        .or_else(|| number.as_f64().filter(|_| number.is_f64()).and_then(Number::from_f64))
        .is_some_and(|read| read == *number)
}

fn find_text_after_hashes(text: &str) -> Option<&str> {
    let (_, rest) = text.rsplit_once("####")?;
    rest.lines().next().map(str::trim).filter(|answer| !answer.is_empty())
}

impl SourceRow<'_> {
    fn field(&self, key: &str, path: &str) -> Result<&Value, TaskError> {
        fields::find_field(&self.fields, path).ok_or_else(|| {
            let names: Vec<&str> = self.fields.keys().map(String::as_str).collect();
            TaskError::NoField {
                path: self.path.to_owned(),
                location: self.location,
                field: path.to_owned(),
                has: if names.is_empty() { "none".to_owned() } else { names.join(", ") },
                way_out: fields::missing_field_advice(key, path, &self.fields),
            }
        })
    }

    pub(super) fn type_error(&self, field: &str, found: &Value, expected: &str) -> TaskError {
        let mut found = found.to_string();
        if found.chars().count() > 80 {
            found = found.chars().take(79).chain(['…']).collect();
        }
        TaskError::Field {
            path: self.path.to_owned(),
            location: self.location,
            field: field.to_owned(),
            found,
            expected: expected.to_owned(),
        }
    }
}
