//! Fakes of a learner and colocated servers, with checks of device ownership.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use levade_policy::{
    Completion, ForwardBackward, Learner, Manifest, MicroBatchPlan, OptimParams, OptimReport,
    Sampler, UpdateSequences,
};
use levade_rl::Loss;
use levade_tree::TreeBatch;
use tempfile::TempDir;
use tokio::sync::Notify;

use super::*;
use crate::devices::TransferReport;
use crate::push::{BroadcastWeights, GroupBackend, GroupInfo, GroupSpec, SendReport};
use crate::server::testing::{
    Behavior, Fake, Log, Sender, ServerApi, expected, impatient, publish, request,
};
use crate::server::{InFlight, ServerOptions};

pub(super) const ALL: [ServerApi; 3] = [ServerApi::NewVllm, ServerApi::OldVllm, ServerApi::Sglang];
pub(super) const LONG: Duration = Duration::from_secs(30);
pub(super) const ADAM: OptimParams = OptimParams {
    learning_rate: 0.01,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-8,
    weight_decay: 0.0,
    max_grad_norm: 1.0,
};

/// A learner that checks at every call whether it owns the devices exclusively.
pub(super) struct Trainee {
    pub(super) root: PathBuf,
    pub(super) fakes: Arc<Vec<Fake>>,
    pub(super) log: Log,
    /// Whether the weights, and all other state, are on the devices.
    pub(super) has: Mutex<(bool, bool)>,
    /// Calls that ran while a server was awake, or without the devices.
    pub(super) wrong: Mutex<Vec<String>>,
    pub(super) has_exited: AtomicBool,
    /// If set, an optimizer step waits for this notification.
    pub(super) waits: Mutex<Option<Arc<Notify>>>,
    pub(super) sender: Sender,
}

impl Trainee {
    pub(super) fn record_event(&self, what: &str) {
        self.log.lock().unwrap().push(format!("[{what}]"));
    }

    pub(super) fn is_wrong(&self, what: String) {
        self.wrong.lock().unwrap().push(what);
    }

    /// Records a call that needs the devices.
    pub(super) fn verb(&self, name: &str) -> Result<(), PolicyError> {
        self.running()?;
        self.record_event(name);
        let awake = self.fakes.iter().filter(|fake| fake.is_awake()).count();
        if awake > 0 || *self.has.lock().unwrap() != (true, true) {
            self.is_wrong(format!(
                "{name}: {awake} servers are awake, it has {:?}",
                self.has.lock().unwrap()
            ));
        }
        Ok(())
    }

    pub(super) fn running(&self) -> Result<(), PolicyError> {
        if self.has_exited.load(Ordering::Relaxed) {
            Err(PolicyError::Stopped("the learner".into()))
        } else {
            Ok(())
        }
    }
}

#[async_trait]
impl Offload for Trainee {
    async fn offload(&self, keeps_weights: bool) -> Result<TransferReport, PolicyError> {
        self.running()?;
        self.record_event(if keeps_weights { "offload all but weights" } else { "offload" });
        *self.has.lock().unwrap() = (keeps_weights, false);
        Ok(TransferReport { bytes: 1, seconds: 0.0 })
    }

    async fn onload(&self) -> Result<TransferReport, PolicyError> {
        *self.has.lock().unwrap() = (true, true);
        self.verb("onload")?;
        Ok(TransferReport { bytes: 1, seconds: 0.0 })
    }
}

#[async_trait]
impl BroadcastWeights for Trainee {
    async fn open_group(&self, opening: &GroupSpec) -> Result<GroupInfo, PolicyError> {
        self.sender.open_group(opening).await
    }

    async fn send_to(&self, group: &str) -> Result<SendReport, PolicyError> {
        self.record_event("send");
        if *self.has.lock().unwrap() != (true, false) {
            self.is_wrong("it sends what it has not, or has more".into());
        }
        self.sender.send_to(group).await
    }
}

#[async_trait]
impl Learner for Trainee {
    async fn plan(&self, update: &UpdateSequences) -> Result<MicroBatchPlan, PolicyError> {
        MicroBatchPlan::pack(update)
    }

    async fn logprobs(&self, _: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.verb("logprobs").map(|()| Vec::new())
    }

    async fn forward_backward(
        &self,
        _: Arc<TreeBatch>,
        _: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.verb("forward_backward").map(|()| ForwardBackward::default())
    }

    async fn optim_step(&self, _: OptimParams) -> Result<OptimReport, PolicyError> {
        self.verb("optim_step")?;
        let waits = self.waits.lock().unwrap().clone();
        if let Some(waits) = waits {
            waits.notified().await;
        }
        self.verb("step done")?;
        Ok(OptimReport { grad_norm: 0.0, applied: true })
    }

    async fn save(&self, dir: &Path, _: bool) -> Result<Manifest, PolicyError> {
        self.verb("save")?;
        Manifest::from_files(dir, levade_policy::Content::Full, &[])
    }

    async fn load(&self, _: &Path, _: bool) -> Result<(), PolicyError> {
        self.verb("load")
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        self.verb("publish")?;
        Ok(publish(&self.root, version))
    }
}

/// Colocated servers and their learner.
pub(super) struct ColocatedFleet {
    pub(super) root: TempDir,
    pub(super) fakes: Arc<Vec<Fake>>,
    pub(super) trainee: Arc<Trainee>,
    pub(super) colocation: Arc<Colocation>,
    pub(super) learner: Arc<dyn Learner>,
    pub(super) sampler: Arc<dyn Sampler>,
    pub(super) router: Arc<Router>,
    pub(super) push: Option<Arc<WeightBroadcast>>,
    pub(super) log: Log,
    /// Whether each server has a process.
    pub(super) running: Vec<watch::Sender<bool>>,
}

impl ColocatedFleet {
    pub(super) async fn new(kinds: &[ServerApi], pushes: bool) -> Self {
        Self::with(kinds, pushes, Duration::from_secs(4), false).await
    }

    pub(super) async fn with(
        kinds: &[ServerApi],
        pushes: bool,
        sleep_timeout: Duration,
        started: bool,
    ) -> Self {
        let root = TempDir::new().unwrap();
        let log = Log::default();
        let mut fakes = Vec::new();
        for api in kinds {
            fakes.push(
                Fake::with(*api, Behavior { log: Some(log.clone()), ..Behavior::default() }).await,
            );
        }
        let fakes = Arc::new(fakes);
        let trainee = Arc::new(Trainee {
            root: root.path().to_owned(),
            fakes: fakes.clone(),
            log: log.clone(),
            has: Mutex::new((true, true)),
            wrong: Mutex::default(),
            has_exited: AtomicBool::new(false),
            waits: Mutex::default(),
            sender: Sender::default(),
        });
        let push =
            pushes.then(|| Arc::new(WeightBroadcast::new(trainee.clone(), GroupBackend::Gloo)));
        let colocation = Colocation::new(trainee.clone(), sleep_timeout);
        colocation.make_room().await.unwrap();
        let mut replicas = Vec::new();
        let mut servers = Vec::new();
        let mut running = Vec::new();
        for fake in fakes.iter() {
            let options = ServerOptions {
                sleeps: true,
                push: push.clone(),
                silence: Duration::from_secs(1),
                response_timeout: Duration::from_secs(2),
                ..fake.options(InFlight::Recompute)
            };
            let server = Server::new(options).unwrap();
            server.inspect().await.unwrap();
            replicas.push((fake.url.clone(), Arc::new(server.clone()) as Arc<dyn Sampler>));
            let (sender, receiver) = watch::channel(true);
            running.push(sender);
            servers.push(ColocatedServer {
                name: fake.url.clone(),
                server,
                running: started.then_some(receiver),
            });
        }
        let options = impatient(Duration::from_millis(50), Duration::from_secs(8));
        let router = Arc::new(Router::new(replicas, options).unwrap());
        colocation.colocate(router.clone(), servers, push.clone()).unwrap();
        let learner = colocation.learner(trainee.clone());
        let sampler = colocation.sampler(router.clone());
        ColocatedFleet {
            root,
            fakes,
            trainee,
            colocation,
            learner,
            sampler,
            router,
            push,
            log,
            running,
        }
    }

    /// Returns the requests since the last call, without label, cache, tokenizer and sampling
    /// routes and pushes' ends.
    pub(super) fn requests(&self) -> Vec<String> {
        let all = std::mem::take(&mut *self.log.lock().unwrap());
        all.into_iter()
            .filter(|issued| {
                let quiet = [
                    "/update_weight_version",
                    "/reset_prefix_cache",
                    "/tokenize",
                    "/shutdown",
                    "/destroy",
                ];
                let generate_routes = ["/inference", "/generate"];
                !quiet.iter().chain(&generate_routes).any(|route| issued.starts_with(route))
            })
            .collect()
    }

    pub(super) async fn step(&self) {
        self.learner.optim_step(ADAM).await.unwrap();
    }

    pub(super) async fn publishes(&self, version: u64) -> Result<(), PolicyError> {
        let weights = self.learner.publish(version).await?;
        if let Some(push) = &self.push {
            push.offer(version).await;
        }
        self.sampler.update_weights(&weights).await
    }

    pub(super) async fn sample_completion(&self, stream: u64) -> Completion {
        let issued = request(stream, 12);
        let completion =
            self.sampler.sample(issued.clone()).await.unwrap().collect(LONG).await.unwrap();
        self.check(&completion, &issued.prompt);
        completion
    }

    /// Checks that every token was sampled by the weights of its version.
    pub(super) fn check(&self, completion: &Completion, prompt: &[u32]) {
        let path = [prompt, &completion.tokens].concat();
        let mut versions = Vec::new();
        completion
            .versions
            .iter()
            .for_each(|run| versions.extend(vec![run.version; run.len as usize]));
        for (a, b) in completion.logprobs.iter().zip(expected(&path, prompt.len(), |i| versions[i]))
        {
            assert!((a - b).abs() < 1e-4, "{completion:?}");
        }
    }

    pub(super) fn is_sound(&self) {
        let wrong = self.trainee.wrong.lock().unwrap().clone();
        assert!(wrong.is_empty(), "{wrong:?}");
        assert!(self.fakes.iter().all(|fake| fake.nonsense() == 0 && fake.half() == 0));
    }
}

pub(super) fn version_of(completion: &Completion) -> u64 {
    completion.versions.last().unwrap().version
}
