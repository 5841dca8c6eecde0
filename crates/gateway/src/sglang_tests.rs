use axum::http::StatusCode;
use levade_text::testing::IM_END;
use serde_json::{Value, json};

use crate::testing::{OUTSIDE_KEY, TestGateway};

const PATH: &str = "/generate";

async fn send_request(served: &TestGateway, body: &Value) -> Value {
    let response = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await;
    assert_eq!(response.status, StatusCode::OK, "{}", response.text);
    response.json()
}

#[tokio::test]
async fn response_reports_ids_and_logprob_triplets() {
    let served = TestGateway::scripted(&["ab"]);
    let body = json!({
        "rid": "r1", "input_ids": [72, 105], "return_logprob": true, "logprob_start_len": -1,
        "sampling_params": { "max_new_tokens": 9, "temperature": 1.0, "skip_special_tokens": true },
    });
    let found = send_request(&served, &body).await;
    assert_eq!((&found["text"], &found["output_ids"]), (&json!("ab"), &json!([97, 98, IM_END])));
    let meta = &found["meta_info"];
    assert_eq!(meta["id"], "r1");
    assert_eq!(meta["finish_reason"], json!({ "type": "stop", "matched": IM_END }));
    assert_eq!((&meta["prompt_tokens"], &meta["completion_tokens"]), (&json!(2), &json!(3)));
    let triplets = json!([[-0.5, 97, null], [-0.5, 98, null], [-0.5, IM_END, null]]);
    assert_eq!(meta["output_token_logprobs"], triplets);
    assert_eq!((&meta["input_token_logprobs"], &meta["weight_version"]), (&json!([]), &json!("0")));
    assert_eq!(meta["weight_versions"], json!([{ "version": "0", "start": 0, "end": 3 }]));
    assert!(served.gateway.unknown_fields().is_empty(), "{:?}", served.gateway.unknown_fields());
}

#[tokio::test]
async fn completion_text_is_trimmed_by_client_parameters() {
    for (params, text) in [
        (json!({ "stop": ["c"] }), "ab"),
        (json!({ "stop": ["c"], "no_stop_trim": true }), "abc"),
        (json!({ "stop": ["c"], "skip_special_tokens": false }), "ab"),
        (json!({ "skip_special_tokens": false }), "abcd"),
        (json!({ "skip_special_tokens": false, "no_stop_trim": true }), "abcd<|im_end|>"),
        (json!({ "no_stop_trim": true }), "abcd"),
        (json!({ "max_new_tokens": 2 }), "ab"),
    ] {
        let served = TestGateway::scripted(&["abcd"]);
        let mut body = json!({ "text": "Hi", "sampling_params": params });
        let found = send_request(&served, &body).await;
        assert_eq!(found["text"], text, "{params}");
        // The last chunk of a stream contains the complete output.
        body["stream"] = true.into();
        let response = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await;
        let frames = response.text.strip_suffix("\n\ndata: [DONE]\n\n").unwrap().split("\n\n");
        let chunks: Vec<Value> = frames
            .map(|frame| serde_json::from_str(frame.strip_prefix("data: ").unwrap()).unwrap())
            .collect();
        for pair in chunks.windows(2) {
            assert!(
                output_ids(&pair[1]).starts_with(&output_ids(&pair[0])),
                "streams tell of all so far"
            );
        }
        let last = chunks.last().unwrap();
        assert_eq!((&last["text"], &last["output_ids"]), (&found["text"], &found["output_ids"]));
        assert_eq!(last["meta_info"]["finish_reason"], found["meta_info"]["finish_reason"]);
    }
}

fn output_ids(chunk: &Value) -> Vec<Value> {
    chunk["output_ids"].as_array().unwrap().clone()
}

#[tokio::test]
async fn sampling_params_of_wrong_type_or_range_are_rejected() {
    let served = TestGateway::scripted(&["ab"]);
    for (params, expected) in [
        (json!({ "skip_special_tokens": "no" }), "skip_special_tokens = \"no\""),
        (json!({ "no_stop_trim": 1 }), "no_stop_trim = 1"),
        (json!({ "top_k": -5 }), "top_k = -5"),
    ] {
        let body = json!({ "text": "Hi", "sampling_params": params });
        let response = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{params}: {}", response.text);
        assert!(response.text.contains(&expected.replace('"', "\\\"")), "{}", response.text);
    }
}

#[tokio::test]
async fn prompt_logprobs_start_at_requested_index() {
    let served = TestGateway::simulated(4);
    let mut body = json!({
        "input_ids": [72, 105, 33], "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 2,
        "sampling_params": { "max_new_tokens": 4, "ignore_eos": true }, "return_text_in_logprobs": true,
    });
    let all = send_request(&served, &body).await;
    let all = &all["meta_info"];
    let known = all["input_token_logprobs"].as_array().unwrap();
    assert_eq!((known.len(), &known[0]), (3, &json!([null, 72, "H"])));
    assert!(known[1][0].as_f64().unwrap() < 0.0 && known[1][1] == 105);
    let tops = all["input_top_logprobs"].as_array().unwrap();
    assert_eq!((tops[0].is_null(), tops[1].as_array().unwrap().len()), (true, 2));
    assert_eq!(all["output_top_logprobs"].as_array().unwrap().len(), 4);
    body["logprob_start_len"] = 1.into();
    let later = send_request(&served, &body).await;
    let later = later["meta_info"]["input_token_logprobs"].as_array().unwrap().clone();
    assert_eq!((later.len(), &later[0], &later[1]), (2, &json!([null, 105, "i"]), &known[2]));
}

#[tokio::test]
async fn batch_returns_completions_in_order() {
    let served = TestGateway::simulated(3);
    let body = json!({
        "input_ids": [[72], [105, 33]], "rid": ["a", "b"],
        "sampling_params": [{ "max_new_tokens": 2, "n": 2, "ignore_eos": true }, { "max_new_tokens": 3, "ignore_eos": true }],
    });
    let found = send_request(&served, &body).await;
    let facts: Vec<(&str, u64, u64)> = found
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            let meta = &one["meta_info"];
            let count = |name: &str| meta[name].as_u64().unwrap();
            (meta["id"].as_str().unwrap(), count("prompt_tokens"), count("completion_tokens"))
        })
        .collect();
    assert_eq!(facts, [("a_0", 1, 2), ("a_1", 1, 2), ("b", 2, 3)]);
    for (field, value) in
        [("rid", json!(["a"])), ("sampling_params", json!([{}])), ("stream", json!(true))]
    {
        let mut wrong = body.clone();
        wrong[field] = value;
        let response = served.send("POST", PATH, OUTSIDE_KEY, &wrong.to_string()).await;
        assert_eq!(
            (response.status, &response.json()["error"]["param"]),
            (StatusCode::BAD_REQUEST, &json!(field))
        );
    }
}

#[tokio::test]
async fn stream_of_several_choices_reports_index() {
    let served = TestGateway::simulated(3);
    let body = json!({ "input_ids": [72], "stream": true, "sampling_params": { "n": 2 } });
    let response = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await;
    for index in 0..2 {
        assert!(response.text.contains(&format!("\"index\":{index}")), "{}", response.text);
    }
}

#[tokio::test]
async fn unsupported_sglang_fields_are_named_in_error() {
    let served = TestGateway::scripted(&["ab"]);
    for (body, param) in [
        (json!({ "sampling_params": {} }), "input_ids"),
        (json!({ "input_ids": [1], "text": "a" }), "input_ids"),
        (json!({ "input_ids": [] }), "prompt"),
        (
            json!({ "input_ids": [1], "sampling_params": { "ebnf": "root ::= x" } }),
            "sampling_params.ebnf",
        ),
        (json!({ "input_ids": [1], "sampling_params": { "regex": 1 } }), "sampling_params.regex"),
        (json!({ "input_ids": [1], "sampling_params": { "stop_regex": "a" } }), "stop_regex"),
        (json!({ "input_ids": [1], "token_ids_logprob": [3] }), "token_ids_logprob"),
        (json!({ "input_ids": [1], "return_hidden_states": true }), "return_hidden_states"),
    ] {
        let response = served.send("POST", PATH, OUTSIDE_KEY, &body.to_string()).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{body}: {}", response.text);
        assert_eq!(response.json()["error"]["param"], param, "{}", response.text);
    }
}

#[tokio::test]
async fn info_endpoints_describe_model() {
    let served = TestGateway::simulated(3);
    for (path, field, value) in [
        ("/version", "version", json!(env!("CARGO_PKG_VERSION"))),
        ("/get_model_info", "model_path", json!("tiny")),
        ("/model_info?model=tiny", "is_generation", json!(true)),
        ("/server_info", "context_length", json!(4096)),
        ("/weight_info", "weight_version", json!("0")),
        ("/health_generate", "absent", Value::Null),
        ("/tokenizer_info", "eos_token", json!("<|endoftext|>")),
        ("/v1/models", "object", json!("list")),
    ] {
        let theirs = served.send("GET", path, OUTSIDE_KEY, "").await;
        let ours = format!("{}{path}", served.session.path());
        assert_eq!((theirs.status, &theirs.json()[field]), (StatusCode::OK, &value), "{path}");
        let theirs = served.send("GET", &ours, served.session.key(), "").await;
        assert_eq!((theirs.status, &theirs.json()[field]), (StatusCode::OK, &value), "{ours}");
        if path != "/version" {
            assert_eq!(
                served.send("GET", &ours, OUTSIDE_KEY, "").await.status,
                StatusCode::UNAUTHORIZED,
                "{ours}"
            );
        }
    }
    assert_eq!(served.send("GET", "/ping", OUTSIDE_KEY, "").await.status, StatusCode::OK);
    assert_eq!(
        served.send("GET", "/model_info?model=x", OUTSIDE_KEY, "").await.status,
        StatusCode::NOT_FOUND
    );
    // A model that cannot sample is unhealthy.
    let silent = TestGateway::scripted(&[]);
    let response = silent.send("GET", "/health_generate", OUTSIDE_KEY, "").await;
    assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE, "{}", response.text);
}
