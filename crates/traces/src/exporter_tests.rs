use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

use flate2::read::GzDecoder;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;

use super::*;
use crate::collector::CollectorOptions;
use crate::spans::TraceOptions;
use crate::testing::{STARTED_AT, attempt, chats};

/// A collector that responds with these statuses, then with 200. For the status 0, it sends nothing
/// until the client closes the connection. It sends the names of the spans of each accepted
/// request, and the value of the header `x-key`.
fn collector(mut statuses: Vec<u16>) -> (String, Receiver<(Vec<String>, String)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1/traces", listener.local_addr().unwrap());
    let (sender, received) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let status = if statuses.is_empty() { 200 } else { statuses.remove(0) };
            let request = serve(stream.unwrap(), status);
            if status == 200 && sender.send(request).is_err() {
                return;
            }
        }
    });
    (url, received)
}

fn serve(mut stream: TcpStream, status: u16) -> (Vec<String>, String) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut length, mut key) = (0, String::new());
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if let Some(value) = line.strip_prefix("x-key:") {
            key = value.trim().to_owned();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    if status == 0 {
        let _ = reader.read_to_end(&mut Vec::new());
        return (Vec::new(), key);
    }
    write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: 3\r\nconnection: close\r\n\r\nno!")
        .unwrap();
    let mut plain = Vec::new();
    GzDecoder::new(&body[..]).read_to_end(&mut plain).unwrap();
    let request = ExportTraceServiceRequest::decode(&plain[..]).unwrap();
    let scopes = request.resource_spans.iter().flat_map(|resource| &resource.scope_spans);
    let names = scopes.flat_map(|scope| &scope.spans).map(|span| span.name.clone());
    (names.collect(), key)
}

/// Returns an attempt, and a builder of its trace.
fn traced() -> (Attempt, TraceBuilder) {
    let (chat, chats) = chats();
    let options = TraceOptions { text: true, max_text_chars: 10, mlflow_tags: false };
    let builder = TraceBuilder { run: "r".into(), started_at: STARTED_AT, chats, options };
    (attempt(&chat), builder)
}

fn exporter(url: &str) -> (Attempt, Exporter) {
    let (attempt, builder) = traced();
    let headers = CollectorOptions::parse_headers("x-key=a%2Cb, x-other=1").unwrap();
    let url = url.to_owned();
    let connect =
        move || Ok(Collector::new(CollectorOptions { url: url.clone(), headers: headers.clone() }));
    (attempt, Exporter::start(builder, connect).unwrap())
}

#[test]
fn exporter_retries_until_collector_is_available() {
    let (url, received) = collector(vec![503, 429]);
    let (attempt, mut exporter) = exporter(&url);
    exporter.send(&attempt);
    exporter.send(&attempt);
    let report = exporter.close();
    assert_eq!((report.sent, report.dropped, report.rejected), (2, 0, 0));
    assert_eq!(report.loss(), None);
    assert!(report.failure.unwrap().ends_with("HTTP status 503: no!"));
    let (names, key) = received.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!((names.len(), key.as_str()), (12, "a,b"));
    assert_eq!(names[0], "attempt train/1/7/2/4");
}

#[test]
fn slow_collector_gets_smaller_requests() {
    let (url, received) = collector(vec![0, 0]);
    let (attempt, builder) = traced();
    let traces = vec![builder.trace(&attempt); 9];
    let options = CollectorOptions { url, headers: Vec::new() };
    let mut collector = Collector::with_timeout(options, Duration::from_secs(2));
    assert_eq!(collector.send_all(&traces), Ok(None));
    // The collector records a request after its response.
    let next = || received.recv_timeout(Duration::from_secs(20)).unwrap().0.len() / 6;
    assert_eq!([(); 5].map(|()| next()), [2, 2, 2, 2, 1], "requests of 9 and 4 time out");
}

#[test]
fn silent_collector_is_reported() {
    let (url, _received) = collector(vec![0, 0, 0]);
    let (attempt, builder) = traced();
    let options = CollectorOptions { url: url.clone(), headers: Vec::new() };
    let mut collector = Collector::with_timeout(options, Duration::from_millis(300));
    let error = collector.send_all(&vec![builder.trace(&attempt); 2]).unwrap_err();
    let CollectorError::Unavailable(why) = error else { panic!("{error:?}") };
    assert!(why.starts_with(&format!("{url}: no response to the trace of one attempt")), "{why}");
}

#[test]
fn rejected_traces_are_counted_and_reported_once() {
    let (url, _received) = collector(vec![400]);
    let (attempt, mut exporter) = exporter(&url);
    exporter.send(&attempt);
    let report = exporter.close();
    assert_eq!((report.sent, report.dropped, report.rejected), (0, 0, 1));
    assert!(report.loss().unwrap().contains("HTTP status 400"), "{report:?}");
    assert!(exporter.take_failure().unwrap().contains("400"));
    assert_eq!(exporter.take_failure(), None);
}

#[test]
fn full_queue_drops_attempts_without_delay() {
    // Accepts connections in its backlog, and never responds.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (attempt, exporter) = exporter(&format!("http://{}", listener.local_addr().unwrap()));
    let start = Instant::now();
    for _ in 0..MAX_QUEUED + 2 * MAX_BATCH + 10 {
        exporter.send(&attempt);
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let state = lock(&exporter.state);
    let ExporterState { report: ExportReport { dropped, .. }, pending } = &*state;
    assert!(*dropped >= 10 && *pending >= MAX_QUEUED, "{dropped} {pending}");
    assert_eq!(dropped + pending, MAX_QUEUED + 2 * MAX_BATCH + 10);
}

#[test]
fn header_without_value_is_rejected_without_quoting_it() {
    let error = CollectorOptions::parse_headers("secret").unwrap_err();
    assert!(!error.contains("secret"), "{error}");
}
