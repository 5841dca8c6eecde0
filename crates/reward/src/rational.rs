//! Exact fractions of integers with up to 4,096 bits.
//!
//! Decimals and their sums, products and quotients are exact: 0.1 + 0.2 equals 0.3, and the last of
//! 40 digits is significant. To bound time and memory, a result with more than 4,096 bits is
//! `None`, and the caller decides how to proceed.

use std::cmp::Ordering;

use num_bigint::BigInt;
use num_integer::Integer;
use num_rational::BigRational;
use num_traits::{One, Pow, Signed, ToPrimitive, Zero};

/// A rational number: a fraction in lowest terms with a positive denominator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rational(BigRational);

/// Maximum number of bits of a numerator or a denominator: about 1,200 decimal digits.
const MAX_BITS: u64 = 4096;

/// Maximum number of decimal digits that are parsed, leading zeros included.
const MAX_DIGITS: usize = 1300;

impl From<i64> for Rational {
    fn from(value: i64) -> Self {
        Rational(BigRational::from_integer(value.into()))
    }
}

impl Rational {
    /// Returns `numerator / denominator` in lowest terms, or `None` if the denominator is 0.
    pub fn new(numerator: i128, denominator: i128) -> Option<Self> {
        Self::from_parts(numerator.into(), denominator.into())
    }

    fn from_parts(numerator: BigInt, denominator: BigInt) -> Option<Self> {
        if denominator.is_zero() {
            return None;
        }
        Self::within_bounds(BigRational::new(numerator, denominator))
    }

    fn within_bounds(value: BigRational) -> Option<Self> {
        (value.numer().bits().max(value.denom().bits()) <= MAX_BITS).then_some(Rational(value))
    }

    /// Parses digits with an optional sign, decimal point and exponent (`-12`, `.5`, `3.`,
    /// `1.5e-3`). Returns `None` for any other text and for numbers of more than 4,096 bits.
    pub fn parse(text: &str) -> Option<Self> {
        let (negative, text) = match text.as_bytes().first()? {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let (mantissa, exponent) = match text.find(['e', 'E']) {
            Some(at) => (&text[..at], text[at + 1..].parse::<i32>().ok()?),
            None => (text, 0),
        };
        let (integer, decimals) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        if integer.is_empty() && decimals.is_empty() {
            return None;
        }
        if !integer.bytes().chain(decimals.bytes()).all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        // Leading and trailing zeros do not change the value, however many there are.
        let integer = integer.trim_start_matches('0');
        let decimals = decimals.trim_end_matches('0');
        if integer.len() + decimals.len() > MAX_DIGITS {
            return None;
        }
        let digits = BigInt::parse_bytes(format!("0{integer}{decimals}").as_bytes(), 10)?;
        if digits.is_zero() {
            return Some(Rational::from(0));
        }
        let shift = exponent.checked_sub(i32::try_from(decimals.len()).ok()?)?;
        if shift.unsigned_abs() as usize > MAX_DIGITS {
            return None;
        }
        let power = BigInt::from(10).pow(shift.unsigned_abs());
        let signed = if negative { -digits } else { digits };
        if shift < 0 {
            Self::from_parts(signed, power)
        } else {
            Self::from_parts(signed * power, BigInt::one())
        }
    }

    /// Returns the numerator, which carries the sign.
    pub fn numerator(&self) -> &BigInt {
        self.0.numer()
    }

    /// Returns the denominator, at least 1.
    pub fn denominator(&self) -> &BigInt {
        self.0.denom()
    }

    /// Returns the numerator and the denominator if both fit 128-bit integers.
    pub fn to_parts(&self) -> Option<(i128, i128)> {
        Some((self.numerator().to_i128()?, self.denominator().to_i128()?))
    }

    /// Returns whether the denominator is 1.
    pub fn is_integer(&self) -> bool {
        self.0.is_integer()
    }

    /// Returns the f64 that is nearest to the value, or an infinity if the value is beyond the
    /// range of f64.
    pub fn to_f64(&self) -> f64 {
        let infinity = if self.0.is_negative() { f64::NEG_INFINITY } else { f64::INFINITY };
        self.0.to_f64().unwrap_or(infinity)
    }

    /// Returns −self.
    pub fn negate(self) -> Self {
        Rational(-self.0)
    }

    /// Returns |self|.
    pub fn abs(self) -> Self {
        Rational(self.0.abs())
    }

    /// Returns self + other, or `None` if the result has too many bits.
    pub fn plus(&self, other: &Self) -> Option<Self> {
        Self::within_bounds(&self.0 + &other.0)
    }

    /// Returns self − other, or `None` if the result has too many bits.
    pub fn minus(&self, other: &Self) -> Option<Self> {
        Self::within_bounds(&self.0 - &other.0)
    }

    /// Returns self × other, or `None` if the result has too many bits.
    pub fn times(&self, other: &Self) -> Option<Self> {
        Self::within_bounds(&self.0 * &other.0)
    }

    /// Returns self ÷ other, or `None` if `other` is 0 or the result has too many bits.
    pub fn divide(&self, other: &Self) -> Option<Self> {
        if other.0.is_zero() { None } else { Self::within_bounds(&self.0 / &other.0) }
    }

    /// Returns self to an integer power, or `None` if the result has too many bits or would divide
    /// by 0.
    pub fn power(&self, exponent: i32) -> Option<Self> {
        if exponent < 0 && self.0.is_zero() {
            return None;
        }
        let bits = self.numerator().bits().max(self.denominator().bits());
        let is_unit = self.is_integer() && bits <= 1;
        if !is_unit
            && bits.saturating_sub(1).saturating_mul(exponent.unsigned_abs().into()) > MAX_BITS
        {
            return None;
        }
        let odd = exponent.rem_euclid(2);
        Self::within_bounds(Pow::pow(
            &self.0,
            if is_unit && exponent != 0 { 2 - odd } else { exponent },
        ))
    }

    /// Returns the largest integer that is at most self.
    pub fn floor(&self) -> Self {
        Rational(self.0.floor())
    }

    /// Returns self modulo other, with the sign of `other`. Returns `None` if `other` is 0 or the
    /// result has too many bits.
    pub fn modulo(&self, other: &Self) -> Option<Self> {
        self.minus(&other.times(&self.divide(other)?.floor())?)
    }

    /// Returns the greatest common divisor of two integers, or `None` if either value is not an
    /// integer.
    pub fn gcd(&self, other: &Self) -> Option<Self> {
        let both = self.is_integer() && other.is_integer();
        both.then(|| Rational(self.numerator().gcd(other.numerator()).into()))
    }

    /// Compares the values of two rational numbers.
    pub fn compare(&self, other: &Self) -> Ordering {
        self.0.cmp(&other.0)
    }
}

/// Interprets the decimal digits of an integer as digits in `base`, and returns their value.
/// Returns `None` if the digits do not fit the base.
pub(crate) fn value_in_base(digits: &Rational, base: u32) -> Option<Rational> {
    if !digits.is_integer() || !(2..=36).contains(&base) {
        return None;
    }
    let base_value = Rational::from(i64::from(base));
    let written = digits.numerator().to_string();
    let (negative, digits) =
        written.strip_prefix('-').map_or((false, written.as_str()), |digits| (true, digits));
    let value = digits.chars().try_fold(Rational::from(0), |value, digit| {
        value.times(&base_value)?.plus(&Rational::from(i64::from(digit.to_digit(base)?)))
    })?;
    Some(if negative { value.negate() } else { value })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn q(text: &str) -> Rational {
        Rational::parse(text).unwrap()
    }

    #[test]
    fn rational_number_is_parsed_exactly() {
        for (text, numerator, denominator) in [
            ("0", 0, 1),
            ("-12", -12, 1),
            ("+0.50", 1, 2),
            (".25", 1, 4),
            ("3.", 3, 1),
            ("1.5e-3", 3, 2000),
            ("2E3", 2000, 1),
            ("-0.0", 0, 1),
            ("0e999999999", 0, 1),
        ] {
            let got = q(text);
            assert_eq!(got.to_parts(), Some((numerator, denominator)), "{text}");
        }
        for text in [
            "",
            ".",
            "-",
            "1.2.3",
            "1,000",
            "e5",
            "1e",
            "0x10",
            "1e4000",
            "1e-4000",
            "٣",
            "--1",
            "1e99999999999",
        ] {
            assert_eq!(Rational::parse(text), None, "{text}");
        }
        assert_eq!(Rational::parse(&"9".repeat(2000)), None);
        assert_ne!(Rational::parse(&"9".repeat(40)), Rational::parse(&("9".repeat(39) + "8")));
        assert_eq!(q(&format!("1.{}", "0".repeat(500))), Rational::from(1));
    }

    #[test]
    fn decimal_arithmetic_is_exact() {
        assert_eq!(q("0.1").plus(&q("0.2")), Some(q("0.3")));
        assert_eq!(q("1").divide(&q("3")).unwrap().times(&q("3")), Some(q("1")));
        assert_eq!(q("1").divide(&q("0")), None);
        assert_eq!(q("-1.5").power(3), Some(q("-3.375")));
        assert_eq!((q("0.5").power(-4), q("7").power(0)), (Some(q("16")), Some(q("1"))));
        assert_eq!(
            (q("0").power(-1), q("2").power(5000), q("1").power(i32::MIN)),
            (None, None, Some(q("1")))
        );
        assert_eq!(q("0").power(0), Some(q("1")));
        assert_eq!((q("-1").power(i32::MAX), q("-1").power(0)), (Some(q("-1")), Some(q("1"))));
        assert_eq!(q("0.2").compare(&q("0.25")), Ordering::Less);
    }

    #[test]
    fn oversized_rational_results_are_rejected() {
        let largest = q("2").power(4095).unwrap();
        assert_eq!(largest.plus(&largest), None);
        assert_eq!(largest.times(&q("2")), None);
        assert_eq!(largest.times(&q("1").divide(&largest).unwrap()), Some(q("1")));
        assert_eq!(Rational::new(1, 0), None);
        assert_eq!((q("1e-1200").to_f64(), q("-1e1200").to_f64()), (0.0, f64::NEG_INFINITY));
    }

    proptest! {
        #[test]
        fn arithmetic_matches_f64(a in -9999i64..9999, b in 1i64..999, c in -9999i64..9999, d in 1i64..999) {
            let (x, y) = (Rational::new(a.into(), b.into()).unwrap(), Rational::new(c.into(), d.into()).unwrap());
            let (p, q) = (a as f64 / b as f64, c as f64 / d as f64);
            let near = |got: Option<Rational>, want: f64| {
                (got.unwrap().to_f64() - want).abs() <= 1e-9 * want.abs().max(1.0)
            };
            prop_assert!(near(x.plus(&y), p + q));
            prop_assert!(near(x.minus(&y), p - q));
            prop_assert!(near(x.times(&y), p * q));
            prop_assert!(c == 0 || near(x.divide(&y), p / q));
            prop_assert_eq!(x.compare(&y), (a * d).cmp(&(c * b)));
        }
    }
}
