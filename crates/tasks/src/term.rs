//! Random arithmetic terms, and their notation in symbols.

use super::task_rng::TaskRng;

/// Arithmetic operator that joins two terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ArithmeticOperator {
    Plus,
    Minus,
    Times,
}

/// An arithmetic expression tree over integers.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Term {
    Number(i128),
    Binary(ArithmeticOperator, Box<Term>, Box<Term>),
}

impl Term {
    /// Samples a random tree over the numbers, which keep their order. Every way to split the
    /// numbers in two is equally likely. `numbers` must not be empty.
    pub fn sample(numbers: &[i128], sampler: &mut TaskRng) -> Term {
        if let [number] = numbers {
            return Term::Number(*number);
        }
        let (lhs, rhs) = numbers.split_at(1 + sampler.uniform_index(numbers.len() - 1));
        let operator =
            [ArithmeticOperator::Plus, ArithmeticOperator::Minus, ArithmeticOperator::Times]
                [sampler.uniform_index(3)];
        let lhs = Term::sample(lhs, sampler);
        Term::Binary(operator, Box::new(lhs), Box::new(Term::sample(rhs, sampler)))
    }

    /// Evaluates the term. A term with six numbers of six digits stays far within 128 bits.
    pub fn value(&self) -> i128 {
        match self {
            Term::Number(number) => *number,
            Term::Binary(operator, lhs, rhs) => match operator {
                ArithmeticOperator::Plus => lhs.value() + rhs.value(),
                ArithmeticOperator::Minus => lhs.value() - rhs.value(),
                ArithmeticOperator::Times => lhs.value() * rhs.value(),
            },
        }
    }

    /// Formats the term in symbols, with `times` for multiplication, and with parentheses only if
    /// they change the value.
    pub fn to_symbols(&self, times: &str) -> String {
        self.format_infix(times, &mut |number| number.to_string())
    }

    /// Formats the term with letters in place of numbers, such as `(a + b) * c`.
    pub fn to_shape(&self) -> String {
        let mut letters = 'a'..='z';
        self.format_infix("*", &mut |_| letters.next().unwrap_or('?').to_string())
    }

    /// Moves a number that multiplies a longer term before that term: `(12 + 7) * 3` becomes
    /// `3 * (12 + 7)`.
    pub fn move_factor_first(self) -> Term {
        match self {
            Term::Binary(ArithmeticOperator::Times, lhs, rhs)
                if matches!((&*lhs, &*rhs), (Term::Binary(..), Term::Number(_))) =>
            {
                Term::Binary(ArithmeticOperator::Times, rhs, lhs)
            }
            other => other,
        }
    }

    /// Formats only the parentheses of the term, with a dot for each number, such as `(··)·`.
    pub fn to_grouping(&self) -> String {
        self.to_shape()
            .chars()
            .filter_map(
                |c| if c.is_alphabetic() { Some('·') } else { "()".contains(c).then_some(c) },
            )
            .collect()
    }

    fn format_infix(&self, times: &str, leaf: &mut dyn FnMut(i128) -> String) -> String {
        match self {
            Term::Number(number) => leaf(*number),
            Term::Binary(operator, lhs, rhs) => {
                let level = self.precedence();
                let mut wrapped = |side: &Term, min_level: u8| {
                    let text = side.format_infix(times, leaf);
                    if side.precedence() < min_level { format!("({text})") } else { text }
                };
                let lhs = wrapped(lhs, level);
                // a − (b + c) needs its parentheses, a + (b + c) does not.
                let rhs = wrapped(
                    rhs,
                    if *operator == ArithmeticOperator::Minus { level + 1 } else { level },
                );
                let sign = match operator {
                    ArithmeticOperator::Plus => "+",
                    ArithmeticOperator::Minus => "-",
                    ArithmeticOperator::Times => times,
                };
                format!("{lhs} {sign} {rhs}")
            }
        }
    }

    fn precedence(&self) -> u8 {
        match self {
            Term::Binary(ArithmeticOperator::Times, ..) => 2,
            Term::Binary(..) => 1,
            Term::Number(_) => 3,
        }
    }

    /// Splits the term into its first number and the following steps, each an operator and a number
    /// that apply to the result so far. Returns `None` if the term is not such a chain.
    pub fn to_steps(&self) -> Option<(i128, Vec<(ArithmeticOperator, i128)>)> {
        match self {
            Term::Number(number) => Some((*number, Vec::new())),
            Term::Binary(operator, lhs, rhs) => {
                let Term::Number(number) = **rhs else { return None };
                let (first, mut steps) = lhs.to_steps()?;
                steps.push((*operator, number));
                Some((first, steps))
            }
        }
    }

    /// Returns the numbers of the term, from left to right.
    pub fn numbers(&self) -> Vec<i128> {
        match self {
            Term::Number(number) => vec![*number],
            Term::Binary(_, lhs, rhs) => [lhs.numbers(), rhs.numbers()].concat(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate;
    use crate::task_rng::RngPurpose;

    #[test]
    fn term_symbols_evaluate_to_term_value() {
        let mut shapes = std::collections::BTreeSet::new();
        for index in 0..2000 {
            let mut sampler = TaskRng::new(1, RngPurpose::Training, index);
            let numbers: Vec<i128> = (0..2 + sampler.uniform_index(4))
                .map(|_| 1 + sampler.uniform_index(50) as i128)
                .collect();
            let term = Term::sample(&numbers, &mut sampler);
            assert_eq!(term.numbers(), numbers);
            for times in ["*", "×"] {
                let text = term.to_symbols(times);
                assert_eq!(
                    evaluate(&text).unwrap().to_string(),
                    term.value().to_string(),
                    "{text}"
                );
            }
            if numbers.len() == 3 {
                shapes.insert(term.to_shape());
            }
        }
        // All operators occur on both levels, with parentheses if they matter.
        for shape in
            ["a + b - c", "(a + b) * c", "a * (b - c)", "a - (b - c)", "a - b * c", "a * b * c"]
        {
            assert!(shapes.contains(shape), "{shape} not in {shapes:?}");
        }
        assert!(!shapes.contains("a + (b + c)"));
    }

    #[test]
    fn term_steps_are_left_to_right_operations() {
        let sum = Term::Binary(ArithmeticOperator::Plus, number(1), number(2));
        let multiplication =
            Term::Binary(ArithmeticOperator::Times, Box::new(sum.clone()), number(3));
        assert_eq!(
            multiplication.to_steps(),
            Some((1, vec![(ArithmeticOperator::Plus, 2), (ArithmeticOperator::Times, 3)]))
        );
        assert_eq!(
            Term::Binary(ArithmeticOperator::Times, number(3), Box::new(sum)).to_steps(),
            None
        );
    }

    fn number(n: i128) -> Box<Term> {
        Box::new(Term::Number(n))
    }
}
