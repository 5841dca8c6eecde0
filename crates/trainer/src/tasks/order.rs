//! The order in which a phase trains on tasks.

use super::*;

/// The order of the training tasks in a phase: every task once per epoch, in a different order each
/// epoch.
pub(crate) struct TaskOrder {
    seed: u64,
    phase: u32,
    tasks: usize,
    /// The most recently used epoch with its order.
    epoch: Option<(u32, Vec<u32>)>,
}

impl TaskOrder {
    pub(crate) fn new(seed: u64, phase: u32, tasks: usize) -> Self {
        TaskOrder { seed, phase, tasks, epoch: None }
    }

    /// Returns the index of the task at position `position`, from 0. There must be at least one
    /// task.
    pub(crate) fn task_index(&mut self, position: u64) -> usize {
        let epoch = (position / self.tasks as u64) as u32;
        let within = (position % self.tasks as u64) as usize;
        if self.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.epoch = Some((epoch, order(self.seed, "tasks", &[self.phase, epoch], self.tasks)));
        }
        self.epoch.as_ref().map_or(0, |(_, order)| order[within] as usize)
    }
}
