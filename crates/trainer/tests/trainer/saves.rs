//! Tests of failing and damaged checkpoints.

use super::*;

/// A simulator with a hook that runs before each save.
struct HookedSave<F> {
    simulator: Arc<Simulator>,
    hook: F,
    /// Total time of device handoffs, in seconds.
    handed_over: Arc<AtomicU32>,
}

#[async_trait]
impl<F: Fn(&Path) -> Result<(), PolicyError> + Send + Sync> Learner for HookedSave<F> {
    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.simulator.logprobs(batch).await
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.simulator.forward_backward(batch, loss).await
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.simulator.optim_step(params).await
    }

    async fn save(&self, dir: &Path, with_optimizer: bool) -> Result<Manifest, PolicyError> {
        (self.hook)(dir)?;
        self.simulator.save(dir, with_optimizer).await
    }

    async fn load(&self, dir: &Path, with_optimizer: bool) -> Result<(), PolicyError> {
        self.simulator.load(dir, with_optimizer).await
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        self.simulator.publish(version).await
    }

    fn handoff_time(&self) -> Option<Duration> {
        Some(Duration::from_secs(self.handed_over.load(Ordering::SeqCst).into()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replay_matches_if_learner_writes_other_tokenizer() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let with_tokenizer = || {
        let policy = simulator(Duration::ZERO, 0.0);
        let mut parts = parts(&policy, Duration::ZERO);
        let policy_learner = parts.policies[0].learner.as_mut().unwrap();
        policy_learner.learner = Arc::new(HookedSave {
            simulator: policy,
            hook: |dir: &Path| {
                std::fs::write(dir.join("tokenizer.json"), "of the learner").unwrap();
                Ok(())
            },
            handed_over: Arc::default(),
        });
        policy_learner.extra_files =
            Arc::new(|dir: &Path| std::fs::write(dir.join("tokenizer.json"), "of the model"));
        parts
    };
    let recipe = recipe(&dir, &[]);
    let mut trainer =
        Trainer::new(recipe.clone(), with_tokenizer(), StartMode::Fresh).await.unwrap();
    trainer.run(&mut (), &StopFlag::default()).await.unwrap();
    drop(trainer);
    let replayed = async || {
        let mut compared = Vec::new();
        let policies = with_tokenizer().policies;
        replay(&recipe, &dir, policies, &mut (), &mut |one| compared.push(one)).await.unwrap();
        compared
    };
    let compared = replayed().await;
    assert!(
        compared.len() >= 2 && compared.iter().all(|one| one.differs.is_none()),
        "{compared:?}"
    );
    // Changed weights are still detected.
    let changed = compared[0].checkpoint.join("simulator.weights");
    let mut bytes = std::fs::read(&changed).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&changed, bytes).unwrap();
    assert_eq!(replayed().await[0].differs.as_deref(), Some(&*changed.display().to_string()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_preserves_earlier_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let mut parts = parts(&policy, Duration::ZERO);
    // The disk is full at the third checkpoint, after a part of it is written. Each earlier
    // checkpoint adds a minute of device handoffs.
    let minutes = Arc::<AtomicU32>::default();
    let handed_over = Arc::clone(&minutes);
    let hook = move |dir: &Path| {
        if minutes.fetch_add(60, Ordering::SeqCst) < 120 {
            return Ok(());
        }
        std::fs::write(dir.join("simulator.weights"), "half").unwrap();
        Err(PolicyError::Storage("cannot write simulator.weights: no space left on device".into()))
    };
    if let Some(policy_learner) = &mut parts.policies[0].learner {
        policy_learner.learner =
            Arc::new(HookedSave { simulator: policy.clone(), hook, handed_over });
    }
    let mut trainer = Trainer::new(recipe(&dir, &[]), parts, StartMode::Fresh).await.unwrap();
    let error = trainer.run(&mut (), &StopFlag::default()).await.unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("no space left"), "{error}");
    drop(trainer);
    let mut names: Vec<_> = std::fs::read_dir(dir.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    // The third checkpoint, of the best weights so far, does not exist.
    assert_eq!(names, ["best", "step-000002", "step-000003"]);
    // The step after a checkpoint reports the time of device handoffs.
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let turns = |line: &str| {
        serde_json::from_str::<serde_json::Value>(line).unwrap()["timing_s/device_handoff"].as_f64()
    };
    let turns: Vec<f64> = text.lines().filter_map(turns).collect();
    assert_eq!(turns[..3], [0.0, 0.0, 60.0]);

    let fresh = simulator(Duration::ZERO, 0.0);
    run(&dir, &fresh, StartMode::Resume, &[]).await.unwrap();
    let uninterrupted = simulator(Duration::ZERO, 0.0);
    run(&root.path().join("whole"), &uninterrupted, StartMode::Fresh, &[]).await.unwrap();
    assert_eq!(fresh.weights(), uninterrupted.weights());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_checkpoint_is_skipped_on_resume() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    run(&dir, &policy, StartMode::Fresh, &[]).await.unwrap();
    let lines = metrics(&dir);
    let last = crate::common::last_checkpoint(&dir);
    std::fs::write(last.join("simulator.optimiser"), "cut").unwrap();

    let fresh = simulator(Duration::ZERO, 0.0);
    let mut trainer =
        Trainer::new(recipe(&dir, &[]), parts(&fresh, Duration::ZERO), StartMode::Resume)
            .await
            .unwrap();
    let mut notes = Notes::default();
    trainer.run(&mut notes, &StopFlag::default()).await.unwrap();
    assert!(notes.0[0].contains("step-000011 is incomplete"), "{:?}", notes.0);
    assert_eq!(fresh.weights(), policy.weights());
    assert_eq!(metrics(&dir), lines);
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    assert_eq!(wait(store.evals()).unwrap().last().unwrap().0, EvalKey { phase: 1, step: 5 });
}

/// The future of a run can be sent to another thread.
#[test]
fn trainer_futures_are_send() {
    fn send<T: Send>(_: impl FnOnce(&'static mut Trainer, &'static StopFlag) -> T) {}
    send(|trainer, stop| trainer.run(Box::leak(Box::new(())), stop));
    fn send_parts<T: Send>(_: impl FnOnce(&Path) -> T) {}
    send_parts(|dir| {
        Trainer::new(
            recipe(dir, &[]),
            parts(&simulator(Duration::ZERO, 0.0), Duration::ZERO),
            StartMode::Fresh,
        )
    });
}
