//! Functions that replace operators, because the engine has no hook for operators. The calls are
//! inserted by [`translate`](super::translate).

use std::cmp::Ordering;

use minijinja::value::{Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};

use super::arguments::{integer, split_arguments};
use super::containers;
use super::format;
use super::limits::{self, make_list, measure_value, spend_bytes, template_error};
use super::repr::python_str;
use super::text_filters::escape_html;

/// Registers the functions that implement Python's operators in a template environment.
pub(crate) fn register_operators(environment: &mut Environment<'_>) {
    environment.add_function("__levade_add", add_values);
    environment.add_function("__levade_mul", mul_values);
    environment.add_function("__levade_mod", modulo_values);
    environment.add_function("__levade_pow", pow_values);
    environment.add_function("__levade_concat", concat_values);
    environment.add_function("__levade_slice", slice_values);
    environment.add_function("__levade_bind", bind_macro_arguments);
    environment.add_function("__levade_order", order_values);
    environment.add_function(super::names::ATTRIBUTE, containers::get_attribute);
    environment.add_function(super::names::ITER, check_iterable);
    environment.add_function(super::names::KEEP, limits::check_container);
    environment.add_function(super::names::TICK, limits::start_iteration);
}

/// A number in Python's sense: booleans are numbers, too.
enum PythonNumber {
    Integer(i128),
    Float(f64),
}

impl PythonNumber {
    fn from_value(value: &Value) -> Option<Self> {
        match value.kind() {
            ValueKind::Bool => Some(PythonNumber::Integer(i128::from(value.is_true()))),
            ValueKind::Number if value.is_integer() => {
                i128::try_from(value.clone()).ok().map(PythonNumber::Integer)
            }
            ValueKind::Number => f64::try_from(value.clone()).ok().map(PythonNumber::Float),
            _ => None,
        }
    }

    fn to_f64(&self) -> f64 {
        match self {
            PythonNumber::Integer(value) => *value as f64,
            PythonNumber::Float(value) => *value,
        }
    }
}

/// Applies an arithmetic operator to two values. `integers` returns `None` if the result exceeds
/// 128 bits.
fn apply_arithmetic(
    operator: &str,
    (left, right): (&Value, &Value),
    integers: impl Fn(i128, i128) -> Option<i128>,
    floats: impl Fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    match (PythonNumber::from_value(left), PythonNumber::from_value(right)) {
        (Some(PythonNumber::Integer(a)), Some(PythonNumber::Integer(b))) => {
            let result = integers(a, b).ok_or_else(|| {
                template_error(format!("{a} {operator} {b} has no result in 128 bits"))
            })?;
            Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from))
        }
        (Some(a), Some(b)) => Ok(Value::from(floats(a.to_f64(), b.to_f64()))),
        _ => Err(template_error(format!(
            "{operator} cannot combine a value of kind {} with one of kind {}",
            left.kind(),
            right.kind()
        ))),
    }
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn add_values(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        spend_bytes(state, a.len() + b.len())?;
        if left.is_safe() || right.is_safe() {
            let joined = [to_markup(&left), to_markup(&right)].concat();
            spend_bytes(state, joined.len())?;
            return Ok(Value::from_safe_string(joined));
        }
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(&left) && is_list(&right) && left.is_tuple() == right.is_tuple() {
        let items: Vec<Value> = left.try_iter()?.chain(right.try_iter()?).collect();
        return make_sequence(state, items, left.is_tuple());
    }
    apply_arithmetic("+", (&left, &right), i128::checked_add, |a, b| a + b)
}

/// Returns the markup of a value. Plain text is escaped when it is joined with markup, as in
/// markupsafe.
fn to_markup(value: &Value) -> String {
    let text = value.as_str().unwrap_or_default();
    if value.is_safe() { text.to_string() } else { escape_html(text) }
}

fn make_sequence(state: &mut State, items: Vec<Value>, tuple: bool) -> Result<Value, Error> {
    let list = make_list(state, items)?;
    Ok(if tuple { Value::from(Tuple::from(list.try_iter()?.collect::<Vec<_>>())) } else { list })
}

fn mul_values(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    let pair = match (is_repeatable(&left), is_repeatable(&right)) {
        (true, _) => integer(&right).map(|count| (&left, count)),
        (_, true) => integer(&left).map(|count| (&right, count)),
        _ => return apply_arithmetic("*", (&left, &right), i128::checked_mul, |a, b| a * b),
    };
    let (value, count) =
        pair.ok_or_else(|| template_error("* repeats strings and lists by integers only"))?;
    let count = usize::try_from(count).unwrap_or(0);
    if let Some(text) = value.as_str() {
        spend_bytes(state, text.len().saturating_mul(count))?;
        return Ok(Value::from(text.repeat(count)));
    }
    let texts = measure_value(state, value)?.bytes;
    spend_bytes(state, texts.saturating_mul(count))?;
    let items: Vec<Value> = value.try_iter()?.collect();
    spend_bytes(state, items.len().saturating_mul(count).saturating_mul(size_of::<Value>()))?;
    make_sequence(state, vec![items; count].concat(), value.is_tuple())
}

fn is_repeatable(value: &Value) -> bool {
    value.as_str().is_some() || is_list(value)
}

pub(super) fn modulo_values(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    if let Some(template) = left.as_str() {
        let formatted = format::printf(state, template, &right)?;
        return Ok(Value::from(formatted));
    }
    let zero = PythonNumber::from_value(&right).is_some_and(|right| right.to_f64() == 0.0);
    if zero && PythonNumber::from_value(&left).is_some() {
        return Err(template_error(format!("{left} % {right} divides by zero")));
    }
    apply_arithmetic("%", (&left, &right), floor_modulo, |a, b| {
        let rest = a % b;
        if rest == 0.0 {
            0.0_f64.copysign(b)
        } else if (rest < 0.0) != (b < 0.0) {
            rest + b
        } else {
            rest
        }
    })
}

fn floor_modulo(a: i128, b: i128) -> Option<i128> {
    a.checked_rem(b).map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
}

fn pow_values(left: Value, right: Value) -> Result<Value, Error> {
    if let (Some(base), Some(PythonNumber::Integer(exponent @ i128::MIN..0))) =
        (PythonNumber::from_value(&left), PythonNumber::from_value(&right))
    {
        if base.to_f64() == 0.0 {
            return Err(template_error(format!("{left} ** {right} divides by zero")));
        }
        return Ok(Value::from(base.to_f64().powf(exponent as f64)));
    }
    apply_arithmetic("**", (&left, &right), checked_power, f64::powf)
}

fn checked_power(a: i128, b: i128) -> Option<i128> {
    a.checked_pow(u32::try_from(b).ok()?)
}

fn concat_values(state: &mut State, parts: Rest<Value>) -> Result<Value, Error> {
    let mut out = String::new();
    for part in parts.iter() {
        match part.as_str() {
            Some(part) => out.push_str(part),
            None => out.push_str(&python_str(state, part)?),
        }
        if out.len() > limits::TEXT {
            break;
        }
    }
    limits::make_text(state, out)
}

/// Implements Python's slicing `value[start:stop:step]`.
fn slice_values(
    state: &mut State,
    value: Value,
    start: Value,
    stop: Value,
    step: Value,
) -> Result<Value, Error> {
    let start = slice_bound(&start, "the start")?;
    let stop = slice_bound(&stop, "the stop")?;
    let step = slice_bound(&step, "the step")?.unwrap_or(1);
    if step == 0 {
        return Err(template_error("the step of a slice is 0"));
    }
    // For a value that cannot be sliced, Jinja2 returns an undefined value instead of an error.
    if let Some(text) = value.as_str() {
        spend_bytes(state, text.len())?;
        if step == 1 && start.unwrap_or(0) >= 0 && stop.is_none() {
            let from = usize::try_from(start.unwrap_or(0)).unwrap_or(usize::MAX);
            let from = text.char_indices().nth(from).map_or(text.len(), |(at, _)| at);
            return Ok(Value::from(&text[from..]));
        }
        let chars: Vec<char> = text.chars().collect();
        return Ok(Value::from(
            slice_indices(chars.len(), start, stop, step).map(|at| chars[at]).collect::<String>(),
        ));
    }
    if !is_list(&value) {
        return if value.is_undefined() {
            Err(template_error("an undefined value cannot be sliced"))
        } else {
            Ok(Value::UNDEFINED)
        };
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    let sliced =
        slice_indices(items.len(), start, stop, step).map(|at| items[at].clone()).collect();
    make_sequence(state, sliced, value.is_tuple())
}

fn slice_bound(value: &Value, name: &str) -> Result<Option<i64>, Error> {
    match value {
        value if value.is_none() => Ok(None),
        value => match integer(value) {
            Some(bound) => Ok(Some(bound)),
            None => Err(template_error(format!(
                "{name} of a slice is of kind {}, but must be an integer",
                value.kind()
            ))),
        },
    }
}

/// Returns the indices that a slice of a sequence selects, as Python's
/// `range(*slice(start, stop, step).indices(length))` does.
fn slice_indices(
    length: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let (min_length, max_length) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clamp = |bound: Option<i64>, default: i64| match bound {
        None => default,
        Some(bound) if bound < 0 => bound.saturating_add(length).max(min_length),
        Some(bound) => bound.min(max_length),
    };
    let (start, stop) = if step > 0 {
        (clamp(start, 0), clamp(stop, length))
    } else {
        (clamp(start, max_length), clamp(stop, min_length))
    };
    let mut next = Some(start);
    std::iter::from_fn(move || {
        let at = next.filter(|&at| if step > 0 { at < stop } else { at > stop })?;
        next = at.checked_add(step);
        usize::try_from(at).ok()
    })
}

/// Implements `left < right` and the other order operators of Python. They compare numbers,
/// strings, lists or tuples with values of the same kind.
pub(super) fn order_values(operator: &str, left: Value, right: Value) -> Result<Value, Error> {
    let numbers = match (PythonNumber::from_value(&left), PythonNumber::from_value(&right)) {
        (Some(PythonNumber::Integer(a)), Some(PythonNumber::Integer(b))) => Some(Some(a.cmp(&b))),
        (Some(a), Some(b)) => Some(a.to_f64().partial_cmp(&b.to_f64())),
        _ => None,
    };
    let texts = left.as_str().is_some() && right.as_str().is_some();
    let lists = is_list(&left) && is_list(&right) && left.is_tuple() == right.is_tuple();
    let found = match numbers {
        Some(Some(found)) => found,
        // Order comparisons with NaN are false.
        Some(None) => return Ok(Value::from(false)),
        None if texts || lists => left.cmp(&right),
        None => {
            let left = left.kind();
            let right = right.kind();
            return Err(template_error(format!(
                "{operator} cannot compare a value of kind {left} with one of kind {right}"
            )));
        }
    };
    Ok(Value::from(match operator {
        "<" => found == Ordering::Less,
        "<=" => found != Ordering::Greater,
        ">" => found == Ordering::Greater,
        _ => found != Ordering::Less,
    }))
}

/// Returns the value over which a loop iterates, or an error if it is `none`.
fn check_iterable(value: Value) -> Result<Value, Error> {
    if value.is_none() {
        return Err(template_error("a loop iterates over none, which is not iterable"));
    }
    Ok(value)
}

/// Binds the arguments of a macro that accepts any arguments: its own parameters by name, and the
/// remaining arguments as `varargs` and `kwargs`.
fn bind_macro_arguments(
    state: &mut State,
    names: Value,
    arguments: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let arguments = arguments.into_values();
    let (positional, named) = split_arguments(&arguments)?;
    let names: Vec<Value> = names.try_iter()?.collect();
    let mut bound: Vec<(Value, Value)> =
        names.iter().cloned().zip(positional.iter().cloned()).collect();
    let mut keyword_pairs: Vec<(Value, Value)> = Vec::new();
    for name in named.args() {
        let key = Value::from(name);
        let value = named.peek::<Value>(name)?;
        if !names.contains(&key) && name != "caller" {
            keyword_pairs.push((key, value));
        } else if bound.iter().any(|(known, _)| *known == key) {
            return Err(template_error(format!("a macro receives {name} twice")));
        } else {
            bound.push((key, value));
        }
    }
    let rest = positional.get(names.len()..).unwrap_or_default().to_vec();
    bound.push((Value::from("varargs"), Value::from(Tuple::from(rest))));
    bound.push((Value::from("kwargs"), Value::from_pairs(keyword_pairs)));
    let bound = Value::from_pairs(bound);
    measure_value(state, &bound)?;
    Ok(bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slice of `list(range(5))` and its result in Python.
    type Case = (Option<i64>, Option<i64>, i64, &'static [usize]);

    #[test]
    fn slice_positions_match_python() {
        let cases: [Case; 9] = [
            (None, None, 1, &[0, 1, 2, 3, 4]),
            (Some(1), Some(-1), 1, &[1, 2, 3]),
            (None, None, -1, &[4, 3, 2, 1, 0]),
            (Some(3), Some(0), -1, &[3, 2, 1]),
            (Some(-2), None, 1, &[3, 4]),
            (Some(-20), Some(20), 2, &[0, 2, 4]),
            (Some(20), Some(-20), -3, &[4, 1]),
            (Some(4), Some(2), 1, &[]),
            (Some(i64::MIN), Some(i64::MAX), i64::MAX, &[0]),
        ];
        for (start, stop, step, expected) in cases {
            assert_eq!(
                slice_indices(5, start, stop, step).collect::<Vec<_>>(),
                expected,
                "{start:?}:{stop:?}:{step}"
            );
        }
    }
}
