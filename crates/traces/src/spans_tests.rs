use super::*;
use crate::testing::{STARTED_AT, attempt, chats, seconds};

fn builder(options: TraceOptions) -> (std::sync::Arc<levade_text::Chat>, TraceBuilder) {
    let (chat, chats) = chats();
    (chat, TraceBuilder { run: "sums".into(), started_at: STARTED_AT, chats, options })
}

const OPTIONS: TraceOptions = TraceOptions { text: true, max_text_chars: 1000, mlflow_tags: false };

fn spans(traces: ResourceSpans) -> Vec<Span> {
    traces.scope_spans.into_iter().flat_map(|scope| scope.spans).collect()
}

fn get<'a>(span: &'a Span, key: &str) -> Option<&'a Any> {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    found.and_then(|attribute| attribute.value.as_ref()?.value.as_ref())
}

fn string<'a>(span: &'a Span, key: &str) -> &'a str {
    match get(span, key) {
        Some(Any::StringValue(text)) => text,
        other => panic!("{key} of {} is {other:?}", span.name),
    }
}

#[test]
fn trace_has_root_calls_tools_and_score() {
    let (chat, builder) = builder(OPTIONS);
    let attempt = attempt(&chat);
    let spans = spans(builder.trace(&attempt));
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "attempt train/1/7/2/4",
            "chat default",
            "execute_tool add",
            "execute_tool add",
            "chat default",
            "score"
        ]
    );
    let root = &spans[0];
    assert!(root.parent_span_id.is_empty());
    assert!(spans[1..].iter().all(|span| span.parent_span_id == root.span_id));
    assert!(spans.iter().all(|span| span.trace_id == root.trace_id && span.span_id.len() == 8));
    let ids: std::collections::BTreeSet<_> = spans.iter().map(|span| &span.span_id).collect();
    assert_eq!(ids.len(), spans.len());
    // The root covers the attempt and its scoring; the others have their own times.
    let times = |span: &Span| (span.start_time_unix_nano, span.end_time_unix_nano);
    let of = |after, duration| (seconds(after, duration).start, seconds(after, duration).end());
    assert_eq!(times(root), of(9, 11));
    assert_eq!(times(&spans[1]), of(10, 2));
    assert_eq!(times(&spans[3]), of(13, 1));
    assert_eq!(string(&spans[2], "levade.time"), "derived");
    assert_eq!(get(root, "levade.step"), Some(&Any::IntValue(7)));
    assert_eq!(get(root, "levade.reward"), Some(&Any::DoubleValue(0.75)));
    assert_eq!(get(root, "levade.score.right"), Some(&Any::DoubleValue(1.0)));
    assert_eq!(root.events[0].name, "gen_ai.evaluation.result");
    assert_eq!(string(&spans[2], "gen_ai.tool.call.result"), "5");
    assert_eq!(spans[3].status.as_ref().map(|status| status.code), Some(2));
    assert_eq!(string(&spans[3], "error.type"), "failed");
    let output: Value = serde_json::from_str(string(&spans[1], "gen_ai.output.messages")).unwrap();
    assert_eq!(output[0]["parts"][1]["arguments"], json!({"a": 2}));
    assert_eq!(output[0]["finish_reason"], "tool_call");
}

#[test]
fn ids_are_deterministic_and_differ_between_runs() {
    let (chat, builder) = builder(OPTIONS);
    let attempt = attempt(&chat);
    assert_eq!(builder.trace(&attempt), builder.trace(&attempt));
    let later = TraceBuilder { started_at: STARTED_AT + 1, ..builder.clone() };
    let id = |builder: &TraceBuilder| spans(builder.trace(&attempt))[0].trace_id.clone();
    assert_ne!(id(&builder), id(&later));
}

#[test]
fn options_omit_text_and_truncate_it() {
    let (chat, builder) = builder(TraceOptions { text: false, mlflow_tags: true, ..OPTIONS });
    let found = spans(builder.trace(&attempt(&chat)));
    let has_text = |attribute: &KeyValue| {
        let key = attribute.key.as_str();
        key.ends_with(".messages") || key.contains("tool.call.a") || key.contains("tool.call.r")
    };
    assert!(!found.iter().flat_map(|span| &span.attributes).any(has_text));
    assert_eq!(string(&found[0], "mlflow.traceTag.levade.step"), "7");
    assert_eq!(truncate("äbc", 3), "äbc");
    assert_eq!(truncate("äbcd", 1), "ä… [3 characters omitted]");
}

#[test]
fn unknown_times_keep_order_without_duration() {
    let (chat, builder) = builder(OPTIONS);
    let mut attempt = attempt(&chat);
    attempt.outcome.timings = Default::default();
    let spans = spans(builder.trace(&attempt));
    let start = |span: &Span| span.start_time_unix_nano;
    assert_eq!(start(&spans[0]), STARTED_AT * 1_000_000_000);
    assert!(spans.is_sorted_by(|a, b| start(a) < start(b)), "{spans:?}");
    for span in &spans {
        assert_eq!(string(span, "levade.time"), "unknown");
        assert_eq!(span.start_time_unix_nano, span.end_time_unix_nano);
    }
}

#[test]
fn several_agents_have_spans_of_their_own() {
    let (chat, builder) = builder(OPTIONS);
    let mut attempt = attempt(&chat);
    attempt.trajectory.assign(levade_tree::SegmentId(3), "critic");
    let spans = spans(builder.trace(&attempt));
    let find = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    let critic = find("invoke_agent critic");
    assert_eq!(critic.parent_span_id, find("attempt train/1/7/2/4").span_id);
    let calls = spans.iter().filter(|span| span.parent_span_id == critic.span_id);
    assert_eq!(calls.map(|span| span.name.as_str()).collect::<Vec<_>>(), ["chat default"]);
}
