//! Checks that models are called in one crate only.

use super::cycles::modules;
use super::{CRATES, exists, root};

/// Returns `CRATE::MODULE` of each module, outside of tests, that contains these tokens
/// consecutively.
pub fn modules_containing(pattern: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (crate_name, _) in CRATES.iter().filter(|(crate_name, _)| exists(crate_name)) {
        for (module, tokens) in modules(&root().join("crates").join(crate_name).join("src")) {
            if tokens.windows(pattern.len()).any(|window| window == pattern) {
                found.push(format!("{crate_name}::{module}"));
            }
        }
    }
    found
}

#[test]
fn only_call_health_probes_and_move_scores_call_samplers() {
    let mut found = modules_containing(&[".", "sample", "("]);
    // In these crates, `sample` is also a method of samplers, routers and the engine itself.
    found.retain(|module| {
        !["policy::", "engine::", "remote::"]
            .iter()
            .any(|crate_name| module.starts_with(crate_name))
    });
    assert_eq!(found, ["agent::game::probabilities", "gateway::info", "call::generate"]);
}

#[test]
fn chat_apis_are_called_by_call_only() {
    assert_eq!(modules_containing(&[".", "respond", "("]), ["call::relay"]);
}

#[test]
fn gateway_methods_are_in_one_file() {
    assert_eq!(modules_containing(&["impl", "Gateway", "{"]), ["gateway::gateway"]);
}
