//! Tests that run a tiny model through the public API.
#![allow(clippy::unwrap_used)] // clippy sees only what is inside #[test], not the helpers beside it

#[path = "../examples/tiny/mod.rs"]
mod tiny;

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use levade_recipe::Recipe;
use levade_run::dir::{RECIPE, RunDir};
use levade_run::{EVENTS, Event, RecordedEvent, Run, resume, start};
use levade_trainer::{Event as Training, RunEnd};

/// Reads all events of a run, and asks the run to stop after `steps` steps. Returns the events and
/// how the run ended.
async fn watch(mut run: Run, steps: usize) -> (Vec<Event>, RunEnd) {
    let mut events = Vec::new();
    while let Some(event) = run.next().await {
        events.push(event);
        let is_step = |event: &&Event| matches!(event, Event::Training(Training::Step { .. }));
        if events.iter().filter(is_step).count() == steps {
            run.stop();
        }
    }
    (events, run.end().await.unwrap().unwrap())
}

/// Waits until a run has finished, and returns its weights.
async fn finish(run: Run) -> Vec<u8> {
    let RunEnd::Finished(summary) = run.end().await.unwrap().unwrap() else {
        panic!("the run was stopped")
    };
    weights(&summary.checkpoint.unwrap())
}

fn weights(checkpoint: &Path) -> Vec<u8> {
    fs::read(checkpoint.join("model.safetensors")).unwrap()
}

fn recorded(recipe: &Recipe) -> Vec<Event> {
    let text = fs::read_to_string(recipe.run.folder.join(EVENTS)).unwrap();
    let line = |line: &str| serde_json::from_str::<RecordedEvent>(line).unwrap().event;
    text.lines().map(line).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resumed_run_ends_with_same_weights() {
    let root = tempfile::tempdir().unwrap();
    let full_weights =
        finish(start(tiny::recipe(root.path(), "whole", &[]).unwrap()).unwrap()).await;

    let recipe = tiny::recipe(root.path(), "stopped", &[]).unwrap();
    let (events, ended) = watch(start(recipe.clone()).unwrap(), 2).await;
    let RunEnd::Stopped { done: stopped_after, steps: 5, .. } = ended else { panic!("{ended:?}") };
    // The request reaches the run while its third step samples, or soon after.
    assert!((2..5).contains(&stopped_after), "{stopped_after}");
    let is_stop =
        |event: &Event| matches!(event, Event::Stopped { done, .. } if *done == stopped_after);
    assert!(events.last().is_some_and(is_stop), "{:?}", events.last());
    assert!(
        events.iter().any(|event| matches!(event, Event::Setup { part, .. } if part == "memory"))
    );
    let (more, ended) = watch(resume(recipe.clone()).unwrap(), usize::MAX).await;
    let RunEnd::Finished(summary) = ended else { panic!("{ended:?}") };
    assert_eq!(weights(&summary.checkpoint.unwrap()), full_weights);
    let is_start = |event: &Event| matches!(event, Event::Training(Training::Started { done, .. }) if *done == stopped_after);
    assert!(more.iter().any(is_start));

    // The file contains the events of both runs, in order, except progress events.
    let expected_events: Vec<Event> =
        events.into_iter().chain(more).filter(|event| !event.is_progress()).collect();
    assert_eq!(recorded(&recipe), expected_events);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_is_at_location_in_recipe() {
    let root = tempfile::tempdir().unwrap();
    let stores = ["", "sqlite:records.db", "memory:"];
    let mut ends = Vec::new();
    for (name, store) in ["usual", "named", "memory"].into_iter().zip(stores) {
        let store = format!("run.store='{store}'");
        let recipe = tiny::recipe(root.path(), name, &[&store, "phase.1.steps=1"]).unwrap();
        ends.push(finish(start(recipe.clone()).unwrap()).await);
        let dir = RunDir::open(&recipe.run.folder).unwrap();
        let again = resume(recipe);
        if name == "memory" {
            for error in [dir.open_store().await.err().unwrap(), again.err().unwrap()] {
                assert!(error.to_string().contains("kept its store in memory"), "{error}");
            }
        } else {
            assert!(!dir.open_store().await.unwrap().planned_steps().await.unwrap().is_empty());
            again.unwrap().end().await.unwrap();
        }
    }
    assert_eq!(ends[0], ends[1]);
    assert_eq!(ends[0], ends[2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_directory_and_missing_model_are_errors() {
    let root = tempfile::tempdir().unwrap();
    let recipe = tiny::recipe(root.path(), "run", &["model.source='./nothing-there'"]).unwrap();
    assert!(resume(recipe.clone()).err().unwrap().to_string().contains("holds no run to resume"));
    let mut run = start(recipe).unwrap();
    let mut last = None;
    while let Some(event) = run.next().await {
        last = Some(event);
    }
    let error = run.end().await.unwrap_err();
    let Some(Event::Failed { error: expected_events }) = last else { panic!("{last:?}") };
    assert_eq!(expected_events, format!("{error:#}"));
    assert!(expected_events.contains("nothing-there"), "{expected_events}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_ends_the_wait_for_a_store() {
    let root = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = format!("run.store='http://{}'", listener.local_addr().unwrap());
    drop(listener);
    let recipe = tiny::recipe(root.path(), "waiting", &[&store]).unwrap();
    let mut run = start(recipe.clone()).unwrap();
    // The store is opened after the recipe is written.
    let file = recipe.run.folder.join(RECIPE);
    let started = Instant::now();
    while !file.exists() {
        assert!(started.elapsed() < Duration::from_secs(120), "the run does not start");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    run.stop();
    let mut last = None;
    let read = async {
        while let Some(event) = run.next().await {
            last = Some(event);
        }
    };
    tokio::time::timeout(Duration::from_secs(60), read).await.unwrap();
    assert!(run.end().await.unwrap().is_none());
    assert_eq!(last, Some(Event::StoppedBeforeStart));
    assert!(!file.exists(), "the directory contains a run that never started");
}
