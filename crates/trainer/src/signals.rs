//! Queries the models about the sequences of a step before it is planned: a critic's values,
//! log-probabilities of a reference, entropies of the policy.
//!
//! Estimators of advantages need these numbers besides rewards. A greedy attempt to compare with (ReMax) is
//! sampled alongside the other attempts.

use std::collections::HashMap;

use levade_recipe::{Charge, Overlong, RlKeys};
use levade_store::{Attempt, PerToken, PlannedPath};
use levade_tree::{AttemptId, PathInput, PathTarget, SegmentId, Term, Trajectory};

use crate::TrainerError;
use crate::batch::{Paths, Targets, trained_paths};
use crate::policies::Models;
use crate::rewards::is_cut;
use crate::survey::{PathKey, Question, predictions, survey};

/// Knowledge of a path besides its record, a number for every trained token each; empty where not asked
/// for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Signals {
    /// A critic's values.
    pub values: Vec<f32>,
    /// A critic's value of the state that the path was cut in.
    pub cut: Option<f32>,
    /// Log-probabilities under the weights at the beginning of the step.
    pub logprobs: Vec<f32>,
    /// Log-probabilities under the reference.
    pub reference: Vec<f32>,
    /// Entropies of what these weights predict, in nats.
    pub entropies: Vec<f32>,
    /// Σ p² of what they predict.
    pub concentrations: Vec<f32>,
}

/// The signals of all paths of a step.
#[derive(Default)]
pub(crate) struct Heard(HashMap<PathKey, Signals>);

impl Heard {
    /// Asks the models for what advantages need to know. `context` is the longest path that they take.
    ///
    /// # Errors
    /// When a model fails.
    pub async fn of(
        keys: &RlKeys,
        models: Models<'_>,
        targets: Targets<'_>,
        groups: &[&[Attempt]],
        context: usize,
        budget: usize,
    ) -> Result<Self, TrainerError> {
        let charged = keys.kl.is_some_and(|kl| kl.apply_to == Charge::Reward);
        let mut heard = Heard::default();
        if !charged && models.critic.is_none() && !keys.needs_predictions() {
            return Ok(heard);
        }
        let paths = every_path(groups, targets);
        if let Some(critic) = models.critic {
            for (key, values) in survey(critic, Question::Values, &paths, budget).await? {
                heard.at(key).values = values;
            }
            if keys.overlong == Overlong::Bootstrap {
                heard.bootstrap(critic, targets, groups, context, budget).await?;
            }
        }
        if let Some(reference) = models.reference.filter(|_| charged) {
            for (key, logprobs) in survey(models.policy, Question::Logprobs, &paths, budget).await? {
                heard.at(key).logprobs = logprobs;
            }
            for (key, logprobs) in survey(reference, Question::Logprobs, &paths, budget).await? {
                heard.at(key).reference = logprobs;
            }
        }
        if keys.needs_predictions() {
            for (key, found) in predictions(models.policy, &paths, budget).await? {
                let signals = heard.at(key);
                (signals.logprobs, signals.entropies) = (found.logprobs, found.entropies);
                signals.concentrations = found.concentrations;
            }
        }
        Ok(heard)
    }

    /// The signals of one path.
    pub fn get(&self, attempt: AttemptId, leaf: SegmentId) -> Signals {
        self.0.get(&(attempt, leaf)).cloned().unwrap_or_default()
    }

    fn at(&mut self, key: PathKey) -> &mut Signals {
        self.0.entry(key).or_default()
    }

    /// Asks the critic what the states are worth in which attempts were cut.
    async fn bootstrap(
        &mut self,
        critic: &dyn levade_policy::Learner,
        targets: Targets<'_>,
        groups: &[&[Attempt]],
        context: usize,
        budget: usize,
    ) -> Result<(), TrainerError> {
        let mut fitting = Vec::new();
        let cut = |attempt: &&Attempt| attempt.reward.is_some() && is_cut(attempt);
        for attempt in groups.iter().copied().flatten().filter(cut) {
            let Some((leaf, input)) = end_of(&attempt.trajectory, targets) else { continue };
            let key = (attempt.id, leaf);
            if input.tokens.len() <= context {
                fitting.push((key, input));
            } else {
                // No state comes after a full context: the last one that has a value stands for it.
                let signals = self.at(key);
                signals.cut = signals.values.last().copied();
            }
        }
        for (key, values) in survey(critic, Question::Values, &fitting, budget).await? {
            self.at(key).cut = values.first().copied();
        }
        Ok(())
    }
}

/// Every path of the attempts that can be trained on, with all of its targets.
pub(crate) fn every_path(groups: &[&[Attempt]], targets: Targets<'_>) -> Vec<(PathKey, PathInput)> {
    let mut found = Vec::new();
    for attempt in groups.iter().copied().flatten().filter(|attempt| attempt.reward.is_some()) {
        let paths = Paths::of(&attempt.trajectory);
        for path in trained_paths(&attempt.trajectory, targets) {
            let planned = PlannedPath {
                attempt: attempt.id,
                leaf: path.leaf,
                advantage: PerToken::same(0.0),
                weight: PerToken::same(0.0),
                returns: None,
                values: None,
            };
            found.push(((attempt.id, path.leaf), paths.input(&planned, targets, 0)));
        }
    }
    found
}

/// The path on which the targets of an attempt were when it ended, and one token more on it as a target: a
/// critic's value for it is that of the state in which the attempt ended. `None` where nothing was sampled.
fn end_of(trajectory: &Trajectory, targets: Targets<'_>) -> Option<(SegmentId, PathInput)> {
    let last = |path: &crate::batch::TrainedPath| {
        path.turns.iter().flat_map(|action| &action.segments).map(|(segment, _)| *segment).max()
    };
    let path = trained_paths(trajectory, targets).into_iter().max_by_key(last)?;
    let mut tokens = trajectory.path_tokens(path.leaf);
    let index = tokens.len() as u32;
    // Any token will do: its predictor is what is asked about.
    tokens.push(*tokens.last()?);
    let target = PathTarget { index, temperature: 1.0, term: Term::default() };
    Some((path.leaf, PathInput { tokens: tokens.into(), targets: vec![target] }))
}

#[cfg(test)]
mod tests {
    use levade_tree::{Kind, Segment, VersionRun};

    use super::*;

    #[test]
    fn an_attempt_ends_where_it_acted_last() {
        let mut t = Trajectory::new();
        let sampled = |parent, token: u32| Segment {
            kind: Kind::Sampled,
            logprobs: vec![-1.0],
            versions: vec![VersionRun { version: 0, len: 1 }],
            ..Segment::given(Some(SegmentId(parent)), vec![token], 0)
        };
        assert_eq!(end_of(&t, Targets::DEFAULT).map(|(leaf, _)| leaf), None);
        t.push(Segment::given(None, vec![1, 2], 0)).unwrap();
        assert_eq!(end_of(&t, Targets::DEFAULT).map(|(leaf, _)| leaf), None);
        t.push(sampled(0, 3)).unwrap();
        t.push(sampled(0, 4)).unwrap();
        // What it observed after its last action is part of the state that it ended in.
        t.push(Segment::given(Some(SegmentId(2)), vec![5, 6], 1)).unwrap();
        let (leaf, input) = end_of(&t, Targets::DEFAULT).unwrap();
        assert_eq!((leaf, input.tokens), (SegmentId(3), vec![1, 2, 4, 5, 6, 6].into()));
        let [target] = &input.targets[..] else { panic!() };
        assert_eq!(target.index, 5);
    }
}
