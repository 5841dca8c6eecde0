//! Tasks from files: JSON Lines, JSON arrays, Parquet, CSV and TSV, also compressed with gzip or
//! zstd.
//!
//! The format of a file is detected from its content; only tables (CSV, TSV) are recognized by
//! their names. Numbers keep their digits. If a row lacks a required field, the error contains the
//! file, the row and the field. A task keeps its complete row. A column that cannot be read is left
//! out, with a note.

mod content;
mod fields;
mod json;
mod json_text;
mod messages;
mod options;
mod parquet;
mod paths;
mod table;
mod template;
mod temporal;

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use serde_json::{Map, Value};

use self::content::FileContent;
use self::fields::{RowLayout, SkippedColumn};
use super::task_rng::{RngPurpose, TaskRng};
use super::{MatchingRule, QuestionKey, RowLocation, SkipReason, Task, TaskError, TaskRow};

pub use options::{AnswerPart, FileOptions, HeldOutCount};
pub use paths::{Paths, without_endings};

/// Tasks that were read from the files of a source, split into training and held-out tasks.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FileTasks {
    /// Tasks that are not held out, in the order of the rows.
    pub rest: Vec<Task>,
    /// Held-out tasks, which are never trained on. Their order depends only on the split.
    pub held_out: Vec<Task>,
    /// Number of rows that were left out because they repeat an earlier row.
    pub repeated: usize,
    /// Counts of the solutions that were converted to demonstrations, and of those that were
    /// skipped. All counts are 0 if annotations were not read.
    pub demonstrations: DemonstrationCounts,
    /// Notes for the user about how the files were read.
    pub notes: Vec<String>,
}

/// Numbers of annotated solutions that were converted to demonstrations, and that were skipped, by
/// reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DemonstrationCounts {
    /// Number of solutions that were converted to demonstrations.
    pub converted: usize,
    /// Number of solutions skipped as [`SkipReason::NoCalls`].
    pub no_calls: usize,
    /// Number of solutions skipped as [`SkipReason::TooManyCalls`].
    pub too_many_calls: usize,
    /// Number of solutions skipped as [`SkipReason::Unreadable`].
    pub unreadable: usize,
    /// Number of solutions skipped as [`SkipReason::Disagrees`].
    pub disagrees: usize,
    /// Number of solutions skipped as [`SkipReason::NoAnswer`].
    pub no_answer: usize,
}

impl DemonstrationCounts {
    fn add(&mut self, skipped: Option<SkipReason>) {
        *match skipped {
            None => &mut self.converted,
            Some(SkipReason::NoCalls) => &mut self.no_calls,
            Some(SkipReason::TooManyCalls) => &mut self.too_many_calls,
            Some(SkipReason::Unreadable) => &mut self.unreadable,
            Some(SkipReason::Disagrees) => &mut self.disagrees,
            Some(SkipReason::NoAnswer) => &mut self.no_answer,
        } += 1;
    }
}

impl FileOptions {
    /// Reads the tasks of the files like [`load_with_rule`](Self::load_with_rule), with the
    /// matching rule of new runs.
    ///
    /// # Errors
    /// Returns the errors of [`load_with_rule`](Self::load_with_rule).
    pub fn load(&self, split_seed: u64) -> Result<FileTasks, TaskError> {
        self.load_with_rule(split_seed, MatchingRule::default())
    }

    /// Reads the tasks of the files, and holds out the questions of the split. Every row is
    /// checked, including rows that `limit` leaves out. `matching` determines which rows are
    /// repeats.
    ///
    /// The held-out questions are those with the smallest hashes of question and `split_seed`. The
    /// order of files and rows and the seed of a run have no effect, and additional rows change few
    /// of the held-out questions.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, if there are no rows, or if a row is not an
    /// object or lacks a required field (with the row and its fields). Also returns an error if too
    /// many rows would be held out, or if `repeat` would make too many tasks.
    pub fn load_with_rule(
        &self,
        split_seed: u64,
        matching: MatchingRule,
    ) -> Result<FileTasks, TaskError> {
        let files = self.path.files()?;
        let mut loader = TaskLoader::new(self, files.len() > 1, split_seed, matching);
        for (number, file) in files.iter().enumerate() {
            loader.read_file_rows(number, file)?;
        }
        let TaskLoader { mut ranked, mut tasks, unseen_choices, .. } = loader;
        if let Some(split) =
            paths::find_mixed_split(&files).filter(|_| self.held_out != HeldOutCount::All)
        {
            tasks.notes.push(format!(
                "{}: is read together with files for training, although its name is that of an \
                 evaluation split; use a separate source for each split, and set `held_out = \
                 \"all\"` for the evaluation split",
                split.display()
            ));
        }
        if unseen_choices > 0 {
            let named = template::find_choices_field(tasks.rest.iter().map(|task| &*task.row));
            tasks.notes.push(format!(
                "{}: {unseen_choices} rows have a field {named:?} that the model does not see; \
                 `question = \"{{{}}}\\n{{{named}}}\"` shows it",
                files.first().map_or(self.path.first(), |file| file).display(),
                self.question,
            ));
        }
        let rows = tasks.rest.len();
        let path = files.first().map_or(self.path.first(), |file| file).to_owned();
        if rows == 0 {
            return Err(TaskError::Empty { path });
        }
        ranked.sort_unstable();
        match self.held_out {
            HeldOutCount::Count(held_out) if held_out >= rows => {
                return Err(TaskError::HeldOut { path, rows, held_out });
            }
            HeldOutCount::Count(held_out) => ranked.truncate(held_out),
            HeldOutCount::All => {}
        }
        let mut rest: Vec<Option<Task>> = tasks.rest.into_iter().map(Some).collect();
        tasks.held_out = ranked.into_iter().filter_map(|(_, at)| rest[at].take()).collect();
        tasks.rest = rest.into_iter().flatten().collect();
        let rows = tasks.rest.len().min(self.limit.unwrap_or(usize::MAX));
        let repeat = self.repeat;
        match rows.checked_mul(repeat) {
            Some(all) if all <= MAX_REPEATED || repeat == 1 => Ok(tasks),
            _ => Err(TaskError::Repeat { path, rows, repeat, max_tasks: MAX_REPEATED }),
        }
    }

    /// Reads all rows of the files, including rows that repeat another row or contain no task. Also
    /// returns notes for the user.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or there are no rows.
    pub fn rows(&self) -> Result<(Vec<FileRow>, Vec<String>), TaskError> {
        let files = self.path.files()?;
        let mut loader = TaskLoader::new(self, files.len() > 1, 0, MatchingRule::default());
        loader.all = Some(Vec::new());
        for (number, file) in files.iter().enumerate() {
            loader.read_file_rows(number, file)?;
        }
        let path = files.first().map_or(self.path.first(), |file| file).to_owned();
        let rows = loader.all.filter(|rows| !rows.is_empty()).ok_or(TaskError::Empty { path })?;
        Ok((rows, loader.tasks.notes))
    }

    /// Returns whether the field `field` can contain the question or the expected answer.
    pub fn uses(&self, field: &str) -> bool {
        template::list_field_paths(&self.question).contains(&field) || self.answer == field
    }

    /// Selects the training tasks from `rest`, the tasks that no source holds out: in random order,
    /// at most `limit` tasks, and each repeated `repeat` times.
    pub fn training(&self, mut rest: Vec<Task>, seed: u64) -> Vec<Task> {
        TaskRng::new(seed, RngPurpose::Shuffle, 0).shuffle(&mut rest);
        rest.truncate(self.limit.unwrap_or(usize::MAX));
        std::iter::repeat_n(rest, self.repeat).flatten().collect()
    }
}

/// A row of a data file, with the task that the row contains.
#[derive(Debug)]
pub struct FileRow {
    /// Identifier of the row: the name of the file, followed by the number of the row.
    pub id: String,
    /// All fields of the row.
    pub fields: TaskRow,
    /// Task that the row contains, or the reason why the row contains none.
    pub task: Result<Task, TaskError>,
}

impl FileRow {
    /// Returns the value of the field at a path, or `None` if the row has no such field.
    pub fn field(&self, path: &str) -> Option<&Value> {
        fields::find_field(&self.fields, path)
    }
}

impl TaskRow {
    /// Returns the value of the field at a path such as `extra_info.level`, or `None` if the row
    /// has no such field.
    pub fn field(&self, path: &str) -> Option<&Value> {
        fields::find_field(self, path)
    }
}

/// Maximum number of tasks of a source whose rows are repeated. Each repetition is a separate task
/// in memory.
const MAX_REPEATED: usize = 1 << 24;

/// A row of a data file while the file is read.
struct SourceRow<'f> {
    /// Index of the file within its source, from 0.
    number: usize,
    path: &'f Path,
    location: RowLocation,
    fields: Map<String, Value>,
    /// The fields with numbers as strings in their original notation. `None` if `fields` preserves
    /// the notation of all numbers.
    spelled: Option<Value>,
    /// Whether the row lacks columns that cannot be read.
    is_partial: bool,
}

/// State of reading the tasks of a source from its files.
struct TaskLoader<'o> {
    options: &'o FileOptions,
    source: String,
    several: bool,
    /// Fields of question and answer, which the first row determines. `None` before the first row.
    layout: Option<RowLayout>,
    matching: MatchingRule,
    /// Keys of the rows that were read so far, to find repeated rows.
    known: HashSet<QuestionKey>,
    /// Names of the columns that contained JSON as a string.
    opened: BTreeSet<String>,
    /// Number of lone surrogates that were replaced in JSON strings.
    halves: usize,
    /// Number of rows whose list of right answers contains empty items.
    blanks: usize,
    /// Number of rows whose answer is a string in the notation of a list of strings.
    printed: usize,
    /// Number of rows with choices that the question does not show.
    unseen_choices: usize,
    /// Pairs (rank in the split, index in `tasks`) of all tasks.
    ranked: Vec<(u64, usize)>,
    split_seed: u64,
    tasks: FileTasks,
    /// Names of the columns that a note already reports as left out.
    skipped_columns: BTreeSet<String>,
    /// All rows. `None` if only the tasks are requested.
    all: Option<Vec<FileRow>>,
}

impl<'o> TaskLoader<'o> {
    fn new(
        options: &'o FileOptions,
        several: bool,
        split_seed: u64,
        matching: MatchingRule,
    ) -> Self {
        TaskLoader {
            options,
            source: options.path.name(),
            several,
            layout: None,
            matching,
            known: HashSet::new(),
            opened: BTreeSet::new(),
            halves: 0,
            blanks: 0,
            printed: 0,
            unseen_choices: 0,
            ranked: Vec::new(),
            split_seed,
            tasks: FileTasks::default(),
            skipped_columns: BTreeSet::new(),
            all: None,
        }
    }

    fn read_file_rows(&mut self, number: usize, path: &Path) -> Result<(), TaskError> {
        let to_error = |why: String| TaskError::Format { path: path.to_owned(), why };
        let FileOptions { question, answer, person, .. } = self.options;
        let ending = paths::file_extension(path);
        let needed = |column: &str| {
            RowLayout::can_use_column(column, question, answer)
                || person.as_deref().is_some_and(|path| fields::leads_to(column, path))
        };
        let skipped_columns = match content::read_file(path)? {
            FileContent::Parquet(bytes) => {
                parquet::read_all_rows(bytes, &needed, to_error, |location, fields, is_partial| {
                    self.add_row(SourceRow {
                        number,
                        path,
                        location,
                        fields,
                        spelled: None,
                        is_partial,
                    })
                })?
            }
            FileContent::Text(_) if ending == "parquet" => {
                return Err(to_error(
                    "the file has the extension of a Parquet file, but is not a Parquet file"
                        .into(),
                ));
            }
            FileContent::Text(text) if ["csv", "tsv"].contains(&ending.as_str()) => {
                table::read_table_rows(
                    &text,
                    ending == "tsv",
                    &needed,
                    to_error,
                    &mut |location, fields| {
                        self.add_row(SourceRow {
                            number,
                            path,
                            location,
                            fields,
                            spelled: None,
                            is_partial: false,
                        })
                    },
                )?
            }
            FileContent::Text(text) => {
                let halves = json::parse_rows(
                    &text,
                    &|json::JsonRowError { line, column, why }| TaskError::Json {
                        path: path.to_owned(),
                        line,
                        column,
                        why,
                    },
                    &mut |location, json::ParsedValue { value, spelled }| match value {
                        Value::Object(fields) => self.add_row(SourceRow {
                            number,
                            path,
                            location,
                            fields,
                            spelled,
                            is_partial: false,
                        }),
                        _ => Err(TaskError::NotObject { path: path.to_owned(), location }),
                    },
                )?;
                self.halves += halves;
                Vec::new()
            }
        };
        let [halves, blanks, printed] =
            [&mut self.halves, &mut self.blanks, &mut self.printed].map(std::mem::take);
        if halves > 0 {
            self.tasks.notes.push(format!(
                "{}: {halves} escapes are half a surrogate pair (as \\ud83d alone), which does not \
                 encode a character; they are read as U+FFFD",
                path.display()
            ));
        }
        if blanks > 0 {
            self.tasks.notes.push(format!(
                "{}: {blanks} rows have an empty string or null among their correct answers, which \
                 is ignored",
                path.display()
            ));
        }
        if printed > 0 {
            self.tasks.notes.push(format!(
                "{}: {printed} rows expect a string such as `[\"a\", \"b\"]`, which counts as one \
                 answer; save it as a list if each item is a correct answer",
                path.display()
            ));
        }
        for SkippedColumn { column, why } in skipped_columns {
            let path = path.display();
            if self.skipped_columns.insert(column.clone()) {
                self.tasks
                    .notes
                    .push(format!("{path}: the column {column:?} is ignored, because it {why}"));
            }
        }
        Ok(())
    }

    fn add_row(&mut self, mut row: SourceRow<'_>) -> Result<(), TaskError> {
        let task = self.read_task(&mut row);
        if let Some(all) = &mut self.all {
            let id = task_id(&self.source, self.several, &row);
            let fields = TaskRow::from(row.fields);
            let task = task.map(|task| Task { row: fields.clone(), ..task });
            all.push(FileRow { id, fields, task });
            return Ok(());
        }
        let mut task = task?;
        let key = task.key();
        let known = match (self.matching, &self.layout) {
            (MatchingRule::ExactRows, Some(layout)) => {
                task.row_key(&row.fields, &[&layout.question, &layout.answer])
            }
            (MatchingRule::Rows, Some(layout)) => {
                task.loose_row_key(&row.fields, &[&layout.question, &layout.answer])
            }
            _ => key,
        };
        // Rows with missing columns may differ in these columns.
        if self.known.insert(known) || (row.is_partial && self.matching != MatchingRule::Questions)
        {
            self.unseen_choices += usize::from(template::hides_choices(&task, &row.fields));
            self.ranked.push((key.rank(self.split_seed), self.tasks.rest.len()));
            task.row = row.fields.into();
            self.tasks.rest.push(task);
        } else {
            self.tasks.repeated += 1;
        }
        Ok(())
    }

    /// Converts a row to a task, without the field [`Task::row`].
    fn read_task(&mut self, row: &mut SourceRow<'_>) -> Result<Task, TaskError> {
        let options = self.options;
        let path = row.path;
        let location = row.location;
        let mut opened: Vec<(String, &str)> = Vec::new();
        let paths = fields::layout_paths(&options.question, &options.answer);
        for path in paths.iter().map(String::as_str).chain(["extra_info."]) {
            let found = json_text::parse_json_column(&mut row.fields, path);
            let opened_here = match found {
                Ok(found) => found,
                Err((column, must)) => {
                    return Err(row.type_error(
                        column,
                        row.fields.get(column).unwrap_or(&Value::Null),
                        must,
                    ));
                }
            };
            if let Some((column, text)) = opened_here {
                self.halves += json::count_surrogates(&text);
                opened.push((column.to_owned(), "a table"));
            }
        }
        for column in template::CHOICES {
            if let Some(text) = json_text::parse_json_options(&mut row.fields, column) {
                self.halves += json::count_surrogates(&text);
                opened.push((column.to_owned(), "options"));
            }
        }
        let layout = self.layout.get_or_insert_with(|| {
            let layout = RowLayout::for_row(&row.fields, &options.question, &options.answer);
            let RowLayout { question, answer } = &layout;
            if (question, answer) != (&options.question, &options.answer) {
                let path = row.path.display();
                self.tasks.notes.push(format!(
                    "{path}: read with question = {question:?}, answer = {answer:?}"
                ));
            }
            layout
        });
        if let Some(Value::String(text)) = row.fields.get(&layout.question)
            && let Ok(Some(messages)) = json_text::parse_message_text(text)
        {
            self.halves += json::count_surrogates(json::strip_byte_order_mark(text));
            row.fields.insert(layout.question.clone(), messages);
            opened.push((layout.question.clone(), "messages"));
        }
        for (column, what) in opened {
            if self.opened.insert(column.clone()) {
                let path = path.display();
                self.tasks.notes.push(format!(
                    "{path}, {location}: the column {column:?} contains JSON in a string, which is \
                     read as {what}, in this and in other rows"
                ));
            }
        }
        let task =
            options.build_task(row, layout, &mut self.tasks.demonstrations, &mut self.blanks)?;
        if let Some(path) = &options.person {
            row.set_person(path)?;
        }
        self.printed +=
            usize::from(task.answer.as_str().is_some_and(json_text::is_list_of_answers));
        Ok(Task {
            id: task_id(&self.source, self.several, row),
            source: self.source.clone(),
            ..task
        })
    }
}

/// Returns the id of a row's task: the name of its source, followed by the number of the row.
fn task_id(source: &str, several: bool, row: &SourceRow<'_>) -> String {
    let number = row.location.number();
    if several { format!("{source}-{}-{number}", row.number) } else { format!("{source}-{number}") }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
