//! The learner of `[cluster.learner]`: starts or connects to its processes, checks them against the
//! run, and connects them to the policy that they train.

pub mod order;
pub mod torchrun;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use levade_model::{ModelConfig, ModelFiles, write_json, write_safetensors_with};
use levade_policy::{Learner, LoraOptions};
use levade_recipe::{LearnerKeys, Recipe, TorchKeys};
use levade_remote::{
    Adapter, CRITIC, GroupLayout, LearnerOptions, LearnerRequirements, REFERENCE, RemoteLearner,
};

use crate::child::ChildTask;
use crate::dir::RECIPE;
use crate::display;
use crate::failure::unusable;
use crate::gpus::{self, GpuAllocation};
use crate::host::Host;

/// Name of the directory in the run directory that the learner's processes write to.
pub const SUBDIR: &str = "learner";
/// Name of the file in the run directory with the properties of the learner that affect its
/// numerical results.
const LAYOUT: &str = "learner.json";

/// Requirements that an external learner must meet: the properties of the policy that it will
/// train.
pub struct Requirements<'a> {
    /// Model that the policy starts from.
    pub files: &'a ModelFiles,
    /// Maximum sequence length, in tokens.
    pub context: usize,
    /// Options of the policy's adapter. `None` if all weights are trained.
    pub lora: Option<&'a LoraOptions>,
    /// Whether the run needs a frozen reference copy of the model.
    pub reference: bool,
    /// Whether the run needs a critic.
    pub critic: bool,
}

/// Handles of a connected external learner.
pub struct Handles {
    policy: RemoteLearner,
}

impl Handles {
    /// Returns the learner of the policy.
    pub fn policy(&self) -> Arc<dyn Learner> {
        Arc::new(self.policy.clone())
    }

    /// Returns the client of the processes that hold the policy's weights.
    pub fn group(&self) -> &RemoteLearner {
        &self.policy
    }

    /// Returns the learner of the frozen reference copy.
    pub fn reference(&self) -> Arc<dyn Learner> {
        Arc::new(self.policy.with_name(REFERENCE))
    }

    /// Returns the learner of the critic.
    pub fn critic(&self) -> Arc<dyn Learner> {
        Arc::new(self.policy.with_name(CRITIC))
    }
}

/// Starts the external learner of a recipe, or connects to it, and checks that it fits the run.
/// Returns `None` if the embedded engine trains. A started learner is added to `children`.
///
/// # Errors
/// Returns an error if the learner cannot be started or reached, if it does not fit the model, or
/// if its parallel layout differs from the layout at the start of the run.
pub async fn start(
    recipe: &Recipe,
    wants: &Requirements<'_>,
    host: &Host,
    children: &mut Vec<ChildTask>,
) -> anyhow::Result<Option<Handles>> {
    let Some(LearnerKeys::Torch(keys)) = &recipe.cluster.learner else { return Ok(None) };
    let root = std::path::absolute(&recipe.run.folder)?;
    if wants.lora.is_some() && (wants.reference || wants.critic) {
        return Err(unusable(
            "`cluster.learner` of kind \"torch\" trains an adapter (`model.lora`) without a \
             reference or a critic; leave out the penalty and the critic, or train all weights",
        ));
    }
    let uniform = |lora: &&LoraOptions| {
        lora.ranks.is_empty() && lora.alphas.is_empty() && !lora.rank_stabilized
    };
    if wants.lora.is_some_and(|lora| !uniform(&lora)) {
        return Err(unusable(
            "`cluster.learner` of kind \"torch\" trains adapters of one rank and scale; leave out \
             `model.lora.ranks`, `alphas` and `rank_stabilized`",
        ));
    }
    let expected = LearnerRequirements {
        model_type: read_model_family(&wants.files.config)?,
        vocabulary: wants.files.config.vocabulary,
        context: wants.context,
        reference: wants.reference,
        critic: wants.critic,
        lora: wants.lora.map(to_adapter),
        dtype: keys.dtype.to_string(),
        export_dtype: recipe.engine.precision.to_string(),
    };
    let (url, token, processes) = if keys.start {
        GpuAllocation::of(recipe).check_learner(gpus::visible().as_deref())?;
        let model = prepare_model_dir(wants.files, &root.join(SUBDIR))?;
        let log = torchrun::node_log_path(&root, 0);
        host.setup(
            "learner",
            format!("starting {} (log: {})", describe_size(keys), display::path(&log)),
        );
        let torchrun::Group { url, token, processes, exit_task } =
            torchrun::start(keys, recipe, &root, &model, wants, host.supervisor()).await?;
        children.push(ChildTask { name: "the learner's group".into(), ended: exit_task });
        (url, token, Some(processes))
    } else {
        let token = std::env::var(&keys.token_env)
            .ok()
            .filter(|token| !token.is_empty())
            .ok_or_else(|| {
                unusable(format!(
                    "the environment variable {}, which `cluster.learner.token_env` names, must \
                     contain the token of the learner at {}",
                    keys.token_env, keys.url
                ))
            })?;
        (keys.url.clone(), token, None)
    };
    let options = LearnerOptions {
        url,
        token,
        call: keys.call_timeout(),
        silence: keys.silence_timeout(),
        reconnect: keys.silence_timeout(),
        start: keys.start_timeout(),
    };
    let policy = RemoteLearner::connect(options, processes, &expected).await?;
    let described = policy.description();
    let GroupLayout { world_size, dtype, device, torch, .. } = &described.layout;
    host.setup(
        "learner",
        format!(
            "{}, {} parameters, {dtype} on {device}, {world_size} data-parallel ranks, PyTorch \
             {torch}",
            described.model_type,
            display::count(described.parameters)
        ),
    );
    if device.starts_with("cuda") {
        let note = "training on CUDA is less tested than training on CPUs: watch \
                    `training/logprob_mismatch`";
        host.setup("note", note);
    }
    check_layout(&root, &described.layout, host)?;
    Ok(Some(Handles { policy }))
}

fn describe_size(keys: &TorchKeys) -> String {
    match keys.nodes {
        1 => format!("{} processes", keys.processes_per_node()),
        nodes => format!("{} processes on each of {nodes} machines", keys.processes_per_node()),
    }
}

/// Returns a model directory that PyTorch can read. A model in another format, such as GGUF, is
/// converted once into the learner's directory.
fn prepare_model_dir(files: &ModelFiles, learner: &Path) -> anyhow::Result<PathBuf> {
    let path = std::path::absolute(files.path())?;
    if path.is_dir() {
        return Ok(path);
    }
    let dir = learner.join("model");
    let config = "config.json";
    // The configuration is written last, so that its presence marks a complete directory.
    if !dir.join(config).exists() {
        std::fs::create_dir_all(&dir)
            .with_context(|| format!("cannot create {}", dir.display()))?;
        let parameters = files.config.parameters().into_iter();
        let tensors: Vec<(String, Vec<usize>)> =
            parameters.map(|one| (one.name, one.shape)).collect();
        let mut failed = None;
        let written = write_safetensors_with(&dir.join("model.safetensors"), &tensors, |index| {
            let (name, shape) = &tensors[index];
            let mut values = vec![0.0; shape.iter().product()];
            if let Err(error) = files.tensor_into(name, shape, &mut values) {
                failed.get_or_insert(error);
            }
            Cow::Owned(values)
        });
        failed.map_or(written, Err)?;
        write_json(&dir.join(config), &files.config.to_hf_json())?;
    }
    Ok(dir)
}

/// Returns the family of a model, as in its `config.json`.
fn read_model_family(config: &ModelConfig) -> anyhow::Result<String> {
    let family = serde_json::to_value(config.family)?;
    Ok(family.as_str().unwrap_or_default().to_owned())
}

fn to_adapter(lora: &LoraOptions) -> Adapter {
    Adapter { rank: lora.rank, alpha: lora.alpha, targets: lora.targets.iter().cloned().collect() }
}

/// Records the parallel layout of the learner when a run starts. When a run resumes, compares the
/// layout with the recorded layout.
fn check_layout(root: &Path, now: &GroupLayout, host: &Host) -> anyhow::Result<()> {
    let file = root.join(LAYOUT);
    let Some(before) = std::fs::read(&file).ok().filter(|_| root.join(RECIPE).exists()) else {
        std::fs::create_dir_all(root)?;
        return Ok(write_json(&file, &serde_json::to_value(now)?)?);
    };
    let before: GroupLayout = serde_json::from_slice(&before).map_err(|why| {
        unusable(format!(
            "{} no longer shows how many ranks the run started with: {why}; if `cluster.learner` \
             is unchanged, remove the file",
            file.display()
        ))
    })?;
    if let Some(what) = now.find_incompatibility(&before) {
        return Err(unusable(format!(
            "{what}\nset `cluster.learner.processes`, `nodes`, `tp`, `cp` and `pp` to their \
             recorded values (see {}), or start another run from the newest checkpoint: --set \
             model.source=CHECKPOINT --run DIR",
            file.display()
        )));
    }
    for change in now.describe_changes(&before) {
        let note = format!(
            "the learner has changed: {change}; from now on, its results can differ in their last \
             bits"
        );
        host.setup("note", note);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(world_size: u32) -> GroupLayout {
        let facts = serde_json::json!({ "world_size": world_size, "processes": world_size, "torch": "2.15.0" });
        serde_json::from_value(facts).unwrap()
    }

    #[test]
    fn resumed_run_requires_initial_rank_count() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        check_layout(&root, &layout(2), &Host::default()).unwrap();
        // The run has not started yet, so its layout can change.
        check_layout(&root, &layout(4), &Host::default()).unwrap();
        std::fs::write(root.join(RECIPE), "").unwrap();
        check_layout(&root, &layout(4), &Host::default()).unwrap();
        let error = check_layout(&root, &layout(2), &Host::default()).unwrap_err().to_string();
        assert!(error.contains("has 2 data-parallel ranks, but the run started with 4"), "{error}");
        assert!(error.contains("--set model.source=CHECKPOINT"), "{error}");
        // A partly written file, for example on a full disk, must not pass for a run without a
        // layout.
        std::fs::write(root.join(LAYOUT), "{\"world_size\": ").unwrap();
        let error = check_layout(&root, &layout(2), &Host::default()).unwrap_err().to_string();
        assert!(error.contains("learner.json no longer shows how many ranks"), "{error}");
        std::fs::remove_file(root.join(LAYOUT)).unwrap();
        check_layout(&root, &layout(4), &Host::default()).unwrap();
    }
}
