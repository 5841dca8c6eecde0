//! Exact fractions of 128-bit integers.
//!
//! Decimals, their sums, products and quotients are exact, so 0.1 + 0.2 is 0.3. Nothing overflows silently:
//! an operation whose result does not fit gives `None`, and the caller decides what to do instead.

use std::cmp::Ordering;

/// A fraction in lowest terms with a positive denominator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rational {
    numerator: i128,
    denominator: i128,
}

impl From<i64> for Rational {
    fn from(value: i64) -> Self {
        Rational { numerator: value.into(), denominator: 1 }
    }
}

impl Rational {
    /// `numerator / denominator` in lowest terms; `None` if the denominator is 0 or a part does not fit.
    pub fn new(numerator: i128, denominator: i128) -> Option<Self> {
        if denominator == 0 {
            return None;
        }
        let shared = gcd(numerator.unsigned_abs(), denominator.unsigned_abs());
        let part = |value: i128| i128::try_from(value.unsigned_abs() / shared).ok();
        let (top, bottom) = (part(numerator)?, part(denominator)?);
        let negative = (numerator < 0) != (denominator < 0);
        Some(Rational { numerator: if negative { -top } else { top }, denominator: bottom })
    }

    /// Reads digits with an optional sign, decimal point and exponent (`-12`, `.5`, `3.`, `1.5e-3`); `None`
    /// for anything else, and for numbers that do not fit.
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
        let (whole, decimals) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        if whole.is_empty() && decimals.is_empty() {
            return None;
        }
        let mut digits = 0i128;
        // Zeros at the end of the decimals carry no value, however many there are.
        let decimals = decimals.trim_end_matches('0');
        for digit in whole.bytes().chain(decimals.bytes()) {
            if !digit.is_ascii_digit() {
                return None;
            }
            digits = digits.checked_mul(10)?.checked_add(i128::from(digit - b'0'))?;
        }
        if digits == 0 {
            return Some(Rational::from(0));
        }
        let shift = exponent.checked_sub(i32::try_from(decimals.len()).ok()?)?;
        let power = 10i128.checked_pow(shift.unsigned_abs())?;
        let signed = if negative { -digits } else { digits };
        if shift < 0 { Self::new(signed, power) } else { Self::new(signed.checked_mul(power)?, 1) }
    }

    /// The part above the line; it has the sign.
    pub fn numerator(self) -> i128 {
        self.numerator
    }

    /// The part below the line, at least 1.
    pub fn denominator(self) -> i128 {
        self.denominator
    }

    /// Whether the denominator is 1.
    pub fn is_integer(self) -> bool {
        self.denominator == 1
    }

    /// The nearest f64, give or take one rounding.
    pub fn to_f64(self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }

    /// −self. (The parts never hold `i128::MIN`, so this always fits.)
    pub fn negate(self) -> Self {
        Rational { numerator: -self.numerator, ..self }
    }

    /// |self|.
    pub fn abs(self) -> Self {
        Rational { numerator: self.numerator.abs(), ..self }
    }

    /// self + other; `None` if it does not fit.
    pub fn plus(self, other: Self) -> Option<Self> {
        // Over the least common denominator, so that sums of decimals fit as long as they can.
        let shared = gcd(self.denominator.unsigned_abs(), other.denominator.unsigned_abs()) as i128;
        let (mine, theirs) = (other.denominator / shared, self.denominator / shared);
        let top = self.numerator.checked_mul(mine)?.checked_add(other.numerator.checked_mul(theirs)?)?;
        Self::new(top, self.denominator.checked_mul(mine)?)
    }

    /// self − other; `None` if it does not fit.
    pub fn minus(self, other: Self) -> Option<Self> {
        self.plus(other.negate())
    }

    /// self × other; `None` if it does not fit.
    pub fn times(self, other: Self) -> Option<Self> {
        // Reduced crosswise first, so that the products are already in lowest terms.
        let left = Self::new(self.numerator, other.denominator)?;
        let right = Self::new(other.numerator, self.denominator)?;
        let top = left.numerator.checked_mul(right.numerator)?;
        Self::new(top, left.denominator.checked_mul(right.denominator)?)
    }

    /// self ÷ other; `None` if other is 0 or the result does not fit.
    pub fn over(self, other: Self) -> Option<Self> {
        self.times(Self::new(other.denominator, other.numerator)?)
    }

    /// self to a whole power; `None` if it does not fit, or divides by 0.
    pub fn power(self, exponent: i32) -> Option<Self> {
        let base = if exponent < 0 { Rational::from(1).over(self)? } else { self };
        let times = exponent.unsigned_abs();
        Self::new(base.numerator.checked_pow(times)?, base.denominator.checked_pow(times)?)
    }

    /// Which is larger; `None` if the comparison itself does not fit.
    pub fn compare(self, other: Self) -> Option<Ordering> {
        Some(self.minus(other)?.numerator.cmp(&0))
    }
}

fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn q(text: &str) -> Rational {
        Rational::parse(text).unwrap()
    }

    #[test]
    fn reads_decimals_exactly() {
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
            assert_eq!((got.numerator(), got.denominator()), (numerator, denominator), "{text}");
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
            "1e400",
            "1e-400",
            "٣",
            "--1",
            "1e99999999999",
        ] {
            assert_eq!(Rational::parse(text), None, "{text}");
        }
        assert_eq!(Rational::parse(&"9".repeat(40)), None);
        assert_eq!(q(&format!("1.{}", "0".repeat(500))), Rational::from(1));
    }

    #[test]
    fn decimals_add_up() {
        assert_eq!(q("0.1").plus(q("0.2")), Some(q("0.3")));
        assert_eq!(q("1").over(q("3")).unwrap().times(q("3")), Some(q("1")));
        assert_eq!(q("1").over(q("0")), None);
        assert_eq!(q("-1.5").power(3), Some(q("-3.375")));
        assert_eq!((q("0.5").power(-4), q("7").power(0)), (Some(q("16")), Some(q("1"))));
        assert_eq!((q("0").power(-1), q("2").power(127), q("1").power(i32::MIN)), (None, None, Some(q("1"))));
        assert_eq!(q("0.2").compare(q("0.25")), Some(Ordering::Less));
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let most = Rational::new(i128::MAX, 1).unwrap();
        assert_eq!(most.plus(Rational::from(1)), None);
        assert_eq!(most.times(Rational::from(2)), None);
        assert_eq!(most.times(Rational::new(1, i128::MAX).unwrap()), Some(Rational::from(1)));
        assert_eq!(Rational::new(i128::MIN, 1), None);
        assert_eq!(Rational::new(i128::MIN, -2).unwrap().numerator(), i128::MAX / 2 + 1);
        assert_eq!(Rational::new(1, 0), None);
    }

    proptest! {
        #[test]
        fn arithmetic_agrees_with_f64(a in -9999i64..9999, b in 1i64..999, c in -9999i64..9999, d in 1i64..999) {
            let (x, y) = (Rational::new(a.into(), b.into()).unwrap(), Rational::new(c.into(), d.into()).unwrap());
            let (p, q) = (a as f64 / b as f64, c as f64 / d as f64);
            let near = |got: Option<Rational>, want: f64| {
                (got.unwrap().to_f64() - want).abs() <= 1e-9 * want.abs().max(1.0)
            };
            prop_assert!(near(x.plus(y), p + q));
            prop_assert!(near(x.minus(y), p - q));
            prop_assert!(near(x.times(y), p * q));
            prop_assert!(c == 0 || near(x.over(y), p / q));
            prop_assert_eq!(x.compare(y), Some((a * d).cmp(&(c * b))));
            let lowest = gcd(x.numerator().unsigned_abs(), x.denominator().unsigned_abs());
            prop_assert_eq!(lowest, 1);
        }
    }
}
