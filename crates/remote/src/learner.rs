//! Learners in other processes, such as a group of PyTorch processes under torchrun: all methods of
//! [`Learner`], over HTTP.
//!
//! Arrays are sent as safetensors. Every call has an ID, and the group keeps the results of the
//! last calls by ID. If a response is lost, the call is sent again with the same ID and gets the
//! first result, so nothing is trained twice.
//!
//! A group that has failed, hangs, or was restarted without the last published version has lost its
//! state. Its calls return [`PolicyError::Stopped`] or a deadline, it gets no further call, and the
//! caller resumes from its newest checkpoint with another group. Published weights are files, which
//! the embedded engine checks completely before it samples from them. The bits of sampler and
//! learner differ, so no recorded value replaces one that the learner would compute differently.

mod batch;
mod description;
mod group;
mod link;
#[cfg(test)]
mod testing;
mod wait;
mod wire;

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use levade_policy::{
    ForwardBackward, Learner, Manifest, MicroBatchPlan, OptimParams, OptimReport, PolicyError,
    Predictions, TrainReport, TrainRequest, UpdateSequences, WeightsAt, WeightsLocation,
    WeightsRef,
};
use levade_rl::Loss;
use levade_tree::TreeBatch;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::devices::{Offload, TransferReport};
use crate::push::{BroadcastWeights, GroupInfo, GroupSpec, SendReport};
use batch::{put_batch, put_paths, put_update_sequences};
pub use description::{
    Adapter, CRITIC, Description, GroupLayout, LearnerDescription, LearnerRequirements, POLICY,
    REFERENCE,
};
use group::{LearnerCall, LearnerGroup};
pub use link::{LearnerOptions, Processes};
use wire::Body;

/// Client of one learner in a group of learners that run in other processes.
#[derive(Clone)]
pub struct RemoteLearner {
    group: Arc<LearnerGroup>,
    name: String,
}

impl RemoteLearner {
    /// Connects to a group of learners, and checks that it fits the run. Returns the learner of the
    /// group's policy. `processes` are kept alive until all learners of the group are dropped.
    ///
    /// # Errors
    /// Returns an error if the URL or the token is invalid, or if the group does not respond in
    /// time. If the group does not fit the run, the error names the difference and what to change.
    pub async fn connect(
        options: LearnerOptions,
        processes: Option<Processes>,
        expected: &LearnerRequirements,
    ) -> Result<Self, PolicyError> {
        let group = LearnerGroup::connect(options, processes, expected).await?;
        Ok(RemoteLearner { group, name: POLICY.into() })
    }

    /// Returns the learner named `name` of the same group.
    #[must_use]
    pub fn with_name(&self, name: &str) -> Self {
        RemoteLearner { group: self.group.clone(), name: name.into() }
    }

    /// Returns the facts that the group reports about itself.
    pub fn description(&self) -> &Description {
        self.group.description()
    }

    /// Waits until the processes of the group have exited, and returns the resulting
    /// [`PolicyError::Stopped`]. Never returns if this process did not start them.
    pub async fn wait_for_exit(&self) -> PolicyError {
        self.group.wait_for_exit().await
    }

    async fn call(
        &self,
        verb: &'static str,
        body: Body,
        what: &(dyn Fn(usize) -> String + Sync),
    ) -> Result<Body, PolicyError> {
        let call = LearnerCall { learner: &self.name, verb, body, what };
        Ok(self.group.call(call, &mut || {}).await?.0)
    }

    /// Calls `verb` on the learner, and returns arrays with one number per target of `batch`.
    async fn request_numbers<const N: usize>(
        &self,
        verb: &'static str,
        names: [&str; N],
        batch: &TreeBatch,
    ) -> Result<[Vec<f32>; N], PolicyError> {
        let mut body = Body::new(json!({}));
        put_batch(&mut body, batch);
        let tokens = batch.tokens.len();
        let mut response =
            self.call(verb, body, &|_| format!("{verb} of a batch of {tokens} tokens")).await?;
        let mut found = [const { Vec::new() }; N];
        for (slot, name) in found.iter_mut().zip(names) {
            *slot = response
                .take_numbers(name, batch.targets.len())
                .map_err(|why| self.response_error(verb, &why))?;
        }
        Ok(found)
    }

    fn take<T: DeserializeOwned>(
        &self,
        verb: &str,
        response: &mut Body,
        name: &str,
    ) -> Result<T, PolicyError> {
        response.take(name).map_err(|why| self.response_error(verb, &why))
    }

    fn response_error(&self, verb: &str, why: &str) -> PolicyError {
        PolicyError::Invalid(format!(
            "the response of the learner at {} to {verb} cannot be used: {why}",
            self.group.url()
        ))
    }

    /// Checks that files written by the learner can be read on this machine.
    fn check_files_are_readable(&self, manifest: &Manifest) -> Result<(), PolicyError> {
        let WeightsLocation::Local(dir) = &manifest.location else { return Ok(()) };
        for file in &manifest.files {
            let path = dir.join(&file.name);
            let found = std::fs::metadata(&path).map(|found| found.len());
            if found.as_ref().ok() != Some(&file.bytes) {
                let found =
                    found.map_or_else(|error| error.to_string(), |bytes| format!("{bytes} bytes"));
                return Err(PolicyError::Storage(format!(
                    "the learner at {} reports that it wrote {} with {} bytes, but this machine \
                     finds: {found}; the run directory must be on a file system that both \
                     machines reach under the same path",
                    self.group.url(),
                    path.display(),
                    file.bytes
                )));
            }
        }
        Ok(())
    }
}

/// Sums of a micro-batch in JSON, where `null` represents a number that is not finite.
#[derive(serde::Deserialize)]
#[serde(transparent)]
struct MicroBatchSums(serde_json::Map<String, Value>);

impl MicroBatchSums {
    /// Parses the sums of a response. `null` becomes NaN.
    fn parse(self) -> Result<ForwardBackward, String> {
        let MicroBatchSums(mut fields) = self;
        let null = Value::Null;
        let zero = json!(0.0);
        let lost: Vec<String> = fields
            .iter()
            .filter(|(_, value)| **value == null)
            .map(|(name, _)| name.clone())
            .collect();
        lost.iter().for_each(|name| drop(fields.insert(name.clone(), zero.clone())));
        let read = serde_json::from_value(Value::Object(fields));
        let mut sums: ForwardBackward =
            read.map_err(|error| format!("the sums cannot be read: {error}"))?;
        for name in &lost {
            match name.as_str() {
                "loss" => sums.loss = f64::NAN,
                "nll" => sums.nll = f64::NAN,
                "entropy" => sums.entropy = f64::NAN,
                "kl" => sums.kl = f64::NAN,
                "ratio" => sums.ratio = f64::NAN,
                "drift" => sums.drift = f64::NAN,
                "max_mismatch" => sums.max_mismatch = f32::NAN,
                other => return Err(format!("the sum {other} is null, but must be a number")),
            }
        }
        Ok(sums)
    }
}

/// Result of an optimizer step in JSON, where `null` represents a gradient norm that is not finite.
#[derive(serde::Deserialize)]
struct OptimStepResult {
    grad_norm: Option<f64>,
    applied: bool,
}

impl From<OptimStepResult> for OptimReport {
    fn from(OptimStepResult { grad_norm, applied }: OptimStepResult) -> Self {
        OptimReport { grad_norm: grad_norm.unwrap_or(f64::NAN), applied }
    }
}

fn to_json(value: &impl serde::Serialize) -> Result<Value, PolicyError> {
    serde_json::to_value(value).map_err(|error| PolicyError::Invalid(error.to_string()))
}

/// Returns the parameters of an optimizer step as JSON, with all digits of each `f32`. Thus a
/// learner that computes in f64 gets exactly the recorded value, not the shortest decimal for it.
fn params_to_json(params: &OptimParams) -> Result<Value, PolicyError> {
    let mut json = to_json(params)?;
    for field in json.as_object_mut().into_iter().flat_map(|fields| fields.values_mut()) {
        if let Some(value) = field.as_f64() {
            *field = f64::from(value as f32).into();
        }
    }
    Ok(json)
}

/// Returns the absolute path of a directory as a string.
fn absolute_dir(dir: &Path) -> Result<String, PolicyError> {
    let absolute = std::path::absolute(dir).ok();
    absolute.and_then(|dir| dir.to_str().map(str::to_owned)).ok_or_else(|| {
        PolicyError::Invalid(format!(
            "the name of the directory {} is not UTF-8; rename it",
            dir.display()
        ))
    })
}

#[async_trait]
impl Learner for RemoteLearner {
    async fn plan(&self, update: &UpdateSequences) -> Result<MicroBatchPlan, PolicyError> {
        let mut body = Body::new(json!({ "micro_batch_tokens": update.micro_batch_tokens }));
        put_update_sequences(&mut body, update);
        let mut response =
            self.call("plan", body, &|_| "the micro-batch plan of an update".into()).await?;
        let micro_batch_plan: MicroBatchPlan = self.take("plan", &mut response, "cut")?;
        // A plan is recorded only if it can be executed.
        let paths = update.groups.iter().map(Vec::len).sum();
        micro_batch_plan.check(paths, self.description().layout.world_size)?;
        Ok(micro_batch_plan)
    }

    async fn train(
        &self,
        update: TrainRequest,
        micro_batch_plan: &MicroBatchPlan,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<TrainReport, PolicyError> {
        let TrainRequest { sequences, loss, params } = update;
        let ranks = self.description().layout.world_size;
        if micro_batch_plan.world_size != ranks {
            return Err(PolicyError::PlanMismatch(format!(
                "the plan was made for {} data-parallel ranks, but the learner at {} has {ranks}; \
                 start it with as many ranks as the run started with (`cluster.learner.processes` \
                 and `nodes`)",
                micro_batch_plan.world_size,
                self.group.url()
            )));
        }
        micro_batch_plan.check(sequences.len(), ranks)?;
        let mut body = Body::new(json!({
            "loss": to_json(&loss)?,
            "params": params_to_json(&params)?,
            "cut": to_json(micro_batch_plan)?,
        }));
        put_paths(&mut body, &sequences);
        let batches = micro_batch_plan.micro_batches.len();
        let what = |known: usize| match known {
            known if known < batches => {
                format!("training on micro-batch {} of {batches}", known + 1)
            }
            _ => "an optimizer step".into(),
        };
        let call = LearnerCall { learner: &self.name, verb: "train", body, what: &what };
        let (mut response, notified) = self.group.call(call, done).await?;
        let sums: Vec<MicroBatchSums> = self.take("train", &mut response, "sums")?;
        let sums = sums.into_iter().map(MicroBatchSums::parse).collect::<Result<Vec<_>, _>>();
        let sums = sums.map_err(|why| self.response_error("train", &why))?;
        if sums.len() != batches {
            let why = format!("expected sums of {batches} micro-batches, but found {}", sums.len());
            return Err(self.response_error("train", &why));
        }
        (notified..batches).for_each(|_| done());
        let step: OptimStepResult = self.take("train", &mut response, "step")?;
        Ok(TrainReport { sums, step: step.into() })
    }

    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        let [logprobs] = self.request_numbers("logprobs", ["logprobs"], &batch).await?;
        Ok(logprobs)
    }

    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        let names = ["logprobs", "entropies", "concentrations"];
        let [logprobs, entropies, concentrations] =
            self.request_numbers("predictions", names, &batch).await?;
        Ok(Predictions { logprobs, entropies, concentrations })
    }

    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        let [values] = self.request_numbers("values", ["values"], &batch).await?;
        Ok(values)
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        let mut body = Body::new(json!({ "loss": to_json(&loss)? }));
        put_batch(&mut body, &batch);
        let tokens = batch.tokens.len();
        let what = |_| format!("the gradient of a batch of {tokens} tokens");
        let mut response = self.call("forward_backward", body, &what).await?;
        let sums: MicroBatchSums = self.take("forward_backward", &mut response, "sums")?;
        sums.parse().map_err(|why| self.response_error("forward_backward", &why))
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        let body = Body::new(json!({ "params": params_to_json(&params)? }));
        let mut response = self.call("optim_step", body, &|_| "an optimizer step".into()).await?;
        Ok(self.take::<OptimStepResult>("optim_step", &mut response, "step")?.into())
    }

    async fn save(&self, dir: &Path, with_optimizer: bool) -> Result<Manifest, PolicyError> {
        let body =
            Body::new(json!({ "folder": absolute_dir(dir)?, "with_optimiser": with_optimizer }));
        let what = |_| format!("writing the weights to {}", dir.display());
        let mut response = self.call("save", body, &what).await?;
        let manifest: Manifest = self.take("save", &mut response, "manifest")?;
        self.check_files_are_readable(&manifest)?;
        Ok(manifest)
    }

    async fn load(&self, dir: &Path, with_optimizer: bool) -> Result<(), PolicyError> {
        let body =
            Body::new(json!({ "folder": absolute_dir(dir)?, "with_optimiser": with_optimizer }));
        let what = |_| format!("reading the weights from {}", dir.display());
        self.call("load", body, &what).await.map(drop)
    }

    /// Resets the weights to their initial state. Does nothing if this process has started the
    /// learner's processes, because they are then untrained. Learners of other groups may have been
    /// trained by an earlier run, so they reload their initial weights.
    async fn reset(&self) -> Result<(), PolicyError> {
        if self.group.is_own() {
            return Ok(());
        }
        let body = Body::new(json!({ "folder": null, "with_optimiser": false }));
        self.call("load", body, &|_| "reading the initial weights".into()).await.map(drop)
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        let body = Body::new(json!({ "version": version }));
        let what = |_| format!("publishing the weights as version {version}");
        let mut response = self.call("publish", body, &what).await?;
        let weights: WeightsRef = self.take("publish", &mut response, "weights")?;
        if weights.version != version {
            return Err(self.response_error(
                "publish",
                &format!("the version is {}, but must be {version}", weights.version),
            ));
        }
        if let WeightsAt::Manifest(manifest) = &weights.at {
            self.check_files_are_readable(manifest)?;
        }
        if self.name == POLICY {
            self.group.record_published(version);
        }
        Ok(weights)
    }
}

#[async_trait]
impl BroadcastWeights for RemoteLearner {
    async fn open_group(&self, opening: &GroupSpec) -> Result<GroupInfo, PolicyError> {
        let what = |_| format!("opening the group {}", opening.group);
        let response = self.call("push_open", Body::new(to_json(opening)?), &what).await?;
        serde_json::from_value(response.json)
            .map_err(|error| self.response_error("push_open", &error.to_string()))
    }

    async fn send_to(&self, group: &str) -> Result<SendReport, PolicyError> {
        let body = Body::new(json!({ "group": group }));
        let response =
            self.call("push_send", body, &|_| format!("sending weights to {group}")).await?;
        serde_json::from_value(response.json)
            .map_err(|error| self.response_error("push_send", &error.to_string()))
    }
}

/// Moves the weights and optimizer state of all learners of the group together.
#[async_trait]
impl Offload for RemoteLearner {
    async fn offload(&self, keeps_weights: bool) -> Result<TransferReport, PolicyError> {
        let body = Body::new(json!({ "keeps_weights": keeps_weights }));
        let what = |_| "moving weights and moments to host memory".into();
        let response = self.call("offload", body, &what).await?;
        serde_json::from_value(response.json)
            .map_err(|error| self.response_error("offload", &error.to_string()))
    }

    async fn onload(&self) -> Result<TransferReport, PolicyError> {
        let what = |_| "moving weights and moments back to the devices".into();
        let response = self.call("onload", Body::new(json!({})), &what).await?;
        serde_json::from_value(response.json)
            .map_err(|error| self.response_error("onload", &error.to_string()))
    }
}

#[cfg(test)]
#[path = "learner/learner_tests.rs"]
mod tests;
