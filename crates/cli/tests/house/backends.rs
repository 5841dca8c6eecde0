//! Checks that crates use engines, stores and learners through their traits: only `run` names the
//! types.

use std::fs;
use std::path::Path;

use super::calls::modules_containing;
use super::cycles::modules_using;
use super::{CRATES, exists, root};

/// Backend types, each with its crate.
const BACKENDS: [(&str, &str); 5] = [
    ("engine", "Engine"),
    ("store", "Sqlite"),
    ("store_client", "HttpStore"),
    ("store_client", "HttpRollouts"),
    ("remote", "RemoteLearner"),
];

/// Returns `CRATE::MODULE` of each module of `crate_name`, outside of tests, that names the type
/// `name` of the crate `backend`.
fn modules_naming(crates: &Path, crate_name: &str, backend: &str, name: &str) -> Vec<String> {
    let names =
        modules_using(&crates.join(crate_name).join("src"), &format!("levade_{backend}"), name);
    names.into_iter().map(|module| format!("{crate_name}::{module}")).collect()
}

#[test]
fn backend_types_are_named_in_run_only() {
    for (backend, name) in BACKENDS {
        let crate_names = CRATES
            .iter()
            .map(|(crate_name, _)| *crate_name)
            .filter(|crate_name| exists(crate_name) && *crate_name != backend);
        let mut found: Vec<_> = crate_names
            .flat_map(|crate_name| {
                modules_naming(&root().join("crates"), crate_name, backend, name)
            })
            .collect();
        let all = found.len();
        found.retain(|module| !module.starts_with("run::"));
        assert!(found.is_empty(), "{found:?} name `{name}` of `{backend}`; only `run` may");
        // Stores are opened by their location, so `run` names no backend of the store.
        assert_eq!(all > 0, !backend.starts_with("store"), "`run` names `{name}`");
    }
}

#[test]
fn stores_are_opened_by_the_client_crate_only() {
    let mut found = modules_containing(&[".", "open_local", "("]);
    // A server opens the stores that it serves.
    found.retain(|module| module != "store_server::runs");
    assert_eq!(found, ["store_client::lib"]);
}

#[test]
fn naming_finds_imports_and_paths_outside_of_tests() {
    let found = |text: &str| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let src = dir.join("made-up/src");
        fs::create_dir_all(&src).unwrap();
        fs::write(src.join("lib.rs"), text).unwrap();
        !modules_naming(dir, "made-up", "engine", "Engine").is_empty()
    };
    for text in [
        "use levade_engine::Engine;",
        "use levade_engine::{EngineOptions, Engine as Local};",
        "pub use levade_engine::{self, Engine};",
        "fn f() { levade_engine::Engine::start(); }",
        "use levade_engine::*; fn f(engine: Engine) {}",
        "use levade_engine as kernels; fn f(engine: kernels::Engine) {}",
    ] {
        assert!(found(text), "{text}");
    }
    for text in [
        "use levade_engine::EngineOptions;",
        "use base64::Engine as _;",
        "// levade_engine::Engine\nconst NAME: &str = \"levade_engine::Engine\";",
        "#[cfg(test)]\nmod tests { use levade_engine::Engine; }",
    ] {
        assert!(!found(text), "{text}");
    }
}
