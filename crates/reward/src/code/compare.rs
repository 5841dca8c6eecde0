//! Compares the output of a program, or the return value of a function, with what a test expects.
//!
//! An expected integer must match exactly. In an output, numbers are compared as decimals:
//! `1000000007.0` equals 1000000007. In a value, numbers are compared as by Python's `==`: the
//! float 1e25 does not equal 10^25. A tolerance applies only to expected numbers that are written
//! with a decimal point or an exponent.

use serde_json::Value;

use crate::decimal::Decimal;

/// Tolerance for a number that is not an integer: its maximum absolute and relative difference from
/// the expected number. The larger of the two bounds applies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tolerance {
    pub absolute: f64,
    /// Maximum difference as a fraction of the expected number.
    pub relative: f64,
}

impl Tolerance {
    fn allows(self, difference: f64, want: f64) -> bool {
        difference <= self.absolute.max(self.relative * want.abs())
    }
}

/// Returns whether two program outputs have the same lines with the same words. Numbers may differ
/// within `tolerance`. White space between words and around the complete output is ignored.
pub(super) fn same_output(found: &str, want: &str, tolerance: Tolerance) -> bool {
    let mut found = found.trim().lines();
    let mut want = want.trim().lines();
    loop {
        match (found.next(), want.next()) {
            (None, None) => return true,
            (Some(found), Some(want)) if same_line(found, want, tolerance) => {}
            _ => return false,
        }
    }
}

fn same_line(found: &str, want: &str, tolerance: Tolerance) -> bool {
    let mut found = found.split_whitespace();
    let mut want = want.split_whitespace();
    loop {
        match (found.next(), want.next()) {
            (None, None) => return true,
            (Some(found), Some(want)) if found == want || same_number(found, want, tolerance) => {}
            _ => return false,
        }
    }
}

fn same_number(found: &str, want: &str, tolerance: Tolerance) -> bool {
    if is_padded(found) || is_padded(want) {
        return false;
    }
    let (Some(found), Some(want)) = (Decimal::parse(found), Decimal::parse(want)) else {
        return false;
    };
    if found.is_value_of(&want) {
        // An integer in another notation, such as +7, may be text rather than a number.
        return found.is_float || want.is_float || want.digits.is_empty();
    }
    want.is_float && tolerance.allows(found.difference(&want), want.to_f64())
}

/// Returns whether a word is a number with leading zeros. Such a word is text, for example a bit
/// string: 007 does not equal 7, and 00 does not equal 0.
fn is_padded(word: &str) -> bool {
    let digits = word.trim_start_matches(['+', '-']);
    digits.starts_with('0') && digits[1..].starts_with(|c: char| c.is_ascii_digit())
}

/// Returns whether a return value, which Python's `json` wrote, equals the expected value of a
/// test.
pub(super) fn same_value(found: &Value, want: &Value, tolerance: Tolerance) -> bool {
    match (found, want) {
        (Value::Array(found), Value::Array(want)) => {
            found.len() == want.len()
                && found.iter().zip(want).all(|(a, b)| same_value(a, b, tolerance))
        }
        (Value::Object(found), Value::Object(want)) => {
            let same = |(name, want)| {
                found.get(name).is_some_and(|found| same_value(found, want, tolerance))
            };
            found.len() == want.len() && want.iter().all(same)
        }
        (Value::Number(_) | Value::Bool(_), Value::Number(_) | Value::Bool(_)) => {
            let (Some(found), Some(want)) = (Number::from_json(found), Number::from_json(want))
            else {
                return false;
            };
            found.equals(&want, tolerance)
        }
        _ => found == want,
    }
}

/// A Python number, classified by its JSON notation.
enum Number {
    Integer(Decimal),
    Float(f64),
}

impl Number {
    fn from_json(value: &Value) -> Option<Self> {
        match value {
            // `True == 1` in Python.
            Value::Bool(value) => {
                Decimal::parse(if *value { "1" } else { "0" }).map(Number::Integer)
            }
            Value::Number(number) if number.as_str().contains(['.', 'e']) => {
                number.as_str().parse().ok().map(Number::Float)
            }
            Value::Number(number) => Decimal::parse(number.as_str()).map(Number::Integer),
            _ => None,
        }
    }

    fn equals(&self, want: &Number, tolerance: Tolerance) -> bool {
        match (self, want) {
            (Number::Integer(found), Number::Integer(want)) => found.is_value_of(want),
            (Number::Float(found), Number::Integer(want)) => {
                Decimal::from_f64(*found).is_some_and(|found| found.is_value_of(want))
            }
            // An integer may have more digits than a float can hold: 10^22 + 1 is not 1e22.
            (Number::Integer(found), Number::Float(value)) => Decimal::from_f64(*value)
                .is_some_and(|want| {
                    found.is_value_of(&want) || tolerance.allows(found.difference(&want), *value)
                }),
            (Number::Float(found), Number::Float(want)) => {
                found == want || tolerance.allows((found - want).abs(), *want)
            }
        }
    }
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
