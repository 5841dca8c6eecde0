//! Endpoint of an attempt, as the client that makes the attempt receives it.

use serde::{Deserialize, Serialize};

/// Address, keys and agents of an attempt's session. It contains secrets and has no `Debug`.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionEndpoint {
    /// Base URL, without a trailing slash and without `/v1`.
    pub base_url: String,
    /// API key for calls to the endpoint.
    pub key: String,
    /// Key for posting rewards. `None` if the recipe takes no rewards of programs.
    pub reward_key: Option<String>,
    /// Name of the policy that plays the attempt's own agent.
    pub model: String,
    /// Agents as which the client can call. The first is the attempt's own agent.
    pub agents: Vec<String>,
}
