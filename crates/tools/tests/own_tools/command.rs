//! Tests of programs as tools.

use std::time::Instant;

use levade_tools::{CommandKeys, CommandTool, ObservationKind};
use serde_json::json;

use super::*;

fn command(command: &[&str], folder: &Path, deadline: Duration) -> ToolSet {
    let parameters =
        json!({ "type": "object", "properties": { "text": { "type": "string" } }, "required": ["text"] });
    let keys = CommandKeys {
        command: command.iter().map(|element| (*element).to_owned()).collect(),
        folder: folder.to_owned(),
        environment: vec!["CARGO_MANIFEST_DIR".into()],
        description: "Runs.".into(),
        parameters: parameters.as_object().unwrap().clone(),
    };
    let toolbox = CommandTool::new("run", keys, supervisor()).unwrap();
    ToolSet::new(vec![Arc::new(toolbox)], deadline).unwrap()
}

async fn said(set: &ToolSet, argument: &str) -> Observation {
    let mut open = open(set, "a").await;
    let observation = answer(&mut open, "run", json!({ "text": argument })).await;
    open.close().await.unwrap();
    observation
}

#[tokio::test]
async fn program_gets_arguments_and_json_line() {
    let folder = tempfile::tempdir().unwrap();
    let nasty = "$(id); \"it's\" {text} --x\n";
    let set = command(&["printf", "%s|%s", "{text}", "a {text}"], folder.path(), LONG);
    assert_eq!(said(&set, nasty).await.text, format!("{nasty}|a {nasty}"));
    let set = command(&["cat"], folder.path(), LONG);
    assert_eq!(said(&set, nasty).await.text, format!("{}\n", json!({ "text": nasty })));
    let set = command(&["sh", "-c", "pwd; env | cut -d= -f1 | sort | tr '\\n' ' '"], folder.path(), LONG);
    let text = said(&set, "").await.text;
    let (here, names) = text.split_once('\n').unwrap();
    assert_eq!(Path::new(here).canonicalize().unwrap(), folder.path().canonicalize().unwrap());
    assert!(names.contains("CARGO_MANIFEST_DIR") && names.contains("PATH"), "{names}");
    assert!(!names.contains("CARGO_PKG_NAME"), "{names}");
    let mut open = open(&set, "a").await;
    let bad = answer(&mut open, "run", json!({ "txt": 1 })).await;
    assert_eq!(bad.kind, ObservationKind::BadArguments);
}

#[tokio::test]
async fn failure_reports_exit_status_and_last_output() {
    let folder = tempfile::tempdir().unwrap();
    let of = async |script: &str| said(&command(&["sh", "-c", script], folder.path(), LONG), "x").await;
    let failed = of("echo begin >&2; yes e | head -c 9000 >&2; echo; echo the end >&2; exit 3").await;
    assert!(failed.text.starts_with("Error: run failed (exit code 3): …"), "{}", failed.text);
    assert!(failed.text.ends_with("the end") && !failed.text.contains("begin"), "{}", failed.text);
    assert_eq!((failed.kind, failed.trouble), (ObservationKind::Failed, None));
    assert_eq!(of("echo sorry; exit 4").await.text, "Error: run failed (exit code 4): sorry");
    assert_eq!(of("exit 5").await.text, "Error: run failed (exit code 5)");
    assert_eq!(of("kill -9 $$").await.text, "Error: run failed (killed by signal 9)");
    assert_eq!(of("exec 1>&-; exec 2>&-; exit 0").await.text, "");
    let missing = said(&command(&["no-such-program"], folder.path(), LONG), "x").await;
    assert!(missing.text.starts_with("Error: cannot start no-such-program"), "{}", missing.text);
    assert!(missing.trouble.is_some());
    let nowhere = said(&command(&["true"], Path::new("/no/such"), LONG), "x").await;
    assert_eq!(nowhere.text, "Error: cannot start true: there is no folder /no/such");
}

#[tokio::test]
async fn long_output_keeps_both_ends() {
    let folder = tempfile::tempdir().unwrap();
    let of = async |script: &str| said(&command(&["sh", "-c", script], folder.path(), LONG), "x").await.text;
    let text = of("echo first; yes | head -c 20000000; echo last").await;
    assert!(text.starts_with("first\ny\n") && text.ends_with("y\nlast\n"));
    assert!(text.contains("bytes are left out here") && text.len() < 1_100_000, "{}", text.len());
    assert_eq!(of("printf 'a\\377b'").await, "a\u{fffd}b");
}

#[tokio::test]
async fn timeout_ends_program_and_descendants() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("children");
    let script = format!(
        "trap '' TERM; (setsid sleep 1000 & echo $! >> {0}); echo $$ >> {0}; sleep 1000; sleep 1000",
        file.display()
    );
    let set = command(&["sh", "-c", &script], folder.path(), Duration::from_secs(2));
    let late = said(&set, "x").await;
    assert_eq!(
        (late.text.as_str(), late.kind),
        ("Error: run did not answer within 2s", ObservationKind::Timeout)
    );
    let there = |process: &str| Path::new(&format!("/proc/{process}")).exists();
    let children = std::fs::read_to_string(&file).unwrap();
    assert_eq!(children.lines().count(), 2, "{children}");
    let start = Instant::now();
    while children.lines().any(there) {
        assert!(start.elapsed() < Duration::from_secs(20), "{children}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
