//! Chooses tasks by their pool, and by the success that the policy had at them before.
//!
//! The choice for a position is a function of the seed, the position, and the groups that earlier
//! steps have taken. After a resume, the same groups therefore lead to the same choices. A position
//! with a recorded attempt keeps the task of that attempt.
//!
//! # Choice
//! 1. **Pool.** The pools whose stage is reached are sampled by their weights.
//! 2. **Class.** A task whose estimated success p is outside of the band is chosen only by the
//!    fraction `retest` of the samples, the least recently measured one first. A task without an
//!    estimate is within the band.
//! 3. **Task.** Tasks within the band are sampled with weights 4 p (1 − p), and those without an
//!    estimate with weight 1. Without a band, the tasks of a pool are chosen once per epoch.
//!
//! # Gates
//! The success in a pool is the mean of the estimates of the [`GATE_TASKS`] tasks that were
//! measured last. The gate of a stage opens at `gate`, and closes below `back`.

use std::collections::{BTreeMap, HashMap};

use levade_policy::uniform;
use levade_recipe::CurriculumKeys;
use serde_json::Value;

use super::{Task, Tasks};
use crate::random::{curriculum_random_stream, shuffled_indices};

/// Maximum number of training tasks for a curriculum. Their estimates are kept in memory and summed
/// for each sampled task.
const MAX_TASKS: usize = 1 << 20;
/// Number of most recently measured tasks in a pool whose mean success opens and closes the pool's
/// gate.
const GATE_TASKS: usize = 64;
/// Minimum number of measured tasks before the gate of a pool can open, unless the pool has fewer
/// tasks.
const MIN_GATE_TASKS: usize = 8;
/// Minimum sampling weight of a task within the band. It applies to tasks that always or never
/// succeed.
const MIN_WEIGHT: f64 = 0.1;

/// Curriculum of a phase: samples training tasks by their pools and by the measured success at each
/// task.
pub(super) struct Curriculum {
    keys: CurriculumKeys,
    seed: u64,
    phase: u32,
    /// Estimated success at each training task, by task index.
    tasks: Vec<SuccessEstimate>,
    /// Task indices by task id. Several tasks can have the same id.
    by_id: HashMap<String, Vec<usize>>,
    /// Pools in the order of their stages, or of their first task if there are no stages.
    pools: Vec<TaskPool>,
    /// Number of measurements so far. A measurement is the result of one group.
    measurements: u64,
    /// Index of the task that was chosen for each position in the task order, until a step takes
    /// the group.
    chosen: BTreeMap<u64, usize>,
}

#[derive(Debug, Clone, Copy, Default)]
struct SuccessEstimate {
    pool: usize,
    /// Weighted sum of the scores. Earlier groups have smaller weights.
    successes: f64,
    /// Weighted number of attempts. Earlier groups have smaller weights. 0 before the first
    /// measurement.
    attempts: f64,
    /// Number of the last measurement of this task, from 1. 0 before the first measurement.
    measured_at: u64,
}

impl SuccessEstimate {
    /// Returns the estimated success in 0..=1, or `None` if the task was never measured.
    fn success(&self) -> Option<f64> {
        (self.measured_at > 0).then(|| self.successes / self.attempts)
    }
}

/// Tasks with one value of the field `pool_by`.
struct TaskPool {
    name: String,
    weight: f64,
    tasks: Vec<usize>,
    /// Whether the gate from this pool's stage to the next stage is open.
    is_open: bool,
    /// Positions in the task order that were assigned to the pool, in ascending order.
    positions: Vec<u64>,
    /// Most recently used epoch, with the order of the pool's tasks in that epoch.
    epoch: Option<(u32, Vec<u32>)>,
}

impl Curriculum {
    /// Creates the curriculum of a phase, without measurements.
    ///
    /// # Errors
    /// Returns a message if there are too many tasks, or if `weights` or `stages` do not name the
    /// pools of the tasks.
    pub fn new(
        keys: &CurriculumKeys,
        seed: u64,
        phase: u32,
        tasks: &Tasks,
    ) -> Result<Self, String> {
        let count = tasks.train_len();
        if count > MAX_TASKS {
            return Err(format!(
                "there are {count} training tasks, but a curriculum keeps estimates of at most \
                 {MAX_TASKS}; lower `train` or `limit` of a source"
            ));
        }
        let all = (0..count).filter_map(|index| tasks.train(index));
        Curriculum::from_tasks(keys, seed, phase, all)
    }

    fn from_tasks(
        keys: &CurriculumKeys,
        seed: u64,
        phase: u32,
        tasks: impl Iterator<Item = Task>,
    ) -> Result<Self, String> {
        let mut by_id: HashMap<String, Vec<usize>> = HashMap::new();
        let mut pools: Vec<TaskPool> = Vec::new();
        let mut estimates = Vec::new();
        for (index, task) in tasks.enumerate() {
            let value = pool_name(&task, &keys.pool_by);
            let name = value.ok_or_else(|| {
                format!("the task {} has no field `{}` (`pool_by`)", task.id, keys.pool_by)
            })?;
            let pool = pools.iter().position(|pool| pool.name == name).unwrap_or_else(|| {
                pools.push(TaskPool::new(name));
                pools.len() - 1
            });
            pools[pool].tasks.push(index);
            by_id.entry(task.id).or_default().push(index);
            estimates.push(SuccessEstimate { pool, ..SuccessEstimate::default() });
        }
        check_names("weights", keys.weights.keys(), &pools)?;
        check_names("stages", keys.stages.iter(), &pools)?;
        pools.sort_by_key(|pool| keys.stages.iter().position(|stage| *stage == pool.name));
        for (at, pool) in pools.iter_mut().enumerate() {
            pool.weight = keys.weights.get(&pool.name).copied().unwrap_or(pool.tasks.len() as f64);
            pool.tasks.iter().for_each(|index| estimates[*index].pool = at);
        }
        Ok(Curriculum {
            keys: keys.clone(),
            seed,
            phase,
            tasks: estimates,
            by_id,
            pools,
            measurements: 0,
            chosen: BTreeMap::new(),
        })
    }

    /// Returns the index of the task at a position in the task order: the task of a recorded
    /// attempt or, if there is none, a sampled task. Sampling avoids the tasks in `busy` if
    /// possible.
    pub fn choose_task(
        &mut self,
        position: u64,
        recorded: Option<&Value>,
        busy: &[usize],
    ) -> usize {
        let index = match recorded.and_then(|task| self.find_task(task)) {
            Some(index) => index,
            None => self.sample_task(position, busy),
        };
        self.assign_to_pool(position, index);
        self.chosen.insert(position, index);
        index
    }

    /// Updates the estimate of a task with the scores of a group that a step has taken. `task` is
    /// the recorded task of the group.
    pub fn measure(&mut self, position: u64, task: Option<&Value>, scores: &[f64]) {
        let chosen = self.chosen.remove(&position);
        let Some(index) = chosen.or_else(|| self.find_task(task?)) else { return };
        self.assign_to_pool(position, index);
        if scores.is_empty() {
            return;
        }
        self.measurements += 1;
        let memory = self.keys.memory;
        let successes: f64 = scores.iter().map(|score| score.clamp(0.0, 1.0)).sum();
        let estimate = &mut self.tasks[index];
        estimate.successes = memory * estimate.successes + successes;
        estimate.attempts = memory * estimate.attempts + scores.len() as f64;
        estimate.measured_at = self.measurements;
        let pool = estimate.pool;
        let success = self.pool_success(pool);
        let pool = &mut self.pools[pool];
        let Some(success) = success else { return };
        pool.is_open =
            if pool.is_open { success >= self.keys.back } else { success >= self.keys.gate };
    }

    /// Returns the estimated success at a task, rounded to four decimals. The number is recorded,
    /// and must be equal when it is read back.
    pub fn success(&self, task_index: usize) -> Option<f64> {
        let success = self.tasks.get(task_index)?.success()?;
        Some((success * 1e4).round() / 1e4)
    }

    /// Returns the metrics of the curriculum: the number of tasks in each class of difficulty, and
    /// the number of reached stages.
    pub fn metrics(&self) -> Vec<(&'static str, f64)> {
        let [low, high] = self.keys.band.unwrap_or([0.0, 1.0]);
        let count = |is_counted: &dyn Fn(Option<f64>) -> bool| {
            self.tasks.iter().filter(|task| is_counted(task.success())).count() as f64
        };
        vec![
            ("unknown", count(&|success| success.is_none())),
            ("hard", count(&|success| success.is_some_and(|success| success < low))),
            (
                "medium",
                count(&|success| success.is_some_and(|success| (low..=high).contains(&success))),
            ),
            ("easy", count(&|success| success.is_some_and(|success| success > high))),
            ("pools", self.reached_pools().len() as f64),
        ]
    }

    /// Returns the index of the training task with the id of the recorded task `task`, or `None` if
    /// the run has no such task.
    fn find_task(&self, task: &Value) -> Option<usize> {
        self.by_id.get(task["id"].as_str()?)?.first().copied()
    }

    /// Assigns a position in the task order to the pool of the task with this index.
    fn assign_to_pool(&mut self, position: u64, index: usize) {
        let positions = &mut self.pools[self.tasks[index].pool].positions;
        let at = positions.partition_point(|earlier| *earlier < position);
        if positions.get(at) != Some(&position) {
            positions.insert(at, position);
        }
    }

    /// Returns the indices of the pools whose stages are reached.
    fn reached_pools(&self) -> Vec<usize> {
        if self.keys.stages.is_empty() {
            return (0..self.pools.len()).collect();
        }
        let open = self.pools.iter().take_while(|pool| pool.is_open).count();
        (0..self.pools.len().min(open + 1)).collect()
    }

    /// Returns the mean success at the most recently measured tasks of a pool, or `None` if too few
    /// tasks were measured.
    fn pool_success(&self, pool: usize) -> Option<f64> {
        let tasks = &self.pools[pool].tasks;
        let mut measured: Vec<&SuccessEstimate> =
            tasks.iter().map(|index| &self.tasks[*index]).collect();
        measured.retain(|estimate| estimate.measured_at > 0);
        if measured.len() < MIN_GATE_TASKS.min(tasks.len()) {
            return None;
        }
        measured.sort_by_key(|estimate| std::cmp::Reverse(estimate.measured_at));
        measured.truncate(GATE_TASKS);
        let sum: f64 = measured.iter().filter_map(|estimate| estimate.success()).sum();
        Some(sum / measured.len() as f64)
    }

    /// Samples a task for a position in the task order. Avoids the tasks in `busy` if possible.
    fn sample_task(&mut self, position: u64, busy: &[usize]) -> usize {
        let stream = curriculum_random_stream(self.phase);
        let number = |index: u64| uniform(self.seed, stream, position * 3 + index);
        let reached = self.reached_pools();
        let weights: Vec<f64> = reached.iter().map(|pool| self.pools[*pool].weight).collect();
        let pool = reached[sample_weighted_index(&weights, number(0))];
        let Some([low, high]) = self.keys.band else {
            return self.next_task_of_epoch(pool, position);
        };
        let all = &self.pools[pool].tasks;
        let mut free: Vec<usize> =
            all.iter().copied().filter(|index| !busy.contains(index)).collect();
        if free.is_empty() {
            free.clone_from(all);
        }
        let success = |index: &usize| self.tasks[*index].success();
        let (inside, outside): (Vec<usize>, Vec<usize>) = free
            .into_iter()
            .partition(|index| success(index).is_none_or(|p| (low..=high).contains(&p)));
        let oldest = outside.iter().min_by_key(|index| self.tasks[**index].measured_at);
        match oldest {
            Some(oldest) if inside.is_empty() || number(1) < self.keys.retest => *oldest,
            _ => {
                let weight =
                    |index| success(index).map_or(1.0, |p| (4.0 * p * (1.0 - p)).max(MIN_WEIGHT));
                let weights: Vec<f64> = inside.iter().map(weight).collect();
                inside[sample_weighted_index(&weights, number(2))]
            }
        }
    }

    /// Returns the next task of the pool with this index. Each task of the pool occurs once per
    /// epoch.
    fn next_task_of_epoch(&mut self, index: usize, position: u64) -> usize {
        let pool = &mut self.pools[index];
        let before = pool.positions.partition_point(|earlier| *earlier < position);
        let epoch = (before / pool.tasks.len()) as u32;
        if pool.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            let numbers = [self.phase, index as u32, epoch];
            pool.epoch =
                Some((epoch, shuffled_indices(self.seed, "pool", &numbers, pool.tasks.len())));
        }
        let within = before % pool.tasks.len();
        pool.tasks[pool.epoch.as_ref().map_or(0, |(_, order)| order[within] as usize)]
    }
}

impl TaskPool {
    fn new(name: String) -> Self {
        let (tasks, positions, epoch) = (Vec::new(), Vec::new(), None);
        TaskPool { name, weight: 0.0, tasks, is_open: false, positions, epoch }
    }
}

/// Returns the name of a task's pool: the value of its field `pool_by`. Returns `None` if the task
/// has no such field.
fn pool_name(task: &Task, pool_by: &str) -> Option<String> {
    match pool_by {
        "" => Some(String::new()),
        "source" => Some(task.source.clone()),
        "kind" if task.kind.is_some() => task.kind.clone(),
        field => match task.row.field(field)? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        },
    }
}

/// Checks that a recipe key, if it is set, names exactly the pools.
///
/// # Errors
/// Returns a message that contains the key, and a name that is missing in the key or among the
/// pools.
fn check_names<'k>(
    key: &str,
    names: impl Iterator<Item = &'k String> + Clone,
    pools: &[TaskPool],
) -> Result<(), String> {
    if names.clone().next().is_none() {
        return Ok(());
    }
    let known: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
    let unknown = names.clone().find(|name| !known.contains(&name.as_str()));
    let missing = known.iter().find(|known| !names.clone().any(|name| name == *known));
    match (unknown, missing) {
        (Some(name), _) => {
            Err(format!("`{key}` names {name:?}, but the pools are {}", known.join(", ")))
        }
        (None, Some(name)) => Err(format!(
            "`{key}` does not name the pool {name:?}; it must name all of {}",
            known.join(", ")
        )),
        (None, None) => Ok(()),
    }
}

/// Returns the index that the random number `number`, in 0..1, selects in proportion to `weights`.
/// At least one weight must be positive.
fn sample_weighted_index(weights: &[f64], number: f64) -> usize {
    let mut rest = number * weights.iter().sum::<f64>();
    for (index, weight) in weights.iter().enumerate() {
        if rest < *weight {
            return index;
        }
        rest -= weight;
    }
    weights.len() - 1
}

#[cfg(test)]
#[path = "curriculum_tests.rs"]
mod tests;
