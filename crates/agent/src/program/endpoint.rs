//! Endpoint of an attempt, as the client that makes the attempt receives it.

use serde::{Deserialize, Serialize};

/// Endpoint of an attempt's session: its address, keys and agents. This type contains secrets, so
/// it does not implement `Debug`.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionEndpoint {
    /// Base URL of the endpoint, without a trailing slash and without `/v1`.
    pub base_url: String,
    /// API key for model calls to the endpoint.
    pub key: String,
    /// Key with which a program posts rewards. `None` if the recipe accepts no rewards from
    /// programs.
    pub reward_key: Option<String>,
    /// Name of the policy that plays the attempt's own agent.
    pub model: String,
    /// Names of the agents as which the client can call the model. The first is the attempt's own
    /// agent.
    pub agents: Vec<String>,
}
