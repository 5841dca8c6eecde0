//! The order in which a phase trains on tasks.

use levade_recipe::CurriculumKeys;
use levade_store::Attempt;
use serde_json::Value;

use super::curriculum::Curriculum;
use super::*;
use crate::metrics::Metrics;

/// The order of the training tasks in a phase: every task once per epoch, in a different order each
/// epoch, or as a curriculum chooses them.
pub(crate) struct TaskOrder {
    seed: u64,
    phase: u32,
    tasks: usize,
    /// The most recently used epoch with its order.
    epoch: Option<(u32, Vec<u32>)>,
    curriculum: Option<Curriculum>,
}

impl TaskOrder {
    /// Creates the order of all training tasks.
    pub(crate) fn new(seed: u64, phase: u32, tasks: usize) -> Self {
        TaskOrder { seed, phase, tasks, epoch: None, curriculum: None }
    }

    /// Creates the order of a phase, with the curriculum that it has.
    ///
    /// # Errors
    /// Returns an error if the curriculum does not fit the tasks.
    pub(crate) fn of_phase(
        seed: u64,
        phase: u32,
        tasks: &Tasks,
        keys: Option<&CurriculumKeys>,
    ) -> Result<Self, TrainerError> {
        let curriculum = keys.map(|keys| Curriculum::new(keys, seed, phase, tasks));
        let curriculum =
            curriculum.transpose().map_err(|why| TrainerError::Curriculum { phase, why })?;
        Ok(TaskOrder { curriculum, ..TaskOrder::new(seed, phase, tasks.train_len()) })
    }

    /// Returns the index of the task at position `position`, from 0. There must be at least one
    /// task. `recorded` is the task of an attempt that the store has for the position. A curriculum
    /// avoids the tasks in `busy`.
    pub(crate) fn task_index(
        &mut self,
        position: u64,
        recorded: Option<&Value>,
        busy: &[usize],
    ) -> usize {
        if let Some(curriculum) = &mut self.curriculum {
            return curriculum.choose(position, recorded, busy);
        }
        let epoch = (position / self.tasks as u64) as u32;
        let within = (position % self.tasks as u64) as usize;
        if self.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.epoch = Some((epoch, order(self.seed, "tasks", &[self.phase, epoch], self.tasks)));
        }
        self.epoch.as_ref().map_or(0, |(_, order)| order[within] as usize)
    }

    /// Returns the measured success at a task in 0..=1, if a curriculum has measured it.
    pub(crate) fn success(&self, task_index: usize) -> Option<f64> {
        self.curriculum.as_ref()?.success(task_index)
    }

    /// Returns whether the order depends on the results of attempts.
    pub(crate) fn needs_results(&self) -> bool {
        self.curriculum.is_some()
    }

    /// Passes to a curriculum the attempts of the group at a position that a step has taken.
    pub(crate) fn measure(&mut self, position: u64, attempts: &[Attempt]) {
        if let Some(curriculum) = &mut self.curriculum {
            let task = attempts.first().map(|attempt| &attempt.task);
            let scores: Vec<f64> = attempts.iter().filter_map(|attempt| attempt.score).collect();
            curriculum.measure(position, task, &scores);
        }
    }

    /// Adds the state of the curriculum to the metrics of a step.
    pub(crate) fn describe(&self, metrics: &mut Metrics) {
        if let Some(curriculum) = &self.curriculum {
            for (name, value) in curriculum.metrics() {
                metrics.add(format!("curriculum/{name}"), value);
            }
        }
    }
}
