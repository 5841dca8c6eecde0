//! Sends metrics to other programs, in addition to `metrics.jsonl`.
//!
//! # Guarantees
//! - **A sink never delays training and never ends it.** A sink that fails reports it once and is not used
//!   again.
//! - **Steps that a resumed run repeats are not sent twice.** An MLflow server that answered at the start can
//!   be unreachable for any time, and gets what it missed.

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
pub(crate) use tensorboard::TensorBoard;
pub(crate) use wandb::Wandb;

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

    /// Name in messages.
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
    if !recipe.metrics.wandb.is_empty() {
        sinks.push(Box::new(Wandb::open(recipe, &folder.join("wandb"), step)?));
    }
    Ok(sinks)
}

/// The keys of a recipe as flat names and texts, as long as servers take.
fn parameters(recipe: &Recipe) -> Vec<(String, String)> {
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
