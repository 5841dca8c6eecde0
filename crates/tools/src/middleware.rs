//! Toolboxes that wrap another toolbox and change its calls.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_text::ToolSpec;
use serde_json::{Map, Value};

use super::{HelperSlot, Permit, Session, ToolContext, ToolError, ToolOutput, Toolbox};

/// Middleware that changes the calls of another toolbox. Each default method leaves the call
/// unchanged.
#[async_trait]
pub trait ToolMiddleware: Send + Sync {
    /// Returns whether calls can run concurrently if the wrapped toolbox allows concurrency.
    fn allows_parallel(&self) -> bool {
        true
    }

    /// Acquires further permits before a session is opened. `permit` is the permit of the wrapped
    /// toolbox; the returned permit must include it.
    async fn admit_session(&self, permit: Permit) -> Permit {
        permit
    }

    /// Acquires further permits before a call. `permit` is the permit of the wrapped toolbox; the
    /// returned permit must include it.
    async fn admit(&self, permit: Permit) -> Permit {
        permit
    }

    /// Executes a call of the tool `tool` in the wrapped `session`.
    async fn call(
        &self,
        session: &dyn Session,
        tool: &str,
        arguments: &Map<String, Value>,
    ) -> ToolOutput {
        session.call(tool, arguments).await
    }

    /// Post-processes the tool result of a call in the wrapped `session`.
    async fn post_process(
        &self,
        session: &dyn Session,
        tool: &str,
        arguments: &Map<String, Value>,
        output: ToolOutput,
    ) -> ToolOutput {
        session.post_process(tool, arguments, output).await
    }
}

/// Toolbox whose calls a middleware changes.
pub struct MiddlewareToolbox<A> {
    toolbox: Arc<dyn Toolbox>,
    middleware: Arc<A>,
}

/// Session whose calls a middleware changes.
pub struct WrappedSession<A> {
    pub(super) session: Box<dyn Session>,
    pub(super) middleware: Arc<A>,
}

impl<A> MiddlewareToolbox<A> {
    pub(super) fn with_middleware(toolbox: Arc<dyn Toolbox>, middleware: A) -> Self {
        MiddlewareToolbox { toolbox, middleware: Arc::new(middleware) }
    }
}

#[async_trait]
impl<A: ToolMiddleware + 'static> Toolbox for MiddlewareToolbox<A> {
    fn name(&self) -> &str {
        self.toolbox.name()
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        self.toolbox.specs()
    }

    fn helpers(&self) -> Vec<HelperSlot> {
        self.toolbox.helpers()
    }

    async fn check_ready(&self) -> Result<(), ToolError> {
        self.toolbox.check_ready().await
    }

    async fn admit_session(&self) -> Permit {
        self.middleware.admit_session(self.toolbox.admit_session().await).await
    }

    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let session = self.toolbox.open(attempt).await?;
        Ok(Box::new(WrappedSession { session, middleware: Arc::clone(&self.middleware) }))
    }

    fn timeout_detail(&self) -> String {
        self.toolbox.timeout_detail()
    }
}

#[async_trait]
impl<A: ToolMiddleware + 'static> Session for WrappedSession<A> {
    fn specs(&self) -> Vec<ToolSpec> {
        self.session.specs()
    }

    fn can_run_parallel(&self, tool: &str) -> bool {
        self.middleware.allows_parallel() && self.session.can_run_parallel(tool)
    }

    fn has_effect(&self, tool: &str) -> bool {
        self.session.has_effect(tool)
    }

    fn opening(&self) -> Option<String> {
        self.session.opening()
    }

    fn max_call_timeout(&self) -> Option<Duration> {
        self.session.max_call_timeout()
    }

    async fn admit(&self, tool: &str) -> Permit {
        // The wrapped toolbox's own wait comes first, so that no permit of the wrapper is held
        // meanwhile.
        self.middleware.admit(self.session.admit(tool).await).await
    }

    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        self.middleware.call(&*self.session, tool, arguments).await
    }

    fn timeout_detail(&self) -> String {
        self.session.timeout_detail()
    }

    async fn post_process(
        &self,
        tool: &str,
        arguments: &Map<String, Value>,
        output: ToolOutput,
    ) -> ToolOutput {
        self.middleware.post_process(&*self.session, tool, arguments, output).await
    }

    async fn scorer_input(&mut self) -> Result<Map<String, Value>, ToolError> {
        self.session.scorer_input().await
    }

    async fn close(&mut self) -> Result<(), ToolError> {
        self.session.close().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::context;

    /// A toolbox with a timeout for its calls and messages about pending work.
    struct SlowToolbox;

    #[async_trait]
    impl Toolbox for SlowToolbox {
        fn name(&self) -> &str {
            "slow"
        }

        async fn open(&self, _attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
            Ok(Box::new(SlowToolbox))
        }

        fn timeout_detail(&self) -> String {
            "; it is being installed".into()
        }
    }

    #[async_trait]
    impl Session for SlowToolbox {
        fn specs(&self) -> Vec<ToolSpec> {
            Vec::new()
        }

        fn max_call_timeout(&self) -> Option<Duration> {
            Some(Duration::from_secs(90))
        }

        async fn call(&self, _tool: &str, _arguments: &Map<String, Value>) -> ToolOutput {
            ToolOutput::text("done")
        }

        fn timeout_detail(&self) -> String {
            "; it is at step 3".into()
        }
    }

    struct PassThrough;

    impl ToolMiddleware for PassThrough {}

    #[tokio::test]
    async fn middleware_preserves_call_timeout_and_timeout_details() {
        let toolbox = MiddlewareToolbox::with_middleware(Arc::new(SlowToolbox), PassThrough);
        assert_eq!(
            (toolbox.name(), toolbox.timeout_detail().as_str()),
            ("slow", "; it is being installed")
        );
        let session = toolbox.open(&context("a")).await.unwrap();
        assert_eq!(session.max_call_timeout(), Some(Duration::from_secs(90)));
        assert_eq!(session.timeout_detail(), "; it is at step 3");
    }
}
