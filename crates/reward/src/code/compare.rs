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
    fn allows_difference(self, difference: f64, want: f64) -> bool {
        difference <= self.absolute.max(self.relative * want.abs())
    }
}

/// Returns whether two program outputs have the same lines with the same words. Numbers may differ
/// within `tolerance`. White space between words and around the complete output is ignored.
pub(super) fn outputs_match(found: &str, want: &str, tolerance: Tolerance) -> bool {
    let mut found = found.trim().lines();
    let mut want = want.trim().lines();
    loop {
        match (found.next(), want.next()) {
            (None, None) => return true,
            (Some(found), Some(want)) if lines_match(found, want, tolerance) => {}
            _ => return false,
        }
    }
}

fn lines_match(found: &str, want: &str, tolerance: Tolerance) -> bool {
    let mut found = found.split_whitespace();
    let mut want = want.split_whitespace();
    loop {
        match (found.next(), want.next()) {
            (None, None) => return true,
            (Some(found), Some(want)) if found == want || numbers_match(found, want, tolerance) => {
            }
            _ => return false,
        }
    }
}

fn numbers_match(found: &str, want: &str, tolerance: Tolerance) -> bool {
    if has_leading_zeros(found) || has_leading_zeros(want) {
        return false;
    }
    let (Some(found), Some(want)) = (Decimal::parse(found), Decimal::parse(want)) else {
        return false;
    };
    if found.equals_as_number(&want) {
        // An integer in another notation, such as +7, may be text rather than a number.
        return found.is_float || want.is_float || want.digits.is_empty();
    }
    want.is_float && tolerance.allows_difference(found.difference(&want), want.to_f64())
}

/// Returns whether a word is a number with leading zeros. Such a word is text, for example a bit
/// string: 007 does not equal 7, and 00 does not equal 0.
fn has_leading_zeros(word: &str) -> bool {
    let digits = word.trim_start_matches(['+', '-']);
    digits.starts_with('0') && digits[1..].starts_with(|c: char| c.is_ascii_digit())
}

/// Returns whether a return value, which Python's `json` wrote, equals the expected value of a
/// test.
pub(super) fn values_match(found: &Value, want: &Value, tolerance: Tolerance) -> bool {
    match (found, want) {
        (Value::Array(found), Value::Array(want)) => {
            found.len() == want.len()
                && found.iter().zip(want).all(|(a, b)| values_match(a, b, tolerance))
        }
        (Value::Object(found), Value::Object(want)) => {
            let same = |(name, want)| {
                found.get(name).is_some_and(|found| values_match(found, want, tolerance))
            };
            found.len() == want.len() && want.iter().all(same)
        }
        (Value::Number(_) | Value::Bool(_), Value::Number(_) | Value::Bool(_)) => {
            let (Some(found), Some(want)) =
                (PythonNumber::from_json(found), PythonNumber::from_json(want))
            else {
                return false;
            };
            found.equals(&want, tolerance)
        }
        _ => found == want,
    }
}

/// A Python number, classified by its JSON notation.
enum PythonNumber {
    Integer(Decimal),
    Float(f64),
}

impl PythonNumber {
    fn from_json(value: &Value) -> Option<Self> {
        match value {
            // `True == 1` in Python.
            Value::Bool(value) => {
                Decimal::parse(if *value { "1" } else { "0" }).map(PythonNumber::Integer)
            }
            Value::Number(number) if number.as_str().contains(['.', 'e']) => {
                number.as_str().parse().ok().map(PythonNumber::Float)
            }
            Value::Number(number) => Decimal::parse(number.as_str()).map(PythonNumber::Integer),
            _ => None,
        }
    }

    fn equals(&self, want: &PythonNumber, tolerance: Tolerance) -> bool {
        match (self, want) {
            (PythonNumber::Integer(found), PythonNumber::Integer(want)) => {
                found.equals_as_number(want)
            }
            (PythonNumber::Float(found), PythonNumber::Integer(want)) => {
                Decimal::from_f64(*found).is_some_and(|found| found.equals_as_number(want))
            }
            // An integer may have more digits than a float can hold: 10^22 + 1 is not 1e22.
            (PythonNumber::Integer(found), PythonNumber::Float(value)) => Decimal::from_f64(*value)
                .is_some_and(|want| {
                    found.equals_as_number(&want)
                        || tolerance.allows_difference(found.difference(&want), *value)
                }),
            (PythonNumber::Float(found), PythonNumber::Float(want)) => {
                found == want || tolerance.allows_difference((found - want).abs(), *want)
            }
        }
    }
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
