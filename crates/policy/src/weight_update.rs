//! Loads published weights in all samplers of a policy, before one deadline.
//!
//! The error names the samplers that have not loaded them. The embedded engine, which shares memory
//! with its learner, only checks that it has the version.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;

use crate::process_time::with_timeout;
use crate::{PolicyError, Sampler, WeightsRef};

/// Lets all samplers load published weights concurrently. Each sampler comes with a name for error
/// messages.
///
/// # Errors
/// Returns [`PolicyError::Deadline`] with the names of all samplers that have not loaded the
/// weights within `timeout`, and [`PolicyError::WeightsNotLoaded`] with the name of the first
/// sampler that rejects them. The remaining samplers may have loaded them.
pub async fn update_sampler_weights(
    samplers: Vec<(String, Arc<dyn Sampler>)>,
    weights: &WeightsRef,
    timeout: Duration,
) -> Result<(), PolicyError> {
    let missing: Vec<String> = samplers.iter().map(|(name, _)| name.clone()).collect();
    let missing = Arc::new(Mutex::new(missing));
    let mut calls = JoinSet::new();
    for (name, sampler) in samplers {
        let weights = weights.clone();
        let missing = missing.clone();
        calls.spawn(async move {
            let result = sampler.update_weights(&weights).await;
            result.map_err(|error| PolicyError::WeightsNotLoaded(format!("{name}: {error}")))?;
            missing.lock().unwrap_or_else(PoisonError::into_inner).retain(|other| *other != name);
            Ok(())
        });
    }
    let all = async {
        while let Some(done) = calls.join_next().await {
            done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
        }
        Ok(())
    };
    with_timeout(timeout, all).await.unwrap_or_else(|| {
        let missing = missing.lock().unwrap_or_else(PoisonError::into_inner).join(", ");
        Err(PolicyError::Deadline(
            timeout,
            format!("{missing} to load version {} of the weights", weights.version),
        ))
    })
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::{Load, SampleRequest, SampleStream, WeightsAt};

    /// A sampler that loads weights after a delay.
    struct SlowSampler(Duration);

    #[async_trait]
    impl Sampler for SlowSampler {
        async fn sample(&self, _: SampleRequest) -> Result<SampleStream, PolicyError> {
            Err(PolicyError::Stopped("a sampler that only loads weights".into()))
        }

        async fn abort(&self, _: Option<u64>) -> Result<usize, PolicyError> {
            Ok(0)
        }

        async fn workload(&self) -> Result<Load, PolicyError> {
            Ok(Load::default())
        }

        async fn version(&self) -> Result<u64, PolicyError> {
            tokio::time::sleep(self.0).await;
            Ok(3)
        }
    }

    fn sampler(name: &str, seconds: u64) -> (String, Arc<dyn Sampler>) {
        (name.into(), Arc::new(SlowSampler(Duration::from_secs(seconds))))
    }

    #[tokio::test(start_paused = true)]
    async fn update_timeout_names_samplers_without_new_weights() {
        let weights = WeightsRef { version: 3, at: WeightsAt::Memory };
        let update = async |samplers, weights: &WeightsRef| {
            update_sampler_weights(samplers, weights, Duration::from_secs(60))
                .await
                .map_err(|error| error.to_string())
        };
        let start = tokio::time::Instant::now();
        update(vec![sampler("a", 40), sampler("b", 50)], &weights).await.unwrap();
        assert_eq!(start.elapsed(), Duration::from_secs(50), "both at once");
        let hangs =
            update(vec![sampler("a", 1), sampler("b", 1 << 40)], &weights).await.unwrap_err();
        assert_eq!(hangs, "waited 60s for b to load version 3 of the weights");
        let other = WeightsRef { version: 4, ..weights.clone() };
        let rejection =
            update(vec![sampler("a", 1), sampler("b", 1 << 40)], &other).await.unwrap_err();
        assert!(
            rejection.contains("a: ") && rejection.contains("the sampler has version 3"),
            "{rejection}"
        );
        let sent = WeightsRef { at: WeightsAt::Collective { group: "g".into() }, ..weights };
        let rejection = update(vec![sampler("a", 1)], &sent).await.unwrap_err();
        assert!(rejection.contains("cannot load weights from another source"), "{rejection}");
    }
}
