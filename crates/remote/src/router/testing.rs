//! Scripted replicas that fail on demand, over simulators that all sample the same tokens.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{
    Completion, DeviceStats, FinishReason, Load, PolicyError, SampleEvent, SampleRequest,
    SampleStream, Sampler, SamplingParams, Simulator, SimulatorConfig, Timing, WeightsAt,
    WeightsRef,
};

use super::{Router, RouterOptions};

/// How a replica fails.
#[derive(Debug, Clone, PartialEq)]
pub enum FailureMode {
    Never,
    /// Rejects each request.
    Rejects(PolicyError),
    /// Never answers a request.
    Hangs,
    /// Samples this many tokens, then fails.
    After(usize, PolicyError),
    /// Samples this many tokens, then hangs.
    HangsAfter(usize),
    /// Samples this many tokens, then closes the stream.
    StopsAfter(usize),
}

/// A simulator that fails on demand, with its own weight versions.
pub struct ScriptedSampler {
    pub simulator: Simulator,
    pub fails: Mutex<FailureMode>,
    pub version: AtomicU64,
    /// Error with which it rejects weights, if any.
    pub rejects_weights: Mutex<Option<PolicyError>>,
    pub loaded_versions: Mutex<Vec<u64>>,
    /// Duration of a weight update.
    pub update_delay: Mutex<Duration>,
    /// Whether it reports that it has been paused ever since its start.
    pub stands_still: Mutex<bool>,
    pub requests: Mutex<Vec<SampleRequest>>,
    pub aborted: Mutex<Vec<Option<u64>>>,
    pub stats: Mutex<Option<DeviceStats>>,
    started: tokio::time::Instant,
}

pub fn stopped_error() -> PolicyError {
    PolicyError::Stopped("it".into())
}

/// Returns the configuration of a simulator that takes `token` per token.
pub fn config(token: Duration) -> SimulatorConfig {
    let timing = Timing { batch: token, ..Timing::default() };
    SimulatorConfig { timing, spread: 2.0, ..SimulatorConfig::default() }
}

impl ScriptedSampler {
    pub fn new(token: Duration) -> Arc<Self> {
        Arc::new(ScriptedSampler {
            simulator: Simulator::new(config(token)),
            fails: Mutex::new(FailureMode::Never),
            version: AtomicU64::new(0),
            rejects_weights: Mutex::default(),
            loaded_versions: Mutex::default(),
            update_delay: Mutex::default(),
            stands_still: Mutex::new(false),
            requests: Mutex::default(),
            aborted: Mutex::default(),
            stats: Mutex::default(),
            started: tokio::time::Instant::now(),
        })
    }

    pub fn fails(&self, how: FailureMode) {
        *self.fails.lock().unwrap() = how;
    }

    /// Returns the requests received, without probes.
    pub fn requests(&self) -> Vec<SampleRequest> {
        let requests = self.requests.lock().unwrap();
        requests.iter().filter(|request| request.id != "probe").cloned().collect()
    }

    pub fn probed(&self) -> usize {
        self.requests.lock().unwrap().iter().filter(|request| request.id == "probe").count()
    }
}

#[async_trait]
impl Sampler for ScriptedSampler {
    async fn sample(&self, mut request: SampleRequest) -> Result<SampleStream, PolicyError> {
        self.requests.lock().unwrap().push(request.clone());
        let fails = self.fails.lock().unwrap().clone();
        let version = self.version.load(Ordering::Relaxed);
        match &fails {
            FailureMode::Rejects(error) => return Err(error.clone()),
            FailureMode::Hangs => std::future::pending().await,
            _ if version < request.min_version => {
                return Err(PolicyError::Behind {
                    policy: "p".into(),
                    min_version: request.min_version,
                    version,
                });
            }
            _ => {}
        }
        request.min_version = 0;
        // A simulator has no text, so its stop strings are token IDs in decimal.
        let strings = std::mem::take(&mut request.params.stop_strings);
        request.params.stop_ids.extend(strings.iter().map(|id| id.parse::<u32>().unwrap()));
        let mut from = self.simulator.sample(request).await?;
        let (events, stream) = SampleStream::channel();
        tokio::spawn(async move {
            let mut sampled = 0;
            loop {
                match &fails {
                    FailureMode::After(limit, error) if sampled == *limit => {
                        return drop(events.send(Err(error.clone())));
                    }
                    FailureMode::StopsAfter(limit) if sampled == *limit => return,
                    FailureMode::HangsAfter(limit) if sampled == *limit => {
                        return events.closed().await;
                    }
                    _ => {}
                }
                let event = tokio::select! {
                    () = events.closed() => return,
                    event = from.next() => event,
                };
                let event = match event {
                    Some(Ok(SampleEvent::Tokens { tokens, logprobs, top, .. })) => {
                        sampled += tokens.len();
                        Ok(SampleEvent::Tokens { tokens, logprobs, top, version })
                    }
                    Some(Ok(SampleEvent::Finished(FinishReason::StopId)))
                        if !strings.is_empty() =>
                    {
                        Ok(SampleEvent::Finished(FinishReason::StopString))
                    }
                    Some(event) => event,
                    None => return,
                };
                if events.send(event).is_err() {
                    return;
                }
            }
        });
        Ok(stream)
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        self.aborted.lock().unwrap().push(stream);
        self.simulator.abort(stream).await
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        self.simulator.workload().await
    }

    async fn device_stats(&self) -> Result<Option<DeviceStats>, PolicyError> {
        Ok(self.stats.lock().unwrap().clone())
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        let still = *self.stands_still.lock().unwrap();
        Ok(if still { self.started.elapsed() } else { Duration::ZERO })
    }

    async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        if let Some(error) = self.rejects_weights.lock().unwrap().clone() {
            return Err(error);
        }
        let takes = *self.update_delay.lock().unwrap();
        // It has no version during the update.
        self.version.store(0, Ordering::Relaxed);
        tokio::time::sleep(takes).await;
        self.loaded_versions.lock().unwrap().push(weights.version);
        self.version.store(weights.version, Ordering::Relaxed);
        Ok(())
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        match &*self.fails.lock().unwrap() {
            FailureMode::Rejects(error) => Err(error.clone()),
            _ => Ok(self.version.load(Ordering::Relaxed)),
        }
    }
}

/// Creates a router over `count` replicas named a, b, c, …, which take 10 ms per token.
pub fn router(count: usize, options: RouterOptions) -> (Router, Vec<Arc<ScriptedSampler>>) {
    router_over(vec![Duration::from_millis(10); count], options)
}

/// Creates a router over replicas with these durations per token.
pub fn router_over(
    tokens: Vec<Duration>,
    options: RouterOptions,
) -> (Router, Vec<Arc<ScriptedSampler>>) {
    let replicas: Vec<Arc<ScriptedSampler>> =
        tokens.into_iter().map(ScriptedSampler::new).collect();
    let named = replicas.iter().zip('a'..).map(|(replica, name)| {
        let sampler: Arc<dyn Sampler> = replica.clone();
        (name.to_string(), sampler)
    });
    let router = Router::new(named.collect(), options).unwrap();
    (router, replicas)
}

pub fn weights(version: u64) -> WeightsRef {
    WeightsRef { version, at: WeightsAt::Memory }
}

pub fn request(stream: u64, max_tokens: usize) -> SampleRequest {
    // Penalties show whether earlier tokens count as completion.
    let params = SamplingParams { max_tokens, frequency_penalty: 0.7, ..SamplingParams::default() };
    SampleRequest { seed: 5, stream, prompt: vec![1, 2, 3], params, ..SampleRequest::default() }
}

/// Returns the completion of a replica that does not fail.
pub async fn undisturbed(mut request: SampleRequest) -> Completion {
    let strings = std::mem::take(&mut request.params.stop_strings);
    request.params.stop_ids.extend(strings.iter().map(|id| id.parse::<u32>().unwrap()));
    let stream = Simulator::new(config(Duration::ZERO)).sample(request).await.unwrap();
    let mut completion = stream.collect(Duration::from_secs(60)).await.unwrap();
    if !strings.is_empty() && completion.finish == FinishReason::StopId {
        completion.finish = FinishReason::StopString;
    }
    completion
}

pub async fn complete(router: &Router, request: SampleRequest) -> Result<Completion, PolicyError> {
    router.sample(request).await?.collect(Duration::from_secs(3600)).await
}
