//! Jinja as transformers configures it: Jinja2's grammar, filters, tests and globals, and Python's
//! methods and printing, in a sandbox that changes no values and bounds all costs.
//!
//! The engine is `minijinja`. Differences from Python are corrected through its extension points
//! (filters, tests, functions, the callback for methods, the formatter). If there is no extension
//! point for a difference, the template is rewritten before it is compiled ([`translate`]).
//!
//! Out of scope: `lipsum`, `urlize`, `xmlattr`, and templates that include other templates.
//! Integers beyond 128 bits print their digits, but support no arithmetic. Objects without a text
//! representation, such as generators, print differently than in Python.

mod arguments;
mod containers;
mod expression;
mod filters;
mod format;
mod from_json;
mod lexer;
mod limits;
mod names;
mod numbers;
mod objects;
mod operators;
mod repr;
mod strings;
#[cfg(test)]
mod tests;
mod text_filters;
mod translate;
mod wrap;

use minijinja::syntax::SyntaxConfig;
use minijinja::tests::is_in;
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, functions};

use crate::clock;
pub(crate) use from_json::from_fields;
pub(crate) use limits::STEPS;

/// Name of the template variable from which filters read the guard character of a rendering.
pub(crate) const GUARD: &str = "__levade_guard";

/// Name of the only template in a template environment.
pub(crate) const NAME: &str = "chat";

/// Creates a template environment that contains the template `source`. The current time is always
/// `now`, a Unix timestamp in seconds.
///
/// # Errors
/// Returns an error if the template does not parse.
pub(crate) fn environment(source: &str, now: u64) -> Result<Environment<'static>, Error> {
    let translated = translate::translate(source)
        .map_err(|message| Error::new(ErrorKind::SyntaxError, message))?;
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_debug(true);
    environment.set_fuel(Some(limits::STEPS));
    environment.set_recursion_limit(limits::FRAMES);
    environment.set_formatter(|out, state, value| match value.as_str() {
        Some(text) => {
            limits::spend_bytes(state, text.len())?;
            out.write_str(text).map_err(Error::from)
        }
        None => {
            let text = repr::python_str(state, value)?;
            out.write_str(&text).map_err(Error::from)
        }
    });
    environment.set_unknown_method_callback(containers::call_method);
    operators::register_operators(&mut environment);
    filters::register_filters(&mut environment, now);
    tests_of_jinja(&mut environment);
    globals(&mut environment, now);
    environment.add_template_owned(NAME, translated)?;
    Ok(environment)
}

/// Returns the guard character of a rendering, or `None` if the rendering has none.
fn guard(state: &State) -> Option<char> {
    state.lookup(GUARD).and_then(|guard| guard.as_str()?.chars().next())
}

fn tests_of_jinja(environment: &mut Environment<'_>) {
    // Python iterates over strings and undefined values, but not over `None`.
    environment.add_test("iterable", |value: &Value| {
        value.is_undefined()
            || value.as_str().is_some()
            || (!value.is_none() && value.try_iter().is_ok())
    });
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Undefined | ValueKind::Seq | ValueKind::Map | ValueKind::String
        )
    });
    environment.add_test("callable", |value: &Value| {
        let is_macro = value.kind() == ValueKind::Map && value.to_string().starts_with("<macro ");
        is_macro || matches!(value.kind(), ValueKind::Undefined | ValueKind::Plain)
    });
    let remainder = |by: Option<i64>, wanted: i64| {
        move |state: &mut State, value: Value, other: Option<Value>| -> Result<bool, Error> {
            let by = by
                .map(Value::from)
                .or(other)
                .ok_or_else(|| limits::template_error("divisibleby: num is missing"))?;
            Ok(operators::modulo_values(state, value, by)? == Value::from(wanted))
        }
    };
    environment.add_test("divisibleby", remainder(None, 0));
    environment.add_test("even", remainder(Some(2), 0));
    environment.add_test("odd", remainder(Some(2), 1));
    let equal = |wanted: bool| {
        move |state: &mut State, left: &Value, right: &Value| {
            limits::start_iteration(state, 0).map(|_| (left == right) == wanted)
        }
    };
    for name in ["==", "eq", "equalto"] {
        environment.add_test(name, equal(true));
    }
    for name in ["!=", "ne"] {
        environment.add_test(name, equal(false));
    }
    environment.add_test("in", |state: &mut State, value: &Value, container: &Value| {
        limits::start_iteration(state, 0)?;
        is_in(state, value, container)
    });
    for (operator, names) in [
        ("<", ["<", "lt", "lessthan"].as_slice()),
        ("<=", &["<=", "le"]),
        (">", &[">", "gt", "greaterthan"]),
        (">=", &[">=", "ge"]),
    ] {
        for name in names {
            environment.add_test(*name, move |left: Value, right: Value| {
                operators::order_values(operator, left, right).map(|found| found.is_true())
            });
        }
    }
    for name in ["startingwith", "endingwith", "safe", "int"] {
        environment.remove_test(name);
    }
}

fn globals(environment: &mut Environment<'_>, now: u64) {
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        Err(limits::template_error(message.to_string()))
    });
    environment.add_function("strftime_now", move |state: &mut State, format: String| {
        limits::spend_bytes(state, format.len())?;
        let printed = clock::strftime(&format, now).map_err(limits::template_error)?;
        limits::make_text(state, printed)
    });
    environment.add_function("dict", |state: &mut State, arguments: Rest<ValueOrKwargs>| {
        let items = items_of("dict", &arguments.into_values())?;
        limits::check_container(state, Value::from_pairs(items))
    });
    environment.add_function("namespace", |state: &mut State, arguments: Rest<ValueOrKwargs>| {
        let items = items_of("namespace", &arguments.into_values())?;
        let values = limits::check_container(state, Value::from_pairs(items))?;
        let namespace = functions::namespace(Some(values.into()))?;
        limits::remember_namespace(state, &namespace);
        Ok(namespace)
    });
    environment.add_function("cycler", objects::cycler);
    environment.add_function("joiner", objects::joiner);
    environment.remove_global("debug");
}

/// Returns the keys and values for a call of Python's `dict`: a mapping or pairs, then keyword
/// arguments. `call` is the name in error messages.
fn items_of(call: &str, arguments: &[Value]) -> Result<Vec<(Value, Value)>, Error> {
    let (positional, named) = arguments::split_arguments(arguments)?;
    let mut items = Vec::new();
    match positional {
        [] => {}
        [from] if from.kind() == ValueKind::Map => items.extend(limits::mapping_pairs(from)),
        [from] => {
            for pair in from.try_iter()? {
                let pair: Vec<Value> = pair.try_iter()?.collect();
                let [key, item] = pair.as_slice() else {
                    return Err(limits::template_error(format!(
                        "{call}: every item of a list must be a pair of a key and a value"
                    )));
                };
                items.push((key.clone(), item.clone()));
            }
        }
        _ => {
            return Err(limits::template_error(format!(
                "{call} takes at most one positional argument, and keyword arguments"
            )));
        }
    }
    for name in named.args() {
        items.push((Value::from(name), named.peek(name)?));
    }
    Ok(items)
}
