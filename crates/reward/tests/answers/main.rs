//! Checks the verdicts of the scorers `maths` and `numeric` on many pairs of an expected answer and
//! a completion.
//!
//! A scorer must grant correct completions a reward without rewarding wrong ones, so every test has
//! correct and wrong completions.

#![allow(clippy::unwrap_used)] // clippy sees only what is inside #[test], not the helpers beside it

mod maths;
mod numeric;
mod pairs;

/// Random number generator (splitmix64) with its seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut state = self.0;
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^ (state >> 31)
    }

    /// Returns an integer between `from` and `to`, both included.
    fn integer_between(&mut self, from: i64, to: i64) -> i64 {
        from + (self.next() % (to - from + 1) as u64) as i64
    }

    fn choose<'t, T>(&mut self, several: &'t [T]) -> &'t T {
        &several[self.next() as usize % several.len()]
    }

    /// Returns digits without a zero at the start or the end.
    fn digits(&mut self, length: usize) -> String {
        (0..length)
            .map(|at| {
                let from = i64::from(at == 0 || at + 1 == length);
                char::from(b'0' + self.integer_between(from, 9) as u8)
            })
            .collect()
    }
}

/// An expected answer, with equal values and different values.
struct Item {
    gold: String,
    same: Vec<String>,
    other: Vec<String>,
}

/// Changes the last digit by 1.
fn next_to(digits: &str) -> String {
    let (rest, last) = digits.split_at(digits.len() - 1);
    let last = last.parse::<u8>().unwrap();
    format!("{rest}{}", if last > 4 { last - 1 } else { last + 1 })
}

/// Separates digits into groups of three.
fn grouped(digits: &str, separator: &str) -> String {
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).unwrap()).collect();
    groups.join(separator)
}

/// Counts verdicts and collects the wrong ones.
#[derive(Default)]
struct Tally {
    pairs: usize,
    num_correct: usize,
    lost: Vec<String>,
    false_rewards: Vec<String>,
}

impl Tally {
    fn add(&mut self, gold: &str, completion: &str, is_correct: bool, value: f64) {
        self.pairs += 1;
        self.num_correct += usize::from(is_correct);
        let pair = || format!("expected {gold}   reply {completion}");
        match (is_correct, value == 1.0) {
            (true, false) => self.lost.push(pair()),
            (false, true) => self.false_rewards.push(pair()),
            _ => {}
        }
    }

    /// Prints the counts. Fails on any false reward, if more than 2 % of the rewards are missing,
    /// or if there are fewer than 10,000 pairs.
    fn check(&self, name: &str) {
        let got = self.num_correct - self.lost.len();
        println!(
            "{name}: {} pairs, {got} of {} right, {} false",
            self.pairs,
            self.num_correct,
            self.false_rewards.len()
        );
        let show = |list: &[String]| list.iter().take(40).cloned().collect::<Vec<_>>().join("\n");
        assert!(
            self.false_rewards.is_empty(),
            "{name}: false rewards:\n{}",
            show(&self.false_rewards)
        );
        println!("{}", show(&self.lost));
        assert!(
            got * 100 >= self.num_correct * 98,
            "{name}: {got} of {} rewards",
            self.num_correct
        );
        assert!(self.pairs >= 10_000, "{name}: {} pairs", self.pairs);
    }
}
