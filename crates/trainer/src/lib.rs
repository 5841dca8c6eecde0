//! Trains models as a recipe specifies: sample, score, plan, update, publish, checkpoint.
//!
//! A [`Recipe`](levade_recipe::Recipe) describes a run, [`RunParts`] contain its models and tools,
//! and a [`Trainer`] runs it. The trainer uses samplers and learners through their traits, so the
//! same loop drives the embedded engine, a simulator and remote processes.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//!
//! use levade_policy::{Simulator, SimulatorConfig};
//! use levade_recipe::Recipe;
//! use levade_text::testing;
//! use levade_trainer::{
//!     AgentSpec, Policy, PolicyLearner, RunEnd, RunParts, StartMode, StopFlag, Trainer,
//! };
//!
//! # let dir = std::env::temp_dir().join(format!("levade-trainer-{}", std::process::id()));
//! # std::fs::create_dir_all(&dir)?;
//! let file = dir.join("recipe.toml");
//! std::fs::write(
//!     &file,
//!     r#"
//!     [run]
//!     name = "sums"
//!     folder = "run"
//!     [model]
//!     source = "simulated"
//!     [[tasks]]
//!     kind = "arithmetic"
//!     [agent]
//!     max_tokens = 8
//!     [eval]
//!     tasks = 4
//!     [[phase]]
//!     kind = "rl"
//!     steps = 2
//!     groups = 2
//!     group_size = 2
//!     learning_rate = 0.05
//!     "#,
//! )?;
//! let recipe = Recipe::load(&file, &[])?;
//!
//! // A policy without a model, which samples and learns.
//! let config = SimulatorConfig { vocabulary: testing::VOCABULARY, ..SimulatorConfig::default() };
//! let simulator = Arc::new(Simulator::new(config));
//! let policy = Policy {
//!     name: "default".into(),
//!     sampler: simulator.clone(),
//!     context: 1024,
//!     learner: Some(PolicyLearner {
//!         learner: simulator,
//!         reference: None,
//!         critic: None,
//!         extra_files: Arc::new(|_checkpoint| Ok(())),
//!     }),
//! };
//! let parts = RunParts {
//!     policies: vec![policy],
//!     agents: vec![AgentSpec::new(
//!         "default",
//!         Arc::new(testing::tiny_chat()?),
//!         Default::default(),
//!     )],
//!     scorers: Default::default(),
//!     environments: Default::default(),
//!     started_at: 0,
//!     model_files: Vec::new(),
//!     teachers: Default::default(),
//! };
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
//! let mut trainer = Trainer::new(recipe, parts, StartMode::Fresh).await?;
//! let ended = trainer.run(&mut (), &StopFlag::default()).await?;
//! let RunEnd::Finished(summary) = ended else { unreachable!() };
//! assert_eq!(summary.steps, 2);
//! # Ok::<(), levade_trainer::TrainerError>(())
//! # })?;
//! # std::fs::remove_dir_all(dir)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **Deterministic.** The final weights are a function of the recipe and its seed, given a
//!   deterministic learner and sampler. Concurrent attempts, the number of threads and
//!   interruptions change no bit. Results that depend on wall-clock time (a tool that times out)
//!   are recorded and not repeated.
//! - **Nothing is lost or trained twice.** Every attempt is recorded when it ends, and every step's
//!   plan before the step runs. A checkpoint is complete or absent. After a kill at any moment, the
//!   run resumes from the newest checkpoint and repeats the later steps from the store.
//! - **Explicit weights.** Every normalizer is in the plan, so micro-batches change only the order
//!   of sums.
//! - **Evaluations** use held-out tasks, are greedy by default, and report the score without
//!   shaping.
//! - **Checked before the start**: every recipe key, every task of a file and a sample of the tasks
//!   of a generator, the chat template, the demonstrations.
//!
//! # Crash points
//! Tests kill the process at these points (see [`crash_point`](levade_policy::crash_point)):
//! `sampling`, `tool_call`, `attempt_unscored`, `scoring`, `attempt_recorded`, `ledger_written`,
//! `micro_batch`, `before_optim_step`, `in_optim_step`, `after_optim_step`, `metrics_written`,
//! `checkpoint_file`, `weights_saved`, `companions_saved`, `before_rename`, `after_rename`,
//! `snapshot_written`, `rewind_built`, `rewind_exchanged`.
//!
//! Out of scope: loading models (the caller provides [`RunParts`]), and progress bars (an
//! [`Observer`] displays them).

mod agents;
mod audit;
mod batch;
mod best;
mod checkpoint;
mod completions;
mod context;
mod credit;
mod error;
mod eval_result;
mod evaluate;
mod exit;
mod files;
mod gain;
mod in_flight;
mod learn;
mod measure;
mod metrics;
mod mismatch;
mod observe;
mod origin;
mod panics;
mod past;
mod phase;
mod plan;
mod policies;
mod prepare;
mod progress;
mod prompt_version;
mod queries;
mod random;
mod reference;
mod remedies;
mod replay;
mod reporter;
mod rescore;
mod rewards;
mod rewind;
mod rollout;
mod rules;
mod run_dir;
mod save;
mod scheduler;
mod scoring;
mod sessions;
mod signals;
mod sink;
mod superseded;
mod tasks;
mod terms;
mod toolboxes;
mod tracer;
mod trainer;

pub use agents::{AgentSpec, Agents, ChatBackend, NamedAgent};
pub use audit::{PolicyDescendants, TrainedStep, find_descendants, trained_steps};
pub use best::BestCheckpoint;
pub use checkpoint::{Checkpoint, Position, checkpoints, improved_prompts};
pub use completions::{ScoredCompletions, score_completions};
pub use error::TrainerError;
pub use eval_result::{EvalResult, MetricsAtK, TaskSliceResult, UncalledTools};
pub use evaluate::evaluate;
pub use gain::{ScoreGain, milestone_evals};
pub use levade_rl::{Interval, ScoreDivergence};
pub use metrics::Metrics;
pub use observe::{Event, Observer, StopFlag};
pub use origin::{
    read_merge_source, record_merge_source, record_model, seconds, started_at, task_matching_rule,
};
pub use phase::{check_phases, with_copies};
pub use policies::{ExtraFiles, Policy, PolicyLearner};
pub use prompt_version::{ImprovedPrompts, PromptVersion};
pub use replay::{ReplayComparison, replay, terms};
pub use rescore::{RescoredAttempt, RescoredRun, rescore, rescoring_keys};
pub use rewind::{RewindResult, rewind};
pub use rollout::{AttemptMaker, AttemptWarnings};
pub use run_dir::{LockedRunDir, StartMode};
pub use scoring::{CustomScorers, DryRunScore, Scorers};
pub use sessions::SessionRecords;
pub use sink::mlflow_experiment;
pub use tasks::{EvalSlice, Tasks, chat_options, check_tasks, dry_run, trained_questions};
pub use terms::{BatchTerms, PolicyTerms, TokenTerm};
pub use toolboxes::Toolboxes;
pub use tracer::Tracer;
pub use trainer::{RunEnd, RunParts, Summary, Trainer};
