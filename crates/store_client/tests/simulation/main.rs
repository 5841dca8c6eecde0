//! Deterministic simulation of a store of rollouts, its runners and its trainer.
//!
//! Time and network are simulated; the code is real: the queue in its file, the routes of the
//! server, the client with its retries, and the loop of runners. Faults come from a seed: delayed,
//! lost and repeated messages, isolated nodes, killed runners and trainers, and a killed
//! server that starts again from its file. One thread runs everything, so a seed always repeats
//! the same events.
//!
//! # Rules
//! - A write that was acknowledged to a client is in the store, also after a kill.
//! - A try has one owner, and starts after the one before has ended or lost its lease. Reports of
//!   an earlier try do not count.
//! - A lease ends at its timeout.
//! - Every attempt slot is trained once, on the result of the try that the store accepted, and
//!   everything ends when the faults end.
//!
//! `LEVADE_SEEDS=10000 LEVADE_FIRST_SEED=0 cargo test --release -p levade-store-client --test
//! simulation -- --ignored --nocapture simulations_with_seeds_from_environment` runs more seeds.
//! For a single seed, it prints the events.
#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

mod network;
mod nodes;
mod processes;
mod random;
mod rules;
mod seeds;
mod server;
mod world;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use network::Faults;
use nodes::{Ledger, Slot, check_trained, config, run_runner, run_trainer};
use processes::{RunnerFactory, RunnerProcess};
use random::Random;
use seeds::{Outcome, directory, run_seeds, run_seeds_of_environment};
use server::ServerProcess;
use world::World;

/// Time within which everything must end after the last fault.
const CALM: Duration = Duration::from_secs(1800);

/// Simulates a seed.
fn simulate(seed: u64) -> Outcome {
    let dir = directory();
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async { Simulation::new(seed, dir.path()).run().await })
}

struct Simulation<'a> {
    world: Arc<World>,
    dir: &'a Path,
    ledger: Ledger,
    runners: Vec<RunnerProcess>,
    trainer: JoinSet<()>,
    max_tries: u32,
    lease: f64,
    /// Number of files of servers.
    files: u64,
    kills: u64,
}

impl<'a> Simulation<'a> {
    fn new(seed: u64, dir: &'a Path) -> Self {
        let mut random = Random::new(seed);
        let lease = random.integer(6..60) as f64;
        let max_tries = if random.percent(50) { 1 } else { 3 };
        let slots = random.integer(2..8) as usize;
        let runners: Vec<usize> =
            (0..random.integer(1..4)).map(|_| random.integer(1..4) as usize).collect();
        let world = World::new(random, lease);
        let shared = Arc::clone(&world);
        let factory: RunnerFactory = Arc::new(move |name, slots, requests| {
            Box::pin(run_runner(Arc::clone(&shared), name, slots, requests))
        });
        let start = |(index, slots)| {
            RunnerProcess::start(format!("runner{index}"), slots, Arc::clone(&factory))
        };
        let runners = runners.into_iter().enumerate().map(start).collect();
        let ledger = Ledger::default();
        ledger.lock().unwrap().resize(slots, Slot::default());
        let trainer = JoinSet::new();
        let (files, kills) = (0, 0);
        Simulation { world, dir, ledger, runners, trainer, max_tries, lease, files, kills }
    }

    /// Starts the server from the file of the previous one.
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

    fn start_trainer(&mut self) {
        let config = config(self.lease, self.max_tries);
        self.trainer = JoinSet::new();
        self.trainer.spawn(run_trainer(Arc::clone(&self.world), Arc::clone(&self.ledger), config));
    }

    fn is_trained(&self) -> bool {
        self.ledger.lock().unwrap().iter().all(|slot| slot.trained.is_some())
    }

    /// Checks the rules that depend on time, and those of acknowledged writes if `is_restarted`.
    async fn check(&self, is_restarted: bool) {
        let Some(server) = self.world.server() else { return };
        let mut rules = self.world.rules.lock().await;
        rules.check_timeouts(&self.world, &*server.store, server.started).await;
        if is_restarted {
            rules.check_acknowledged(&self.world, &*server.store).await;
        }
    }

    /// Changes one thing: the network, or a process.
    async fn disturb(&mut self) {
        let world = Arc::clone(&self.world);
        let kind = world.with_random(|random, _| random.integer(0..10));
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
            }
            3 | 4 => {
                world.note("trainer", "killed");
                self.start_trainer();
                self.kills += 1;
            }
            5 | 6 => self.kill_server(),
            7 => world.isolate(&runner.name),
            8 => world.isolate("trainer"),
            _ => world.set_faults(|faults| faults.isolated.clear()),
        }
    }

    /// Restarts what has ended: runners at once, as a supervisor would, and a server that is down.
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
        let has_ended = self.trainer.try_join_next().is_some() || self.trainer.is_empty();
        if has_ended && !self.is_trained() {
            self.start_trainer();
        }
    }

    async fn run(mut self) -> Outcome {
        let world = Arc::clone(&self.world);
        let (faults, chaos) =
            world.with_random(|random, _| (Faults::sample(random), random.millis(20_000..200_000)));
        world.set_faults(|of| *of = faults);
        // Server and clients start in any order.
        if world.with_random(|random, _| random.percent(70)) {
            self.start_server();
        }
        self.start_trainer();
        let start = tokio::time::Instant::now();
        while start.elapsed() < chaos && !self.is_trained() {
            let pause = world.with_random(|random, _| random.millis(100..2_500));
            tokio::time::sleep(pause).await;
            if world.with_random(|random, _| random.percent(12)) {
                self.disturb().await;
            }
            let starts_server = world.with_random(|random, _| random.percent(40));
            self.supervise(starts_server).await;
            self.check(false).await;
        }
        world.note("network", "calm");
        world.set_faults(|faults| *faults = Faults::default());
        let calm = tokio::time::Instant::now();
        while !self.is_trained() && calm.elapsed() < CALM && world.violations().is_empty() {
            self.supervise(true).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.check(false).await;
        }
        // Rollouts of killed trainers end, too.
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

    /// Checks the last rules, and stops everything.
    async fn finish(mut self) -> Outcome {
        let server = self.world.server().unwrap();
        let mut rules = self.world.rules.lock().await;
        let slots = self.ledger.lock().unwrap().clone();
        rules.check_timeouts(&self.world, &*server.store, server.started).await;
        rules.check_acknowledged(&self.world, &*server.store).await;
        check_trained(&self.world, &*server.store, &slots).await;
        let requests = rules.requests;
        drop(rules);
        self.runners.clear();
        self.trainer.abort_all();
        self.world.stop();
        let (violations, events) = (self.world.violations(), self.world.events());
        Outcome { violations, events, requests, kills: self.kills }
    }
}

#[test]
fn simulations_with_fixed_seeds_violate_no_rule() {
    run_seeds(simulate, 0, 200);
}

#[test]
#[ignore = "runs as long as the environment asks for"]
fn simulations_with_seeds_from_environment_violate_no_rule() {
    run_seeds_of_environment(simulate);
}

#[test]
fn simulation_with_equal_seed_repeats_all_events() {
    for seed in [1, 2, 3, 5, 8, 13] {
        let (first, second) = (simulate(seed), simulate(seed));
        assert!(first.events.len() > 20, "{:?}", first.events);
        assert_eq!(first.events, second.events, "seed {seed}");
    }
}
