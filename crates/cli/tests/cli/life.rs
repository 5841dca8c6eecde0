//! Tests of the life cycle of a run: train, stop, resume, evaluate, chat and inspect.

use std::fs;

use serde_json::Value;

use crate::support::{Workspace, copy_dir, stderr, stdout};

#[test]
fn run_can_be_trained_evaluated_chatted_and_inspected() {
    let workspace = Workspace::with_trained_model();
    let output = workspace.train().output().unwrap();
    let text = stdout(&output);
    let notes = stderr(&output);
    assert!(output.status.success(), "{notes}");
    for part in [
        "phase 0: sft, 1 step\n",
        "\nsft 1/1 · loss",
        "phase 1: grpo, 3 steps\n",
        "\ngrpo 3/3 · reward",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    // In every step, training recomputes the recorded log-probabilities to the bit.
    assert_eq!(text.matches(" · mismatch 0 · ").count(), 3, "{text}");
    for row in ["before training  ", "after sft  ", "after grpo  "] {
        assert_eq!(
            text.lines().filter(|line| line.starts_with(row)).count(),
            2,
            "{row:?} in\n{text}"
        );
    }
    for part in [
        "held-out tasks ",
        "\narithmetic-unseen-wordings (separate",
        "\nrun    run\n",
        " chat run\n",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert!(notes.contains("memory ") && notes.contains("49.5 k parameters"), "{notes}");
    assert!(!text.contains('\x1b') && !notes.contains('\x1b'), "colors in redirected output");
    for file in ["recipe.toml", "run.db", "metrics.jsonl", "engine.json"] {
        assert!(workspace.path("run").join(file).is_file(), "{file}");
    }
    assert_eq!(workspace.checkpoints("run").len(), 4);

    second_run_is_rejected(&workspace);
    eval_matches_training(&workspace);
    chat_answers(&workspace);
    inspect_shows_attempts(&workspace);
}

fn second_run_is_rejected(workspace: &Workspace) {
    let weights = workspace.weights("run");
    let output = workspace.train().output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = stderr(&output);
    assert!(message.contains("already holds a run") && message.contains("--resume"), "{message}");
    assert!(message.contains("--run"), "{message}");
    // The run directory contains the recipe of the run.
    let output = workspace.levade().args(["train", "run", "--resume"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("after grpo "), "{}", stdout(&output));
    assert_eq!(workspace.weights("run"), weights);
}

/// Returns the report of an evaluation.
fn eval(workspace: &Workspace, recipe: &str, arguments: &[&str]) -> Value {
    let output =
        workspace.levade().args(["eval", recipe, "--json"]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

/// Asserts that `eval` reproduces the results of the evaluations in training.
fn eval_matches_training(workspace: &Workspace) {
    let metrics = fs::read_to_string(workspace.path("run/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    assert_eq!(last["eval"], "after grpo");
    let result = eval(workspace, "recipe.toml", &["--model", "run"]);
    assert_eq!(eval(workspace, "run", &[])["slices"], result["slices"]);
    assert_eq!(result["overall"]["success"]["estimate"], last["eval/success"]);
    assert_eq!(result["overall"]["sampled_tokens"], last["eval/response_length/mean"]);
    assert_eq!(result["slices"][1]["answered"], last["eval/arithmetic-unseen-wordings/answered"]);
    assert_eq!(result["slices"][1]["tasks"], 3);
    // With top_k = 1, sampling is greedy. `eval.max_tokens` limits attempts of evaluations only.
    let warm = ["--model", "run", "--set", "eval.temperature=1", "--set"];
    for (key, is_greedy) in [("eval.top_k=1", true), ("eval.top_p=1", false)] {
        let found = eval(workspace, "recipe.toml", &[&warm[..], &[key]].concat());
        assert_eq!(found["slices"] == result["slices"], is_greedy, "{key}: {found}");
    }
    let limited = ["--model", "run", "--set", "eval.max_tokens=3"];
    let found = eval(workspace, "recipe.toml", &limited);
    assert_eq!(found["overall"]["sampled_tokens"], 3.0);
    // Without --model, the model of the recipe is measured. --tasks reduces the number of tasks.
    assert_eq!(eval(workspace, "recipe.toml", &["--tasks", "2"])["overall"]["tasks"], 2);
    let output = workspace
        .levade()
        .args(["eval", "recipe.toml", "--model", "run/checkpoints/step-000001"])
        .output()
        .unwrap();
    assert!(
        stdout(&output).contains("held-out tasks") && stdout(&output).contains("/4 "),
        "{}",
        stdout(&output)
    );
}

/// Returns the output and the notes of a chat.
fn chat(workspace: &Workspace, arguments: &[&str], input: &str) -> (String, String) {
    let output =
        workspace.levade().arg("chat").args(arguments).write_stdin(input).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    (stdout(&output), stderr(&output))
}

/// Returns what `inspect` prints about the run.
fn inspect(workspace: &Workspace, arguments: &[&str]) -> String {
    let output = workspace.levade().args(["inspect", "run"]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

fn chat_answers(workspace: &Workspace) {
    // A question that is similar to the model's training tasks, so that the model calls the tool.
    let input = "Work out 12 + 7.\n\n/reset\nWork out 12 + 7.\n/quit\nnever read\n";
    let (text, notes) = chat(workspace, &["run"], input);
    assert!(text.contains("<tool_call>\n{\"name\": \"calculator\""), "{text}");
    assert!(text.contains("\n→ "), "{text}");
    // At temperature 0, a new conversation with the same question repeats the first one.
    let (first, second) = text.split_at(text.len() / 2);
    assert_eq!(first, second);
    assert!(notes.contains("step-000004"), "{notes}");
    // Without a recipe, there are no tools and no system prompt.
    let sampling = ["model", "--max-tokens", "3", "--temperature", "1", "--top-k", "5"];
    let (text, notes) = chat(workspace, &sampling, "Hello\nAgain\n");
    assert!(!text.contains('→') && text.chars().count() <= 8, "{text:?}");
    assert_eq!(
        notes.matches("[truncated at --max-tokens]").count() + notes.matches("stopped").count(),
        2,
        "{notes}"
    );
}

fn inspect_shows_attempts(workspace: &Workspace) {
    let inspect = |arguments: &[&str]| inspect(workspace, arguments);
    let steps = inspect(&[]);
    assert_eq!(steps.lines().count(), 3, "{steps}");
    assert!(steps.starts_with("train phase 1 step    0:    6 attempts · score "), "{steps}");
    let attempts = inspect(&["--step", "1"]);
    assert_eq!(attempts.lines().count(), 6);
    let name = attempts.lines().nth(4).unwrap().split_whitespace().next().unwrap();
    assert_eq!(name, "train/1/1/1/1");
    let text = inspect(&["--attempt", name, "--logprobs"]);
    for part in [
        "\nreward     ",
        "\nadvantage  ",
        "\ntask       id: \"arithmetic-train-1-",
        "── context, turn 0, ",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert!(
        text.contains("── sampled, turn 0, ") && text.contains("temperature 1, weights 2, log p -"),
        "{text}"
    );
    assert!(text.contains("\n[<][t][o][o][l]") && text.contains("  \"<\"\n"), "{text}");
    assert_eq!(inspect(&["--eval", "--phase", "0", "--step", "0"]).lines().count(), 7);
    assert!(inspect(&["--demonstrations"]).contains("phase 0 step    0:    4 attempts"));
    let [best, worst] = ["--best", "--worst"].map(|which| {
        let text = inspect(&[which]);
        let line = text.lines().find_map(|line| line.strip_prefix("reward ")).unwrap();
        // A comma is followed by the parts of the reward that steps of the attempt earned.
        line.split(',').next().unwrap().trim().parse::<f64>().unwrap()
    });
    assert!(best >= worst, "{best} {worst}");
    let (terms, lines) = (
        inspect(&["--attempt", name, "--terms"]),
        inspect(&["--attempt", name, "--terms", "--json"]),
    );
    terms_of_a_step_add_up_to_its_recorded_loss(workspace, &terms, &lines);
}

/// Asserts that the terms of a step sum to its recorded loss. `terms` and `lines` are the text and
/// JSON output for one attempt of the second step of its phase; the remaining terms are those of
/// other attempts.
fn terms_of_a_step_add_up_to_its_recorded_loss(workspace: &Workspace, terms: &str, lines: &str) {
    let sum = terms
        .lines()
        .find_map(|line| line.strip_prefix("all terms of the step add up to its loss, "));
    let sum: f64 = sum.expect(terms).strip_suffix(", bit for bit").expect(terms).parse().unwrap();
    let metrics = fs::read_to_string(workspace.path("run/metrics.jsonl")).unwrap();
    let losses = metrics.lines().filter_map(|line| {
        let line: Value = serde_json::from_str(line).unwrap();
        ["actor/pg_loss", "actor/loss"].iter().find_map(|name| line[name].as_f64())
    });
    assert_eq!(losses.collect::<Vec<f64>>()[1].to_bits(), sum.to_bits(), "{metrics}");

    let tokens: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!tokens.is_empty() && terms.matches("weight · (").count() == tokens.len());
    for token in &tokens {
        let [ratio, logp, behavior, age, loss, advantage, part, weight] =
            ["ratio", "logp", "behavior", "age", "loss", "advantage", "part", "weight"]
                .map(|name| number(token, name));
        // The tokens were sampled by the weights that were trained: the ratio is 1, and no token is
        // clipped.
        assert_eq!((ratio, token["clipped"].as_bool()), (1.0, Some(false)), "{token}");
        assert_eq!((logp, age), (behavior, 0.0));
        assert!((loss + advantage).abs() < 1e-12, "−A ρ at ρ = 1: {token}");
        assert_eq!(part, weight * loss);
    }
}

/// Adds up the terms of all attempts row by row, as the learner does: with an entropy bonus in
/// several updates, and for demonstrations in the second step that trains on them.
#[test]
fn terms_of_several_updates_add_up_in_the_learners_order() {
    let workspace = Workspace::with_trained_model();
    let keys = [
        "eval.tasks=0",
        "phase.0.epochs=2",
        "phase.1.steps=1",
        "phase.1.mini_batches=2",
        "phase.1.entropy=0.01",
    ];
    let output =
        workspace.train().args(keys.iter().flat_map(|key| ["--set", *key])).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let terms = terms_of(&workspace, &["--phase", "1", "--step", "0"], "0");
    assert!(
        terms.iter().any(|term| term["update"] == 1)
            && terms.iter().all(|term| term["bonus"].as_f64() > Some(0.0))
    );
    let recorded = recorded_values(&workspace, "actor/loss");
    assert_eq!((sum(&terms) / 2.0).to_bits(), recorded[0].to_bits());
    let text = inspect(&workspace, &["--attempt", "train/1/0/0/0", "--terms"]);
    assert!(
        text.contains(", bit for bit; divided by its 2 updates: its loss, ")
            && text.contains(" − 0.01 · H) = "),
        "{text}"
    );

    let terms = terms_of(&workspace, &["--demonstrations", "--phase", "0", "--step", "0"], "1");
    assert_eq!(sum(&terms).to_bits(), recorded_values(&workspace, "train/loss")[1].to_bits());
    let output = workspace
        .levade()
        .args(["inspect", "run", "--attempt", "train/1/0/0/0", "--step", "0"])
        .output()
        .unwrap();
    assert!(
        !output.status.success()
            && stderr(&output).contains("--attempt with --step requires --terms")
    );
}

/// Returns the terms, in a step, of the attempts that `inspect` lists with these arguments.
fn terms_of(workspace: &Workspace, listed: &[&str], step: &str) -> Vec<Value> {
    let mut terms = Vec::new();
    for line in inspect(workspace, listed).lines() {
        let name = line.split_whitespace().next().unwrap();
        let arguments = ["--attempt", name, "--step", step, "--terms", "--json"];
        let text = inspect(workspace, &arguments);
        terms.extend(text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()));
    }
    terms
}

/// Returns the values of a metric in the order of the steps that have it.
fn recorded_values(workspace: &Workspace, metric: &str) -> Vec<f64> {
    let metrics = fs::read_to_string(workspace.path("run/metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line[metric].as_f64()).collect()
}

/// Adds up terms in the order that `docs/commands.md` specifies: rows, units, micro-batches.
fn sum(terms: &[Value]) -> f64 {
    let mut terms: Vec<&Value> = terms.iter().collect();
    terms.sort_by_key(|term| {
        ["micro_batch", "unit", "row", "term"].map(|name| term[name].as_u64().unwrap())
    });
    let mut sum = 0.0;
    for batch in terms.chunk_by(|a, b| a["micro_batch"] == b["micro_batch"]) {
        let mut of_batch = 0.0;
        for unit in batch.chunk_by(|a, b| a["unit"] == b["unit"]) {
            let mut of_unit = 0.0;
            for row in unit.chunk_by(|a, b| a["row"] == b["row"]) {
                let products = row.iter().map(|term| number(term, "weight") * number(term, "loss"));
                of_unit +=
                    products.fold(0.0, |sum, product| sum + product) - number(row[0], "row_bonus");
            }
            of_batch += of_unit;
        }
        sum += of_batch;
    }
    sum
}

fn number(term: &Value, name: &str) -> f64 {
    term[name].as_f64().unwrap()
}

/// A copied run is independent of the original, and a moved run continues at its new location.
#[test]
fn copied_or_moved_run_resumes_at_new_location() {
    let workspace = Workspace::new();
    let first = workspace.train().args(["--set", "eval.tasks=0"]).output().unwrap();
    assert!(first.status.success(), "{}", stderr(&first));
    copy_dir(&workspace.path("run"), &workspace.path("copy"));
    let run_state =
        || (fs::read(workspace.path("run/metrics.jsonl")).unwrap(), workspace.weights("run"));
    let before = run_state();
    let train =
        |arguments: &[&str]| workspace.levade().arg("train").args(arguments).output().unwrap();
    let output = train(&["copy"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("/copy already holds a run"), "{}", stderr(&output));
    let output = train(&["copy", "--resume", "--set", "phase.1.steps=4"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        stdout(&output).contains("resuming from copy/checkpoints/step-000004"),
        "{}",
        stdout(&output)
    );
    assert!(run_state() == before && workspace.weights("copy") != before.1);

    fs::rename(workspace.path("run"), workspace.path("moved")).unwrap();
    let output = train(&["moved/recipe.toml", "--resume"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!workspace.path("run").exists());
    for run in ["copy", "moved"] {
        let recipe = fs::read_to_string(workspace.path(run).join("recipe.toml")).unwrap();
        assert!(recipe.contains(&format!("/{run}\"")), "{recipe}");
    }
}

/// Replaying a run succeeds only if there are checkpoints to compare with.
#[test]
fn replay_reproduces_checkpoints_and_fails_without_any() {
    let workspace = Workspace::with_trained_model();
    assert!(workspace.train().args(["--set", "eval.tasks=0"]).output().unwrap().status.success());
    let replay = || workspace.levade().args(["replay", "run"]).output().unwrap();
    let output = replay();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("the same, bit for bit"), "{}", stdout(&output));

    std::fs::remove_dir_all(workspace.path("run/checkpoints")).unwrap();
    std::fs::create_dir(workspace.path("run/checkpoints")).unwrap();
    let output = replay();
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stderr(&output).contains("nothing was compared"), "{}", stderr(&output));
}

/// Ctrl-C and the signals of schedulers and closed terminals stop the run at the next safe point.
/// The resumed run ends with the weights of an uninterrupted run.
#[test]
#[cfg(unix)]
fn interrupted_run_resumes_with_equal_weights() {
    let workspace = Workspace::with_trained_model();
    let steps = ["--set", "phase.1.steps=12", "--set", "run.checkpoint_every=0"];
    let output = workspace.train().args(steps).args(["--run", "whole"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));

    // If the tests run under `nohup`, the run ignores SIGHUP as well.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    for signal in ["-INT", "-TERM", "-USR1", "-HUP"] {
        if signal == "-HUP" && ignored & 1 == 1 {
            continue;
        }
        let run = format!("run{signal}");
        let output = workspace
            .train_until_signal(signal, &["--set", "run.checkpoint_every=0", "--run", &run]);
        let notes = stderr(&output);
        assert_eq!(output.status.code(), Some(130), "{notes}");
        let hint = format!(
            "train recipe.toml --set phase.1.steps=12 --set run.checkpoint_every=0 --run {run} \
             --resume\n"
        );
        assert!(notes.contains("stopped after step ") && notes.ends_with(&hint), "{notes}");

        let output =
            workspace.train().args(steps).args(["--run", &run, "--resume"]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(
            stdout(&output).contains(&format!("resuming from {run}/checkpoints/step-0000")),
            "{}",
            stdout(&output)
        );
        assert_eq!(workspace.weights(&run), workspace.weights("whole"));
    }
}

/// A KL penalty is computed against a frozen copy of the model, in a second engine.
#[test]
fn kl_penalty_is_measured_against_frozen_copy() {
    let workspace = Workspace::with_trained_model();
    let penalty =
        ["--set", "phase.1.kl={estimator = 'k3', coefficient = 0.1}", "--set", "eval.tasks=0"];
    let output = workspace.train().args(penalty).output().unwrap();
    let text = stdout(&output);
    let notes = stderr(&output);
    assert!(output.status.success(), "{notes}");
    assert!(notes.contains(" for the frozen copy"), "{notes}");
    // At the start of the phase, the weights equal those of the copy.
    let divergence = |step: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(step)).unwrap();
        line.split_once("KL ").unwrap().1.split(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(divergence("grpo 1/3"), 0.0, "{text}");
    assert!(divergence("grpo 3/3") > 0.0, "{text}");
}

#[test]
fn pull_prints_path_and_description() {
    let workspace = Workspace::new();
    let output = workspace.levade().args(["pull", "model"]).output().unwrap();
    assert!(output.status.success());
    assert_eq!(stdout(&output), "model\n");
    assert!(
        stderr(&output)
            .contains("llama, 49.5 k parameters, 2 layers of 48, 259 tokens, context 640")
    );
    assert!(stderr(&output).contains("with its tokenizer, with a chat template"));
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    let workspace = Workspace::new();
    let help = stdout(&workspace.levade().arg("--help").output().unwrap());
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty()).filter(|line| line.starts_with("  "));
    let commands: Vec<&str> = listed.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"train") && commands.contains(&"man"), "{commands:?}");
    for (shell, option) in [("bash", "--resume"), ("zsh", "--resume"), ("fish", "-l resume")] {
        let script = stdout(&workspace.levade().args(["completions", shell]).output().unwrap());
        for part in commands.iter().chain([&option]) {
            assert!(script.contains(part), "{shell}: {part}");
        }
    }
    let output = workspace.levade().args(["man", "pages"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let pages = commands.iter().filter(|command| **command != "help");
    let pages = pages.map(|command| format!("levade-{command}.1"));
    for page in pages.chain(["levade.1".into(), "levade-sandbox-serve.1".into()]) {
        let text = fs::read_to_string(workspace.path("pages").join(&page)).unwrap();
        assert!(text.contains(".TH"), "{page}: {text}");
    }
    fs::write(workspace.path("file"), "").unwrap();
    let output = workspace.levade().args(["man", "file"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("cannot write manual pages to file"), "{}", stderr(&output));
}

#[test]
fn help_and_version_show_commands_and_release() {
    let workspace = Workspace::new();
    let help = stdout(&workspace.levade().arg("--help").output().unwrap());
    for part in ["train", "eval", "chat", "inspect", "pull", "Examples:", "Exit codes:"] {
        assert!(help.contains(part), "no {part:?} in\n{help}");
    }
    let version = stdout(&workspace.levade().arg("--version").output().unwrap());
    let release = concat!("levade ", env!("CARGO_PKG_VERSION"));
    assert!(
        version.starts_with(&format!("{release} (")) && version.contains("commit"),
        "{version}"
    );
    assert_eq!(stdout(&workspace.levade().arg("-V").output().unwrap()), format!("{release}\n"));
    assert_eq!(workspace.levade().output().unwrap().status.code(), Some(2));
}
