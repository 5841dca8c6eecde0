//! Wordings of arithmetic tasks: in symbols, in words, as steps, or as a story.
//!
//! Some wordings are reserved: training never uses them, so that an evaluation on them measures
//! generalization.

use super::task_rng::TaskRng;
use super::term::{ArithmeticOperator, Term};

/// Format in which a wording states the arithmetic expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WordingFormat {
    /// The expression is in symbols, such as `(12 + 7) * 3`.
    Symbols,
    /// The expression is in nested phrases, such as `the product of 3 and the sum of 12 and 7`. A
    /// number that multiplies a phrase precedes the phrase, in the words and in the term.
    Nested,
    /// The expression is in spoken order, such as `12 plus 7 minus 3`. Permitted only if reading
    /// from left to right agrees with precedence.
    Spoken,
    /// The expression becomes instructions, such as `Multiply the result by 7. Add 3.`, with the
    /// first number as `{first}`. The condition of `Spoken` applies.
    Steps,
    /// The expression becomes a story that contains the numbers as `{a}`, `{b}`, `{c}`. The term
    /// must have exactly this shape, and its result must not be negative.
    Story(&'static str),
}

/// A wording of an arithmetic task.
#[derive(Debug)]
pub(super) struct Wording {
    /// Name of the wording, as in [`Task::template`](super::Task::template).
    pub id: &'static str,
    /// Whether the wording is held out: it is never used in training.
    pub reserved: bool,
    format: WordingFormat,
    text: &'static str,
}

const fn training_wording(id: &'static str, format: WordingFormat, text: &'static str) -> Wording {
    Wording { id, reserved: false, format, text }
}

const fn reserved_wording(id: &'static str, format: WordingFormat, text: &'static str) -> Wording {
    Wording { id, reserved: true, format, text }
}

const WORDINGS: &[Wording] = &[
    training_wording("symbols-what-is", WordingFormat::Symbols, "What is {}?"),
    training_wording("symbols-calculate", WordingFormat::Symbols, "Calculate {}."),
    training_wording("symbols-compute", WordingFormat::Symbols, "Compute {}."),
    training_wording("symbols-equals", WordingFormat::Symbols, "{} = ?"),
    training_wording("symbols-work-out", WordingFormat::Symbols, "Work out {}."),
    training_wording("symbols-value", WordingFormat::Symbols, "Find the value of {}."),
    training_wording("symbols-bare", WordingFormat::Symbols, "{}"),
    reserved_wording("symbols-tell", WordingFormat::Symbols, "Could you tell me how much {} is?"),
    reserved_wording("symbols-result", WordingFormat::Symbols, "I need the result of this: {}"),
    reserved_wording(
        "symbols-evaluate",
        WordingFormat::Symbols,
        "Please evaluate the expression {} for me.",
    ),
    training_wording("nested-what-is", WordingFormat::Nested, "What is {}?"),
    training_wording("nested-calculate", WordingFormat::Nested, "Calculate {}."),
    training_wording("nested-find", WordingFormat::Nested, "Find {}."),
    reserved_wording("nested-tell", WordingFormat::Nested, "Tell me the number that is {}."),
    reserved_wording(
        "nested-homework",
        WordingFormat::Nested,
        "My homework asks for {}. What should I write?",
    ),
    training_wording("spoken-what-is", WordingFormat::Spoken, "What is {}?"),
    training_wording("spoken-how-much", WordingFormat::Spoken, "How much is {}?"),
    reserved_wording("spoken-make", WordingFormat::Spoken, "What do you get for {}?"),
    training_wording(
        "steps-start",
        WordingFormat::Steps,
        "Start with {first}. {} What is the result?",
    ),
    training_wording(
        "steps-take",
        WordingFormat::Steps,
        "Take the number {first}. {} What number do you have now?",
    ),
    reserved_wording(
        "steps-think",
        WordingFormat::Steps,
        "I think of {first}. {} Where do I end up?",
    ),
    training_wording(
        "story-boxes",
        WordingFormat::Story("a * b - c"),
        "A warehouse has {a} shelves with {b} boxes on each. After {c} boxes are shipped, how \
         many boxes are left?",
    ),
    training_wording(
        "story-library",
        WordingFormat::Story("a * b + c"),
        "A library buys {a} crates of books with {b} books in each, and is given {c} more. How \
         many books does it get?",
    ),
    training_wording(
        "story-bus",
        WordingFormat::Story("a + b - c"),
        "A train carries {a} people. {b} people get on and then {c} people get off. How many \
         people are on the train?",
    ),
    training_wording(
        "story-tickets",
        WordingFormat::Story("(a + b) * c"),
        "A theatre sells {a} tickets on Friday and {b} on Saturday. Each ticket costs {c} \
         dollars. How many dollars does it take in?",
    ),
    training_wording(
        "story-orchard",
        WordingFormat::Story("(a - b) * c"),
        "An orchard has {a} trees. A storm fells {b} of them. Each tree left gives {c} apples. \
         How many apples are there?",
    ),
    training_wording(
        "story-savings",
        WordingFormat::Story("a - b - c"),
        "Mia has saved {a} dollars. She spends {b} dollars on a bicycle and {c} dollars on a \
         trip. How many dollars are left?",
    ),
    training_wording(
        "story-steps",
        WordingFormat::Story("a + b + c"),
        "Leo walked {a} steps on Monday, {b} on Tuesday and {c} on Wednesday. How many steps did \
         he walk in all?",
    ),
    training_wording(
        "story-truck",
        WordingFormat::Story("a + b * c"),
        "A truck weighs {a} kilograms. It is loaded with {b} sacks of {c} kilograms each. How \
         many kilograms does it weigh now?",
    ),
    training_wording(
        "story-hotel",
        WordingFormat::Story("a * b * c"),
        "A town has {a} hotels with {b} floors each, and every floor has {c} rooms. How many \
         rooms are there?",
    ),
    reserved_wording(
        "story-bakery",
        WordingFormat::Story("a * b - c"),
        "A bakery bakes {a} trays with {b} rolls on each tray and sells {c} rolls. How many rolls \
         does it still have?",
    ),
    reserved_wording(
        "story-stamps",
        WordingFormat::Story("a * b + c"),
        "Ada fills {a} pages of her album with {b} stamps each and keeps {c} stamps in a tin. How \
         many stamps does she own?",
    ),
    reserved_wording(
        "story-votes",
        WordingFormat::Story("a + b + c"),
        "Three villages cast {a}, {b} and {c} votes. How many votes were cast together?",
    ),
    reserved_wording(
        "story-wages",
        WordingFormat::Story("(a + b) * c"),
        "A firm employs {a} welders and {b} painters and pays each of them {c} dollars. How many \
         dollars does it pay?",
    ),
    reserved_wording(
        "story-gift",
        WordingFormat::Story("a * (b - c)"),
        "Each of {a} visitors gets {b} coins at the door and gives {c} of them back. How many \
         coins do they keep in all?",
    ),
];

impl Wording {
    /// Samples a wording that fits the term. `reserved` selects the held-out wordings or the
    /// training wordings, and `use_words` selects words or symbols. If `stories` is false, stories
    /// are excluded.
    pub fn sample(
        term: &Term,
        reserved: bool,
        use_words: bool,
        stories: bool,
        sampler: &mut TaskRng,
    ) -> &'static Wording {
        let wanted = |w: &Wording| {
            w.reserved == reserved
                && (w.format == WordingFormat::Symbols) != use_words
                && (stories || !matches!(w.format, WordingFormat::Story(_)))
        };
        let fitting: Vec<&Wording> =
            WORDINGS.iter().filter(|w| wanted(w) && w.fits(term)).collect();
        // Symbols and nested phrases fit every term, so the list is never empty.
        fitting[sampler.uniform_index(fitting.len())]
    }

    /// Reorders the term to the order in which the wording names its parts.
    pub fn reorder(&self, term: Term) -> Term {
        if self.format == WordingFormat::Nested { term.move_factor_first() } else { term }
    }

    /// Returns the name of the wording's format.
    pub fn format_name(&self) -> &'static str {
        match self.format {
            WordingFormat::Symbols => "symbols",
            WordingFormat::Nested => "nested",
            WordingFormat::Spoken => "spoken",
            WordingFormat::Steps => "steps",
            WordingFormat::Story(_) => "story",
        }
    }

    fn fits(&self, term: &Term) -> bool {
        match self.format {
            WordingFormat::Symbols | WordingFormat::Nested => true,
            WordingFormat::Spoken | WordingFormat::Steps => {
                term.to_steps().is_some() && !term.to_symbols("*").contains('(')
            }
            WordingFormat::Story(shape) => term.to_shape() == shape && term.value() >= 0,
        }
    }

    /// Returns the text of the question that states `term` in this wording.
    pub fn render(&self, term: &Term, sampler: &mut TaskRng) -> String {
        match self.format {
            WordingFormat::Symbols => {
                let times = ["*", "×"][sampler.uniform_index(2)];
                self.text.replace("{}", &term.to_symbols(times))
            }
            WordingFormat::Nested => self.text.replace("{}", &phrase_with_last_step(term)),
            WordingFormat::Spoken => self.text.replace("{}", &spoken_phrase(term)),
            WordingFormat::Steps => {
                let (first, steps) = term.to_steps().unwrap_or_default();
                let steps: Vec<String> = steps.iter().map(|&(o, n)| describe_step(o, n)).collect();
                self.text.replace("{first}", &first.to_string()).replace("{}", &steps.join(" "))
            }
            WordingFormat::Story(_) => ["{a}", "{b}", "{c}"]
                .iter()
                .zip(term.numbers())
                .fold(self.text.to_owned(), |text, (name, number)| {
                    text.replace(name, &number.to_string())
                }),
        }
    }
}

/// Phrases a term like [`nested_phrase`], except that an outermost addition or subtraction of a
/// number comes last: `the product of 12 and 7, minus 3`. This avoids nested lists, which are hard
/// to read.
fn phrase_with_last_step(term: &Term) -> String {
    let Term::Binary(operator, lhs, rhs) = term else { return nested_phrase(term) };
    match (operator, &**lhs, &**rhs) {
        (ArithmeticOperator::Plus, Term::Binary(..), Term::Number(number)) => {
            format!("{}, plus {number}", nested_phrase(lhs))
        }
        (ArithmeticOperator::Minus, Term::Binary(..), Term::Number(number)) => {
            format!("{}, minus {number}", nested_phrase(lhs))
        }
        _ => nested_phrase(term),
    }
}

/// Phrases a term in prefix words, which are unambiguous without parentheses. For example, "the
/// difference of a and b" is a − b.
fn nested_phrase(term: &Term) -> String {
    match term {
        Term::Number(number) => number.to_string(),
        Term::Binary(operator, lhs, rhs) => {
            let lhs = nested_phrase(lhs);
            let rhs = nested_phrase(rhs);
            match operator {
                ArithmeticOperator::Plus => format!("the sum of {lhs} and {rhs}"),
                ArithmeticOperator::Minus => format!("the difference of {lhs} and {rhs}"),
                ArithmeticOperator::Times => format!("the product of {lhs} and {rhs}"),
            }
        }
    }
}

fn spoken_phrase(term: &Term) -> String {
    term.to_symbols("times").replace(" + ", " plus ").replace(" - ", " minus ")
}

fn describe_step(operator: ArithmeticOperator, number: i128) -> String {
    match operator {
        ArithmeticOperator::Plus => format!("Add {number}."),
        ArithmeticOperator::Minus => format!("Subtract {number}."),
        ArithmeticOperator::Times => format!("Multiply the result by {number}."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task_rng::RngPurpose;

    fn term(index: u64, operands: usize) -> (Term, TaskRng) {
        let mut sampler = TaskRng::new(2, RngPurpose::Training, index);
        let numbers: Vec<i128> =
            (0..operands).map(|_| 10 + sampler.uniform_index(9990) as i128).collect();
        (Term::sample(&numbers, &mut sampler), sampler)
    }

    #[test]
    fn every_wording_is_sampled_and_complete() {
        let mut seen = std::collections::BTreeSet::new();
        for index in 0..6000 {
            let (term, mut sampler) = term(index, 3);
            let reserved = index % 2 == 0;
            let words = index % 3 > 0;
            let wording = Wording::sample(&term, reserved, words, true, &mut sampler);
            assert_eq!(wording.reserved, reserved);
            let question = wording.render(&term, &mut sampler);
            assert!(!question.contains(['{', '}']), "{question}");
            for number in term.numbers() {
                assert!(question.contains(&number.to_string()), "{question}");
            }
            seen.insert(wording.id);
        }
        let all: std::collections::BTreeSet<_> = WORDINGS.iter().map(|w| w.id).collect();
        assert_eq!(seen, all);
        assert_eq!(all.len(), WORDINGS.len(), "ids are unique");
    }

    /// Training wordings and reserved wordings have no text in common.
    #[test]
    fn reserved_wordings_differ_from_training_wordings() {
        for a in WORDINGS.iter().filter(|w| w.reserved) {
            for b in WORDINGS.iter().filter(|w| !w.reserved) {
                assert!(a.text != b.text || a.format != b.format, "{} {}", a.id, b.id);
            }
        }
    }

    #[test]
    fn wording_describes_operations_of_term() {
        let sum = Term::Binary(ArithmeticOperator::Plus, number(12), number(7));
        let multiplication =
            Term::Binary(ArithmeticOperator::Times, Box::new(sum.clone()), number(3));
        let difference = Term::Binary(ArithmeticOperator::Minus, number(40), Box::new(sum.clone()));
        assert_eq!(nested_phrase(&multiplication), "the product of the sum of 12 and 7 and 3");
        assert_eq!(
            phrase_with_last_step(&multiplication.clone().move_factor_first()),
            "the product of 3 and the sum of 12 and 7"
        );
        assert_eq!(difference.clone().move_factor_first(), difference);
        let rest = Term::Binary(ArithmeticOperator::Minus, Box::new(sum.clone()), number(3));
        assert_eq!(phrase_with_last_step(&rest), "the sum of 12 and 7, minus 3");
        assert_eq!(
            phrase_with_last_step(&difference),
            "the difference of 40 and the sum of 12 and 7"
        );
        assert_eq!(spoken_phrase(&sum), "12 plus 7");
        let mut sampler = TaskRng::new(0, RngPurpose::Training, 0);
        let steps = wording("steps-start");
        assert_eq!(steps.render(&sum, &mut sampler), "Start with 12. Add 7. What is the result?");
        assert!(!steps.fits(&difference));
        // "12 plus 7 times 3" would denote another number.
        assert!(
            !steps.fits(&multiplication)
                && !wording("spoken-what-is").fits(&multiplication)
                && wording("spoken-what-is").fits(&sum)
        );
        assert_eq!(
            (difference.to_grouping(), multiplication.to_grouping()),
            ("·(··)".into(), "(··)·".into())
        );
        assert!(
            wording("story-tickets").fits(&multiplication)
                && !wording("story-tickets").fits(&difference)
        );
    }

    fn number(n: i128) -> Box<Term> {
        Box::new(Term::Number(n))
    }

    fn wording(id: &str) -> &'static Wording {
        WORDINGS.iter().find(|w| w.id == id).unwrap()
    }
}
