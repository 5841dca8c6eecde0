//! Events in the format `triplet`, which keeps only the tokens of model requests and the values of
//! rewards.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

/// Reduces an event to the format `triplet`: token ids for a model request, and the value for a
/// reward. Other events are unchanged.
pub(super) fn to_triplet(mut event: Value) -> Value {
    let Value::Object(data) = event["data"].take() else { return event };
    event["data"] = match event["event_type"].as_str() {
        Some("model_request") => reduce_model_request(&data),
        Some("reward") => {
            let value = data.get("value").cloned().unwrap_or_default();
            copy_fields(json!({ "value": value }), &data, &["source", "reason"])
        }
        _ => Value::Object(data),
    };
    event
}

/// Removes every model request whose prompt equals the prompt of a later model request.
pub(super) fn remove_repeated_requests(events: Vec<Value>) -> Vec<Value> {
    let mut seen = HashSet::new();
    let mut kept: Vec<Value> = events
        .into_iter()
        .rev()
        .filter(|event| {
            event["event_type"] != "model_request"
                || seen.insert(event["data"]["prompt_token_ids"].to_string())
        })
        .collect();
    kept.reverse();
    kept
}

/// Returns the token ids of the prompt and of the completion of a model request. A list is empty if
/// the server did not report token ids.
pub(super) fn read_token_ids(data: &Map<String, Value>) -> (Value, Value) {
    let response = data.get("response").unwrap_or(&Value::Null);
    // A server that streams reports a list of chunks instead of one response.
    let one = std::slice::from_ref(response);
    let chunks = response.as_array().map_or(one, Vec::as_slice);
    let prompt = chunks.iter().find_map(|chunk| {
        // In a response of chat completions, the prompt tokens are beside the choices; in one of
        // completions, they are in the choices.
        as_non_empty_list(&chunk["prompt_token_ids"])
            .or_else(|| as_non_empty_list(&chunk["choices"][0]["prompt_token_ids"]))
    });
    let completion: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array())
        .flatten()
        .collect();
    (json!(prompt.unwrap_or(&Vec::new())), json!(completion))
}

fn as_non_empty_list(value: &Value) -> Option<&Vec<Value>> {
    value.as_array().filter(|list| !list.is_empty())
}

fn reduce_model_request(data: &Map<String, Value>) -> Value {
    let (prompt, completion) = read_token_ids(data);
    let response = data.get("response").unwrap_or(&Value::Null);
    let server = data.get("server").unwrap_or(&Value::Null);
    let trimmed = json!({
        "prompt_token_ids": prompt,
        "response_token_ids": completion,
        "response_log_probs": read_logprobs(&response["choices"][0]["logprobs"]),
        "server": { "model": server["model"], "version": server["version"] },
    });
    let mut trimmed = copy_fields(trimmed, data, &["http_status", "status"]);
    if let Some(error) = response.get("error") {
        trimmed["error"] = error.clone();
    }
    trimmed
}

/// Returns the log-probabilities of the completion's tokens, from the `logprobs` of a chat
/// completion or of a completion. Returns `None` if a log-probability is missing or not finite.
fn read_logprobs(of: &Value) -> Option<Vec<f64>> {
    match (&of["content"], &of["token_logprobs"]) {
        (Value::Array(tokens), _) => {
            tokens.iter().map(|token| as_finite(&token["logprob"])).collect()
        }
        (_, Value::Array(values)) => values.iter().map(as_finite).collect(),
        _ => None,
    }
}

fn as_finite(value: &Value) -> Option<f64> {
    value.as_f64().filter(|value| value.is_finite())
}

/// Copies the fields `names` from the object `from` to the object `to`. Absent fields are skipped.
fn copy_fields(mut to: Value, from: &Map<String, Value>, names: &[&str]) -> Value {
    for name in names {
        if let Some(value) = from.get(*name) {
            to[*name] = value.clone();
        }
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the data of the triplet of a model request.
    fn reduce_data(data: Value) -> Value {
        to_triplet(json!({ "event_type": "model_request", "data": data }))["data"].clone()
    }

    #[test]
    fn model_request_event_keeps_tokens_of_each_api() {
        let chat = reduce_data(json!({
            "request": { "messages": [] }, "http_status": 200, "server": { "model": "m", "version": 3 },
            "response": {
                "prompt_token_ids": [1, 2],
                "choices": [{ "token_ids": [3], "logprobs": { "content": [{ "logprob": -0.5 }] } }],
            },
        }));
        let expected = json!({
            "prompt_token_ids": [1, 2], "response_token_ids": [3], "response_log_probs": [-0.5],
            "server": { "model": "m", "version": 3 }, "http_status": 200,
        });
        assert_eq!(chat, expected);
        let choice = json!({ "prompt_token_ids": [1], "token_ids": [2, 3],
                             "logprobs": { "token_logprobs": [-1.0, null] } });
        let completion = reduce_data(json!({ "response": { "choices": [choice] } }));
        assert_eq!(completion["prompt_token_ids"], json!([1]));
        assert_eq!(completion["response_log_probs"], Value::Null);
        let chunks = json!([{ "prompt_token_ids": [1], "choices": [] },
                            { "choices": [{ "token_ids": [2] }] }, { "choices": [{ "token_ids": [3] }] }]);
        let streamed = reduce_data(json!({ "response": chunks }));
        assert_eq!(streamed["prompt_token_ids"], json!([1]));
        assert_eq!(streamed["response_token_ids"], json!([2, 3]));
        let failed = reduce_data(
            json!({ "response": { "error": { "message": "too long" } }, "status": "error" }),
        );
        assert_eq!(failed["response_token_ids"], json!([]));
        assert_eq!(failed["error"]["message"], "too long");
    }

    #[test]
    fn conversion_to_triplets_keeps_other_events_unchanged() {
        let event = json!({ "event_type": "log", "data": { "value": 1, "text": "x" } });
        assert_eq!(to_triplet(event.clone()), event);
    }
}
