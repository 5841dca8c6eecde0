//! Resolves a model argument, and prints the notes about it.

use levade_run::dir::RunDir;
use levade_run::source;

pub use levade_run::model::check_base;
pub use levade_run::source::{AgentScope, find_training_run, is_best_checkpoint, model_source};

use crate::screen::Style;

/// Resolves the user's argument for a model to a model source ([`source::resolve_model`]). Returns
/// the source, and the run that it belongs to, or `None` if it belongs to no run.
///
/// # Errors
/// Returns an error if the argument names a run without a checkpoint, or a run whose agents use
/// several of its policies.
pub fn resolve_model(text: &str, scope: AgentScope) -> anyhow::Result<(String, Option<RunDir>)> {
    let found = source::resolve_model(text, scope)?;
    if let Some(note) = found.note {
        eprintln!("{} {note}", Style::stderr().dim("note:"));
    }
    Ok((found.source, found.run))
}
