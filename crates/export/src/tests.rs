//! Tests of complete exports: from recorded tokens to the rows of every format.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use levade_store::testing::wait;
use levade_store::{Attempt, Memory, Status, Store, WithdrawRequest};
use levade_text::testing::{IM_END, tiny_chat};
use levade_text::{Chat, Message, Role, ToolSpec};
use levade_tree::{
    AttemptId, AttemptSlot, Component, Outcome, Purpose, RunId, Segment, SegmentId, Trajectory,
    VersionRun,
};
use serde_json::{Value, json};

use crate::*;

fn chat() -> Arc<Chat> {
    Arc::new(tiny_chat().unwrap())
}

fn tool() -> ToolSpec {
    ToolSpec {
        name: "add".into(),
        description: "Adds.".into(),
        parameters: json!({ "type": "object", "properties": { "a": { "type": "integer" } } }),
    }
}

fn sampled(chat: &Chat, parent: SegmentId, text: &str, turn: u32) -> Segment {
    let mut tokens = chat.tokenizer().encode(text);
    tokens.push(IM_END);
    Segment {
        kind: levade_tree::Kind::Sampled,
        parent: Some(parent),
        logprobs: (0..tokens.len()).map(|i| -0.1 - i as f32).collect(),
        versions: vec![VersionRun { version: 3 + u64::from(turn), len: tokens.len() as u32 }],
        temperature: 1.0,
        ..Segment::context(None, tokens, turn)
    }
}

const CALL: &str =
    "Let me add.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2}}\n</tool_call>";

/// Returns an attempt with a tool call and an answer, and with a fork if `forks` is set.
fn attempt(
    run: &RunId,
    slot: AttemptSlot,
    answer: &str,
    score: Option<f64>,
    forks: bool,
) -> Attempt {
    let chat = chat();
    let tools = [tool()];
    let question = [Message::system("Be brief."), Message::user("What is 2 + 2?")];
    let mut trajectory = Trajectory::new();
    let prompt = chat.prompt(&question, &tools).unwrap();
    let root = trajectory.push(Segment::context(None, prompt, 0)).unwrap();
    let call = sampled(&chat, root, CALL, 0);
    let ids = call.tokens.clone();
    let call = trajectory.push(call).unwrap();
    let result = [Message::tool("4 <|im_end|>")];
    let given = chat.continuation(&question, &ids, &result, &tools).unwrap();
    let given = trajectory.push(Segment::context(Some(call), given, 1)).unwrap();
    trajectory.push(sampled(&chat, given, answer, 1)).unwrap();
    if forks {
        trajectory.push(sampled(&chat, given, "Or five.", 2)).unwrap();
    }
    let component =
        Component { weight: Some(1.0), ..Component::new("numeric", score.unwrap_or(0.0)) };
    Attempt {
        id: AttemptId::new(run, &slot, 0),
        slot,
        number: 0,
        task: json!({
            "id": format!("sum-{}", slot.group), "question": "What is 2 + 2?", "answer": 4,
            "source": "sums", "kind": null,
        }),
        outcome: Outcome { turns: 2, components: vec![component], ..Outcome::demonstrated(answer) },
        score,
        reward: score,
        step_rewards: Vec::new(),
        status: if score.is_some() { Status::Completed } else { Status::Unscored },
        trajectory: trajectory.with_names("solver", "default"),
    }
}

fn slot(step: u32, group: u32, sample: u32) -> AttemptSlot {
    AttemptSlot { purpose: Purpose::Train, phase: 0, step, group, sample }
}

/// Returns a store with two steps of two groups of two attempts.
fn store() -> Memory {
    let run = RunId("toy-1".into());
    let store = Memory::new(run.clone());
    for step in 0..2 {
        for group in 0..2 {
            for sample in 0..2 {
                let score = match (group, sample) {
                    // The scores of the first group are equal.
                    (0, _) => Some(1.0),
                    (_, 0) => Some(0.25),
                    _ => Some(1.0),
                };
                let answer = format!("Four, {sample}.");
                let one = attempt(
                    &run,
                    slot(step, group, sample),
                    &answer,
                    score,
                    step == 1 && sample == 1,
                );
                wait(store.record_attempt(&one)).unwrap();
            }
        }
    }
    wait(store.record_attempt(&attempt(&run, slot(2, 0, 0), "Four.", None, false))).unwrap();
    store
}

fn filter() -> Filter {
    Filter {
        purposes: vec![Purpose::Train],
        statuses: vec![Status::Completed],
        ..Filter::default()
    }
}

/// Returns the rows of a format, as a stream writes them, with the progress.
fn export(filter: &Filter, format: Format, options: RowOptions) -> (Vec<Value>, Progress) {
    let store = store();
    let find_chat = |_: &str, _: &str| Ok(chat());
    let read = |id: &AttemptId| wait(store.attempt(id));
    let groups = wait(filter.select(&store)).unwrap();
    let sequences = SequenceReader::new(&find_chat, false);
    let exporter = Exporter::new(store.run(), filter, (format, options), sequences, &read);
    let mut bytes = Vec::new();
    let progress = exporter.write_stream(&groups, &mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    (text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), progress)
}

fn table(filter: &Filter) -> Vec<Value> {
    export(filter, Format::Table, RowOptions { tokens: true, ..RowOptions::default() }).0
}

#[test]
fn table_contains_messages_scores_and_exact_tokens() {
    let rows = table(&filter());
    // Eight attempts, two of which have a fork.
    assert_eq!(rows.len(), 10);
    let row = &rows[0];
    assert_eq!(row["slot"], "train/0/0/0/0");
    let call = json!({
        "id": "call_2_0", "type": "function",
        "function": { "name": "add", "arguments": "{\"a\":2}" },
    });
    let expected = json!([
        { "role": "system", "content": row["messages"][0]["content"] },
        { "role": "user", "content": "What is 2 + 2?" },
        { "role": "assistant", "content": "Let me add.", "tool_calls": [call] },
        { "role": "tool", "content": "4 <|im_end|>", "tool_call_id": "call_2_0" },
        { "role": "assistant", "content": "Four, 0." },
    ]);
    assert_eq!(row["messages"], expected);
    assert_eq!(row["messages"][0]["content"], "Be brief.");
    assert_eq!(row["tools_json"], json!([tool().to_openai()]).to_string());
    assert_eq!(
        (&row["agent"], &row["score"], &row["problems"]),
        (&json!("solver"), &json!(1.0), &json!([]))
    );
    assert_eq!(row["components"], json!([{ "name": "numeric", "value": 1.0, "weight": 1.0 }]));
    assert_eq!(row["weight_versions"], json!([3, 4]));

    // The tokens are those of the store, to the bit.
    let run = RunId("toy-1".into());
    let one = attempt(&run, slot(0, 0, 0), "Four, 0.", Some(1.0), false);
    let leaf = one.trajectory.leaves()[0];
    assert_eq!(row["token_ids"], json!(one.trajectory.sequence_tokens(leaf)));
    let mut at = 0;
    for segment in one.trajectory.segments() {
        for i in 0..segment.tokens.len() {
            assert_eq!(row["loss_mask"][at], json!(segment.is_target()));
            let logprob = row["logprobs"][at].as_f64().map(|p| (p as f32).to_bits());
            assert_eq!(logprob, segment.logprobs.get(i).map(|p| p.to_bits()), "token {at}");
            let version = segment.token_versions().nth(i);
            assert_eq!(row["token_versions"][at].as_u64(), version, "token {at}");
            at += 1;
        }
    }
    assert_eq!(row["tokens"], json!(at));
}

#[test]
fn filters_select_steps_rewards_tasks_and_agents() {
    let slots = |filter: &Filter| -> Vec<String> {
        let rows = table(filter);
        let mut slots: Vec<String> =
            rows.iter().map(|row| row["slot"].as_str().unwrap().to_owned()).collect();
        slots.dedup();
        slots
    };
    let steps = Filter { steps: Some("1".parse().unwrap()), ..filter() };
    assert_eq!(slots(&steps), ["train/0/1/0/0", "train/0/1/0/1", "train/0/1/1/0", "train/0/1/1/1"]);
    let reward = Filter { reward: Some("..0.5".parse().unwrap()), ..filter() };
    assert_eq!(slots(&reward), ["train/0/0/1/0", "train/0/1/1/0"]);
    let task = Filter { task: Some("*-1".parse().unwrap()), ..filter() };
    assert_eq!(slots(&task).len(), 4);
    assert!(slots(&Filter { agent: Some("other".into()), ..filter() }).is_empty());
    assert_eq!(slots(&Filter { agent: Some("solver".into()), ..filter() }).len(), 8);
    let unscored = Filter { statuses: vec![Status::Unscored], ..filter() };
    assert_eq!(slots(&unscored), ["train/0/2/0/0"]);
}

#[test]
fn sequence_outside_template_keeps_text_and_reason() {
    let run = RunId("toy-1".into());
    let mut broken = Trajectory::new();
    let tokens = chat().tokenizer().encode("Once upon a time");
    let root = broken.push(Segment::context(None, tokens, 0)).unwrap();
    broken.push(sampled(&chat(), root, "there was", 0)).unwrap();
    let attempt =
        Attempt { trajectory: broken, ..attempt(&run, slot(0, 0, 0), "", Some(1.0), false) };
    let find_chat = |_: &str, _: &str| Ok(chat());
    let sequences = SequenceReader::new(&find_chat, false).read_sequences(&attempt);
    let [Sequence { messages: None, text: Some(text), problems, .. }] = &sequences[..] else {
        panic!("{sequences:?}")
    };
    assert_eq!(text, "Once upon a timethere was<|im_end|>");
    assert!(problems[0].contains("do not fit the chat template"), "{problems:?}");
    let exported = ExportedAttempt { run: run.0, attempt, sequences };
    for format in [Format::TrlSft, Format::VerlSft, Format::Atif, Format::Verl] {
        let rows = format.rows(std::slice::from_ref(&exported), &RowOptions::default());
        assert!(rows.rows.is_empty() && rows.skipped[0].contains("train/0/0/0/0"), "{rows:?}");
    }
}

#[test]
fn malformed_call_stays_in_content_and_is_named() {
    let run = RunId("toy-1".into());
    let mut one =
        attempt(&run, slot(0, 0, 0), "<tool_call>\n{\"name\"\n</tool_call>", Some(0.0), false);
    let find_chat = |_: &str, _: &str| Ok(chat());
    let sequences = SequenceReader::new(&find_chat, false).read_sequences(&one);
    let last = sequences[0].messages.as_ref().unwrap().last().unwrap();
    assert!(last.content.contains("{\"name\"") && last.tool_calls.is_empty(), "{last:?}");
    assert!(
        sequences[0].problems[0].contains("malformed tool call"),
        "{:?}",
        sequences[0].problems
    );
    // Raw messages contain every call as text.
    one = attempt(&run, slot(0, 0, 0), "Four.", Some(0.0), false);
    let raw = SequenceReader::new(&find_chat, true).read_sequences(&one);
    let messages = raw[0].messages.as_ref().unwrap();
    assert_eq!(messages[2], Message::assistant(CALL));
    assert_eq!(messages[3].role, Role::Tool);
}

#[test]
fn preferences_pair_best_with_worst_and_skip_ties() {
    let (rows, progress) = export(&filter(), Format::TrlPreference, RowOptions::default());
    assert_eq!(rows.len(), 2);
    // The groups whose scores are equal have no pair.
    assert_eq!(progress.skipped, 2);
    let row = &rows[0];
    assert_eq!(row["prompt"].as_array().unwrap().len(), 2);
    assert_eq!(row["chosen"][2]["content"], "Four, 1.");
    assert_eq!(row["rejected"][2]["content"], "Four, 0.");
    assert_eq!(row["chosen"][0]["tool_calls"][0]["function"]["arguments"], json!({ "a": 2 }));
    let far = RowOptions { min_gap: 0.8, ..RowOptions::default() };
    assert!(export(&filter(), Format::TrlPreference, far).0.is_empty());
}

#[test]
fn verl_writes_each_task_once() {
    let (rows, _) = export(&filter(), Format::Verl, RowOptions::default());
    let ids: Vec<&str> =
        rows.iter().map(|row| row["extra_info"]["index"].as_str().unwrap()).collect();
    assert_eq!(ids, ["sum-0", "sum-1"]);
    assert_eq!(rows[0]["reward_model"], json!({ "style": "rule", "ground_truth": "4" }));
    assert_eq!(rows[0]["prompt"][1], json!({ "role": "user", "content": "What is 2 + 2?" }));
    assert_eq!(rows[0]["data_source"], "sums");
}

#[test]
fn split_prompt_keeps_all_messages_in_order() {
    let (whole, _) = export(&filter(), Format::TrlSft, RowOptions::default());
    let split = RowOptions { split_prompt: true, ..RowOptions::default() };
    let (split, _) = export(&filter(), Format::TrlSft, split);
    for (whole, split) in whole.iter().zip(&split) {
        let joined =
            [&split["prompt"], &split["completion"]].map(|part| part.as_array().unwrap().clone());
        assert_eq!(whole["messages"], json!(joined.concat()));
        assert_eq!(split["completion"][0]["role"], "assistant");
    }
}

#[test]
fn trajectory_marks_repeated_completions_and_joins_results() {
    let options = RowOptions { tokens: true, ..RowOptions::default() };
    let (rows, _) = export(&filter(), Format::Atif, options);
    assert_eq!(rows.len(), 10);
    let forked: Vec<&Value> =
        rows.iter().filter(|row| row["extra"]["slot"] == "train/0/1/0/1").collect();
    let [first, second] = forked[..] else { panic!("{forked:?}") };
    assert_eq!(first["session_id"], second["session_id"]);
    assert_ne!(first["trajectory_id"], second["trajectory_id"]);
    assert_eq!(first["steps"][2]["is_copied_context"], Value::Null);
    assert_eq!(second["steps"][2]["is_copied_context"], true);
    assert_eq!(second["steps"][3]["is_copied_context"], Value::Null);
    let step = &first["steps"][2];
    let result = json!({ "content": "4 <|im_end|>", "source_call_id": "call_2_0" });
    assert_eq!(step["observation"]["results"], json!([result]));
    assert_eq!(step["tool_calls"][0]["arguments"], json!({ "a": 2 }));
    let count = step["metrics"]["completion_tokens"].as_u64().unwrap() as usize;
    assert_eq!(step["metrics"]["completion_token_ids"].as_array().unwrap().len(), count);
    assert_eq!(step["metrics"]["logprobs"][0], json!(-0.1f32));
}

#[test]
fn attempt_withdrawn_after_selection_has_no_row() {
    let store = store();
    let filter = filter();
    let groups = wait(filter.select(&store)).unwrap();
    let withdrawn = groups[0][1];
    let request = WithdrawRequest { attempts: vec![withdrawn], ..WithdrawRequest::default() };
    wait(store.withdraw(&request)).unwrap();
    let find_chat = |_: &str, _: &str| Ok(chat());
    let read = |id: &AttemptId| wait(store.attempt(id));
    let sequences = SequenceReader::new(&find_chat, false);
    let format = (Format::Table, RowOptions::default());
    let exporter = Exporter::new(store.run(), &filter, format, sequences, &read);
    let mut bytes = Vec::new();
    let progress = exporter.write_stream(&groups, &mut bytes).unwrap();
    // Ten sequences without that of the attempt.
    assert_eq!((progress.rows, progress.skipped), (9, 1));
    assert_eq!(progress.first_skipped.as_deref(), Some("train/0/0/0/1: it was withdrawn"));
    assert!(!String::from_utf8(bytes).unwrap().contains(&withdrawn.to_string()));
}

#[test]
fn interrupted_export_equals_undisturbed_one_in_every_target() {
    let store = store();
    let filter = filter();
    let find_chat = |_: &str, _: &str| Ok(chat());
    let mut contents: BTreeMap<bool, Vec<Vec<u8>>> = BTreeMap::new();
    for interrupts in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        for (name, format) in [
            ("rows.jsonl", Format::Table),
            ("rows.parquet", Format::Table),
            ("verl.parquet", Format::Verl),
            ("verl-sft.parquet", Format::VerlSft),
            ("sft.jsonl", Format::TrlSft),
            ("pairs.jsonl", Format::TrlPreference),
            ("trajectories/", Format::Atif),
        ] {
            let options = RowOptions { tokens: true, ..RowOptions::default() };
            let path = dir.path().join(name);
            let target =
                Target::parse(&format!("{}/{name}", dir.path().display()), format, &options);
            let target = target.unwrap();
            let select = || Ok(wait(filter.select(&store))?);
            let remaining = std::cell::Cell::new(if interrupts { 5 } else { usize::MAX });
            let read = |id: &AttemptId| {
                if remaining.get() == 0 {
                    let what = "the disk was pulled out".to_owned();
                    let (location, key) = ("memory:".to_owned(), id.to_string());
                    return Err(levade_store::StoreError::Unstorable { location, key, what });
                }
                remaining.set(remaining.get() - 1);
                wait(store.attempt(id))
            };
            for _ in 0..3 {
                let part = Part::open(&path, "options", select).unwrap();
                let sequences = SequenceReader::new(&find_chat, format.needs_raw_messages());
                let exporter =
                    Exporter::new(store.run(), &filter, (format, options), sequences, &read);
                match exporter.write_part(part, &target, &mut |_| {}) {
                    Ok(_) => break,
                    Err(error) => {
                        assert!(interrupts && error.to_string().contains("pulled out"), "{error}");
                        remaining.set(usize::MAX);
                    }
                }
            }
            let mut files = vec![path.clone()];
            if path.is_dir() {
                files = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
                files.sort();
                assert_eq!(files.len(), 10);
            }
            let bytes = files.iter().map(|file| fs::read(file).unwrap());
            contents.entry(interrupts).or_default().extend(bytes);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 7, "parts are left");
    }
    assert_eq!(contents[&false], contents[&true]);
}
