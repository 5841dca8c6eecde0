use std::sync::Arc;
use std::time::{Duration, Instant};

use levade_reward::{CodeKeys, Isolation, Scorer, ScorerInput, TestScoring};
use levade_sandbox::service::{Service, serve};
use levade_tree::{AttemptId, Component, Outcome};
use serde_json::{Value, json};

use super::*;

fn keys() -> CodeKeys {
    CodeKeys {
        value: TestScoring::Fraction,
        protection: Isolation::BestEffort,
        seconds: 3.0,
        memory_mb: 128,
        ..CodeKeys::default()
    }
}

fn scorer_input(code_block: &str, tests: Value) -> ScorerInput {
    let outcome = Outcome::demonstrated(code_block);
    let task = json!({ "row": { "tests": tests } });
    ScorerInput {
        attempt: AttemptId::from_bytes([1; 16]),
        task,
        outcome,
        trajectory: Arc::default(),
    }
}

async fn score(scorer: &Arc<dyn Scorer>, program: &str, tests: Value) -> Vec<f64> {
    let code_block = format!("```python\n{program}\n```");
    let components: Vec<Component> = scorer.score(&scorer_input(&code_block, tests)).await.unwrap();
    components.iter().map(|component| component.value).collect()
}

fn tests() -> Value {
    json!({ "inputs": ["1 2", "3 4"], "outputs": ["3", "7"] })
}

const ADD: &str = "print(sum(map(int, input().split())))";

#[tokio::test]
async fn misbehaving_programs_affect_only_their_score() {
    let local_scorer = create_code_scorer(&keys()).unwrap();
    local_scorer.check_ready(&Value::Null).await.unwrap();
    assert_eq!(score(&local_scorer, ADD, tests()).await, [1.0, 1.0, 0.0]);
    let start = Instant::now();
    for (program, limited) in [
        ("while True: pass", 1.0),
        ("import time\ntime.sleep(1e6)", 1.0),
        ("x = bytearray(1 << 30)", 0.0),
        ("import os\nwhile True:\n    os.fork()", 1.0),
        ("for _ in range(1 << 22): print('x' * 64)", 0.0),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", 0.0),
        ("print(open('/etc/shadow').read())", 0.0),
        ("import socket\nsocket.create_connection(('1.1.1.1', 80), 2)", 0.0),
    ] {
        let components = score(&local_scorer, program, tests()).await;
        assert_eq!(components[..2], [0.0, 0.0], "{program}");
        // A failed fork raises an exception, possibly before the timeout.
        if limited > 0.0 && !program.contains("fork") {
            assert_eq!(components[2], limited, "{program}");
        }
    }
    // A program that timed out is not run again.
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert_eq!(score(&local_scorer, ADD, tests()).await, [1.0, 1.0, 0.0]);
    let asserts = json!(["assert add(1, 2) == 3", "assert add(1, 2) == 4"]);
    assert_eq!(
        score(&local_scorer, "def add(a, b):\n    return a + b", asserts).await,
        [0.5, 0.5, 0.0]
    );
    // Output beyond the limit of kept output must neither pass nor hide a wrong part.
    let long = json!([{ "input": "", "output": "1\n".repeat(100_000) }]);
    assert_eq!(score(&local_scorer, "print('1\\n' * 100000)", long.clone()).await[0], 1.0);
    assert_eq!(
        score(&local_scorer, "print('1\\n' * 90000 + '2\\n' * 400000 + '1\\n' * 10000)", long)
            .await[0],
        0.0
    );
}

#[tokio::test]
async fn sandbox_service_runs_programs() {
    let options = Options { protection: Demand::BestEffort, ..Options::default() };
    let service = Service::new(
        Sandbox::start(options).await.unwrap(),
        Limits::default(),
        &[],
        Default::default(),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { serve(&service, listener, std::future::pending()).await });
    let remote = create_code_scorer(&CodeKeys { url: Some(url), ..keys() }).unwrap();
    remote.check_ready(&Value::Null).await.unwrap();
    assert_eq!(score(&remote, ADD, tests()).await, [1.0, 1.0, 0.0]);
    assert_eq!(score(&remote, "while True: pass", tests()).await, [0.0, 0.0, 1.0]);
    assert_eq!(
        score(&remote, "def f(x):\n    return x", json!(["assert f(2) == 2"])).await[0],
        1.0
    );

    let unreachable =
        create_code_scorer(&CodeKeys { url: Some("http://127.0.0.1:9".into()), ..keys() }).unwrap();
    let error = unreachable.score(&scorer_input("```\n1\n```", tests())).await.unwrap_err();
    assert!(error.is_temporary(), "{error}");
    assert!(unreachable.check_ready(&Value::Null).await.is_err());
    let keyed =
        CodeKeys { url: Some("http://h".into()), key_env: Some("LEVADE_NO_SUCH".into()), ..keys() };
    assert!(create_code_scorer(&keyed).unwrap_err().contains("LEVADE_NO_SUCH"));
}
