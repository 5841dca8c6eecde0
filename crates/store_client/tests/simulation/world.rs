//! What the nodes of a simulation share: time, random numbers, faults, the server, and the events
//! and violations so far.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use hyper::Response;
use levade_store::rollouts::Clock;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::network::Faults;
use crate::random::Random;
use crate::rules::Rules;
use crate::server::ServerProcess;

/// Time of the store at the start.
const START: f64 = 1_000_000.0;

/// Simulated time as the clock of the store.
#[derive(Debug, Clone, Copy)]
pub struct SimulatedClock {
    start: Instant,
}

impl Clock for SimulatedClock {
    fn now(&self) -> f64 {
        START + self.start.elapsed().as_secs_f64()
    }
}

/// State that the nodes of a simulation share.
pub struct World {
    pub clock: SimulatedClock,
    random: Mutex<Random>,
    faults: Mutex<Faults>,
    server: Mutex<Option<Arc<ServerProcess>>>,
    /// Messages in flight without a sender.
    tasks: Mutex<JoinSet<()>>,
    pub rules: tokio::sync::Mutex<Rules>,
    events: Mutex<Vec<String>>,
    violations: Mutex<Vec<String>>,
}

impl World {
    /// Creates a world without a server. Rollouts have leases of `lease` seconds.
    pub fn new(random: Random, lease: f64) -> Arc<Self> {
        Arc::new(World {
            clock: SimulatedClock { start: Instant::now() },
            random: Mutex::new(random),
            faults: Mutex::default(),
            server: Mutex::default(),
            tasks: Mutex::default(),
            rules: tokio::sync::Mutex::new(Rules::new(lease)),
            events: Mutex::default(),
            violations: Mutex::default(),
        })
    }

    /// Calls a function with the random numbers and the current faults.
    pub fn with_random<T>(&self, choose: impl FnOnce(&mut Random, &Faults) -> T) -> T {
        choose(&mut self.random.lock().unwrap(), &self.faults.lock().unwrap())
    }

    /// Returns the current faults.
    pub fn faults(&self) -> Faults {
        self.faults.lock().unwrap().clone()
    }

    /// Changes the faults.
    pub fn set_faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.faults.lock().unwrap());
    }

    /// Isolates a node: no message from it or to it arrives.
    pub fn isolate(&self, node: &str) {
        self.note(node, "isolated");
        self.set_faults(|faults| {
            faults.isolated.insert(node.to_owned());
        });
    }

    /// Returns the server, or `None` if it is down.
    pub fn server(&self) -> Option<Arc<ServerProcess>> {
        self.server.lock().unwrap().clone()
    }

    /// Replaces the server, and returns the one before.
    pub fn set_server(&self, server: Option<Arc<ServerProcess>>) -> Option<Arc<ServerProcess>> {
        std::mem::replace(&mut *self.server.lock().unwrap(), server)
    }

    /// Starts a task of the network.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Ends all tasks of the network.
    pub fn stop(&self) {
        self.tasks.lock().unwrap().abort_all();
    }

    /// Records an event. The events of a seed are always the same.
    pub fn note(&self, node: &str, text: &str) {
        let millis = self.clock.start.elapsed().as_millis();
        self.events.lock().unwrap().push(format!("{millis:>7} {node}: {text}"));
    }

    /// Records a violation unless `holds`.
    pub fn check(&self, holds: bool, text: impl FnOnce() -> String) {
        if !holds {
            let text = text();
            self.note("VIOLATION", &text);
            self.violations.lock().unwrap().push(text);
        }
    }

    /// Returns the violations so far.
    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().unwrap().clone()
    }

    /// Returns the events so far.
    pub fn events(&self) -> Vec<String> {
        self.events.lock().unwrap().clone()
    }

    /// Checks the rules after a server has executed a request.
    pub async fn check_response(
        &self,
        process: &Arc<ServerProcess>,
        (node, method, sent): (&str, &str, &Bytes),
        response: &Response<Bytes>,
    ) {
        // A request that a killed server had executed is one whose response is lost.
        if !self.server().is_some_and(|current| Arc::ptr_eq(&current, process)) {
            return;
        }
        let mut rules = self.rules.lock().await;
        if response.status().is_success() {
            rules.check_response(self, &*process.store, (node, method, sent), response).await;
        }
        rules.check_store(self, &*process.store).await;
    }

    /// Records the writes that a response acknowledges to a client.
    pub async fn acknowledge(&self, method: &str, sent: &Bytes, response: &Response<Bytes>) {
        if response.status().is_success() {
            self.rules.lock().await.acknowledge(method, sent, response.body());
        }
    }
}
