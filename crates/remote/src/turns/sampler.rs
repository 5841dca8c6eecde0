//! Samplers that share their devices with a learner.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{
    DeviceStats, Load, PolicyError, SampleRequest, SampleStream, Sampler, WeightsRef,
};

use super::Colocation;
use crate::router::Router;

/// Sampler over the inference servers that share the learner's devices. Loading weights acquires
/// the devices for the servers. A request to a sleeping server also acquires them. The server that
/// gets the request does this; requests in flight have all found an awake server.
struct ColocatedSampler {
    colocation: Arc<Colocation>,
    router: Arc<Router>,
}

impl Colocation {
    /// Returns the servers of a router as one sampler. The servers must
    /// [share](Colocation::colocate) these devices.
    pub fn sampler(self: &Arc<Self>, router: Arc<Router>) -> Arc<dyn Sampler> {
        Arc::new(ColocatedSampler { colocation: Arc::clone(self), router })
    }
}

#[async_trait]
impl Sampler for ColocatedSampler {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        self.router.sample(request).await
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        self.router.abort(stream).await
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        self.router.workload().await
    }

    async fn device_stats(&self) -> Result<Option<DeviceStats>, PolicyError> {
        self.router.device_stats().await
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        self.router.paused().await
    }

    async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        self.colocation.hand_to_samplers(weights).await
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        self.router.version().await
    }
}
