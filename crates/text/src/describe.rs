//! Describes tools in the system prompt for chat templates that do not describe them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::calls::{Syntax, SyntaxTags};
use crate::{ToolSpec, python_json};

/// Format of the tool descriptions in the system prompt. Used only if the chat template does not
/// describe tools.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolPrompt {
    /// The prompt contains the complete JSON schema of every tool.
    #[default]
    Full,
    /// The prompt contains one line per tool: its name, the names and types of its parameters, and
    /// its description. Descriptions of parameters are omitted.
    Compact,
}

/// Returns the section of the system prompt that describes the tools and how to call them. `quote`
/// is applied to text that comes from the tools.
pub(crate) fn describe_tools(
    tools: &[ToolSpec],
    tool_prompt: ToolPrompt,
    syntax: &dyn Syntax,
    quote: impl Fn(&str) -> String,
) -> String {
    let lines: Vec<String> = match tool_prompt {
        ToolPrompt::Full => {
            tools.iter().map(|tool| python_json::dumps(&tool.to_openai())).collect()
        }
        ToolPrompt::Compact => tools.iter().map(format_signature).collect(),
    };
    let lines = quote(&lines.join("\n"));
    let SyntaxTags { how, example, .. } = syntax.syntax_tags();
    match tool_prompt {
        ToolPrompt::Full => format!(
            "You can call tools. They are:\n<tools>\n{lines}\n</tools>\n\n\
             To call one, write {how}, like this:\n{example}"
        ),
        ToolPrompt::Compact => format!("Tools:\n{lines}\nCall: {example}"),
    }
}

/// Returns the signature of a tool as `name(first: type, second?: type): description`, with a
/// question mark after optional parameters.
fn format_signature(tool: &ToolSpec) -> String {
    let required: Vec<&str> = tool.parameters["required"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let parameters: Vec<String> = tool.parameters["properties"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, schema)| {
            let optional = if required.contains(&name.as_str()) { "" } else { "?" };
            format!("{name}{optional}: {}", type_name(schema))
        })
        .collect();
    let head = format!("{}({})", tool.name, parameters.join(", "));
    if tool.description.is_empty() { head } else { format!("{head}: {}", tool.description) }
}

/// Returns a short name for the type that a JSON schema describes: its allowed values if the schema
/// lists them, otherwise its type.
fn type_name(schema: &Value) -> String {
    match (&schema["enum"], &schema["type"]) {
        (Value::Array(values), _) => {
            values.iter().map(python_json::dumps).collect::<Vec<_>>().join("|")
        }
        (_, Value::String(kind)) if kind == "array" && schema["items"].is_object() => {
            format!("[{}]", type_name(&schema["items"]))
        }
        (_, Value::Array(kinds)) => kinds.iter().map(plain_text).collect::<Vec<_>>().join("|"),
        (_, Value::String(kind)) => kind.clone(),
        _ => "any".into(),
    }
}

fn plain_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::calls::CallFormat;
    use crate::calls::tests::parse_completion;

    #[test]
    fn compact_tool_prompt_lists_signatures() {
        let syntax = CallFormat::Hermes.syntax();
        let tool = ToolSpec {
            name: "search".into(),
            description: "Finds pages.".into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "left out"},
                    "kind": {"enum": ["web", "news"]},
                    "sites": {"type": "array", "items": {"type": "string"}},
                    "limit": {"type": ["integer", "null"]},
                    "more": {},
                },
                "required": ["query"],
            }),
        };
        let expected = "search(query: string, kind?: \"web\"|\"news\", sites?: [string], limit?: \
                        integer|null, more?: any): Finds pages.";
        assert_eq!(format_signature(&tool), expected);
        let bare =
            ToolSpec { name: "now".into(), description: String::new(), parameters: Value::Null };
        assert_eq!(format_signature(&bare), "now()");
        let section =
            describe_tools(&[tool.clone(), bare], ToolPrompt::Compact, syntax, str::to_owned);
        assert!(section.starts_with(&format!("Tools:\n{expected}\nnow()\nCall: <tool_call>\n")));
        let full =
            describe_tools(std::slice::from_ref(&tool), ToolPrompt::Full, syntax, str::to_owned);
        assert!(
            full.contains(&python_json::dumps(&tool.to_openai())) && full.len() > section.len()
        );
        // The example call is not a valid call itself, so that a model does not copy it verbatim.
        let found = parse_completion(CallFormat::Hermes, &section, &[]);
        assert!(found.calls[0].is_err());
    }
}
