//! Opens stores by their location, and calls those of a server over HTTP.
//!
//! [`open`] opens the store of a run by its [`Location`], and [`open_rollouts`] a store of
//! rollouts. Callers use the traits of `levade-store` and know no backend. [`list_runs`] and
//! [`remove_run`] are for the people who keep a server.
//!
//! # Guarantees of the HTTP client
//! - **Every wait has a deadline.** A server that cannot be reached is waited for, at most for
//!   `LEVADE_STORE_TIMEOUT` seconds (default 300). The error names the URL and the last failure.
//! - **Lost responses.** A request is repeated only if that has no further effect. A repeated
//!   request for leases returns the same leases, even if the server was killed in between.
//! - **Errors keep their type**: they are those of the server's store.
//! - **Keys stay secret.** `LEVADE_STORE_KEY` is sent as a bearer token, and appears in no message.
//!   A URL with a user name or a password is rejected.
//! - **One trainer per run.** A store that was opened for writing has the lease of its run. After
//!   another trainer has resumed the run, every write returns [`StoreError::Fenced`].
//!
//! Out of scope: the server, which is `levade-store-server`, and MongoDB, which is
//! `levade-store-mongo`.

mod rollouts;
mod runs;
mod service;
mod store;
pub mod worker;

use std::path::Path;
use std::sync::Arc;

use levade_store::rollouts::{Clock, Rollouts};
use levade_store::{Access, Code, Location, MongoUrl, Store, StoreError};
use levade_store_mongo::{MongoRollouts, MongoStore};

pub use rollouts::HttpRollouts;
pub use runs::{list_runs, remove_run};
pub use service::{KEY_VARIABLE, ServiceOptions, TIMEOUT_VARIABLE, Transport};
pub use store::HttpStore;

/// Opens the store of the run in the directory `run_dir`.
///
/// # Errors
/// Returns the errors of [`Location::open_local`] for a store of this machine, the errors of
/// [`HttpStore::open`] for a store on a server, those of [`MongoStore::open`] for a MongoDB
/// database, and an error if an environment variable of [`ServiceOptions`] is invalid.
pub async fn open(
    location: &Location,
    run_dir: &Path,
    access: Access<'_>,
) -> Result<Arc<dyn Store>, StoreError> {
    match location {
        Location::Sqlite(_) | Location::Memory => location.open_local(run_dir, access).await,
        Location::Mongo(url) => Ok(Arc::new(MongoStore::open(url, run_dir, access).await?)),
        Location::Server { url, name } => {
            let options = options(url)?;
            let store = HttpStore::open(url, name.as_deref(), run_dir, access, &options).await?;
            Ok(Arc::new(store))
        }
    }
}

/// Opens a store of rollouts: `memory:`, the path of an SQLite file, with or without `sqlite:`,
/// which is created if it does not exist, the URL of a server (`http://` or `https://`), or that
/// of a MongoDB database (`mongodb://`). A server uses its own clock instead of `clock`.
///
/// # Errors
/// Returns the errors of [`levade_store::open_rollouts`], of [`HttpRollouts::connect`] and of
/// [`MongoRollouts::open`], and an error if an environment variable of [`ServiceOptions`] is
/// invalid.
pub async fn open_rollouts(
    location: &str,
    clock: Arc<dyn Clock>,
) -> Result<Arc<dyn Rollouts>, StoreError> {
    match location.split_once("://") {
        Some(("http" | "https", _)) => {
            Ok(Arc::new(HttpRollouts::connect(location, &options(location)?).await?))
        }
        Some(("mongodb" | "mongodb+srv", _)) => {
            let url: MongoUrl = location.parse().map_err(|why: String| {
                let (location, code) = ("MongoDB".to_owned(), Code::Invalid);
                StoreError::Open { location, code, source: why.into() }
            })?;
            Ok(Arc::new(MongoRollouts::open(&url).await?))
        }
        Some((scheme, _)) => Err(StoreError::Open {
            // The rest may contain a password.
            location: format!("{scheme}://…"),
            code: Code::Invalid,
            source: "it is neither a file nor a URL with http://, https:// or mongodb://".into(),
        }),
        None => levade_store::open_rollouts(rollouts_file(location), clock).await,
    }
}

/// Returns the path of a file of rollouts, which may be written like the store of a run.
pub fn rollouts_file(location: &str) -> &str {
    location.strip_prefix("sqlite:").unwrap_or(location)
}

/// Reads the options of the environment.
fn options(location: &str) -> Result<ServiceOptions, StoreError> {
    ServiceOptions::from_env().map_err(|why| StoreError::Open {
        location: location.to_owned(),
        code: Code::Invalid,
        source: why.into(),
    })
}
