//! A phase of reinforcement learning.

use std::time::Instant;

use levade_policy::crash_point;
use levade_recipe::{Phase, RlKeys};
use levade_store::{Attempt, PolicyPlan, StepPlan};
use levade_traces::Chats;

use super::describe::SamplerSnapshot;
use super::{check_not_withdrawn, describe, diversity, trajectories_by_id};
use crate::TrainerError;
use crate::batch::TokenCensus;
use crate::context::RunContext;
use crate::exit::EarlyExit;
use crate::learn::{MicroBatchProgress, UpdateOutcome, UpdateSettings, run_plan};
use crate::metrics::Metrics;
use crate::observe::{Event, Observer, StopFlag};
use crate::plan;
use crate::progress::RunProgress;
use crate::reference::update_references;
use crate::scheduler::{GroupScheduler, StepGroups};
use crate::signals::SignalTable;
use crate::tasks::TaskOrder;

pub(crate) struct RlPhase {
    phase: Phase,
    index: u32,
    keys: RlKeys,
    scheduler: GroupScheduler,
    /// Chat formats with which tool calls are parsed from attempts.
    chats: Chats,
}

impl RlPhase {
    pub async fn new(
        phase: Phase,
        index: u32,
        keys: RlKeys,
        run: &RunContext,
        progress: &RunProgress,
    ) -> Result<Self, TrainerError> {
        let RunContext { recipe, tasks, rollouts, store, .. } = run;
        let order = TaskOrder::of_phase(recipe.run.seed, index, tasks, keys.curriculum.as_ref())?;
        let done = progress.steps_done(index);
        let mut taken = Vec::new();
        for step in 0..done {
            let plan = store.step_plan(index, step).await?;
            taken.extend(plan.map_or_else(
                || default_group_positions(&keys, step),
                |plan| group_positions(&plan, &keys),
            ));
        }
        let initial_version = |name: String| {
            let version = progress.version(&name) - u64::from(done);
            (name, version)
        };
        let initial_versions =
            recipe.trained_policies_in(&phase).into_iter().map(initial_version).collect();
        let scheduler = GroupScheduler::new(
            index,
            &keys,
            order,
            initial_versions,
            done,
            &taken,
            rollouts,
            tasks,
            run.origin.rules,
        )
        .await?;
        run.past.reset_results();
        if run.past.needs_results() {
            for position in &taken {
                let attempts = scheduler.recorded_samples(*position, rollouts).await?;
                run.past.record_results(attempts.iter());
            }
        }
        Ok(RlPhase { phase, index, keys, scheduler, chats: rollouts.agents.chats() })
    }

    pub async fn run_step(
        &mut self,
        run: &RunContext,
        progress: &RunProgress,
        step: u32,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<(Metrics, Vec<Attempt>), EarlyExit> {
        let start = Instant::now();
        let RunContext { rollouts, tasks, store, .. } = run;
        let sampler = &rollouts.agents.first().sampler;
        let before = SamplerSnapshot::take(&**sampler).await?;
        let used = rollouts.agents.toolbox_usage();
        self.scheduler.set_completed_steps(step);
        update_references(run, &self.phase, step).await?;
        let planned = store.step_plan(self.index, step).await?;
        if let Some(plan) = &planned {
            check_not_withdrawn(&**store, plan.sequences().map(|it| it.attempt)).await?;
        }
        let taken = match &planned {
            Some(plan) => {
                self.scheduler
                    .restore_step(&group_positions(plan, &self.keys), rollouts, tasks)
                    .await?
            }
            None => collect_groups(&mut self.scheduler, run, observer, stop).await?,
        };
        let attempts = taken.groups.concat();
        run.past.record_results(attempts.iter());
        let baselines: Vec<Attempt> = taken.baselines.iter().flatten().cloned().collect();
        let made = [attempts.as_slice(), &baselines].concat();
        rollouts.record_failed_attempts(&made).await?;
        if taken.num_uninformative > 0 {
            let note = format!(
                "step {step}: for {} of {} tasks, all attempts earned the same reward, although \
                 as many additional tasks as a step has were sampled",
                taken.num_uninformative, self.keys.groups
            );
            observer.event(&Event::Note(note));
        }
        let waited = start.elapsed().as_secs_f64();
        let groups: Vec<&[Attempt]> = taken.groups.iter().map(Vec::as_slice).collect();

        // Attempts continue while the weights are trained.
        let RlPhase { scheduler, phase, index, keys, chats } = self;
        let has_reward =
            |baseline: &&Option<Attempt>| baseline.as_ref().is_some_and(|b| b.reward.is_some());
        let missing = taken.baselines.len() - taken.baselines.iter().filter(has_reward).count();
        let missing = if keys.needs_baseline() { missing } else { 0 };
        if missing > 0 {
            let note = format!(
                "step {step}: the greedy attempts at {missing} of {} tasks failed; the other \
                 attempts at these tasks are left out, because there is no baseline",
                taken.groups.len()
            );
            observer.event(&Event::Note(note));
        }
        let context = PhaseContext { phase, index: *index, keys, run, progress };
        let learning = Instant::now();
        let training = async {
            let plan = match planned {
                Some(plan) => plan,
                None => {
                    let policies = context.plan_step(step, &groups, &taken.baselines).await?;
                    StepPlan {
                        phase: context.index,
                        step,
                        group_positions: taken.positions.clone(),
                        policies,
                    }
                }
            };
            store.record_step(&plan).await?;
            crash_point("ledger_written");
            let outcomes = context.train_policies(step, &plan, &attempts, observer).await?;
            Ok::<_, TrainerError>((plan, outcomes))
        };
        let (plan, outcomes) = run_alongside(scheduler, run, training).await?;
        let aside =
            |of: &UpdateOutcome| of.reference_seconds + of.critic_seconds + of.prepare_seconds;
        let updated = learning.elapsed().as_secs_f64() - outcomes.iter().map(aside).sum::<f64>();

        let mut metrics = Metrics::default();
        describe::add_attempt_metrics(&groups, &mut metrics);
        diversity::add_diversity_metrics(&groups, chats, &mut metrics);
        run.past.add_metrics(attempts.iter(), |policy| progress.version(policy), &mut metrics);
        scheduler.add_curriculum_metrics(&mut metrics);
        let lengths =
            |group: &&[Attempt]| group.iter().map(|a| a.trajectory.sampled_tokens()).collect();
        let lengths: Vec<Vec<usize>> = groups.iter().map(lengths).collect();
        describe::add_oversampling_metrics(&lengths, &taken.excluded, &mut metrics);
        let several = plan.policies.len() > 1;
        for (policy, outcome) in plan.policies.iter().zip(&outcomes) {
            let mut found = context.policy_metrics(step, policy, outcome, &attempts);
            if several {
                found.add("timing_s/update_actor", outcome.update_seconds);
            }
            metrics.extend(several.then_some(policy.policy.as_str()), found);
        }
        if keys.needs_baseline() {
            describe::add_baseline_metrics(&baselines, missing, &mut metrics);
        }
        if keys.kl.is_some_and(|kl| kl.reference_every > 0) {
            metrics.add("actor/reference_age", f64::from(step - keys.reference_step(step)));
        }
        let step_seconds = start.elapsed().as_secs_f64();
        describe::add_sampler_metrics(
            &before,
            &SamplerSnapshot::take(&**sampler).await?,
            step_seconds,
            &mut metrics,
        );
        describe::add_tool_metrics(&used, &rollouts.agents.toolbox_usage(), &mut metrics);
        context.add_timing_metrics(
            &attempts,
            &outcomes,
            waited,
            updated,
            step_seconds,
            &mut metrics,
        );
        describe::add_memory_metrics(&mut metrics);
        Ok((metrics, made))
    }
}

/// Returns the positions of a step's groups in the task order if the recorded plan does not contain
/// them: the next `groups` positions.
fn default_group_positions(keys: &RlKeys, step: u32) -> Vec<u64> {
    let groups = keys.groups as u64;
    (u64::from(step) * groups..(u64::from(step) + 1) * groups).collect()
}

/// Returns the positions, in the task order, of the groups that a planned step trains on.
pub(crate) fn group_positions(plan: &StepPlan, keys: &RlKeys) -> Vec<u64> {
    if plan.group_positions.is_empty() {
        default_group_positions(keys, plan.step)
    } else {
        plan.group_positions.clone()
    }
}

/// Waits until the groups of the next step are complete, and takes them from the scheduler.
async fn collect_groups(
    scheduler: &mut GroupScheduler,
    run: &RunContext,
    observer: &mut dyn Observer,
    stop: &StopFlag,
) -> Result<StepGroups, EarlyExit> {
    let RunContext { rollouts, tasks, .. } = run;
    scheduler.admit_groups(rollouts, tasks).await?;
    loop {
        if let Some(taken) = scheduler.take_groups() {
            return Ok(taken);
        }
        tokio::select! {
            // A fixed order of the branches makes simulations repeatable.
            biased;
            more = scheduler.next_event(rollouts, tasks, true, observer) => if !more? {
                return Err(TrainerError::NoAttemptsInFlight.into());
            },
            // Attempts in progress are abandoned. The resumed run repeats them from the same random
            // streams.
            () = stop.stopped() => return Err(EarlyExit::Stopped),
        }
    }
}

/// Runs the future `work` while the scheduler continues to start, score and record attempts.
async fn run_alongside<T>(
    scheduler: &mut GroupScheduler,
    run: &RunContext,
    work: impl Future<Output = Result<T, TrainerError>>,
) -> Result<T, TrainerError> {
    let RunContext { rollouts, tasks, .. } = run;
    scheduler.admit_groups(rollouts, tasks).await?;
    tokio::pin!(work);
    let mut unseen = ();
    loop {
        tokio::select! {
            // A fixed order of the branches makes simulations repeatable.
            biased;
            done = &mut work => return done,
            more = scheduler.next_event(rollouts, tasks, false, &mut unseen),
                if scheduler.is_running() => { more?; }
        }
    }
}

/// The parts of a phase and its run that are needed to plan and train a step.
struct PhaseContext<'a> {
    phase: &'a Phase,
    index: u32,
    keys: &'a RlKeys,
    run: &'a RunContext,
    progress: &'a RunProgress,
}

impl PhaseContext<'_> {
    async fn train_policies(
        &self,
        step: u32,
        plan: &StepPlan,
        attempts: &[Attempt],
        observer: &mut dyn Observer,
    ) -> Result<Vec<UpdateOutcome>, TrainerError> {
        let trajectories = trajectories_by_id(attempts);
        let mut micro_batches = MicroBatchProgress::new(plan);
        let mut outcomes = Vec::with_capacity(plan.policies.len());
        for policy in &plan.policies {
            let name = policy.policy.as_str();
            let policy_learner = self.run.policies.policy_learner(name)?;
            let models = policy_learner.models(self.phase);
            let settings = self.update_settings(name, step);
            outcomes.push(
                run_plan(policy, &trajectories, models, &settings, &mut micro_batches, observer)
                    .await?,
            );
        }
        Ok(outcomes)
    }

    fn update_settings<'t>(&'t self, policy: &'t str, step: u32) -> UpdateSettings<'t> {
        let RunContext { origin, recipe, .. } = self.run;
        let targets = self.run.targets(policy);
        let version = self.progress.version(policy);
        UpdateSettings::new((self.index, self.phase), step, Some(origin), targets, version, recipe)
    }

    /// Computes the metrics of one policy in a step.
    fn policy_metrics(
        &self,
        step: u32,
        plan: &PolicyPlan,
        outcome: &UpdateOutcome,
        attempts: &[Attempt],
    ) -> Metrics {
        let mut metrics = Metrics::default();
        let advantages = plan.sequences().flat_map(|sequence| {
            sequence.advantage.run_values().map(f64::from).collect::<Vec<_>>()
        });
        metrics.add_spread("critic/advantages", advantages);
        if let Some(kl) = plan.kl {
            metrics.add("actor/reward_kl_penalty", kl.found);
            metrics.add("actor/reward_kl_penalty_coeff", kl.coefficient);
        }
        if let Some(high) = &plan.high_entropy {
            describe::add_high_entropy_metrics(high, &mut metrics);
        }
        let settings = self.update_settings(&plan.policy, step);
        describe::add_mask_metrics(
            &plan::count_target_tokens(attempts.iter(), settings.targets, self.keys),
            &mut metrics,
        );
        describe::add_age_metrics(attempts, settings.targets, settings.version, &mut metrics);
        outcome.report(self.phase, settings.policy, &mut metrics);
        metrics
    }

    /// Returns the coefficient of the phase's KL penalty: the recipe's coefficient or, if the
    /// penalty is adaptive, the coefficient that follows from the previous step. Returns 0 if the
    /// phase has no KL penalty.
    async fn kl_coefficient(&self, policy: &str, step: u32) -> Result<f64, TrainerError> {
        let Some(kl) = self.keys.kl else { return Ok(0.0) };
        let (Some(adaptive), Some(before)) = (kl.adaptive, step.checked_sub(1)) else {
            return Ok(kl.coefficient);
        };
        let before = self.run.store.step_plan(self.index, before).await?;
        let before = before.and_then(|plan| {
            plan.policies.into_iter().find(|policy_plan| policy_plan.policy == policy)?.kl
        });
        Ok(before.map_or(kl.coefficient, |before| {
            adaptive.next_coefficient(before.coefficient, before.found, before.rollouts as usize)
        }))
    }

    /// Makes the plan of a step for each policy. First queries each policy's models for the values
    /// that the advantage estimator needs.
    async fn plan_step(
        &self,
        step: u32,
        groups: &[&[Attempt]],
        baselines: &[Option<Attempt>],
    ) -> Result<Vec<PolicyPlan>, TrainerError> {
        let RunContext { recipe, policies, .. } = self.run;
        let limits = self.run.rollouts.agents.token_limits();
        let budget = recipe.engine.micro_batch_tokens;
        let mut plans = Vec::new();
        let mut sampled = TokenCensus::default();
        for (name, policy_learner) in
            policies.trained_among(&recipe.trained_policies_in(self.phase))
        {
            let models = policy_learner.models(self.phase);
            let targets = self.run.targets(name);
            sampled.add(&plan::count_target_tokens(
                groups.iter().copied().flatten(),
                targets,
                self.keys,
            ));
            let signal_table = SignalTable::query(
                self.keys,
                models,
                targets,
                groups,
                policies.context(name),
                budget,
            )
            .await?;
            let kl_coefficient = self.kl_coefficient(name, step).await?;
            let draft = {
                let signals = |attempt, leaf| signal_table.get(attempt, leaf);
                let plan_input = plan::PlanInput {
                    targets,
                    version: self.progress.version(name),
                    keys: self.keys,
                    seed: recipe.run.seed,
                    limits: &limits,
                    constant_length: self.run.constant_length,
                    kl_coefficient,
                    baselines,
                    signals: &signals,
                };
                plan::draft_rl(&plan_input, groups)?
            };
            plans.push(draft.into_plan(models, budget).await?);
        }
        match sampled.describe_masks() {
            Some(masked) => Err(TrainerError::NoTargets { phase: self.index, step, masked }),
            None => Ok(plans),
        }
    }

    fn add_timing_metrics(
        &self,
        attempts: &[Attempt],
        outcomes: &[UpdateOutcome],
        generated: f64,
        updated: f64,
        step_seconds: f64,
        metrics: &mut Metrics,
    ) {
        let sampled: usize =
            attempts.iter().map(|attempt| attempt.trajectory.sampled_tokens()).sum();
        let all: usize =
            attempts.iter().flat_map(|a| a.trajectory.segments()).map(|s| s.tokens.len()).sum();
        let sum = |outcome_field: fn(&UpdateOutcome) -> f64| {
            outcomes.iter().map(outcome_field).sum::<f64>()
        };
        metrics.add("timing_s/gen", generated);
        if self.keys.needs_reference() {
            metrics.add("timing_s/ref", sum(|outcome_field| outcome_field.reference_seconds));
        }
        if self.keys.needs_critic() {
            metrics
                .add("timing_s/update_critic", sum(|outcome_field| outcome_field.critic_seconds));
        }
        let prepared = sum(|outcome_field| outcome_field.prepare_seconds);
        if prepared > 0.0 {
            metrics.add("timing_s/old_log_prob", prepared);
        }
        metrics.add("timing_s/update_actor", updated);
        metrics.add("timing_s/step", step_seconds);
        metrics.add("perf/total_num_tokens", all as f64);
        metrics.add("perf/throughput", all as f64 / step_seconds);
        if updated > 0.0 {
            metrics.add(
                "perf/trained_tokens_per_s",
                sum(|outcome_field| outcome_field.all.tokens as f64) / updated,
            );
        }
        // If attempts run ahead of training, or come from the store, the wait does not reflect the
        // sampling speed.
        if self.keys.staleness == 0 && generated > 0.1 * step_seconds {
            metrics.add("perf/sampled_tokens_per_s", sampled as f64 / generated);
        }
    }
}
