//! The calculator tool.

use std::sync::Arc;

use async_trait::async_trait;
use levade_process::Supervisor;
use levade_tasks::{CALCULATOR, evaluate};
use levade_text::ToolSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{CallError, Session, ToolContext, ToolError, ToolOptions, ToolOutput, Toolbox};

/// Options of `[[tool]] kind = "calculator"`, which evaluates arithmetic expressions. This kind has
/// no keys of its own.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CalculatorKeys {}

impl ToolOptions for CalculatorKeys {
    fn has_effects(&self) -> bool {
        false
    }

    fn toolbox(
        &self,
        name: String,
        _: Option<f64>,
        _: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String> {
        Ok(Arc::new(Calculator { name, parallel: true }))
    }
}

/// Tool that evaluates one arithmetic expression per call. The argument is `expression`, a string.
/// [`evaluate`] describes the syntax and the output format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calculator {
    /// Name of the toolbox. The tool itself is always called [`Calculator::NAME`].
    pub name: String,
    /// Whether calls of one turn can run concurrently.
    pub parallel: bool,
}

impl Default for Calculator {
    fn default() -> Self {
        Calculator { name: Self::NAME.to_owned(), parallel: true }
    }
}

impl Calculator {
    /// Name by which the model calls the tool.
    pub const NAME: &'static str = CALCULATOR;

    /// Returns the description of the tool for the model.
    pub fn spec() -> ToolSpec {
        ToolSpec {
            name: Self::NAME.to_owned(),
            description: "Evaluates an arithmetic expression with + - * / ^ and parentheses."
                .to_owned(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "expression": { "type": "string", "description": "The expression, such as (12 \
                                                                      + 7) * 3." }
                },
                "required": ["expression"],
                "additionalProperties": false,
            }),
        }
    }

    /// Evaluates the expression in the arguments of a tool call.
    ///
    /// # Errors
    /// Returns an error if the arguments or the expression are invalid. Every failure is the fault
    /// of the model, because the tool itself cannot fail.
    fn evaluate_arguments(arguments: &Map<String, Value>) -> Result<String, String> {
        let expression = match arguments.get("expression") {
            Some(Value::String(expression)) => expression,
            Some(other) => {
                return Err(format!(
                    "the argument \"expression\" is {other}, but it must be a string"
                ));
            }
            None => return Err("\"expression\" is missing".to_owned()),
        };
        if let Some(extra) = arguments.keys().find(|key| *key != "expression") {
            return Err(format!(
                "{extra:?} is not an argument of this tool; its argument is \"expression\""
            ));
        }
        evaluate(expression).map(|value| value.to_string()).map_err(|error| error.to_string())
    }
}

#[async_trait]
impl Toolbox for Calculator {
    fn name(&self) -> &str {
        &self.name
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![Self::spec()])
    }

    async fn open(&self, _attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        // The tool keeps no state between calls.
        Ok(Box::new(self.clone()))
    }
}

#[async_trait]
impl Session for Calculator {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![Self::spec()]
    }

    fn can_run_parallel(&self, _tool: &str) -> bool {
        self.parallel
    }

    async fn call(&self, _tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        match Self::evaluate_arguments(arguments) {
            Ok(value) => ToolOutput::text(value),
            Err(why) => ToolOutput::error(CallError::BadArguments, why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn call_calculator(arguments: Value) -> ToolOutput {
        Calculator::default().call(Calculator::NAME, arguments.as_object().unwrap()).await
    }

    #[tokio::test]
    async fn calculator_call_returns_value_or_error() {
        assert_eq!(
            call_calculator(json!({"expression": "12 * (3 + 4)"})).await,
            ToolOutput::text("84")
        );
        for (arguments, why) in [
            (json!({"expression": "12 * (3 + 4"}), "'(' at character 6 is never closed"),
            (json!({}), "\"expression\" is missing"),
            (json!({"expression": 5}), "the argument \"expression\" is 5, but it must be a string"),
            (
                json!({"expression": "1", "unit": "m"}),
                "\"unit\" is not an argument of this tool; its argument is \"expression\"",
            ),
        ] {
            assert_eq!(
                call_calculator(arguments).await,
                ToolOutput::error(CallError::BadArguments, why)
            );
        }
    }

    #[test]
    fn calculation_call_matches_schema() {
        let call = levade_tasks::calculation("1 + 1");
        let ToolSpec { name, parameters, .. } = Calculator::spec();
        assert_eq!(call.name, name);
        for name in call.arguments.keys() {
            assert!(parameters["properties"].get(name).is_some(), "{name}");
        }
    }
}
