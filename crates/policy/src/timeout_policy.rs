//! Gives every call of a policy a deadline (`engine.call_seconds` of a recipe).
//!
//! If a device hangs, the call fails with an error that names the pending operation.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::process_time::with_timeout;
use crate::{
    DeviceStats, ForwardBackward, Learner, Load, LossTerms, Manifest, MicroBatchPlan, OptimParams,
    OptimReport, PolicyError, Predictions, SampleRequest, SampleStream, Sampler, TrainReport,
    TrainRequest, UpdateSequences, WeightsRef,
};
use async_trait::async_trait;
use levade_rl::Loss;
use levade_tree::TreeBatch;
use tokio::sync::Notify;

/// Wrapper of a policy with a timeout for each call. A call that takes longer than `timeout` fails
/// with [`PolicyError::Deadline`], which names the pending operation. A device that hangs therefore
/// ends the run, which can resume from its last checkpoint, instead of blocking it. An update has
/// this deadline for each micro-batch and for the optimizer step. The tokens of a completion arrive
/// on its stream, whose reader sets their deadline.
pub struct TimeoutPolicy<P: ?Sized> {
    policy: Arc<P>,
    timeout: Duration,
}

impl<P: ?Sized> TimeoutPolicy<P> {
    /// Creates a policy that allows each call of `policy` to take at most `timeout`.
    pub fn new(policy: Arc<P>, timeout: Duration) -> Self {
        TimeoutPolicy { policy, timeout }
    }

    async fn with_deadline<T>(
        &self,
        call: impl Future<Output = Result<T, PolicyError>>,
        what: impl FnOnce() -> String,
    ) -> Result<T, PolicyError> {
        let done = with_timeout(self.timeout, call).await;
        done.unwrap_or_else(|| Err(PolicyError::Deadline(self.timeout, what())))
    }
}

fn describe_batch(what: &str, batch: &TreeBatch) -> String {
    format!("{what} of a batch of {} tokens", batch.tokens.len())
}

#[async_trait]
impl<P: Learner + ?Sized> Learner for TimeoutPolicy<P> {
    async fn plan(&self, update: &UpdateSequences) -> Result<MicroBatchPlan, PolicyError> {
        self.with_deadline(self.policy.plan(update), || "the micro-batch plan of an update".into())
            .await
    }

    async fn train(
        &self,
        update: TrainRequest,
        plan: &MicroBatchPlan,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<TrainReport, PolicyError> {
        let progress = Notify::new();
        let num_done = AtomicUsize::new(0);
        let batches = plan.micro_batches.len();
        let mut on_done = || {
            done();
            num_done.fetch_add(1, Ordering::Relaxed);
            progress.notify_one();
        };
        let mut call = std::pin::pin!(self.policy.train(update, plan, &mut on_done));
        loop {
            tokio::select! {
                biased;
                trained = &mut call => return trained,
                more = with_timeout(self.timeout, progress.notified()) => if more.is_none() {
                    let what = match num_done.load(Ordering::Relaxed) {
                        known if known < batches => {
                            format!("the gradient of micro-batch {} of {batches}", known + 1)
                        }
                        _ => "an optimizer step".into(),
                    };
                    return Err(PolicyError::Deadline(self.timeout, what));
                },
            }
        }
    }

    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.with_deadline(self.policy.logprobs(batch.clone()), || {
            describe_batch("the log-probabilities", &batch)
        })
        .await
    }

    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        self.with_deadline(self.policy.predictions(batch.clone()), || {
            describe_batch("the predictions", &batch)
        })
        .await
    }

    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.with_deadline(self.policy.values(batch.clone()), || {
            describe_batch("the values", &batch)
        })
        .await
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.with_deadline(self.policy.forward_backward(batch.clone(), loss), || {
            describe_batch("the gradient", &batch)
        })
        .await
    }

    async fn forward_backward_terms(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<(ForwardBackward, LossTerms), PolicyError> {
        self.with_deadline(self.policy.forward_backward_terms(batch.clone(), loss), || {
            describe_batch("the losses", &batch)
        })
        .await
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.with_deadline(self.policy.optim_step(params), || "an optimizer step".into()).await
    }

    async fn save(&self, dir: &Path, with_optimizer: bool) -> Result<Manifest, PolicyError> {
        self.with_deadline(self.policy.save(dir, with_optimizer), || {
            format!("the weights to be written to {}", dir.display())
        })
        .await
    }

    async fn load(&self, dir: &Path, with_optimizer: bool) -> Result<(), PolicyError> {
        self.with_deadline(self.policy.load(dir, with_optimizer), || {
            format!("the weights to be read from {}", dir.display())
        })
        .await
    }

    async fn reset(&self) -> Result<(), PolicyError> {
        self.with_deadline(self.policy.reset(), || {
            "the learner to restore its initial weights".into()
        })
        .await
    }

    fn handoff_time(&self) -> Option<Duration> {
        self.policy.handoff_time()
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        self.with_deadline(self.policy.publish(version), || {
            format!("the weights to be published as version {version}")
        })
        .await
    }
}

#[async_trait]
impl<P: Sampler + ?Sized> Sampler for TimeoutPolicy<P> {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        self.with_deadline(self.policy.sample(request), || "the sampler to accept a request".into())
            .await
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        self.with_deadline(self.policy.abort(stream), || "the sampler to abort requests".into())
            .await
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        self.with_deadline(self.policy.workload(), || "the load of the sampler".into()).await
    }

    async fn device_stats(&self) -> Result<Option<DeviceStats>, PolicyError> {
        self.with_deadline(self.policy.device_stats(), || {
            "the device statistics of the sampler".into()
        })
        .await
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        self.with_deadline(self.policy.paused(), || "the pause time of the sampler".into()).await
    }

    async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        self.with_deadline(self.policy.update_weights(weights), || {
            format!("the sampler to load version {} of the weights", weights.version)
        })
        .await
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        self.with_deadline(self.policy.version(), || "the version of the sampler's weights".into())
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Simulator, SimulatorConfig, Timing};

    #[tokio::test(start_paused = true)]
    async fn exceeded_deadline_names_pending_operation() {
        let timing = Timing { update: Duration::from_secs(60), ..Timing::default() };
        let simulator =
            Arc::new(Simulator::new(SimulatorConfig { timing, ..SimulatorConfig::default() }));
        let params = OptimParams {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.99,
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
        };
        let patient = TimeoutPolicy::new(simulator.clone(), Duration::from_secs(61));
        patient.optim_step(params).await.unwrap();
        patient.publish(1).await.unwrap();
        assert_eq!(patient.version().await.unwrap(), 1);
        let hasty: TimeoutPolicy<dyn Learner> =
            TimeoutPolicy::new(simulator, Duration::from_secs(59));
        let error = hasty.optim_step(params).await.unwrap_err();
        assert_eq!(error.to_string(), "waited 59s for an optimizer step");
    }
}
