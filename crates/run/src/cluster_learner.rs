//! The learner of `[cluster.learner]`: started or connected to, checked against the run, and wired to the
//! policy that it trains.

pub mod order;
pub mod torchrun;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use levade_model::{ModelConfig, ModelFiles, write_json, write_safetensors_with};
use levade_policy::{Learner, LoraOptions};
use levade_recipe::{LearnerKeys, Recipe, TorchKeys};
use levade_remote::{Adapter, CRITIC, Expected, GroupLayout, LearnerOptions, REFERENCE, RemoteLearner};

use crate::child::Gone;
use crate::dir::RECIPE;
use crate::display;
use crate::failure::unusable;
use crate::gpus::{self, Shares};
use crate::host::Host;

/// The folder of a run that its learner's processes write to.
pub const FOLDER: &str = "learner";
/// File of a run folder with facts of its learner that its numbers depend on.
const LAYOUT: &str = "learner.json";

/// The policy that a group is to train.
pub struct Wants<'a> {
    /// The model it begins with.
    pub files: &'a ModelFiles,
    /// Longest path, in tokens.
    pub context: usize,
    /// The form of its adapter, where it has one.
    pub lora: Option<&'a LoraOptions>,
    /// Whether a frozen copy is asked for.
    pub reference: bool,
    /// Whether a critic is.
    pub critic: bool,
}

/// A group of learners that answers.
pub struct Elsewhere {
    policy: RemoteLearner,
}

impl Elsewhere {
    /// The learner of the policy.
    pub fn policy(&self) -> Arc<dyn Learner> {
        Arc::new(self.policy.clone())
    }

    /// The processes that hold the weights of the policy.
    pub fn group(&self) -> &RemoteLearner {
        &self.policy
    }

    /// The frozen copy.
    pub fn reference(&self) -> Arc<dyn Learner> {
        Arc::new(self.policy.named(REFERENCE))
    }

    /// The critic.
    pub fn critic(&self) -> Arc<dyn Learner> {
        Arc::new(self.policy.named(CRITIC))
    }
}

/// Starts or finds the learner of a recipe, and checks that it fits; `None` where the embedded engine learns.
/// One that is started is added to `children`.
///
/// # Errors
/// When it cannot be started or reached, does not fit the model, or is split otherwise than the run began.
pub async fn start(
    recipe: &Recipe,
    wants: &Wants<'_>,
    host: &Host,
    children: &mut Vec<Gone>,
) -> anyhow::Result<Option<Elsewhere>> {
    let Some(LearnerKeys::Torch(keys)) = &recipe.cluster.learner else { return Ok(None) };
    let root = std::path::absolute(&recipe.run.folder)?;
    if wants.lora.is_some() && (wants.reference || wants.critic) {
        return Err(unusable(
            "`cluster.learner` of kind \"torch\" trains an adapter (`model.lora`) without a reference or a critic; \
             leave out the penalty and the critic, or train all weights",
        ));
    }
    let uniform =
        |lora: &&LoraOptions| lora.ranks.is_empty() && lora.alphas.is_empty() && !lora.rank_stabilised;
    if wants.lora.is_some_and(|lora| !uniform(&lora)) {
        return Err(unusable(
            "`cluster.learner` of kind \"torch\" trains adapters of one rank and scale; leave out `model.lora.ranks`, \
             `alphas` and `rank_stabilised`",
        ));
    }
    let expected = Expected {
        model_type: family(&wants.files.config)?,
        vocabulary: wants.files.config.vocabulary,
        context: wants.context,
        reference: wants.reference,
        critic: wants.critic,
        lora: wants.lora.map(adapter),
        dtype: keys.dtype.to_string(),
        export_dtype: recipe.engine.precision.to_string(),
    };
    let (url, token, processes) = if keys.start {
        Shares::of(recipe).check_learner(gpus::visible().as_deref())?;
        let model = model_folder(wants.files, &root.join(FOLDER))?;
        let log = torchrun::log_of(&root, 0);
        host.setup("learner", format!("starts {} (log: {})", size(keys), display::path(&log)));
        let torchrun::Group { url, token, processes, gone } =
            torchrun::start(keys, recipe, &root, &model, wants, host.supervisor()).await?;
        children.push(Gone { name: "the learner's group".into(), ended: gone });
        (url, token, Some(processes))
    } else {
        let token = std::env::var(&keys.token_env).ok().filter(|token| !token.is_empty()).ok_or_else(|| {
            unusable(format!(
                "the environment variable {}, which `cluster.learner.token_env` names, holds no token of the \
                 learner at {}",
                keys.token_env, keys.url
            ))
        })?;
        (keys.url.clone(), token, None)
    };
    let options = LearnerOptions {
        url,
        token,
        call: keys.call(),
        silence: keys.silence(),
        reconnect: keys.silence(),
        start: keys.start(),
    };
    let policy = RemoteLearner::connect(options, processes, &expected).await?;
    let described = policy.description();
    let GroupLayout { world_size, dtype, device, torch, .. } = &described.layout;
    host.setup(
        "learner",
        format!(
            "{}, {} parameters, {dtype} on {device}, {world_size} data-parallel ranks, PyTorch {torch}",
            described.model_type,
            display::count(described.parameters)
        ),
    );
    if device.starts_with("cuda") {
        let note = "what runs on CUDA is tested less than what runs on processors: watch `training/logprob_mismatch`";
        host.setup("note", note);
    }
    compare(&root, &described.layout, host)?;
    Ok(Some(Elsewhere { policy }))
}

fn size(keys: &TorchKeys) -> String {
    match keys.nodes {
        1 => format!("{} processes", keys.of_node()),
        nodes => format!("{} processes on each of {nodes} machines", keys.of_node()),
    }
}

/// The folder of a model that PyTorch reads. A model in another form, such as GGUF, is written into the
/// folder of the learner, once.
fn model_folder(files: &ModelFiles, learner: &Path) -> anyhow::Result<PathBuf> {
    let path = std::path::absolute(files.path())?;
    if path.is_dir() {
        return Ok(path);
    }
    let (folder, config) = (learner.join("model"), "config.json");
    // The configuration comes last: with it the folder is whole.
    if !folder.join(config).exists() {
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let parameters = files.config.parameters().into_iter();
        let tensors: Vec<(String, Vec<usize>)> = parameters.map(|one| (one.name, one.shape)).collect();
        let mut failed = None;
        let written = write_safetensors_with(&folder.join("model.safetensors"), &tensors, |index| {
            let (name, shape) = &tensors[index];
            let mut values = vec![0.0; shape.iter().product()];
            if let Err(error) = files.tensor_into(name, shape, &mut values) {
                failed.get_or_insert(error);
            }
            Cow::Owned(values)
        });
        failed.map_or(written, Err)?;
        write_json(&folder.join(config), &files.config.to_hf_json())?;
    }
    Ok(folder)
}

/// The family of a model, in the words of its `config.json`.
fn family(config: &ModelConfig) -> anyhow::Result<String> {
    let family = serde_json::to_value(config.family)?;
    Ok(family.as_str().unwrap_or_default().to_owned())
}

fn adapter(lora: &LoraOptions) -> Adapter {
    Adapter { rank: lora.rank, alpha: lora.alpha, targets: lora.targets.iter().cloned().collect() }
}

/// Writes down how a run that begins is split, and compares it where a run goes on.
fn compare(root: &Path, now: &GroupLayout, host: &Host) -> anyhow::Result<()> {
    let file = root.join(LAYOUT);
    let Some(before) = std::fs::read(&file).ok().filter(|_| root.join(RECIPE).exists()) else {
        std::fs::create_dir_all(root)?;
        return Ok(write_json(&file, &serde_json::to_value(now)?)?);
    };
    let before: GroupLayout = serde_json::from_slice(&before).map_err(|why| {
        unusable(format!(
            "{} does not say any more how many ranks the run began with: {why}; remove it if `cluster.learner` is as it was",
            file.display()
        ))
    })?;
    if let Some(what) = now.breaks(&before) {
        return Err(unusable(format!(
            "{what}\nset `cluster.learner.processes`, `nodes`, `tp`, `cp` and `pp` as they were (see {}), or begin another \
             run from the newest checkpoint: --set model.source=CHECKPOINT --run FOLDER",
            file.display()
        )));
    }
    for change in now.changes(&before) {
        let note =
            format!("of the learner, {change}: from here on its numbers can differ in their last bits");
        host.setup("note", note);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(world_size: u32) -> GroupLayout {
        let facts =
            serde_json::json!({ "world_size": world_size, "processes": world_size, "torch": "2.15.0" });
        serde_json::from_value(facts).unwrap()
    }

    #[test]
    fn a_run_goes_on_with_as_many_ranks_as_it_began_with() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("run");
        compare(&root, &layout(2), &Host::default()).unwrap();
        // Nothing has begun yet.
        compare(&root, &layout(4), &Host::default()).unwrap();
        std::fs::write(root.join(RECIPE), "").unwrap();
        compare(&root, &layout(4), &Host::default()).unwrap();
        let error = compare(&root, &layout(2), &Host::default()).unwrap_err().to_string();
        assert!(error.contains("has 2 data-parallel ranks, and the run began with 4"), "{error}");
        assert!(error.contains("--set model.source=CHECKPOINT"), "{error}");
        // Half written, on a full disk say: that is not taken for a run without one.
        std::fs::write(root.join(LAYOUT), "{\"world_size\": ").unwrap();
        let error = compare(&root, &layout(2), &Host::default()).unwrap_err().to_string();
        assert!(error.contains("learner.json does not say any more how many ranks"), "{error}");
        std::fs::remove_file(root.join(LAYOUT)).unwrap();
        compare(&root, &layout(4), &Host::default()).unwrap();
    }
}
