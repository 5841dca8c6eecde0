//! A tool that takes its time.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dressage_text::ToolSpec;
use serde_json::{Map, Value};

use super::{CallError, Tool, ToolError, ToolSession};

/// Another tool, each of whose answers is held back for a random time: to see what slow tools cost, and that what they
/// answer does not depend on when.
pub struct Delayed {
    tool: Arc<dyn Tool>,
    delay: RangeInclusive<Duration>,
}

struct DelayedSession {
    session: Box<dyn ToolSession>,
    delay: RangeInclusive<Duration>,
}

impl Delayed {
    /// `tool`, with a random time within `delay` before each answer, anew for each call and each process.
    pub fn new(tool: Arc<dyn Tool>, delay: RangeInclusive<Duration>) -> Self {
        Delayed { tool, delay }
    }
}

#[async_trait]
impl Tool for Delayed {
    fn spec(&self) -> ToolSpec {
        self.tool.spec()
    }

    async fn open(&self, attempt: &str) -> Result<Box<dyn ToolSession>, ToolError> {
        let session = self.tool.open(attempt).await?;
        Ok(Box::new(DelayedSession { session, delay: self.delay.clone() }))
    }
}

#[async_trait]
impl ToolSession for DelayedSession {
    async fn execute(&mut self, arguments: &Map<String, Value>) -> Result<String, CallError> {
        // The standard library seeds every state anew, which is all the randomness that is needed here.
        let share = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
        let (least, most) = (*self.delay.start(), *self.delay.end());
        tokio::time::sleep(least + most.saturating_sub(least).mul_f64(share)).await;
        self.session.execute(arguments).await
    }

    async fn close(&mut self) -> Result<(), ToolError> {
        self.session.close().await
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use serde_json::json;

    use super::*;
    use crate::tools::Calculator;

    #[tokio::test(start_paused = true)]
    async fn answers_are_late_and_the_same() {
        let (least, most) = (Duration::from_secs(1), Duration::from_secs(3));
        let tool = Delayed::new(Arc::new(Calculator), least..=most);
        assert_eq!(tool.spec(), Calculator.spec());
        let mut session = tool.open("a").await.unwrap();
        let arguments = json!({ "expression": "6 * 7" });
        let mut waits = HashSet::new();
        for _ in 0..5 {
            let start = tokio::time::Instant::now();
            assert_eq!(session.execute(arguments.as_object().unwrap()).await.unwrap(), "42");
            let waited = start.elapsed();
            assert!(least <= waited && waited <= most + Duration::from_millis(1), "{waited:?}");
            waits.insert(waited);
        }
        assert!(waits.len() > 1, "{waits:?}");
        session.close().await.unwrap();
    }
}
