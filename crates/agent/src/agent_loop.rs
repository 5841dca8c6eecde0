//! The contract of agent loops: whatever makes an attempt at a task.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use levade_policy::{Sampler, SamplingParams};
use levade_text::Message;
use levade_tree::{Outcome, Trajectory};

use crate::Teacher;
use levade_tasks::Task;

/// The policies of a run that can be sampled from, by name.
pub type Samplers = Arc<BTreeMap<String, Arc<dyn Sampler>>>;

/// All that an attempt is made from.
#[derive(Clone)]
pub struct AttemptContext {
    /// A name for tools and logs, unique to this try.
    pub name: String,
    /// The task, with all that is known of it.
    pub task: Task,
    /// The conversation so far: instructions and task, as the recipe puts them.
    pub messages: Vec<Message>,
    /// Seed of the run.
    pub seed: u64,
    /// The attempt's own stream of random numbers, unique in the run.
    pub stream: u64,
    /// Whether the attempt belongs to an evaluation: a trained policy then plays the agent that the task
    /// names, if the agent's mixture has one.
    pub is_evaluation: bool,
    /// How to sample.
    pub params: SamplingParams,
    /// The policies that can be asked. Versions that a segment records are those of the policy that it names.
    pub samplers: Samplers,
}

/// Picks one of several policies, by its place, by seed and stream of an attempt.
pub type Pick = Arc<dyn Fn(u64, u64) -> usize + Send + Sync>;

impl AttemptContext {
    /// Picks which policy of a mixture plays the task's agent. `trained` tells for each policy whether it
    /// learns.
    pub fn pick(&self, pick: &Pick, trained: &[bool]) -> usize {
        let place = pick(self.seed, self.stream);
        let measured = trained.iter().filter(|trained| **trained).count();
        if !self.is_evaluation || measured == 0 || trained.get(place) == Some(&true) {
            return place;
        }
        let learning = (0..trained.len()).filter(|at| trained[*at]);
        learning.cycle().nth(place).unwrap_or(place)
    }
}

/// Attempt that a loop has made.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// All tokens.
    pub trajectory: Trajectory,
    /// How the attempt ended.
    pub outcome: Outcome,
}

impl Attempt {
    /// Returns an attempt without tokens that broke in `source`.
    pub fn broken(source: &str, why: impl Into<String>) -> Self {
        let why = why.into();
        let mut outcome = Outcome { error: Some(why.clone()), ..Outcome::begun() };
        outcome.trouble(source, why);
        Attempt { trajectory: Trajectory::new(), outcome }
    }
}

/// Makes attempts.
///
/// Every token that a model saw or drew is in the trajectory of the attempt, exactly as it was; each segment
/// names the agent that acted and the policy that was asked.
#[async_trait]
pub trait AgentLoop: Send + Sync {
    /// Makes one attempt. What breaks is in its outcome, with everything recorded up to there: an attempt
    /// never fails the ones beside it.
    async fn run(&self, context: AttemptContext) -> Attempt;

    /// Such a loop in which a teacher acts in the place of trained policies, and in whose attempts its
    /// replies are demonstrations for these. `None` where it does not ask in messages.
    fn taught(&self, teacher: &Teacher) -> Option<Arc<dyn AgentLoop>> {
        let _ = teacher;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pick_takes_trained_policy_in_evaluations() {
        let context = |is_evaluation| AttemptContext {
            name: "a".into(),
            task: Task::default(),
            messages: Vec::new(),
            seed: 1,
            stream: 2,
            is_evaluation,
            params: SamplingParams::default(),
            samplers: Samplers::default(),
        };
        let picks = |is_evaluation, trained: &[bool]| -> Vec<usize> {
            let of = |place: usize| {
                let pick: Pick = Arc::new(move |_, _| place);
                context(is_evaluation).pick(&pick, trained)
            };
            (0..trained.len()).map(of).collect()
        };
        let mixture = [false, true, false, true];
        assert_eq!(picks(false, &mixture), [0, 1, 2, 3]);
        assert_eq!(picks(true, &mixture), [1, 1, 1, 3]);
        // Nothing there learns.
        assert_eq!(picks(true, &[false, false]), [0, 1]);
    }
}
