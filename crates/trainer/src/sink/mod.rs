//! Sends metrics to external programs, in addition to `metrics.jsonl`.
//!
//! # Guarantees
//! - **A sink never delays training and never ends it.** A sink that fails reports it once and is
//!   not used again.
//! - **Steps that a resumed run repeats are not sent twice.** An MLflow server that responded at
//!   the start can be unreachable for any time, and receives the missed metrics afterwards.

mod mlflow;
mod tensorboard;
mod wandb;
mod wire;

use std::path::Path;

use levade_recipe::Recipe;
use serde_json::{Value, json};

use crate::TrainerError;
use crate::metrics::Metrics;

pub(crate) use mlflow::Mlflow;
pub use mlflow::mlflow_experiment;
pub(crate) use tensorboard::TensorBoard;
pub(crate) use wandb::Wandb;

/// Destination of metrics outside the run's metrics file, such as TensorBoard, MLflow or Weights &
/// Biases.
pub(crate) trait Sink: Send + Sync {
    /// Receives the metrics of a step, or of an evaluation after that step.
    ///
    /// # Errors
    /// Returns a message if the sink cannot receive further metrics.
    fn log(&mut self, step: u32, metrics: &Metrics) -> Result<(), String>;

    /// Closes the sink. `finished` states whether all phases are finished. If false, the run was
    /// stopped.
    ///
    /// # Errors
    /// Returns a message if some metrics could not be sent.
    fn close(&mut self, finished: bool) -> Result<(), String>;

    /// Returns the name of the sink, for messages.
    fn name(&self) -> String;
}

/// Opens the sinks that a recipe names, for a run in `dir` that starts or resumes after `step`
/// steps.
///
/// # Errors
/// Returns an error if a file cannot be created.
pub(crate) fn open_sinks(
    recipe: &Recipe,
    dir: &Path,
    step: u32,
) -> Result<Vec<Box<dyn Sink>>, TrainerError> {
    let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
    if recipe.metrics.tensorboard {
        sinks.push(Box::new(TensorBoard::open(&dir.join("tensorboard"), step)?));
    }
    if !recipe.metrics.mlflow.is_empty() {
        sinks.push(Box::new(Mlflow::open(recipe, dir)));
    }
    if !recipe.metrics.wandb.is_empty() {
        sinks.push(Box::new(Wandb::open(recipe, &dir.join("wandb"), step)?));
    }
    Ok(sinks)
}

/// Returns the keys of a recipe as flat names, such as `run.seed`, with their values as text. A
/// text is truncated to 500 characters, because servers limit its length.
fn recipe_parameters(recipe: &Recipe) -> Vec<(String, String)> {
    fn flatten(name: String, value: &Value, to: &mut Vec<(String, String)>) {
        match value {
            Value::Object(entries) => {
                for (key, value) in entries {
                    let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                    flatten(name, value, to);
                }
            }
            Value::Array(items) => {
                for (i, value) in items.iter().enumerate() {
                    flatten(format!("{name}.{i}"), value, to);
                }
            }
            Value::Null => {}
            Value::String(text) => to.push((name, text.chars().take(500).collect())),
            other => to.push((name, other.to_string())),
        }
    }
    let mut found = Vec::new();
    flatten(String::new(), &json!(recipe), &mut found);
    found
}
