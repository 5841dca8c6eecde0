//! Tests of `sampler`.

use super::*;

#[test]
fn validate_reports_values_out_of_range() {
    let plain = SamplingParams::default();
    for (params, want) in [
        (
            SamplingParams { presence_penalty: 2.5, ..plain.clone() },
            "presence_penalty = 2.5, but it must be in -2..=2",
        ),
        (
            SamplingParams { frequency_penalty: f32::NAN, ..plain.clone() },
            "frequency_penalty = NaN, but",
        ),
        (
            SamplingParams { logit_bias: [(3, 1.0), (5, -101.0)].into(), ..plain.clone() },
            "logit_bias of token 5 = -101, but it must be in -100..=100",
        ),
        (
            SamplingParams { logit_bias: [(9, 1.0)].into(), ..plain.clone() },
            "logit_bias names token 9",
        ),
        (
            SamplingParams { top_logprobs: 21, ..plain.clone() },
            "top_logprobs = 21, but it must be at most 20",
        ),
        (
            SamplingParams { prompt_logprobs: Some(21), ..plain.clone() },
            "prompt_logprobs = 21, but it must be at most 20",
        ),
        (
            SamplingParams { max_tokens: 0, ..plain.clone() },
            "max_tokens = 0, but it must be at least 1, unless",
        ),
        (SamplingParams { min_tokens: 5, max_tokens: 4, ..plain.clone() }, "min_tokens = 5, but"),
        (
            SamplingParams { sampled_before: 3, ..plain.clone() },
            "drawn_before = 3, but the prompt has only 2",
        ),
    ] {
        let error = request(params).validate(9).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
    let endless = SamplingParams { grammar: Some(Grammar::JsonObject), ..plain.clone() };
    assert!(
        request(endless)
            .validate(9)
            .unwrap_err()
            .to_string()
            .contains("a grammar requires stop_ids")
    );
    let good = SamplingParams { min_tokens: 6, max_tokens: 4, sampled_before: 2, ..plain.clone() };
    request(good).validate(9).unwrap();
    let scored = SamplingParams { max_tokens: 0, prompt_logprobs: Some(0), ..plain.clone() };
    request(scored).validate(9).unwrap();
    assert!(request(plain).validate(2).unwrap_err().to_string().contains("token 2 is outside"));
}

fn request(params: SamplingParams) -> SampleRequest {
    SampleRequest { seed: 1, stream: 1, prompt: vec![1, 2], params, ..SampleRequest::default() }
}

/// Parameters are stored as JSON, with biases by token id.
#[test]
fn sampling_params_round_trip_through_json() {
    let params =
        SamplingParams { logit_bias: [(7, -1.5)].into(), top_logprobs: 3, ..Default::default() };
    let text = serde_json::to_string(&params).unwrap();
    assert!(text.contains(r#""logit_bias":{"7":-1.5}"#), "{text}");
    assert_eq!(serde_json::from_str::<SamplingParams>(&text).unwrap(), params);
    assert_eq!(serde_json::from_str::<SamplingParams>("{}").unwrap(), SamplingParams::default());
}
