//! `[runners]`: attempts that other processes make.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// `[runners]`: settings of the runners (`levade runner`) that make the attempts, on this host or
/// other hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunnersKeys {
    /// Store of rollouts from which runners lease attempts: the path of an SQLite file, which all
    /// processes of one host can share, or the `http://` or `https://` URL of a
    /// `levade store serve` process.
    pub store: String,
    /// Name of the queue from which runners lease attempts. If empty, it is `run/NAME` with the
    /// name of the run.
    #[serde(default)]
    pub queue: String,
    /// Address and port at which the gateway listens for model calls of the attempts. Port 0
    /// selects a free port.
    #[serde(default = "default_listen")]
    pub listen: String,
    /// URL by which runners reach the gateway. If empty, it is `http://` with the address in
    /// `listen`.
    #[serde(default)]
    pub gateway: String,
    /// Maximum time between two reports of a runner, in seconds. A runner reports six times in this
    /// time. Without a report, its attempt counts as lost, and another runner repeats it.
    #[serde(default = "default_lease_seconds")]
    pub lease_seconds: f64,
    /// Maximum time until a runner leases the first waiting attempt, and maximum time for which the
    /// store may be unreachable, in seconds.
    #[serde(default = "default_wait_seconds")]
    pub wait_seconds: f64,
    /// Directory that contains the files named in the recipe. A runner looks for these files in its
    /// own directory (`--dir`). The default is the directory of the recipe.
    #[serde(default)]
    pub folder: PathBuf,
}

fn default_listen() -> String {
    "127.0.0.1:0".into()
}

fn default_lease_seconds() -> f64 {
    60.0
}

fn default_wait_seconds() -> f64 {
    3600.0
}

impl RunnersKeys {
    /// Returns the name of the queue for the run called `run`.
    pub fn queue_name(&self, run: &str) -> String {
        if self.queue.is_empty() { format!("run/{run}") } else { self.queue.clone() }
    }

    /// Returns the maximum time between two reports of a runner (`lease_seconds`).
    pub fn lease_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.lease_seconds)
    }

    /// Returns the maximum wait for the first runner, and for an unreachable store
    /// (`wait_seconds`).
    pub fn wait_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.wait_seconds)
    }
}
