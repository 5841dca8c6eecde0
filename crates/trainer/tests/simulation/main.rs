//! Deterministic simulation of complete runs whose attempts are made by runners: store server,
//! runners, trainer and gateway.
//!
//! Time, network and policy are simulated. The trainer, with its record, queue of attempts and
//! checkpoints, runs its real code. So do the gateway's routes, sessions and recorders, the store
//! server with its file, the store client, and the loop of runners. The agent is a simulated
//! program. Faults come from a seed: delayed, lost and repeated messages, isolated nodes, runners
//! that return their leases, killed runners, trainers and servers. One thread runs everything, so a
//! seed always repeats the same events.
//!
//! # Rules
//! In addition to the rules of the simulation of the store:
//! - Every planned attempt counts once: it has completed, or it has failed with a named reason.
//! - A completed attempt has the reward, the tokens and the calls that its runner reported. Its try
//!   was leased once.
//! - A reported outcome is lost only with its trainer process, with its lease, or if the trainer
//!   cannot use the store for too long.
//! - After a try is leased, the session of the previous try accepts no call.
//! - No attempt is trained twice. If no agent failed, tokens and weights equal the tokens and
//!   weights of the same run without faults.
//! - Everything ends when the faults end.
//!
//! Not simulated: sockets, kills within a write to a file, the runner's HTTP client for model calls
//! and its tool loop, several policies, and runs whose record is on a server.
//!
//! `LEVADE_SEEDS=10000 LEVADE_FIRST_SEED=0 cargo test --release -p levade-trainer --test simulation
//! -- --ignored --nocapture` runs more seeds. For a single seed, it prints the events.
#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

mod agents;
mod ends;
mod gateways;
#[path = "../../../store_client/tests/simulation/network.rs"]
mod network;
#[path = "../../../store_client/tests/simulation/processes.rs"]
mod processes;
#[path = "../../../store_client/tests/simulation/random.rs"]
mod random;
#[path = "../../../store_client/tests/simulation/rules.rs"]
mod rules;
#[path = "../../../store_client/tests/simulation/seeds.rs"]
mod seeds;
#[path = "../../../store_client/tests/simulation/server.rs"]
mod server;
mod training;
#[path = "../../../store_client/tests/simulation/world.rs"]
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use levade_policy::block_in_caller;
use levade_trainer::StopFlag;
use tokio::task::JoinSet;

use agents::run_runner;
use ends::{Results, check_run};
use gateways::Gateways;
use network::Faults;
use processes::{RunnerFactory, RunnerProcess};
use random::Random;
use seeds::{Outcome, directory, run_seeds, run_seeds_of_environment};
use server::ServerProcess;
use training::TrainerProcess;
use world::World;

/// Time within which everything must end after the last fault.
const CALM: Duration = Duration::from_secs(3600);

/// Number of different recipes.
const RECIPES: u64 = 6;

/// Results of each recipe without faults, by recipe number.
static UNDISTURBED: Mutex<BTreeMap<u64, Results>> = Mutex::new(BTreeMap::new());

/// Simulates a seed, with faults if `is_disturbed`. Also returns the results of the run if no agent
/// failed, otherwise `None`.
fn simulate_run(seed: u64, is_disturbed: bool) -> (Outcome, Option<Results>) {
    block_in_caller();
    let dir = directory();
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async { Simulation::new(seed, dir.path()).run(is_disturbed).await })
}

/// Simulates a seed, and compares its results with the results of the same recipe without faults.
/// Returns the run without faults if that run breaks a rule.
fn simulate(seed: u64) -> Outcome {
    let recipe = seed % RECIPES;
    let known = UNDISTURBED.lock().unwrap().get(&recipe).cloned();
    let want = match known {
        Some(results) => results,
        None => {
            let (mut outcome, results) = simulate_run(recipe, false);
            let Some(results) = results.filter(|_| outcome.violations.is_empty()) else {
                outcome.violations.insert(0, "a rule is broken without faults".to_owned());
                return outcome;
            };
            UNDISTURBED.lock().unwrap().insert(recipe, results.clone());
            results
        }
    };
    let (mut outcome, results) = simulate_run(seed, true);
    if outcome.violations.is_empty() && results.is_some_and(|results| results != want) {
        outcome.violations.push("the results differ from those without faults".to_owned());
    }
    outcome
}

struct Simulation<'a> {
    world: Arc<World>,
    gateways: Arc<Gateways>,
    dir: &'a Path,
    recipe: u64,
    runners: Vec<RunnerProcess>,
    trainer: JoinSet<bool>,
    stop: StopFlag,
    /// Number of trainer processes that were started.
    trainers: u64,
    /// Trainer processes that ended before the run was finished.
    interrupted: BTreeSet<String>,
    is_finished: bool,
    lease: Duration,
    /// Number of the server's current file. A killed server's successor gets a copy with the next
    /// number.
    files: u64,
    kills: u64,
}

impl<'a> Simulation<'a> {
    fn new(seed: u64, dir: &'a Path) -> Self {
        let mut random = Random::new(seed);
        let lease = Duration::from_secs(random.integer(5..30));
        let slots: Vec<usize> =
            (0..random.integer(1..4)).map(|_| random.integer(1..4) as usize).collect();
        let world = World::new(random, lease.as_secs_f64());
        let gateways = Arc::new(Gateways::default());
        let shared = (Arc::clone(&world), Arc::clone(&gateways));
        let factory: RunnerFactory = Arc::new(move |name, slots, requests| {
            Box::pin(run_runner(shared.clone(), name, slots, requests))
        });
        let start = |(index, slots)| {
            RunnerProcess::start(format!("runner{index}"), slots, Arc::clone(&factory))
        };
        let runners = slots.into_iter().enumerate().map(start).collect();
        Simulation {
            world,
            gateways,
            dir,
            recipe: seed % RECIPES,
            runners,
            trainer: JoinSet::new(),
            stop: StopFlag::default(),
            trainers: 0,
            interrupted: BTreeSet::new(),
            is_finished: false,
            lease,
            files: 0,
            kills: 0,
        }
    }

    /// Starts the server from the file of the previous server.
    fn start_server(&mut self) {
        let file = self.dir.join(format!("{}.db", self.files));
        let server = ServerProcess::start(file, Arc::new(self.world.clock));
        self.world.set_server(Some(server));
        self.world.note("store", "started");
    }

    /// Kills the server, if it runs.
    fn kill_server(&mut self) {
        if let Some(server) = self.world.set_server(None) {
            self.files += 1;
            server.kill(&self.dir.join(format!("{}.db", self.files)));
            self.kills += 1;
            self.world.note("store", "killed");
        }
    }

    /// Returns the name of the running trainer process.
    fn trainer_name(&self) -> String {
        format!("trainer{}", self.trainers)
    }

    fn start_trainer(&mut self) {
        self.trainers += 1;
        self.stop = StopFlag::default();
        let process = TrainerProcess {
            world: Arc::clone(&self.world),
            gateways: Arc::clone(&self.gateways),
            name: self.trainer_name(),
            dir: self.dir.to_owned(),
            number: self.recipe,
            lease: self.lease,
            stop: self.stop.clone(),
        };
        self.world.note(&process.name, "started");
        self.trainer.spawn(process.run());
    }

    /// Kills the trainer. Messages that it still sends do not arrive.
    async fn kill_trainer(&mut self) {
        if self.trainer.is_empty() {
            return;
        }
        let name = self.trainer_name();
        self.world.note(&name, "killed");
        self.kills += 1;
        self.gateways.close(&name);
        self.world.isolate(&name);
        self.trainer.shutdown().await;
        self.interrupted.insert(name);
        // Its tasks are dropped, and with them the lock of the run's directory.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    /// Checks the rules that depend on time and, if `is_restarted`, the rules of acknowledged
    /// writes.
    async fn check(&self, is_restarted: bool) {
        let Some(server) = self.world.server() else { return };
        let mut rules = self.world.rules.lock().await;
        rules.check_timeouts(&self.world, &*server.store, server.started).await;
        if is_restarted {
            rules.check_acknowledged(&self.world, &*server.store).await;
        }
    }

    /// Makes one random change to the network or to a process.
    async fn disturb(&mut self) {
        let world = Arc::clone(&self.world);
        let kind = world.with_random(|random, _| random.integer(0..11));
        let runner = world.with_random(|random, _| random.integer(0..self.runners.len() as u64));
        let runner = &mut self.runners[runner as usize];
        match kind {
            0 | 1 => {
                world.note(&runner.name, "killed");
                runner.restart();
                self.kills += 1;
            }
            2 => {
                world.note(&runner.name, "asked to stop");
                runner.request_stop();
                if world.with_random(|random, _| random.percent(30)) {
                    runner.request_stop();
                }
            }
            3 | 4 => self.kill_trainer().await,
            5 => {
                world.note(&self.trainer_name(), "asked to stop");
                self.stop.stop();
            }
            6 | 7 => self.kill_server(),
            8 => world.isolate(&runner.name),
            9 => world.isolate(&self.trainer_name()),
            _ => self.connect_all(),
        }
    }

    /// Connects all nodes, except the trainer processes that have ended.
    fn connect_all(&self) {
        let running = (!self.trainer.is_empty()).then(|| self.trainer_name());
        let is_ended =
            |name: &String| name.starts_with("trainer") && Some(name) != running.as_ref();
        self.world.set_faults(|faults| faults.isolated.retain(is_ended));
    }

    /// Restarts ended processes, as a supervisor would: runners and the trainer at once, and the
    /// server if `starts_server`.
    async fn supervise(&mut self, starts_server: bool) {
        if starts_server && self.world.server().is_none() {
            self.start_server();
            self.check(true).await;
        }
        for runner in &mut self.runners {
            if runner.has_ended() {
                runner.restart();
            }
        }
        if let Some(ended) = self.trainer.try_join_next() {
            match ended {
                Ok(is_finished) => self.is_finished = is_finished,
                Err(error) => self.world.check(false, || format!("the trainer panicked: {error}")),
            }
            if !self.is_finished {
                self.interrupted.insert(self.trainer_name());
            }
        }
        if self.trainer.is_empty() && !self.is_finished {
            self.start_trainer();
        }
    }

    async fn run(mut self, is_disturbed: bool) -> (Outcome, Option<Results>) {
        let world = Arc::clone(&self.world);
        let (faults, chaos) =
            world.with_random(|random, _| (Faults::sample(random), random.millis(20_000..90_000)));
        if is_disturbed {
            world.set_faults(|of| *of = faults);
        }
        // Server and clients start in any order.
        if !is_disturbed || world.with_random(|random, _| random.percent(70)) {
            self.start_server();
        }
        self.start_trainer();
        let start = tokio::time::Instant::now();
        while is_disturbed && start.elapsed() < chaos && !self.is_finished {
            let pause = world.with_random(|random, _| random.millis(100..2_500));
            tokio::time::sleep(pause).await;
            if world.with_random(|random, _| random.percent(20)) {
                self.disturb().await;
            }
            let starts_server = world.with_random(|random, _| random.percent(40));
            self.supervise(starts_server).await;
            self.check(false).await;
        }
        world.note("network", "calm");
        self.connect_all();
        world.set_faults(|faults| {
            let isolated = std::mem::take(&mut faults.isolated);
            *faults = Faults { isolated, ..Faults::default() };
        });
        let calm = tokio::time::Instant::now();
        while !self.is_finished && calm.elapsed() < CALM && world.violations().is_empty() {
            self.supervise(true).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.check(false).await;
        }
        // Rollouts of killed trainers also end.
        if self.world.server().is_none() {
            self.start_server();
        }
        while self.has_open().await && calm.elapsed() < CALM {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.check(false).await;
        }
        self.finish().await
    }

    /// Returns whether a rollout has not ended.
    async fn has_open(&self) -> bool {
        let Some(server) = self.world.server() else { return true };
        let counts = server.store.statistics().await.unwrap();
        counts.queued_rollouts + counts.active_rollouts > 0
    }

    /// Checks the rules of a finished run, and stops all processes.
    async fn finish(mut self) -> (Outcome, Option<Results>) {
        let server = self.world.server().unwrap();
        let world = Arc::clone(&self.world);
        world.check(self.is_finished, || "the run is not finished".to_owned());
        let is_open = self.has_open().await;
        world.check(!is_open, || "a rollout has not ended".to_owned());
        let mut rules = world.rules.lock().await;
        rules.check_timeouts(&world, &*server.store, server.started).await;
        rules.check_acknowledged(&world, &*server.store).await;
        let requests = rules.requests;
        drop(rules);
        let results = match self.is_finished {
            true => {
                check_run(&world, &*server.store, &self.dir.join("run"), &self.interrupted).await
            }
            false => None,
        };
        self.runners.clear();
        self.trainer.abort_all();
        world.stop();
        let (violations, events) = (world.violations(), world.events());
        (Outcome { violations, events, requests, kills: self.kills }, results)
    }
}

#[test]
fn simulations_with_fixed_seeds_violate_no_rule() {
    run_seeds(simulate, 0, 20);
}

#[test]
#[ignore = "runs as long as the environment asks for"]
fn simulations_with_seeds_from_environment_violate_no_rule() {
    run_seeds_of_environment(simulate);
}

#[test]
fn simulation_with_equal_seed_repeats_all_events() {
    for seed in [1, 2, 3, 5, 8] {
        let [(first, results), (second, repeated)] = [(); 2].map(|()| simulate_run(seed, true));
        assert!(first.events.len() > 20, "{:?}", first.events);
        assert_eq!(first.events, second.events, "seed {seed}");
        assert_eq!(results, repeated, "seed {seed}");
    }
}
