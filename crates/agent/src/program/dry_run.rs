//! Trial runs of a program, which check whether the program loads and calls the model.

use levade_call::Recording;
use levade_process::{RunOutput, explaining_lines};

use super::{CALL_END_TIMEOUT, Program};
use crate::AttemptContext;
use crate::cast::CallerKind;

/// Result of a dry run, which starts a program once without recording an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DryRunResult {
    /// Number of the program's model calls that got a response.
    pub answered_calls: usize,
    /// Reasons why model calls of the program were rejected.
    pub rejected: Vec<String>,
    /// Exit code; 128 plus the signal number if a signal ended the program. `None` if the program
    /// was still running and was stopped.
    pub code: Option<i32>,
    /// Most informative lines that the program printed: the lines of standard error, or of standard
    /// output if standard error has none.
    pub printed: String,
}

impl Program {
    /// Starts the program for a task as an attempt does, and records nothing. Stops the program
    /// when `enough` completes or the timeout expires, if the program has not ended before.
    ///
    /// # Errors
    /// Returns a message if the roster lacks an agent that the program calls.
    pub async fn dry_run(
        &self,
        context: AttemptContext,
        enough: impl Future<Output = ()>,
    ) -> Result<DryRunResult, String> {
        let opened = self.open_session(&context, CallerKind::Program)?;
        let endpoint = opened.create_endpoint(self);
        let ended = self.execute_program(&context, &endpoint, opened.own_player(), enough).await;
        let session = opened.session;
        let Recording { calls, rejected, .. } = session.close(CALL_END_TIMEOUT).await.0;
        self.gateway.forget_session(&session);
        let completed = calls.iter().filter(|call| call.error.is_none()).count();
        let rejected = rejected.into_keys().map(|kind| kind.to_string()).collect();
        let RunOutput { code, stdout, stderr } = match ended {
            Ok(ended) => ended,
            // The program could not be started, or its worker ended.
            Err(why) => {
                return Ok(DryRunResult {
                    answered_calls: completed,
                    rejected,
                    code: Some(1),
                    printed: why,
                });
            }
        };
        let mut streams =
            [stderr, stdout].into_iter().map(|stream| explaining_lines(&stream.text()));
        let printed = streams.find(|lines| !lines.is_empty()).unwrap_or_default().join("\n");
        Ok(DryRunResult { answered_calls: completed, rejected, code, printed })
    }
}
