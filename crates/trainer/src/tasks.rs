//! The tasks of a run: what is trained on, in which order, and what is held out.

use std::sync::Arc;
use std::time::Duration;

use dressage_agent::Truncation;
use dressage_agent::tasks::{Arithmetic, Split, Task};
use dressage_agent::tools::{Calculator, Delayed, Tool, ToolSet};
use dressage_reward::Scorer;
use dressage_text::{Chat, ChatOptions, Message};

use crate::TrainerError;
use crate::random::order;
use crate::recipe::{AgentKeys, QUESTION, Recipe, TaskSource};

/// How many tasks of a generator are looked at before the start. The others differ from them in their numbers only.
const GENERATED_CHECKED: u32 = 64;

/// All tasks of a run.
pub struct Tasks {
    train: Vec<Train>,
    /// What is held out, by where it comes from.
    pub eval: Vec<EvalSlice>,
    /// What a user should know of the sources.
    pub(crate) notes: Vec<String>,
}

enum Train {
    Generated(Arithmetic, u32),
    Listed(Vec<Task>),
}

/// Held-out tasks of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalSlice {
    /// What they are called in metrics.
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

impl Tasks {
    /// Reads or prepares the tasks of a recipe.
    ///
    /// # Errors
    /// When a source cannot be read, or an evaluation is asked for and nothing is held out.
    pub fn load(recipe: &Recipe) -> Result<Self, TrainerError> {
        let (seed, count) = (recipe.run.seed, recipe.eval.tasks);
        let mut tasks = Tasks { train: Vec::new(), eval: Vec::new(), notes: Vec::new() };
        for (i, source) in recipe.tasks.iter().enumerate() {
            // Two sources may be of one name; their place tells them apart.
            let named = |name: &str| {
                let taken = tasks.eval.iter().any(|slice| slice.name == name);
                if taken { format!("{name}-{i}") } else { name.to_owned() }
            };
            match source {
                TaskSource::Arithmetic(keys) => {
                    let generator = Arithmetic::new(keys.options(), seed)?;
                    let slice = |split, n: usize| (0..n as u64).map(|i| generator.task(split, i)).collect();
                    let seen = EvalSlice::split(
                        named("arithmetic"),
                        slice(Split::HeldOut, count),
                        recipe.eval.select,
                    );
                    let unseen = EvalSlice {
                        name: named("arithmetic-unseen-wordings"),
                        apart: true,
                        selects: false,
                        tasks: slice(Split::HeldOutWording, recipe.eval.unseen_wordings),
                    };
                    tasks.eval.extend(seen.into_iter().chain([unseen]));
                    tasks.train.push(Train::Generated(generator, keys.train));
                }
                TaskSource::Jsonl(options) => {
                    let loaded = options.load(seed)?;
                    if loaded.repeated > 0 {
                        tasks.notes.push(format!(
                            "{}: {} rows are left out, since an earlier row asks the same",
                            options.path.display(),
                            loaded.repeated
                        ));
                    }
                    let stem = options.path.file_stem().unwrap_or_default().to_string_lossy();
                    let mut held_out = loaded.held_out;
                    held_out.truncate(count);
                    tasks.eval.extend(EvalSlice::split(named(&stem), held_out, recipe.eval.select));
                    tasks.train.push(Train::Listed(loaded.train));
                }
            }
        }
        tasks.eval.retain(|slice| !slice.tasks.is_empty() && count > 0);
        if tasks.eval.iter().all(|slice| slice.apart) && count > 0 {
            return Err(TrainerError::NothingHeldOut);
        }
        Ok(tasks)
    }

    /// How many tasks there are to train on.
    pub fn train_len(&self) -> usize {
        self.train.iter().map(Train::len).sum()
    }

    /// A task to train on, counted over all sources; `None` past the end.
    pub fn train(&self, mut index: usize) -> Option<Task> {
        for source in &self.train {
            if index < source.len() {
                return match source {
                    Train::Generated(generator, _) => Some(generator.task(Split::Train, index as u64)),
                    Train::Listed(tasks) => tasks.get(index).cloned(),
                };
            }
            index -= source.len();
        }
        None
    }

    /// Tasks that are looked at before the start: all of files, some of generators.
    pub(crate) fn to_check(&self) -> impl Iterator<Item = Task> + '_ {
        let train = self.train.iter().flat_map(|source| {
            let (generated, listed) = match source {
                Train::Generated(generator, n) => (Some((generator, (*n).min(GENERATED_CHECKED))), &[][..]),
                Train::Listed(tasks) => (None, &tasks[..]),
            };
            let generated = generated
                .into_iter()
                .flat_map(|(generator, n)| (0..u64::from(n)).map(|i| generator.task(Split::Train, i)));
            generated.chain(listed.iter().cloned())
        });
        train.chain(self.eval.iter().flat_map(|slice| slice.tasks.iter().cloned()))
    }
}

impl Train {
    fn len(&self) -> usize {
        match self {
            Train::Generated(_, n) => *n as usize,
            Train::Listed(tasks) => tasks.len(),
        }
    }
}

/// The training tasks of a phase in the order they are taken: every task once, then all again in another order.
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

/// The conversation that a task opens.
pub fn opening(agent: &AgentKeys, task: &Task) -> Vec<Message> {
    let asked = Message::user(agent.prompt.replace(QUESTION, &task.question));
    if agent.system.is_empty() { vec![asked] } else { vec![Message::system(agent.system.as_str()), asked] }
}

/// The tools that a recipe names.
///
/// # Errors
/// When there is no such tool, or one is named twice.
pub fn tool_set(agent: &AgentKeys) -> Result<ToolSet, TrainerError> {
    let known: [Arc<dyn Tool>; 1] = [Arc::new(Calculator)];
    let named = |name: &String| {
        known.iter().find(|tool| tool.spec().name == *name).cloned().ok_or_else(|| {
            TrainerError::UnknownTool {
                name: name.clone(),
                known: known.iter().map(|tool| tool.spec().name).collect::<Vec<_>>().join(", "),
            }
        })
    };
    let mut tools = agent.tools.iter().map(named).collect::<Result<Vec<_>, _>>()?;
    if agent.tool_delay > 0.0 {
        let [least, most] = [agent.tool_delay_least, agent.tool_delay].map(Duration::from_secs_f64);
        let slow = |tool| -> Arc<dyn Tool> { Arc::new(Delayed::new(tool, least..=most)) };
        tools = tools.into_iter().map(slow).collect();
    }
    Ok(ToolSet::new(tools, Duration::from_secs_f64(agent.tool_seconds))?)
}

/// How to talk to a model, as a recipe says it. Of a run, `now` is the moment at which it began, in seconds since 1970; without one the
/// clock says it.
pub fn chat_options(agent: &AgentKeys, now: Option<u64>) -> ChatOptions {
    ChatOptions {
        tools: agent.protocol,
        tool_prompt: agent.tool_prompt,
        variables: agent.variables.clone(),
        now,
    }
}

/// Finds what would fail later: prompts that do not fit, answers that cannot be scored.
///
/// # Errors
/// Names the first such task.
pub async fn check_tasks(
    recipe: &Recipe,
    tasks: &Tasks,
    chat: &Chat,
    tools: &ToolSet,
    context: usize,
) -> Result<(), TrainerError> {
    let specs = tools.specs();
    let limits = recipe.agent.limits(context);
    let cuts = limits.truncation != Truncation::Refuse;
    for task in tasks.to_check() {
        let tokens = chat.prompt(&opening(&recipe.agent, &task), &specs)?.len();
        if tokens > limits.prompt && !cuts {
            return Err(TrainerError::PromptOverLimit { task: task.id, tokens, most: limits.prompt });
        }
        if tokens.min(limits.prompt) >= context {
            return Err(TrainerError::PromptTooLong { task: task.id, tokens, context });
        }
        if let Err(source) = recipe.reward.scorer.check_expected(&task.answer) {
            return Err(TrainerError::Answer { task: task.id, source });
        }
    }
    // A program that cannot score is found before anything is sampled.
    if let (Scorer::Command(scorer), Some(task)) = (&recipe.reward.scorer, tasks.to_check().next()) {
        let asked = scorer.score("", &task.answer).await;
        asked.map_err(|source| TrainerError::Answer { task: task.id, source })?;
    }
    Ok(())
}
