//! A learner that shares its devices with samplers.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{
    ForwardBackward, Learner, LossTerms, Manifest, MicroBatchPlan, OptimParams, OptimReport,
    PolicyError, Predictions, TrainReport, TrainRequest, UpdateSequences, WeightsRef,
};
use levade_rl::Loss;
use levade_tree::TreeBatch;

use super::Colocation;

/// A learner that shares its devices with samplers. Any call that needs the devices acquires them
/// for the learner, and keeps them until it ends.
struct ColocatedLearner {
    colocation: Arc<Colocation>,
    learner: Arc<dyn Learner>,
}

impl Colocation {
    /// Wraps a learner so that its calls acquire these devices.
    pub fn learner(self: &Arc<Self>, learner: Arc<dyn Learner>) -> Arc<dyn Learner> {
        Arc::new(ColocatedLearner { colocation: Arc::clone(self), learner })
    }
}

impl ColocatedLearner {
    /// Runs `work` while the learner owns the devices.
    async fn with_devices<T>(
        &self,
        work: impl Future<Output = Result<T, PolicyError>>,
    ) -> Result<T, PolicyError> {
        let mut state = self.colocation.acquire_for_learner().await?;
        let done = work.await;
        // A failure may mean that a server has taken device memory, so check the managed servers
        // again.
        state.is_sure &= done.is_ok();
        done
    }
}

#[async_trait]
impl Learner for ColocatedLearner {
    /// Plans an update. Planning needs no device, so the devices are not acquired.
    async fn plan(&self, update: &UpdateSequences) -> Result<MicroBatchPlan, PolicyError> {
        self.learner.plan(update).await
    }

    async fn train(
        &self,
        update: TrainRequest,
        micro_batch_plan: &MicroBatchPlan,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<TrainReport, PolicyError> {
        self.with_devices(self.learner.train(update, micro_batch_plan, done)).await
    }

    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.with_devices(self.learner.logprobs(batch)).await
    }

    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        self.with_devices(self.learner.predictions(batch)).await
    }

    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.with_devices(self.learner.values(batch)).await
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.with_devices(self.learner.forward_backward(batch, loss)).await
    }

    async fn forward_backward_terms(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<(ForwardBackward, LossTerms), PolicyError> {
        self.with_devices(self.learner.forward_backward_terms(batch, loss)).await
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.with_devices(self.learner.optim_step(params)).await
    }

    async fn save(&self, dir: &Path, with_optimizer: bool) -> Result<Manifest, PolicyError> {
        self.with_devices(self.learner.save(dir, with_optimizer)).await
    }

    async fn load(&self, dir: &Path, with_optimizer: bool) -> Result<(), PolicyError> {
        self.with_devices(self.learner.load(dir, with_optimizer)).await
    }

    async fn reset(&self) -> Result<(), PolicyError> {
        self.with_devices(self.learner.reset()).await
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        self.with_devices(self.learner.publish(version)).await
    }

    fn handoff_time(&self) -> Option<Duration> {
        Some(self.colocation.spent())
    }
}
