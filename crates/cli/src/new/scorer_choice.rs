//! Chooses the scorer that fits the expected answers of the tasks in a file.

use std::sync::Arc;

use levade_reward::{self as reward, ScorerKind};
use levade_run::testbed;
use levade_tasks::Task;
use serde_json::Value;

use super::Scorer;

/// Names of the row fields that list the options of a question.
pub const OPTIONS: [&str; 2] = ["choices", "options"];

/// Kind of a task's expected answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerKind {
    /// The expected answer is a number without further text.
    Number,
    /// The expected answer is a formula, a tuple, a fraction, or a solution that ends with a
    /// number.
    Maths,
    /// The expected answer is a single capital letter.
    Letter,
    /// The expected answer consists of words, or is a truth value.
    Text,
    /// The expected answer consists of tests of a program.
    Tests,
    /// The expected answer is a program.
    Program,
    /// The expected answer is an SQL query.
    Query,
    /// The expected answer is a table, or a list of lists or tables.
    Table,
}

/// Chooses the scorer that fits the expected answers of all tasks.
///
/// # Errors
/// Returns a message if no scorer of this command fits. The message names the expected answer of a
/// task, and what the user can do.
pub fn choose_scorer(tasks: &[Task]) -> Result<Scorer, String> {
    let has = |name: &str| {
        tasks.iter().all(|task| task.row.get(name).is_some_and(|value| !value.is_null()))
    };
    if has("tests") {
        return Ok(Scorer::Code);
    }
    if OPTIONS.into_iter().any(has) {
        return Ok(Scorer::Choice);
    }
    let kinds: Vec<AnswerKind> = tasks.iter().map(|task| classify_answer(&task.answer)).collect();
    let first = |wanted: AnswerKind| {
        kinds.iter().position(|kind| *kind == wanted).map(|at| tasks[at].id.as_str())
    };
    if kinds.iter().all(|kind| *kind == AnswerKind::Tests) {
        return Ok(Scorer::Code);
    }
    for (kind, what) in [
        (
            AnswerKind::Table,
            "expects a table or a list of lists; name a string in it with --answer FIELD.NAME",
        ),
        (
            AnswerKind::Program,
            "expects a program, which no scorer compares; name a field with tests with --answer, \
             or give rows a field `tests` (docs/scorers.md#code)",
        ),
        (
            AnswerKind::Query,
            "expects a query, which the scorer `sql` compares by its rows; that needs databases: \
             write `scorer = { kind = \"sql\", databases = … }` (docs/scorers.md#sql) in a recipe \
             that --scorer answer writes",
        ),
        (AnswerKind::Tests, "expects tests of a program, but other tasks do not"),
    ] {
        if let Some(id) = first(kind) {
            return Err(format!("the task {id} {what}; or set --scorer"));
        }
    }
    let all = |wanted: &[AnswerKind]| kinds.iter().all(|kind| wanted.contains(kind));
    let shows_options = || tasks.iter().all(|task| count_options(&visible_text(task)) > 1);
    Ok(if all(&[AnswerKind::Letter]) {
        if shows_options() { Scorer::Choice } else { Scorer::Answer }
    } else if all(&[AnswerKind::Number]) {
        Scorer::Numeric
    } else if all(&[AnswerKind::Number, AnswerKind::Maths, AnswerKind::Letter]) {
        // A letter among formulas is a variable.
        Scorer::Maths
    } else {
        Scorer::Answer
    })
}

/// Returns the maximum number of options that questions show, over the rows that do not list their
/// options. Returns `None` if this number is at most 4, the default of the scorer `choice`, or if
/// all rows list their options.
pub fn max_shown_options(tasks: &[Task]) -> Option<usize> {
    let max_options = tasks
        .iter()
        .filter(|task| !OPTIONS.iter().any(|name| task.row.contains_key(*name)))
        .map(|task| count_options(&visible_text(task)))
        .max()?;
    (max_options > 4).then_some(max_options)
}

fn create_scorer_kind(name: &str, keys: Value) -> Result<ScorerKind, String> {
    serde_json::from_value(serde_json::json!({ name: keys })).map_err(|error| error.to_string())
}

/// Checks that a scorer can compare with the expected answer of each task. A run does the same
/// check.
///
/// # Errors
/// Returns a message that names the first task whose expected answer the scorer cannot use, and the
/// reason.
pub fn check_scorer(scorer: Scorer, tasks: &[Task]) -> Result<(), String> {
    let scorer: Arc<dyn reward::Scorer> = match scorer {
        Scorer::Numeric => create_scorer_kind("numeric", serde_json::json!({}))?.scorer(),
        Scorer::Maths => create_scorer_kind("maths", serde_json::json!({}))?.scorer(),
        Scorer::Answer => create_scorer_kind("answer", serde_json::json!({}))?.scorer(),
        Scorer::Choice => {
            let options = max_shown_options(tasks).unwrap_or(4);
            create_scorer_kind("choice", serde_json::json!({ "options": options }))?.scorer()
        }
        Scorer::Code => match create_scorer_kind("code", serde_json::json!({}))? {
            ScorerKind::Code(keys) => testbed::create_code_scorer(&keys)?,
            other => other.scorer(),
        },
        Scorer::Python => return Ok(()),
    };
    for task in tasks {
        let value = serde_json::to_value(task).map_err(|error| error.to_string())?;
        scorer.check_task(&value).map_err(|error| format!("task {}: {error}", task.id))?;
    }
    Ok(())
}

/// Returns the text in which a task can show the options of its question: its messages and its
/// question.
fn visible_text(task: &Task) -> String {
    let texts = task.messages.iter().map(|message| message.content.to_string());
    texts.chain([task.question.clone()]).collect::<Vec<_>>().join("\n")
}

/// Counts the consecutive lettered options, from A on, that a text shows, such as `A. …` or `B) …`.
fn count_options(text: &str) -> usize {
    let mut rest = text;
    let mut count = 0;
    for letter in 'A'..='Z' {
        let marks = [format!("{letter}."), format!("{letter})"), format!("{letter}:")];
        let found = marks.iter().filter_map(|mark| {
            rest.match_indices(mark.as_str())
                .map(|(at, _)| at)
                .find(|at| !rest[..*at].ends_with(char::is_alphanumeric))
        });
        let Some(at) = found.min() else { break };
        rest = &rest[at + 2..];
        count += 1;
    }
    count
}

fn classify_answer(answer: &Value) -> AnswerKind {
    match answer {
        Value::Object(_) => AnswerKind::Table,
        Value::Array(items) if items.iter().any(|item| item.is_array() || item.is_object()) => {
            AnswerKind::Table
        }
        Value::Array(items) => {
            let kinds: Vec<AnswerKind> = items.iter().map(classify_answer).collect();
            let is_all = |wanted: &[AnswerKind]| kinds.iter().all(|kind| wanted.contains(kind));
            match kinds.first() {
                Some(first) if is_all(&[*first]) => *first,
                _ if is_all(&[AnswerKind::Number, AnswerKind::Maths]) => AnswerKind::Maths,
                _ => AnswerKind::Text,
            }
        }
        Value::String(text) => classify_text(text.trim()),
        Value::Number(_) => AnswerKind::Number,
        Value::Bool(_) | Value::Null => AnswerKind::Text,
    }
}

fn is_number(text: &str) -> bool {
    let text = text.trim().replace([',', '$'], "");
    text.contains(|c: char| c.is_ascii_digit()) && text.parse::<f64>().is_ok()
}

/// Returns whether a text contains tests of a program, as JSON or as Python.
fn contains_tests(text: &str) -> bool {
    match serde_json::from_str(text) {
        Ok(Value::Object(table)) => {
            table.contains_key("inputs") && table.contains_key("outputs")
                || table.contains_key("test_cases")
                || table.contains_key("assert_case")
        }
        Ok(Value::Array(list)) => {
            !list.is_empty()
                && list
                    .iter()
                    .all(|item| item.get("input").is_some() && item.get("output").is_some())
        }
        _ => text.contains("def check(") || text.to_lowercase().starts_with("assert "),
    }
}

fn classify_text(text: &str) -> AnswerKind {
    let lower = text.to_lowercase();
    let starts = |prefixes: &[&str]| prefixes.iter().any(|word| lower.starts_with(word));
    match text {
        text if is_number(text) => AnswerKind::Number,
        text if text.len() == 1 && text.bytes().all(|byte| byte.is_ascii_uppercase()) => {
            AnswerKind::Letter
        }
        text if contains_tests(text) => AnswerKind::Tests,
        _ if starts(&["select ", "select\n", "with "]) && lower.contains("select") => {
            AnswerKind::Query
        }
        _ if starts(&["def ", "class ", "import ", "```python"]) && text.contains('\n') => {
            AnswerKind::Program
        }
        // Answers of GSM8K contain the complete solution.
        text if text.rsplit_once("####").is_some_and(|(_, last)| is_number(last)) => {
            AnswerKind::Maths
        }
        text if text.contains('\\') || text.contains('^') || is_formula(text) => AnswerKind::Maths,
        _ => AnswerKind::Text,
    }
}

/// Returns whether a text without words is a formula: `3/7`, `(1, 3)`, `x+2`, `5%`. A date, a
/// telephone number and two integers with a hyphen (`2-1`) are not formulas.
fn is_formula(text: &str) -> bool {
    let chars: Vec<char> = text.chars().collect();
    let is_plain = chars
        .iter()
        .all(|c| c.is_ascii_alphanumeric() || " ()[]{},.+-*/=<>|!%:$√π∞≤≥±".contains(*c));
    let has_word = chars.windows(2).any(|pair| pair.iter().all(|c| c.is_alphabetic()));
    let has_gap =
        chars.windows(3).any(|at| at[0].is_ascii_digit() && at[1] == ' ' && at[2].is_ascii_digit());
    let groups: Vec<&str> = text.split(['-', '/', '.']).collect();
    let is_dated = groups.len() > 2 && groups.iter().all(|group| group.parse::<u32>().is_ok());
    // Two joined integers are the score of a match or a range of years.
    let is_integer =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_joined = text.split_once('-').is_some_and(|(a, b)| is_integer(a) && is_integer(b));
    is_plain
        && chars.iter().any(char::is_ascii_digit)
        && !(has_word || has_gap || is_dated || is_joined || text.starts_with('+'))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tasks(answers: &[Value]) -> Vec<Task> {
        answers
            .iter()
            .enumerate()
            .map(|(at, answer)| Task {
                id: format!("rows-{}", at + 1),
                question: "What?".into(),
                answer: answer.clone(),
                ..Task::default()
            })
            .collect()
    }

    #[test]
    fn choose_scorer_considers_every_answer() {
        for (answers, scorer) in [
            (vec![json!("72"), json!(7.5), json!("$1,200"), json!("-3")], Scorer::Numeric),
            (vec![json!(["72", "72.0"])], Scorer::Numeric),
            (vec![json!("72"), json!("48/2 = 24\n#### 24")], Scorer::Maths),
            (
                vec![
                    json!("7"),
                    json!("\\frac{1}{2}"),
                    json!("(1, 3)"),
                    json!("[2,3)"),
                    json!("x+1"),
                ],
                Scorer::Maths,
            ),
            (vec![json!("3/7"), json!("5%"), json!("2:3")], Scorer::Maths),
            (vec![json!("7"), json!("Paris")], Scorer::Answer),
            (
                vec![
                    json!(["Paris", "Lutetia"]),
                    json!(true),
                    json!("2026-01-02"),
                    json!("+1 555 0100"),
                ],
                Scorer::Answer,
            ),
            (vec![json!("2026-01-02"), json!("1/2/2026")], Scorer::Answer),
            (
                vec![json!("2-1"), json!("3–0"), json!("1914-1918"), json!("555-1234")],
                Scorer::Answer,
            ),
            (vec![json!("2-x"), json!("$2-1$"), json!("2 - 1"), json!("-3")], Scorer::Maths),
            (vec![json!("A"), json!("B")], Scorer::Answer),
            (vec![json!(["assert f() == 1"])], Scorer::Code),
            (vec![json!("{\"inputs\": [\"1\"], \"outputs\": [\"2\"]}")], Scorer::Code),
            (vec![json!("def check(candidate):\n    assert candidate() == 1")], Scorer::Code),
        ] {
            assert_eq!(choose_scorer(&tasks(&answers)), Ok(scorer), "{answers:?}");
        }
        for (answers, why) in [
            (vec![json!("x"), json!({"text": ["x"]})], "rows-2 expects a table"),
            (vec![json!([["x"]])], "rows-1 expects a table"),
            (vec![json!("def f():\n    return 1")], "rows-1 expects a program"),
            (vec![json!("SELECT a FROM t")], "expects a query"),
            (vec![json!(["assert f()"]), json!("4")], "rows-1 expects tests"),
        ] {
            let error = choose_scorer(&tasks(&answers)).unwrap_err();
            assert!(error.contains(why) && error.contains("--scorer"), "{error}");
        }
    }

    #[test]
    fn choose_scorer_returns_choice_for_shown_options() {
        let mut all = tasks(&[json!("A"), json!("E")]);
        all.iter_mut()
            .for_each(|task| task.question = "Which?\nA. x\nB. y\n(C) z\nD) w\nE. v".into());
        assert_eq!((choose_scorer(&all), max_shown_options(&all)), (Ok(Scorer::Choice), Some(5)));
        assert!(check_scorer(Scorer::Choice, &all).is_ok());
        all[1].question = "What grade?".into();
        assert_eq!(choose_scorer(&all), Ok(Scorer::Answer));
    }

    #[test]
    fn check_scorer_names_task_with_unusable_answer() {
        let all = tasks(&[json!("72"), json!("Paris")]);
        let error = check_scorer(Scorer::Numeric, &all).unwrap_err();
        assert!(error.starts_with("task rows-2: the expected answer \"Paris\""), "{error}");
        for scorer in [Scorer::Maths, Scorer::Answer, Scorer::Python] {
            assert_eq!(check_scorer(scorer, &all), Ok(()), "{scorer:?}");
        }
    }
}
