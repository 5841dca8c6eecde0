//! Sends traces to a collector: OTLP over HTTP, as compressed protobuf.

use std::io::Write as _;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::ResourceSpans;
use prost::Message;

/// Timeout for a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of characters of a response in an error message.
const MAX_EXCERPT_CHARS: usize = 300;

/// Address of a collector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorOptions {
    /// Complete URL, such as `http://127.0.0.1:4318/v1/traces`.
    pub url: String,
    /// Names and values of further headers.
    pub headers: Vec<(String, String)>,
}

impl CollectorOptions {
    /// Parses headers in the form of the variable `OTEL_EXPORTER_OTLP_HEADERS`: `name=value` pairs,
    /// separated by commas. `%2C` in a value is a comma.
    ///
    /// # Errors
    /// Returns an error if a header has no value. The error does not quote the header, because its
    /// text can be a secret.
    pub fn parse_headers(list: &str) -> Result<Vec<(String, String)>, String> {
        let pairs = list.split(',').map(str::trim).filter(|pair| !pair.is_empty());
        let parse = |pair: &str| {
            let (name, value) =
                pair.split_once('=').ok_or("a header has no value; write NAME=VALUE,NAME=VALUE")?;
            let value = value.trim().replace("%2C", ",").replace("%20", " ").replace("%3D", "=");
            Ok((name.trim().to_owned(), value))
        };
        pairs.map(parse).collect()
    }
}

/// Reason why a collector did not accept traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CollectorError {
    /// The collector is unreachable, or its status demands a retry.
    Unavailable(String),
    /// The collector rejected the traces. A retry would be rejected again.
    Rejected(String),
}

impl std::fmt::Display for CollectorError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (CollectorError::Unavailable(why) | CollectorError::Rejected(why)) = self;
        f.write_str(why)
    }
}

impl std::error::Error for CollectorError {}

/// A collector of traces.
#[derive(Debug)]
pub struct Collector {
    options: CollectorOptions,
    agent: ureq::Agent,
}

impl Collector {
    /// Creates a client of a collector. Nothing is sent yet.
    pub fn new(options: CollectorOptions) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(RESPONSE_TIMEOUT))
            .http_status_as_error(false);
        Collector { options, agent: config.build().new_agent() }
    }

    /// Sends traces in one request, and blocks until the collector has accepted them. Returns the
    /// collector's message if it dropped some of their spans.
    ///
    /// # Errors
    /// Returns an error if the collector is unavailable or rejects the request.
    pub fn send(&self, traces: Vec<ResourceSpans>) -> Result<Option<String>, CollectorError> {
        let CollectorOptions { url, headers } = &self.options;
        let request = ExportTraceServiceRequest { resource_spans: traces };
        let mut body = GzEncoder::new(Vec::new(), Compression::fast());
        // Writing to memory cannot fail.
        let _ = body.write_all(&request.encode_to_vec());
        let body = body.finish().unwrap_or_default();
        let mut request = self.agent.post(url);
        request = request.header("content-type", "application/x-protobuf");
        request = request.header("content-encoding", "gzip");
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let unavailable =
            |error: ureq::Error| CollectorError::Unavailable(format!("{url}: {error}"));
        let mut response = request.send(&body[..]).map_err(unavailable)?;
        let status = response.status().as_u16();
        let body = response.body_mut().read_to_vec().map_err(unavailable)?;
        if (200..300).contains(&status) {
            let partial = ExportTraceServiceResponse::decode(&body[..]).unwrap_or_default();
            let partial = partial.partial_success.filter(|partial| partial.rejected_spans > 0);
            return Ok(partial.map(|partial| {
                format!("{} spans rejected: {}", partial.rejected_spans, partial.error_message)
            }));
        }
        let text = String::from_utf8_lossy(&body);
        let text: String = text.chars().filter(|c| !c.is_control()).collect();
        let text: String = text.chars().take(MAX_EXCERPT_CHARS).collect();
        let why = format!("{url}: HTTP status {status}: {text}");
        // The statuses that OTLP declares as worth a retry.
        Err(match status {
            429 | 502 | 503 | 504 => CollectorError::Unavailable(why),
            _ => CollectorError::Rejected(why),
        })
    }
}
