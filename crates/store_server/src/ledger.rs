//! Routes of the stores of runs: `POST /v1/runs/RUN/METHOD` calls a method of [`Store`].
//!
//! Bodies of requests and responses are records in the format of [`levade_store::wire`]. Every
//! write carries the number of the trainer's lease in the header `x-levade-epoch`. `/v1/runs` lists
//! the runs as JSON. The method `remove` removes a run that no trainer has leased.

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use levade_http::service::read_body;
use levade_store::wire::{MEDIA_TYPE, OpenRequest, Record, WireError, decode, encode};
use levade_store::{
    Attempt, AttemptEnd, AttemptId, AttemptSlot, AttemptStart, EvalKey, Purpose, Segment, StepPlan,
    Store, StoreError, WithdrawRequest, is_run_name,
};
use serde_json::Value;

use crate::response::{ApiError, RouteResult, ok_response};
use crate::service::{Service, Shared};

/// Maximum size of a request body in bytes.
const MAX_RECORD: usize = 1 << 30;

/// Request header that contains the number of the trainer's lease.
const EPOCH_HEADER: &str = "x-levade-epoch";

/// Returns the HTTP routes of the stores of runs.
pub(crate) fn routes() -> Router<Shared> {
    Router::new()
        .route("/v1/runs", get(list_runs).post(list_runs))
        .route("/v1/runs/{run}/{method}", post(call_run_method))
}

async fn list_runs(State(service): State<Shared>) -> RouteResult {
    ok_response(&service.runs().list().await.map_err(to_typed_error)?)
}

async fn call_run_method(
    State(service): State<Shared>,
    Path((run, method)): Path<(String, String)>,
    request: Request,
) -> Result<Response, ApiError> {
    if !is_run_name(&run) {
        let text = format!("{run:?} is not the name of a run: use letters, digits, -, _ and .");
        return Err(ApiError::bad_request(text));
    }
    let (parts, body) = request.into_parts();
    let epoch = parts.headers.get(EPOCH_HEADER).and_then(|epoch| epoch.to_str().ok()?.parse().ok());
    let body = read_body(&parts.headers, body, MAX_RECORD).await?;
    let call = RunCall { service: &service, run: &run, method: &method, epoch, body: &body };
    let record = match method.as_str() {
        "open" | "heartbeat" => call.acquire_or_renew_lease().await,
        "remove" => call.remove_run().await,
        "start" | "append" | "end" | "abandon_running" | "record_attempts" | "record_step"
        | "record_eval" | "withdraw" => call.call_write().await,
        "attempt" | "last_try" | "tries" | "tasks" | "summaries" | "failures" | "step"
        | "planned_steps" | "evals" | "withdrawals" => call.call_read().await,
        _ => {
            let text = format!("there is no method {method:?} of runs");
            return Err(ApiError::new(StatusCode::NOT_FOUND, text));
        }
    };
    let record = record.map_err(to_typed_error)?;
    Ok(([(header::CONTENT_TYPE, MEDIA_TYPE)], record).into_response())
}

/// A client's call of a method of a run's store.
struct RunCall<'a> {
    service: &'a Service,
    run: &'a str,
    method: &'a str,
    /// Number of the trainer's lease. `None` if the request contains none, which is an error for
    /// writes and heartbeats.
    epoch: Option<u64>,
    body: &'a [u8],
}

impl RunCall<'_> {
    fn parse_arguments<T: Record>(&self) -> Result<T, StoreError> {
        decode(self.body).map_err(|what| self.invalid_request_error(what))
    }

    fn encode_result(&self, result: &impl Record) -> Result<Vec<u8>, StoreError> {
        encode(result).map_err(|what| self.invalid_request_error(what))
    }

    fn invalid_request_error(&self, what: String) -> StoreError {
        let key = format!("the request `{}`", self.method);
        StoreError::Unstorable { location: self.run.to_owned(), key, what }
    }

    fn epoch(&self) -> Result<u64, StoreError> {
        self.epoch.ok_or_else(|| {
            self.invalid_request_error(format!(
                "the request has no header {EPOCH_HEADER} with the number of the trainer's lease"
            ))
        })
    }

    /// Acquires the lease of the run (method `open`), or renews the lease (method `heartbeat`).
    async fn acquire_or_renew_lease(&self) -> Result<Vec<u8>, StoreError> {
        let runs = self.service.runs();
        if self.method == "open" {
            return self.encode_result(
                &runs.open(self.run, self.parse_arguments::<OpenRequest>()?).await?,
            );
        }
        runs.lock_for_write(self.run, self.epoch()?, "a heartbeat").await?;
        self.encode_result(&())
    }

    /// Removes the run and its stored data. This method needs no lease.
    async fn remove_run(&self) -> Result<Vec<u8>, StoreError> {
        self.service.runs().remove_run(self.run).await?;
        self.encode_result(&())
    }

    async fn call_write(&self) -> Result<Vec<u8>, StoreError> {
        let key = format!("a write (`{}`)", self.method);
        let locked = self.service.runs().lock_for_write(self.run, self.epoch()?, &key).await?;
        let store: &dyn Store = locked.store(self.run)?;
        match self.method {
            "start" => self.encode_result(
                &store.start_attempt(&self.parse_arguments::<AttemptStart>()?).await?,
            ),
            "append" => {
                let (id, segments): (AttemptId, Vec<Segment>) = self.parse_arguments()?;
                self.encode_result(&store.append_segments(&id, &segments).await?)
            }
            "end" => {
                let (id, end): (AttemptId, AttemptEnd) = self.parse_arguments()?;
                self.encode_result(&store.end_attempt(&id, &end).await?)
            }
            "abandon_running" => self.encode_result(&store.abandon_running().await?),
            "record_attempts" => self.encode_result(
                &store.record_attempts(&self.parse_arguments::<Vec<Attempt>>()?).await?,
            ),
            "record_step" => {
                self.encode_result(&store.record_step(&self.parse_arguments::<StepPlan>()?).await?)
            }
            "withdraw" => self
                .encode_result(&store.withdraw(&self.parse_arguments::<WithdrawRequest>()?).await?),
            _ => {
                let (key, result): (EvalKey, Value) = self.parse_arguments()?;
                self.encode_result(&store.record_eval(key, &result).await?)
            }
        }
    }

    async fn call_read(&self) -> Result<Vec<u8>, StoreError> {
        let locked = self.service.runs().lock_for_read(self.run).await?;
        let store: &dyn Store = locked.store(self.run)?;
        match self.method {
            "attempt" => {
                self.encode_result(&store.attempt(&self.parse_arguments::<AttemptId>()?).await?)
            }
            "last_try" => {
                self.encode_result(&store.last_try(&self.parse_arguments::<AttemptSlot>()?).await?)
            }
            "tries" => self
                .encode_result(&store.count_tries(&self.parse_arguments::<AttemptSlot>()?).await?),
            "tasks" => self.encode_result(&store.tasks(self.parse_arguments::<Purpose>()?).await?),
            "summaries" => {
                self.encode_result(&store.summaries(self.parse_arguments::<Purpose>()?).await?)
            }
            "failures" => {
                self.encode_result(&store.failures(self.parse_arguments::<Purpose>()?).await?)
            }
            "step" => {
                let (phase, step): (u32, u32) = self.parse_arguments()?;
                self.encode_result(&store.step_plan(phase, step).await?)
            }
            "planned_steps" => self.encode_result(&store.planned_steps().await?),
            "withdrawals" => self.encode_result(&store.withdrawals().await?),
            _ => self.encode_result(&store.evals().await?),
        }
    }
}

/// Converts a store error to an HTTP response from whose body a client restores the same error.
fn to_typed_error(error: StoreError) -> ApiError {
    let typed = serde_json::to_value(WireError::from(&error)).unwrap_or_default();
    let mut response = ApiError::from(levade_store::rollouts::RolloutError::Store(error));
    response.body["error"] = typed;
    response
}
