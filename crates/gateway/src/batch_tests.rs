use std::time::Duration;

use axum::http::StatusCode;
use serde_json::json;

use crate::Options;
use crate::testing::{CONTEXT, LIMITS, Limits, Served};

#[tokio::test]
async fn rejected_prompt_leaves_body_unrecorded() {
    // The first completions end long before the last prompt is checked, and the other way round.
    let slow: fn() -> Served = || Served::paced(&["A reply."], Duration::from_millis(5));
    for served in [|| Served::simulated(3), slow] {
        for (path, body) in [
            ("/v1/completions", json!({ "prompt": ["ab", "", "cd"] })),
            ("/v1/completions", json!({ "prompt": [[1, 2], [3], []] })),
            ("/v1/completions", json!({ "prompt": [[1, 2], vec![1; CONTEXT]] })),
            ("/generate", json!({ "input_ids": [[1, 2], []] })),
        ] {
            let served = served();
            let answer = served.post(path, &body).await;
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{path} {body}: {}", answer.text);
            let recorded = served.session.close(Duration::from_secs(5)).await.0;
            assert_eq!(recorded.calls, [], "{path} {body}");
            assert_eq!(recorded.trajectory.sampled_tokens(), 0);
        }
    }
}

#[tokio::test]
async fn sampler_rejection_rejects_all_prompts() {
    let served = Served::simulated(3);
    let answer = served.post("/v1/completions", &json!({ "prompt": [[1, 2], [4_000_000]] })).await;
    assert!(answer.text.contains("outside the model's vocabulary"), "{}", answer.text);
    assert_eq!(served.session.close(Duration::from_secs(5)).await.0.calls, []);
}

#[tokio::test]
async fn attempt_limit_rejects_all_prompts() {
    let served = Served::limited(&["A reply."], Limits { calls: 2, ..LIMITS });
    let answer = served.post("/v1/completions", &json!({ "prompt": ["a", "b", "c"] })).await;
    assert!(answer.text.contains("has made its 2 calls"), "{}", answer.text);
    assert_eq!(served.session.close(Duration::from_secs(5)).await.0.calls, []);
}

#[tokio::test]
async fn body_can_have_more_prompts_than_permits() {
    let served =
        Served::paced_with(&["Yes."], Duration::from_millis(1), Options { running: 1, ..Options::default() });
    let answer = served.post("/v1/completions", &json!({ "prompt": ["a", "b", "c"] })).await;
    assert_eq!(answer.json()["choices"].as_array().map(Vec::len), Some(3), "{}", answer.text);
    assert_eq!(served.session.close(Duration::from_secs(5)).await.0.calls.len(), 3);
}
