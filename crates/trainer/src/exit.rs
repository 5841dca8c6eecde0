//! Reasons to leave the training loop before all phases are finished.

use crate::TrainerError;

/// Reason why the loop over phases and steps ends early.
pub(crate) enum EarlyExit {
    /// A stop was requested through a [`StopFlag`](crate::StopFlag).
    Stopped,
    /// A failure that affects the complete run rather than a single attempt.
    Failed(TrainerError),
}

impl<E: Into<TrainerError>> From<E> for EarlyExit {
    fn from(error: E) -> Self {
        EarlyExit::Failed(error.into())
    }
}
