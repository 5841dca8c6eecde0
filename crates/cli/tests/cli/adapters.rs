//! Tests of adapters: training, evaluation, resuming and merging.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{Workspace, stderr, stdout};

const ADAPTER: [&str; 6] = [
    "--set",
    "model.lora.rank=4",
    "--set",
    "phase.1.kl={estimator = \"k3\", coefficient = 0.01}",
    "--set",
    "phase.1.learning_rate=1e-2",
];

fn success(workspace: &Workspace, model: &str, precision: &str) -> Value {
    let precision = format!("engine.precision={precision}");
    let eval = ["eval", "recipe.toml", "--json", "--model", model, "--set", &precision];
    let output = workspace.levade().args(eval).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_str::<Value>(&stdout(&output)).unwrap()["overall"].take()
}

#[test]
fn adapter_is_trained_evaluated_and_merged() {
    for precision in ["f32", "bf16"] {
        let workspace = Workspace::with_trained_model();
        let set = format!("engine.precision={precision}");
        let output = workspace.train().args(ADAPTER).args(["--set", &set]).output().unwrap();
        let text = stdout(&output);
        let notes = stderr(&output);
        assert!(output.status.success(), "{notes}");
        assert_eq!(text.matches(" · mismatch 0 · ").count(), 3, "{text}");
        let numerics: Value =
            serde_json::from_slice(&fs::read(workspace.path("run/engine.json")).unwrap()).unwrap();
        assert!(numerics.to_string().contains(precision), "{numerics}");

        let last = workspace.checkpoints("run").pop().unwrap();
        let config: Value =
            serde_json::from_slice(&fs::read(last.join("adapter_config.json")).unwrap()).unwrap();
        assert_eq!((&config["peft_type"], &config["r"]), (&"LORA".into(), &4.into()));
        assert!(
            last.join("adapter_model.safetensors").is_file()
                && !last.join("model.safetensors").exists()
        );

        let metrics = fs::read_to_string(workspace.path("run/metrics.jsonl")).unwrap();
        let trained: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
        let measured = success(&workspace, "run", precision);
        assert_eq!(measured["success"]["estimate"], trained["eval/success"]);
        assert_eq!(measured["sampled_tokens"], trained["eval/response_length/mean"]);

        let chat = ["chat", "run", "--temperature", "0"];
        let output =
            workspace.levade().args(chat).write_stdin("What is 1 + 2?\n").output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));

        if precision == "f32" {
            base_option_sets_base(&workspace, &last, &stdout(&output));
        }

        let output = workspace.levade().args(["merge", "run", "merged"]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(stdout(&output), "merged\n");
        assert!(workspace.path("merged/tokenizer.json").is_file());
        if precision == "f32" {
            assert_eq!(success(&workspace, "merged", precision)["correct"], measured["correct"]);
        }
        let again = workspace.levade().args(["merge", "run", "merged"]).output().unwrap();
        assert_eq!(again.status.code(), Some(2), "{}", stderr(&again));
    }
}

/// Asserts that `--base` opens an adapter whose base has moved. The adapter is that of a
/// checkpoint, with its target modules spelled as a pattern, as external tools write them.
fn base_option_sets_base(workspace: &Workspace, checkpoint: &Path, completion: &str) {
    let dir = workspace.path("moved");
    fs::create_dir(&dir).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(checkpoint.join(file), dir.join(file)).unwrap();
    }
    let config = dir.join("adapter_config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    json["base_model_name_or_path"] = "/home/somebody/gone".into();
    json["target_modules"] = r"(?:model\.)?.*\.(?:self_attn|mlp)\.\w+_proj".into();
    fs::write(&config, json.to_string()).unwrap();
    let chat = |more: &[&str]| {
        let chat = ["chat", "moved", "--recipe", "recipe.toml", "--temperature", "0"];
        workspace.levade().args(chat).args(more).write_stdin("What is 1 + 2?\n").output().unwrap()
    };
    let rejected = chat(&[]);
    assert_eq!(rejected.status.code(), Some(2));
    for part in ["/home/somebody/gone", "--base SOURCE", "model.base"] {
        assert!(stderr(&rejected).contains(part), "{}", stderr(&rejected));
    }
    let output = chat(&["--base", "model"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output), completion);
    directory_with_recipe_needs_no_option(workspace, &dir, completion);
}

/// Asserts that `chat` reads the recipe in the directory of an adapter, as a package contains it,
/// and rejects that recipe if it defines tools.
fn directory_with_recipe_needs_no_option(workspace: &Workspace, dir: &Path, completion: &str) {
    let recipe = fs::read_to_string(workspace.path("recipe.toml")).unwrap();
    let chat = |recipe: &str| {
        fs::write(dir.join("recipe.toml"), recipe).unwrap();
        let chat = ["chat", "moved", "--base", "model"];
        workspace.levade().args(chat).write_stdin("What is 1 + 2?\n").output().unwrap()
    };
    let output = chat(&recipe);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output), completion);
    let tool =
        "[[tool]]\nname = \"t\"\nkind = \"command\"\ndescription = \"d\"\ncommand = [\"true\"]\n";
    let rejected = chat(&format!("{recipe}\n{tool}"));
    assert_eq!(rejected.status.code(), Some(2));
    assert!(stderr(&rejected).contains("--recipe"), "{}", stderr(&rejected));
}

#[test]
fn killed_adapter_run_resumes_with_equal_bits() {
    let [uninterrupted, stopped] =
        [Workspace::with_trained_model(), Workspace::with_trained_model()];
    let adapter = |workspace: &Workspace| {
        fs::read(workspace.checkpoints("run").last().unwrap().join("adapter_model.safetensors"))
            .unwrap()
    };
    let output = uninterrupted.train().args(ADAPTER).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let output = stopped
        .train()
        .args(ADAPTER)
        .env("LEVADE_CRASH_AT", "after_optim_step:3")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let output = stopped.levade().args(["train", "run", "--resume"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(adapter(&uninterrupted) == adapter(&stopped));
}

#[test]
fn invalid_adapter_keys_are_rejected() {
    let workspace = Workspace::with_trained_model();
    for (set, expected) in [
        ("model.lora.rank=0", "lora.rank = 0"),
        ("model.lora.targets=[\"router\"]", "gate_proj"),
        ("model.lora.rnak=3", "rank"),
        ("engine.precision=f16", "bf16"),
    ] {
        let output = workspace.train().args(["--set", set]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{set}: {}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{set}: {}", stderr(&output));
        assert!(!workspace.path("run").exists(), "{set}");
    }
    let output = workspace.levade().args(["merge", "model", "merged"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("without an adapter"), "{}", stderr(&output));
}
