//! Compares the results of two queries.

use std::cmp::Ordering;

use super::run::Cell;

/// Maximum number of row comparisons in the search for the order of columns; beyond it, results count as
/// different.
const MAX_COMPARED: usize = 2_000_000;

impl Cell {
    /// Returns whether the value is a floating-point number.
    fn is_real(&self) -> bool {
        matches!(self, Cell::Real(_))
    }

    fn number(&self) -> Option<f64> {
        match self {
            Cell::Whole(value) => Some(*value as f64),
            Cell::Real(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns whether two values are equal.
    ///
    /// Integers must match exactly. Floating-point numbers may have a relative difference of up to four
    /// machine epsilons, because the order of operations affects rounding. An infinity equals only
    /// itself.
    fn is_same(&self, other: &Cell) -> bool {
        let close = |a: f64, b: f64| {
            let size = a.abs().max(b.abs());
            a == b || (size.is_finite() && (a - b).abs() <= 4.0 * f64::EPSILON * size)
        };
        match (self, other) {
            (Cell::Real(a), Cell::Real(b)) => close(*a, *b),
            (Cell::Whole(whole), Cell::Real(real)) | (Cell::Real(real), Cell::Whole(whole)) => {
                real.round() as i128 == i128::from(*whole) && close(*real, real.round())
            }
            (a, b) => a == b,
        }
    }

    /// Compares two values of any kinds, to sort them.
    fn order(&self, other: &Cell) -> Ordering {
        match (self, other) {
            (Cell::Whole(a), Cell::Whole(b)) => a.cmp(b),
            (Cell::Text(a), Cell::Text(b)) => a.cmp(b),
            (Cell::Blob(a), Cell::Blob(b)) => a.cmp(b),
            (a, b) => match (a.number(), b.number()) {
                (Some(a), Some(b)) => a.total_cmp(&b),
                _ => a.kind().cmp(&b.kind()),
            },
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Cell::Null => 0,
            Cell::Whole(_) | Cell::Real(_) => 1,
            Cell::Text(_) => 2,
            Cell::Blob(_) => 3,
        }
    }
}

type Rows = [Vec<Cell>];

/// Comparison of two results of equal size.
struct Comparison<'r> {
    want: &'r Rows,
    found: &'r Rows,
    /// Whether the order of rows matters.
    ordered: bool,
    /// For each column of `want`, the columns of `found` with the same values.
    candidates: Vec<Vec<usize>>,
    /// Number of row comparisons so far.
    compared: usize,
}

/// Returns whether two results have the same rows.
///
/// If `ordered`, the rows must be in the same order. If `any_order`, the columns of `found` may be
/// permuted, with one permutation for all rows. Results without rows are equal, whatever their columns.
pub(super) fn same(want: &Rows, found: &Rows, ordered: bool, any_order: bool) -> bool {
    let width = want.first().map_or(0, Vec::len);
    if want.len() != found.len() || want.iter().chain(found).any(|row| row.len() != width) {
        return false;
    }
    let mut comparison = Comparison { want, found, ordered, candidates: Vec::new(), compared: 0 };
    let columns: Vec<usize> = (0..width).collect();
    if comparison.agrees(&columns, &columns) {
        return true;
    }
    if !any_order || width < 2 {
        return false;
    }
    let candidates = |at: &usize| -> Vec<usize> {
        let fits = |other: &usize| comparison.agrees(&[*at], &[*other]);
        columns.iter().copied().filter(fits).collect()
    };
    comparison.candidates = columns.iter().map(candidates).collect();
    // Columns with few candidates are assigned first.
    let mut settled = columns;
    settled.sort_by_key(|at| comparison.candidates[*at].len());
    comparison.search(&settled, &mut Vec::new())
}

impl Comparison<'_> {
    /// Returns whether the rows are equal in the columns `want` and `found` of the two results.
    fn agrees(&self, want: &[usize], found: &[usize]) -> bool {
        let same_row = |(a, b): (&Vec<Cell>, &Vec<Cell>)| {
            want.iter().zip(found).all(|(at, other)| a[*at].is_same(&b[*other]))
        };
        if self.ordered {
            return self.want.iter().zip(self.found).all(same_row);
        }
        // Floating-point columns are the last sort keys: values that are equal up to rounding must not
        // decide the position of a row.
        let is_real = |(at, other): &(usize, usize)| {
            self.want.iter().any(|row| row[*at].is_real())
                || self.found.iter().any(|row| row[*other].is_real())
        };
        let pairs = want.iter().copied().zip(found.iter().copied());
        let (real, exact): (Vec<_>, Vec<_>) = pairs.partition(is_real);
        let (first, second): (Vec<usize>, Vec<usize>) = exact.into_iter().chain(real).unzip();
        let (want, found) = (sorted(self.want, &first), sorted(self.found, &second));
        want.into_iter().zip(found).all(same_row)
    }

    /// Searches for a column of `found` for each column in `want`, by backtracking. `chosen` contains the
    /// columns for the first of them. Returns whether all were found.
    fn search(&mut self, want: &[usize], chosen: &mut Vec<usize>) -> bool {
        let depth = chosen.len();
        if depth == want.len() {
            return true;
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
                return false;
            }
            chosen.push(at);
            if self.agrees(&want[..=depth], chosen) && self.search(want, chosen) {
                return true;
            }
            chosen.pop();
        }
        false
    }
}

/// Returns the rows sorted by `columns`.
fn sorted<'r>(rows: &'r Rows, columns: &[usize]) -> Vec<&'r Vec<Cell>> {
    let mut rows: Vec<&Vec<Cell>> = rows.iter().collect();
    rows.sort_by(|a, b| {
        let cells = columns.iter().map(|at| a[*at].order(&b[*at]));
        cells.fold(Ordering::Equal, Ordering::then)
    });
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Dice;

    fn cell(dice: &mut Dice) -> Cell {
        match dice.below(6) {
            0 => Cell::Null,
            1 => Cell::Real(dice.below(1_000_000_000) as f64 / 1024.0),
            2 => Cell::Whole(dice.below(3) as i64),
            3 => Cell::Whole(dice.digits(18).parse().unwrap()),
            4 => Cell::Text(dice.digits(3).into_bytes()),
            _ => Cell::Text(["Ada", "Bob", "Cy", ""][dice.below(4)].into()),
        }
    }

    /// Returns a value that differs in its last digit, sign, size or kind.
    fn changed(cell: &Cell, dice: &mut Dice) -> Cell {
        match cell {
            Cell::Null => Cell::Text("NULL".into()),
            Cell::Whole(value) => match dice.below(4) {
                0 => Cell::Whole(value + 1),
                1 => Cell::Whole(-value - 1),
                2 => Cell::Real(*value as f64 + 0.5 + (*value as f64).abs()),
                _ => Cell::Text(value.to_string().into_bytes()),
            },
            Cell::Real(value) => match dice.below(3) {
                0 => Cell::Real(value + (1.0 / 1024.0f64).max(value.abs() * 1e-12)),
                1 => Cell::Real(-value - 1.0),
                _ => Cell::Real(value * 10.0 + 1.0),
            },
            Cell::Text(text) => Cell::Text([text, &b"x"[..]].concat()),
            Cell::Blob(bytes) => Cell::Text(bytes.clone()),
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
    fn same_distinguishes_generated_tables() {
        let mut dice = Dice::new(3);
        let (mut right, mut found, mut wrong) = (0, 0, 0);
        for _ in 0..4_000 {
            let (height, width) = (1 + dice.below(8), 1 + dice.below(5));
            let want: Vec<Vec<Cell>> =
                (0..height).map(|_| (0..width).map(|_| cell(&mut dice)).collect()).collect();
            let columns = shuffled(&(0..width).collect::<Vec<_>>(), &mut dice);
            let map = |rows: &Rows, columns: &[usize]| -> Vec<Vec<Cell>> {
                rows.iter().map(|row| columns.iter().map(|at| row[*at].clone()).collect()).collect()
            };
            let as_real = |cell: &Cell| match cell {
                Cell::Whole(value) if value.abs() < 1 << 50 => Cell::Real(*value as f64),
                other => other.clone(),
            };
            let mut other = map(&shuffled(&want, &mut dice), &columns);
            if dice.below(2) == 0 {
                other.iter_mut().flatten().for_each(|cell| *cell = as_real(cell));
            }
            right += 2;
            found += usize::from(same(&want, &other, false, true));
            found += usize::from(same(&want, &map(&want, &columns), true, true));
            // One value differs, in any order of rows and columns.
            let mut differs = other.clone();
            let (row, column) = (dice.below(height), dice.below(width));
            differs[row][column] = changed(&differs[row][column], &mut dice);
            wrong += 1;
            assert!(!same(&want, &differs, false, true), "{want:?} {differs:?}");
            // A missing row, and a duplicate row.
            wrong += 2;
            assert!(!same(&want, &other[1..], false, true));
            assert!(!same(&want, &[other.clone(), other[..1].to_vec()].concat(), false, true));
            // If the order matters, only equal rows can be exchanged.
            let mut moved = want.clone();
            moved.swap(0, height - 1);
            if moved != want && !same(&want[..1], &want[height - 1..], true, true) {
                wrong += 1;
                assert!(!same(&want, &moved, true, false));
            }
            // An exchange in only one row makes the result differ if it changes the sorted values of the
            // columns.
            if width > 1 && height > 1 && want[0][0] != want[0][1] {
                let mut exchanged = want.clone();
                exchanged[0].swap(0, 1);
                let sums = |rows: &Rows| -> Vec<Vec<String>> {
                    let column = |at| rows.iter().map(|row| format!("{:?}", row[at])).collect::<Vec<_>>();
                    let mut all: Vec<Vec<String>> = (0..width).map(column).collect();
                    all.iter_mut().for_each(|column| column.sort());
                    all.sort();
                    all
                };
                if sums(&want) != sums(&exchanged) {
                    wrong += 1;
                    assert!(!same(&want, &exchanged, false, true), "{want:?} {exchanged:?}");
                }
            }
        }
        println!("sql: {found} of {right} right, 0 of {wrong} wrong");
        assert!(found * 100 >= right * 98 && right + wrong > 10_000);
    }

    #[test]
    fn similar_columns_are_compared_in_bounded_time() {
        let begun = std::time::Instant::now();
        let bit = |row: usize, at: usize, salt: usize| {
            Cell::Whole(((row.wrapping_mul(0x9E37_79B9).wrapping_add(at * salt) >> 7) & 1) as i64)
        };
        let table = |salt: usize| -> Vec<Vec<Cell>> {
            (0..64)
                .flat_map(|row| {
                    let bits: Vec<Cell> = (0..14).map(|at| bit(row, at, salt)).collect();
                    let flipped =
                        bits.iter().map(|cell| Cell::Whole(1 - i64::from(*cell == Cell::Whole(1)))).collect();
                    [bits, flipped]
                })
                .collect()
        };
        assert!(!same(&table(0x51_7CC1), &table(0x27_22BA), false, true));
        assert!(begun.elapsed() < std::time::Duration::from_secs(10));
    }
}
