//! Schedules groups of attempts ahead of training, within a bound on off-policy staleness.
//!
//! # Staleness bound
//! Let η be the recipe's `staleness`: the maximum number of versions between sampling a token and
//! training on it. Let G be the number of groups per step, and v the number of completed steps of
//! the phase. A new group starts while fewer than (v + 1 + η) · G groups have started. η = 0 is
//! synchronous training, η = 1 is one step off-policy, and a larger η lets slow attempts span more
//! updates.
//!
//! A step takes G complete groups, in the order that the recipe prefers. Groups that started η
//! versions ago are due: the step takes all of them, and waits for incomplete ones. At most G
//! groups are ever due: at most (v − η + 1 + η) · G groups had started by version v − η, and the
//! completed steps have taken v · G of them. So the bound holds for every token, and no sampled
//! token is discarded to enforce it.
//!
//! # Oversampling and updates
//! If a recipe oversamples, a group is complete as soon as enough of its attempts have a reward:
//! those that end first, or those that started first. The remaining attempts are cancelled.
//!
//! Attempts in progress continue across an update, and each token has the version that sampled it.
//! A request that arrives while weights change waits until they are published. With η > 0, or with
//! oversampling, the order in which attempts end decides which groups a step takes. Such a run is a
//! function of its store, not of its recipe, and `replay` repeats it from the store.

mod experience;
mod group;
mod restore;

use std::collections::{BTreeMap, VecDeque};

use levade_policy::SamplingParams;
use levade_recipe::{GroupOrder, OversampleKeep, RlKeys, ZeroVarianceGroups};
use levade_store::{Attempt, Status};
use levade_tasks::Task;
use levade_tree::{AttemptSlot, Purpose};

use crate::TrainerError;
use crate::agents::TokenLimits;
use crate::batch::Targets;
use crate::checkpoint::Versions;
use crate::in_flight::{AttemptEvent, AttemptsInFlight, completed_attempts};
use crate::metrics::Metrics;
use crate::observe::{Event, Observer};
use crate::rewards;
use crate::rollout::{AttemptMaker, ScorerOutage};
use crate::rules::Rules;
use crate::tasks::{TaskOrder, Tasks};
pub(crate) use group::ExcludedAttempts;
use group::{Group, GroupMember, group_len};

/// Schedules the groups of one RL phase: groups in progress and groups waiting to be trained on.
pub(crate) struct GroupScheduler {
    phase: u32,
    keys: RlKeys,
    order: TaskOrder,
    /// Number of completed steps of the phase.
    step: u32,
    /// Versions of the policies that the phase trains, when the phase started.
    initial_versions: Versions,
    /// Number of groups that steps have taken, including replaced groups.
    taken: u64,
    /// Number of taken groups that had been replaced by another group.
    spent: u64,
    /// Number of admitted groups: they have the first positions in the task order.
    admitted: u64,
    /// Admitted groups that no step has taken yet, by position in the task order.
    open: BTreeMap<u64, Group>,
    /// Attempts of admitted groups that have not started yet.
    waiting: VecDeque<(u64, GroupMember)>,
    in_flight: AttemptsInFlight<(u64, GroupMember)>,
    /// A finished attempt that is being recorded. It is stored here because the caller of
    /// [`GroupScheduler::next_event`] may drop the future during the write.
    ended: Option<((u64, GroupMember), Attempt)>,
    /// Scorers that are unavailable.
    scorer_outage: ScorerOutage,
    completions: u64,
    /// Maximum number of sampled tokens per attempt, by agent.
    limits: TokenLimits,
    rules: Rules,
}

/// The groups of attempts that a step trains on.
pub(crate) struct StepGroups {
    /// Positions of the groups in the task order.
    pub positions: Vec<u64>,
    /// Attempts of each group.
    pub groups: Vec<Vec<Attempt>>,
    /// Attempts that were started for each group but do not belong to it. Empty if the step was
    /// planned by an earlier process.
    pub excluded: Vec<ExcludedAttempts>,
    /// The greedy baseline attempt of each group. All are `None` if the advantage estimator uses no
    /// baseline.
    pub baselines: Vec<Option<Attempt>>,
    /// Number of groups without training signal that were not replaced, because the refill budget
    /// was exhausted.
    pub num_uninformative: usize,
}

impl GroupScheduler {
    /// Creates the scheduler of a phase. `initial_versions` are the versions of the phase's
    /// policies at its start, `step` is the number of completed steps, and `taken` are the
    /// positions of the groups that these steps took.
    ///
    /// # Errors
    /// Returns an error if the store cannot be read.
    #[allow(clippy::too_many_arguments)]
    pub async fn new(
        phase: u32,
        keys: &RlKeys,
        order: TaskOrder,
        initial_versions: Versions,
        step: u32,
        taken: &[u64],
        rollouts: &AttemptMaker,
        tasks: &Tasks,
        rules: Rules,
    ) -> Result<Self, TrainerError> {
        let mut scheduler = GroupScheduler {
            phase,
            keys: keys.clone(),
            order,
            step,
            initial_versions,
            taken: taken.len() as u64,
            spent: (taken.len() as u64).saturating_sub(u64::from(step) * keys.groups as u64),
            admitted: 0,
            open: BTreeMap::new(),
            waiting: VecDeque::new(),
            in_flight: AttemptsInFlight::new(rollouts.scorers.clone(), rollouts.store.clone()),
            ended: None,
            scorer_outage: ScorerOutage::default(),
            completions: 0,
            limits: rollouts.agents.token_limits(),
            rules,
        };
        scheduler.measure_taken(taken, rollouts).await?;
        scheduler.admit_groups_below(end_position(taken), taken, rollouts, tasks).await?;
        Ok(scheduler)
    }

    /// Adds the state of the curriculum to the metrics of a step.
    pub fn add_curriculum_metrics(&self, metrics: &mut Metrics) {
        self.order.add_curriculum_metrics(metrics);
    }

    /// Returns the slot of an attempt. The step and the group in the slot encode the position of
    /// the attempt's group in the task order. The attempt may be trained on in another step.
    fn attempt_slot(&self, position: u64, member: GroupMember) -> AttemptSlot {
        let groups = self.keys.groups as u64;
        let step = (position / groups) as u32;
        let group = (position % groups) as u32;
        let (purpose, sample) = match member {
            GroupMember::Sample(sample) => (Purpose::Train, sample),
            GroupMember::Baseline => (Purpose::Baseline, 0),
        };
        AttemptSlot { purpose, phase: self.phase, step, group, sample }
    }

    /// Admits the group at a position: reads its recorded attempts, and queues the missing
    /// attempts. The scheduler does not change until all reads have succeeded.
    async fn open_group(
        &mut self,
        position: u64,
        rollouts: &AttemptMaker,
        tasks: &Tasks,
    ) -> Result<(), TrainerError> {
        let num_started = self.keys.group_size + self.keys.oversample;
        let mut attempts = Vec::with_capacity(num_started);
        let mut waiting = Vec::new();
        for member in (0..num_started as u32).map(GroupMember::Sample) {
            let recorded = rollouts.store.last_try(&self.attempt_slot(position, member)).await?;
            if recorded.is_none() {
                waiting.push((position, member));
            }
            attempts.push(recorded);
        }
        // Tokens that an earlier process of the run sampled keep their age, whether or not the
        // attempt is scored.
        let oldest_version = oldest_sampled_step(&attempts, &self.initial_versions);
        let mut baseline = None;
        if self.keys.needs_baseline() {
            baseline = rollouts
                .store
                .last_try(&self.attempt_slot(position, GroupMember::Baseline))
                .await?;
            if baseline.is_none() {
                waiting.push((position, GroupMember::Baseline));
            }
        }
        let recorded = attempts.iter().chain([&baseline]).flatten().next();
        let recorded = recorded.map(|attempt| &attempt.task);
        let busy: Vec<usize> = self.open.values().map(|group| group.task_index).collect();
        let task_index = self.order.task_index(position, recorded, &busy);
        let Some(mut task) = tasks.train(task_index) else { return Ok(()) };
        if rollouts.scorers.depend_on_success() {
            // All attempts of a group must have the same scorers, even if the run was resumed in
            // between.
            task.measured_success = match recorded {
                Some(recorded) => recorded["measured_success"].as_f64(),
                None => self.order.success(task_index),
            };
        }
        let keys = (0..num_started as u32).map(GroupMember::Sample).chain([GroupMember::Baseline]);
        let mut unscored = Vec::new();
        for (member, recorded) in keys.zip(attempts.iter_mut().chain([&mut baseline])) {
            if let Some(attempt) = recorded.take_if(|attempt| attempt.status == Status::Unscored) {
                unscored.push((member, rollouts.prepare_for_scoring(attempt, &task).await?));
            }
        }
        self.waiting.extend(waiting);
        for (member, made) in unscored {
            self.in_flight.start_scoring((position, member), made);
        }
        let group = Group {
            task,
            task_index,
            admitted: u32::try_from(oldest_version)
                .map_or(self.step, |oldest_version| oldest_version.min(self.step)),
            attempts,
            full: false,
            baseline,
            completed: None,
            replaced: false,
            compared: Vec::new(),
            excluded: ExcludedAttempts::default(),
        };
        self.open.insert(position, group);
        self.complete_if_done(position);
        Ok(())
    }

    /// Admits all groups at positions below `end`, except the positions in `taken`. A resumed run
    /// thereby restores groups that an earlier process had started while it took later groups.
    async fn admit_groups_below(
        &mut self,
        end: u64,
        taken: &[u64],
        rollouts: &AttemptMaker,
        tasks: &Tasks,
    ) -> Result<(), TrainerError> {
        for position in self.admitted..end {
            if !taken.contains(&position) {
                self.open_group(position, rollouts, tasks).await?;
            }
            self.admitted = position + 1;
        }
        Ok(())
    }

    /// Returns the number of groups that the staleness bound allows to start so far. Each replaced
    /// group raises the number by one.
    fn capacity(&self) -> u64 {
        let groups = self.keys.groups as u64;
        let steps = u64::from(self.keys.steps);
        let ahead = u64::from(self.step) + 1 + u64::from(self.keys.staleness);
        let replaced = self.open.values().filter(|group| group.replaced).count() as u64;
        ahead.min(steps) * groups + self.spent + replaced
    }

    /// Admits groups up to the capacity, and starts attempts up to the concurrency limit.
    pub async fn admit_groups(
        &mut self,
        rollouts: &AttemptMaker,
        tasks: &Tasks,
    ) -> Result<(), TrainerError> {
        // Opening a recorded group without training signal raises the capacity.
        while self.admitted < self.capacity() {
            self.admit_groups_below(self.capacity(), &[], rollouts, tasks).await?;
        }
        while self.in_flight.num_generating() < rollouts.concurrency
            && let Some(index) = self.next_waiting()
            && let Some((position, member)) = self.waiting.remove(index)
        {
            let slot = self.attempt_slot(position, member);
            let Some(group) = self.open.get(&position) else { continue };
            let temperature =
                if member == GroupMember::Baseline { 0.0 } else { self.keys.temperature };
            let params = SamplingParams { temperature, ..SamplingParams::default() };
            let task = group.task_with_experience(member, self.keys.experience.as_ref());
            let attempt = rollouts.generate_attempt(&slot, &task, params, true)?;
            self.in_flight.start_generating((position, member), attempt);
        }
        Ok(())
    }

    /// Returns the queue index of the first waiting attempt that can start.
    fn next_waiting(&self) -> Option<usize> {
        let experience = self.keys.experience.as_ref();
        self.waiting.iter().position(|(position, member)| {
            self.open.get(position).is_none_or(|group| group.can_start(*member, experience))
        })
    }

    /// Waits for the next event of an attempt in progress, and records the attempt if it has ended.
    /// Returns `false` if no attempt is in progress.
    ///
    /// `needs` states whether a step waits for the attempts. If so, and if all attempts wait for
    /// unavailable scorers, the wait is limited to the outage timeout.
    ///
    /// This method is cancel safe: if the future is dropped, the next call continues from the same
    /// state.
    pub async fn next_event(
        &mut self,
        rollouts: &AttemptMaker,
        tasks: &Tasks,
        needs: bool,
        observer: &mut dyn Observer,
    ) -> Result<bool, TrainerError> {
        self.admit_groups(rollouts, tasks).await?;
        if needs {
            self.scorer_outage.report(observer);
        }
        if self.ended.is_none() {
            let limit = needs.then(|| rollouts.scorers.outage_timeout());
            match self.in_flight.next(limit).await? {
                None => return Ok(false),
                Some(
                    AttemptEvent::Attempt(key, attempt)
                    | AttemptEvent::NeedsComparison(key, attempt),
                ) => {
                    self.ended = Some((key, attempt));
                }
                Some(AttemptEvent::Retry((position, member))) => {
                    if self.is_needed(position, member) {
                        self.waiting.push_front((position, member));
                    }
                    return Ok(true);
                }
                Some(AttemptEvent::ScorerUnavailable(failure)) => {
                    self.scorer_outage.add(&failure);
                    return Ok(true);
                }
            }
        }
        if let Some(((position, member), attempt)) = &self.ended
            && self.is_needed(*position, *member)
        {
            rollouts.record_completed(attempt).await?;
        }
        let Some(((position, member), attempt)) = self.ended.take() else { return Ok(true) };
        if !self.is_needed(position, member) {
            return Ok(true);
        }
        let Some(group) = self.open.get_mut(&position) else { return Ok(true) };
        let is_scored = attempt.status != Status::Unscored;
        let sampled_tokens = attempt.trajectory.sampled_tokens();
        match member {
            GroupMember::Sample(sample) => {
                group.compared.retain(|other| *other != sample);
                group.attempts[sample as usize] = Some(attempt);
            }
            GroupMember::Baseline => group.baseline = Some(attempt),
        }
        self.complete_if_done(position);
        if is_scored {
            let (done, total) = self.attempt_progress();
            observer.event(&Event::Attempt {
                purpose: Purpose::Train,
                done,
                total,
                sampled_tokens,
            });
        }
        self.admit_groups(rollouts, tasks).await?;
        Ok(true)
    }

    /// Returns whether a group still needs one of the attempts that were started for it.
    fn is_needed(&self, position: u64, member: GroupMember) -> bool {
        self.open.get(&position).is_some_and(|group| match member {
            GroupMember::Sample(sample) if group.full => group.compared.contains(&sample),
            GroupMember::Sample(_) | GroupMember::Baseline => true,
        })
    }

    /// Marks a group as complete if it needs no further attempts. If the group has no training
    /// signal, raises the capacity by one, so that another group replaces it.
    fn complete_if_done(&mut self, position: u64) {
        let Some(group) = self.open.get_mut(&position).filter(|group| group.completed.is_none())
        else {
            return;
        };
        if !group.full {
            let Some(end) = group_len(&group.attempts, &self.keys) else { return };
            group.full = true;
            let not_started = self
                .waiting
                .iter()
                .filter(|(group_position, member)| {
                    *group_position == position && *member != GroupMember::Baseline
                })
                .count();
            let running = group.attempts.iter().filter(|attempt| attempt.is_none()).count();
            let beyond = group.attempts[end..].iter_mut().filter_map(Option::take);
            group.excluded = ExcludedAttempts {
                ended: beyond.map(|attempt| attempt.trajectory.sampled_tokens()).collect(),
                cancelled: running.saturating_sub(not_started),
            };
            self.in_flight.cancel(|(group_position, member)| {
                *group_position == position && *member != GroupMember::Baseline
            });
            self.waiting.retain(|(waiting, member)| {
                *waiting != position || *member == GroupMember::Baseline
            });
            let waits = group.attempts.iter_mut().zip(0..).filter_map(|(attempt, sample)| {
                let attempt = attempt.take_if(|attempt| attempt.status == Status::Unscored)?;
                Some(((position, GroupMember::Sample(sample)), attempt))
            });
            let waits: Vec<_> = waits.collect();
            if !waits.is_empty() {
                group.compared = waits.iter().map(|(_, attempt)| attempt.slot.sample).collect();
                self.in_flight
                    .score_together(waits, completed_attempts(group.attempts.iter().flatten()));
            }
        }
        if !group.compared.is_empty() {
            return;
        }
        if self.keys.needs_baseline() && group.baseline.is_none() {
            return;
        }
        group.completed = Some(self.completions);
        self.completions += 1;
        // At most as many groups as one step has are sampled as replacements. The limit refers to
        // positions, so that the order in which attempts end has no effect.
        let ahead = (2 + u64::from(self.keys.staleness)) * self.keys.groups as u64;
        let is_uninformative = self.is_uninformative(position);
        if let Some(group) = self.open.get_mut(&position) {
            group.replaced = position < self.taken + ahead && is_uninformative;
        }
    }

    /// Returns whether the group at a position carries no training signal and the recipe replaces
    /// such groups.
    fn is_uninformative(&self, position: u64) -> bool {
        let refills = self.keys.zero_variance_groups() == ZeroVarianceGroups::Refill;
        self.open.get(&position).filter(|_| refills).is_some_and(|group| {
            // The group is informative for any policy whose own attempts got different rewards.
            self.initial_versions.keys().all(|policy| {
                let requires_acting = self.rules.requires_acting;
                let targets = Targets { policy, untrained: &[], requires_acting };
                let samples =
                    group.attempts.iter().flatten().filter(|a| rewards::is_sample(a, targets));
                rewards::is_uninformative(
                    &self.keys,
                    &rewards::rewarded_attempts(samples, &self.keys, &self.limits),
                )
            })
        })
    }

    /// Returns the positions of the groups that the next step takes, including replaced groups.
    /// Returns `None` until all groups of the step are complete.
    fn next_positions(&self) -> Option<Vec<u64>> {
        let size = self.keys.groups;
        let is_due =
            |group: &Group| group.admitted.saturating_add(self.keys.staleness) <= self.step;
        let is_informative = |group: &&Group| !group.replaced;
        let mut chosen: Vec<u64> = self
            .open
            .iter()
            .filter(|(_, g)| is_due(g) && !g.replaced)
            .map(|(position, _)| *position)
            .collect();
        chosen.truncate(size);
        if chosen.iter().any(|position| self.open[position].completed.is_none()) {
            return None;
        }
        let mut other_groups: Vec<(&u64, &Group)> = self
            .open
            .iter()
            .filter(|(position, group)| {
                !chosen.contains(position) && is_informative(group) && group.completed.is_some()
            })
            .collect();
        match self.keys.prefer {
            GroupOrder::Oldest => {}
            GroupOrder::FirstDone => other_groups.sort_by_key(|(_, group)| group.completed),
            GroupOrder::Freshest => other_groups.sort_by_key(|(position, group)| {
                std::cmp::Reverse((
                    oldest_sampled_step(&group.attempts, &self.initial_versions),
                    **position,
                ))
            }),
        }
        let rest = size.saturating_sub(chosen.len());
        chosen.extend(other_groups.into_iter().take(rest).map(|(position, _)| *position));
        if chosen.len() < size {
            return None;
        }
        // Replaced groups without training signal are consumed as well.
        chosen.extend(
            self.open.iter().filter(|(_, group)| group.replaced).map(|(position, _)| *position),
        );
        chosen.sort_unstable();
        Some(chosen)
    }

    /// Takes the groups of the next step. Returns `None` if the groups are not complete yet.
    pub fn take_groups(&mut self) -> Option<StepGroups> {
        let positions = self.next_positions()?;
        let uninformative =
            positions.iter().filter(|position| self.is_uninformative(**position)).count();
        let uninformative = uninformative - (positions.len() - self.keys.groups);
        self.count_taken(&positions);
        let mut excluded = Vec::with_capacity(positions.len());
        let (groups, baselines): (Vec<Vec<Attempt>>, _) = positions
            .iter()
            .filter_map(|position| self.open.remove(position))
            .map(|group| {
                excluded.push(group.excluded);
                (group.attempts.into_iter().flatten().collect(), group.baseline)
            })
            .unzip();
        for (position, attempts) in positions.iter().zip(&groups) {
            self.order.measure(*position, attempts);
        }
        Some(StepGroups {
            positions,
            groups,
            excluded,
            baselines,
            num_uninformative: uninformative,
        })
    }

    /// Counts the groups at these positions as taken by a step.
    fn count_taken(&mut self, positions: &[u64]) {
        self.taken += positions.len() as u64;
        self.spent += (positions.len() as u64).saturating_sub(self.keys.groups as u64);
    }

    /// Sets the number of completed steps. Must be called once the weights of the last step are
    /// published.
    pub fn set_completed_steps(&mut self, step: u32) {
        self.step = step;
    }

    /// Returns the number of finished attempts for the next step, and the number of attempts that
    /// the step needs.
    fn attempt_progress(&self) -> (usize, usize) {
        let total = self.keys.groups * self.keys.group_size;
        let done: usize = self
            .open
            .values()
            .filter(|group| !group.replaced)
            .map(|group| group.attempts.iter().flatten().count())
            .sum();
        (done.min(total), total)
    }

    /// Returns whether an attempt is in progress or is being recorded.
    pub fn is_running(&self) -> bool {
        !self.in_flight.is_empty() || self.ended.is_some()
    }
}

/// Returns the highest position plus one, or 0 if there are no positions.
fn end_position(positions: &[u64]) -> u64 {
    positions.iter().map(|position| position + 1).max().unwrap_or(0)
}

/// Returns the number of completed steps at which the oldest token of these attempts was sampled.
/// `initial_versions` contains the versions of the phase's policies at its start. Tokens of other
/// policies are ignored, because the weights of these policies do not age.
fn oldest_sampled_step(attempts: &[Option<Attempt>], initial_versions: &Versions) -> u64 {
    let segments = attempts.iter().flatten().flat_map(|attempt| attempt.trajectory.segments());
    let steps =
        segments.filter_map(|segment| Some((segment, *initial_versions.get(&segment.policy)?)));
    let steps = steps.flat_map(|(segment, initial_versions)| {
        segment.versions.iter().map(move |run| run.version.saturating_sub(initial_versions))
    });
    steps.min().unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "flow_tests.rs"]
mod tests;
