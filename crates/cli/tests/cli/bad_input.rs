//! Tests of invalid input: each is rejected with exit code 2 and an error of at most one screen that
//! names the input and a remedy. No partial files are left.

use std::fs;
use std::process::Output;

use levade_engine::testing::{Compute, random_weights};
use levade_model::ModelConfig;

use crate::support::{Place, config, stderr, stdout, write_model};

/// Returns the error message of a command that rejected its input. Asserts the exit code, the length
/// of the message and the absence of internal details.
fn error(output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let error = text.split_once("error: ").unwrap_or_else(|| panic!("no error in\n{text}")).1.to_owned();
    assert!(error.lines().count() <= 12 && error.len() < 1500, "more than a screen:\n{error}");
    for inside in ["panicked", "RUST_BACKTRACE", "Error {", "Some(", "Os {"] {
        assert!(!text.contains(inside), "the inside shows:\n{text}");
    }
    error
}

fn assert_says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "no {part:?} in\n{error}");
    }
}

/// Asserts that training is rejected before it starts, with a message that contains `parts`, and
/// writes nothing.
fn refused(place: &Place, args: &[&str], parts: &[&str]) {
    let output = place.train().args(args).output().unwrap();
    assert_says(&error(&output), parts);
    assert_eq!(stdout(&output), "");
    assert!(!place.path("run").exists(), "a run folder was made");
}

#[test]
fn closed_stderr_does_not_change_exit_code() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_levade"));
    let status = command.args(["train", "/nowhere", "--log", "trace"]).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(2));
}

#[test]
fn invalid_recipe_is_rejected_with_key() {
    let place = Place::new();
    refused(
        &place,
        &["--set", "run.sede=2"],
        &["recipe.toml", "unknown key `run.sede`", "did you mean `seed`?"],
    );
    refused(
        &place,
        &["--set", "run.seed=two"],
        &["`run.seed` is the text \"two\"", "must be a whole number"],
    );
    refused(&place, &["--set", "phase.1.group_size=1"], &["`phase.1.group_size` is 1", "at least 2"]);
    refused(&place, &["--set", "phase.7.steps=1"], &["--set phase.7.steps", "a list of 2"]);
    refused(&place, &["--set", "seed"], &["--set seed", "key=value"]);
    refused(&place, &["--set", "agent.tools=['abacus']"], &["\"abacus\"", "there is calculator"]);
    place.replace("recipe.toml", "learning_rate = 1e-3", "lerning_rate = 1e-3");
    refused(&place, &[], &["unknown key `phase.1.lerning_rate`", "did you mean `learning_rate`?"]);
    place.write("recipe.toml", "[run\nname = 'x'");
    refused(&place, &[], &["recipe.toml is not valid TOML", "line 1"]);
    for (name, part) in
        [("nowhere.toml", "nowhere.toml does not exist"), ("model", "model holds no recipe.toml")]
    {
        let output = place.levade().args(["train", name]).output().unwrap();
        assert_says(&error(&output), &[part, "TOML file"]);
    }
}

#[test]
fn missing_model_files_are_rejected() {
    let place = Place::new();
    refused(&place, &["--set", "model.source=./nowhere"], &["nowhere\" does not exist", "a .gguf file"]);
    refused(&place, &["--set", "model.source=no such model"], &["no such model", "owner/name"]);
    fs::remove_file(place.path("model/model.safetensors")).unwrap();
    refused(&place, &[], &["model", "safetensors"]);
    fs::remove_file(place.path("model/config.json")).unwrap();
    refused(&place, &[], &["has no config.json", "give the folder of a Hugging Face model"]);
}

#[test]
fn damaged_weight_files_are_rejected() {
    let place = Place::new();
    let whole = fs::read(place.path("model/model.safetensors")).unwrap();
    let damaged = |bytes: &[u8], parts: &[&str]| {
        place.write("model/model.safetensors", bytes);
        refused(
            &place,
            &[],
            &[&["model.safetensors is damaged, cut short", "fetch or convert it again"], parts].concat(),
        );
    };
    damaged(&whole[..whole.len() - 100], &["tensor"]);
    damaged(&whole[..5], &["5 bytes"]);
    damaged(&[], &["it is empty"]);
    let mut garbled = whole;
    garbled[8..40].fill(b'x');
    damaged(&garbled, &["its header is not a JSON object"]);

    // Truncated GGUF files, and a file in another format.
    let header = [&b"GGUF"[..], &3u32.to_le_bytes(), &2u64.to_le_bytes(), &5u64.to_le_bytes()].concat();
    for bytes in [&header[..], b"GGUF", b"PK\x03\x04, as a wheel begins"] {
        place.write("model.gguf", bytes);
        let parts = ["model.gguf is damaged, cut short", "fetch or convert it again"];
        refused(&place, &["--set", "model.source=./model.gguf"], &parts);
    }
}

/// Replaces the weights of the model with those of another configuration.
fn write_weights_of(place: &Place, other: &ModelConfig) {
    let weights = random_weights(&Compute::new(1), other, 1);
    weights.layout.tensors.write(&place.path("model/model.safetensors"), &weights.master).unwrap();
}

#[test]
fn config_that_contradicts_weights_is_rejected() {
    let place = Place::new();
    write_weights_of(&place, &ModelConfig { intermediate: 64, ..config() });
    refused(&place, &[], &["mlp.", "has shape [64, 48]", "asks for [80, 48]", "fetch both again"]);
    write_weights_of(&place, &ModelConfig { layers: 3, ..config() });
    refused(&place, &[], &["a tensor model.layers.2.", "which the configuration does not ask for"]);
    write_weights_of(&place, &ModelConfig { layers: 1, ..config() });
    refused(&place, &[], &["has no tensor model.layers.1.", "fetch both again"]);
    let contradiction = ModelConfig { kv_heads: 3, ..config() };
    place.write("model/config.json", contradiction.to_hf_json().to_string());
    refused(&place, &[], &["config.json", "4 attention heads cannot share 3"]);
}

#[test]
fn model_without_chat_template_or_tokenizer_is_rejected() {
    let place = Place::new();
    place.replace("model/tokenizer_config.json", "\"chat_template\"", "\"no_template\"");
    let parts = ["model", "has no chat template", "chat_template.jinja"];
    refused(&place, &[], &parts);
    let chat = place.levade().args(["chat", "model"]).write_stdin("Hi\n").output().unwrap();
    assert_says(&error(&chat), &parts);
    place.write("model/chat_template.jinja", "{% for message in messages %}{{ message.content }}");
    refused(&place, &[], &["model", "chat template: "]);
    fs::remove_file(place.path("model/tokenizer.json")).unwrap();
    refused(&place, &[], &["has no tokenizer.json"]);
}

/// Creates a directory with a recipe whose tasks are these rows of a JSONL file.
fn with_rows(rows: &str) -> Place {
    let place = Place::new();
    let text = fs::read_to_string(place.path("recipe.toml")).unwrap();
    let (head, rest) = text.split_once("[[tasks]]").unwrap();
    let (_, rest) = rest.split_once("[agent]").unwrap();
    let tasks = "[[tasks]]\nkind = \"jsonl\"\npath = \"rows.jsonl\"\nheld_out = 1\n[agent]";
    place.write("recipe.toml", format!("{head}{tasks}{rest}"));
    place.write("rows.jsonl", rows);
    place
}

#[test]
fn invalid_task_rows_are_rejected_with_line() {
    let good = "{\"question\": \"1 + 1?\", \"answer\": 2}\n{\"question\": \"1 + 2?\", \"answer\": 3}\n";
    let place = with_rows(&format!("{good}{{\"question\": \"1 + 3?\", \"anwser\": 4}}\n"));
    refused(&place, &[], &["rows.jsonl, line 3", "no field \"answer\"", "it has question, anwser"]);
    let place = with_rows(&format!("{good}\n{{\"question\": \n"));
    refused(&place, &[], &["rows.jsonl, line 4", "not valid JSON"]);
    let place = with_rows(&format!("{good}{{\"question\": \"1 + 3?\", \"answer\": \"four\"}}\n"));
    refused(&place, &["--set", "phase=[]"], &["task ", "four"]);
    let place = with_rows(&good.repeat(2));
    let output = place.train().args(["--set", "phase=[]"]).output().unwrap();
    let notes = stdout(&output);
    assert!(output.status.success() && notes.contains("rows.jsonl: 2 rows are left out"), "{notes}");
    let place = with_rows(good);
    refused(&place, &[], &["`phase.0.demonstrations` is 4", "only 0 training tasks"]);
    fs::remove_file(place.path("rows.jsonl")).unwrap();
    refused(&place, &[], &["cannot read the tasks of", "rows.jsonl"]);
}

#[test]
fn prompt_longer_than_context_is_rejected() {
    let place = Place::new();
    let parts =
        ["the prompt of task arithmetic-", "tokens, but the context holds 200", "raise `model.context`"];
    refused(&place, &["--set", "model.context=200"], &parts);
    refused(&place, &["--set", "model.context=4096"], &["4096", "the model was trained for 640"]);
}

/// Returns the value that an error proposes for a key, as in `` `KEY = VALUE` ``.
fn proposed<'e>(error: &'e str, key: &str) -> &'e str {
    let after = error.split_once(&format!("`{key} = ")).unwrap_or_else(|| panic!("no {key} in {error}")).1;
    after.split_once('`').unwrap().0
}

#[test]
fn memory_error_names_values_that_fit() {
    let place = Place::new();
    let run = |key: &str, value: &str| {
        let changed = format!("{key}={value}");
        Place::new().train().args(["--set", "phase=[]", "--set", &changed]).output().unwrap()
    };
    let output = place.train().args(["--set", "engine.micro_batch_tokens=2000000000"]).output().unwrap();
    let message = error(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_says(&message, &["the run takes at least ", "training ", "MiB may be used"]);
    let fits = run("engine.micro_batch_tokens", proposed(&message, "engine.micro_batch_tokens"));
    assert!(fits.status.success(), "{}", stderr(&fits));

    let output = place.train().args(["--set", "engine.memory_mb=8"]).output().unwrap();
    let message = error(&output);
    let least = proposed(&message, "engine.memory_mb");
    let fits = run("engine.memory_mb", least);
    assert!(fits.status.success(), "{least}: {}", stderr(&fits));
    let less = (least.parse::<u32>().unwrap() - 1).to_string();
    assert_eq!(run("engine.memory_mb", &less).status.code(), Some(2), "{less}");
}

#[test]
fn resume_rejects_missing_changed_and_locked_runs() {
    let place = Place::new();
    refused(&place, &["--resume"], &["run holds no run to resume", "leave --resume out"]);
    let output = place.train().args(["--set", "phase=[]"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let output =
        place.train().args(["--resume", "--set", "agent.max_turns=3", "--set", "phase=[]"]).output().unwrap();
    assert_says(&error(&output), &["`agent.max_turns` is 3 now and was 2", "--run"]);
    // The lock is checked before the model is opened, and before a second learner could be started.
    let held = fs::File::open(place.path("run/lock")).unwrap();
    held.lock().unwrap();
    let output = place.train().args(["--resume", "--set", "model.source=./nowhere"]).output().unwrap();
    assert_says(&error(&output), &["another process is working on the run in ", "wait for it or stop it"]);
}

#[test]
fn commands_reject_missing_runs_models_and_attempts() {
    let place = Place::new();
    let ask = |args: &[&str], parts: &[&str]| {
        let output = place.levade().args(args).write_stdin("Hi\n").output().unwrap();
        assert_says(&error(&output), parts);
    };
    ask(&["inspect", "model"], &["model holds no run", "levade train"]);
    ask(&["replay", "model"], &["model holds no run", "levade train"]);
    ask(&["chat", "runs/nowhere"], &["runs/nowhere does not exist", "levade train"]);
    ask(&["merge", "runs/nowhere", "merged"], &["runs/nowhere does not exist", "levade train"]);
    ask(&["chat", "model", "--top-p", "2"], &["top_p = 2", "(0, 1]"]);
    ask(&["chat", "model", "--tool", "abacus"], &["\"abacus\"", "there is calculator"]);
    ask(&["eval", "recipe.toml", "--tasks", "0", "--set", "eval.unseen_wordings=0"], &["give --tasks N"]);
    ask(&["eval", "recipe.toml", "--model", "./nowhere"], &["does not exist"]);
    ask(&["eval", "recipe.toml", "--base", "model"], &["is a model without adapter; leave out --base"]);
    ask(&["eval", "recipe.toml", "--tasks", "16777217"], &["`eval.tasks` is 16777217", "at most 16777216"]);
    ask(&["pull", "./nowhere.gguf"], &["does not exist"]);
    let output = place.train().args(["--set", "phase=[]"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    ask(&["inspect", "run"], &["no attempts for train", "--eval"]);
    ask(&["inspect", "run", "--attempt", "eval/0/0/99/0"], &["no eval/0/0/99/0", "levade inspect run"]);
    ask(&["inspect", "run", "--attempt", "99"], &["PURPOSE/PHASE/STEP/GROUP/SAMPLE"]);
    ask(&["chat", "run"], &["has no checkpoint yet", "--resume"]);
    // A model that an override names replaces that of the run.
    ask(&["eval", "run"], &["has no checkpoint yet"]);
    ask(&["eval", "run", "--set", "model.source=./nowhere"], &["nowhere\" does not exist"]);
}

/// Compiles a library that, if preloaded, simulates a full disk: writes to the file that the
/// environment variable `FULL` names fail beyond 64 KiB.
#[cfg(target_os = "linux")]
fn full_disk(place: &Place) -> std::path::PathBuf {
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
    place.write("full.c", source);
    let library = place.path("full.so");
    let compiled = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(place.path("full.c"))
        .args(["-ldl"])
        .status()
        .unwrap();
    assert!(compiled.success());
    library
}

/// If the disk is full during the third checkpoint, the earlier checkpoints stay complete and no part
/// of the third one is left. When there is space again, the run resumes and ends with the same
/// weights.
#[test]
#[cfg(target_os = "linux")]
fn full_disk_leaves_no_partial_checkpoint() {
    let place = Place::with_trained_model();
    let library = full_disk(&place);
    let steps = ["--set", "run.keep=9"];
    let whole = place.train().args(steps).args(["--run", "whole"]).output().unwrap();
    assert!(whole.status.success(), "{}", stderr(&whole));
    for full in ["step-000003/model.safetensors", "step-000003/optimiser.second.safetensors"] {
        let run = full.replace('/', "-");
        let train = |resume: &[&str]| {
            let mut command = place.train();
            command.args(steps).args(["--run", &run]).args(resume);
            command
        };
        let output = train(&[]).env("LD_PRELOAD", &library).env("FULL", full).output().unwrap();
        assert_says(&error(&output), &["the disk is full", full, "free some space"]);
        let names: Vec<_> =
            place.checkpoints(&run).iter().map(|p| p.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["step-000001", "step-000002"]);
        let output = train(&["--resume"]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(place.weights(&run) == place.weights("whole"), "the weights differ");
    }
}

#[test]
fn damaged_checkpoint_is_skipped_on_resume() {
    let place = Place::new();
    let output = place.train().args(["--set", "run.keep=9", "--set", "eval.tasks=0"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let weights = place.weights("run");
    let last = place.checkpoints("run").pop().unwrap().join("model.safetensors");
    fs::write(&last, &weights[..1000]).unwrap();
    let output = place.levade().args(["chat", "run"]).write_stdin("").output().unwrap();
    assert_says(&error(&output), &["model.safetensors is damaged, cut short"]);
    let output =
        place.train().args(["--resume", "--set", "run.keep=9", "--set", "eval.tasks=0"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_says(
        &stdout(&output),
        &["note: checkpoint step-000004 is not whole", "goes on from run/checkpoints/step-000003"],
    );
    assert!(place.weights("run") == weights, "the weights differ");
}

/// The model of these tests is valid, so each rejection above is due to the changed input.
#[test]
fn valid_model_and_recipe_are_accepted() {
    let place = Place::new();
    write_model(&place.path("model"), &config());
    let output = place.train().args(["--set", "phase=[]", "--set", "eval.tasks=1"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}
