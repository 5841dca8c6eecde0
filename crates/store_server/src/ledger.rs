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
    Attempt, AttemptId, AttemptSlot, AttemptStart, End, EvalKey, Purpose, Segment, StepPlan, Store,
    StoreError, WithdrawRequest, is_run_name,
};
use serde_json::Value;

use crate::response::{ApiError, RouteResult, ok};
use crate::service::{Service, Shared};

/// Maximum size of a request in bytes.
const MAX_RECORD: usize = 1 << 30;

/// Header of a request with the number of the trainer's lease.
const EPOCH_HEADER: &str = "x-levade-epoch";

/// Returns the routes of the stores of runs.
pub(crate) fn routes() -> Router<Shared> {
    Router::new()
        .route("/v1/runs", get(list).post(list))
        .route("/v1/runs/{run}/{method}", post(answer))
}

async fn list(State(service): State<Shared>) -> RouteResult {
    ok(&service.runs().list().await.map_err(to_typed_error)?)
}

async fn answer(
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
    let call = Call { service: &service, run: &run, method: &method, epoch, body: &body };
    let record = match method.as_str() {
        "open" | "heartbeat" => call.lease().await,
        "remove" => call.remove().await,
        "start" | "append" | "end" | "abandon_running" | "record_attempts" | "record_step"
        | "record_eval" | "withdraw" => call.write().await,
        "attempt" | "last_try" | "tries" | "tasks" | "summaries" | "failures" | "step"
        | "planned_steps" | "evals" | "withdrawals" => call.read().await,
        _ => {
            let text = format!("there is no method {method:?} of runs");
            return Err(ApiError::new(StatusCode::NOT_FOUND, text));
        }
    };
    let record = record.map_err(to_typed_error)?;
    Ok(([(header::CONTENT_TYPE, MEDIA_TYPE)], record).into_response())
}

/// A request that calls a method of a run's store.
struct Call<'a> {
    service: &'a Service,
    run: &'a str,
    method: &'a str,
    /// Number of the trainer's lease. `None` for a read.
    epoch: Option<u64>,
    body: &'a [u8],
}

impl Call<'_> {
    fn arguments<T: Record>(&self) -> Result<T, StoreError> {
        decode(self.body).map_err(|what| self.invalid(what))
    }

    fn encode_result(&self, result: &impl Record) -> Result<Vec<u8>, StoreError> {
        encode(result).map_err(|what| self.invalid(what))
    }

    fn invalid(&self, what: String) -> StoreError {
        let key = format!("the request `{}`", self.method);
        StoreError::Unstorable { location: self.run.to_owned(), key, what }
    }

    fn epoch(&self) -> Result<u64, StoreError> {
        self.epoch.ok_or_else(|| self.invalid(format!("it has no header {EPOCH_HEADER}")))
    }

    /// Takes or renews the lease of the run.
    async fn lease(&self) -> Result<Vec<u8>, StoreError> {
        let runs = self.service.runs();
        if self.method == "open" {
            return self
                .encode_result(&runs.open(self.run, self.arguments::<OpenRequest>()?).await?);
        }
        runs.writer(self.run, self.epoch()?, "a heartbeat").await?;
        self.encode_result(&())
    }

    /// Removes the run, which needs no lease.
    async fn remove(&self) -> Result<Vec<u8>, StoreError> {
        self.service.runs().remove(self.run).await?;
        self.encode_result(&())
    }

    async fn write(&self) -> Result<Vec<u8>, StoreError> {
        let key = format!("a write (`{}`)", self.method);
        let locked = self.service.runs().writer(self.run, self.epoch()?, &key).await?;
        let store: &dyn Store = locked.store(self.run)?;
        match self.method {
            "start" => self.encode_result(&store.start_attempt(&self.arguments::<AttemptStart>()?).await?),
            "append" => {
                let (id, segments): (AttemptId, Vec<Segment>) = self.arguments()?;
                self.encode_result(&store.append_segments(&id, &segments).await?)
            }
            "end" => {
                let (id, end): (AttemptId, End) = self.arguments()?;
                self.encode_result(&store.end_attempt(&id, &end).await?)
            }
            "abandon_running" => self.encode_result(&store.abandon_running().await?),
            "record_attempts" => self
                .encode_result(&store.record_attempts(&self.arguments::<Vec<Attempt>>()?).await?),
            "record_step" => {
                self.encode_result(&store.record_step(&self.arguments::<StepPlan>()?).await?)
            }
            "withdraw" => {
                self.encode_result(&store.withdraw(&self.arguments::<WithdrawRequest>()?).await?)
            }
            _ => {
                let (key, result): (EvalKey, Value) = self.arguments()?;
                self.encode_result(&store.record_eval(key, &result).await?)
            }
        }
    }

    async fn read(&self) -> Result<Vec<u8>, StoreError> {
        let locked = self.service.runs().reader(self.run).await?;
        let store: &dyn Store = locked.store(self.run)?;
        match self.method {
            "attempt" => self.encode_result(&store.attempt(&self.arguments::<AttemptId>()?).await?),
            "last_try" => {
                self.encode_result(&store.last_try(&self.arguments::<AttemptSlot>()?).await?)
            }
            "tries" => self.encode_result(&store.count_tries(&self.arguments::<AttemptSlot>()?).await?),
            "tasks" => self.encode_result(&store.tasks(self.arguments::<Purpose>()?).await?),
            "summaries" => {
                self.encode_result(&store.summaries(self.arguments::<Purpose>()?).await?)
            }
            "failures" => self.encode_result(&store.failures(self.arguments::<Purpose>()?).await?),
            "step" => {
                let (phase, step): (u32, u32) = self.arguments()?;
                self.encode_result(&store.step_plan(phase, step).await?)
            }
            "planned_steps" => self.encode_result(&store.planned_steps().await?),
            "withdrawals" => self.encode_result(&store.withdrawals().await?),
            _ => self.encode_result(&store.evals().await?),
        }
    }
}

/// Converts an error to a response whose body a client converts back to the same error.
fn to_typed_error(error: StoreError) -> ApiError {
    let typed = serde_json::to_value(WireError::from(&error)).unwrap_or_default();
    let mut response = ApiError::from(levade_store::rollouts::RolloutError::Store(error));
    response.body["error"] = typed;
    response
}
