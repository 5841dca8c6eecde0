//! Runner processes of a simulation.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Creates the future of a runner from its name, the number of its slots, and requests to stop.
pub type RunnerFactory = Arc<
    dyn Fn(String, usize, mpsc::UnboundedReceiver<()>) -> Pin<Box<dyn Future<Output = ()> + Send>>,
>;

/// A runner process, with the channel for requests to stop.
pub struct RunnerProcess {
    pub name: String,
    slots: usize,
    factory: RunnerFactory,
    task: JoinSet<()>,
    requests: mpsc::UnboundedSender<()>,
}

impl RunnerProcess {
    /// Starts a runner.
    pub fn start(name: String, slots: usize, factory: RunnerFactory) -> Self {
        let (requests, receiver) = mpsc::unbounded_channel();
        let mut task = JoinSet::new();
        task.spawn(factory(name.clone(), slots, receiver));
        RunnerProcess { name, slots, factory, task, requests }
    }

    /// Kills the process, and starts it again.
    pub fn restart(&mut self) {
        *self = RunnerProcess::start(self.name.clone(), self.slots, Arc::clone(&self.factory));
    }

    /// Asks the process to stop.
    pub fn request_stop(&self) {
        // The process may have ended.
        let _ = self.requests.send(());
    }

    /// Returns whether the process has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.task.try_join_next().is_some() || self.task.is_empty()
    }
}
