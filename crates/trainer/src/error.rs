//! Errors of a run.

use std::io;
use std::path::PathBuf;

use levade_agent::DemonstrationError;
use levade_agent::environments::EnvironmentError;
use levade_policy::PolicyError;
use levade_reward::ScoreError;
use levade_rl::RlError;
use levade_store::StoreError;
use levade_tasks::TaskError;
use levade_text::TextError;
use levade_tools::ToolError;
use levade_tree::{AttemptId, Placement, TreeError};

use levade_recipe::{Difference, RecipeError};

/// Errors of a run.
#[derive(Debug, thiserror::Error)]
pub enum TrainerError {
    /// The recipe is wrong.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The tasks cannot be had.
    #[error(transparent)]
    Tasks(#[from] TaskError),
    /// An environment cannot be used.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The tools do not go together.
    #[error(transparent)]
    Tools(#[from] ToolError),
    /// A tool's options do not go together.
    #[error("the tool {name:?} cannot be used: {why}")]
    Tool {
        /// The tool.
        name: String,
        /// Why.
        why: String,
    },
    /// The recipe names a tool that does not exist.
    #[error("`agent.tools` names \"{name}\", but there is no such tool; {known}")]
    UnknownTool {
        /// The name.
        name: String,
        /// The tools there are.
        known: String,
    },
    /// The model cannot be talked to.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The folder holds a run already.
    #[error("{} already holds a run: continue it with --resume, or name another folder with --run", .0.display())]
    FolderTaken(PathBuf),
    /// The record of a run exists already, outside of its folder.
    #[error("the record {} exists already; name another file in `run.store`, or continue its run with --resume", .0.display())]
    RecordTaken(PathBuf),
    /// There is nothing to resume.
    #[error("{} holds no run to resume; leave --resume out to start one there", .0.display())]
    NothingToResume(PathBuf),
    /// Another process works on the run.
    #[error("another process is working on the run in {}; wait for it or stop it", .0.display())]
    Locked(PathBuf),
    /// The recipe does not continue the run.
    #[error(
        "the recipe differs from that of the run in {0}: {difference}. Put it back, go on by the run's own recipe \
         (levade train {0} --resume), or start another run in a folder named with --run",
        folder.display()
    )]
    Differs {
        /// The run.
        folder: PathBuf,
        /// The first key that differs.
        difference: Box<Difference>,
    },
    /// A phase of a run that goes on is to have another length, but is over.
    #[error(
        "phase {phase} is over, phase {later} of the run began from where it ended: its length cannot change any more. Put it back, add a \
         phase at the end, or start another run in a folder named with --run"
    )]
    PhaseOver {
        /// The phase.
        phase: usize,
        /// One that came after it.
        later: u32,
    },
    /// A file or a tool that a run began with is another one now.
    #[error(
        "{name} of `{of}` is not what the run in {} began with: it was changed, added or taken away. Put it back, or start another \
         run in a folder named with --run",
        folder.display()
    )]
    Changed {
        /// Owner: `model`, the source of tasks, or an agent.
        of: String,
        /// Name of the file or the tool.
        name: String,
        /// The run.
        folder: PathBuf,
    },
    /// There is nothing to evaluate on.
    #[error(
        "no task is held out, so there is nothing to evaluate on: set `held_out` of a source of tasks, or `eval.tasks` to 0 \
         to go without"
    )]
    NothingHeldOut,
    /// There is nothing to train on.
    #[error(
        "every task is held out, so there is nothing to train on: hold out fewer, or give a source whose \
         questions no other source holds out"
    )]
    NothingToTrainOn,
    /// There are fewer demonstrations than asked for.
    #[error(
        "`phase.{phase}.demonstrations` is {wanted}, but only {found} training tasks have a demonstration"
    )]
    TooFewDemonstrations {
        /// The phase.
        phase: usize,
        /// How many are asked for.
        wanted: usize,
        /// How many there are.
        found: usize,
    },
    /// A teacher does not do well enough.
    #[error(
        "{teacher} reached a score of {least} in {found} of {tried} attempts, but `phase.{phase}.demonstrations` is \
         {wanted}; ask for fewer, lower `phase.{phase}.source.least_score`, or raise `phase.{phase}.source.tasks`"
    )]
    TooFewLessons {
        /// The phase.
        phase: u32,
        /// The teacher: `the policy NAME`, or `the field NAME`.
        teacher: String,
        /// The least score.
        least: f64,
        /// How many attempts reached it.
        found: usize,
        /// How many were made.
        tried: usize,
        /// How many are asked for.
        wanted: usize,
    },
    /// An agent whose loop does not ask in messages.
    #[error("the agent {agent} has a loop of its own that {teacher} cannot act in")]
    NotTaught {
        /// The agent.
        agent: String,
        /// The teacher: `the policy NAME`, or `the field NAME`.
        teacher: String,
    },
    /// Replies of a task that cannot be imitated.
    #[error("task {task}: {why}")]
    Replies {
        /// The task.
        task: String,
        /// Why not.
        why: String,
    },
    /// A demonstration cannot be imitated.
    #[error("the demonstration of task {task}: {source}")]
    Demonstration {
        /// The task.
        task: String,
        /// Why not.
        source: DemonstrationError,
    },
    /// A task does not fit into what the recipe allows.
    #[error(
        "the prompt of task {task} has {tokens} tokens, more than `agent.max_prompt_tokens` = {most}: raise it, say with \
         `agent.truncation` what to leave out, or leave the task out"
    )]
    PromptOverLimit {
        /// The task.
        task: String,
        /// Tokens of its prompt.
        tokens: usize,
        /// The limit.
        most: usize,
    },
    /// The first prompt of a task is longer than those of an agent that drops nothing.
    #[error(
        "the prompt of task {task} has {tokens} tokens, more than `agent.max_context_tokens` = {most}, and with \
         `agent.context = \"fail\"` nothing is left out: raise it, shorten `agent.system`, or leave the task out"
    )]
    PromptOverContext {
        /// The task.
        task: String,
        /// Tokens of its prompt.
        tokens: usize,
        /// The limit.
        most: usize,
    },
    /// A task does not fit.
    #[error(
        "the prompt of task {task} has {tokens} tokens, but the context holds {context}: raise `model.context` if the model \
         allows it, shorten `agent.system`, or leave the task out"
    )]
    PromptTooLong {
        /// The task.
        task: String,
        /// Tokens of its prompt.
        tokens: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// The answer of a task cannot be scored.
    #[error("task {task}: {source}")]
    Answer {
        /// The task.
        task: String,
        /// Why not.
        source: ScoreError,
    },
    /// A task names a scorer that there is not.
    #[error(
        "task {task} is for the scorer {name:?}, but the recipe has {known}; describe it in [[reward.scorers]], or leave \
         the field `scorer` out"
    )]
    UnknownScorer {
        /// The task.
        task: String,
        /// The scorer.
        name: String,
        /// Scorers of the recipe.
        known: String,
    },
    /// No scorer is for a task.
    #[error(
        "task {task} of the source {of} has no scorer: none of {known} is for it; see `when` of \
         [[reward.scorers]]; the sources are {sources}"
    )]
    NoScorer {
        /// The task.
        task: String,
        /// Its source.
        of: String,
        /// All sources.
        sources: String,
        /// Scorers of the recipe.
        known: String,
    },
    /// A penalty for length starts below 0 tokens for an agent.
    #[error(
        "`phase.{phase}.overlong.buffer` is {buffer}, but must be at most the max_tokens of the agent {agent}, \
         {most}: it does the task {task}"
    )]
    OverlongBuffer {
        /// Position of the phase.
        phase: usize,
        /// The buffer, in tokens.
        buffer: u64,
        /// The agent.
        agent: String,
        /// Its limit, in tokens.
        most: usize,
        /// A task that it does.
        task: String,
    },
    /// A phase compares with greedy attempts, which are in no group, and a scorer compares those of a group.
    #[error(
        "phase {phase} compares with a greedy attempt, which the scorer {scorer} cannot score: it compares attempts at one \
         task with each other. Choose another advantage or scorer"
    )]
    NotCompared {
        /// The phase.
        phase: usize,
        /// The scorer.
        scorer: String,
    },
    /// A scorer was away for too long.
    #[error(
        "the scorer {scorer} was away for the {seconds} s of `reward.outage_seconds`, and nothing can be done without it: {why}. \
         Attempts that wait for it ({waiting}) are in the record; --resume scores them and samples none of them again"
    )]
    Outage {
        /// The scorer.
        scorer: String,
        /// For how long it was waited for.
        seconds: f64,
        /// How many attempts, or groups of them, wait for it.
        waiting: usize,
        /// Why it could not score.
        why: String,
    },
    /// A phase has a KL penalty, but there is no reference to measure from.
    #[error("phase {0} has a KL penalty, but no reference model was loaded")]
    NoReference(usize),
    /// The recipe names parts that its runner has not brought.
    #[error("the recipe needs {0}, which was not brought; this is a defect of the program")]
    NoPart(String),
    /// A task names an agent that there is not.
    #[error(
        "task {task} is for the agent {name:?}, but the recipe has {known}; describe it in [agent.{name}], or leave the \
         field `agent_name` out"
    )]
    UnknownAgent {
        /// The task.
        task: String,
        /// The agent.
        name: String,
        /// Agents of the recipe.
        known: String,
    },
    /// No attempt is under way, but a step waits for one.
    #[error("a step waits for attempts, but none is under way; this is a defect of the trainer")]
    Starved,
    /// A phase needs values, but there is no critic.
    #[error("phase {0} needs a critic, but none was loaded")]
    NoCritic(usize),
    /// Everything that a step sampled is masked.
    #[error(
        "phase {phase}, step {step} has no token to train on: of those that were sampled {masked}; sample for \
         training at a temperature above 0, without filters, penalties and biases"
    )]
    NoTargets {
        /// The phase of the recipe, from 0.
        phase: u32,
        /// The step within the phase, from 0.
        step: u32,
        /// Reasons, each with how much it masks.
        masked: String,
    },
    /// A plan names an attempt that is not recorded.
    #[error("the plan of the step names attempt {0}, which is not in the record; the record is incomplete")]
    Unrecorded(AttemptId),
    /// A step that is asked for is not recorded.
    #[error("step {step} of phase {phase} is not in the record; `levade inspect` lists the steps that are")]
    NoStep {
        /// Index of the phase.
        phase: u32,
        /// Index of the step within the phase.
        step: u32,
    },
    /// A planned step took an attempt that is not recorded.
    #[error("a planned step took {0}, which is not in the record; the record is incomplete")]
    NotMade(Placement),
    /// Not one attempt came to its end.
    #[error("all {count} attempts failed; the first one: {first}")]
    AllFailed {
        /// How many there were.
        count: usize,
        /// Reason that broke the first.
        first: String,
    },
    /// A sampler or a learner failed.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A formula was given what it cannot use.
    #[error(transparent)]
    Rl(#[from] RlError),
    /// A batch cannot be built.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// The record failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file of the run failed.
    #[error("cannot {action} {}: {source}{}", path.display(), way_out(source))]
    File {
        /// Action at the time.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A file of the run does not hold what it should.
    #[error("{} is damaged: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Fault in it.
        why: String,
    },
}

fn way_out(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; make room and continue with --resume: earlier checkpoints are whole"
        }
        _ => "",
    }
}

impl TrainerError {
    /// Whether it is for the user to put right (their input, their disk) rather than a failure of the run.
    pub fn is_user_error(&self) -> bool {
        use TrainerError as E;
        match self {
            E::Recipe(_)
            | E::Tasks(_)
            | E::Environment(_)
            | E::Tools(_)
            | E::UnknownTool { .. }
            | E::Tool { .. }
            | E::Text(_)
            | E::FolderTaken(_)
            | E::RecordTaken(_)
            | E::NothingToResume(_)
            | E::Locked(_)
            | E::Differs { .. }
            | E::PhaseOver { .. }
            | E::Changed { .. }
            | E::NothingHeldOut
            | E::NothingToTrainOn
            | E::TooFewDemonstrations { .. }
            | E::TooFewLessons { .. }
            | E::NotTaught { .. }
            | E::Demonstration { .. }
            | E::Replies { .. }
            | E::PromptTooLong { .. }
            | E::PromptOverLimit { .. }
            | E::PromptOverContext { .. }
            | E::Answer { .. }
            | E::UnknownAgent { .. }
            | E::UnknownScorer { .. }
            | E::NoScorer { .. }
            | E::OverlongBuffer { .. }
            | E::NotCompared { .. }
            | E::NoStep { .. }
            | E::Damaged { .. } => true,
            E::NoReference(_)
            | E::NoCritic(_)
            | E::NoPart(_)
            | E::Starved
            | E::NoTargets { .. }
            | E::Unrecorded(_)
            | E::NotMade(_)
            | E::AllFailed { .. }
            | E::Outage { .. }
            | E::Rl(_)
            | E::Tree(_) => false,
            E::Policy(error) => matches!(
                error,
                PolicyError::Invalid(_) | PolicyError::PromptTooLong { .. } | PolicyError::Storage(_)
            ),
            E::Store(error) => error.is_user_error(),
            E::File { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::StorageFull
                    | io::ErrorKind::QuotaExceeded
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::ReadOnlyFilesystem
                    | io::ErrorKind::NotFound
                    | io::ErrorKind::NotADirectory
            ),
        }
    }
}
