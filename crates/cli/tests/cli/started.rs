//! Tests of child processes of a run: they end with the trainer, and `check` starts each of them
//! once.
#![cfg(unix)]

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Workspace, stdout};

/// Returns whether a process is running and not a zombie.
fn is_running(pid: &str) -> bool {
    let found = Command::new("ps").args(["-o", "stat=", "-p", pid.trim()]).output().unwrap();
    !stdout(&found).trim().is_empty() && !stdout(&found).starts_with('Z')
}

/// Waits until a condition holds. Panics after a minute.
fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < Duration::from_secs(60), "timed out after a minute: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Trains until a scorer has written the ids of its process and of a detached child, kills the
/// trainer, and waits until both processes have exited.
fn killed_trainer_leaves_nothing(scorer: &str) {
    let workspace = Workspace::new();
    workspace.replace("recipe.toml", "[reward]\n", &format!("[reward]\nscorer = {scorer}\n"));
    workspace.write(
        "score.py",
        "import os, subprocess, time\n\
         def compute_score(**_):\n    \
             child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n    \
             open('pids', 'w').write(f'{os.getpid()}\\n{child.pid}\\n')\n    \
             time.sleep(300)\n",
    );
    let mut run = Command::new(env!("CARGO_BIN_EXE_levade"))
        .current_dir(workspace.path(""))
        .args(["train", "recipe.toml"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pids = || fs::read_to_string(workspace.path("pids")).unwrap_or_default();
    wait_until("the scorer starts", || pids().lines().count() == 2);
    assert!(pids().lines().all(is_running));
    // This sends SIGKILL, which the trainer cannot handle.
    run.kill().unwrap();
    run.wait().unwrap();
    wait_until("the scorer and its child end", || !pids().lines().any(is_running));
}

#[test]
fn command_scorer_ends_with_killed_trainer() {
    let script =
        "setsid sleep 300 >/dev/null 2>&1 & printf '%s\\\\n%s\\\\n' $$ $! > pids; sleep 300";
    killed_trainer_leaves_nothing(&format!(
        r#"{{ kind = "command", command = ["sh", "-c", "{script}"] }}"#
    ));
}

#[test]
fn python_scorer_ends_with_killed_trainer() {
    killed_trainer_leaves_nothing(r#"{ kind = "python", file = "score.py" }"#);
}

/// Checks a recipe whose agent is a Python program with this source. Returns the lines of the
/// program in the report, and the exit code.
fn run_check(program: &str, arguments: &[&str]) -> (String, Option<i32>) {
    let workspace = Workspace::new();
    workspace.write("agent.py", program);
    let agent = "[agent]\nkind = \"program\"\ncommand = [\"python3\", \"agent.py\"]\n";
    workspace.replace(
        "recipe.toml",
        "[agent]\ntools = [\"calculator\"]\ntool_prompt = \"compact\"\n",
        agent,
    );
    let scorer = "[reward]\nscorer = { kind = \"program\", from = \"last_line\" }\n";
    workspace.replace("recipe.toml", "[reward]\n", scorer);
    let output =
        workspace.levade().args(["check", "recipe.toml"]).args(arguments).output().unwrap();
    let text = stdout(&output);
    let from = text.lines().position(|line| line.contains(" program ")).expect(&text);
    let line = text
        .lines()
        .skip(from)
        .enumerate()
        .take_while(|(at, line)| *at == 0 || line.starts_with("   "));
    (line.map(|(_, line)| line).collect::<Vec<_>>().join("\n"), output.status.code())
}

/// Returns the source of a Python program that calls the model once and continues with `rest`.
fn program_text(rest: &str) -> String {
    format!(
        "import json, os, sys, time, urllib.request\n\
         body = json.dumps({{'model': os.environ['OPENAI_MODEL'], 'messages': [{{'role': 'user', \
         'content': 'hi'}}]}})\n\
         key = {{'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': \
         'application/json'}}\n\
         url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n\
         reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body.encode(), \
         key)))\n\
         text = reply['choices'][0]['message']['content']\n{rest}\n"
    )
}

#[test]
fn check_starts_program_against_scripted_completion() {
    let (line, code) = run_check(&program_text("print(json.dumps({'reward': len(text)}))"), &[]);
    assert!(line.starts_with('✓') && line.contains("it called the model"), "{line}");
    assert_eq!(code, Some(0), "{line}");
    // Programs that were written for the former name of the project read the variables with the
    // older prefix.
    let older = "ours = {name: value for name, value in os.environ.items() if name.startswith('LEVADE_')}\n\
         assert 'LEVADE_TASK' in ours and all(os.environ['DRESSAGE' + name[6:]] == ours[name] for \
         name in ours)\n\
         print(json.dumps({'reward': len(text)}))";
    let (line, code) = run_check(&program_text(older), &[]);
    assert!(line.starts_with('✓') && line.contains("it called the model"), "{line}");
    assert_eq!(code, Some(0), "{line}");
    // A program that keeps running is stopped.
    let (line, code) = run_check(&program_text("time.sleep(300)"), &[]);
    assert!(line.starts_with('✓'), "{line}");
    assert_eq!(code, Some(0));
    // A program that cannot use the scripted completion gets a note instead of a fault.
    let (line, code) = run_check(&program_text("json.loads(text)"), &[]);
    assert!(line.starts_with('·') && line.contains("JSONDecodeError"), "{line}");
    assert_eq!(code, Some(0));
}

#[test]
fn check_reports_missing_package_and_missing_call() {
    let (line, code) = run_check("import no_package_of_this_name\n", &[]);
    assert!(
        line.starts_with('✗') && line.contains("No module named 'no_package_of_this_name'"),
        "{line}"
    );
    assert!(line.contains("install the missing module") && line.contains("agent.py"), "{line}");
    assert_eq!(code, Some(2));
    let (line, code) = run_check("print('done')\n", &[]);
    assert!(line.starts_with('✗') && line.contains("without calling the model"), "{line}");
    assert_eq!(code, Some(2));
    let (line, code) = run_check("import no_package_of_this_name\n", &["--no-start"]);
    assert!(line.starts_with('✓'), "{line}");
    assert_eq!(code, Some(0));
}

#[test]
fn check_opens_each_tool_once() {
    let workspace = Workspace::new();
    let file = "open('loaded', 'a').write('x')\nclass Shop:\n    def __init__(self): open('made', \
                'a').write('x')\n    def buy(self) -> str: return 'a pen'\n";
    workspace.write("shop.py", file);
    let tools = "[[tool]]\nkind = \"python\"\nname = \"shop\"\nfile = \"shop.py\"\nworkers = 1\n\
                 [[tool]]\nkind = \"command\"\n\
                 name = \"run\"\ndescription = \"It runs.\"\ncommand = [\"true\"]\nfolder = \"nowhere\"\n\n[agent]\n\
                 tools = [\"shop\", \"run\"]";
    workspace.replace("recipe.toml", "[agent]\ntools = [\"calculator\"]", tools);
    let check = |arguments: &[&str]| {
        let output =
            workspace.levade().args(["check", "recipe.toml"]).args(arguments).output().unwrap();
        (stdout(&output), output.status.code())
    };
    let (text, code) = check(&[]);
    assert!(
        text.contains("✗ tool      run: there is no directory") && text.contains("nowhere"),
        "{text}"
    );
    assert_eq!(code, Some(2));
    for file in ["loaded", "made"] {
        std::fs::remove_file(workspace.path(file)).unwrap();
    }
    let (text, code) = check(&["--set", "tool.1.folder=."]);
    assert!(text.contains("✓ tool      shop: buy") && text.contains("✓ prompts"), "{text}");
    assert_eq!(code, Some(0), "{text}");
    for file in ["loaded", "made"] {
        assert_eq!(std::fs::read_to_string(workspace.path(file)).unwrap(), "x", "{file}");
    }
}

/// A fault of a simulated user or of the rules of a game would otherwise appear in the first
/// attempt, which can be hours after the start of a run.
#[test]
fn check_starts_simulated_user_and_game() {
    let check = |workspace: &Workspace| {
        let output = workspace.levade().args(["check", "recipe.toml"]).output().unwrap();
        (stdout(&output), output.status.code())
    };
    let workspace = Workspace::new();
    let user =
        "[user.customer]\nkind = \"python\"\nfile = \"user.py\"\n\n[agent]\nuser = \"customer\"\n";
    workspace.replace("recipe.toml", "[agent]\n", user);
    let class =
        |body: &str| format!("class Customer:\n    def respond(self, messages):\n        {body}\n");
    workspace.write("user.py", class("return 'hello'"));
    let (text, _) = check(&workspace);
    assert!(text.contains("✓ user      customer: its first message is \"hello\""), "{text}");
    workspace.write("user.py", class("raise ValueError('no words')"));
    let (text, code) = check(&workspace);
    assert!(text.contains("✗ user      customer: ") && text.contains("no words"), "{text}");
    assert_eq!(code, Some(2));

    let workspace = Workspace::new();
    let game = "run = { name = 'nim', folder = 'run' }\nmodel = { source = './model' }\n\
                agent = { kind = 'game' }\nreward = { scorer = 'program' }\neval = { tasks = 0 }\n\
                tasks = [{ kind = 'seeds', train = 4 }]\n\
                [game]\nname = 'nim'\ncommand = ['python3', 'game.py']\n\
                agents = { secnd = 'default' }\n";
    workspace.write("recipe.toml", game);
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/nim/game.py");
    workspace.write("game.py", fs::read_to_string(rules).unwrap());
    let (text, _) = check(&workspace);
    assert!(text.contains("✓ game      nim: first is default, second is default"), "{text}");
    assert!(text.contains("· game      `game.agents.secnd` is no seat"), "{text}");
    workspace.write("game.py", "raise SystemExit('no rules')\n");
    let (text, code) = check(&workspace);
    assert!(text.contains("✗ game      ") && text.contains("no rules"), "{text}");
    assert_eq!(code, Some(2));
}
