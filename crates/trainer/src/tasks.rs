//! The tasks of a run: what is trained on, in which order, and what is held out.

use std::collections::HashSet;

use dressage_agent::Truncation;
use dressage_agent::environments::{Environments, Listed};
use dressage_agent::tasks::{Arithmetic, FileOptions, FileTasks, QuestionKey, Split, Task};
use dressage_agent::tools::ToolContext;
use dressage_conversation::Overflow;
use dressage_policy::SamplingParams;
use dressage_store::Store;
use dressage_text::ChatOptions;
use dressage_tree::Purpose;
use serde_json::json;

use crate::TrainerError;
use crate::agents::{Agents, NamedAgent};
use crate::random::order;
use crate::recipe::{AgentKeys, Recipe, TaskSource};
use crate::scoring::{Rehearsed, Scorers};

/// How many tasks of a generator are looked at before the start. The others differ from them in their numbers
/// only.
const GENERATED_CHECKED: usize = 64;

/// All tasks of a run. What is held out of one source is trained on from none.
pub struct Tasks {
    train: Vec<Train>,
    /// Held-out tasks by where they come from. They depend on `eval.split_seed`, never on the run's seed.
    pub eval: Vec<EvalSlice>,
    /// Notes that a user should know of the sources.
    pub notes: Vec<String>,
    /// Lists that environments gave.
    pub(crate) listings: Vec<Listing>,
}

/// A list of tasks that an environment gave, to be told from another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listing {
    /// The source of tasks.
    pub of: String,
    /// Packages that it comes from, with their versions.
    pub package: String,
    /// Length of the tasks as JSON.
    pub bytes: u64,
    /// Checksum of that.
    pub crc32c: u32,
}

impl Listing {
    fn new(place: usize, listed: &Listed) -> Self {
        let text = json!([listed.train, listed.held_out]).to_string();
        Listing {
            of: format!("tasks.{place}"),
            package: listed.package.clone(),
            bytes: text.len() as u64,
            crc32c: crc32c::crc32c(text.as_bytes()),
        }
    }
}

enum Train {
    /// The tasks of a generator at these places, all in `0..n` where none is left out.
    Generated(Arithmetic, Places),
    Listed(Vec<Task>),
}

enum Places {
    All(u32),
    Some(Vec<u32>),
}

/// Held-out tasks of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalSlice {
    /// Name in metrics.
    pub name: String,
    /// Whether they are reported apart from the overall result.
    pub apart: bool,
    /// Whether they choose the best checkpoint, and do nothing else.
    pub selects: bool,
    /// The tasks.
    pub tasks: Vec<Task>,
}

impl EvalSlice {
    /// Held-out tasks, of which a `share` only chooses the best checkpoint; of both parts there is at least
    /// one task, if there are two.
    fn split(name: String, mut tasks: Vec<Task>, share: f64) -> Vec<Self> {
        let choosing = ((tasks.len() as f64 * share).round() as usize).max(1);
        if share == 0.0 || tasks.len() < 2 {
            return vec![EvalSlice { name, apart: false, selects: false, tasks }];
        }
        let reported = tasks.split_off(choosing.min(tasks.len() - 1));
        let choosing = EvalSlice { name: format!("{name}-choosing"), apart: true, selects: true, tasks };
        vec![choosing, EvalSlice { name, apart: false, selects: false, tasks: reported }]
    }
}

/// A source that was read.
enum Loaded<'r> {
    Arithmetic(Arithmetic, u32),
    Files(&'r FileOptions, FileTasks),
    Environment(String, Listed),
}

impl Tasks {
    /// Reads or prepares the tasks of a recipe.
    ///
    /// # Errors
    /// When a source cannot be read or listed, or an evaluation is asked for and nothing is held out.
    pub async fn load(recipe: &Recipe, environments: &Environments) -> Result<Self, TrainerError> {
        let (seed, split_seed, count) = (recipe.run.seed, recipe.eval.split_seed, recipe.eval.tasks);
        let (mut loaded, mut eval, mut notes): (Vec<Loaded<'_>>, Vec<EvalSlice>, Vec<String>) =
            Default::default();
        // What files hold out, and what is asked of generators.
        let (mut held_out, mut generated) = (HashSet::new(), HashSet::new());
        let mut listings = Vec::new();
        for (i, source) in recipe.tasks.iter().enumerate() {
            // Two sources may be of one name; their place tells them apart.
            let named = |name: &str| {
                let taken = eval.iter().any(|slice| slice.name == name);
                if taken { format!("{name}-{i}") } else { name.to_owned() }
            };
            match source {
                TaskSource::Arithmetic(keys) => {
                    let asking = Arithmetic::new(keys.options(), split_seed)?;
                    let slice = |split, n: usize| (0..n as u64).map(|i| asking.task(split, i)).collect();
                    let seen: Vec<Task> = slice(Split::HeldOut, count);
                    let unseen = EvalSlice {
                        name: named("arithmetic-unseen-wordings"),
                        apart: true,
                        selects: false,
                        tasks: slice(Split::HeldOutWording, recipe.eval.unseen_wordings),
                    };
                    generated.extend(seen.iter().chain(&unseen.tasks).map(Task::key));
                    eval.extend(EvalSlice::split(named("arithmetic"), seen, recipe.eval.select));
                    eval.push(unseen);
                    loaded.push(Loaded::Arithmetic(Arithmetic::new(keys.options(), seed)?, keys.train));
                }
                TaskSource::File(options) => {
                    let mut tasks = options.load(split_seed)?;
                    notes.append(&mut tasks.notes);
                    if tasks.repeated > 0 {
                        notes.push(format!(
                            "{}: {} rows are left out, since an earlier row asks the same",
                            options.path.first().display(),
                            tasks.repeated
                        ));
                    }
                    held_out.extend(tasks.held_out.iter().map(Task::key));
                    let mut asked = std::mem::take(&mut tasks.held_out);
                    asked.truncate(count);
                    eval.extend(EvalSlice::split(named(&options.path.name()), asked, recipe.eval.select));
                    loaded.push(Loaded::Files(options, tasks));
                }
                source => {
                    let Some(options) = source.environment() else { continue };
                    let name = options.common().name.to_owned();
                    let found = environments.find(&name);
                    let found =
                        found.ok_or_else(|| TrainerError::NoPart(format!("the environment {name}")))?;
                    let mut listed = found.tasks(seed, split_seed).await?;
                    listings.push(Listing::new(i, &listed));
                    if listed.repeated > 0 {
                        let repeated = listed.repeated;
                        notes.push(format!(
                            "{name}: {repeated} tasks are left out, since another asks the same"
                        ));
                    }
                    held_out.extend(listed.held_out.iter().map(Task::key));
                    let mut asked = std::mem::take(&mut listed.held_out);
                    asked.truncate(count);
                    let kinds = by_kind(&name, asked).into_iter();
                    let kinds: Vec<_> = kinds.map(|(name, tasks)| (named(&name), tasks)).collect();
                    for (name, tasks) in kinds {
                        eval.extend(EvalSlice::split(name, tasks, recipe.eval.select));
                    }
                    loaded.push(Loaded::Environment(name, listed));
                }
            }
        }
        let mut train = Vec::with_capacity(loaded.len());
        for source in loaded {
            train.push(match source {
                // What a generator holds out and what it trains on share no numbers, whatever the seeds.
                Loaded::Arithmetic(generator, n) => {
                    Train::Generated(generator, Places::without(&generator, n, &held_out, &mut notes))
                }
                Loaded::Files(options, FileTasks { mut rest, .. }) => {
                    let before = rest.len();
                    rest.retain(|task| !held_out.contains(&task.key()) && !generated.contains(&task.key()));
                    let path = options.path.first().display();
                    note_left_out(&mut notes, format_args!("{path}"), before - rest.len());
                    Train::Listed(options.training(rest, seed))
                }
                Loaded::Environment(name, Listed { mut train, .. }) => {
                    let before = train.len();
                    train.retain(|task| !held_out.contains(&task.key()) && !generated.contains(&task.key()));
                    note_left_out(&mut notes, format_args!("{name}"), before - train.len());
                    Train::Listed(train)
                }
            });
        }
        eval.retain(|slice| !slice.tasks.is_empty() && count > 0);
        if eval.iter().all(|slice| slice.apart) && count > 0 {
            return Err(TrainerError::NothingHeldOut);
        }
        Ok(Tasks { train, eval, notes, listings })
    }

    /// How many tasks there are to train on.
    pub fn train_len(&self) -> usize {
        self.train.iter().map(Train::len).sum()
    }

    /// A task to train on, counted over all sources; `None` past the end.
    pub fn train(&self, mut index: usize) -> Option<Task> {
        for source in &self.train {
            if index < source.len() {
                return source.task(index);
            }
            index -= source.len();
        }
        None
    }

    /// Tasks to evaluate on that ask one of these questions.
    pub fn evaluated_among<'t>(&'t self, questions: &HashSet<QuestionKey>) -> Vec<&'t Task> {
        let tasks = self.eval.iter().flat_map(|slice| &slice.tasks);
        tasks.filter(|task| questions.contains(&task.key())).collect()
    }

    /// Tasks that are looked at before the start: all of files, some of generators.
    pub(crate) fn to_check(&self) -> impl Iterator<Item = Task> + '_ {
        let train = self.train.iter().flat_map(|source| {
            let most = match source {
                Train::Generated(..) => GENERATED_CHECKED,
                Train::Listed(_) => usize::MAX,
            };
            (0..source.len().min(most)).filter_map(|index| source.task(index))
        });
        train.chain(self.eval.iter().flat_map(|slice| slice.tasks.iter().cloned()))
    }
}

impl Train {
    fn len(&self) -> usize {
        match self {
            Train::Generated(_, Places::All(n)) => *n as usize,
            Train::Generated(_, Places::Some(places)) => places.len(),
            Train::Listed(tasks) => tasks.len(),
        }
    }

    fn task(&self, index: usize) -> Option<Task> {
        match self {
            Train::Generated(generator, Places::All(_)) => Some(generator.task(Split::Train, index as u64)),
            Train::Generated(generator, Places::Some(places)) => {
                places.get(index).map(|&place| generator.task(Split::Train, place.into()))
            }
            Train::Listed(tasks) => tasks.get(index).cloned(),
        }
    }
}

impl Places {
    /// The places in `0..n` at which a generator asks nothing that a file holds out.
    fn without(
        generator: &Arithmetic,
        n: u32,
        held_out: &HashSet<QuestionKey>,
        notes: &mut Vec<String>,
    ) -> Self {
        if held_out.is_empty() {
            return Places::All(n);
        }
        let asks = |place: &u32| generator.task(Split::Train, u64::from(*place)).key();
        let places: Vec<u32> = (0..n).filter(|place| !held_out.contains(&asks(place))).collect();
        let left_out = n as usize - places.len();
        note_left_out(notes, format_args!("arithmetic"), left_out);
        if left_out == 0 { Places::All(n) } else { Places::Some(places) }
    }
}

/// Tasks of a source by their kinds, in the order in which these come first; under the name of the source
/// where all are of one kind.
fn by_kind(source: &str, tasks: Vec<Task>) -> Vec<(String, Vec<Task>)> {
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

fn note_left_out(notes: &mut Vec<String>, source: std::fmt::Arguments<'_>, count: usize) {
    if count > 0 {
        notes
            .push(format!("{source}: {count} tasks are not trained on, since another source holds them out"));
    }
}

/// The questions that a run was trained on, by its record: those of its demonstrations, and of the attempts
/// that it made for training.
///
/// # Errors
/// When the record cannot be read, or holds something else than tasks.
pub async fn trained_on(record: &dyn Store) -> Result<HashSet<QuestionKey>, TrainerError> {
    let mut questions = HashSet::new();
    for purpose in [Purpose::Demonstration, Purpose::Train] {
        for task in record.tasks(purpose).await? {
            let task: Task = serde_json::from_value(task).map_err(|error| TrainerError::Damaged {
                path: record.place().into(),
                why: format!("a task of it cannot be read: {error}"),
            })?;
            questions.insert(task.key());
        }
    }
    Ok(questions)
}

/// The training tasks of a phase in the order they are taken: every task once, then all again in another
/// order.
pub(crate) struct TaskOrder {
    seed: u64,
    phase: u32,
    tasks: usize,
    /// The order of the epoch that was asked for last.
    epoch: Option<(u32, Vec<u32>)>,
}

impl TaskOrder {
    pub(crate) fn new(seed: u64, phase: u32, tasks: usize) -> Self {
        TaskOrder { seed, phase, tasks, epoch: None }
    }

    /// Which task is taken at `place`, from 0. There must be tasks.
    pub(crate) fn at(&mut self, place: u64) -> usize {
        let (epoch, within) = ((place / self.tasks as u64) as u32, (place % self.tasks as u64) as usize);
        if self.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.epoch = Some((epoch, order(self.seed, "tasks", &[self.phase, epoch], self.tasks)));
        }
        self.epoch.as_ref().map_or(0, |(_, order)| order[within] as usize)
    }
}

/// How to talk to a model, as a recipe says it. Of a run, `now` is the moment at which it began, in seconds
/// since 1970; without one the clock says it.
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

/// Finds what would fail later: tools that are not there, prompts that do not fit, answers that cannot be
/// scored.
///
/// # Errors
/// Names the first such tool or task.
pub async fn check_tasks(
    recipe: &Recipe,
    scorers: &Scorers,
    tasks: &Tasks,
    agents: &Agents,
) -> Result<(), TrainerError> {
    let mut asked = Vec::new();
    for task in tasks.to_check() {
        let NamedAgent { built_in: agent, context, keys, .. } = agents.of(&task)?;
        let limits = agent.limits;
        let attempt = "the check before the start".to_owned();
        let (seed, deadline) = (recipe.run.seed, limits.attempt);
        let params = SamplingParams::default();
        let opened = ToolContext { attempt, task: task.clone(), seed, stream: 0, deadline, params };
        agent.tools.find(&opened).await?;
        let cuts = limits.truncation != Truncation::Refuse;
        let tokens = agent.format.chat().prompt(&keys.opening(&task), &agent.tools.specs(&task))?.len();
        if tokens > limits.prompt && !cuts {
            return Err(TrainerError::PromptOverLimit { task: task.id, tokens, most: limits.prompt });
        }
        let budget = agent.context.budget;
        let fails = budget.overflow == Overflow::Fail && !keys.kind.calls();
        if fails && tokens.min(limits.prompt) > budget.most {
            return Err(TrainerError::PromptOverContext { task: task.id, tokens, most: budget.most });
        }
        if tokens.min(limits.prompt) >= *context {
            return Err(TrainerError::PromptTooLong { task: task.id, tokens, context: *context });
        }
        let recorded = json!(task);
        scorers.check_task(&task.id, &recorded)?;
        // A program that cannot score is found before anything is sampled.
        scorers.check_ready(&task.id, &recorded, &mut asked).await?;
    }
    Ok(())
}

/// Asks each scorer about a made-up attempt at the first task that it scores, which ends with what that task
/// expects.
pub async fn rehearse(scorers: &Scorers, tasks: &Tasks) -> Vec<Rehearsed> {
    scorers.rehearse(|is_for| tasks.to_check().map(|task| json!(task)).find(|task| is_for(task))).await
}

#[cfg(test)]
#[path = "tasks_tests.rs"]
mod tests;
