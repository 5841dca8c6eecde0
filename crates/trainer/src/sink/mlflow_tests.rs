use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use super::*;

/// State of the test server.
#[derive(Default)]
struct RecordedRequests {
    experiments: Vec<String>,
    /// Metrics of each run, in order: key, step, value.
    runs: Vec<Vec<(String, u64, f64)>>,
    status: Vec<String>,
    deleted: Vec<usize>,
    /// Statuses of the next responses, last first.
    refusals: Vec<u16>,
}

struct Server {
    address: String,
    kept: Arc<Mutex<RecordedRequests>>,
    run_dir: tempfile::TempDir,
}

impl Server {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let kept = Arc::new(Mutex::new(RecordedRequests::default()));
        let server_state = kept.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                serve(stream.unwrap(), &server_state).unwrap();
            }
        });
        Server { address, kept, run_dir: tempfile::tempdir().unwrap() }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, RecordedRequests> {
        self.kept.lock().unwrap()
    }

    fn sink(&self) -> Mlflow {
        Mlflow::with_client(MlflowClient {
            server: self.address.clone(),
            agent: http_client(),
            experiment: "small".into(),
            file: self.run_dir.path().join("mlflow.json"),
            parameters: vec![("run.seed".into(), "1".into())],
            pause: Duration::from_millis(1),
        })
    }

    /// Logs a metric at some steps and closes the sink.
    fn log(&self, name: &str, steps: std::ops::Range<u32>, finished: bool) -> Result<(), String> {
        let mut sink = self.sink();
        for step in steps {
            let mut metrics = Metrics::default();
            metrics.add(name, f64::from(step) / 2.0);
            metrics.add("not/a number", f64::NAN);
            sink.log(step, &metrics)?;
        }
        sink.close(finished)
    }
}

fn serve(mut stream: TcpStream, kept: &Mutex<RecordedRequests>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut first = String::new();
    let mut length = 0;
    reader.read_line(&mut first)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (status, message) = respond(&first, &body, &mut kept.lock().unwrap());
    let message = message.to_string();
    write!(
        stream,
        "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{message}",
        message.len()
    )
}

fn respond(first: &str, body: &Value, kept: &mut RecordedRequests) -> (u16, Value) {
    if let Some(status) = kept.refusals.pop() {
        return (status, json!({"message": "not now"}));
    }
    let run = body["run_id"].as_str().or_else(|| first.split("run_id=").nth(1)?.split(' ').next());
    let run: Option<usize> = run.map(|id| id.parse().unwrap());
    if run.is_some_and(|run| kept.deleted.contains(&run)) {
        return (400, json!({"message": "the run is deleted"}));
    }
    let verb = first.split("/api/2.0/mlflow/").nth(1).unwrap().split([' ', '?']).next().unwrap();
    match (verb, run) {
        ("experiments/get-by-name", _) if kept.experiments.is_empty() => {
            (404, json!({"message": "none"}))
        }
        ("experiments/get-by-name", _) => (200, json!({"experiment": {"experiment_id": "0"}})),
        ("experiments/create", _) => {
            kept.experiments.push(body["name"].as_str().unwrap().into());
            (200, json!({"experiment_id": "0"}))
        }
        ("runs/create", _) => {
            kept.runs.push(Vec::new());
            kept.status.push("RUNNING".into());
            (200, json!({"run": {"info": {"run_id": (kept.runs.len() - 1).to_string()}}}))
        }
        ("runs/update", Some(run)) => {
            kept.status[run] = body["status"].as_str().unwrap().into();
            (200, json!({}))
        }
        ("runs/get", Some(run)) => {
            let mut last: HashMap<&str, u64> = HashMap::new();
            for (key, step, _) in &kept.runs[run] {
                last.insert(key, *step);
            }
            let metrics: Vec<Value> = last
                .into_iter()
                .map(|(key, step)| json!({"key": key, "step": step, "value": 0.0}))
                .collect();
            (200, json!({"run": {"data": {"metrics": metrics}}}))
        }
        ("runs/log-batch", Some(run)) => {
            for number in body["metrics"].as_array().into_iter().flatten() {
                let name = number["key"].as_str().unwrap();
                // This is the server's own rule.
                if !name.chars().all(|c| c.is_alphanumeric() || "_-. /:".contains(c)) {
                    return (400, json!({"message": format!("invalid metric name {name:?}")}));
                }
                let step = number["step"].as_u64().unwrap();
                let value = number["value"].as_f64().unwrap();
                kept.runs[run].push((name.into(), step, value));
            }
            (200, json!({}))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn resumed_run_sends_no_step_twice() {
    let server = Server::new();
    server.log("eval/pass@4", 0..3, false).unwrap();
    assert_eq!(server.kept().status, ["KILLED"]);
    // Steps 1 and 2 are repeated.
    server.log("eval/pass@4", 1..5, true).unwrap();
    let kept = server.kept();
    let expected: Vec<_> = (0..5u32)
        .map(|step| ("eval/pass_at_4".to_owned(), step.into(), f64::from(step) / 2.0))
        .collect();
    assert_eq!((kept.experiments.len(), kept.status[0].as_str()), (1, "FINISHED"));
    assert_eq!(kept.runs, [expected]);
}

#[test]
fn recovered_server_receives_all_metrics() {
    let server = Server::new();
    server.log("x", 0..1, false).unwrap();
    // The server is unavailable when the run resumes, and again later.
    server.kept().refusals = vec![503; 4];
    let mut sink = server.sink();
    for step in 1..4 {
        let mut metrics = Metrics::default();
        metrics.add("x", 1.0);
        sink.log(step, &metrics).unwrap();
        server.kept().refusals.extend([500, 429]);
    }
    sink.close(true).unwrap();
    let steps: Vec<u64> = server.kept().runs[0].iter().map(|(_, step, _)| *step).collect();
    assert_eq!(steps, [0, 1, 2, 3]);
}

#[test]
fn deleted_run_is_created_again() {
    let server = Server::new();
    server.log("x", 0..2, false).unwrap();
    server.kept().deleted.push(0);
    server.log("x", 1..3, true).unwrap();
    let logged: Vec<usize> = server.kept().runs.iter().map(Vec::len).collect();
    assert_eq!(logged, [2, 2]);
}

#[test]
fn rejection_reports_server_message_and_status() {
    let server = Server::new();
    server.kept().refusals.push(403);
    let why = server.log("x", 0..1, true).unwrap_err();
    assert!(why.contains("not now") && why.contains("403"), "{why}");
    // No server listens at this address.
    let nowhere = Server { address: "http://127.0.0.1:9".into(), ..Server::new() };
    let why = nowhere.log("x", 0..1, true).unwrap_err();
    assert!(why.contains("get-by-name"), "{why}");
}
