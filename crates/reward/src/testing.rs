//! Scorer input and random numbers for tests.

use std::sync::Arc;

use levade_tree::{AttemptId, Outcome, Trajectory};
use serde_json::Value;

use crate::ScorerInput;

/// Returns the input of a scorer for an attempt at `task` that ended with the answer `text`.
pub(crate) fn scorer_input(text: &str, task: Value) -> ScorerInput {
    let outcome = Outcome { turns: 1, ..Outcome::demonstrated(text) };
    let trajectory = Arc::new(Trajectory::default());
    ScorerInput { attempt: AttemptId::from_bytes([1; 16]), task, outcome, trajectory }
}

/// A deterministic random number generator for generated tests.
pub(crate) struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns a random number in 0..`bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        // xorshift64* (Vigna 2016).
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % bound.max(1)
    }

    /// Returns an integer of 1 to `max_digits` random digits, without leading zeros.
    pub fn digits(&mut self, max_digits: usize) -> String {
        let count = 1 + self.below(max_digits);
        let first = char::from(b'1' + self.below(9) as u8);
        let rest = (1..count).map(|_| char::from(b'0' + self.below(10) as u8));
        std::iter::once(first).chain(rest).collect()
    }

    /// Returns a random integer or decimal, with a minus sign in half of the cases. The integer
    /// part has at most `max_digits` digits, and the decimal part at most 6.
    pub fn number(&mut self, max_digits: usize) -> String {
        let sign = if self.below(2) == 0 { "-" } else { "" };
        let integer = self.digits(max_digits);
        match self.below(3) {
            0 => {
                let decimals = self.digits(6);
                format!("{sign}{integer}.{decimals}")
            }
            _ => format!("{sign}{integer}"),
        }
    }

    /// Returns a different number: with the last digit one higher or lower, with the opposite sign,
    /// or ten times as large.
    pub fn changed(&mut self, number: &str) -> String {
        let (sign, size) = number.strip_prefix('-').map_or(("", number), |size| ("-", size));
        let last = size.len() - 1;
        let digit = size.as_bytes()[last] - b'0';
        let with_last = |digit: u8| format!("{sign}{}{}", &size[..last], char::from(b'0' + digit));
        match self.below(4) {
            0 if digit < 9 => with_last(digit + 1),
            1 if digit > 0 && (last > 0 || digit > 1) => with_last(digit - 1),
            2 if !size.contains('.') => format!("{number}0"),
            _ => {
                if sign.is_empty() {
                    format!("-{size}")
                } else {
                    size.to_owned()
                }
            }
        }
    }
}

/// Returns a number with commas between groups of three digits.
pub(crate) fn thousands(number: &str) -> String {
    let (integer, decimals) = number
        .split_once('.')
        .map_or((number, None), |(integer, decimals)| (integer, Some(decimals)));
    let (sign, integer) = integer.strip_prefix('-').map_or(("", integer), |integer| ("-", integer));
    let mut grouped = String::new();
    for (at, digit) in integer.chars().enumerate() {
        if at > 0 && (integer.len() - at) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!(
        "{sign}{grouped}{}",
        decimals.map(|decimals| format!(".{decimals}")).unwrap_or_default()
    )
}
