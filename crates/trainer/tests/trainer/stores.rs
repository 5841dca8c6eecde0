//! Runs whose store is in memory, or in a file of another name.

use std::time::Duration;

use levade_trainer::{LockedRunDir, StartMode, TrainerError};

use crate::common::{recipe, simulator};
use crate::run::run;

/// The store is at the location in `run.store`. The final weights do not depend on the location.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_location_does_not_change_weights() {
    let root = tempfile::tempdir().unwrap();
    let usual = simulator(Duration::ZERO, 0.0);
    run(&root.path().join("usual"), &usual, StartMode::Fresh, &[]).await.unwrap();
    let elsewhere = root.path().join("elsewhere.db");
    let absolute = format!("run.store='sqlite:{}'", elsewhere.display());
    for (name, store) in [
        ("memory", "run.store='memory:'"),
        ("relative", "run.store='sqlite:records.db'"),
        ("absolute", absolute.as_str()),
    ] {
        let dir = root.path().join(name);
        let policy = simulator(Duration::ZERO, 0.0);
        run(&dir, &policy, StartMode::Fresh, &[store]).await.unwrap();
        assert_eq!(policy.weights(), usual.weights(), "{name}");
        assert!(!dir.join("run.db").exists());
        assert_eq!(dir.join("records.db").is_file(), name == "relative");
    }
    assert!(elsewhere.is_file());
    // An existing store is not overwritten, and a run resumes only with its own store.
    let again = root.path().join("again");
    let policy = simulator(Duration::ZERO, 0.0);
    let error = run(&again, &policy, StartMode::Fresh, &[&absolute]).await.unwrap_err();
    assert!(matches!(error, TrainerError::StoreExists(_)) && error.is_user_error(), "{error}");
    let error =
        run(&root.path().join("absolute"), &policy, StartMode::Resume, &[]).await.unwrap_err();
    assert!(error.to_string().contains("`run.store` is not set now and was"), "{error}");
    run(&root.path().join("absolute"), &policy, StartMode::Resume, &[&absolute]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_run_cannot_be_resumed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let memory = ["run.store='memory:'"];
    run(&dir, &policy, StartMode::Fresh, &memory).await.unwrap();
    let keys = recipe(&dir, &memory).run;
    for error in [
        LockedRunDir::check(&keys, StartMode::Resume).unwrap_err(),
        run(&dir, &policy, StartMode::Resume, &memory).await.unwrap_err(),
    ] {
        assert!(
            error.is_user_error() && error.to_string().contains("kept its store in memory"),
            "{error}"
        );
    }
}
