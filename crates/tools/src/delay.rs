//! A toolbox with artificial latency.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value};

use super::middleware::{MiddlewareToolbox, ToolMiddleware};
use super::{Session, ToolOutput, Toolbox};

/// Toolbox whose calls each start after a random delay. It serves to measure the cost of slow
/// tools, and to check that tool results do not depend on timing.
pub type DelayedToolbox = MiddlewareToolbox<DelayRange>;

/// Range from which the random delays of calls are sampled.
pub struct DelayRange(RangeInclusive<Duration>);

impl DelayedToolbox {
    /// Wraps `toolbox` so that each call starts after a random delay within `delay`. The delays
    /// differ between calls and processes.
    pub fn new(toolbox: Arc<dyn Toolbox>, delay: RangeInclusive<Duration>) -> Self {
        MiddlewareToolbox::with_middleware(toolbox, DelayRange(delay))
    }
}

#[async_trait]
impl ToolMiddleware for DelayRange {
    async fn call(
        &self,
        session: &dyn Session,
        tool: &str,
        arguments: &Map<String, Value>,
    ) -> ToolOutput {
        // The standard library seeds each `RandomState` differently, which is enough randomness
        // here.
        let fraction = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
        let min = *self.0.start();
        let upper = *self.0.end();
        tokio::time::sleep(min + upper.saturating_sub(min).mul_f64(fraction)).await;
        session.call(tool, arguments).await
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::testing::context;
    use crate::{Calculator, ToolOutput};

    #[tokio::test(start_paused = true)]
    async fn tool_delay_is_random_and_preserves_results() {
        let min = Duration::from_secs(1);
        let upper = Duration::from_secs(3);
        let toolbox = DelayedToolbox::new(Arc::new(Calculator::default()), min..=upper);
        assert_eq!(toolbox.specs(), Some(vec![Calculator::spec()]));
        let mut session = toolbox.open(&context("a")).await.unwrap();
        assert!(session.can_run_parallel(Calculator::NAME));
        let arguments = levade_tasks::calculation("6 * 7").arguments;
        let mut waits = HashSet::new();
        for _ in 0..5 {
            let start = tokio::time::Instant::now();
            assert_eq!(session.call(Calculator::NAME, &arguments).await, ToolOutput::text("42"));
            let waited = start.elapsed();
            assert!(min <= waited && waited <= upper + Duration::from_millis(1), "{waited:?}");
            waits.insert(waited);
        }
        assert!(waits.len() > 1, "{waits:?}");
        session.close().await.unwrap();
    }
}
