//! Grammar-constrained completions with the tiny tokenizer and a random model: they follow their
//! grammar in any batch and after an abort, and they are not training targets.

use std::sync::Arc;
use std::time::Duration;

use levade_engine::testing::{Compute, random_weights, tiny_config};
use levade_engine::{Engine, EngineOptions};
use levade_policy::{
    AllowedTokens, Completion, Constraint, FinishReason, Grammar, Grammars, PolicyError,
    SampleEvent, SampleRequest, Sampler, SamplingParams, uniform,
};
use levade_text::testing::{END_OF_TEXT, IM_END, tiny_tokenizer};
use levade_text::{Tokenizer, Vocabulary};
use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(60);

fn tokenizer() -> Tokenizer {
    tiny_tokenizer().unwrap()
}

/// Starts an engine with the tiny model, whose vocabulary is larger than the tokenizer's.
fn bare() -> Engine {
    let options = EngineOptions {
        kv_memory_mb: 8,
        batch_tokens: 0,
        trains: false,
        ..EngineOptions::default()
    };
    let compute = Compute::new(2);
    let weights = random_weights(&compute, &tiny_config(), 3);
    Engine::start_with(compute, weights, &options, None).unwrap()
}

fn engine() -> Engine {
    bare().with_grammars(Arc::new(Vocabulary::new(&tokenizer())))
}

/// Returns the schema of an object without white space, so that it ends soon.
fn schema() -> Grammar {
    let schema = json!({
        "x-guidance": {"whitespace_flexible": false},
        "type": "object",
        "properties": {
            "unit": {"enum": ["metre", "mile"]},
            "place": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 5}, "is_near": {"type": "boolean"}},
                "required": ["name", "is_near"],
                "additionalProperties": false
            },
            "how_far": {"type": "integer", "minimum": 0, "maximum": 99}
        },
        "required": ["unit", "place", "how_far"],
        "additionalProperties": false
    });
    Grammar::JsonSchema(schema.to_string())
}

fn keeps_to_the_schema(text: &str) -> bool {
    let value: Value = serde_json::from_str(text).unwrap();
    let name = value["place"]["name"].as_str().unwrap();
    ["metre", "mile"].map(|unit| json!(unit)).contains(&value["unit"])
        && name.chars().count() <= 5
        && value["place"]["is_near"].is_boolean()
        && value["how_far"].as_u64().is_some_and(|far| far <= 99)
}

fn request(stream: u64, grammar: Option<Grammar>) -> SampleRequest {
    let params = SamplingParams {
        max_tokens: 160,
        temperature: [1.0, 0.7, 0.0, 1.5][stream as usize % 4],
        top_logprobs: 2,
        stop_ids: vec![IM_END, END_OF_TEXT],
        grammar,
        ..SamplingParams::default()
    };
    let prompt =
        (0..30 + stream % 3).map(|i| 2 + (uniform(9, stream / 3, i) * 250.0) as u32).collect();
    SampleRequest { seed: 7, stream, prompt, params, ..SampleRequest::default() }
}

async fn sample(engine: &Engine, request: SampleRequest) -> Completion {
    engine.sample(request).await.unwrap().collect(DEADLINE).await.unwrap()
}

/// Returns the text of a completion that a stop id has ended.
fn text(completion: &Completion) -> String {
    assert_eq!(
        completion.finish,
        FinishReason::StopId,
        "{}",
        tokenizer().decode_with_special(&completion.tokens)
    );
    let (last, content) = completion.tokens.split_last().unwrap();
    assert!([IM_END, END_OF_TEXT].contains(last));
    tokenizer().decode_with_special(content)
}

/// Each grammar, separately and all at once: the same bits, and the requested format.
#[tokio::test]
async fn completions_follow_grammar_in_any_batch() {
    let lark = "start: \"<call>\" NAME \"(\" arguments \")</call>\"\nNAME: /[a-z]{1,4}/\n\
                arguments: %json \
                {\"x-guidance\": {\"whitespace_flexible\": false}, \"enum\": [[1, 2], {\"a\": null}]}";
    let forms = [
        None,
        Some(schema()),
        Some(Grammar::Regex("-?[0-9]{1,9}( km)?".into())),
        Some(Grammar::Lark(lark.into())),
    ];
    let of = |stream: u64| request(stream, forms[stream as usize / 4 % 4].clone());
    let engine = engine();
    let mut separate = Vec::new();
    for stream in 0..16 {
        separate.push(sample(&engine, of(stream)).await);
    }
    let company: Vec<_> = (0..16)
        .map(|stream| {
            let engine = engine.clone();
            let request = of(stream);
            tokio::spawn(async move { sample(&engine, request).await })
        })
        .collect();
    for (task, separate) in company.into_iter().zip(&separate) {
        assert_eq!(task.await.unwrap(), *separate);
    }
    for completion in &separate[4..8] {
        assert!(keeps_to_the_schema(&text(completion)), "{}", text(completion));
    }
    for completion in &separate[8..12] {
        let text = text(completion);
        let digits = text.strip_suffix(" km").unwrap_or(&text);
        let digits = digits.strip_prefix('-').unwrap_or(digits);
        assert!(
            matches!(digits.len(), 1..=9) && digits.bytes().all(|b| b.is_ascii_digit()),
            "{text}"
        );
    }
    for completion in &separate[12..] {
        let text = text(completion);
        let inner =
            text.strip_prefix("<call>").and_then(|text| text.strip_suffix(")</call>")).unwrap();
        let (name, arguments) = inner.split_once('(').unwrap();
        assert!(
            matches!(name.len(), 1..=4) && name.bytes().all(|b| b.is_ascii_lowercase()),
            "{text}"
        );
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert!([json!([1, 2]), json!({"a": null})].contains(&arguments), "{text}");
    }
}

/// Tokens sampled under a grammar are recorded with the model's own probabilities, and are not
/// trained.
#[tokio::test]
async fn constrained_tokens_are_not_targets() {
    let engine = engine();
    for (grammar, is_target) in [(Some(schema()), false), (None, true)] {
        let request = request(0, grammar);
        let prompt = request.prompt.clone();
        let params = request.params.clone();
        let completion = sample(&engine, request.clone()).await;
        // Log-probabilities of a scored prompt with the same tokens.
        let scored =
            SamplingParams { max_tokens: 0, prompt_logprobs: Some(0), ..SamplingParams::default() };
        let full = SampleRequest {
            prompt: [&prompt[..], &completion.tokens].concat(),
            params: scored,
            ..request
        };
        let scored = sample(&engine, full).await;
        assert_eq!(scored.prompt_logprobs[prompt.len() - 1..], completion.logprobs);
        let segment = completion.into_segment(None, &params, 0);
        assert_eq!((segment.filtered, segment.is_target()), (!is_target, is_target));
    }
}

/// An aborted completion that is requested again continues under its grammar, with the tokens that
/// would have followed without the abort.
#[tokio::test]
async fn aborted_completion_keeps_its_grammar() {
    let engine = engine();
    for stream in [4, 5, 6] {
        let request = request(stream, Some(schema()));
        let full = sample(&engine, request.clone()).await;
        let mut sample_stream = engine.sample(request.clone()).await.unwrap();
        let mut completion = Completion::default();
        while completion.tokens.len() < 7 {
            match sample_stream.next().await.unwrap().unwrap() {
                SampleEvent::Tokens { tokens, logprobs, version, .. } => {
                    completion.extend(&tokens, &logprobs, version);
                }
                other => panic!("{other:?}"),
            }
        }
        engine.abort(Some(stream)).await.unwrap();
        sample_stream.gather(&mut completion).await.unwrap();
        let mut rest = request;
        rest.prompt.extend(&completion.tokens);
        rest.params.sampled_before = completion.tokens.len();
        rest.params.max_tokens -= completion.tokens.len();
        if completion.finish == FinishReason::Aborted {
            let rest = sample(&engine, rest.clone()).await;
            completion.extend(&rest.tokens, &rest.logprobs, 0);
        }
        assert_eq!((&completion.tokens, &completion.logprobs), (&full.tokens, &full.logprobs));
        // A completion that violates the grammar cannot be continued.
        *rest.prompt.last_mut().unwrap() = 0;
        let rejected = engine.sample(rest).await.err().unwrap();
        assert!(
            rejected.to_string().contains("cannot constrain the completion any further"),
            "{rejected}"
        );
    }
}

#[tokio::test]
async fn sample_rejects_unusable_grammars() {
    let wrong =
        Grammar::JsonSchema(json!({"type": "number", "minimum": 2, "maximum": 1}).to_string());
    for (engine, grammar, reason) in [
        (engine(), wrong, "the JSON schema cannot be compiled"),
        (bare(), schema(), "started without support for grammars"),
    ] {
        let rejected = engine.sample(request(1, Some(grammar))).await.err().unwrap();
        assert!(matches!(rejected, PolicyError::Invalid(_)), "{rejected}");
        assert!(rejected.to_string().contains(reason), "{rejected}");
        assert!(!sample(&engine, request(1, None)).await.tokens.is_empty(), "it goes on");
    }
}

/// A constraint that fails ends only its own request. If it allows no token of the model, the error
/// reports that. If only the end is allowed, the completion ends, even before `min_tokens`.
#[tokio::test]
async fn failing_constraint_ends_only_its_request() {
    struct Odd;
    struct Counts(usize, Grammar);
    impl Grammars for Odd {
        fn start(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>, PolicyError> {
            Ok(Box::new(Counts(0, grammar.clone())))
        }
    }
    impl Constraint for Counts {
        fn allowed(&mut self) -> Result<AllowedTokens, PolicyError> {
            let tokens = if self.0 < 3 {
                [65, 66].into_iter().collect()
            } else {
                [1000].into_iter().collect()
            };
            Ok(AllowedTokens { tokens, may_end: self.0 >= 3 && self.1 == Grammar::JsonObject })
        }

        fn push(&mut self, _: u32) -> Result<(), PolicyError> {
            self.0 += 1;
            if self.0 == 3 && self.1 == Grammar::Regex("lost".into()) {
                Err(PolicyError::Invalid("lost".into()))
            } else {
                Ok(())
            }
        }
    }
    let engine = bare().with_grammars(Arc::new(Odd));
    let separate = sample(&engine, request(8, None)).await;
    let mut early = request(1, Some(Grammar::JsonObject));
    early.params.min_tokens = 20;
    let (concurrent, early, lost, nothing) = tokio::join!(
        sample(&engine, request(8, None)),
        sample(&engine, early),
        async {
            engine
                .sample(request(2, Some(Grammar::Regex("lost".into()))))
                .await
                .unwrap()
                .collect(DEADLINE)
                .await
        },
        async {
            engine
                .sample(request(3, Some(Grammar::Regex("".into()))))
                .await
                .unwrap()
                .collect(DEADLINE)
                .await
        },
    );
    assert_eq!(concurrent, separate);
    assert!(early.tokens.len() == 4 && early.finish == FinishReason::StopId, "{early:?}");
    assert_eq!(lost.unwrap_err(), PolicyError::Invalid("lost".into()));
    assert!(
        nothing
            .unwrap_err()
            .to_string()
            .contains("no token of the model can continue the completion")
    );
}
