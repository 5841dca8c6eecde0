//! Tests of games on a small model that has learned to make legal moves of Kuhn poker at random:
//! training of several policies, and exact expected values.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use levade_game::{GameTree, Kuhn};
use levade_model::ModelConfig;
use serde_json::{Value, json};

use crate::support::{Workspace, config, stderr, stdout, train_model};

/// Returns the user message of the game loop for the last decision on a path.
fn user_message(set: &levade_game::InformationSet) -> String {
    let choices: Vec<String> = set.choices.iter().map(Value::to_string).collect();
    let format = format!("Reply with one JSON object: {{\"move\": {}}}", choices.join(" | "));
    let lines =
        set.observed.iter().map(String::as_str).chain([set.request.prompt.as_str(), &format]);
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns one row for every legal move at every information set: the conversation before it, and
/// the completion that plays it.
fn demonstrations() -> String {
    let tree = GameTree::new(&Kuhn, &Value::Null, 100).unwrap();
    let mut rows = String::new();
    for index in 0..tree.information_sets().len() {
        let path = tree.path(index);
        let seat = &tree.seats()[path[0].0.seat];
        let mut messages = vec![json!({"role": "system", "content": seat.instructions})];
        for (set, choice) in &path {
            messages.push(json!({"role": "user", "content": user_message(set)}));
            if let Some(choice) = choice {
                let completion = format!("{{\"move\": {}}}", set.choices[*choice]);
                messages.push(json!({"role": "assistant", "content": completion}));
            }
        }
        for choice in &path[path.len() - 1].0.choices {
            let row = json!({
                "question": messages,
                "answer": "any",
                "demonstration": [format!("{{\"move\": {choice}}}")],
            });
            writeln!(rows, "{row}").unwrap();
        }
    }
    rows
}

/// Imitation of all legal moves, equally often.
const SCHOOL: &str = r#"
agent = { max_turns = 1, max_tokens = 40 }

[[tasks]]
kind = "file"
path = "rows.jsonl"
held_out = 0

[reward]
scorer = { kind = "answer", location = "text" }

[[phase]]
kind = "sft"
demonstrations = 24
source = { field = "demonstration", min_score = 0.0 }
epochs = 60
batch = 24
learning_rate = 1e-2
optimizer = { schedule = "cosine", min_lr_ratio = 0.1, warmup = 5 }
"#;

/// Returns the model after imitation, made once for all tests.
fn player() -> &'static Path {
    static MODEL: OnceLock<(Workspace, PathBuf)> = OnceLock::new();
    let config = ModelConfig { context: 1024, ..config() };
    &MODEL.get_or_init(|| train_model(&config, SCHOOL, &demonstrations())).1
}

/// A recipe in which two policies learn the two seats.
const TWO: &str = r#"
[run]
name = "kuhn"
folder = "run"
checkpoint_every = 1
keep = 20

[model]
source = "./model"
lora = { rank = 8 }

[policy.first]
kind = "trained"
[policy.second]
kind = "trained"

[engine]
micro_batch_tokens = 4096

[[tasks]]
kind = "seeds"
train = 100

[agent]
kind = "game"
policy = "first"
max_turns = 8
max_tokens = 400

[agent.second]
policy = "second"

[game]
name = "kuhn"
move_tokens = 40
reasoning = false
agents = { opener = "default", responder = "second" }

[reward]
scorer = "program"
of = "default"

[eval]
tasks = 0

[[phase]]
kind = "rl"
steps = 1
groups = 6
group_size = 8
group_by = "agent"
unit = "sample"
learning_rate = 1e-2
"#;

fn new_workspace() -> Workspace {
    let workspace = Workspace::with_model(player());
    workspace.write("recipe.toml", TWO);
    workspace
}

fn train(workspace: &Workspace, arguments: &[&str]) -> String {
    let output = workspace.train().args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

fn play(workspace: &Workspace, arguments: &[&str]) -> Value {
    let mut command = workspace.levade();
    let output = command.args(["play", "kuhn", "--json"]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

/// Returns the recorded sequences of a run's training.
fn sequences(workspace: &Workspace) -> Vec<Value> {
    let output = workspace.levade().args(["export", "run", "--tokens"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the first moments of the optimizer after one step, which are the gradient times 1 − β₁.
fn gradient(workspace: &Workspace, policy_dir: &str) -> Vec<f32> {
    let checkpoint = workspace.checkpoints("run").remove(0).join(policy_dir);
    let bytes = fs::read(checkpoint.join("optimiser.first.safetensors")).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let values = bytes[8 + header..].chunks_exact(4);
    values.map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

/// In a game with two trained policies, the gradient of each equals that of a run that trains only
/// this policy on the same recorded completions.
#[test]
fn gradients_of_two_policies_match_separate_training() {
    let both = new_workspace();
    let text = train(&both, &[]);
    assert_eq!(text.matches(" · mismatch 0 · ").count(), 1, "{text}");
    let recorded = |workspace: &Workspace| -> Vec<Value> {
        let rows = sequences(workspace).into_iter();
        rows.map(|row| json!([row["slot"], row["agent"], row["token_ids"], row["logprobs"]]))
            .collect()
    };
    // The first trained policy of a run is in the checkpoint itself.
    let cases = [("first", "second", ""), ("second", "first", "policies/second")];
    for (trained, frozen, dir) in cases {
        let single = new_workspace();
        let text = train(&single, &["--set", &format!("policy.{frozen}.kind=frozen")]);
        assert_eq!(text.matches(" · mismatch 0 · ").count(), 1, "{text}");
        assert_eq!(recorded(&single), recorded(&both), "the transitions are the same");
        let (found, want) = (gradient(&both, dir), gradient(&single, ""));
        assert_eq!(found.len(), want.len());
        let difference = norm(found.iter().zip(&want).map(|(a, b)| a - b));
        let size = norm(want.iter().copied());
        assert!(size > 1e-6, "{trained} has no gradient");
        assert!(difference <= 1e-5 * size, "{trained}: {difference} of {size}");
    }
    assert_ne!(gradient(&both, ""), gradient(&both, "policies/second"));
}

/// Returns the results of a run's evaluations, in order.
fn evals(workspace: &Workspace) -> Vec<Value> {
    let metrics = fs::read_to_string(workspace.path("run/metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str(line).unwrap());
    lines.filter(|line: &Value| line["eval"].is_string()).collect()
}

/// Evaluates and compares the result with that of an evaluation in training. Returns the notes.
fn assert_same_result(workspace: &Workspace, trained: &Value, arguments: &[&str]) -> String {
    let mut command = workspace.levade();
    let output = command.args(["eval", "--json"]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let result: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let overall = &result["overall"];
    let game = overall["game"].as_object().unwrap();
    assert!(game.len() > 4, "{overall}");
    for (name, value) in game {
        assert_eq!(value["estimate"], trained[format!("eval/game/{name}")], "{name}: {trained}");
    }
    assert_eq!(overall["sampled_tokens"], trained["eval/response_length/mean"], "{trained}");
    stderr(&output)
}

/// `eval` seats the policies that an evaluation of training seats, with their own prompts.
#[test]
fn eval_seats_policies_as_training_does() {
    let workspace = new_workspace();
    workspace.replace("recipe.toml", "tasks = 0", "tasks = 6");
    let frozen = ["--set", "policy.second.kind=frozen", "--set", "agent.second.train=false"];
    train(&workspace, &frozen);
    let results = evals(&workspace);
    let [before, after] = &results[..] else { panic!("{results:?}") };
    let notes = assert_same_result(&workspace, after, &["run"]);
    assert!(notes.contains("first: run/checkpoints/step-000001\n"), "{notes}");
    assert!(notes.contains("/model, frozen\n"), "{notes}");
    assert_same_result(&workspace, before, &[&["recipe.toml"][..], &frozen].concat());

    // A mixture whose second policy has prompts of its own.
    let workspace = new_workspace();
    workspace.replace("recipe.toml", "tasks = 0", "tasks = 6");
    let mixture = "agent.second.policy=[{ name = 'first', weight = 1.0 }, { name = 'second', \
                   weight = 1.0, system = 'Play. {instructions}', format = 'Now: {format}' }]";
    let set = [&frozen[..], &["--set", mixture]].concat();
    train(&workspace, &[&set[..], &["--set", "phase=[]"]].concat());
    let results = evals(&workspace);
    assert_same_result(&workspace, &results[0], &[&["recipe.toml"][..], &set].concat());

    // `check` finds that the prompt of one policy does not fit.
    let long = mixture.replace("Play.", &"Play to win. ".repeat(90));
    let mut command = workspace.levade();
    let output = command.args(["check", "recipe.toml"]).args(frozen).args(["--set", &long]);
    let output = output.output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
    let want = "the prompt of the policy second in the seat Player2 of the agent second has ";
    assert!(stdout(&output).contains(want), "{}", stdout(&output));
}

/// `eval` of a run loads the past versions that training meets. Only the run has them.
#[test]
fn eval_of_run_plays_against_past_versions() {
    for lora in ["lora = { rank = 8 }", ""] {
        let workspace = new_workspace();
        workspace.replace("recipe.toml", "tasks = 0", "tasks = 6");
        workspace.replace("recipe.toml", "lora = { rank = 8 }", lora);
        let past = "policy.second={ kind = 'past', of = 'first', every = 2, keep = 1 }";
        let set = ["--set", past, "--set", "agent.second.train=false"];
        train(&workspace, &set);
        let results = evals(&workspace);
        let notes = assert_same_result(&workspace, results.last().unwrap(), &["run"]);
        assert!(notes.contains("second: past versions of first\n"), "{notes}");
        let mut command = workspace.levade();
        let output = command.args(["eval", "recipe.toml", "--model", "model"]).args(set);
        let output = output.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let want = "meet the policy second, past versions of first, which only a run";
        assert!(stderr(&output).contains(want), "{}", stderr(&output));
    }
}

/// Compares the probabilities of first moves with those of the completions that the policies
/// sampled in training. Returns the report of `play --value`.
fn assert_probabilities_match_samples(workspace: &Workspace) -> Value {
    let report = play(workspace, &["--value", "run@0"]);
    assert_eq!(report["seats"], json!(["opener", "responder"]));
    let sets = report["information_sets"].as_array().unwrap();
    assert_eq!(sets.len(), 12);

    // Completions at the first move of a seat, as the policies sampled them.
    let mut compared = 0;
    for row in sequences(workspace) {
        let messages = row["messages"].as_array().unwrap();
        let text = |index: usize| messages[index]["content"].as_str().unwrap();
        let observed: Vec<&str> =
            text(1).lines().take_while(|line| !line.starts_with("Your turn")).collect();
        let set = sets.iter().find(|set| set["observed"] == json!(observed));
        let (Some(set), 3) = (set, messages.len()) else { continue };
        let choices = set["choices"].as_array().unwrap();
        let played = choices.iter().position(|c| format!("{{\"move\": {c}}}") == text(2));
        let Some(played) = played else { continue };
        let sampled: f64 =
            row["logprobs"].as_array().unwrap().iter().filter_map(Value::as_f64).sum();
        let scored =
            set["probabilities"][played].as_f64().unwrap() * set["legal"].as_f64().unwrap();
        assert!((sampled - scored.ln()).abs() < 1e-4, "{sampled} and {}: {row}", scored.ln());
        compared += 1;
    }
    assert!(compared >= 30, "{compared}");
    report
}

#[test]
fn exact_value_uses_prompts_of_single_policies() {
    let workspace = new_workspace();
    let policy = "policy = [{ name = \"first\", weight = 1.0, system = \"Bluff. {instructions}\", \
                  format = \"Now: {format}\" }]";
    workspace.replace("recipe.toml", "policy = \"first\"", policy);
    train(&workspace, &["--set", "run.seed=5"]);
    assert_probabilities_match_samples(&workspace);
}

/// The probabilities of moves are those with which the game loop samples them, and the values
/// follow from them by the payoff table.
#[test]
fn exact_value_matches_sampled_completions_and_payoff_table() {
    let workspace = new_workspace();
    train(&workspace, &["--set", "run.seed=5"]);
    let report = assert_probabilities_match_samples(&workspace);
    let sets = report["information_sets"].as_array().unwrap();

    // The opener's value against a random responder, by the payoff table.
    let bet = |seat: &str, card: &str, choice: &str, observations: usize| -> f64 {
        let is_set = |set: &&Value| {
            let observed = set["observed"].as_array().unwrap();
            set["seat"] == seat
                && observed[0].as_str().unwrap().contains(card)
                && observed.len() == observations
                && set["choices"][1] == choice
        };
        sets.iter().find(is_set).unwrap()["probabilities"][1].as_f64().unwrap()
    };
    let mut sum = 0.0;
    for (own, name) in ["is J", "is Q", "is K"].into_iter().enumerate() {
        for other in (0..3).filter(|other| *other != own) {
            let showdown = if own > other { 1.0 } else { -1.0 };
            let bets = bet("opener", name, "bet", 1);
            let calls = bet("opener", name, "call", 3);
            let checked_bet = calls * 2.0 * showdown - (1.0 - calls);
            sum += bets * (0.5 * 2.0 * showdown + 0.5);
            sum += (1.0 - bets) * (0.5 * showdown + 0.5 * checked_bet);
        }
    }
    let value = |opponent: &str, seat: usize| report["values"][opponent][seat].as_f64().unwrap();
    assert!(
        (value("random", 0) - sum / 6.0).abs() < 1e-9,
        "{} and {}",
        value("random", 0),
        sum / 6.0
    );
    // An opponent that knows the policy gains at least as much as the equilibrium.
    for seat in 0..2 {
        assert!(value("best_response", seat) <= value("equilibrium", seat) + 1e-12);
        assert!(value("equilibrium", seat) <= [-1.0, 1.0][seat] / 18.0 + 1e-12);
        assert!(report["legal"][seat].as_f64().unwrap() > 0.5, "{}", report["legal"]);
    }
    // A step changes both policies, and the table shows them beside the first version.
    let after = play(&workspace, &["--value", "run", "--against", "run@0"]);
    assert_ne!(after["information_sets"], report["information_sets"]);
    let before = play(&workspace, &["--value", "run@0", "--against", "run@0"]);
    let sum: f64 =
        [0, 1].iter().map(|seat| before["values"]["run@0"][seat].as_f64().unwrap()).sum();
    assert!(sum.abs() < 1e-12, "a zero-sum game between the same players: {before}");
}

/// Two policies that learn at once, half of the time against the first version, each gain against
/// it in every seed, by exact value. They also learn to reply legally.
#[test]
fn two_policies_gain_exact_value_against_first_version() {
    for seed in 1..=3 {
        let workspace = new_workspace();
        let policy = |name: &str| {
            format!(
                "policy = [{{ name = \"{name}\", weight = 1.0 }}, {{ name = \"untrained\", weight \
                 = 1.0 }}]"
            )
        };
        for name in ["first", "second"] {
            workspace.replace("recipe.toml", &format!("policy = \"{name}\""), &policy(name));
        }
        let seed = format!("run.seed={seed}");
        let settings = [
            "policy.untrained={kind='frozen'}",
            "game.illegal=-0.1",
            "phase.0.steps=8",
            "phase.0.groups=12",
            "phase.0.group_size=16",
            "phase.0.learning_rate=3e-3",
            &seed,
        ];
        train(&workspace, &settings.map(|setting| ["--set", setting]).concat());
        let value = |source: &str| play(&workspace, &["--value", source, "--against", "run@0"]);
        let (before, after) = (value("run@0"), value("run"));
        for (seat, gain) in [(0, 0.3), (1, 0.2)] {
            let number = |report: &Value| report["values"]["run@0"][seat].as_f64().unwrap();
            assert!(number(&after) >= number(&before) + gain, "{before} and {after}");
            let legal = |report: &Value| report["legal"][seat].as_f64().unwrap();
            assert!(legal(&after) > legal(&before), "{before} and {after}");
        }
    }
}

/// Two versions play each other with both sides, and the same matches give the same ratings.
#[test]
fn elo_rates_checkpoints_reproducibly() {
    let workspace = new_workspace();
    train(&workspace, &[]);
    let rate = || play(&workspace, &["--elo", "run", "--games", "5", "--seed", "3"]);
    let report = rate();
    assert_eq!(report["matches"], 10);
    let ratings = report["ratings"].as_array().unwrap();
    let steps: Vec<&Value> = ratings.iter().map(|rating| &rating["step"]).collect();
    assert_eq!(steps, [0, 1]);
    assert_eq!((&ratings[0]["elo"], &ratings[0]["high"]), (&json!(0.0), &json!(0.0)));
    let number = |name: &str| ratings[1][name].as_f64().unwrap();
    assert!(number("low") < number("high") && number("elo").abs() < 800.0, "{report}");
    assert_eq!(rate(), report);
    let error = |arguments: &[&str]| {
        let output = workspace.levade().args(["play", "kuhn"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        stderr(&output)
    };
    assert!(error(&["--elo", "run", "--step", "1"]).contains("at least two checkpoints"));
    let missing = error(&["--elo", "run", "--step", "1", "--step", "7"]);
    assert!(missing.contains("no checkpoint of step 7; it has those of the steps 0, 1"));
    assert!(error(&["--elo", "model"]).contains("no run"));
}

#[test]
fn value_rejects_unusable_arguments() {
    let workspace = Workspace::new();
    workspace.write("kuhn.toml", TWO);
    for (arguments, part) in [
        (&["--value", "model"][..], "--recipe"),
        (&["--value", "model", "--recipe", "recipe.toml"], "plays no game"),
        (&["--value", "model", "--recipe", "kuhn.toml", "--max-sets", "5"], "more than 5"),
        (
            &["--value", "model", "--recipe", "kuhn.toml", "--temperature", "0"],
            "--temperature is 0",
        ),
        (&["--value", "runs/none@3"], "does not exist"),
        (&["--value", "model", "--seat", "1"], "cannot be used with"),
        (&["--seat", "1", "--options", "[]"], "--options is [], but must be an object"),
        (&[], "--seat"),
    ] {
        let output = workspace.levade().args(["play", "kuhn"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(part), "{arguments:?}: {}", stderr(&output));
    }
}
