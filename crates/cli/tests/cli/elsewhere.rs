//! Runs that are read where nothing may be written, that go on another day, and that have little memory.
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

use crate::support::{Place, config, stderr, stdout};

/// A user who owns nothing.
const NOBODY: u32 = 65534;

/// Lets everybody read what lies under a folder, and nobody write it.
fn for_reading_only(path: &Path) {
    let mode = if path.is_dir() || path.ends_with("levade") { 0o555 } else { 0o444 };
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| for_reading_only(&entry.unwrap().path()));
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Lets its owner write it again.
fn for_writing(path: &Path) {
    let mode = if path.is_dir() { 0o755 } else { 0o644 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| for_writing(&entry.unwrap().path()));
    }
}

/// A subcommand by somebody who may write nothing there.
fn read(place: &Place, arguments: &[&str]) -> Output {
    let binary = place.path("levade");
    if !binary.exists() {
        fs::copy(env!("CARGO_BIN_EXE_levade"), &binary).unwrap();
    }
    for_reading_only(&place.path(""));
    // Somewhere to write after all, whatever this test's own folder for temporary files allows.
    let room = TempDir::new().unwrap();
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut command = Command::new(&binary);
    command.current_dir(place.path("")).args(arguments).env("TMPDIR", room.path()).stdin(Stdio::null());
    // Permissions mean nothing to the superuser.
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    let output = command.output().unwrap();
    for_writing(&place.path(""));
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    output
}

#[test]
fn a_run_is_read_where_nothing_can_be_written() {
    let place = Place::new();
    let eval = ["--eval", "--phase", "1"];
    let inspect = |more: &[&str]| stdout(&read(&place, &[&["inspect", "run"], more].concat()));
    let output = place.train().env("LEVADE_CRASH_AT", "ledger_written:3").output().unwrap();
    assert!(!output.status.success());
    // The log of a process that was killed holds what the database does not.
    assert!(fs::metadata(place.path("run/run.db-wal")).unwrap().len() > 0);
    let steps = inspect(&[]);
    assert_eq!(steps.lines().count(), 2, "{steps}");
    // Copied elsewhere, it may come without the index of the log.
    fs::remove_file(place.path("run/run.db-shm")).unwrap();
    assert_eq!(inspect(&[]), steps);
    assert!(!place.path("run/run.db-shm").exists());

    let output = place.train().arg("--resume").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!place.path("run/run.db-wal").exists());
    let whole = inspect(&[]);
    assert!(whole.starts_with(&steps) && whole.lines().count() == 3, "{whole}");
    let own = place.levade().args(["inspect", "run", "--best"]).output().unwrap();
    assert_eq!(inspect(&["--best"]), stdout(&own));
    read(&place, &["chat", "run"]);
    assert!(stdout(&read(&place, &["eval", "run"])).contains("held-out tasks"));
    assert!(stdout(&read(&place, &["replay", "run"])).contains("the same, bit for bit"));

    // While another process writes.
    let store = wait(Sqlite::resume(&place.path("run/run.db"), &RunId(String::new()))).unwrap();
    wait(store.record_eval(EvalKey { phase: 7, step: 0 }, &"new".into())).unwrap();
    assert!(place.path("run/run.db-wal").exists());
    assert_eq!(inspect(&[]), whole);
    assert_eq!(inspect(&eval).lines().count(), 1);
    drop(store);
}

/// A template that prints the time goes on printing that of the beginning.
#[test]
fn a_run_that_goes_on_later_has_not_grown_older() {
    let dated = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}\
                 {% if m.role == 'user' %}{{ '\nnow=' + strftime_now('%F %T') }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
                 {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let place = Place::new();
    let special = SpecialTokens { eos: Some("<|im_end|>".into()), ..SpecialTokens::default() };
    let settings = place.path("model/tokenizer_config.json");
    write_tokenizer_config(&settings, &special, Some(dated), config().context).unwrap();
    let output = place.train().env("LEVADE_CRASH_AT", "ledger_written:3").output().unwrap();
    assert!(!output.status.success());
    std::thread::sleep(Duration::from_millis(1100));
    let output = place.train().arg("--resume").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));

    let store = wait(Sqlite::open_existing(&place.path("run/run.db"))).unwrap();
    let mut times = BTreeSet::new();
    for purpose in [Purpose::Demonstration, Purpose::Train, Purpose::Eval] {
        for summary in wait(store.summaries(purpose)).unwrap() {
            let attempt = wait(store.attempt(&summary.id)).unwrap().unwrap();
            // A token is a byte here.
            let prompt =
                attempt.trajectory.segments()[0].tokens.iter().filter_map(|token| u8::try_from(*token).ok());
            let text = String::from_utf8(prompt.collect()).unwrap();
            times.insert(text.split_once("now=").unwrap().1[..19].to_owned());
        }
    }
    assert_eq!(times.len(), 1, "{times:?}");
}

/// A line without end takes more memory than there may be.
#[test]
fn without_memory_there_is_an_error() {
    let place = Place::new();
    let output = Command::new("sh")
        .current_dir(place.path(""))
        .args(["-c", "ulimit -v 900000; exec \"$0\" chat model --threads 1 < /dev/zero"])
        .arg(env!("CARGO_BIN_EXE_levade"))
        .output()
        .unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(
        message.contains("error: there is no memory: ") && message.contains(" bytes were asked for"),
        "{message}"
    );
    assert!(message.contains(" MiB are free") && message.contains("`engine.memory_mb`"), "{message}");
    assert!(!message.contains("backtrace"), "{message}");
}

#[test]
fn what_is_said_need_not_be_utf_8() {
    let place = Place::new();
    let chat = |input: &[u8]| {
        let mut command = place.levade();
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

    // What cannot be read at all is an error.
    let folder = fs::File::open(place.path("")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_levade"))
        .current_dir(place.path(""))
        .args(["chat", "model"])
        .stdin(folder)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot read standard input"), "{}", stderr(&output));
}

/// A run that keeps its record in memory trains as any other; what needs the record says why it cannot.
#[test]
fn memory_run_trains_but_cannot_be_resumed_or_inspected() {
    let place = Place::new();
    let memory = ["--set", "run.store=memory:"];
    let output = place.train().args(memory).args(["--restarts", "1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("`run.store` is \"memory:\""), "{}", stderr(&output));
    let output = place.train().args(memory).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!place.path("run/run.db").exists());
    let events = fs::read_to_string(place.path("run/events.jsonl")).unwrap();
    assert!(events.lines().last().unwrap().contains("\"finished\""), "{events}");
    for command in [&["train", "run", "--resume"][..], &["inspect", "run"]] {
        let output = place.levade().args(command).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        assert!(stderr(&output).contains("keeps its record in memory"), "{}", stderr(&output));
    }
}
