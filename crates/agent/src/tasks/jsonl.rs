//! Tasks from a file with one JSON object on each line.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::draws::{Draws, Purpose};
use super::{Skipped, Task, TaskError, annotated};

/// Which file, and how to read it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JsonlOptions {
    /// The file.
    pub path: PathBuf,
    /// The field with the question, a text.
    #[serde(default = "question_field")]
    pub question: String,
    /// The field with the answer, a text or a number.
    #[serde(default = "answer_field")]
    pub answer: String,
    /// What of that field is the answer.
    #[serde(default)]
    pub answer_from: AnswerFrom,
    /// How many rows are kept apart from training.
    #[serde(default)]
    pub held_out: usize,
    /// Train on at most this many rows.
    #[serde(default)]
    pub limit: Option<usize>,
    /// How often each training row comes in one round through the tasks, so that a small file weighs against a large one.
    #[serde(default = "once")]
    pub repeat: usize,
    /// Read demonstrations off the calculator annotations of the answer field (see [`annotated`]), with at most this
    /// many calls each.
    #[serde(default)]
    pub annotated_calls: Option<usize>,
}

fn once() -> usize {
    1
}

fn question_field() -> String {
    "question".to_owned()
}

fn answer_field() -> String {
    "answer".to_owned()
}

/// What of the answer field is the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerFrom {
    /// All of it.
    #[default]
    Whole,
    /// What follows the last `####`, to the end of its line; the rest is the solution (GSM8K).
    Hashes,
}

/// The tasks of a file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct JsonlTasks {
    /// For training, in random order.
    pub train: Vec<Task>,
    /// Kept apart, in random order. The same for every `limit`.
    pub held_out: Vec<Task>,
    /// Rows left out because an earlier row asks the same: on both sides of the split they would leak.
    pub repeated: usize,
    /// What became of the annotations of all rows, where they were read.
    pub demonstrations: DemonstrationCounts,
}

/// How many solutions became demonstrations, and why the others did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DemonstrationCounts {
    /// Became one.
    pub converted: usize,
    /// See [`Skipped::NoCalls`].
    pub no_calls: usize,
    /// See [`Skipped::TooManyCalls`].
    pub too_many_calls: usize,
    /// See [`Skipped::Unreadable`].
    pub unreadable: usize,
    /// See [`Skipped::Disagrees`].
    pub disagrees: usize,
    /// See [`Skipped::NoAnswer`].
    pub no_answer: usize,
}

impl DemonstrationCounts {
    fn add(&mut self, skipped: Option<Skipped>) {
        *match skipped {
            None => &mut self.converted,
            Some(Skipped::NoCalls) => &mut self.no_calls,
            Some(Skipped::TooManyCalls) => &mut self.too_many_calls,
            Some(Skipped::Unreadable) => &mut self.unreadable,
            Some(Skipped::Disagrees) => &mut self.disagrees,
            Some(Skipped::NoAnswer) => &mut self.no_answer,
        } += 1;
    }
}

impl JsonlOptions {
    /// A file with fields `question` and `answer`, all of it for training.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        JsonlOptions {
            path: path.into(),
            question: question_field(),
            answer: answer_field(),
            answer_from: AnswerFrom::default(),
            held_out: 0,
            limit: None,
            repeat: once(),
            annotated_calls: None,
        }
    }

    /// Reads the file. Every row is checked, also those that `limit` leaves out. `seed` decides the order and which rows
    /// are held out.
    ///
    /// # Errors
    /// When the file cannot be read or has no rows; when a row is not a JSON object or lacks what it must have (which
    /// line, what it has instead); when too many rows are to be held out.
    pub fn load(&self, seed: u64) -> Result<JsonlTasks, TaskError> {
        let path = || self.path.clone();
        let bytes = fs::read(&self.path).map_err(|why| TaskError::Read { path: path(), why })?;
        let mut tasks = JsonlTasks::default();
        let mut asked = HashSet::new();
        let mut rows = Vec::new();
        for (at, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let task = self.task(at + 1, line, &mut tasks.demonstrations)?;
            if asked.insert(task.question.clone()) {
                rows.push(task);
            } else {
                tasks.repeated += 1;
            }
        }
        if rows.is_empty() {
            return Err(TaskError::Empty { path: path() });
        }
        if self.held_out >= rows.len() {
            return Err(TaskError::HeldOut { path: path(), rows: rows.len(), held_out: self.held_out });
        }
        Draws::new(seed, Purpose::Shuffle, 0).shuffle(&mut rows);
        tasks.train = rows.split_off(self.held_out);
        tasks.held_out = rows;
        tasks.train.truncate(self.limit.unwrap_or(usize::MAX));
        tasks.train = std::iter::repeat_n(tasks.train, self.repeat).flatten().collect();
        Ok(tasks)
    }

    fn task(
        &self,
        line: usize,
        text: &[u8],
        demonstrations: &mut DemonstrationCounts,
    ) -> Result<Task, TaskError> {
        let row: Value = serde_json::from_slice(text).map_err(|error| TaskError::Json {
            path: self.path.clone(),
            line,
            column: error.column(),
            // The parser counts lines within the row.
            why: error.to_string().split(" at line ").next().unwrap_or_default().to_owned(),
        })?;
        let Value::Object(row) = row else {
            return Err(TaskError::NotObject { path: self.path.clone(), line });
        };
        let question = match self.field(&row, &self.question, line)? {
            Value::String(question) if !question.trim().is_empty() => question.clone(),
            other => return Err(self.wrong(line, &self.question, other, "a text that is not empty")),
        };
        let field = self.field(&row, &self.answer, line)?;
        let answer = match (field, self.answer_from) {
            (Value::Number(_), AnswerFrom::Whole) => field.clone(),
            (Value::String(text), AnswerFrom::Whole) if !text.trim().is_empty() => Value::from(text.trim()),
            (Value::String(text), AnswerFrom::Hashes) => match after_hashes(text) {
                Some(answer) => Value::from(answer),
                None => {
                    return Err(self.wrong(line, &self.answer, field, "a text with an answer after ####"));
                }
            },
            (_, AnswerFrom::Hashes) => {
                return Err(self.wrong(line, &self.answer, field, "a text with an answer after ####"));
            }
            _ => return Err(self.wrong(line, &self.answer, field, "a number or a text that is not empty")),
        };
        let demonstration = match (field, self.annotated_calls) {
            (Value::String(solution), Some(max_calls)) => {
                let demonstration = annotated(solution, max_calls);
                demonstrations.add(demonstration.as_ref().err().copied());
                demonstration.ok()
            }
            _ => None,
        };
        let source = self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Task {
            id: format!("{source}-{line}"),
            question,
            answer,
            source,
            template: None,
            kind: None,
            demonstration,
        })
    }

    fn field<'r>(
        &self,
        row: &'r Map<String, Value>,
        field: &str,
        line: usize,
    ) -> Result<&'r Value, TaskError> {
        row.get(field).ok_or_else(|| TaskError::NoField {
            path: self.path.clone(),
            line,
            field: field.to_owned(),
            has: match row.len() {
                0 => "none".to_owned(),
                _ => row.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
            },
        })
    }

    fn wrong(&self, line: usize, field: &str, found: &Value, expected: &'static str) -> TaskError {
        let mut found = found.to_string();
        if found.chars().count() > 80 {
            found = found.chars().take(79).chain(['…']).collect();
        }
        TaskError::Field { path: self.path.clone(), line, field: field.to_owned(), found, expected }
    }
}

fn after_hashes(text: &str) -> Option<&str> {
    let (_, rest) = text.rsplit_once("####")?;
    rest.lines().next().map(str::trim).filter(|answer| !answer.is_empty())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tempfile::TempDir;

    use super::*;

    /// A file with these contents, as options that read it; the folder lives as long as the first.
    fn file(contents: &str) -> (TempDir, JsonlOptions) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sums.jsonl");
        fs::write(&path, contents).unwrap();
        (folder, JsonlOptions::new(path))
    }

    #[track_caller]
    fn refused(contents: &str, change: impl FnOnce(&mut JsonlOptions), want: &str) {
        let (folder, mut options) = file(contents);
        change(&mut options);
        let error = options.load(0).unwrap_err().to_string();
        let error = error.replace(&folder.path().display().to_string(), "");
        assert_eq!(error, want);
    }

    #[test]
    fn reads_rows() {
        let (_folder, options) =
            file("{\"question\": \"1+1?\", \"answer\": \" 2 \"}\n\n{\"question\": \"2+2?\", \"answer\": 4}");
        let mut tasks = options.load(0).unwrap().train;
        tasks.sort_by(|a, b| a.id.cmp(&b.id));
        let rows: Vec<_> = tasks.iter().map(|t| (t.id.as_str(), t.question.as_str(), &t.answer)).collect();
        assert_eq!(rows, [("sums-1", "1+1?", &Value::from("2")), ("sums-3", "2+2?", &Value::from(4))]);
        assert!(tasks.iter().all(|t| t.source == "sums" && t.demonstration.is_none()));
    }

    #[test]
    fn reads_annotated_solutions() {
        let (_folder, mut options) = file(concat!(
            "{\"q\": \"A?\", \"a\": \"It is 1+1 = <<1+1=2>>2.\\n#### 2\"}\n",
            "{\"q\": \"B?\", \"a\": \"It is <<1+1=3>>3.\\n#### 1,003 \"}\n",
            "{\"q\": \"A?\", \"a\": \"Again.\\n#### 2\"}\n",
        ));
        (options.question, options.answer) = ("q".into(), "a".into());
        options.answer_from = AnswerFrom::Hashes;
        options.annotated_calls = Some(3);
        let tasks = options.load(0).unwrap();
        let find = |q: &str| tasks.train.iter().find(|t| t.question == q).unwrap();
        assert_eq!(find("A?").demonstration.as_ref().unwrap().calls[0].result, "2");
        assert_eq!((&find("B?").answer, &find("B?").demonstration), (&Value::from("1,003"), &None));
        assert_eq!(tasks.repeated, 1);
        let want = DemonstrationCounts { converted: 1, disagrees: 1, no_calls: 1, ..Default::default() };
        assert_eq!(tasks.demonstrations, want);
    }

    #[test]
    fn splits_are_disjoint_and_repeatable() {
        let rows: String =
            (0..100).map(|i| format!("{{\"question\": \"{}?\", \"answer\": {i}}}\n", i % 90)).collect();
        let (_folder, mut options) = file(&rows);
        options.held_out = 20;
        let all = options.load(7).unwrap();
        assert_eq!((all.train.len(), all.held_out.len(), all.repeated), (70, 20, 10));
        let questions = |tasks: &[Task]| tasks.iter().map(|t| t.question.clone()).collect::<BTreeSet<_>>();
        assert!(questions(&all.train).is_disjoint(&questions(&all.held_out)));
        assert_eq!(options.load(7).unwrap(), all);
        assert_ne!(options.load(8).unwrap().held_out, all.held_out);
        options.repeat = 3;
        assert_eq!(options.load(1).unwrap().train.len(), 3 * all.train.len());
        options.repeat = 1;
        options.limit = Some(5);
        let few = options.load(7).unwrap();
        assert_eq!((&few.train[..], &few.held_out), (&all.train[..5], &all.held_out));
    }

    #[test]
    fn bad_files_are_named() {
        let nothing = |_: &mut JsonlOptions| {};
        refused("", nothing, "/sums.jsonl has no rows: it must hold one JSON object on each line");
        refused("\n \n", nothing, "/sums.jsonl has no rows: it must hold one JSON object on each line");
        let fine = "{\"question\": \"1?\", \"answer\": 1}\n";
        refused(
            &format!("{fine}\n{{\"question\": \"2?\", \"response\": 2}}"),
            nothing,
            "/sums.jsonl, line 3: the row has no field \"answer\"; it has question, response. Name the right field in \
             the recipe, or complete the row",
        );
        refused(
            &format!("{fine}{{}}"),
            nothing,
            "/sums.jsonl, line 2: the row has no field \"question\"; it has none. Name the right field in the recipe, or \
             complete the row",
        );
        refused(
            &format!("{fine}{{\"question\": \"2?\", answer: 2}}"),
            nothing,
            "/sums.jsonl, line 2, column 20: the row is not valid JSON: key must be a string",
        );
        refused(
            "{\"question\": \"2?\"",
            nothing,
            "/sums.jsonl, line 1, column 17: the row is not valid JSON: EOF while parsing an object",
        );
        refused(&format!("{fine}[1]"), nothing, "/sums.jsonl, line 2: the row is not a JSON object");
        refused(
            "{\"question\": 5, \"answer\": 1}",
            nothing,
            "/sums.jsonl, line 1: field \"question\" is 5, but it must be a text that is not empty",
        );
        refused(
            "{\"question\": \"1?\", \"answer\": null}",
            nothing,
            "/sums.jsonl, line 1: field \"answer\" is null, but it must be a number or a text that is not empty",
        );
        refused(
            "{\"question\": \"1?\", \"answer\": \"it is 2\"}",
            |options| options.answer_from = AnswerFrom::Hashes,
            "/sums.jsonl, line 1: field \"answer\" is \"it is 2\", but it must be a text with an answer after ####",
        );
        refused(
            fine,
            |options| options.held_out = 1,
            "/sums.jsonl has 1 different questions, so 1 of them cannot be held out and leave one to train on: hold out \
             fewer",
        );
        refused(
            fine,
            |options| options.path.set_file_name("none.jsonl"),
            "cannot read the tasks of /none.jsonl: No such file or directory (os error 2)",
        );
        let (folder, options) = file(fine);
        fs::write(folder.path().join("sums.jsonl"), b"{\"question\": \"\xff\"}").unwrap();
        assert!(matches!(options.load(0), Err(TaskError::Json { line: 1, .. })));
    }
}
