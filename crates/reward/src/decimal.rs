//! Decimal numbers of any length, as written in model output and in JSON.
//!
//! Comparisons work on the digits: values are not rounded, and powers of ten are not expanded.

use std::cmp::Ordering;

use num_bigint::BigInt;
use num_integer::Integer;
use num_traits::Zero;

/// A decimal number of any length, for exact comparisons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decimal {
    pub negative: bool,
    /// Digits without leading and trailing zeros; empty for 0.
    pub digits: Vec<u8>,
    /// Power of ten of the last digit.
    pub exponent: i64,
    /// Whether the number is written with a decimal point or an exponent.
    pub is_float: bool,
}

/// Maximum number of digits for which a difference is computed exactly.
const MAX_DIGITS: i64 = 100_000;

impl Decimal {
    pub fn parse(text: &str) -> Option<Self> {
        let (negative, rest) = match text.as_bytes().first()? {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let (mantissa, exponent) = match rest.find(['e', 'E']) {
            Some(at) => (&rest[..at], rest[at + 1..].parse::<i32>().ok()?.into()),
            None => (rest, 0i64),
        };
        let (integer, decimals) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let mut digits: Vec<u8> = integer.bytes().chain(decimals.bytes()).collect();
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

    /// Creates a decimal from a float. An integer keeps all of its digits. Any other value becomes
    /// the shortest decimal that is closest to it. Returns `None` if the value is not finite.
    pub fn from_f64(value: f64) -> Option<Self> {
        Decimal::parse(&if value.fract() == 0.0 {
            format!("{value:.0}")
        } else {
            value.to_string()
        })
    }

    pub fn equals_as_number(&self, other: &Decimal) -> bool {
        (self.negative, self.exponent, &self.digits)
            == (other.negative, other.exponent, &other.digits)
    }

    /// Returns the f64 that is nearest to the value.
    pub fn to_f64(&self) -> f64 {
        let digits = String::from_utf8_lossy(&self.digits);
        let size = format!("{}e{}", if digits.is_empty() { "0" } else { &digits }, self.exponent);
        let size = size.parse::<f64>().unwrap_or(f64::NAN);
        if self.negative { -size } else { size }
    }

    /// Returns |self − other|, computed on the decimal digits and rounded once.
    pub fn difference(&self, other: &Decimal) -> f64 {
        let low = self.exponent.min(other.exponent);
        let width = |number: &Decimal| number.digits.len() as i64 + number.exponent - low;
        let length = width(self).max(width(other));
        if length > MAX_DIGITS {
            return (self.to_f64() - other.to_f64()).abs();
        }
        let length = length as usize + 1;
        // Signed digits of the difference, lowest digit first.
        let mut signed_digits = vec![0i8; length];
        let mut add = |number: &Decimal, sign: i8| {
            let start = (number.exponent - low) as usize;
            for (at, digit) in number.digits.iter().rev().enumerate() {
                signed_digits[start + at] += sign * (digit - b'0') as i8;
            }
        };
        add(self, if self.negative { -1 } else { 1 });
        add(other, if other.negative { 1 } else { -1 });
        // If both numbers have the same sign, each entry is in −9..=9. Otherwise all entries have
        // the same sign. In both cases the sign of the difference is the sign of its highest
        // non-zero entry. Make it positive, then carry.
        if signed_digits
            .iter()
            .rev()
            .find(|signed_digit| **signed_digit != 0)
            .is_some_and(|position| *position < 0)
        {
            signed_digits.iter_mut().for_each(|signed_digit| *signed_digit = -*signed_digit);
        }
        let mut carry = 0i8;
        for signed_digit in &mut signed_digits {
            let sum = *signed_digit + carry;
            (*signed_digit, carry) = (sum.rem_euclid(10), sum.div_euclid(10));
        }
        let text: String = signed_digits
            .iter()
            .rev()
            .map(|signed_digit| char::from(b'0' + *signed_digit as u8))
            .collect();
        format!("{text}e{low}").parse().unwrap_or(f64::INFINITY)
    }

    /// Compares the values of two decimals.
    pub fn compare(&self, other: &Decimal) -> Ordering {
        let sign = |number: &Decimal| match (number.digits.is_empty(), number.negative) {
            (true, _) => 0,
            (false, true) => -1,
            (false, false) => 1,
        };
        // Power of ten of the first digit, plus 1.
        let size = |number: &Decimal| number.exponent.saturating_add(number.digits.len() as i64);
        let own = sign(self);
        let its = sign(other);
        let sizes = size(self).cmp(&size(other)).then_with(|| self.digits.cmp(&other.digits));
        own.cmp(&its).then(match own {
            0 => Ordering::Equal,
            1 => sizes,
            _ => sizes.reverse(),
        })
    }

    /// Returns whether the value is an integer multiple of `step`, which must not be 0.
    pub fn is_multiple_of(&self, step: &Decimal) -> bool {
        let to_integer =
            |number: &Decimal| BigInt::parse_bytes(&number.digits, 10).unwrap_or_default();
        let value = to_integer(self);
        let step_digits = to_integer(step);
        let tens = self.exponent.saturating_sub(step.exponent);
        // The last digit of the value is not 0, so the value is not a multiple of ten steps.
        value.is_zero()
            || (tens >= 0 && {
                let power = BigInt::from(10).modpow(&BigInt::from(tens), &step_digits);
                (value * power).is_multiple_of(&step_digits)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_of_any_length_are_ordered() {
        let ascending = [
            "-1e99999",
            "-12345678901234567890.5",
            "-12345678901234567890",
            "-1.5",
            "-1",
            "-1e-9",
            "0",
            "1e-99999",
            "0.099",
            "0.1",
            "0.10000000000000000001",
            "9.99",
            "10",
            "598731845373330050",
            "598731845373330050.5",
            "598731845373330051.0",
            "1e400",
        ];
        for (at, low) in ascending.iter().enumerate() {
            for (index, high) in ascending.iter().enumerate() {
                let low = Decimal::parse(low).unwrap();
                let high = Decimal::parse(high).unwrap();
                assert_eq!(low.compare(&high), at.cmp(&index), "{low:?} {high:?}");
            }
        }
        assert_eq!(
            Decimal::parse("1e2").unwrap().compare(&Decimal::parse("100.0").unwrap()),
            Ordering::Equal
        );
    }

    #[test]
    fn multiples_are_detected_exactly_at_any_length() {
        for (value, step, want) in [
            ("0", "7", true),
            ("19.99", "0.01", true),
            ("19.999", "0.01", false),
            ("37037036703703701.5", "3", false),
            ("9007199254740993.5", "0.5", true),
            ("9007199254740993.25", "0.5", false),
            ("1e999999999", "7", false),
            ("7e999999999", "7", true),
            ("1e400", "2.5", true),
            ("1e-400", "2.5", false),
            ("-3", "1.5", true),
            ("100", "25", true),
            ("25", "100", false),
        ] {
            let value = Decimal::parse(value).unwrap();
            let step = Decimal::parse(step).unwrap();
            assert_eq!(value.is_multiple_of(&step), want, "{value:?} {step:?}");
        }
    }
}
