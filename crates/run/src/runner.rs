//! Runners: processes that lease attempts of runs from a store of rollouts, and make them.
//!
//! A runner needs no recipe file: the run has announced its recipe in the store. The model is
//! called at the address that each attempt contains. One runner serves many runs.
//!
//! Leases, heartbeats, draining and outages are those of [`levade_store_client::worker`].

mod loaded_recipe;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_agent::runner::{AttemptReport, LeasedAttempt, WorkerStats, evaluation_queue_name};
use levade_store::rollouts::{
    Json, LeaseEnd, PageRequest, ResourcesFilter, Rollout, Rollouts, SortOrder,
};
use levade_store_client::worker::{RolloutExecutor, WorkerOptions, retry, run_worker};
use serde_json::value::to_raw_value;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

use crate::external::create_session_api;
use crate::host::Host;
use crate::runners::Announcement;
use loaded_recipe::LoadedRecipe;

/// Interval between two searches for announced runs while no run is announced.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// Prefix of the queue names of runs.
const QUEUE_PREFIX: &str = "run/";

/// Kind of attempts that a runner makes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AttemptFilter {
    /// The runner makes all attempts.
    #[default]
    All,
    /// The runner makes all attempts except those of evaluations.
    Training,
    /// The runner makes only attempts of evaluations.
    Evaluation,
}

impl AttemptFilter {
    /// Returns the names of the queues to lease from. `runs` are the names of the queues of runs.
    fn queues(self, runs: Vec<String>) -> Vec<String> {
        let evaluations = runs.iter().map(|queue| evaluation_queue_name(queue));
        match self {
            AttemptFilter::All => {
                let evaluations: Vec<String> = evaluations.collect();
                [runs, evaluations].concat()
            }
            AttemptFilter::Training => runs,
            AttemptFilter::Evaluation => evaluations.collect(),
        }
    }
}

/// Options of a runner, which makes attempts of runs.
pub struct RunnerOptions {
    /// Store from which the runner leases attempts.
    pub store: Arc<dyn Rollouts>,
    /// Name of the queue from which the runner leases. If `None`, the runner leases from the queues
    /// of all announced runs.
    pub queue: Option<String>,
    /// Kind of attempts that the runner makes.
    pub filter: AttemptFilter,
    /// Maximum number of concurrent attempts, at least 1.
    pub slots: usize,
    /// Name of the runner, unique in the store.
    pub name: String,
    /// Whether the runner exits after the attempts of its first leases have ended.
    pub once: bool,
    /// Directory that contains the files that recipes name.
    pub dir: PathBuf,
    /// Maximum wait for an unreachable store, and for the first announced run.
    pub wait: Duration,
    /// Time that attempts in progress have to end after a request to stop.
    pub drain: Duration,
}

/// Leases and makes attempts until a stop is requested. The first item of `requests` drains the
/// runner: it takes no new attempts. The second item stops its attempts.
///
/// # Errors
/// Returns an error if the store is unreachable, or if no run is announced, for longer than
/// [`RunnerOptions::wait`].
pub async fn run(
    options: RunnerOptions,
    host: Host,
    requests: UnboundedReceiver<()>,
) -> anyhow::Result<()> {
    let RunnerOptions { store, queue, filter, slots, name, once, dir, wait, drain } = options;
    let worker = WorkerOptions { store: Arc::clone(&store), slots, name, once, wait, drain };
    let recipes = tokio::sync::Mutex::default();
    let runner = Runner { store, queue, filter, slots, dir, wait, host, recipes };
    run_worker(worker, Arc::new(runner), requests).await
}

/// Runner with the attempts that it is making.
struct Runner {
    store: Arc<dyn Rollouts>,
    queue: Option<String>,
    filter: AttemptFilter,
    slots: usize,
    dir: PathBuf,
    wait: Duration,
    host: Host,
    /// Recipes by id and version of their resources.
    recipes: tokio::sync::Mutex<HashMap<(String, u64), Arc<LoadedRecipe>>>,
}

#[async_trait]
impl RolloutExecutor for Runner {
    type Error = anyhow::Error;

    /// Returns the names of the queues to lease from. Waits until a run is announced.
    async fn queues(&self) -> anyhow::Result<Vec<String>> {
        let Runner { store, queue, filter: attempts, wait, .. } = self;
        if let Some(queue) = queue {
            return Ok(attempts.queues(vec![queue.clone()]));
        }
        let id_contains = Some(QUEUE_PREFIX.to_owned());
        let filter = ResourcesFilter { id_contains, ..ResourcesFilter::default() };
        let newest = PageRequest {
            sort_by: Some("update_time".into()),
            order: SortOrder::Desc,
            ..PageRequest::default()
        };
        let start = Instant::now();
        let mut is_noted = false;
        loop {
            let query = || store.query_resources(&filter, &newest);
            let found = retry(&**store, "look for runs", *wait, query).await?.items;
            let ids = found.into_iter().map(|resources| resources.id);
            let queues: Vec<String> = ids.filter(|id| id.starts_with(QUEUE_PREFIX)).collect();
            if !queues.is_empty() {
                return Ok(attempts.queues(queues));
            }
            if start.elapsed() > *wait {
                anyhow::bail!(
                    "no run was announced at {} within {wait:?}; start one whose recipe has \
                     runners.store, or name its queue with --queue",
                    store.location()
                );
            }
            if !is_noted {
                is_noted = true;
                self.note(format!("waiting for a run to be announced at {}", store.location()));
            }
            tokio::time::sleep(SEARCH_INTERVAL).await;
        }
    }

    async fn execute(&self, rollout: &Rollout) -> (LeaseEnd, Option<Json>) {
        let report = self.make_attempt(rollout).await;
        let end = match &report {
            AttemptReport::Failed { why } => {
                self.note(format!("an attempt of {} could not be made: {why}", rollout.queue));
                LeaseEnd::Failed
            }
            _ => LeaseEnd::Succeeded,
        };
        // A report has no values that JSON cannot represent.
        (end, to_raw_value(&report).ok())
    }

    fn stats(&self, queues: Vec<String>, running: usize) -> Option<Json> {
        to_raw_value(&WorkerStats { queues, slots: self.slots, running }).ok()
    }

    fn note(&self, text: String) {
        self.host.note(text);
    }
}

impl Runner {
    /// Makes a leased attempt. If the attempt fails, the report contains the error.
    async fn make_attempt(&self, rollout: &Rollout) -> AttemptReport {
        let made = async {
            let leased: LeasedAttempt = serde_json::from_str(rollout.input.get())?;
            let recipe = self.load_recipe(&leased.resources_id, leased.recipe_version).await?;
            let agent = recipe.agent(&leased.agent)?;
            // The gateway enforces the timeout of completions.
            let timeout = leased.limits.attempt_timeout;
            let api = create_session_api(&leased.endpoint, timeout)?;
            anyhow::Ok(agent.run(leased, api).await)
        };
        made.await.unwrap_or_else(|error| AttemptReport::Failed { why: format!("{error:#}") })
    }

    /// Returns the recipe of a run. The recipe is read only once.
    async fn load_recipe(&self, id: &str, version: u64) -> anyhow::Result<Arc<LoadedRecipe>> {
        let mut recipes = self.recipes.lock().await;
        let key = (id.to_owned(), version);
        if let Some(recipe) = recipes.get(&key) {
            return Ok(Arc::clone(recipe));
        }
        let Runner { store, dir, wait, .. } = self;
        let read = || store.resources(Some(id), Some(version));
        let resources = retry(&**store, "read the recipe", *wait, read).await?;
        let missing =
            || anyhow::anyhow!("the store contains no version {version} of the recipe {id}");
        let announcement = Announcement::parse(&resources.ok_or_else(missing)?)?;
        let supervisor = self.host.supervisor();
        let recipe = LoadedRecipe::new(&announcement.recipe, id, dir, supervisor)?;
        self.host.note(format!("making attempts of {id}, version {version}"));
        let recipe = Arc::new(recipe);
        // Older versions of the run have no attempts to lease.
        recipes.retain(|(other, _), _| other != id);
        recipes.insert(key, Arc::clone(&recipe));
        Ok(recipe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_selects_queues_of_training_and_evaluation() {
        let queues = |filter: AttemptFilter| filter.queues(vec!["run/a".into(), "run/b".into()]);
        assert_eq!(queues(AttemptFilter::Training), ["run/a", "run/b"]);
        let evaluations = ["run/a/evaluation", "run/b/evaluation"];
        assert_eq!(queues(AttemptFilter::Evaluation), evaluations);
        assert_eq!(queues(AttemptFilter::All), [&["run/a", "run/b"][..], &evaluations].concat());
    }
}
