//! The models that an evaluation measures: which policies of the recipe they play.
//!
//! The other policies play as in an evaluation of training: frozen ones with the weights that the
//! recipe names, external ones behind their API, past versions from the directory of the run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use levade_recipe::{ModelKeys, Override, PolicyKeys, PolicyModel, Recipe};
use levade_run::dir::{POLICIES, RunDir, find_checkpoint_dir, policy_dir};
use levade_trainer::{Checkpoint, checkpoints};

use crate::failure::unusable;
use crate::run::{self, AgentScope};

/// Models that an evaluation measures.
#[derive(Debug)]
pub struct MeasuredModels {
    /// Model of each measured policy, by the name of the policy in the recipe.
    pub models: BTreeMap<String, PolicyModel>,
    /// Source of the measured model, which labels the result. If a checkpoint contains several
    /// measured models, the source is the checkpoint.
    pub source: String,
    /// Run that trained the measured model. `None` if no run trained the model.
    pub trained_by: Option<RunDir>,
    /// Checkpoint of the run whose past versions play in the evaluation. `None` if no past versions
    /// play.
    pub checkpoint: Option<Checkpoint>,
}

/// Finds the models of the measured policies. All trained policies of the recipe are measured, or
/// the policy of `[agent]` if the recipe has no trained policy. `named` is the model that the user
/// names, or the run that contains the recipe. If an override sets the source of a policy, or if
/// `named` is `None`, the policy's model comes from the recipe. `base` replaces the base model of
/// an adapter.
///
/// If past versions play, sets `run.folder` to the directory of their run.
///
/// # Errors
/// Returns an error if the model does not exist, if it is not clear which policy it plays, or if
/// there is no run with the past versions that play.
pub fn find_measured_models(
    recipe: &mut Recipe,
    named: Option<&str>,
    base: Option<String>,
    overrides: &[Override],
) -> anyhow::Result<MeasuredModels> {
    let policies = measured_policies(recipe);
    let mut models = recipe_models(recipe, &policies);
    let (source, trained_by) = match named {
        Some(name) => {
            let is_open = |policy: &&String| !sets_source(overrides, policy);
            let open: Vec<&String> = policies.iter().filter(is_open).collect();
            let (source, run, found) = resolve_sources(&open, name)?;
            for (policy, source) in found {
                let base = recipe.model.base.clone();
                let context = models.get(&policy).and_then(|own| own.context);
                let model = PolicyModel { source: Some(source), base, context, lora: None };
                models.insert(policy, model);
            }
            (source, run)
        }
        None => {
            let first = models.values().next().and_then(|model| model.source.clone());
            let name = first.unwrap_or_else(|| recipe.model.source.clone());
            run::resolve_model(&name, AgentScope::All)?
        }
    };
    for model in models.values_mut().filter(|_| base.is_some()) {
        model.base.clone_from(&base);
    }
    let checkpoint = find_past_checkpoint(recipe, &source, trained_by.as_ref())?;
    Ok(MeasuredModels { models, source, trained_by, checkpoint })
}

/// Returns a line for each policy of a recipe with several policies: the name of the policy, and
/// the model that plays it. Other recipes have no lines.
pub fn describe_policies(recipe: &Recipe, measured: &MeasuredModels) -> Vec<String> {
    let policies = recipe.policies();
    if policies.len() < 2 {
        return Vec::new();
    }
    let describe = |(name, keys): (String, PolicyKeys)| match (measured.models.get(&name), keys) {
        (Some(model), _) => format!("{name}: {}", model.source.as_deref().unwrap_or_default()),
        (None, PolicyKeys::Past(keys)) => format!("{name}: past versions of {}", keys.of),
        (None, PolicyKeys::External(keys)) => format!("{name}: {}, external", keys.model),
        (None, keys) => {
            let model = keys.model(&recipe.model);
            format!("{name}: {}, frozen", model.map(|model| model.source).unwrap_or_default())
        }
    };
    policies.into_iter().map(describe).collect()
}

/// Returns the names of the trained policies. If there are none, returns the name of the frozen
/// policy of `[agent]`.
fn measured_policies(recipe: &Recipe) -> Vec<String> {
    let trained = recipe.trained_policies();
    if !trained.is_empty() {
        return trained;
    }
    let first = recipe.agents().into_iter().next().and_then(|(_, keys)| recipe.policy_name(keys));
    let is_frozen = |name: &String| matches!(recipe.policy.get(name), Some(PolicyKeys::Frozen(_)));
    first.into_iter().filter(is_frozen).collect()
}

/// Returns the models that the recipe sets for `policies`, without adapters that are not trained
/// yet.
fn recipe_models(recipe: &Recipe, policies: &[String]) -> BTreeMap<String, PolicyModel> {
    let all = recipe.policies().into_iter().filter(|(name, _)| policies.contains(name));
    let own = all.filter_map(|(name, keys)| {
        let ModelKeys { source, base, context, .. } = keys.model(&recipe.model)?;
        Some((name, PolicyModel { source: Some(source), base, context, lora: None }))
    });
    own.collect()
}

/// Returns the sources of the models from which a recipe starts its training.
pub fn trained_sources(recipe: &Recipe) -> Vec<String> {
    let models = recipe_models(recipe, &recipe.trained_policies());
    models.into_values().filter_map(|model| model.source).collect()
}

/// Returns whether an override sets the source of a policy.
fn sets_source(overrides: &[Override], policy: &str) -> bool {
    let sets = |change: &Override| {
        let path: Vec<&str> = change.path.iter().map(String::as_str).collect();
        let table = change.value.as_table();
        match path[..] {
            ["policy"] => table.and_then(|all| all.get(policy)?.get("source")).is_some(),
            ["policy", name] => name == policy && table.is_some_and(|t| t.contains_key("source")),
            ["policy", name, "source"] => name == policy,
            _ => false,
        }
    };
    overrides.iter().any(sets)
}

/// Name of a policy and the source of its model.
type PolicySource = (String, String);

/// Resolves the name of a model for these policies. Returns the source of the model, the run that
/// the source belongs to, and the source of each policy. If a run trains several policies, each
/// policy has its own model in the checkpoint of the run.
fn resolve_sources(
    policies: &[&String],
    name: &str,
) -> anyhow::Result<(String, Option<RunDir>, Vec<PolicySource>)> {
    let (source, run) = run::model_source(name)?;
    let checkpoint = PathBuf::from(&source);
    let of_run = run.as_ref().filter(|_| checkpoint.join(POLICIES).is_dir());
    let trained = of_run.map(RunDir::recipe).transpose()?.map(|recipe| recipe.trained_policies());
    let trained = trained.unwrap_or_default();
    let own = |policy: &str| {
        let dir = policy_dir(&checkpoint, &trained, policy);
        (policy.to_owned(), dir.to_string_lossy().into_owned())
    };
    let names =
        |names: &[&String]| names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
    match policies {
        [] => Ok((source, run, Vec::new())),
        [only] if trained.contains(only) => {
            let (policy, source) = own(only);
            Ok((source.clone(), run, vec![(policy, source)]))
        }
        [only] => {
            let (source, run) = run::resolve_model(name, AgentScope::All)?;
            Ok((source.clone(), run, vec![((*only).clone(), source)]))
        }
        [first, ..] if trained.is_empty() => Err(unusable(format!(
            "agents of the recipe use several trained policies, {}, and {name} is one model: name \
             the run that trained them, or one of its checkpoints; or set the model of each policy \
             (--set policy.{first}.source=SOURCE), or of all that name none (--set \
             model.source=SOURCE)",
            names(policies)
        ))),
        _ => match policies.iter().find(|policy| !trained.contains(policy)) {
            Some(missing) => Err(unusable(format!(
                "{source} has no model of the trained policy {missing}, but of {}: name one with \
                 --set policy.{missing}.source=SOURCE",
                names(&trained.iter().collect::<Vec<_>>())
            ))),
            None => Ok((source, run, policies.iter().map(|policy| own(policy)).collect())),
        },
    }
}

/// Returns the checkpoint of the run whose past versions play in the evaluation. Returns `None` if
/// no past versions play.
fn find_past_checkpoint(
    recipe: &mut Recipe,
    source: &str,
    run: Option<&RunDir>,
) -> anyhow::Result<Option<Checkpoint>> {
    let pools = |recipe: &Recipe| -> Vec<_> {
        recipe.past_policies().map(|(name, keys)| (name.to_owned(), keys.clone())).collect()
    };
    let wanted = pools(recipe);
    let Some((pool, keys)) = wanted.first() else { return Ok(None) };
    let missing = || {
        unusable(format!(
            "agents of the recipe meet the policy {pool}, past versions of {of}, which only a run \
             with this policy has: evaluate such a run or one of its checkpoints, or give the \
             agents another policy (--set agent.NAME.policy={of})",
            of = keys.of
        ))
    };
    let run = run.ok_or_else(missing)?;
    let found = pools(&run.recipe()?);
    let dir =
        find_checkpoint_dir(Path::new(source)).filter(|_| wanted.iter().all(|p| found.contains(p)));
    let dir = dir.ok_or_else(missing)?;
    let of_dir = |checkpoint: &Checkpoint| checkpoint.dir.file_name() == dir.file_name();
    let checkpoint = checkpoints(run.root())?.into_iter().find(of_dir).ok_or_else(missing)?;
    recipe.run.folder = run.root().to_owned();
    Ok(Some(checkpoint))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use levade_run::dir::{CHECKPOINTS, RECIPE, STATE, STORE_FILE};

    use super::*;

    const POLICY: &str = "[policy]\na = { kind = 'trained' }\nb = { kind = 'trained' }\n\
                          c = { kind = 'frozen' }\nd = { kind = 'frozen', source = 'other' }\n";

    fn load(dir: &Path, text: &str) -> Recipe {
        let path = dir.join(RECIPE);
        let head = "[run]\nname = 'x'\n[model]\nsource = 'first'\n[[tasks]]\nkind = 'arithmetic'\n";
        fs::write(&path, [head, text].concat()).unwrap();
        let mut recipe = Recipe::load(&path, &[]).unwrap();
        recipe.keep_policies_in_use();
        recipe
    }

    fn sources_of(measured: &MeasuredModels) -> Vec<(&str, &str)> {
        let models = measured.models.iter();
        models.map(|(name, model)| (name.as_str(), model.source.as_deref().unwrap())).collect()
    }

    #[test]
    fn measured_model_plays_trained_policy_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let agents = "[agent]\npolicy = 'b'\n[agent.x]\npolicy = 'c'\n[agent.y]\npolicy = 'd'\n";
        let mut recipe = load(dir.path(), &[POLICY, agents].concat());
        let measured = find_measured_models(&mut recipe, Some("some/model"), None, &[]).unwrap();
        assert_eq!(sources_of(&measured), [("b", "some/model")]);
        assert_eq!(
            describe_policies(&recipe, &measured),
            ["b: some/model", "c: first, frozen", "d: other, frozen"]
        );
        let own = find_measured_models(&mut recipe, None, None, &[]).unwrap();
        assert_eq!((sources_of(&own), own.source.as_str()), (vec![("b", "first")], "first"));
        // Without a trained policy, the model plays [agent].
        let agents = "[agent]\npolicy = 'd'\n[agent.x]\npolicy = 'c'\n";
        let mut recipe = load(dir.path(), &[POLICY, agents].concat());
        let measured = find_measured_models(&mut recipe, Some("some/model"), None, &[]).unwrap();
        assert_eq!(sources_of(&measured), [("d", "some/model")]);
    }

    #[test]
    fn several_trained_policies_need_checkpoint_or_source_of_each() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let agents = "[agent]\npolicy = 'b'\n[agent.x]\npolicy = 'a'\n";
        let mut recipe = load(root, &[POLICY, agents].concat());
        let error = find_measured_models(&mut recipe, Some("some/model"), None, &[])
            .unwrap_err()
            .to_string();
        for part in ["a, b", "some/model is one model", "--set policy.a.source=SOURCE"] {
            assert!(error.contains(part), "{error}");
        }
        let own: Override = "policy.a.source=mine".parse().unwrap();
        let mut set = recipe.clone();
        let Some(PolicyKeys::Trained(keys)) = set.policy.get_mut("a") else { panic!() };
        keys.source = Some("mine".into());
        let measured = find_measured_models(&mut set, Some("some/model"), None, &[own]).unwrap();
        assert_eq!(sources_of(&measured), [("a", "mine"), ("b", "some/model")]);
        assert_eq!(trained_sources(&set), ["mine", "first"]);

        fs::write(root.join(STORE_FILE), "").unwrap();
        let checkpoint = root.join(CHECKPOINTS).join("step-000004");
        fs::create_dir_all(checkpoint.join(POLICIES).join("b")).unwrap();
        fs::write(checkpoint.join(STATE), "").unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let second = text(&checkpoint.join("policies/b"));
        for name in [root, &checkpoint] {
            let measured = find_measured_models(&mut recipe, Some(&text(name)), None, &[]).unwrap();
            let want = [("a", text(&checkpoint)), ("b", second.clone())];
            let want: Vec<(&str, &str)> = want.iter().map(|(p, s)| (*p, s.as_str())).collect();
            assert_eq!(sources_of(&measured), want);
            assert_eq!(measured.source, text(&checkpoint));
            assert_eq!(measured.trained_by.as_ref().unwrap().root(), root);
        }
        // A recipe with one of the policies gets its model.
        recipe.policy.remove("a");
        recipe.agents.clear();
        let measured =
            find_measured_models(&mut recipe, Some(&text(&checkpoint)), None, &[]).unwrap();
        assert_eq!(sources_of(&measured), [("b", second.as_str())]);
        let agents = "[agent]\npolicy = 'b'\n[agent.x]\npolicy = 'e'\n[policy.e]\nkind = 'trained'";
        let other = tempfile::tempdir().unwrap();
        let mut recipe = load(other.path(), &[POLICY, agents].concat());
        let error = find_measured_models(&mut recipe, Some(&text(root)), None, &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("no model of the trained policy e, but of a, b"), "{error}");
    }

    #[test]
    fn past_versions_need_their_run() {
        let dir = tempfile::tempdir().unwrap();
        let text = "[policy]\na = { kind = 'trained' }\np = { kind = 'past', of = 'a' }\n\
                    [agent]\npolicy = 'a'\n[agent.x]\npolicy = 'p'\n";
        let mut recipe = load(dir.path(), text);
        for name in [None, Some("some/model")] {
            let error = find_measured_models(&mut recipe, name, None, &[]).unwrap_err().to_string();
            let want = "meet the policy p, past versions of a, which only a run with this policy";
            assert!(error.contains(want), "{error}");
        }
    }
}
