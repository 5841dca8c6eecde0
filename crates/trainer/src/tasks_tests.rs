//! Tests that held-out tasks are trained on nowhere, and of the conversation that a task opens.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use dressage_agent::environments::Environments;
use dressage_agent::tasks::ArithmeticOptions;
use dressage_text::Message;
use tempfile::TempDir;

use super::*;

/// A folder for files, and the tasks of a recipe with these sources.
fn load(folder: &TempDir, sources: &str, seed: u64) -> Result<Tasks, TrainerError> {
    let file = folder.path().join("recipe.toml");
    let recipe = format!(
        "run = {{ name = 'x', seed = {seed} }}\nmodel = {{ source = './model' }}\neval = {{ tasks = 1000 \
         }}\n{sources}"
    );
    fs::write(&file, recipe).unwrap();
    tasks_of(&Recipe::load(&file, &[]).unwrap())
}

fn tasks_of(recipe: &Recipe) -> Result<Tasks, TrainerError> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(Tasks::load(recipe, &Environments::default()))
}

fn write_rows(path: &Path, questions: impl Iterator<Item = String>) {
    let mut rows = String::new();
    for question in questions {
        writeln!(rows, "{}", serde_json::json!({"question": question, "answer": 1})).unwrap();
    }
    fs::write(path, rows).unwrap();
}

fn trained(tasks: &Tasks) -> BTreeSet<QuestionKey> {
    (0..tasks.train_len()).map(|index| tasks.train(index).unwrap().key()).collect()
}

fn asked(tasks: &Tasks) -> BTreeSet<QuestionKey> {
    tasks.eval.iter().flat_map(|slice| &slice.tasks).map(Task::key).collect()
}

const OVERLAPPING: &str = "
    [[tasks]]
    kind = 'file'
    path = 'a.jsonl'
    held_out = 40
    [[tasks]]
    kind = 'file'
    path = 'b.jsonl'
    held_out = 30
    repeat = 2
    [[tasks]]
    kind = 'file'
    path = 'c.jsonl'
    limit = 100
";

#[test]
fn what_one_source_holds_out_is_trained_on_from_none() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, questions: Box<dyn Iterator<Item = String>>| {
        write_rows(&folder.path().join(name), questions)
    };
    write("a.jsonl", Box::new((0..200).map(|i| format!("What is {i} + 1?"))));
    write("b.jsonl", Box::new((100..300).rev().map(|i| format!("  what is\t{i} + 1? \n"))));
    write("c.jsonl", Box::new((0..150).map(|i| format!("What is {i} + 1?\u{a0}"))));
    let runs: Vec<Tasks> = (1..4).map(|seed| load(&folder, OVERLAPPING, seed).unwrap()).collect();
    // One evaluation for all seeds, and nothing of it in any training.
    let asked_of = asked(&runs[0]);
    for run in &runs {
        assert_eq!(run.eval, runs[0].eval);
        assert_eq!(run.eval.iter().map(|slice| slice.tasks.len()).collect::<Vec<_>>(), [40, 30]);
        assert!(trained(run).is_disjoint(&asked_of));
        // What the second holds out of the first, the first holds out, too: it takes the smallest hashes of
        // more.
        let left_out: Vec<_> =
            run.notes.iter().filter(|note| note.contains("another source holds them out")).collect();
        let [b, c] = &left_out[..] else { panic!("{:?}", run.notes) };
        assert!(b.contains("b.jsonl: ") && c.contains("c.jsonl: "), "{left_out:?}");
    }
    // The order of training is the seed's.
    let first = |run: &Tasks| (0..20).map(|i| run.train(i).unwrap().id).collect::<Vec<_>>();
    assert_ne!(first(&runs[0]), first(&runs[1]));
    // Another split is another evaluation.
    let split =
        Recipe::load(&folder.path().join("recipe.toml"), &["eval.split_seed=2".parse().unwrap()]).unwrap();
    assert_ne!(asked(&tasks_of(&split).unwrap()), asked_of);
}

#[test]
fn a_test_file_is_only_evaluated_on() {
    let folder = tempfile::tempdir().unwrap();
    write_rows(&folder.path().join("train.jsonl"), (0..50).map(|i| format!("{i}?")));
    write_rows(&folder.path().join("test.jsonl"), (40..60).map(|i| format!("{i}? ")));
    let sources = "tasks = [{ kind = 'file', path = 'train.jsonl' }, \
                   { kind = 'file', path = 'test.jsonl', held_out = 'all' }]";
    let tasks = load(&folder, sources, 1).unwrap();
    assert_eq!((tasks.train_len(), tasks.eval.len(), tasks.eval[0].tasks.len()), (40, 1, 20));
    assert!(trained(&tasks).is_disjoint(&asked(&tasks)));
    let note = "train.jsonl: 10 tasks are not trained on, since another source holds them out";
    assert!(tasks.notes.iter().any(|found| found.ends_with(note)), "{:?}", tasks.notes);

    let known = |range: std::ops::Range<u32>| {
        let task = |i| Task { question: format!("{i}?"), ..Task::default() };
        range.map(|i| task(i).key()).collect::<HashSet<_>>()
    };
    assert_eq!(tasks.evaluated_among(&known(0..45)).len(), 5);
    assert_eq!(tasks.evaluated_among(&known(0..40)), Vec::<&Task>::new());
}

#[test]
fn generators_and_files_do_not_leak_into_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        ArithmeticOptions { operands: 2, min_digits: 1, max_digits: 2, ..ArithmeticOptions::default() };
    let questions = |seed, split| {
        let generator = Arithmetic::new(options, seed).unwrap();
        (0..60).map(move |i| generator.task(split, i).question)
    };
    // A test file with tasks that the generator would train on under seed 5, and training rows that it asks.
    write_rows(&folder.path().join("test.jsonl"), questions(5, Split::Train));
    write_rows(
        &folder.path().join("train.jsonl"),
        questions(1, Split::HeldOut).chain((0..9).map(|i| format!("{i}?"))),
    );
    let sources = "
        [[tasks]]
        kind = 'arithmetic'
        operands = 2
        min_digits = 1
        max_digits = 2
        train = 500
        [[tasks]]
        kind = 'file'
        path = 'test.jsonl'
        held_out = 'all'
        [[tasks]]
        kind = 'file'
        path = 'train.jsonl'
    ";
    let runs = [5, 6].map(|seed| load(&folder, sources, seed).unwrap());
    for run in &runs {
        assert_eq!(run.eval, runs[0].eval);
        assert!(trained(run).is_disjoint(&asked(run)));
        assert_eq!(run.train_len(), trained_len(run));
    }
    assert!(runs[0].train_len() <= 500 - 60 + 9, "{}", runs[0].train_len());
    // Without the file the generator's tasks are all there, in their order.
    let alone = load(&folder, sources.split("[[tasks]]\n        kind = 'file'").next().unwrap(), 5).unwrap();
    let generator = Arithmetic::new(options, 5).unwrap();
    assert_eq!(alone.train_len(), 500);
    assert!((0..500).all(|i| alone.train(i) == Some(generator.task(Split::Train, i as u64))));
}

/// How many tasks there are, counted one by one.
fn trained_len(tasks: &Tasks) -> usize {
    (0..).map_while(|index| tasks.train(index)).count()
}

#[test]
fn a_conversation_is_opened_with_its_own_instructions() {
    let agent =
        AgentKeys { system: "Be brief.".into(), prompt: "Q: {question}".into(), ..AgentKeys::default() };
    let plain = Task { question: "1 + 1?".into(), ..Task::default() };
    assert_eq!(agent.opening(&plain), [Message::system("Be brief."), Message::user("Q: 1 + 1?")]);
    let chat = |messages: &[Message]| {
        let question = messages.last().unwrap().content.to_string();
        agent.opening(&Task { question, messages: messages.to_vec(), ..Task::default() })
    };
    let shown = [Message::user("2 + 2?"), Message::assistant("4"), Message::user("1 + 1?")];
    let want = [Message::user("2 + 2?"), Message::assistant("4"), Message::user("Q: 1 + 1?")];
    assert_eq!(chat(&shown), [&[Message::system("Be brief.")], &want[..]].concat());
    let own = [&[Message::system("Think.")], &shown[..]].concat();
    assert_eq!(chat(&own), [&[Message::system("Think.")], &want[..]].concat());
    let called = [Message::user("1 + 1?"), Message::calls("", Vec::new()), Message::tool("2")];
    assert_eq!(chat(&called), [&[Message::system("Be brief.")], &called[..]].concat());
}
