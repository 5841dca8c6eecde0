//! Compares the results of two queries.

use std::cmp::Ordering;

use super::run::SqlValue;

/// Maximum number of row comparisons in the search for the order of columns. If the search needs
/// more, the comparison of the results stays undecided.
const MAX_COMPARED: usize = 2_000_000;

impl SqlValue {
    /// Returns whether two values are equal.
    ///
    /// Integers must match exactly. Floating-point numbers may have a relative difference of up to
    /// four machine epsilons, because the order of operations affects rounding. An infinity equals
    /// only itself.
    fn equals_value(&self, other: &SqlValue) -> bool {
        let close = |a: f64, b: f64| {
            let size = a.abs().max(b.abs());
            a == b || (size.is_finite() && (a - b).abs() <= 4.0 * f64::EPSILON * size)
        };
        match (self, other) {
            (SqlValue::Real(a), SqlValue::Real(b)) => close(*a, *b),
            (SqlValue::Integer(integer), SqlValue::Real(real))
            | (SqlValue::Real(real), SqlValue::Integer(integer)) => {
                real.round() as i128 == i128::from(*integer) && close(*real, real.round())
            }
            (a, b) => a == b,
        }
    }

    /// Compares two values of any kinds, to sort them. The order is total: numbers are compared by
    /// their exact values, and the two zeros are equal.
    fn compare_to(&self, other: &SqlValue) -> Ordering {
        match (self, other) {
            (SqlValue::Integer(a), SqlValue::Integer(b)) => a.cmp(b),
            (SqlValue::Real(a), SqlValue::Real(b)) => (a + 0.0).total_cmp(&(b + 0.0)),
            (SqlValue::Integer(a), SqlValue::Real(b)) => compare_int_to_float(*a, *b),
            (SqlValue::Real(a), SqlValue::Integer(b)) => compare_int_to_float(*b, *a).reverse(),
            (SqlValue::Text(a), SqlValue::Text(b)) | (SqlValue::Blob(a), SqlValue::Blob(b)) => {
                a.cmp(b)
            }
            (a, b) => a.sort_class().cmp(&b.sort_class()),
        }
    }

    fn sort_class(&self) -> u8 {
        match self {
            SqlValue::Null => 0,
            SqlValue::Integer(_) | SqlValue::Real(_) => 1,
            SqlValue::Text(_) => 2,
            SqlValue::Blob(_) => 3,
        }
    }
}

/// Compares an integer with a floating-point number, without rounding the integer.
fn compare_int_to_float(integer: i64, real: f64) -> Ordering {
    // Rounding is monotonic: only equal numbers can hide a difference.
    let rounded = (integer as f64).total_cmp(&(real + 0.0));
    rounded.then_with(|| i128::from(integer).cmp(&(real as i128)))
}

type Rows = [Vec<SqlValue>];

/// State of comparing two query results of equal size.
struct RowComparison<'r> {
    want: &'r Rows,
    found: &'r Rows,
    /// Whether the order of rows matters.
    ordered: bool,
    /// For each column of `want`, the columns of `found` with the same values.
    candidates: Vec<Vec<usize>>,
    /// Number of row comparisons that the search has made so far.
    compared: usize,
}

/// Returns whether two query results have the same rows, or `None` if that cannot be decided.
///
/// If `ordered`, the rows must be in the same order. If `any_order`, the columns of `found` may be
/// permuted, with one permutation for all rows. Results without rows are equal, whatever their
/// columns.
pub(super) fn results_match(
    want: &Rows,
    found: &Rows,
    ordered: bool,
    any_order: bool,
) -> Option<bool> {
    let width = want.first().map_or(0, Vec::len);
    if want.len() != found.len() || want.iter().chain(found).any(|row| row.len() != width) {
        return Some(false);
    }
    let mut comparison =
        RowComparison { want, found, ordered, candidates: Vec::new(), compared: 0 };
    let columns: Vec<usize> = (0..width).collect();
    if comparison.columns_match(&columns, &columns)? {
        return Some(true);
    }
    if !any_order || width < 2 {
        return Some(false);
    }
    for at in &columns {
        let mut candidates = Vec::new();
        for other in &columns {
            if comparison.columns_match(&[*at], &[*other])? {
                candidates.push(*other);
            }
        }
        comparison.candidates.push(candidates);
    }
    // Columns with few candidates are assigned first.
    let mut assigned = columns;
    assigned.sort_by_key(|at| comparison.candidates[*at].len());
    comparison.match_columns(&assigned, &mut Vec::new())
}

impl RowComparison<'_> {
    /// Returns whether the rows are equal in the columns `want` of the expected result and `found`
    /// of the other. Returns `None` if that cannot be decided.
    fn columns_match(&self, want: &[usize], found: &[usize]) -> Option<bool> {
        let same_row = |(a, b): (&Vec<SqlValue>, &Vec<SqlValue>)| {
            want.iter().zip(found).all(|(at, other)| a[*at].equals_value(&b[*other]))
        };
        if self.ordered {
            return Some(self.want.iter().zip(self.found).all(same_row));
        }
        // Rows are sorted by the classes of their values, so that rounding does not decide the
        // position of a row.
        let count = self.want.len();
        let mut keys: Vec<(Vec<u32>, usize)> =
            (0..2 * count).map(|row| (Vec::new(), row)).collect();
        for (at, other) in want.iter().zip(found) {
            for ((key, _), class) in keys.iter_mut().zip(self.value_classes(*at, *other)) {
                key.push(class);
            }
        }
        let mut found_keys = keys.split_off(count);
        keys.sort();
        found_keys.sort();
        let pairs = || keys.iter().zip(&found_keys);
        if pairs().any(|((a, _), (b, _))| a != b) {
            return Some(false);
        }
        // A class can be a chain of close values whose ends are not close. Another pairing of its
        // rows could then be right.
        let is_paired =
            pairs().all(|((_, a), (_, b))| same_row((&self.want[*a], &self.found[*b - count])));
        is_paired.then_some(true)
    }

    /// Returns the equivalence class of each value in a column of `want`, then in a column of
    /// `found`. Values that are equal, also up to rounding, have the same class.
    fn value_classes(&self, at: usize, other: usize) -> Vec<u32> {
        let column =
            self.want.iter().map(|row| &row[at]).chain(self.found.iter().map(|row| &row[other]));
        let mut cells: Vec<(usize, &SqlValue)> = column.enumerate().collect();
        cells.sort_by(|(_, a), (_, b)| a.compare_to(b));
        let mut classes = vec![0; cells.len()];
        for pair in cells.windows(2) {
            let (before, a) = pair[0];
            let (row, b) = pair[1];
            classes[row] = classes[before] + u32::from(!a.equals_value(b));
        }
        classes
    }

    /// Searches for a column of `found` for each column in `want`, by backtracking. `chosen`
    /// contains the columns for the first columns of `want`. Returns whether all columns were
    /// found, or `None` if the search was too long.
    fn match_columns(&mut self, want: &[usize], chosen: &mut Vec<usize>) -> Option<bool> {
        let depth = chosen.len();
        if depth == want.len() {
            return Some(true);
        }
        let mut tried: Vec<usize> = Vec::new();
        for at in self.candidates[want[depth]].clone() {
            let is_equal = |other: &usize| self.found.iter().all(|row| row[at] == row[*other]);
            if chosen.contains(&at) || tried.iter().any(is_equal) {
                continue;
            }
            tried.push(at);
            self.compared += self.found.len();
            if self.compared > MAX_COMPARED {
                return None;
            }
            chosen.push(at);
            if self.columns_match(&want[..=depth], chosen)? && self.match_columns(want, chosen)? {
                return Some(true);
            }
            chosen.pop();
        }
        Some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Dice;

    fn cell(dice: &mut Dice) -> SqlValue {
        match dice.below(6) {
            0 => SqlValue::Null,
            1 => SqlValue::Real(dice.below(1_000_000_000) as f64 / 1024.0),
            2 => SqlValue::Integer(dice.below(3) as i64),
            3 => SqlValue::Integer(dice.digits(18).parse().unwrap()),
            4 => SqlValue::Text(dice.digits(3).into_bytes()),
            _ => SqlValue::Text(["Ada", "Bob", "Cy", ""][dice.below(4)].into()),
        }
    }

    /// Returns a value that differs in its last digit, sign, size or kind.
    fn changed(cell: &SqlValue, dice: &mut Dice) -> SqlValue {
        match cell {
            SqlValue::Null => SqlValue::Text("NULL".into()),
            SqlValue::Integer(value) => match dice.below(4) {
                0 => SqlValue::Integer(value + 1),
                1 => SqlValue::Integer(-value - 1),
                2 => SqlValue::Real(*value as f64 + 0.5 + (*value as f64).abs()),
                _ => SqlValue::Text(value.to_string().into_bytes()),
            },
            SqlValue::Real(value) => match dice.below(3) {
                0 => SqlValue::Real(value + (1.0 / 1024.0f64).max(value.abs() * 1e-12)),
                1 => SqlValue::Real(-value - 1.0),
                _ => SqlValue::Real(value * 10.0 + 1.0),
            },
            SqlValue::Text(text) => SqlValue::Text([text, &b"x"[..]].concat()),
            SqlValue::Blob(bytes) => SqlValue::Text(bytes.clone()),
        }
    }

    fn shuffled<T: Clone>(items: &[T], dice: &mut Dice) -> Vec<T> {
        let mut items = items.to_vec();
        (1..items.len()).rev().for_each(|at| items.swap(at, dice.below(at + 1)));
        items
    }

    /// Compares tables that are equal except for the order of rows and columns, or that differ in a
    /// value, a row or one exchange.
    #[test]
    fn generated_tables_are_distinguished() {
        let mut dice = Dice::new(3);
        let mut right = 0;
        let mut found = 0;
        let mut wrong = 0;
        for _ in 0..4_000 {
            let height = 1 + dice.below(8);
            let width = 1 + dice.below(5);
            let want: Vec<Vec<SqlValue>> =
                (0..height).map(|_| (0..width).map(|_| cell(&mut dice)).collect()).collect();
            let columns = shuffled(&(0..width).collect::<Vec<_>>(), &mut dice);
            let map = |rows: &Rows, columns: &[usize]| -> Vec<Vec<SqlValue>> {
                rows.iter().map(|row| columns.iter().map(|at| row[*at].clone()).collect()).collect()
            };
            let as_real = |cell: &SqlValue| match cell {
                SqlValue::Integer(value) if value.abs() < 1 << 50 => SqlValue::Real(*value as f64),
                other => other.clone(),
            };
            let mut other = map(&shuffled(&want, &mut dice), &columns);
            if dice.below(2) == 0 {
                other.iter_mut().flatten().for_each(|cell| *cell = as_real(cell));
            }
            right += 2;
            found += usize::from(results_match(&want, &other, false, true) == Some(true));
            found +=
                usize::from(results_match(&want, &map(&want, &columns), true, true) == Some(true));
            // One value differs, in any order of rows and columns.
            let mut differs = other.clone();
            let row = dice.below(height);
            let column = dice.below(width);
            differs[row][column] = changed(&differs[row][column], &mut dice);
            wrong += 1;
            assert!(
                results_match(&want, &differs, false, true) == Some(false),
                "{want:?} {differs:?}"
            );
            // A missing row, and a duplicate row.
            wrong += 2;
            assert!(results_match(&want, &other[1..], false, true) == Some(false));
            let doubled = [other.clone(), other[..1].to_vec()].concat();
            assert!(results_match(&want, &doubled, false, true) == Some(false));
            // If the order matters, only equal rows can be exchanged.
            let mut moved = want.clone();
            moved.swap(0, height - 1);
            if moved != want
                && results_match(&want[..1], &want[height - 1..], true, true) == Some(false)
            {
                wrong += 1;
                assert!(results_match(&want, &moved, true, false) == Some(false));
            }
            // An exchange in only one row makes the result differ if it changes the sorted values
            // of the columns.
            if width > 1 && height > 1 && want[0][0] != want[0][1] {
                let mut exchanged = want.clone();
                exchanged[0].swap(0, 1);
                let sums = |rows: &Rows| -> Vec<Vec<String>> {
                    let column =
                        |at| rows.iter().map(|row| format!("{:?}", row[at])).collect::<Vec<_>>();
                    let mut all: Vec<Vec<String>> = (0..width).map(column).collect();
                    all.iter_mut().for_each(|column| column.sort());
                    all.sort();
                    all
                };
                if sums(&want) != sums(&exchanged) {
                    wrong += 1;
                    assert!(
                        results_match(&want, &exchanged, false, true) == Some(false),
                        "{want:?} {exchanged:?}"
                    );
                }
            }
        }
        println!("sql: {found} of {right} right, 0 of {wrong} wrong");
        assert!(found * 100 >= right * 98 && right + wrong > 10_000);
    }

    #[test]
    fn rows_with_several_rounded_columns_are_equal_in_any_order() {
        let near = |value: f64| value * (1.0 + f64::EPSILON);
        let row = |cells: [f64; 2]| cells.map(SqlValue::Real).to_vec();
        // Rounding exchanges the first columns of the two rows.
        let want = [row([near(0.3), 1.0]), row([0.3, 2.0])];
        let found = [row([0.3, 1.0]), row([near(0.3), 2.0])];
        assert_eq!(results_match(&want, &found, false, false), Some(true));
        assert_eq!(
            results_match(&want, &[row([0.3, 1.0]), row([0.3, 1.0])], false, false),
            Some(false)
        );
        let zeros = [row([0.0, 2.0]), row([-0.0, 1.0])];
        assert_eq!(
            results_match(&zeros, &[row([-0.0, 2.0]), row([0.0, 1.0])], false, false),
            Some(true)
        );
    }

    #[test]
    fn order_of_large_numbers_is_total() {
        let large = 1i64 << 53;
        let mut cells = vec![
            SqlValue::Integer(i64::MAX),
            SqlValue::Real(i64::MAX as f64),
            SqlValue::Real(f64::INFINITY),
        ];
        cells.extend((-3..4).flat_map(|step| {
            [SqlValue::Integer(large + step), SqlValue::Real((large + step) as f64)]
        }));
        for a in &cells {
            for b in &cells {
                assert_eq!(a.compare_to(b), b.compare_to(a).reverse(), "{a:?} {b:?}");
                for c in &cells {
                    let [ab, bc, ac] = [a.compare_to(b), b.compare_to(c), a.compare_to(c)];
                    assert!(ab != bc || ac == ab, "{a:?} {b:?} {c:?}");
                }
            }
        }
        assert_eq!(
            SqlValue::Integer(large + 1).compare_to(&SqlValue::Real(large as f64)),
            Ordering::Greater
        );
    }

    #[test]
    fn chain_of_close_values_is_not_decided_if_its_ends_differ() {
        // Three steps of the bound: the ends of the chain are not equal.
        let step = |count: i32| {
            SqlValue::Real((0..count).fold(1.0, |value: f64, _| value * (1.0 + 3.0 * f64::EPSILON)))
        };
        let rows = |counts: [i32; 4]| counts.map(|count| vec![step(count)]).to_vec();
        assert_eq!(
            results_match(&rows([0, 1, 2, 3]), &rows([0, 1, 2, 3]), false, false),
            Some(true)
        );
        assert_eq!(results_match(&rows([0, 0, 1, 3]), &rows([0, 2, 3, 3]), false, false), None);
    }

    #[test]
    fn similar_columns_are_compared_in_bounded_time() {
        let started = std::time::Instant::now();
        let bit = |row: usize, at: usize, salt: usize| {
            SqlValue::Integer(
                ((row.wrapping_mul(0x9E37_79B9).wrapping_add(at * salt) >> 7) & 1) as i64,
            )
        };
        let table = |salt: usize| -> Vec<Vec<SqlValue>> {
            (0..64)
                .flat_map(|row| {
                    let bits: Vec<SqlValue> = (0..14).map(|at| bit(row, at, salt)).collect();
                    let flipped = bits
                        .iter()
                        .map(|cell| SqlValue::Integer(1 - i64::from(*cell == SqlValue::Integer(1))))
                        .collect();
                    [bits, flipped]
                })
                .collect()
        };
        assert_eq!(results_match(&table(0x51_7CC1), &table(0x27_22BA), false, true), Some(false));
        assert!(started.elapsed() < std::time::Duration::from_secs(10));
    }
}
