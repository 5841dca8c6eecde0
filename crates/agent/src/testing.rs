//! Agents and contexts for tests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use levade_call::CallRecord;
use levade_conversation::{Format, Options, Origin};
use levade_policy::{FinishReason, Sampler, SamplingParams};
use levade_text::testing::tiny_chat;
use levade_tools::{ToolSet, Toolbox};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::AttemptContext;
use crate::roster::{Agent, AttemptLimits, Player};

/// Returns a player of the policy `policy`, whose completions come from `sampler`.
pub(crate) fn player(policy: &str, sampler: Arc<dyn Sampler>) -> Player {
    let format = Arc::new(Format::new(Arc::new(tiny_chat().unwrap()), Options::default()));
    Player::new(policy, sampler, format, 4096)
}

/// Returns an agent with these tools and one player.
pub(crate) fn agent(name: &str, player: Player, tools: Vec<Arc<dyn Toolbox>>) -> Agent {
    let limits = AttemptLimits {
        max_turns: 3,
        max_tokens: 1000,
        completion_timeout: Duration::from_secs(5),
        attempt_timeout: Duration::from_secs(60),
    };
    let tools = ToolSet::new(tools, Duration::from_secs(5)).unwrap();
    Agent { tools, ..Agent::new(name, player, limits) }
}

/// Returns the record of a call of `solver` that ended at a stop token.
pub(crate) fn call_record(turn: u32, summary: bool) -> CallRecord {
    CallRecord {
        agent: "solver".into(),
        model: "student".into(),
        external: false,
        summary,
        probe: false,
        origin: Some(Origin::Started),
        prompt: 5,
        tokens: 7,
        finish: FinishReason::StopId,
        error: None,
        turn: Some(turn),
        content: String::new(),
        calls: 1,
        malformed_calls: 0,
        interval: Default::default(),
    }
}

/// Returns the context of an attempt of the first of these agents.
pub(crate) fn context(agents: Vec<Agent>) -> AttemptContext {
    let params = SamplingParams { temperature: 0.9, ..SamplingParams::default() };
    AttemptContext { seed: 7, stream: 11, params, ..AttemptContext::new("a", agents) }
}

/// Posts a document to the gateway at `address`, and returns the status and the body of the
/// response. `headers` are complete lines.
pub(crate) async fn post_json(
    address: SocketAddr,
    path: &str,
    key: &str,
    headers: &str,
    body: &Value,
) -> (u16, Value) {
    let body = body.to_string();
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         authorization: Bearer {key}\r\n{headers}content-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    client.read_to_string(&mut response).await.unwrap();
    let status = response.split(' ').nth(1).unwrap().parse().unwrap();
    let (_, text) = response.split_once("\r\n\r\n").unwrap();
    (status, serde_json::from_str(text).unwrap_or_else(|_| panic!("{response}")))
}
