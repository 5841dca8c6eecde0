//! Trains by a recipe: sample, score, plan, update, publish, checkpoint.
//!
//! A [`Recipe`](levade_recipe::Recipe) says what a run does; [`Parts`] have its models and tools; a
//! [`Trainer`] runs it. It uses samplers and learners through their traits, so the same loop drives the
//! embedded engine, a simulator and remote processes.
//!
//! # Guarantees
//! - **Deterministic.** The final weights are a function of the recipe and its seed, given a deterministic
//!   learner and sampler. Concurrent attempts, the number of threads and interruptions change no bit. What
//!   depends on wall-clock time (a tool that times out) is recorded and not repeated.
//! - **Nothing is lost or trained twice.** Every attempt is recorded when it ends, every step's plan before
//!   the step runs; a checkpoint is complete or absent. After a kill at any moment, the run resumes from the
//!   newest checkpoint and repeats what came after it from the record.
//! - **Explicit weights.** Every normalizer is in the plan, so micro-batches change only the order of sums.
//! - **Evaluations** are greedy, on held-out tasks, and count the score without shaping.
//! - **Checked before the start**: every recipe key, every task of a file and a sample of those from a
//!   generator, the chat template, the demonstrations.
//!
//! # Crash points
//! Tests kill the process at these places (see [`crash_point`](levade_policy::crash_point)): `sampling`,
//! `tool_call`, `attempt_unscored`, `scoring`, `attempt_recorded`, `ledger_written`, `micro_batch`,
//! `before_optim_step`, `in_optim_step`, `after_optim_step`, `metrics_written`, `checkpoint_file`,
//! `weights_saved`, `companions_saved`, `before_rename`, `after_rename`.
//!
//! Out of scope: loading models (the caller provides [`Parts`]), and progress bars (an [`Observer`] draws
//! them).

mod agents;
mod alone;
mod apart;
mod batch;
mod best;
mod checkpoint;
mod context;
mod credit;
mod error;
mod eval_result;
mod evaluate;
mod exit;
mod files;
mod flow;
mod folder;
mod gain;
mod learn;
mod measure;
mod metrics;
mod observe;
mod origin;
mod phase;
mod plan;
mod policies;
mod prepare;
mod progress;
mod random;
mod reference;
mod replay;
mod replies;
mod reporter;
mod rewards;
mod rollout;
mod save;
mod scoring;
mod signals;
mod sink;
mod survey;
mod tasks;
mod terms;
mod toolboxes;
mod trainer;
mod under_way;

pub use agents::{AgentParts, Agents, Answers, NamedAgent};
pub use best::Best;
pub use checkpoint::{Checkpoint, Position};
pub use error::TrainerError;
pub use eval_result::{AtK, EvalResult, SliceResult, Uncalled};
pub use evaluate::evaluate;
pub use folder::{RunFolder, Start};
pub use gain::{Gain, milestones};
pub use levade_rl::Interval;
pub use metrics::Metrics;
pub use observe::{Event, Observer, StopFlag};
pub use origin::{begun, matching, merged_from, seconds, write_merged_from};
pub use phase::check_phases;
pub use policies::{Companions, Learns, Policy};
pub use replay::{Compared, replay, terms};
pub use replies::{ScoredReplies, score_replies};
pub use rollout::{Rollouts, Troubles};
pub use scoring::{CustomScorers, Rehearsed, Scorers};
pub use tasks::{EvalSlice, Tasks, chat_options, check_tasks, rehearse, trained_on};
pub use terms::{BatchTerms, PolicyTerms, TokenTerm};
pub use toolboxes::Toolboxes;
pub use trainer::{Ended, Parts, Summary, Trainer};
