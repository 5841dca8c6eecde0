//! Restores what earlier steps have taken, from the store.

use super::*;

impl GroupScheduler {
    /// Updates a curriculum with the results of the groups that completed steps have taken, in the
    /// order of the steps.
    pub(super) async fn measure_taken(
        &mut self,
        taken: &[u64],
        rollouts: &AttemptMaker,
    ) -> Result<(), TrainerError> {
        if !self.order.needs_results() {
            return Ok(());
        }
        for position in taken {
            let attempts = self.recorded_samples(*position, rollouts).await?;
            self.order.measure(*position, &attempts);
        }
        Ok(())
    }

    /// Reads the recorded attempts of a group that a step has taken.
    pub async fn recorded_samples(
        &self,
        position: u64,
        rollouts: &AttemptMaker,
    ) -> Result<Vec<Attempt>, TrainerError> {
        let num_started = (self.keys.group_size + self.keys.oversample) as u32;
        let mut attempts = Vec::with_capacity(num_started as usize);
        for member in (0..num_started).map(GroupMember::Sample) {
            let recorded = rollouts.store.last_try(&self.attempt_slot(position, member)).await?;
            // An attempt without a score was cancelled, because its group was complete without it.
            attempts.push(recorded.filter(|attempt| attempt.status != Status::Unscored));
        }
        if self.keys.oversample_keep == OversampleKeep::Started {
            attempts.truncate(group_len(&attempts, &self.keys).unwrap_or(attempts.len()));
        }
        Ok(attempts.into_iter().flatten().collect())
    }

    /// Reads the groups of a step that an earlier process planned from the store.
    pub async fn restore_step(
        &mut self,
        positions: &[u64],
        rollouts: &AttemptMaker,
        tasks: &Tasks,
    ) -> Result<StepGroups, TrainerError> {
        self.admit_groups_below(end_position(positions), positions, rollouts, tasks).await?;
        let mut groups = Vec::with_capacity(positions.len());
        let mut baselines = Vec::new();
        for position in positions {
            self.open.remove(position);
            let attempts = self.recorded_samples(*position, rollouts).await?;
            if attempts.len() < self.keys.group_size {
                let missing =
                    self.attempt_slot(*position, GroupMember::Sample(attempts.len() as u32));
                return Err(TrainerError::MissingAttempt(missing));
            }
            self.order.measure(*position, &attempts);
            groups.push(attempts);
            let slot = self.attempt_slot(*position, GroupMember::Baseline);
            let mut baseline = None;
            if self.keys.needs_baseline() {
                baseline = rollouts.store.last_try(&slot).await?;
                if baseline.is_none() {
                    return Err(TrainerError::MissingAttempt(slot));
                }
            }
            baselines.push(baseline);
        }
        self.waiting.retain(|(position, _)| !positions.contains(position));
        self.count_taken(positions);
        Ok(StepGroups {
            positions: positions.to_vec(),
            groups,
            excluded: Vec::new(),
            baselines,
            num_uninformative: 0,
        })
    }
}
