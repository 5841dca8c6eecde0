//! A phase that improves a text of an agent, such as its system prompt or the description of a
//! tool: textual gradients with beam search, or reflective evolution with a Pareto front. The text
//! is called the prompt here.
//!
//! The first step scores the initial prompts at tasks that are reserved for selection. These
//! prompts are the agent's prompt at the start of the phase and the candidates of the recipe. In
//! each further step, the agent attempts training tasks with parent prompts, the editor criticizes
//! every parent in view of its attempts and rewrites it, and the new prompts are scored. All new
//! prompts of a step are made at the same time.
//!
//! # Guarantees
//! - **Everything is in the record**: attempts, critiques and new prompts are attempts of purpose
//!   [`Prompt`](Purpose::Prompt). A resumed run reads them and repeats none.
//! - **The search is deterministic**: it depends on the seed and the recorded attempts alone.
//! - **A prompt without enough scores never wins.**
//! - **A resumed phase starts from the same prompt**: the prompt in the checkpoint at the end of
//!   the previous phase.
//!
//! No weights change. Out of scope: the instructions by which other agents summarize tool results.

mod editor;
mod search;
mod texts;

use std::time::Instant;

use futures_util::future::try_join_all;
use levade_policy::SamplingParams;
use levade_recipe::{PromptAlgorithm, PromptKeys};
use levade_store::{Attempt, Status};
use levade_tasks::Task;
use levade_traces::Chats;
use levade_tree::{AttemptSlot, Purpose};
use serde_json::json;
use tracing::debug;

use crate::TrainerError;
use crate::agents::Agents;
use crate::context::RunContext;
use crate::exit::EarlyExit;
use crate::files::{file_error, write_atomically};
use crate::metrics::Metrics;
use crate::observe::StopFlag;
use crate::prompt_version::PromptVersion;
use crate::random::shuffled_indices;
use crate::rollout::AttemptMaker;
use crate::tasks::Tasks;

use super::enter::phase_start_checkpoint;
use editor::Editor;
use search::{PromptCandidate, is_better, mean_score, rank_candidates, select_parents};
use texts::EditorWording;

/// A prompt phase in progress: an editor rewrites the prompt of an agent, and the scores of
/// attempts with a prompt are the prompt's scores.
pub(crate) struct PromptPhase {
    index: u32,
    keys: PromptKeys,
    /// Name of the agent whose prompt is improved.
    agent: String,
    editor: Editor,
    /// Chat formats with which attempts are decoded for the editor.
    chats: Chats,
    tasks: PhaseTasks,
    pool: Vec<PromptCandidate>,
    next_version: u32,
}

/// Training tasks that a prompt phase uses, by purpose.
struct PhaseTasks {
    /// Tasks on which prompts are scored.
    selection: Vec<Task>,
    /// Tasks whose attempts the editor criticizes.
    gradient: Vec<Task>,
}

/// A new prompt that a step makes from a parent prompt.
struct ChildPrompt {
    parent: PromptCandidate,
    tasks: Vec<Task>,
    /// Attempts with the parent prompt, which the editor criticizes.
    attempts: Vec<Attempt>,
    /// The new prompt. `None` until the editor has written it, or if the editor's completion
    /// contains no usable prompt.
    text: Option<String>,
    /// Scores of the new prompt on the selection tasks. Empty if the prompt was not kept.
    scores: Vec<Option<f64>>,
}

/// Purpose of an attempt in a step of a prompt phase. Variants are in the order of the attempts'
/// group indices.
#[derive(Clone, Copy)]
enum PromptAttemptKind {
    Gradient,
    Critique,
    Edit,
    /// Attempts with the new prompt at the tasks whose attempts were criticized.
    Trial,
    Selection,
}

/// Checks that a phase has enough training tasks for its agent, and that the agent reads the text
/// that the phase improves.
///
/// # Errors
/// Returns an error if there are too few tasks, or if the agent's prompts do not contain the text.
pub(super) fn check_prompt_phase(
    phase: usize,
    keys: &PromptKeys,
    seed: u64,
    tasks: &Tasks,
    agents: &Agents,
) -> Result<(), TrainerError> {
    PhaseTasks::select_tasks(phase as u32, keys, seed, tasks, agents)?;
    let agent = agents.find_agent(agent_name(keys, agents))?;
    let key = target_key(phase);
    agent.prompt_text(&keys.target, &key)?;
    agent.check_text_is_rendered(&keys.target, &key)
}

/// Returns the recipe key of phase `phase` that names the text to improve, such as
/// `phase.1.target`.
fn target_key(phase: usize) -> String {
    format!("phase.{phase}.target")
}

/// Returns the name of the agent whose prompt the phase improves. It is the first agent if the
/// recipe names none.
fn agent_name<'a>(keys: &'a PromptKeys, agents: &'a Agents) -> &'a str {
    if keys.agent.is_empty() { &agents.first().agent.name } else { &keys.agent }
}

impl PhaseTasks {
    /// Selects tasks of the phase's agent in a seeded order: first the tasks that score prompts,
    /// then as many tasks as all critiques of the phase can use.
    ///
    /// # Errors
    /// Returns [`TrainerError::TooFewPromptTasks`] if there are too few tasks for one critique.
    fn select_tasks(
        phase: u32,
        keys: &PromptKeys,
        seed: u64,
        tasks: &Tasks,
        agents: &Agents,
    ) -> Result<Self, TrainerError> {
        let name = agent_name(keys, agents);
        let order = shuffled_indices(seed, "prompt tasks", &[phase], tasks.train_len());
        let is_own =
            |task: &Task| agents.agent_for(task).is_ok_and(|agent| agent.agent.name == name);
        let mut own = order.into_iter().filter_map(|i| tasks.train(i as usize)).filter(is_own);
        let selection: Vec<Task> = own.by_ref().take(keys.selection_tasks).collect();
        let all = keys.num_new_prompts() * keys.rounds as usize * keys.gradient_tasks;
        let gradient: Vec<Task> = own.take(all).collect();
        let wanted = keys.selection_tasks + keys.gradient_tasks.min(all);
        let found = selection.len() + gradient.len();
        if found < wanted {
            return Err(TrainerError::TooFewPromptTasks { phase, wanted, found });
        }
        Ok(PhaseTasks { selection, gradient })
    }

    /// Returns the `count` tasks of the critique with index `number` in the phase. If the tasks are
    /// used up, they repeat.
    fn critique_tasks(&self, number: usize, count: usize) -> Vec<Task> {
        let tasks = self.gradient.iter().cycle().skip(number * count % self.gradient.len());
        tasks.take(count).cloned().collect()
    }
}

impl PromptPhase {
    /// Starts a phase, or resumes it after `done` finished steps. These steps are repeated from the
    /// store.
    pub async fn new(
        index: u32,
        keys: PromptKeys,
        run: &RunContext,
        done: u32,
        stop: &StopFlag,
    ) -> Result<Self, EarlyExit> {
        let agents = &run.rollouts.agents;
        let agent = agent_name(&keys, agents).to_owned();
        let tasks = PhaseTasks::select_tasks(index, &keys, run.rollouts.seed, &run.tasks, agents)?;
        let editor = Editor::new(&agent, &keys, run)?;
        let chats = agents.chats();
        if done == 0 && keys.rounds > 0 {
            // Without an editor, all attempts with the given prompts are in vain.
            tokio::select! {
                reached = editor.check_reachable() => reached?,
                () = stop.stopped() => return Err(EarlyExit::Stopped),
            }
        }
        let pool = Vec::new();
        let mut phase =
            PromptPhase { index, keys, agent, editor, chats, tasks, pool, next_version: 0 };
        for step in 0..done {
            phase.run_step(run, step, stop).await?;
        }
        Ok(phase)
    }

    /// Returns the prompt with the highest mean score, or `None` if no prompt has a mean score.
    pub fn best_version(&self) -> Option<PromptVersion> {
        let best =
            rank_candidates(&self.pool).into_iter().find(|candidate| candidate.mean().is_some())?;
        Some(PromptVersion {
            agent: self.agent.clone(),
            target: self.keys.target.clone(),
            version: best.version,
            text: best.text.clone(),
        })
    }

    /// Runs a step. Returns its metrics and the attempts of the agent whose prompt is improved.
    pub async fn run_step(
        &mut self,
        run: &RunContext,
        step: u32,
        stop: &StopFlag,
    ) -> Result<(Metrics, Vec<Attempt>), EarlyExit> {
        let start = Instant::now();
        let mut metrics = Metrics::default();
        let attempts = if step == 0 {
            self.score_initial_prompts(run, stop).await?
        } else {
            self.run_round(run, step, &mut metrics, stop).await?
        };
        let means: Vec<f64> = self.pool.iter().filter_map(PromptCandidate::mean).collect();
        metrics.add_spread("prompt/score", means);
        metrics.add("prompt/candidates", self.pool.len() as f64);
        metrics
            .add("prompt/version", f64::from(self.best_version().map_or(0, |best| best.version)));
        metrics.add("timing_s/step", start.elapsed().as_secs_f64());
        self.write_pool(run)?;
        Ok((metrics, attempts))
    }

    /// Returns the prompt with which the phase starts: the result of earlier phases, or else the
    /// prompt of the recipe. When a run resumes, its agents may already have a prompt of this
    /// phase, so the result of earlier phases is read from the checkpoint at the end of the
    /// previous phase.
    fn start_prompt(&self, run: &RunContext) -> Result<String, TrainerError> {
        let checkpoints = run.checkpoints.find()?.complete;
        let start = phase_start_checkpoint(&checkpoints, self.index)
            .filter(|_| run.origin.rules.chained_prompts);
        let PromptKeys { target, .. } = &self.keys;
        if let Some(prompt) = start.and_then(|start| start.prompts.get(&self.agent, target)) {
            return Ok(prompt.text.clone());
        }
        let agent = run.rollouts.agents.find_agent(&self.agent)?;
        let key = target_key(self.index as usize);
        match run.recipe.agent_named(&self.agent) {
            Some(keys) => agent.with_prompts_from(keys).prompt_text(target, &key),
            None => agent.prompt_text(target, &key),
        }
    }

    /// Scores the prompt with which the phase starts, and the candidate prompts of the recipe.
    /// Returns the attempts.
    async fn score_initial_prompts(
        &mut self,
        run: &RunContext,
        stop: &StopFlag,
    ) -> Result<Vec<Attempt>, EarlyExit> {
        let mut texts = vec![self.start_prompt(run)?];
        texts.extend(self.keys.candidates.iter().cloned());
        let selection = &self.tasks.selection;
        let score = texts.iter().enumerate().map(|(i, text)| {
            self.make_attempts(
                run,
                (0, i, PromptAttemptKind::Selection),
                text,
                selection,
                texts.len(),
                stop,
            )
        });
        let attempts = try_join_all(score).await?;
        for (text, attempts) in texts.into_iter().zip(&attempts) {
            self.add_candidate(None, text, attempt_scores(attempts));
        }
        Ok(attempts.concat())
    }

    /// Makes new prompts from the best prompts so far, and scores them. Returns the agent's
    /// attempts.
    async fn run_round(
        &mut self,
        run: &RunContext,
        step: u32,
        metrics: &mut Metrics,
        stop: &StopFlag,
    ) -> Result<Vec<Attempt>, EarlyExit> {
        let seed = run.rollouts.seed;
        let stream = u64::from(self.index) << 32 | u64::from(step);
        let parents = select_parents(&self.pool, &self.keys, seed, stream);
        let count = self.keys.gradient_tasks;
        let first = (step as usize - 1) * self.keys.num_new_prompts();
        let children = parents.into_iter().enumerate().map(|(i, parent)| ChildPrompt {
            parent: parent.clone(),
            tasks: self.tasks.critique_tasks(first + i, count),
            attempts: Vec::new(),
            text: None,
            scores: Vec::new(),
        });
        let mut children: Vec<ChildPrompt> = children.collect();
        let num_children = children.len();

        let gradients = children.iter().enumerate().map(|(i, child)| {
            let part = (step, i, PromptAttemptKind::Gradient);
            self.make_attempts(run, part, &child.parent.text, &child.tasks, num_children, stop)
        });
        let gradients = try_join_all(gradients).await?;
        for (child, attempts) in children.iter_mut().zip(gradients) {
            child.attempts = attempts;
        }
        self.rewrite_prompts(run, step, &mut children, stop).await?;
        let unreadable = children.iter().filter(|child| child.text.is_none()).count();
        // A prompt that exists already needs no scores.
        for i in 0..num_children {
            let (before, rest) = children.split_at_mut(i);
            let is_known = |text: &str| {
                self.pool.iter().any(|known| known.text == text)
                    || before.iter().any(|other| other.text.as_deref() == Some(text))
            };
            rest[0].text.take_if(|text| is_known(text));
        }

        let scored = children
            .iter()
            .enumerate()
            .map(|(i, child)| self.score_child(run, step, i, child, num_children, stop));
        let scored = try_join_all(scored).await?;
        let mut attempts = Vec::new();
        for (child, (scores, made)) in children.iter_mut().zip(scored) {
            child.scores = scores;
            attempts.append(&mut child.attempts);
            attempts.extend(made);
        }
        let mut kept = 0;
        for child in children {
            if let (Some(text), false) = (child.text, child.scores.is_empty()) {
                self.add_candidate(Some(child.parent.version), text, child.scores);
                kept += 1;
            }
        }
        metrics.add("prompt/new", f64::from(kept));
        metrics.add("prompt/unreadable", unreadable as f64);
        metrics.add("prompt/dropped", (num_children - unreadable) as f64 - f64::from(kept));
        Ok(attempts)
    }

    /// Lets the editor write a critique for each child's parent prompt, and then the new prompt of
    /// each child.
    async fn rewrite_prompts(
        &self,
        run: &RunContext,
        step: u32,
        children: &mut [ChildPrompt],
        stop: &StopFlag,
    ) -> Result<(), EarlyExit> {
        let sample_index = |name: &str, i: usize, n: usize| {
            shuffled_indices(run.rollouts.seed, name, &[self.index, step, i as u32], n)[0] as usize
        };
        let wording = EditorWording::new(&self.keys.target);
        let critique = |(i, child): (usize, &ChildPrompt)| {
            let described: Vec<String> = child
                .attempts
                .iter()
                .zip(&child.tasks)
                .enumerate()
                .map(|(n, (made, task))| {
                    texts::describe_attempt(
                        n,
                        &task.question,
                        made,
                        (self.agent.as_str(), &self.chats),
                    )
                })
                .collect();
            let instruction = texts::CRITIQUES[sample_index("critique", i, texts::CRITIQUES.len())];
            let request = wording.critique_request(instruction, &child.parent.text, &described);
            (self.attempt_slot(step, i, PromptAttemptKind::Critique, 0), Some(request))
        };
        let requests: Vec<_> = children.iter().enumerate().map(critique).collect();
        let critiques = self.complete_requests(run, requests, stop).await?;
        let edit = |(i, (child, advice)): (usize, (&ChildPrompt, &Option<String>))| {
            let instruction = texts::EDITS[sample_index("edit", i, texts::EDITS.len())];
            let request = advice
                .as_ref()
                .map(|advice| wording.edit_request(instruction, &child.parent.text, advice));
            (self.attempt_slot(step, i, PromptAttemptKind::Edit, 0), request)
        };
        let requests: Vec<_> = children.iter().zip(&critiques).enumerate().map(edit).collect();
        let completions = self.complete_requests(run, requests, stop).await?;
        for (child, completion) in children.iter_mut().zip(completions) {
            child.text = completion.and_then(|completion| self.parse_prompt(&completion));
        }
        Ok(())
    }

    /// Returns the new prompt in the editor's completion, or `None` if the completion contains no
    /// usable prompt.
    fn parse_prompt(&self, completion: &str) -> Option<String> {
        let read = texts::parse_prompt(completion, &self.keys.target);
        read.inspect_err(|why| debug!(phase = self.index, why, "a rewrite was dropped")).ok()
    }

    /// Sends requests to the editor concurrently, and returns its completions in the same order. A
    /// completion is `None` if there is no request, if the request failed, or if the completion has
    /// no text.
    async fn complete_requests(
        &self,
        run: &RunContext,
        requests: Vec<(AttemptSlot, Option<String>)>,
        stop: &StopFlag,
    ) -> Result<Vec<Option<String>>, EarlyExit> {
        let complete = async |(slot, request): &(AttemptSlot, Option<String>)| match request {
            Some(request) => self.editor.complete(run, *slot, request).await.map(Some),
            None => Ok(None),
        };
        let completions = tokio::select! {
            completions = try_join_all(requests.iter().map(complete)) => completions?,
            // Requests in progress are abandoned, and the resumed run repeats them.
            () = stop.stopped() => return Err(EarlyExit::Stopped),
        };
        let made: Vec<Attempt> = completions.iter().flatten().cloned().collect();
        run.rollouts.record_failed_attempts(&made).await?;
        let text = |attempt: Attempt| {
            let text = attempt.outcome.final_text;
            (attempt.status == Status::Completed && !text.trim().is_empty()).then_some(text)
        };
        Ok(completions.into_iter().map(|attempt| attempt.and_then(text)).collect())
    }

    /// Scores the new prompt of a child on the selection tasks. Returns its scores and the attempts
    /// with it. Returns no scores if the child has no prompt, or if the algorithm GEPA drops the
    /// prompt because it is not better than its parent.
    async fn score_child(
        &self,
        run: &RunContext,
        step: u32,
        index: usize,
        child: &ChildPrompt,
        siblings: usize,
        stop: &StopFlag,
    ) -> Result<(Vec<Option<f64>>, Vec<Attempt>), EarlyExit> {
        let Some(text) = &child.text else { return Ok(Default::default()) };
        let mut made = Vec::new();
        if self.keys.algorithm == PromptAlgorithm::Gepa {
            let part = (step, index, PromptAttemptKind::Trial);
            made = self.make_attempts(run, part, text, &child.tasks, siblings, stop).await?;
            let parent = mean_score(&attempt_scores(&child.attempts));
            if !is_better(mean_score(&attempt_scores(&made)), parent) {
                return Ok((Vec::new(), made));
            }
        }
        let part = (step, index, PromptAttemptKind::Selection);
        let selected =
            self.make_attempts(run, part, text, &self.tasks.selection, siblings, stop).await?;
        let scores = attempt_scores(&selected);
        made.extend(selected);
        Ok((scores, made))
    }

    /// Makes one attempt of the agent at each task, with the given prompt. `num_siblings` prompts
    /// are tried at the same time and share the concurrency limit.
    async fn make_attempts(
        &self,
        run: &RunContext,
        (step, index, part): (u32, usize, PromptAttemptKind),
        prompt: &str,
        tasks: &[Task],
        num_siblings: usize,
        stop: &StopFlag,
    ) -> Result<Vec<Attempt>, EarlyExit> {
        let wanted: Vec<_> = tasks
            .iter()
            .enumerate()
            .map(|(n, task)| (self.attempt_slot(step, index, part, n), task.clone()))
            .collect();
        let maker = AttemptMaker {
            agents: run.rollouts.agents.with_prompt_text(&self.agent, &self.keys.target, prompt),
            concurrency: run.rollouts.concurrency.div_ceil(num_siblings),
            ..run.rollouts.clone()
        };
        let params =
            SamplingParams { temperature: self.keys.temperature, ..SamplingParams::default() };
        let made = maker.run(&wanted, &params, &mut (), stop).await?;
        made.ok_or(EarlyExit::Stopped)
    }

    /// Returns the slot of attempt `n` of the kind `part`, for the prompt with index `index` in a
    /// step.
    fn attempt_slot(
        &self,
        step: u32,
        index: usize,
        part: PromptAttemptKind,
        n: usize,
    ) -> AttemptSlot {
        let PromptKeys { gradient_tasks, selection_tasks, .. } = self.keys;
        let offset = match part {
            PromptAttemptKind::Gradient => 0,
            PromptAttemptKind::Critique => gradient_tasks,
            PromptAttemptKind::Edit => gradient_tasks + 1,
            PromptAttemptKind::Trial => gradient_tasks + 2,
            PromptAttemptKind::Selection => 2 * gradient_tasks + 2,
        };
        let groups = 2 * gradient_tasks + 2 + selection_tasks;
        // The recipe bounds the number of attempts of a step.
        let group = (index * groups + offset + n) as u32;
        AttemptSlot { purpose: Purpose::Prompt, phase: self.index, step, group, sample: 0 }
    }

    fn add_candidate(&mut self, parent: Option<u32>, text: String, scores: Vec<Option<f64>>) {
        self.pool.push(PromptCandidate { version: self.next_version, parent, text, scores });
        self.next_version += 1;
    }

    /// Writes all prompts with their scores to a JSON file in the run directory, the best prompt
    /// first.
    fn write_pool(&self, run: &RunContext) -> Result<(), TrainerError> {
        let dir = run.run_dir.root().join("prompts");
        std::fs::create_dir_all(&dir).map_err(|source| file_error("create", &dir, source))?;
        let path = dir.join(format!("phase-{}.json", self.index));
        let prompt = |candidate: &PromptCandidate| {
            json!({
                "version": candidate.version,
                "parent": candidate.parent,
                "score": candidate.mean(),
                "scores": candidate.scores,
                "text": candidate.text,
            })
        };
        let prompts: Vec<_> = rank_candidates(&self.pool).into_iter().map(prompt).collect();
        let PromptKeys { target, .. } = &self.keys;
        let pool = json!({ "agent": self.agent, "target": target, "prompts": prompts });
        let text = format!("{pool:#}\n");
        write_atomically(&path, text.as_bytes())
    }
}

/// Returns the score of each attempt. `None` if the attempt has no score.
fn attempt_scores(attempts: &[Attempt]) -> Vec<Option<f64>> {
    attempts.iter().map(|attempt| attempt.score).collect()
}
