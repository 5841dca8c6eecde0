//! Groups in progress, and the attempts that they exclude.

use super::*;

/// Identifies an attempt within its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum GroupMember {
    /// A sampled attempt that may be trained on, by its index in the group.
    Sample(u32),
    /// The greedy attempt whose reward is the baseline of the sampled attempts. It is never trained
    /// on.
    Baseline,
}

/// An admitted group that no step has taken yet.
pub(super) struct Group {
    pub(super) task: Task,
    /// Index of the task among all training tasks.
    pub(super) task_index: usize,
    /// Number of completed steps of the phase when the group was admitted, or when its oldest
    /// recorded token was sampled, whichever is lower.
    pub(super) admitted: u32,
    /// Finished attempts by sample index, including oversampled attempts. `None` while an attempt
    /// has not ended.
    pub(super) attempts: Vec<Option<Attempt>>,
    /// Whether enough attempts have ended, so that the group needs no further attempts.
    pub(super) full: bool,
    /// The finished greedy attempt. `None` while it has not ended, or if the advantage estimator
    /// uses no baseline.
    pub(super) baseline: Option<Attempt>,
    /// Rank of the group in the order in which groups were completed. `None` while the group is
    /// incomplete.
    pub(super) completed: Option<u64>,
    /// Whether the group carries no training signal and another group was admitted in its place.
    pub(super) replaced: bool,
    /// Sample indices of the attempts that are being compared with each other and have no score
    /// yet.
    pub(super) compared: Vec<u32>,
    /// Attempts that were started for the group but do not belong to it.
    pub(super) excluded: ExcludedAttempts,
}

/// Attempts that were started for a group but do not belong to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ExcludedAttempts {
    /// Number of sampled tokens of each attempt that had ended.
    pub ended: Vec<usize>,
    /// Number of attempts that were cancelled while running.
    pub cancelled: usize,
}

/// Returns the number of attempts, from the start of `attempts`, among which the group is formed.
/// `attempts` are in starting order. Returns `None` while the group needs further attempts.
pub(super) fn group_len(attempts: &[Option<Attempt>], keys: &RlKeys) -> Option<usize> {
    // A failed attempt has no reward. While other attempts may still end, the group waits for them.
    let counts = |a: &Attempt| a.reward.is_some() || a.status == Status::Unscored;
    let all = attempts.iter().all(Option::is_some).then_some(attempts.len());
    let count =
        |attempts: &[Option<Attempt>]| attempts.iter().flatten().filter(|a| counts(a)).count();
    match keys.oversample_keep {
        OversampleKeep::Ended => {
            all.or((count(attempts) >= keys.group_size).then_some(attempts.len()))
        }
        OversampleKeep::Started => {
            let in_order = attempts.iter().take_while(|attempt| attempt.is_some()).count();
            (1..=in_order).find(|end| count(&attempts[..*end]) >= keys.group_size).or(all)
        }
    }
}
