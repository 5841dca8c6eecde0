//! Expressions as they are written.

use num_bigint::BigInt;

use crate::Rational;

/// A mathematical expression as it was written.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Expr {
    Number(Literal),
    /// A variable, with its subscript.
    Symbol(String),
    /// Words beside the mathematics, mostly a unit.
    Unit(String),
    Constant(Constant),
    Sum(Vec<Expr>),
    Product(Vec<Expr>),
    Power(Box<Expr>, Box<Expr>),
    Negative(Box<Expr>),
    Call(Function, Vec<Expr>),
    /// Both values, ±x.
    PlusMinus(Box<Expr>),
}

/// Digits as written: `digits` × 10^`scale`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Literal {
    pub digits: String,
    pub scale: i32,
    /// Whether it is written with a decimal point, so that it may be rounded.
    pub decimal: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Constant {
    Pi,
    E,
    I,
    Infinity,
    /// π / 180.
    Degree,
}

/// Functions with a value of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
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
    /// Remainder of the first argument by the second, with the sign of the second.
    Modulo,
}

impl Literal {
    /// A whole number.
    pub fn whole(digits: impl Into<String>) -> Self {
        Literal { digits: digits.into(), scale: 0, decimal: false }
    }

    /// Exact value; `None` where it does not fit.
    pub fn rational(&self) -> Option<Rational> {
        Rational::parse(&format!("{}e{}", self.digits, self.scale))
    }

    /// Returns the value of a whole number whose digits are of `base`.
    pub fn in_base(&self, base: u64) -> Option<Expr> {
        let base = u32::try_from(base).ok().filter(|base| self.is_whole() && (2..=36).contains(base))?;
        let value = BigInt::parse_bytes(self.digits.as_bytes(), base)?;
        Some(Expr::Number(Literal::whole(value.to_string())))
    }

    /// Whether it is a whole number without point and exponent.
    pub fn is_whole(&self) -> bool {
        self.scale == 0 && !self.decimal
    }
}

impl Expr {
    /// A small whole number.
    pub fn whole(value: u32) -> Expr {
        Expr::Number(Literal::whole(value.to_string()))
    }

    /// 1 / x.
    pub fn inverted(self) -> Expr {
        Expr::Power(Box::new(self), Box::new(Expr::Negative(Box::new(Expr::whole(1)))))
    }

    /// Returns a / b.
    pub fn quotient(a: &Expr, b: &Expr) -> Expr {
        Expr::Product(vec![a.clone(), b.clone().inverted()])
    }

    /// The sign of an infinity; `None` for anything else.
    pub fn infinite(&self) -> Option<i8> {
        match self {
            Expr::Constant(Constant::Infinity) => Some(1),
            Expr::Negative(inner) => inner.infinite().map(|sign| -sign),
            _ => None,
        }
    }

    /// The expressions directly below.
    pub fn parts(&self) -> Vec<&Expr> {
        match self {
            Expr::Number(_) | Expr::Symbol(_) | Expr::Unit(_) | Expr::Constant(_) => vec![],
            Expr::Sum(parts) | Expr::Product(parts) | Expr::Call(_, parts) => parts.iter().collect(),
            Expr::Power(base, exponent) => vec![base, exponent],
            Expr::PlusMinus(inner) | Expr::Negative(inner) => vec![inner],
        }
    }

    /// Whether no more than `levels` expressions stand within one another. Goes down no further than that.
    pub fn is_within(&self, levels: u32) -> bool {
        levels > 0 && self.parts().into_iter().all(|part| part.is_within(levels - 1))
    }

    /// Returns how many expressions there are, this one included.
    pub fn size(&self) -> usize {
        1 + self.parts().into_iter().map(Expr::size).sum::<usize>()
    }

    /// Adds the names of the variables to a list, each once.
    pub fn variables<'e>(&'e self, names: &mut Vec<&'e str>) {
        match self {
            Expr::Symbol(name) if !names.contains(&name.as_str()) => names.push(name),
            _ => self.parts().into_iter().for_each(|part| part.variables(names)),
        }
    }

    /// Whether it has neither variables nor words.
    pub fn is_fixed(&self) -> bool {
        !self.any(&mut |of| matches!(of, Expr::Symbol(_) | Expr::Unit(_)))
    }

    /// Whether this or anything below it is so.
    pub fn any(&self, is: &mut impl FnMut(&Expr) -> bool) -> bool {
        is(self) || self.parts().into_iter().any(|part| part.any(is))
    }
}
