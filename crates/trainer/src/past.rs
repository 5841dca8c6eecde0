//! Past versions of trained policies, as opponents.
//!
//! A pool contains the newest snapshots of one trained policy, each in a sampler of its own. In
//! each attempt, one of the snapshots plays. The picker of an agent selects the snapshot from the
//! random stream of the attempt or, with `mixture = "group"`, of the group.
//!
//! # Guarantees
//! - **A function of the step.** The versions in the pool depend only on the number of steps that
//!   trained the policy, and a resumed run loads the same weights. So a resumed run selects the
//!   same opponents, with the same bits.
//! - **Complete or absent.** A snapshot is written to a temporary directory and then renamed. It
//!   stays as long as a checkpoint needs it.
//! - **Recorded.** Segments of the pool have its name as policy, and the version that sampled them.
//!   They are context for the trained policy.
//!
//! If attempts run ahead of training (`staleness` above 0), a snapshot can be replaced while it
//! plays: the attempt then continues with the newer one, and its segments have both versions.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use levade_policy::{
    Content, Learner, Manifest, PolicyError, Sampler, SavedFile, WeightsAt, WeightsLocation,
    WeightsRef, crash_point, uniform, update_sampler_weights,
};
use levade_recipe::{PastDraw, PastKeys, Recipe};
use levade_store::Attempt;
use levade_tree::{DEFAULT, agent_of};
use serde::{Deserialize, Serialize};

use crate::TrainerError;
use crate::checkpoint::{Checkpoint, Versions};
use crate::files::{create_empty_dir, file_error, sync_dir, write_atomically};
use crate::metrics::Metrics;
use crate::policies::Policies;
use crate::random::pool_random_counter;

/// Name of the directory, within a run directory, that contains the snapshots of all pools.
pub(crate) const DIR: &str = "past";
/// Name of the file that lists the files of a snapshot with their checksums.
const SNAPSHOT: &str = "snapshot.json";
/// Schema version of `snapshot.json` that this build reads and writes.
const SCHEMA: u32 = 1;

/// Contents of `snapshot.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Snapshot {
    schema: u32,
    content: Content,
    files: Vec<SavedFile>,
}

/// A pool of past versions of one policy, which play against the policy as opponents. A past
/// version is stored as a snapshot of the policy's weights.
pub(crate) struct PastVersionPool {
    name: String,
    keys: PastKeys,
    /// Samplers that serve the snapshots, by slot of the pool.
    samplers: Vec<Arc<dyn Sampler>>,
    /// Directory that contains the pool's snapshots.
    dir: PathBuf,
    /// Timeout for a sampler to load a snapshot.
    timeout: Duration,
    /// Counter of the random number that selects a snapshot for an attempt.
    counter: u64,
    /// Agent whose rewards are the score of an attempt, by which wins are counted.
    scored_agent: String,
    state: Mutex<PoolState>,
}

/// The part of a pool's state that changes while the run trains.
#[derive(Default)]
struct PoolState {
    /// Weight version of the trained policy when the pool last took or restored snapshots: the
    /// number of steps that had trained the policy.
    trained: u64,
    /// Results against each past version in the current phase, by version. [`PastDraw::Hardest`]
    /// selects by them.
    results: BTreeMap<u64, VersionResults>,
}

/// Number of attempts against a past version, and how many of them the trained policy won.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct VersionResults {
    attempts: u64,
    won: u64,
}

impl PastVersionPool {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn snapshot_dir(&self, version: u64) -> PathBuf {
        self.dir.join(format!("{version:06}"))
    }

    /// Returns the number of slots: the maximum number of snapshots that the pool can load at once.
    pub fn num_slots(&self) -> usize {
        self.samplers.len()
    }

    /// Selects a past version for the attempt with this random stream, and returns the version's
    /// slot.
    pub fn pick_slot(&self, seed: u64, stream: u64) -> usize {
        let state = self.state();
        let versions = self.keys.versions(state.trained);
        let newest = versions.clone().last().unwrap_or(0);
        let weight = |version: u64| match self.keys.draw {
            PastDraw::Uniform => 1.0,
            PastDraw::Newest => 0.5f64.powi(((newest - version) / self.keys.every) as i32),
            PastDraw::Hardest => {
                let VersionResults { attempts, won } =
                    state.results.get(&version).copied().unwrap_or_default();
                // One win and one loss in addition: a version without attempts counts as even.
                let won = (won + 1) as f64 / (attempts + 2) as f64;
                (1.0 - won).powi(2)
            }
        };
        let sum: f64 = versions.clone().map(weight).sum();
        let mut rest = uniform(seed, stream, self.counter) * sum;
        let picked = versions.clone().find(|version| {
            rest -= weight(*version);
            rest < 0.0
        });
        // Rounding may leave a rest.
        self.keys.slot(picked.unwrap_or(newest))
    }

    /// Saves the policy's current weights as a snapshot, and loads the snapshot into the sampler of
    /// its slot.
    async fn take_snapshot(&self, learner: &dyn Learner, version: u64) -> Result<(), TrainerError> {
        let dir = self.snapshot_dir(version);
        let temporary = self.dir.join(format!(".tmp-{version:06}"));
        create_empty_dir(&temporary)?;
        let Manifest { content, files, .. } = learner.save(&temporary, false).await?;
        let snapshot = Snapshot { schema: SCHEMA, content, files };
        let path = temporary.join(SNAPSHOT);
        let text = serde_json::to_string_pretty(&snapshot)
            .map_err(|error| file_error("write", &path, error.into()))?;
        write_atomically(&path, text.as_bytes())?;
        crash_point("snapshot_written");
        // A snapshot with this name is of steps that the run repeats.
        remove_dir(&dir)?;
        fs::rename(&temporary, &dir).map_err(|source| file_error("rename", &temporary, source))?;
        sync_dir(&self.dir)?;
        self.load_snapshot(version).await?;
        self.state().trained = version;
        Ok(())
    }

    /// Loads the snapshot of `version` into the sampler of its slot.
    async fn load_snapshot(&self, version: u64) -> Result<(), TrainerError> {
        let dir = self.snapshot_dir(version);
        let unusable = |why: String| TrainerError::Snapshot {
            pool: self.name.clone(),
            version,
            dir: dir.clone(),
            why,
        };
        let text = fs::read_to_string(dir.join(SNAPSHOT))
            .map_err(|error| unusable(format!("{SNAPSHOT}: {error}")))?;
        let Snapshot { schema, content, files } = serde_json::from_str(&text)
            .map_err(|error| unusable(format!("{SNAPSHOT}: {error}")))?;
        if schema != SCHEMA {
            return Err(unusable(format!(
                "the file {SNAPSHOT} has schema version {schema}, but this build reads version \
                 {SCHEMA}"
            )));
        }
        let manifest = Manifest { location: WeightsLocation::Local(dir.clone()), content, files };
        let weights = WeightsRef { version, at: WeightsAt::Manifest(manifest) };
        let sampler = Arc::clone(&self.samplers[self.keys.slot(version)]);
        let named = format!("the sampler of {} at version {version}", self.name);
        let loaded = update_sampler_weights(vec![(named, sampler)], &weights, self.timeout).await;
        loaded.map_err(|error| match error {
            PolicyError::WeightsNotLoaded(why) => unusable(why),
            error => error.into(),
        })
    }

    /// Returns the past version that played in an attempt, or `None` if no past version sampled a
    /// token there.
    fn played_version(&self, attempt: &Attempt) -> Option<u64> {
        let segments = attempt.trajectory.segments().iter();
        let mut own = segments.filter(|segment| segment.policy == self.name);
        own.find_map(|segment| Some(segment.versions.first()?.version))
    }

    /// Returns which past version played against the trained policy in an attempt, and whether the
    /// trained policy won. Returns `None` if they did not play against each other, or if both
    /// played the agent whose score counts.
    fn match_result(&self, attempt: &Attempt) -> Option<(u64, bool)> {
        let version = self.played_version(attempt)?;
        let cast = &attempt.outcome.cast;
        let plays = |policy: &str| cast.values().any(|playing| playing == policy);
        let is_scored = |policy: &str| {
            cast.iter()
                .any(|(name, playing)| playing == policy && agent_of(name) == self.scored_agent)
        };
        let (own, past) = (is_scored(&self.keys.of), is_scored(&self.name));
        let has_result = plays(&self.keys.of) && !(own && past);
        let score = attempt.score.filter(|_| has_result)?;
        Some((version, (score > 0.0) != past))
    }

    /// Removes all snapshots except those of `versions`.
    fn retain_snapshots(&self, versions: &[u64]) -> Result<(), TrainerError> {
        let failed = |source| file_error("list", &self.dir, source);
        for entry in fs::read_dir(&self.dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let version = name.to_str().and_then(|name| name.parse().ok());
            if version.is_some_and(|version| !versions.contains(&version)) {
                remove_dir(&self.dir.join(name))?;
            }
        }
        Ok(())
    }
}

/// Removes a directory with its contents, if it exists.
fn remove_dir(dir: &Path) -> Result<(), TrainerError> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(file_error("remove", dir, error))
        }
        _ => Ok(()),
    }
}

/// The pools of past versions of a run's policies.
#[derive(Clone, Default)]
pub(crate) struct PastVersionPools(Vec<Arc<PastVersionPool>>);

impl PastVersionPools {
    /// Creates the pools of a recipe. The policies with a pool's name provide its samplers, one for
    /// each slot.
    ///
    /// # Errors
    /// Returns an error if a pool has fewer samplers than snapshots.
    pub fn new(recipe: &Recipe, policies: &Policies) -> Result<Self, TrainerError> {
        let of = recipe.reward.of.as_str();
        let scored_agent = if of.is_empty() { DEFAULT } else { of };
        let pools = recipe.past_policies().map(|(name, keys)| {
            let samplers: Vec<_> = policies.samplers(name).take(keys.keep as usize).collect();
            if (samplers.len() as u64) < keys.keep {
                let missing = format!("sampler {} of the policy {name}", samplers.len() + 1);
                return Err(TrainerError::MissingPart(missing));
            }
            Ok(Arc::new(PastVersionPool {
                name: name.to_owned(),
                keys: keys.clone(),
                samplers,
                dir: recipe.run.folder.join(DIR).join(name),
                timeout: recipe.engine.max_call_timeout(),
                counter: pool_random_counter(name),
                scored_agent: scored_agent.to_owned(),
                state: Mutex::default(),
            }))
        });
        Ok(PastVersionPools(pools.collect::<Result<_, _>>()?))
    }

    /// Returns the pool called `name`.
    pub fn get(&self, name: &str) -> Option<&Arc<PastVersionPool>> {
        self.0.iter().find(|pool| pool.name == name)
    }

    /// Loads the snapshots that each pool contained at a checkpoint. `versions` are the policies'
    /// versions in that checkpoint. If it is `None`, no checkpoint exists, and the initial weights
    /// become the first snapshots.
    ///
    /// # Errors
    /// Returns an error that names the snapshot if a snapshot is missing or damaged, and an error
    /// if a file cannot be written.
    pub async fn restore(
        &self,
        policies: &Policies,
        versions: Option<&Versions>,
    ) -> Result<(), TrainerError> {
        for pool in &self.0 {
            let Some(versions) = versions else {
                pool.take_snapshot(&*policies.policy_learner(&pool.keys.of)?.learner, 0).await?;
                continue;
            };
            let trained = versions.get(&pool.keys.of).copied().unwrap_or_default();
            for version in pool.keys.versions(trained) {
                pool.load_snapshot(version).await?;
            }
            pool.state().trained = trained;
        }
        Ok(())
    }

    /// Takes the snapshots that are due after `policy` has published the weight version `version`.
    ///
    /// # Errors
    /// Returns an error if a snapshot cannot be written, or if its sampler fails to load it.
    pub async fn take_due_snapshots(
        &self,
        policies: &Policies,
        policy: &str,
        version: u64,
    ) -> Result<(), TrainerError> {
        for pool in self.0.iter().filter(|pool| pool.keys.of == policy) {
            if version.is_multiple_of(pool.keys.every) {
                pool.take_snapshot(&*policies.policy_learner(policy)?.learner, version).await?;
            }
        }
        Ok(())
    }

    /// Removes the snapshots that neither a pool nor one of the checkpoints `kept` needs.
    ///
    /// # Errors
    /// Returns an error if a directory cannot be listed or removed.
    pub fn prune(&self, kept: &[Checkpoint]) -> Result<(), TrainerError> {
        for pool in &self.0 {
            let of = &pool.keys.of;
            let trained = kept.iter().map(|checkpoint| checkpoint.version(of));
            let all = trained.chain([pool.state().trained]);
            let versions: Vec<u64> = all.flat_map(|trained| pool.keys.versions(trained)).collect();
            pool.retain_snapshots(&versions)?;
        }
        Ok(())
    }

    /// Returns whether the selection of past versions depends on the results of earlier attempts.
    pub fn needs_results(&self) -> bool {
        self.0.iter().any(|pool| pool.keys.draw == PastDraw::Hardest)
    }

    /// Clears the results against past versions. A phase starts without results.
    pub fn reset_results(&self) {
        self.0.iter().for_each(|pool| pool.state().results.clear());
    }

    /// Counts the results of attempts that a training step has used, in pools that select by
    /// results.
    pub fn record_results<'a>(&self, attempts: impl Iterator<Item = &'a Attempt> + Clone) {
        for pool in self.0.iter().filter(|pool| pool.keys.draw == PastDraw::Hardest) {
            let mut state = pool.state();
            for attempt in attempts.clone() {
                let Some((version, won)) = pool.match_result(attempt) else { continue };
                let results = state.results.entry(version).or_default();
                results.attempts += 1;
                results.won += u64::from(won);
            }
        }
    }

    /// Adds metrics of a step's attempts against each pool: their number, the age of the past
    /// versions, and the mean score. `version` returns the current weight version of a policy.
    pub fn add_metrics<'a>(
        &self,
        attempts: impl Iterator<Item = &'a Attempt> + Clone,
        version: impl Fn(&str) -> u64,
        metrics: &mut Metrics,
    ) {
        for pool in &self.0 {
            let played = attempts.clone().filter_map(|attempt| {
                let played = pool.played_version(attempt)?;
                Some((version(&pool.keys.of).saturating_sub(played) as f64, attempt.score))
            });
            let played: Vec<(f64, Option<f64>)> = played.collect();
            let name = |metric: &str| format!("past/{}/{metric}", pool.name);
            metrics.add(name("attempts"), played.len() as f64);
            metrics.add_spread(&name("age"), played.iter().map(|(age, _)| *age));
            let scores: Vec<f64> = played.iter().filter_map(|(_, score)| *score).collect();
            if !scores.is_empty() {
                metrics.add(name("score"), scores.iter().sum::<f64>() / scores.len() as f64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use levade_policy::{Simulator, SimulatorConfig};
    use levade_store::AttemptStart;
    use levade_tree::{AttemptId, AttemptSlot, Kind, Purpose, RunId, Segment, VersionRun};

    use super::*;

    /// Returns a pool of four versions after 40 steps: 10, 20, 30, 40.
    fn pool(draw: PastDraw) -> PastVersionPool {
        let sampler = || {
            let config = SimulatorConfig { rows: 1, ..SimulatorConfig::default() };
            Arc::new(Simulator::new(config)) as Arc<dyn Sampler>
        };
        PastVersionPool {
            name: "past".into(),
            keys: PastKeys { of: "a".into(), every: 10, keep: 4, draw },
            samplers: (0..4).map(|_| sampler()).collect(),
            dir: PathBuf::new(),
            timeout: Duration::ZERO,
            counter: pool_random_counter("past"),
            scored_agent: "wolf".into(),
            state: Mutex::new(PoolState { trained: 40, results: BTreeMap::new() }),
        }
    }

    /// Returns, for each version from the oldest on, the fraction of random streams in which the
    /// version plays.
    fn fractions(pool: &PastVersionPool) -> Vec<f64> {
        let picks: Vec<usize> = (0..20_000).map(|stream| pool.pick_slot(7, stream)).collect();
        assert_eq!(picks, (0..20_000).map(|stream| pool.pick_slot(7, stream)).collect::<Vec<_>>());
        let count = |slot| picks.iter().filter(|pick| **pick == slot).count() as f64 / 20_000.0;
        pool.keys.versions(40).map(|version| count(pool.keys.slot(version))).collect()
    }

    fn assert_close(found: &[f64], expected: [f64; 4]) {
        let close = found.iter().zip(expected).all(|(found, want)| (found - want).abs() < 0.015);
        assert!(found.len() == 4 && close, "{found:?} instead of {expected:?}");
    }

    #[test]
    fn pick_slot_follows_distribution() {
        assert_close(&fractions(&pool(PastDraw::Uniform)), [0.25; 4]);
        let newest = [1.0, 2.0, 4.0, 8.0].map(|weight| weight / 15.0);
        assert_close(&fractions(&pool(PastDraw::Newest)), newest);
        // Without results, all versions are equally hard.
        let hardest = pool(PastDraw::Hardest);
        assert_close(&fractions(&hardest), [0.25; 4]);
        // The policy wins 9 of 10 attempts against version 10, and 1 of 10 against version 40.
        for (version, won) in [(10, 8), (40, 0)] {
            hardest.state().results.insert(version, VersionResults { attempts: 8, won });
        }
        let weights = [0.01, 0.25, 0.25, 0.81].map(|weight| weight / 1.32);
        assert_close(&fractions(&hardest), weights);
    }

    /// Returns an attempt in which the policies of `cast` played agents, and sampled a token each
    /// at version 20.
    fn attempt(cast: &[(&str, &str)], score: f64) -> Attempt {
        let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample: 0 };
        let id = AttemptId::new(&RunId("r".into()), &slot, 0);
        let start = AttemptStart { id, slot, number: 0, task: serde_json::Value::Null };
        let mut attempt = Attempt { score: Some(score), ..Attempt::from_start(&start) };
        for (agent, policy) in cast {
            let segment = Segment {
                kind: Kind::Sampled,
                logprobs: vec![0.0],
                versions: vec![VersionRun { version: 20, len: 1 }],
                agent: (*agent).to_owned(),
                policy: (*policy).to_owned(),
                ..Segment::context(None, vec![1], 0)
            };
            attempt.trajectory.push(segment).unwrap();
            attempt.outcome.cast.insert((*agent).to_owned(), (*policy).to_owned());
        }
        attempt
    }

    #[test]
    fn match_result_belongs_to_trained_policy() {
        let pool = pool(PastDraw::Hardest);
        let result = |cast: &[(&str, &str)], score: f64| pool.match_result(&attempt(cast, score));
        let own = [("wolf@1", "a"), ("good@2", "past"), ("good@3", "a")];
        assert_eq!(
            [1.0, 0.0, -0.1].map(|score| result(&own, score)),
            [Some((20, true)), Some((20, false)), Some((20, false)),]
        );
        // The score belongs to the past version.
        let other = [("wolf@1", "past"), ("good@2", "a")];
        assert_eq!(
            [1.0, -1.0].map(|score| result(&other, score)),
            [Some((20, false)), Some((20, true)),]
        );
        for cast in [
            &[("wolf@1", "a"), ("wolf@2", "past")][..],
            &[("wolf@1", "past"), ("good@2", "first")],
            &[("wolf@1", "a"), ("good@2", "first")],
        ] {
            assert_eq!(result(cast, 1.0), None, "{cast:?}");
        }
    }

    /// Recorded runs depend on these picks.
    #[test]
    fn picks_are_stable_and_differ_between_pools() {
        let pool = pool(PastDraw::Uniform);
        let picks = |pool: &PastVersionPool| -> String {
            (0..16).map(|stream| pool.pick_slot(1, stream).to_string()).collect()
        };
        assert_eq!(picks(&pool), "1211231221322103");
        let other = PastVersionPool { counter: pool_random_counter("other"), ..pool };
        assert_eq!(picks(&other), "1213032322333232");
    }
}
