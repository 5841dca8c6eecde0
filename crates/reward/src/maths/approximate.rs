//! Evaluates expressions in floating point if a finite field cannot: functions, nested roots,
//! variable exponents.

use num_integer::Integer;

use super::expression::{Expr, MathConstant, MathFunction};
use super::field::{EvaluationPoint, to_exact_rational};

/// A complex number in floating point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Complex {
    pub re: f64,
    pub im: f64,
}

impl Complex {
    pub fn from_real(re: f64) -> Self {
        Complex { re, im: 0.0 }
    }

    fn plus(self, other: Self) -> Self {
        Complex { re: self.re + other.re, im: self.im + other.im }
    }

    fn times(self, other: Self) -> Self {
        Complex {
            re: self.re * other.re - self.im * other.im,
            im: self.re * other.im + self.im * other.re,
        }
    }

    fn divide(self, other: Self) -> Self {
        let norm = other.re * other.re + other.im * other.im;
        self.times(Complex { re: other.re / norm, im: -other.im / norm })
    }

    pub fn size(self) -> f64 {
        self.re.hypot(self.im)
    }

    fn ln(self) -> Self {
        Complex { re: self.size().ln(), im: self.im.atan2(self.re) }
    }

    fn exp(self) -> Self {
        let size = self.re.exp();
        Complex { re: size * self.im.cos(), im: size * self.im.sin() }
    }

    fn power(self, exponent: Complex) -> Self {
        if exponent.im == 0.0 && exponent.re.fract() == 0.0 && exponent.re.abs() < 1e6 {
            if self.im == 0.0 {
                return Complex::from_real(self.re.powi(exponent.re as i32));
            }
            let mut remaining = exponent.re.abs() as u32;
            let mut base = self;
            let mut product = Complex::from_real(1.0);
            while remaining > 0 {
                if remaining & 1 == 1 {
                    product = product.times(base);
                }
                base = base.times(base);
                remaining >>= 1;
            }
            return if exponent.re < 0.0 {
                Complex::from_real(1.0).divide(product)
            } else {
                product
            };
        }
        if self.im == 0.0 && self.re >= 0.0 && exponent.im == 0.0 {
            return Complex::from_real(self.re.powf(exponent.re));
        }
        self.ln().times(exponent).exp()
    }

    /// Returns whether the distance to `other` is at most `fraction` of the larger size, or almost
    /// 0.
    pub fn is_near(self, other: Self, fraction: f64) -> bool {
        let far = Complex { re: self.re - other.re, im: self.im - other.im }.size();
        far <= fraction * self.size().max(other.size()) || far <= 1e-13
    }
}

/// Returns the floating-point value of an expression at a point, or `None` if it is undefined or
/// too large.
pub(super) fn evaluate(expression: &Expr, at: EvaluationPoint) -> Option<Complex> {
    let found = match expression {
        Expr::Number(literal) => {
            Complex::from_real(format!("{}e{}", literal.digits, literal.scale).parse().ok()?)
        }
        // In −3..=3, and not close to 0.
        Expr::Symbol(name) | Expr::Unit(name) => {
            let hash = at.hash_name(name);
            let size = 0.25 + 2.75 * (hash >> 11) as f64 / (1u64 << 53) as f64;
            // The first points are positive, because more expressions have values there.
            Complex::from_real(if at.0 % 4 >= 2 && hash & 1 == 1 { -size } else { size })
        }
        Expr::Constant(constant) => match constant {
            MathConstant::Pi => Complex::from_real(std::f64::consts::PI),
            MathConstant::E => Complex::from_real(std::f64::consts::E),
            MathConstant::I => Complex { re: 0.0, im: 1.0 },
            MathConstant::Degree => Complex::from_real(std::f64::consts::PI / 180.0),
            MathConstant::Infinity => return None,
        },
        Expr::Negative(inner) => evaluate(inner, at)?.times(Complex::from_real(-1.0)),
        Expr::Sum(parts) => parts
            .iter()
            .try_fold(Complex::from_real(0.0), |sum, part| Some(sum.plus(evaluate(part, at)?)))?,
        Expr::Product(parts) => {
            parts.iter().try_fold(Complex::from_real(1.0), |product, part| {
                Some(product.times(evaluate(part, at)?))
            })?
        }
        Expr::Power(base, exponent) => {
            let base = evaluate(base, at)?;
            // Takes the real root of odd degree, so that √[3]{−8} is −2.
            if base.im == 0.0
                && base.re < 0.0
                && let Some(fraction) = to_exact_rational(exponent)
                && fraction.denominator().is_odd()
                && !fraction.is_integer()
            {
                let sign = if fraction.numerator().is_even() { 1.0 } else { -1.0 };
                Complex::from_real(sign * (-base.re).powf(fraction.to_f64()))
            } else {
                base.power(evaluate(exponent, at)?)
            }
        }
        Expr::Call(function, arguments) => {
            let arguments: Option<Vec<Complex>> =
                arguments.iter().map(|argument| evaluate(argument, at)).collect();
            call_function(*function, &arguments?)?
        }
        Expr::PlusMinus(_) => return None,
    };
    (found.re.is_finite() && found.im.is_finite()).then_some(found)
}

fn call_function(function: MathFunction, arguments: &[Complex]) -> Option<Complex> {
    use MathFunction as F;
    if let (F::Abs, [argument]) = (function, arguments) {
        return Some(Complex::from_real(argument.size()));
    }
    if let (F::Ln, [argument]) = (function, arguments) {
        return Some(argument.ln());
    }
    if let (F::Log, [base, argument]) = (function, arguments) {
        return Some(argument.ln().divide(base.ln()));
    }
    let real: Vec<f64> = arguments
        .iter()
        .filter(|argument| argument.im == 0.0)
        .map(|argument| argument.re)
        .collect();
    if real.len() < arguments.len() {
        return None;
    }
    let value = match (function, &real[..]) {
        (F::Floor, [x]) => x.floor(),
        (F::Ceiling, [x]) => x.ceil(),
        (F::Sin, [x]) => x.sin(),
        (F::Cos, [x]) => x.cos(),
        (F::Tan, [x]) => x.tan(),
        (F::Cot, [x]) => 1.0 / x.tan(),
        (F::Sec, [x]) => 1.0 / x.cos(),
        (F::Csc, [x]) => 1.0 / x.sin(),
        (F::Arcsin, [x]) => x.asin(),
        (F::Arccos, [x]) => x.acos(),
        (F::Arctan, [x]) => x.atan(),
        (F::Sinh, [x]) => x.sinh(),
        (F::Cosh, [x]) => x.cosh(),
        (F::Tanh, [x]) => x.tanh(),
        (F::Max, several) => several.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        (F::Min, several) => several.iter().copied().fold(f64::INFINITY, f64::min),
        (F::Factorial, [x]) if x.fract() == 0.0 && (0.0..=170.0).contains(x) => {
            (1..=*x as u32).map(f64::from).product()
        }
        (F::Binomial, [n, k]) if k.fract() == 0.0 && (0.0..=1000.0).contains(k) => {
            (0..*k as u32).map(|j| (n - f64::from(j)) / f64::from(j + 1)).product()
        }
        _ => return None,
    };
    Some(Complex::from_real(value))
}
