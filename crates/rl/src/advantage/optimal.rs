//! The group's baseline of least variance for every token.
//!
//! B_t = Σᵢ Gᵢₜ Wᵢₜ / Σᵢ Wᵢₜ over the paths of the group's rollouts, with G the rewards from t on and W the
//! squared norms of the scores of all tokens up to t, for which 1 − 2π + Σπ² stands: the squared norm of the
//! gradient of log π in the logits. As in verl.

use serde::{Deserialize, Serialize};

use super::{Path, PathAdvantages, Rollout, returns};
use crate::RlError;

/// Added to the sum of weights, as in the reference.
const EPSILON: f64 = 1e-8;

/// Which tokens of a group are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Alignment {
    /// The first action token of each, the second of each, and so on.
    #[default]
    ActionToken,
    /// Tokens at the same distance from the prompt, tool results counted. The tail is then cut at a number of
    /// action tokens all the same, as in verl: for comparisons only.
    Position,
}

/// One path on its way: slots that it has a token in, returns and weights there.
struct Row<'a> {
    slots: Vec<usize>,
    returns: Vec<f64>,
    weights: Vec<f64>,
    at: (usize, usize),
    path: &'a Path,
}

/// Advantages of all rollouts.
pub fn advantages(
    rollouts: &[Rollout],
    alignment: Alignment,
    bare_tail: bool,
) -> Result<Vec<Vec<PathAdvantages>>, RlError> {
    let mut found: Vec<Vec<PathAdvantages>> =
        rollouts.iter().map(|r| vec![PathAdvantages::default(); r.paths.len()]).collect();
    for members in super::groups(rollouts) {
        let mut rows = Vec::new();
        for &i in &members {
            for (p, path) in rollouts[i].paths.iter().enumerate() {
                rows.push(row(path, (i, p), alignment)?);
            }
        }
        let slots = rows.iter().flat_map(|row| row.slots.iter().map(|s| s + 1)).max().unwrap_or(0);
        let (mut numerator, mut denominator) = (vec![0.0; slots], vec![EPSILON; slots]);
        for row in rows.iter().filter(|_| members.len() > 1) {
            for ((&slot, g), w) in row.slots.iter().zip(&row.returns).zip(&row.weights) {
                numerator[slot] += g * w;
                denominator[slot] += w;
            }
        }
        // From where on the longest path has nobody to compare with.
        let mut lengths: Vec<usize> = rows.iter().map(|row| row.path.len()).collect();
        lengths.sort_unstable();
        let tail = match lengths[..] {
            [.., second, longest] if bare_tail && longest > second => Some((longest, second)),
            _ => None,
        };
        for row in rows {
            let baseline = |slot: usize| match tail {
                Some((longest, second)) if row.path.len() == longest && slot >= second => 0.0,
                _ => numerator[slot] / denominator[slot],
            };
            let advantages =
                row.returns.iter().zip(&row.slots).map(|(g, slot)| g - baseline(*slot)).collect();
            found[row.at.0][row.at.1] = PathAdvantages { advantages, returns: row.returns };
        }
    }
    Ok(found)
}

fn row(path: &Path, at: (usize, usize), alignment: Alignment) -> Result<Row<'_>, RlError> {
    let needed = path.len();
    let has =
        |what, found| if found == needed { Ok(()) } else { Err(RlError::Missing { what, needed, found }) };
    has("behaviour log-probabilities", path.behaviour.len())?;
    has("sums of squared probabilities", path.concentration.len())?;
    let slots = match alignment {
        Alignment::ActionToken => (0..needed).collect(),
        Alignment::Position => {
            has("positions", path.positions.len())?;
            path.positions.clone()
        }
    };
    let mut energy = 0.0;
    let weights = path.behaviour.iter().zip(&path.concentration).map(|(logp, squares)| {
        energy += 1.0 - 2.0 * logp.exp() + squares;
        energy
    });
    Ok(Row { slots, returns: returns(&path.rewards, 1.0), weights: weights.collect(), at, path })
}
