//! Holds the parts of a run that stay the same from start to end.

use std::collections::BTreeMap;
use std::sync::Arc;

use levade_agent::Teacher;
use levade_recipe::Recipe;
use levade_store::Store;

use crate::batch::Targets;
use crate::checkpoint::CheckpointDir;
use crate::origin::RunOrigin;
use crate::past::PastVersionPools;
use crate::policies::Policies;
use crate::rollout::AttemptMaker;
use crate::run_dir::LockedRunDir;
use crate::tasks::Tasks;

/// The parts of a run that phases, evaluations and checkpoints share. The parts that change between
/// steps are in [`RunProgress`](crate::progress::RunProgress).
pub(crate) struct RunContext {
    pub recipe: Recipe,
    pub tasks: Tasks,
    pub rollouts: AttemptMaker,
    pub policies: Policies,
    /// Pools of past versions of the policies, which play as opponents.
    pub past: PastVersionPools,
    /// Names of the agents that are not trained: their completions are not training targets.
    pub untrained: Vec<String>,
    /// Maximum number of sampled tokens per attempt: the largest `max_tokens` among the agents of
    /// the training tasks.
    pub constant_length: usize,
    /// External policies that phases imitate, by policy name.
    pub teachers: BTreeMap<String, Teacher>,
    pub store: Arc<dyn Store>,
    pub checkpoints: CheckpointDir,
    pub origin: RunOrigin,
    pub run_dir: LockedRunDir,
}

impl RunContext {
    /// Returns the training targets of `policy`: which tokens the policy learns from.
    pub fn targets<'a>(&'a self, policy: &'a str) -> Targets<'a> {
        let requires_acting = self.origin.rules.requires_acting;
        Targets { policy, untrained: &self.untrained, requires_acting }
    }
}
