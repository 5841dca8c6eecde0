//! Parses the verdicts of a judge on all answers of a group.

use serde_json::Value;

use super::number::to_fraction;
use super::verdict::find_json_values;

/// Returns a pseudorandom permutation of 0..n that depends only on `n` and `seed`.
pub(super) fn permutation(n: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    let mut state = seed;
    for last in (1..n).rev() {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut random = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        random = (random ^ (random >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        random ^= random >> 31;
        order.swap(last, (random % (last as u64 + 1)) as usize);
    }
    order
}

/// Parses a judge's ranking of `n` answers, and returns the answers' scores: 1 for the best down to
/// 0 for the worst.
///
/// The ranking is the last line that contains each answer's number (1 to `n`) exactly once, best
/// first, and otherwise only a label: `3 > 1 > 2`, `[3, 1, 2]`, `Ranking: 3, 1, 2`. A single answer
/// scores 0.5. Returns `None` if there is no such line.
pub(super) fn parse_ranking(completion: &str, n: usize) -> Option<Vec<f64>> {
    completion.lines().rev().find_map(|line| {
        let line = line.trim().trim_start_matches(['*', '_', '`', '#', ' ']);
        let line = match line.split_once([':', '：']) {
            Some((label, rest)) if !label.contains(|c: char| c.is_ascii_digit()) => rest,
            _ => line,
        };
        let words = line.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
        let is_other =
            |word: &&str| !word.eq_ignore_ascii_case("answer") && word.parse::<usize>().is_err();
        if words.clone().any(|word| is_other(&word))
            || line.contains(['<', '=', '≈', '~', '≺', '.'])
        {
            return None;
        }
        let numbers: Vec<usize> = words.filter_map(|word| word.parse().ok()).collect();
        let mut worth = vec![None; n];
        if numbers.len() != n {
            return None;
        }
        for (rank, number) in numbers.into_iter().enumerate() {
            let slot = worth.get_mut(number.checked_sub(1)?)?;
            let value = if n > 1 { 1.0 - rank as f64 / (n - 1) as f64 } else { 0.5 };
            if slot.replace(value).is_some() {
                return None;
            }
        }
        worth.into_iter().collect()
    })
}

/// Parses a judge's list of numbers, and returns the scores of `n` answers, in the order of the
/// prompt.
///
/// The list is the last one on a line of its own. If there is none, it is the only list in the
/// completion; equal lists count as one. The range from `min` to `max` is mapped to 0..=1. Returns
/// `None` if no list is found, if its length is not `n`, or if a number is out of range.
pub(super) fn parse_score_list(completion: &str, n: usize, min: f64, max: f64) -> Option<Vec<f64>> {
    let numbers = |value: Value| -> Option<Vec<f64>> {
        value.as_array()?.iter().map(Value::as_f64).collect()
    };
    let parse_line = |line: &str| {
        let line = line.trim().trim_matches(['*', '`', ' ']);
        numbers(serde_json::from_str(line).ok()?)
    };
    let list = completion.lines().rev().find_map(parse_line).or_else(|| {
        let mut lists =
            find_json_values(completion, '[').into_iter().filter_map(|(.., value)| numbers(value));
        let first = lists.next()?;
        lists.all(|other| other == first).then_some(first)
    })?;
    let list = Some(list).filter(|list| list.len() == n)?;
    list.into_iter().map(|number| to_fraction(number, min, max)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffle_is_deterministic_and_reaches_all_orders() {
        assert_eq!(permutation(8, 1), permutation(8, 1));
        let mut seen: Vec<Vec<usize>> = (0..200).map(|seed| permutation(3, seed)).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 6);
        assert_eq!((permutation(0, 1).len(), permutation(1, 1)), (0, vec![0]));
    }

    #[test]
    fn ranking_and_scores_parse_unambiguous_completions() {
        for (completion, want) in [
            ("Answer 2 is best.\n2 > 3 > 1", Some(vec![0.0, 1.0, 0.5])),
            ("[3, 1, 2]\nThat is all.", Some(vec![0.5, 0.0, 1.0])),
            (
                "Ranking: **2 > 3 > 1**\nAnswers 1, 2 and 3 are all short.",
                Some(vec![0.0, 1.0, 0.5]),
            ),
            ("Answer 2 > Answer 3 > Answer 1", Some(vec![0.0, 1.0, 0.5])),
            ("3 < 1 < 2", None),
            ("3 > 1 = 2", None),
            ("1 > 2", None),
            ("1 > 2 > 2", None),
            ("0 > 1 > 2", None),
            ("1 > 2 > 4", None),
            ("", None),
        ] {
            assert_eq!(parse_ranking(completion, 3), want, "{completion}");
        }
        assert_eq!(parse_ranking("1", 1), Some(vec![0.5]));
        assert_eq!(parse_score_list("so [1, 2, 3] or [10, 0]", 3, 0.0, 10.0), None);
        assert_eq!(parse_score_list("so\n[10, 0, 5]", 3, 0.0, 10.0), Some(vec![1.0, 0.0, 0.5]));
        let explained = "[10, 0, 5]\nThe steps of the first are [1, 2, 3].";
        assert_eq!(parse_score_list(explained, 3, 0.0, 10.0), Some(vec![1.0, 0.0, 0.5]));
        assert_eq!(parse_score_list("So [10, 0, 5] and not [1, 2, 3].", 3, 0.0, 10.0), None);
        assert_eq!(parse_score_list("[11, 0, 5]", 3, 0.0, 10.0), None);
    }
}
