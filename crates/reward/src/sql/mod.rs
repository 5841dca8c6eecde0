//! Queries, right where they give what the expected query gives (execution accuracy).
//!
//! Both run on the same SQLite file, which is opened for reading alone: no other file can be attached,
//! nothing written, and time, rows and sizes of values are bounded.

mod run;

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::answer::in_tag;
use crate::scorer::{expected, task_field};
use crate::{Component, Evidence, ScoreError, Scorer, blocks};
use run::{Cell, Query};

/// Scores 1 where a query gives the rows that the expected one gives, else 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SqlScorer {
    /// An SQLite file, or the folder that has those of all tasks.
    pub databases: PathBuf,
    /// Field of a task or its row that names its database: `NAME.sqlite` in the folder, or
    /// `NAME/NAME.sqlite`, as Spider and BIRD have them.
    #[serde(default = "db_id")]
    pub field: String,
    /// Longest time of a query, in seconds.
    #[serde(default = "ten")]
    pub seconds: f64,
    /// Most rows of a result.
    #[serde(default = "rows")]
    pub rows: usize,
}

fn db_id() -> String {
    "db_id".into()
}

fn ten() -> f64 {
    10.0
}

fn rows() -> usize {
    10_000
}

/// Name of the component that says whether the query ran.
const RUNS: &str = "runs";

#[async_trait]
impl Scorer for SqlScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        let (database, gold) = (self.database(task)?, gold(task)?);
        Query::check(&database, &gold).map_err(|why| unusable(&gold, &why))
    }

    async fn score(&self, evidence: &Evidence) -> Result<Vec<Component>, ScoreError> {
        let (database, gold) = (self.database(&evidence.task)?, gold(&evidence.task)?);
        let Some(query) = query_in(evidence.text()).filter(|_| evidence.is_answered()) else {
            return Ok(vec![Component::score(0.0), Component::new(RUNS, 0.0)]);
        };
        let limit = Duration::from_secs_f64(self.seconds);
        let run = |text: &str| Query::new(&database, text, limit, self.rows).run();
        let want = run(&gold).await.map_err(|why| unusable(&gold, &why))?;
        let found = run(query).await;
        let runs = f64::from(u8::from(found.is_ok()));
        let right = found.is_ok_and(|found| same(&want, &found, is_ordered(&gold)));
        let score =
            Component { extracted: Some(query.to_owned()), ..Component::score(f64::from(u8::from(right))) };
        Ok(vec![score, Component::new(RUNS, runs)])
    }
}

impl SqlScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        let refuse = |what: String| Err(ScoreError::Unusable(what));
        if self.databases.as_os_str().is_empty() {
            return refuse("databases is empty: name an SQLite file, or a folder of them".into());
        }
        if !(self.seconds > 0.0 && self.seconds <= 1e6) {
            return refuse(format!("seconds = {}, but it must be in 0..=1e6, not 0", self.seconds));
        }
        if self.rows == 0 {
            return refuse("rows = 0, but it must be at least 1".into());
        }
        Ok(())
    }

    /// The file of a task's database.
    fn database(&self, task: &Value) -> Result<PathBuf, ScoreError> {
        if !self.databases.is_dir() {
            return Ok(self.databases.clone());
        }
        let name = task_field(task, &self.field).and_then(Value::as_str).unwrap_or_default();
        // A name that is a path would lead out of the folder.
        let is_name = |c: char| c.is_alphanumeric() || "_- .".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(is_name) {
            let what = format!("the field {:?} of the task is {name:?}, which names no database", self.field);
            return Err(ScoreError::Unusable(what));
        }
        let endings = ["", ".sqlite", ".db"];
        let flat = endings.map(|ending| self.databases.join(format!("{name}{ending}")));
        let nested = endings.map(|ending| self.databases.join(name).join(format!("{name}{ending}")));
        let found = flat.into_iter().chain(nested).find(|path: &PathBuf| Path::is_file(path));
        found.ok_or_else(|| {
            let folder = self.databases.display();
            ScoreError::Unusable(format!(
                "{folder} has no database {name}: neither {name}.sqlite nor {name}/{name}.sqlite"
            ))
        })
    }
}

fn unusable(query: &str, why: &str) -> ScoreError {
    ScoreError::Unusable(format!(
        "the expected query {:?} cannot be run: {why}",
        crate::process::shown(query)
    ))
}

/// The expected query.
fn gold(task: &Value) -> Result<String, ScoreError> {
    let gold = expected(task);
    let text = gold.as_str().map(str::trim).filter(|text| !text.is_empty());
    text.map(str::to_owned)
        .ok_or_else(|| ScoreError::Unusable(format!("the expected answer {gold} is no query")))
}

/// The query in a text, or in its `<answer>` or `<sql>`: the last block of code in SQL, or all of it.
fn query_in(text: &str) -> Option<&str> {
    let answer = in_tag(text, "answer").or_else(|| in_tag(text, "sql")).unwrap_or(text);
    let found = blocks::last_in(answer, &["sql", "sqlite", "sqlite3"]).unwrap_or(answer).trim();
    Some(found.trim_end_matches(';').trim()).filter(|query| !query.is_empty())
}

/// Whether the rows of a query have an order: `ORDER BY` outside of brackets, texts and comments.
fn is_ordered(query: &str) -> bool {
    let (mut words, mut depth) = (Vec::new(), 0i32);
    let mut chars = query.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\'' | '"' | '`' => while chars.next().is_some_and(|next| next != c) {},
            '[' => while chars.next().is_some_and(|next| next != ']') {},
            '-' if chars.peek() == Some(&'-') => while chars.next().is_some_and(|next| next != '\n') {},
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
                while let Some(next) = chars.next_if(|next| next.is_alphanumeric() || *next == '_') {
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

/// Whether two results have the same rows, in the same order where there is one.
fn same(want: &[Vec<Cell>], found: &[Vec<Cell>], ordered: bool) -> bool {
    let width = want.first().map_or(0, Vec::len);
    if want.len() != found.len() || want.iter().chain(found).any(|row| row.len() != width) {
        return false;
    }
    let same_row = |(a, b): (&Vec<Cell>, &Vec<Cell>)| a.iter().zip(b).all(|(a, b)| a.same(b));
    if ordered {
        return want.iter().zip(found).all(same_row);
    }
    // Columns in floating point come last: values that are the same but for rounding must not decide where a
    // row stands among others.
    let is_real = |at: &usize| want.iter().chain(found).any(|row| row[*at].is_real());
    let (real, exact): (Vec<usize>, Vec<usize>) = (0..width).partition(is_real);
    let columns = [exact, real].concat();
    let order = |a: &Vec<Cell>, b: &Vec<Cell>| {
        let cells = columns.iter().map(|at| a[*at].order(&b[*at]));
        cells.fold(std::cmp::Ordering::Equal, std::cmp::Ordering::then)
    };
    let (mut want, mut found) = (want.to_vec(), found.to_vec());
    want.sort_by(order);
    found.sort_by(order);
    want.iter().zip(&found).all(same_row)
}

#[cfg(test)]
mod tests;
