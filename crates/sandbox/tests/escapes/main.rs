//! Escape tests: each attack must end as its title says, and leave no process, file, mount or
//! descriptor.
//!
//! The tests should run as root and as an unprivileged user; docs/sandbox.md has the commands. If
//! the kernel provides no namespaces, the tests print that and are skipped.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

mod endings;
mod leaks;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::PathBuf;
use std::process::ExitCode;

use levade_sandbox::{
    EndReason, Language, Limits, Options, Outcome, Run, Sandbox, SandboxError, SessionOptions,
};

use leaks::ResourceSnapshot;

/// Code that precedes each attack.
const PRELUDE: &str = include_str!("attacks/prelude.py");

/// Attacks by class, each after a title.
const ATTACKS: [&str; 8] = [
    include_str!("attacks/network.py"),
    include_str!("attacks/files.py"),
    include_str!("attacks/kernel.py"),
    include_str!("attacks/processes.py"),
    include_str!("attacks/time.py"),
    include_str!("attacks/memory.py"),
    include_str!("attacks/between.py"),
    include_str!("attacks/output.py"),
];

/// Returns the expectation, name and code of each attack.
fn attacks() -> impl Iterator<Item = (&'static str, &'static str, String)> {
    let parts =
        ATTACKS.iter().flat_map(|class| class.strip_prefix("### ").unwrap().split("\n### "));
    parts.map(|part| {
        let (title, code) = part.split_once('\n').unwrap();
        let (expect, name) = title.split_once(": ").unwrap();
        (expect, name, format!("{PRELUDE}\n{code}"))
    })
}

/// Serializes the tests, because processes and descriptors of another test would count as
/// leftovers.
static TEST_LOCK: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Starts a sandbox with full protection. Prints a message and returns `None` if the kernel does
/// not provide it.
async fn full_sandbox() -> Option<(Sandbox, tokio::sync::MutexGuard<'static, ()>)> {
    full_sandbox_with(Vec::new()).await
}

/// Starts a sandbox with full protection, whose code can read the directories in `read` as well.
async fn full_sandbox_with(
    read: Vec<PathBuf>,
) -> Option<(Sandbox, tokio::sync::MutexGuard<'static, ()>)> {
    let guard = TEST_LOCK.lock().await;
    match Sandbox::start(Options { concurrency: 4, read, ..Options::default() }).await {
        Ok(sandbox) => Some((sandbox, guard)),
        Err(error @ SandboxError::Protection { .. }) => {
            eprintln!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Returns small limits, so that resource bombs end quickly.
fn limits() -> Limits {
    Limits {
        seconds: 10.0,
        memory_mb: 256,
        disk_mb: 32,
        file_mb: 16,
        files: 2048,
        fetch_mb: 20,
        ..Limits::default()
    }
}

async fn python(sandbox: &Sandbox, code: &str) -> Outcome {
    sandbox.run(&Run { limits: limits(), ..Run::new(Language::Python, code) }).await.unwrap()
}

/// Resources of the host that code must not reach.
struct Host {
    dir: tempfile::TempDir,
    /// Directory that code can read, outside of the directories that each run has of its own.
    shown: tempfile::TempDir,
    tcp: std::net::TcpListener,
    _local: [UnixListener; 3],
    _datagrams: UnixDatagram,
    name: String,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("secret"), "hush").unwrap();
        let name = format!("levade-test-{}-{:p}", std::process::id(), &dir);
        let abstracted = SocketAddr::from_abstract_name(&name).unwrap();
        let shared_dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let shown = shared_dir.path();
        std::fs::write(shown.join("data"), "rows").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, shown.join("pipe"), 0o666.into()).unwrap();
        let local = [
            UnixListener::bind(dir.path().join("socket")).unwrap(),
            UnixListener::bind(shown.join("socket")).unwrap(),
            UnixListener::bind_addr(&abstracted).unwrap(),
        ];
        let datagrams = UnixDatagram::bind(shown.join("datagrams")).unwrap();
        // Grants access to all users, because code runs as another user if this process is root.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        for name in ["", "socket", "datagrams", "pipe", "data"] {
            std::fs::set_permissions(shown.join(name), std::fs::Permissions::clone(&open)).unwrap();
        }
        let tcp = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        Host { dir, shown: shared_dir, tcp, _local: local, _datagrams: datagrams, name }
    }

    fn shared_path(&self) -> PathBuf {
        self.shown.path().to_owned()
    }

    fn put_in(&self, code: &str) -> String {
        let path = |name: &str| self.dir.path().join(name).to_str().unwrap().to_owned();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        code.replace("@port@", &self.tcp.local_addr().unwrap().port().to_string())
            .replace("@unix@", &path("socket"))
            .replace("@abstract@", &self.name)
            .replace("@secret@", &path("secret"))
            .replace("@shown@", self.shown.path().to_str().unwrap())
            .replace("@folder@", self.dir.path().to_str().unwrap())
            .replace("@pid@", &std::process::id().to_string())
            .replace("@host@", host.trim())
    }
}

/// Harmless attacks that succeed without a sandbox, which shows that each can detect an escape.
const HARMLESS: [&str; 14] = [
    "tcp",
    "udp",
    "listening",
    "a local socket of the host",
    "an abstract socket of the host",
    "the network as /proc shows it",
    "a file of the host",
    "users of the host",
    "symbolic links to the host",
    "devices that are no harmless ones",
    "processes of others",
    "signals to the host",
    "handles of processes of the host",
    "secrets in the environment",
];

#[tokio::test]
async fn harmless_attacks_succeed_without_sandbox() {
    let _lock = TEST_LOCK.lock().await;
    let host = Host::new();
    let mut count = 0;
    for (_, name, code) in attacks() {
        if !HARMLESS.contains(&name) {
            continue;
        }
        count += 1;
        let code = host.put_in(&code);
        let mut command = std::process::Command::new("python3");
        let dir = tempfile::tempdir().unwrap();
        let output = command
            .args(["-c", &code])
            .current_dir(dir.path())
            .env("LEVADE_TEST_SECRET", "hush")
            .output()
            .unwrap();
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(
            out.contains("ESCAPED"),
            "{name}: {out}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    assert_eq!(count, HARMLESS.len());
}

/// Checks that an attack ended as its title says. Returns a description of the difference if it did
/// not.
fn check_outcome(expect: &str, outcome: &Outcome) -> Result<(), String> {
    let out = outcome.stdout.text();
    let err = outcome.stderr.text();
    if out.contains("ESCAPED") {
        return Err(out);
    }
    let (what, number) = expect.split_once(' ').unwrap_or((expect, "0"));
    let number: i32 = number.parse().unwrap();
    let is_expected = match what {
        "refused" => outcome.ended == EndReason::Exit(0) && out.contains("refused:"),
        "fine" | "exit" => outcome.ended == EndReason::Exit(number),
        "signal" => outcome.ended == EndReason::Signal(number),
        "late" => outcome.ended == EndReason::TimeLimit,
        "memory" => {
            outcome.ended == EndReason::MemoryLimit
                || (outcome.ended == EndReason::Exit(1) && err.ends_with("MemoryError\n"))
                || (outcome.ended == EndReason::Exit(1) && err.contains("Cannot allocate memory"))
        }
        "bounded" => {
            let held_bytes =
                out.lines().filter_map(|line| line.strip_prefix("HELD ")?.parse::<u64>().ok());
            let max_mb = limits().memory_mb + limits().disk_mb;
            match outcome.ended {
                EndReason::MemoryLimit => true,
                EndReason::Exit(0) => {
                    held_bytes.sum::<u64>() <= max_mb
                        && (out.contains("HELD") || out.contains("refused:"))
                }
                EndReason::Exit(1) => {
                    err.contains("MemoryError") || err.contains("Cannot allocate memory")
                }
                _ => false,
            }
        }
        other => panic!("{other}"),
    };
    is_expected.then_some(()).ok_or_else(|| format!("{:?}\n{out}\n{err}", outcome.ended))
}

#[tokio::test]
async fn every_attack_is_contained_and_leaves_nothing() {
    // SAFETY: no other thread of this test reads the environment yet.
    unsafe { std::env::set_var("LEVADE_TEST_SECRET", "hush") };
    let host = Host::new();
    let Some((sandbox, _lock)) = full_sandbox_with(vec![host.shared_path()]).await else { return };
    let only = std::env::var("LEVADE_ATTEMPT").unwrap_or_default();
    let mut count = 0;
    let mut wrong = Vec::new();
    python(&sandbox, "pass").await;
    let before = ResourceSnapshot::wait_until_stable().await;
    for (expect, name, code) in attacks() {
        if !name.contains(&only) {
            continue;
        }
        count += 1;
        let seconds = if expect == "late" { 1.5 } else { 60.0 };
        let code = host.put_in(&code);
        let run =
            Run { limits: Limits { seconds, ..limits() }, ..Run::new(Language::Python, code) };
        let judgement = match sandbox.run(&run).await {
            Ok(outcome) => check_outcome(expect, &outcome),
            Err(error) => Err(error.to_string()),
        };
        let remaining = before.wait_until_restored().await;
        for what in [judgement, remaining].into_iter().filter_map(Result::err) {
            wrong.push(format!("--- {expect}: {name}\n{what}"));
        }
    }
    println!("{count} attempts");
    assert!(count >= 190 || !only.is_empty(), "{count}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn runs_are_isolated_from_each_other() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    // The session has a file and a secret while it is open.
    let mut one = sandbox
        .session(SessionOptions {
            environment: [("TOKEN".to_owned(), "very-hush".to_owned())].into(),
            limits: limits(),
            ..SessionOptions::default()
        })
        .unwrap();
    let cell = one
        .cell(
            "import socket, os\npair = socket.socketpair()\n\
             open('/tmp/meet', 'w').write('x')\nopen('/dev/shm/meet', 'w').write('x')\n\
             os.environ['TOKEN']",
        )
        .await
        .unwrap();
    assert_eq!((cell.shown, cell.error), (vec!["'very-hush'".to_owned()], None));
    let code = "import os, socket, sys\n\
        print(len(open('/proc/self/net/unix').readlines()) - 1, 'sockets')\n\
        print([os.listdir(f) for f in ('/tmp', '/dev/shm')], os.listdir())\n\
        needle = ('-yrev'[::-1] + 'hush').encode()\n\
        memory = open('/proc/self/mem', 'rb')\n\
        found = 0\n\
        for line in open('/proc/self/maps'):\n\
        \x20   if ' rw' not in line or '[' in line and 'heap' not in line and 'stack' not in \
        line: continue\n\
        \x20   start, end = (int(x, 16) for x in line.split()[0].split('-'))\n\
        \x20   memory.seek(start)\n\
        \x20   try: found += memory.read(end - start).count(b'=' + needle) + \
        memory.read(0).count(needle)\n\
        \x20   except OSError: pass\n\
        print('secrets', found)";
    let outcome = python(&sandbox, code).await;
    let out = outcome.stdout.text();
    assert_eq!(out, "0 sockets\n[[], []] ['main.py']\nsecrets 0\n", "{}", outcome.stderr.text());
    // The next run does not find the files of an earlier run either.
    python(&sandbox, "open('/tmp/kept', 'w').write('x')").await;
    assert_eq!(
        python(&sandbox, "import os; print(os.listdir('/tmp'))").await.stdout.text(),
        "[]\n"
    );
}

#[tokio::test]
async fn links_and_special_files_are_not_fetched() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    let fetch = [
        "good", "in/deep", "link", "linked/x", "pipe", "device", "folder", "nothing", "large",
        "huge",
    ];
    let code = "import os\nopen('good', 'w').write('good')\nos.makedirs('in')\n\
                open('in/deep', 'w').write('deep')\n\
                os.symlink('/etc/passwd', 'link')\nos.symlink('/etc', 'linked')\n\
                os.mkfifo('pipe')\n\
                os.symlink('/dev/zero', 'device')\nos.mkdir('folder')\n\
                open('large', 'wb').write(bytes(12 << 20))\n\
                open('huge', 'wb').write(bytes(12 << 20))";
    let run = Run {
        fetch: fetch.iter().map(|name| (*name).to_owned()).collect(),
        limits: limits(),
        ..Run::new(Language::Python, code)
    };
    let outcome = sandbox.run(&run).await.unwrap();
    assert_eq!(outcome.ended, EndReason::Exit(0), "{}", outcome.stderr.text());
    let found: Vec<&str> = outcome.files.keys().map(String::as_str).collect();
    assert_eq!(found, ["good", "in/deep", "large"], "{:?}", outcome.not_fetched);
    assert_eq!(
        (outcome.files["good"].as_slice(), outcome.files["large"].len()),
        (&b"good"[..], 12 << 20)
    );
    assert_eq!(outcome.not_fetched["pipe"], "is no regular file");
    assert!(outcome.not_fetched["huge"].contains("may be fetched"), "{:?}", outcome.not_fetched);
    assert_eq!(outcome.not_fetched.len(), 7);
}

#[tokio::test]
async fn streams_can_be_reopened_and_stdin_is_immutable() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    let stdin = b"3\n4\n".to_vec();
    let code = "import io, os\n\
        print(open('/dev/stdin').read().split())\n\
        print(io.BytesIO(os.read(0, os.fstat(0).st_size)).readlines())\n\
        open('/proc/self/fd/1', 'w').write('more\\n')\n\
        open('/dev/stderr', 'w').write('error\\n')\n\
        for path, how in [('/dev/stdin', 'r+'), ('/dev/stdout', 'r')]:\n    \
            try: open(path, how); print('opened', path)\n    \
            except OSError as error: print(type(error).__name__)\n\
        for change in lambda: os.ftruncate(0, 9), lambda: os.write(0, b'x'):\n    \
            try: change(); print('changed')\n    \
            except OSError as error: print(type(error).__name__)";
    let run = Run { stdin: stdin.clone(), limits: limits(), ..Run::new(Language::Python, code) };
    let outcome = sandbox.run(&run).await.unwrap();
    let errors = "PermissionError\nPermissionError\nPermissionError\nPermissionError\n";
    let expected = format!("['3', '4']\n[b'3\\n', b'4\\n']\nmore\n{errors}");
    assert_eq!((outcome.stdout.text(), outcome.stderr.text().as_str()), (expected, "error\n"));
    let bash = "n=$(head -n 1 </dev/stdin); echo $((n + 1)) | tee /dev/stderr > /dev/stdout";
    let outcome = sandbox
        .run(&Run { stdin, limits: limits(), ..Run::new(Language::Shell, bash) })
        .await
        .unwrap();
    assert_eq!((outcome.stdout.text().as_str(), outcome.stderr.text().as_str()), ("4\n", "4\n"));
}

#[tokio::test]
async fn large_output_and_input_do_not_delay_runs() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    let code =
        "import sys\nfor n in range(300000): print('line', n)\nsys.stderr.write('e' * 5_000_000)";
    let outcome = python(&sandbox, code).await;
    assert_eq!(outcome.ended, EndReason::Exit(0));
    assert_eq!((outcome.stdout.total, outcome.stderr.total), (3_488_890, 5_000_000));
    let text = outcome.stdout.text();
    assert!(text.starts_with("line 0\n") && text.ends_with("line 299999\n") && text.len() < 70_000);
    let stdin = vec![b'z'; 20 << 20];
    let slow = "import sys, time\nn = 0\nwhile True:\n    b = sys.stdin.buffer.read(1 << 20)\n    \
                if not b: break\n    n += len(b); time.sleep(0.01)\nprint(n)";
    for (code, expected) in [(slow, "20971520\n"), ("print('never read')", "never read\n")] {
        let run =
            Run { stdin: stdin.clone(), limits: limits(), ..Run::new(Language::Python, code) };
        let outcome = sandbox.run(&run).await.unwrap();
        assert_eq!((outcome.ended, outcome.stdout.text().as_str()), (EndReason::Exit(0), expected));
    }
    assert_eq!(
        python(&sandbox, "import sys; print(repr(sys.stdin.read()))").await.stdout.text(),
        "''\n"
    );
}

#[tokio::test]
async fn exposed_directory_inside_tmp_is_readable() {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::create_dir(dir.path().join("data")).unwrap();
    std::fs::write(dir.path().join("data/table"), "rows").unwrap();
    std::fs::write(dir.path().join("secret"), "hush").unwrap();
    let guard = TEST_LOCK.lock().await;
    let options = Options { read: vec![dir.path().join("data")], ..Options::default() };
    let sandbox = match Sandbox::start(options).await {
        Ok(sandbox) => sandbox,
        Err(error @ SandboxError::Protection { .. }) => return eprintln!("SKIPPED: {error}"),
        Err(error) => panic!("{error}"),
    };
    let code = format!(
        "import os\nos.chdir('{}')\nprint(os.listdir(), open('data/table').read())\n\
         try: open('data/new', 'w'); print('ESCAPED')\n\
         except OSError: print('refused:')",
        dir.path().display()
    );
    let outcome = python(&sandbox, &code).await;
    assert_eq!(outcome.stdout.text(), "['data'] rows\nrefused:\n", "{}", outcome.stderr.text());
    drop(guard);
}

#[tokio::test]
async fn cancelled_run_leaves_nothing() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    python(&sandbox, "pass").await;
    let before = ResourceSnapshot::wait_until_stable().await;
    let code = "import os, time\nfor _ in range(3): os.fork()\ntime.sleep(100)";
    let run =
        Run { limits: Limits { seconds: 100.0, ..limits() }, ..Run::new(Language::Python, code) };
    for milliseconds in [0, 1, 5, 20, 100, 300] {
        let time = std::time::Duration::from_millis(milliseconds);
        assert!(tokio::time::timeout(time, sandbox.run(&run)).await.is_err());
    }
    before.wait_until_restored().await.unwrap();
    assert_eq!(python(&sandbox, "print(1)").await.stdout.text(), "1\n");
}

#[tokio::test]
async fn shell_runs_with_python_in_path() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    let code = "set -e\necho $0 $HOME $(cat in)\npython3 -c 'print(6 * 7)' < /dev/null\n\
                cat <(echo sub)\nexit 7";
    let run = Run {
        files: [("in".to_owned(), b"given".to_vec())].into(),
        limits: limits(),
        ..Run::new(Language::Shell, code)
    };
    let outcome = sandbox.run(&run).await.unwrap();
    let text = outcome.stdout.text();
    assert_eq!(outcome.ended, EndReason::Exit(7), "{text}{}", outcome.stderr.text());
    assert_eq!(text, "/work/main.sh /work given\n42\nsub\n");
}

/// Tests a kernel without namespaces: the process is root without any rights, as in most
/// containers.
#[test]
fn reduced_protection_is_rejected_or_used_on_request() -> ExitCode {
    let inner = std::env::var("LEVADE_INNER").is_ok();
    if !inner {
        let test = "reduced_protection_is_rejected_or_used_on_request";
        let _lock = TEST_LOCK.blocking_lock();
        let status = std::process::Command::new("unshare")
            .args(["--user", "--map-root-user", "sh", "-c"])
            .arg(
                "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all \
                  --inh-caps=-all \"$@\"",
            )
            .arg("sh")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env("LEVADE_INNER", "1")
            .status();
        return match status {
            Ok(status) if status.success() => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("SKIPPED: unshare: {error}");
                ExitCode::SUCCESS
            }
        };
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let error = Sandbox::start(Options::default()).await.unwrap_err().to_string();
        for part in ["user-namespace", "mount-namespace", "unshare", "Way out", "best-effort"] {
            assert!(error.contains(part), "{error}");
        }
        let options =
            Options { protection: levade_sandbox::Demand::BestEffort, ..Options::default() };
        let sandbox = Sandbox::start(options).await.unwrap();
        let protection = sandbox.protection();
        for name in ["landlock", "seccomp", "no-new-privileges", "resource-limits", "memory-watch"]
        {
            assert!(protection.achieved.contains(&name.to_owned()), "{protection}");
        }
        assert!(!protection.is_full());
        let host = Host::new();
        let before = ResourceSnapshot::wait_until_stable().await;
        for code in [
            "tries(lambda: open('@secret@').read())",
            "tries(lambda: open('/etc/passwd').read())",
            "tries(os.listdir, '/proc')",
            "tries(lambda: open('/proc/@pid@/environ').read())",
            "tries(lambda: does(socket.create_connection, ('127.0.0.1', @port@), 2))",
            "tries(lambda: does(socket.socket(socket.AF_UNIX).connect, '\\0@abstract@'))",
            "tries(lambda: does(os.kill, @pid@, 0))",
            "tries(lambda: does(open, '@folder@/x', 'w'))",
            "tries(call, 101, 16, @pid@, 0, 0)",
            "for _ in range(3):\n    if os.fork() == 0:\n        os.setsid(); time.sleep(100)\n\
             print('refused:')",
        ] {
            let code = host.put_in(&format!("{PRELUDE}\n{code}"));
            let outcome = python(&sandbox, &code).await;
            check_outcome("refused", &outcome).unwrap_or_else(|why| panic!("{code}: {why}"));
            before.wait_until_restored().await.unwrap();
        }
        let run = Run {
            fetch: vec!["made".into()],
            ..Run::new(
                Language::Shell,
                "cat > made; \
                                                                                 pwd",
            )
        };
        let outcome = sandbox.run(&Run { stdin: b"in".to_vec(), ..run }).await.unwrap();
        assert_eq!(
            (outcome.ended, outcome.files["made"].as_slice()),
            (EndReason::Exit(0), &b"in"[..])
        );
        let dir = outcome.stdout.text();
        let late = Run {
            limits: Limits { seconds: 0.5, ..limits() },
            ..Run::new(Language::Python, "while 1: pass")
        };
        assert_eq!(sandbox.run(&late).await.unwrap().ended, EndReason::TimeLimit);
        drop(sandbox);
        before.wait_until_restored().await.unwrap_err();
        assert!(!std::path::Path::new(dir.trim()).exists(), "{dir}");
    });
    ExitCode::SUCCESS
}

mod sessions;
