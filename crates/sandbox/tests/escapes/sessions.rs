//! Tests of sessions: lost variables and processes left behind.

use super::*;

#[tokio::test]
async fn session_reports_loss_of_variables() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    let before = ResourceSnapshot::wait_until_stable().await;
    let limits = Limits { seconds: 4.0, ..limits() };
    let mut session =
        sandbox.session(SessionOptions { limits, ..SessionOptions::default() }).unwrap();
    let first = session.cell("import threading\nx = [1, 2]\nx").await.unwrap();
    assert_eq!(
        (first.shown, first.ended, first.is_fresh),
        (vec!["[1, 2]".to_owned()], None, false)
    );
    let flood = session.cell("for n in range(20000): print(n)\nx.append(3); x;").await.unwrap();
    assert_eq!((flood.stdout.total, flood.shown.len(), flood.ended), (108_890, 0, None));
    let raised = session.cell("def f(): return 1/0\nf()").await.unwrap();
    let error = raised.error.unwrap();
    assert_eq!(
        (error.ename.as_str(), error.evalue.as_str()),
        ("ZeroDivisionError", "division by zero")
    );
    assert!(error.traceback.iter().any(|line| line.contains("<cell 3>")), "{error:?}");
    assert!(!error.traceback.iter().any(|line| line.contains("<string>")), "{error:?}");
    assert_eq!(session.cell("x").await.unwrap().shown, ["[1, 2, 3]"]);
    let forked = session.cell("import os\nos.fork()\nx = 1").await.unwrap();
    assert_eq!((forked.error, forked.ended), (None, None));
    assert_eq!(session.cell("x").await.unwrap().shown, ["1"]);
    // The interpreter is lost by a time limit, an exit, or a write to a descriptor that the code
    // must not use.
    for (code, ended) in [
        ("while True: pass", Some(EndReason::TimeLimit)),
        ("import os; os._exit(3)", Some(EndReason::Exit(3))),
        ("import os; os.write(3, b'\\xff\\xff\\xff\\xff')\nimport time; time.sleep(9)", None),
        (
            "import os; os.write(3, b'\\x02\\0\\0\\0{}')\nimport time; time.sleep(9)",
            Some(EndReason::Signal(9)),
        ),
        ("import os; os.close(3)\nimport time; time.sleep(9)", Some(EndReason::TimeLimit)),
        ("held = []\nwhile True: held.append(bytearray(1 << 20))", None),
    ] {
        session.cell("x = 5").await.unwrap();
        let lost = session.cell(code).await.unwrap();
        if let Some(ended) = ended {
            assert_eq!(lost.ended, Some(ended), "{code}");
        } else if lost.ended.is_none() {
            assert_eq!(lost.error.unwrap().ename, "MemoryError", "{code}");
            continue;
        }
        let next = session.cell("x").await.unwrap();
        assert!(next.is_fresh, "{code}");
        assert_eq!(next.error.unwrap().ename, "NameError", "{code}");
    }
    drop(session);
    before.wait_until_restored().await.unwrap();
}

#[tokio::test]
async fn processes_left_by_cells_are_watched() {
    let Some((sandbox, _lock)) = full_sandbox().await else { return };
    python(&sandbox, "pass").await;
    let before = leaks::processes();
    let limits = Limits { memory_mb: 128, ..limits() };
    let mut session =
        sandbox.session(SessionOptions { limits, ..SessionOptions::default() }).unwrap();
    let code = "import subprocess, sys\n\
        left = 'import time; time.sleep(1); held = bytearray(b\"x\") * (60 << 20); \
        time.sleep(60)'\n\
        for _ in range(4): subprocess.Popen([sys.executable, '-c', left])";
    let cell = session.cell(code).await.unwrap();
    assert_eq!((cell.ended, cell.error), (None, None));
    let started = std::time::Instant::now();
    while leaks::processes() > before {
        assert!(started.elapsed().as_secs() < 20, "they go on");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(session.cell("1").await.unwrap().ended, Some(EndReason::MemoryLimit));
    let next = session.cell("1").await.unwrap();
    assert_eq!((next.shown, next.is_fresh), (vec!["1".to_owned()], true));
}
