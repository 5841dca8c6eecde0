//! The rules of the house that a compiler does not know: files stay short, and a room knows only the rooms below it.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

use std::fs;
use std::path::{Path, PathBuf};

/// Longer files are hard to read in one go.
const MOST_LINES: usize = 600;

/// From the top down, the binary first.
const ROOMS: [&str; 11] =
    ["cli", "trainer", "agent", "reward", "store", "engine", "text", "model", "policy", "rl", "tree"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// Source files under a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy();
        // What tools leave behind is not ours.
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
fn no_file_is_too_long() {
    let mut found = Vec::new();
    sources(&root(), &mut found);
    assert!(found.iter().any(|path| path.ends_with("cli/src/main.rs")), "the sources were not found");
    let lines = |path: &PathBuf| fs::read_to_string(path).unwrap().lines().count();
    let long: Vec<_> =
        found.iter().map(|path| (path, lines(path))).filter(|(_, lines)| *lines > MOST_LINES).collect();
    assert!(
        long.is_empty(),
        "more than {MOST_LINES} lines; take them apart by what they are about: {long:?}"
    );
}

#[test]
fn a_room_knows_only_the_rooms_below_it() {
    for (place, room) in ROOMS.iter().enumerate() {
        let manifest = fs::read_to_string(root().join("crates").join(room).join("Cargo.toml")).unwrap();
        // Tests may borrow from anywhere.
        let (_, dependencies) = manifest.split_once("\n[dependencies]\n").unwrap();
        let dependencies = dependencies.split("\n[").next().unwrap();
        for line in dependencies.lines() {
            let Some(rest) = line.strip_prefix("dressage-") else { continue };
            let known = rest.split(['.', ' ', '=']).next().unwrap();
            let at = ROOMS.iter().position(|room| *room == known);
            assert!(at.is_some_and(|at| at > place), "{room} knows {known}, which is not below it");
        }
    }
    let rooms = fs::read_dir(root().join("crates")).unwrap().count();
    assert_eq!(rooms, ROOMS.len(), "a room is missing from the list above");
}
