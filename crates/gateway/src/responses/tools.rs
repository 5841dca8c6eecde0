//! Tools in the formats of the Responses API, which the model sees as functions.
//!
//! The model's name of a tool in a namespace joins both names. A custom tool, whose input is a
//! text, becomes a function with one argument. A [shell or patch tool](NativeTool), which the
//! client runs, becomes a function whose arguments are the action. Calls are written in the format
//! of their tool.

use std::collections::HashMap;

use levade_text::{Arguments, ToolCall, ToolSpec};
use serde_json::{Map, Value, json};

use crate::gateway::Gateway;
use crate::openai;
use crate::parameters;
use crate::tool_types::{self, INPUT};
use levade_call::ApiError;
use levade_call::ToolChoice;

/// Tools of a request. The client runs them; tools that OpenAI hosts are omitted.
#[derive(Debug, Default)]
pub(super) struct RequestTools {
    /// Definitions of the tools as the model sees them.
    pub specs: Vec<ToolSpec>,
    /// Names of the tools with strict arguments, as the model sees these names.
    pub strict: Vec<String>,
    by_name: HashMap<String, ClientTool>,
}

/// The client's definition of a tool.
#[derive(Debug)]
struct ClientTool {
    namespace: Option<String>,
    name: String,
    kind: ClientToolKind,
}

/// Type of a tool that the client runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientToolKind {
    Function,
    Custom,
    Native(NativeTool),
}

/// Tool of the Responses API whose calls and results have item types of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NativeTool {
    LocalShell,
    Shell,
    ApplyPatch,
}

impl NativeTool {
    const ALL: [Self; 3] = [NativeTool::LocalShell, NativeTool::Shell, NativeTool::ApplyPatch];

    /// Returns the type of the tool, which is also the name under which the model calls it.
    pub(super) fn name(self) -> &'static str {
        match self {
            NativeTool::LocalShell => "local_shell",
            NativeTool::Shell => "shell",
            NativeTool::ApplyPatch => "apply_patch",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.name() == name)
    }

    /// Returns the tool whose name, followed by `suffix`, is the item type `kind`. The suffix is
    /// `_call` for calls and `_call_output` for results.
    pub(super) fn from_item(kind: &str, suffix: &str) -> Option<Self> {
        Self::from_name(kind.strip_suffix(suffix)?)
    }

    /// Returns the name of the field with the arguments in a call item of this tool.
    fn arguments_field(self) -> &'static str {
        if self == NativeTool::ApplyPatch { "operation" } else { "action" }
    }

    /// Returns the arguments in a call item of this tool. Omits fields without a value, which
    /// clients add.
    pub(super) fn parse_arguments(self, item: &Value) -> Arguments {
        let mut arguments = item[self.arguments_field()].clone();
        if let Value::Object(fields) = &mut arguments {
            fields.retain(|_, value| !value.is_null());
            if self == NativeTool::LocalShell {
                fields.remove("type");
                fields.retain(|name, value| {
                    name != "env" || value.as_object().is_none_or(|env| !env.is_empty())
                });
            }
        }
        arguments.into()
    }

    /// Converts the arguments of a call into the value of the call item's arguments field. Returns
    /// `None` if the arguments are not valid for this tool.
    fn to_action(self, arguments: &Arguments) -> Option<Value> {
        let is_text = |name: &str| arguments.get(name).is_some_and(Value::is_string);
        let are_texts = |name: &str| {
            let list = arguments.get(name).and_then(Value::as_array);
            list.is_some_and(|list| list.iter().all(Value::is_string))
        };
        let mut action: Map<String, Value> = match self {
            NativeTool::LocalShell if are_texts("command") => {
                Map::from_iter([("type".into(), "exec".into()), ("env".into(), json!({}))])
            }
            NativeTool::Shell if are_texts("commands") => Map::from_iter(
                ["timeout_ms", "max_output_length"].map(|name| (name.into(), Value::Null)),
            ),
            NativeTool::ApplyPatch if is_text("path") => {
                match arguments.get("type").and_then(Value::as_str) {
                    Some("delete_file") => Map::new(),
                    Some("create_file" | "update_file") if is_text("diff") => Map::new(),
                    _ => return None,
                }
            }
            _ => return None,
        };
        action.extend(arguments.iter().map(|(name, value)| (name.clone(), value.clone())));
        Some(action.into())
    }

    /// Returns the text of a result item whose output is not a string: the outputs of a shell, or
    /// the status of a patch. Returns `None` for any other result.
    pub(super) fn format_output(self, item: &Value) -> Option<String> {
        match (self, &item["output"]) {
            (NativeTool::ApplyPatch, Value::Null) => Some(item["status"].as_str()?.to_owned()),
            (NativeTool::Shell, Value::Array(outputs)) => {
                Some(outputs.iter().map(format_shell_output).collect::<Vec<_>>().join("\n"))
            }
            _ => None,
        }
    }
}

/// Returns the text of one command's output: its stdout, its stderr, and a line that reports a
/// timeout or an exit code other than 0.
fn format_shell_output(output: &Value) -> String {
    let outcome = &output["outcome"];
    let failure = match (outcome["type"].as_str(), outcome["exit_code"].as_i64()) {
        (Some("timeout"), _) => "[timed out]".to_owned(),
        (_, Some(code)) if code != 0 => format!("[exit code {code}]"),
        _ => String::new(),
    };
    let printed = ["stdout", "stderr"]
        .map(|name| output[name].as_str().unwrap_or_default().trim_end_matches('\n'));
    let lines = printed.into_iter().chain([failure.as_str()]).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the name of a tool as the model sees it. For a tool in a namespace, the name contains
/// both names.
pub(super) fn display_name(namespace: Option<&str>, name: &str) -> String {
    match namespace.filter(|namespace| !namespace.is_empty()) {
        None => name.to_owned(),
        Some(space) => format!("{}__{name}", space.trim_end_matches("__")),
    }
}

impl RequestTools {
    /// Parses the tools of a request. Tools that OpenAI hosts are omitted and counted.
    ///
    /// # Errors
    /// Returns an error that names the first invalid or unsupported tool, and the reason.
    pub(super) fn parse_tools(gateway: &Gateway, tools: &[Value]) -> Result<Self, ApiError> {
        let mut read = RequestTools::default();
        for (at, tool) in tools.iter().enumerate() {
            read.add_tool(gateway, tool, None, &format!("tools[{at}]"))?;
        }
        Ok(read)
    }

    fn add_tool(
        &mut self,
        gateway: &Gateway,
        tool: &Value,
        space: Option<&str>,
        field_path: &str,
    ) -> Result<(), ApiError> {
        match tool["type"].as_str() {
            Some("function") => {
                let parameters = parameters::parameters_to_schema(&tool["parameters"])
                    .map_err(|why| ApiError::field(field_path, format!("{field_path}: {why}")))?;
                if tool["strict"] == true {
                    self.strict.push(display_name(space, tool_name(tool, field_path)?));
                }
                let description = tool["description"].as_str().unwrap_or_default().to_owned();
                let spec = ToolSpec {
                    name: tool_name(tool, field_path)?.to_owned(),
                    description,
                    parameters,
                };
                self.push_tool(space, ClientToolKind::Function, spec, field_path)
            }
            Some("custom") => {
                let spec =
                    tool_types::custom_tool_spec(tool_name(tool, field_path)?.to_owned(), tool);
                self.push_tool(space, ClientToolKind::Custom, spec, field_path)
            }
            Some("namespace") if space.is_none() => {
                let space = tool_name(tool, field_path)?;
                for (at, inner) in tool["tools"].as_array().into_iter().flatten().enumerate() {
                    self.add_tool(
                        gateway,
                        inner,
                        Some(space),
                        &format!("{field_path}.tools[{at}]"),
                    )?;
                }
                Ok(())
            }
            Some(hosted) if tool_types::is_hosted_tool(tool) => {
                gateway.count_unknown_field("responses", &format!("tools[type={hosted}]"));
                Ok(())
            }
            Some(kind) => match (NativeTool::from_name(kind), tool_types::published_spec(tool)) {
                (Some(native), Some(spec)) => {
                    self.push_tool(space, ClientToolKind::Native(native), spec, field_path)
                }
                _ => Err(tool_types::unknown_tool_error(tool, field_path)),
            },
            None => Err(ApiError::field(field_path, format!("{field_path} has no type: {tool}"))),
        }
    }

    fn push_tool(
        &mut self,
        space: Option<&str>,
        kind: ClientToolKind,
        spec: ToolSpec,
        field_path: &str,
    ) -> Result<(), ApiError> {
        let shown = display_name(space, &spec.name);
        let shape = ClientTool { namespace: space.map(str::to_owned), name: spec.name, kind };
        if self.by_name.insert(shown.clone(), shape).is_some() {
            return Err(ApiError::field(
                field_path,
                format!(
                    "{field_path} has the name {shown:?}, which another tool already has; names \
                     must be unique"
                ),
            ));
        }
        self.specs.push(ToolSpec { name: shown, ..spec });
        Ok(())
    }

    /// Parses `tool_choice`. If the choice is of type `allowed_tools`, removes all tools from
    /// `specs` that it does not list.
    pub(super) fn parse_tool_choice(
        &self,
        value: Option<&Value>,
        specs: &mut Vec<ToolSpec>,
    ) -> Result<ToolChoice, ApiError> {
        let wrong = |why: &str| {
            let value = value.unwrap_or(&Value::Null);
            ApiError::field("tool_choice", format!("tool_choice is {value}, but {why}"))
        };
        match value {
            None | Some(Value::Null) => Ok(ToolChoice::Auto),
            Some(Value::String(word)) => match word.as_str() {
                "auto" => Ok(ToolChoice::Auto),
                "none" => Ok(ToolChoice::None),
                "required" => Ok(ToolChoice::Required),
                _ => Err(wrong(
                    "tool_choice must be auto, none, required, or an object that names a function",
                )),
            },
            Some(value) if value["type"] == openai::ALLOWED_TOOLS => {
                let mut choice = value.clone();
                if let Some(listed) = choice["tools"].as_array_mut() {
                    // The removed entries are hosted tools, which are not in `specs`.
                    listed.retain(|tool| chosen_name(tool).is_some());
                }
                openai::retain_allowed_tools(specs, &choice, chosen_name)
            }
            Some(value) => match chosen_name(value) {
                Some(shown) if self.by_name.contains_key(&shown) => Ok(ToolChoice::Named(shown)),
                Some(_) => Err(wrong("the request has no such tool")),
                None => Err(wrong("only tools that the client runs can be chosen here")),
            },
        }
    }

    /// Converts a tool call into an output item. `id` creates the item's id from a prefix.
    pub(super) fn to_call_item(
        &self,
        call: &ToolCall,
        id: impl FnOnce(&str) -> String,
    ) -> CallItem {
        let shape = self.by_name.get(&call.name);
        let kind = shape.map_or(ClientToolKind::Function, |shape| shape.kind);
        // A call whose arguments do not fit its tool becomes a function call, so that no argument
        // is lost.
        let custom =
            tool_types::custom_input(&call.arguments).filter(|_| kind == ClientToolKind::Custom);
        let native = match kind {
            ClientToolKind::Native(native) => {
                native.to_action(&call.arguments).map(|action| (native, action))
            }
            _ => None,
        };
        let (prefix, kind) = match (&custom, &native) {
            (Some(_), _) => ("ctc", "custom_tool_call"),
            (None, Some((NativeTool::LocalShell, _))) => ("lsh", "local_shell_call"),
            (None, Some((NativeTool::Shell, _))) => ("sh", "shell_call"),
            (None, Some((NativeTool::ApplyPatch, _))) => ("apc", "apply_patch_call"),
            (None, None) => ("fc", "function_call"),
        };
        let mut item =
            json!({ "id": id(prefix), "type": kind, "status": "completed", "call_id": call.id });
        if let Some((native, action)) = native {
            item[native.arguments_field()] = action;
            return CallItem { item, input: None };
        }
        item["name"] = shape.map_or(call.name.as_str(), |shape| &shape.name).into();
        if let Some(space) = shape.and_then(|shape| shape.namespace.as_deref()) {
            item["namespace"] = space.into();
        }
        let (field, text) = match custom {
            Some(input) => (INPUT, input.to_owned()),
            None => ("arguments", Value::from(call.arguments.clone()).to_string()),
        };
        item[field] = text.as_str().into();
        CallItem { item, input: Some((field, text)) }
    }
}

fn tool_name<'a>(tool: &'a Value, field_path: &str) -> Result<&'a str, ApiError> {
    let name = tool["name"].as_str().filter(|name| !name.is_empty());
    name.ok_or_else(|| ApiError::field(field_path, format!("{field_path} has no name: {tool}")))
}

/// A tool call as an output item of a response.
pub(super) struct CallItem {
    /// JSON of the complete item.
    pub item: Value,
    /// Name and value of the item's input field, if a stream sends the input in separate events.
    /// `None` if the stream sends only the complete item.
    pub input: Option<(&'static str, String)>,
}

/// Returns the name of the tool that `tool_choice` names, as the model sees the name.
fn chosen_name(choice: &Value) -> Option<String> {
    Some(display_name(
        choice["namespace"].as_str(),
        choice["name"].as_str().or_else(|| {
            choice["type"].as_str().and_then(NativeTool::from_name).map(NativeTool::name)
        })?,
    ))
}
