//! Opens stores by their location, and calls those of a server over HTTP.
//!
//! [`open_rollouts`] opens a store of rollouts: `memory:`, the path of an SQLite file, or the URL of
//! `levade store serve`. Callers use the traits of `levade-store` and know no backend.
//!
//! # Guarantees of the HTTP client
//! - **Every wait has a deadline.** A server that cannot be reached is waited for, at most for
//!   `LEVADE_STORE_TIMEOUT` seconds (default 300); the error names the URL and the last failure.
//! - **Lost responses.** A request is repeated only if that has no further effect. A repeated request
//!   for leases returns the same leases, also after the server was killed and restarted.
//! - **Errors keep their type**: [`RolloutError`] and [`StoreError`] are those of the server's store.
//! - **Keys stay secret.** `LEVADE_STORE_KEY` is sent as a bearer token, and appears in no message. A
//!   URL with a user name or a password is rejected.
//!
//! Out of scope: the server, which is `levade-store-server`.
//!
//! [`RolloutError`]: levade_store::rollouts::RolloutError

mod rollouts;
mod service;

use std::sync::Arc;

use levade_store::rollouts::{Clock, Rollouts};
use levade_store::{Code, StoreError};

pub use rollouts::HttpRollouts;
pub use service::{KEY_VARIABLE, ServiceOptions, TIMEOUT_VARIABLE};

/// Opens a store of rollouts: `memory:`, the path of an SQLite file, which is created if it does not
/// exist, or the URL of a server (`http://` or `https://`). A server uses its own clock instead of
/// `clock`.
///
/// # Errors
/// Returns the errors of [`levade_store::open_rollouts`] and of [`HttpRollouts::connect`], and an
/// error if an environment variable of [`ServiceOptions`] is invalid.
pub async fn open_rollouts(
    location: &str,
    clock: Arc<dyn Clock>,
) -> Result<Arc<dyn Rollouts>, StoreError> {
    match location.split_once("://") {
        Some(("http" | "https", _)) => {
            Ok(Arc::new(HttpRollouts::connect(location, &options(location)?).await?))
        }
        _ => levade_store::open_rollouts(location, clock).await,
    }
}

/// Reads the options of the environment.
fn options(location: &str) -> Result<ServiceOptions, StoreError> {
    ServiceOptions::from_env().map_err(|why| StoreError::Open {
        location: location.to_owned(),
        code: Code::Invalid,
        source: why.into(),
    })
}

/// Returns a random text of 32 hexadecimal digits.
fn random_id(location: &str) -> Result<String, StoreError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| StoreError::Open {
        location: location.to_owned(),
        code: Code::Unavailable,
        source: error.to_string().into(),
    })?;
    Ok(format!("{:032x}", u128::from_be_bytes(random)))
}
