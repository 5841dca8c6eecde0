//! Seeded generator of arithmetic tasks with exact integers, many wordings, and splits that cannot
//! overlap.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::expression::calculation;
use super::task_rng::{RngPurpose, TaskRng};
use super::term::Term;
use super::wording::Wording;
use super::{DemonstratedCall, Demonstration, Task, TaskError, TaskRow};

/// Inverse of the fraction of operand sets that are held out from training.
const HELD_OUT_FRACTION: u64 = 8;

/// Options of generated arithmetic tasks: number and size of the operands, and wordings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ArithmeticOptions {
    /// Number of operands in an expression, from 2 to 6.
    pub operands: u32,
    /// Minimum number of decimal digits of an operand, at least 1.
    pub min_digits: u32,
    /// Maximum number of decimal digits of an operand, at most 6. All numbers of digits are equally
    /// likely.
    pub max_digits: u32,
    /// Fraction of tasks that are in words, from 0 to 1. The remaining tasks are in symbols.
    pub words: f64,
    /// Whether a task in words may be a story, in which the operations are not named.
    pub stories: bool,
}

impl Default for ArithmeticOptions {
    fn default() -> Self {
        ArithmeticOptions { operands: 3, min_digits: 2, max_digits: 4, words: 0.5, stories: true }
    }
}

/// Part of a generator's tasks, for training or for evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Tasks for training.
    Train,
    /// Wordings that occur in training, with operands that never occur in training.
    HeldOut,
    /// Wordings that never occur in training, with operands that never occur in training.
    HeldOutWording,
}

/// Generator of arithmetic tasks. Task i of a split is a pure function of options, seed, split and
/// i.
///
/// Held-out tasks share no set of operands with training tasks, **whatever the seeds of the two**:
/// the hash of a set decides which side it belongs to. Evaluations are therefore unbiased for any
/// run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arithmetic {
    options: ArithmeticOptions,
    seed: u64,
}

impl Arithmetic {
    /// Creates a generator from options and a seed.
    ///
    /// # Errors
    /// Returns [`TaskError::Option`] if an option is out of range.
    pub fn new(options: ArithmeticOptions, seed: u64) -> Result<Self, TaskError> {
        let ArithmeticOptions { operands, min_digits, max_digits, words, stories: _ } = options;
        check_option((2..=6).contains(&operands), "operands", operands.into(), "in 2..=6")?;
        check_option((1..=6).contains(&min_digits), "min_digits", min_digits.into(), "in 1..=6")?;
        check_option(
            (min_digits..=6).contains(&max_digits),
            "max_digits",
            max_digits.into(),
            "at least min_digits and at most 6",
        )?;
        check_option((0.0..=1.0).contains(&words), "words", words, "in 0..=1")?;
        Ok(Arithmetic { options, seed })
    }

    /// Returns task `index` (below 2⁵⁶) of a split. Its demonstration consists of one call of the
    /// calculator and the answer.
    pub fn task(&self, split: Split, index: u64) -> Task {
        let (purpose, name) = match split {
            Split::Train => (RngPurpose::Training, "train"),
            Split::HeldOut => (RngPurpose::HeldOut, "held-out"),
            Split::HeldOutWording => (RngPurpose::HeldOutWording, "held-out-wording"),
        };
        let mut sampler = TaskRng::new(self.seed, purpose, index);
        let numbers = loop {
            let numbers = self.sample_operands(&mut sampler);
            if is_held_out(&numbers) == (split != Split::Train) {
                break numbers;
            }
        };
        let term = Term::sample(&numbers, &mut sampler);
        let use_words = sampler.uniform() < self.options.words;
        let reserved = split == Split::HeldOutWording;
        let wording =
            Wording::sample(&term, reserved, use_words, self.options.stories, &mut sampler);
        let term = wording.reorder(term);
        let answer = term.value().to_string();
        let call = DemonstratedCall {
            content: String::new(),
            call: calculation(&term.to_symbols("*")),
            result: answer.clone(),
        };
        Task {
            id: format!("arithmetic-{name}-{}-{index}", self.seed),
            question: wording.render(&term, &mut sampler),
            messages: Vec::new(),
            agent: None,
            source: "arithmetic".to_owned(),
            template: Some(wording.id.to_owned()),
            kind: Some(format!("{} {}", wording.format_name(), term.to_grouping())),
            demonstration: Some(Demonstration {
                calls: vec![call],
                answer: format!("The answer is {answer}."),
            }),
            answer: Value::String(answer),
            answer_number: None,
            row: TaskRow::default(),
            measured_success: None,
            experience: None,
        }
    }

    fn sample_operands(&self, sampler: &mut TaskRng) -> Vec<i128> {
        let ArithmeticOptions { operands, min_digits, max_digits, .. } = self.options;
        let mut number = || {
            let digits =
                min_digits + sampler.uniform_index((max_digits - min_digits + 1) as usize) as u32;
            let min_value = 10usize.pow(digits - 1);
            (min_value + sampler.uniform_index(9 * min_value)) as i128
        };
        (0..operands).map(|_| number()).collect()
    }
}

fn check_option(
    ok: bool,
    name: &'static str,
    value: f64,
    range: &'static str,
) -> Result<(), TaskError> {
    if ok { Ok(()) } else { Err(TaskError::Option { name, value, range }) }
}

/// Returns whether a set of operands is held out. The decision uses a hash (FNV-1a, finished by a
/// multiplication) of the sorted numbers, so that neither their order nor the operators matter.
fn is_held_out(numbers: &[i128]) -> bool {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    for byte in sorted.iter().flat_map(|number| number.to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
    }
    // The low bits of FNV are weak.
    (hash ^ (hash >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32 & (HELD_OUT_FRACTION - 1) == 0
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::evaluate;

    const SPLITS: [Split; 3] = [Split::Train, Split::HeldOut, Split::HeldOutWording];

    fn expression_of_call(task: &Task) -> String {
        task.demonstration.as_ref().unwrap().calls[0].call.arguments["expression"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    fn parse_operands(task: &Task) -> Vec<i128> {
        let text = expression_of_call(task);
        let mut numbers: Vec<i128> =
            text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
        numbers.sort_unstable();
        numbers
    }

    #[test]
    fn generator_omits_stories_when_disabled() {
        let options =
            ArithmeticOptions { words: 1.0, stories: false, ..ArithmeticOptions::default() };
        let generator = Arithmetic::new(options, 3).unwrap();
        for split in SPLITS {
            let is_story = |i| generator.task(split, i).template.unwrap().starts_with("story");
            assert!(!(0..300).any(is_story));
        }
    }

    #[test]
    fn generated_answers_match_calculator() {
        let generator = Arithmetic::new(ArithmeticOptions::default(), 3).unwrap();
        for split in SPLITS {
            for index in 0..500 {
                let task = generator.task(split, index);
                let value = evaluate(&expression_of_call(&task)).unwrap().to_string();
                assert_eq!(task.answer, Value::String(value.clone()), "{}", task.question);
                let demonstration = task.demonstration.as_ref().unwrap();
                assert_eq!(demonstration.calls[0].result, value);
                assert!(demonstration.answer.contains(&value));
                let numbers = parse_operands(&task);
                assert_eq!(numbers.len(), 3);
                assert!(numbers.iter().all(|n| (10..10_000).contains(n)), "{}", task.question);
            }
        }
    }

    #[test]
    fn generated_task_is_deterministic() {
        let generator = Arithmetic::new(ArithmeticOptions::default(), 3).unwrap();
        let later = Arithmetic::new(ArithmeticOptions::default(), 3).unwrap();
        let other = Arithmetic::new(ArithmeticOptions::default(), 4).unwrap();
        for split in SPLITS {
            assert_eq!(generator.task(split, 17), later.task(split, 17));
            assert_ne!(generator.task(split, 17).question, generator.task(split, 18).question);
            assert_ne!(generator.task(split, 17).question, other.task(split, 17).question);
        }
    }

    #[test]
    fn splits_share_no_operands_across_seeds() {
        let options = ArithmeticOptions {
            operands: 2,
            min_digits: 1,
            max_digits: 2,
            words: 0.5,
            stories: true,
        };
        let of = |seed, split| -> BTreeSet<Vec<i128>> {
            let generator = Arithmetic::new(options, seed).unwrap();
            (0..3000).map(|index| parse_operands(&generator.task(split, index))).collect()
        };
        let train = of(1, Split::Train);
        assert!(train.is_disjoint(&of(2, Split::HeldOut)));
        assert!(train.is_disjoint(&of(3, Split::HeldOutWording)));
    }

    /// Even the smallest sets of operands occur on both sides, so that sampling terminates.
    #[test]
    fn both_splits_have_operands_for_every_number_of_digits() {
        for digits in 1..=6 {
            for operands in 2..=6 {
                let options = ArithmeticOptions {
                    operands,
                    min_digits: digits,
                    max_digits: digits,
                    words: 0.3,
                    stories: true,
                };
                let generator = Arithmetic::new(options, 0).unwrap();
                for split in SPLITS {
                    generator.task(split, 0);
                }
            }
        }
        let sampler: Vec<bool> = (0..8000).map(|n| is_held_out(&[n, n * n + 1, 77])).collect();
        let held_out = sampler.iter().filter(|h| **h).count();
        assert!((900..1100).contains(&held_out), "{held_out}");
    }

    #[test]
    fn training_uses_no_reserved_wordings() {
        let generator = Arithmetic::new(ArithmeticOptions::default(), 5).unwrap();
        let ids = |split| -> BTreeSet<String> {
            (0..2000).map(|index| generator.task(split, index).template.unwrap()).collect()
        };
        assert_eq!(ids(Split::Train), ids(Split::HeldOut));
        assert!(ids(Split::Train).is_disjoint(&ids(Split::HeldOutWording)));
    }

    #[test]
    fn fraction_of_tasks_in_words_matches_option() {
        assert_eq!((count_in_words(0.0), count_in_words(1.0)), (0, 1000));
        assert!((440..560).contains(&count_in_words(0.5)));
    }

    fn count_in_words(words: f64) -> usize {
        let generator =
            Arithmetic::new(ArithmeticOptions { words, ..Default::default() }, 1).unwrap();
        let symbols = |task: &Task| task.template.as_ref().unwrap().starts_with("symbols");
        (0..1000).filter(|&index| !symbols(&generator.task(Split::Train, index))).count()
    }

    #[test]
    fn options_out_of_range_are_rejected() {
        let fine = ArithmeticOptions::default();
        assert_eq!(
            options_error(ArithmeticOptions { operands: 1, ..fine }),
            "operands = 1, but it must be in 2..=6"
        );
        assert!(
            options_error(ArithmeticOptions { min_digits: 5, ..fine })
                .starts_with("max_digits = 4")
        );
        assert!(
            options_error(ArithmeticOptions { words: f64::NAN, ..fine }).starts_with("words = NaN")
        );
    }

    fn options_error(options: ArithmeticOptions) -> String {
        Arithmetic::new(options, 0).unwrap_err().to_string()
    }
}
