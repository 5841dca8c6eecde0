//! Tests of context policies over the HTTP routes.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use levade_call::{Party, Summarizer};
use levade_conversation::{Budget, Fork, Origin, Overflow, Reason};
use serde_json::{Value, json};

use crate::testing::TestGateway;

const CHAT: &str = "/v1/chat/completions";

/// Creates a gateway whose model returns `texts`, with an attempt whose prompts have at most
/// `budget_tokens` tokens.
fn gateway_with_policy(texts: &[&str], overflow: Overflow, budget_tokens: usize) -> TestGateway {
    let budget = Budget { max_tokens: budget_tokens, overflow, keep: 1 };
    TestGateway::with_context_policy(texts, |party| {
        let summarizer = || Summarizer {
            party: Arc::new(Party { agent: "default.summary".into(), ..(**party).clone() }),
            max_tokens: 40,
            instruction: "Sum up.".into(),
        };
        (budget, (overflow == Overflow::Summarize).then(|| Arc::new(summarizer())))
    })
}

/// Asks a question after `messages`, and appends the question and the completion to `messages`.
async fn send_request(
    served: &TestGateway,
    messages: &mut Vec<Value>,
    question: &str,
) -> StatusCode {
    messages.push(json!({ "role": "user", "content": question }));
    let response = served.post(CHAT, &json!({ "model": "tiny", "messages": messages })).await;
    if response.status == StatusCode::OK {
        messages.push(response.json()["choices"][0]["message"].clone());
    }
    response.status
}

#[tokio::test]
async fn long_conversation_forks_and_continues() {
    let served = gateway_with_policy(&["Well."], Overflow::DropOldest, 400);
    let mut messages = vec![json!({ "role": "system", "content": "Be brief." })];
    for turn in 0..12 {
        let question = format!("Question {turn}: {}", "x y ".repeat(10));
        assert_eq!(send_request(&served, &mut messages, &question).await, StatusCode::OK);
    }
    let origins = served.origins();
    let truncation = Origin::Forked(Fork { at: 2, reason: Reason::ContextDropped });
    let truncations = origins.iter().filter(|origin| **origin == truncation).count();
    assert!((2..=4).contains(&truncations), "{origins:?}");
    assert_eq!(
        origins.iter().filter(|origin| **origin == Origin::Continued).count(),
        11 - truncations
    );
    for path in served.paths().await {
        assert!(path.contains("Be brief.") && path.contains("Question 0:"), "{path}");
        assert!(path.len() < 800, "{path}");
    }
}

#[tokio::test]
async fn summary_calls_do_not_count_toward_limits() {
    let texts = ["One.", "Two.", "Three.", "They counted.", "Four."];
    let served = gateway_with_policy(&texts, Overflow::Summarize, 350);
    let mut messages = Vec::new();
    for turn in 0..4 {
        assert_eq!(
            send_request(&served, &mut messages, &format!("{turn} {}", "x y ".repeat(18))).await,
            StatusCode::OK
        );
    }
    assert_eq!(messages.last().unwrap()["content"], "Four.");
    assert_eq!(served.session.recorder().remaining_calls(), 100 - 4);
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    let calls: Vec<(&str, bool)> =
        recorded.calls.iter().map(|call| (call.agent.as_str(), call.summary)).collect();
    assert_eq!(calls[3..], [("default.summary", true), ("default", false)]);
    assert_eq!(recorded.counts.forked.get(&Reason::ContextSummarized), Some(&1));
    let trajectory = recorded.trajectory;
    let paths: Vec<String> = trajectory
        .leaves()
        .into_iter()
        .map(|leaf| {
            served.format.chat().tokenizer().decode_with_special(&trajectory.sequence_tokens(leaf))
        })
        .collect();
    assert!(paths.iter().any(|path| path.contains("Sum up.\n\nassistant: One.")), "{paths:?}");
    let last = paths.iter().find(|path| path.contains("Four.")).unwrap();
    assert!(
        last.contains("left out:\nThey counted.<|im_end|>") && !last.contains("One."),
        "{last}"
    );
}

#[tokio::test]
async fn too_long_prompt_returns_context_length_error() {
    for overflow in [Overflow::Fail, Overflow::DropOldest] {
        let served = gateway_with_policy(&["Well."], overflow, 100);
        let body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "x y ".repeat(50) }] });
        let response = served.post(CHAT, &body).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST);
        let error = &response.json()["error"];
        assert_eq!(error["code"], "context_length_exceeded", "{error}");
        assert!(error["message"].as_str().unwrap().contains("agent.max_context_tokens"), "{error}");
    }
}
