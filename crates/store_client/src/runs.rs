//! Lists and removes the runs of a store server.

use std::time::Duration;

use bytes::Bytes;
use levade_store::wire::{MEDIA_TYPE, RunEntry, WireError, encode};
use levade_store::{Code, StoreError, is_run_name};

use crate::ServiceOptions;
use crate::service::{CallError, ServerCall, ServiceClient};

/// Timeout for a server that does not respond. It is short, because the user waits for the command.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the runs on the store server at `url`, sorted by name.
///
/// # Errors
/// Returns an error if the URL or the key is invalid, or if the server does not respond within 10
/// seconds.
pub async fn list_runs(url: &str) -> Result<Vec<RunEntry>, StoreError> {
    let call = ServerCall {
        path: "/v1/runs".to_owned(),
        body: Bytes::from_static(b"{}"),
        content_type: "application/json",
        epoch: None,
        hold: Duration::ZERO,
        is_repeatable: true,
    };
    let body = send_request(url, url, "list", call).await?;
    serde_json::from_slice(&body).map_err(|error| {
        request_error(
            url,
            "list",
            Code::Internal,
            format!("the response is no list of runs: {error}"),
        )
    })
}

/// Removes the run `name` and its stored data from the store server at `url`.
///
/// # Errors
/// Returns [`StoreError::Leased`] if a trainer works on the run, [`StoreError::Open`] with
/// [`Code::NotFound`] if the server has no such run, and the errors of [`list_runs`].
pub async fn remove_run(url: &str, name: &str) -> Result<(), StoreError> {
    if !is_run_name(name) {
        let why = format!("{name:?} is not the name of a run: use letters, digits, -, _ and .");
        return Err(request_error(url, "remove", Code::Invalid, why));
    }
    let body = encode(&()).map_err(|why| request_error(url, "remove", Code::Internal, why))?;
    let call = ServerCall {
        path: format!("/v1/runs/{name}/remove"),
        body: body.into(),
        content_type: MEDIA_TYPE,
        epoch: None,
        hold: Duration::ZERO,
        // A repetition after a lost response reports a missing run.
        is_repeatable: false,
    };
    send_request(url, &format!("{url}/{name}"), "remove", call).await.map(drop)
}

async fn send_request(
    url: &str,
    location: &str,
    action: &'static str,
    call: ServerCall,
) -> Result<Bytes, StoreError> {
    let options = crate::read_service_options(url)?;
    let options = ServiceOptions { timeout: options.timeout.min(TIMEOUT), ..options };
    let response = ServiceClient::new(url, &options)?.call::<WireError>(call).await;
    response.map_err(|error| match error {
        CallError::Rejected(mut error) => {
            location.clone_into(&mut error.location);
            error.into()
        }
        CallError::Failed(code, why) => request_error(location, action, code, why),
    })
}

fn request_error(location: &str, action: &'static str, code: Code, why: String) -> StoreError {
    StoreError::Failed {
        location: location.to_owned(),
        action,
        key: "the runs".to_owned(),
        code,
        source: why.into(),
    }
}
