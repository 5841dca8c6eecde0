//! Parses the tests of a task from the formats of public data sets.

use serde_json::{Map, Value};

use super::packed;
use crate::json;
use crate::scorer::{expected, task_field};

/// A test of a program that a model wrote.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TestCase {
    /// The program reads `input` and must print `output`.
    Prints { input: String, output: String },
    /// The code `code` runs after the program in the same namespace, and raises an exception if the
    /// program is wrong.
    Asserts {
        code: String,
        /// Code of the task's row that the program completes, and the name of the function that
        /// this code defines.
        start: Option<(String, String)>,
    },
    /// A function of the program, or a method of its class `Solution`, must return one of `values`.
    Returns { function: String, arguments: Vec<Value>, values: Vec<Value> },
}

/// Parses the tests of a task, in the field `field` or else in the expected answer.
///
/// # Errors
/// Returns a message if a test cannot be parsed, or if there are no tests.
pub(super) fn parse_cases(task: &Value, field: &str) -> Result<Vec<TestCase>, String> {
    let tests = task_field(task, field).unwrap_or_else(|| expected(task));
    let cases = parse_tests(tests, task)
        .map_err(|why| format!("the tests of the task are invalid: {why}"))?;
    if cases.is_empty() {
        return Err(format!(
            "the task has no tests, neither in its field {field:?} nor as its answer"
        ));
    }
    Ok(cases)
}

fn parse_tests(value: &Value, task: &Value) -> Result<Vec<TestCase>, String> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::String(text) => match json::parse(text) {
            // Tabular data sets store tests as JSON text.
            Ok(inner @ (Value::Array(_) | Value::Object(_))) => parse_tests(&inner, task),
            _ if text.trim().is_empty() => Ok(Vec::new()),
            _ if packed::looks_packed(text) => {
                let tests = packed::unpack_tests(text).and_then(|json| {
                    json::parse(&json)
                        .map_err(|error| format!("the unpacked text is not JSON: {error}"))
                });
                match tests {
                    Ok(inner @ (Value::Array(_) | Value::Object(_))) => parse_tests(&inner, task),
                    Ok(other) => Err(format!(
                        "the packed tests contain {}, which is neither a list nor an object",
                        excerpt(&other)
                    )),
                    Err(why) => Err(format!(
                        "cannot unpack the tests {}: {why}; give code, JSON, or tests that are \
                         packed as in LiveCodeBench",
                        excerpt(value)
                    )),
                }
            }
            _ => Ok(vec![assertion_test(add_test_setup(text, task), task)]),
        },
        Value::Array(items) => items.iter().map(|item| parse_test(item, task)).collect(),
        Value::Object(fields) => parse_test_fields(fields, task),
        other => Err(format!("expected a list, an object or code, but found {}", excerpt(other))),
    }
}

/// Parses an item of a list of tests: code, or an input with its output.
fn parse_test(item: &Value, task: &Value) -> Result<TestCase, String> {
    match item {
        Value::String(code) => Ok(assertion_test(add_test_setup(code, task), task)),
        Value::Object(fields) => {
            let (Some(input), Some(output)) = (fields.get("input"), fields.get("output")) else {
                return Err(format!("the test {} lacks `input` or `output`", excerpt(item)));
            };
            let is =
                |name: &str, value: &str| fields.get(name).and_then(Value::as_str) == Some(value);
            // `testtype` of LiveCodeBench and DeepCoder; `type` of PrimeIntellect.
            let is_functional = is("testtype", "functional");
            let is_call = is("type", "function_call");
            if !is_functional && !is_call {
                return parse_output_test(input, output);
            }
            let text_field =
                |name: &&str| fields.get(*name).or_else(|| task_field(task, name))?.as_str();
            let function = ["fn_name", "func_name"].iter().find_map(text_field).map(str::to_owned);
            let function = function.or_else(|| function_name_in_metadata(fields.get("metadata")?));
            match function.or_else(|| function_name_in_metadata(task_field(task, "metadata")?)) {
                Some(function) => parse_call_test(&function, input, output, is_call),
                None => Err(
                    "a functional test has no function to call: set `fn_name` or `func_name` in \
                             the row or its `metadata`"
                        .into(),
                ),
            }
        }
        other => Err(format!("the test {} is neither code nor an object", excerpt(other))),
    }
}

/// Returns the function's name from `metadata`. LiveCodeBench has metadata once per row, as JSON
/// text, and DeepCoder has it in each test.
fn function_name_in_metadata(metadata: &Value) -> Option<String> {
    let parsed = metadata.as_str().and_then(|text| json::parse(text).ok());
    let facts = parsed.as_ref().unwrap_or(metadata);
    ["func_name", "fn_name"].iter().find_map(|name| Some(facts.get(name)?.as_str()?.to_owned()))
}

/// Parses tests in the formats of APPS, TACO and verl: lists of inputs and outputs, with or without
/// a function to call, or a list of assertions.
fn parse_test_fields(fields: &Map<String, Value>, task: &Value) -> Result<Vec<TestCase>, String> {
    let before = fields.get("import_prefix").and_then(Value::as_str).unwrap_or_default();
    if let Some(Value::Array(list)) = fields.get("assert_case") {
        let assertion = |item: &Value| match item.as_str() {
            Some(code) => {
                Ok(assertion_test(format!("{before}\n{}", add_test_setup(code, task)), task))
            }
            None => Err(format!("the assertion {} is not code", excerpt(item))),
        };
        return list.iter().map(assertion).collect();
    }
    // PrimeIntellect's `verification_info`.
    if let Some(cases @ Value::Array(_)) = fields.get("test_cases") {
        return parse_tests(cases, task);
    }
    // CodeContests names the fields `input` and `output`.
    let list = |name: &str| {
        fields.get(name).or_else(|| fields.get(name.strip_suffix('s')?)).and_then(Value::as_array)
    };
    let (Some(inputs), Some(outputs)) = (list("inputs"), list("outputs")) else {
        let names: Vec<&str> = fields.keys().map(String::as_str).collect();
        return Err(format!(
            "expected the fields `inputs` and `outputs`, or `assert_case`, but found {}",
            names.join(", ")
        ));
    };
    if inputs.len() != outputs.len() {
        return Err(format!("there are {} inputs, but {} outputs", inputs.len(), outputs.len()));
    }
    let function = fields.get("fn_name").and_then(Value::as_str).filter(|name| !name.is_empty());
    let case = |(input, output): (&Value, &Value)| match function {
        Some(function) => parse_call_test(function, input, output, true),
        None => parse_output_test(input, output),
    };
    inputs.iter().zip(outputs).map(case).collect()
}

/// Creates a test that compares the program's printed output.
///
/// # Errors
/// Returns a message if the output is null, which does not mean empty, or is an object or a
/// Boolean, which can be printed in several ways.
fn parse_output_test(input: &Value, output: &Value) -> Result<TestCase, String> {
    match output {
        Value::Null => {
            Err("an output is null, but the test compares printed output: give a string".into())
        }
        Value::Object(_) | Value::Bool(_) => Err(format!(
            "the output {} cannot be compared with printed output: give it as a string",
            excerpt(output)
        )),
        _ => Ok(TestCase::Prints {
            input: value_to_input_text(input),
            output: value_to_input_text(output),
        }),
    }
}

/// Creates a test that calls a function.
///
/// `input` is a list of arguments, or text with one JSON argument per line. If `input` is text, a
/// text in `output` is parsed as JSON, as in LiveCodeBench. Otherwise, `output` is the expected
/// value itself, so that "3" is a string.
///
/// APPS and TACO can wrap the return value in a list. If `wrapped`, the first item of a list is
/// accepted as well, as in their harness.
///
/// # Errors
/// Returns a message if an argument is not JSON.
fn parse_call_test(
    function: &str,
    input: &Value,
    output: &Value,
    wrapped: bool,
) -> Result<TestCase, String> {
    let parsed = |line: &str| {
        json::parse(line).map_err(|error| format!("the argument {line:?} is not JSON: {error}"))
    };
    let arguments = match input {
        Value::Array(arguments) => arguments.clone(),
        Value::String(lines) => lines
            .lines()
            .filter(|line| !line.trim().is_empty())
            .map(parsed)
            .collect::<Result<_, _>>()?,
        other => vec![other.clone()],
    };
    let value = match output {
        Value::String(text) if input.is_string() => {
            json::parse(text).unwrap_or_else(|_| output.clone())
        }
        other => other.clone(),
    };
    let inner = value.as_array().and_then(|items| items.first()).filter(|_| wrapped).cloned();
    let values = [value].into_iter().chain(inner).collect();
    Ok(TestCase::Returns { function: function.to_owned(), arguments, values })
}

/// Creates a test from Python assertions. If the row's `prompt` is code that defines the function
/// `entry_point` up to its docstring, as in HumanEval, the test gets this code as the start of the
/// program.
fn assertion_test(code: String, task: &Value) -> TestCase {
    let field = |name: &str| task_field(task, name).and_then(Value::as_str);
    let entry = field("entry_point").map(str::trim).filter(|entry| {
        !entry.is_empty() && entry.chars().all(|c| c.is_alphanumeric() || c == '_')
    });
    let start = entry.zip(field("prompt")).filter(|(entry, prompt)| {
        let defines = |line: &str| {
            let line = line.strip_prefix("async ").unwrap_or(line);
            let rest =
                line.strip_prefix("def ").and_then(|rest| rest.trim_start().strip_prefix(*entry));
            rest.is_some_and(|rest| rest.trim_start().starts_with('('))
        };
        prompt.lines().any(defines)
    });
    TestCase::Asserts {
        code,
        start: start.map(|(entry, prompt)| (prompt.to_owned(), entry.to_owned())),
    }
}

/// Returns the code of a test, preceded by the row's `test_imports` and `test_setup_code` (MBPP).
/// If the code defines `check(candidate)` (HumanEval), a call of `check` with the row's
/// `entry_point` is appended.
fn add_test_setup(code: &str, task: &Value) -> String {
    let lines = |name: &str| {
        task_field(task, name).map(value_to_input_text).filter(|lines| !lines.trim().is_empty())
    };
    let before = ["test_imports", "test_setup_code"].into_iter().filter_map(lines);
    let mut parts: Vec<String> = before.collect();
    parts.push(code.to_owned());
    let entry = task_field(task, "entry_point")
        .and_then(Value::as_str)
        .filter(|_| code.contains("def check("));
    parts.extend(entry.map(|entry| format!("check({entry})\n")));
    parts.join("\n")
}

/// Converts the input or output of a test to text. The items of a list become lines.
fn value_to_input_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(lines) => lines.iter().map(value_to_input_text).collect::<Vec<_>>().join("\n"),
        other => other.to_string(),
    }
}

fn excerpt(value: &Value) -> String {
    crate::scorer::excerpt(&value.to_string())
}
