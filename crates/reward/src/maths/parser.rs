//! Parses tokens into expressions.

mod slices;

use super::expression::{Expr, MathConstant, MathFunction, NumberLiteral};
use super::field::to_exact_rational;
use super::lexer::Token;
use super::names::RELATIONS;
use super::series::{self, determinant};
use crate::words;
pub(super) use slices::{
    closing_bracket_index, split_matrix_rows, split_outside_brackets, split_row_cells,
};

/// Maximum nesting depth of groups in an expression.
const DEPTH: u32 = 40;

/// Maximum nesting depth of operations. It bounds the recursion of functions that traverse an
/// expression.
const HEIGHT: u32 = 400;

/// Maximum number of items in an answer.
pub(super) const ITEMS: usize = 100;

/// A parser of mathematical expressions, at a position in a list of tokens.
struct ExpressionParser<'t> {
    tokens: &'t [Token],
    at: usize,
    depth: u32,
    /// Number of open bars of absolute values.
    bars: u32,
    /// Whether the tokens are a cell of a determinant. Such a cell cannot contain further
    /// determinants.
    is_cell: bool,
}

/// Parses all tokens as one expression. Returns `None` if they are not an expression, or are nested
/// too deeply.
pub(super) fn parse_expression(tokens: &[Token]) -> Option<Expr> {
    let mut parser = ExpressionParser::new(tokens, 0);
    let whole = parser.parse_top_level()?;
    (parser.at == tokens.len() && whole.is_within(HEIGHT)).then_some(whole)
}

impl<'t> ExpressionParser<'t> {
    fn new(tokens: &'t [Token], depth: u32) -> Self {
        ExpressionParser { tokens, at: 0, depth, bars: 0, is_cell: false }
    }

    /// Parses a sum, or two sums separated by `\over` or `\choose`.
    fn parse_top_level(&mut self) -> Option<Expr> {
        let top = self.parse_sum()?;
        match self.peek() {
            Some(Token::Command(name)) if name == "over" => {
                self.at += 1;
                Some(Expr::Product(vec![top, self.parse_sum()?.inverse()]))
            }
            Some(Token::Command(name)) if name == "choose" => {
                self.at += 1;
                Some(Expr::Call(MathFunction::Binomial, vec![top, self.parse_sum()?]))
            }
            _ => Some(top),
        }
    }

    /// Returns whether a measure in a smaller unit follows a measure, as in 5 feet 3 inches.
    fn continues_measure(&self) -> bool {
        let is_unit = |token: Option<&Token>| matches!(token, Some(Token::Text(word)) if words::parse_units(word).is_some());
        let before = self.at.checked_sub(1).and_then(|at| self.tokens.get(at));
        matches!(self.peek(), Some(Token::Number { .. }))
            && is_unit(before)
            && is_unit(self.tokens.get(self.at + 1))
    }

    fn peek(&self) -> Option<&'t Token> {
        self.tokens.get(self.at)
    }

    fn take_sign(&mut self, sign: char) -> bool {
        let is_next = self.peek() == Some(&Token::Sign(sign));
        self.at += usize::from(is_next);
        is_next
    }

    /// Runs `read` one nesting level deeper. Returns `None` at the maximum depth.
    fn parse_nested<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth == DEPTH {
            return None;
        }
        self.depth += 1;
        let done = read(self);
        self.depth -= 1;
        done
    }

    fn parse_sum(&mut self) -> Option<Expr> {
        let mut terms = Vec::new();
        loop {
            let mut negative = false;
            let mut both = false;
            while let Some(Token::Sign(sign @ ('+' | '-' | '±'))) = self.peek() {
                self.at += 1;
                negative ^= *sign == '-';
                both |= *sign == '±';
            }
            let mut term = self.parse_product()?;
            if negative {
                term = Expr::Negative(Box::new(term));
            }
            if both {
                term = Expr::PlusMinus(Box::new(term));
            }
            terms.push(term);
            if !matches!(self.peek(), Some(Token::Sign('+' | '-' | '±')))
                && !self.continues_measure()
            {
                break;
            }
        }
        if terms.len() == 1 { terms.pop() } else { Some(Expr::Sum(terms)) }
    }

    fn parse_product(&mut self) -> Option<Expr> {
        let mut factors = vec![self.parse_power()?];
        loop {
            if self.take_sign('*') {
                factors.push(self.parse_signed_factor()?);
            } else if self.take_sign('/') || self.take_sign(':') {
                factors.push(self.parse_signed_factor()?.inverse());
            } else if matches!(self.peek(), Some(Token::Command(name)) if name == "mod") {
                self.at += 1;
                let dividend =
                    if factors.len() == 1 { factors.remove(0) } else { Expr::Product(factors) };
                factors = vec![Expr::Call(
                    MathFunction::Modulo,
                    vec![dividend, self.parse_signed_factor()?],
                )];
            } else if self.continues_measure() {
                break;
            } else if self.starts_factor() {
                // Two adjacent measures are not a product.
                let measured = |factor: &Expr| !matches!(factor, Expr::Unit(_));
                if matches!(self.peek(), Some(Token::Number { .. }))
                    && matches!(factors.last(), Some(Expr::Unit(_)))
                    && factors.iter().any(measured)
                {
                    return None;
                }
                let factor = self.parse_juxtaposed(factors.last()?)?;
                match factor {
                    // A mixed number.
                    Ok(part) => {
                        let integer = factors.pop()?;
                        factors.push(Expr::Sum(vec![integer, part]));
                    }
                    Err(factor) => factors.push(factor),
                }
            } else {
                break;
            }
        }
        if factors.len() == 1 { factors.pop() } else { Some(Expr::Product(factors)) }
    }

    /// Parses the factor after an operator, which may have a sign.
    fn parse_signed_factor(&mut self) -> Option<Expr> {
        if self.take_sign('-') {
            return self
                .parse_nested(Self::parse_signed_factor)
                .map(|factor| Expr::Negative(Box::new(factor)));
        }
        self.take_sign('+');
        self.parse_power()
    }

    fn starts_factor(&self) -> bool {
        match self.peek() {
            Some(Token::Number { .. } | Token::Letter(_) | Token::Text(_) | Token::GroupOpen) => {
                true
            }
            Some(Token::Open(open)) => *open != '{',
            Some(Token::Begin(name)) => name == "vmatrix",
            Some(Token::Command(name)) => {
                !["over", "choose", "mod", "pmod"].contains(&name.as_str())
            }
            Some(Token::Sign('|')) => self.bars == 0,
            _ => false,
        }
    }

    /// Parses a factor that directly follows the factor `before`. The inner result is `Ok` if the
    /// two factors form a mixed number.
    fn parse_juxtaposed(&mut self, before: &Expr) -> Option<Result<Expr, Expr>> {
        let after_integer = matches!(before, Expr::Number(literal) if literal.is_integer());
        match self.peek() {
            Some(Token::Command(name)) if name == "frac" && after_integer => {
                let fraction = self.parse_power()?;
                Some(if is_fraction(&fraction) { Ok(fraction) } else { Err(fraction) })
            }
            // A fraction after a space forms a mixed number: 1 1/2.
            Some(Token::Number { spaced: true, .. }) if after_integer => {
                let top = self.parse_power()?;
                if !self.take_sign('/') {
                    return None;
                }
                let fraction = Expr::Product(vec![top, self.parse_power()?.inverse()]);
                is_fraction(&fraction).then_some(Ok(fraction))
            }
            // Two adjacent numbers are not a product.
            Some(Token::Number { .. }) if matches!(before, Expr::Number(_)) => None,
            _ => self.parse_power().map(Err),
        }
    }

    fn parse_power(&mut self) -> Option<Expr> {
        let base = self.parse_postfix()?;
        if !self.take_sign('^') {
            return Some(base);
        }
        // A degree sign.
        if self.peek() == Some(&Token::Sign('°')) {
            self.at += 1;
            return Some(Expr::Product(vec![base, Expr::Constant(MathConstant::Degree)]));
        }
        if let [Token::GroupOpen, Token::Sign('°'), Token::GroupClose, ..] = self.tokens[self.at..]
        {
            self.at += 3;
            return Some(Expr::Product(vec![base, Expr::Constant(MathConstant::Degree)]));
        }
        let exponent = self.parse_nested(|p| {
            if p.take_sign('-') {
                return p.parse_power().map(|power| Expr::Negative(Box::new(power)));
            }
            p.parse_power()
        })?;
        if matches!(&exponent, Expr::Unit(unit) if ["th", "st", "nd", "rd"].contains(&unit.as_str()))
        {
            return Some(base);
        }
        Some(Expr::Power(Box::new(base), Box::new(exponent)))
    }

    fn parse_postfix(&mut self) -> Option<Expr> {
        let mut inner = self.parse_primary()?;
        loop {
            if self.take_sign('!') {
                inner = Expr::Call(MathFunction::Factorial, vec![inner]);
            } else if self.take_sign('°') {
                inner = Expr::Product(vec![inner, Expr::Constant(MathConstant::Degree)]);
            } else if self.take_sign('%') {
                // A percentage within an expression. `quantity` handles a percentage that is the
                // complete answer.
                inner = Expr::Product(vec![inner, Expr::integer(100).inverse()]);
            } else if self.peek() == Some(&Token::Sign('_'))
                && let Expr::Number(literal) = &inner
            {
                self.at += 1;
                let base = self.parse_subscript()?;
                inner =
                    literal.in_base(base.parse().ok().or_else(|| words::word_to_number(&base))?)?;
            } else if self.peek() == Some(&Token::Sign('\''))
                && let Expr::Symbol(name) = &mut inner
            {
                self.at += 1;
                name.push('\'');
            } else {
                return Some(inner);
            }
        }
    }

    fn parse_primary(&mut self) -> Option<Expr> {
        let token = self.peek()?;
        self.at += 1;
        match token {
            Token::Number { digits, scale, decimal, .. } => {
                self.parse_number(digits, *scale, *decimal)
            }
            Token::Letter(name) => {
                let mut name = name.clone();
                if self.take_sign('_') {
                    name.push('_');
                    name.push_str(&self.parse_subscript()?);
                }
                Some(match name.as_str() {
                    "e" => Expr::Constant(MathConstant::E),
                    "i" => Expr::Constant(MathConstant::I),
                    _ => Expr::Symbol(name),
                })
            }
            // Symbols of units are case-sensitive: MW and mW.
            Token::Text(word) => {
                let lower = word.to_lowercase();
                let is_sign = word.chars().nth(1).is_none()
                    || words::parse_units(word) != words::parse_units(&lower);
                Some(Expr::Unit(if is_sign { word.clone() } else { lower }))
            }
            Token::Begin(name) if name == "vmatrix" => self.parse_determinant(),
            Token::GroupOpen => self.parse_until(|token| *token == Token::GroupClose),
            Token::Open(open @ ('(' | '[' | '⌊' | '⌈')) => {
                let inner = self.parse_until(
                    |token| matches!(token, Token::Close(close) if is_matching_bracket(*open, *close)),
                )?;
                Some(match open {
                    '⌊' => Expr::Call(MathFunction::Floor, vec![inner]),
                    '⌈' => Expr::Call(MathFunction::Ceiling, vec![inner]),
                    _ => inner,
                })
            }
            // |A| of a matrix.
            Token::Sign('|') if matches!(self.peek(), Some(Token::Begin(_))) => {
                self.at += 1;
                let found = self.parse_determinant();
                self.take_sign('|').then_some(found?)
            }
            Token::Sign('|') => {
                self.bars += 1;
                let inner = self.parse_until(|token| *token == Token::Sign('|'));
                self.bars -= 1;
                Some(Expr::Call(MathFunction::Abs, vec![inner?]))
            }
            Token::Command(name) => self.parse_command(name),
            _ => None,
        }
    }

    /// Parses the determinant of the matrix after its `Begin` token.
    fn parse_determinant(&mut self) -> Option<Expr> {
        if self.is_cell {
            return None;
        }
        let length = closing_bracket_index(&self.tokens[self.at - 1..])?;
        let inner = &self.tokens[self.at..self.at - 1 + length];
        self.at += length;
        let cell = |tokens| {
            let mut parser =
                ExpressionParser { is_cell: true, ..ExpressionParser::new(tokens, self.depth + 1) };
            let value = parser.parse_nested(Self::parse_top_level)?;
            (parser.at == tokens.len()).then_some(value)
        };
        let rows: Option<Vec<Vec<Expr>>> = split_matrix_rows(inner)
            .map(|row| split_row_cells(row).into_iter().map(cell).collect())
            .collect();
        determinant(&rows?)
    }

    /// Parses the terms of `\sum_{k=1}^{4} k`, or the factors of `\prod`.
    fn parse_series(&mut self) -> Option<Vec<Expr>> {
        if !self.take_sign('_') || self.peek() != Some(&Token::GroupOpen) {
            return None;
        }
        let [Token::GroupOpen, Token::Letter(index), Token::Sign('='), ..] =
            &self.tokens[self.at..]
        else {
            return None;
        };
        self.at += 3;
        let from = self.parse_until(|token| *token == Token::GroupClose)?;
        if !self.take_sign('^') {
            return None;
        }
        let to = self.parse_argument()?;
        let body = self.parse_nested(Self::parse_product)?;
        series::expand_terms(&body, index, &to_exact_rational(&from)?, &to_exact_rational(&to)?)
    }

    /// Parses a sum up to the token for which `closes` returns true.
    fn parse_until(&mut self, closes: impl Fn(&Token) -> bool) -> Option<Expr> {
        let inner = self.parse_nested(Self::parse_top_level)?;
        let is_closed = self.peek().is_some_and(closes);
        self.at += 1;
        is_closed.then_some(inner)
    }

    fn parse_number(&mut self, digits: &str, scale: i32, decimal: bool) -> Option<Expr> {
        let literal = |digits: &str, scale| {
            let digits = if digits.is_empty() { "0" } else { digits };
            Expr::Number(NumberLiteral { digits: digits.to_owned(), scale, decimal })
        };
        let repeating = match &self.tokens[self.at..] {
            [
                Token::Command(name),
                Token::GroupOpen,
                Token::Number { digits, .. },
                Token::GroupClose,
                ..,
            ] if ["overline", "dot"].contains(&name.as_str()) && decimal => digits,
            _ => return Some(literal(digits, scale)),
        };
        self.at += 4;
        // 0.1666… is 0.1 + 6 / 9 / 10.
        let exact = |digits: &str, scale| {
            Expr::Number(NumberLiteral { decimal: false, digits: digits.into(), scale })
        };
        let nines = "9".repeat(repeating.len());
        let part = Expr::Product(vec![exact(repeating, scale), exact(&nines, 0).inverse()]);
        Some(Expr::Sum(vec![exact(if digits.is_empty() { "0" } else { digits }, scale), part]))
    }

    /// Parses a subscript, and returns its text.
    fn parse_subscript(&mut self) -> Option<String> {
        self.take_sign('_');
        let start = self.at;
        if self.peek()? == &Token::GroupOpen {
            self.at += closing_bracket_index(&self.tokens[self.at..])? + 1;
        } else {
            self.at += 1;
        }
        let inside = self.tokens[start..self.at].iter().map(|token| match token {
            Token::Number { digits, .. } => digits.clone(),
            Token::Letter(name) | Token::Text(name) | Token::Command(name) => name.clone(),
            Token::Sign(sign) => sign.to_string(),
            _ => String::new(),
        });
        Some(inside.collect())
    }

    fn parse_command(&mut self, name: &str) -> Option<Expr> {
        use MathFunction as F;
        match name {
            "pi" => return Some(Expr::Constant(MathConstant::Pi)),
            "infty" => return Some(Expr::Constant(MathConstant::Infinity)),
            "frac" => {
                let top = self.parse_argument()?;
                let bottom = self.parse_argument()?;
                return Some(Expr::Product(vec![top, bottom.inverse()]));
            }
            "binom" => {
                return Some(Expr::Call(
                    F::Binomial,
                    vec![self.parse_argument()?, self.parse_argument()?],
                ));
            }
            "sqrt" => {
                let mut degree = Expr::integer(2);
                if self.peek() == Some(&Token::Open('[')) {
                    self.at += 1;
                    degree = self.parse_until(|token| *token == Token::Close(']'))?;
                }
                let radicand = self.parse_argument()?;
                return Some(Expr::Power(Box::new(radicand), Box::new(degree.inverse())));
            }
            "sum" => return self.parse_series().map(Expr::Sum),
            "prod" => return self.parse_series().map(Expr::Product),
            "det" => {
                let brackets = matches!(self.peek(), Some(Token::Open(_)));
                self.at += usize::from(brackets) + 1;
                let Some(Token::Begin(_)) = self.tokens.get(self.at - 1) else { return None };
                let found = self.parse_determinant()?;
                self.at += usize::from(brackets);
                return Some(found);
            }
            // A segment, or a number whose digits are letters.
            "overline" => {
                let name = self.parse_subscript()?;
                return name
                    .chars()
                    .all(char::is_alphabetic)
                    .then(|| Expr::Symbol(format!("\\overline{{{name}}}")));
            }
            "exp" => {
                let of = self.parse_operand()?;
                return Some(Expr::Power(Box::new(Expr::Constant(MathConstant::E)), Box::new(of)));
            }
            _ => {}
        }
        let function = match name {
            "sin" => F::Sin,
            "cos" => F::Cos,
            "tan" => F::Tan,
            "cot" => F::Cot,
            "sec" => F::Sec,
            "csc" => F::Csc,
            "arcsin" => F::Arcsin,
            "arccos" => F::Arccos,
            "arctan" => F::Arctan,
            "sinh" => F::Sinh,
            "cosh" => F::Cosh,
            "tanh" => F::Tanh,
            "ln" => F::Ln,
            "log" => F::Log,
            "abs" => F::Abs,
            "floor" => F::Floor,
            "ceil" => F::Ceiling,
            "max" => F::Max,
            "min" => F::Min,
            "gcd" => F::Gcd,
            "lcm" => F::Lcm,
            // A letter with a LaTeX name, such as a Greek one.
            _ if name.chars().all(|c| c.is_ascii_alphabetic())
                && !["over", "choose", "pmod", "mod"].contains(&name)
                && !RELATIONS.contains(&name) =>
            {
                let subscript = if self.take_sign('_') {
                    format!("_{}", self.parse_subscript()?)
                } else {
                    String::new()
                };
                return Some(Expr::Symbol(format!("\\{name}{subscript}")));
            }
            _ => return None,
        };
        let mut base = Expr::integer(10);
        if function == F::Log && self.take_sign('_') {
            base = self.parse_argument()?;
        }
        // sin^2 x, and sin^{-1} x.
        let exponent =
            if self.take_sign('^') { Some(self.parse_nested(Self::parse_postfix)?) } else { None };
        let (function, exponent) = match (function, exponent) {
            (F::Sin, Some(power)) if is_minus_one(&power) => (F::Arcsin, None),
            (F::Cos, Some(power)) if is_minus_one(&power) => (F::Arccos, None),
            (F::Tan, Some(power)) if is_minus_one(&power) => (F::Arctan, None),
            other => other,
        };
        let arguments = match function {
            F::Max | F::Min | F::Gcd | F::Lcm => self.parse_arguments()?,
            F::Log => vec![base, self.parse_operand()?],
            _ => vec![self.parse_operand()?],
        };
        let call = Expr::Call(function, arguments);
        Some(match exponent {
            Some(exponent) => Expr::Power(Box::new(call), Box::new(exponent)),
            None => call,
        })
    }

    /// Parses the argument of a LaTeX command: a group, or the next token. (The lexer has separated
    /// digits.)
    fn parse_argument(&mut self) -> Option<Expr> {
        if self.take_sign('-') {
            return self
                .parse_nested(Self::parse_primary)
                .map(|expr| Expr::Negative(Box::new(expr)));
        }
        self.parse_nested(Self::parse_primary)
    }

    /// Parses the arguments of a function in brackets, separated by commas.
    fn parse_arguments(&mut self) -> Option<Vec<Expr>> {
        let end = self.at + closing_bracket_index(&self.tokens[self.at..])?;
        let inner = self.tokens.get(self.at + 1..end)?;
        self.at = end + 1;
        let depth = self.depth;
        split_outside_brackets(inner, Token::is_separator)
            .into_iter()
            .map(|part| {
                let mut parser = ExpressionParser {
                    is_cell: self.is_cell,
                    ..ExpressionParser::new(part, depth + 1)
                };
                let one = parser.parse_nested(Self::parse_sum)?;
                (parser.at == part.len()).then_some(one)
            })
            .collect()
    }

    /// Parses the operand of a function: a bracket, or factors up to an operator or another
    /// function.
    fn parse_operand(&mut self) -> Option<Expr> {
        self.parse_nested(|p| {
            if let Some(Token::Open(_) | Token::GroupOpen | Token::Sign('|')) = p.peek() {
                return p.parse_power();
            }
            let mut factors = vec![p.parse_signed_factor()?];
            while p.starts_factor() {
                let is_function = matches!(
                    p.peek(),
                    Some(Token::Open(_)) | Some(Token::Text(_))
                ) || matches!(p.peek(), Some(Token::Command(name)) if !["pi", "frac", "sqrt"].contains(&name.as_str()) && !is_greek(name));
                if is_function {
                    break;
                }
                factors.push(p.parse_power()?);
            }
            if factors.len() == 1 { factors.pop() } else { Some(Expr::Product(factors)) }
        })
    }
}

fn is_greek(name: &str) -> bool {
    ["alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "omega"].contains(&name)
}

fn is_matching_bracket(open: char, close: char) -> bool {
    matches!((open, close), ('(', ')') | ('[', ']') | ('⌊', '⌊') | ('⌈', '⌈'))
}

/// Returns whether an expression is a quotient of integers.
fn is_fraction(expression: &Expr) -> bool {
    let is_integer = |expr: &Expr| matches!(expr, Expr::Number(literal) if literal.is_integer());
    let Expr::Product(factors) = expression else { return false };
    matches!(&factors[..], [top, Expr::Power(bottom, _)] if is_integer(top) && is_integer(bottom))
}

fn is_minus_one(expression: &Expr) -> bool {
    matches!(expression, Expr::Negative(one) if **one == Expr::integer(1))
}
