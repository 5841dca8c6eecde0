//! Requests to a chat API.

use levade_text::{Message, ToolSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A conversation that the model continues with one assistant message.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChatRequest {
    /// Messages of the conversation so far.
    pub messages: Vec<Message>,
    /// Tools that the model may call.
    pub tools: Vec<ToolSpec>,
    /// Sampling parameters of the completion.
    pub params: ChatParams,
}

/// Sampling parameters of a chat request. For absent parameters, the server uses its defaults.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChatParams {
    /// Maximum number of tokens of the completion.
    pub max_tokens: Option<usize>,
    /// Sampling temperature, by which logits are divided.
    pub temperature: Option<f32>,
    /// Nucleus sampling: keeps the smallest set of tokens whose total probability reaches this
    /// value.
    pub top_p: Option<f32>,
    /// Stop strings, at which the completion ends.
    pub stop: Vec<String>,
    /// Random seed of the sampling, for servers that support seeds.
    pub seed: Option<u64>,
    /// Further request fields, such as `tool_choice`, `response_format` or `reasoning_effort`,
    /// which are sent unchanged. They override the fields above. Null removes a field.
    pub extra: Map<String, Value>,
}

/// Estimated number of bytes per token, as in English text.
const BYTES_OF_A_TOKEN: u64 = 4;

impl ChatRequest {
    /// Builds the JSON body of the request for the model `model`.
    pub(crate) fn to_body(&self, model: &str, stream: bool) -> Value {
        let params = &self.params;
        let mut body = Map::new();
        let mut set = |name: &str, value: Value| {
            if !value.is_null() {
                body.insert(name.into(), value);
            }
        };
        set("model", json!(model));
        set("messages", json!(self.messages));
        if !self.tools.is_empty() {
            set("tools", self.tools.iter().map(ToolSpec::to_openai).collect());
        }
        set("max_tokens", json!(params.max_tokens));
        set("temperature", json!(params.temperature.map(to_shortest_decimal)));
        set("top_p", json!(params.top_p.map(to_shortest_decimal)));
        if !params.stop.is_empty() {
            set("stop", json!(params.stop));
        }
        set("seed", json!(params.seed));
        set("stream", json!(stream));
        if stream {
            set("stream_options", json!({ "include_usage": true }));
        }
        for (name, value) in &params.extra {
            match value {
                Value::Null => drop(body.shift_remove(name)),
                value => drop(body.insert(name.clone(), value.clone())),
            }
        }
        Value::Object(body)
    }

    /// Estimates the number of prompt and completion tokens of a request, for rate limits. The
    /// estimate is replaced when the server reports the token counts.
    pub(crate) fn estimate_tokens(&self, body: &[u8]) -> u64 {
        body.len() as u64 / BYTES_OF_A_TOKEN + self.params.max_tokens.unwrap_or_default() as u64
    }
}

/// Converts an `f32` to the `f64` with the same shortest decimal representation, so that 0.7 is
/// sent as 0.7, not as 0.699999988079071.
fn to_shortest_decimal(value: f32) -> f64 {
    value.to_string().parse::<f64>().unwrap_or(f64::from(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chat_request_body_contains_only_set_fields() {
        let plain = ChatRequest { messages: vec![Message::user("hi")], ..ChatRequest::default() };
        let body = plain.to_body("m", false);
        assert_eq!(
            body,
            json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": false})
        );
        let mut full = plain.clone();
        full.tools = vec![ToolSpec {
            name: "add".into(),
            description: "Adds.".into(),
            parameters: json!({}),
        }];
        full.params = ChatParams {
            max_tokens: Some(9),
            temperature: Some(0.7),
            stop: vec!["END".into()],
            seed: Some(3),
            extra: json!({"max_tokens": null, "max_completion_tokens": 9, "seed": 4})
                .as_object()
                .unwrap()
                .clone(),
            ..ChatParams::default()
        };
        let body = full.to_body("m", true);
        assert_eq!(body["tools"][0]["function"]["name"], "add");
        assert_eq!(body["temperature"].to_string(), "0.7");
        assert_eq!(
            (&body["stop"], &body["seed"], &body["stream"]),
            (&json!(["END"]), &json!(4), &json!(true))
        );
        assert!(body.get("max_tokens").is_none() && body["max_completion_tokens"] == 9);
        assert_eq!(body["stream_options"]["include_usage"], true);
        assert_eq!(full.estimate_tokens(&[0; 400]), 109);
    }
}
