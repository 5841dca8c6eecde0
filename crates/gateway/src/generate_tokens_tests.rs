//! Tests of completions of texts and token ids.

use super::*;

#[tokio::test]
async fn completions_accept_texts_and_token_ids() {
    let served = TestGateway::scripted(&["abc"]);
    let body_of = async |body: Value| served.post("/v1/completions", &body).await.json();
    let one = body_of(json!({ "prompt": "Say", "logprobs": 0, "return_token_ids": true })).await;
    let choice = &one["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("abc"), &json!("stop")));
    assert_eq!(choice["token_ids"], json!([97, 98, 99, IM_END]));
    assert_eq!(choice["logprobs"]["text_offset"].as_array().unwrap().len(), 4);
    let batch_response =
        body_of(json!({ "prompt": [[83, 97], [83, 98]], "max_tokens": 2, "n": 2 })).await;
    let texts: Vec<&str> = batch_response["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| choice["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["ab"; 4]);
    let stopped = body_of(json!({ "prompt": "Say", "stop": ["c", "zz"] })).await;
    assert_eq!(
        (&stopped["choices"][0]["text"], &stopped["choices"][0]["stop_reason"]),
        (&json!("ab"), &json!("c"))
    );
    // Some clients need the stop string to parse tags.
    let mut kept =
        json!({ "prompt": "Say", "stop": ["c", "zz"], "include_stop_str_in_output": true });
    assert_eq!(body_of(kept.clone()).await["choices"][0]["text"], "abc");
    kept["stream"] = true.into();
    let stream = served.post("/v1/completions", &kept).await.text;
    let frames = stream.split("\n\n").filter_map(|frame| frame.strip_prefix("data: {"));
    let chunks = frames.map(|rest| serde_json::from_str::<Value>(&format!("{{{rest}")).unwrap());
    let calls_sent: String = chunks
        .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(calls_sent, "abc");
}

#[tokio::test]
async fn several_prompts_are_streamed_concurrently() {
    for echo in [false, true] {
        let mut body =
            json!({ "prompt": [[83, 97], [83, 98, 99]], "n": 2, "max_tokens": 3, "echo": echo });
        let full_response =
            TestGateway::scripted(&["abcd"]).post("/v1/completions", &body).await.json();
        body["stream"] = true.into();
        body["stream_options"] = json!({ "include_usage": true });
        let served = TestGateway::scripted(&["abcd"]);
        let stream = served.post("/v1/completions", &body).await.text;
        assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
        let mut texts = vec![String::new(); 4];
        let mut ends = vec![Value::Null; 4];
        let mut usage = Value::Null;
        for frame in stream.split("\n\n").filter_map(|frame| frame.strip_prefix("data: {")) {
            let chunk: Value = serde_json::from_str(&format!("{{{frame}")).unwrap();
            for choice in chunk["choices"].as_array().unwrap() {
                let index = choice["index"].as_u64().unwrap() as usize;
                texts[index] += choice["text"].as_str().unwrap();
                if !choice["finish_reason"].is_null() {
                    ends[index] = choice["finish_reason"].clone();
                }
            }
            usage = chunk["usage"].clone();
        }
        let want: Vec<&str> = full_response["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["text"].as_str().unwrap())
            .collect();
        assert_eq!(
            (texts, ends),
            (want.iter().map(ToString::to_string).collect(), vec![json!("length"); 4])
        );
        assert_eq!(usage, full_response["usage"]);
        // The calls of both prompts belong to the attempt, and each completion was sampled once.
        assert_eq!(served.session.close(Duration::from_secs(5)).await.0.calls.len(), 4);
    }
    // One rejected prompt rejects the stream.
    let served = TestGateway::scripted(&["abcd"]);
    let body = json!({ "prompt": [[83], []], "stream": true });
    assert_eq!(served.post("/v1/completions", &body).await.status, StatusCode::BAD_REQUEST);
    assert!(served.session.close(Duration::from_secs(5)).await.0.calls.is_empty());
}

/// Prompts of token ids belong to the attempt as well: a prompt that repeats sampled tokens
/// continues them.
#[tokio::test]
async fn returned_token_ids_continue_sampled_sequence() {
    let served = TestGateway::scripted(&["abc"]);
    let body_of = async |prompt: Vec<u32>| {
        served.post("/v1/completions", &json!({ "prompt": prompt })).await.json()
    };
    body_of(vec![1, 2]).await;
    body_of(vec![1, 2, 97, 98, 99, IM_END, 3]).await;
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    let [leaf] = recorded.trajectory.leaves()[..] else { panic!("{:?}", recorded.trajectory) };
    let path = recorded.trajectory.sequence_tokens(leaf);
    assert_eq!(path, [1, 2, 97, 98, 99, IM_END, 3, 97, 98, 99, IM_END]);
}

#[tokio::test]
async fn tokenize_parses_special_tokens_unless_disabled() {
    let served = TestGateway::scripted(&["Yes."]);
    let text = "a<|im_end|>";
    let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
    for (switch, want) in
        [(json!(null), vec![97, IM_END]), (json!(true), vec![97, IM_END]), (json!(false), bytes)]
    {
        let body = json!({ "model": "tiny", "prompt": text, "add_special_tokens": switch });
        let response =
            served.send("POST", "/tokenize", OUTSIDE_KEY, &body.to_string()).await.json();
        assert_eq!(
            (&response["tokens"], &response["count"]),
            (&json!(want), &json!(want.len())),
            "{switch}"
        );
    }
}

#[tokio::test]
async fn changed_template_variables_are_rejected() {
    let served = TestGateway::scripted(&["Yes."]);
    for (variables, status) in [
        (json!({}), StatusCode::OK),
        // The template does not contain this variable, so it changes nothing.
        (json!({ "no_such_variable": true }), StatusCode::OK),
        (json!({ "add_generation_prompt": 7 }), StatusCode::BAD_REQUEST),
    ] {
        let mut body = question("1?");
        body["chat_template_kwargs"] = variables.clone();
        let response = served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await;
        assert_eq!(response.status, status, "{variables}: {}", response.text);
    }
}

#[tokio::test]
async fn vllm_constraints_reach_sampler() {
    let served = TestGateway::scripted(&["Yes."]);
    for (path, field) in [(CHAT, "guided_choice"), ("/v1/completions", "guided_choice")] {
        let mut body = question("1?");
        body["prompt"] = "1?".into();
        body[field] = json!(["Yes", "No"]);
        let response = served.send("POST", path, OUTSIDE_KEY, &body.to_string()).await;
        assert!(
            response.text.contains("a scripted model does not support grammars"),
            "{path}: {}",
            response.text
        );
    }
}
