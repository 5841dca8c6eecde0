//! Tests of a program: how data sets write them, and what each one is.

use serde_json::{Map, Value};

use super::packed;
use crate::json;
use crate::scorer::{expected, task_field};

/// One test.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Case {
    /// The program reads this input and must print this output.
    Prints { input: String, output: String },
    /// Code that runs after the program, with its names, and raises where that is wrong.
    Asserts {
        code: String,
        /// Code of the row that the program completes, and the name that this code defines last.
        start: Option<(String, String)>,
    },
    /// A function of the program, or a method of its class `Solution`, must return one of these.
    Returns { function: String, arguments: Vec<Value>, values: Vec<Value> },
}

/// The tests of a task: in its field `field`, or else what it expects.
///
/// # Errors
/// Says what is no test, or that there is none.
pub(super) fn of(task: &Value, field: &str) -> Result<Vec<Case>, String> {
    let given = task_field(task, field).unwrap_or_else(|| expected(task));
    let cases = read(given, task).map_err(|why| format!("the tests of the task {why}"))?;
    if cases.is_empty() {
        return Err(format!("the task has no tests, neither in its field {field:?} nor as its answer"));
    }
    Ok(cases)
}

fn read(given: &Value, task: &Value) -> Result<Vec<Case>, String> {
    match given {
        Value::Null => Ok(Vec::new()),
        Value::String(text) => match json::parse(text) {
            // Tables have them as text.
            Ok(inner @ (Value::Array(_) | Value::Object(_))) => read(&inner, task),
            _ if text.trim().is_empty() => Ok(Vec::new()),
            _ if packed::is_packed(text) => {
                let tests = packed::unpack(text).and_then(|json| {
                    json::parse(&json).map_err(|error| format!("packed, but its text is no JSON: {error}"))
                });
                match tests {
                    Ok(inner @ (Value::Array(_) | Value::Object(_))) => read(&inner, task),
                    Ok(other) => Err(format!("are packed, but hold {}, no list and no table", shown(&other))),
                    Err(why) => Err(format!(
                        "are {}, which is {why}; give code, JSON, or tests as LiveCodeBench packs them",
                        shown(given)
                    )),
                }
            }
            _ => Ok(vec![asserts(checked(text, task), task)]),
        },
        Value::Array(items) => items.iter().map(|item| one(item, task)).collect(),
        Value::Object(fields) => fields_of(fields, task),
        other => Err(format!("are {}: give a list, a table or code", shown(other))),
    }
}

/// One of a list: code, or an input with its output.
fn one(item: &Value, task: &Value) -> Result<Case, String> {
    match item {
        Value::String(code) => Ok(asserts(checked(code, task), task)),
        Value::Object(fields) => {
            let (Some(input), Some(output)) = (fields.get("input"), fields.get("output")) else {
                return Err(format!("have {}, which is no `input` with an `output`", shown(item)));
            };
            let is = |name: &str, value: &str| fields.get(name).and_then(Value::as_str) == Some(value);
            // LiveCodeBench and DeepCoder; PrimeIntellect.
            let (is_functional, is_call) = (is("testtype", "functional"), is("type", "function_call"));
            if !is_functional && !is_call {
                return prints(input, output);
            }
            let beside = |name: &&str| fields.get(*name).or_else(|| task_field(task, name))?.as_str();
            let function = ["fn_name", "func_name"].iter().find_map(beside).map(str::to_owned);
            let function = function.or_else(|| named_in(fields.get("metadata")?));
            match function.or_else(|| named_in(task_field(task, "metadata")?)) {
                Some(function) => called(&function, input, output, is_call),
                None => Err("are `functional`, but neither the row nor its `metadata` has a `fn_name` or \
                             `func_name` to call"
                    .into()),
            }
        }
        other => Err(format!("have {}, which is neither code nor a table", shown(other))),
    }
}

/// The function that facts beside a test name: LiveCodeBench has them once for the row, as text, and
/// DeepCoder with each test.
fn named_in(metadata: &Value) -> Option<String> {
    let parsed = metadata.as_str().and_then(|text| json::parse(text).ok());
    let facts = parsed.as_ref().unwrap_or(metadata);
    ["func_name", "fn_name"].iter().find_map(|name| Some(facts.get(name)?.as_str()?.to_owned()))
}

/// Tests as APPS, TACO and verl have them: lists of inputs and of outputs, with a function to call or
/// without; or lists of assertions.
fn fields_of(fields: &Map<String, Value>, task: &Value) -> Result<Vec<Case>, String> {
    let before = fields.get("import_prefix").and_then(Value::as_str).unwrap_or_default();
    if let Some(Value::Array(list)) = fields.get("assert_case") {
        let assertion = |item: &Value| match item.as_str() {
            Some(code) => Ok(asserts(format!("{before}\n{}", checked(code, task)), task)),
            None => Err(format!("have the assertion {}, which is no code", shown(item))),
        };
        return list.iter().map(assertion).collect();
    }
    // PrimeIntellect's `verification_info`.
    if let Some(cases @ Value::Array(_)) = fields.get("test_cases") {
        return read(cases, task);
    }
    // CodeContests has the names without an `s`.
    let list = |name: &str| {
        fields.get(name).or_else(|| fields.get(name.strip_suffix('s')?)).and_then(Value::as_array)
    };
    let (Some(inputs), Some(outputs)) = (list("inputs"), list("outputs")) else {
        let names: Vec<&str> = fields.keys().map(String::as_str).collect();
        return Err(format!("have {}, but not `inputs` with `outputs`, nor `assert_case`", names.join(", ")));
    };
    if inputs.len() != outputs.len() {
        return Err(format!("have {} inputs and {} outputs", inputs.len(), outputs.len()));
    }
    let function = fields.get("fn_name").and_then(Value::as_str).filter(|name| !name.is_empty());
    let case = |(input, output): (&Value, &Value)| match function {
        Some(function) => called(function, input, output, true),
        None => prints(input, output),
    };
    inputs.iter().zip(outputs).map(case).collect()
}

/// A test of what is printed. An output that is missing is no empty one, and a table or a truth value may be
/// printed in several ways.
fn prints(input: &Value, output: &Value) -> Result<Case, String> {
    match output {
        Value::Null => Err("have an output that is null, though nothing is returned".into()),
        Value::Object(_) | Value::Bool(_) => {
            Err(format!("have the output {}, which no program prints: give it as text", shown(output)))
        }
        _ => Ok(Case::Prints { input: text(input), output: text(output) }),
    }
}

/// A call, whose arguments are a list or, as text, JSON on a line each. The value is written as the
/// arguments are: beside arguments as text it is JSON, as in LiveCodeBench, and beside a list of arguments
/// it is the value itself, so that "3" is a text. APPS and TACO write the value that is returned in a list
/// of its own, and so does whoever checks them as their harness does: `wrapped` says that the first item of
/// a list is right, too.
fn called(function: &str, input: &Value, output: &Value, wrapped: bool) -> Result<Case, String> {
    let parsed = |line: &str| {
        json::parse(line).map_err(|error| format!("have the argument {line:?}, no JSON: {error}"))
    };
    let arguments = match input {
        Value::Array(arguments) => arguments.clone(),
        Value::String(lines) => {
            lines.lines().filter(|line| !line.trim().is_empty()).map(parsed).collect::<Result<_, _>>()?
        }
        other => vec![other.clone()],
    };
    let value = match output {
        Value::String(text) if input.is_string() => json::parse(text).unwrap_or_else(|_| output.clone()),
        other => other.clone(),
    };
    let inner = value.as_array().and_then(|items| items.first()).filter(|_| wrapped).cloned();
    let values = [value].into_iter().chain(inner).collect();
    Ok(Case::Returns { function: function.to_owned(), arguments, values })
}

/// Assertions, with the start of the program that the row has in `prompt`, as HumanEval's rows do: code that
/// defines the function of `entry_point` up to its documentation.
fn asserts(code: String, task: &Value) -> Case {
    let field = |name: &str| task_field(task, name).and_then(Value::as_str);
    let entry = field("entry_point")
        .map(str::trim)
        .filter(|entry| !entry.is_empty() && entry.chars().all(|c| c.is_alphanumeric() || c == '_'));
    let start = entry.zip(field("prompt")).filter(|(entry, prompt)| {
        let defines = |line: &str| {
            let line = line.strip_prefix("async ").unwrap_or(line);
            let rest = line.strip_prefix("def ").and_then(|rest| rest.trim_start().strip_prefix(*entry));
            rest.is_some_and(|rest| rest.trim_start().starts_with('('))
        };
        prompt.lines().any(defines)
    });
    Case::Asserts { code, start: start.map(|(entry, prompt)| (prompt.to_owned(), entry.to_owned())) }
}

/// Code of tests, after that which MBPP has for the tests of a row. `check(candidate)`, as HumanEval has it,
/// is called with the function that the row names.
fn checked(code: &str, task: &Value) -> String {
    let lines = |name: &str| task_field(task, name).map(text).filter(|lines| !lines.trim().is_empty());
    let before = ["test_imports", "test_setup_code"].into_iter().filter_map(lines);
    let mut whole: Vec<String> = before.collect();
    whole.push(code.to_owned());
    let entry =
        task_field(task, "entry_point").and_then(Value::as_str).filter(|_| code.contains("def check("));
    whole.extend(entry.map(|entry| format!("check({entry})\n")));
    whole.join("\n")
}

/// Input or output: a text, or lines of one each.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(lines) => lines.iter().map(text).collect::<Vec<_>>().join("\n"),
        other => other.to_string(),
    }
}

fn shown(value: &Value) -> String {
    crate::scorer::shown(&value.to_string())
}
