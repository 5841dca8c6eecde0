//! A learner that publishes its weights as directories, for samplers that share no memory with it.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{
    ForwardBackward, Learner, LossTerms, Manifest, MicroBatchPlan, OptimParams, OptimReport,
    PolicyError, Predictions, SavedFile, TrainReport, TrainRequest, UpdateSequences, WeightsAt,
    WeightsLocation, WeightsRef,
};
use levade_rl::Loss;
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};

use crate::push::WeightBroadcast;
use crate::server::{PROBE, ProbeFile};

/// Number of weight directories that are kept: the newest directory, and the previous one, which a
/// sampler may still be reading.
const KEPT: usize = 2;

/// A learner that publishes its weights as directories, one per version. Each directory also
/// contains the log-probabilities of a probe prompt, by which samplers can be checked. A directory
/// is complete or absent: it is written under another name, flushed, then renamed. Old directories
/// are removed.
pub struct PublishingLearner {
    learner: Arc<dyn Learner>,
    dir: PathBuf,
    probe: Vec<u32>,
    push: Option<Arc<WeightBroadcast>>,
}

impl PublishingLearner {
    /// Creates a learner that publishes the weights of `learner` under `dir`, with the
    /// log-probabilities of `probe`, a prompt of at least two tokens.
    pub fn new(learner: Arc<dyn Learner>, dir: impl Into<PathBuf>, probe: Vec<u32>) -> Self {
        PublishingLearner { learner, dir: dir.into(), probe, push: None }
    }

    /// Also offers the published weights to `push`, until the learner's weights change.
    #[must_use]
    pub fn with_broadcast(self, push: Option<Arc<WeightBroadcast>>) -> Self {
        PublishingLearner { push, ..self }
    }

    /// Waits until the learner's weights may change, that is, until a push in progress has ended.
    async fn withdraw_broadcast(&self) {
        if let Some(push) = &self.push {
            push.withdraw().await;
        }
    }

    /// Writes the weights of a version into a directory, and returns the directory's manifest.
    async fn write_weights(&self, version: u64) -> Result<Manifest, PolicyError> {
        let target = self.dir.join(format!("v{version}"));
        let partial = self.dir.join(format!("v{version}.half"));
        for old in [&partial, &target] {
            if old.exists() {
                std::fs::remove_dir_all(old)
                    .map_err(|error| storage_error("remove", old, error))?;
            }
        }
        std::fs::create_dir_all(&partial)
            .map_err(|error| storage_error("create", &partial, error))?;
        let saved = self.learner.save(&partial, false).await?;
        let manifest = self.add_probe(&partial, saved).await?;
        std::fs::rename(&partial, &target)
            .map_err(|error| storage_error("rename", &partial, error))?;
        self.prune_old_dirs(&target);
        Ok(Manifest { location: WeightsLocation::Local(target), ..manifest })
    }

    /// Adds the log-probabilities of the probe prompt to a directory of weights and its manifest.
    /// The learner has already flushed its files, and this file is flushed too, because a server on
    /// another machine may read it over a shared disk after this machine has failed.
    async fn add_probe(&self, dir: &Path, manifest: Manifest) -> Result<Manifest, PolicyError> {
        let probe = ProbeFile {
            tokens: self.probe.clone(),
            logprobs: self.compute_probe_logprobs().await?,
        };
        let text = serde_json::to_string(&probe)
            .map_err(|error| PolicyError::Storage(error.to_string()))?;
        let path = dir.join(PROBE);
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        });
        let file = written.and_then(|()| SavedFile::read(dir, PROBE)).map_err(|error| {
            PolicyError::Storage(format!("cannot write {}: {error}", path.display()))
        })?;
        let mut files = manifest.files;
        files.push(file);
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Manifest { files, ..manifest })
    }

    async fn compute_probe_logprobs(&self) -> Result<Vec<f32>, PolicyError> {
        let path = SequenceInput {
            tokens: self.probe.clone().into(),
            targets: (1..self.probe.len())
                .map(|index: usize| SequenceTarget {
                    index: index as u32,
                    temperature: 1.0,
                    term: Term::default(),
                })
                .collect(),
        };
        let batch =
            TreeBatch::merge(&[path]).map_err(|error| PolicyError::Invalid(error.to_string()))?;
        self.learner.logprobs(Arc::new(batch)).await
    }

    /// Removes old weight directories: all except the newest [`KEPT`]. Ignores directories that
    /// cannot be removed.
    fn prune_old_dirs(&self, newest: &Path) {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut found: Vec<(std::time::SystemTime, PathBuf)> = entries
            .filter(|entry| {
                entry.path() != newest && entry.file_name().to_string_lossy().starts_with('v')
            })
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        found.sort();
        let removed = found.len().saturating_sub(KEPT - 1);
        for (_, path) in &found[..removed] {
            std::fs::remove_dir_all(path).ok();
        }
    }
}

fn storage_error(what: &str, path: &Path, error: std::io::Error) -> PolicyError {
    PolicyError::Storage(format!("cannot {what} {}: {error}", path.display()))
}

#[async_trait]
impl Learner for PublishingLearner {
    async fn plan(&self, update: &UpdateSequences) -> Result<MicroBatchPlan, PolicyError> {
        self.learner.plan(update).await
    }

    async fn train(
        &self,
        update: TrainRequest,
        micro_batch_plan: &MicroBatchPlan,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<TrainReport, PolicyError> {
        self.withdraw_broadcast().await;
        self.learner.train(update, micro_batch_plan, done).await
    }

    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.learner.logprobs(batch).await
    }

    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        self.learner.predictions(batch).await
    }

    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.learner.values(batch).await
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.learner.forward_backward(batch, loss).await
    }

    async fn forward_backward_terms(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<(ForwardBackward, LossTerms), PolicyError> {
        self.learner.forward_backward_terms(batch, loss).await
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.withdraw_broadcast().await;
        self.learner.optim_step(params).await
    }

    async fn save(&self, dir: &Path, with_optimizer: bool) -> Result<Manifest, PolicyError> {
        self.learner.save(dir, with_optimizer).await
    }

    async fn load(&self, dir: &Path, with_optimizer: bool) -> Result<(), PolicyError> {
        self.withdraw_broadcast().await;
        self.learner.load(dir, with_optimizer).await
    }

    async fn reset(&self) -> Result<(), PolicyError> {
        self.withdraw_broadcast().await;
        self.learner.reset().await
    }

    fn handoff_time(&self) -> Option<Duration> {
        self.learner.handoff_time()
    }

    /// Publishes the weights as version `version`. Weights in memory are written to a directory.
    /// The log-probabilities of the probe prompt are added to a directory that the learner has
    /// written on this machine.
    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        self.withdraw_broadcast().await;
        let weights = self.learner.publish(version).await?;
        let manifest = match weights.at {
            WeightsAt::Memory => self.write_weights(version).await?,
            WeightsAt::Manifest(Manifest {
                location: WeightsLocation::Local(dir),
                content,
                files,
            }) => {
                let manifest =
                    Manifest { location: WeightsLocation::Local(dir.clone()), content, files };
                self.add_probe(&dir, manifest).await?
            }
            other => return Ok(WeightsRef { at: other, ..weights }),
        };
        if let Some(push) = &self.push {
            push.offer(version).await;
        }
        Ok(WeightsRef { version: weights.version, at: WeightsAt::Manifest(manifest) })
    }
}
