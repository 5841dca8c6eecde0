//! Where metrics go besides `metrics.jsonl`.
//!
//! Guarantees: a sink never holds training up and never ends it. One that fails says so once, and is left alone.

mod mlflow;
mod tensorboard;

use std::path::Path;

use crate::TrainerError;
use crate::metrics::Metrics;
use crate::recipe::Recipe;

pub(crate) use mlflow::Mlflow;
pub(crate) use tensorboard::TensorBoard;

/// Takes metrics, step by step.
pub(crate) trait Sink: Send + Sync {
    /// The numbers of a step, or of an evaluation after it.
    ///
    /// # Errors
    /// Why it takes no more.
    fn log(&mut self, step: u32, metrics: &Metrics) -> Result<(), String>;

    /// The run is over, or is stopped.
    ///
    /// # Errors
    /// What could not be passed on.
    fn close(&mut self, finished: bool) -> Result<(), String>;

    /// Its name in messages.
    fn name(&self) -> String;
}

/// The sinks of a recipe, for a run in `folder` that goes on from `step`.
///
/// # Errors
/// When a file cannot be created.
pub(crate) fn open(recipe: &Recipe, folder: &Path, step: u32) -> Result<Vec<Box<dyn Sink>>, TrainerError> {
    let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
    if recipe.metrics.tensorboard {
        sinks.push(Box::new(TensorBoard::open(&folder.join("tensorboard"), step)?));
    }
    if !recipe.metrics.mlflow.is_empty() {
        sinks.push(Box::new(Mlflow::open(recipe, folder)));
    }
    Ok(sinks)
}
