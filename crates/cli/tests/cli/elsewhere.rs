//! Tests of runs in restricted conditions: a read-only directory, a later resume, and little
//! memory.
#![cfg(unix)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use levade_model::{SpecialTokens, write_tokenizer_config};
use levade_store::testing::wait;
use levade_store::{EvalKey, Sqlite, Store};
use levade_tree::{Purpose, RunId};
use tempfile::TempDir;

use crate::support::{Workspace, config, stderr, stdout};

/// Id of the user and group `nobody`, who own no files.
const NOBODY: u32 = 65534;

/// Makes a path and everything below it readable for all users and writable for none.
fn make_read_only(path: &Path) {
    let mode = if path.is_dir() || path.ends_with("levade") { 0o555 } else { 0o444 };
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| make_read_only(&entry.unwrap().path()));
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Makes a path and everything below it writable for its owner.
fn make_writable(path: &Path) {
    let mode = if path.is_dir() { 0o755 } else { 0o644 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| make_writable(&entry.unwrap().path()));
    }
}

/// Runs a subcommand in the read-only directory, as another user if the tests run as root. Asserts
/// that it succeeds.
fn read(workspace: &Workspace, arguments: &[&str]) -> Output {
    let binary = workspace.path("levade");
    if !binary.exists() {
        fs::copy(env!("CARGO_BIN_EXE_levade"), &binary).unwrap();
    }
    make_read_only(&workspace.path(""));
    // The other user needs a writable directory for temporary files; the test's own may be private.
    let room = TempDir::new().unwrap();
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut command = Command::new(&binary);
    command
        .current_dir(workspace.path(""))
        .args(arguments)
        .env("TMPDIR", room.path())
        .stdin(Stdio::null());
    // Permissions do not restrict root.
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    let output = command.output().unwrap();
    make_writable(&workspace.path(""));
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    output
}

#[test]
fn run_is_readable_in_read_only_directory() {
    let workspace = Workspace::new();
    let eval = ["--eval", "--phase", "1"];
    let inspect = |more: &[&str]| stdout(&read(&workspace, &[&["inspect", "run"], more].concat()));
    let output = workspace.train().env("LEVADE_CRASH_AT", "ledger_written:3").output().unwrap();
    assert!(!output.status.success());
    // The write-ahead log of a killed process contains data that is not yet in the database file.
    assert!(fs::metadata(workspace.path("run/run.db-wal")).unwrap().len() > 0);
    let steps = inspect(&[]);
    assert_eq!(steps.lines().count(), 2, "{steps}");
    // A copy of the run may lack the index of the write-ahead log.
    fs::remove_file(workspace.path("run/run.db-shm")).unwrap();
    assert_eq!(inspect(&[]), steps);
    assert!(!workspace.path("run/run.db-shm").exists());

    let output = workspace.train().arg("--resume").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!workspace.path("run/run.db-wal").exists());
    let complete = inspect(&[]);
    assert!(complete.starts_with(&steps) && complete.lines().count() == 3, "{complete}");
    let own = workspace.levade().args(["inspect", "run", "--best"]).output().unwrap();
    assert_eq!(inspect(&["--best"]), stdout(&own));
    read(&workspace, &["chat", "run"]);
    assert!(stdout(&read(&workspace, &["eval", "run"])).contains("held-out tasks"));
    assert!(stdout(&read(&workspace, &["replay", "run"])).contains("the same, bit for bit"));

    // Another process has the database open for writing.
    let store = wait(Sqlite::resume(&workspace.path("run/run.db"), &RunId(String::new()))).unwrap();
    wait(store.record_eval(EvalKey { phase: 7, step: 0 }, &"new".into())).unwrap();
    assert!(workspace.path("run/run.db-wal").exists());
    assert_eq!(inspect(&[]), complete);
    assert_eq!(inspect(&eval).lines().count(), 1);
    drop(store);
}

/// A chat template that prints the time prints the start of the run, even after a resume.
#[test]
fn resumed_run_keeps_time_in_prompts() {
    let dated = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}\
                 {% if m.role == 'user' %}{{ '\n\
                 now=' + strftime_now('%F %T') }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
                 {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let workspace = Workspace::new();
    let special = SpecialTokens { eos: Some("<|im_end|>".into()), ..SpecialTokens::default() };
    let settings = workspace.path("model/tokenizer_config.json");
    write_tokenizer_config(&settings, &special, Some(dated), config().context).unwrap();
    let output = workspace.train().env("LEVADE_CRASH_AT", "ledger_written:3").output().unwrap();
    assert!(!output.status.success());
    std::thread::sleep(Duration::from_millis(1100));
    let output = workspace.train().arg("--resume").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));

    let store = wait(Sqlite::open_existing(&workspace.path("run/run.db"))).unwrap();
    let mut times = BTreeSet::new();
    for purpose in [Purpose::Demonstration, Purpose::Train, Purpose::Eval] {
        for summary in wait(store.summaries(purpose)).unwrap() {
            let attempt = wait(store.attempt(&summary.id)).unwrap().unwrap();
            // Each token of the model is a byte.
            let prompt = attempt.trajectory.segments()[0]
                .tokens
                .iter()
                .filter_map(|token| u8::try_from(*token).ok());
            let text = String::from_utf8(prompt.collect()).unwrap();
            times.insert(text.split_once("now=").unwrap().1[..19].to_owned());
        }
    }
    assert_eq!(times.len(), 1, "{times:?}");
}

/// An endless input line needs more memory than the limit allows.
#[test]
fn failed_allocation_ends_with_error_message() {
    let workspace = Workspace::new();
    let output = Command::new("sh")
        .current_dir(workspace.path(""))
        .args(["-c", "ulimit -v 900000; exec \"$0\" chat model --threads 1 < /dev/zero"])
        .arg(env!("CARGO_BIN_EXE_levade"))
        .output()
        .unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(
        message.contains("error: out of memory: ") && message.contains(" bytes were requested"),
        "{message}"
    );
    assert!(
        message.contains(" MiB are free") && message.contains("`engine.memory_mb`"),
        "{message}"
    );
    assert!(!message.contains("backtrace"), "{message}");
}

#[test]
fn chat_input_may_contain_invalid_utf8() {
    let workspace = Workspace::new();
    let chat = |input: &[u8]| {
        let mut command = workspace.levade();
        command.args(["chat", "model", "--max-tokens", "3"]).write_stdin(input).output().unwrap()
    };
    let output = chat(b"caf\xe9 hello\nhello again\n");
    let notes = stderr(&output);
    assert!(output.status.success(), "{notes}");
    assert!(notes.contains("the input is not UTF-8"), "{notes}");
    let plain = chat(b"cafe hello\nhello again\n");
    assert_eq!(
        stdout(&output).matches('\n').count(),
        stdout(&plain).matches('\n').count(),
        "{}",
        stdout(&output)
    );

    // An input that cannot be read is an error.
    let dir = fs::File::open(workspace.path("")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_levade"))
        .current_dir(workspace.path(""))
        .args(["chat", "model"])
        .stdin(dir)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot read standard input"), "{}", stderr(&output));
}

/// A run with its store in memory trains normally. Commands that need a persistent store fail with
/// the reason.
#[test]
fn memory_run_trains_but_cannot_be_resumed_or_inspected() {
    let workspace = Workspace::new();
    let memory = ["--set", "run.store=memory:"];
    let output = workspace.train().args(memory).args(["--restarts", "1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("`run.store` is \"memory:\""), "{}", stderr(&output));
    let output = workspace.train().args(memory).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!workspace.path("run/run.db").exists());
    let events = fs::read_to_string(workspace.path("run/events.jsonl")).unwrap();
    assert!(events.lines().last().unwrap().contains("\"finished\""), "{events}");
    for command in [&["train", "run", "--resume"][..], &["inspect", "run"]] {
        let output = workspace.levade().args(command).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        assert!(stderr(&output).contains("kept its store in memory"), "{}", stderr(&output));
    }
}
