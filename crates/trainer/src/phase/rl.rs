//! A phase of reinforcement learning.

use std::time::Instant;

use levade_policy::crash_point;
use levade_recipe::{Phase, RlKeys};
use levade_store::{Attempt, PolicyPlan, StepPlan};
use levade_traces::Chats;

use super::describe::SamplerSnapshot;
use super::{by_id, describe, diversity, reject_withdrawn};
use crate::TrainerError;
use crate::batch::Census;
use crate::context::RunContext;
use crate::exit::Exit;
use crate::learn::{Progress, UpdateOutcome, UpdateSettings, run_plan};
use crate::metrics::Metrics;
use crate::observe::{Event, Observer, StopFlag};
use crate::plan;
use crate::progress::RunProgress;
use crate::reference::move_references;
use crate::scheduler::{GroupScheduler, StepGroups};
use crate::signals::SignalTable;
use crate::tasks::TaskOrder;

pub(crate) struct Rl {
    phase: Phase,
    index: u32,
    keys: RlKeys,
    scheduler: GroupScheduler,
    /// Formats in which tool calls are read.
    chats: Chats,
}

impl Rl {
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
            let plan = store.step(index, step).await?;
            taken.extend(
                plan.map_or_else(
                    || default_positions(&keys, step),
                    |plan| positions_of(&plan, &keys),
                ),
            );
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
                run.past.measure(attempts.iter());
            }
        }
        Ok(Rl { phase, index, keys, scheduler, chats: rollouts.agents.chats() })
    }

    pub async fn step(
        &mut self,
        run: &RunContext,
        progress: &RunProgress,
        step: u32,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<(Metrics, Vec<Attempt>), Exit> {
        let start = Instant::now();
        let RunContext { rollouts, tasks, store, .. } = run;
        let sampler = &rollouts.agents.first().sampler;
        let before = SamplerSnapshot::take(&**sampler).await?;
        let used = rollouts.agents.used();
        self.scheduler.advance(step);
        move_references(run, &self.phase, step).await?;
        let planned = store.step(self.index, step).await?;
        if let Some(plan) = &planned {
            reject_withdrawn(&**store, plan.sequences().map(|it| it.attempt)).await?;
        }
        let taken = match &planned {
            Some(plan) => {
                self.scheduler
                    .restore_step(&positions_of(plan, &self.keys), rollouts, tasks)
                    .await?
            }
            None => collect(&mut self.scheduler, run, observer, stop).await?,
        };
        let attempts = taken.groups.concat();
        run.past.measure(attempts.iter());
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
        let Rl { scheduler, phase, index, keys, chats } = self;
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
                    let policies = context.plan(step, &groups, &taken.baselines).await?;
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
            let outcomes = context.learn(step, &plan, &attempts, observer).await?;
            Ok::<_, TrainerError>((plan, outcomes))
        };
        let (plan, outcomes) = run_alongside(scheduler, run, training).await?;
        let aside =
            |of: &UpdateOutcome| of.reference_seconds + of.critic_seconds + of.prepare_seconds;
        let updated = learning.elapsed().as_secs_f64() - outcomes.iter().map(aside).sum::<f64>();

        let mut metrics = Metrics::default();
        describe::attempts(&groups, &mut metrics);
        diversity::report(&groups, chats, &mut metrics);
        run.past.describe(attempts.iter(), |policy| progress.version(policy), &mut metrics);
        scheduler.describe(&mut metrics);
        let lengths =
            |group: &&[Attempt]| group.iter().map(|a| a.trajectory.sampled_tokens()).collect();
        let lengths: Vec<Vec<usize>> = groups.iter().map(lengths).collect();
        describe::oversampled(&lengths, &taken.excluded, &mut metrics);
        let several = plan.policies.len() > 1;
        for (policy, outcome) in plan.policies.iter().zip(&outcomes) {
            let mut found = context.describe(step, policy, outcome, &attempts);
            if several {
                found.add("timing_s/update_actor", outcome.update_seconds);
            }
            metrics.extend(several.then_some(policy.policy.as_str()), found);
        }
        if keys.needs_baseline() {
            describe::baselines(&baselines, missing, &mut metrics);
        }
        if keys.kl.is_some_and(|kl| kl.reference_every > 0) {
            metrics.add("actor/reference_age", f64::from(step - keys.reference_step(step)));
        }
        let step_seconds = start.elapsed().as_secs_f64();
        describe::sampling(
            &before,
            &SamplerSnapshot::take(&**sampler).await?,
            step_seconds,
            &mut metrics,
        );
        describe::tools(&used, &rollouts.agents.used(), &mut metrics);
        context.timing(&attempts, &outcomes, waited, updated, step_seconds, &mut metrics);
        describe::memory(&mut metrics);
        Ok((metrics, made))
    }
}

/// Returns the positions of a step's groups if the store does not contain them: those in order.
fn default_positions(keys: &RlKeys, step: u32) -> Vec<u64> {
    let groups = keys.groups as u64;
    (u64::from(step) * groups..(u64::from(step) + 1) * groups).collect()
}

/// Returns the positions of the groups that a planned step takes.
pub(crate) fn positions_of(plan: &StepPlan, keys: &RlKeys) -> Vec<u64> {
    if plan.group_positions.is_empty() {
        default_positions(keys, plan.step)
    } else {
        plan.group_positions.clone()
    }
}

/// Waits for the groups of the next step.
async fn collect(
    scheduler: &mut GroupScheduler,
    run: &RunContext,
    observer: &mut dyn Observer,
    stop: &StopFlag,
) -> Result<StepGroups, Exit> {
    let RunContext { rollouts, tasks, .. } = run;
    scheduler.admit(rollouts, tasks).await?;
    loop {
        if let Some(taken) = scheduler.take() {
            return Ok(taken);
        }
        tokio::select! {
            // A fixed order of the branches makes simulations repeatable.
            biased;
            more = scheduler.next(rollouts, tasks, true, observer) => if !more? {
                return Err(TrainerError::NoAttemptsInFlight.into());
            },
            // Attempts in progress are abandoned. The resumed run repeats them from the same random
            // streams.
            () = stop.stopped() => return Err(Exit::Stopped),
        }
    }
}

/// Runs `work` while attempts continue, are recorded, and new ones start.
async fn run_alongside<T>(
    scheduler: &mut GroupScheduler,
    run: &RunContext,
    work: impl Future<Output = Result<T, TrainerError>>,
) -> Result<T, TrainerError> {
    let RunContext { rollouts, tasks, .. } = run;
    scheduler.admit(rollouts, tasks).await?;
    tokio::pin!(work);
    let mut unseen = ();
    loop {
        tokio::select! {
            // A fixed order of the branches makes simulations repeatable.
            biased;
            done = &mut work => return done,
            more = scheduler.next(rollouts, tasks, false, &mut unseen), if scheduler.is_running() => { more?; }
        }
    }
}

/// Parameters of a phase's steps.
struct PhaseContext<'a> {
    phase: &'a Phase,
    index: u32,
    keys: &'a RlKeys,
    run: &'a RunContext,
    progress: &'a RunProgress,
}

impl PhaseContext<'_> {
    async fn learn(
        &self,
        step: u32,
        plan: &StepPlan,
        attempts: &[Attempt],
        observer: &mut dyn Observer,
    ) -> Result<Vec<UpdateOutcome>, TrainerError> {
        let trajectories = by_id(attempts);
        let mut micro_batches = Progress::new(plan);
        let mut outcomes = Vec::with_capacity(plan.policies.len());
        for policy in &plan.policies {
            let name = policy.policy.as_str();
            let policy_learner = self.run.policies.policy_learner(name)?;
            let models = policy_learner.models(self.phase);
            let settings = self.settings(name, step);
            outcomes.push(
                run_plan(policy, &trajectories, models, &settings, &mut micro_batches, observer)
                    .await?,
            );
        }
        Ok(outcomes)
    }

    fn settings<'t>(&'t self, policy: &'t str, step: u32) -> UpdateSettings<'t> {
        let RunContext { origin, recipe, .. } = self.run;
        let targets = self.run.targets(policy);
        let version = self.progress.version(policy);
        UpdateSettings::new((self.index, self.phase), step, Some(origin), targets, version, recipe)
    }

    /// Returns the metrics of a policy.
    fn describe(
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
            describe::high_entropy(high, &mut metrics);
        }
        let settings = self.settings(&plan.policy, step);
        describe::masked(&plan::census(attempts.iter(), settings.targets, self.keys), &mut metrics);
        describe::age(attempts, settings.targets, settings.version, &mut metrics);
        outcome.report(self.phase, settings.policy, &mut metrics);
        metrics
    }

    /// Returns the coefficient of a KL penalty that is applied to the reward: the recipe's, or, if
    /// it is adaptive, the value that results from the previous step.
    async fn kl_coefficient(&self, policy: &str, step: u32) -> Result<f64, TrainerError> {
        let Some(kl) = self.keys.kl else { return Ok(0.0) };
        let (Some(adaptive), Some(before)) = (kl.adaptive, step.checked_sub(1)) else {
            return Ok(kl.coefficient);
        };
        let before = self.run.store.step(self.index, before).await?;
        let before = before.and_then(|plan| {
            plan.policies.into_iter().find(|policy_plan| policy_plan.policy == policy)?.kl
        });
        Ok(before.map_or(kl.coefficient, |before| {
            adaptive.next_coefficient(before.coefficient, before.found, before.rollouts as usize)
        }))
    }

    /// Plans a step for each policy, after querying its models for the numbers that the advantage
    /// estimator needs.
    async fn plan(
        &self,
        step: u32,
        groups: &[&[Attempt]],
        baselines: &[Option<Attempt>],
    ) -> Result<Vec<PolicyPlan>, TrainerError> {
        let RunContext { recipe, policies, .. } = self.run;
        let limits = self.run.rollouts.agents.token_limits();
        let budget = recipe.engine.micro_batch_tokens;
        let mut plans = Vec::new();
        let mut sampled = Census::default();
        for (name, policy_learner) in
            policies.trained_among(&recipe.trained_policies_in(self.phase))
        {
            let models = policy_learner.models(self.phase);
            let targets = self.run.targets(name);
            sampled.add(&plan::census(groups.iter().copied().flatten(), targets, self.keys));
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
        match sampled.masked_reasons() {
            Some(masked) => Err(TrainerError::NoTargets { phase: self.index, step, masked }),
            None => Ok(plans),
        }
    }

    fn timing(
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
