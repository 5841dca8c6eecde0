//! Runners of a simulation. Their agent is a program that calls the model several times and then
//! reports a reward, which follows from the completions.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_agent::runner::{AttemptReport, LeasedAttempt};
use levade_store::rollouts::{Json, LeaseEnd, Rollout, Rollouts};
use levade_store_client::worker::{RolloutExecutor, WorkerOptions, run_worker};
use levade_store_client::{HttpRollouts, ServiceOptions};
use serde::{Deserialize, Serialize};
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::gateways::{Gateways, ModelCall};
use crate::network::{Link, URL};
use crate::world::World;

/// Queue of the run.
pub const QUEUE: &str = "run/simulated";

/// Timeout for an unreachable store, after which a process ends.
pub const WAIT: Duration = Duration::from_secs(60);

/// Timeout for one request to the store.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// Maximum time in milliseconds that a stopping runner waits for its attempts. Many attempts take
/// longer, so that their leases are returned.
const MAX_DRAIN: u64 = 15_000;

/// Timeout of one call of the model.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of a call with its retries. It is shorter than the time for which the gateway remembers
/// a call.
const RETRY_TIMEOUT: Duration = Duration::from_secs(45);

pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Connects a node to the server.
pub async fn connect(world: &Arc<World>, node: &str) -> Result<Arc<dyn Rollouts>, Failure> {
    let link = Link { world: Arc::clone(world), node: node.to_owned() };
    let options = ServiceOptions { key: None, timeout: REQUEST_TIMEOUT };
    Ok(Arc::new(HttpRollouts::connect_over(Arc::new(link), URL, &options).await?))
}

/// Last line that the agent prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastLine {
    pub reward: f64,
    /// Number of tokens of all completions.
    pub tokens: u64,
    /// Number of model calls.
    pub calls: u32,
}

/// Returns the slot and the number of the try that a rollout contains.
pub fn attempt_of(rollout: &Rollout) -> (String, u32) {
    let leased: LeasedAttempt = serde_json::from_str(rollout.input.get()).unwrap();
    let (slot, number) = leased.name.split_once(", try ").unwrap_or((&leased.name, "0"));
    (slot.to_owned(), number.parse().unwrap())
}

/// Work of a simulated runner.
struct Sampling {
    world: Arc<World>,
    gateways: Arc<Gateways>,
    name: String,
}

impl Sampling {
    /// Waits for the time that the agent needs between calls.
    async fn think(&self) {
        let time = self.world.with_random(|random, _| {
            let longest = if random.percent(15) { 25_000 } else { 2_500 };
            random.millis(10..longest)
        });
        tokio::time::sleep(time).await;
    }

    /// Calls the model. Retries while the gateway is unreachable.
    async fn call(&self, call: ModelCall) -> Result<Value, String> {
        let start = Instant::now();
        for retries in 0.. {
            let call = ModelCall { retries, ..call.clone() };
            let called =
                tokio::time::timeout(CALL_TIMEOUT, self.gateways.call(&self.world, call)).await;
            let why = match called {
                Ok(Ok((200, document))) => {
                    self.world.note(&self.name, "call: status 200");
                    return Ok(document);
                }
                Ok(Ok((status, document))) if !matches!(status, 408 | 409 | 429 | 500..) => {
                    return Err(format!("status {status}: {document}"));
                }
                Ok(Ok((status, _))) => format!("status {status}"),
                Ok(Err(why)) => why,
                Err(_) => "no response".to_owned(),
            };
            self.world.note(&self.name, &format!("call: {why}"));
            if start.elapsed() > RETRY_TIMEOUT {
                return Err(format!("the gateway is unreachable: {why}"));
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        unreachable!("the loop ends by returning")
    }

    async fn run(
        &self,
        leased: &LeasedAttempt,
        attempt: (String, u32),
    ) -> Result<LastLine, String> {
        let mut messages = vec![json!({"role": "user", "content": "What is 2 + 3?"})];
        // The same try at the same slot always makes the same calls.
        let calls = 1 + (leased.stream % 3) as u32;
        let (mut tokens, mut sum) = (0, 0);
        for _ in 0..calls {
            self.think().await;
            let call = ModelCall {
                node: self.name.clone(),
                base_url: leased.endpoint.base_url.clone(),
                key: leased.endpoint.key.clone(),
                attempt: attempt.clone(),
                retries: 0,
                body: json!({
                    "model": leased.endpoint.model, "messages": messages, "max_tokens": 12,
                }),
            };
            let document = self.call(call).await?;
            tokens += document["usage"]["completion_tokens"].as_u64().unwrap();
            let content = &document["choices"][0]["message"]["content"];
            let content = content.as_str().unwrap_or_default();
            sum += content.bytes().map(u32::from).sum::<u32>();
            messages.push(json!({"role": "assistant", "content": content}));
            messages.push(json!({"role": "user", "content": "Go on."}));
        }
        self.think().await;
        Ok(LastLine { reward: f64::from(sum % 97) / 97.0, tokens, calls })
    }
}

#[async_trait]
impl RolloutExecutor for Sampling {
    type Error = Failure;

    async fn queues(&self) -> Result<Vec<String>, Failure> {
        Ok(vec![QUEUE.to_owned()])
    }

    async fn execute(&self, rollout: &Rollout) -> (LeaseEnd, Option<Json>) {
        let leased: LeasedAttempt = serde_json::from_str(rollout.input.get()).unwrap();
        let attempt = attempt_of(rollout);
        self.gateways.lease(&attempt);
        let made = self.run(&leased, attempt).await;
        let (code, stdout, stderr) = match made {
            Ok(line) => (0, serde_json::to_string(&line).unwrap(), String::new()),
            Err(why) => (1, String::new(), why),
        };
        let report = AttemptReport::Program { code: Some(code), stdout, stderr };
        (LeaseEnd::Succeeded, Some(to_raw_value(&report).unwrap()))
    }

    fn stats(&self, _: Vec<String>, _: usize) -> Option<Json> {
        None
    }

    fn note(&self, text: String) {
        self.world.note(&self.name, &text);
    }
}

/// Runs a runner until `requests` stop it, or until the store is unreachable for too long.
pub async fn run_runner(
    (world, gateways): (Arc<World>, Arc<Gateways>),
    name: String,
    slots: usize,
    requests: mpsc::UnboundedReceiver<()>,
) {
    let store = match connect(&world, &name).await {
        Ok(store) => store,
        Err(error) => return world.note(&name, &error.to_string()),
    };
    let work = Sampling { world: Arc::clone(&world), gateways, name: name.clone() };
    let drain = world.with_random(|random, _| random.millis(0..MAX_DRAIN));
    let options =
        WorkerOptions { store, slots, name: name.clone(), once: false, wait: WAIT, drain };
    let ended = run_worker(options, Arc::new(work), requests).await;
    world.note(&name, if ended.is_ok() { "ended" } else { "ended by an error" });
}
