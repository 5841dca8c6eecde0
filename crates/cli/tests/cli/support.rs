//! Test fixtures: a small model on disk, a recipe that trains it in seconds, and the binary.

use std::fs;
#[cfg(unix)]
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Output;
#[cfg(unix)]
use std::process::Stdio;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use assert_cmd::Command;
use levade_engine::testing::{Compute, random_weights, tiny_config};
use levade_model::{ModelConfig, SpecialTokens, write_json, write_tokenizer_config};
use levade_text::testing::{END_OF_TEXT, IM_END, VOCABULARY, tiny_chat};
use tempfile::TempDir;

/// Returns a command that runs the binary without the environment variables of the user that change
/// its behavior, and with a timeout of five minutes.
pub fn levade() -> Command {
    let mut command = Command::cargo_bin("levade").unwrap();
    for name in ["LEVADE_CRASH_AT", "LEVADE_CACHE", "NO_COLOR"] {
        command.env_remove(name);
    }
    // A process that hangs is ended, so that its test fails by name.
    command.timeout(Duration::from_secs(300));
    command
}

/// Returns the standard output of a program.
pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns the standard error of a program.
pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Returns the configuration of the small model, whose tokens are single bytes.
pub fn config() -> ModelConfig {
    ModelConfig {
        vocabulary: VOCABULARY,
        context: 640,
        bos: None,
        eos: vec![IM_END, END_OF_TEXT],
        ..tiny_config()
    }
}

/// Writes a model directory with random weights.
pub fn write_model(dir: &Path, config: &ModelConfig) {
    fs::create_dir_all(dir).unwrap();
    let weights = random_weights(&Compute::new(1), config, 7);
    write_json(&dir.join("config.json"), &config.to_hf_json()).unwrap();
    weights.layout.tensors.write(&dir.join("model.safetensors"), &weights.master).unwrap();
    let chat = tiny_chat().unwrap();
    fs::write(dir.join("tokenizer.json"), chat.tokenizer().to_json().unwrap()).unwrap();
    let special = SpecialTokens { eos: Some("<|im_end|>".into()), ..SpecialTokens::default() };
    let template = Some(chat.template().source());
    write_tokenizer_config(&dir.join("tokenizer_config.json"), &special, template, config.context)
        .unwrap();
}

/// A temporary directory with a model in `model`, and a `recipe.toml` that trains it in seconds.
pub struct Workspace {
    temp_dir: TempDir,
}

impl Workspace {
    /// Creates a directory with a model of random weights.
    pub fn new() -> Self {
        let workspace = Workspace { temp_dir: tempfile::tempdir().unwrap() };
        write_model(&workspace.path("model"), &config());
        workspace.write("recipe.toml", RECIPE);
        workspace
    }

    /// Creates a directory with a model that has learned to call the calculator in most cases.
    pub fn with_trained_model() -> Self {
        Self::with_model(trained_model())
    }

    /// Creates a directory with a copy of a model.
    pub fn with_model(model: &Path) -> Self {
        let workspace = Workspace { temp_dir: tempfile::tempdir().unwrap() };
        copy_dir(model, &workspace.path("model"));
        workspace.write("recipe.toml", RECIPE);
        workspace
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.temp_dir.path().join(name)
    }

    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.path(name), contents).unwrap();
    }

    /// Replaces all occurrences of a text in a file, which must contain it.
    pub fn replace(&self, name: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.path(name)).unwrap();
        assert!(text.contains(from), "{name} has no {from:?}");
        self.write(name, text.replace(from, to));
    }

    /// Returns a command that runs the binary in this directory.
    pub fn levade(&self) -> Command {
        let mut command = levade();
        command.current_dir(self.temp_dir.path());
        command
    }

    /// Returns a command that trains with `recipe.toml` and writes the run to `run`.
    pub fn train(&self) -> Command {
        let mut command = self.levade();
        command.args(["train", "recipe.toml"]);
        command
    }

    /// Starts a run of twelve steps, sends it a signal after the second step, and returns its
    /// output when it has ended. Standard output has been consumed.
    #[cfg(unix)]
    pub fn train_until_signal(&self, signal: &str, arguments: &[&str]) -> Output {
        let mut run = std::process::Command::new(env!("CARGO_BIN_EXE_levade"))
            .current_dir(self.path(""))
            .args(["train", "recipe.toml", "--set", "phase.1.steps=12"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(run.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.starts_with("grpo  2/12 ")));
        let sent = std::process::Command::new("kill")
            .args([signal, &run.id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
        // Reads until the run and all of its child processes have closed the pipe.
        lines.for_each(drop);
        run.wait_with_output().unwrap()
    }

    /// Returns the weights of the last checkpoint of a run.
    pub fn weights(&self, run: &str) -> Vec<u8> {
        fs::read(self.checkpoints(run).last().unwrap().join("model.safetensors")).unwrap()
    }

    /// Returns the checkpoints of a run, oldest first. Panics if a checkpoint is incomplete, or if
    /// the directory contains other files than the name of the best checkpoint.
    pub fn checkpoints(&self, run: &str) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.path(run).join("checkpoints")) else {
            return Vec::new();
        };
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let is_complete = |path: &PathBuf| {
            path.file_name().unwrap().to_str().unwrap().starts_with("step-")
                && path.join("trainer.json").is_file()
        };
        if let Some(at) = paths.iter().position(|path| path.ends_with("best")) {
            let name = fs::read_to_string(paths.remove(at)).unwrap();
            assert!(
                paths.iter().any(|path| path.ends_with(name.trim())),
                "the best is {name:?} of {paths:?}"
            );
        }
        assert!(paths.iter().all(is_complete), "{paths:?}");
        paths
    }
}

/// Returns a port that no other test uses while no program listens on it: one below the ports that
/// the system assigns to servers on port 0 and to clients.
pub fn unused_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test processes start at different ports.
    let first = 10_000 + std::process::id() as u16 % 100 * 200;
    let mut ports = (0..200).map(|_| first + NEXT.fetch_add(1, Ordering::Relaxed) % 200);
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap()
}

/// Copies a directory recursively.
pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_dir(&entry.path(), &target)
        } else {
            fs::copy(entry.path(), target).map(drop).unwrap()
        }
    }
}

/// A recipe with one SFT step and three RL steps.
pub const RECIPE: &str = r#"
[run]
name = "tiny"
folder = "run"
checkpoint_every = 1

[model]
source = "./model"

[engine]
concurrency = 4
micro_batch_tokens = 600

[[tasks]]
kind = "arithmetic"
operands = 2
min_digits = 1
max_digits = 2
words = 0.0
train = 500

[agent]
tools = ["calculator"]
tool_prompt = "compact"
max_turns = 2
max_tokens = 110

[reward]
malformed_call = -0.1
unfinished = -0.2

[eval]
tasks = 4
unseen_wordings = 3

[[phase]]
kind = "sft"
demonstrations = 4
batch = 4
learning_rate = 1e-4

[[phase]]
kind = "rl"
steps = 3
groups = 2
group_size = 3
learning_rate = 1e-3
"#;

/// Returns a small model that was trained on many demonstrations, once for all tests.
fn trained_model() -> &'static Path {
    static MODEL: OnceLock<(Workspace, PathBuf)> = OnceLock::new();
    &MODEL.get_or_init(|| train_model(&config(), TRAINING_RECIPE, "")).1
}

/// Trains a model with a recipe that has at least tables of tasks and a phase, and with these rows
/// in `rows.jsonl`. Returns the directory of the run, and its last checkpoint.
pub fn train_model(config: &ModelConfig, recipe: &str, rows: &str) -> (Workspace, PathBuf) {
    const COMMON: &str = "model = { source = './model' }\n\
        run = { name = 'school', folder = 'run', checkpoint_every = 0 }\n\
        engine = { micro_batch_tokens = 4096 }\neval = { tasks = 0 }\n";
    let workspace = Workspace { temp_dir: tempfile::tempdir().unwrap() };
    write_model(&workspace.path("model"), config);
    workspace.write("recipe.toml", [COMMON, recipe].concat());
    workspace.write("rows.jsonl", rows);
    let output = workspace.train().output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let path = workspace.checkpoints("run").pop().unwrap();
    (workspace, path)
}

/// Demonstrations until the model writes complete tool calls.
const TRAINING_RECIPE: &str = r#"
[[tasks]]
kind = "arithmetic"
operands = 2
min_digits = 1
max_digits = 2
words = 0.0

[agent]
tools = ["calculator"]
tool_prompt = "compact"

[[phase]]
kind = "sft"
demonstrations = 64
epochs = 18
batch = 8
learning_rate = 1e-2
optimizer = { schedule = "cosine", min_lr_ratio = 0.1, warmup = 5 }
"#;
