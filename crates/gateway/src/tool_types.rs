//! Types of tools other than functions: custom tools, tools that the client runs with a schema that
//! the provider publishes, and tools that the provider hosts.
//!
//! Every tool that the client runs is shown to the model as a function, because the client sends
//! the results of its calls. A hosted tool is omitted, because nothing here runs it.

use levade_call::ApiError;
use levade_text::{Arguments, ToolSpec};
use serde_json::{Map, Value, json};

/// Name of the only argument of a custom tool.
pub(crate) const INPUT: &str = "input";

/// Prefixes of the types of tools that providers host, and of the types of such tools' items in a
/// history.
const HOSTED: [&str; 11] = [
    "advisor",
    "code_execution",
    "code_interpreter",
    "file_search",
    "image_generation",
    "mcp",
    "program",
    "tool_search",
    "web_fetch",
    "web_search",
    "x_search",
];

/// Returns whether `kind` is the type of a tool that the provider hosts, or of a history item of
/// such a tool.
pub(crate) fn is_hosted_type(kind: &str) -> bool {
    HOSTED.iter().any(|hosted| kind.starts_with(hosted))
}

/// Returns whether the provider, not the client, runs a tool. For some tool types, a field of the
/// tool decides.
pub(crate) fn is_hosted_tool(tool: &Value) -> bool {
    match tool["type"].as_str().unwrap_or_default() {
        "tool_search" => tool["execution"] != "client",
        "shell" => {
            tool["environment"]["type"].as_str().is_some_and(|kind| kind.starts_with("container"))
        }
        kind => is_hosted_type(kind),
    }
}

/// Returns the error for a tool that the client runs, but whose parameters the request does not
/// contain.
pub(crate) fn unknown_tool_error(tool: &Value, field_path: &str) -> ApiError {
    let name = tool["name"].as_str().map_or_else(String::new, |name| format!(" ({name:?})"));
    let message = format!(
        "{field_path}{name} is of type {}, whose parameters are unknown here, so the model \
         cannot call it; define it as a function with its parameters",
        tool["type"]
    );
    ApiError::field(field_path, message)
}

/// Returns a function definition that represents a custom tool, whose input is free text. The
/// function's only argument is this text.
pub(crate) fn custom_tool_spec(name: String, tool: &Value) -> ToolSpec {
    let input = json!({ "type": "string", "description": "The input, as it stands." });
    let parameters =
        json!({ "type": "object", "properties": { INPUT: input }, "required": [INPUT] });
    let format = &tool["format"];
    let grammar = format["definition"].as_str().or(format["grammar"]["definition"].as_str());
    let mut description = tool["description"].as_str().unwrap_or_default().to_owned();
    if let Some(grammar) = grammar {
        description += &format!("\n\nThe input is of this grammar:\n{grammar}");
    }
    ToolSpec { name, description, parameters }
}

/// Returns the arguments of a call to a custom tool with the text `input`.
pub(crate) fn custom_arguments(input: &str) -> Arguments {
    Map::from_iter([(INPUT.to_owned(), Value::from(input))]).into()
}

/// Returns the text input of a call to a custom tool, or `None` if the arguments are not exactly
/// one text named `input`.
pub(crate) fn custom_input(arguments: &Arguments) -> Option<&str> {
    arguments.get(INPUT).and_then(Value::as_str).filter(|_| arguments.len() == 1)
}

/// Returns a function definition for a tool that the client runs and whose schema its provider has
/// published. Returns `None` if the tool's type has no published schema. A tool without a name is
/// named after its type.
pub(crate) fn published_spec(tool: &Value) -> Option<ToolSpec> {
    let kind = tool["type"].as_str()?;
    let (description, properties, required) = match kind {
        "bash_20241022" | "bash_20250124" => (
            "Runs a command in a bash session that lasts over calls.",
            json!({
                "command": string_type("The command. Required unless the session is restarted."),
                "restart": { "type": "boolean", "description": "Whether to restart the session." },
            }),
            json!([]),
        ),
        "text_editor_20241022"
        | "text_editor_20250124"
        | "text_editor_20250429"
        | "text_editor_20250728" => {
            let is_old = kind < "text_editor_20250429";
            let mut commands = vec!["view", "create", "str_replace", "insert"];
            commands.extend(Some("undo_edit").filter(|_| is_old));
            let inserted = if is_old { "new_str" } else { "insert_text" };
            let mut properties = json!({
                "command": enum_type(&commands),
                "path": string_type("Absolute path of the file or directory."),
                "file_text": string_type("Content of the file. Required by create."),
                "view_range": {
                    "type": "array",
                    "items": { "type": "integer" },
                    "description": "First and last line for view, from 1; -1 is the last line of \
                                    the file.",
                },
                "old_str": string_type(
                    "Text to replace, which must occur once. Required by str_replace.",
                ),
                "new_str": string_type("Text in its place."),
                "insert_line": int_type("Line after which insert inserts; 0 is the start of the \
                                        file."),
            });
            properties[inserted] = string_type(if is_old {
                "Text in place of old_str, or text to insert."
            } else {
                "Text to insert. Required by insert."
            });
            ("Views, creates and edits text files.", properties, json!(["command", "path"]))
        }
        "memory_20250818" => (
            "Keeps notes in files below /memories that last over conversations.",
            json!({
                "command":
                    enum_type(&["view", "create", "str_replace", "insert", "delete", "rename"]),
                "path": string_type(
                    "Path of the file or directory. Required by all commands but rename.",
                ),
                "view_range": {
                    "type": "array",
                    "items": { "type": "integer" },
                    "description": "First and last line for view.",
                },
                "file_text": string_type("Content of the file. Required by create."),
                "old_str": string_type("Text to replace. Required by str_replace."),
                "new_str": string_type("Text in its place. Required by str_replace."),
                "insert_line": int_type("Line after which to insert. Required by insert."),
                "insert_text": string_type("Text to insert. Required by insert."),
                "old_path": string_type("Path to rename. Required by rename."),
                "new_path": string_type("New path. Required by rename."),
            }),
            json!(["command"]),
        ),
        "local_shell" => (
            "Runs a program on the client's machine.",
            json!({
                "command": string_list_type("The program and its arguments."),
                "working_directory": string_type("Directory in which to run it."),
                "timeout_ms": int_type("Timeout in milliseconds."),
                "env": {
                    "type": "object",
                    "additionalProperties": { "type": "string" },
                    "description": "Environment variables.",
                },
                "user": string_type("User who runs it."),
            }),
            json!(["command"]),
        ),
        "shell" => (
            "Runs commands in a shell.",
            json!({
                "commands": string_list_type("The commands."),
                "timeout_ms": int_type("Timeout in milliseconds."),
                "max_output_length": int_type("Maximum number of characters of each command's \
                                              output."),
            }),
            json!(["commands"]),
        ),
        "apply_patch" => (
            "Creates, updates or deletes a file.",
            json!({
                "type": enum_type(&["create_file", "update_file", "delete_file"]),
                "path": string_type("Path of the file."),
                "diff": string_type(
                    "Lines of the new file, each after \"+\", or changes after \"@@\": lines \
                     begin with \" \" if they stay, with \"-\" if they go, with \"+\" if they are \
                     new. Not for delete_file."
                ),
            }),
            json!(["type", "path"]),
        ),
        _ => return None,
    };
    let name = tool["name"].as_str().filter(|name| !name.is_empty()).unwrap_or(
        match kind.split_once("_20") {
            Some(("text_editor", _)) => "str_replace_based_edit_tool",
            Some((name, _)) => name,
            None => kind,
        },
    );
    let parameters = json!({ "type": "object", "properties": properties, "required": required });
    Some(ToolSpec { name: name.to_owned(), description: description.to_owned(), parameters })
}

fn string_type(description: &str) -> Value {
    json!({ "type": "string", "description": description })
}

fn int_type(description: &str) -> Value {
    json!({ "type": "integer", "description": description })
}

fn string_list_type(description: &str) -> Value {
    json!({ "type": "array", "items": { "type": "string" }, "description": description })
}

fn enum_type(names: &[&str]) -> Value {
    json!({ "type": "string", "enum": names })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_tools_have_name_and_required_properties() {
        for (tool, name) in [
            (json!({ "type": "bash_20250124", "name": "bash" }), "bash"),
            (
                json!({ "type": "text_editor_20241022", "name": "str_replace_editor" }),
                "str_replace_editor",
            ),
            (json!({ "type": "text_editor_20250728" }), "str_replace_based_edit_tool"),
            (json!({ "type": "memory_20250818" }), "memory"),
            (json!({ "type": "local_shell" }), "local_shell"),
            (json!({ "type": "shell", "environment": { "type": "local" } }), "shell"),
            (json!({ "type": "apply_patch" }), "apply_patch"),
        ] {
            assert!(!is_hosted_tool(&tool), "{tool}");
            let spec = published_spec(&tool).unwrap();
            assert_eq!(spec.name, name);
            let properties = &spec.parameters["properties"];
            let required = &spec.parameters["required"];
            assert!(
                required
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|name| properties.get(name.as_str().unwrap()).is_some())
            );
        }
        assert!(published_commands("text_editor_20250124").contains("undo_edit"));
        assert!(!published_commands("text_editor_20250429").contains("undo_edit"));
    }

    fn published_commands(kind: &str) -> String {
        published_spec(&json!({ "type": kind })).unwrap().parameters["properties"]["command"]["enum"]
                .to_string()
    }

    #[test]
    fn hosted_tools_differ_from_client_tools() {
        for tool in [
            json!({ "type": "web_search_20260318" }),
            json!({ "type": "web_search_preview" }),
            json!({ "type": "code_execution_20250825" }),
            json!({ "type": "mcp_toolset" }),
            json!({ "type": "tool_search" }),
            json!({ "type": "shell", "environment": { "type": "container_auto" } }),
        ] {
            assert!(is_hosted_tool(&tool), "{tool}");
        }
        for tool in [
            json!({ "type": "computer_20250124", "name": "computer" }),
            json!({ "type": "computer_use_preview" }),
            json!({ "type": "bash_20990101", "name": "bash" }),
            json!({ "type": "tool_search", "execution": "client" }),
        ] {
            assert!(!is_hosted_tool(&tool) && published_spec(&tool).is_none(), "{tool}");
            let error = unknown_tool_error(&tool, "tools[0]");
            assert!(error.message.contains(tool["type"].as_str().unwrap()), "{error}");
        }
    }
}
