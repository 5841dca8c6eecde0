//! Starts runs: a recipe becomes engines, servers, agents, scorers and a training loop.
//!
//! The crates below know one another by traits only. This crate reads from a recipe which of them a run is
//! made of, creates them, and gives them to the training loop. [`start`] returns a [`Run`] at once: a task of
//! this process, with [`Event`]s, that can be stopped. [`resume`] continues it, also in another process. The
//! binary is a caller of this crate, as is any program that embeds training.
//!
//! # Guarantees
//! - **Events.** Each event is owned and can be written as JSON. The run directory has them in
//!   `events.jsonl`, with times, except those that only tell progress ([`Event::is_progress`]).
//! - **Stopping.** A run that is asked to stop writes a checkpoint at the next step boundary. Resumed,
//!   it ends with the weights of a run that was never stopped, bit for bit.
//! - **Child processes.** When a run has ended, the processes that it started have ended, too, or an event
//!   names those that are left after 30 seconds.
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
//! Out of scope: arguments and printing (the binary), and what a step does (`levade-trainer`).

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
pub mod scorers;
pub mod testbed;

pub use events_file::{EVENTS, RecordedEvent};
pub use failure::{Unusable, unusable};
pub use host::{Event, Host};
pub use run::{Run, launch, resume, start};
