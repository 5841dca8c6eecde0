//! Answers of a group, judged in one prompt.

use super::verdict::{last_json, share};

/// A shuffle of 0..n, a function of the seed.
pub(super) fn shuffled(n: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    let mut state = seed;
    for last in (1..n).rev() {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut drawn = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        drawn = (drawn ^ (drawn >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        drawn ^= drawn >> 31;
        order.swap(last, (drawn % (last as u64 + 1)) as usize);
    }
    order
}

/// The ranking in a reply, best first, with answers by their numbers from 1 on: the last line that names each
/// once (`3 > 1 > 2`, `[3, 1, 2]`). Gives the worth of each answer, from 1 for the best down to 0.
pub(super) fn ranking(reply: &str, n: usize) -> Option<Vec<f64>> {
    reply.lines().rev().find_map(|line| {
        let parts = line.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty());
        let numbers: Vec<usize> = parts.map_while(|part| part.parse().ok()).collect();
        let mut worth = vec![None; n];
        if numbers.len() != n {
            return None;
        }
        for (rank, number) in numbers.into_iter().enumerate() {
            let place = worth.get_mut(number.checked_sub(1)?)?;
            let value = if n > 1 { 1.0 - rank as f64 / (n - 1) as f64 } else { 0.5 };
            if place.replace(value).is_some() {
                return None;
            }
        }
        worth.into_iter().collect()
    })
}

/// The last list of numbers in a reply, one for each answer in the order in which they were shown.
pub(super) fn scores(reply: &str, n: usize, least: f64, most: f64) -> Option<Vec<f64>> {
    let list = last_json(reply, '[', ']')?;
    let list = list.as_array().filter(|list| list.len() == n)?;
    list.iter().map(|number| share(number.as_f64()?, least, most)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_a_function_of_its_seed() {
        assert_eq!(shuffled(8, 1), shuffled(8, 1));
        let mut seen: Vec<Vec<usize>> = (0..200).map(|seed| shuffled(3, seed)).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 6);
        assert_eq!((shuffled(0, 1).len(), shuffled(1, 1)), (0, vec![0]));
    }

    #[test]
    fn rankings_and_scores_are_read() {
        for (reply, want) in [
            ("Answer 2 is best.\n2 > 3 > 1", Some(vec![0.0, 1.0, 0.5])),
            ("[3, 1, 2]\nThat is all.", Some(vec![0.5, 0.0, 1.0])),
            ("1 > 2", None),
            ("1 > 2 > 2", None),
            ("0 > 1 > 2", None),
            ("1 > 2 > 4", None),
            ("", None),
        ] {
            assert_eq!(ranking(reply, 3), want, "{reply}");
        }
        assert_eq!(ranking("1", 1), Some(vec![0.5]));
        assert_eq!(scores("so [1, 2, 3] or [10, 0]", 3, 0.0, 10.0), None);
        assert_eq!(scores("so\n[10, 0, 5]", 3, 0.0, 10.0), Some(vec![1.0, 0.0, 0.5]));
        assert_eq!(scores("[11, 0, 5]", 3, 0.0, 10.0), None);
    }
}
