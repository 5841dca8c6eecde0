//! Checks that models are called in one crate only.

use super::circles::modules;
use super::{ROOMS, exists, root};

/// Returns `CRATE::MODULE` of each module, outside of tests, that contains these tokens
/// consecutively.
fn containing(pattern: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (room, _) in ROOMS.iter().filter(|(room, _)| exists(room)) {
        for (module, tokens) in modules(&root().join("crates").join(room).join("src")) {
            if tokens.windows(pattern.len()).any(|window| window == pattern) {
                found.push(format!("{room}::{module}"));
            }
        }
    }
    found
}

#[test]
fn samplers_are_called_by_call_and_the_health_probe_only() {
    let mut found = containing(&[".", "sample", "("]);
    // In these crates, `sample` is also a method of samplers, routers and the engine itself.
    found.retain(|module| !["policy::", "engine::", "remote::"].iter().any(|room| module.starts_with(room)));
    assert_eq!(found, ["gateway::info", "call::generate"]);
}

#[test]
fn chat_apis_are_called_by_call_only() {
    assert_eq!(containing(&[".", "respond", "("]), ["call::relay"]);
}

#[test]
fn gateway_methods_are_in_one_file() {
    assert_eq!(containing(&["impl", "Gateway", "{"]), ["gateway::gateway"]);
}
