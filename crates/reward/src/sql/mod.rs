//! Scores SQL queries by execution accuracy: a query is right if its result equals that of the
//! expected query.
//!
//! Both queries run on the same SQLite file, which is opened read-only. They cannot attach another
//! file or write. Time, the number of rows, the size of the result and the sizes of values are
//! limited.

mod compare;
mod run;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::answer::text_in_tag;
use crate::scorer::{expected, task_field};
use crate::{Component, ScoreError, Scorer, ScorerInput, blocks};
use compare::results_match;
use run::{COLUMNS, Query, QueryLimits, VALUE_BYTES};

/// Scorer that gives 1 if a query returns the same rows as the expected query, else 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SqlScorer {
    /// Path of an SQLite file, or of the directory with the SQLite files of all tasks.
    pub databases: PathBuf,
    /// Field of a task or its row with the name of its database. The file is `NAME.sqlite` or
    /// `NAME/NAME.sqlite` in the directory, as in Spider and BIRD. Default: `db_id`.
    #[serde(default = "default_database_field")]
    pub field: String,
    /// Timeout for a query, in seconds. Above 0 and at most 1e6. Default: 10.
    #[serde(default = "default_timeout_seconds")]
    pub seconds: f64,
    /// Maximum number of rows of a query's result. At least 1. Default: 10000.
    #[serde(default = "default_max_rows")]
    pub rows: usize,
    /// Maximum size of a query's result, in MiB. In 1..=65536. Default: 16.
    #[serde(default = "default_result_mb")]
    pub result_mb: usize,
    /// Order in which the query may return the columns. Default: any order.
    #[serde(default)]
    pub columns: Columns,
}

/// Order in which a query may return the columns of the expected query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Columns {
    /// The query may return the columns in any order that is the same for all rows, as in Spider's
    /// evaluation.
    #[default]
    AnyOrder,
    /// The query must return the columns in the order of the expected query, as in BIRD's
    /// evaluation.
    InOrder,
}

fn default_database_field() -> String {
    "db_id".into()
}

fn default_timeout_seconds() -> f64 {
    10.0
}

fn default_max_rows() -> usize {
    10_000
}

fn default_result_mb() -> usize {
    16
}

/// Name of the score component that is 1 if the query ran without an error, else 0.
const RUNS: &str = "runs";

#[async_trait]
impl Scorer for SqlScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        let database = self.database_path(task)?;
        let gold = expected_query(task)?;
        Query::check(&database, &gold).map_err(|why| unusable_query_error(&gold, &why))
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let database = self.database_path(&input.task)?;
        let gold = expected_query(&input.task)?;
        let Some(query) = extract_query(input.text()).filter(|_| input.is_answered()) else {
            return Ok(vec![Component::score(0.0), Component::new(RUNS, 0.0)]);
        };
        let mut bounds = QueryLimits {
            time: Duration::from_secs_f64(self.seconds),
            rows: self.rows,
            bytes: self.result_mb << 20,
            enough: usize::MAX,
            value: VALUE_BYTES[0],
            columns: COLUMNS[0],
        };
        let mut want = Query::new(&database, &gold, bounds).run().await;
        // The expected query may need longer values or wider tables, so its limits are raised once
        // each.
        for _ in 0..2 {
            match &want {
                Err(why) if why.contains("too big") => bounds.value = VALUE_BYTES[1],
                Err(why) if why.contains("too many columns") => bounds.columns = COLUMNS[1],
                _ => break,
            }
            want = Query::new(&database, &gold, bounds).run().await;
        }
        let want = want.map_err(|why| unusable_query_error(&gold, &why))?.rows;
        // A query with one row more than expected is wrong, so no further row is read.
        bounds.enough = want.len();
        let found = Query::new(&database, &query, bounds).run().await;
        let runs = f64::from(u8::from(found.is_ok()));
        let is_correct = match found {
            Ok(found) if found.is_complete => {
                let ordered = orders_rows(&gold);
                let any_order = self.columns == Columns::AnyOrder;
                let same = move || results_match(&want, &found.rows, ordered, any_order);
                // The search for an order of many columns can take long.
                let same = tokio::task::spawn_blocking(same).await;
                let undecided = |why: &str| {
                    let query = crate::scorer::excerpt(&gold);
                    ScoreError::Unusable(format!(
                        "cannot compare the result with the result of the expected query \
                         {query:?}: {why}"
                    ))
                };
                let same = same.map_err(|error| undecided(&error.to_string()))?;
                same.ok_or_else(|| undecided("too many of its columns or values are equal"))?
            }
            _ => false,
        };
        let score = Component {
            extracted: Some(query),
            ..Component::score(f64::from(u8::from(is_correct)))
        };
        Ok(vec![score, Component::new(RUNS, runs)])
    }
}

impl SqlScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        let invalid = |what: String| Err(ScoreError::Unusable(what));
        if self.databases.as_os_str().is_empty() {
            return invalid(
                "databases is empty: set it to an SQLite file, or to a directory of SQLite files"
                    .into(),
            );
        }
        if !(self.seconds > 0.0 && self.seconds <= 1e6) {
            return invalid(format!(
                "seconds = {}, but it must be more than 0 and at most 1e6",
                self.seconds
            ));
        }
        if self.rows == 0 {
            return invalid("rows = 0, but it must be at least 1".into());
        }
        if !(1..=1 << 16).contains(&self.result_mb) {
            return invalid(format!(
                "result_mb = {}, but it must be in 1..={}",
                self.result_mb,
                1 << 16
            ));
        }
        Ok(())
    }

    /// Returns the path of a task's SQLite database.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unusable`] if the task names no database, or if its file does not
    /// exist.
    fn database_path(&self, task: &Value) -> Result<PathBuf, ScoreError> {
        if !self.databases.is_dir() {
            return Ok(self.databases.clone());
        }
        let name = task_field(task, &self.field).and_then(Value::as_str).unwrap_or_default();
        // A name with path separators could refer to a file outside of the directory.
        let is_name = |c: char| c.is_alphanumeric() || "_- .".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(is_name) {
            let what = format!(
                "the field {:?} of the task is {name:?}, which is not the name of a database",
                self.field
            );
            return Err(ScoreError::Unusable(what));
        }
        let endings = ["", ".sqlite", ".db"];
        let flat = endings.map(|ending| self.databases.join(format!("{name}{ending}")));
        let nested =
            endings.map(|ending| self.databases.join(name).join(format!("{name}{ending}")));
        let found = flat.into_iter().chain(nested).find(|path: &PathBuf| Path::is_file(path));
        found.ok_or_else(|| {
            let dir = self.databases.display();
            ScoreError::Unusable(format!(
                "{dir} has no database {name}: neither {name}.sqlite nor {name}/{name}.sqlite"
            ))
        })
    }
}

fn unusable_query_error(query: &str, why: &str) -> ScoreError {
    ScoreError::Unusable(format!(
        "the expected query {:?} cannot be run: {why}",
        crate::scorer::excerpt(query)
    ))
}

/// Returns the expected query of a task.
///
/// # Errors
/// Returns [`ScoreError::Unusable`] if the expected answer is empty or not text.
fn expected_query(task: &Value) -> Result<String, ScoreError> {
    let gold = expected(task);
    let text = gold.as_str().map(str::trim).filter(|text| !text.is_empty());
    text.map(str::to_owned)
        .ok_or_else(|| ScoreError::Unusable(format!("the expected answer {gold} is not a query")))
}

/// Returns the SQL query in a text: the last SQL code block, or the complete text. If the text has
/// an `<answer>` or `<sql>` tag, only the tag's content counts. Returns `None` if the query is
/// empty.
fn extract_query(text: &str) -> Option<String> {
    let answer = text_in_tag(text, "answer").or_else(|| text_in_tag(text, "sql")).unwrap_or(text);
    let found =
        blocks::last_code_block(answer, &["sql", "sqlite", "sqlite3"]).unwrap_or(Cow::from(answer));
    let query = found.trim().trim_end_matches(';').trim();
    Some(query.to_owned()).filter(|query| !query.is_empty())
}

/// Returns whether a query orders its rows, by `ORDER BY` outside of parentheses, quotes and
/// comments.
fn orders_rows(query: &str) -> bool {
    let mut words = Vec::new();
    let mut depth = 0i32;
    let mut chars = query.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\'' | '"' | '`' => while chars.next().is_some_and(|next| next != c) {},
            '[' => while chars.next().is_some_and(|next| next != ']') {},
            '-' if chars.peek() == Some(&'-') => {
                while chars.next().is_some_and(|next| next != '\n') {}
            }
            '/' if chars.peek() == Some(&'*') => {
                let mut before = ' ';
                while let Some(next) = chars.next().filter(|next| (before, *next) != ('*', '/')) {
                    before = next;
                }
            }
            '(' => depth += 1,
            ')' => depth -= 1,
            c if c.is_alphabetic() => {
                let mut word = String::from(c.to_ascii_lowercase());
                while let Some(next) = chars.next_if(|next| next.is_alphanumeric() || *next == '_')
                {
                    word.push(next.to_ascii_lowercase());
                }
                if depth == 0 {
                    words.push(word);
                }
            }
            _ => {}
        }
    }
    words.windows(2).any(|pair| pair == ["order", "by"])
}

#[cfg(test)]
mod tests;
