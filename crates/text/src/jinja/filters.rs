//! Filters of Jinja2 that the engine implements differently, or without a bound on their output.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters};

use super::arguments::{BoundArguments, Filter, integer};
use super::format;
use super::from_json::UnrepresentableNumber;
use super::limits::{
    self, check_container, make_list, mapping_pairs, measure_value, spend_bytes, template_error,
};
use super::numbers::{strip_underscores, to_number};
use super::repr::python_str;
use super::strings;
use super::text_filters::{self, map_text};
use crate::python_json::JsonStyle;

/// Registers Jinja's filters in a template environment, and removes filters that Jinja lacks.
///
/// `random` picks an item by the fixed time `now`, so that every rendering prints the same text.
pub(crate) fn register_filters(environment: &mut Environment<'_>, now: u64) {
    let filters: [(&'static str, Filter); 23] = [
        ("tojson", tojson_filter),
        ("length", length_filter),
        ("count", length_filter),
        ("string", |state, value, _| map_text(state, value, |text| text.to_string())),
        ("join", join_filter),
        ("int", int_filter),
        ("float", float_filter),
        ("list", |state, value, _| {
            let items = collect_items(state, &value)?;
            make_list(state, items)
        }),
        ("first", |state, value, _| {
            Ok(collect_items(state, &value)?.first().cloned().unwrap_or_default())
        }),
        ("last", |state, value, _| {
            Ok(collect_items(state, &value)?.last().cloned().unwrap_or_default())
        }),
        ("reverse", reverse_filter),
        ("items", items_filter),
        ("attr", attr_filter),
        ("default", default_filter),
        ("d", default_filter),
        ("dictsort", dictsort_filter),
        ("sort", sort_filter),
        ("min", |state, value, given| {
            call_with_named_arguments(
                state,
                "min",
                &["case_sensitive", "attribute"],
                value,
                given,
                filters::min,
            )
        }),
        ("max", |state, value, given| {
            call_with_named_arguments(
                state,
                "max",
                &["case_sensitive", "attribute"],
                value,
                given,
                filters::max,
            )
        }),
        ("groupby", groupby_filter),
        ("sum", sum_filter),
        ("batch", |state, value, given| {
            call_grouping_filter(state, "batch", value, given, filters::batch)
        }),
        ("slice", |state, value, given| {
            call_grouping_filter(state, "slice", value, given, filters::slice)
        }),
    ];
    for (name, filter) in filters.into_iter().chain(text_filters::FILTERS) {
        environment.add_filter(
            name,
            move |state: &mut State, value: Value, given: Rest<ValueOrKwargs>| {
                // `map` calls filters in a loop of its own.
                limits::start_iteration(state, 0)?;
                filter(state, value, &given.into_values())
            },
        );
    }
    environment.add_filter(
        "random",
        move |state: &mut State, value: Value| -> Result<Value, Error> {
            let items = collect_items(state, &value)?;
            let at = usize::try_from(now).unwrap_or(0).checked_rem(items.len());
            Ok(at.map_or(Value::UNDEFINED, |at| items[at].clone()))
        },
    );
    // Jinja2 has none of these filters.
    for name in ["split", "lines", "bool", "chain", "zip"] {
        environment.remove_filter(name);
    }
}

/// Returns the items over which Python iterates for a value: characters, keys or items. Undefined
/// values have no items.
fn collect_items(state: &mut State, value: &Value) -> Result<Vec<Value>, Error> {
    match value.as_str() {
        _ if value.is_undefined() => Ok(Vec::new()),
        Some(text) => {
            spend_bytes(state, text.len().saturating_mul(size_of::<Value>()))?;
            Ok(text.chars().map(Value::from).collect())
        }
        None if value.is_none() => Err(template_error("none is not iterable")),
        None => Ok(value.try_iter()?.collect()),
    }
}

/// Returns the attribute `value.a.0.b` for the attribute path `a.0.b`, as filters take it.
fn get_attribute_path(value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else { return value.get_item(path) };
    path.split('.').try_fold(value.clone(), |value, part| match part.parse::<u32>() {
        Ok(index) => value.get_item(&Value::from(index)),
        Err(_) => value.get_item(&Value::from(part)),
    })
}

fn length_filter(_: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    BoundArguments::new("length", &[], given)?;
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(0)),
        ValueKind::Bytes => Ok(Value::from(value.as_bytes().map_or(0, <[u8]>::len))),
        kind => value
            .len()
            .map(Value::from)
            .ok_or_else(|| template_error(format!("a value of kind {kind} has no length"))),
    }
}

/// Implements the filter `tojson(value, ensure_ascii, indent, separators, sort_keys)` with the
/// defaults of transformers.
fn tojson_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new(
        "tojson",
        &["ensure_ascii", "indent", "separators", "sort_keys"],
        given,
    )?;
    let indent = match bound.value(1) {
        None => None,
        Some(indent) => Some(match (indent.as_str(), integer(indent)) {
            (Some(text), _) => text.to_string(),
            (None, Some(width)) => {
                let width = usize::try_from(width).unwrap_or(0);
                spend_bytes(state, width)?;
                " ".repeat(width)
            }
            (None, None) => {
                return Err(template_error(format!(
                    "tojson: indent is {indent}, but must be a number or a string"
                )));
            }
        }),
    };
    let separators = match bound.value(2) {
        None => None,
        Some(separators) => {
            let given: Vec<Value> = separators.try_iter()?.collect();
            match given.as_slice() {
                [comma, colon] if comma.as_str().is_some() && colon.as_str().is_some() => {
                    Some((comma.to_string(), colon.to_string()))
                }
                _ => {
                    return Err(template_error(format!(
                        "tojson: separators are {separators}, but must be two strings"
                    )));
                }
            }
        }
    };
    let size = measure_value(state, &value)?;
    if size.undefined {
        return Err(template_error(
            "tojson: the value contains an undefined value, which JSON cannot represent",
        ));
    }
    let indentation =
        indent.as_ref().map_or(0, |indent| indent.len().saturating_mul(size.depth + 1));
    let between = separators
        .as_ref()
        .map_or(0, |(comma, colon): &(String, String)| comma.len() + colon.len());
    let each = indentation.saturating_add(between);
    spend_bytes(state, size.bytes.saturating_add(size.values.saturating_mul(each)))?;
    let value = to_json_value(&value)?;
    let style = JsonStyle {
        ensure_ascii: bound.truth(0, false),
        sort_keys: bound.truth(3, false),
        guard: super::guard(state),
        indent,
        separators,
    };
    limits::make_text(state, style.dumps(&value))
}

/// Converts a template value to JSON, with keys as `json.dumps` writes them.
fn to_json_value(value: &Value) -> Result<serde_json::Value, Error> {
    Ok(match value.kind() {
        ValueKind::Map => {
            let mut object = serde_json::Map::new();
            for (key, item) in mapping_pairs(value) {
                let name = match (key.as_str(), key.kind()) {
                    (Some(name), _) => name.to_string(),
                    (None, ValueKind::Number | ValueKind::Bool | ValueKind::None) => {
                        JsonStyle::default().dumps(&to_json_value(&key)?)
                    }
                    (None, kind) => {
                        return Err(template_error(format!(
                            "tojson: a key is of kind {kind}, but must be a string"
                        )));
                    }
                };
                object.insert(name, to_json_value(&item)?);
            }
            serde_json::Value::Object(object)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter()?.map(|item| to_json_value(&item)).collect::<Result<_, _>>()?
        }
        ValueKind::Number
            if !value.is_integer()
                && f64::try_from(value.clone()).is_ok_and(|number| !number.is_finite()) =>
        {
            return Err(template_error(format!("tojson: {value} is not a JSON number")));
        }
        ValueKind::Plain
            if let Some(digits) = value.downcast_object_ref::<UnrepresentableNumber>() =>
        {
            serde_json::Value::Number(digits.0.clone())
        }
        ValueKind::Plain | ValueKind::Bytes => {
            return Err(template_error(format!(
                "tojson: a value of kind {} cannot be represented in JSON",
                value.kind()
            )));
        }
        _ => serde_json::to_value(value)
            .map_err(|error| template_error(format!("tojson: {error}")))?,
    })
}

fn join_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("join", &["d", "attribute"], given)?;
    let between = match bound.value(0) {
        Some(between) => python_str(state, between)?,
        None => String::new(),
    };
    let mut out = String::new();
    for (index, mut item) in collect_items(state, &value)?.into_iter().enumerate() {
        if let Some(path) = bound.value(1) {
            item = get_attribute_path(&item, path)?;
        }
        let item = python_str(state, &item)?;
        spend_bytes(state, between.len())?;
        if index > 0 {
            out.push_str(&between);
        }
        out.push_str(&item);
    }
    limits::make_text(state, out)
}

fn int_filter(_: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("int", &["default", "base"], given)?;
    if value.is_undefined() {
        return Err(template_error("int: the value is undefined"));
    }
    let whole = match value.as_str() {
        Some(text) => {
            let text = strings::strip(text, None, true, true).to_lowercase();
            let (sign, digits) = match text.strip_prefix('-') {
                Some(digits) => ("-", digits),
                None => ("", text.strip_prefix('+').unwrap_or(&text)),
            };
            let base =
                u32::try_from(bound.integer(1, 10)?).ok().filter(|base| (2..=36).contains(base));
            let base =
                base.ok_or_else(|| template_error("int: the base must be between 2 and 36"))?;
            let prefix = match base {
                2 => "0b",
                8 => "0o",
                16 => "0x",
                _ => "",
            };
            let digits = digits.strip_prefix(prefix).unwrap_or(digits);
            strip_underscores(digits)
                .and_then(|digits| i128::from_str_radix(&format!("{sign}{digits}"), base).ok())
        }
        None if value.is_integer() => return Ok(value),
        None => None,
    };
    let whole = match (whole, to_number(&value)) {
        (None, Some(number)) if number.is_finite() => Some(format::to_integer(number)?),
        (whole, _) => whole,
    };
    Ok(whole.map(Value::from).unwrap_or_else(|| bound.value(0).cloned().unwrap_or(Value::from(0))))
}

fn float_filter(_: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("float", &["default"], given)?;
    if value.is_undefined() {
        return Err(template_error("float: the value is undefined"));
    }
    Ok(to_number(&value)
        .map(Value::from)
        .unwrap_or_else(|| bound.value(0).cloned().unwrap_or(Value::from(0.0))))
}

fn reverse_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    BoundArguments::new("reverse", &[], given)?;
    if let Some(text) = value.as_str() {
        return limits::make_text(state, text.chars().rev().collect::<String>());
    }
    let mut items = collect_items(state, &value)?;
    items.reverse();
    make_list(state, items)
}

fn items_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    BoundArguments::new("items", &[], given)?;
    match value.kind() {
        ValueKind::Undefined => make_list(state, Vec::new()),
        ValueKind::Map => make_list(
            state,
            mapping_pairs(&value)
                .map(|(key, item)| Value::from(Tuple::from([key, item])))
                .collect(),
        ),
        kind => Err(template_error(format!(
            "items: the value is of kind {kind}, but must be a mapping"
        ))),
    }
}

/// Implements the filter `attr`: returns an attribute. Keys of a mapping are not attributes.
fn attr_filter(_: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("attr", &["name"], given)?;
    let name = bound.text(0)?;
    Ok(if value.kind() == ValueKind::Map {
        Value::UNDEFINED
    } else {
        value.get_item(&Value::from(name))?
    })
}

fn default_filter(_: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("default", &["default_value", "boolean"], given)?;
    if value.is_undefined() || (bound.truth(1, false) && !value.is_true()) {
        return bound.required(0).cloned().or_else(|_| Ok(Value::from("")));
    }
    Ok(value)
}

/// Calls a filter of the template engine with all arguments by name.
fn call_with_named_arguments(
    state: &mut State,
    call: &str,
    names: &[&str],
    value: Value,
    given: &[Value],
    filter: impl Fn(&State, Value, Kwargs) -> Result<Value, Error>,
) -> Result<Value, Error> {
    let bound = BoundArguments::new(call, names, given)?;
    if value.is_none() {
        return Err(template_error(format!("{call}: none is not iterable")));
    }
    // The engine compares values without checking the time limit.
    let size = measure_value(state, &value)?;
    spend_bytes(state, size.bytes)?;
    let named = names
        .iter()
        .enumerate()
        .filter_map(|(index, name)| Some((*name, bound.value(index)?.clone())));
    let value = filter(state, value, named.collect())?;
    check_container(state, value)
}

fn dictsort_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    call_with_named_arguments(
        state,
        "dictsort",
        &["case_sensitive", "by", "reverse"],
        value,
        given,
        |_, value, named| filters::dictsort(&value, named),
    )
}

fn sort_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    call_with_named_arguments(
        state,
        "sort",
        &["reverse", "case_sensitive", "attribute"],
        value,
        given,
        filters::sort,
    )
}

fn groupby_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    call_with_named_arguments(
        state,
        "groupby",
        &["attribute", "default", "case_sensitive"],
        value,
        given,
        |_, value, named| filters::groupby(value, None, named),
    )
}

fn sum_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    call_with_named_arguments(
        state,
        "sum",
        &["attribute", "start"],
        value,
        given,
        |state, value, named| filters::sum(state, value, None, None, named),
    )
}

/// Implements the filters `batch` and `slice`.
fn call_grouping_filter(
    state: &mut State,
    call: &str,
    value: Value,
    given: &[Value],
    filter: impl Fn(&State, Value, usize, Option<Value>) -> Result<Value, Error>,
) -> Result<Value, Error> {
    let bound = BoundArguments::new(call, &["count", "fill_with"], given)?;
    bound.required(0)?;
    if value.is_none() {
        return Err(template_error(format!("{call}: none is not iterable")));
    }
    let count = usize::try_from(bound.integer(0, 1)?).unwrap_or(0);
    spend_bytes(state, count.saturating_mul(size_of::<Value>()))?;
    let groups = filter(state, value, count, bound.value(1).cloned())?;
    check_container(state, groups)
}
