//! Decides equality exactly, by evaluation in a finite field.
//!
//! Equal rational functions over ℚ have equal values wherever both are defined. By the
//! Schwartz–Zippel lemma, different ones have equal values at a random point of a field of 2^122
//! elements with a probability of about degree / 2^61. An expression is therefore never expanded,
//! and numbers do not grow. π and e are treated as separate variables. The field is F_p[i] with i²
//! = −1. In it every rational number has square roots, so that ℚ(i, √2, √3, …) also maps into it.
//! The prime is chosen so that roots of degree 3, 5 and 7 are unique.

use num_bigint::BigInt;
use num_traits::{Signed, ToPrimitive, Zero};

use super::expression::{Expr, MathConstant, MathFunction, NumberLiteral};
use crate::Rational;

/// The prime p on which the finite field is built. It is below 2^61 and 3 modulo 4, and 3, 5, 7, 11
/// and 13 do not divide p − 1.
const P: u64 = 2_305_843_009_213_693_487;

/// Maximum argument of a factorial that is evaluated.
const FACTORIAL: i128 = 2000;

/// Limit of trial division. A square root is computed only if trial division factors the number
/// completely.
const TRIALS: u128 = 1 << 16;

/// An element re + im · i of the finite field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FieldElement {
    re: u64,
    im: u64,
}

fn multiply_mod(a: u64, b: u64) -> u64 {
    (u128::from(a) * u128::from(b) % u128::from(P)) as u64
}

fn add_mod(a: u64, b: u64) -> u64 {
    (a + b) % P
}

fn subtract_mod(a: u64, b: u64) -> u64 {
    (a + P - b) % P
}

fn power_mod(mut base: u64, mut exponent: u64) -> u64 {
    let mut product = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            product = multiply_mod(product, base);
        }
        base = multiply_mod(base, base);
        exponent >>= 1;
    }
    product
}

impl FieldElement {
    pub const ZERO: FieldElement = FieldElement { re: 0, im: 0 };
    const ONE: FieldElement = FieldElement { re: 1, im: 0 };
    const I: FieldElement = FieldElement { re: 0, im: 1 };

    fn real(re: u64) -> Self {
        FieldElement { re: re % P, im: 0 }
    }

    pub fn plus(self, other: Self) -> Self {
        FieldElement { re: add_mod(self.re, other.re), im: add_mod(self.im, other.im) }
    }

    pub fn minus(self, other: Self) -> Self {
        FieldElement { re: subtract_mod(self.re, other.re), im: subtract_mod(self.im, other.im) }
    }

    pub fn times(self, other: Self) -> Self {
        FieldElement {
            re: subtract_mod(multiply_mod(self.re, other.re), multiply_mod(self.im, other.im)),
            im: add_mod(multiply_mod(self.re, other.im), multiply_mod(self.im, other.re)),
        }
    }

    /// Returns the multiplicative inverse 1 / self, or `None` for 0.
    fn inverse(self) -> Option<Self> {
        let norm = add_mod(multiply_mod(self.re, self.re), multiply_mod(self.im, self.im));
        let inverse = (norm != 0).then(|| power_mod(norm, P - 2))?;
        Some(FieldElement {
            re: multiply_mod(self.re, inverse),
            im: multiply_mod(subtract_mod(0, self.im), inverse),
        })
    }

    fn power(self, exponent: i128) -> Option<Self> {
        let mut base = if exponent < 0 { self.inverse()? } else { self };
        let mut remaining = exponent.unsigned_abs();
        let mut product = FieldElement::ONE;
        while remaining > 0 {
            if remaining & 1 == 1 {
                product = product.times(base);
            }
            base = base.times(base);
            remaining >>= 1;
        }
        Some(product)
    }

    fn from_rational(value: &Rational) -> Self {
        let part = |value: &BigInt| {
            let rest = (value % BigInt::from(P) + P) % P;
            FieldElement::real(rest.to_u64().unwrap_or_default())
        };
        let top = part(value.numerator());
        let bottom = part(value.denominator());
        // The denominator is a multiple of the prime, so there is no exact value; 0 is as good as
        // any other.
        bottom.inverse().map_or(FieldElement::ZERO, |bottom| top.times(bottom))
    }

    fn from_literal(literal: &NumberLiteral) -> Option<Self> {
        let digits = literal
            .digits
            .bytes()
            .fold(0, |sum, digit| add_mod(multiply_mod(sum, 10), u64::from(digit - b'0')));
        Some(FieldElement::real(digits).times(FieldElement::real(10).power(literal.scale.into())?))
    }
}

/// Returns the square root of a rational number in the finite field, or `None` if the number cannot
/// be factored completely.
fn square_root(value: &Rational) -> Option<FieldElement> {
    // √(n / d) = √(n d) / d, as a product of the roots of primes.
    let (numerator, denominator) = value.to_parts()?;
    let mut remaining = numerator.checked_mul(denominator)?.unsigned_abs();
    let mut product = FieldElement::ONE;
    if numerator < 0 {
        product = FieldElement::I;
    }
    let mut take = |prime: u128, remaining: &mut u128| {
        let mut times = 0i128;
        while remaining.is_multiple_of(prime) {
            (*remaining, times) = (*remaining / prime, times + 1);
        }
        product =
            product.times(FieldElement::real((prime % u128::from(P)) as u64).power(times / 2)?);
        if times % 2 == 1 {
            product = product.times(square_root_of_prime(prime)?);
        }
        Some(())
    };
    if remaining == 0 {
        return Some(FieldElement::ZERO);
    }
    let mut trial = 2;
    while trial < TRIALS && trial * trial <= remaining {
        if remaining.is_multiple_of(trial) {
            take(trial, &mut remaining)?;
        }
        trial += 1 + u128::from(trial > 2);
    }
    if remaining > 1 {
        let whole = remaining.isqrt();
        if whole * whole == remaining {
            product = product.times(FieldElement::real((whole % u128::from(P)) as u64));
        } else if remaining < TRIALS * TRIALS {
            let prime = remaining;
            take(prime, &mut remaining)?;
        } else {
            return None;
        }
    }
    Some(product.times(FieldElement::from_rational(&Rational::new(1, denominator)?)))
}

/// Returns the square root of a prime below 2^61 in the finite field. The root is in F_p, or i
/// times the root of the negative prime.
fn square_root_of_prime(prime: u128) -> Option<FieldElement> {
    let prime = u64::try_from(prime).ok().filter(|prime| *prime < P)?;
    let root = power_mod(prime, P.div_ceil(4));
    Some(if multiply_mod(root, root) == prime {
        FieldElement::real(root)
    } else {
        FieldElement::real(root).times(FieldElement::I)
    })
}

/// Returns the exact value of an expression without variables. Returns `None` if it is not rational
/// or exceeds the bounds of [`Rational`].
pub(super) fn to_exact_rational(expression: &Expr) -> Option<Rational> {
    match expression {
        Expr::Number(literal) => literal.rational(),
        Expr::Negative(inner) => to_exact_rational(inner).map(Rational::negate),
        Expr::Sum(parts) => parts
            .iter()
            .try_fold(Rational::from(0), |sum, part| sum.plus(&to_exact_rational(part)?)),
        Expr::Product(parts) => parts
            .iter()
            .try_fold(Rational::from(1), |product, part| product.times(&to_exact_rational(part)?)),
        Expr::Power(base, exponent) => {
            let exponent = to_exact_rational(exponent).filter(Rational::is_integer)?;
            to_exact_rational(base)?.power(exponent.numerator().to_i32()?)
        }
        _ => None,
    }
}

/// A point at which expressions are evaluated: it assigns a value to every variable.
#[derive(Debug, Clone, Copy)]
pub(super) struct EvaluationPoint(pub u64);

impl EvaluationPoint {
    /// Returns a pseudorandom number that depends on the point and `name`.
    pub fn hash_name(self, name: &str) -> u64 {
        let mut state = self.0 ^ 0x9e37_79b9_7f4a_7c15;
        for byte in name.bytes() {
            state = (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        // splitmix64
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^ (state >> 31)
    }

    fn variable_value(self, name: &str) -> FieldElement {
        FieldElement::real(self.hash_name(name))
    }

    /// Returns the value of an expression at this point, or `None` if the expression has no value
    /// in the finite field.
    pub fn evaluate(self, expression: &Expr) -> Option<FieldElement> {
        match expression {
            Expr::Number(literal) => FieldElement::from_literal(literal),
            Expr::Symbol(name) | Expr::Unit(name) => Some(self.variable_value(name)),
            Expr::Constant(MathConstant::Pi) => Some(self.variable_value("\\pi")),
            Expr::Constant(MathConstant::E) => Some(self.variable_value("\\e")),
            Expr::Constant(MathConstant::I) => Some(FieldElement::I),
            Expr::Constant(MathConstant::Degree) => {
                Some(self.variable_value("\\pi").times(FieldElement::real(180).inverse()?))
            }
            Expr::Constant(MathConstant::Infinity) | Expr::PlusMinus(_) => None,
            Expr::Negative(inner) => Some(FieldElement::ZERO.minus(self.evaluate(inner)?)),
            Expr::Sum(parts) => parts
                .iter()
                .try_fold(FieldElement::ZERO, |sum, part| Some(sum.plus(self.evaluate(part)?))),
            Expr::Product(parts) => parts.iter().try_fold(FieldElement::ONE, |product, part| {
                Some(product.times(self.evaluate(part)?))
            }),
            Expr::Power(base, exponent) => self.power(base, &to_exact_rational(exponent)?),
            Expr::Call(function, arguments) => call_function(*function, arguments),
        }
    }

    fn power(self, base: &Expr, exponent: &Rational) -> Option<FieldElement> {
        let (numerator, denominator) = exponent.to_parts()?;
        let of_degree = match denominator {
            1 => self.evaluate(base)?,
            2 => square_root(&to_exact_rational(base)?)?,
            degree @ (3 | 5 | 7 | 9 | 11 | 13) => {
                let base = self.evaluate(base).filter(|base| base.im == 0)?;
                // The inverse of the degree modulo p − 1.
                let whole = (1..degree).find_map(|k| {
                    let sum = k * i128::from(P - 1) + 1;
                    (sum % degree == 0).then_some(sum / degree)
                })?;
                FieldElement::real(power_mod(base.re, whole as u64))
            }
            _ => return None,
        };
        of_degree.power(numerator)
    }
}

fn call_function(function: MathFunction, arguments: &[Expr]) -> Option<FieldElement> {
    let numbers: Option<Vec<Rational>> = arguments.iter().map(to_exact_rational).collect();
    let numbers = numbers?;
    let small = |number: &Rational| {
        number.to_parts().filter(|(_, denominator)| *denominator == 1).map(|(n, _)| n)
    };
    match (function, numbers.as_slice()) {
        (MathFunction::Abs, [number]) => Some(FieldElement::from_rational(&number.clone().abs())),
        (MathFunction::Floor, [number]) => Some(FieldElement::from_rational(&number.floor())),
        (MathFunction::Ceiling, [number]) => {
            Some(FieldElement::from_rational(&number.clone().negate().floor().negate()))
        }
        (MathFunction::Modulo, [number, by]) if by.numerator().is_positive() => {
            Some(FieldElement::from_rational(&number.modulo(by)?))
        }
        (MathFunction::Gcd | MathFunction::Lcm, [first, more @ ..]) => {
            let mut found = first.clone().abs();
            for other in more {
                let gcd = found.gcd(other)?;
                found = match function {
                    MathFunction::Gcd => gcd,
                    _ if gcd.numerator().is_zero() => gcd,
                    _ => found.times(other)?.abs().divide(&gcd)?,
                };
            }
            found.is_integer().then(|| FieldElement::from_rational(&found))
        }
        (MathFunction::Factorial, [number]) => {
            let number = small(number).filter(|number| (0..=FACTORIAL).contains(number))?;
            Some(
                (1..=number).fold(FieldElement::ONE, |product, k| {
                    product.times(FieldElement::real(k as u64))
                }),
            )
        }
        (MathFunction::Binomial, [n, k]) => {
            let n = small(n)?;
            let k = small(k)?;
            if !(0..=FACTORIAL).contains(&k) || n < k || n > 1 << 60 {
                return None;
            }
            let mut product = FieldElement::ONE;
            for j in 0..k {
                let part = FieldElement::real((n - j) as u64)
                    .times(FieldElement::real(j as u64 + 1).inverse()?);
                product = product.times(part);
            }
            Some(product)
        }
        (MathFunction::Max | MathFunction::Min, [first, more @ ..]) => {
            let is_better = |other: &&Rational, best: &Rational| {
                other.compare(best).is_gt() == (function == MathFunction::Max)
            };
            Some(FieldElement::from_rational(
                more.iter()
                    .fold(first, |best, other| if is_better(&other, best) { other } else { best }),
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_of_roots_match_radicands() {
        for value in [2, 3, 5, 6, 12, 49, 65537, 999_983, 1 << 40] {
            let number = Rational::from(value);
            let found = square_root(&number).unwrap();
            assert_eq!(found.times(found), FieldElement::from_rational(&number), "{value}");
        }
        // √2 √3 = √6, no matter which of the roots are in F_p.
        let root = |n: i64| square_root(&Rational::from(n)).unwrap();
        assert_eq!(root(2).times(root(3)), root(6));
        assert_eq!(root(-2).times(root(-3)), FieldElement::ZERO.minus(root(6)));
        // Too large to be factored.
        assert_eq!(
            super::square_root(
                &Rational::new(2_305_843_009_213_693_951 * 2_147_483_647, 1).unwrap()
            ),
            None
        );
    }

    #[test]
    fn cube_root_is_unique() {
        let eight = Expr::integer(8);
        let third = Rational::new(1, 3).unwrap();
        assert_eq!(EvaluationPoint(1).power(&eight, &third), Some(FieldElement::real(2)));
        let minus = Expr::Negative(Box::new(eight));
        assert_eq!(
            EvaluationPoint(1).power(&minus, &third),
            Some(FieldElement::ZERO.minus(FieldElement::real(2)))
        );
    }
}
