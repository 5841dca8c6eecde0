//! Wordings of arithmetic tasks: in symbols, in words, as steps, or as a story.
//!
//! Some wordings are reserved: training never uses them, so that an evaluation on them measures
//! generalization.

use super::task_rng::TaskRng;
use super::term::{Operator, Term};

/// Format of the text that replaces `{}` in a wording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Symbols, such as `(12 + 7) * 3`.
    Symbols,
    /// Nested phrases, such as `the product of 3 and the sum of 12 and 7`. A number that multiplies
    /// a phrase precedes the phrase, in the words and in the term.
    Nested,
    /// Spoken order, such as `12 plus 7 minus 3`, if reading from left to right agrees with
    /// precedence.
    Spoken,
    /// Instructions, such as `Multiply the result by 7. Add 3.`, with the first number as
    /// `{first}`. The condition of `Spoken` applies.
    Steps,
    /// A story with the numbers as `{a}`, `{b}`, `{c}`, for a term of exactly this shape whose
    /// result is not negative.
    Story(&'static str),
}

/// A wording of a task.
#[derive(Debug)]
pub(super) struct Wording {
    /// Name of the wording in [`Task::template`](super::Task::template).
    pub id: &'static str,
    /// Whether the wording is never used in training.
    pub reserved: bool,
    form: Form,
    text: &'static str,
}

const fn trained(id: &'static str, form: Form, text: &'static str) -> Wording {
    Wording { id, reserved: false, form, text }
}

const fn reserved(id: &'static str, form: Form, text: &'static str) -> Wording {
    Wording { id, reserved: true, form, text }
}

const WORDINGS: &[Wording] = &[
    trained("symbols-what-is", Form::Symbols, "What is {}?"),
    trained("symbols-calculate", Form::Symbols, "Calculate {}."),
    trained("symbols-compute", Form::Symbols, "Compute {}."),
    trained("symbols-equals", Form::Symbols, "{} = ?"),
    trained("symbols-work-out", Form::Symbols, "Work out {}."),
    trained("symbols-value", Form::Symbols, "Find the value of {}."),
    trained("symbols-bare", Form::Symbols, "{}"),
    reserved("symbols-tell", Form::Symbols, "Could you tell me how much {} is?"),
    reserved("symbols-result", Form::Symbols, "I need the result of this: {}"),
    reserved("symbols-evaluate", Form::Symbols, "Please evaluate the expression {} for me."),
    trained("nested-what-is", Form::Nested, "What is {}?"),
    trained("nested-calculate", Form::Nested, "Calculate {}."),
    trained("nested-find", Form::Nested, "Find {}."),
    reserved("nested-tell", Form::Nested, "Tell me the number that is {}."),
    reserved("nested-homework", Form::Nested, "My homework asks for {}. What should I write?"),
    trained("spoken-what-is", Form::Spoken, "What is {}?"),
    trained("spoken-how-much", Form::Spoken, "How much is {}?"),
    reserved("spoken-make", Form::Spoken, "What do you get for {}?"),
    trained("steps-start", Form::Steps, "Start with {first}. {} What is the result?"),
    trained("steps-take", Form::Steps, "Take the number {first}. {} What number do you have now?"),
    reserved("steps-think", Form::Steps, "I think of {first}. {} Where do I end up?"),
    trained(
        "story-boxes",
        Form::Story("a * b - c"),
        "A warehouse has {a} shelves with {b} boxes on each. After {c} boxes are shipped, how many boxes are left?",
    ),
    trained(
        "story-library",
        Form::Story("a * b + c"),
        "A library buys {a} crates of books with {b} books in each, and is given {c} more. How many books does it get?",
    ),
    trained(
        "story-bus",
        Form::Story("a + b - c"),
        "A train carries {a} people. {b} people get on and then {c} people get off. How many people are on the train?",
    ),
    trained(
        "story-tickets",
        Form::Story("(a + b) * c"),
        "A theatre sells {a} tickets on Friday and {b} on Saturday. Each ticket costs {c} dollars. How many dollars does \
         it take in?",
    ),
    trained(
        "story-orchard",
        Form::Story("(a - b) * c"),
        "An orchard has {a} trees. A storm fells {b} of them. Each tree left gives {c} apples. How many apples are there?",
    ),
    trained(
        "story-savings",
        Form::Story("a - b - c"),
        "Mia has saved {a} dollars. She spends {b} dollars on a bicycle and {c} dollars on a trip. How many dollars are \
         left?",
    ),
    trained(
        "story-steps",
        Form::Story("a + b + c"),
        "Leo walked {a} steps on Monday, {b} on Tuesday and {c} on Wednesday. How many steps did he walk in all?",
    ),
    trained(
        "story-truck",
        Form::Story("a + b * c"),
        "A truck weighs {a} kilograms. It is loaded with {b} sacks of {c} kilograms each. How many kilograms does it weigh \
         now?",
    ),
    trained(
        "story-hotel",
        Form::Story("a * b * c"),
        "A town has {a} hotels with {b} floors each, and every floor has {c} rooms. How many rooms are there?",
    ),
    reserved(
        "story-bakery",
        Form::Story("a * b - c"),
        "A bakery bakes {a} trays with {b} rolls on each tray and sells {c} rolls. How many rolls does it still have?",
    ),
    reserved(
        "story-stamps",
        Form::Story("a * b + c"),
        "Ada fills {a} pages of her album with {b} stamps each and keeps {c} stamps in a tin. How many stamps does she own?",
    ),
    reserved(
        "story-votes",
        Form::Story("a + b + c"),
        "Three villages cast {a}, {b} and {c} votes. How many votes were cast together?",
    ),
    reserved(
        "story-wages",
        Form::Story("(a + b) * c"),
        "A firm employs {a} welders and {b} painters and pays each of them {c} dollars. How many dollars does it pay?",
    ),
    reserved(
        "story-gift",
        Form::Story("a * (b - c)"),
        "Each of {a} visitors gets {b} coins at the door and gives {c} of them back. How many coins do they keep in all?",
    ),
];

impl Wording {
    /// Samples a wording that fits the term, from the reserved wordings or from the others, in
    /// symbols or in words. If `stories` is false, stories are excluded.
    pub fn sample(
        term: &Term,
        reserved: bool,
        words: bool,
        stories: bool,
        sampler: &mut TaskRng,
    ) -> &'static Wording {
        let wanted = |w: &Wording| {
            w.reserved == reserved
                && (w.form == Form::Symbols) != words
                && (stories || !matches!(w.form, Form::Story(_)))
        };
        let fitting: Vec<&Wording> = WORDINGS.iter().filter(|w| wanted(w) && w.fits(term)).collect();
        // Symbols and nested phrases fit every term, so the list is never empty.
        fitting[sampler.below(fitting.len())]
    }

    /// Returns the term in the order in which the wording names its parts.
    pub fn ordered(&self, term: Term) -> Term {
        if self.form == Form::Nested { term.factor_first() } else { term }
    }

    /// Returns the name of the wording's format.
    pub fn form_name(&self) -> &'static str {
        match self.form {
            Form::Symbols => "symbols",
            Form::Nested => "nested",
            Form::Spoken => "spoken",
            Form::Steps => "steps",
            Form::Story(_) => "story",
        }
    }

    fn fits(&self, term: &Term) -> bool {
        match self.form {
            Form::Symbols | Form::Nested => true,
            Form::Spoken | Form::Steps => term.steps().is_some() && !term.symbols("*").contains('('),
            Form::Story(shape) => term.shape() == shape && term.value() >= 0,
        }
    }

    /// Returns the text of the question.
    pub fn render(&self, term: &Term, sampler: &mut TaskRng) -> String {
        match self.form {
            Form::Symbols => {
                let times = ["*", "×"][sampler.below(2)];
                self.text.replace("{}", &term.symbols(times))
            }
            Form::Nested => self.text.replace("{}", &phrase(term)),
            Form::Spoken => self.text.replace("{}", &spoken(term)),
            Form::Steps => {
                let (first, steps) = term.steps().unwrap_or_default();
                let steps: Vec<String> = steps.iter().map(|&(o, n)| step(o, n)).collect();
                self.text.replace("{first}", &first.to_string()).replace("{}", &steps.join(" "))
            }
            Form::Story(_) => ["{a}", "{b}", "{c}"]
                .iter()
                .zip(term.numbers())
                .fold(self.text.to_owned(), |text, (name, number)| text.replace(name, &number.to_string())),
        }
    }
}

/// Writes a term like [`nested`], but puts an addition or subtraction of a number at the outermost
/// level last: `the product of 12 and 7, minus 3`. This avoids nested lists, which are hard to
/// read.
fn phrase(term: &Term) -> String {
    let Term::Binary(operator, left, right) = term else { return nested(term) };
    match (operator, &**left, &**right) {
        (Operator::Plus, Term::Binary(..), Term::Number(number)) => {
            format!("{}, plus {number}", nested(left))
        }
        (Operator::Minus, Term::Binary(..), Term::Number(number)) => {
            format!("{}, minus {number}", nested(left))
        }
        _ => nested(term),
    }
}

/// Writes a term in prefix words, which are unambiguous without parentheses: the difference of a
/// and b is a − b.
fn nested(term: &Term) -> String {
    match term {
        Term::Number(number) => number.to_string(),
        Term::Binary(operator, left, right) => {
            let (left, right) = (nested(left), nested(right));
            match operator {
                Operator::Plus => format!("the sum of {left} and {right}"),
                Operator::Minus => format!("the difference of {left} and {right}"),
                Operator::Times => format!("the product of {left} and {right}"),
            }
        }
    }
}

fn spoken(term: &Term) -> String {
    term.symbols("times").replace(" + ", " plus ").replace(" - ", " minus ")
}

fn step(operator: Operator, number: i128) -> String {
    match operator {
        Operator::Plus => format!("Add {number}."),
        Operator::Minus => format!("Subtract {number}."),
        Operator::Times => format!("Multiply the result by {number}."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task_rng::Purpose;

    fn term(index: u64, operands: usize) -> (Term, TaskRng) {
        let mut sampler = TaskRng::new(2, Purpose::Training, index);
        let numbers: Vec<i128> = (0..operands).map(|_| 10 + sampler.below(9990) as i128).collect();
        (Term::sample(&numbers, &mut sampler), sampler)
    }

    #[test]
    fn every_wording_is_sampled_and_complete() {
        let mut seen = std::collections::BTreeSet::new();
        for index in 0..6000 {
            let (term, mut sampler) = term(index, 3);
            let (reserved, words) = (index % 2 == 0, index % 3 > 0);
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
                assert!(a.text != b.text || a.form != b.form, "{} {}", a.id, b.id);
            }
        }
    }

    #[test]
    fn words_describe_the_term() {
        let number = |n| Box::new(Term::Number(n));
        let sum = Term::Binary(Operator::Plus, number(12), number(7));
        let product = Term::Binary(Operator::Times, Box::new(sum.clone()), number(3));
        let difference = Term::Binary(Operator::Minus, number(40), Box::new(sum.clone()));
        assert_eq!(nested(&product), "the product of the sum of 12 and 7 and 3");
        assert_eq!(phrase(&product.clone().factor_first()), "the product of 3 and the sum of 12 and 7");
        assert_eq!(difference.clone().factor_first(), difference);
        let rest = Term::Binary(Operator::Minus, Box::new(sum.clone()), number(3));
        assert_eq!(phrase(&rest), "the sum of 12 and 7, minus 3");
        assert_eq!(phrase(&difference), "the difference of 40 and the sum of 12 and 7");
        assert_eq!(spoken(&sum), "12 plus 7");
        let find = |id: &str| WORDINGS.iter().find(|w| w.id == id).unwrap();
        let mut sampler = TaskRng::new(0, Purpose::Training, 0);
        let steps = find("steps-start");
        assert_eq!(steps.render(&sum, &mut sampler), "Start with 12. Add 7. What is the result?");
        assert!(!steps.fits(&difference));
        // "12 plus 7 times 3" would denote another number.
        assert!(
            !steps.fits(&product)
                && !find("spoken-what-is").fits(&product)
                && find("spoken-what-is").fits(&sum)
        );
        assert_eq!((difference.grouping(), product.grouping()), ("·(··)".into(), "(··)·".into()));
        assert!(find("story-tickets").fits(&product) && !find("story-tickets").fits(&difference));
    }
}
