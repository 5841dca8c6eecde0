//! One phase: what a step of it trains on.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use dressage_agent::demonstrate;
use dressage_agent::tasks::Task;
use dressage_agent::tools::ToolSet;
use dressage_policy::crash_point;
use dressage_store::{Attempt, AttemptKey, Purpose, Status};
use dressage_text::Chat;
use dressage_tree::{Kind, Trajectory};
use serde_json::json;

use crate::TrainerError;
use crate::learn::{Learned, loss_of, optim_params, run_plan};
use crate::metrics::Metrics;
use crate::observe::{Observer, StopFlag};
use crate::plan;
use crate::random::order;
use crate::recipe::{GrpoKeys, Phase, Recipe, SftKeys};
use crate::rollout::outcome_of;
use crate::tasks::{TaskOrder, Tasks, opening};
use crate::trainer::{Leave, Trainer};

/// A phase under way.
pub(crate) enum PhaseRun {
    Sft(Sft),
    Grpo(Grpo),
}

pub(crate) struct Sft {
    phase: Phase,
    index: u32,
    keys: SftKeys,
    demonstrations: Vec<Attempt>,
}

pub(crate) struct Grpo {
    phase: Phase,
    index: u32,
    keys: GrpoKeys,
    order: TaskOrder,
}

impl PhaseRun {
    /// How many steps a phase has.
    pub fn steps(phase: &Phase) -> u32 {
        match phase {
            Phase::Sft(keys) => keys.epochs * keys.demonstrations.div_ceil(keys.batch) as u32,
            Phase::Grpo(keys) => keys.steps,
        }
    }

    /// Finds before the start what would stop the phase later.
    pub fn check(
        index: usize,
        phase: &Phase,
        recipe: &Recipe,
        tasks: &Tasks,
        chat: &Chat,
        tools: &ToolSet,
    ) -> Result<(), TrainerError> {
        match phase {
            Phase::Sft(keys) => demonstrations(index, keys, recipe, tasks, chat, tools).map(|_| ()),
            Phase::Grpo(_) => Ok(()),
        }
    }

    /// Begins or goes on with a phase.
    pub fn new(index: usize, phase: &Phase, trainer: &Trainer) -> Result<Self, TrainerError> {
        let Trainer { recipe, tasks, rollouts, store, .. } = trainer;
        let (phase, number) = (phase.clone(), index as u32);
        Ok(match phase.clone() {
            Phase::Sft(keys) => {
                let agent = &rollouts.agent;
                let demonstrations = demonstrations(index, &keys, recipe, tasks, &agent.chat, &agent.tools)?;
                store.record_attempts(&demonstrations)?;
                PhaseRun::Sft(Sft { phase, index: number, keys, demonstrations })
            }
            Phase::Grpo(keys) => {
                let order = TaskOrder::new(recipe.run.seed, number, tasks.train_len());
                PhaseRun::Grpo(Grpo { phase, index: number, keys, order })
            }
        })
    }

    /// Runs a step up to its last optimiser step.
    pub async fn step(
        &mut self,
        trainer: &Trainer,
        step: u32,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<Metrics, Leave> {
        match self {
            PhaseRun::Sft(phase) => Ok(phase.step(trainer, step, observer).await?),
            PhaseRun::Grpo(phase) => phase.step(trainer, step, observer, stop).await,
        }
    }
}

/// How many tasks are looked at for each demonstration, so that rare kinds are among them.
const POOL: usize = 32;

/// The items, one of each kind by turns: kinds in the order in which they first come, items of a kind in theirs.
fn by_turns<T, K: PartialEq>(items: impl Iterator<Item = T>, kind: impl Fn(&T) -> K) -> Vec<T> {
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

/// The demonstrations of a phase, as they are recorded: from all kinds of tasks alike.
fn demonstrations(
    index: usize,
    keys: &SftKeys,
    recipe: &Recipe,
    tasks: &Tasks,
    chat: &Chat,
    tools: &ToolSet,
) -> Result<Vec<Attempt>, TrainerError> {
    let seed = recipe.run.seed;
    let order = order(seed, "demonstrations", &[index as u32], tasks.train_len());
    let with_demonstration = order.into_iter().filter_map(|i| {
        let task = tasks.train(i as usize)?;
        task.demonstration.clone().map(|demonstration| (task, demonstration))
    });
    let pool = with_demonstration.take(keys.demonstrations.saturating_mul(POOL));
    let mixed = by_turns(pool, |(task, _)| task.kind.clone());
    let specs = tools.specs();
    let mut found = Vec::with_capacity(keys.demonstrations);
    for (group, (task, demonstration)) in mixed.into_iter().take(keys.demonstrations).enumerate() {
        let mut messages = opening(&recipe.agent, &task);
        messages.extend(demonstration.messages());
        let trajectory = demonstrate(chat, &specs, &messages)
            .map_err(|source| TrainerError::Demonstration { task: task.id.clone(), source })?;
        let (phase, group) = (index as u32, group as u32);
        found.push(Attempt {
            key: AttemptKey { purpose: Purpose::Demonstration, phase, step: 0, group, sample: 0 },
            outcome: json!({"final_text": demonstration.answer}),
            task: json!(task),
            score: None,
            reward: None,
            status: Status::Completed,
            trajectory,
        });
    }
    if found.len() < keys.demonstrations {
        let (phase, wanted, found) = (index, keys.demonstrations, found.len());
        return Err(TrainerError::TooFewDemonstrations { phase, wanted, found });
    }
    Ok(found)
}

impl Sft {
    async fn step(
        &mut self,
        trainer: &Trainer,
        step: u32,
        observer: &mut dyn Observer,
    ) -> Result<Metrics, TrainerError> {
        let start = Instant::now();
        let Trainer { recipe, store, learner, .. } = trainer;
        let total = self.demonstrations.len();
        let a_pass = total.div_ceil(self.keys.batch) as u32;
        let (epoch, within) = (step / a_pass, (step % a_pass) as usize);
        let order = order(recipe.run.seed, "batches", &[self.index, epoch], total);
        let picked: Vec<&Attempt> = order
            .iter()
            .skip(within * self.keys.batch)
            .take(self.keys.batch)
            .map(|&i| &self.demonstrations[i as usize])
            .collect();
        let plan = match store.step(self.index, step)? {
            Some(plan) => plan,
            None => {
                let picked: Vec<_> =
                    picked.iter().map(|attempt| (attempt.key, &attempt.trajectory)).collect();
                let budget = recipe.engine.micro_batch_tokens;
                plan::sft(self.index, step, &picked, self.keys.normaliser, budget)?
            }
        };
        store.record_step(&plan)?;
        crash_point("ledger_written");
        let steps = PhaseRun::steps(&self.phase);
        let params = optim_params(&self.phase, step, steps);
        let trajectories = by_key(&self.demonstrations);
        let loss = loss_of(&self.phase);
        let learned = run_plan(&plan, &trajectories, &**learner, None, loss, params, observer).await?;
        let mut metrics = Metrics::default();
        metrics.add("training/epoch", f64::from(step) / f64::from(a_pass));
        learned.report(&self.phase, params, &mut metrics);
        let seconds = start.elapsed().as_secs_f64();
        metrics.add("timing_s/update_actor", seconds);
        metrics.add("timing_s/step", seconds);
        metrics.add("perf/throughput", learned.all.tokens as f64 / seconds);
        Ok(metrics)
    }
}

impl Grpo {
    async fn step(
        &mut self,
        trainer: &Trainer,
        step: u32,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<Metrics, Leave> {
        let start = Instant::now();
        let Trainer { recipe, tasks, rollouts, store, learner, reference, .. } = trainer;
        let wanted = self.wanted(step, tasks);
        let attempts = rollouts.run(&wanted, self.keys.temperature, observer, stop).await?;
        let attempts = attempts.ok_or(Leave::Stopped)?;
        let generated = start.elapsed().as_secs_f64();
        let groups: Vec<&[Attempt]> = attempts.chunks(self.keys.group_size).collect();

        let plan = match store.step(self.index, step)? {
            Some(plan) => plan,
            None => plan::grpo(self.index, step, &groups, &self.keys, recipe.engine.micro_batch_tokens)?,
        };
        store.record_step(&plan)?;
        crash_point("ledger_written");
        let params = optim_params(&self.phase, step, PhaseRun::steps(&self.phase));
        let trajectories = by_key(&attempts);
        let learning = Instant::now();
        let loss = loss_of(&self.phase);
        let learned =
            run_plan(&plan, &trajectories, &**learner, reference.as_deref(), loss, params, observer).await?;
        let updated = learning.elapsed().as_secs_f64() - learned.reference_seconds;

        let mut metrics = Metrics::default();
        describe(&groups, &mut metrics);
        let advantages = plan.updates.iter().flat_map(|u| u.micro_batches.iter().flatten());
        metrics.add_spread("critic/advantages", advantages.map(|path| f64::from(path.advantage)));
        learned.report(&self.phase, params, &mut metrics);
        self.timing(&attempts, &learned, generated, updated, start.elapsed().as_secs_f64(), &mut metrics);
        Ok(metrics)
    }

    /// The attempts of a step: its tasks in the seeded order, each tried `group_size` times.
    fn wanted(&mut self, step: u32, tasks: &Tasks) -> Vec<(AttemptKey, Task)> {
        let mut wanted = Vec::with_capacity(self.keys.groups * self.keys.group_size);
        for group in 0..self.keys.groups {
            let place = u64::from(step) * self.keys.groups as u64 + group as u64;
            let Some(task) = tasks.train(self.order.at(place)) else { continue };
            for sample in 0..self.keys.group_size as u32 {
                let key = AttemptKey {
                    purpose: Purpose::Train,
                    phase: self.index,
                    step,
                    group: group as u32,
                    sample,
                };
                wanted.push((key, task.clone()));
            }
        }
        wanted
    }

    fn timing(
        &self,
        attempts: &[Attempt],
        learned: &Learned,
        generated: f64,
        updated: f64,
        whole: f64,
        metrics: &mut Metrics,
    ) {
        let sampled: usize = attempts.iter().map(|attempt| attempt.trajectory.sampled_tokens()).sum();
        let all: usize = attempts.iter().flat_map(|a| a.trajectory.segments()).map(|s| s.tokens.len()).sum();
        metrics.add("timing_s/gen", generated);
        if self.keys.kl.is_some() {
            metrics.add("timing_s/ref", learned.reference_seconds);
        }
        metrics.add("timing_s/update_actor", updated);
        metrics.add("timing_s/step", whole);
        metrics.add("perf/total_num_tokens", all as f64);
        metrics.add("perf/throughput", all as f64 / whole);
        metrics.add("perf/sampled_tokens_per_s", sampled as f64 / generated);
    }
}

fn by_key(attempts: &[Attempt]) -> HashMap<AttemptKey, &Trajectory> {
    attempts.iter().map(|attempt| (attempt.key, &attempt.trajectory)).collect()
}

/// What the attempts of a step were like.
fn describe(groups: &[&[Attempt]], metrics: &mut Metrics) {
    let attempts: Vec<&Attempt> = groups.iter().copied().flatten().collect();
    metrics.add_spread("critic/score", attempts.iter().filter_map(|attempt| attempt.score));
    metrics.add_spread("critic/rewards", attempts.iter().filter_map(|attempt| attempt.reward));
    let rewards: Vec<Vec<f64>> =
        groups.iter().map(|group| group.iter().filter_map(|attempt| attempt.reward).collect()).collect();
    let stats = dressage_rl::GroupStats::new(&rewards);
    metrics.add("critic/rewards/std", stats.deviation);
    metrics.add("critic/rewards/best", stats.best);
    metrics.add("training/uniform_groups", stats.degenerate);

    let sampled = attempts.iter().map(|attempt| attempt.trajectory.sampled_tokens() as f64);
    metrics.add_spread("response_length", sampled);
    let prompts = attempts.iter().filter_map(|attempt| attempt.trajectory.segments().first());
    let prompts =
        prompts.filter(|segment| segment.kind == Kind::Given).map(|segment| segment.tokens.len() as f64);
    metrics.add_spread("prompt_length", prompts);

    let outcomes: Vec<_> = attempts.iter().filter_map(|attempt| outcome_of(attempt)).collect();
    let share = |wanted: &dyn Fn(&dressage_agent::Outcome) -> bool| {
        outcomes.iter().filter(|outcome| wanted(outcome)).count() as f64 / outcomes.len().max(1) as f64
    };
    use dressage_agent::Finish;
    metrics.add(
        "response_length/clip_ratio",
        share(&|o| matches!(o.finish, Finish::MaxTokens | Finish::Context)),
    );
    metrics.add("response/aborted_ratio", share(&|o| o.finish == Finish::Failed));
    metrics.add("response/answered_ratio", share(&|o| o.finish == Finish::Answered));
    metrics.add_spread("num_turns", outcomes.iter().map(|o| f64::from(o.turns)));
    metrics.add_spread("tool_call_counts", outcomes.iter().map(|o| f64::from(o.calls.total())));
    let total =
        |count: &dyn Fn(&dressage_agent::Outcome) -> u32| outcomes.iter().map(|o| f64::from(count(o))).sum();
    metrics.add("tool_calls/ok", total(&|o| o.calls.ok));
    metrics.add("tool_calls/malformed", total(&|o| o.calls.malformed));
    metrics.add("tool_calls/unknown_tool", total(&|o| o.calls.unknown_tool));
    metrics.add("tool_calls/bad_arguments", total(&|o| o.calls.bad_arguments));
    metrics.add("tool_calls/failed", total(&|o| o.calls.failed));
    metrics.add("tool_calls/timeout", total(&|o| o.calls.timeout));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_take_turns() {
        let words = ["ant", "bee", "auk", "ape", "bat", "cow", "asp"];
        let first = |word: &&str| word.chars().next();
        assert_eq!(by_turns(words.into_iter(), first), ["ant", "bee", "cow", "auk", "bat", "ape", "asp"]);
        assert_eq!(by_turns(words.into_iter(), |_| ()), words);
    }
}
