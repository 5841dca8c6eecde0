//! Finds the fields of question and answer in a row, and resolves paths into nested fields.

use serde_json::{Map, Value};

use super::template;

/// Common pairs of the fields for question and answer, most specific first. The first pair that a
/// row has is used.
const LAYOUTS: [(&str, &str); 7] = [
    ("question", "answer"),
    // Layout of verl, and Search-R1's variant of it.
    ("prompt", "reward_model.ground_truth.target"),
    ("prompt", "reward_model.ground_truth"),
    // Layouts of AgentRL: its stored tasks, and field names that it accepts in files.
    (QUERY_PROMPT, "task_answer.answer"),
    ("query", "answer"),
    ("q", "a"),
    ("Question", "Final answer"),
];

/// Names of the fields for the question and the instructions in a task of AgentRL.
pub(super) const QUERY_PROMPT: &str = "query_prompt";
pub(super) const SYSTEM_PROMPT: &str = "system_prompt";

/// Common names of question fields, most likely first. They are suggested if the question field is
/// missing.
const QUESTIONS: [&str; 9] = [
    "question",
    "prompt",
    "problem",
    "query",
    "instruction",
    "input",
    "messages",
    "conversations",
    "text",
];
const ANSWERS: [&str; 14] = [
    "answer",
    "golden_answers",
    "answers",
    "final_answer",
    "expected_answer",
    "ground_truth",
    "reward_model.ground_truth",
    "target",
    "label",
    "output",
    "response",
    "solution",
    "completion",
    "gold",
];

/// Name of the field that names the agent, as in verl's layout.
pub(super) const AGENT: &str = "agent_name";

/// Paths of the fields that contain the question and the answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RowLayout {
    pub question: String,
    pub answer: String,
}

/// Returns the common layouts, in which the recipe's fields replace the default fields.
fn list_layouts<'n>(question: &'n str, answer: &'n str) -> [(&'n str, &'n str); 7] {
    let (default_question, default_answer) = LAYOUTS[0];
    LAYOUTS.map(|(q, a)| {
        (
            if question == default_question { q } else { question },
            if answer == default_answer { a } else { answer },
        )
    })
}

impl RowLayout {
    /// Returns the first layout whose fields the row has, with the recipe's fields `question` and
    /// `answer`. If no layout matches, returns a layout whose columns the row has, so that an error
    /// names the missing field.
    pub fn for_row(row: &Map<String, Value>, question: &str, answer: &str) -> Self {
        let layouts = list_layouts(question, answer);
        // An empty name means that the field is not needed.
        let has = |path: &str| path.is_empty() || find_field(row, path).is_some();
        let has_question = |question: &str| {
            has(question) || template::list_field_paths(question).into_iter().all(has)
        };
        let has_column =
            |path: &str| has(path) || row.contains_key(path.split('.').next().unwrap_or_default());
        let complete_layout = layouts.iter().find(|(q, a)| has_question(q) && has(a));
        let (question, answer) = *complete_layout
            .or_else(|| {
                layouts
                    .iter()
                    .rev()
                    .find(|(q, a)| (has_question(q) || has_column(q)) && has_column(a))
            })
            .unwrap_or(&layouts[0]);
        RowLayout { question: question.to_owned(), answer: answer.to_owned() }
    }

    /// Returns whether `column` can contain a field of any layout. Such columns must be readable;
    /// other columns can be left out.
    pub fn can_use_column(column: &str, question: &str, answer: &str) -> bool {
        let leads = |path: &str| leads_to(column, path);
        column == AGENT
            || list_layouts(question, answer).into_iter().any(|(question, answer)| {
                leads(question)
                    || leads(answer)
                    || template::list_field_paths(question).into_iter().any(leads)
            })
    }
}

/// Returns whether `path` is the name of the column, or leads to a field within it.
pub(super) fn leads_to(column: &str, path: &str) -> bool {
    path.strip_prefix(column).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns the paths of the fields of all layouts, with the recipe's fields.
pub(super) fn layout_paths(question: &str, answer: &str) -> Vec<String> {
    let layouts = list_layouts(question, answer);
    let questions = layouts.iter().flat_map(|(question, _)| template::list_field_paths(question));
    let answers = layouts.iter().map(|(_, answer)| *answer);
    let mut paths: Vec<String> = questions.chain(answers).map(str::to_owned).collect();
    paths.sort_unstable();
    paths.dedup();
    paths
}

/// Returns the value at a path such as `reward_model.ground_truth`. A field with exactly this name
/// takes precedence over a nested field. Items of a list are indexed from 0.
pub(super) fn find_field<'r>(row: &'r Map<String, Value>, path: &str) -> Option<&'r Value> {
    if let Some(value) = row.get(path) {
        return Some(value);
    }
    let mut dots = path.rmatch_indices('.');
    dots.find_map(|(dot, _)| find_in_value(row.get(&path[..dot])?, &path[dot + 1..]))
}

fn find_in_value<'r>(value: &'r Value, path: &str) -> Option<&'r Value> {
    match value {
        Value::Object(fields) => find_field(fields, path),
        Value::Array(items) => {
            let (first, rest) =
                path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
            let item = items.get(first.parse::<usize>().ok()?)?;
            rest.map_or(Some(item), |rest| find_in_value(item, rest))
        }
        _ => None,
    }
}

/// Returns the paths of all fields of a row. The fields of a nested object follow the object
/// itself.
pub(super) fn list_paths(row: &Map<String, Value>) -> Vec<String> {
    fn add(row: &Map<String, Value>, before: &str, paths: &mut Vec<String>) {
        for (name, value) in row {
            let path = format!("{before}{name}");
            paths.push(path.clone());
            if let Value::Object(fields) = value {
                add(fields, &format!("{path}."), paths);
            }
        }
    }
    let mut found = Vec::new();
    add(row, "", &mut found);
    found
}

/// A column that is left out of all rows because it cannot be read, with the reason.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SkippedColumn {
    pub column: String,
    pub why: String,
}

/// Returns advice for the error that a row lacks the field `path`, which the recipe sets with the
/// key `key`.
pub(super) fn missing_field_advice(key: &str, path: &str, row: &Map<String, Value>) -> String {
    let known_paths = list_paths(row);
    let usual: &[&str] = match key {
        "question" => &QUESTIONS,
        "answer" => &ANSWERS,
        _ => &[],
    };
    let likeness =
        |other: &str| strsim::normalized_damerau_levenshtein(&last_name(path), &last_name(other));
    let slip = known_paths
        .iter()
        .filter(|other| likeness(other) >= 0.7)
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    let mut meant: Vec<&String> = slip.into_iter().collect();
    for name in usual {
        let named = known_paths.iter().filter(|path| last_name(path) == last_name(name));
        meant.extend(named.filter(|path| !meant.contains(path)).collect::<Vec<_>>());
    }
    let set: Vec<String> =
        meant.into_iter().take(3).map(|path| format!("`{key} = {path:?}`")).collect();
    match &set[..] {
        [] if key == "answer" => {
            "Set `answer` in the recipe to the correct field, complete the row, or set `answer = \
             \"\"` if the task has no expected answer"
                .to_owned()
        }
        [] => format!("Set `{key}` in the recipe to the correct field, or complete the row"),
        set => format!("Set {} in the recipe, or complete the row", set.join(" or ")),
    }
}

fn last_name(path: &str) -> String {
    path.rsplit('.').next().unwrap_or_default().to_lowercase()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(value: Value) -> Map<String, Value> {
        let Value::Object(row) = value else { panic!("{value}") };
        row
    }

    #[test]
    fn field_path_resolves_nested_fields() {
        let row = row(json!({
            "a": {"b": 1, "b.c": 2, "d": {"e": 3}, "list": [{"x": 4}, 5]}, "a.d": {"e": 6, "f": 7}, "n": null,
        }));
        for (path, want) in [
            ("a.b", Some(1)),
            ("a.b.c", Some(2)),
            ("a.d.e", Some(6)),
            ("a.d.f", Some(7)),
            ("a.list.0.x", Some(4)),
            ("a.list.1", Some(5)),
            ("a.list.2", None),
            ("a.list.x", None),
            ("a.x", None),
            ("b", None),
            ("a.b.x", None),
            ("", None),
        ] {
            assert_eq!(find_field(&row, path), want.map(Value::from).as_ref(), "{path}");
        }
        assert_eq!(find_field(&row, "n"), Some(&Value::Null));
    }

    #[test]
    fn layout_is_detected_from_row() {
        let extra = json!({"answer": "4", "question": "?"});
        let verl =
            json!({"prompt": [], "reward_model": {"ground_truth": "2"}, "extra_info": extra});
        assert_eq!(
            layout_of(verl.clone(), "question", "answer"),
            pair("prompt", "reward_model.ground_truth")
        );
        assert_eq!(
            layout_of(verl, "extra_info.question", "answer"),
            pair("extra_info.question", "reward_model.ground_truth")
        );
        let search = json!({"question": "?", "prompt": [], "reward_model": {"ground_truth": {"target": ["2"]}}});
        assert_eq!(
            layout_of(search, "question", "answer"),
            pair("prompt", "reward_model.ground_truth.target")
        );
        assert_eq!(
            layout_of(json!({"question": 1, "answer": 2, "prompt": 3}), "question", "answer"),
            pair("question", "answer")
        );
        assert_eq!(layout_of(json!({"problem": 1}), "question", "x.y"), pair("question", "x.y"));
        assert_eq!(
            layout_of(json!({"problem": 1, "answer": 2}), "question", "answer"),
            pair("question", "answer"),
            "a layout is not begun by its answer alone"
        );
        let null = json!({"prompt": [], "reward_model": null});
        assert_eq!(
            layout_of(null, "question", "answer"),
            pair("prompt", "reward_model.ground_truth")
        );
        assert!(can_use_column("prompt") && can_use_column("question") && can_use_column("extra"));
        assert!(
            !can_use_column("reward_model") && !can_use_column("prompts") && !can_use_column("ext")
        );
    }

    fn layout_of(value: Value, question: &str, answer: &str) -> (String, String) {
        let layout = RowLayout::for_row(&row(value), question, answer);
        (layout.question, layout.answer)
    }

    fn pair(question: &str, answer: &str) -> (String, String) {
        (question.to_owned(), answer.to_owned())
    }

    fn can_use_column(column: &str) -> bool {
        RowLayout::can_use_column(column, "question", "extra.answer")
    }

    #[test]
    fn missing_field_suggests_similar_names() {
        assert_eq!(
            advice_for("answer", "answer", json!({"q": 1, "anwser": 2, "solution": 3})),
            "Set `answer = \"anwser\"` or `answer = \"solution\"` in the recipe, or complete the \
             row"
        );
        assert_eq!(
            advice_for("answer", "answer", json!({"reward": {"ground_truth": 1}})),
            "Set `answer = \"reward.ground_truth\"` in the recipe, or complete the row"
        );
        assert_eq!(
            advice_for("question", "question", json!({"x": 1})),
            "Set `question` in the recipe to the correct field, or complete the row"
        );
    }

    fn advice_for(key: &str, path: &str, value: Value) -> String {
        missing_field_advice(key, path, &row(value))
    }
}
