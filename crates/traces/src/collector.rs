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

/// Timeout for a response. MLflow's server needs up to a second per attempt on a busy machine.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of characters of a response that an error message contains.
const MAX_EXCERPT_CHARS: usize = 300;

/// Address and headers of an OpenTelemetry collector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorOptions {
    /// Complete URL of the collector, such as `http://127.0.0.1:4318/v1/traces`.
    pub url: String,
    /// Names and values of additional request headers.
    pub headers: Vec<(String, String)>,
}

impl CollectorOptions {
    /// Parses request headers in the format of the variable `OTEL_EXPORTER_OTLP_HEADERS`:
    /// `name=value` pairs, separated by commas. `%2C` in a value is a comma.
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

/// Client of an OpenTelemetry collector, which receives traces.
#[derive(Debug)]
pub struct Collector {
    options: CollectorOptions,
    timeout: Duration,
    agent: ureq::Agent,
    /// Maximum number of traces in a request. It is halved whenever a request exceeds the timeout.
    max_traces: usize,
}

/// Result of a request that a collector has accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AcceptedTraces {
    /// Number of traces that were sent. At least 1, unless there were no traces to send.
    pub(crate) count: usize,
    /// Message of the collector if it dropped some of the traces' spans. `None` if it accepted all
    /// spans.
    pub(crate) dropped: Option<String>,
}

/// Reason why a request to a collector failed.
enum RequestError {
    /// The collector did not respond within the timeout.
    TimedOut,
    Collector(CollectorError),
}

impl Collector {
    /// Creates a client of a collector, without connecting to it.
    pub fn new(options: CollectorOptions) -> Self {
        Collector::with_timeout(options, RESPONSE_TIMEOUT)
    }

    /// Creates a client of a collector with a timeout for its responses.
    pub(crate) fn with_timeout(options: CollectorOptions, timeout: Duration) -> Self {
        let config =
            ureq::Agent::config_builder().timeout_global(Some(timeout)).http_status_as_error(false);
        let agent = config.build().new_agent();
        Collector { options, timeout, agent, max_traces: usize::MAX }
    }

    /// Sends the first of `traces` in one request, and blocks until the collector has accepted
    /// them. If the collector is too slow for them, the next request contains half as many traces,
    /// and so on. Later calls start with the reduced number.
    ///
    /// # Errors
    /// Returns an error if the collector is unavailable, rejects the request, or is too slow for a
    /// single trace.
    pub(crate) fn send(
        &mut self,
        traces: &[ResourceSpans],
    ) -> Result<AcceptedTraces, CollectorError> {
        loop {
            let count = traces.len().min(self.max_traces);
            match self.request(traces[..count].to_vec()) {
                Ok(dropped) => return Ok(AcceptedTraces { count, dropped }),
                Err(RequestError::TimedOut) if count > 1 => self.max_traces = count / 2,
                Err(RequestError::TimedOut) => {
                    let CollectorOptions { url, .. } = &self.options;
                    return Err(CollectorError::Unavailable(format!(
                        "{url}: no response to the trace of one attempt within {:?}; check the \
                         collector, or try again when it is less busy",
                        self.timeout
                    )));
                }
                Err(RequestError::Collector(error)) => return Err(error),
            }
        }
    }

    /// Sends all traces, in as many requests as the collector needs. If the collector drops some of
    /// the spans, returns the collector's message without sending the remaining traces.
    ///
    /// # Errors
    /// Returns an error if the collector is unavailable, rejects a request, or is too slow for a
    /// single trace. The collector may have accepted some of the traces before.
    pub fn send_all(
        &mut self,
        mut traces: &[ResourceSpans],
    ) -> Result<Option<String>, CollectorError> {
        while !traces.is_empty() {
            let AcceptedTraces { count, dropped } = self.send(traces)?;
            if dropped.is_some() {
                return Ok(dropped);
            }
            traces = &traces[count..];
        }
        Ok(None)
    }

    /// Sends traces in one request. Returns the collector's message if it dropped some spans,
    /// otherwise `None`.
    fn request(&self, traces: Vec<ResourceSpans>) -> Result<Option<String>, RequestError> {
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
        let unavailable = |error: ureq::Error| match error {
            ureq::Error::Timeout(_) => RequestError::TimedOut,
            error => {
                RequestError::Collector(CollectorError::Unavailable(format!("{url}: {error}")))
            }
        };
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
        // These are the statuses for which OTLP recommends a retry.
        Err(RequestError::Collector(match status {
            429 | 502 | 503 | 504 => CollectorError::Unavailable(why),
            _ => CollectorError::Rejected(why),
        }))
    }
}
