//! `[runners]`: attempts that other processes make.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// `[runners]`: attempts are made by runners (`levade runner`), on this host or others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunnersKeys {
    /// Store of rollouts from which runners lease attempts: the path of an SQLite file, which all
    /// processes of one host can share, or the `http://` or `https://` URL of `levade store serve`.
    pub store: String,
    /// Name of the queue; `run/NAME` with the name of the run if empty.
    #[serde(default)]
    pub queue: String,
    /// Address and port at which the gateway listens for model calls of the attempts. Port 0 takes
    /// a free port.
    #[serde(default = "loopback")]
    pub listen: String,
    /// URL by which runners reach the gateway; `http://` and the `listen` address if empty.
    #[serde(default)]
    pub gateway: String,
    /// Maximum time between two reports of a runner, in seconds. A runner reports six times in this
    /// time. Without a report, the attempt is lost, and another runner repeats it.
    #[serde(default = "sixty")]
    pub lease_seconds: f64,
    /// Timeout for a runner to lease the first waiting attempt, and for an unreachable store, in
    /// seconds.
    #[serde(default = "hour")]
    pub wait_seconds: f64,
    /// Directory of files that the recipe names. A runner looks for them in its own directory
    /// (`--dir`). By default the directory of the recipe.
    #[serde(default)]
    pub folder: PathBuf,
}

fn loopback() -> String {
    "127.0.0.1:0".into()
}

fn sixty() -> f64 {
    60.0
}

fn hour() -> f64 {
    3600.0
}

impl RunnersKeys {
    /// Returns the name of the queue of the run named `run`.
    pub fn queue_of(&self, run: &str) -> String {
        if self.queue.is_empty() { format!("run/{run}") } else { self.queue.clone() }
    }

    /// Returns the maximum time between two reports of a runner.
    pub fn lease(&self) -> Duration {
        Duration::from_secs_f64(self.lease_seconds)
    }

    /// Returns the timeout for a runner and for the store.
    pub fn wait(&self) -> Duration {
        Duration::from_secs_f64(self.wait_seconds)
    }
}
