//! The training loop: sample, score, plan, update, publish, checkpoint.
//!
//! A [`Recipe`](levade_recipe::Recipe) says what is done; [`Parts`] bring the model and the tools; a
//! [`Trainer`] does it. It knows samplers and learners by their traits alone, so the same loop drives the
//! embedded engine, a simulator and whatever else implements them.
//!
//! Guarantees:
//! - *Deterministic.* The final weights are a function of the recipe and its seed (given a learner and a
//!   sampler that are). Which attempts run beside each other, how many threads there are and how often the
//!   run was interrupted change nothing, to the bit. What depends on wall time (a tool that times out) is
//!   recorded and not repeated.
//! - *Nothing is lost, nothing is trained twice.* Every attempt is recorded as it ends, every step's plan
//!   before the step runs; a checkpoint is whole or not there. After a kill at any moment the run goes on
//!   from the newest checkpoint, and what came after it is done again from the record.
//! - *Explicit weights.* Every normaliser is in the plan, so micro-batching changes nothing but the order of
//!   sums.
//! - *Honest numbers.* Evaluations are greedy, on held-out tasks, and count the score alone, without shaping.
//!
//! Places where a test can make the process die (see [`crash_point`](levade_policy::crash_point)):
//! `sampling`, `tool_call`, `attempt_unscored`, `scoring`, `attempt_recorded`, `ledger_written`,
//! `micro_batch`, `before_optim_step`, `in_optim_step`, `after_optim_step`, `metrics_written`,
//! `checkpoint_file`, `weights_saved`, `companions_saved`, `before_rename`, `after_rename`.
//!
//! Not here: loading models (who makes the [`Parts`] does), progress bars (an [`Observer`] draws them).

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
