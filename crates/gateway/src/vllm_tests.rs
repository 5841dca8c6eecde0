use axum::http::StatusCode;
use levade_text::testing::IM_END;
use serde_json::{Value, json};

use crate::testing::{OUTSIDE_KEY, TestGateway};

const PATH: &str = "/inference/v1/generate";

fn request(params: &Value) -> Value {
    json!({
        "model": "tiny", "request_id": "r1", "token_ids": [72, 105], "sampling_params": params,
        "cache_salt": "v3", "priority": 0, "return_token_ids": true, "output_mode": "tokens",
    })
}

/// Parses the chunks of a stream.
fn chunks(text: &str) -> Vec<Value> {
    let frames = text.strip_suffix("data: [DONE]\n\n").unwrap().split("\n\n");
    let frames = frames.filter(|frame| !frame.is_empty());
    frames
        .map(|frame| serde_json::from_str(frame.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}

#[tokio::test]
async fn response_reports_ids_and_logprobs_in_both_formats() {
    let served = TestGateway::scripted(&["ab"]);
    let body =
        request(&json!({ "logprobs": 0, "stop_token_ids": [98], "skip_special_tokens": false }));
    let full = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await.json();
    assert_eq!((&full["request_id"], &full["model"]), (&json!("r1"), &json!("tiny")));
    let choice = &full["choices"][0];
    assert_eq!(choice["token_ids"], json!([97, 98, IM_END]));
    let content = choice["logprobs"]["content"].as_array().unwrap();
    for (token, id) in content.iter().zip([97, 98, IM_END]) {
        assert_eq!(token["token"], format!("token_id:{id}"));
        assert_eq!((&token["token_id"], &token["logprob"]), (&json!(id), &json!(-0.5)));
    }
    assert_eq!((content.len(), &choice["finish_reason"]), (3, &json!("stop")));
    // The end-of-turn token is not among the client's stop tokens.
    assert_eq!(choice["stop_reason"], Value::Null);
    assert_eq!(choice["weight_versions"], json!([{ "version": "0", "start": 0, "end": 3 }]));
    assert_eq!(
        (&full["usage"]["prompt_tokens"], &full["prompt_logprobs"]),
        (&json!(2), &Value::Null)
    );
    assert!(served.gateway.unknown_fields().is_empty(), "{:?}", served.gateway.unknown_fields());
}

#[tokio::test]
async fn client_stop_token_is_stop_reason() {
    let served = TestGateway::scripted(&["ab"]);
    let body = request(&json!({ "stop_token_ids": [IM_END] }));
    let full = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await.json();
    assert_eq!(full["choices"][0]["stop_reason"], IM_END);
    assert_eq!(full["choices"][0]["logprobs"], Value::Null);
    // A completion that ends at `max_tokens` did not end because of its last token.
    let body = request(&json!({ "stop_token_ids": [97], "max_tokens": 1 }));
    let choice = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await.json()["choices"]
        [0]
    .clone();
    assert_eq!((&choice["token_ids"], &choice["finish_reason"]), (&json!([97]), &json!("length")));
    assert_eq!(choice["stop_reason"], Value::Null);
}

#[tokio::test]
async fn stream_matches_document_with_contiguous_version_spans() {
    let served = TestGateway::simulated(12);
    let mut body = request(&json!({ "n": 2, "logprobs": 1, "prompt_logprobs": 1, "seed": 7 }));
    let full = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await.json();
    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    let chunks = chunks(&served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await.text);
    let prompt: Vec<&Value> =
        chunks.iter().filter(|chunk| !chunk["prompt_logprobs"].is_null()).collect();
    assert_eq!(prompt.len(), 1);
    assert_eq!(prompt[0]["prompt_logprobs"], full["prompt_logprobs"]);
    let known = full["prompt_logprobs"].as_array().unwrap();
    assert_eq!((known.len(), &known[0]), (2, &Value::Null));
    assert!(known[1]["105"]["logprob"].as_f64().unwrap() < 0.0);
    for index in 0..2 {
        let parts = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
        let parts: Vec<&Value> = parts.filter(|part| part["index"] == index).collect();
        let of = |name: &str| -> Vec<Value> {
            parts.iter().flat_map(|part| part[name].as_array().unwrap().clone()).collect()
        };
        let ids = of("token_ids");
        assert_eq!(Value::from(ids.clone()), full["choices"][index]["token_ids"]);
        let content =
            parts.iter().flat_map(|part| part["logprobs"]["content"].as_array().unwrap().clone());
        let content: Vec<Value> = content.collect();
        assert_eq!(Value::from(content), full["choices"][index]["logprobs"]["content"]);
        let mut next = 0;
        for run in of("weight_versions") {
            assert_eq!(run["start"], next);
            next = run["end"].as_u64().unwrap();
        }
        assert_eq!(next as usize, ids.len());
    }
    assert_eq!(chunks.last().unwrap()["usage"], full["usage"]);
}

#[tokio::test]
async fn attempt_calls_are_recorded_as_token_ids() {
    let served = TestGateway::scripted(&["ab"]);
    let path = format!("{}{PATH}", served.session.path());
    let response = served.post(&path, &request(&json!({}))).await;
    assert_eq!(response.status, StatusCode::OK, "{}", response.text);
    assert_eq!(served.paths().await, ["Hiab<|im_end|>"]);
}

#[tokio::test]
async fn unsupported_parameters_are_named_in_error() {
    let served = TestGateway::scripted(&["ab"]);
    for (params, param) in [
        (json!({ "logprobs": -1 }), "sampling_params.logprobs"),
        (json!({ "prompt_logprobs": "all" }), "sampling_params.prompt_logprobs"),
        (json!({ "bad_words": ["x"] }), "bad_words"),
        (json!({ "allowed_token_ids": [1] }), "allowed_token_ids"),
        (json!({ "n": 0 }), "n"),
    ] {
        let response = served.send("POST", PATH, OUTSIDE_KEY, &request(&params).to_string()).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{params}: {}", response.text);
        assert_eq!(response.json()["error"]["param"], param, "{}", response.text);
    }
    let mut body = request(&json!({}));
    body["output_mode"] = "text".into();
    let response = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await;
    assert_eq!(response.json()["error"]["param"], "output_mode");
    // Unknown parameters are counted.
    let body = request(&json!({ "no_such_thing": 1 }));
    assert_eq!(
        served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await.status,
        StatusCode::OK
    );
    assert_eq!(served.gateway.unknown_fields()["generate.sampling_params.no_such_thing"], 1);
}
