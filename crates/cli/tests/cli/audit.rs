//! Tests of `levade audit` and `levade withdraw` on a run whose tasks came from people.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Workspace, stderr, stdout};

const RECIPE: &str = r#"
run = { name = "people", folder = "run", checkpoint_every = 1 }
model = { source = "model" }
engine = { threads = 1 }
eval = { tasks = 0 }
reward = { scorer = { kind = "numeric" } }

[[tasks]]
kind = "file"
path = "rows.jsonl"
person = "author.id"

[[phase]]
kind = "sft"
source = { field = "demonstration", min_score = 0.0 }
demonstrations = 4
batch = 2
learning_rate = 1e-4
"#;

/// Trains one epoch on four rows of two people. The questions contain the animals of the people.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    let row = |(index, (person, animal)): (usize, (&str, &str))| {
        let number = index + 1;
        let question = format!("How many legs have {number} {animal}s?");
        let completion = format!("They have {} legs.", 4 * number);
        json!({ "question": question, "answer": 4 * number, "author": { "id": person },
            "demonstration": [completion] })
        .to_string()
            + "\n"
    };
    let people = [("alice", "zebra"), ("bob", "giraffe"), ("alice", "zebra"), ("bob", "giraffe")];
    workspace.write("rows.jsonl", people.into_iter().enumerate().map(row).collect::<String>());
    workspace.write("recipe.toml", RECIPE);
    let trained = workspace.train().output().unwrap();
    assert!(trained.status.success(), "{}", stderr(&trained));
    workspace
}

/// Returns the names of the files below a directory that contain a text.
fn files_with(dir: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_with(&path, text));
        } else if fs::read(&path).unwrap().windows(text.len()).any(|part| part == text.as_bytes()) {
            found.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    found
}

#[test]
fn data_of_a_person_is_traced_withdrawn_and_erased() {
    let workspace = workspace();
    let run = |arguments: &[&str]| workspace.levade().args(arguments).output().unwrap();
    let output = run(&["audit", "run", "--step", "2", "--json"]);
    let found: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let steps = found["made_by"].as_array().unwrap();
    let attempts: Vec<&Value> =
        steps.iter().flat_map(|step| step["attempts"].as_array().unwrap()).collect();
    let mut persons: Vec<(&str, &str)> = attempts
        .iter()
        .map(|it| (it["task"].as_str().unwrap(), it["persons"][0].as_str().unwrap()))
        .collect();
    persons.sort_unstable();
    let want = [("rows-1", "alice"), ("rows-2", "bob"), ("rows-3", "alice"), ("rows-4", "bob")];
    assert_eq!((steps.len(), persons), (2, want.to_vec()));

    let output = run(&["audit", "run", "--person", "alice"]);
    let text = stdout(&output);
    assert!(text.contains("2 attempts: versions "), "{text}{}", stderr(&output));
    assert!(text.contains(" to 2 of policy default descend"), "{text}");
    for want in ["task rows-1 of alice", "task rows-3 of alice", "step-000002"] {
        assert!(text.contains(want), "{want}: {text}");
    }
    assert!(!text.contains("rows-2"), "{text}");
    for command in ["audit", "withdraw"] {
        let output = run(&[command, "run", "--person", "carol"]);
        assert_eq!(output.status.code(), Some(2), "{command}");
        let error = stderr(&output);
        assert!(error.contains("no attempt at a task of the person \"carol\""), "{error}");
    }

    let dir = workspace.path("run");
    assert!(!files_with(&dir, "zebra").is_empty());
    let output = run(&["withdraw", "run", "--person", "alice", "--erase"]);
    let text = stdout(&output);
    assert_eq!(text.matches("erased demonstration/0/0/").count(), 2, "{text}{}", stderr(&output));
    assert!(text.contains(" to 2 of policy default (steps "), "{text}");
    assert_eq!(files_with(&dir, "zebra"), [""; 0]);
    assert!(!files_with(&dir, "giraffe").is_empty());
    let repeated = stdout(&run(&["withdraw", "run", "--person", "alice", "--erase"]));
    assert!(
        repeated.contains("nothing to do") && repeated.contains(" to 2 of policy"),
        "{repeated}"
    );
    // The tombstones keep the key, so the weights are still found.
    let text = stdout(&run(&["audit", "run", "--person", "alice"]));
    assert_eq!(text.matches(", withdrawn and erased").count(), 2, "{text}");

    // The run does not go on with another attempt at the person's tasks.
    let resumed = ["train", "recipe.toml", "--resume", "--set", "phase.0.epochs=2"];
    let resumed = run(&resumed);
    assert_eq!(resumed.status.code(), Some(2), "{}", stdout(&resumed));
    let error = stderr(&resumed);
    assert!(error.contains("of the person \"alice\" was withdrawn from this run"), "{error}");
}
