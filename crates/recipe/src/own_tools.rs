//! Tools of a user's own: `kind = "python"` and `kind = "command"`.

use std::path::PathBuf;
use std::time::Duration;

use levade_tools::{CommandOptions, PythonOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// `[[tool]] kind = "python"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PythonKeys {
    /// File with functions and classes.
    pub file: Option<PathBuf>,
    /// Configuration of tools as verl has it, in YAML or JSON.
    pub config: Option<PathBuf>,
    /// Names of the functions and classes of the file that are tools; those that a decorator marks, or else
    /// all that are public, where empty.
    pub functions: Vec<String>,
    /// The interpreter: a name, or a path such as that of a virtual environment's.
    pub python: String,
    /// Names of environment variables that the processes get.
    pub environment: Vec<String>,
    /// Most processes; one for each processor, and at most four, where 0.
    pub workers: usize,
    /// Most calls that a process has at once.
    pub worker_calls: usize,
    /// Longest time in which a process may load the file, in seconds.
    pub start_seconds: f64,
}

impl Default for PythonKeys {
    fn default() -> Self {
        PythonKeys {
            file: None,
            config: None,
            functions: Vec::new(),
            python: "python3".into(),
            environment: Vec::new(),
            workers: 0,
            worker_calls: 16,
            start_seconds: 120.0,
        }
    }
}

impl PythonKeys {
    /// The options of the toolbox.
    ///
    /// # Errors
    /// Says which keys do not go together.
    pub(super) fn options(&self) -> Result<PythonOptions, String> {
        let given = |path: &Option<PathBuf>| path.clone().filter(|path| !path.as_os_str().is_empty());
        let (file, config) = (given(&self.file), given(&self.config));
        if file.is_none() && config.is_none() {
            return Err("it needs a `file` with functions, or a `config` of verl's tools".into());
        }
        if file.is_none() && !self.functions.is_empty() {
            return Err("`functions` are those of a `file`, which is not given".into());
        }
        if self.python.is_empty() || self.worker_calls == 0 {
            return Err("`python` must name an interpreter, and `worker_calls` be at least 1".into());
        }
        Ok(PythonOptions {
            file,
            config,
            functions: self.functions.clone(),
            python: self.python.clone(),
            passes: self.environment.clone(),
            workers: self.workers,
            worker_calls: self.worker_calls,
            start: Duration::try_from_secs_f64(self.start_seconds)
                .ok()
                .filter(|start| !start.is_zero())
                .ok_or_else(|| {
                    format!("`start_seconds` is {}, but must be more than 0", self.start_seconds)
                })?,
        })
    }
}

/// `[[tool]] kind = "command"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandKeys {
    /// The program and its arguments, with `{NAME}` for the arguments of a call.
    pub command: Vec<String>,
    /// Description for the model.
    pub description: String,
    /// JSON schema of its arguments.
    #[serde(default)]
    pub parameters: Map<String, Value>,
    /// The folder that it runs in; that of the recipe where not given.
    #[serde(default)]
    pub folder: PathBuf,
    /// Names of environment variables that it gets.
    #[serde(default)]
    pub environment: Vec<String>,
}

impl CommandKeys {
    /// The options of the toolbox.
    ///
    /// # Errors
    /// When the parameters are not those of an object.
    pub(super) fn options(&self) -> Result<CommandOptions, String> {
        let mut parameters = self.parameters.clone();
        for (key, value) in
            [("type", json!("object")), ("properties", json!({})), ("additionalProperties", json!(false))]
        {
            parameters.entry(key).or_insert(value);
        }
        if parameters["type"] != "object" || !parameters["properties"].is_object() {
            let why = "its `parameters` must be the JSON schema of an object, with a table `properties`";
            return Err(why.into());
        }
        Ok(CommandOptions {
            command: self.command.clone(),
            folder: self.folder.clone(),
            passes: self.environment.clone(),
            description: self.description.clone(),
            parameters: Value::Object(parameters),
        })
    }
}
