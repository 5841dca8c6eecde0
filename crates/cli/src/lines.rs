//! Writes JSON-lines files with one line for each attempt.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use levade_store::Attempt;
use serde_json::{Map, Value, json};

use crate::failure::unusable;

/// Buffered writer of a JSON-lines file.
pub struct LinesFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl LinesFile {
    /// Creates the file, or truncates an existing one.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be created.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let file =
            File::create(path).map_err(|error| unusable(format!("{}: {error}", path.display())))?;
        Ok(LinesFile { path: path.to_owned(), file: BufWriter::new(file) })
    }

    /// Writes one line.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be written.
    pub fn write(&mut self, line: &Value) -> anyhow::Result<()> {
        let written = writeln!(self.file, "{line}");
        written.map_err(|error| self.error(&error))
    }

    /// Flushes the buffer to the file.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be written.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        let written = self.file.flush();
        written.map_err(|error| self.error(&error))
    }

    fn error(&self, error: &io::Error) -> anyhow::Error {
        anyhow::anyhow!("{}: {error}", self.path.display())
    }
}

/// Creates the JSON line of an attempt. `slice` is the name of its evaluation slice or task source.
///
/// `reply` is the text of the final answer, and empty if a limit ended the attempt. `score` is null
/// if the attempt could not be scored; `error` then contains the reason.
pub fn attempt_line(slice: &str, attempt: &Attempt) -> Value {
    let task = &attempt.task;
    let outcome = &attempt.outcome;
    let mut line = Map::new();
    for name in ["id", "question", "answer"] {
        line.insert(name.to_owned(), task[name].clone());
    }
    let components: Map<String, Value> = outcome
        .components
        .iter()
        .map(|component| (component.name.clone(), json!(component.value)))
        .collect();
    let rest = json!({
        "slice": slice,
        "sample": attempt.slot.sample,
        "reply": outcome.final_text,
        "extracted": outcome.extracted,
        "score": attempt.score,
        "components": components,
        "finish": outcome.finish,
        "turns": outcome.turns,
        "sampled_tokens": outcome.sampled_tokens,
        "tool_calls": outcome.calls.total(),
        "error": outcome.error,
    });
    if let Value::Object(rest) = rest {
        line.extend(rest);
    }
    Value::Object(line)
}

#[cfg(test)]
mod tests {
    use levade_store::{AttemptStart, Status};
    use levade_tree::{AttemptId, AttemptSlot, CallCounts, Component, Outcome, Purpose};

    use super::*;

    #[test]
    fn attempt_line_contains_task_answer_and_score() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        let started_attempt = AttemptStart {
            id: AttemptId::from_bytes([1; 16]),
            slot: AttemptSlot { purpose: Purpose::Eval, phase: 0, step: 0, group: 3, sample: 1 },
            number: 0,
            task: json!({"id": "t-3", "question": "1 + 1?", "answer": 2, "row": {"level": "easy"}}),
        };
        let outcome = Outcome {
            extracted: Some("2".into()),
            calls: CallCounts { ok: 1, failed: 1, ..CallCounts::default() },
            components: vec![Component::new("right", 1.0)],
            ..Outcome::demonstrated("It is 2.")
        };
        let attempt = Attempt {
            outcome,
            score: Some(1.0),
            status: Status::Completed,
            ..Attempt::from_start(&started_attempt)
        };
        let mut file = LinesFile::create(&path).unwrap();
        file.write(&attempt_line("easy", &attempt)).unwrap();
        file.finish().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("}\n") && text.lines().count() == 1, "{text}");
        let expected = json!({
            "id": "t-3", "question": "1 + 1?", "answer": 2, "slice": "easy", "sample": 1, "reply": "It is 2.",
            "extracted": "2", "score": 1.0, "components": {"right": 1.0}, "finish": "answered", "turns": 0,
            "sampled_tokens": 0, "tool_calls": 2, "error": null,
        });
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
        let nowhere = dir.path().join("none/out.jsonl");
        let error = LinesFile::create(&nowhere).err().unwrap().to_string();
        assert!(error.contains("none/out.jsonl: No such file"), "{error}");
    }
}
