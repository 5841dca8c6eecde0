//! Tools in the shapes of the Responses API, shown to the model as functions.
//!
//! A tool in a namespace is shown under both names. A custom tool, whose input is a text, is shown as a
//! function of one argument. Calls are written back in the shape that their tool has.

use std::collections::HashMap;

use levade_text::{Arguments, ToolCall, ToolSpec};
use serde_json::{Map, Value, json};

use crate::gateway::Gateway;
use crate::openai;
use crate::parameters;
use levade_call::ApiError;
use levade_call::ToolChoice;

/// The argument of a custom tool.
const INPUT: &str = "input";

/// Tools that a request tells of.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// The tools as the model is told of them.
    pub specs: Vec<ToolSpec>,
    /// Names, as the model is told of them, of the tools that are strict.
    pub strict: Vec<String>,
    by_name: HashMap<String, Shape>,
}

/// How a client knows a tool.
#[derive(Debug)]
struct Shape {
    namespace: Option<String>,
    name: String,
    custom: bool,
}

/// The name that a model knows a tool of a namespace by.
pub(super) fn shown_name(namespace: Option<&str>, name: &str) -> String {
    match namespace.filter(|namespace| !namespace.is_empty()) {
        None => name.to_owned(),
        Some(space) => format!("{}__{name}", space.trim_end_matches("__")),
    }
}

/// The arguments of a custom tool's call.
pub(super) fn custom_arguments(input: &str) -> Arguments {
    Map::from_iter([(INPUT.to_owned(), Value::from(input))]).into()
}

impl Tools {
    /// Reads tools. Those that OpenAI runs itself are left out, and counted.
    ///
    /// # Errors
    /// Names the first tool that cannot be used, and why.
    pub(super) fn read(gateway: &Gateway, tools: &[Value]) -> Result<Self, ApiError> {
        let mut read = Tools::default();
        for (at, tool) in tools.iter().enumerate() {
            read.add(gateway, tool, None, &format!("tools[{at}]"))?;
        }
        Ok(read)
    }

    fn add(
        &mut self,
        gateway: &Gateway,
        tool: &Value,
        space: Option<&str>,
        place: &str,
    ) -> Result<(), ApiError> {
        let name = || {
            let name = tool["name"].as_str().filter(|name| !name.is_empty());
            name.ok_or_else(|| ApiError::field(place, format!("{place} has no name: {tool}")))
        };
        match tool["type"].as_str() {
            Some("function") => {
                let wrong = |why| ApiError::field(place, format!("the parameters of {place} {why}"));
                let parameters = parameters::schema(&tool["parameters"]).map_err(wrong)?;
                if tool["strict"] == true {
                    self.strict.push(shown_name(space, name()?));
                }
                self.push((space, name()?, false), describe(tool), parameters, place)
            }
            Some("custom") => {
                let input = json!({ "type": "string", "description": "The input, as it stands." });
                let parameters =
                    json!({ "type": "object", "properties": { INPUT: input }, "required": [INPUT] });
                let format = &tool["format"];
                let grammar = format["definition"].as_str().or(format["grammar"]["definition"].as_str());
                let mut description = describe(tool);
                if let Some(grammar) = grammar {
                    description += &format!("\n\nThe input is of this grammar:\n{grammar}");
                }
                self.push((space, name()?, true), description, parameters, place)
            }
            Some("namespace") if space.is_none() => {
                let space = name()?;
                for (at, inner) in tool["tools"].as_array().into_iter().flatten().enumerate() {
                    self.add(gateway, inner, Some(space), &format!("{place}.tools[{at}]"))?;
                }
                Ok(())
            }
            Some(hosted) => {
                gateway.unknown_field("responses", &format!("tools[type={hosted}]"));
                Ok(())
            }
            None => Err(ApiError::field(place, format!("{place} has no type: {tool}"))),
        }
    }

    fn push(
        &mut self,
        (space, name, custom): (Option<&str>, &str, bool),
        description: String,
        parameters: Value,
        place: &str,
    ) -> Result<(), ApiError> {
        let shown = shown_name(space, name);
        let shape = Shape { namespace: space.map(str::to_owned), name: name.to_owned(), custom };
        if self.by_name.insert(shown.clone(), shape).is_some() {
            return Err(ApiError::field(
                place,
                format!("{place} has the name {shown:?}, which another tool has"),
            ));
        }
        self.specs.push(ToolSpec { name: shown, description, parameters });
        Ok(())
    }

    /// Returns which tools may be called. Leaves only those in `specs` that a choice of type `allowed_tools`
    /// names.
    pub(super) fn choice(
        &self,
        value: Option<&Value>,
        specs: &mut Vec<ToolSpec>,
    ) -> Result<ToolChoice, ApiError> {
        let wrong = |why: &str| {
            let value = value.unwrap_or(&Value::Null);
            ApiError::field("tool_choice", format!("tool_choice is {value}, {why}"))
        };
        match value {
            None | Some(Value::Null) => Ok(ToolChoice::Auto),
            Some(Value::String(word)) => match word.as_str() {
                "auto" => Ok(ToolChoice::Auto),
                "none" => Ok(ToolChoice::None),
                "required" => Ok(ToolChoice::Required),
                _ => Err(wrong("but it is auto, none, required, or an object that names a function")),
            },
            Some(value) if value["type"] == openai::ALLOWED_TOOLS => {
                let mut choice = value.clone();
                if let Some(listed) = choice["tools"].as_array_mut() {
                    // The others are hosted, and were left out.
                    listed.retain(|tool| tool["name"].is_string());
                }
                let name =
                    |tool: &Value| Some(shown_name(tool["namespace"].as_str(), tool["name"].as_str()?));
                openai::allowed(specs, &choice, name)
            }
            Some(value) => match (value["type"].as_str(), value["name"].as_str()) {
                (Some("function" | "custom"), Some(name)) => {
                    let shown = shown_name(value["namespace"].as_str(), name);
                    match self.by_name.contains_key(&shown) {
                        true => Ok(ToolChoice::Named(shown)),
                        false => Err(wrong("but there is no such tool")),
                    }
                }
                _ => Err(wrong("but only functions and custom tools can be chosen here")),
            },
        }
    }

    /// A call as an item, in progress or complete, and the text that its input is.
    pub(super) fn item(&self, call: &ToolCall, id: impl FnOnce(&str) -> String) -> CallItem {
        let shape = self.by_name.get(&call.name);
        let input = call.arguments.get(INPUT).and_then(Value::as_str).filter(|_| call.arguments.len() == 1);
        // A call of a custom tool with other arguments comes as the call of a function, which loses nothing.
        let custom = shape.is_some_and(|shape| shape.custom).then_some(input).flatten();
        let (prefix, kind, field) = match custom {
            Some(_) => ("ctc", "custom_tool_call", INPUT),
            None => ("fc", "function_call", "arguments"),
        };
        let text =
            custom.map_or_else(|| Value::from(call.arguments.clone()).to_string(), |input| input.to_owned());
        let name = shape.map_or(call.name.as_str(), |shape| &shape.name);
        let mut item = json!({
            "id": id(prefix),
            "type": kind,
            "status": "completed",
            "call_id": call.id,
            "name": name,
        });
        if let Some(space) = shape.and_then(|shape| shape.namespace.as_deref()) {
            item["namespace"] = space.into();
        }
        item[field] = text.as_str().into();
        CallItem { item, field, text }
    }
}

/// A call as an item.
pub(super) struct CallItem {
    /// The item, complete.
    pub item: Value,
    /// Name of the field that holds its input.
    pub field: &'static str,
    /// The input.
    pub text: String,
}

fn describe(tool: &Value) -> String {
    tool["description"].as_str().unwrap_or_default().to_owned()
}
