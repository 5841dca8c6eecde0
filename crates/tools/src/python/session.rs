//! A session of Python tools for one attempt.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use levade_process::{Affinity, Pool, Request, Worker, WorkerError, describe_exit};
use levade_text::{ContentPart, ToolSpec};
use serde_json::{Map, Value, json};

use super::tool_schemas::ToolSchemas;
use crate::{CallError, Permit, Session, ToolError, ToolOutput};

/// Counter that makes the session names in workers unique within this process.
static SESSIONS: AtomicU64 = AtomicU64::new(0);

/// Instances of Python tool classes for one attempt, with the worker that holds them.
pub(super) struct PinnedInstances {
    worker: Affinity,
    session: String,
    is_closed: bool,
    /// Text that the instances add to the prompt; `None` if they add no text.
    pub opening: Option<String>,
}

impl PinnedInstances {
    /// Creates the instances of an attempt's tool classes in `worker`.
    ///
    /// # Errors
    /// Returns an error message if an instance cannot be created. The other instances are then
    /// released.
    pub async fn open(worker: &Arc<Worker>, attempt: &str, task: Value) -> Result<Self, String> {
        let session = next_session(attempt);
        let worker = worker.affinity();
        // From here on the session is closed on every exit, including cancellation.
        let mut pinned = PinnedInstances { worker, session, is_closed: false, opening: None };
        let opened = pinned
            .send_request("open", "open", |order| order["task"] = task)
            .await
            .and_then(check_response);
        match opened {
            Ok(response) => {
                let opening = response["opening"].as_str().filter(|text| !text.trim().is_empty());
                pinned.opening = opening.map(str::to_owned);
                Ok(pinned)
            }
            Err(why) => {
                pinned.is_closed = true;
                Err(why)
            }
        }
    }

    async fn send_request(
        &self,
        label: &str,
        verb: &str,
        more: impl FnOnce(&mut Value),
    ) -> Result<Value, String> {
        let mut order = json!({ "do": verb, "session": self.session });
        more(&mut order);
        self.worker.request(Request::new(label, order)).await.map_err(describe_error)
    }
}

impl Drop for PinnedInstances {
    fn drop(&mut self) {
        if !self.is_closed {
            self.worker
                .notify(Request::new("close", json!({ "do": "close", "session": self.session })));
        }
    }
}

/// Session of Python tools for one attempt.
pub(super) struct PythonSession {
    pub toolbox: String,
    pub pool: Arc<Pool>,
    pub schemas: Arc<ToolSchemas>,
    pub pinned: Option<PinnedInstances>,
}

impl PythonSession {
    /// Returns why the instances of the attempt are lost, or `None` if they are available or the
    /// attempt has none.
    fn lost_state(&self) -> Option<String> {
        let why = describe_error(self.pinned.as_ref()?.worker.error()?);
        Some(format!("the state of this attempt is lost: {why}"))
    }
}

#[async_trait]
impl Session for PythonSession {
    fn specs(&self) -> Vec<ToolSpec> {
        self.schemas.specs()
    }

    fn opening(&self) -> Option<String> {
        self.pinned.as_ref()?.opening.clone()
    }

    fn can_run_parallel(&self, tool: &str) -> bool {
        !self.schemas.is_stateful(tool)
    }

    async fn admit(&self, tool: &str) -> Permit {
        if self.schemas.is_stateful(tool) && self.lost_state().is_some() {
            return Permit::default();
        }
        let mut permit = Permit::default();
        if let Some(worker_permit) = self.pool.acquire_permit().await {
            permit.add(worker_permit);
        }
        // If no worker is available, the call returns the error.
        let _ = self.pool.slot().await;
        permit
    }

    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let arguments = match self.schemas.arguments(tool).map(|schema| schema.validate(arguments))
        {
            Some(Ok(checked)) => checked,
            Some(Err(why)) => return ToolOutput::error(CallError::BadArguments, why),
            None => arguments.clone(),
        };
        let order = json!({ "do": "call", "tool": tool, "arguments": arguments });
        let response = match &self.pinned {
            Some(pinned) if self.schemas.is_stateful(tool) => pinned
                .send_request(tool, "call", |order| {
                    order["tool"] = json!(tool);
                    order["arguments"] = json!(arguments);
                })
                .await
                .map_err(|why| self.lost_state().unwrap_or(why)),
            _ => match self.pool.slot().await {
                Ok(slot) => {
                    slot.send(Request::new(tool, order)).response().await.map_err(describe_error)
                }
                Err(error) => Err(describe_error(error)),
            },
        };
        match response {
            Ok(response) => output(&response),
            Err(why) => ToolOutput::error(CallError::Unavailable, why),
        }
    }

    async fn scorer_input(&mut self) -> Result<Map<String, Value>, ToolError> {
        let Some(pinned) = &self.pinned else { return Ok(Map::new()) };
        let found =
            pinned.send_request("evidence", "evidence", |_| {}).await.and_then(check_response);
        match found.map(|mut found| found["found"].take()) {
            Ok(Value::Object(found)) => Ok(found),
            Ok(_) => Ok(Map::new()),
            Err(why) => {
                let why = self.lost_state().unwrap_or(why);
                Err(ToolError::ScorerInput { tool: self.toolbox.clone(), why })
            }
        }
    }

    async fn close(&mut self) -> Result<(), ToolError> {
        let Some(mut pinned) = self.pinned.take() else { return Ok(()) };
        let closed = pinned.send_request("close", "close", |_| {}).await.and_then(check_response);
        pinned.is_closed = true;
        closed.map(drop).map_err(|why| ToolError::Close { tool: self.toolbox.clone(), why })
    }
}

/// Returns a new name for a session in a worker, which is unique within this process.
pub(super) fn next_session(attempt: &str) -> String {
    format!("{attempt}.{}", SESSIONS.fetch_add(1, Ordering::Relaxed))
}

/// Describes an error of a worker to the model.
pub(super) fn describe_error(error: WorkerError) -> String {
    match error {
        WorkerError::Exited { code, last_line } => {
            let last = last_line.unwrap_or_else(|| "it printed nothing".into());
            format!("the Python process ended ({}): {last}", describe_exit(code))
        }
        error => error.to_string(),
    }
}

/// Returns the response of a worker. If it is an error, returns its error message as `Err`.
pub(super) fn check_response(response: Value) -> Result<Value, String> {
    match response["error"].as_str() {
        Some(_) => Err(response["text"].as_str().unwrap_or_default().to_owned()),
        None => Ok(response),
    }
}

/// Converts a worker's response to a call into a tool result.
fn output(response: &Value) -> ToolOutput {
    let text = || response["text"].as_str().unwrap_or_default();
    match response["error"].as_str() {
        Some("arguments") => return ToolOutput::error(CallError::BadArguments, text()),
        Some(_) => return ToolOutput::error(CallError::Failed, text()),
        None => {}
    }
    let parts = response["parts"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|part| match (part["text"].as_str(), part) {
            (Some(text), _) => Some(ContentPart::Text(text.to_owned())),
            (None, Value::Object(part)) => Some(ContentPart::Other(part.clone())),
            _ => None,
        })
        .collect();
    let metrics = response["metrics"].as_object().into_iter().flatten();
    let metrics: BTreeMap<String, f64> =
        metrics.filter_map(|(name, value)| Some((name.clone(), parse_number(value)?))).collect();
    ToolOutput {
        parts,
        reward: parse_number(&response["reward"]),
        metrics,
        ..ToolOutput::default()
    }
}

/// Parses a number from a worker. Workers send non-finite numbers as strings.
pub(super) fn parse_number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}
