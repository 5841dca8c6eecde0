//! Tells why a run leaves its loop before all phases are done.

use crate::TrainerError;

/// A reason to leave the loop of phases and steps early.
pub(crate) enum Exit {
    /// A [`StopFlag`](crate::StopFlag) asked the run to stop.
    Stopped,
    /// Something broke that is not one attempt's own.
    Failed(TrainerError),
}

impl<E: Into<TrainerError>> From<E> for Exit {
    fn from(error: E) -> Self {
        Exit::Failed(error.into())
    }
}
