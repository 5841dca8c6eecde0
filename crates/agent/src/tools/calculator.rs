//! The calculator tool.

use async_trait::async_trait;
use dressage_text::{ToolCall, ToolSpec};
use serde_json::{Map, Value, json};

use super::{CallError, Tool, ToolError, ToolSession, expression};

/// Evaluates one arithmetic expression a call: argument `expression`, a text. See
/// [`evaluate`](super::evaluate) for what it reads and how results print.
#[derive(Debug, Clone, Copy, Default)]
pub struct Calculator;

impl Calculator {
    /// The tool's name.
    pub const NAME: &'static str = "calculator";

    /// A call that asks for the value of `expression`.
    pub fn call(expression: &str) -> ToolCall {
        let arguments = Map::from_iter([("expression".to_owned(), Value::from(expression))]);
        ToolCall { id: String::new(), name: Self::NAME.to_owned(), arguments }
    }
}

#[async_trait]
impl Tool for Calculator {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: Self::NAME.to_owned(),
            description: "Evaluates an arithmetic expression with + - * / ^ and parentheses.".to_owned(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "expression": { "type": "string", "description": "The expression, such as (12 + 7) * 3." }
                },
                "required": ["expression"],
                "additionalProperties": false,
            }),
        }
    }

    async fn open(&self, _attempt: &str) -> Result<Box<dyn ToolSession>, ToolError> {
        // It keeps nothing between calls.
        Ok(Box::new(Calculator))
    }
}

#[async_trait]
impl ToolSession for Calculator {
    async fn execute(&mut self, arguments: &Map<String, Value>) -> Result<String, CallError> {
        let expression = match arguments.get("expression") {
            Some(Value::String(expression)) => expression,
            Some(other) => {
                return Err(CallError::BadArguments(format!(
                    "\"expression\" is {other}, but it must be a string"
                )));
            }
            None => return Err(CallError::BadArguments("\"expression\" is missing".to_owned())),
        };
        if let Some(extra) = arguments.keys().find(|key| *key != "expression") {
            return Err(CallError::BadArguments(format!("{extra:?} is not an argument; \"expression\" is")));
        }
        match expression::evaluate(expression) {
            Ok(value) => Ok(value.to_string()),
            // The tool works: what cannot be computed is the expression's fault.
            Err(error) => Err(CallError::BadArguments(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn run(arguments: Value) -> Result<String, CallError> {
        let mut session = Calculator.open("a").await.unwrap();
        session.execute(arguments.as_object().unwrap()).await
    }

    #[tokio::test]
    async fn computes_and_explains() {
        assert_eq!(run(json!({"expression": "12 * (3 + 4)"})).await, Ok("84".to_owned()));
        let failed = run(json!({"expression": "12 * (3 + 4"})).await;
        assert_eq!(failed, Err(CallError::BadArguments("'(' at character 6 is never closed".to_owned())));
        for (arguments, why) in [
            (json!({}), "\"expression\" is missing"),
            (json!({"expression": 5}), "\"expression\" is 5, but it must be a string"),
            (json!({"expression": "1", "unit": "m"}), "\"unit\" is not an argument; \"expression\" is"),
        ] {
            assert_eq!(run(arguments).await, Err(CallError::BadArguments(why.to_owned())));
        }
    }

    #[test]
    fn its_call_fits_its_schema() {
        let call = Calculator::call("1 + 1");
        let parameters = Calculator.spec().parameters;
        assert_eq!(call.name, Calculator.spec().name);
        for name in call.arguments.keys() {
            assert!(parameters["properties"].get(name).is_some(), "{name}");
        }
    }
}
