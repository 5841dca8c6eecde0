//! Reasons to leave the training loop before all phases are finished.

use crate::TrainerError;

/// A reason to leave the loop of phases and steps early.
pub(crate) enum Exit {
    /// A [`StopFlag`](crate::StopFlag) requested the stop.
    Stopped,
    /// A failure that is not limited to one attempt.
    Failed(TrainerError),
}

impl<E: Into<TrainerError>> From<E> for Exit {
    fn from(error: E) -> Self {
        Exit::Failed(error.into())
    }
}
