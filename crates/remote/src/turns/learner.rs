//! A learner that shares its devices with samplers.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{
    Cut, ForwardBackward, Learner, LossTerms, Manifest, OptimParams, OptimReport, PolicyError, Predictions,
    TrainRequest, Trained, Uncut, WeightsRef,
};
use levade_rl::Loss;
use levade_tree::TreeBatch;

use super::Turns;

/// A learner on colocated devices. Any call that needs the devices acquires them, and holds them
/// until it ends.
struct InTurn {
    turns: Arc<Turns>,
    learner: Arc<dyn Learner>,
}

impl Turns {
    /// Returns a learner of the group on these devices. Its calls acquire the devices for the
    /// learner.
    pub fn learner(self: &Arc<Self>, learner: Arc<dyn Learner>) -> Arc<dyn Learner> {
        Arc::new(InTurn { turns: Arc::clone(self), learner })
    }
}

impl InTurn {
    /// Runs `work` while the learner owns the devices.
    async fn in_turn<T>(&self, work: impl Future<Output = Result<T, PolicyError>>) -> Result<T, PolicyError> {
        let mut turn = self.turns.learns().await?;
        let done = work.await;
        // A failure may mean that a server has taken device memory, so check the managed servers
        // again.
        turn.is_sure &= done.is_ok();
        done
    }
}

#[async_trait]
impl Learner for InTurn {
    /// Needs no device.
    async fn plan(&self, update: &Uncut) -> Result<Cut, PolicyError> {
        self.learner.plan(update).await
    }

    async fn train(
        &self,
        update: TrainRequest,
        cut: &Cut,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<Trained, PolicyError> {
        self.in_turn(self.learner.train(update, cut, done)).await
    }

    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.in_turn(self.learner.logprobs(batch)).await
    }

    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        self.in_turn(self.learner.predictions(batch)).await
    }

    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.in_turn(self.learner.values(batch)).await
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.in_turn(self.learner.forward_backward(batch, loss)).await
    }

    async fn forward_backward_terms(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<(ForwardBackward, LossTerms), PolicyError> {
        self.in_turn(self.learner.forward_backward_terms(batch, loss)).await
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.in_turn(self.learner.optim_step(params)).await
    }

    async fn save(&self, folder: &Path, with_optimiser: bool) -> Result<Manifest, PolicyError> {
        self.in_turn(self.learner.save(folder, with_optimiser)).await
    }

    async fn load(&self, folder: &Path, with_optimiser: bool) -> Result<(), PolicyError> {
        self.in_turn(self.learner.load(folder, with_optimiser)).await
    }

    async fn begin_again(&self) -> Result<(), PolicyError> {
        self.in_turn(self.learner.begin_again()).await
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        self.in_turn(self.learner.publish(version)).await
    }

    fn handed_over(&self) -> Option<Duration> {
        Some(self.turns.spent())
    }
}
