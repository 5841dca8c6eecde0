//! A phase of supervised fine-tuning on demonstrations.

use std::collections::VecDeque;
use std::time::Instant;

use levade_agent::{Agent, Teacher, demonstrate};
use levade_policy::crash_point;
use levade_recipe::{Phase, PromptTarget, Recipe, SftKeys};
use levade_store::{Attempt, Status, StepPlan};
use levade_tree::{AttemptId, AttemptSlot, DEFAULT, Outcome, Purpose, RunId};
use serde_json::json;

use super::{check_not_withdrawn, describe, imitate, teacher, trajectories_by_id};
use crate::TrainerError;
use crate::agents::Agents;
use crate::context::RunContext;
use crate::exit::EarlyExit;
use crate::learn::{MicroBatchProgress, UpdateSettings, run_plan};
use crate::metrics::Metrics;
use crate::observe::{Observer, StopFlag};
use crate::plan;
use crate::progress::RunProgress;
use crate::prompt_version::PromptVersion;
use crate::random::shuffled_indices;
use crate::rollout::{AttemptMaker, reject_withdrawn_task};
use crate::tasks::Tasks;

pub(crate) struct SftPhase {
    phase: Phase,
    index: u32,
    keys: SftKeys,
    demonstrations: Vec<Attempt>,
}

/// Number of tasks with demonstrations that are read per selected demonstration, so that rare kinds
/// of tasks are included.
const POOL: usize = 32;

/// Interleaves items by kind: the result alternates between the kinds. Kinds are in order of first
/// appearance, and items of a kind keep their order.
fn interleave_kinds<T, K: PartialEq>(
    items: impl Iterator<Item = T>,
    kind: impl Fn(&T) -> K,
) -> Vec<T> {
    let mut kinds: Vec<(K, VecDeque<T>)> = Vec::new();
    for item in items {
        let kind = kind(&item);
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, queue)) => queue.push_back(item),
            None => kinds.push((kind, VecDeque::from([item]))),
        }
    }
    let mut mixed = Vec::new();
    while kinds.iter().any(|(_, queue)| !queue.is_empty()) {
        mixed.extend(kinds.iter_mut().filter_map(|(_, queue)| queue.pop_front()));
    }
    mixed
}

/// Creates the demonstrations of a phase from the tasks' worked solutions, as attempts to record.
/// The demonstrations are evenly distributed over the kinds of tasks.
pub(super) fn solution_demonstrations(
    index: usize,
    keys: &SftKeys,
    recipe: &Recipe,
    tasks: &Tasks,
    agents: &Agents,
    run: &RunId,
) -> Result<Vec<Attempt>, TrainerError> {
    let seed = recipe.run.seed;
    let order = shuffled_indices(seed, "demonstrations", &[index as u32], tasks.train_len());
    let with_demonstration = order.into_iter().filter_map(|i| {
        let task = tasks.train(i as usize)?;
        task.demonstration.clone().map(|demonstration| (task, demonstration))
    });
    let pool = with_demonstration.take(keys.demonstrations.saturating_mul(POOL));
    let mixed = interleave_kinds(pool, |(task, _)| task.kind.clone());
    let mut found = Vec::with_capacity(keys.demonstrations);
    for (group, (task, demonstration)) in mixed.into_iter().take(keys.demonstrations).enumerate() {
        let agent = agents.agent_for(&task)?;
        let Agent { name, tools, .. } = &agent.agent;
        let policy = &agent.player().policy;
        let mut messages = agent.keys.initial_messages(&task);
        let num_context = messages.len();
        messages.extend(demonstration.messages());
        let trajectory =
            demonstrate(agent.format.chat(), &tools.specs(&task), &messages, num_context)
                .map(|trajectory| trajectory.with_names(name, policy))
                .map_err(|source| TrainerError::Demonstration { task: task.id.clone(), source })?;
        let purpose = Purpose::Demonstration;
        let phase = index as u32;
        let group = group as u32;
        let slot = AttemptSlot { purpose, phase, step: 0, group, sample: 0 };
        found.push(Attempt {
            id: AttemptId::new(run, &slot, 0),
            slot,
            number: 0,
            outcome: Outcome::demonstrated(demonstration.answer),
            task: json!(task),
            score: None,
            reward: None,
            step_rewards: Vec::new(),
            status: Status::Completed,
            trajectory,
        });
    }
    if found.len() < keys.demonstrations {
        let phase = index;
        let wanted = keys.demonstrations;
        let found = found.len();
        return Err(TrainerError::TooFewDemonstrations { phase, wanted, found });
    }
    Ok(found)
}

/// Records demonstrations, and returns them.
///
/// # Errors
/// Returns [`TrainerError::Withdrawn`] if a demonstration was withdrawn, and
/// [`TrainerError::WithdrawnTask`] if its task was withdrawn before the demonstration was recorded.
async fn record_demonstrations(
    rollouts: &AttemptMaker,
    demonstrations: Vec<Attempt>,
) -> Result<Vec<Attempt>, TrainerError> {
    let AttemptMaker { store, withdrawn, .. } = rollouts;
    check_not_withdrawn(&**store, demonstrations.iter().map(|attempt| attempt.id)).await?;
    for Attempt { task, .. } in &demonstrations {
        let id = task["id"].as_str().unwrap_or_default();
        reject_withdrawn_task(withdrawn, id, &levade_tasks::persons(task))?;
    }
    store.record_attempts(&demonstrations).await?;
    Ok(demonstrations)
}

impl SftPhase {
    pub async fn new(
        phase: Phase,
        index: u32,
        keys: SftKeys,
        run: &RunContext,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<Self, EarlyExit> {
        let RunContext { recipe, tasks, rollouts, store, .. } = run;
        if let Some(source) = &keys.source {
            let written = source.field.as_ref().map(|field| Teacher::RowField(field.clone()));
            let external = source.policy.as_ref().and_then(|name| run.teachers.get(name));
            let teacher = written.as_ref().or(external);
            let own = recipe.trained_policies();
            let is_own = source.policy.as_ref().is_some_and(|name| own.contains(name));
            if teacher.is_none() && !is_own && !source.sessions {
                return Err(TrainerError::MissingPart(source.to_string()).into());
            }
            let keys_and_source = (&keys, source);
            let found = teacher::make_demonstrations(
                index,
                keys_and_source,
                teacher,
                tasks,
                rollouts,
                observer,
                stop,
            )
            .await?;
            let found = found.ok_or(EarlyExit::Stopped)?;
            let later_agents = keys.system.as_ref().map(|system| {
                let agents = &rollouts.agents;
                agents.with_prompt_text(&agents.first().agent.name, &PromptTarget::System, system)
            });
            let demonstrations = if teacher.is_none() || later_agents.is_some() {
                let copies =
                    imitate::copy_as_demonstrations(found, store.run(), later_agents.as_ref())?;
                record_demonstrations(rollouts, copies).await?
            } else {
                found.into_iter().map(|(attempt, _)| attempt).collect()
            };
            return Ok(SftPhase { phase, index, keys, demonstrations });
        }
        let found = solution_demonstrations(
            index as usize,
            &keys,
            recipe,
            tasks,
            &rollouts.agents,
            store.run(),
        )?;
        let demonstrations = record_demonstrations(rollouts, found).await?;
        Ok(SftPhase { phase, index, keys, demonstrations })
    }

    /// Returns the system prompt that the agent uses from the first step of this phase on, or
    /// `None` if the phase sets no system prompt.
    pub fn improved_prompt(&self, recipe: &Recipe) -> Option<PromptVersion> {
        let text = self.keys.system.clone()?;
        let version = u32::from(text != recipe.agent.system);
        let (agent, target) = (DEFAULT.to_owned(), PromptTarget::System);
        Some(PromptVersion { agent, target, version, text })
    }

    pub async fn run_step(
        &mut self,
        run: &RunContext,
        progress: &RunProgress,
        step: u32,
        observer: &mut dyn Observer,
    ) -> Result<Metrics, TrainerError> {
        let start = Instant::now();
        let RunContext { recipe, store, policies, origin, .. } = run;
        let trained = recipe.trained_policies_in(&self.phase);
        let total = self.demonstrations.len();
        let a_pass = total.div_ceil(self.keys.batch) as u32;
        let epoch = step / a_pass;
        let within = (step % a_pass) as usize;
        let order = shuffled_indices(recipe.run.seed, "batches", &[self.index, epoch], total);
        let picked: Vec<&Attempt> = order
            .iter()
            .skip(within * self.keys.batch)
            .take(self.keys.batch)
            .map(|&i| &self.demonstrations[i as usize])
            .collect();
        let plan = match store.step_plan(self.index, step).await? {
            Some(plan) => {
                check_not_withdrawn(&**store, plan.sequences().map(|it| it.attempt)).await?;
                plan
            }
            None => {
                let budget = recipe.engine.micro_batch_tokens;
                let mut plans = Vec::new();
                for (name, policy_learner) in policies.trained_among(&trained) {
                    let targets = run.targets(name);
                    let version = progress.version(name);
                    let draft = plan::draft_sft(targets, version, &picked, self.keys.normalizer);
                    plans.push(draft.into_plan(policy_learner.models(&self.phase), budget).await?);
                }
                StepPlan { phase: self.index, step, group_positions: Vec::new(), policies: plans }
            }
        };
        store.record_step(&plan).await?;
        crash_point("ledger_written");
        let trajectories = trajectories_by_id(&self.demonstrations);
        let mut metrics = Metrics::default();
        metrics.add("training/epoch", f64::from(step) / f64::from(a_pass));
        let index_and_phase = (self.index, &self.phase);
        let mut micro_batches = MicroBatchProgress::new(&plan);
        let several = plan.policies.len() > 1;
        let mut forward_tokens = 0;
        for policy in &plan.policies {
            let name = policy.policy.as_str();
            let policy_learner = policies.policy_learner(name)?;
            let targets = run.targets(name);
            let version = progress.version(name);
            let settings =
                UpdateSettings::new(index_and_phase, step, Some(origin), targets, version, recipe);
            let models = policy_learner.models(&self.phase);
            let outcome =
                run_plan(policy, &trajectories, models, &settings, &mut micro_batches, observer)
                    .await?;
            let mut found = Metrics::default();
            outcome.report(&self.phase, settings.policy, &mut found);
            if several {
                found.add("timing_s/update_actor", outcome.update_seconds);
            }
            metrics.extend(several.then_some(name), found);
            forward_tokens += outcome.all.tokens;
        }
        let seconds = start.elapsed().as_secs_f64();
        metrics.add("timing_s/update_actor", seconds);
        metrics.add("timing_s/step", seconds);
        metrics.add("perf/throughput", forward_tokens as f64 / seconds);
        describe::add_memory_metrics(&mut metrics);
        Ok(metrics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleave_kinds_alternates_between_kinds() {
        let words = ["ant", "bee", "auk", "ape", "bat", "cow", "asp"];
        let first = |word: &&str| word.chars().next();
        assert_eq!(
            interleave_kinds(words.into_iter(), first),
            ["ant", "bee", "cow", "auk", "bat", "ape", "asp"]
        );
        assert_eq!(interleave_kinds(words.into_iter(), |_| ()), words);
    }
}
