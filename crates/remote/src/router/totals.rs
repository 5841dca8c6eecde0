//! Totals over replicas: load, device counters, and time paused.

use std::sync::Arc;
use std::time::Duration;

use levade_policy::{DeviceStats, Load, PolicyError};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use super::pool::ReplicaPool;
use super::replica::{Health, Replica};

/// Sums of the counters of all replicas. They still include the counters of replicas that are
/// unreachable or have restarted. A query locks the sums until all replicas have answered, so a
/// later result is never older than an earlier one.
#[derive(Debug)]
pub(crate) struct ReplicaTotals {
    replicas: Mutex<Vec<ReplicaStats>>,
    /// Time in which each replica was paused, and the total time in which any replica was paused.
    paused: Mutex<(Vec<Duration>, Duration)>,
}

/// Counters of one replica, as it last reported them.
#[derive(Debug, Clone, Default)]
struct ReplicaStats {
    /// Sums of the counters of the replica's earlier processes.
    before: DeviceStats,
    /// Counters of the replica's current process. `None` if it has reported none.
    now: Option<DeviceStats>,
}

/// Adds two sets of counters. Takes `cache_filled`, which is a fraction, from `b`.
fn add_stats(a: &DeviceStats, b: &DeviceStats) -> DeviceStats {
    DeviceStats {
        prefix_hits: a.prefix_hits + b.prefix_hits,
        prefilled: a.prefilled + b.prefilled,
        sampled: a.sampled + b.sampled,
        busy_seconds: a.busy_seconds + b.busy_seconds,
        running_seconds: a.running_seconds + b.running_seconds,
        cache_in_use_seconds: a.cache_in_use_seconds + b.cache_in_use_seconds,
        cache_filled: b.cache_filled,
    }
}

impl ReplicaStats {
    fn update(&mut self, stats: DeviceStats) {
        // Counters only rise within one process; a lower value means a restart.
        if let Some(past) = self
            .now
            .take()
            .filter(|past| stats.sampled < past.sampled || stats.prefilled < past.prefilled)
        {
            self.before = add_stats(&self.before, &past);
        }
        self.now = Some(stats);
    }
}

/// Queries all replicas that are not quarantined, concurrently. Replicas whose query fails are
/// omitted from the result.
async fn query_replicas<T: Send + 'static, F>(
    pool: &ReplicaPool,
    what: &'static str,
    question: impl Fn(Arc<Replica>) -> F,
) -> Vec<(usize, T)>
where
    F: Future<Output = Result<T, PolicyError>> + Send + 'static,
{
    let mut calls = JoinSet::new();
    for replica in pool.replicas_up_to(Health::Suspected) {
        let pending = question(replica.clone());
        let timeout = pool.options.response_timeout;
        calls.spawn(async move {
            (replica.index, replica.call_with_timeout(timeout, what, pending).await)
        });
    }
    let mut responses = Vec::new();
    for (index, response) in calls.join_all().await {
        match response {
            Ok(response) => responses.push((index, response)),
            Err(error) => {
                if let Some(replica) = pool.replica(index) {
                    pool.record_error(&replica, &error);
                }
            }
        }
    }
    responses.sort_by_key(|(index, _)| *index);
    responses
}

impl ReplicaTotals {
    pub fn new(replicas: usize) -> Self {
        ReplicaTotals {
            replicas: Mutex::new(vec![ReplicaStats::default(); replicas]),
            paused: Mutex::new((vec![Duration::ZERO; replicas], Duration::ZERO)),
        }
    }

    /// Returns the oldest version of the weights on the serving replicas, or on the suspected
    /// replicas if no replica serves.
    pub async fn version(&self, pool: &ReplicaPool) -> Result<u64, PolicyError> {
        let versions =
            query_replicas(pool, "report the version of its weights", |replica| async move {
                replica.sampler.version().await
            });
        let versions: Vec<(usize, u64)> = versions.await;
        let health = |index| pool.replica(index).map(|replica| replica.health());
        let min_version = versions
            .iter()
            .filter(|(index, _)| health(*index) == Some(Health::Serving))
            .map(|(_, version)| *version)
            .min();
        min_version
            .or_else(|| versions.iter().map(|(_, v)| *v).min())
            .ok_or_else(|| pool.no_replica_error())
    }

    /// Returns the load of the router: the number of requests on all replicas and in the router's
    /// queue, and the mean fraction of the caches that is in use.
    pub async fn load(&self, pool: &ReplicaPool, waiting: usize) -> Load {
        let loads = query_replicas(pool, "report its load", |replica| async move {
            replica.sampler.workload().await
        });
        let mut total = Load { waiting, ..Load::default() };
        let loads: Vec<(usize, Load)> = loads.await;
        for (_, load) in &loads {
            total.running += load.running;
            total.waiting += load.waiting;
            total.cache_in_use += load.cache_in_use / loads.len() as f64;
        }
        total
    }

    /// Returns the sums of all device counters. The fraction of filled cache is the mean over the
    /// replicas. `None` if no replica has reported counters.
    pub async fn stats(&self, pool: &ReplicaPool) -> Option<DeviceStats> {
        let mut replicas = self.replicas.lock().await;
        let found = query_replicas(pool, "report its device statistics", |replica| async move {
            replica.sampler.device_stats().await
        });
        let found: Vec<(usize, Option<DeviceStats>)> = found.await;
        for (index, stats) in found {
            if replicas.len() <= index {
                replicas.resize_with(index + 1, ReplicaStats::default);
            }
            if let Some(stats) = stats {
                replicas[index].update(stats);
            }
        }
        let known: Vec<DeviceStats> = replicas
            .iter()
            .filter_map(|known| Some(add_stats(&known.before, known.now.as_ref()?)))
            .collect();
        let mut total =
            known.iter().fold(DeviceStats::default(), |total, stats| add_stats(&total, stats));
        total.cache_filled =
            known.iter().map(|stats| stats.cache_filled).sum::<f64>() / known.len() as f64;
        (!known.is_empty()).then_some(total)
    }

    /// Returns the total time in which replicas were paused. Simultaneous pauses, for example of
    /// devices that train together, count once, with the duration of the longest.
    pub async fn paused(&self, pool: &ReplicaPool) -> Duration {
        let mut known = self.paused.lock().await;
        let (replicas, total) = &mut *known;
        let found = query_replicas(pool, "report how long it was paused", |replica| async move {
            replica.sampler.paused().await
        });
        let found: Vec<(usize, Duration)> = found.await;
        let count = found.iter().map(|(index, _)| index + 1).max().unwrap_or(0);
        replicas.resize(replicas.len().max(count), Duration::ZERO);
        let grew = found.into_iter().map(|(index, paused)| {
            let before = std::mem::replace(&mut replicas[index], paused);
            // A restarted replica counts from 0.
            if paused < before { paused } else { paused - before }
        });
        *total += grew.max().unwrap_or_default();
        *total
    }
}
