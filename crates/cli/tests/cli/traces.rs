//! Tests of the traces, the graphs and the alarms of a run, from outside.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Workspace, stderr, stdout, unused_port};

/// Starts a collector that accepts everything. Returns its URL, and the number of its requests.
fn collector() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1/traces", listener.local_addr().unwrap());
    let requests = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&requests);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut length = 0;
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if line.trim().is_empty() {
                    break;
                }
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
            }
            reader.read_exact(&mut vec![0; length]).unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            let response = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            stream.write_all(response.as_bytes()).unwrap();
        }
    });
    (url, requests)
}

#[test]
fn run_sends_traces_live_and_afterwards_and_prints_graph() {
    let workspace = Workspace::with_trained_model();
    let (url, requests) = collector();
    let traced = format!("metrics.traces.otlp={url}");
    let output = workspace.train().args(["--run", "run", "--set", &traced]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stdout(&output).contains("traces"), "{}", stdout(&output));
    let live = requests.load(Ordering::SeqCst);
    assert!(live > 0);

    let run = |arguments: &[&str]| {
        let output = workspace.levade().args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        stdout(&output)
    };
    let sent = run(&["traces", "run", "--to", &url]);
    let numbers: Vec<usize> = sent.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [attempts, measured] = numbers[..] else { panic!("{sent}") };
    assert!(attempts > 0 && attempts == measured, "{sent}");
    assert!(requests.load(Ordering::SeqCst) > live);

    let picture = run(&["inspect", "run", "--best", "--graph", "svg"]);
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
    assert!(picture.contains("calculator"), "{picture}");
    assert!(run(&["inspect", "run", "--best", "--graph", "dot"]).contains("attempt -> call0;"));

    let alarms = run(&["inspect", "run", "--alarms", "--json"]);
    let alarms: serde_json::Value = serde_json::from_str(&alarms).unwrap();
    assert_eq!(
        (alarms["phase"].as_u64(), alarms["steps"].as_u64()),
        (Some(1), Some(3)),
        "{alarms}"
    );
    assert!(alarms["alarms"].is_array(), "{alarms}");
    let imitation = run(&["inspect", "run", "--alarms", "--phase", "0"]);
    assert_eq!(imitation, "no alarms in 1 step of phase 0\n");
    let missing = ["inspect", "run", "--alarms", "--phase", "2"];
    let rejected = workspace.levade().args(missing).output().unwrap();
    assert_eq!(rejected.status.code(), Some(2));
    let want = "--phase is 2, but the run has 2 phases";
    assert!(stderr(&rejected).contains(want), "{}", stderr(&rejected));
}

#[test]
fn unavailable_collector_is_noted_and_does_not_end_the_run() {
    let workspace = Workspace::with_trained_model();
    let url = format!("http://127.0.0.1:{}", unused_port());
    let traced = format!("metrics.traces.otlp={url}/v1/traces");
    let output = workspace.train().args(["--run", "run", "--set", &traced]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("note: the collector of traces has 0 attempts"), "{text}");
    let output = workspace.levade().args(["traces", "run", "--to", &url]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
}
