//! Tests of invalid input: each is rejected with exit code 2 and an error of at most one screen
//! that names the input and a remedy. No partial files are left.

use std::fs;
use std::process::Output;

use levade_engine::testing::{Compute, random_weights};
use levade_model::ModelConfig;

use crate::support::{Workspace, config, stderr, stdout, write_model};

/// Returns the error message of a command that rejected its input. Asserts the exit code, the
/// length of the message and the absence of internal details.
fn error(output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let error =
        text.split_once("error: ").unwrap_or_else(|| panic!("no error in\n{text}")).1.to_owned();
    assert!(error.lines().count() <= 12 && error.len() < 1500, "more than a screen:\n{error}");
    for inside in ["panicked", "RUST_BACKTRACE", "Error {", "Some(", "Os {"] {
        assert!(!text.contains(inside), "the inside shows:\n{text}");
    }
    error
}

fn assert_contains(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "no {part:?} in\n{error}");
    }
}

/// Asserts that training is rejected before it starts, with a message that contains `parts`, and
/// writes nothing.
fn assert_train_rejects(workspace: &Workspace, args: &[&str], parts: &[&str]) {
    let output = workspace.train().args(args).output().unwrap();
    assert_contains(&error(&output), parts);
    assert_eq!(stdout(&output), "");
    assert!(!workspace.path("run").exists(), "a run folder was made");
}

#[test]
fn closed_stderr_does_not_change_exit_code() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_levade"));
    let status =
        command.args(["train", "/nowhere", "--log", "trace"]).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(2));
}

#[test]
fn invalid_recipe_is_rejected_with_key() {
    let workspace = Workspace::new();
    assert_train_rejects(
        &workspace,
        &["--set", "run.sede=2"],
        &["recipe.toml", "unknown key `run.sede`", "did you mean `seed`?"],
    );
    assert_train_rejects(
        &workspace,
        &["--set", "run.seed=two"],
        &["`run.seed` is the string \"two\"", "must be a whole number"],
    );
    assert_train_rejects(
        &workspace,
        &["--set", "phase.1.group_size=1"],
        &["`phase.1.group_size` is 1", "at least 2"],
    );
    assert_train_rejects(
        &workspace,
        &["--set", "phase.7.steps=1"],
        &["--set phase.7.steps", "`phase` is a list; name one of its items (2)"],
    );
    assert_train_rejects(&workspace, &["--set", "seed"], &["--set seed", "key=value"]);
    assert_train_rejects(
        &workspace,
        &["--set", "agent.tools=['abacus']"],
        &["\"abacus\"", "the tools are calculator"],
    );
    workspace.replace("recipe.toml", "learning_rate = 1e-3", "lerning_rate = 1e-3");
    assert_train_rejects(
        &workspace,
        &[],
        &["unknown key `phase.1.lerning_rate`", "did you mean `learning_rate`?"],
    );
    workspace.write("recipe.toml", "[run\nname = 'x'");
    assert_train_rejects(&workspace, &[], &["recipe.toml is not valid TOML", "line 1"]);
    for (name, part) in [
        ("nowhere.toml", "nowhere.toml does not exist"),
        ("model", "model contains no recipe.toml"),
    ] {
        let output = workspace.levade().args(["train", name]).output().unwrap();
        assert_contains(&error(&output), &[part, "TOML file"]);
    }
}

#[test]
fn missing_model_files_are_rejected() {
    let workspace = Workspace::new();
    assert_train_rejects(
        &workspace,
        &["--set", "model.source=./nowhere"],
        &["nowhere\" does not exist", "a .gguf file"],
    );
    assert_train_rejects(
        &workspace,
        &["--set", "model.source=no such model"],
        &["no such model", "owner/name"],
    );
    fs::remove_file(workspace.path("model/model.safetensors")).unwrap();
    assert_train_rejects(&workspace, &[], &["model", "safetensors"]);
    fs::remove_file(workspace.path("model/config.json")).unwrap();
    assert_train_rejects(
        &workspace,
        &[],
        &["has no config.json", "give the directory of a Hugging Face model"],
    );
}

#[test]
fn damaged_weight_files_are_rejected() {
    let workspace = Workspace::new();
    let weights = fs::read(workspace.path("model/model.safetensors")).unwrap();
    let damaged = |bytes: &[u8], parts: &[&str]| {
        workspace.write("model/model.safetensors", bytes);
        assert_train_rejects(
            &workspace,
            &[],
            &[&["model.safetensors is damaged, truncated", "fetch or convert it again"], parts]
                .concat(),
        );
    };
    damaged(&weights[..weights.len() - 100], &["tensor"]);
    damaged(&weights[..5], &["5 bytes"]);
    damaged(&[], &["the file is empty"]);
    let mut garbled = weights;
    garbled[8..40].fill(b'x');
    damaged(&garbled, &["the header is not a JSON object"]);

    // Truncated GGUF files, and a file in another format.
    let header =
        [&b"GGUF"[..], &3u32.to_le_bytes(), &2u64.to_le_bytes(), &5u64.to_le_bytes()].concat();
    for bytes in [&header[..], b"GGUF", b"PK\x03\x04, as a wheel begins"] {
        workspace.write("model.gguf", bytes);
        let parts = ["model.gguf is damaged, truncated", "fetch or convert it again"];
        assert_train_rejects(&workspace, &["--set", "model.source=./model.gguf"], &parts);
    }
}

/// Replaces the weights of the model with those of another configuration.
fn write_weights_of(workspace: &Workspace, other: &ModelConfig) {
    let weights = random_weights(&Compute::new(1), other, 1);
    weights
        .layout
        .tensors
        .write(&workspace.path("model/model.safetensors"), &weights.master)
        .unwrap();
}

#[test]
fn config_that_contradicts_weights_is_rejected() {
    let workspace = Workspace::new();
    write_weights_of(&workspace, &ModelConfig { intermediate: 64, ..config() });
    assert_train_rejects(
        &workspace,
        &[],
        &["mlp.", "has shape [64, 48]", "requires [80, 48]", "fetch both again"],
    );
    write_weights_of(&workspace, &ModelConfig { layers: 3, ..config() });
    assert_train_rejects(
        &workspace,
        &[],
        &["a tensor model.layers.2.", "which the configuration does not describe"],
    );
    write_weights_of(&workspace, &ModelConfig { layers: 1, ..config() });
    assert_train_rejects(&workspace, &[], &["has no tensor model.layers.1.", "fetch both again"]);
    let contradiction = ModelConfig { kv_heads: 3, ..config() };
    workspace.write("model/config.json", contradiction.to_hf_json().to_string());
    assert_train_rejects(
        &workspace,
        &[],
        &["config.json", "attention heads, 4, is not a multiple"],
    );
}

#[test]
fn model_without_chat_template_or_tokenizer_is_rejected() {
    let workspace = Workspace::new();
    workspace.replace("model/tokenizer_config.json", "\"chat_template\"", "\"no_template\"");
    let parts = ["model", "has no chat template", "chat_template.jinja"];
    assert_train_rejects(&workspace, &[], &parts);
    let chat = workspace.levade().args(["chat", "model"]).write_stdin("Hi\n").output().unwrap();
    assert_contains(&error(&chat), &parts);
    workspace
        .write("model/chat_template.jinja", "{% for message in messages %}{{ message.content }}");
    assert_train_rejects(&workspace, &[], &["model", "chat template: "]);
    fs::remove_file(workspace.path("model/tokenizer.json")).unwrap();
    assert_train_rejects(&workspace, &[], &["has no tokenizer.json"]);
}

/// Creates a directory with a recipe whose tasks are these rows of a JSONL file.
fn with_rows(rows: &str) -> Workspace {
    let workspace = Workspace::new();
    let text = fs::read_to_string(workspace.path("recipe.toml")).unwrap();
    let (head, rest) = text.split_once("[[tasks]]").unwrap();
    let (_, rest) = rest.split_once("[agent]").unwrap();
    let tasks = "[[tasks]]\nkind = \"jsonl\"\npath = \"rows.jsonl\"\nheld_out = 1\n[agent]";
    workspace.write("recipe.toml", format!("{head}{tasks}{rest}"));
    workspace.write("rows.jsonl", rows);
    workspace
}

#[test]
fn invalid_task_rows_are_rejected_with_line() {
    let good =
        "{\"question\": \"1 + 1?\", \"answer\": 2}\n{\"question\": \"1 + 2?\", \"answer\": 3}\n";
    let workspace = with_rows(&format!("{good}{{\"question\": \"1 + 3?\", \"anwser\": 4}}\n"));
    assert_train_rejects(
        &workspace,
        &[],
        &["rows.jsonl, line 3", "no field \"answer\"", "it has question, anwser"],
    );
    let workspace = with_rows(&format!("{good}\n{{\"question\": \n"));
    assert_train_rejects(&workspace, &[], &["rows.jsonl, line 4", "not valid JSON"]);
    let workspace =
        with_rows(&format!("{good}{{\"question\": \"1 + 3?\", \"answer\": \"four\"}}\n"));
    assert_train_rejects(&workspace, &["--set", "phase=[]"], &["task ", "four"]);
    let workspace = with_rows(&good.repeat(2));
    let output = workspace.train().args(["--set", "phase=[]"]).output().unwrap();
    let notes = stdout(&output);
    assert!(
        output.status.success() && notes.contains("rows.jsonl: 2 rows are left out"),
        "{notes}"
    );
    let workspace = with_rows(good);
    assert_train_rejects(
        &workspace,
        &[],
        &["`phase.0.demonstrations` is 4", "have only 0 demonstrations"],
    );
    fs::remove_file(workspace.path("rows.jsonl")).unwrap();
    assert_train_rejects(&workspace, &[], &["cannot read the tasks of", "rows.jsonl"]);
}

#[test]
fn prompt_longer_than_context_is_rejected() {
    let workspace = Workspace::new();
    let parts = [
        "the prompt of task arithmetic-",
        "tokens, but the context holds 200",
        "raise `model.context`",
    ];
    assert_train_rejects(&workspace, &["--set", "model.context=200"], &parts);
    assert_train_rejects(
        &workspace,
        &["--set", "model.context=4096"],
        &["4096", "the model was trained for 640"],
    );
}

/// Returns the value that an error proposes for a key, as in `` `KEY = VALUE` ``.
fn proposed_value<'e>(error: &'e str, key: &str) -> &'e str {
    let after =
        error.split_once(&format!("`{key} = ")).unwrap_or_else(|| panic!("no {key} in {error}")).1;
    after.split_once('`').unwrap().0
}

#[test]
fn memory_error_names_values_that_fit() {
    let workspace = Workspace::new();
    let run = |key: &str, value: &str| {
        let changed = format!("{key}={value}");
        Workspace::new().train().args(["--set", "phase=[]", "--set", &changed]).output().unwrap()
    };
    let output =
        workspace.train().args(["--set", "engine.micro_batch_tokens=2000000000"]).output().unwrap();
    let message = error(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_contains(&message, &["the run takes at least ", "training ", "MiB may be used"]);
    let fits =
        run("engine.micro_batch_tokens", proposed_value(&message, "engine.micro_batch_tokens"));
    assert!(fits.status.success(), "{}", stderr(&fits));

    let output = workspace.train().args(["--set", "engine.memory_mb=8"]).output().unwrap();
    let message = error(&output);
    let min_memory = proposed_value(&message, "engine.memory_mb");
    let fits = run("engine.memory_mb", min_memory);
    assert!(fits.status.success(), "{min_memory}: {}", stderr(&fits));
    let less = (min_memory.parse::<u32>().unwrap() - 1).to_string();
    assert_eq!(run("engine.memory_mb", &less).status.code(), Some(2), "{less}");

    let with_cache = |value: &str| {
        let cache = format!("engine.kv_memory_mb={value}");
        let set = ["--set", "phase=[]", "--set", "engine.memory_mb=400", "--set", &cache];
        Workspace::new().train().args(set).output().unwrap()
    };
    let message = error(&with_cache("5000"));
    let max = proposed_value(&message, "engine.kv_memory_mb");
    let fits = with_cache(max);
    assert!(fits.status.success(), "{max}: {}", stderr(&fits));
    let more = (max.parse::<u32>().unwrap() + 1).to_string();
    assert_eq!(with_cache(&more).status.code(), Some(2), "{more}");
}

#[test]
fn resume_rejects_missing_changed_and_locked_runs() {
    let workspace = Workspace::new();
    assert_train_rejects(
        &workspace,
        &["--resume"],
        &["run holds no run to resume", "leave --resume out"],
    );
    let output = workspace.train().args(["--set", "phase=[]"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let output = workspace
        .train()
        .args(["--resume", "--set", "agent.max_turns=3", "--set", "phase=[]"])
        .output()
        .unwrap();
    assert_contains(&error(&output), &["`agent.max_turns` is 3 now and was 2", "--run"]);
    // The lock is checked before the model is opened, and before a second learner could be started.
    let lock_file = fs::File::open(workspace.path("run/lock")).unwrap();
    lock_file.lock().unwrap();
    let output =
        workspace.train().args(["--resume", "--set", "model.source=./nowhere"]).output().unwrap();
    assert_contains(
        &error(&output),
        &["another process is working on the run in ", "wait for it or stop it"],
    );
}

#[test]
fn commands_reject_missing_runs_models_and_attempts() {
    let workspace = Workspace::new();
    let assert_command_rejects = |args: &[&str], parts: &[&str]| {
        let output = workspace.levade().args(args).write_stdin("Hi\n").output().unwrap();
        assert_contains(&error(&output), parts);
    };
    assert_command_rejects(&["inspect", "model"], &["model holds no run", "levade train"]);
    assert_command_rejects(&["replay", "model"], &["model holds no run", "levade train"]);
    assert_command_rejects(
        &["chat", "runs/nowhere"],
        &["runs/nowhere does not exist", "levade train"],
    );
    assert_command_rejects(
        &["merge", "runs/nowhere", "merged"],
        &["runs/nowhere does not exist", "levade train"],
    );
    assert_command_rejects(&["chat", "model", "--top-p", "2"], &["top_p = 2", "(0, 1]"]);
    assert_command_rejects(
        &["chat", "model", "--tool", "abacus"],
        &["\"abacus\"", "the tools are calculator"],
    );
    assert_command_rejects(
        &["eval", "recipe.toml", "--tasks", "0", "--set", "eval.unseen_wordings=0"],
        &["give --tasks N"],
    );
    assert_command_rejects(&["eval", "recipe.toml", "--model", "./nowhere"], &["does not exist"]);
    assert_command_rejects(
        &["eval", "recipe.toml", "--base", "model"],
        &["is a model without an adapter; leave out --base"],
    );
    let serve = ["serve", "model", "--port", "0"];
    assert_command_rejects(
        &[&serve[..], &["--base", "model"]].concat(),
        &["is a model without an adapter; leave out --base"],
    );
    assert_command_rejects(
        &[&serve[..], &["--kv-memory-mb", "1000000000"]].concat(),
        &["the model would take", "lower --kv-memory-mb, --running or --context"],
    );
    assert_command_rejects(&[&serve[..], &["--running", "0"]].concat(), &["--running", "least 1"]);
    assert_command_rejects(
        &[&serve[..], &["--host", "no host"]].concat(),
        &["--host", "\"no host\"", "IP address"],
    );
    assert_command_rejects(
        &["eval", "recipe.toml", "--tasks", "16777217"],
        &["`eval.tasks` is 16777217", "at most 16777216"],
    );
    assert_command_rejects(&["pull", "./nowhere.gguf"], &["does not exist"]);
    let output = workspace.train().args(["--set", "phase=[]"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_command_rejects(&["inspect", "run"], &["no attempts for train", "--eval"]);
    assert_command_rejects(
        &["inspect", "run", "--attempt", "eval/0/0/99/0"],
        &["no eval/0/0/99/0", "levade inspect run"],
    );
    assert_command_rejects(
        &["inspect", "run", "--attempt", "99"],
        &["PURPOSE/PHASE/STEP/GROUP/SAMPLE"],
    );
    assert_command_rejects(&["chat", "run"], &["has no checkpoint yet", "--resume"]);
    // A model that an override names replaces that of the run.
    assert_command_rejects(&["eval", "run"], &["has no checkpoint yet"]);
    assert_command_rejects(
        &["eval", "run", "--set", "model.source=./nowhere"],
        &["nowhere\" does not exist"],
    );
}

/// Compiles a library that, if preloaded, simulates a full disk: writes to the file that the
/// environment variable `FULL` names fail beyond 64 KiB.
#[cfg(target_os = "linux")]
fn full_disk(workspace: &Workspace) -> std::path::PathBuf {
    let source = r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <errno.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <unistd.h>
        ssize_t write(int file, const void *data, size_t count) {
            static ssize_t (*real)(int, const void *, size_t);
            if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
            char link[64], path[4096];
            snprintf(link, sizeof link, "/proc/self/fd/%d", file);
            ssize_t length = readlink(link, path, sizeof path - 1);
            const char *full = getenv("FULL");
            if (length > 0 && full) {
                path[length] = 0;
                if (strstr(path, full) && lseek(file, 0, SEEK_CUR) + count > 65536) {
                    errno = ENOSPC;
                    return -1;
                }
            }
            return real(file, data, count);
        }
    "#;
    workspace.write("full.c", source);
    let library = workspace.path("full.so");
    let compiled = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(workspace.path("full.c"))
        .args(["-ldl"])
        .status()
        .unwrap();
    assert!(compiled.success());
    library
}

/// If the disk is full during the third checkpoint, the earlier checkpoints stay complete and no
/// part of the third one is left. When there is space again, the run resumes and ends with the same
/// weights.
#[test]
#[cfg(target_os = "linux")]
fn full_disk_leaves_no_partial_checkpoint() {
    let workspace = Workspace::with_trained_model();
    let library = full_disk(&workspace);
    let steps = ["--set", "run.keep=9"];
    let uninterrupted = workspace.train().args(steps).args(["--run", "whole"]).output().unwrap();
    assert!(uninterrupted.status.success(), "{}", stderr(&uninterrupted));
    for full in ["step-000003/model.safetensors", "step-000003/optimiser.second.safetensors"] {
        let run = full.replace('/', "-");
        let train = |resume: &[&str]| {
            let mut command = workspace.train();
            command.args(steps).args(["--run", &run]).args(resume);
            command
        };
        let output = train(&[]).env("LD_PRELOAD", &library).env("FULL", full).output().unwrap();
        assert_contains(&error(&output), &["the disk is full", full, "free some space"]);
        let names: Vec<_> =
            workspace.checkpoints(&run).iter().map(|p| p.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["step-000001", "step-000002"]);
        let output = train(&["--resume"]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(workspace.weights(&run) == workspace.weights("whole"), "the weights differ");
    }
}

#[test]
fn damaged_checkpoint_is_skipped_on_resume() {
    let workspace = Workspace::new();
    let output =
        workspace.train().args(["--set", "run.keep=9", "--set", "eval.tasks=0"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let weights = workspace.weights("run");
    let last = workspace.checkpoints("run").pop().unwrap().join("model.safetensors");
    fs::write(&last, &weights[..1000]).unwrap();
    let output = workspace.levade().args(["chat", "run"]).write_stdin("").output().unwrap();
    assert_contains(&error(&output), &["model.safetensors is damaged, truncated"]);
    let output = workspace
        .train()
        .args(["--resume", "--set", "run.keep=9", "--set", "eval.tasks=0"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_contains(
        &stdout(&output),
        &[
            "note: checkpoint step-000004 is incomplete",
            "resuming from run/checkpoints/step-000003",
        ],
    );
    assert!(workspace.weights("run") == weights, "the weights differ");
}

#[test]
fn unreachable_editor_ends_prompt_phase_at_its_start() {
    let workspace = Workspace::new();
    let start = std::time::Instant::now();
    // No server listens on this port.
    let output = workspace
        .train()
        .args(["--set", "policy.default={kind='trained'}"])
        .args(["--set", "policy.editor={kind='external', url='http://127.0.0.1:9/v1', model='m'}"])
        .args([
            "--set",
            "phase=[{kind='prompt', editor='editor', rounds=1, beam_width=1, branch_factor=1, \
             gradient_tasks=1, selection_tasks=2}]",
        ])
        .args(["--set", "eval.tasks=0", "--set", "eval.unseen_wordings=0"])
        .output()
        .unwrap();
    assert_contains(
        &error(&output),
        &[
            "the editor `policy.editor`",
            "cannot connect to http://127.0.0.1:9/v1",
            "refused",
            "correct `policy.editor.url`",
            "--resume",
        ],
    );
    // The timeout of the policy is 600 s. No attempt was made for a prompt that cannot be edited.
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
    let output = workspace.levade().args(["inspect", "run", "--prompts"]).output().unwrap();
    assert_contains(&error(&output), &["no attempts for"]);
}

/// The model of these tests is valid, so each rejection above is due to the changed input.
#[test]
fn valid_model_and_recipe_are_accepted() {
    let workspace = Workspace::new();
    write_model(&workspace.path("model"), &config());
    let output =
        workspace.train().args(["--set", "phase=[]", "--set", "eval.tasks=1"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}
