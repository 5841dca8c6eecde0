//! Errors of a training run.

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
use levade_tree::{AttemptId, AttemptSlot, TreeError};

use levade_recipe::{Difference, RecipeError};

use crate::remedies::{explain_no_checkpoint, full_disk_remedy, reward_change_remedy};

/// An error that ends a training run or prevents its start.
#[derive(Debug, thiserror::Error)]
pub enum TrainerError {
    /// The recipe is invalid.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The tasks cannot be loaded.
    #[error(transparent)]
    Tasks(#[from] TaskError),
    /// An environment that the recipe names cannot be used.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The tools of an agent conflict with each other.
    #[error(transparent)]
    Tools(#[from] ToolError),
    /// A tool cannot be used as the recipe configures it.
    #[error("the tool {name:?} cannot be used: {why}")]
    Tool {
        /// Name of the tool.
        name: String,
        /// Reason why the tool cannot be used.
        why: String,
    },
    /// The recipe names a tool that does not exist.
    #[error("`agent.tools` names the tool \"{name}\", which does not exist; {known}")]
    UnknownTool {
        /// Name in the recipe to which no tool belongs.
        name: String,
        /// The tools that exist, as the end of the message.
        known: String,
    },
    /// The environment variable that contains the headers for the trace collector is malformed.
    #[error(
        "the environment variable {variable}, which `metrics.traces.headers_env` names, cannot \
             be used: {why}"
    )]
    TraceHeaders {
        /// Name of the variable.
        variable: String,
        /// Description of the problem with the variable's value.
        why: String,
    },
    /// The tokenizer or the chat template cannot be used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The directory already contains a run.
    #[error("the directory {} already holds a run; continue the run with --resume, or name another \
             directory with --run", .0.display())]
    RunDirExists(PathBuf),
    /// The store of a run already exists outside the run directory.
    #[error("the store {} already exists; name another file in `run.store`, or continue the run \
             of this store with --resume", .0.display())]
    StoreExists(PathBuf),
    /// The directory contains no run to resume.
    #[error("the directory {} holds no run to resume; leave --resume out to start a run there",
             .0.display())]
    NothingToResume(PathBuf),
    /// Another process is working on the run.
    #[error("another process is working on the run in {}; wait for it or stop it", .0.display())]
    Locked(PathBuf),
    /// The recipe differs from the run's recipe in a key that must not change.
    #[error(
        "the recipe differs from the recipe of the run in {0}: {difference}. Undo the change, \
         resume with the run's own recipe (levade train {0} --resume), {1}or start another run in \
         a directory named with --run",
        run_dir.display(),
        reward_change_remedy(difference)
    )]
    Differs {
        /// Directory of the run.
        run_dir: PathBuf,
        /// The first recipe key whose value differs from the run's recipe.
        difference: Box<Difference>,
    },
    /// The directory contains no record of sessions.
    #[error("the directory {} holds no record of sessions; name the directory that levade serve \
             --record has written", .0.display())]
    NoSessions(PathBuf),
    /// The model or tokenizer of the run differs from those that sampled the recorded sessions.
    #[error("the sessions in {} were sampled by another model than the run's: the file {name} \
             differs; train the model that was served", record.display())]
    OtherModel {
        /// Directory of the record.
        record: PathBuf,
        /// Name of the model or tokenizer file that differs.
        name: String,
    },
    /// The run has no step to go back to, or no intact checkpoint at or before that step.
    #[error("the run in {} {}", run_dir.display(), explain_no_checkpoint(*step, *num_steps, kept))]
    NoCheckpoint {
        /// Number of finished steps that was requested.
        step: u32,
        /// Number of steps of the run, including one that is recorded but not finished.
        num_steps: u32,
        /// Number of finished steps at each checkpoint of the run.
        kept: Vec<u32>,
        /// Directory of the run.
        run_dir: PathBuf,
    },
    /// The store of a run that goes back to an earlier step is not in its directory.
    #[error(
        "the store {location} is outside of the run directory {}, and is not overwritten; name \
         another store for the repeated steps, as in --set run.store=sqlite:run.db",
        run_dir.display()
    )]
    StoreOutside {
        /// Location of the store.
        location: String,
        /// Directory of the run.
        run_dir: PathBuf,
    },
    /// The new store of a run that goes back to an earlier step contains a run.
    #[error("the store {location} already holds a run; name another store in `run.store`")]
    StoreInUse {
        /// Location of the store.
        location: String,
    },
    /// The file system cannot exchange two directories.
    #[error(
        "cannot exchange the run directory {} with the directory for the repeated steps: {source}; \
         copy the run to another file system, and go back to the step there",
        run_dir.display()
    )]
    ExchangeUnsupported {
        /// Directory of the run.
        run_dir: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The recipe changes the length of a phase that has already ended.
    #[error(
        "the length of phase {phase} can no longer change, because phase {later} of the run \
         started from the result of phase {phase}. Undo the change, add a phase at the end, or \
         start another run in a directory named with --run"
    )]
    PhaseFinished {
        /// Index of the phase.
        phase: usize,
        /// Index of a later phase, which has already started.
        later: u32,
    },
    /// A file or a tool has changed since the run started.
    #[error(
        "cannot resume the run in {}: {name} of `{of}` was changed, added or removed after the \
         start. Undo the change, or start another run in a directory named with --run",
        run_dir.display()
    )]
    Changed {
        /// Owner of the file or tool: `model`, a source of tasks such as `tasks.0`, or an agent.
        of: String,
        /// Name of the file or of the tool.
        name: String,
        /// Directory of the run.
        run_dir: PathBuf,
    },
    /// The sources of tasks hold out no task, so nothing can be evaluated.
    #[error(
        "no task is held out, so there is nothing to evaluate on; set `held_out` of a source of \
         tasks, or set `eval.tasks` to 0 to disable evaluation"
    )]
    NoHeldOutTasks,
    /// There are no training tasks. The field contains the reason and a remedy.
    #[error("{0}")]
    NothingToTrainOn(String),
    /// There are fewer demonstrations than requested.
    #[error(
        "`phase.{phase}.demonstrations` is {wanted}, but the training tasks have only {found} \
         demonstrations; lower the number, or add tasks with demonstrations"
    )]
    TooFewDemonstrations {
        /// Index of the phase.
        phase: usize,
        /// Number of demonstrations requested.
        wanted: usize,
        /// Number of demonstrations found.
        found: usize,
    },
    /// The agent of a prompt phase has too few training tasks.
    #[error(
        "phase {phase} improves the prompt of an agent with {found} training tasks, but the phase's \
         keys `selection_tasks` and `gradient_tasks` need {wanted}; lower the keys, or add tasks"
    )]
    TooFewPromptTasks {
        /// Index of the phase.
        phase: u32,
        /// Number of tasks that the phase needs.
        wanted: usize,
        /// Number of tasks that the agent has.
        found: usize,
    },
    /// The attempts of a prompt phase cannot be scored, because the phase scores prompts by single
    /// attempts, but a scorer compares the attempts of a group.
    #[error(
        "phase {phase} scores prompts by single attempts, but the scorer {scorer} compares the \
         attempts of a group; use another scorer"
    )]
    PromptUnscorable {
        /// Index of the phase.
        phase: usize,
        /// Name of the scorer.
        scorer: String,
    },
    /// Too few attempts of a teacher reached the minimum score of a demonstration.
    #[error(
        "phase {phase} has too few demonstrations: {teacher} reached a score of {min_score} in \
         {found} of {tried} attempts, but `phase.{phase}.demonstrations` is {wanted}; lower this \
         number, lower `phase.{phase}.source.min_score`, or raise `phase.{phase}.source.tasks`"
    )]
    TooFewLessons {
        /// Index of the phase.
        phase: u32,
        /// The teacher, in the form `the policy NAME` or `the field NAME`.
        teacher: String,
        /// Minimum score of an attempt that serves as a demonstration.
        min_score: f64,
        /// Number of attempts that reached the minimum score.
        found: usize,
        /// Number of attempts that the teacher made.
        tried: usize,
        /// Number of demonstrations requested.
        wanted: usize,
    },
    /// The loop of an agent does not send chat messages, so a teacher cannot act in it.
    #[error(
        "the loop of agent {agent} does not support {teacher} as teacher; set another \
         `source` of the phase"
    )]
    UnsupportedLoop {
        /// Name of the agent.
        agent: String,
        /// The teacher, in the form `the policy NAME` or `the field NAME`.
        teacher: String,
    },
    /// The written completions of a task's row cannot be imitated.
    #[error("the completions of task {task} cannot be imitated: {why}")]
    WrittenCompletion {
        /// Name of the task.
        task: String,
        /// Reason why the completions cannot be imitated.
        why: String,
    },
    /// The demonstration of a task cannot be imitated.
    #[error("the demonstration of task {task} cannot be imitated: {source}")]
    Demonstration {
        /// Name of the task.
        task: String,
        /// Reason why the demonstration cannot be imitated.
        source: DemonstrationError,
    },
    /// The prompt of a task exceeds the recipe's limit.
    #[error(
        "the prompt of task {task} has {tokens} tokens, more than `agent.max_prompt_tokens` = \
         {max_tokens}; raise this limit, set `agent.truncation`, or remove the task"
    )]
    PromptOverLimit {
        /// Name of the task.
        task: String,
        /// Number of tokens of the task's prompt.
        tokens: usize,
        /// Maximum number of prompt tokens.
        max_tokens: usize,
    },
    /// The first prompt of a task exceeds the context limit of an agent that drops no messages.
    #[error(
        "the prompt of task {task} has {tokens} tokens, more than `agent.max_context_tokens` = \
         {max_tokens}, and with `agent.context = \"fail\"` nothing is left out; raise this limit, \
         shorten `agent.system`, or remove the task"
    )]
    PromptOverContext {
        /// Name of the task.
        task: String,
        /// Number of tokens of the task's prompt.
        tokens: usize,
        /// Maximum number of context tokens.
        max_tokens: usize,
    },
    /// The prompt of a task does not fit into the model's context.
    #[error(
        "the prompt of task {task} has {tokens} tokens, but the context holds {context} tokens; \
         raise `model.context` if the model allows it, shorten `agent.system`, or remove the task"
    )]
    PromptTooLong {
        /// Name of the task.
        task: String,
        /// Number of tokens of the task's prompt.
        tokens: usize,
        /// Context size in tokens.
        context: usize,
    },
    /// A scorer cannot use the expected answer of a task.
    #[error("task {task}: {source}")]
    AnswerKey {
        /// Name of the task.
        task: String,
        /// Reason why the task cannot be scored.
        source: ScoreError,
    },
    /// A task names a scorer that does not exist.
    #[error(
        "task {task} names the scorer {name:?}, but the scorers of the recipe are {known}; add the \
         scorer to [[reward.scorers]], or remove the field `scorer`"
    )]
    UnknownScorer {
        /// Name of the task.
        task: String,
        /// Name of the unknown scorer.
        name: String,
        /// Names of the scorers that the recipe defines.
        known: String,
    },
    /// No scorer of the recipe applies to a task.
    #[error(
        "task {task} of the source {of} has no scorer: `when` of {known} excludes the task; change \
         `when` in [[reward.scorers]]; the sources are {sources}"
    )]
    NoScorer {
        /// Name of the task.
        task: String,
        /// Name of the task's source.
        of: String,
        /// Names of all sources of tasks.
        sources: String,
        /// Names of the scorers that the recipe defines.
        known: String,
    },
    /// The length penalty of a phase would start below 0 tokens for an agent.
    #[error(
        "`phase.{phase}.overlong.buffer` is {buffer}, but must be at most the max_tokens of the \
         agent {agent}, {max_tokens}, because this agent performs the task {task}"
    )]
    OverlongBuffer {
        /// Index of the phase.
        phase: usize,
        /// Length of the range below `max_tokens` in which the penalty rises, in tokens.
        buffer: u64,
        /// Name of the agent.
        agent: String,
        /// Maximum number of sampled tokens of the agent.
        max_tokens: usize,
        /// A task that the agent performs.
        task: String,
    },
    /// A scorer compares the attempts of a group, but the advantage estimator of the phase needs
    /// greedy attempts, which belong to no group.
    #[error(
        "phase {phase} needs the score of a greedy attempt, but the scorer {scorer} only compares \
         the attempts at one task with each other; choose another `advantage` or another scorer"
    )]
    GreedyUnscorable {
        /// Index of the phase.
        phase: usize,
        /// Name of the scorer.
        scorer: String,
    },
    /// A scorer was unavailable for longer than the outage timeout.
    #[error(
        "the scorer {scorer} was unavailable for the {seconds} s of `reward.timeout_seconds`, and \
         the run cannot continue without scores: {why}. The store keeps the attempts that wait for \
         a score ({waiting}); --resume scores them without sampling them again"
    )]
    Outage {
        /// Name of the scorer.
        scorer: String,
        /// Outage timeout in seconds.
        seconds: f64,
        /// Number of attempts, or groups of attempts, that wait for the scorer.
        waiting: usize,
        /// Reason of the scorer's last failure.
        why: String,
    },
    /// The curriculum of a phase does not fit the tasks.
    #[error("the curriculum of phase {phase} does not fit the tasks: {why}")]
    Curriculum {
        /// Index of the phase.
        phase: u32,
        /// Reason why the curriculum does not fit the tasks.
        why: String,
    },
    /// A snapshot of a past version of a policy cannot be loaded.
    #[error("version {version} of the policy {pool} cannot be loaded from {}: {why}; put the files \
             back, or go back to a step before this version with --from", dir.display())]
    Snapshot {
        /// Name of the pool of past versions.
        pool: String,
        /// Version of the trained policy that the snapshot contains.
        version: u64,
        /// Directory of the snapshot.
        dir: PathBuf,
        /// Reason why the snapshot cannot be loaded.
        why: String,
    },
    /// A phase has a KL penalty, but no reference model was loaded.
    #[error("phase {0} has a KL penalty, but no reference model; this is a defect of the program")]
    NoReference(usize),
    /// The program did not provide a component that the recipe names, such as an agent or a policy.
    #[error("the recipe requires {0}, which was not provided; this is a defect of the program")]
    MissingPart(String),
    /// A task names an agent that does not exist.
    #[error(
        "task {task} names the agent {name:?}, but the agents of the recipe are {known}; describe \
         the agent in [agent.{name}], or remove the field `agent_name`"
    )]
    UnknownAgent {
        /// Name of the task.
        task: String,
        /// Name of the unknown agent.
        name: String,
        /// Names of the agents that the recipe defines.
        known: String,
    },
    /// A step waits for an attempt, but no attempt is in progress.
    #[error("a step waits for attempts, but no attempt is in progress (a defect of the trainer)")]
    NoAttemptsInFlight,
    /// A phase needs value estimates, but no critic was loaded.
    #[error("phase {0} needs a critic, but has none; this is a defect of the program")]
    NoCritic(usize),
    /// All tokens that a step sampled are masked.
    #[error(
        "step {step} of phase {phase} has no token to train on: of the sampled tokens, {masked}; \
         for training, sample at a temperature above 0, without filters, penalties and biases"
    )]
    NoTargets {
        /// Index of the phase in the recipe.
        phase: u32,
        /// Index of the step within the phase.
        step: u32,
        /// The reasons for masking, each with the number of tokens that it masks.
        masked: String,
    },
    /// A plan names an attempt that the store does not contain.
    #[error("the store lacks attempt {0}, which the run uses; restore the complete store")]
    Unrecorded(AttemptId),
    /// A step that must be repeated was trained on an attempt that has been withdrawn.
    #[error(
        "cannot repeat a step that trained on {0}, which was withdrawn; continue from an earlier \
         or a later checkpoint, or start another run in a directory named with --run"
    )]
    Withdrawn(AttemptSlot),
    /// The run would use a task that has been withdrawn. The field contains the quoted id of the
    /// task and, if a person withdrew, the person.
    #[error(
        "the task {0} was withdrawn from this run; remove the task from its source, and start \
         another run in a directory named with --run"
    )]
    WithdrawnTask(String),
    /// The requested step is not in the store.
    #[error("step {step} of phase {phase} is not in the store; `levade inspect` lists all steps")]
    NoStep {
        /// Index of the phase.
        phase: u32,
        /// Index of the step within the phase.
        step: u32,
    },
    /// A planned step took a group, but the store does not contain all attempts of the group.
    #[error("the store lacks {0}, which a planned step uses; restore the complete store")]
    MissingAttempt(AttemptSlot),
    /// Every attempt of a batch failed.
    #[error("all {count} attempts failed; error of the first attempt: {first}")]
    AllFailed {
        /// Number of attempts in the batch.
        count: usize,
        /// Error of the first attempt.
        first: String,
    },
    /// A sampler or a learner failed.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A formula received invalid input.
    #[error(transparent)]
    Rl(#[from] RlError),
    /// A batch cannot be built.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// An operation of the store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An operation on a file of the run failed.
    #[error("cannot {action} {}: {source}{}", path.display(), full_disk_remedy(source))]
    File {
        /// The action that failed, as an infinitive such as `write`.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Reason of the failure.
        source: io::Error,
    },
    /// A file of the run has unexpected contents.
    #[error("{} is damaged: {why}", path.display())]
    Damaged {
        /// Path of the damaged file.
        path: PathBuf,
        /// Description of the damage.
        why: String,
    },
}

impl TrainerError {
    /// Returns whether the user can fix the cause, such as wrong input or a full disk.
    pub fn is_user_error(&self) -> bool {
        use TrainerError as E;
        match self {
            E::Recipe(_)
            | E::Tasks(_)
            | E::Environment(_)
            | E::Tools(_)
            | E::UnknownTool { .. }
            | E::Tool { .. }
            | E::TraceHeaders { .. }
            | E::Text(_)
            | E::RunDirExists(_)
            | E::StoreExists(_)
            | E::NothingToResume(_)
            | E::Locked(_)
            | E::Differs { .. }
            | E::NoSessions(_)
            | E::OtherModel { .. }
            | E::NoCheckpoint { .. }
            | E::StoreOutside { .. }
            | E::StoreInUse { .. }
            | E::ExchangeUnsupported { .. }
            | E::PhaseFinished { .. }
            | E::Changed { .. }
            | E::Curriculum { .. }
            | E::Snapshot { .. }
            | E::NoHeldOutTasks
            | E::NothingToTrainOn(_)
            | E::TooFewDemonstrations { .. }
            | E::TooFewLessons { .. }
            | E::TooFewPromptTasks { .. }
            | E::PromptUnscorable { .. }
            | E::UnsupportedLoop { .. }
            | E::Demonstration { .. }
            | E::WrittenCompletion { .. }
            | E::PromptTooLong { .. }
            | E::PromptOverLimit { .. }
            | E::PromptOverContext { .. }
            | E::AnswerKey { .. }
            | E::UnknownAgent { .. }
            | E::UnknownScorer { .. }
            | E::NoScorer { .. }
            | E::OverlongBuffer { .. }
            | E::GreedyUnscorable { .. }
            | E::NoStep { .. }
            | E::Withdrawn(_)
            | E::WithdrawnTask(_)
            | E::Damaged { .. } => true,
            E::NoReference(_)
            | E::NoCritic(_)
            | E::MissingPart(_)
            | E::NoAttemptsInFlight
            | E::NoTargets { .. }
            | E::Unrecorded(_)
            | E::MissingAttempt(_)
            | E::AllFailed { .. }
            | E::Outage { .. }
            | E::Rl(_)
            | E::Tree(_) => false,
            E::Policy(error) => matches!(
                error,
                PolicyError::Invalid(_)
                    | PolicyError::PromptTooLong { .. }
                    | PolicyError::Storage(_)
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
