//! Errors of stores of rollouts.

use serde::{Deserialize, Serialize};

use crate::{Code, StoreError};

/// Reason why a call of the rollout store failed.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutError {
    /// The rollout does not exist.
    #[error("Rollout {rollout_id} not found; enqueue it first")]
    UnknownRollout {
        /// Id of the rollout.
        rollout_id: String,
    },
    /// The rollout has no such try.
    #[error("Attempt {try_id} not found for rollout {rollout_id}; lease the rollout first")]
    UnknownTry {
        /// Id of the rollout.
        rollout_id: String,
        /// Id of the try.
        try_id: String,
    },
    /// The rollout has no try, because no worker has leased it yet.
    #[error("No attempts found for rollout {rollout_id}; lease the rollout first")]
    NoTries {
        /// Id of the rollout.
        rollout_id: String,
    },
    /// The lease has ended, so a report of its worker is rejected.
    #[error(
        "the lease of try {number} of rollout {rollout_id} is lost: {reason}; stop working on it"
    )]
    Lost {
        /// Id of the rollout.
        rollout_id: String,
        /// Number of the try that the lease belongs to.
        number: u32,
        /// Event that ended the lease.
        reason: String,
    },
    /// A rollout with another task was enqueued under the key.
    #[error(
        "the key {key:?} already belongs to rollout {rollout_id}, which has another input; use another key"
    )]
    Conflict {
        /// Idempotency key.
        key: String,
        /// Id of the rollout under the key.
        rollout_id: String,
    },
    /// An argument of the call is invalid. The text names the argument and the reason.
    #[error("{0}")]
    Invalid(String),
    /// The storage backend failed.
    #[error(transparent)]
    Store(StoreError),
}

impl RolloutError {
    /// Returns the category of the error.
    pub fn code(&self) -> Code {
        match self {
            RolloutError::UnknownRollout { .. }
            | RolloutError::UnknownTry { .. }
            | RolloutError::NoTries { .. } => Code::NotFound,
            RolloutError::Lost { .. } | RolloutError::Conflict { .. } => Code::Conflict,
            RolloutError::Invalid(_) => Code::Invalid,
            RolloutError::Store(error) => error.code(),
        }
    }
}

impl From<StoreError> for RolloutError {
    /// Converts an error of the storage backend. A [`RolloutError`] that an operation wrapped as
    /// its cause is returned unchanged.
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Failed { source, code, location, action, key } => {
                match source.downcast::<RolloutError>() {
                    Ok(error) => *error,
                    Err(source) => RolloutError::Store(StoreError::Failed {
                        location,
                        action,
                        key,
                        code,
                        source,
                    }),
                }
            }
            error => RolloutError::Store(error),
        }
    }
}
