//! Lists the tasks of environments, and splits them into training and held-out tasks.

use std::collections::HashSet;

use levade_tasks::{Demonstration, Task};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::options::{CommonOptions, MAX_TASKS, ReasoningGymOptions};
use super::{ANSWER, Environment, EnvironmentError, EnvironmentOptions};

/// Maximum number of tasks that one request to a worker lists.
const PAGE: usize = 100;

/// Smallest seed of held-out tasks that is derived from `eval.split_seed`. This number exceeds all
/// seeds of training tasks that are derived from a run's seed.
const HELD_OUT_SEED_BASE: u64 = 2_000_000_000;

/// Tasks of an environment, divided into training tasks and held-out tasks.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TaskList {
    /// Training tasks.
    pub train: Vec<Task>,
    /// Held-out tasks, in an order that depends only on the split seed.
    pub held_out: Vec<Task>,
    /// Number of tasks that were left out because they repeat an earlier task.
    pub repeated: usize,
    /// Names and versions of the Python packages that the tasks come from.
    pub package: String,
}

/// A task as an environment process reports it.
#[derive(Deserialize)]
struct TaskMessage {
    name: String,
    question: String,
    #[serde(default)]
    #[serde(rename = "answer")]
    answer: Value,
    kind: String,
    row: Map<String, Value>,
}

/// Range of tasks that an environment generates from one seed.
struct SeedRange<'o> {
    /// Name of the data set. `None` if the environment has only one.
    dataset: Option<&'o str>,
    seed: u64,
    count: usize,
}

impl Environment {
    /// Lists the tasks. If the environment generates tasks from seeds, `seed` determines the
    /// training tasks, and `split_seed` the held-out tasks. If the environment has a fixed list,
    /// `split_seed` selects the held-out tasks from it.
    ///
    /// # Errors
    /// Returns an error if the environment cannot be loaded or listed, or if it has too few tasks
    /// for the number of held-out tasks.
    pub async fn tasks(&self, seed: u64, split_seed: u64) -> Result<TaskList, EnvironmentError> {
        let CommonOptions { train, held_out, seeds, .. } = self.options.common_options();
        let mut listed = TaskList::default();
        let mut requested = HashSet::new();
        if self.options.is_seeded() {
            let of_run = seed % 1000 * MAX_TASKS as u64;
            let of_split = HELD_OUT_SEED_BASE + split_seed % 1000 * MAX_TASKS as u64;
            let [seed, held_out_seed] = [(seeds[0], of_run), (seeds[1], of_split)]
                .map(|(configured, derived)| configured.map_or(derived, u64::from));
            for (count, seed, is_held_out) in
                [(held_out, held_out_seed, true), (train, seed, false)]
            {
                for range in self.divide_into_seed_ranges(count, seed) {
                    let tasks = self.list_range(&range, &mut listed.package).await?;
                    let before = tasks.len();
                    let new: Vec<Task> =
                        tasks.into_iter().filter(|task| requested.insert(task.key())).collect();
                    listed.repeated += before - new.len();
                    let list = if is_held_out { &mut listed.held_out } else { &mut listed.train };
                    list.extend(new);
                }
            }
        } else {
            let range = SeedRange { dataset: None, seed: 0, count: train.saturating_add(held_out) };
            let mut tasks = self.list_range(&range, &mut listed.package).await?;
            let before = tasks.len();
            tasks.retain(|task| requested.insert(task.key()));
            listed.repeated = before - tasks.len();
            if tasks.len() <= held_out {
                return Err(self.create_error(format!(
                    "there are only {} tasks, too few to hold out {held_out} of them and train on \
                     at least one; lower held_out",
                    tasks.len()
                )));
            }
            let mut order: Vec<usize> = (0..tasks.len()).collect();
            order.sort_by_key(|&at| tasks[at].key().rank(split_seed));
            let kept: HashSet<usize> = order.into_iter().take(held_out).collect();
            for (at, task) in tasks.into_iter().enumerate() {
                let list =
                    if kept.contains(&at) { &mut listed.held_out } else { &mut listed.train };
                list.push(task);
            }
        }
        listed.held_out.sort_by_key(|task| task.key().rank(split_seed));
        Ok(listed)
    }

    /// Divides `count` tasks into ranges, one for each data set. All ranges have the same `seed`.
    fn divide_into_seed_ranges(&self, count: usize, seed: u64) -> Vec<SeedRange<'_>> {
        match &self.options {
            EnvironmentOptions::ReasoningGym(ReasoningGymOptions { datasets, .. }) => {
                let fractions: Vec<f64> = datasets.iter().map(|dataset| dataset.weight).collect();
                let counts = split_by_fractions(count, &fractions);
                datasets
                    .iter()
                    .zip(counts)
                    .map(|(dataset, count)| SeedRange {
                        dataset: Some(dataset.name.as_str()),
                        seed,
                        count,
                    })
                    .collect()
            }
            _ => vec![SeedRange { dataset: None, seed, count }],
        }
    }

    /// Lists the tasks of a range, page by page. The list is shorter than the range if the
    /// environment has fewer tasks.
    async fn list_range(
        &self,
        range: &SeedRange<'_>,
        package: &mut String,
    ) -> Result<Vec<Task>, EnvironmentError> {
        let mut tasks = Vec::new();
        while tasks.len() < range.count {
            let from = tasks.len();
            let to = range.count.min(tasks.len() + PAGE);
            let order = json!({
                "dataset": range.dataset,
                "seed": range.seed,
                "size": range.count,
                "from": from,
                "to": to,
            });
            let mut response = self.send_query("tasks", order).await?;
            if let Some(name) = response["package"].as_str() {
                *package = name.to_owned();
            }
            let page: Vec<TaskMessage> =
                serde_json::from_value(response["tasks"].take()).map_err(|error| {
                    self.create_error(format!("the listed tasks cannot be parsed: {error}"))
                })?;
            let got = page.len();
            tasks.extend(page.into_iter().map(|message| self.to_task(message)));
            if got < to - from {
                break;
            }
        }
        Ok(tasks)
    }

    fn to_task(&self, message: TaskMessage) -> Task {
        let TaskMessage { name, question, answer: expected_answer, kind, row } = message;
        let source = self.name();
        let agent = Some(self.options.common_options().agent).filter(|agent| !agent.is_empty());
        let demonstration = match &self.options {
            EnvironmentOptions::ReasoningGym(options) if !options.demonstration.is_empty() => {
                let put_in =
                    |expected_answer: &str| options.demonstration.replace(ANSWER, expected_answer);
                expected_answer.as_str().map(|expected_answer| Demonstration {
                    calls: Vec::new(),
                    answer: put_in(expected_answer),
                })
            }
            _ => None,
        };
        Task {
            id: format!("{source}-{name}"),
            question,
            answer: expected_answer,
            source: source.to_owned(),
            kind: Some(kind),
            agent: agent.map(str::to_owned),
            demonstration,
            row: row.into(),
            ..Task::default()
        }
    }
}

/// Divides `count` in proportion to `fractions`. The remainder goes to the parts with the largest
/// fractional parts, and among equal ones to the first.
fn split_by_fractions(count: usize, fractions: &[f64]) -> Vec<usize> {
    let sum: f64 = fractions.iter().sum();
    let exact: Vec<f64> = fractions.iter().map(|fraction| fraction / sum * count as f64).collect();
    let mut counts: Vec<usize> = exact.iter().map(|exact| exact.floor() as usize).collect();
    let mut order: Vec<usize> = (0..fractions.len()).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let remainder = count.saturating_sub(counts.iter().sum());
    for &at in order.iter().cycle().take(remainder) {
        counts[at] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_by_fractions_adds_up_to_total() {
        assert_eq!(split_by_fractions(10, &[1.0, 1.0]), [5, 5]);
        assert_eq!(split_by_fractions(10, &[1.0, 1.0, 1.0]), [4, 3, 3]);
        assert_eq!(split_by_fractions(3, &[3.0, 1.0]), [2, 1]);
        assert_eq!(split_by_fractions(0, &[0.1, 7.0]), [0, 0]);
        for count in 0..50 {
            assert_eq!(
                split_by_fractions(count, &[0.3, 1.7, 2.0, 0.01]).iter().sum::<usize>(),
                count
            );
        }
    }
}
