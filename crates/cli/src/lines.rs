//! Writes JSON-lines files with one line for each attempt.

use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};

use levade_run::dir::RunDir;
use levade_store::Attempt;
use serde_json::{Map, Value, json};

use crate::failure::unusable;

/// Names of the JSON files that a run writes. No command may overwrite them with `--out`.
const RUN_FILES: [&str; 3] = ["metrics.jsonl", "timings.jsonl", "events.jsonl"];

/// Buffered writer of a JSON-lines file.
pub struct LinesFile {
    path: PathBuf,
    file: BufWriter<File>,
    /// Whether the file still contains its earlier content, which the first written line replaces.
    has_earlier_content: bool,
}

impl LinesFile {
    /// Creates the file, or opens an existing file. The content of an existing file stays until the
    /// first line is written, so a command that fails earlier does not lose the content.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be created or written, if it belongs to a
    /// run, or if it contains anything other than lines of JSON.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let failed = |error: io::Error| unusable(format!("{}: {error}", path.display()));
        // A pipe or a terminal has no content.
        let has_earlier_content = path.is_file();
        if has_earlier_content {
            let mut first = [0];
            let length = File::open(path).and_then(|mut file| file.read(&mut first));
            let is_json = length.map_err(failed)? == 0 || first == *b"{";
            let is_of_run = path.parent().is_some_and(|dir| RunDir::find(dir).is_some())
                && path.file_name().is_some_and(|name| RUN_FILES.iter().any(|own| name == *own));
            if !is_json || is_of_run {
                let path = path.display();
                return Err(unusable(format!(
                    "--out {path} exists, and is no file that this command wrote; name another file"
                )));
            }
        }
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = BufWriter::new(file.map_err(failed)?);
        Ok(LinesFile { path: path.to_owned(), file, has_earlier_content })
    }

    /// Removes the content that the file had before it was opened.
    fn drop_earlier_content(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.has_earlier_content) {
            self.file.get_ref().set_len(0)?;
        }
        Ok(())
    }

    /// Writes one line of JSON to the buffer.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be written.
    pub fn write(&mut self, line: &Value) -> anyhow::Result<()> {
        let written = self.drop_earlier_content().and_then(|()| writeln!(self.file, "{line}"));
        written.map_err(|error| self.to_file_error(&error))
    }

    /// Flushes the buffer to the file.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be written.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        let written = self.drop_earlier_content().and_then(|()| self.file.flush());
        written.map_err(|error| self.to_file_error(&error))
    }

    fn to_file_error(&self, error: &io::Error) -> anyhow::Error {
        anyhow::anyhow!("{}: {error}", self.path.display())
    }
}

/// Creates the JSON line for an attempt. `slice` is the name of the attempt's evaluation slice or
/// task source.
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

    #[test]
    fn earlier_lines_stay_until_the_first_line_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        std::fs::write(&path, "{\"old\": 1, \"long\": \"a line that is longer\"}\n").unwrap();
        drop(LinesFile::create(&path).unwrap());
        assert!(std::fs::read_to_string(&path).unwrap().contains("old"));
        let mut file = LinesFile::create(&path).unwrap();
        file.write(&json!({"new": 1})).unwrap();
        file.write(&json!({"new": 2})).unwrap();
        file.finish().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"new\":1}\n{\"new\":2}\n");
        // A result without lines replaces the earlier content, too.
        LinesFile::create(&path).unwrap().finish().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
    }

    #[test]
    fn files_of_run_and_files_without_json_are_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            ("run.db", "SQLite format 3"),
            ("recipe.toml", "[run]\nname = 'x'\n"),
            ("metrics.jsonl", "{\"step\": 0}\n"),
        ];
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        for (name, content) in files {
            let path = dir.path().join(name);
            let error = LinesFile::create(&path).err().unwrap().to_string();
            assert!(error.contains(name) && error.contains("name another file"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
    }
}
