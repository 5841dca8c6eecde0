//! Converts errors to text for the user and to exit codes.
//!
//! An error fits on one screen: what failed, its value, and what to do. The exit code is 2 if the
//! user can correct the cause, and 1 otherwise. An error type with a method `is_user_error`, such
//! as `TrainerError`, decides that itself. This module decides for the other types.

use std::process::ExitCode;

use levade_engine::{EngineError, MemoryPurpose};
use levade_export::ExportError;
pub use levade_launch::INTERRUPTED;
use levade_model::ModelError;
use levade_policy::PolicyError;
use levade_recipe::RecipeError;
pub use levade_run::{Unusable, unusable};
use levade_search::SearchError;
use levade_store::StoreError;
use levade_text::TextError;
use levade_trainer::TrainerError;

/// Returns the exit code for an error: 2 if the user can correct the cause of the error, and 1
/// otherwise.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(if is_user_error(error) { 2 } else { 1 })
}

fn is_user_model_error(error: &ModelError) -> bool {
    !matches!(error, ModelError::Fetch { .. } | ModelError::Checksum { .. })
}

fn is_user_error(error: &anyhow::Error) -> bool {
    if let Some(error) = error.downcast_ref::<TrainerError>() {
        return error.is_user_error();
    }
    if let Some(error) = error.downcast_ref::<ModelError>() {
        return is_user_model_error(error);
    }
    if let Some(error) = error.downcast_ref::<EngineError>() {
        return match error {
            EngineError::Model(error) => is_user_model_error(error),
            EngineError::Options(_) | EngineError::Memory { .. } => true,
        };
    }
    if let Some(error) = error.downcast_ref::<PolicyError>() {
        return matches!(
            error,
            PolicyError::Invalid(_) | PolicyError::PromptTooLong { .. } | PolicyError::Storage(_)
        );
    }
    if let Some(error) = error.downcast_ref::<StoreError>() {
        return error.is_user_error();
    }
    if let Some(error) = error.downcast_ref::<ExportError>() {
        return error.is_user_error();
    }
    if let Some(error) = error.downcast_ref::<SearchError>() {
        return error.is_user_error();
    }
    error.is::<Unusable>() || error.is::<RecipeError>() || error.is::<TextError>()
}

/// Formats an error for the user. If the crate that defines the error does not know the keys of
/// recipes, the text also tells which keys to change.
pub fn format_error(error: &anyhow::Error) -> String {
    if let Some(EngineError::Memory { plan, available }) = error.downcast_ref() {
        let ways = list_remedies(plan.largest_purposes());
        return format!(
            "the model would take {plan}, but only {} MiB of memory may be used\n\
             {}, raise `engine.memory_mb` if it is set, or free memory",
            available >> 20,
            ways.join(", or ")
        );
    }
    if let Some(TrainerError::Policy(PolicyError::Deadline(..))) = error.downcast_ref() {
        return format!(
            "{error}\nraise `engine.call_seconds` if the machine is only slow; --resume continues \
             a run from its last checkpoint"
        );
    }
    // An error that only names the failed action has the reason as its source.
    error.chain().skip(1).fold(error.to_string(), |text, source| {
        let source = source.to_string();
        if text.contains(&source) { text } else { format!("{text}: {source}") }
    })
}

/// Lists ways to reduce the memory for several purposes, each way only once.
fn list_remedies(purposes: impl IntoIterator<Item = MemoryPurpose>) -> Vec<&'static str> {
    let mut ways = Vec::new();
    for way in purposes.into_iter().flat_map(remedies_for_purpose) {
        if !ways.contains(way) {
            ways.push(*way);
        }
    }
    ways
}

/// Lists ways to reduce the memory for one purpose, as changes of a recipe.
fn remedies_for_purpose(purpose: MemoryPurpose) -> &'static [&'static str] {
    match purpose {
        MemoryPurpose::Weights => &["take a smaller model"],
        MemoryPurpose::Optimizer => &["train an adapter (`model.lora`)", "take a smaller model"],
        MemoryPurpose::Training => &["lower `engine.micro_batch_tokens`"],
        // The KV cache has room for one sequence of the length of the context.
        MemoryPurpose::Sequence => &["lower the context (`model.context`)"],
        MemoryPurpose::Cache => {
            &["lower the context (`model.context`)", "lower `engine.kv_memory_mb` if it is set"]
        }
        MemoryPurpose::Sampling => &[
            "lower the context (`model.context`)",
            "lower `engine.threads` or `engine.concurrency`",
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_remedies_removes_duplicates() {
        let ways = list_remedies([
            MemoryPurpose::Optimizer,
            MemoryPurpose::Weights,
            MemoryPurpose::Sequence,
            MemoryPurpose::Cache,
        ]);
        let named = [
            "train an adapter (`model.lora`)",
            "take a smaller model",
            "lower the context (`model.context`)",
            "lower `engine.kv_memory_mb` if it is set",
        ];
        assert_eq!(ways, named);
    }

    #[test]
    fn format_error_adds_missing_sources() {
        for (context, expected) in [
            ("cannot open run.db", "cannot open run.db: disk full"),
            ("disk full: free space", "disk full: free space"),
        ] {
            let error = anyhow::Error::new(std::io::Error::other("disk full"));
            assert_eq!(format_error(&error.context(context)), expected);
        }
    }

    #[test]
    fn is_user_error_distinguishes_input_from_runtime_failures() {
        for error in [
            unusable("no"),
            TextError::NoTemplate.into(),
            TrainerError::NoHeldOutTasks.into(),
            PolicyError::Invalid("temperature = -1".into()).into(),
        ] {
            assert!(is_user_error(&error), "{error}");
        }
        for error in [
            PolicyError::Stopped("the engine".into()).into(),
            TrainerError::AllFailed { count: 3, first: "gone".into() }.into(),
            failed_fetch().into(),
            EngineError::Model(failed_fetch()).into(),
            anyhow::anyhow!("anything else"),
        ] {
            assert!(!is_user_error(&error), "{error}");
        }
    }

    fn failed_fetch() -> ModelError {
        ModelError::Fetch { what: "x".into(), why: "no network".into(), way_out: "y".into() }
    }
}
