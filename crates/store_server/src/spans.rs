//! Routes of spans, and the JSON format of spans.

use std::collections::BTreeMap;
use std::fmt::Write;

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use levade_store::rollouts::trace::Trace;
use levade_store::rollouts::{
    Json, NewSpan, PageRequest, RolloutError, Span, SpanFilter, SpanOutcome, TrySelector,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use crate::openapi::{Routes, op};
use crate::request::{
    SpansQuery, parse_body, parse_json, parse_query, parse_try_selector, read_body_bytes,
};
use crate::response::{ApiError, RouteResult, created_response, json_response, ok_response};
use crate::service::Shared;

/// Returns the HTTP routes of spans.
pub(crate) fn routes() -> Routes {
    let spans = op("List the spans of a rollout", 200, "Page<Span>");
    Routes::new("spans")
        .get("/spans", list_spans, spans.clone().query(SpansQuery::FIELDS))
        .post("/spans", add_span, op("Add a span", 201, "Span?").body("NewSpan"))
        .post("/spans/search", search_spans, spans.body("SpansQuery"))
        .post(
            "/spans/next",
            reserve_sequence_ids,
            op("Reserve sequence ids", 200, "SequenceId").body("NextSpan"),
        )
        .get(
            "/rollouts/{id}/calls",
            list_calls,
            op("Read model calls and rewards from spans", 200, "Calls")
                .query(&["attempt_id", "agent"]),
        )
}

/// Span fields that a client may omit, with their JSON defaults.
const DEFAULTS: [(&str, &str); 11] = [
    ("parent_id", "null"),
    ("status", r#"{"status_code":"UNSET","description":null}"#),
    ("attributes", "{}"),
    ("events", "[]"),
    ("links", "[]"),
    ("start_time", "null"),
    ("end_time", "null"),
    ("context", "null"),
    ("parent", "null"),
    ("resource", r#"{"attributes":{},"schema_url":""}"#),
    ("name", r#""""#),
];

#[derive(Deserialize)]
struct SpanStatus {
    #[expect(dead_code, reason = "only its form is checked")]
    status_code: StatusCodeName,
}

#[derive(Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum StatusCodeName {
    Unset,
    Ok,
    Error,
}

/// Parses a span. The store keeps the JSON text of every field as the client sent it, including
/// unknown fields.
pub(crate) fn parse_span(bytes: &[u8]) -> Result<NewSpan, ApiError> {
    let mut fields: BTreeMap<String, Json> = parse_json(bytes)?;
    for (name, default) in DEFAULTS {
        if !fields.contains_key(name)
            && let Ok(default) = RawValue::from_string(default.to_owned())
        {
            fields.insert(name.to_owned(), default);
        }
    }
    let _: SpanStatus = parse_field(&fields, "status")?;
    for (name, start) in [("attributes", '{'), ("events", '['), ("links", '['), ("resource", '{')] {
        if !fields[name].get().starts_with(start) {
            let message = format!("Input should start with {start}");
            return Err(ApiError::unprocessable("value_error", &["body", name], message));
        }
    }
    let rollout_id = parse_field(&fields, "rollout_id")?;
    let try_id = parse_field(&fields, "attempt_id")?;
    let number: i64 = parse_field(&fields, "sequence_id")?;
    for name in ["rollout_id", "attempt_id", "sequence_id"] {
        fields.remove(name);
    }
    Ok(NewSpan {
        rollout_id,
        try_id,
        number: Some(number.max(0) as u64),
        trace_id: parse_field(&fields, "trace_id")?,
        span_id: parse_field(&fields, "span_id")?,
        parent_id: parse_field(&fields, "parent_id")?,
        name: parse_field(&fields, "name")?,
        start_time: parse_field(&fields, "start_time")?,
        end_time: parse_field(&fields, "end_time")?,
        body: to_raw_value(&fields).map_err(|error| ApiError::bad_request(error.to_string()))?,
    })
}

fn parse_field<T: DeserializeOwned>(
    fields: &BTreeMap<String, Json>,
    name: &str,
) -> Result<T, ApiError> {
    let value = fields
        .get(name)
        .ok_or_else(|| ApiError::unprocessable("missing", &["body", name], "Field required"))?;
    serde_json::from_str(value.get()).map_err(|error| {
        ApiError::unprocessable("value_error", &["body", name], format!("{name}: {error}"))
    })
}

/// Appends a stored span to `out` as a JSON object.
fn write_span(out: &mut String, rollout_id: &str, try_id: &str, number: u64, body: &str) {
    let rollout_id = json!(rollout_id);
    let try_id = json!(try_id);
    let rest = body.trim_start().trim_start_matches('{');
    let separator = if rest.trim_start().starts_with('}') { "" } else { "," };
    let _ = write!(
        out,
        "{{\"rollout_id\":{rollout_id},\"attempt_id\":{try_id},\"sequence_id\":{number}{separator}{rest}"
    );
}

async fn add_span(State(service): State<Shared>, request: Request) -> RouteResult {
    let span = parse_span(&read_body_bytes(request).await?)?;
    let rollout_id = span.rollout_id.clone();
    let try_id = span.try_id.clone();
    let body = span.body.clone();
    match service.store().add_spans(vec![span]).await?.pop() {
        Some(SpanOutcome::Stored(number)) => {
            let mut text = String::with_capacity(body.get().len() + 128);
            write_span(&mut text, &rollout_id, &try_id, number, body.get());
            Ok(json_response(StatusCode::CREATED, text))
        }
        Some(SpanOutcome::UnknownRollout) => {
            Err(RolloutError::UnknownRollout { rollout_id }.into())
        }
        Some(SpanOutcome::UnknownTry) => {
            Err(RolloutError::UnknownTry { rollout_id, try_id }.into())
        }
        Some(SpanOutcome::Duplicate) | None => {
            tracing::warn!(rollout_id, try_id, "dropped a span whose id is already stored");
            created_response(&())
        }
    }
}

async fn list_spans(State(service): State<Shared>, request: Request) -> RouteResult {
    query_spans(&service, parse_query(&request)?).await
}

async fn search_spans(State(service): State<Shared>, request: Request) -> RouteResult {
    query_spans(&service, parse_body(request).await?).await
}

async fn query_spans(service: &Shared, query: SpansQuery) -> RouteResult {
    let paging = query.paging();
    let page = paging.page(Some("sequence_id"))?;
    let spans = service.checked().await?.query_spans(&query.filter()?, &page).await?;
    Ok(build_page_response(&spans.items, paging.limit, paging.offset, spans.total))
}

/// Returns a request for one page that contains all spans, sorted by their sequence numbers.
pub(crate) fn by_number() -> PageRequest {
    PageRequest { sort_by: Some("sequence_id".to_owned()), ..PageRequest::default() }
}

#[derive(Deserialize)]
struct CallsQuery {
    #[serde(default)]
    attempt_id: Option<String>,
    /// Names of the agents whose calls are returned. If empty, the calls of all agents are
    /// returned.
    #[serde(default)]
    agent: Vec<String>,
}

/// Responds with the model calls and the final reward that the spans of a try report.
async fn list_calls(
    State(service): State<Shared>,
    Path(rollout_id): Path<String>,
    request: Request,
) -> RouteResult {
    let query: CallsQuery = parse_query(&request)?;
    let store = service.checked().await?;
    if store.rollout(&rollout_id).await?.is_none() {
        return Err(RolloutError::UnknownRollout { rollout_id }.into());
    }
    let name = parse_try_selector(query.attempt_id.unwrap_or_else(|| "latest".to_owned()));
    if let TrySelector::Id(try_id) = &name {
        let tries = store.query_tries(&rollout_id, &PageRequest::default()).await?.items;
        if tries.iter().all(|of| of.id != *try_id) {
            let try_id = try_id.clone();
            return Err(RolloutError::UnknownTry { rollout_id, try_id }.into());
        }
    }
    let filter = SpanFilter { try_name: Some(name), ..SpanFilter::new(&rollout_id) };
    let spans = store.query_spans(&filter, &by_number()).await?.items;
    // Parsing a long trace takes milliseconds, so it runs on a blocking thread.
    let read = tokio::task::spawn_blocking(move || read_calls(&spans, &query.agent)).await;
    let read =
        read.map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    ok_response(&read.map_err(|error| {
        ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, format!("a span is malformed: {error}"))
    })?)
}

fn read_calls(spans: &[Span], agents: &[String]) -> serde_json::Result<Value> {
    let trace = Trace::from_spans(spans)?;
    let is_selected = |agent: Option<&str>| {
        agents.is_empty() || agent.is_some_and(|agent| agents.iter().any(|of| of == agent))
    };
    let (rewards, problem) = match trace.final_rewards() {
        Ok(rewards) => (rewards, None),
        Err(error) => (&[][..], Some(error.to_string())),
    };
    let dimensions = rewards.iter().map(|(name, value)| json!({ "name": name, "value": value }));
    Ok(json!({
        "final_reward": rewards.first().map(|(_, value)| value),
        "rewards": dimensions.collect::<Vec<_>>(),
        "problem": problem,
        "calls": trace.calls(is_selected),
    }))
}

/// Creates the response for a page of spans. The bodies of the spans are JSON already, and are not
/// parsed.
fn build_page_response(spans: &[Span], limit: i64, offset: i64, total: u64) -> Response {
    let size: usize = spans.iter().map(|span| span.body.get().len() + 128).sum();
    let mut text = String::with_capacity(size + 128);
    text.push_str("{\"items\":[");
    for (index, span) in spans.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        write_span(&mut text, &span.rollout_id, &span.try_id, span.number, span.body.get());
    }
    let _ = write!(text, "],\"limit\":{limit},\"offset\":{offset},\"total\":{total}}}");
    json_response(StatusCode::OK, text)
}

#[derive(Deserialize)]
struct NextBody {
    rollout_id: String,
    #[expect(
        dead_code,
        reason = "required by the protocol; all tries of a rollout share a counter"
    )]
    attempt_id: String,
    /// Number of consecutive sequence ids to reserve. This field is an addition to Agent
    /// Lightning's format.
    #[serde(default = "default_count")]
    count: u64,
}

fn default_count() -> u64 {
    1
}

async fn reserve_sequence_ids(State(service): State<Shared>, request: Request) -> RouteResult {
    let body: NextBody = parse_body(request).await?;
    if !(1..=1_000_000).contains(&body.count) {
        let text = format!("count is {}, but must be from 1 to 1000000", body.count);
        return Err(ApiError::bad_request(text));
    }
    let first = service.store().reserve_span_numbers(&body.rollout_id, body.count).await?;
    ok_response(&json!({ "sequence_id": first }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_round_trips_with_unknown_fields_and_defaults() {
        let text = r#"{"rollout_id":"r\"1","attempt_id":"a","sequence_id":3,"trace_id":"t","span_id":"s",
            "name":"n","attributes":{"x":1.50},"start_time":1.0,"extra":[1e400]}"#;
        let span = parse_span(text.as_bytes()).unwrap();
        assert_eq!((span.number, span.start_time, span.end_time), (Some(3), Some(1.0), None));
        let mut out = String::new();
        write_span(&mut out, &span.rollout_id, &span.try_id, 3, span.body.get());
        let fields: BTreeMap<String, Json> = serde_json::from_str(&out).unwrap();
        assert_eq!(fields["rollout_id"].get(), r#""r\"1""#);
        assert_eq!(fields["attributes"].get(), r#"{"x":1.50}"#);
        assert_eq!(fields["extra"].get(), "[1e400]");
        assert_eq!(fields["events"].get(), "[]");
    }

    #[test]
    fn parse_span_rejects_wrong_and_missing_fields() {
        for text in [
            r#"{"attempt_id":"a","sequence_id":3,"trace_id":"t","span_id":"s"}"#,
            r#"{"rollout_id":"r","attempt_id":"a","sequence_id":"x","trace_id":"t","span_id":"s"}"#,
            r#"{"rollout_id":"r","attempt_id":"a","sequence_id":3,"trace_id":"t","span_id":"s","status":{"status_code":"FINE"}}"#,
            r#"{"rollout_id":"r","attempt_id":"a","sequence_id":3,"trace_id":"t","span_id":"s","events":{}}"#,
            "[]",
            "{",
        ] {
            assert_eq!(parse_span(text.as_bytes()).unwrap_err().status, 422, "{text}");
        }
    }
}
