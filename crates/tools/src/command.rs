//! A program of the user as a tool, started once for each call.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use levade_process::{Launch, ProgramRun, Supervisor, Tail, describe_exit};
use levade_text::ToolSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::arguments::ArgumentValidator;
use super::{
    CallError, OptionError, Session, ToolContext, ToolError, ToolOptions, ToolOutput, Toolbox,
};

/// Maximum number of bytes that are kept from the start of a program's output; as many are kept
/// from its end.
const KEPT_OUTPUT_BYTES: usize = 512 << 10;

/// Maximum number of characters of an error message that the model reads.
const MAX_ERROR_CHARS: usize = 2000;

/// Exclusive limit on the length of a program argument, in bytes. Linux rejects longer arguments.
const MAX_ARGUMENT_BYTES: usize = 128 << 10;

/// Options of `[[tool]] kind = "command"`: a program with its description for the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandKeys {
    /// Program and its arguments. `{NAME}` in an element is replaced by the argument NAME of the
    /// tool call. The element is omitted if that argument is null, or missing without a default.
    /// `{{NAME}}` stands for the literal text `{NAME}`.
    pub command: Vec<String>,
    /// Description of the tool for the model.
    pub description: String,
    /// JSON schema of the tool's arguments. Empty means that the tool has no arguments.
    #[serde(default)]
    pub parameters: Map<String, Value>,
    /// Working directory of the program. Empty means the recipe's directory.
    #[serde(default)]
    #[serde(rename = "folder")]
    pub dir: PathBuf,
    /// Names of environment variables that the program gets in addition to the
    /// [usual ones](levade_policy::environment::CHILD_VARIABLES).
    #[serde(default)]
    pub environment: Vec<String>,
}

impl CommandKeys {
    /// Returns the complete JSON schema of the tool's arguments.
    ///
    /// # Errors
    /// Returns an error if the schema does not describe an object.
    fn schema(&self) -> Result<Value, String> {
        let mut parameters = self.parameters.clone();
        for (key, value) in [
            ("type", json!("object")),
            ("properties", json!({})),
            ("additionalProperties", json!(false)),
        ] {
            parameters.entry(key).or_insert(value);
        }
        if parameters["type"] != "object" || !parameters["properties"].is_object() {
            let why =
                "its `parameters` must be the JSON schema of an object, with a table `properties`";
            return Err(why.into());
        }
        Ok(Value::Object(parameters))
    }
}

impl ToolOptions for CommandKeys {
    fn needs_name(&self) -> bool {
        true
    }

    fn check(&self, _seconds: Option<f64>) -> Result<(), OptionError> {
        CommandTool::new("", self.clone(), Supervisor::default())?;
        Ok(())
    }

    fn toolbox(
        &self,
        name: String,
        _: Option<f64>,
        supervisor: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String> {
        Ok(Arc::new(CommandTool::new(name, self.clone(), supervisor.clone())?))
    }
}

/// Tool that runs a program for each call.
///
/// The program reads the arguments as one line of JSON on standard input as well. Its standard
/// output is the tool result; an exit code other than 0 is a failure. No shell is involved. The
/// program runs with the user's rights under a supervisor, which ends it together with all
/// processes that it has started.
#[derive(Debug, Clone)]
pub struct CommandTool {
    spec: ToolSpec,
    keys: CommandKeys,
    elements: Vec<Element>,
    arguments: ArgumentValidator,
    supervisor: Supervisor,
}

/// Element of a command, with literal texts and names of arguments alternating.
type Element = Vec<TemplatePart>;

#[derive(Debug, Clone, PartialEq)]
enum TemplatePart {
    Text(String),
    Argument(String),
}

impl CommandTool {
    /// Creates the tool `name`, which runs the command in `keys` under `supervisor`.
    ///
    /// # Errors
    /// Returns an error if the command is empty, if the schema is invalid, or if a placeholder
    /// names an argument that the schema does not have or occurs in the program's name.
    pub fn new(
        name: impl Into<String>,
        keys: CommandKeys,
        supervisor: Supervisor,
    ) -> Result<Self, String> {
        let parameters = keys.schema()?;
        if keys.command.first().is_none_or(String::is_empty) {
            return Err("the tool's command is empty, but must start with a program".into());
        }
        let arguments = ArgumentValidator::new(&parameters)
            .map_err(|why| format!("the tool's parameters are not a JSON schema: {why}"))?;
        let elements: Vec<Element> =
            keys.command.iter().map(|element| split_element(element)).collect();
        for part in elements.iter().flatten() {
            if let TemplatePart::Argument(argument) = part
                && !arguments.names().contains(argument)
            {
                let placeholders = match arguments.names() {
                    [] => "the tool has none".to_owned(),
                    names => format!("the tool has {}", names.join(", ")),
                };
                return Err(format!(
                    "the tool's command has {{{argument}}}, which is not one of its parameters; \
                     {placeholders} ({{{{{argument}}}}} stands for the literal text)"
                ));
            }
        }
        if elements
            .first()
            .is_some_and(|first| first.iter().any(|part| matches!(part, TemplatePart::Argument(_))))
        {
            return Err(
                "the first element of the tool's command must have no placeholder, because a \
                 model must not choose the program"
                    .into(),
            );
        }
        let spec =
            ToolSpec { name: name.into(), description: keys.description.clone(), parameters };
        Ok(CommandTool { spec, keys, elements, arguments, supervisor })
    }

    /// Returns the program and its arguments for a tool call.
    ///
    /// # Errors
    /// Returns an error if an argument contains a NUL character or is too long.
    fn build_command(&self, arguments: &Map<String, Value>) -> Result<Vec<String>, String> {
        // A null argument counts as missing: the program never gets the text `null`.
        let mut command = Vec::new();
        for element in &self.elements {
            let Some(element) = element
                .iter()
                .map(|part| match part {
                    TemplatePart::Text(text) => Some(text.clone()),
                    TemplatePart::Argument(name) => arguments
                        .get(name)
                        .or_else(|| self.spec.parameters["properties"][name].get("default"))
                        .filter(|value| !value.is_null())
                        .map(format_argument),
                })
                .collect::<Option<String>>()
            else {
                continue;
            };
            let bytes = element.len();
            if element.contains('\0') {
                return Err(
                    "an argument of the command contains a NUL character, which a program cannot \
                     receive"
                        .into(),
                );
            }
            if bytes >= MAX_ARGUMENT_BYTES {
                return Err(format!(
                    "an argument of the command is {bytes} bytes long, but must be shorter than \
                     {MAX_ARGUMENT_BYTES}"
                ));
            }
            command.push(element);
        }
        Ok(command)
    }

    /// Runs the program until it exits.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started.
    async fn run(&self, command: &[String], input: String) -> Result<ToolOutput, String> {
        let CommandKeys { dir: tool_dir, environment, .. } = &self.keys;
        let launch =
            Launch { dir: tool_dir.clone(), passes: environment.clone(), ..Launch::new(command) };
        let output = ProgramRun::start(
            &self.supervisor,
            &launch,
            input,
            Tail::new(KEPT_OUTPUT_BYTES, KEPT_OUTPUT_BYTES),
        )?
        .wait()
        .await?;
        if let Some(why) = output.start_error() {
            return Err(why);
        }
        let name = &self.spec.name;
        if output.code == Some(0) {
            return Ok(ToolOutput::text(output.stdout.text()));
        }
        let mut stderr_text = output.stderr.text();
        if stderr_text.trim().is_empty() {
            stderr_text = output.stdout.text();
        }
        let stderr_text = stderr_text.trim_end();
        let from = stderr_text.char_indices().nth_back(MAX_ERROR_CHARS - 1).map_or(0, |(at, _)| at);
        let stderr_text =
            if from > 0 { format!("…{}", &stderr_text[from..]) } else { stderr_text.to_owned() };
        let exit_text = format!("{name} failed ({})", describe_exit(output.code));
        let text =
            if stderr_text.is_empty() { exit_text } else { format!("{exit_text}: {stderr_text}") };
        Ok(ToolOutput::error(CallError::Failed, text))
    }
}

/// Splits an element of a command into literal texts and placeholders.
fn split_element(element: &str) -> Element {
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut rest = element;
    while let Some(at) = rest.find('{') {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        let braced =
            leading_name(rest.get(2..).filter(|_| rest.starts_with("{{")).unwrap_or_default());
        let single = leading_name(&rest[1..]);
        if !braced.is_empty() && rest[2 + braced.len()..].starts_with("}}") {
            text.push_str(&format!("{{{braced}}}"));
            rest = &rest[braced.len() + 4..];
        } else if !single.is_empty() && rest[1 + single.len()..].starts_with('}') {
            parts.push(TemplatePart::Text(std::mem::take(&mut text)));
            rest = &rest[single.len() + 2..];
            parts.push(TemplatePart::Argument(single));
        } else {
            text.push('{');
            rest = &rest[1..];
        }
    }
    text.push_str(rest);
    parts.push(TemplatePart::Text(text));
    parts.retain(|part| *part != TemplatePart::Text(String::new()));
    parts
}

fn leading_name(inner: &str) -> String {
    let length = inner.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '-'));
    length.map_or("", |length| &inner[..length]).to_owned()
}

/// Formats a JSON value as a program argument: strings as they are, other values as JSON.
fn format_argument(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[async_trait]
impl Toolbox for CommandTool {
    fn name(&self) -> &str {
        &self.spec.name
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![self.spec.clone()])
    }

    async fn open(&self, _attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        Ok(Box::new(self.clone()))
    }
}

#[async_trait]
impl Session for CommandTool {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![self.spec.clone()]
    }

    fn can_run_parallel(&self, _tool: &str) -> bool {
        true
    }

    async fn call(&self, _tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let command = match self
            .arguments
            .validate(arguments)
            .and_then(|checked| self.build_command(&checked))
        {
            Ok(command) => command,
            Err(why) => return ToolOutput::error(CallError::BadArguments, why),
        };
        let mut input = Value::Object(arguments.clone()).to_string();
        input.push('\n');
        match self.run(&command, input).await {
            Ok(output) => output,
            Err(why) => ToolOutput::error(CallError::Unavailable, why.trim_end()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(command: &[&str], parameters: Value) -> Result<CommandTool, String> {
        let keys = CommandKeys {
            command: command.iter().map(|element| (*element).to_owned()).collect(),
            description: String::new(),
            parameters: parameters.as_object().unwrap().clone(),
            dir: PathBuf::new(),
            environment: Vec::new(),
        };
        CommandTool::new("x", keys, Supervisor::default())
    }

    fn schema() -> Value {
        json!({ "type": "object", "properties": {
            "pattern": { "type": "string" }, "max": { "type": "integer" }, "mode": { "default": "fast" },
        } })
    }

    #[test]
    fn command_argument_is_substituted_as_one_element() {
        let tool = tool(
            &[
                "grep",
                "-e",
                "{pattern}",
                "--max={max}",
                "{mode}",
                "{{pattern}}",
                "{print $1}",
                "{}",
                "a{pattern}b{",
            ],
            schema(),
        )
        .unwrap();
        let command = |arguments: Value| tool.build_command(arguments.as_object().unwrap());
        let nasty = "; rm -rf / $(id) \"' {max}\n";
        assert_eq!(
            command(json!({ "pattern": nasty, "max": 3 })).unwrap(),
            [
                "grep",
                "-e",
                nasty,
                "--max=3",
                "fast",
                "{pattern}",
                "{print $1}",
                "{}",
                &format!("a{nasty}b{{")
            ]
        );
        assert_eq!(
            command(json!({ "mode": ["a", 1] })).unwrap(),
            ["grep", "-e", "[\"a\",1]", "{pattern}", "{print $1}", "{}"]
        );
        let null = json!({ "pattern": null, "max": 3, "mode": null });
        assert_eq!(
            command(null).unwrap(),
            ["grep", "-e", "--max=3", "{pattern}", "{print $1}", "{}"]
        );
        assert!(command(json!({ "pattern": "a\u{0}" })).unwrap_err().contains("a NUL character"));
        assert!(
            command(json!({ "pattern": "a".repeat(MAX_ARGUMENT_BYTES) }))
                .unwrap_err()
                .contains("131072 bytes")
        );
    }

    #[test]
    fn command_tool_rejects_invalid_commands() {
        for (command, why) in [
            (
                &["grep", "{patern}"][..],
                "{patern}, which is not one of its parameters; the tool has pattern, max, mode",
            ),
            (&["{pattern}"], "because a model must not choose the program"),
            (&[], "the tool's command is empty"),
        ] {
            let found = tool(command, schema()).unwrap_err();
            assert!(found.contains(why), "{found}");
        }
        assert!(
            tool(&["a"], json!({ "properties": { "a": { "type": 3 } } }))
                .unwrap_err()
                .starts_with("the tool's parameters are not a JSON schema")
        );
    }
}
