//! Tests of the service's responses, without a socket.

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;

use super::*;
use crate::protection::Demand;
use crate::sandbox::Options;

async fn service(options: Options, keys: &[String]) -> Service {
    let options = Options { protection: Demand::BestEffort, ..options };
    let limits = Limits { seconds: 60.0, ..Limits::default() };
    Service::new(Sandbox::start(options).await.unwrap(), limits, keys, Access::default())
}

async fn post(service: &Service, path: &str, key: Option<&str>, body: &str) -> (u16, Value) {
    let mut request = Request::post(path).header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let response =
        service.router().oneshot(request.body(Body::from(body.to_owned())).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap())
}

#[tokio::test]
async fn run_code_responds_as_sandbox_fusion() {
    let service = service(Options::default(), &[]).await;
    let run = async |body: Value| {
        let (status, response) = post(&service, "/run_code", None, &body.to_string()).await;
        assert_eq!(status, 200, "{response}");
        response
    };
    let good = run(json!({
        "code": "import sys\nprint(sys.stdin.read() + open('in.txt').read())\n\
                 open('out/x', 'w').write('made')",
        "language": "python", "stdin": "read ", "files": {"in.txt": "aGk=", "out/.keep": ""},
        "fetch_files": ["out/x", "nothing"],
    }))
    .await;
    assert_eq!(good["status"], "Success", "{good}");
    assert_eq!(good["run_result"]["status"], "Finished");
    assert_eq!(good["run_result"]["stdout"], "read hi\n");
    assert_eq!(good["run_result"]["return_code"], 0);
    assert_eq!(good["files"], json!({ "out/x": "bWFkZQ==" }));
    assert!(good["compile_result"].is_null() && good["executor_pod_name"].is_null());

    let failed = run(json!({ "code": "print(1)\n1/0", "language": "python" })).await;
    assert_eq!((&failed["status"], &failed["message"]), (&json!("Failed"), &json!("")));
    assert_eq!(failed["run_result"]["return_code"], 1);
    assert!(
        failed["run_result"]["stderr"]
            .as_str()
            .unwrap()
            .ends_with("ZeroDivisionError: division by zero\n")
    );

    let shell = run(json!({ "code": "echo a; exit 3", "language": "bash" })).await;
    assert_eq!(
        (&shell["run_result"]["stdout"], &shell["run_result"]["return_code"]),
        (&json!("a\n"), &json!(3))
    );

    let late = run(
        json!({ "code": "print('x')\nwhile 1: pass", "language": "python", "run_timeout": 0.5 }),
    )
    .await;
    assert_eq!(
        (&late["status"], &late["run_result"]["status"]),
        (&json!("Failed"), &json!("TimeLimitExceeded"))
    );
    assert_eq!(
        (&late["run_result"]["stdout"], &late["run_result"]["return_code"]),
        (&json!("x\n"), &Value::Null)
    );

    let other = run(json!({ "code": "", "language": "cpp" })).await;
    assert_eq!(other["status"], "SandboxError");
    assert!(other["message"].as_str().unwrap().contains("use python or bash"));
}

#[tokio::test]
async fn cells_share_variables_and_continue_after_exceptions() {
    let service = service(Options::default(), &[]).await;
    let body = json!({ "cells": ["a = 'hello'", "a", "import sys; print(a); sys.stderr.write('e\\n\
                                                      ')", "assert False",
                                 "open('f', 'w').write(a)"], "fetch_files": ["f"] });
    let (status, response) = post(&service, "/run_jupyter", None, &body.to_string()).await;
    assert_eq!((status, &response["status"]), (200, &json!("Success")), "{response}");
    let cells = response["cells"].as_array().unwrap();
    assert_eq!(cells[1]["display"], json!([{ "text/plain": "'hello'" }]));
    assert_eq!((&cells[2]["stdout"], &cells[2]["stderr"]), (&json!("hello\n"), &json!("e\n")));
    assert_eq!(cells[3]["error"][0]["ename"], "AssertionError");
    assert_eq!(response["files"], json!({ "f": "aGVsbG8=" }));
    assert_eq!(response["driver"]["status"], "Finished");

    let body = json!({ "cells": ["1", "while 1: pass", "2"], "total_timeout": 0.5 });
    let (_, late) = post(&service, "/run_jupyter", None, &body.to_string()).await;
    assert_eq!(
        (&late["status"], &late["driver"]["status"]),
        (&json!("Failed"), &json!("TimeLimitExceeded"))
    );
    assert_eq!(late["cells"].as_array().unwrap().len(), 2, "{late}");

    let body = json!({ "cells": ["import os; os._exit(7)", "2"] });
    let (_, exited) = post(&service, "/run_jupyter", None, &body.to_string()).await;
    assert_eq!(
        (&exited["status"], &exited["driver"]["return_code"]),
        (&json!("Failed"), &json!(7))
    );
}

#[tokio::test]
async fn odd_output_and_exceptions_preserve_variables() {
    let service = service(Options::default(), &[]).await;
    let cells = [
        "x = 'kept'",
        "raise ValueError('half a pair: \\ud83d')",
        "class Odd(Exception):\n    def __str__(self):\n        return self.no_such\nraise Odd()",
        "class Half:\n    def __repr__(self):\n        return '\\udc80'\nHalf()",
        "import sys\nkept = sys.stdout\nclass Out:\n    def write(self, text): pass\n\
         sys.stdout = Out()",
        "sys.stdout = None",
        "del sys.stdout",
        "sys.stdout = kept; print(x)",
        "for _ in range(2000): display('y' * 60_000)",
        "x",
    ];
    let body = json!({ "cells": cells, "total_timeout": 40 });
    let (status, response) = post(&service, "/run_jupyter", None, &body.to_string()).await;
    assert_eq!((status, &response["status"]), (200, &json!("Success")), "{response}");
    let cells = response["cells"].as_array().unwrap();
    assert_eq!(cells[1]["error"][0]["evalue"], "half a pair: \\ud83d");
    let odd = &cells[2]["error"][0];
    assert_eq!(
        (&odd["ename"], &odd["evalue"]),
        (&json!("Odd"), &json!("<exception str() failed>"))
    );
    assert_eq!(cells[3]["display"], json!([{ "text/plain": "\\udc80" }]));
    assert_eq!(cells[7]["stdout"], "kept\n");
    let shown = cells[8]["display"].as_array().unwrap();
    let last = shown.last().unwrap()["text/plain"].as_str().unwrap();
    assert!(shown.len() < 100 && last.ends_with("more values are left out ...]"), "{last}");
    assert_eq!(cells[9]["display"], json!([{ "text/plain": "'kept'" }]));
}

#[tokio::test]
async fn queue_wait_does_not_count_toward_timeout() {
    let service = service(Options { concurrency: 1, ..Options::default() }, &[]).await;
    let long = r#"{"code": "import time; time.sleep(2)", "language": "python"}"#;
    let holder = {
        let service = service.clone();
        tokio::spawn(async move { post(&service, "/run_code", None, long).await.0 })
    };
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    let body = json!({ "cells": ["a = 1", "a"], "total_timeout": 1.2 });
    let (_, response) = post(&service, "/run_jupyter", None, &body.to_string()).await;
    assert_eq!(response["status"], "Success", "{response}");
    assert_eq!(response["cells"][1]["display"], json!([{ "text/plain": "1" }]));
    assert_eq!(holder.await.unwrap(), 200);
}

#[tokio::test]
async fn cpu_limit_covers_all_processors_until_timeout() {
    let service = service(Options::default(), &[]).await;
    let code = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU)[1])";
    let body = json!({ "code": code, "language": "python", "run_timeout": 7 });
    let (_, response) = post(&service, "/run_code", None, &body.to_string()).await;
    let used_seconds: u64 =
        response["run_result"]["stdout"].as_str().unwrap().trim().parse().unwrap();
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    assert!(used_seconds > 7 * processors, "{used_seconds} seconds for {processors} processors");
}

#[tokio::test]
async fn invalid_request_returns_422_with_field() {
    let service = service(Options::default(), &[]).await;
    for (path, body, part) in [
        ("/run_code", "{", "EOF"),
        ("/run_code", r#"{"language": "python"}"#, "code"),
        ("/run_code", r#"{"code": "", "language": "klingon"}"#, "klingon"),
        ("/run_code", r#"{"code": "", "language": "python", "files": {"a": "?"}}"#, "base64"),
        ("/run_code", r#"{"code": "", "language": "python", "files": {"../a": ""}}"#, "../a"),
        (
            "/run_code",
            r#"{"code": "", "language": "python", "fetch_files": ["/etc/passwd"]}"#,
            "/etc/passwd",
        ),
        ("/run_code", r#"{"code": "", "language": "python", "run_timeout": 0}"#, "seconds"),
        (
            "/run_code",
            r#"{"code": "", "language": "python", "run_timeout": 86400}"#,
            "at most 60 seconds",
        ),
        ("/run_code", r#"{"code": "", "language": "python", "run_timeout": 1e999}"#, "range"),
        ("/run_jupyter", r#"{"cells": [], "total_timeout": 61}"#, "`total_timeout` = 61"),
        ("/run_jupyter", r#"{"cells": [], "kernel": "r"}"#, "kernel"),
    ] {
        let (status, response) = post(&service, path, None, body).await;
        assert_eq!(status, 422, "{body}: {response}");
        assert!(response.to_string().contains(part), "{body}: {response}");
    }
}

#[tokio::test]
async fn web_page_requests_are_rejected_without_keys() {
    let open = service(Options::default(), &[]).await;
    let keyed = service(Options::default(), &["secret".to_owned()]).await;
    const JSON: (&str, &str) = ("content-type", "application/json");
    for (headers, expected) in [
        (&[JSON, ("host", "127.0.0.1:8080")][..], 200),
        (&[JSON, ("host", "evil.example:8080")], 403),
        (&[JSON, ("host", "127.0.0.1:8080"), ("origin", "http://evil.example")], 403),
        (&[JSON, ("host", "127.0.0.1:8080"), ("origin", "null")], 403),
        (&[("content-type", "text/plain"), ("host", "127.0.0.1:8080")], 415),
        (&[("host", "127.0.0.1:8080"), ("content-length", "34")], 415),
    ] {
        assert_eq!(page_status(&open, headers).await, expected, "{headers:?}");
        // No web page has the key.
        assert_eq!(page_status(&keyed, headers).await, 200, "{headers:?}");
    }
}

async fn page_status(service: &Service, headers: &[(&str, &str)]) -> u16 {
    let mut request = Request::post("/run_code").header("authorization", "Bearer secret");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = Body::from(r#"{"code": "", "language": "python"}"#);
    service.router().oneshot(request.body(body).unwrap()).await.unwrap().status().as_u16()
}

#[tokio::test]
async fn configured_keys_are_required() {
    let service = service(Options::default(), &["secret".to_owned()]).await;
    let body = r#"{"code": "", "language": "python"}"#;
    assert_eq!(post(&service, "/run_code", None, body).await.0, 401);
    assert_eq!(post(&service, "/run_code", Some("secrets"), body).await.0, 401);
    assert_eq!(post(&service, "/run_code", Some("secret"), body).await.0, 200);
}

#[tokio::test]
async fn full_queue_returns_429() {
    let service = service(Options { concurrency: 1, waiting: 1, ..Options::default() }, &[]).await;
    let body = r#"{"code": "import time; time.sleep(0.5)", "language": "python"}"#;
    let calls = (0..4).map(|_| {
        let service = service.clone();
        tokio::spawn(async move { post(&service, "/run_code", None, body).await.0 })
    });
    let mut statuses = Vec::new();
    for call in calls.collect::<Vec<_>>() {
        statuses.push(call.await.unwrap());
    }
    statuses.sort();
    assert_eq!(statuses, [200, 200, 429, 429]);
}

#[tokio::test]
async fn request_limits_are_capped_by_service() {
    let service = service(Options::default(), &[]).await;
    let service_limits = service.0.limits;
    let limits = |seconds, memory_mb| service.request_limits("run_timeout", seconds, memory_mb);
    assert_eq!(limits(5.0, 64).unwrap(), Limits { seconds: 5.0, memory_mb: 64, ..service_limits });
    // The maximum time is accepted, and the service chooses the memory limit.
    for memory_mb in [0, -1, i64::MAX] {
        assert_eq!(limits(service_limits.seconds, memory_mb).unwrap(), service_limits);
    }
    let error = limits(service_limits.seconds + 1.0, 64).unwrap_err().to_string();
    assert!(
        error.contains("`run_timeout` = 61, but this service runs code for at most 60 seconds"),
        "{error}"
    );
}

#[tokio::test]
async fn total_and_cell_timeouts_are_enforced() {
    let service = service(Options::default(), &[]).await;
    let response =
        async |body: Value| post(&service, "/run_jupyter", None, &body.to_string()).await.1;
    let slow = "import time; time.sleep(1.2)";
    let late = response(json!({ "cells": [slow, slow, "1"], "total_timeout": 2.0 })).await;
    assert_eq!(
        (&late["status"], &late["driver"]["status"]),
        (&json!("Failed"), &json!("TimeLimitExceeded"))
    );
    assert_eq!(late["cells"].as_array().unwrap().len(), 2, "{late}");
    let spent = late["driver"]["execution_time"].as_f64().unwrap();
    assert!((1.9..20.0).contains(&spent), "{spent}");
    let body =
        json!({ "cells": ["1", "while 1: pass"], "total_timeout": 50.0, "cell_timeout": 0.5 });
    let late = response(body).await;
    assert_eq!(late["driver"]["status"], "TimeLimitExceeded", "{late}");
    assert!(late["driver"]["execution_time"].as_f64().unwrap() < 30.0, "{late}");
}
