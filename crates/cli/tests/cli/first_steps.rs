//! Tests of `new`, `check` and `plan`: the commands that a user runs before training.

use std::fs;
use std::process::Output;

use levade_model::ModelConfig;
use serde_json::json;

use crate::support::{Workspace, config, stderr, stdout, write_model};

/// Runs `levade check` and returns its standard output and exit code.
fn check(workspace: &Workspace, arguments: &[&str]) -> (String, Option<i32>) {
    let output: Output = workspace.levade().arg("check").args(arguments).output().unwrap();
    (stdout(&output), output.status.code().or_else(|| panic!("{}", stderr(&output))))
}

/// Returns the line of an item in the output of a check.
fn line<'t>(report: &'t str, item: &str) -> &'t str {
    report
        .lines()
        .find(|line| line.split_whitespace().nth(1) == Some(item))
        .unwrap_or_else(|| panic!("no {item} in\n{report}"))
}

#[test]
fn check_reports_each_item_and_leaves_no_files() {
    let workspace = Workspace::new();
    let (report, code) = check(&workspace, &["recipe.toml"]);
    assert_eq!(code, Some(0), "{report}");
    for (item, parts) in [
        ("recipe", &["✓", "tiny: sft, grpo; agents default"][..]),
        ("folder", &["✓"]),
        ("tasks", &["✓", "500 to train on, 7 to evaluate on"]),
        ("model", &["✓", "/model: "]),
        ("tool", &["✓", "calculator: calculator; calculator returned \"42\""]),
        ("scorer", &["✓", "returned numeric 1 for an expected answer"]),
        ("prompts", &["✓", "fit the context of 640 tokens"]),
        ("memory", &["✓", "MiB (weights"]),
        ("disk", &["✓", "checkpoints of up to"]),
    ] {
        for part in parts {
            assert!(line(&report, item).contains(part), "no {part:?} in\n{report}");
        }
    }
    assert!(!workspace.path("run").exists());
    // One check reports all faults, each with a remedy.
    workspace.write("tools.py", "import nothing_of_this_name\n");
    let tool = "[[tool]]\nkind = \"python\"\nname = \"own\"\nfile = \"tools.py\"\n\n[agent]\ntools = [\"own\", \"calculator\"]";
    workspace.replace("recipe.toml", "[agent]\ntools = [\"calculator\"]", tool);
    let scorer = "[reward]\nscorer = { kind = \"http\", url = \"http://127.0.0.1:9/\", tries = 1 }";
    workspace.replace("recipe.toml", "[reward]", scorer);
    let (report, code) = check(&workspace, &["recipe.toml", "--set", "engine.memory_mb=1"]);
    assert_eq!(code, Some(2), "{report}");
    for (item, part) in [
        ("tool", "nothing_of_this_name"),
        ("scorer", "127.0.0.1:9"),
        ("memory", "engine.memory_mb"),
    ] {
        let found = report
            .lines()
            .skip_while(|line| *line != self::line(&report, item))
            .take(8)
            .collect::<Vec<_>>()
            .join("\n");
        assert!(found.starts_with('✗') && report.contains(part), "no {part:?} in\n{report}");
    }
    assert!(report.ends_with("3 items would fail\n"), "{report}");
}

#[test]
fn plan_prints_estimates_and_rejects_invalid_options() {
    let workspace = Workspace::new();
    let plan = |arguments: &[&str]| {
        workspace.levade().args(["plan", "recipe.toml"]).args(arguments).output().unwrap()
    };
    let report =
        stdout(&plan(&["--device", "h100", "--fleet", "1,8", "--tool", "2", "--price", "2"]));
    for part in
        ["this machine: ", "devices", "sampling", "bottleneck:", "a core of the gateway", "cost"]
    {
        assert!(report.contains(part), "no {part:?} in\n{report}");
    }
    let fleets: Vec<&str> =
        report.lines().filter(|line| line.ends_with(" %") && !line.contains("phase")).collect();
    assert_eq!(fleets.len(), 2, "{report}");
    workspace.write(
        "seconds.json",
        r#"{"prompt":0.001,"batch":0.02,"sequence":0.001,"learn":0.01,"update":0,"publish":0}"#,
    );
    assert!(stdout(&plan(&["--fleet", "1", "--service", "seconds.json"])).contains("bottleneck:"));
    for (arguments, part) in [
        (
            &["--fleet", "1"][..],
            "--fleet needs times: set --device, or pass measured times with --service",
        ),
        (&["--fleet", "0", "--device", "h100"], "--fleet is 0, but must be in 1..=16384"),
        (
            &["--fleet", "1", "--service", "nowhere.json"],
            "cannot read --service nowhere.json: No such file",
        ),
        (
            &["--fleet", "1,2", "--device", "h100", "--turns", "1000000"],
            "--fleet would simulate 84000000 completions of the largest fleet, more than 10000000: \
             lower --turns, which is 1000000",
        ),
        (
            &["--fleet", "1", "--device", "h100", "--set", "phase.1.staleness=1000000"],
            "lower `phase.1.staleness`, which is 1000000",
        ),
        (
            &["--fleet", "1", "--device", "h100", "--spread", "11"],
            "--spread is 11, but must be in 0..=10",
        ),
        (&["--config", "nowhere.json"], "cannot read --config nowhere.json: No such file"),
        (
            &["--prompt", "601", "--set", "model.context=600"],
            "--prompt is 601, but the context is 600 tokens (`model.context`); lower --prompt",
        ),
    ] {
        let output = plan(arguments);
        assert!(
            output.status.code() == Some(2) && stderr(&output).contains(part),
            "{arguments:?}: {}",
            stderr(&output)
        );
    }
    assert!(!workspace.path("run").exists());
}

#[test]
fn check_names_bad_key_and_bad_row() {
    let workspace = Workspace::new();
    let (report, code) = check(&workspace, &["recipe.toml", "--set", "phase.1.group_size=1"]);
    assert_eq!(code, Some(2));
    assert!(line(&report, "recipe").contains("`phase.1.group_size` is 1"), "{report}");
    let rows = [
        json!({ "question": "1+1?", "answer": "2" }),
        json!({ "question": "2+2?" }),
        json!({ "answer": "3" }),
    ];
    workspace.write("rows.jsonl", rows.map(|row| row.to_string()).join("\n"));
    let (report, code) = check(
        &workspace,
        &[
            "recipe.toml",
            "--set",
            "tasks=[{kind='file', path='rows.jsonl', held_out=1}]",
            "--set",
            "phase.0.demonstrations=1",
        ],
    );
    assert_eq!(code, Some(2));
    assert!(
        line(&report, "tasks").starts_with('✗')
            && report.contains("rows.jsonl")
            && report.contains("answer"),
        "{report}"
    );
    // The remaining items are checked after a fault.
    assert!(
        line(&report, "model").starts_with('✓') && line(&report, "tool").starts_with('✓'),
        "{report}"
    );
}

/// Training would reject these phases and prompts at its start.
#[test]
fn check_rejects_phases_and_prompts_like_train() {
    let workspace = Workspace::new();
    let rows =
        (0..20).map(|i| json!({ "question": format!("{i}+1?"), "answer": i + 1 }).to_string());
    workspace.write("rows.jsonl", rows.collect::<Vec<_>>().join("\n"));
    let (report, code) = check(
        &workspace,
        &["recipe.toml", "--set", "tasks=[{kind='file', path='rows.jsonl', held_out=8}]"],
    );
    assert_eq!(code, Some(2));
    assert!(
        line(&report, "phases")
            .contains("`phase.0.demonstrations` is 4, but the training tasks have only 0"),
        "{report}"
    );
    // Without this check, the phases before it would be trained first.
    let set = "phase.1.curriculum.pool_by=depth";
    let (report, code) = check(&workspace, &["recipe.toml", "--set", set]);
    assert_eq!(code, Some(2));
    assert!(line(&report, "phases").contains("has no field `depth`"), "{report}");
    let (report, code) = check(&workspace, &["recipe.toml", "--set", "agent.max_context_tokens=9"]);
    assert_eq!(code, Some(2));
    assert!(
        line(&report, "prompts").contains("more than `agent.max_context_tokens` = 9"),
        "{report}"
    );
}

#[test]
fn check_measure_reports_step_time_without_run() {
    let workspace = Workspace::new();
    let (report, code) = check(&workspace, &["recipe.toml", "--measure"]);
    assert_eq!(code, Some(0), "{report}");
    assert!(line(&report, "time").contains("a step of 2 groups may take"), "{report}");
    assert!(!workspace.path("run").exists());
}

#[test]
fn new_recipe_passes_check_and_is_never_overwritten() {
    let workspace = Workspace::new();
    // The context must hold the description of a tool, with one token per byte.
    write_model(&workspace.path("wide"), &ModelConfig { context: 2048, ..config() });
    let new = |arguments: &[&str]| {
        workspace.levade().args(["new", "recipe"]).args(arguments).output().unwrap()
    };
    let output =
        new(&["sums", "--model", "./wide", "--tools", "calculator", "--algorithm", "rloo"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("levade check sums"), "{}", stdout(&output));
    let recipe = fs::read_to_string(workspace.path("sums/recipe.toml")).unwrap();
    assert!(
        recipe.contains("algorithm = \"rloo\"") && recipe.contains("# Maximum sequence length"),
        "{recipe}"
    );
    assert!(
        fs::read_to_string(workspace.path("sums/README.md"))
            .unwrap()
            .contains("| algorithm | rloo |")
    );
    let (report, code) = check(&workspace, &["sums"]);
    assert_eq!(code, Some(0), "{report}\n{recipe}");
    // The recipe can be trained.
    let short = [
        "--set",
        "phase.1.steps=1",
        "--set",
        "phase.1.groups=2",
        "--set",
        "phase.1.group_size=2",
        "--set",
        "eval.tasks=2",
    ];
    let output = workspace.levade().args(["train", "sums"]).args(short).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));

    let again = new(&["sums", "--model", "./model"]);
    assert_eq!(again.status.code(), Some(2));
    assert!(
        stderr(&again).contains("sums/recipe.toml exists; name another directory"),
        "{}",
        stderr(&again)
    );
    assert_eq!(fs::read_to_string(workspace.path("sums/recipe.toml")).unwrap(), recipe);

    // A missing file is reported before anything else.
    let missing = new(&["sums", "--model", "./wide", "--tasks", "nowhere.jsonl"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(stderr(&missing).contains("nowhere.jsonl"), "{}", stderr(&missing));
    assert!(!stderr(&missing).contains("exists; name another directory"), "{}", stderr(&missing));

    // The rows of a file determine the scorer, and a fifth of them is held out.
    let rows: Vec<String> = (0..50)
        .map(|n| json!({ "q": format!("Who is {n}?"), "a": ["Ada", "Lovelace"] }).to_string())
        .collect();
    workspace.write("who.jsonl", rows.join("\n"));
    let output =
        new(&["--model", "./wide", "--tasks", "who.jsonl", "--question", "q", "--answer", "a"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let recipe = fs::read_to_string(workspace.path("who/recipe.toml")).unwrap();
    assert!(recipe.contains("held_out = 10") && recipe.contains("kind = \"answer\""), "{recipe}");
    let (report, code) = check(&workspace, &["who"]);
    assert_eq!(code, Some(0), "{report}");

    let wrong = new(&["other", "--model", "./model", "--algorithm", "gpro"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        stderr(&wrong).contains("did you mean `grpo`?") && !workspace.path("other").exists(),
        "{}",
        stderr(&wrong)
    );
    assert!(stderr(&wrong).contains("the recipe would be invalid: `phase."), "{}", stderr(&wrong));
    let unnamed =
        new(&["other", "--model", "./model", "--tasks", "who.jsonl", "--question", "nope"]);
    assert_eq!(unnamed.status.code(), Some(2));
    assert!(stderr(&unnamed).contains("no field \"nope\""), "{}", stderr(&unnamed));
    assert!(stderr(&unnamed).contains("--question FIELD"), "{}", stderr(&unnamed));
    let missing = new(&["other", "--model", "./model", "--tasks", "nowhere.jsonl"]);
    assert_eq!(missing.status.code(), Some(2), "{}", stderr(&missing));
}
