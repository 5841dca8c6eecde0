//! Lets runners make the attempts of a run: announces its queue and its recipe in a store of
//! rollouts, and replaces the loops of its agents by leases.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use levade_agent::environments::{EnvironmentLoop, Environments};
use levade_agent::runner::{LeasedLoop, RunnerLoop, RunnerQueue, RunnerQueueOptions};
use levade_recipe::{AgentKind, Recipe, RunnersKeys};
use levade_store::Code;
use levade_store::rollouts::{Json, Resources, Rollouts, SystemClock};
use levade_store_client::worker::retry;
use levade_store_client::{open_rollouts, rollouts_file};
use levade_trainer::AgentSpec;
use serde::{Deserialize, Serialize};
use serde_json::value::to_raw_value;
use tokio::time::Instant;

use crate::failure::unusable;
use crate::host::Host;
use crate::programs::{GatewayAddress, ProgramGateway, takes_rewards};

/// Version of the protocol between a trainer and its runners. A runner with another version rejects
/// the run.
const PROTOCOL: u32 = 2;

/// Interval between repeated requests to a store that is unreachable.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Announcement of a run to runners, which the store contains as resources. The id of the resources
/// is the name of the run's queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Announcement {
    /// Version of the protocol. This first key identifies the resources as an announcement.
    pub levade_runner_protocol: u32,
    /// Recipe of the run in TOML, with the trainer's paths.
    pub recipe: String,
}

impl Announcement {
    /// Parses the announcement of a run from stored resources.
    ///
    /// # Errors
    /// Returns an error if the resources belong to another program or to another version of the
    /// protocol.
    pub fn parse(resources: &Resources) -> anyhow::Result<Self> {
        let Resources { id, value, .. } = resources;
        let parsed: Self = serde_json::from_str(value.get())
            .with_context(|| format!("the resources {id:?} do not announce a run"))?;
        if parsed.levade_runner_protocol == PROTOCOL {
            return Ok(parsed);
        }
        Err(unusable(format!(
            "the run of {id} uses version {} of the runners' protocol, but this runner uses \
             {PROTOCOL}; use the same version of levade for both",
            parsed.levade_runner_protocol
        )))
    }
}

/// Opens a store of rollouts. `location` is the path of an SQLite file, which is created if it does
/// not exist, or the URL of a server. Waits for the server for at most `wait`.
///
/// # Errors
/// Returns an error if the store cannot be opened.
pub async fn open_store(location: &str, wait: Duration) -> anyhow::Result<Arc<dyn Rollouts>> {
    let location = rollouts_file(location);
    if location.is_empty() {
        return Err(unusable("the store of runners is \"\"; name an SQLite file or a URL"));
    }
    let is_file = !location.contains("://");
    if location.starts_with("http") && !is_file && location.contains('@') {
        // The error must not show the key.
        return Err(unusable(
            "the URL of the store of runners must not contain a user or a key; set \
             LEVADE_STORE_KEY to the key",
        ));
    }
    if let Some(dir) =
        Path::new(location).parent().filter(|dir| is_file && !dir.as_os_str().is_empty())
    {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let start = Instant::now();
    loop {
        // The store client waits for `LEVADE_STORE_TIMEOUT`, which may be longer.
        let rest = wait.saturating_sub(start.elapsed()).max(RETRY_INTERVAL);
        let opening = open_rollouts(location, Arc::new(SystemClock::default()));
        let Ok(opened) = tokio::time::timeout(rest, opening).await else {
            anyhow::bail!(
                "cannot open the store of runners {location}: it did not respond within {wait:?}; \
                 check that `levade store serve` runs there"
            );
        };
        match opened {
            Ok(store) => return Ok(store),
            Err(error) if error.code() == Code::Unavailable && start.elapsed() < wait => {
                tracing::warn!(%error, "waiting for the store");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            Err(error) => {
                return Err(error).with_context(|| {
                    format!("cannot open the store of runners {location} within {wait:?}")
                });
            }
        }
    }
}

/// Replaces the loops of all agents with loops that lease attempts to runners, if the recipe has
/// `[runners]`. Returns the queue of the attempts, or `None` if this process makes the attempts.
///
/// # Errors
/// Returns an error if the store cannot be used within `runners.wait_seconds`, or if the address of
/// the gateway is in use.
pub async fn lease_attempts(
    recipe: &Recipe,
    parts: &mut [AgentSpec],
    environments: &Environments,
    host: &Host,
) -> anyhow::Result<Option<Arc<RunnerQueue>>> {
    let Some(keys) = &recipe.runners else { return Ok(None) };
    let queue = announce(recipe, keys, host).await?;
    // Only attempts that the run has opened can call this gateway.
    let address = GatewayAddress { listen: &keys.listen, url: &keys.gateway, keys: Vec::new() };
    let supervisor = host.supervisor().clone();
    let gateway = ProgramGateway::start(supervisor, Some(address)).await?.with_stop_by_host(host);
    for (name, keys) in recipe.agents() {
        let Some(parts) = parts.iter_mut().find(|parts| parts.name == name) else { continue };
        let program = gateway.program(keys, takes_rewards(&recipe.reward));
        let environments = environments.clone();
        let leased = match keys.kind {
            AgentKind::Tools => LeasedLoop::Tools(program),
            AgentKind::Program => LeasedLoop::Program(program),
            AgentKind::Environment => {
                LeasedLoop::Environment(EnvironmentLoop { program, environments })
            }
            // The recipe was rejected.
            AgentKind::Game | AgentKind::Session => continue,
        };
        parts.custom = Some(Arc::new(RunnerLoop { leased, queue: Arc::clone(&queue) }));
    }
    Ok(Some(queue))
}

/// Announces a run: puts its recipe into the store of runners, and cancels the rollouts that
/// earlier processes of the run left in its queue.
///
/// # Errors
/// Returns an error if the store cannot be used within `runners.wait_seconds`.
async fn announce(
    recipe: &Recipe,
    keys: &RunnersKeys,
    host: &Host,
) -> anyhow::Result<Arc<RunnerQueue>> {
    let store = open_store(&keys.store, keys.wait_timeout()).await?;
    let queue = keys.queue_name(&recipe.run.name);
    let announcement = Announcement { levade_runner_protocol: PROTOCOL, recipe: recipe.to_toml()? };
    let value: Json = to_raw_value(&announcement)?;
    let put = || store.put_resources(Some(&queue), &value);
    let resources = retry(&*store, "announce the run to runners", keys.wait_timeout(), put).await?;
    let options = RunnerQueueOptions {
        store: keys.store.clone(),
        queue: queue.clone(),
        resources_id: resources.id,
        recipe_version: resources.version,
        lease: keys.lease_timeout(),
        wait: keys.wait_timeout(),
    };
    let noticed = host.clone();
    let queued = RunnerQueue::new(Arc::clone(&store), options, move |text| noticed.note(text));
    let cancel = || queued.cancel_all();
    retry(&*store, "cancel earlier attempts", keys.wait_timeout(), cancel).await?;
    let text = format!("make the attempts of {queue}: levade runner --store {}", keys.store);
    host.setup("runners", text);
    Ok(queued)
}

#[cfg(test)]
mod tests {
    use levade_store::rollouts::ANNOUNCEMENT_KEY;

    use super::*;

    #[test]
    fn announcement_starts_with_the_key_that_stores_look_for() {
        let announcement = Announcement { levade_runner_protocol: PROTOCOL, recipe: String::new() };
        let json = serde_json::to_string(&announcement).unwrap();
        assert!(json.starts_with(&format!("{{\"{ANNOUNCEMENT_KEY}\"")), "{json}");
    }

    #[tokio::test]
    async fn open_store_rejects_empty_and_keyed_locations() {
        for location in ["", "http://user:secret@127.0.0.1:1"] {
            let error = open_store(location, Duration::from_secs(60)).await.err().unwrap();
            let text = error.to_string();
            assert!(text.contains("store of runners") && !text.contains("secret"), "{text}");
        }
    }

    #[tokio::test]
    async fn open_store_waits_no_longer_than_its_limit() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let opened = open_store(&url, Duration::from_millis(100));
        let opened = tokio::time::timeout(Duration::from_secs(30), opened).await.unwrap();
        let text = opened.err().unwrap().to_string();
        assert!(text.contains(&url) && text.contains("levade store serve"), "{text}");
    }
}
