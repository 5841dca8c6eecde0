//! Agents that run elsewhere: `[[tasks]] kind = "sessions"`, their recorded sessions, and
//! `[sessions]`, the gateway at which they start the attempts of a run.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// `[[tasks]] kind = "sessions"`: tasks whose attempts are copied from recorded sessions. Nothing
/// is sampled for them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionKeys {
    /// Directory into which `levade serve --record` wrote the sessions.
    pub path: PathBuf,
    /// Name of the agent to which the sessions are attributed. By default, it is the agent of
    /// `[agent]`.
    pub agent: String,
}

/// `[sessions]`: gateway at which agents of kind `session` start attempts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionGatewayKeys {
    /// Address and port at which the gateway listens. Port 0 selects a free port.
    pub listen: String,
    /// URL by which agents reach the gateway. If empty, it is `http://` with the address in
    /// `listen`.
    pub gateway: String,
    /// Name of the environment variable that contains the access keys for starting sessions,
    /// separated by commas.
    pub key_env: String,
    /// Maximum time for which attempts wait while no agent has a session open, in seconds.
    pub wait_seconds: f64,
    /// Maximum time between two calls of an agent in a session, in seconds. After it, the agent
    /// counts as lost, and its attempt is repeated.
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
    /// Returns the maximum time for which attempts wait while no agent has a session open
    /// (`wait_seconds`).
    pub fn wait_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.wait_seconds)
    }

    /// Returns the maximum time between two calls of an agent in a session (`silence_seconds`).
    pub fn silence_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.silence_seconds)
    }
}
