//! Checks rules of the workspace that the compiler cannot check: files stay short and have no
//! circular dependencies, comments fit within a line width, and a crate depends only on the crates
//! that it may.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

mod backends;
mod calls;
mod comment_width;
mod cycles;
mod patches;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cycles::Cycle;

/// Maximum number of lines of a source file. Longer files are hard to read in one sitting.
const MAX_LINES: usize = 600;

/// Crates in order from top to bottom, each with the crates that it may depend on. An entry may
/// precede the creation of its crate.
const CRATES: [(&str, &[&str]); 32] = [
    (
        "cli",
        &[
            "plan",
            "launch",
            "cluster",
            "run",
            "trainer",
            "recipe",
            "export",
            "agent",
            "tools",
            "tasks",
            "game",
            "traces",
            "gateway",
            "call",
            "process",
            "sandbox",
            "store_client",
            "store_server",
            "store",
            "engine",
            "reward",
            "search",
            "conversation",
            "text",
            "model",
            "http",
            "policy",
            "tree",
        ],
    ),
    ("plan", &["run", "recipe", "model", "policy"]),
    ("launch", &["run", "recipe", "process", "http", "policy"]),
    ("cluster", &["run", "policy"]),
    (
        "run",
        &[
            "trainer",
            "recipe",
            "agent",
            "tools",
            "gateway",
            "call",
            "process",
            "sandbox",
            "store_client",
            "store",
            "engine",
            "remote",
            "reward",
            "text",
            "model",
            "policy",
            "tree",
        ],
    ),
    (
        "trainer",
        &[
            "recipe",
            "agent",
            "tools",
            "tasks",
            "traces",
            "process",
            "reward",
            "store_client",
            "store",
            "conversation",
            "text",
            "policy",
            "rl",
            "tree",
        ],
    ),
    (
        "recipe",
        &[
            "agent",
            "tools",
            "tasks",
            "reward",
            "store",
            "conversation",
            "text",
            "policy",
            "rl",
            "tree",
        ],
    ),
    ("export", &["call", "store", "text", "tree"]),
    (
        "agent",
        &[
            "tools",
            "tasks",
            "game",
            "gateway",
            "call",
            "process",
            "reward",
            "store",
            "conversation",
            "text",
            "policy",
            "tree",
        ],
    ),
    ("traces", &["call", "store", "text", "policy", "tree"]),
    ("gateway", &["call", "conversation", "text", "http", "policy", "tree"]),
    ("call", &["conversation", "text", "policy", "tree"]),
    ("tools", &["tasks", "process", "sandbox", "search", "text", "http", "policy", "tree"]),
    ("sandbox", &["http", "policy"]),
    ("tasks", &["reward", "text", "policy"]),
    ("game", &["policy"]),
    ("reward", &["process", "policy", "tree"]),
    ("process", &["policy"]),
    ("search", &["http", "policy"]),
    ("store_client", &["store_mongo", "store", "http", "policy", "tree"]),
    ("store_mongo", &["store", "policy", "tree"]),
    ("store_server", &["store", "http"]),
    ("store", &["policy", "tree"]),
    ("engine", &["model", "policy", "rl", "tree"]),
    ("remote", &["text", "http", "model", "policy", "rl", "tree"]),
    ("conversation", &["text", "policy", "tree"]),
    ("text", &["model", "policy"]),
    ("model", &["policy"]),
    ("http", &[]),
    ("policy", &["rl", "tree"]),
    ("rl", &["tree"]),
    ("tree", &[]),
];

/// Files of a crate that may depend on each other in a circle. ARCHITECTURE.md explains the
/// reasons.
const KNOWN_CYCLES: [(&str, &[&str]); 0] = [];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// Adds the source files (Rust, Python, shell) under a directory to `found`.
fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy();
        // Skip build outputs, runs and hidden files, which are not sources.
        if name.starts_with('.') || ["target", "runs", "__pycache__"].contains(&&*name) {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if path
            .extension()
            .is_some_and(|extension| ["rs", "py", "sh"].iter().any(|known| extension == *known))
        {
            found.push(path);
        }
    }
}

#[test]
fn source_files_have_at_most_max_lines() {
    let mut found = Vec::new();
    sources(&root(), &mut found);
    assert!(
        found.iter().any(|path| path.ends_with("cli/src/main.rs")),
        "the sources were not found"
    );
    let lines = |path: &PathBuf| fs::read_to_string(path).unwrap().lines().count();
    let long: Vec<_> = found
        .iter()
        .map(|path| (path, lines(path)))
        .filter(|(_, lines)| *lines > MAX_LINES)
        .collect();
    assert!(
        long.is_empty(),
        "more than {MAX_LINES} lines; take them apart by what they are about: {long:?}"
    );
}

/// Returns the crates that a manifest names as dependencies, without those of tests, which may use
/// any crate.
fn parse_dependencies(manifest: &str) -> BTreeSet<String> {
    let name = |line: &str| {
        let name = line.strip_prefix("levade-")?.split(['.', ' ', '=']).next()?;
        // The directory of a crate has the name of its library.
        Some(name.replace('-', "_"))
    };
    let mut found = BTreeSet::new();
    let mut lists = false;
    for line in manifest.lines() {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            let (kind, table) = section.rsplit_once('.').unwrap_or(("", section));
            lists = table == "dependencies" || table == "build-dependencies";
            if kind == "dependencies" {
                found.extend(name(table));
            }
        } else if lists {
            found.extend(name(line));
        }
    }
    found
}

fn exists(crate_name: &str) -> bool {
    root().join("crates").join(crate_name).exists()
}

#[test]
fn crates_depend_only_on_allowed_crates() {
    for crate_name in fs::read_dir(root().join("crates")).unwrap() {
        let crate_name = crate_name.unwrap().file_name().into_string().unwrap();
        let Some((_, allowed_crates)) = CRATES.iter().find(|(name, _)| *name == crate_name) else {
            panic!("`{crate_name}` is missing from the list of rooms in {}", file!())
        };
        let manifest =
            fs::read_to_string(root().join("crates").join(&crate_name).join("Cargo.toml")).unwrap();
        for dependency in parse_dependencies(&manifest) {
            let allowed = allowed_crates.contains(&dependency.as_str());
            assert!(
                allowed,
                "`{crate_name}` knows `{dependency}`, but may know only {allowed_crates:?} ({})",
                file!()
            );
        }
    }
    for (index, (crate_name, allowed_crates)) in CRATES.iter().enumerate() {
        for dependency in *allowed_crates {
            let below = CRATES[index..].iter().any(|(name, _)| name == dependency);
            assert!(
                below,
                "the list lets `{crate_name}` know `{dependency}`, which is not below it"
            );
        }
    }
}

#[test]
fn architecture_page_lists_same_dependencies() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let quoted =
        |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
    for (crate_name, allowed_crates) in CRATES.iter().filter(|(crate_name, _)| exists(crate_name)) {
        let row = page
            .lines()
            .find_map(|line| line.strip_prefix(&format!("| `{crate_name}` | ")))
            .unwrap_or_default();
        let listed: BTreeSet<String> =
            quoted(row.split('|').next().unwrap()).into_iter().filter(|r| exists(r)).collect();
        let allowed_crates = allowed_crates
            .iter()
            .map(|crate_name| (*crate_name).to_owned())
            .filter(|r| exists(r))
            .collect();
        assert_eq!(
            listed,
            allowed_crates,
            "which rooms `{crate_name}` may know, in ARCHITECTURE.md and in {}",
            file!()
        );
    }
}

#[test]
fn known_parses_all_forms_of_dependencies() {
    let manifest = "[package]\nname = \"levade-x\"\n[dependencies]\n\
        levade-a.workspace = true\nserde = \"1\"\n\
        levade-b = { path = \"../b\" }\n[target.'cfg(unix)'.dependencies]\n\
        levade-c.workspace = true\n\
        [dependencies.levade-d]\nworkspace = true\n[dev-dependencies]\nlevade-e.workspace = true\n";
    assert_eq!(parse_dependencies(manifest).into_iter().collect::<Vec<_>>(), ["a", "b", "c", "d"]);
}

#[test]
fn files_of_crates_have_no_circular_dependencies() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut met = BTreeSet::new();
    for (crate_name, _) in CRATES.iter().filter(|(crate_name, _)| exists(crate_name)) {
        for Cycle { files, uses } in
            cycles::find_cycles(&root().join("crates").join(crate_name).join("src"))
        {
            let known = KNOWN_CYCLES.iter().position(|(crate_of_cycle, known)| {
                crate_of_cycle == crate_name
                    && files.iter().all(|file| known.contains(&file.as_str()))
            });
            let Some(known) = known else {
                panic!(
                    "`{crate_name}` has a circle among the files {files:?}:\n  {}",
                    uses.join("\n  ")
                )
            };
            met.insert(known);
        }
    }
    for (index, (crate_name, files)) in KNOWN_CYCLES.iter().enumerate() {
        assert!(
            met.contains(&index),
            "the circle of `{crate_name}` among {files:?} is gone: take it off the list"
        );
        let named = |line: &str| files.iter().all(|file| line.contains(&format!("`{file}`")));
        let explained = page
            .lines()
            .any(|line| line.starts_with(&format!("- `{crate_name}`: ")) && named(line));
        assert!(
            explained,
            "ARCHITECTURE.md does not explain the circle of `{crate_name}` among {files:?}"
        );
    }
}
