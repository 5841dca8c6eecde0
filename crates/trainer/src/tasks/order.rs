//! The order in which a phase trains on tasks.

use levade_recipe::CurriculumKeys;
use levade_store::Attempt;
use serde_json::Value;

use super::curriculum::Curriculum;
use super::*;
use crate::metrics::Metrics;

/// The order of the training tasks in a phase. Every task occurs once per epoch, in a different
/// order each epoch, unless a curriculum samples the tasks.
pub(crate) struct TaskOrder {
    seed: u64,
    phase: u32,
    tasks: usize,
    /// The most recently used epoch, with the order of the tasks in that epoch.
    epoch: Option<(u32, Vec<u32>)>,
    curriculum: Option<Curriculum>,
}

impl TaskOrder {
    /// Creates an order in which each of `tasks` training tasks occurs once per epoch.
    pub(crate) fn new(seed: u64, phase: u32, tasks: usize) -> Self {
        TaskOrder { seed, phase, tasks, epoch: None, curriculum: None }
    }

    /// Creates the task order of a phase. `keys` are the keys of the phase's curriculum, or `None`
    /// if it has no curriculum.
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

    /// Returns the index of the task at `position` in the order, from 0. There must be at least one
    /// task. `recorded` is the task of an attempt that the store contains for the position. A
    /// curriculum avoids the tasks in `busy`.
    pub(crate) fn task_index(
        &mut self,
        position: u64,
        recorded: Option<&Value>,
        busy: &[usize],
    ) -> usize {
        if let Some(curriculum) = &mut self.curriculum {
            return curriculum.choose_task(position, recorded, busy);
        }
        let epoch = (position / self.tasks as u64) as u32;
        let within = (position % self.tasks as u64) as usize;
        if self.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.epoch = Some((
                epoch,
                shuffled_indices(self.seed, "tasks", &[self.phase, epoch], self.tasks),
            ));
        }
        self.epoch.as_ref().map_or(0, |(_, order)| order[within] as usize)
    }

    /// Returns the success at a task that a curriculum has measured, in 0..=1. Returns `None` if
    /// there is no measurement.
    pub(crate) fn success(&self, task_index: usize) -> Option<f64> {
        self.curriculum.as_ref()?.success(task_index)
    }

    /// Returns whether the order depends on the results of attempts.
    pub(crate) fn needs_results(&self) -> bool {
        self.curriculum.is_some()
    }

    /// Updates a curriculum with the attempts of the group at `position`, which a step has taken.
    pub(crate) fn measure(&mut self, position: u64, attempts: &[Attempt]) {
        if let Some(curriculum) = &mut self.curriculum {
            let task = attempts.first().map(|attempt| &attempt.task);
            let scores: Vec<f64> = attempts.iter().filter_map(|attempt| attempt.score).collect();
            curriculum.measure(position, task, &scores);
        }
    }

    /// Adds the metrics of the curriculum, if there is a curriculum, to the metrics of a step.
    pub(crate) fn add_curriculum_metrics(&self, metrics: &mut Metrics) {
        if let Some(curriculum) = &self.curriculum {
            for (name, value) in curriculum.metrics() {
                metrics.add(format!("curriculum/{name}"), value);
            }
        }
    }
}
