//! The group's baseline with minimum variance at every token.
//!
//! B_t = Σᵢ Gᵢₜ Wᵢₜ / Σᵢ Wᵢₜ over the sequences of the group's rollouts. G is the sum of rewards
//! from t on. W is the sum of the squared norms of the scores of all tokens up to t. The squared
//! norm of a token is 1 − 2π + Σπ², the squared norm of the gradient of log π with respect to the
//! logits, as in verl.

use serde::{Deserialize, Serialize};

use super::{Rollout, Sequence, SequenceAdvantages, returns};
use crate::RlError;

/// Term added to the sum of weights before dividing by it, as in verl.
const EPSILON: f64 = 1e-8;

/// Rule that determines which tokens of a group's sequences are compared with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Alignment {
    /// Tokens with the same index among the action tokens are compared: all first action tokens
    /// with each other, all second action tokens, and so on.
    #[default]
    ActionToken,
    /// Tokens with the same distance from the prompt are compared, with tool results counted. The
    /// tail without a baseline still starts at a number of action tokens, as in verl. For
    /// comparisons only.
    Position,
}

/// One sequence of a rollout: the aligned slots of its tokens, with their returns and baseline
/// weights.
struct BaselineRow<'a> {
    slots: Vec<usize>,
    returns: Vec<f64>,
    weights: Vec<f64>,
    at: (usize, usize),
    sequence: &'a Sequence,
}

/// Computes the advantages of all rollouts, with the baseline of minimum variance at each token.
pub fn optimal_baseline_advantages(
    rollouts: &[Rollout],
    alignment: Alignment,
    bare_tail: bool,
) -> Result<Vec<Vec<SequenceAdvantages>>, RlError> {
    let mut found: Vec<Vec<SequenceAdvantages>> =
        rollouts.iter().map(|r| vec![SequenceAdvantages::default(); r.sequences.len()]).collect();
    for group_indices in super::group_rollouts(rollouts) {
        let mut rows = Vec::new();
        for &i in &group_indices {
            for (p, sequence) in rollouts[i].sequences.iter().enumerate() {
                rows.push(make_baseline_row(sequence, (i, p), alignment)?);
            }
        }
        let slots = rows.iter().flat_map(|row| row.slots.iter().map(|s| s + 1)).max().unwrap_or(0);
        let mut numerator = vec![0.0; slots];
        let mut denominator = vec![EPSILON; slots];
        for row in rows.iter().filter(|_| group_indices.len() > 1) {
            for ((&slot, g), w) in row.slots.iter().zip(&row.returns).zip(&row.weights) {
                numerator[slot] += g * w;
                denominator[slot] += w;
            }
        }
        // Lengths of the longest and the second longest sequence: between them, no other sequence
        // has tokens.
        let mut lengths: Vec<usize> = rows.iter().map(|row| row.sequence.len()).collect();
        lengths.sort_unstable();
        let tail = match lengths[..] {
            [.., second, max_len] if bare_tail && max_len > second => Some((max_len, second)),
            _ => None,
        };
        for row in rows {
            let len = row.sequence.len();
            let advantages = row.returns.iter().zip(&row.slots).map(|(g, &slot)| match tail {
                Some((max_len, second)) if len == max_len && slot >= second => *g,
                _ => g - numerator[slot] / denominator[slot],
            });
            found[row.at.0][row.at.1] =
                SequenceAdvantages { advantages: advantages.collect(), returns: row.returns };
        }
    }
    Ok(found)
}

fn check_len(what: &'static str, needed: usize, found: usize) -> Result<(), RlError> {
    if found == needed { Ok(()) } else { Err(RlError::Missing { what, needed, found }) }
}

fn make_baseline_row(
    sequence: &Sequence,
    at: (usize, usize),
    alignment: Alignment,
) -> Result<BaselineRow<'_>, RlError> {
    let needed = sequence.len();
    check_len("behavior log-probabilities", needed, sequence.behavior.len())?;
    check_len("sums of squared probabilities", needed, sequence.concentration.len())?;
    let slots = match alignment {
        Alignment::ActionToken => (0..needed).collect(),
        Alignment::Position => {
            check_len("positions", needed, sequence.positions.len())?;
            sequence.positions.clone()
        }
    };
    let mut energy = 0.0;
    let weights = sequence.behavior.iter().zip(&sequence.concentration).map(|(logp, squares)| {
        energy += 1.0 - 2.0 * logp.exp() + squares;
        energy
    });
    Ok(BaselineRow {
        slots,
        returns: returns(&sequence.rewards, 1.0),
        weights: weights.collect(),
        at,
        sequence,
    })
}
