//! A first start of a program, to see whether it loads and calls the model.

use levade_call::Recorded;
use levade_process::{Output, telling_lines};

use super::{PATIENCE, Program};
use crate::AttemptContext;

/// What a program did when it was started once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rehearsal {
    /// Calls of the model that were answered.
    pub answered: usize,
    /// Calls that were refused, by reason.
    pub refused: Vec<String>,
    /// Exit code, beyond 128 with the signal that ended it; `None` if the program was still running and was
    /// stopped.
    pub code: Option<i32>,
    /// Lines that it printed and that tell most, on standard error if it wrote there.
    pub printed: String,
}

impl Program {
    /// Starts the program for a task as in an attempt, and stops it at the latest when `enough` is done or
    /// its time is over. Nothing is recorded.
    ///
    /// # Errors
    /// Returns a message if the roster lacks an agent.
    pub async fn rehearse(
        &self,
        context: AttemptContext,
        enough: impl Future<Output = ()>,
    ) -> Result<Rehearsal, String> {
        let opened = self.open(&context)?;
        let ended = self.execute(&context, &opened, enough).await;
        let session = opened.session;
        let Recorded { calls, refused, .. } = session.close(PATIENCE).await.0;
        self.gateway.forget(&session);
        let answered = calls.iter().filter(|call| call.error.is_none()).count();
        let refused = refused.into_keys().map(|kind| kind.to_string()).collect();
        let Output { code, stdout, stderr } = match ended {
            Ok(ended) => ended,
            // It could not be started, or its worker ended.
            Err(why) => return Ok(Rehearsal { answered, refused, code: Some(1), printed: why }),
        };
        let mut streams = [stderr, stdout].into_iter().map(|stream| telling_lines(&stream.text()));
        let printed = streams.find(|lines| !lines.is_empty()).unwrap_or_default().join("\n");
        Ok(Rehearsal { answered, refused, code, printed })
    }
}
