//! Prompts with holes: `{{ question }}`, `{{ task.row.field }}`.

use serde_json::Value;

/// A prompt, in pieces.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Template(Vec<Piece>);

#[derive(Debug, Clone, PartialEq)]
enum Piece {
    Text(String),
    /// Names from the outermost in.
    Hole(Vec<String>),
}

impl Template {
    /// Reads a template whose holes begin with one of these names.
    ///
    /// # Errors
    /// When a hole is not closed, or begins with another name.
    pub fn new(text: &str, known: &[&str]) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{{") {
            let (hole, after) = after.split_once("}}").ok_or("a {{ is not closed by }}")?;
            let path: Vec<String> = hole.trim().split('.').map(str::to_owned).collect();
            if !known.contains(&path[0].as_str()) {
                return Err(format!("{{{{ {} }}}} is none of {}", hole.trim(), known.join(", ")));
            }
            pieces.push(Piece::Text(before.to_owned()));
            pieces.push(Piece::Hole(path));
            rest = after;
        }
        pieces.push(Piece::Text(rest.to_owned()));
        Ok(Template(pieces))
    }

    /// The prompt with its holes filled: a text as it is, anything else as JSON. Filled once, so that what an
    /// answer says is no hole.
    ///
    /// # Errors
    /// When there is nothing to fill a hole with: which.
    pub fn fill(&self, values: &Value) -> Result<String, String> {
        let mut prompt = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Text(text) => prompt.push_str(text),
                Piece::Hole(path) => {
                    let found = path.iter().try_fold(values, |value, name| value.get(name));
                    match found
                        .ok_or_else(|| format!("there is no {} to fill the template with", path.join(".")))?
                    {
                        Value::String(text) => prompt.push_str(text),
                        other => prompt.push_str(&other.to_string()),
                    }
                }
            }
        }
        Ok(prompt)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn holes_are_filled_once() {
        let template =
            Template::new("Q: {{question}} A: {{ task.row.n }}{{ list }}", &["question", "task", "list"]);
        let values = json!({ "question": "{{ task }}?", "task": { "row": { "n": 5 } }, "list": ["a"] });
        assert_eq!(template.unwrap().fill(&values).unwrap(), "Q: {{ task }}? A: 5[\"a\"]");
    }

    #[test]
    fn holes_that_nothing_fills_are_named() {
        assert_eq!(Template::new("{{ a", &["a"]).unwrap_err(), "a {{ is not closed by }}");
        assert_eq!(Template::new("{{ b }}", &["a", "c"]).unwrap_err(), "{{ b }} is none of a, c");
        let error = Template::new("{{ a.b }}", &["a"]).unwrap().fill(&json!({ "a": {} })).unwrap_err();
        assert_eq!(error, "there is no a.b to fill the template with");
    }
}
