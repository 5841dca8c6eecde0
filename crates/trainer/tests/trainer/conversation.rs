//! Complete runs over templates that render the history differently than it was recorded. Every
//! attempt trains on exactly the tokens that were sampled.

use std::sync::Arc;
use std::time::Duration;

use levade_store::testing::wait;
use levade_store::{Sqlite, Status, Store};
use levade_text::Chat;
use levade_text::testing::{ALWAYS_THINKS, THOUGHTFUL, tiny_tokenizer};
use levade_trainer::{ChatBackend, StartMode, StopFlag, Trainer, chat_options};
use levade_tree::Purpose;
use serde_json::Value;

use crate::common::{metrics, parts, recipe, simulator};

/// Runs two phases with a template. Returns the numbers of drifts and of forks.
async fn run(template: &str, overrides: &[&str]) -> (f64, f64) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let overrides =
        [&["phase.1.steps=2", "agent.max_tokens=300", "eval.every=0"], overrides].concat();
    let recipe = recipe(&dir, &overrides);
    let options = chat_options(&recipe.agent, None);
    let chat = Arc::new(Chat::new(tiny_tokenizer().unwrap(), Some(template), options).unwrap());
    let mut parts = parts(&policy, Duration::ZERO);
    parts.agents[0].backends = vec![ChatBackend::Policy(chat)];
    Trainer::new(recipe, parts, StartMode::Fresh)
        .await
        .unwrap()
        .run(&mut (), &StopFlag::default())
        .await
        .unwrap();

    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let attempts = wait(store.summaries(Purpose::Train)).unwrap();
    assert_eq!(attempts.len(), 2 * 3 * 4);
    assert!(
        attempts
            .iter()
            .all(|attempt| attempt.status == Status::Completed && attempt.reward.is_some())
    );
    let lines = metrics(&dir);
    let steps: Vec<&Value> =
        lines.iter().filter(|line| line.get("conversation/drift").is_some()).collect();
    assert_eq!(steps.len(), 2);
    for step in &steps {
        assert_eq!(step["training/logprob_mismatch"], 0.0, "{step}");
        assert_eq!(step["response/aborted_ratio"], 0.0, "{step}");
        assert!(step["num_turns/max"].as_f64() >= Some(2.0), "{step}");
    }
    ["conversation/drift", "conversation/forks"]
        .map(|name| steps.iter().map(|step| step[name].as_f64().unwrap()).sum::<f64>())
        .into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_reasoning_causes_drift_or_forks() {
    let off = "agent.variables.enable_thinking=false";
    let (drift, forks) = run(THOUGHTFUL, &[off]).await;
    assert!(drift > 0.0 && forks == 0.0, "{drift} {forks}");
    let (drift, forks) = run(THOUGHTFUL, &[off, "agent.history=\"template\""]).await;
    assert!(drift == 0.0 && forks > 0.0, "{drift} {forks}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reasoning_kept_until_next_question_trains() {
    run(THOUGHTFUL, &["agent.variables.enable_thinking=true"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_reasoning_causes_drift_or_forks() {
    let (drift, forks) = run(ALWAYS_THINKS, &[]).await;
    assert!(drift > 0.0 && forks == 0.0, "{drift} {forks}");
    let (drift, forks) = run(ALWAYS_THINKS, &["agent.history=\"template\""]).await;
    assert!(drift == 0.0 && forks > 0.0, "{drift} {forks}");
}
