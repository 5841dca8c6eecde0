//! Tests of task files: which rows a run trains on, and which ones it is evaluated on.

use std::collections::BTreeSet;
use std::fs;

use levade_store::testing::wait;
use levade_store::{Sqlite, Store};
use levade_tasks::{QuestionKey, Task};
use levade_tree::Purpose;
use serde_json::{Value, json};

use crate::support::{Workspace, stderr, stdout};

/// Creates a directory with a recipe that has these task sources and trains two RL steps.
fn with_sources(sources: &str) -> Workspace {
    let workspace = Workspace::new();
    let recipe = format!(
        "run = {{ name = 'tiny', folder = 'run' }}\nmodel = {{ source = './model' }}\n\
         agent = {{ max_tokens = 4 }}\n\
         eval = {{ tasks = 20 }}\n{sources}\n[[phase]]\nkind = 'rl'\nsteps = 2\ngroups = 16\n\
         group_size = 2\n\
         learning_rate = 1e-3\nzero_variance_groups = 'keep'\n"
    );
    workspace.write("recipe.toml", recipe);
    workspace
}

/// Returns the questions of the recorded attempts of a run.
fn questions(workspace: &Workspace, run: &str, purpose: Purpose) -> BTreeSet<QuestionKey> {
    let store = wait(Sqlite::open_existing(&workspace.path(run).join("run.db"))).unwrap();
    let tasks = wait(store.tasks(purpose)).unwrap().into_iter();
    tasks.map(|task| serde_json::from_value::<Task>(task).unwrap().key()).collect()
}

#[test]
fn held_out_tasks_are_not_trained_on() {
    let workspace = with_sources(
        "tasks = [{ kind = 'file', path = 'a.jsonl', held_out = 12 }, \
         { kind = 'file', path = 'b.jsonl', held_out = 8 }]",
    );
    // Of 36 questions, 20 are in both files. In the second file, they end with spaces.
    let rows = |range: std::ops::Range<u32>, blank: &str| -> String {
        range
            .map(|i| {
                format!("{}\n", json!({"question": format!("{i} + 1?{blank}"), "answer": i + 1}))
            })
            .collect()
    };
    workspace.write("a.jsonl", rows(0..28, ""));
    workspace.write("b.jsonl", rows(8..36, "  "));
    let mut trained = BTreeSet::new();
    let mut measured = Vec::new();
    for seed in ["1", "2"] {
        let run = format!("run-{seed}");
        let output = workspace
            .train()
            .args(["--run", &run, "--set", &format!("run.seed={seed}")])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(
            stdout(&output).contains(
                "tasks are excluded from training, because they ask or show a held-out question"
            ),
            "{}",
            stdout(&output)
        );
        trained.extend(questions(&workspace, &run, Purpose::Train));
        measured.push(questions(&workspace, &run, Purpose::Eval));
    }
    assert_eq!(measured[0], measured[1]);
    assert!(
        measured[0].len() >= 12 && trained.len() >= 12,
        "{} and {}",
        measured[0].len(),
        trained.len()
    );
    assert!(trained.is_disjoint(&measured[0]));

    let eval = |args: &[&str]| {
        let output = workspace.levade().arg("eval").args(args).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let notes = eval(&["recipe.toml", "--model", "run-2"]);
    assert!(!notes.contains("was trained on"), "{notes}");
    // Another split evaluates trained questions. The store of the run contains them, even if the
    // run was moved and its task files do not exist.
    fs::rename(workspace.path("run-1"), workspace.path("moved")).unwrap();
    workspace.write("c.jsonl", rows(0..36, ""));
    let sources = "tasks=[{ kind = 'file', path = 'c.jsonl', held_out = 'all' }]";
    let set = ["--set", sources, "--set", "eval.tasks=36", "--set", "phase=[]"];
    let notes = eval(&[&["recipe.toml", "--model", "moved"][..], &set].concat());
    let count = questions(&workspace, "moved", Purpose::Train).len();
    let warning = format!("warning: the model was trained on {count} of these 36 tasks");
    assert!(
        notes.contains(&warning) && notes.contains("one of them is c-"),
        "no {warning:?} in\n{notes}"
    );
    // A model that was trained from that one has seen the same questions.
    let from = "model.source=./moved/checkpoints/step-000002";
    let train_args = ["--run", "second", "--set", from, "--set", "eval.tasks=0"];
    let output = workspace.train().args(train_args).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let mut both = questions(&workspace, "moved", Purpose::Train);
    both.extend(questions(&workspace, "second", Purpose::Train));
    let notes = eval(&[&["recipe.toml", "--model", "second"][..], &set].concat());
    assert!(notes.contains(&format!("trained on {} of these 36", both.len())), "{notes}");
}

#[test]
fn merged_model_inherits_trained_tasks_of_run() {
    let workspace = with_sources("tasks = [{ kind = 'file', path = 'rows.jsonl', held_out = 4 }]");
    let rows =
        (0..20).map(|i| format!("{}\n", json!({"question": format!("{i} + 1?"), "answer": i + 1})));
    workspace.write("rows.jsonl", rows.collect::<String>());
    let adapter = ["--set", "model.lora={ rank = 2 }", "--set", "eval.tasks=0"];
    let output = workspace.train().args(adapter).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let output = workspace.levade().args(["merge", "run", "merged"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let eval = || {
        let sources = "tasks=[{ kind = 'file', path = 'rows.jsonl', held_out = 'all' }]";
        let set = ["--set", sources, "--set", "phase=[]"];
        let output = workspace
            .levade()
            .args(["eval", "recipe.toml", "--model", "merged"])
            .args(set)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let notes = eval();
    let count = questions(&workspace, "run", Purpose::Train).len();
    assert!(notes.contains(&format!("trained on {count} of these 20 tasks")), "{notes}");
    fs::rename(workspace.path("run"), workspace.path("moved")).unwrap();
    let notes = eval();
    assert!(notes.contains("is not known: merged was merged from the run in"), "{notes}");
}

#[test]
fn chat_rows_and_large_integers_are_preserved() {
    let workspace =
        with_sources("tasks = [{ kind = 'file', path = 'rows.json', held_out = 'all' }]");
    let rows = [("1 + 1?", "2"), ("1 + 2?", "3")].map(|(question, answer)| {
        let system = json!({"role": "system", "content": "Be brief."});
        let prompt = json!([system, {"role": "user", "content": question}]);
        json!({"prompt": prompt, "reward_model": {"ground_truth": answer}, "data_source": "sums"})
    });
    let rows = json!(rows);
    workspace.write("rows.json", format!("\u{feff}{rows}"));
    let output = workspace.train().output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("every task is held out, so there is nothing to train on"),
        "{}",
        stderr(&output)
    );
    let untrained = ["--set", "phase=[]", "--set", "reward.scorer={kind='numeric'}"];
    let output = workspace.train().args(untrained).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let inspect = |run: &str| {
        let output = workspace
            .levade()
            .args(["inspect", run, "--attempt", "eval/0/0/0/0"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    let text = inspect("run");
    assert!(text.contains("Be brief.") && text.contains("<|im_start|>user"), "{text}");

    workspace.write("big.json", r#"{"question": "large?", "answer": 18446744073709551617}"#);
    let output = workspace
        .train()
        .args(untrained)
        .args(["--run", "big", "--set", "tasks.0.path=big.json"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(inspect("big").contains("answer: \"18446744073709551617\""), "{}", inspect("big"));
}

#[test]
fn score_finds_tasks_by_id_and_by_row() {
    let workspace = Workspace::new();
    let eval = ["eval", "recipe.toml", "--tasks", "3", "--out", "replies.jsonl"];
    let output = workspace.levade().args(eval).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let lines = |name: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(workspace.path(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    // The untrained model answers no task correctly. One completion is replaced with the right
    // answer. The answers of the rows are not used.
    let mut rows = lines("replies.jsonl");
    assert!(rows.len() >= 3 && rows.iter().all(|row| row["score"] == json!(0.0)), "{rows:?}");
    let answer = rows[1]["answer"].clone();
    rows[1]["reply"] = answer;
    rows.iter_mut().for_each(|row| row["answer"] = json!("0"));
    rows.extend(["2", "It is 3."].map(|completion| {
        json!({"id": "mine", "question": "1 + 1?", "answer": "2", "reply": completion})
    }));
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    workspace.write("changed.jsonl", text);
    let score = ["score", "changed.jsonl", "--recipe", "recipe.toml"];
    let output = workspace.levade().args(score).args(["--out", "scored.jsonl"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let scored = lines("scored.jsonl");
    assert_eq!(scored.len(), rows.len());
    for (at, (row, line)) in rows.iter().zip(&scored).enumerate() {
        let is_correct = at == 1 || at == rows.len() - 2;
        assert_eq!(
            (&line["id"], &line["score"]),
            (&row["id"], &json!(f64::from(u8::from(is_correct)))),
            "{line}"
        );
    }
    assert!(stdout(&output).contains(&format!(" right of {} ", rows.len())), "{}", stdout(&output));

    let output = workspace.levade().args(score).args(["--completion", "said"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("has no completion in said; its fields are id, "),
        "{}",
        stderr(&output)
    );
}

/// A completion that is scored against the answer of another task, or left out, would falsify the
/// result.
#[test]
fn score_matches_ids_by_question_and_counts_equal_completions() {
    let workspace = with_sources(
        "tasks = [{ kind = 'file', path = 'rows.jsonl', answer = 'output', held_out = 1 }]",
    );
    workspace.write(
        "rows.jsonl",
        "{\"question\": \"2 + 2?\", \"output\": \"4\"}\n{\"question\": \"3 + 3?\", \"output\": \"6\"}\n",
    );
    for (rows, fraction) in [
        // The id is from a file with another order of rows.
        (
            vec![json!({"id": "rows-1", "question": "3 + 3?", "output": "6", "text": "6"})],
            "100.0 % right of 1 ",
        ),
        (
            vec![json!({"id": "rows-1", "question": "3 + 3?", "output": "6", "text": "4"})],
            "0.0 % right of 1 ",
        ),
        // Rows without a question, and equal completions. The expected answer is not taken for a
        // completion.
        (
            ["4", "4", "4", "5"].map(|text| json!({"id": "rows-1", "text": text})).to_vec(),
            "75.0 % right of 4 ",
        ),
        (
            ["1", "1", "2"]
                .map(|text| json!({"question": "?", "output": "1", "text": text}))
                .to_vec(),
            "66.7 % right of 3 ",
        ),
    ] {
        let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
        workspace.write("replies.jsonl", &text);
        let output = workspace
            .levade()
            .args(["score", "replies.jsonl", "--recipe", "recipe.toml"])
            .output()
            .unwrap();
        assert!(
            stdout(&output).starts_with(fraction),
            "{text}{}{}",
            stdout(&output),
            stderr(&output)
        );
    }
    // Tasks of a recipe that holds none out.
    workspace.write("replies.jsonl", "{\"id\": \"rows-1\", \"text\": \"4\"}\n");
    let output = workspace
        .levade()
        .args(["score", "replies.jsonl", "--recipe", "recipe.toml"])
        .args(["--set", "tasks.0.held_out=0"])
        .output()
        .unwrap();
    assert!(stdout(&output).starts_with("100.0 % right of 1 "), "{}", stderr(&output));
    workspace.write("replies.jsonl", "{\"question\": \"?\", \"output\": \"1\"}\n");
    let output = workspace
        .levade()
        .args(["score", "replies.jsonl", "--recipe", "recipe.toml"])
        .output()
        .unwrap();
    assert!(stderr(&output).contains("has no completion in reply, "), "{}", stderr(&output));
}
