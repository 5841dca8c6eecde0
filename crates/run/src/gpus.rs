//! GPUs of a machine: which GPUs this process may use, and how a run assigns them.
//!
//! The learner gets the first GPUs, and servers that the run starts get the GPUs after them. If the
//! devices are colocated, both start with the first GPU. If `CUDA_VISIBLE_DEVICES` lists GPUs, as
//! Slurm and users of shared machines do, the run uses only these.

use levade_recipe::{LearnerKeys, Placement, Recipe};

use crate::display;
use crate::failure::unusable;

/// Environment variables that determine which GPUs a process sees, and in which order. Processes
/// that compute receive these variables.
pub const VISIBLE: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"];

/// Returns the names of the environment variables that a process of a run receives: the variables
/// in `named`, which the recipe lists, and [`VISIBLE`].
pub fn with_visible(named: &[String]) -> Vec<String> {
    named.iter().cloned().chain(VISIBLE.map(str::to_owned)).collect()
}

/// Allocation of the trainer machine's GPUs to the learner and the servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuAllocation {
    /// Number of GPUs that the learner uses. 0 if the run does not start the learner.
    pub learner: u32,
    /// Number of GPUs that each server uses. 0 if the run starts no servers.
    pub server: u32,
    /// Number of servers that the run starts.
    servers: u32,
    /// Whether the servers are colocated with the learner on the same GPUs.
    is_colocated: bool,
}

impl GpuAllocation {
    /// Creates the allocation of GPUs that a recipe specifies.
    pub fn of(recipe: &Recipe) -> Self {
        let learner = match &recipe.cluster.learner {
            Some(LearnerKeys::Torch(keys)) if keys.start => keys.gpus,
            _ => 0,
        };
        let started =
            recipe.cluster.samplers.as_ref().map(|keys| keys.servers()).filter(|keys| keys.start);
        GpuAllocation {
            learner,
            server: started.map_or(0, |keys| keys.gpus),
            servers: started.map_or(0, |keys| u32::try_from(keys.count).unwrap_or(u32::MAX)),
            is_colocated: recipe.cluster.placement == Placement::Colocated,
        }
    }

    /// Returns the total number of GPUs that the run uses.
    pub fn total(&self) -> u32 {
        let servers = self.server.saturating_mul(self.servers);
        if self.is_colocated {
            self.learner.max(servers)
        } else {
            self.learner.saturating_add(servers)
        }
    }

    /// Returns the index of the first GPU that server `number` uses.
    fn first_gpu_index(&self, number: u32) -> u32 {
        let before = if self.is_colocated { 0 } else { self.learner };
        before.saturating_add(number.saturating_mul(self.server))
    }

    /// Returns the names of the GPUs that server `number` uses, separated by commas, for the
    /// server's environment. `visible` is the value of `CUDA_VISIBLE_DEVICES`. If it is `None`, all
    /// GPUs of the machine are visible.
    ///
    /// # Errors
    /// Returns an error if `visible` lists fewer GPUs than the run uses.
    pub fn server_gpus(&self, number: u32, visible: Option<&str>) -> anyhow::Result<String> {
        let first = self.first_gpu_index(number);
        let mine = first..first.saturating_add(self.server);
        let Some(visible) = visible else {
            return Ok(mine.map(|gpu| gpu.to_string()).collect::<Vec<_>>().join(","));
        };
        let names = parse_gpu_names(visible);
        if names.len() < self.total() as usize {
            return Err(unusable(format!(
                "{}={visible:?} makes {} visible to this run, but the run needs {}: {} of the \
                 learner (`cluster.learner.gpus`) {} {} of {} servers (`cluster.samplers.gpus`); \
                 make more GPUs visible, or use fewer",
                VISIBLE[0],
                display::plural(names.len() as u32, "GPU"),
                self.total(),
                self.learner,
                if self.is_colocated { "colocated with" } else { "and" },
                self.server.saturating_mul(self.servers),
                self.servers
            )));
        }
        Ok(names[mine.start as usize..mine.end as usize].join(","))
    }

    /// Checks that enough GPUs are visible for the learner. `visible` is the value of
    /// `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// Returns an error if `visible` lists fewer GPUs than the learner uses.
    pub fn check_learner(&self, visible: Option<&str>) -> anyhow::Result<()> {
        let Some((visible, count)) =
            visible.map(|visible| (visible, parse_gpu_names(visible).len()))
        else {
            return Ok(());
        };
        if count >= self.learner as usize {
            return Ok(());
        }
        Err(unusable(format!(
            "{}={visible:?} makes {} visible to this run, but `cluster.learner.gpus` is {}; make \
             more GPUs visible, or use fewer",
            VISIBLE[0],
            display::plural(count as u32, "GPU"),
            self.learner
        )))
    }
}

/// Returns the value of `CUDA_VISIBLE_DEVICES`. Returns `None` if this variable is not set.
pub fn visible() -> Option<String> {
    std::env::var(VISIBLE[0]).ok()
}

/// Parses a list of GPU names as CUDA does: up to the first invalid name.
fn parse_gpu_names(visible: &str) -> Vec<&str> {
    let is_one = |name: &&str| !name.is_empty() && !name.starts_with('-');
    visible.split(',').map(str::trim).take_while(is_one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISAGGREGATED: GpuAllocation =
        GpuAllocation { learner: 2, server: 1, servers: 2, is_colocated: false };

    #[test]
    fn servers_follow_learner_or_are_colocated() {
        let gpus_of =
            |allocation: GpuAllocation, number| allocation.server_gpus(number, None).unwrap();
        assert_eq!(
            (gpus_of(DISAGGREGATED, 0), gpus_of(DISAGGREGATED, 1)),
            ("2".into(), "3".into())
        );
        let colocated = GpuAllocation { is_colocated: true, server: 2, ..DISAGGREGATED };
        assert_eq!((gpus_of(colocated, 0), gpus_of(colocated, 1)), ("0,1".into(), "2,3".into()));
        assert_eq!((DISAGGREGATED.total(), colocated.total()), (4, 4));
    }

    #[test]
    fn gpus_are_chosen_from_visible_list() {
        let named = |number, visible| DISAGGREGATED.server_gpus(number, Some(visible));
        assert_eq!(named(1, "7, 5,GPU-ab,0").unwrap(), "0");
        assert_eq!(named(0, "7,5,GPU-ab,0").unwrap(), "GPU-ab");
        for few in ["4,5,6", "", "0,1,2,-1,3"] {
            let error = named(0, few).unwrap_err().to_string();
            assert!(
                error.contains("CUDA_VISIBLE_DEVICES=") && error.contains("the run needs 4: 2 of"),
                "{error}"
            );
        }
        assert!(
            DISAGGREGATED.check_learner(Some("3,4")).is_ok()
                && DISAGGREGATED.check_learner(None).is_ok()
        );
        let error = DISAGGREGATED.check_learner(Some("3")).unwrap_err().to_string();
        assert!(
            error.contains("makes 1 GPU visible to this run, but `cluster.learner.gpus` is 2"),
            "{error}"
        );
    }
}
