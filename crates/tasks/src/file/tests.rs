#[path = "template_tests.rs"]
mod templates;

use std::collections::BTreeSet;
use std::fs;

use levade_text::Message;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::TaskRow;

/// Writes a file, and returns options that read it. The file exists as long as the returned
/// directory guard.
fn write_file(name: &str, contents: impl AsRef<[u8]>) -> (TempDir, FileOptions) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, contents).unwrap();
    (dir, FileOptions::new(path))
}

fn file(contents: &str) -> (TempDir, FileOptions) {
    write_file("sums.jsonl", contents)
}

#[track_caller]
fn assert_rejected(contents: &str, change: impl FnOnce(&mut FileOptions), want: &str) {
    let (dir, mut options) = file(contents);
    change(&mut options);
    let error = options.load(0).unwrap_err().to_string();
    let error = error.replace(&dir.path().display().to_string(), "");
    assert_eq!(error, want);
}

fn answers(tasks: &FileTasks) -> Vec<Value> {
    tasks.rest.iter().map(|task| task.answer.clone()).collect()
}

#[test]
fn load_reads_rows_as_tasks() {
    let (_dir, options) = file(
        "{\"question\": \"1+1?\", \"answer\": \" 2 \"}\n\n{\"question\": \"2+2?\", \"answer\": 4}",
    );
    let tasks = options.load(0).unwrap().rest;
    let rows: Vec<_> =
        tasks.iter().map(|t| (t.id.as_str(), t.question.as_str(), &t.answer)).collect();
    assert_eq!(
        rows,
        [("sums-1", "1+1?", &Value::from(" 2 ")), ("sums-3", "2+2?", &Value::from(4))]
    );
    assert!(tasks.iter().all(|t| t.source == "sums" && t.demonstration.is_none()));
}

#[test]
fn load_converts_annotated_solutions() {
    let (_dir, mut options) = file(concat!(
        "{\"q\": \"A?\", \"a\": \"It is 1+1 = <<1+1=2>>2.\\n#### 2\"}\n",
        "{\"q\": \"B?\", \"a\": \"It is <<1+1=3>>3.\\n#### 1,003 \"}\n",
        "{\"q\": \"A?\", \"a\": \"Again.\\n#### 2\"}\n",
    ));
    (options.question, options.answer) = ("q".into(), "a".into());
    options.answer_from = AnswerPart::Hashes;
    options.annotated_calls = Some(3);
    let tasks = options.load(0).unwrap();
    let find = |q: &str| tasks.rest.iter().find(|t| t.question == q).unwrap();
    assert_eq!(find("A?").demonstration.as_ref().unwrap().calls[0].result, "2");
    assert_eq!((&find("B?").answer, &find("B?").demonstration), (&Value::from("1,003"), &None));
    assert_eq!(tasks.repeated, 1);
    let want =
        DemonstrationCounts { converted: 1, disagrees: 1, no_calls: 1, ..Default::default() };
    assert_eq!(tasks.demonstrations, want);
}

#[test]
fn person_key_is_copied_from_its_field() {
    let rows = concat!(
        "{\"question\": \"A?\", \"answer\": 1, \"author\": {\"id\": \"alice\"}}\n",
        "{\"question\": \"B?\", \"answer\": 2, \"author\": {\"id\": [7, \"bob\"]}}\n",
        "{\"question\": \"C?\", \"answer\": 3, \"author\": {\"id\": null}}\n",
    );
    let (_dir, mut options) = file(rows);
    options.person = Some("author.id".into());
    let tasks = options.load(0).unwrap().rest;
    let persons: Vec<Vec<String>> = tasks.iter().map(Task::persons).collect();
    assert_eq!(persons, [vec!["alice"], vec!["7", "bob"], vec![]]);
    // The record contains the key, and the row keeps its own field.
    let recorded = json!(tasks[0]);
    assert_eq!(crate::persons(&recorded), ["alice"]);
    assert_eq!(recorded["row"]["author"]["id"], "alice");
    assert_rejected(
        "{\"question\": \"A?\", \"answer\": 1, \"author\": {\"id\": {\"name\": \"alice\"}}}",
        |options| options.person = Some("author.id".into()),
        "/sums.jsonl, line 1: field \"author.id\" is {\"name\":\"alice\"}, but it must be the key \
         of a person (a string or a number), or a list of keys",
    );
    let (_dir, mut options) = file(rows);
    options.person = Some("autor.id".into());
    let error = options.load(0).unwrap_err().to_string();
    assert!(error.contains("`person = \"author.id\"`"), "{error}");
}

#[test]
fn expected_numbers_keep_their_notation() {
    let numbers = [
        "18446744073709551617",
        "1.10",
        "1e400",
        "-0",
        "0.1000",
        "7",
        "[1.10, 2, \"\", null, \" x \"]",
    ];
    let rows: String = numbers
        .iter()
        .enumerate()
        .map(|(i, number)| format!("{{\"question\": \"{i}?\", \"answer\": {number}}}\n"))
        .collect();
    let (_dir, options) = file(&rows);
    let want = [
        json!("18446744073709551617"),
        json!("1.10"),
        json!("1e400"),
        json!("-0"),
        json!("0.1000"),
        json!(7),
    ];
    let got = answers(&options.load(0).unwrap());
    assert_eq!(got[..6], want);
    // Within lists and objects, numbers stay numbers.
    assert_eq!(got[6].to_string(), "[1.10,2,\" x \"]");
    assert_eq!(answer_of("1e-05"), ("\"1e-05\"".into(), Some("1e-05".into())));
    assert_eq!(answer_of("1E5"), ("\"1E5\"".into(), Some("1e+5".into())));
    assert_eq!(answer_of("0.5"), ("0.5".into(), None));
    assert_eq!(answer_of("\"1.10\""), ("\"1.10\"".into(), None));
    assert_eq!(answer_of("{\"v\": [1e-05, 2.50]}"), ("{\"v\":[1e-05,2.50]}".into(), None));
}

fn answer_of(number: &str) -> (String, Option<String>) {
    let (_dir, options) = file(&format!("{{\"question\": \"?\", \"answer\": {number}}}\n"));
    let task = options.load(0).unwrap().rest.remove(0);
    (task.answer.to_string(), task.answer_number.map(|number| number.to_string()))
}

#[test]
fn answers_accept_lists_and_objects() {
    for (answer, want) in [
        ("[\"Beijing\", \" Peking\"]", json!(["Beijing", " Peking"])),
        ("{\"target\": [\"a\"]}", json!({"target": ["a"]})),
        ("true", json!(true)),
    ] {
        let (_dir, options) = file(&row_with_answer(answer));
        assert_eq!(answers(&options.load(0).unwrap()), [want]);
    }
    let expected = "but it must be a number, a string, or a list of correct answers, and not \
                    empty; if scorers need no answer, set `answer = \"\"`";
    for (answer, found) in
        [("null", "null"), ("\" \"", "\" \""), ("[]", "[]"), ("[\"\"]", "[\"\"]"), ("{}", "{}")]
    {
        assert_rejected(
            &row_with_answer(answer),
            |_| {},
            &format!("/sums.jsonl, line 1: field \"answer\" is {found}, {expected}"),
        );
    }
}

fn row_with_answer(answer: &str) -> String {
    format!("{{\"question\": \"?\", \"answer\": {answer}}}")
}

#[test]
fn verl_rows_are_recognized() {
    let row = json!({
        "data_source": "x",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0, "question": "one and one"},
    });
    let (_dir, mut options) = file(&row.to_string());
    let tasks = options.load(0).unwrap();
    let [task] = &tasks.rest[..] else { panic!("{tasks:?}") };
    assert_eq!(
        (task.question.as_str(), task.messages.len(), &task.answer),
        ("1+1?", 2, &json!("2"))
    );
    assert!(
        tasks.notes[0]
            .ends_with("read with question = \"prompt\", answer = \"reward_model.ground_truth\"")
    );
    // A single user turn is the same question as its text.
    let single_turn = json!({"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}});
    let (_dir, single) = file(&single_turn.to_string());
    let tasks = single.load(0).unwrap();
    assert_eq!((tasks.rest[0].question.as_str(), tasks.rest[0].messages.len()), ("1+1?", 0));

    options.question = "extra_info.question".into();
    let tasks = options.load(0).unwrap();
    assert_eq!((tasks.rest[0].question.as_str(), tasks.rest[0].messages.len()), ("one and one", 0));
}

#[test]
fn agent_r1_rows_are_recognized() {
    let row = json!({
        "data_source": "hotpotqa/hotpot_qa",
        "prompt": [{"role": "user", "content": "Question: Who founded Rome?"}],
        "ability": "multihop_qa",
        "reward_model": {"style": "rule", "ground_truth": "Romulus"},
        "extra_info": {"split": "train", "index": 0, "level": "hard", "question": "Who founded \
                                                                                   Rome?"},
        "tools": ["search"],
        "scorer": "exact",
        "answer_schema": {"type": "string"},
    });
    let (_dir, options) = file(&row.to_string());
    let tasks = options.load(0).unwrap();
    let [task] = &tasks.rest[..] else { panic!("{tasks:?}") };
    assert_eq!(
        (task.question.as_str(), &task.answer),
        ("Question: Who founded Rome?", &json!("Romulus"))
    );
    assert_eq!(Value::Object((*task.row).clone()), row);
}

#[test]
fn agentrl_rows_are_recognized() {
    let stored = json!({
        "tid": "0f", "split": "train", "description": "Who?", "task_id": "17",
        "system_prompt": "Research.", "query_prompt": "Your task is to answer: Who?",
        "task_answer": {"answer": "Romulus", "aug_answer": ["Remus"], "query": "Who?"},
        "answer_schema": "answer", "scorer": "agentcpm", "tools": ["search", "fetch_url"],
    });
    let (_dir, options) = file(&stored.to_string());
    let tasks = options.load(0).unwrap();
    let [task] = &tasks.rest[..] else { panic!("{tasks:?}") };
    assert_eq!(
        (task.question.as_str(), &task.answer),
        ("Your task is to answer: Who?", &json!("Romulus"))
    );
    assert_eq!(
        task.messages,
        [Message::system("Research."), Message::user("Your task is to answer: Who?")]
    );
    // Fields that tools and scorers use.
    assert_eq!(Value::Object((*task.row).clone()), stored);
    for (row, note) in [
        (
            json!({"id": 3, "q": "Who?", "a": "Romulus", "aug_answers": ["Remus"]}),
            "question = \"q\", answer = \"a\"",
        ),
        (
            json!({"Question": "Who?", "Final answer": "Romulus", "Level": 1}),
            "answer = \"Final answer\"",
        ),
        (
            json!({"query": "Who?", "answer": "Romulus", "scorer": "agentcpm"}),
            "question = \"query\"",
        ),
    ] {
        let (_dir, options) = file(&row.to_string());
        let tasks = options.load(0).unwrap();
        assert_eq!(
            (tasks.rest[0].question.as_str(), &tasks.rest[0].answer),
            ("Who?", &json!("Romulus"))
        );
        assert_eq!(Value::Object((*tasks.rest[0].row).clone()), row);
        assert!(tasks.notes[0].contains(note), "{:?}", tasks.notes);
    }
}

#[test]
fn task_keeps_complete_row() {
    let row = r#"{"question": "1+1?", "extra": {"id": 18446744073709551617, "rate": 1.10, "n": 7, "tags": ["a"]}, "answer": " 2 "}"#;
    let (_dir, options) = file(row);
    let tasks = options.load(0).unwrap();
    let kept = &tasks.rest[0].row;
    assert_eq!(serde_json::to_string(&**kept).unwrap(), row.replace(": ", ":").replace(", ", ","));
    assert!(kept["extra"]["id"].is_number() && kept["extra"]["rate"].is_number());
    // Clones share the row, also those of a task that is trained on several times.
    let repeated = FileOptions { repeat: 3, ..options.clone() }.training(tasks.rest.clone(), 1);
    assert!(repeated.iter().all(|task| std::ptr::eq(&*task.row, &**kept)));
    // A recorded task contains the row, and tasks recorded without a row can still be read.
    let recorded = serde_json::to_value(&tasks.rest[0]).unwrap();
    assert_eq!(serde_json::from_value::<Task>(recorded.clone()).unwrap(), tasks.rest[0]);
    let Value::Object(mut earlier) = recorded else { panic!() };
    earlier.remove("row");
    let read: Task = serde_json::from_value(Value::Object(earlier.clone())).unwrap();
    assert_eq!(read, Task { row: TaskRow::default(), ..tasks.rest[0].clone() });
    assert_eq!(serde_json::to_value(&read).unwrap(), Value::Object(earlier));

    let (_dir, options) = write_file("sums.csv", "id,question,note,answer,note\n007,1+1?,x,2,y\n");
    let tasks = options.load(0).unwrap();
    let row = json!({"id": "007", "question": "1+1?", "answer": "2"});
    assert_eq!(Value::Object((*tasks.rest[0].row).clone()), row);
    let [note] = &tasks.notes[..] else { panic!("{:?}", tasks.notes) };
    assert!(
        note.ends_with(
            "sums.csv: the column \"note\" is ignored, because it occurs twice in the header"
        ),
        "{note}"
    );
}

#[test]
fn all_file_formats_yield_same_tasks() {
    let lines =
        "{\"question\": \"1?\", \"answer\": \"2\"}\n{\"question\": \"3?\", \"answer\": \"4\"}\n";
    let array =
        "[{\"question\": \"1?\", \"answer\": \"2\"},\n{\"question\": \"3?\", \"answer\": \"4\"}]";
    let table = "question,answer\n1?,2\n3?,4\n";
    let packed = zstd::stream::encode_all(table.as_bytes(), 1).unwrap();
    let marked: Vec<u8> =
        format!("\u{feff}{lines}").encode_utf16().flat_map(u16::to_le_bytes).collect();
    for (name, contents) in [
        ("sums.jsonl", lines.as_bytes()),
        ("sums.json", array.as_bytes()),
        ("sums", array.as_bytes()),
        ("sums.csv", table.as_bytes()),
        ("sums.csv.zst", &packed),
        ("sums.tsv", table.replace(',', "\t").as_bytes()),
        ("sums.jsonl", &marked),
    ] {
        let (_dir, options) = write_file(name, contents);
        let tasks = options.load(0).unwrap();
        let rows: Vec<_> =
            tasks.rest.iter().map(|t| (t.question.as_str(), t.answer.as_str().unwrap())).collect();
        assert_eq!(rows, [("1?", "2"), ("3?", "4")], "{name}");
        assert!(tasks.rest.iter().all(|task| task.source == "sums"), "{name}");
    }
}

#[test]
fn several_files_form_one_source() {
    let (dir, mut options) = file("{\"question\": \"1?\", \"answer\": 2}\n");
    let more = r#"[{"question": "3?", "answer": 4}, {"question": " 1? ", "answer": 2}]"#;
    fs::write(dir.path().join("more.json"), more).unwrap();
    options.path = dir.path().join("*.json*").into();
    let tasks = options.load(0).unwrap();
    let questions: Vec<_> = tasks.rest.iter().map(|task| task.question.as_str()).collect();
    // In the order of the file names; the row that repeats a question is left out.
    assert_eq!(questions, ["3?", " 1? "]);
    assert_eq!(tasks.repeated, 1);
    let ids: BTreeSet<_> = tasks.rest.iter().map(|task| &task.id).collect();
    assert_eq!(ids.len(), 2);
}

#[test]
fn lone_surrogate_is_reported_in_notes() {
    let (_dir, options) = file(r#"{"question": "What is \ud83d 1 + 1?", "answer": 2}"#);
    let tasks = options.load(0).unwrap();
    assert_eq!(tasks.rest[0].question, "What is \u{fffd} 1 + 1?");
    assert!(
        tasks.notes[0].contains("sums.jsonl: 1 escapes are half a surrogate pair"),
        "{:?}",
        tasks.notes
    );
}

fn questions(tasks: &[Task]) -> BTreeSet<String> {
    tasks.iter().map(|task| task.question.clone()).collect()
}

fn rows(numbers: impl Iterator<Item = u32>) -> String {
    numbers.map(|i| format!("{{\"question\": \"{i}?\", \"answer\": {i}}}\n")).collect()
}

#[test]
fn held_out_questions_depend_only_on_questions() {
    let (dir, mut options) = file(&rows((0..100).map(|i| i % 90)));
    options.held_out = HeldOutCount::Count(20);
    let all = options.load(7).unwrap();
    assert_eq!((all.rest.len(), all.held_out.len(), all.repeated), (70, 20, 10));
    assert!(questions(&all.rest).is_disjoint(&questions(&all.held_out)));
    assert_eq!(options.load(7).unwrap(), all);
    assert_ne!(questions(&options.load(8).unwrap().held_out), questions(&all.held_out));

    // Another order of rows, trailing blanks and another file hold out the same questions in the
    // same order.
    let path = dir.path().join("other.jsonl");
    let blank = rows((0..90).rev()).replace("?\"", "? \"");
    fs::write(&path, blank).unwrap();
    let other = FileOptions { path: path.clone().into(), ..options.clone() };
    assert_eq!(held_out_keys(&other.load(7).unwrap()), held_out_keys(&all));

    // Additional rows replace only few held-out questions.
    fs::write(&path, rows(0..99)).unwrap();
    let kept = other.load(7).unwrap();
    let kept = questions(&kept.held_out).intersection(&questions(&all.held_out)).count();
    assert!((15..20).contains(&kept), "{kept}");

    options.held_out = HeldOutCount::All;
    let all = options.load(7).unwrap();
    assert_eq!((all.rest.len(), all.held_out.len()), (0, 90));
}

fn held_out_keys(tasks: &FileTasks) -> Vec<QuestionKey> {
    tasks.held_out.iter().map(Task::key).collect::<Vec<_>>()
}

#[test]
fn training_order_is_random_and_deterministic() {
    let (_dir, mut options) = file(&rows(0..90));
    let rest = options.load(0).unwrap().rest;
    let train = |options: &FileOptions, seed| options.training(rest.clone(), seed);
    let all = train(&options, 7);
    assert_eq!(questions(&all), questions(&rest));
    assert_eq!(train(&options, 7), all);
    assert_ne!(train(&options, 8), all);
    options.repeat = 3;
    assert_eq!(train(&options, 1).len(), 3 * all.len());
    options.repeat = 1;
    options.limit = Some(5);
    assert_eq!(train(&options, 7), all[..5]);
}

#[test]
fn held_out_round_trips_count_and_all() {
    for text in ["200", "\"all\""] {
        let held_out: HeldOutCount = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&held_out).unwrap(), text);
    }
    for bad in ["-1", "\"most\"", "0.5"] {
        let error = serde_json::from_str::<HeldOutCount>(bad).unwrap_err().to_string();
        assert!(error.contains("expected a whole number, at least 0, or \"all\""), "{error}");
    }
}

#[test]
fn tasks_without_expected_answer_load() {
    let (_dir, options) = file("{\"question\": \"Be kind?\", \"rubric\": \"kindness\"}\n");
    let tasks = load_without_answers(options);
    assert_eq!(
        (answers(&tasks), &tasks.rest[0].row["rubric"]),
        (vec![Value::Null], &json!("kindness"))
    );
    // Rows in verl's layout need no answer either.
    let (_dir, options) =
        file("{\"prompt\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"data_source\": \"x\"}\n");
    let tasks = load_without_answers(options);
    assert_eq!((answers(&tasks), tasks.rest[0].question.as_str()), (vec![Value::Null], "Hi"));
    let (_dir, options) = file("{\"question\": \"1?\"}\n");
    let error = options.load(0).unwrap_err().to_string();
    assert!(
        error.ends_with("or set `answer = \"\"` if the task has no expected answer"),
        "{error}"
    );
}

fn load_without_answers(mut options: FileOptions) -> FileTasks {
    options.answer = String::new();
    options.load(0).unwrap()
}

#[test]
fn invalid_files_are_rejected_by_name() {
    assert_rejected("", keep_options, "/sums.jsonl has no rows");
    assert_rejected("\n \n", keep_options, "/sums.jsonl has no rows");
    let fine = "{\"question\": \"1?\", \"answer\": 1}\n";
    assert_rejected(
        &format!("{fine}\n{{\"question\": \"2?\", \"response\": 2}}"),
        keep_options,
        "/sums.jsonl, line 3: the row has no field \"answer\"; it has question, response. Set \
         `answer = \"response\"` in \
         the recipe, or complete the row",
    );
    assert_rejected(
        &format!("{fine}{{}}"),
        keep_options,
        "/sums.jsonl, line 2: the row has no field \"question\"; it has none. Set \
         `question` in the recipe to the correct field, or complete the row",
    );
    assert_rejected(
        &format!("{fine}{{\"question\": \"2?\", answer: 2}}"),
        keep_options,
        "/sums.jsonl, line 2, column 20: not valid JSON: key must be a string",
    );
    assert_rejected(
        "{\"question\": \"2?\"",
        keep_options,
        "/sums.jsonl, line 1, column 17: not valid JSON: EOF while parsing an object",
    );
    assert_rejected(
        &format!("{fine}[1]"),
        keep_options,
        "/sums.jsonl, line 2: the row is not a JSON object",
    );
    assert_rejected(
        "[{\"question\": \"1?\", \"answer\": 1}, 5]",
        keep_options,
        "/sums.jsonl, row 2: the row is not a JSON object",
    );
    assert_rejected(
        "{\"question\": 5, \"answer\": 1}",
        keep_options,
        "/sums.jsonl, line 1: field \"question\" is 5, but it must be a non-empty \
         string, or a list of messages",
    );
    assert_rejected(
        "{\"question\": [{\"role\": \"assistant\", \"content\": \"Hi\"}], \"answer\": 1}",
        keep_options,
        "/sums.jsonl, line 1: field \"question\" is \
         [{\"role\":\"assistant\",\"content\":\"Hi\"}], but it must be a string, or messages that \
         end with a user message: the last message has the role assistant, which leaves nothing \
         to respond to: end with a user message",
    );
    assert_rejected(
        "{\"question\": \"1?\", \"answer\": \"it is 2\"}",
        |options| options.answer_from = AnswerPart::Hashes,
        "/sums.jsonl, line 1: field \"answer\" is \"it is 2\", but it must be a string \
         that contains an answer after ####",
    );
    assert_rejected(
        fine,
        |options| options.repeat = usize::MAX,
        &format!(
            "/sums.jsonl has 1 rows to train on, and `repeat` = {} would result in more than \
             16777216 tasks: lower `repeat` or `limit`",
            usize::MAX
        ),
    );
    assert_rejected(
        fine,
        |options| options.held_out = HeldOutCount::Count(1),
        "/sums.jsonl has 1 different questions, so holding out 1 questions leaves none to train on: \
         hold out fewer, or set `held_out = \"all\"` if the source is only for evaluation",
    );
    assert_rejected(
        fine,
        |options| options.path = options.path.first().with_file_name("none.jsonl").into(),
        "cannot read the tasks of /none.jsonl: No such file or directory (os error 2)",
    );
    let (_dir, options) = file("{\"question\": \"1?\"}\n");
    fs::write(options.path.first(), b"{\"question\": \"\xff\"}").unwrap();
    assert!(matches!(options.load(0), Err(TaskError::Format { .. })));
    let (_dir, options) = write_file("sums.parquet", fine);
    assert!(
        options
            .load(0)
            .unwrap_err()
            .to_string()
            .ends_with("has the extension of a Parquet file, but is not a Parquet file")
    );
}

fn keep_options(_: &mut FileOptions) {}

#[path = "text_tests.rs"]
mod texts;
