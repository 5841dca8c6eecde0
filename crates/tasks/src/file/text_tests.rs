//! Tests of repeated rows, and of texts and JSON in rows.

use super::*;

#[test]
fn only_equal_rows_are_repeats() {
    for (rows, kept) in [
        ([counting_row(", \"db_id\": \"a\""), counting_row(", \"db_id\": \"b\"")], 2),
        ([counting_row(", \"choices\": [1, 2]"), counting_row(", \"choices\": [2, 1]")], 2),
        ([counting_row(""), counting_row("").replace('1', "2")], 2),
        ([instructed_row("There is 1."), instructed_row("There are 2.")], 2),
        ([counting_row(", \"agent_name\": \"x\""), counting_row(", \"agent_name\": \"y\"")], 2),
        ([counting_row(", \"x\": {\"y\": 1}"), counting_row(", \"x\": {\"y\": 2}")], 2),
        ([counting_row(""), counting_row("").replace("How many", "how many")], 2),
        ([counting_row(""), counting_row("").replace("How many", "How  many")], 2),
        ([counting_row(", \"x\": \"a b\""), counting_row(", \"x\": \"a  b\"")], 2),
        ([counting_row(", \"index\": [1]"), counting_row(", \"index\": [2]")], 2),
        ([row_with_call("1"), row_with_call("2")], 2),
        ([counting_row(""), counting_row("").replace("How many?", " How many? ")], 1),
        (
            [
                counting_row(", \"x\": {\"y\": 1, \"z\": 2}"),
                counting_row(", \"x\": {\"z\": 2, \"y\": 1}"),
            ],
            1,
        ),
        (
            [
                counting_row(", \"__index_level_0__\": 1"),
                counting_row(", \"__index_level_0__\": 2"),
            ],
            1,
        ),
        ([counting_row(", \"id\": 7"), counting_row(", \"id\": 8")], 1),
        (
            [
                counting_row(", \"extra_info\": {\"index\": 1}"),
                counting_row(", \"extra_info\": {\"index\": 2}"),
            ],
            1,
        ),
        ([counting_row(""), counting_row("").replace('1', "\"1\"")], 1),
        ([counting_row(", \"x\": null"), counting_row("")], 1),
        ([instructed_row("There is 1."), instructed_row("There is  1.")], 2),
        ([instructed_row("There is 1."), instructed_row("There is 1.")], 1),
    ] {
        let (_dir, options) = file(&rows.concat());
        let tasks = options.load(0).unwrap();
        assert_eq!((tasks.rest.len(), tasks.repeated), (kept, 2 - kept), "{rows:?}");
        assert_eq!(options.load_with_rule(0, MatchingRule::Questions).unwrap().rest.len(), 1);
    }
}

fn counting_row(more: &str) -> String {
    format!("{{\"question\": \"How many?\", \"answer\": 1{more}}}\n")
}

fn instructed_row(content: &str) -> String {
    format!(
        "{{\"question\": [{{\"role\": \"system\", \"content\": {content:?}}}, {{\"role\": \"user\", \
             \"content\": \"How many?\"}}], \"answer\": 1}}\n"
    )
}

fn row_with_call(x: &str) -> String {
    let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": format!("{{\"x\": {x}}}")}});
    let chat = json!([
        {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
    ]);
    format!("{}\n", json!({"question": chat, "answer": 1}))
}

#[test]
fn json_text_of_messages_loads_as_messages() {
    let chat =
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]);
    let prompt = chat.to_string();
    let model = json!({"style": "rule", "ground_truth": "2"});
    let lines = json!({"prompt": prompt, "reward_model": model.to_string()}).to_string();
    let table =
        format!("prompt,reward_model\n{},{}\n", quoted(&prompt), quoted(&model.to_string()));
    for (name, contents) in [("rows.jsonl", lines), ("rows.csv", table)] {
        let (_dir, options) = write_file(name, contents);
        let tasks = options.load(0).unwrap();
        let [task] = &tasks.rest[..] else { panic!("{tasks:?}") };
        assert_eq!(task.messages, [Message::system("Be brief."), Message::user("1+1?")], "{name}");
        assert_eq!(
            (&task.answer, &task.row["prompt"], &task.row["reward_model"]),
            (&json!("2"), &chat, &model)
        );
        for column in [
            "prompt\" contains JSON in a string, which is read as messages",
            "reward_model\" contains JSON",
        ] {
            assert!(tasks.notes.iter().any(|note| note.contains(column)), "{:?}", tasks.notes);
        }
    }
    let (_dir, options) =
        file("{\"question\": \"[{'role': 'user', 'content': 'Hi'}]\", \"answer\": 1}");
    let error = options.load(0).unwrap_err().to_string();
    assert!(error.ends_with("as Python prints it: save the list with json.dumps"), "{error}");
    // A question about JSON stays a question.
    let (_dir, options) =
        file("{\"question\": \"[{\\\"name\\\": 1}] has how many?\", \"answer\": 1}");
    assert_eq!(options.load(0).unwrap().rest[0].question, "[{\"name\": 1}] has how many?");
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

#[test]
fn json_text_of_options_loads_as_options() {
    let rows = "question,choices,answer\nWhich?,\"[\"\"red\"\", \"\"green\"\"]\",A\n";
    let (_dir, mut options) = write_file("rows.csv", rows);
    options.question = "{question}\n{choices}".into();
    let tasks = options.load(0).unwrap();
    let task = &tasks.rest[0];
    assert_eq!(
        (&*task.question, &task.row["choices"]),
        ("Which?\nA. red\nB. green", &json!(["red", "green"]))
    );
    assert!(
        tasks.notes[0].contains("\"choices\" contains JSON in a string, which is read as options")
    );
    let (_dir, printed) = write_file("rows.csv", rows.replace("\"\"", "'"));
    let error =
        FileOptions { question: options.question, ..printed }.load(0).unwrap_err().to_string();
    assert!(error.contains("\"choices\"") && error.contains("json.dumps"), "{error}");
}

#[test]
fn row_texts_keep_white_space() {
    let row = r#"{"a": "    return 1\n", "b": "", "n": 1E5, "answer": " 2\n"}"#;
    let (_dir, mut options) = file(row);
    for (question, want) in [
        ("{a}", "    return 1\n"),
        (" {b}\n{a}\n{b} ", "    return 1\n"),
        ("{n}: {a}end\n", "1E5:     return 1\nend"),
    ] {
        options.question = question.into();
        let task = &options.load(0).unwrap().rest[0];
        assert_eq!((&*task.question, &task.answer), (want, &json!(" 2\n")), "{question}");
    }
}

#[test]
fn empty_right_answers_are_omitted_with_note() {
    let (_dir, options) = file(
        "{\"question\": \"a?\", \"answer\": [\"x\", \"\", null]}\n{\"question\": \"b?\", \"answer\": [[\"x\", \"\"]]}",
    );
    let tasks = options.load(0).unwrap();
    let answers: Vec<&Value> = tasks.rest.iter().map(|task| &task.answer).collect();
    assert_eq!(answers, [&json!(["x"]), &json!([["x", ""]])]);
    assert!(
        tasks.notes[0].contains("1 rows have an empty string or null among their correct answers")
    );
    for (answer, noted) in
        [("['x', 'y']", 1), ("[\"x\"]", 1), ("[\"assert f()\"]", 0), ("[1, 2]", 0)]
    {
        let (_dir, options) = file(&json!({"question": "a?", "answer": answer}).to_string());
        let tasks = options.load(0).unwrap();
        assert_eq!((tasks.notes.len(), &tasks.rest[0].answer), (noted, &json!(answer)), "{answer}");
    }
}
