//! Parses, exactly evaluates and prints arithmetic expressions.
//!
//! ```text
//! sum     = product { (+ | -) product }
//! product = signed { (* | / ) signed }
//! signed  = (+ | -) signed | power
//! power   = atom [ (^ | **) signed ]          right-associative; -2^2 is -4
//! atom    = number | ( sum )
//! ```
//!
//! Also accepted: `×`, `·`, `x` for `*`; `÷` for `/`; `−` and `–` for `-`; decimals (`.5`, `3.`),
//! exponents (`1.5e3`), and thousands separators if every group has three digits (`1,234,567`). A
//! product needs its operator: `2(3)` is rejected with the position of the missing operator.
//!
//! Values are exact fractions as long as they fit 128-bit integers, so that 0.1 + 0.2 is 0.3.
//! Larger values and powers with fractional exponents are f64.

use std::fmt;

use levade_reward::Rational;
use levade_text::ToolCall;
use serde_json::{Map, Value};

/// Name of the tool that evaluates arithmetic expressions, in demonstrations and for agents.
pub const CALCULATOR: &str = "calculator";

/// Maximum length of an expression, in characters.
const MAX_LENGTH: usize = 1000;

/// Maximum nesting depth of parentheses, signs and powers; it bounds the recursion.
const MAX_DEPTH: usize = 100;

/// Maximum number of significant decimals of a printed result.
const DECIMALS: u32 = 10;

/// Error in an arithmetic expression. Positions count characters from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// The expression is empty or contains only spaces.
    #[error("the expression is empty")]
    Empty,
    /// The expression has more than 1,000 characters.
    #[error("the expression has {length} characters, but at most {MAX_LENGTH} are allowed")]
    TooLong {
        /// Number of characters in the expression.
        length: usize,
    },
    /// The expression has more than 100 levels of parentheses, signs and powers.
    #[error("the expression is nested more than {MAX_DEPTH} levels deep at character {at}")]
    TooDeep {
        /// Position of the character at which the limit is exceeded.
        at: usize,
    },
    /// A character is not permitted at its position.
    #[error("unexpected '{found}' at character {at}: {expected}")]
    Unexpected {
        /// Character that is not permitted.
        found: char,
        /// Position of that character.
        at: usize,
        /// Description of the characters that are permitted there.
        expected: &'static str,
    },
    /// The expression ends where a number or a parenthesis is expected.
    #[error("the expression ends where a number or '(' is expected")]
    Ends,
    /// An opening parenthesis is never closed.
    #[error("'(' at character {at} is never closed")]
    Unclosed {
        /// Position of the opening parenthesis.
        at: usize,
    },
    /// A division by zero, or zero to a negative power.
    #[error("division by zero at character {at}")]
    DivisionByZero {
        /// Position of the division or power operator.
        at: usize,
    },
    /// A fractional power of a negative number has no real value.
    #[error("the power at character {at} has no real value")]
    NotReal {
        /// Position of the power operator.
        at: usize,
    },
    /// A value exceeds the range of f64.
    #[error("the result at character {at} is too large")]
    TooLarge {
        /// Position of the operator or number with that value.
        at: usize,
    },
}

/// A number that is exact if possible: a fraction, or an approximate f64.
#[derive(Debug, Clone, PartialEq)]
pub enum Number {
    /// An exact fraction of two integers.
    Exact(Rational),
    /// An approximate value, always finite.
    Approximate(f64),
}

impl Number {
    /// Returns the f64 that is nearest to the number.
    pub fn to_f64(&self) -> f64 {
        match self {
            Number::Exact(value) => value.to_f64(),
            Number::Approximate(value) => *value,
        }
    }
}

/// Evaluates an expression.
///
/// # Errors
/// Returns [`ExpressionError`] with the position if the expression is invalid or its value is not a
/// finite real number.
pub fn evaluate(text: &str) -> Result<Number, ExpressionError> {
    let chars: Vec<char> = text.chars().collect();
    if chars.len() > MAX_LENGTH {
        return Err(ExpressionError::TooLong { length: chars.len() });
    }
    let mut parser = ExpressionParser { chars, at: 0, depth: 0 };
    parser.skip_spaces();
    if parser.peek().is_none() {
        return Err(ExpressionError::Empty);
    }
    let value = parser.parse_sum()?;
    match parser.peek() {
        None => Ok(value),
        Some(_) => Err(parser.unexpected_error("an operator or the end is expected")),
    }
}

/// Returns a tool call of the [`CALCULATOR`] that evaluates `expression`.
pub fn calculation(expression: &str) -> ToolCall {
    let arguments = Map::from_iter([("expression".to_owned(), Value::from(expression))]);
    ToolCall { id: String::new(), name: CALCULATOR.to_owned(), arguments: arguments.into() }
}

#[derive(Clone, Copy)]
enum ArithmeticOperation {
    Plus,
    Minus,
    Times,
    DividedBy,
}

struct ExpressionParser {
    chars: Vec<char>,
    at: usize,
    depth: usize,
}

impl ExpressionParser {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn peek_ahead(&self, by: usize) -> Option<char> {
        self.chars.get(self.at + by).copied()
    }

    fn skip_spaces(&mut self) {
        while self.peek().is_some_and(char::is_whitespace) {
            self.at += 1;
        }
    }

    /// Advances past `length` characters and the spaces that follow. Returns the position of the
    /// first character, from 1.
    fn take(&mut self, length: usize) -> usize {
        let position = self.at + 1;
        self.at += length;
        self.skip_spaces();
        position
    }

    fn unexpected_error(&self, expected: &'static str) -> ExpressionError {
        match self.peek() {
            Some(found) => ExpressionError::Unexpected { found, at: self.at + 1, expected },
            None => ExpressionError::Ends,
        }
    }

    /// Runs the parsing function `inner` at a nesting depth that is increased by one.
    fn parse_nested<T>(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<T, ExpressionError>,
    ) -> Result<T, ExpressionError> {
        if self.depth == MAX_DEPTH {
            return Err(ExpressionError::TooDeep { at: self.at + 1 });
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    fn parse_sum(&mut self) -> Result<Number, ExpressionError> {
        let mut value = self.parse_product()?;
        loop {
            let operation = match self.peek() {
                Some('+') => ArithmeticOperation::Plus,
                Some('-' | '−' | '–') => ArithmeticOperation::Minus,
                _ => return Ok(value),
            };
            let at = self.take(1);
            let rhs = self.parse_product()?;
            value = apply_operation(operation, value, rhs, at)?;
        }
    }

    fn parse_product(&mut self) -> Result<Number, ExpressionError> {
        let mut value = self.parse_unary()?;
        loop {
            let operation = match self.peek() {
                Some('*' | '×' | '·' | '⋅' | 'x' | 'X') => ArithmeticOperation::Times,
                Some('/' | '÷' | '∕') => ArithmeticOperation::DividedBy,
                _ => return Ok(value),
            };
            let at = self.take(1);
            let rhs = self.parse_unary()?;
            value = apply_operation(operation, value, rhs, at)?;
        }
    }

    fn parse_unary(&mut self) -> Result<Number, ExpressionError> {
        match self.peek() {
            Some('+') => {
                self.take(1);
                self.parse_nested(Self::parse_unary)
            }
            Some('-' | '−' | '–') => {
                self.take(1);
                Ok(match self.parse_nested(Self::parse_unary)? {
                    Number::Exact(value) => Number::Exact(value.negate()),
                    Number::Approximate(value) => Number::Approximate(-value),
                })
            }
            _ => self.parse_power(),
        }
    }

    fn parse_power(&mut self) -> Result<Number, ExpressionError> {
        let base = self.parse_atom()?;
        let length = match (self.peek(), self.peek_ahead(1)) {
            (Some('^'), _) => 1,
            (Some('*'), Some('*')) => 2,
            _ => return Ok(base),
        };
        let at = self.take(length);
        let exponent = self.parse_nested(Self::parse_unary)?;
        raise_to_power(base, exponent, at)
    }

    fn parse_atom(&mut self) -> Result<Number, ExpressionError> {
        match self.peek() {
            Some('(') => {
                let open = self.take(1);
                let value = self.parse_nested(Self::parse_sum)?;
                match self.peek() {
                    Some(')') => {
                        self.take(1);
                        Ok(value)
                    }
                    None => Err(ExpressionError::Unclosed { at: open }),
                    Some(_) => Err(self.unexpected_error("an operator or ')' is expected")),
                }
            }
            Some(c) if c.is_ascii_digit() || c == '.' => self.parse_number(),
            _ => Err(self.unexpected_error("a number or '(' is expected")),
        }
    }

    fn parse_number(&mut self) -> Result<Number, ExpressionError> {
        let start = self.at;
        let mut text = String::new();
        self.take_digits(&mut text);
        if (1..=3).contains(&text.len()) {
            while self.peek() == Some(',') && self.is_thousands_separator() {
                self.at += 1;
                self.take_digits(&mut text);
            }
        }
        if self.peek() == Some('.') {
            self.at += 1;
            text.push('.');
            self.take_digits(&mut text);
        }
        if text == "." {
            self.at = start;
            return Err(self.unexpected_error("a number or '(' is expected"));
        }
        if let Some('e' | 'E') = self.peek() {
            let signed = matches!(self.peek_ahead(1), Some('+' | '-'));
            if self.peek_ahead(if signed { 2 } else { 1 }).is_some_and(|c| c.is_ascii_digit()) {
                text.push('e');
                if signed {
                    text.extend(self.peek_ahead(1));
                }
                self.at += if signed { 2 } else { 1 };
                self.take_digits(&mut text);
            }
        }
        self.skip_spaces();
        if let Some(value) = Rational::parse(&text).filter(fits_128_bits) {
            return Ok(Number::Exact(value));
        }
        // The number has too many digits to be exact; it becomes an f64.
        check_approximate(text.parse().unwrap_or(f64::INFINITY), start + 1)
    }

    /// Returns whether the comma at the current position is followed by exactly three digits, as a
    /// thousands separator is.
    fn is_thousands_separator(&self) -> bool {
        let digit = |by| self.peek_ahead(by).is_some_and(|c: char| c.is_ascii_digit());
        (1..=3).all(digit) && !digit(4)
    }

    fn take_digits(&mut self, into: &mut String) {
        while let Some(c) = self.peek().filter(char::is_ascii_digit) {
            into.push(c);
            self.at += 1;
        }
    }
}

fn check_approximate(value: f64, at: usize) -> Result<Number, ExpressionError> {
    if value.is_finite() {
        Ok(Number::Approximate(value))
    } else {
        Err(ExpressionError::TooLarge { at })
    }
}

/// Returns whether numerator and denominator of a fraction fit in 128-bit integers. Only such
/// fractions are exact.
fn fits_128_bits(value: &Rational) -> bool {
    value.to_parts().is_some()
}

fn is_zero(value: &Number) -> bool {
    value.to_f64() == 0.0
}

fn apply_operation(
    operation: ArithmeticOperation,
    lhs: Number,
    rhs: Number,
    at: usize,
) -> Result<Number, ExpressionError> {
    if matches!(operation, ArithmeticOperation::DividedBy) && is_zero(&rhs) {
        return Err(ExpressionError::DivisionByZero { at });
    }
    if let (Number::Exact(a), Number::Exact(b)) = (&lhs, &rhs) {
        let exact = match operation {
            ArithmeticOperation::Plus => a.plus(b),
            ArithmeticOperation::Minus => a.minus(b),
            ArithmeticOperation::Times => a.times(b),
            ArithmeticOperation::DividedBy => a.divide(b),
        };
        if let Some(value) = exact.filter(fits_128_bits) {
            return Ok(Number::Exact(value));
        }
    }
    let a = lhs.to_f64();
    let b = rhs.to_f64();
    let value = match operation {
        ArithmeticOperation::Plus => a + b,
        ArithmeticOperation::Minus => a - b,
        ArithmeticOperation::Times => a * b,
        ArithmeticOperation::DividedBy => a / b,
    };
    check_approximate(value, at)
}

fn raise_to_power(base: Number, exponent: Number, at: usize) -> Result<Number, ExpressionError> {
    if is_zero(&base) && exponent.to_f64() < 0.0 {
        return Err(ExpressionError::DivisionByZero { at });
    }
    if let (Number::Exact(base), Number::Exact(exponent)) = (&base, &exponent)
        && let Some(value) = compute_exact_power(base, exponent)
    {
        return Ok(Number::Exact(value));
    }
    let value = base.to_f64().powf(exponent.to_f64());
    if value.is_nan() {
        return Err(ExpressionError::NotReal { at });
    }
    check_approximate(value, at)
}

/// Computes an integer power by repeated squaring. Returns `None` if the exponent is not an integer
/// or the result is not exact in 128 bits.
fn compute_exact_power(base: &Rational, exponent: &Rational) -> Option<Rational> {
    let (exponent, 1) = exponent.to_parts()? else { return None };
    // For exponents beyond 32 bits, only powers of 0 and ±1 fit; they depend only on the sign and
    // on the last bit.
    let last = (exponent.rem_euclid(2) + 2) as i32 * exponent.signum() as i32;
    let is_unit = [-1, 0, 1].map(Rational::from).contains(base);
    base.power(i32::try_from(exponent).ok().or(is_unit.then_some(last))?).filter(fits_128_bits)
}

impl fmt::Display for Number {
    /// Formats the number as the calculator prints it. Integers are printed in full. Decimals are
    /// rounded to ten decimals (below 1, to ten digits after the leading zeros), without trailing
    /// zeros. Approximate values that are very large or very small get an exponent.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number::Exact(value) if value.is_integer() => write!(f, "{}", value.numerator()),
            Number::Exact(value) => match round_to_decimal(value) {
                Some(text) => f.write_str(&text),
                None => write_decimal(value.to_f64(), f),
            },
            Number::Approximate(value) => write_decimal(*value, f),
        }
    }
}

/// Rounds a fraction half away from zero, and returns it in decimal notation. Returns `None` if the
/// digits do not fit in 128 bits.
fn round_to_decimal(value: &Rational) -> Option<String> {
    let (numerator, denominator) = value.to_parts()?;
    let top = numerator.unsigned_abs();
    let bottom = denominator.unsigned_abs();
    let mut decimals = DECIMALS;
    let mut leading = top;
    while leading.checked_mul(10)? < bottom {
        leading *= 10;
        decimals += 1;
    }
    // Integer part and remainder are separate, so that only the remainder is scaled up.
    let unit = 10u128.checked_pow(decimals)?;
    let scaled = (top % bottom).checked_mul(unit)?;
    let half_up = u128::from(scaled % bottom >= bottom.div_ceil(2));
    let digits = (top / bottom).checked_mul(unit)?.checked_add(scaled / bottom + half_up)?;
    let sign = if numerator < 0 { "-" } else { "" };
    let text =
        format!("{sign}{}.{:0width$}", digits / unit, digits % unit, width = decimals as usize);
    Some(trim_zeros(&text))
}

fn write_decimal(value: f64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let size = value.abs();
    if size != 0.0 && !(1e-5..1e15).contains(&size) {
        let text = format!("{value:.9e}");
        return match text.split_once('e') {
            Some((mantissa, exponent)) => write!(f, "{}e{exponent}", trim_zeros(mantissa)),
            None => f.write_str(&text),
        };
    }
    f.write_str(&trim_zeros(&format!("{value:.decimals$}", decimals = DECIMALS as usize)))
}

/// Removes trailing zeros of the decimals, and a minus sign before zero.
fn trim_zeros(text: &str) -> String {
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
#[path = "expression_tests.rs"]
mod tests;
