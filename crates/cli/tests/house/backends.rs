//! Checks that crates use engines, stores and learners through their traits: only `run` names the
//! types.

use std::fs;
use std::path::Path;

use super::circles::names;
use super::{ROOMS, exists, root};

/// Backend types, each with its crate.
const BACKENDS: [(&str, &str); 3] = [("engine", "Engine"), ("store", "Sqlite"), ("remote", "RemoteLearner")];

/// Returns `CRATE::MODULE` of each module of `room`, outside of tests, that names the type `name` of
/// the crate `of`.
fn naming(crates: &Path, room: &str, of: &str, name: &str) -> Vec<String> {
    let names = names(&crates.join(room).join("src"), &format!("levade_{of}"), name);
    names.into_iter().map(|module| format!("{room}::{module}")).collect()
}

#[test]
fn backend_types_are_named_in_run_only() {
    for (of, name) in BACKENDS {
        let rooms = ROOMS.iter().map(|(room, _)| *room).filter(|room| exists(room) && *room != of);
        let mut found: Vec<_> =
            rooms.flat_map(|room| naming(&root().join("crates"), room, of, name)).collect();
        let all = found.len();
        found.retain(|module| !module.starts_with("run::"));
        assert!(found.is_empty(), "{found:?} name `{name}` of `{of}`; only `run` may");
        // Stores are opened by their location, so `run` names no backend of the store.
        assert_eq!(all > 0, of != "store", "`run` names `{name}`");
    }
}

#[test]
fn naming_finds_imports_and_paths_outside_of_tests() {
    let found = |text: &str| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let src = dir.join("made-up/src");
        fs::create_dir_all(&src).unwrap();
        fs::write(src.join("lib.rs"), text).unwrap();
        !naming(dir, "made-up", "engine", "Engine").is_empty()
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
