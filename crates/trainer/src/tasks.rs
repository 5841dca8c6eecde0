//! The tasks of a run: the training tasks, their order, and the held-out tasks.

mod curriculum;
mod listed;
mod order;

use std::collections::HashSet;

use levade_agent::Truncation;
use levade_agent::environments::{Environments, TaskList};
use levade_conversation::Overflow;
use levade_policy::SamplingParams;
use levade_recipe::{AgentKeys, OverlongAttempts, Phase, Recipe, TaskSource};
use levade_store::Store;
use levade_tasks::{
    Arithmetic, FileOptions, FileTasks, HeldOutQuestions, MatchingRule, QuestionKey, Split, Task,
    filter_seen,
};
use levade_text::ChatOptions;
use levade_tools::ToolContext;
use levade_tree::Purpose;
use serde_json::json;

use crate::TrainerError;
use crate::agents::{Agents, NamedAgent};
use crate::random::shuffled_indices;
use crate::scoring::{DryRunScore, Scorers};
use crate::sessions::{SessionRecords, list_sessions};
pub(crate) use listed::ListedTasks;
pub(crate) use order::TaskOrder;

/// Number of a generator's tasks that are checked before the run starts. Further tasks differ only
/// in their numbers.
const GENERATED_CHECKED: usize = 64;

/// All training and evaluation tasks of a run. A question that one source holds out is excluded
/// from the training tasks of all sources.
pub struct Tasks {
    train: Vec<TrainSource>,
    /// Held-out tasks by slice. They depend on `eval.split_seed`, never on the run's seed.
    pub eval: Vec<EvalSlice>,
    /// Notes about the sources, for the user.
    pub notes: Vec<String>,
    /// Fingerprints of the task lists that environments returned, and of lists of sessions.
    pub(crate) listings: Vec<ListedTasks>,
    /// Stores of the recorded sessions that serve as tasks.
    pub(crate) records: SessionRecords,
}

enum TrainSource {
    /// Tasks that a generator produces at these indices.
    Generated(Arithmetic, TaskIndices),
    Listed(Vec<Task>),
}

enum TaskIndices {
    All(u32),
    Some(Vec<u32>),
}

/// A named set of held-out tasks whose results are reported together.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalSlice {
    /// Name of the slice in metrics.
    pub name: String,
    /// Whether the slice does not count in the overall result.
    pub excluded_from_overall: bool,
    /// Whether the tasks serve only to select the best checkpoint.
    pub selects: bool,
    /// Held-out tasks of the slice.
    pub tasks: Vec<Task>,
}

impl EvalSlice {
    /// Splits held-out tasks into tasks that only select the best checkpoint and tasks that are
    /// reported. `fraction` is the fraction of selection tasks. If there are at least two tasks,
    /// each part has at least one. If `fraction` is 0, there are no selection tasks.
    fn split_slice(name: String, mut tasks: Vec<Task>, fraction: f64) -> Vec<Self> {
        let num_selected = ((tasks.len() as f64 * fraction).round() as usize).max(1);
        if fraction == 0.0 || tasks.len() < 2 {
            return vec![EvalSlice { name, excluded_from_overall: false, selects: false, tasks }];
        }
        let reported = tasks.split_off(num_selected.min(tasks.len() - 1));
        let choosing = EvalSlice {
            name: format!("{name}-choosing"),
            excluded_from_overall: true,
            selects: true,
            tasks,
        };
        vec![
            choosing,
            EvalSlice { name, excluded_from_overall: false, selects: false, tasks: reported },
        ]
    }
}

/// The tasks of one source, as they were read.
enum LoadedSource<'r> {
    Arithmetic(Arithmetic, u32),
    Files(&'r FileOptions, FileTasks),
    Environment(String, TaskList),
    /// Tasks that need no check for leaks: training seeds of a game, or recorded sessions. Held-out
    /// seeds are other numbers than training seeds, and no session is held out.
    Separate(Vec<Task>),
}

impl Tasks {
    /// Loads or generates the tasks of a recipe, with the duplicate rule of new runs.
    ///
    /// # Errors
    /// Returns the errors of [`Tasks::load_by`].
    pub async fn load(recipe: &Recipe, environments: &Environments) -> Result<Self, TrainerError> {
        Self::load_by(recipe, environments, MatchingRule::default()).await
    }

    /// Loads or generates the tasks of a recipe. `matching` determines which rows are duplicates,
    /// and which tasks leak held-out tasks.
    ///
    /// # Errors
    /// Returns an error if a source cannot be read or listed, or if an evaluation is requested and
    /// no task is held out.
    pub async fn load_by(
        recipe: &Recipe,
        environments: &Environments,
        matching: MatchingRule,
    ) -> Result<Self, TrainerError> {
        let seed = recipe.run.seed;
        let split_seed = recipe.eval.split_seed;
        let count = recipe.eval.tasks;
        let (mut loaded, mut eval, mut notes): (
            Vec<LoadedSource<'_>>,
            Vec<EvalSlice>,
            Vec<String>,
        ) = Default::default();
        // Evaluation questions of generators.
        let mut generated = Vec::new();
        let mut listings = Vec::new();
        let mut records = Vec::new();
        for (i, source) in recipe.tasks.iter().enumerate() {
            // Two sources can have the same name; their index distinguishes them.
            let named = |name: &str| {
                let taken = eval.iter().any(|slice| slice.name == name);
                if taken { format!("{name}-{i}") } else { name.to_owned() }
            };
            match source {
                TaskSource::Arithmetic(keys) => {
                    let arithmetic = Arithmetic::new(keys.options(), split_seed)?;
                    let slice = |split, n: usize| {
                        (0..n as u64).map(|i| arithmetic.task(split, i)).collect()
                    };
                    let seen: Vec<Task> = slice(Split::HeldOut, count);
                    let unseen = EvalSlice {
                        name: named("arithmetic-unseen-wordings"),
                        excluded_from_overall: true,
                        selects: false,
                        tasks: slice(Split::HeldOutWording, recipe.eval.unseen_wordings),
                    };
                    generated.extend(seen.iter().chain(&unseen.tasks).cloned());
                    eval.extend(EvalSlice::split_slice(
                        named("arithmetic"),
                        seen,
                        recipe.eval.select,
                    ));
                    eval.push(unseen);
                    loaded.push(LoadedSource::Arithmetic(
                        Arithmetic::new(keys.options(), seed)?,
                        keys.train,
                    ));
                }
                TaskSource::File(options) => {
                    let mut tasks = options.load_with_rule(split_seed, matching)?;
                    notes.append(&mut tasks.notes);
                    if tasks.repeated > 0 {
                        notes.push(format!(
                            "{}: {} rows are left out, because they repeat an earlier row",
                            options.path.first().display(),
                            tasks.repeated
                        ));
                    }
                    let eval_tasks = tasks.held_out.iter().take(count).cloned().collect();
                    eval.extend(EvalSlice::split_slice(
                        named(&options.path.name()),
                        eval_tasks,
                        recipe.eval.select,
                    ));
                    loaded.push(LoadedSource::Files(options, tasks));
                }
                TaskSource::Seeds(keys) => {
                    let held_out = keys.held_out_tasks(split_seed, count);
                    eval.extend(EvalSlice::split_slice(
                        named("seeds"),
                        held_out,
                        recipe.eval.select,
                    ));
                    loaded.push(LoadedSource::Separate(keys.training_tasks()));
                }
                TaskSource::Sessions(keys) => {
                    let listed = list_sessions(keys, recipe.session_group()).await?;
                    listings.push(ListedTasks::of_sessions(i, &listed.tasks));
                    notes.extend(listed.notes);
                    records.push((keys.path.clone(), listed.store));
                    loaded.push(LoadedSource::Separate(listed.tasks));
                }
                source => {
                    let Some(options) = source.environment() else { continue };
                    let name = options.common_options().name.to_owned();
                    let found = environments.find(&name);
                    let found = found.ok_or_else(|| {
                        TrainerError::MissingPart(format!("the environment {name}"))
                    })?;
                    let listed = found.tasks(seed, split_seed).await?;
                    listings.push(ListedTasks::new(i, &listed));
                    if listed.repeated > 0 {
                        let repeated = listed.repeated;
                        notes.push(format!(
                            "{name}: {repeated} tasks are left out, because they repeat another"
                        ));
                    }
                    let eval_tasks = listed.held_out.iter().take(count).cloned().collect();
                    let kinds = group_by_kind(&name, eval_tasks).into_iter();
                    let kinds: Vec<_> = kinds.map(|(name, tasks)| (named(&name), tasks)).collect();
                    for (name, tasks) in kinds {
                        eval.extend(EvalSlice::split_slice(name, tasks, recipe.eval.select));
                    }
                    loaded.push(LoadedSource::Environment(name, listed));
                }
            }
        }
        let (source_questions, all_questions) = held_out_questions(matching, &loaded, &generated);
        let all_questions = all_questions.as_ref().unwrap_or(&source_questions);
        let mut train = Vec::with_capacity(loaded.len());
        for source in loaded {
            train.push(match source {
                // Held-out tasks and training tasks of a generator share no numbers, whatever the
                // seeds.
                LoadedSource::Arithmetic(generator, n) => TrainSource::Generated(
                    generator,
                    TaskIndices::without_held_out(&generator, n, &source_questions, &mut notes),
                ),
                LoadedSource::Files(options, FileTasks { rest, .. }) => {
                    let path = options.path.first().display();
                    let rest =
                        remove_leaks(all_questions, format_args!("{path}"), rest, &mut notes);
                    TrainSource::Listed(options.training(rest, seed))
                }
                LoadedSource::Separate(tasks) => TrainSource::Listed(tasks),
                LoadedSource::Environment(name, TaskList { train, .. }) => TrainSource::Listed(
                    remove_leaks(all_questions, format_args!("{name}"), train, &mut notes),
                ),
            });
        }
        eval.retain(|slice| !slice.tasks.is_empty() && count > 0);
        if eval.iter().all(|slice| slice.excluded_from_overall) && count > 0 {
            return Err(TrainerError::NoHeldOutTasks);
        }
        let records = SessionRecords::new(records);
        Ok(Tasks { train, eval, notes, listings, records })
    }

    /// Returns the names of the sources, without duplicates.
    pub(crate) fn sources(&self) -> Vec<String> {
        let first = |source: &TrainSource| source.task(0).map(|task| task.source);
        let held_out =
            self.eval.iter().filter_map(|slice| Some(slice.tasks.first()?.source.clone()));
        let mut names: Vec<String> = Vec::new();
        for name in self.train.iter().filter_map(first).chain(held_out) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// Returns the number of training tasks over all sources.
    pub fn train_len(&self) -> usize {
        self.train.iter().map(TrainSource::len).sum()
    }

    /// Returns the training task at `index`, counted over all sources, or `None` if `index` is out
    /// of range.
    pub fn train(&self, mut index: usize) -> Option<Task> {
        for source in &self.train {
            if index < source.len() {
                return source.task(index);
            }
            index -= source.len();
        }
        None
    }

    /// Returns the evaluation tasks whose questions are in `questions`, which are the questions
    /// that a model has seen in training.
    pub fn evaluated_tasks_among<'t>(&'t self, questions: &HashSet<QuestionKey>) -> Vec<&'t Task> {
        let tasks: Vec<&Task> = self.eval.iter().flat_map(|slice| &slice.tasks).collect();
        filter_seen(&tasks, questions)
    }

    /// Returns all tasks, training tasks first.
    pub fn all(&self) -> impl Iterator<Item = Task> + '_ {
        let train =
            self.train.iter().flat_map(|source| (0..source.len()).filter_map(|i| source.task(i)));
        train.chain(self.eval.iter().flat_map(|slice| slice.tasks.iter().cloned()))
    }

    /// Returns the tasks that are checked before the run starts: all tasks of files and
    /// environments, and the first tasks of generators.
    pub(crate) fn tasks_to_check(&self) -> impl Iterator<Item = Task> + '_ {
        self.train_to_check().chain(self.eval.iter().flat_map(|slice| slice.tasks.iter().cloned()))
    }

    /// Returns the maximum number of sampled tokens per attempt: the largest limit among the agents
    /// of the training tasks.
    ///
    /// # Errors
    /// Returns an error if a task names an unknown agent.
    pub(crate) fn max_tokens(&self, agents: &Agents) -> Result<usize, TrainerError> {
        let limits = self.train_to_check().map(|task| Ok(agents.agent_for(&task)?.keys.max_tokens));
        let limits = limits.collect::<Result<Vec<_>, TrainerError>>()?;
        Ok(limits.into_iter().max().unwrap_or_default())
    }

    /// Returns the training tasks among [`tasks_to_check`](Self::tasks_to_check).
    fn train_to_check(&self) -> impl Iterator<Item = Task> + '_ {
        self.train.iter().flat_map(|source| {
            let max_checked = match source {
                TrainSource::Generated(..) => GENERATED_CHECKED,
                TrainSource::Listed(_) => usize::MAX,
            };
            (0..source.len().min(max_checked)).filter_map(|index| source.task(index))
        })
    }
}

impl TrainSource {
    fn len(&self) -> usize {
        match self {
            TrainSource::Generated(_, TaskIndices::All(n)) => *n as usize,
            TrainSource::Generated(_, TaskIndices::Some(indices)) => indices.len(),
            TrainSource::Listed(tasks) => tasks.len(),
        }
    }

    fn task(&self, index: usize) -> Option<Task> {
        match self {
            TrainSource::Generated(generator, TaskIndices::All(_)) => {
                Some(generator.task(Split::Train, index as u64))
            }
            TrainSource::Generated(generator, TaskIndices::Some(indices)) => indices
                .get(index)
                .map(|&item_index| generator.task(Split::Train, item_index.into())),
            TrainSource::Listed(tasks) => tasks.get(index).cloned(),
        }
    }
}

impl TaskIndices {
    /// Returns the indices in `0..n` at which the generator produces no held-out question. Adds a
    /// note if some indices are excluded.
    fn without_held_out(
        generator: &Arithmetic,
        n: u32,
        held_out: &HeldOutQuestions,
        notes: &mut Vec<String>,
    ) -> Self {
        if held_out.is_empty() {
            return TaskIndices::All(n);
        }
        let task = |index: u32| generator.task(Split::Train, u64::from(index));
        let (excluded, kept): (Vec<u32>, Vec<u32>) =
            (0..n).partition(|index| held_out.leak(&task(*index)));
        let Some(first) = excluded.first() else { return TaskIndices::All(n) };
        note_excluded(notes, format_args!("arithmetic"), excluded.len(), &task(*first));
        TaskIndices::Some(kept)
    }
}

impl LoadedSource<'_> {
    /// Returns the training tasks and the held-out tasks of the source. Both lists are empty for a
    /// source that separates them itself, such as a generator.
    fn task_parts(&self) -> (&[Task], &[Task]) {
        match self {
            LoadedSource::Arithmetic(..) | LoadedSource::Separate(_) => (&[], &[]),
            LoadedSource::Files(_, tasks) => (&tasks.rest, &tasks.held_out),
            LoadedSource::Environment(_, listed) => (&listed.train, &listed.held_out),
        }
    }
}

/// Collects the held-out questions of files and environments. The second value also includes the
/// questions of generators, and is `None` if there are none.
fn held_out_questions(
    matching: MatchingRule,
    loaded: &[LoadedSource<'_>],
    generated: &[Task],
) -> (HeldOutQuestions, Option<HeldOutQuestions>) {
    let sources = || {
        loaded
            .iter()
            .map(|source| source.task_parts().0.iter().chain(source.task_parts().1).collect())
    };
    let mut held_out: Vec<&Task> = loaded.iter().flat_map(|source| source.task_parts().1).collect();
    let source_questions = HeldOutQuestions::new(matching, &held_out, sources());
    held_out.extend(generated);
    let all_questions = || HeldOutQuestions::new(matching, &held_out, sources());
    (source_questions, (!generated.is_empty()).then(all_questions))
}

/// Removes tasks that ask or show a held-out question. Adds a note with the number of removed
/// tasks, and a note with the number of kept tasks that are near copies of held-out questions.
fn remove_leaks(
    held_out: &HeldOutQuestions,
    source: std::fmt::Arguments<'_>,
    tasks: Vec<Task>,
    notes: &mut Vec<String>,
) -> Vec<Task> {
    let (excluded, kept): (Vec<Task>, Vec<Task>) =
        tasks.into_iter().partition(|task| held_out.leak(task));
    if let Some(first) = excluded.first() {
        note_excluded(notes, source, excluded.len(), first);
    }
    let mut copies = kept.iter().filter_map(|task| Some((task, held_out.near_copy(task)?)));
    if let Some((task, question)) = copies.next() {
        let count = 1 + copies.count();
        notes.push(format!(
            "{source}: {count} training tasks are near copies of held-out questions, or contain \
             one: {} ({:?}) is close to {:?}",
            task.id,
            truncate_question(&task.question),
            truncate_question(question)
        ));
    }
    kept
}

/// Groups the tasks of a source by kind, in the order of first appearance. A group is named
/// `SOURCE-KIND`, or `SOURCE` if all tasks are of one kind.
fn group_by_kind(source: &str, tasks: Vec<Task>) -> Vec<(String, Vec<Task>)> {
    let mut kinds: Vec<(String, Vec<Task>)> = Vec::new();
    for task in tasks {
        let kind = task.kind.clone().unwrap_or_default();
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, tasks)) => tasks.push(task),
            None => kinds.push((kind, vec![task])),
        }
    }
    match &mut kinds[..] {
        [(only, _)] => *only = source.to_owned(),
        several => several.iter_mut().for_each(|(kind, _)| *kind = format!("{source}-{kind}")),
    }
    kinds
}

fn note_excluded(
    notes: &mut Vec<String>,
    source: std::fmt::Arguments<'_>,
    count: usize,
    first: &Task,
) {
    notes.push(format!(
        "{source}: {count} tasks are excluded from training, because they ask or show a held-out \
         question; one is {} ({:?})",
        first.id,
        truncate_question(&first.question)
    ));
}

/// Truncates a question to 80 characters, for messages.
fn truncate_question(question: &str) -> String {
    const MAX: usize = 80;
    match question.char_indices().nth(MAX) {
        Some((at, _)) => format!("{}…", &question[..at]),
        None => question.to_owned(),
    }
}

/// Returns the questions that a run's model has seen in training: the questions of all
/// demonstrations and training attempts in the store.
///
/// # Errors
/// Returns an error if the store cannot be read, or if its tasks cannot be parsed.
pub async fn trained_questions(store: &dyn Store) -> Result<HashSet<QuestionKey>, TrainerError> {
    let mut questions = HashSet::new();
    for purpose in [Purpose::Demonstration, Purpose::Train] {
        for task in store.tasks(purpose).await? {
            let task: Task =
                serde_json::from_value(task).map_err(|error| TrainerError::Damaged {
                    path: store.location().into(),
                    why: format!("a stored task cannot be read: {error}"),
                })?;
            questions.extend(task.shown_keys());
        }
    }
    Ok(questions)
}

/// Returns the chat options that the recipe sets for an agent. `now` is the start of the run as a
/// Unix timestamp in seconds. If it is `None`, templates see the current time.
pub fn chat_options(agent: &AgentKeys, now: Option<u64>) -> ChatOptions {
    ChatOptions {
        tools: agent.protocol,
        tool_prompt: agent.tool_prompt,
        bare_calls: agent.bare_calls,
        late_system: agent.late_system,
        variables: agent.variables.clone(),
        now,
    }
}

/// Checks for errors that would otherwise occur during training: missing tools, prompts that do not
/// fit, and expected answers that cannot be scored.
///
/// # Errors
/// Returns an error that names the first such tool or task.
pub async fn check_tasks(
    recipe: &Recipe,
    scorers: &Scorers,
    tasks: &Tasks,
    agents: &Agents,
) -> Result<(), TrainerError> {
    let mut checked_scorers = Vec::new();
    let sources = tasks.sources();
    for task in tasks.tasks_to_check() {
        let named = agents.agent_for(&task)?;
        let NamedAgent { agent, format, keys, .. } = named;
        let player = named.player();
        let opening = player.opening;
        let attempt = "the check before the start".to_owned();
        let seed = recipe.run.seed;
        let deadline = agent.limits.attempt_timeout;
        let params = SamplingParams::default();
        let opened = ToolContext { attempt, task: task.clone(), seed, stream: 0, deadline, params };
        agent.tools.discover_tools(&opened).await?;
        let can_truncate = opening.truncation != Truncation::Reject;
        let tokens =
            format.chat().prompt(&keys.initial_messages(&task), &agent.tools.specs(&task))?.len();
        if tokens > opening.max_tokens && !can_truncate {
            return Err(TrainerError::PromptOverLimit {
                task: task.id,
                tokens,
                max_tokens: opening.max_tokens,
            });
        }
        let budget = player.context_policy.budget;
        let fails = budget.overflow == Overflow::Fail && !keys.kind.calls_over_http();
        if fails && tokens.min(opening.max_tokens) > budget.max_tokens {
            return Err(TrainerError::PromptOverContext {
                task: task.id,
                tokens,
                max_tokens: budget.max_tokens,
            });
        }
        let context = player.context;
        if tokens.min(opening.max_tokens) >= context {
            return Err(TrainerError::PromptTooLong { task: task.id, tokens, context });
        }
        for (phase, buffer) in overlong_buffers(recipe) {
            let agent = agent.name.clone();
            let max_len = keys.max_tokens;
            if buffer > max_len as u64 {
                return Err(TrainerError::OverlongBuffer {
                    phase,
                    buffer,
                    agent,
                    max_tokens: max_len,
                    task: task.id,
                });
            }
        }
        let recorded = json!(task);
        scorers.check_task(&task.id, &recorded, &sources)?;
        // A scoring program that cannot score is detected before anything is sampled.
        scorers.check_ready(&task.id, &recorded, &mut checked_scorers).await?;
    }
    Ok(())
}

/// Returns the indices of the phases with a length penalty, each with the size of the penalty's
/// buffer in tokens.
fn overlong_buffers(recipe: &Recipe) -> impl Iterator<Item = (usize, u64)> {
    recipe.phase.iter().enumerate().filter_map(|(index, phase)| match phase {
        Phase::Rl(keys) => match keys.overlong {
            OverlongAttempts::Penalize { buffer, .. } => Some((index, buffer)),
            _ => None,
        },
        Phase::Sft(_) | Phase::Prompt(_) => None,
    })
}

/// Dry-runs each scorer on a synthetic attempt at the first task to which it applies. The answer of
/// the attempt is the expected answer of the task.
pub async fn dry_run(scorers: &Scorers, tasks: &Tasks) -> Vec<DryRunScore> {
    scorers
        .dry_run(|is_for| tasks.tasks_to_check().map(|task| json!(task)).find(|task| is_for(task)))
        .await
}

#[cfg(test)]
#[path = "tasks_tests.rs"]
mod tests;
