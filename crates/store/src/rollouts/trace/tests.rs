//! Tests of the reader of traces. The spans have the form that agentlightning 0.3.0's tracer sends.

use proptest::prelude::*;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};

use super::*;

/// Returns a span of a try: its id, parent, name, start, end and attributes.
fn span(
    id: &str,
    parent: Option<&str>,
    name: &str,
    (start, end): (f64, f64),
    attributes: Value,
) -> Span {
    let body = json!({
        "trace_id": "t", "span_id": id, "parent_id": parent, "name": name,
        "status": { "status_code": "OK", "description": null }, "attributes": attributes,
        "events": [], "links": [], "start_time": start, "end_time": end,
    });
    let body = to_raw_value(&body).unwrap();
    Span { rollout_id: "ro".to_owned(), try_id: "at".to_owned(), number: 0, body }
}

fn call(id: &str, parent: Option<&str>, at: (f64, f64), response_id: &str) -> Span {
    let attributes = json!({
        "gen_ai.request.model": "toy",
        "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "What is 1 + 1?",
        "gen_ai.response.id": response_id,
        "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "2",
    });
    span(id, parent, "openai.chat.completion", at, attributes)
}

fn reward(id: &str, at: f64, value: impl Into<Value>) -> Span {
    let attributes = json!({
        "agentlightning.reward.0.name": "task", "agentlightning.reward.0.value": value.into(),
        "agentlightning.reward.1.name": "style", "agentlightning.reward.1.value": 0.25,
    });
    span(id, Some("root"), "agentlightning.annotation", (at, at), attributes)
}

fn trace(spans: &[Span]) -> Trace {
    Trace::from_spans(spans).unwrap()
}

fn ids_and_rewards(calls: &[TracedCall]) -> Vec<(&str, Option<f64>)> {
    calls.iter().map(|call| (call.span_id.as_str(), call.reward)).collect()
}

#[test]
fn span_attribute_with_too_many_dots_is_omitted() {
    let deep = ["gen_ai.prompt", &".a".repeat(1 << 20)].concat();
    let attributes = json!({ deep: 1, "gen_ai.prompt.0.content": "What is 1 + 1?" });
    let calls =
        trace(&[span("a", None, "openai.chat.completion", (1.0, 2.0), attributes)]).calls(|_| true);
    assert_eq!(calls[0].prompt, json!([{ "content": "What is 1 + 1?" }]));
}

#[test]
fn trace_of_tracer_yields_calls_and_final_reward() {
    // Spans arrive when they end, the root last.
    let trace = trace(&[
        call("a", Some("root"), (1.0, 2.0), "r1"),
        call("b", Some("root"), (3.0, 4.0), "r2"),
        reward("c", 5.0, 0.75),
        span("root", None, "ro-1.session", (0.0, 6.0), json!({ "agentops.span.kind": "session" })),
    ]);
    assert_eq!(trace.final_reward(), Ok(Some(0.75)));
    let rewards = trace.final_rewards().unwrap();
    assert_eq!(rewards, [("task".to_owned(), 0.75), ("style".to_owned(), 0.25)]);
    let calls = trace.calls(|_| true);
    assert_eq!(ids_and_rewards(&calls), [("a", None), ("b", Some(0.75))]);
    assert_eq!(calls[0].prompt, json!([{ "role": "user", "content": "What is 1 + 1?" }]));
    assert_eq!(calls[0].completion[0]["content"], "2");
    assert_eq!(calls[0].response_id.as_deref(), Some("r1"));
}

/// Returns a reward in the format of AgentOps.
fn agentops(key: &str, output: Value) -> Span {
    span("x", None, "reward.operation", (0.0, 0.0), json!({ key: output }))
}

/// Returns a reward in Agent Lightning's old format.
fn annotation(reward: Value) -> Span {
    span("x", None, "agentlightning.annotation", (0.0, 0.0), json!({ "reward": reward }))
}

#[test]
fn rewards_are_read_in_each_known_format() {
    let text = r#"{"type": "reward", "value": -1.5}"#;
    for (span, expected) in [
        (agentops("agentops.task.output", json!(text)), Some(-1.5)),
        (agentops("agentops.entity.output", json!({ "type": "reward", "value": 2 })), Some(2.0)),
        (agentops("agentops.entity.output", json!({ "type": "reward", "value": null })), None),
        (agentops("agentops.entity.output", json!("no JSON")), None),
        (agentops("agentops.entity.output", json!({ "type": "other", "value": 2 })), None),
        (annotation(json!(3.0)), Some(3.0)),
        (annotation(Value::Null), None),
        (reward("x", 0.0, 1), Some(1.0)),
    ] {
        let found = trace(std::slice::from_ref(&span)).final_reward();
        assert_eq!(found, Ok(expected), "{}", span.body);
    }
}

#[test]
fn unreadable_reward_is_an_error_and_never_an_earlier_reward() {
    let good = reward("good", 1.0, 1.0);
    let secondary = json!({ "agentlightning.reward.1.value": 1.0 });
    let unknown = json!({ "agentlightning.reward.first.value": 1.0 });
    for bad in [
        reward("bad", 2.0, "NaN"),
        reward("bad", 2.0, Value::Null),
        reward("bad", 2.0, true),
        span("bad", None, "agentlightning.annotation", (2.0, 2.0), json!({ "reward": "high" })),
        span("bad", None, "x", (2.0, 2.0), secondary),
        span("bad", None, "x", (2.0, 2.0), unknown),
    ] {
        let last = trace(&[good.clone(), bad.clone()]);
        let error = last.final_reward().unwrap_err();
        assert!(error.to_string().starts_with("span bad: "), "{error}");
        // A later reward replaces the unreadable one.
        let repaired = trace(&[bad.clone(), good.clone()]);
        assert_eq!(repaired.final_reward(), Ok(Some(1.0)), "{}", bad.body);
        // The call before it keeps no reward.
        let with_call = trace(&[call("a", None, (0.0, 0.5), "r"), bad]);
        assert_eq!(with_call.calls(|_| true)[0].reward, None);
    }
}

#[test]
fn reward_belongs_to_latest_call_that_ended_before() {
    let spans = [
        call("a", None, (0.0, 1.0), "r1"),
        call("b", None, (2.0, 3.0), "r2"),
        // Still running when the reward was given.
        call("c", None, (3.5, 9.0), "r3"),
        reward("x", 4.0, 1.0),
        reward("y", 5.0, 2.0),
        reward("z", 6.0, 3.0),
    ];
    let calls = trace(&spans).calls(|_| true);
    assert_eq!(ids_and_rewards(&calls), [("a", Some(2.0)), ("b", Some(1.0)), ("c", None)]);
}

#[test]
fn calls_are_selected_by_innermost_agent() {
    let agent =
        |id: &str, parent: Option<&str>, at, attributes| span(id, parent, "x", at, attributes);
    let spans = [
        agent("team", None, (0.0, 9.0), json!({ "langchain.chain.type": "team" })),
        agent(
            "writer",
            Some("team"),
            (1.0, 4.0),
            json!({ "agentops.span.kind": "agent", "operation.name": "write" }),
        ),
        call("a", Some("writer"), (2.0, 3.0), "r1"),
        agent("checker", Some("team"), (4.0, 8.0), json!({ "agent.name": "check" })),
        call("b", Some("checker"), (5.0, 6.0), "r2"),
        call("c", Some("team"), (8.5, 8.6), "r3"),
    ];
    for (name, id) in [("write", "a"), ("check", "b"), ("team", "c")] {
        let calls = trace(&spans).calls(|agent| agent == Some(name));
        let ids: Vec<_> = calls.iter().map(|call| call.span_id.as_str()).collect();
        assert_eq!(ids, [id], "{name}");
    }
    let all = trace(&spans).calls(|_| true);
    let agents: Vec<_> = all.iter().map(|call| call.agent.as_deref()).collect();
    assert_eq!(agents, [Some("write"), Some("check"), Some("team")]);
}

#[test]
fn call_without_parent_belongs_to_enclosing_agent() {
    let spans = [
        span("root", None, "session", (0.0, 10.0), json!({})),
        span("agent", Some("root"), "x", (1.0, 5.0), json!({ "agent.name": "write" })),
        // The second tracer lost the parent.
        call("a", Some("root"), (2.0, 3.0), "r1"),
        call("b", Some("root"), (6.0, 7.0), "r2"),
    ];
    let calls = trace(&spans).calls(|_| true);
    let agents: Vec<_> = calls.iter().map(|call| (&*call.span_id, call.agent.as_deref())).collect();
    assert_eq!(agents, [("a", Some("write")), ("b", None)]);
}

#[test]
fn trace_omits_repeated_responses_and_calls_within_reward_operations() {
    let operation = json!({ "agentlightning.operation.name": "agentlightning.reward" });
    let without_id = span("d", Some("a"), "openai.chat.completion", (0.2, 0.3), json!({}));
    let spans = [
        call("a", None, (0.0, 1.0), "r1"),
        call("b", Some("a"), (0.1, 0.9), "r1"),
        without_id,
        span("judge", None, "agentlightning.operation", (2.0, 5.0), operation),
        call("c", Some("judge"), (3.0, 4.0), "r2"),
    ];
    assert_eq!(ids_and_rewards(&trace(&spans).calls(|_| true)), [("a", None)]);
}

#[test]
fn tokens_are_read_from_each_instrumentation() {
    for (prompt, response) in [
        ("prompt_token_ids", "response_token_ids"),
        (
            "agentlightning.operation.output.prompt_token_ids",
            "agentlightning.operation.output.choices.0.token_ids",
        ),
    ] {
        let attributes = json!({ prompt: [1, 2], response: [3] });
        let calls = trace(&[span("a", None, "openai.chat.completion", (0.0, 1.0), attributes)])
            .calls(|_| true);
        assert_eq!(calls[0].prompt_token_ids, [1, 2]);
        assert_eq!(calls[0].response_token_ids, [3]);
    }
    let wrong = json!({ "prompt_token_ids": [1, -2], "response_token_ids": "3" });
    let calls = trace(&[span("a", None, TRIPLET_SPAN, (0.0, 1.0), wrong)]).calls(|_| true);
    assert!(calls[0].prompt_token_ids.is_empty() && calls[0].response_token_ids.is_empty());
}

proptest! {
    /// Whatever the parents are, cycles and lost ones included, the reader ends, and returns each
    /// call at most once. A call whose ancestors reach a root is returned.
    #[test]
    fn spans_with_arbitrary_parents_yield_each_reachable_call_once(
        parents in prop::collection::vec(prop::option::of(0_usize..14), 1..12),
        times in prop::collection::vec((0_u8..8, 0_u8..8), 12),
    ) {
        let spans: Vec<Span> = parents
            .iter()
            .zip(&times)
            .enumerate()
            .map(|(index, (parent, (start, length)))| {
                let parent = parent.map(|parent| parent.to_string());
                let at = (f64::from(*start), f64::from(start + length));
                call(&index.to_string(), parent.as_deref(), at, &format!("r{index}"))
            })
            .collect();
        let is_reachable = |mut index: usize| {
            for _ in 0..=parents.len() {
                match parents[index] {
                    None => return true,
                    Some(parent) if parent >= parents.len() => return true,
                    Some(parent) => index = parent,
                }
            }
            false
        };
        let expected: Vec<String> =
            (0..parents.len()).filter(|index| is_reachable(*index)).map(|i| i.to_string()).collect();
        let mut found: Vec<String> =
            trace(&spans).calls(|_| true).into_iter().map(|call| call.span_id).collect();
        found.sort_by_key(|id| id.parse::<usize>().unwrap());
        prop_assert_eq!(found, expected);
    }
}
