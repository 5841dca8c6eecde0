//! Tests of a set of toolboxes.

use levade_tasks::calculation;
use serde_json::json;

use super::*;
use crate::testing::{Log, LoggedToolbox, call, context, parsed_calls};
use crate::{Calculator, ToolTexts};

const DEADLINE: Duration = Duration::from_millis(50);

fn set(boxes: Vec<LoggedToolbox>) -> ToolSet {
    let boxes = boxes.into_iter().map(|toolbox| Arc::new(toolbox) as Arc<dyn Toolbox>).collect();
    ToolSet::new(boxes, DEADLINE).unwrap()
}

fn lines(log: &Log) -> Vec<String> {
    log.lock().unwrap().clone()
}

async fn texts(open: &mut OpenTools, calls: &[ToolCall]) -> Vec<String> {
    open.execute_calls(&parsed_calls(calls), true)
        .await
        .into_iter()
        .map(|observation| observation.text)
        .collect()
}

#[tokio::test]
async fn call_to_empty_tool_set_is_an_error() {
    let mut open = set(Vec::new()).open(&context("a")).await.unwrap();
    assert_eq!(
        texts(&mut open, &[call("abacus", json!({}))]).await,
        ["Error: there is no tool \"abacus\", nor any other"]
    );
    open.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn each_result_kind_is_observed_and_counted() {
    let log = Log::default();
    let boxes: Vec<Arc<dyn Toolbox>> =
        vec![Arc::new(Calculator::default()), Arc::new(LoggedToolbox::new("slow", &log))];
    let mut open = ToolSet::new(boxes, DEADLINE).unwrap().open(&context("a1")).await.unwrap();
    assert_eq!(
        open.specs().iter().map(|s| s.name.as_str()).collect::<Vec<_>>(),
        ["calculator", "slow"]
    );
    for (call, kind, text, is_failure) in [
        (calculation("2 * 21"), ObservationKind::Ok, "42", false),
        (
            call("slow", json!({"fail": "the backend is down"})),
            ObservationKind::Failed,
            "Error: the backend is down",
            true,
        ),
        (
            call("calculator", json!({})),
            ObservationKind::BadArguments,
            "Error: \"expression\" is missing",
            false,
        ),
        (
            call("abacus", json!({})),
            ObservationKind::UnknownTool,
            "Error: there is no tool \"abacus\"; there is calculator, slow",
            false,
        ),
        (
            call("slow", json!({"hang": 1})),
            ObservationKind::Timeout,
            "Error: slow did not answer within 50ms",
            true,
        ),
        // A call that hung does not affect the session.
        (call("slow", json!({})), ObservationKind::Ok, "done 0", false),
    ] {
        let observed = open.execute_calls(&parsed_calls(&[call]), true).await;
        let [observation] = &observed[..] else { panic!("{observed:?}") };
        assert_eq!((observation.text.as_str(), observation.kind), (text, kind));
        assert_eq!(observation.failure.as_deref(), is_failure.then_some(text));
    }
    let malformed = levade_text::MalformedCall { why: "it is not JSON".into(), raw: String::new() };
    let malformed =
        ParsedCompletion { calls: vec![Err(malformed)], bare: true, ..parsed_calls(&[]) };
    let observed = open.execute_calls(&malformed, false).await;
    assert_eq!(observed[0].text, "Error: the tool call cannot be read: it is not JSON");
    assert_eq!((&observed[0].message().name, &observed[0].message().tool_call_id), (&None, &None));
    let expected_counts = CallCounts {
        ok: 2,
        malformed: 1,
        unknown_tool: 1,
        bad_arguments: 1,
        failed: 1,
        timeout: 1,
        bare: 1,
    };
    assert_eq!(open.counts(), expected_counts);
    assert_eq!((expected_counts.total(), expected_counts.errors()), (7, 5));
    open.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn parallel_calls_overlap_and_preserve_order() {
    let log = Log::default();
    let parallel_toolbox =
        |name| LoggedToolbox { parallel: true, ..LoggedToolbox::new(name, &log) };
    let set =
        set(vec![parallel_toolbox("x"), parallel_toolbox("y"), LoggedToolbox::new("alone", &log)]);
    let mut open = set.open(&context("a")).await.unwrap();
    log.lock().unwrap().clear();
    let calls = [
        late_call("x", 0, 30),
        late_call("y", 1, 10),
        call("abacus", json!({})),
        late_call("x", 2, 20),
        late_call("alone", 3, 10),
        late_call("x", 4, 5),
        late_call("alone", 5, 1),
    ];
    let start = tokio::time::Instant::now();
    let observations = texts(&mut open, &calls).await;
    assert_eq!(start.elapsed(), Duration::from_millis(30 + 10 + 5 + 1));
    let numbers: Vec<&str> =
        observations.iter().filter_map(|text| text.strip_prefix("done ")).collect();
    assert_eq!(numbers, ["0", "1", "2", "3", "4", "5"]);
    assert!(observations[2].starts_with("Error: there is no tool"));
    let order = [
        "call x 0",
        "call y 1",
        "call x 2",
        "answer y 1",
        "answer x 2",
        "answer x 0",
        "call alone 3",
        "answer alone 3",
        "call x 4",
        "answer x 4",
        "call alone 5",
        "answer alone 5",
    ];
    assert_eq!(lines(&log), order);
    assert_eq!((open.counts().ok, open.counts().unknown_tool), (6, 1));
    // Any number of calls runs with bounded concurrency.
    let many: Vec<ToolCall> =
        (0..2 * MAX_CONCURRENT_CALLS as u64).map(|n| late_call("x", n, 10)).collect();
    let start = tokio::time::Instant::now();
    assert_eq!(texts(&mut open, &many).await.len(), many.len());
    assert_eq!(start.elapsed(), Duration::from_millis(20));
    open.close().await.unwrap();
}

fn late_call(name: &str, n: u64, millis: u64) -> ToolCall {
    call(name, json!({"n": n, "millis": millis}))
}

#[tokio::test]
async fn unread_turn_executes_only_tools_with_effects() {
    let log = Log::default();
    let set = set(vec![
        LoggedToolbox { acts: true, ..LoggedToolbox::new("move", &log) },
        LoggedToolbox::new("look", &log),
    ]);
    let mut open = set.open(&context("a")).await.unwrap();
    let calls = parsed_calls(&[
        call("look", json!({})),
        call("move", json!({"ends": "won"})),
        call("fly", json!({})),
    ]);
    let observed = open.execute_calls(&calls, false).await;
    assert_eq!(observed.iter().map(|o| o.ends.as_deref()).collect::<Vec<_>>(), [Some("won")]);
    assert_eq!(open.counts().total(), 1);
    open.close().await.unwrap();
}

#[tokio::test]
async fn sessions_are_closed_once() {
    let log = Log::default();
    let set = set(vec![LoggedToolbox::new("x", &log), LoggedToolbox::new("y", &log)]);
    set.open(&context("a1")).await.unwrap().close().await.unwrap();
    let want = ["open x for a1", "open y for a1", "close x", "drop x", "close y", "drop y"];
    assert_eq!(lines(&log), want);
}

#[tokio::test]
async fn failed_open_closes_earlier_sessions() {
    let log = Log::default();
    let shut = LoggedToolbox { hangs: "refuses", ..LoggedToolbox::new("y", &log) };
    let set = set(vec![LoggedToolbox::new("x", &log), shut, LoggedToolbox::new("z", &log)]);
    let error = set.open(&context("a1")).await.unwrap_err();
    assert_eq!(error, ToolError::Open { tool: "y".into(), why: "no".into() });
    assert_eq!(lines(&log), ["open x for a1", "open y for a1", "close x", "drop x"]);
}

#[tokio::test(start_paused = true)]
async fn hanging_session_methods_time_out_and_sessions_close() {
    let closed = ["close x", "drop x", "close y", "drop y"].map(String::from);
    for hangs in ["open", "call", "evidence", "close"] {
        let log = Log::default();
        let set = set(vec![
            LoggedToolbox::new("x", &log),
            LoggedToolbox { hangs, ..LoggedToolbox::new("y", &log) },
        ]);
        let start = tokio::time::Instant::now();
        let opened = set.open(&context("a")).await;
        if hangs == "open" {
            let error = opened.unwrap_err().to_string();
            assert_eq!(error, "tool \"y\" could not be opened: not ready within 50ms");
            assert_eq!(lines(&log)[2..], closed[..2]);
            continue;
        }
        let mut open = opened.unwrap();
        let observations = texts(&mut open, &[call("y", json!({})), call("x", json!({}))]).await;
        let late = ["Error: y did not answer within 50ms", "done 0"];
        assert_eq!(observations, if hangs == "call" { late } else { ["done 0"; 2] });
        let (scorer_input, missing) = open.scorer_input().await;
        let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
        let late = "tool \"y\" returned no scorer input: the toolbox did not finish within 50ms"
            .to_owned();
        assert_eq!(
            (scorer_input.len(), missing),
            (0, if hangs == "evidence" { vec![late] } else { vec![] })
        );
        let done = open.close().await;
        if hangs == "close" {
            assert_eq!(
                done.unwrap_err().to_string(),
                "tool \"y\" could not be closed: the toolbox did not finish within 50ms"
            );
        } else {
            done.unwrap();
        }
        assert!(lines(&log).ends_with(&closed), "{hangs}: {:?}", lines(&log));
        assert_eq!(start.elapsed().as_millis() / 50, 1, "{hangs}");
    }
}

#[tokio::test]
async fn scorer_inputs_reject_oversized_and_deep_values() {
    let log = Log::default();
    let named = |name, hangs| LoggedToolbox { hangs, ..LoggedToolbox::new(name, &log) };
    let set = set(vec![
        named("files", "knows"),
        named("flood", "floods"),
        named("pit", "digs"),
        named("mute", ""),
    ]);
    let mut open = set.open(&context("a")).await.unwrap();
    let (scorer_input, missing) = open.scorer_input().await;
    assert_eq!(Value::Object(scorer_input), json!({"files": {"files": ["a.txt"]}}));
    let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let wanted = [
        "tool \"flood\" returned no scorer input: the scorer input is longer than 1048576 bytes",
        // A value that is deeper than the limit of JSON parsers could be recorded but not read
        // again.
        "tool \"pit\" returned no scorer input: the value is nested 121 deep, but at most 100 \
         levels can be stored",
    ];
    assert_eq!(missing, wanted);
    open.close().await.unwrap();
}

/// Waits until session `x` is closed.
async fn wait_until_closed(log: &Log) {
    for _ in 0..1000 {
        if lines(log).iter().any(|line| line == "drop x") {
            assert!(lines(log).contains(&"close x".to_owned()), "{:?}", lines(log));
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("never closed: {:?}", lines(log));
}

#[tokio::test]
async fn cancelled_attempt_closes_sessions() {
    let at = |verb: &'static str| async move {
        let log = Log::default();
        // Covers cancellation while the second session executes a call or returns scorer input, and
        // between two methods.
        let second = LoggedToolbox { hangs: verb, parallel: true, ..LoggedToolbox::new("y", &log) };
        let boxes: Vec<Arc<dyn Toolbox>> = vec![
            Arc::new(second.clone()),
            Arc::new(LoggedToolbox { parallel: true, ..LoggedToolbox::new("x", &log) }),
        ];
        let patient = ToolSet::new(boxes, Duration::from_secs(3600)).unwrap();
        let attempt = async {
            let mut open = patient.open(&context("a")).await.unwrap();
            texts(&mut open, &[call("x", json!({})), call("y", json!({}))]).await;
            open.scorer_input().await;
            if verb != "none" {
                open.close().await.unwrap();
                return;
            }
            std::future::pending::<()>().await;
        };
        assert!(with_timeout(Duration::from_millis(10), attempt).await.is_none());
        log
    };
    for verb in ["call", "evidence", "none"] {
        wait_until_closed(&at(verb).await).await;
    }
}

#[tokio::test]
async fn cancelled_close_completes_in_background() {
    let log = Log::default();
    let open = set(vec![LoggedToolbox::new("x", &log)]).open(&context("a")).await.unwrap();
    // The close is dropped at its first await, before the session has closed.
    let closing = std::pin::pin!(open.close());
    assert!(futures_util::FutureExt::now_or_never(closing).is_none());
    wait_until_closed(&log).await;
}

#[tokio::test]
async fn changed_tools_are_announced_but_prompt_is_fixed() {
    let log = Log::default();
    let toolbox = LoggedToolbox::new("web", &log);
    let offered = toolbox.tools.clone();
    *offered.lock().unwrap() = vec!["search", "open"];
    let set = set(vec![toolbox]);
    assert_eq!(set.specs(&context("task").task), []);
    let mut first = set.open(&context("task")).await.unwrap();
    assert_eq!(names_of(&set.specs(&context("task").task)), ["search", "open"]);

    // The prompt stays unchanged. The observation of the turn announces new and removed tools.
    *offered.lock().unwrap() = vec!["open", "click"];
    let mut second = set.open(&context("task")).await.unwrap();
    for open in [&mut first, &mut second] {
        assert_eq!(names_of(open.specs()), ["search", "open"]);
        let calls = ["search", "open", "click"].map(|name| call(name, json!({})));
        let observed = open.execute_calls(&parsed_calls(&calls), true).await;
        let texts: Vec<&str> = observed.iter().map(|o| o.text.as_str()).collect();
        let removed_error = "Error: the tool \"search\" is no longer there";
        let note = "done 0\n[The tools have changed. New: \
                    {\"name\":\"click\",\"description\":\"\",\"parameters\":{\"type\":\"object\"}}. Gone: search]";
        assert_eq!(
            texts,
            [removed_error, note, "Error: there is no tool \"click\"; there is search, open"]
        );
        let failures: Vec<Option<&str>> = observed.iter().map(|o| o.failure.as_deref()).collect();
        assert_eq!(failures, [Some(removed_error), None, None]);
        assert_eq!(open.counts().unknown_tool, 2);
        // From then on the new tool can be called by either name. It is announced once.
        let calls = ["click", "web__click", "open"].map(|name| call(name, json!({})));
        let observed = open.execute_calls(&parsed_calls(&calls), true).await;
        assert!(observed.iter().all(|observed| observed.text == "done 0"), "{observed:?}");
    }
    // Another task sees the current tools.
    let other = set.open(&context("other")).await.unwrap();
    assert_eq!(names_of(other.specs()), ["open", "click"]);
    for open in [first, second, other] {
        open.close().await.unwrap();
    }
}

#[tokio::test]
async fn descriptions_replace_those_of_toolboxes_and_are_not_announced() {
    let log = Log::default();
    let toolbox = LoggedToolbox::new("web", &log);
    let offered = toolbox.tools.clone();
    let plain = set(vec![toolbox]);
    let texts_of = |text: &str| {
        let of_tool = ToolTexts { description: Some(text.into()), ..Default::default() };
        ToolDescriptions::from([("web".to_owned(), of_tool)])
    };
    let described = plain.clone().with_descriptions(&texts_of("Looks up pages."));
    described.discover_tools(&context("task")).await.unwrap();
    let mut open = described.open(&context("task")).await.unwrap();
    assert_eq!(open.specs()[0].description, "Looks up pages.");
    assert_eq!(described.specs(&context("task").task), open.specs());
    assert_eq!(texts(&mut open, &calls_of(&["web"])).await, ["done 0"]);
    *offered.lock().unwrap() = vec!["web", "click"];
    let announced = texts(&mut open, &calls_of(&["web"])).await;
    assert!(announced[0].contains("New: {\"name\":\"click\""), "{announced:?}");
    assert!(!announced[0].contains("Changed"), "{announced:?}");
    // The texts are those of one set; a clone without them, or with others, shares the tools.
    assert_eq!(plain.specs(&context("task").task)[0].description, "");
    let other = described.with_descriptions(&texts_of("Opens pages."));
    assert_eq!(other.specs(&context("task").task)[0].description, "Opens pages.");
    open.close().await.unwrap();

    let misspelled = ToolDescriptions::from([("webb".to_owned(), ToolTexts::default())]);
    let error =
        plain.with_descriptions(&misspelled).discover_tools(&context("task")).await.unwrap_err();
    assert!(error.to_string().contains("the tool \"webb\""), "{error}");
}

fn names_of(specs: &[ToolSpec]) -> Vec<String> {
    specs.iter().map(|spec| spec.name.clone()).collect::<Vec<_>>()
}

#[tokio::test]
async fn announced_tools_get_unique_names() {
    let log = Log::default();
    let boxes = [LoggedToolbox::new("web", &log), LoggedToolbox::new("wiki", &log)];
    let [web, wiki] = [&boxes[0], &boxes[1]].map(|toolbox| toolbox.tools.clone());
    *web.lock().unwrap() = vec!["search"];
    *wiki.lock().unwrap() = vec!["search"];
    let mut open = set(boxes.into()).open(&context("task")).await.unwrap();
    *web.lock().unwrap() = vec!["search", "click"];
    assert!(
        texts(&mut open, &calls_of(&["web__search"])).await[0].contains("New: {\"name\":\"click\"")
    );
    // A second tool of a name that is taken, and a removed tool, are called by the names that the
    // model knows.
    *wiki.lock().unwrap() = vec!["click"];
    let texts_seen = texts(&mut open, &calls_of(&["wiki__search", "click"])).await;
    assert!(texts_seen[0].contains("no longer there"), "{texts_seen:?}");
    assert!(texts_seen[0].contains("New: {\"name\":\"wiki__click\""), "{texts_seen:?}");
    assert_eq!(texts_seen[1], "done 0");
    let texts_seen = texts(&mut open, &calls_of(&["wiki__search"])).await;
    assert!(texts_seen[0].contains("no longer there"), "{texts_seen:?}");
    *wiki.lock().unwrap() = vec!["search", "click"];
    let texts_seen = texts(&mut open, &calls_of(&["wiki__search"])).await;
    assert!(texts_seen[0].contains("New: {\"name\":\"wiki__search\""), "{texts_seen:?}");
    let both = calls_of(&["click", "wiki__click"]);
    assert_eq!(texts(&mut open, &both).await, ["done 0", "done 0"]);
    // The tool of `wiki` still works after `web` has lost its tool of the same name.
    *web.lock().unwrap() = vec!["search"];
    let texts_seen = texts(&mut open, &both).await;
    assert!(texts_seen[0].contains("no longer there"), "{texts_seen:?}");
    assert_eq!(texts_seen[1], "done 0");
    open.close().await.unwrap();
}

fn calls_of(names: &[&str]) -> Vec<ToolCall> {
    names.iter().map(|name| call(name, json!({}))).collect::<Vec<_>>()
}

#[tokio::test]
async fn discover_tools_opens_session_only_if_needed() {
    let log = Log::default();
    let unknown = set(vec![LoggedToolbox::new("x", &log)]);
    unknown.discover_tools(&context("a")).await.unwrap();
    unknown.discover_tools(&context("b")).await.unwrap();
    assert_eq!(lines(&log), ["open x for a", "close x", "drop x"]);
    assert_eq!(unknown.specs(&context("c").task)[0].name, "x");
    // No session is opened to find tools that are already known.
    let specs = unknown.specs(&context("c").task);
    let assuming = set(vec![LoggedToolbox::new("x", &log)]);
    assuming.set_known_tools(&[("x".into(), specs.clone())]).unwrap();
    assuming.discover_tools(&context("a")).await.unwrap();
    assert_eq!((lines(&log).len(), assuming.specs(&context("c").task)), (3, specs));
    // If toolboxes know their tools in advance, no session is opened.
    let boxes: Vec<Arc<dyn Toolbox>> = vec![Arc::new(Calculator::default())];
    let known = ToolSet::new(boxes, DEADLINE).unwrap();
    assert_eq!(known.specs(&context("c").task), [Calculator::spec()]);
    known.discover_tools(&context("a")).await.unwrap();
}

#[tokio::test]
async fn duplicate_toolbox_names_are_rejected_and_tools_prefixed() {
    let set = |names: [&str; 2]| {
        let boxes = names.map(|name| {
            Arc::new(Calculator { name: name.into(), ..Calculator::default() }) as Arc<dyn Toolbox>
        });
        ToolSet::new(boxes.to_vec(), DEADLINE)
    };
    let error = set(["sums", "sums"]).unwrap_err().to_string();
    assert!(error.starts_with("two tools are named \"sums\""), "{error}");
    let mut open = set(["sums", "more"]).unwrap().open(&context("a")).await.unwrap();
    let calls = ["sums__calculator", "more__calculator", "calculator"];
    let calls = calls.map(|name| call(name, json!({"expression": "1 + 1"})));
    let texts = texts(&mut open, &calls).await;
    assert_eq!(texts[..2], ["2", "2"]);
    assert!(texts[2].ends_with("there is sums__calculator, more__calculator"), "{}", texts[2]);
    open.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn usage_is_counted_per_toolbox() {
    let log = Log::default();
    let set = set(vec![
        LoggedToolbox { parallel: true, ..LoggedToolbox::new("x", &log) },
        LoggedToolbox::new("y", &log),
    ]);
    let calls = [
        slow_call("x", 10),
        slow_call("x", 20),
        slow_call("y", 5),
        slow_call("y", 1000),
        slow_call("nobody", 7),
    ];
    // Usage covers all clones of the set and all openings.
    for _ in 0..2 {
        let mut open = set.clone().open(&context("a")).await.unwrap();
        let observations = open.execute_calls(&parsed_calls(&calls), true).await;
        let toolboxes: Vec<Option<&str>> =
            observations.iter().map(|answer| answer.toolbox.as_deref()).collect();
        assert_eq!(toolboxes, [Some("x"), Some("x"), Some("y"), Some("y"), None]);
        open.close().await.unwrap();
    }
    let used: Vec<(&str, Usage)> = set.usage().collect();
    // A call that timed out counts with its timeout as duration.
    assert_eq!(used, [("x", usage_of(4, 60)), ("y", usage_of(4, 2 * (5 + 50)))]);
    assert_eq!(usage_of(4, 60).minus(usage_of(1, 10)), usage_of(3, 50));
}

fn slow_call(name: &str, millis: u64) -> ToolCall {
    call(name, json!({ "millis": millis }))
}

fn usage_of(calls: u64, millis: u64) -> Usage {
    Usage { calls, time: Duration::from_millis(millis), waited: Duration::ZERO }
}
