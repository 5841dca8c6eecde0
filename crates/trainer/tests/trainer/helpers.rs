//! Runs whose tools call other agents. Their conversations are branches of the attempts, and are
//! trained if the recipe sets `train`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use levade_process::Supervisor;
use levade_recipe::Recipe;
use levade_store::testing::wait;
use levade_store::{Attempt, Sqlite, Store};
use levade_text::testing::tiny_chat;
use levade_trainer::{
    AgentSpec, RunEnd, RunParts, StartMode, StopFlag, Toolboxes, Trainer, replay,
};
use levade_tree::Purpose;

use crate::common::{parts, recipe, simulator, trained};

/// An agent of the same policy summarizes results of the calculator of two characters or more.
const CONDENSE: [&str; 2] = [
    "tool=[{kind='calculator', summarize={agent='browser', above=1}}]",
    "agent.browser={tools=[], max_tokens=12}",
];

fn parts_of(recipe: &Recipe, policy: &Arc<levade_policy::Simulator>) -> RunParts {
    let mut parts = parts(policy, Duration::ZERO);
    let toolboxes = Toolboxes::new(&recipe.tool, Supervisor::default());
    let chat = Arc::new(tiny_chat().unwrap());
    parts.agents = recipe
        .agents()
        .into_iter()
        .map(|(name, keys)| {
            AgentSpec::new(name, chat.clone(), toolboxes.tools_for(keys, Some(&chat)).unwrap())
        })
        .collect();
    parts
}

/// Runs to the end. Returns the final weights and all training attempts.
async fn run(dir: &Path, overrides: &[&str]) -> (Vec<f32>, Vec<Attempt>) {
    let recipe = recipe(dir, &[&CONDENSE[..], overrides].concat());
    let policy = simulator(Duration::ZERO, 0.0);
    let parts = parts_of(&recipe, &policy);
    let mut trainer = Trainer::new(recipe, parts, StartMode::Fresh).await.unwrap();
    let ended = trainer.run(&mut (), &StopFlag::default()).await.unwrap();
    assert!(matches!(ended, RunEnd::Finished(_)), "{ended:?}");
    drop(trainer);
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let all = wait(store.summaries(Purpose::Train)).unwrap();
    let attempts =
        all.iter().map(|summary| wait(store.attempt(&summary.id)).unwrap().unwrap()).collect();
    (policy.weights(), attempts)
}

fn has_browser(attempt: &Attempt) -> bool {
    attempt.trajectory.segments().iter().any(|segment| segment.agent == "browser")
}

/// Returns the number of planned sequences that end with a segment of the agent "browser".
fn trained_on(dir: &Path, attempts: &[Attempt]) -> usize {
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let mut found = 0;
    for (phase, step) in wait(store.planned_steps()).unwrap() {
        let plan = wait(store.step_plan(phase, step)).unwrap().unwrap();
        found += plan
            .sequences()
            .filter(|path| {
                let attempt = attempts.iter().find(|attempt| attempt.id == path.attempt);
                let segments = attempt.map(|attempt| attempt.trajectory.segments());
                segments.is_some_and(|segments| segments[path.leaf.0 as usize].agent == "browser")
            })
            .count();
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn helper_agents_are_recorded_and_trained_if_configured() {
    let root = tempfile::tempdir().unwrap();
    let one = root.path().join("one");
    let two = root.path().join("two");
    let silent = root.path().join("silent");
    let (weights, attempts) = run(&one, &[]).await;
    let helped: Vec<&Attempt> = attempts.iter().filter(|attempt| has_browser(attempt)).collect();
    assert!(!helped.is_empty(), "no answer was condensed in {} attempts", attempts.len());
    for attempt in &helped {
        // Each turn of an attempt belongs to one agent.
        let mut by_turn: Vec<(u32, &str)> =
            attempt.trajectory.segments().iter().map(|s| (s.turn, s.agent.as_str())).collect();
        by_turn.sort_unstable();
        by_turn.dedup();
        assert!(by_turn.windows(2).all(|pair| pair[0].0 != pair[1].0), "{by_turn:?}");
    }
    assert!(trained_on(&one, &attempts) > 0);
    // A run is a function of its recipe, whatever ran concurrently.
    let (again, same) = run(&two, &["engine.concurrency=1"]).await;
    assert_eq!(again, weights);
    assert_eq!(same.len(), attempts.len());
    let fresh = vec![trained("default", &simulator(Duration::ZERO, 0.0))];
    let recipe = Recipe::load(&one.join("recipe.toml"), &[]).unwrap();
    let mut differs = 0;
    replay(&recipe, &one, fresh, &mut (), &mut |compared| {
        differs += usize::from(compared.differs.is_some())
    })
    .await
    .unwrap();
    assert_eq!(differs, 0);
    // An untrained helper is still recorded.
    let (other, attempts) = run(&silent, &["agent.browser.train=false"]).await;
    assert_ne!(other, weights);
    assert!(attempts.iter().any(has_browser));
    assert_eq!(trained_on(&silent, &attempts), 0);
}
