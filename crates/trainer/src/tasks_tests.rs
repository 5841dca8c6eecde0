//! Tests the separation of held-out tasks from training, and the opening conversation of a task.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use levade_agent::environments::Environments;
use levade_tasks::ArithmeticOptions;
use levade_text::Message;
use tempfile::TempDir;

use super::*;
use crate::agents::AgentSpec;

/// Writes a recipe with these sources next to their files, and loads it with `overrides`.
fn recipe(dir: &TempDir, sources: &str, seed: u64, overrides: &[&str]) -> Recipe {
    let file = dir.path().join("recipe.toml");
    let recipe = format!(
        "run = {{ name = 'x', seed = {seed} }}\nmodel = {{ source = './model' }}\n\
         eval = {{ tasks = 1000 }}\n{sources}"
    );
    fs::write(&file, recipe).unwrap();
    let overrides: Vec<_> = overrides.iter().map(|text| text.parse().unwrap()).collect();
    Recipe::load(&file, &overrides).unwrap()
}

/// Returns the tasks of a recipe with these sources.
fn load(dir: &TempDir, sources: &str, seed: u64) -> Result<Tasks, TrainerError> {
    tasks_of(&recipe(dir, sources, seed, &[]))
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

fn question_texts(tasks: &Tasks) -> BTreeSet<QuestionKey> {
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
fn held_out_questions_are_excluded_from_all_sources() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, questions: Box<dyn Iterator<Item = String>>| {
        write_rows(&dir.path().join(name), questions)
    };
    write("a.jsonl", Box::new((0..200).map(|i| format!("What is {i} + 1?"))));
    write("b.jsonl", Box::new((100..300).rev().map(|i| format!("  what is\t{i} + 1? \n"))));
    write("c.jsonl", Box::new((0..150).map(|i| format!("What is {i} + 1?\u{a0}"))));
    let runs: Vec<Tasks> = (1..4).map(|seed| load(&dir, OVERLAPPING, seed).unwrap()).collect();
    // All seeds share one evaluation, and none of its questions is in any training set.
    let questions_of = question_texts(&runs[0]);
    for run in &runs {
        assert_eq!(run.eval, runs[0].eval);
        assert_eq!(run.eval.iter().map(|slice| slice.tasks.len()).collect::<Vec<_>>(), [40, 30]);
        assert!(trained(run).is_disjoint(&questions_of));
        // The first source holds out everything that the second holds out of it, because it takes
        // the smallest hashes of a larger number.
        let left_out: Vec<_> =
            run.notes.iter().filter(|note| note.contains("a held-out question")).collect();
        let [b, c] = &left_out[..] else { panic!("{:?}", run.notes) };
        assert!(b.contains("b.jsonl: ") && c.contains("c.jsonl: "), "{left_out:?}");
    }
    // The seed determines the training order.
    let first = |run: &Tasks| (0..20).map(|i| run.train(i).unwrap().id).collect::<Vec<_>>();
    assert_ne!(first(&runs[0]), first(&runs[1]));
    // Another split seed yields another evaluation.
    let split =
        Recipe::load(&dir.path().join("recipe.toml"), &["eval.split_seed=2".parse().unwrap()])
            .unwrap();
    assert_ne!(question_texts(&tasks_of(&split).unwrap()), questions_of);
}

#[test]
fn fully_held_out_file_is_not_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    write_rows(&dir.path().join("train.jsonl"), (0..50).map(|i| format!("{i}?")));
    write_rows(&dir.path().join("test.jsonl"), (40..60).map(|i| format!("{i}? ")));
    let sources = "tasks = [{ kind = 'file', path = 'train.jsonl' }, \
                   { kind = 'file', path = 'test.jsonl', held_out = 'all' }]";
    let tasks = load(&dir, sources, 1).unwrap();
    assert_eq!((tasks.train_len(), tasks.eval.len(), tasks.eval[0].tasks.len()), (40, 1, 20));
    assert!(trained(&tasks).is_disjoint(&question_texts(&tasks)));
    let note = "train.jsonl: 10 tasks are excluded from training, because they ask or \
                show a held-out question; one is train-41 (\"40?\")";
    assert!(tasks.notes.iter().any(|found| found.ends_with(note)), "{:?}", tasks.notes);

    let known = |range: std::ops::Range<u32>| {
        let task = |i| Task { question: format!("{i}?"), ..Task::default() };
        range.flat_map(|i| task(i).shown_keys()).collect::<HashSet<_>>()
    };
    assert_eq!(tasks.evaluated_tasks_among(&known(0..45)).len(), 5);
    assert_eq!(tasks.evaluated_tasks_among(&known(0..40)), Vec::<&Task>::new());
}

#[test]
fn generators_and_files_exclude_mutual_leaks() {
    let dir = tempfile::tempdir().unwrap();
    let options = ArithmeticOptions {
        operands: 2,
        min_digits: 1,
        max_digits: 2,
        ..ArithmeticOptions::default()
    };
    let questions = |seed, split| {
        let generator = Arithmetic::new(options, seed).unwrap();
        (0..60).map(move |i| generator.task(split, i).question)
    };
    // A test file with tasks that the generator would train on under seed 5, and training rows that
    // the generator evaluates on.
    write_rows(&dir.path().join("test.jsonl"), questions(5, Split::Train));
    write_rows(
        &dir.path().join("train.jsonl"),
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
    let runs = [5, 6].map(|seed| load(&dir, sources, seed).unwrap());
    for run in &runs {
        assert_eq!(run.eval, runs[0].eval);
        assert!(trained(run).is_disjoint(&question_texts(run)));
        assert_eq!(run.train_len(), trained_len(run));
    }
    assert!(runs[0].train_len() <= 500 - 60 + 9, "{}", runs[0].train_len());
    // Without the files, the generator keeps all its tasks in order.
    let separate =
        load(&dir, sources.split("[[tasks]]\n        kind = 'file'").next().unwrap(), 5).unwrap();
    let generator = Arithmetic::new(options, 5).unwrap();
    assert_eq!(separate.train_len(), 500);
    assert!((0..500).all(|i| separate.train(i) == Some(generator.task(Split::Train, i as u64))));
}

/// Returns the number of training tasks, counted one by one.
fn trained_len(tasks: &Tasks) -> usize {
    (0..).map_while(|index| tasks.train(index)).count()
}

#[test]
fn opening_prefers_system_message_of_task() {
    let agent = AgentKeys {
        system: "Be brief.".into(),
        prompt: "Q: {question}".into(),
        ..AgentKeys::default()
    };
    let plain = Task { question: "1 + 1?".into(), ..Task::default() };
    assert_eq!(
        agent.initial_messages(&plain),
        [Message::system("Be brief."), Message::user("Q: 1 + 1?")]
    );
    let chat = |messages: &[Message]| {
        let question = messages.last().unwrap().content.to_string();
        agent.initial_messages(&Task { question, messages: messages.to_vec(), ..Task::default() })
    };
    let shown = [Message::user("2 + 2?"), Message::assistant("4"), Message::user("1 + 1?")];
    let want = [Message::user("2 + 2?"), Message::assistant("4"), Message::user("Q: 1 + 1?")];
    assert_eq!(chat(&shown), [&[Message::system("Be brief.")], &want[..]].concat());
    let own = [&[Message::system("Think.")], &shown[..]].concat();
    assert_eq!(chat(&own), [&[Message::system("Think.")], &want[..]].concat());
    let called = [Message::user("1 + 1?"), Message::calls("", Vec::new()), Message::tool("2")];
    assert_eq!(chat(&called), [&[Message::system("Be brief.")], &called[..]].concat());
}

/// Few-shot rows, other spellings and near copies of a test file are next to a training file.
#[test]
fn variants_of_held_out_questions_are_not_trained() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    write_rows(&path("test.jsonl"), (0..10).map(|i| format!("What is {i}+1?")));
    let few = |shown: u32, questions: u32| {
        let turn =
            |role: &str, content: String| serde_json::json!({"role": role, "content": content});
        let turns = [
            turn("user", format!("What is {shown}+1?")),
            turn("assistant", (shown + 1).to_string()),
            turn("user", format!("What is {questions}+1?")),
        ];
        serde_json::json!({"question": turns, "answer": questions + 1}).to_string()
    };
    let rows: Vec<String> =
        (0..5).map(|i| few(900, i)).chain((5..10).map(|i| few(i, 700 + i))).collect();
    fs::write(path("few.jsonl"), rows.join("\n")).unwrap();
    let spelled =
        ["what is 3 + 1", "Question: What is ４+1?", "What is 30 + 1?"].map(str::to_owned);
    let copy = "Please tell me in one word: what is 6 + 1? Think first.".to_owned();
    write_rows(&path("spelled.jsonl"), spelled.into_iter().chain([copy]));
    let sources = "tasks = [{ kind = 'file', path = 'test.jsonl', held_out = 'all' }, \
                   { kind = 'file', path = 'few.jsonl' }, \
                   { kind = 'file', path = 'spelled.jsonl' }]";
    let tasks = load(&dir, sources, 1).unwrap();
    let kept: BTreeSet<String> =
        (0..tasks.train_len()).map(|i| tasks.train(i).unwrap().question).collect();
    assert_eq!(kept.len(), 2, "{kept:?}");
    let has = |parts: &[&str]| {
        let found = tasks.notes.iter().any(|note| parts.iter().all(|part| note.contains(part)));
        assert!(found, "no {parts:?} in {:?}", tasks.notes);
    };
    has(&["few.jsonl: 10 tasks are excluded from training, because they ask or \
         show a held-out question; one is few-1"]);
    has(&["spelled.jsonl: 2 tasks are excluded from training", "spelled-1 (\"what is 3 + 1\")"]);
    has(&[
        "spelled.jsonl: 1 training tasks are near copies",
        "spelled-4",
        "is close to \"What is 6+1?\"",
    ]);
}

/// Checks the tasks of a recipe with these keys after the sources. Its only task is for the agent
/// "writer" and has a prompt of about 20 tokens.
fn check(dir: &TempDir, keys: &str) -> Result<(), String> {
    let row =
        serde_json::json!({"question": "What is 1 + 1?", "answer": "2", "agent_name": "writer"});
    fs::write(dir.path().join("rows.jsonl"), format!("{row}\n")).unwrap();
    let recipe = format!(
        "run = {{ name = 'x' }}\nmodel = {{ source = './model' }}\neval = {{ tasks = 0 }}\n\
         tasks = [{{ kind = 'file', path = 'rows.jsonl' }}]\n{keys}"
    );
    let file = dir.path().join("recipe.toml");
    fs::write(&file, recipe).unwrap();
    let recipe = Recipe::load(&file, &[]).unwrap();
    let tasks = tasks_of(&recipe).unwrap();
    let chat = std::sync::Arc::new(levade_text::testing::tiny_chat().unwrap());
    let parts: Vec<AgentSpec> = ["default", "writer"]
        .map(|name| {
            let tools = levade_tools::ToolSet::new(Vec::new(), std::time::Duration::ZERO);
            AgentSpec::new(name, chat.clone(), tools.unwrap())
        })
        .into();
    let sampler: std::sync::Arc<dyn levade_policy::Sampler> =
        std::sync::Arc::new(levade_policy::Simulator::new(Default::default()));
    let agents = Agents::with_sampler(&recipe, &parts, &sampler, 2000).unwrap();
    let scorers = Scorers::new(&recipe.reward, Default::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime
        .block_on(check_tasks(&recipe, &scorers, &tasks, &agents))
        .map_err(|error| error.to_string())
}

#[test]
fn overlong_buffer_must_not_exceed_agent_limit() {
    let dir = tempfile::tempdir().unwrap();
    let check = |first: usize, writer: usize| {
        check(
            &dir,
            &format!(
                "[agent]\nmax_tokens = {first}\n[agent.writer]\nmax_tokens = {writer}\n[[phase]]\n\
                 kind = 'rl'\n\
                 steps = 1\ngroups = 1\ngroup_size = 2\nlearning_rate = 1e-5\n\
                 overlong = {{ kind = 'penalize', buffer = 128 }}\n"
            ),
        )
    };
    assert_eq!(check(16, 512), Ok(()));
    let error = check(512, 16).unwrap_err();
    let want = "`phase.0.overlong.buffer` is 128, but must be at most the max_tokens of the agent \
                writer, 16";
    assert!(
        error.starts_with(want) && error.ends_with("this agent performs the task rows-1"),
        "{error}"
    );
}

/// Returns the number of tokens that an error reports. The error must be about the prompt of the
/// first task and the limit `key` of 4.
#[track_caller]
fn tokens_over(error: &str, key: &str) -> usize {
    let start = "the prompt of task rows-1 has ";
    let end = format!(" tokens, more than `{key}` = 4");
    let found = error.strip_prefix(start).and_then(|rest| rest.split_once(&end));
    found.unwrap_or_else(|| panic!("{error}")).0.parse().unwrap()
}

#[test]
fn prompt_over_limit_fails_unless_truncated() {
    let dir = tempfile::tempdir().unwrap();
    let check = |max_len, more| {
        check(&dir, &format!("[agent.writer]\nmax_prompt_tokens = {max_len}\n{more}"))
    };
    let tokens = tokens_over(&check(4, "").unwrap_err(), "agent.max_prompt_tokens");
    assert!(tokens > 5, "{tokens}");
    assert_eq!(check(tokens, ""), Ok(()));
    check(tokens - 1, "").unwrap_err();
    assert_eq!(check(4, "truncation = 'left'"), Ok(()));
}

/// A program can write a shorter prompt, and other context policies shorten it.
#[test]
fn prompt_over_context_fails_unless_shortened() {
    let dir = tempfile::tempdir().unwrap();
    let check = |max_len, more| {
        check(&dir, &format!("[agent.writer]\nmax_context_tokens = {max_len}\n{more}"))
    };
    let tokens = tokens_over(&check(4, "").unwrap_err(), "agent.max_context_tokens");
    assert!(tokens > 5, "{tokens}");
    assert_eq!(check(tokens, ""), Ok(()));
    check(tokens - 1, "").unwrap_err();
    assert_eq!(check(4, "context = 'drop_oldest'"), Ok(()));
    assert_eq!(check(4, "kind = 'program'\ncommand = ['true']"), Ok(()));
    // The truncated prompt fits into the context.
    assert_eq!(check(4, "max_prompt_tokens = 4\ntruncation = 'left'"), Ok(()));
}

#[test]
fn sources_lists_each_source_once() {
    let dir = tempfile::tempdir().unwrap();
    write_rows(&dir.path().join("train.jsonl"), (0..9).map(|i| format!("{i}?")));
    write_rows(&dir.path().join("test.jsonl"), (10..12).map(|i| format!("{i}?")));
    let sources = "tasks = [{ kind = 'arithmetic', train = 5 }, \
                   { kind = 'file', path = 'train.jsonl', held_out = 1 }, \
                   { kind = 'file', path = 'test.jsonl', held_out = 'all' }]";
    assert_eq!(load(&dir, sources, 1).unwrap().sources(), ["arithmetic", "train", "test"]);
}

#[test]
fn repeated_rows_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    let notes = |count: u32| {
        write_rows(&dir.path().join("rows.jsonl"), (0..9).map(|i| format!("{}?", i % count)));
        load(&dir, "tasks = [{ kind = 'file', path = 'rows.jsonl', held_out = 1 }]", 1)
            .unwrap()
            .notes
    };
    let note = "rows.jsonl: 2 rows are left out, because they repeat an earlier row";
    assert!(notes(7).iter().any(|found| found.ends_with(note)), "{:?}", notes(7));
    assert_eq!(notes(9), Vec::<String>::new());
}

#[test]
fn evaluation_needs_held_out_tasks_unless_turned_off() {
    let dir = tempfile::tempdir().unwrap();
    write_rows(&dir.path().join("rows.jsonl"), (0..9).map(|i| format!("{i}?")));
    let load = |held_out: u32, change: &str| {
        let sources =
            format!("tasks = [{{ kind = 'file', path = 'rows.jsonl', held_out = {held_out} }}]");
        let tasks = tasks_of(&recipe(&dir, &sources, 1, &[change]))?;
        Ok::<Vec<usize>, TrainerError>(tasks.eval.iter().map(|slice| slice.tasks.len()).collect())
    };
    assert!(matches!(load(0, "eval.tasks=1"), Err(TrainerError::NoHeldOutTasks)));
    assert_eq!(load(0, "eval.tasks=0").unwrap(), Vec::<usize>::new());
    assert_eq!(load(3, "eval.tasks=0").unwrap(), Vec::<usize>::new());
    assert_eq!(load(3, "eval.tasks=1").unwrap(), [1]);
}
