//! Opens stores by their location. Stores on a server are called over HTTP.
//!
//! [`open`] opens the store of a run by its [`Location`], and [`open_rollouts`] a store of
//! rollouts. Callers use the traits of `levade-store`, so they do not depend on a backend.
//! [`list_runs`] and [`remove_run`] administer a server.
//!
//! # Guarantees of the HTTP client
//! - **Every wait has a deadline.** A client waits for an unreachable server for at most
//!   `LEVADE_STORE_TIMEOUT` seconds (default 300). The error then names the URL and the last
//!   failure.
//! - **Lost responses.** A request is repeated only if the repetition has no further effect. A
//!   repeated request for leases returns the same leases, even if the server was killed in between.
//! - **Errors keep their type.** A call returns the error that the server's store returned.
//! - **Keys stay secret.** `LEVADE_STORE_KEY` is sent as a bearer token and never appears in a
//!   message. A URL with a user name or a password is rejected.
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
use levade_store::{Code, Location, MongoUrl, Store, StoreAccess, StoreError};
use levade_store_mongo::{MongoRollouts, MongoStore};

pub use rollouts::HttpRollouts;
pub use runs::{list_runs, remove_run};
pub use service::{KEY_VARIABLE, ServiceOptions, TIMEOUT_VARIABLE, Transport};
pub use store::HttpStore;

/// Opens the store of the run in the directory `run_dir`, whatever backend `location` names.
///
/// # Errors
/// Returns an error if an environment variable of [`ServiceOptions`] is invalid. Otherwise returns
/// the errors of the backend:
/// - [`Location::open_local`] for a store on this machine,
/// - [`HttpStore::open`] for a store on a server,
/// - [`MongoStore::open`] for a MongoDB database.
pub async fn open(
    location: &Location,
    run_dir: &Path,
    access: StoreAccess<'_>,
) -> Result<Arc<dyn Store>, StoreError> {
    match location {
        Location::Sqlite(_) | Location::Memory => location.open_local(run_dir, access).await,
        Location::Mongo(url) => Ok(Arc::new(MongoStore::open(url, run_dir, access).await?)),
        Location::Server { url, name } => {
            let options = read_service_options(url)?;
            let store = HttpStore::open(url, name.as_deref(), run_dir, access, &options).await?;
            Ok(Arc::new(store))
        }
    }
}

/// Opens a store of rollouts. A server uses its own clock instead of `clock`. `location` is one of:
/// - `memory:`
/// - the path of an SQLite file, with or without `sqlite:`; a missing file is created
/// - the URL of a server (`http://` or `https://`)
/// - the URL of a MongoDB database (`mongodb://`)
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
            Ok(Arc::new(HttpRollouts::connect(location, &read_service_options(location)?).await?))
        }
        Some(("mongodb" | "mongodb+srv", _)) => {
            let url: MongoUrl = location.parse().map_err(|why: String| {
                let (location, code) = ("MongoDB".to_owned(), Code::Invalid);
                StoreError::Open { location, code, source: why.into() }
            })?;
            Ok(Arc::new(MongoRollouts::open(&url).await?))
        }
        Some((scheme, _)) => Err(StoreError::Open {
            // The location after its scheme may contain a password, so the error leaves it out.
            location: format!("{scheme}://…"),
            code: Code::Invalid,
            source: "it is neither a file nor a URL with http://, https:// or mongodb://".into(),
        }),
        None => levade_store::open_rollouts(rollouts_file(location), clock).await,
    }
}

/// Returns the path in a location of rollouts that names an SQLite file: the location without the
/// prefix `sqlite:`.
pub fn rollouts_file(location: &str) -> &str {
    location.strip_prefix("sqlite:").unwrap_or(location)
}

/// Reads [`ServiceOptions`] from the environment variables. An error contains `location`.
fn read_service_options(location: &str) -> Result<ServiceOptions, StoreError> {
    ServiceOptions::from_env().map_err(|why| StoreError::Open {
        location: location.to_owned(),
        code: Code::Invalid,
        source: why.into(),
    })
}
