//! Tests of programs as tools.

use std::time::Instant;

use levade_tools::{CommandKeys, CommandTool, ObservationKind};
use serde_json::json;

use super::*;

fn command(command: &[&str], dir: &Path, deadline: Duration) -> ToolSet {
    let parameters = json!({ "type": "object", "properties": { "text": { "type": "string" } }, "required": ["text"] });
    let keys = CommandKeys {
        command: command.iter().map(|element| (*element).to_owned()).collect(),
        dir: dir.to_owned(),
        environment: vec!["CARGO_MANIFEST_DIR".into()],
        description: "Runs.".into(),
        parameters: parameters.as_object().unwrap().clone(),
    };
    let toolbox = CommandTool::new("run", keys, supervisor()).unwrap();
    ToolSet::new(vec![Arc::new(toolbox)], deadline).unwrap()
}

async fn run_command(set: &ToolSet, argument: &str) -> Observation {
    let mut open = open(set, "a").await;
    let observation = call_tool(&mut open, "run", json!({ "text": argument })).await;
    open.close().await.unwrap();
    observation
}

#[tokio::test]
async fn command_program_gets_arguments_and_json_line() {
    let dir = tempfile::tempdir().unwrap();
    let nasty = "$(id); \"it's\" {text} --x\n";
    let set = command(&["printf", "%s|%s", "{text}", "a {text}"], dir.path(), LONG);
    assert_eq!(run_command(&set, nasty).await.text, format!("{nasty}|a {nasty}"));
    let set = command(&["cat"], dir.path(), LONG);
    assert_eq!(run_command(&set, nasty).await.text, format!("{}\n", json!({ "text": nasty })));
    let set =
        command(&["sh", "-c", "pwd; env | cut -d= -f1 | sort | tr '\\n' ' '"], dir.path(), LONG);
    let text = run_command(&set, "").await.text;
    let (here, names) = text.split_once('\n').unwrap();
    assert_eq!(Path::new(here).canonicalize().unwrap(), dir.path().canonicalize().unwrap());
    assert!(names.contains("CARGO_MANIFEST_DIR") && names.contains("PATH"), "{names}");
    assert!(!names.contains("CARGO_PKG_NAME"), "{names}");
    let mut open = open(&set, "a").await;
    let bad = call_tool(&mut open, "run", json!({ "txt": 1 })).await;
    assert_eq!(bad.kind, ObservationKind::BadArguments);
}

#[tokio::test]
async fn failed_command_reports_exit_status_and_last_output() {
    let dir = tempfile::tempdir().unwrap();
    let of = async |script: &str| {
        run_command(&command(&["sh", "-c", script], dir.path(), LONG), "x").await
    };
    let failed =
        of("echo begin >&2; yes e | head -c 9000 >&2; echo; echo the end >&2; exit 3").await;
    assert!(failed.text.starts_with("Error: run failed (exit code 3): …"), "{}", failed.text);
    assert!(failed.text.ends_with("the end") && !failed.text.contains("begin"), "{}", failed.text);
    assert_eq!((failed.kind, failed.failure), (ObservationKind::Failed, None));
    assert_eq!(of("echo sorry; exit 4").await.text, "Error: run failed (exit code 4): sorry");
    assert_eq!(of("exit 5").await.text, "Error: run failed (exit code 5)");
    assert_eq!(of("kill -9 $$").await.text, "Error: run failed (killed by signal 9)");
    assert_eq!(of("exec 1>&-; exec 2>&-; exit 0").await.text, "");
    let missing = run_command(&command(&["no-such-program"], dir.path(), LONG), "x").await;
    assert!(missing.text.starts_with("Error: cannot start no-such-program"), "{}", missing.text);
    assert!(missing.failure.is_some());
    let nowhere = run_command(&command(&["true"], Path::new("/no/such"), LONG), "x").await;
    assert_eq!(nowhere.text, "Error: cannot start true: there is no directory /no/such");
}

#[tokio::test]
async fn long_command_output_keeps_both_ends() {
    let dir = tempfile::tempdir().unwrap();
    let of = async |script: &str| {
        run_command(&command(&["sh", "-c", script], dir.path(), LONG), "x").await.text
    };
    let text = of("echo first; yes | head -c 20000000; echo last").await;
    assert!(text.starts_with("first\ny\n") && text.ends_with("y\nlast\n"));
    assert!(text.contains("bytes are left out here") && text.len() < 1_100_000, "{}", text.len());
    assert_eq!(of("printf 'a\\377b'").await, "a\u{fffd}b");
}

#[tokio::test]
async fn command_timeout_ends_program_and_descendants() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("children");
    let script = format!(
        "trap '' TERM; (setsid sleep 1000 & echo $! >> {0}); echo $$ >> {0}; sleep 1000; sleep \
         1000",
        file.display()
    );
    let set = command(&["sh", "-c", &script], dir.path(), Duration::from_secs(2));
    let late = run_command(&set, "x").await;
    assert_eq!(
        (late.text.as_str(), late.kind),
        ("Error: run did not answer within 2s", ObservationKind::Timeout)
    );
    let children = std::fs::read_to_string(&file).unwrap();
    assert_eq!(children.lines().count(), 2, "{children}");
    let start = Instant::now();
    while children.lines().any(|process| Path::new(&format!("/proc/{process}")).exists()) {
        assert!(start.elapsed() < Duration::from_secs(20), "{children}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
