//! Routes of Agent Lightning 0.1: an agent pulls a task, reads resources and posts one report.
//!
//! A report is converted to spans of the latest try: one span for each triplet, the spans of its
//! trace, and one span with the final reward. Readers of spans therefore need no special case for
//! this version. A client sends an empty report after an exception; it ends the try as failed.
//!
//! Clients of this version neither name their try nor send heartbeats. So a lost agent is detected
//! by the timeouts of the rollout's configuration. A repeated report has no effect.

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use levade_store::rollouts::trace::{TRIPLET_REWARD, TRIPLET_SPAN};
use levade_store::rollouts::{
    Json, LeaseEnd, LeaseRequest, NewSpan, Resources, Rollout, RolloutError, Try,
};
use serde::Deserialize;
use serde_json::value::to_raw_value;
use serde_json::{Map, Value, json};

use crate::openapi::{Routes, op};
use crate::request::parse_body;
use crate::response::{ApiError, RouteResult, ok_response};
use crate::service::Shared;

/// Request header that every client of Agent Lightning 0.1 sends. A web page can send the header
/// only to servers that permit the page's origin.
const CLIENT_HEADER: &str = "x-agentlightning-client";

/// Returns the HTTP routes of Agent Lightning 0.1.
pub(crate) fn routes() -> Routes {
    Routes::new("agent-lightning-0.1")
        .get("/task", lease_task, op("Lease a task", 200, "TaskIfAny"))
        .get(
            "/resources/latest",
            get_latest_resources,
            op("Return the latest resources", 200, "Resources"),
        )
        .get("/resources/{id}", get_resources, op("Return resources", 200, "Resources"))
        .post(
            "/rollout",
            receive_report,
            op("Report the end of a task", 200, "Accepted").body("Report"),
        )
}

async fn lease_task(State(service): State<Shared>, request: Request) -> RouteResult {
    if !request.headers().contains_key(CLIENT_HEADER) {
        let text = "a request for a task needs the header X-AgentLightning-Client: true";
        return Err(ApiError::new(StatusCode::FORBIDDEN, text));
    }
    let leased = service.checked().await?.lease_rollouts(&LeaseRequest::new(1, None)).await?;
    let Some(Rollout {
        latest_try: Some(of),
        id,
        input,
        mode,
        resources_id,
        start_time,
        metadata,
        ..
    }) = leased.first()
    else {
        return ok_response(&json!({ "is_available": false, "task": null }));
    };
    ok_response(&json!({
        "is_available": true,
        "task": {
            "rollout_id": id,
            "input": input,
            "mode": mode,
            "resources_id": resources_id,
            "create_time": start_time,
            "last_claim_time": of.start_time,
            "num_claims": of.number,
            "metadata": metadata.as_ref().map_or_else(|| json!({}), |metadata| json!(metadata)),
        },
    }))
}

async fn get_latest_resources(State(service): State<Shared>) -> RouteResult {
    found_or_404(service.store().resources(None, None).await?, || {
        "No resources have been set on the server.".to_owned()
    })
}

async fn get_resources(State(service): State<Shared>, Path(id): Path<String>) -> RouteResult {
    let resources = service.store().resources(Some(&id), None).await?;
    found_or_404(resources, || format!("Resource ID '{id}' not found."))
}

fn found_or_404(resources: Option<Resources>, text: impl FnOnce() -> String) -> RouteResult {
    ok_response(&resources.ok_or_else(|| ApiError::new(StatusCode::NOT_FOUND, text()))?)
}

/// The part of a task's JSON that names its try. A client may copy this part into its report.
#[derive(Deserialize)]
struct TaskClaims {
    #[serde(default)]
    num_claims: Option<u32>,
}

#[derive(Deserialize)]
struct Triplet {
    #[serde(default)]
    prompt: Value,
    #[serde(default)]
    response: Value,
    #[serde(default)]
    reward: Option<Value>,
    #[serde(default)]
    metadata: Map<String, Value>,
}

#[derive(Deserialize)]
struct TaskReport {
    rollout_id: String,
    #[serde(default)]
    task: Option<TaskClaims>,
    #[serde(default)]
    final_reward: Option<Value>,
    #[serde(default)]
    triplets: Option<Vec<Triplet>>,
    #[serde(default)]
    trace: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    logs: Option<Json>,
    #[serde(default)]
    metadata: Option<Json>,
}

async fn receive_report(State(service): State<Shared>, request: Request) -> RouteResult {
    let report: TaskReport = parse_body(request).await?;
    let store = service.checked().await?;
    let rollout_id = report.rollout_id.clone();
    let Some(rollout) = store.rollout(&rollout_id).await? else {
        return Err(RolloutError::UnknownRollout { rollout_id }.into());
    };
    let latest = rollout
        .latest_try
        .ok_or_else(|| RolloutError::NoTries { rollout_id: rollout_id.clone() })?;
    let mut lease = latest.lease();
    if let Some(number) = report.task.as_ref().and_then(|task| task.num_claims) {
        lease.number = number;
    }
    let mut spans = Vec::new();
    if lease.number == latest.number {
        spans = report.to_spans(&latest, service.store().now())?;
    }
    let end = if spans.is_empty() { LeaseEnd::Failed } else { LeaseEnd::Succeeded };
    if !spans.is_empty() {
        store.add_spans(spans).await?;
    }
    let metadata = json!({ "logs": report.logs, "metadata": report.metadata });
    store.end_lease(&lease, end, to_raw_value(&metadata).ok()).await?;
    let message = format!("Rollout {rollout_id} received and stored.");
    ok_response(&json!({ "status": "ok", "message": message, "data": null }))
}

impl TaskReport {
    /// Converts the report to spans. The id of a span depends only on its position in the report,
    /// so that a repeated report adds no spans.
    fn to_spans(&self, of: &Try, now: f64) -> Result<Vec<NewSpan>, ApiError> {
        // Of two spans for one response, the first counts. Triplets are extracted from the trace or
        // replace it, so they precede it here.
        let mut spans = Vec::new();
        for triplet in self.triplets.iter().flatten() {
            let mut attributes = Map::new();
            for (name, side) in [("prompt", &triplet.prompt), ("response", &triplet.response)] {
                attributes.insert(format!("{name}_token_ids"), side["token_ids"].clone());
            }
            attributes.insert("gen_ai.prompt.0".to_owned(), read_raw_content(&triplet.prompt));
            attributes
                .insert("gen_ai.completion.0".to_owned(), read_raw_content(&triplet.response));
            if let Some(id) = triplet.metadata.get("response_id").filter(|id| id.is_string()) {
                attributes.insert("gen_ai.response.id".to_owned(), id.clone());
            }
            if let Some(name) = triplet.metadata.get("agent_name").filter(|name| name.is_string()) {
                attributes.insert("agent.name".to_owned(), name.clone());
            }
            if let Some(reward) = &triplet.reward {
                attributes.insert(TRIPLET_REWARD.to_owned(), reward.clone());
            }
            spans.push(new_reported_span(of, TRIPLET_SPAN, attributes, spans.len(), now));
        }
        for span in self.trace.iter().flatten() {
            spans.push(convert_sdk_span(of, span, spans.len()));
        }
        if let Some(reward) = &self.final_reward {
            let attributes = Map::from_iter([
                ("agentlightning.reward.0.name".to_owned(), json!("primary")),
                ("agentlightning.reward.0.value".to_owned(), reward.clone()),
            ]);
            spans.push(new_reported_span(
                of,
                "agentlightning.annotation",
                attributes,
                spans.len(),
                now,
            ));
        }
        Ok(spans)
    }
}

/// Creates a span for values that a client reported without a span. `index` is the position of the
/// span in the report.
pub(crate) fn new_reported_span(
    of: &Try,
    name: &str,
    attributes: Map<String, Value>,
    index: usize,
    now: f64,
) -> NewSpan {
    new_span(
        of,
        name,
        attributes,
        (format!("{:032x}", 1), format!("{:016x}", index + 1), None),
        (Some(now), Some(now)),
    )
}

/// Returns the text of the prompt or the response of a triplet: the field `raw_content` if the
/// value is an object, and the value itself otherwise.
fn read_raw_content(side: &Value) -> Value {
    match side {
        Value::Object(fields) => fields.get("raw_content").cloned().unwrap_or_default(),
        value => value.clone(),
    }
}

/// Ids of a new span: trace id, span id, and parent span id.
type Ids = (String, String, Option<String>);

fn new_span(
    of: &Try,
    name: &str,
    attributes: Map<String, Value>,
    (trace_id, span_id, parent_id): Ids,
    (start_time, end_time): (Option<f64>, Option<f64>),
) -> NewSpan {
    let body = json!({
        "trace_id": trace_id, "span_id": span_id, "parent_id": parent_id, "name": name,
        "status": { "status_code": "UNSET", "description": null },
        "attributes": attributes, "events": [], "links": [],
        "start_time": start_time, "end_time": end_time, "context": null, "parent": null,
        "resource": { "attributes": {}, "schema_url": "" },
    });
    NewSpan {
        rollout_id: of.rollout_id.clone(),
        try_id: of.id.clone(),
        number: None,
        trace_id,
        span_id,
        parent_id,
        name: name.to_owned(),
        start_time,
        end_time,
        body: to_raw_value(&body).unwrap_or_default(),
    }
}

/// Converts a span from the JSON format of OpenTelemetry's Python SDK, which writes ids as `0x…`
/// and times as ISO 8601.
fn convert_sdk_span(of: &Try, span: &Map<String, Value>, index: usize) -> NewSpan {
    let context = span.get("context").unwrap_or(&Value::Null);
    let name = span.get("name").and_then(Value::as_str).unwrap_or_default();
    let attributes = span.get("attributes").and_then(Value::as_object).cloned().unwrap_or_default();
    let ids = (
        parse_sdk_id(context.get("trace_id")).unwrap_or_else(|| format!("{:032x}", 1)),
        parse_sdk_id(context.get("span_id")).unwrap_or_else(|| format!("{:016x}", index + 1)),
        parse_sdk_id(span.get("parent_id")),
    );
    let time = |name: &str| parse_utc_time(span.get(name)?.as_str()?);
    new_span(of, name, attributes, ids, (time("start_time"), time("end_time")))
}

/// Removes the prefix `0x` from an id of OpenTelemetry's Python SDK. Returns `None` if the value is
/// not a text.
fn parse_sdk_id(value: Option<&Value>) -> Option<String> {
    value?.as_str().map(|text| text.trim_start_matches("0x").to_owned())
}

fn parse_numbers(text: &str, separator: char) -> Option<Vec<f64>> {
    text.split(separator).map(|part| part.parse().ok()).collect()
}

/// Parses a UTC time such as `2025-09-13T12:34:56.789012Z`, and returns it as a Unix timestamp in
/// seconds.
fn parse_utc_time(text: &str) -> Option<f64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let [year, month, day] = parse_numbers(date, '-')?.try_into().ok()?;
    let [hour, minute, second]: [f64; 3] = parse_numbers(time, ':')?.try_into().ok()?;
    // Days since 1970 of a year that starts in March, so that leap days are last
    // (H. Hinnant, "chrono-compatible low-level date algorithms").
    let shifted = if month <= 2.0 { year - 1.0 } else { year };
    let era = (shifted / 400.0).floor();
    let year_of_era = shifted - era * 400.0;
    let month_index = if month > 2.0 { month - 3.0 } else { month + 9.0 };
    let day_of_year = ((153.0 * month_index + 2.0) / 5.0).floor() + day - 1.0;
    let day_of_era = year_of_era * 365.0 + (year_of_era / 4.0).floor()
        - (year_of_era / 100.0).floor()
        + day_of_year;
    let days = era * 146_097.0 + day_of_era - 719_468.0;
    Some(days * 86_400.0 + hour * 3600.0 + minute * 60.0 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utc_times_parse_to_unix_seconds() {
        for (text, expected) in [
            ("1970-01-01T00:00:00.000000Z", Some(0.0)),
            ("2000-02-29T12:00:00Z", Some(951_825_600.0)),
            ("2025-09-13T12:34:56.500000Z", Some(1_757_766_896.5)),
            ("2100-03-01T00:00:00Z", Some(4_107_542_400.0)),
            ("2025-09-13 12:34:56", None),
            ("yesterday", None),
        ] {
            assert_eq!(parse_utc_time(text), expected, "{text}");
        }
    }
}
