//! Agents that run elsewhere: `[[tasks]] kind = "sessions"`, their recorded sessions, and
//! `[sessions]`, the gateway at which they start the attempts of a run.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// `[[tasks]] kind = "sessions"`: tasks whose attempts are copies of recorded sessions. Nothing is
/// sampled for them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionKeys {
    /// Directory into which `levade serve --record` has written the sessions.
    pub path: PathBuf,
    /// Name of the agent to which the sessions are attributed; by default the agent of `[agent]`.
    pub agent: String,
}

/// `[sessions]`: gateway at which agents of kind `session` start attempts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionGatewayKeys {
    /// Address and port at which the gateway listens. Port 0 takes a free port.
    pub listen: String,
    /// URL by which agents reach the gateway; `http://` and the `listen` address if empty.
    pub gateway: String,
    /// Environment variable with the keys that start sessions, separated by commas.
    pub key_env: String,
    /// Timeout for an agent to start a session while attempts wait and no session is open, in
    /// seconds.
    pub wait_seconds: f64,
    /// Time without a call after which the agent of a session counts as lost, in seconds. Its
    /// attempt is then repeated.
    pub silence_seconds: f64,
}

impl Default for SessionGatewayKeys {
    fn default() -> Self {
        SessionGatewayKeys {
            listen: "127.0.0.1:0".into(),
            gateway: String::new(),
            key_env: "LEVADE_API_KEYS".into(),
            wait_seconds: 3600.0,
            silence_seconds: 600.0,
        }
    }
}

impl SessionGatewayKeys {
    /// Returns the timeout for an agent to start a session.
    pub fn wait(&self) -> Duration {
        Duration::from_secs_f64(self.wait_seconds)
    }

    /// Returns the time without a call after which the agent of a session counts as lost.
    pub fn silence(&self) -> Duration {
        Duration::from_secs_f64(self.silence_seconds)
    }
}
