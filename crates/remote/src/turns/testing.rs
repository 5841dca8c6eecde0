//! Fakes of a learner and colocated servers, with checks of device ownership.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use levade_policy::{
    Completion, Cut, ForwardBackward, Learner, Manifest, OptimParams, OptimReport, Sampler, Uncut,
};
use levade_rl::Loss;
use levade_tree::TreeBatch;
use tempfile::TempDir;
use tokio::sync::Notify;

use super::*;
use crate::devices::Moved;
use crate::push::{Broadcasts, GroupBackend, Opened, Opening, Sent};
use crate::server::testing::{Behaviour, Fake, Log, Sender, Speaks, expected, impatient, publish, request};
use crate::server::{InFlight, ServerOptions};

pub(super) const ALL: [Speaks; 3] = [Speaks::NewVllm, Speaks::OldVllm, Speaks::Sglang];
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
    pub(super) dies: AtomicBool,
    /// If set, an optimizer step waits for this notification.
    pub(super) waits: Mutex<Option<Arc<Notify>>>,
    pub(super) sender: Sender,
}

impl Trainee {
    pub(super) fn says(&self, what: &str) {
        self.log.lock().unwrap().push(format!("[{what}]"));
    }

    pub(super) fn is_wrong(&self, what: String) {
        self.wrong.lock().unwrap().push(what);
    }

    /// Records a call that needs the devices.
    pub(super) fn verb(&self, name: &str) -> Result<(), PolicyError> {
        self.lives()?;
        self.says(name);
        let awake = self.fakes.iter().filter(|fake| fake.is_awake()).count();
        if awake > 0 || *self.has.lock().unwrap() != (true, true) {
            self.is_wrong(format!(
                "{name}: {awake} servers are awake, it has {:?}",
                self.has.lock().unwrap()
            ));
        }
        Ok(())
    }

    pub(super) fn lives(&self) -> Result<(), PolicyError> {
        match self.dies.load(Ordering::Relaxed) {
            true => Err(PolicyError::Stopped("the learner".into())),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl Offloads for Trainee {
    async fn offload(&self, keeps_weights: bool) -> Result<Moved, PolicyError> {
        self.lives()?;
        self.says(if keeps_weights { "offload all but weights" } else { "offload" });
        *self.has.lock().unwrap() = (keeps_weights, false);
        Ok(Moved { bytes: 1, seconds: 0.0 })
    }

    async fn onload(&self) -> Result<Moved, PolicyError> {
        *self.has.lock().unwrap() = (true, true);
        self.verb("onload")?;
        Ok(Moved { bytes: 1, seconds: 0.0 })
    }
}

#[async_trait]
impl Broadcasts for Trainee {
    async fn open_group(&self, opening: &Opening) -> Result<Opened, PolicyError> {
        self.sender.open_group(opening).await
    }

    async fn send_to(&self, group: &str) -> Result<Sent, PolicyError> {
        self.says("send");
        if *self.has.lock().unwrap() != (true, false) {
            self.is_wrong("it sends what it has not, or has more".into());
        }
        self.sender.send_to(group).await
    }
}

#[async_trait]
impl Learner for Trainee {
    async fn plan(&self, update: &Uncut) -> Result<Cut, PolicyError> {
        Cut::filled(update)
    }

    async fn logprobs(&self, _: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.verb("logprobs").map(|()| Vec::new())
    }

    async fn forward_backward(&self, _: Arc<TreeBatch>, _: Loss) -> Result<ForwardBackward, PolicyError> {
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

    async fn save(&self, folder: &Path, _: bool) -> Result<Manifest, PolicyError> {
        self.verb("save")?;
        Manifest::of(folder, levade_policy::Content::Whole, &[])
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
pub(super) struct Shared {
    pub(super) root: TempDir,
    pub(super) fakes: Arc<Vec<Fake>>,
    pub(super) trainee: Arc<Trainee>,
    pub(super) turns: Arc<Turns>,
    pub(super) learner: Arc<dyn Learner>,
    pub(super) sampler: Arc<dyn Sampler>,
    pub(super) router: Arc<Router>,
    pub(super) push: Option<Arc<Pushing>>,
    pub(super) log: Log,
    /// Whether each server has a process.
    pub(super) lives: Vec<watch::Sender<bool>>,
}

impl Shared {
    pub(super) async fn new(kinds: &[Speaks], pushes: bool) -> Self {
        Self::with(kinds, pushes, Duration::from_secs(4), false).await
    }

    pub(super) async fn with(kinds: &[Speaks], pushes: bool, patience: Duration, started: bool) -> Self {
        let (root, log) = (TempDir::new().unwrap(), Log::default());
        let mut fakes = Vec::new();
        for speaks in kinds {
            fakes.push(
                Fake::with(*speaks, Behaviour { log: Some(log.clone()), ..Behaviour::default() }).await,
            );
        }
        let fakes = Arc::new(fakes);
        let trainee = Arc::new(Trainee {
            root: root.path().to_owned(),
            fakes: fakes.clone(),
            log: log.clone(),
            has: Mutex::new((true, true)),
            wrong: Mutex::default(),
            dies: AtomicBool::new(false),
            waits: Mutex::default(),
            sender: Sender::default(),
        });
        let push = pushes.then(|| Arc::new(Pushing::new(trainee.clone(), GroupBackend::Gloo)));
        let turns = Turns::new(trainee.clone(), patience);
        turns.make_room().await.unwrap();
        let (mut members, mut sharers, mut lives) = (Vec::new(), Vec::new(), Vec::new());
        for fake in fakes.iter() {
            let options = ServerOptions {
                sleeps: true,
                push: push.clone(),
                silence: Duration::from_secs(1),
                answer: Duration::from_secs(2),
                ..fake.options(InFlight::Recompute)
            };
            let server = Server::new(options).unwrap();
            server.look().await.unwrap();
            members.push((fake.url.clone(), Arc::new(server.clone()) as Arc<dyn Sampler>));
            let (sender, receiver) = watch::channel(true);
            lives.push(sender);
            sharers.push(Sharer { name: fake.url.clone(), server, lives: started.then_some(receiver) });
        }
        let options = impatient(Duration::from_millis(50), Duration::from_secs(8));
        let router = Arc::new(Router::new(members, options).unwrap());
        turns.share(router.clone(), sharers, push.clone()).unwrap();
        let (learner, sampler) = (turns.learner(trainee.clone()), turns.sampler(router.clone()));
        Shared { root, fakes, trainee, turns, learner, sampler, router, push, log, lives }
    }

    /// Returns the requests since the last call, without label, cache, tokenizer and sampling
    /// routes and pushes' ends.
    pub(super) fn asked(&self) -> Vec<String> {
        let all = std::mem::take(&mut *self.log.lock().unwrap());
        let tells = |asked: &String| {
            let quiet =
                ["/update_weight_version", "/reset_prefix_cache", "/tokenize", "/shutdown", "/destroy"];
            let draws = ["/inference", "/generate"];
            !quiet.iter().chain(&draws).any(|route| asked.starts_with(route))
        };
        all.into_iter().filter(tells).collect()
    }

    pub(super) async fn step(&self) {
        self.learner.optim_step(ADAM).await.unwrap();
    }

    pub(super) async fn publishes(&self, version: u64) -> Result<(), PolicyError> {
        let weights = self.learner.publish(version).await?;
        if let Some(push) = &self.push {
            push.offer(version).await;
        }
        self.sampler.adopt(&weights).await
    }

    pub(super) async fn draws(&self, stream: u64) -> Completion {
        let asked = request(stream, 12);
        let reply = self.sampler.sample(asked.clone()).await.unwrap().collect(LONG).await.unwrap();
        self.check(&reply, &asked.prompt);
        reply
    }

    /// Checks that every token was sampled by the weights of its version.
    pub(super) fn check(&self, reply: &Completion, prompt: &[u32]) {
        let path = [prompt, &reply.tokens].concat();
        let mut versions = Vec::new();
        reply.versions.iter().for_each(|run| versions.extend(vec![run.version; run.len as usize]));
        for (a, b) in reply.logprobs.iter().zip(expected(&path, prompt.len(), |i| versions[i])) {
            assert!((a - b).abs() < 1e-4, "{reply:?}");
        }
    }

    pub(super) fn is_sound(&self) {
        let wrong = self.trainee.wrong.lock().unwrap().clone();
        assert!(wrong.is_empty(), "{wrong:?}");
        assert!(self.fakes.iter().all(|fake| fake.nonsense() == 0 && fake.half() == 0));
    }
}

pub(super) fn version_of(reply: &Completion) -> u64 {
    reply.versions.last().unwrap().version
}
