use std::time::Duration;

use axum::http::StatusCode;
use serde_json::json;

use crate::GatewayOptions;
use crate::testing::{CONTEXT, LIMITS, Limits, TestGateway};

#[tokio::test]
async fn rejected_prompt_leaves_batch_unrecorded() {
    // The first completions end long before the last prompt is checked, and the other way round.
    for served in [
        || TestGateway::simulated(3),
        || TestGateway::paced(&["A reply."], Duration::from_millis(5)),
    ] {
        for (path, body) in [
            ("/v1/completions", json!({ "prompt": ["ab", "", "cd"] })),
            ("/v1/completions", json!({ "prompt": [[1, 2], [3], []] })),
            ("/v1/completions", json!({ "prompt": [[1, 2], vec![1; CONTEXT]] })),
            ("/generate", json!({ "input_ids": [[1, 2], []] })),
        ] {
            let served = served();
            let response = served.post(path, &body).await;
            assert_eq!(
                response.status,
                StatusCode::BAD_REQUEST,
                "{path} {body}: {}",
                response.text
            );
            let recorded = served.session.close(Duration::from_secs(5)).await.0;
            assert_eq!(recorded.calls, [], "{path} {body}");
            assert_eq!(recorded.trajectory.sampled_tokens(), 0);
        }
    }
}

#[tokio::test]
async fn sampler_rejection_rejects_all_prompts() {
    let served = TestGateway::simulated(3);
    let response =
        served.post("/v1/completions", &json!({ "prompt": [[1, 2], [4_000_000]] })).await;
    assert!(response.text.contains("outside the model's vocabulary"), "{}", response.text);
    assert_eq!(served.session.close(Duration::from_secs(5)).await.0.calls, []);
}

#[tokio::test]
async fn attempt_limit_rejects_all_prompts() {
    let served = TestGateway::with_limits(&["A reply."], Limits { calls: 2, ..LIMITS });
    let response = served.post("/v1/completions", &json!({ "prompt": ["a", "b", "c"] })).await;
    assert!(response.text.contains("has reached its limit of 2 calls"), "{}", response.text);
    assert_eq!(served.session.close(Duration::from_secs(5)).await.0.calls, []);
}

#[tokio::test]
async fn batch_can_have_more_prompts_than_permits() {
    let served = TestGateway::paced_with(
        &["Yes."],
        Duration::from_millis(1),
        GatewayOptions { running: 1, ..GatewayOptions::default() },
    );
    let response = served.post("/v1/completions", &json!({ "prompt": ["a", "b", "c"] })).await;
    assert_eq!(response.json()["choices"].as_array().map(Vec::len), Some(3), "{}", response.text);
    assert_eq!(served.session.close(Duration::from_secs(5)).await.0.calls.len(), 3);
}
