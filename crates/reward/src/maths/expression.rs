//! Mathematical expressions in the form in which they are written.

use num_bigint::BigInt;

use crate::Rational;

/// A mathematical expression in the form in which it was written.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Expr {
    Number(NumberLiteral),
    /// A variable with its subscript.
    Symbol(String),
    /// Words next to a mathematical value, usually a unit.
    Unit(String),
    Constant(MathConstant),
    Sum(Vec<Expr>),
    Product(Vec<Expr>),
    Power(Box<Expr>, Box<Expr>),
    Negative(Box<Expr>),
    Call(MathFunction, Vec<Expr>),
    /// Both signs of a value: ±x.
    PlusMinus(Box<Expr>),
}

/// A number in the form in which it was written: `digits` × 10^`scale`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NumberLiteral {
    pub digits: String,
    pub scale: i32,
    /// Whether the number has a decimal point, so that it may be rounded.
    pub decimal: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MathConstant {
    Pi,
    E,
    I,
    Infinity,
    /// The degree sign, whose value is π / 180.
    Degree,
}

/// Functions that are evaluated when answers are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MathFunction {
    Factorial,
    Binomial,
    Abs,
    Floor,
    Ceiling,
    Ln,
    /// Logarithm of the second argument to the base of the first.
    Log,
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    Arcsin,
    Arccos,
    Arctan,
    Sinh,
    Cosh,
    Tanh,
    Max,
    Min,
    Gcd,
    Lcm,
    /// Remainder of the first argument divided by the second, with the sign of the second.
    Modulo,
}

impl NumberLiteral {
    /// Creates an integer literal from its digits.
    pub fn integer(digits: impl Into<String>) -> Self {
        NumberLiteral { digits: digits.into(), scale: 0, decimal: false }
    }

    /// Returns the exact value of the literal, or `None` if it exceeds the bounds of [`Rational`].
    pub fn rational(&self) -> Option<Rational> {
        Rational::parse(&format!("{}e{}", self.digits, self.scale))
    }

    /// Returns the value of an integer whose digits are in `base`, or `None` if they do not fit the
    /// base.
    pub fn in_base(&self, base: u64) -> Option<Expr> {
        let base =
            u32::try_from(base).ok().filter(|base| self.is_integer() && (2..=36).contains(base))?;
        let value = BigInt::parse_bytes(self.digits.as_bytes(), base)?;
        Some(Expr::Number(NumberLiteral::integer(value.to_string())))
    }

    /// Returns whether the literal has neither a decimal point nor an exponent.
    pub fn is_integer(&self) -> bool {
        self.scale == 0 && !self.decimal
    }
}

impl Expr {
    /// Creates an expression that is an integer.
    pub fn integer(value: u32) -> Expr {
        Expr::Number(NumberLiteral::integer(value.to_string()))
    }

    /// Returns the expression 1 / self.
    pub fn inverse(self) -> Expr {
        Expr::Power(Box::new(self), Box::new(Expr::Negative(Box::new(Expr::integer(1)))))
    }

    /// Returns the expression a / b.
    pub fn quotient(a: &Expr, b: &Expr) -> Expr {
        Expr::Product(vec![a.clone(), b.clone().inverse()])
    }

    /// Returns the sign of an infinite value, or `None` for any other expression.
    pub fn infinity_sign(&self) -> Option<i8> {
        match self {
            Expr::Constant(MathConstant::Infinity) => Some(1),
            Expr::Negative(inner) => inner.infinity_sign().map(|sign| -sign),
            _ => None,
        }
    }

    /// Returns the direct subexpressions.
    pub fn parts(&self) -> Vec<&Expr> {
        match self {
            Expr::Number(_) | Expr::Symbol(_) | Expr::Unit(_) | Expr::Constant(_) => vec![],
            Expr::Sum(parts) | Expr::Product(parts) | Expr::Call(_, parts) => {
                parts.iter().collect()
            }
            Expr::Power(base, exponent) => vec![base, exponent],
            Expr::PlusMinus(inner) | Expr::Negative(inner) => vec![inner],
        }
    }

    /// Returns whether expressions are nested at most `levels` deep. Recursion stops at that depth.
    pub fn is_within(&self, levels: u32) -> bool {
        levels > 0 && self.parts().into_iter().all(|part| part.is_within(levels - 1))
    }

    /// Returns the number of nodes of the expression, including itself.
    pub fn size(&self) -> usize {
        1 + self.parts().into_iter().map(Expr::size).sum::<usize>()
    }

    /// Appends the names of the expression's variables to `names`, each name once.
    pub fn variables<'e>(&'e self, names: &mut Vec<&'e str>) {
        match self {
            Expr::Symbol(name) if !names.contains(&name.as_str()) => names.push(name),
            _ => self.parts().into_iter().for_each(|part| part.variables(names)),
        }
    }

    /// Returns whether the expression has neither variables nor words.
    pub fn is_fixed(&self) -> bool {
        !self.any(&mut |expr| matches!(expr, Expr::Symbol(_) | Expr::Unit(_)))
    }

    /// Returns whether `is` returns true for the expression or any of its subexpressions.
    pub fn any(&self, is: &mut impl FnMut(&Expr) -> bool) -> bool {
        is(self) || self.parts().into_iter().any(|part| part.any(is))
    }
}
