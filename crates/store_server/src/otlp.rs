//! Route `POST /v1/traces`, which receives OpenTelemetry spans as protobuf or JSON.
//!
//! The attributes of a span, or of its resource, name the rollout and the try that the span belongs
//! to. Spans that name no try or an unknown one are reported as rejected in `partial_success`. The
//! exporter then does not resend the accepted spans.

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use levade_http::service::read_body;
use levade_store::rollouts::{Json, NewSpan, SpanOutcome};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde::Serialize;
use serde_content::{Deserializer, Number, Value as Content};
use serde_json::value::to_raw_value;
use serde_json::{Map, Value, json};

use crate::openapi::{Routes, op};
use crate::request::MAX_BODY;
use crate::service::Shared;

const ROLLOUT_ID: &str = "agentlightning.rollout_id";
const ATTEMPT_ID: &str = "agentlightning.attempt_id";
const SEQUENCE_ID: &str = "agentlightning.span_sequence_id";

/// Returns the HTTP route for traces in the OpenTelemetry protocol (OTLP).
pub(crate) fn routes() -> Routes {
    let unsupported = op("Not supported", 501, "");
    Routes::new("opentelemetry")
        .post(
            "/v1/traces",
            receive_traces,
            op("Add spans in OTLP, as protobuf or JSON", 200, "Any").body("Any"),
        )
        .post("/v1/metrics", reject_unsupported, unsupported.clone())
        .post("/v1/logs", reject_unsupported, unsupported.clone())
        .post("/v1/development/profiles", reject_unsupported, unsupported)
}

async fn reject_unsupported() -> StatusCode {
    StatusCode::NOT_IMPLEMENTED
}

/// Encoding of an OTLP request. The response uses the same encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OtlpEncoding {
    Protobuf,
    Json,
}

impl OtlpEncoding {
    fn from_content_type(content_type: &str) -> Option<Self> {
        match content_type
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .to_ascii_lowercase()
            .as_str()
        {
            "application/x-protobuf" => Some(OtlpEncoding::Protobuf),
            "application/json" => Some(OtlpEncoding::Json),
            _ => None,
        }
    }

    fn build_response(self, status: StatusCode, protobuf: Vec<u8>, json: String) -> Response {
        let (kind, body) = match self {
            OtlpEncoding::Protobuf => ("application/x-protobuf", protobuf),
            OtlpEncoding::Json => ("application/json", json.into_bytes()),
        };
        (status, [(header::CONTENT_TYPE, kind)], body).into_response()
    }

    /// Creates an error response that contains a `google.rpc.Status`, as OTLP requires.
    fn build_error_response(self, status: StatusCode, message: String) -> Response {
        let json = json!({ "message": message }).to_string();
        self.build_response(status, RpcStatus { code: 0, message }.encode_to_vec(), json)
    }

    fn decode_request(self, body: &[u8]) -> Result<ExportTraceServiceRequest, String> {
        match self {
            _ if body.is_empty() => Ok(ExportTraceServiceRequest::default()),
            OtlpEncoding::Protobuf => {
                ExportTraceServiceRequest::decode(body).map_err(|error| error.to_string())
            }
            OtlpEncoding::Json => {
                let value = serde_json::from_slice(body).map_err(|error| error.to_string())?;
                let content =
                    Deserializer::new(to_content(value)).human_readable().coerce_numbers();
                content.deserialize().map_err(|error| error.to_string())
            }
        }
    }
}

/// Converts JSON to serde content in which numbers are plain. OTLP messages have flattened fields,
/// for which `serde_json` with arbitrary precision yields no numbers.
fn to_content(value: Value) -> Content<'static> {
    match value {
        Value::Null => Content::Option(None),
        Value::Bool(value) => Content::Bool(value),
        Value::Number(number) => Content::Number(match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Number::I64(number),
            (None, Some(number)) => Number::U64(number),
            (None, None) => Number::F64(number.as_f64().unwrap_or(f64::NAN)),
        }),
        Value::String(text) => Content::String(text.into()),
        Value::Array(list) => Content::Seq(list.into_iter().map(to_content).collect()),
        Value::Object(fields) => {
            let fields = fields
                .into_iter()
                .map(|(name, value)| (Content::String(name.into()), to_content(value)));
            Content::Map(fields.collect())
        }
    }
}

/// The protobuf message `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
}

async fn receive_traces(State(service): State<Shared>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let content_type = content_type.unwrap_or_default().to_owned();
    let Some(encoding) = OtlpEncoding::from_content_type(&content_type) else {
        let message = format!(
            "Unsupported Content-Type {content_type:?}; send application/x-protobuf or application/json"
        );
        return OtlpEncoding::Protobuf.build_error_response(StatusCode::BAD_REQUEST, message);
    };
    let body = match read_body(&parts.headers, body, MAX_BODY).await {
        Ok(body) => body,
        Err(rejection) => {
            return encoding.build_error_response(rejection.status, rejection.message);
        }
    };
    // Decoding a large body takes milliseconds, so it runs on a blocking thread.
    let decoded = tokio::task::spawn_blocking(move || decode_spans(encoding, &body)).await;
    let (spans, unnamed) = match decoded {
        Ok(Ok(decoded)) => decoded,
        Ok(Err(why)) => {
            let message = format!("Unable to parse OTLP payload: {why}");
            return encoding.build_error_response(StatusCode::BAD_REQUEST, message);
        }
        Err(error) => {
            return encoding
                .build_error_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
        }
    };
    if spans.is_empty() && unnamed == 0 {
        return encoding.build_response(StatusCode::OK, Vec::new(), "{}".to_owned());
    }
    match service.store().add_spans(spans).await {
        Ok(outcomes) => build_success_response(encoding, &outcomes, unnamed),
        // The exporter sends all spans again. The spans that are stored by then are ignored.
        Err(error) => {
            encoding.build_error_response(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
        }
    }
}

fn build_success_response(
    encoding: OtlpEncoding,
    outcomes: &[SpanOutcome],
    unnamed: usize,
) -> Response {
    let unknown = outcomes
        .iter()
        .filter(|of| matches!(of, SpanOutcome::UnknownRollout | SpanOutcome::UnknownTry))
        .count();
    let rejected = unnamed + unknown;
    if rejected == 0 {
        return encoding.build_response(StatusCode::OK, Vec::new(), "{}".to_owned());
    }
    let message = format!(
        "{unnamed} spans have no attributes {ROLLOUT_ID} and {ATTEMPT_ID}, and {unknown} name an unknown rollout or attempt"
    );
    tracing::warn!(unnamed, unknown, "rejected spans");
    let response = ExportTraceServiceResponse {
        partial_success: Some(ExportTracePartialSuccess {
            rejected_spans: rejected as i64,
            error_message: message,
        }),
    };
    let json = serde_json::to_string(&response).unwrap_or_else(|_| "{}".to_owned());
    encoding.build_response(StatusCode::OK, response.encode_to_vec(), json)
}

/// Decodes the body of an OTLP request. Returns its spans, and the number of spans that name no
/// try.
fn decode_spans(encoding: OtlpEncoding, body: &Bytes) -> Result<(Vec<NewSpan>, usize), String> {
    let request = encoding.decode_request(body)?;
    let mut spans = Vec::new();
    let mut unnamed = 0;
    for of_resource in request.resource_spans {
        let attributes = of_resource.resource.map(|resource| to_json_object(&resource.attributes));
        let attributes = attributes.unwrap_or_default();
        let resource = json!({ "attributes": attributes, "schema_url": of_resource.schema_url });
        let resource = to_raw_value(&resource).map_err(|error| error.to_string())?;
        for span in of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            match convert_span(&span, &attributes, &resource) {
                Some(span) => spans.push(span),
                None => unnamed += 1,
            }
        }
    }
    Ok((spans, unnamed))
}

/// JSON body of a stored span, in Agent Lightning's format. It borrows the values that all spans of
/// a resource share.
#[derive(Serialize)]
struct SpanBody<'a> {
    trace_id: &'a str,
    span_id: &'a str,
    parent_id: Option<&'a str>,
    name: &'a str,
    status: SpanStatus<'a>,
    attributes: &'a Map<String, Value>,
    events: Vec<SpanEvent<'a>>,
    links: Vec<SpanLink>,
    start_time: Option<f64>,
    end_time: Option<f64>,
    context: SpanContext,
    parent: (),
    resource: &'a Json,
}

#[derive(Serialize)]
struct SpanStatus<'a> {
    status_code: &'a str,
    description: Option<&'a String>,
}

#[derive(Serialize)]
struct SpanEvent<'a> {
    name: &'a str,
    attributes: Map<String, Value>,
    timestamp: Option<f64>,
}

#[derive(Serialize)]
struct SpanLink {
    context: SpanContext,
    attributes: Option<Map<String, Value>>,
}

#[derive(Serialize)]
struct SpanContext {
    trace_id: String,
    span_id: String,
    is_remote: bool,
    trace_state: Map<String, Value>,
}

impl SpanContext {
    fn new(trace_id: &str, span_id: &str) -> Self {
        let (trace_id, span_id) = (trace_id.to_owned(), span_id.to_owned());
        SpanContext { trace_id, span_id, is_remote: false, trace_state: Map::new() }
    }
}

/// Returns the attribute `name` of a span as text, or the attribute of its resource if the span has
/// none. Null counts as absent.
fn find_attribute_text(
    name: &str,
    of_span: &Map<String, Value>,
    of_resource: &Map<String, Value>,
) -> Option<String> {
    let mut values = [of_span, of_resource].into_iter().filter_map(|of| of.get(name));
    let value = values.find(|value| !value.is_null())?;
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// Converts an OTLP span to Agent Lightning's format. Returns `None` if neither the span nor its
/// resource names a try.
fn convert_span(span: &Span, of_resource: &Map<String, Value>, resource: &Json) -> Option<NewSpan> {
    let attributes = to_json_object(&span.attributes);
    let rollout_id = find_attribute_text(ROLLOUT_ID, &attributes, of_resource)?;
    let try_id = find_attribute_text(ATTEMPT_ID, &attributes, of_resource)?;
    // For a missing, negative or malformed number, the store assigns the next one.
    let number = find_attribute_text(SEQUENCE_ID, &attributes, of_resource)
        .and_then(|text| text.trim().parse::<u64>().ok());
    let trace_id = to_hex(&span.trace_id, 16);
    let span_id = to_hex(&span.span_id, 8);
    let parent_id = (!span.parent_span_id.is_empty()).then(|| to_hex(&span.parent_span_id, 8));
    let start_time = to_seconds(span.start_time_unix_nano);
    let end_time = to_seconds(span.end_time_unix_nano);
    let code = match span.status.as_ref().map_or(0, |status| status.code) {
        1 => "OK",
        2 => "ERROR",
        _ => "UNSET",
    };
    let description =
        span.status.as_ref().map(|status| &status.message).filter(|text| !text.is_empty());
    let events = span.events.iter().map(|event| SpanEvent {
        name: &event.name,
        attributes: to_json_object(&event.attributes),
        timestamp: to_seconds(event.time_unix_nano),
    });
    let links = span.links.iter().map(|link| SpanLink {
        context: SpanContext::new(&to_hex(&link.trace_id, 16), &to_hex(&link.span_id, 8)),
        attributes: (!link.attributes.is_empty()).then(|| to_json_object(&link.attributes)),
    });
    let body = to_raw_value(&SpanBody {
        trace_id: &trace_id,
        span_id: &span_id,
        parent_id: parent_id.as_deref(),
        name: &span.name,
        status: SpanStatus { status_code: code, description },
        attributes: &attributes,
        events: events.collect(),
        links: links.collect(),
        start_time,
        end_time,
        context: SpanContext::new(&trace_id, &span_id),
        parent: (),
        resource,
    });
    let body = body.ok()?;
    let name = span.name.clone();
    Some(NewSpan {
        rollout_id,
        try_id,
        number,
        trace_id,
        span_id,
        parent_id,
        name,
        start_time,
        end_time,
        body,
    })
}

/// Returns an identifier in hexadecimal, padded to at least `bytes` bytes.
fn to_hex(id: &[u8], bytes: usize) -> String {
    let mut text = "00".repeat(bytes.saturating_sub(id.len()));
    for byte in id {
        for digit in [byte >> 4, byte & 15] {
            text.extend(char::from_digit(u32::from(digit), 16));
        }
    }
    text
}

/// Converts a timestamp from nanoseconds to seconds. 0 means that the time is unknown, and yields
/// `None`.
fn to_seconds(nanoseconds: u64) -> Option<f64> {
    (nanoseconds != 0).then_some(nanoseconds as f64 / 1e9)
}

fn to_json_object(attributes: &[KeyValue]) -> Map<String, Value> {
    attributes.iter().map(|of| (of.key.clone(), to_json_value(of.value.as_ref()))).collect()
}

fn to_json_value(value: Option<&AnyValue>) -> Value {
    match value.and_then(|value| value.value.as_ref()) {
        Some(Any::StringValue(text)) => json!(text),
        Some(Any::BoolValue(value)) => json!(value),
        Some(Any::IntValue(number)) => json!(number),
        // JSON cannot represent infinities and NaN.
        Some(Any::DoubleValue(number)) if number.is_finite() => json!(number),
        Some(Any::DoubleValue(number)) => json!(number.to_string()),
        Some(Any::ArrayValue(list)) => {
            list.values.iter().map(|value| to_json_value(Some(value))).collect::<Vec<_>>().into()
        }
        Some(Any::KvlistValue(list)) => to_json_object(&list.values).into(),
        Some(Any::BytesValue(bytes)) => json!(to_hex(bytes, 0)),
        Some(Any::StringValueStrindex(_)) | None => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the OTLP specification (examples/trace.json), with the names of a try.
    const JSON: &str = r#"{"resourceSpans":[{"resource":{"attributes":[
        {"key":"agentlightning.rollout_id","value":{"stringValue":"ro-1"}},
        {"key":"agentlightning.attempt_id","value":{"stringValue":"at-1"}}]},
        "scopeSpans":[{"scope":{"name":"my.library"},"spans":[
        {"traceId":"5B8EFFF798038103D269B633813FC60C","spanId":"EEE19B7EC3C1B174","parentSpanId":"EEE19B7EC3C1B173",
         "name":"I'm a server span","startTimeUnixNano":"1544712660000000000","endTimeUnixNano":"1544712661500000000",
         "kind":2,"status":{"code":2,"message":"no"},"attributes":[{"key":"n","value":{"intValue":"7"}},
         {"key":"agentlightning.span_sequence_id","value":{"stringValue":"12"}},
         {"key":"list","value":{"arrayValue":{"values":[{"doubleValue":0.5},{"boolValue":true}]}}}]},
        {"traceId":"5B8EFFF798038103D269B633813FC60C","spanId":"EEE19B7EC3C1B175","name":"x",
         "attributes":[{"key":"agentlightning.attempt_id","value":{"stringValue":"at-2"}},
         {"key":"agentlightning.span_sequence_id","value":{"intValue":"-1"}}]}]}]},
        {"scopeSpans":[{"spans":[{"name":"unnamed"}]}]}]}"#;

    #[test]
    fn protobuf_and_json_traces_decode_to_equal_spans() {
        let (spans, unnamed) =
            decode_spans(OtlpEncoding::Json, &Bytes::from_static(JSON.as_bytes())).unwrap();
        assert_eq!((spans.len(), unnamed), (2, 1));
        let first = &spans[0];
        assert_eq!((first.try_id.as_str(), first.number), ("at-1", Some(12)));
        assert_eq!(first.trace_id, "5b8efff798038103d269b633813fc60c");
        assert_eq!(
            (first.start_time, first.end_time),
            (Some(1_544_712_660.0), Some(1_544_712_661.5))
        );
        let body: Value = serde_json::from_str(first.body.get()).unwrap();
        assert_eq!(body["attributes"]["list"], json!([0.5, true]));
        assert_eq!(body["status"], json!({ "status_code": "ERROR", "description": "no" }));
        let second = &spans[1];
        assert_eq!(
            (second.try_id.as_str(), second.number, second.start_time),
            ("at-2", None, None)
        );
        assert_eq!(second.parent_id, None);
        let protobuf = OtlpEncoding::Json.decode_request(JSON.as_bytes()).unwrap().encode_to_vec();
        let (again, _) = decode_spans(OtlpEncoding::Protobuf, &protobuf.into()).unwrap();
        assert_eq!(again[0].body.get(), first.body.get());
    }

    #[test]
    fn malformed_trace_bodies_are_rejected() {
        for encoding in [OtlpEncoding::Protobuf, OtlpEncoding::Json] {
            assert!(decode_spans(encoding, &Bytes::from_static(b"\xff\xff\xff")).is_err());
            assert_eq!(decode_spans(encoding, &Bytes::new()).unwrap().0.len(), 0);
        }
        assert_eq!(
            OtlpEncoding::from_content_type("Application/JSON; charset=utf-8"),
            Some(OtlpEncoding::Json)
        );
        assert_eq!(OtlpEncoding::from_content_type("text/plain"), None);
    }
}
