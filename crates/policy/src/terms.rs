//! Losses of single terms, in the order in which a learner adds them.

use levade_rl::Loss;
use levade_tree::TreeBatch;
use serde::{Deserialize, Serialize};

/// Losses of all terms of a batch, grouped by the units that go through the model one after
/// another.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LossTerms {
    /// Rows of each unit, in the order in which the learner adds them.
    pub units: Vec<Vec<LossRow>>,
}

/// Losses of the terms of one predicted distribution: the terms of all targets that the same token
/// predicts at the same temperature.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LossRow {
    /// Losses of the terms, in the order in which the learner adds them.
    pub terms: Vec<LossTerm>,
    /// Entropy of the predicted distribution in nats.
    pub entropy: f64,
    /// Entropy bonus, which is subtracted from the losses of the row.
    pub bonus: f64,
}

/// Log-probability and loss of one term.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct LossTerm {
    /// Index of the term in [`TreeBatch::terms`].
    pub term: u32,
    /// Log-probability of the target under the weights that are trained.
    pub logp: f32,
    /// Loss of the term before it is multiplied by the term's weight.
    pub loss: f64,
}

impl LossTerms {
    /// Returns the weighted sum of all terms, added in the learner's order. The sum equals
    /// [`ForwardBackward::loss`](crate::ForwardBackward::loss) to the bit.
    pub fn total(&self, batch: &TreeBatch) -> f64 {
        self.units
            .iter()
            .fold(0.0, |sum, rows| sum + rows.iter().fold(0.0, |sum, row| sum + row.total(batch)))
    }
}

impl LossRow {
    /// Evaluates the loss of the terms of `targets`, each given with its index and its
    /// log-probability.
    pub fn new(
        batch: &TreeBatch,
        loss: &Loss,
        targets: impl IntoIterator<Item = (usize, f32)>,
        entropy: f64,
    ) -> Self {
        let mut terms = Vec::new();
        let mut weights = Vec::new();
        for (target, logp) in targets {
            let target = &batch.targets[target];
            for (term, index) in batch.terms_of(target).iter().zip(target.first_term..) {
                terms.push(LossTerm { term: index, logp, loss: loss.evaluate(logp, term).loss });
            }
            weights.push(
                batch.terms_of(target).iter().map(|term| f64::from(term.weight)).sum::<f64>(),
            );
        }
        let bonus = if loss.entropy == 0.0 {
            0.0
        } else {
            weights.iter().sum::<f64>() * loss.entropy * entropy
        };
        LossRow { terms, entropy, bonus }
    }

    /// Returns the weighted sum of the row's terms, added in the learner's order, minus the entropy
    /// bonus.
    fn total(&self, batch: &TreeBatch) -> f64 {
        self.terms.iter().fold(0.0, |sum: f64, term| {
            let weight = batch.terms[term.term as usize].weight;
            // A term with weight 0 is not trained, whatever its loss.
            if weight == 0.0 { sum } else { sum + f64::from(weight) * term.loss }
        }) - self.bonus
    }
}
