//! Tests that programs end in the sandbox as in a fresh interpreter, and that legitimate programs
//! still work.

use levade_sandbox::{EndReason, Language, Limits, Run, SessionOptions};

use super::{full_sandbox, limits, python};

/// Programs that print or write while exiting, or that set an exit code in an unusual way.
const ENDINGS: [&str; 27] = [
    "print('end')",
    "import sys; sys.stdout.write('no line end')",
    "f = open('out', 'w'); f.write('left open'); print('x')",
    "f = open('out', 'w'); f.write('in a cycle')\nclass C: pass\nc = C(); c.c = c; c.f = f; del f",
    "import builtins; builtins.kept = open('out', 'w'); builtins.kept.write('kept elsewhere')",
    "import json; json.kept = open('out', 'w'); json.kept.write('kept by a module')",
    "import os, sys\nclass C:\n    def __del__(self): print('gone', os.name, sys is not None)\n\
     c = C()",
    "class C:\n    def __del__(self): print('cycle gone')\nc = C(); c.me = c",
    "class C:\n    def __del__(self): raise ValueError('late')\nc = C(); print(1)",
    "import atexit\natexit.register(print, 'first'); atexit.register(print, 'last')",
    "import atexit\natexit.register(lambda: 1 / 0); atexit.register(print, 'before')",
    "import atexit, sys\natexit.register(sys.exit, 3)",
    "import threading, time\n\
     threading.Thread(target=lambda: (time.sleep(0.2), print('waited for'))).start()",
    "import threading, time\n\
     threading.Thread(target=lambda: (time.sleep(5), print('never')), daemon=True).start()",
    "import threading, sys\nthreading.Thread(target=sys.exit, args=(4,)).start()",
    "import sys; sys.exit(None)",
    "import sys; sys.exit(300)",
    "import sys; sys.exit(-1)",
    "import sys; sys.exit('words')",
    "import sys; sys.exit((1, 2))",
    "raise SystemExit",
    "raise ValueError('x')",
    "import sys; sys.exit = print\nraise ValueError('x')",
    "import builtins; builtins.isinstance = lambda *a: True\nraise ValueError('x')",
    "import builtins; print(type(__builtins__), builtins is __builtins__)",
    "import ctypes; ctypes.CDLL(None).printf(b'by the C library')",
    "import concurrent.futures as f\n\
     with f.ThreadPoolExecutor(2) as p: print(list(p.map(abs, [-1, -2])))",
];

#[tokio::test]
async fn programs_end_as_in_fresh_interpreter() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    for code in ENDINGS {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("main.py"), code).unwrap();
        let fresh = std::process::Command::new("python3")
            .arg("main.py")
            .current_dir(dir.path())
            .output()
            .unwrap();
        let run =
            Run { fetch: vec!["out".into()], limits: limits(), ..Run::new(Language::Python, code) };
        let ours = sandbox.run(&run).await.unwrap();
        let file = std::fs::read(dir.path().join("out")).ok();
        assert_eq!(ours.files.get("out"), file.as_ref(), "{code}");
        assert_eq!(ours.stdout.text(), String::from_utf8_lossy(&fresh.stdout), "{code}");
        assert_eq!(ours.ended, EndReason::Exit(fresh.status.code().unwrap()), "{code}");
        assert_eq!(
            last_line(&ours.stderr.text()),
            last_line(&String::from_utf8_lossy(&fresh.stderr)),
            "{code}"
        );
    }
}

fn last_line(text: &str) -> String {
    text.lines().last().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn legitimate_programs_work_behind_filter() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    for (code, expected) in [
        (
            "import mmap\n\
             m = mmap.mmap(-1, 5000); m[:3] = b'abc'; print(m[:4], len(m), type(m).__name__)",
            "b'abc\\x00' 5000 mmap\n",
        ),
        (
            "import mmap, os\nm = mmap.mmap(-1, 10)\nif os.fork() == 0: m[0] = 65; os._exit(0)\n\
             os.wait(); print(m[0])",
            "65\n",
        ),
        (
            "import multiprocessing as m\n\
             with m.get_context('fork').Pool(3) as p: print(p.map(abs, [-1, -2]))",
            "[1, 2]\n",
        ),
        (
            "import multiprocessing as m\nv = m.Value('i', 0)\n\
             p = m.get_context('fork').Process(target=lambda: setattr(v, 'value', 7))\n\
             p.start(); p.join(); print(v.value)",
            "7\n",
        ),
        (
            "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('cat', \
             stdin=-1, stdout=-1)\n    print((await p.communicate(b'hi'))[0])\nasyncio.run(f())",
            "b'hi'\n",
        ),
        (
            "import socket\na, b = socket.socketpair()\n\
             a.setsockopt(1, 7, 1 << 20); a.sendall(b'x'); print(b.recv(2))",
            "b'x'\n",
        ),
        (
            "import sqlite3\n\
             c = sqlite3.connect('x.db'); c.execute('create table t (x)'); c.commit(); \
             print(c.execute('select count(*) from t').fetchone())",
            "(0,)\n",
        ),
        (
            "import shutil\n\
             open('a', 'w').write('x' * 100000); shutil.copy('a', 'b'); \
             print(len(open('b').read()))",
            "100000\n",
        ),
        ("import tempfile\nwith tempfile.TemporaryDirectory() as d: print(d[:5])", "/tmp/\n"),
        (
            "import os\nf = os.open('x', os.O_CREAT | os.O_RDWR); os.fsync(f); print('synced')",
            "synced\n",
        ),
    ] {
        let outcome = python(&sandbox, code).await;
        assert_eq!(outcome.stdout.text(), expected, "{code}\n{}", outcome.stderr.text());
    }
}

#[tokio::test]
async fn processor_time_counts_running_children() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    let code = "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: \
                pass\ntime.sleep(1.5)";
    let outcome = python(&sandbox, code).await;
    assert!(outcome.cpu_seconds > 0.3, "{}", outcome.cpu_seconds);
    let outcome = python(&sandbox, "import time; time.sleep(1.5)").await;
    assert!(outcome.cpu_seconds < 0.9, "{}", outcome.cpu_seconds);
}

#[tokio::test]
async fn processor_time_between_cells_is_bounded() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    let limits = Limits { seconds: 1.0, ..limits() };
    let mut session =
        sandbox.session(SessionOptions { limits, ..SessionOptions::default() }).unwrap();
    let calm = "import threading, time\n\
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nx = 1";
    assert_eq!(session.cell(calm).await.unwrap().ended, None);
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert_eq!(session.cell("x").await.unwrap().shown, ["1"]);
    // Children that end at once leave no processor time behind. They are counted while they run.
    for code in [
        "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        while True: pass",
        "import os, signal, time
if os.fork() == 0:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        try:
            if os.fork() == 0:
                for _ in range(300000): pass
                os._exit(0)
        except OSError: time.sleep(0.01)",
    ] {
        let cell = session.cell(code).await.unwrap();
        assert!(cell.ended.is_none() || cell.is_fresh, "{cell:?}");
        let started = std::time::Instant::now();
        loop {
            tokio::time::sleep(std::time::Duration::from_secs(4)).await;
            let next = session.cell("1").await.unwrap();
            if let Some(ended) = next.ended {
                // On a busy machine, many children may reach the memory limit first.
                assert!(
                    matches!(ended, EndReason::TimeLimit | EndReason::MemoryLimit),
                    "{ended:?}: {code}"
                );
                break;
            }
            assert!(started.elapsed().as_secs() < 60, "it goes on: {code}");
        }
    }
}

#[tokio::test]
async fn cells_survive_patched_functions_and_odd_exceptions() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    let mut session =
        sandbox.session(SessionOptions { limits: limits(), ..SessionOptions::default() }).unwrap();
    for (code, ename) in [
        ("import json, struct\njson.dumps = struct.pack = struct.unpack = None", None),
        (
            "class Meta(type):\n    def __getattribute__(cls, name): raise SystemExit\n\
             class Odd(Exception, metaclass=Meta): pass\nraise Odd",
            Some("Odd"),
        ),
        (
            "class Bare(Exception):\n    def __getattribute__(self, name): raise SystemExit\n\
             raise Bare",
            Some("Bare"),
        ),
    ] {
        let cell = session.cell(code).await.unwrap();
        let error = cell.error.as_ref().map(|error| error.ename.as_str());
        assert_eq!((error, cell.ended), (ename, None), "{code}");
    }
    assert_eq!(session.cell("6 * 7").await.unwrap().shown, ["42"]);
}
