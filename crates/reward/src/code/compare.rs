//! Whether an output, or the value of a function, is what a test expects.
//!
//! An integer that is expected is met exactly, in an output as a decimal and in a value as Python's `==` does
//! it: `1000000007.0` is 1000000007, and the float 1e25 is not 10^25. Only numbers that are expected with a
//! decimal point or an exponent have a tolerance.

use serde_json::Value;

/// Difference that a number may have from an expected one that is no integer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tolerance {
    pub absolute: f64,
    /// Of the expected number.
    pub relative: f64,
}

impl Tolerance {
    fn allows(self, difference: f64, want: f64) -> bool {
        difference <= self.absolute.max(self.relative * want.abs())
    }
}

/// A decimal number of any length.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Decimal {
    negative: bool,
    /// Digits without zeros around them; none for 0.
    digits: Vec<u8>,
    /// Power of ten of the last digit.
    exponent: i64,
    /// Whether it is written with a decimal point or an exponent.
    is_float: bool,
}

/// Most digits of which a difference is computed exactly.
const MAX_DIGITS: i64 = 100_000;

impl Decimal {
    fn parse(text: &str) -> Option<Self> {
        let (negative, rest) = match text.as_bytes().first()? {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let (mantissa, exponent) = match rest.find(['e', 'E']) {
            Some(at) => (&rest[..at], rest[at + 1..].parse::<i32>().ok()?.into()),
            None => (rest, 0i64),
        };
        let (whole, decimals) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let mut digits: Vec<u8> = whole.bytes().chain(decimals.bytes()).collect();
        if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
            return None;
        }
        let mut exponent = exponent - decimals.len() as i64;
        let kept = digits.len() - digits.iter().rev().take_while(|digit| **digit == b'0').count();
        exponent += (digits.len() - kept) as i64;
        digits.truncate(kept);
        digits.drain(..digits.iter().take_while(|digit| **digit == b'0').count());
        let is_float = rest.contains(['.', 'e', 'E']);
        let exponent = if digits.is_empty() { 0 } else { exponent };
        Some(Decimal { negative: negative && !digits.is_empty(), digits, exponent, is_float })
    }

    /// Creates the decimal of a float, with all of its digits if it is whole.
    fn of(value: f64) -> Option<Self> {
        Decimal::parse(&if value.fract() == 0.0 { format!("{value:.0}") } else { value.to_string() })
    }

    fn is_value_of(&self, other: &Decimal) -> bool {
        (self.negative, self.exponent, &self.digits) == (other.negative, other.exponent, &other.digits)
    }

    /// The nearest f64.
    fn to_f64(&self) -> f64 {
        let digits = String::from_utf8_lossy(&self.digits);
        let size = format!("{}e{}", if digits.is_empty() { "0" } else { &digits }, self.exponent);
        let size = size.parse::<f64>().unwrap_or(f64::NAN);
        if self.negative { -size } else { size }
    }

    /// |self − other|, computed on the digits and rounded once.
    fn difference(&self, other: &Decimal) -> f64 {
        let low = self.exponent.min(other.exponent);
        let width = |of: &Decimal| of.digits.len() as i64 + of.exponent - low;
        let length = width(self).max(width(other));
        if length > MAX_DIGITS {
            return (self.to_f64() - other.to_f64()).abs();
        }
        let length = length as usize + 1;
        // Digits from the lowest one, with the sign of their number.
        let mut places = vec![0i8; length];
        let mut add = |of: &Decimal, sign: i8| {
            let start = (of.exponent - low) as usize;
            for (at, digit) in of.digits.iter().rev().enumerate() {
                places[start + at] += sign * (digit - b'0') as i8;
            }
        };
        add(self, if self.negative { -1 } else { 1 });
        add(other, if other.negative { 1 } else { -1 });
        // The sign of the whole is that of its highest place, since no place is beyond ±18 while carried ones
        // are below 10: make that positive, then carry.
        if places.iter().rev().find(|place| **place != 0).is_some_and(|place| *place < 0) {
            places.iter_mut().for_each(|place| *place = -*place);
        }
        let mut carry = 0i8;
        for place in &mut places {
            let sum = *place + carry;
            (*place, carry) = (sum.rem_euclid(10), sum.div_euclid(10));
        }
        let text: String = places.iter().rev().map(|place| char::from(b'0' + *place as u8)).collect();
        format!("{text}e{low}").parse().unwrap_or(f64::INFINITY)
    }
}

/// Returns whether an output is what was expected: the same lines, once both are stripped of white space
/// around them, with the same words.
pub(super) fn same_output(found: &str, want: &str, tolerance: Tolerance) -> bool {
    let (mut found, mut want) = (found.trim().lines(), want.trim().lines());
    loop {
        match (found.next(), want.next()) {
            (None, None) => return true,
            (Some(found), Some(want)) if same_line(found, want, tolerance) => {}
            _ => return false,
        }
    }
}

fn same_line(found: &str, want: &str, tolerance: Tolerance) -> bool {
    let (mut found, mut want) = (found.split_whitespace(), want.split_whitespace());
    loop {
        match (found.next(), want.next()) {
            (None, None) => return true,
            (Some(found), Some(want)) if found == want || same_number(found, want, tolerance) => {}
            _ => return false,
        }
    }
}

fn same_number(found: &str, want: &str, tolerance: Tolerance) -> bool {
    let (Some(found), Some(want)) = (Decimal::parse(found), Decimal::parse(want)) else { return false };
    if found.is_value_of(&want) {
        // Integers that are written otherwise, such as 007, may be no numbers.
        return found.is_float || want.is_float || want.digits.is_empty();
    }
    want.is_float && tolerance.allows(found.difference(&want), want.to_f64())
}

/// Returns whether a value, as Python's `json` writes it, is the one that was expected.
pub(super) fn same_value(found: &Value, want: &Value, tolerance: Tolerance) -> bool {
    match (found, want) {
        (Value::Array(found), Value::Array(want)) => {
            found.len() == want.len() && found.iter().zip(want).all(|(a, b)| same_value(a, b, tolerance))
        }
        (Value::Object(found), Value::Object(want)) => {
            let same = |(name, want)| found.get(name).is_some_and(|found| same_value(found, want, tolerance));
            found.len() == want.len() && want.iter().all(same)
        }
        (Value::Number(_) | Value::Bool(_), Value::Number(_) | Value::Bool(_)) => {
            let (Some(found), Some(want)) = (Number::of(found), Number::of(want)) else { return false };
            found.is(&want, tolerance)
        }
        _ => found == want,
    }
}

/// A number of Python.
enum Number {
    Integer(Decimal),
    Float(f64),
}

impl Number {
    fn of(value: &Value) -> Option<Self> {
        match value {
            // As in Python, `True == 1`.
            Value::Bool(value) => Decimal::parse(if *value { "1" } else { "0" }).map(Number::Integer),
            Value::Number(number) if number.as_str().contains(['.', 'e']) => {
                number.as_str().parse().ok().map(Number::Float)
            }
            Value::Number(number) => Decimal::parse(number.as_str()).map(Number::Integer),
            _ => None,
        }
    }

    fn is(&self, want: &Number, tolerance: Tolerance) -> bool {
        match (self, want) {
            (Number::Integer(found), Number::Integer(want)) => found.is_value_of(want),
            (Number::Float(found), Number::Integer(want)) => {
                Decimal::of(*found).is_some_and(|found| found.is_value_of(want))
            }
            // An integer may have more digits than a float can hold: 10^22 + 1 is not 1e22.
            (Number::Integer(found), Number::Float(value)) => Decimal::of(*value).is_some_and(|want| {
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
