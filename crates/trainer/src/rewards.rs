//! Selects the attempts of a group that count, with the reward of each.
//!
//! The recipe decides how attempts without tokens and truncated attempts count (`empty`,
//! `overlong`). A group whose attempts all have the same reward has no gradient.
//! [`scheduler`](crate::scheduler) uses this module to complete groups, [`plan`](crate::plan) to
//! compute advantages.

use levade_recipe::{EmptyAttempts, OverlongAttempts, RlKeys};
use levade_rl::shaping;
use levade_store::Attempt;
use levade_tree::{Finish, Kind, Trajectory};

use crate::agents::TokenLimits;
use crate::batch::Targets;

/// Returns whether a limit on tokens, turns, context or time ended the attempt.
pub(crate) fn is_truncated(attempt: &Attempt) -> bool {
    let finish = attempt.outcome.finish;
    !finish.is_complete() && finish != Finish::Failed
}

/// Returns the reward of an attempt under the recipe's rule for overlong attempts, and whether the
/// attempt is trained. Returns `None` if the attempt has no reward, or if the rule drops it.
pub(crate) fn shaped_reward(
    attempt: &Attempt,
    keys: &RlKeys,
    limits: &TokenLimits,
) -> Option<(f64, bool)> {
    let reward = attempt.reward?;
    match keys.overlong {
        OverlongAttempts::Keep | OverlongAttempts::Bootstrap => Some((reward, true)),
        OverlongAttempts::Mask => Some((reward, !is_truncated(attempt))),
        OverlongAttempts::Drop => (!is_truncated(attempt)).then_some((reward, true)),
        OverlongAttempts::Penalize { buffer, factor } => {
            let tokens = attempt.trajectory.sampled_tokens() as u64;
            let limit = limits.max_attempt_tokens(&attempt.task) as u64;
            Some((reward + shaping::overlong_penalty(tokens, limit, buffer, factor), true))
        }
    }
}

/// Returns whether an attempt is a sample of the targets' policy. An attempt is no sample if the
/// policy did not act but another policy acted or was selected for an agent, because the policy
/// cannot have changed the reward. An attempt in which no policy acted is a sample of every policy.
pub(crate) fn is_sample(attempt: &Attempt, targets: Targets<'_>) -> bool {
    let is_other = |policy: &String| policy != targets.policy;
    let is_selected = attempt.outcome.cast.values().any(is_other);
    let mut acting = attempt.trajectory.segments().iter().filter(|s| s.kind != Kind::Context);
    let is_acting = targets.requires_acting && acting.any(|segment| is_other(&segment.policy));
    !(is_selected || is_acting) || has_trained_completion(&attempt.trajectory, targets)
}

/// Returns whether a trained agent acted in a trajectory with the targets' policy. Greedy
/// completions also count.
fn has_trained_completion(trajectory: &Trajectory, targets: Targets<'_>) -> bool {
    trajectory
        .segments()
        .iter()
        .any(|segment| segment.kind != Kind::Context && targets.accepts_segment(segment))
}

/// Returns the attempts of a group that count for training, each with its reward and whether it is
/// trained.
pub(crate) fn rewarded_attempts<'a>(
    attempts: impl Iterator<Item = &'a Attempt>,
    keys: &RlKeys,
    limits: &TokenLimits,
) -> Vec<(&'a Attempt, f64, bool)> {
    attempts
        .filter(|attempt| {
            keys.empty == EmptyAttempts::Keep || attempt.trajectory.sampled_tokens() > 0
        })
        .filter_map(|attempt| {
            shaped_reward(attempt, keys, limits).map(|(r, trained)| (attempt, r, trained))
        })
        .collect()
}

/// Returns whether a group has no gradient because all its attempts have the same reward.
/// `rewarded` contains the attempts with their rewards.
pub(crate) fn is_uninformative(keys: &RlKeys, rewarded: &[(&Attempt, f64, bool)]) -> bool {
    let Some((first, reward, _)) = rewarded.first() else { return true };
    keys.zero_variance_has_no_gradient()
        && rewarded.iter().all(|(attempt, r, _)| {
            r == reward
                && (!keys.uses_reward_components() || attempt.step_rewards == first.step_rewards)
        })
}
