//! The tools that a Python worker provides.

use std::collections::BTreeMap;

use levade_text::ToolSpec;
use serde::Deserialize;
use serde_json::Value;

use crate::arguments::ArgumentValidator;

/// Tool as a Python worker describes it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct ToolDescription {
    pub name: String,
    pub description: String,
    pub parameters: Value,
    /// Whether each attempt has its own instance of the tool's class.
    pub stateful: bool,
}

/// All tools of a Python toolbox, with their schemas.
#[derive(Debug)]
pub(super) struct ToolSchemas {
    pub tools: Vec<ToolDescription>,
    arguments: BTreeMap<String, ArgumentValidator>,
}

impl ToolSchemas {
    /// Creates the schemas from the tool descriptions of a worker.
    ///
    /// # Errors
    /// Returns an error that names the tool if its schema is invalid.
    pub fn new(tools: Vec<ToolDescription>) -> Result<Self, String> {
        let mut arguments = BTreeMap::new();
        for tool in &tools {
            let read = ArgumentValidator::new(&tool.parameters);
            arguments.insert(
                tool.name.clone(),
                read.map_err(|why| {
                    format!("the schema of {}'s parameters is wrong: {why}", tool.name)
                })?,
            );
        }
        Ok(ToolSchemas { tools, arguments })
    }

    /// Returns the descriptions of the tools for the model.
    pub fn specs(&self) -> Vec<ToolSpec> {
        self.tools
            .iter()
            .map(|tool| ToolSpec {
                name: tool.name.clone(),
                description: tool.description.clone(),
                parameters: tool.parameters.clone(),
            })
            .collect()
    }

    /// Returns whether any tool has an instance for each attempt.
    pub fn has_state(&self) -> bool {
        self.tools.iter().any(|tool| tool.stateful)
    }

    /// Returns whether the tool `name` has an instance for each attempt.
    pub fn is_stateful(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.stateful && tool.name == name)
    }

    /// Returns the validator of the tool `name`'s arguments.
    pub fn arguments(&self, name: &str) -> Option<&ArgumentValidator> {
        self.arguments.get(name)
    }
}
