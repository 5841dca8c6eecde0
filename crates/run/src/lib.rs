//! Starts runs: creates the engines, servers, agents, scorers and training loop that a recipe
//! specifies.
//!
//! The crates below depend on each other only through traits. This crate reads the parts of a run
//! from a recipe, creates them, and passes them to the training loop. [`start`] returns a [`Run`]
//! immediately: a task of this process that reports [`Event`]s and can be stopped. [`resume`]
//! continues a run, in the same or another process. The `levade` binary calls this crate, as does
//! any program that embeds training.
//!
//! # Guarantees
//! - **Events.** Each event is owned and can be serialized to JSON. The file `events.jsonl` in the
//!   run directory contains all events with their times, except progress events
//!   ([`Event::is_progress`]).
//! - **Stopping.** A run that is asked to stop writes a checkpoint at the next step boundary. After
//!   it is resumed, it ends with the same weights, bit for bit, as a run without the stop.
//! - **Child processes.** When a run has ended, the processes that it started have exited. An event
//!   names processes that are still running after 30 seconds.
//!
//! # Example
//! Starts a run, prints its events, stops it after the first step, and resumes it.
//! ```no_run
//! use levade_recipe::Recipe;
//! use levade_run::{Event, resume, start};
//! use levade_trainer::Event as Training;
//!
//! # async fn example() -> anyhow::Result<()> {
//! let recipe = Recipe::load("recipes/calculator/recipe.toml".as_ref(), &[])?;
//! let mut run = start(recipe.clone())?;
//! while let Some(event) = run.next().await {
//!     println!("{event:?}");
//!     if matches!(event, Event::Training(Training::Step { .. })) {
//!         run.stop();
//!     }
//! }
//! println!("{:?}", run.end().await?);
//! println!("{:?}", resume(recipe)?.end().await?);
//! # Ok(()) }
//! ```
//! `examples/embed.rs` does this with a tiny model of random weights.
//!
//! Out of scope: arguments and printing (the binary), and the content of a step (`levade-trainer`).

pub mod child;
pub mod cluster_learner;
mod cluster_samplers;
pub mod dir;
pub mod display;
pub mod encoder;
mod events_file;
pub mod external;
mod failure;
pub mod gpus;
mod host;
pub mod model;
pub mod numerics;
pub mod policies;
pub mod programs;
mod run;
pub mod runner;
pub mod runners;
pub mod scorers;
pub mod session_record;
pub mod source;
pub mod testbed;

pub use events_file::{EVENTS, RecordedEvent};
pub use failure::{Unusable, unusable};
pub use host::{Event, Host};
pub use run::{Run, launch, resume, start};
