//! Prompt templates with variables such as `{{ question }}` and `{{ task.row.field }}`.

use serde_json::Value;

/// A parsed prompt template: literal text and variables.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PromptTemplate(Vec<TemplatePart>);

#[derive(Debug, Clone, PartialEq)]
enum TemplatePart {
    Text(String),
    /// A variable, as the names of nested fields from the outermost to the innermost.
    Hole(Vec<String>),
}

impl PromptTemplate {
    /// Parses a prompt template whose variables start with one of the names in `known`.
    ///
    /// # Errors
    /// Returns an error if a `{{` is not closed, or if a variable starts with another name.
    pub fn new(text: &str, known: &[&str]) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{{") {
            let (hole, after) = after.split_once("}}").ok_or("a {{ is not closed by }}")?;
            let path: Vec<String> = hole.trim().split('.').map(str::to_owned).collect();
            if !known.contains(&path[0].as_str()) {
                return Err(format!(
                    "{{{{ {} }}}} is not a variable of the template; use one of {}",
                    hole.trim(),
                    known.join(", ")
                ));
            }
            parts.push(TemplatePart::Text(before.to_owned()));
            parts.push(TemplatePart::Hole(path));
            rest = after;
        }
        parts.push(TemplatePart::Text(rest.to_owned()));
        Ok(PromptTemplate(parts))
    }

    /// Returns the prompt with the values of the template's variables: strings verbatim, all other
    /// values as JSON. Inserted text is not expanded again, so an answer cannot introduce a
    /// variable.
    ///
    /// # Errors
    /// Returns an error that names the variable if a value is missing.
    pub fn fill_template(&self, values: &Value) -> Result<String, String> {
        let mut prompt = String::new();
        for part in &self.0 {
            match part {
                TemplatePart::Text(text) => prompt.push_str(text),
                TemplatePart::Hole(path) => {
                    let found = path.iter().try_fold(values, |value, name| value.get(name));
                    match found.ok_or_else(|| {
                        format!("the template variable {} has no value", path.join("."))
                    })? {
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
    fn template_does_not_expand_inserted_text() {
        let template = PromptTemplate::new(
            "Q: {{question}} A: {{ task.row.n }}{{ list }}",
            &["question", "task", "list"],
        );
        let values =
            json!({ "question": "{{ task }}?", "task": { "row": { "n": 5 } }, "list": ["a"] });
        assert_eq!(template.unwrap().fill_template(&values).unwrap(), "Q: {{ task }}? A: 5[\"a\"]");
    }

    #[test]
    fn template_errors_name_invalid_variable() {
        assert_eq!(PromptTemplate::new("{{ a", &["a"]).unwrap_err(), "a {{ is not closed by }}");
        assert_eq!(
            PromptTemplate::new("{{ b }}", &["a", "c"]).unwrap_err(),
            "{{ b }} is not a variable of the template; use one of a, c"
        );
        let error = PromptTemplate::new("{{ a.b }}", &["a"])
            .unwrap()
            .fill_template(&json!({ "a": {} }))
            .unwrap_err();
        assert_eq!(error, "the template variable a.b has no value");
    }
}
