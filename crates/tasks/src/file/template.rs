//! Question templates, which combine several fields: `"{Body} {Question}"`.
//!
//! `{PATH}` stands for a field of the row, `{{` and `}}` for braces. A list becomes lettered lines
//! (`A. …`), in the order in which the scorer `choice` counts options. An object with `text` and
//! `label` uses its labels, a list of objects with a label and a text uses their labels, and any
//! other object uses its field names.

use levade_reward::{OPTION_LABELS, OPTION_TEXTS, split_letters};
use serde_json::{Map, Value};

use super::json_text;
use crate::Task;

/// Names of the fields that list the options of a question, as in the scorer `choice`.
pub(super) const CHOICES: [&str; 2] = ["choices", "options"];

/// A part of a question template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TemplatePart<'t> {
    /// Literal text of the template.
    Text(&'t str),
    /// Path of a field whose value is inserted.
    Field(&'t str),
}

/// Parses a question template. Returns `None` if the text contains no placeholder, and is a field
/// path itself.
///
/// # Errors
/// Returns a description of the problem if a brace is not matched or encloses no name.
pub(super) fn parse_parts(template: &str) -> Result<Option<Vec<TemplatePart<'_>>>, String> {
    if !template.contains(['{', '}']) {
        return Ok(None);
    }
    let mut parts = Vec::new();
    let mut rest = template;
    while let Some(at) = rest.find(['{', '}']) {
        let (text, braces) = rest.split_at(at);
        if !text.is_empty() {
            parts.push(TemplatePart::Text(text));
        }
        if braces.starts_with("{{") || braces.starts_with("}}") {
            parts.push(TemplatePart::Text(&braces[..1]));
            rest = &braces[2..];
            continue;
        }
        let inside = braces.strip_prefix('{').and_then(|inside| inside.split_once('}'));
        let (name, after) = inside
            .ok_or("the template has an unmatched brace; write {{ or }} for a literal brace")?;
        if name.trim().is_empty() || name.contains('{') {
            return Err(format!(
                "the template has {{{name}}}, which is not a field name; write {{{{ for a literal \
                 brace"
            ));
        }
        parts.push(TemplatePart::Field(name.trim()));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(TemplatePart::Text(rest));
    }
    Ok(Some(parts))
}

/// Returns the paths of the fields from which a question or a question template is read.
pub(super) fn list_field_paths(question: &str) -> Vec<&str> {
    match parse_parts(question) {
        Ok(Some(parts)) => parts
            .into_iter()
            .filter_map(|part| match part {
                TemplatePart::Field(path) => Some(path),
                TemplatePart::Text(_) => None,
            })
            .collect(),
        _ => vec![question],
    }
}

/// Description of the values that a question template can contain.
const NEEDED: &str = "a string, a number, or a list or object of strings, because a \
    question template contains it";

/// Converts a field value to the text of a question. A string is unchanged, and a list becomes
/// lettered lines.
///
/// # Errors
/// Returns the expected form if the value cannot be converted.
pub(super) fn to_question_text(value: &Value) -> Result<String, &'static str> {
    const NO_MESSAGES: &str = "a string, because a question template contains it: a list of \
        messages can only be a complete question";
    let is_message = |item: &Value| item.get("role").or(item.get("from")).is_some();
    let lines = match value {
        Value::Array(list) if list.iter().any(is_message) => return Err(NO_MESSAGES),
        Value::String(text) if json_text::parse_message_text(text) != Ok(None) => {
            return Err(NO_MESSAGES);
        }
        Value::String(text) => return Ok(text.clone()),
        Value::Array(list) => option_lines(list)?,
        Value::Object(table) => match table.get("text").map(|texts| (texts, table.get("label"))) {
            Some((Value::Array(texts), Some(Value::Array(labels))))
                if texts.len() == labels.len() =>
            {
                let named = labels.iter().zip(texts);
                let named = named
                    .map(|(label, text)| option_line(&scalar_text(label).ok_or(NEEDED)?, text));
                named.collect::<Result<_, _>>()?
            }
            Some((Value::Array(_), Some(Value::Array(_)))) => {
                return Err("an object with as many labels as texts, because a question template \
                            contains it");
            }
            Some((Value::Array(texts), _)) => option_lines(texts)?,
            _ => {
                let mut by_name: Vec<_> =
                    table.iter().filter(|(_, value)| !value.is_null()).collect();
                by_name.sort_by(|a, b| a.0.cmp(b.0));
                by_name
                    .into_iter()
                    .map(|(name, value)| option_line(name, value))
                    .collect::<Result<_, _>>()?
            }
        },
        Value::Null => return Ok(String::new()),
        value => return scalar_text(value).ok_or(NEEDED),
    };
    Ok(lines.join("\n"))
}

fn option_line(name: &str, value: &Value) -> Result<String, &'static str> {
    let text = scalar_text(value).ok_or(NEEDED)?;
    // Options in data sets such as AQuA include their letters: `A)21`.
    let has_name = text
        .trim_start_matches('(')
        .strip_prefix(name)
        .is_some_and(|rest| rest.starts_with([')', '.', ':']));
    Ok(if has_name { text } else { format!("{name}. {text}") })
}

fn option_lines(list: &[Value]) -> Result<Vec<String>, &'static str> {
    let texts: Vec<String> = list
        .iter()
        .map(|item| scalar_text(option_text(item)).ok_or(NEEDED))
        .collect::<Result<_, _>>()?;
    if !texts.is_empty() && split_letters(&texts).is_some() {
        return Ok(texts);
    }
    let labels: Option<Vec<String>> = list.iter().map(option_label).collect();
    match labels {
        Some(labels) => labels
            .iter()
            .zip(list)
            .map(|(label, item)| option_line(label, option_text(item)))
            .collect(),
        None => list
            .iter()
            .enumerate()
            .map(|(at, item)| option_line(&option_letter(at), option_text(item)))
            .collect(),
    }
}

/// Returns whether the row lists options of which the first two are shown neither in the question
/// nor in a message.
pub(super) fn hides_choices(task: &Task, row: &Map<String, Value>) -> bool {
    let listed = CHOICES.iter().find_map(|name| to_question_text(row.get(*name)?).ok());
    let Some(listed) = listed.filter(|listed| listed.lines().count() > 1) else { return false };
    let texts: Vec<&str> =
        task.messages.iter().map(|turn| &*turn.content).chain([&*task.question]).collect();
    // The text of an option without its letter.
    let mut options =
        listed.lines().take(2).map(|line| line.split_once(". ").map_or(line, |(_, text)| text));
    !options.all(|option| texts.iter().any(|text| text.contains(option.trim())))
}

/// Returns the name of the field that lists the options in most of the rows.
pub(super) fn find_choices_field<'r>(
    mut rows: impl Iterator<Item = &'r Map<String, Value>>,
) -> &'static str {
    let found = rows.find_map(|row| CHOICES.into_iter().find(|name| row.contains_key(*name)));
    found.unwrap_or(CHOICES[0])
}

/// Returns the text of an option. If the option is an object, the text is one of its fields.
fn option_text(item: &Value) -> &Value {
    OPTION_TEXTS
        .iter()
        .find_map(|name| item.get(*name).filter(|value| !value.is_null()))
        .unwrap_or(item)
}

/// Returns the label of an option that is an object with a label and a text, or `None` otherwise.
fn option_label(item: &Value) -> Option<String> {
    OPTION_LABELS.iter().find_map(|name| scalar_text(item.get(*name)?))
}

fn scalar_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.trim().to_owned()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

/// Returns the letter of the option at index `at`, or its number if the index is beyond Z.
fn option_letter(at: usize) -> String {
    match u8::try_from(at).ok().filter(|at| *at < 26) {
        Some(at) => char::from(b'A' + at).to_string(),
        None => (at + 1).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn template_parses_fields_and_escaped_braces() {
        let all = parse_parts("{Body} Q: {extra.question}{{x}}").unwrap().unwrap();
        assert_eq!(
            all,
            [
                TemplatePart::Field("Body"),
                TemplatePart::Text(" Q: "),
                TemplatePart::Field("extra.question"),
                TemplatePart::Text("{"),
                TemplatePart::Text("x"),
                TemplatePart::Text("}"),
            ]
        );
        assert_eq!(parse_parts("extra.question"), Ok(None));
        assert_eq!(list_field_paths("{a} and { b.0 }"), ["a", "b.0"]);
        assert_eq!(list_field_paths("question"), ["question"]);
        for wrong in ["{a", "a}", "{}", "{ }", "{a{b}}"] {
            assert!(parse_parts(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn list_values_become_lettered_lines() {
        for (value, want) in [
            (json!(["red", " green ", 3]), "A. red\nB. green\nC. 3"),
            (json!({"text": ["x", "y"], "label": ["1", "2"]}), "1. x\n2. y"),
            (json!({"text": ["x", "y"]}), "A. x\nB. y"),
            (json!({"B": "y", "A": "x"}), "A. x\nB. y"),
            (json!([{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]), "A. x\nB. y"),
            (json!([{"key": "2", "value": "x"}, {"key": "1", "value": "y"}]), "2. x\n1. y"),
            (json!([{"text": "x"}, {"label": "B", "text": "y"}]), "A. x\nB. y"),
            (json!(["B) 21", "A)22"]), "B) 21\nA)22"),
            (json!(["A) 21", "A) 22"]), "A) 21\nB. A) 22"),
            (json!(["A)21", "B)21.5", "(C) 7"]), "A)21\nB)21.5\n(C) 7"),
            (json!(["A dog", "Both"]), "A. A dog\nB. Both"),
            (json!("plain"), "plain"),
            (json!(7), "7"),
            (json!(null), ""),
        ] {
            assert_eq!(to_question_text(&value).unwrap(), want, "{value}");
        }
        assert_eq!(to_question_text(&json!("    indented\n")).unwrap(), "    indented\n");
        assert!(to_question_text(&json!([["a"], ["b"]])).is_err());
        assert!(to_question_text(&json!({"text": ["x", "y"], "label": ["1"]})).is_err());
        assert!(to_question_text(&json!("[{\"role\": \"user\", \"content\": \"x\"}]")).is_err());
        assert!(to_question_text(&json!("[{'role': 'user', 'content': 'x'}]")).is_err());
        assert!(to_question_text(&json!([{"role": "user", "content": "x"}])).is_err());
        let many = to_question_text(&json!(vec!["x"; 28])).unwrap();
        assert!(many.contains("Z. x\n27. x\n28. x"), "{many}");
    }
}
