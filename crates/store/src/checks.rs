//! Checks that every backend applies to the values of a write.

use levade_tree::{AttemptId, AttemptSlot, RunId, Segment, SegmentId, Trajectory};

use crate::error::Failure;
use crate::{
    Attempt, AttemptEnd, AttemptStart, PerToken, PlannedSequence, Status, StepPlan, StepReward,
    WriteOutcome,
};

/// Checks that the id of an attempt is derived from its run, slot and try.
pub fn check_attempt_id(
    run: &RunId,
    id: &AttemptId,
    slot: &AttemptSlot,
    number: u32,
) -> Result<(), Failure> {
    if *id == AttemptId::new(run, slot, number) {
        return Ok(());
    }
    Err(Failure::Unstorable(format!(
        "the id {id} does not match try {number} of its attempt slot in run {run}"
    )))
}

/// Checks that the score, the reward and the step rewards of an attempt are finite. `None` is
/// accepted.
fn check_finite(
    score: Option<f64>,
    reward: Option<f64>,
    step_rewards: &[StepReward],
) -> Result<(), Failure> {
    let numbers = [("score", score), ("reward", reward)];
    let step_rewards = step_rewards.iter().map(|step| ("step reward", Some(step.reward)));
    for (name, value) in numbers.into_iter().chain(step_rewards) {
        if let Some(value) = value
            && !value.is_finite()
        {
            return Err(Failure::Unstorable(format!(
                "the {name} of the attempt is {value}, but it must be finite"
            )));
        }
    }
    Ok(())
}

/// Checks the values of an attempt's end: the status must be an end, and the score and the rewards
/// must be finite.
pub fn check_end_values(end: &AttemptEnd) -> Result<(), Failure> {
    if !end.status.is_end() {
        return Err(Failure::Unstorable(format!(
            "an attempt cannot end with the status {}; use a final status, such as completed",
            end.status.name()
        )));
    }
    check_finite(end.score, end.reward, &end.step_rewards)
}

/// Checks the values of a complete attempt that is recorded in one call: the id, the status, the
/// score, the rewards and the temperatures of the segments.
pub fn check_attempt(run: &RunId, attempt: &Attempt) -> Result<(), Failure> {
    check_attempt_id(run, &attempt.id, &attempt.slot, attempt.number)?;
    if attempt.status == Status::Withdrawn {
        return Err(Failure::Unstorable(
            "an attempt cannot be recorded as withdrawn; record the attempt first, then withdraw it"
                .into(),
        ));
    }
    check_finite(attempt.score, attempt.reward, &attempt.step_rewards)?;
    attempt.trajectory.segments().iter().try_for_each(check_segment)
}

/// Checks that the temperature of a segment is finite.
fn check_segment(segment: &Segment) -> Result<(), Failure> {
    if segment.temperature.is_finite() {
        return Ok(());
    }
    Err(Failure::Unstorable(format!(
        "segment {} has the temperature {}, but a temperature must be finite",
        segment.id.0, segment.temperature
    )))
}

/// Compares a repeated request to start an attempt with the stored attempt. Returns
/// [`WriteOutcome::AlreadyRecorded`] if the tasks are equal and the attempt can be continued, and
/// an error otherwise.
pub fn check_restart(stored: &Attempt, start: &AttemptStart) -> Result<WriteOutcome, Failure> {
    if stored.task != start.task {
        return Err(Failure::Conflict(start.slot.to_string(), "task"));
    }
    match stored.status {
        Status::Abandoned | Status::Withdrawn => Err(Failure::Ended(stored.status)),
        _ => Ok(WriteOutcome::AlreadyRecorded),
    }
}

/// Compares the end of an attempt with the stored attempt. Returns [`WriteOutcome::Written`] if the
/// end must be written, and [`WriteOutcome::AlreadyRecorded`] if the stored attempt already has
/// this end.
pub fn check_end(stored: &Attempt, end: &AttemptEnd) -> Result<WriteOutcome, Failure> {
    match stored.status {
        Status::Running => Ok(WriteOutcome::Written),
        // The attempt waited for its score.
        Status::Unscored if end.status != Status::Unscored => Ok(WriteOutcome::Written),
        Status::Withdrawn => Err(Failure::Ended(stored.status)),
        Status::Abandoned if find_end_difference(&stored.end(), end).is_some() => {
            Err(Failure::Ended(stored.status))
        }
        _ => match find_end_difference(&stored.end(), end) {
            None => Ok(WriteOutcome::AlreadyRecorded),
            Some(field) => Err(Failure::Conflict(stored.slot.to_string(), field)),
        },
    }
}

/// Returns the segments among `segments` that the store does not have yet, in the form in which
/// they must be stored.
///
/// `len` is the number of segments that the store has for the attempt. `stored` reads one of these
/// segments, and `tokens` reads the number of tokens of a segment. Both are called only for
/// segments that an item of `segments` names by its id or as its parent.
pub fn select_new_segments(
    attempt: &Attempt,
    len: u32,
    segments: &[Segment],
    mut stored: impl FnMut(SegmentId) -> Result<Option<Segment>, Failure>,
    mut tokens: impl FnMut(SegmentId) -> Result<usize, Failure>,
) -> Result<Vec<Segment>, Failure> {
    let mut new: Vec<Segment> = Vec::new();
    for incoming in segments {
        let mut incoming = incoming.clone();
        let id = incoming.id;
        let next = len + new.len() as u32;
        if id.0 > next {
            let what = format!(
                "segment {} would leave a gap; the next segment must have the id {next}",
                id.0
            );
            return Err(Failure::Unstorable(what));
        }
        if id.0 >= len && attempt.status != Status::Running {
            return Err(Failure::Ended(attempt.status));
        }
        let parent_len = match incoming.parent.filter(|_| incoming.after.is_some()) {
            None => 0,
            Some(parent) if parent.0 < len => tokens(parent)?,
            Some(parent) => {
                new.get((parent.0 - len) as usize).map_or(0, |parent| parent.tokens.len())
            }
        };
        incoming
            .validate(id.0, parent_len)
            .map_err(|error| Failure::Unstorable(error.to_string()))?;
        check_segment(&incoming)?;
        let existing =
            if id.0 < len { stored(id)? } else { new.get((id.0 - len) as usize).cloned() };
        match existing {
            Some(existing) if are_segments_equal(&existing, &incoming) => {}
            Some(_) => return Err(Failure::Conflict(attempt.slot.to_string(), "segment")),
            None => new.push(incoming),
        }
    }
    Ok(new)
}

/// Returns the name of the first field in which two ends differ, or `None` if they are equal.
fn find_end_difference(stored: &AttemptEnd, end: &AttemptEnd) -> Option<&'static str> {
    if stored.outcome != end.outcome || stored.status != end.status {
        return Some("outcome");
    }
    if stored.score != end.score {
        return Some("score");
    }
    (stored.reward != end.reward || stored.step_rewards != end.step_rewards).then_some("reward")
}

/// Returns the name of the first field in which two attempts with the same id differ, or `None` if
/// they are equal.
pub fn find_attempt_difference(a: &Attempt, b: &Attempt) -> Option<&'static str> {
    if a.task != b.task {
        return Some("task");
    }
    find_end_difference(&a.end(), &b.end())
        .or_else(|| (!are_trajectories_equal(&a.trajectory, &b.trajectory)).then_some("trajectory"))
}

fn are_trajectories_equal(a: &Trajectory, b: &Trajectory) -> bool {
    let a = a.segments();
    let b = b.segments();
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| are_segments_equal(a, b))
}

/// Returns whether two segments are equal. Log-probabilities are compared by their bits, so that
/// NaN equals NaN.
fn are_segments_equal(x: &Segment, y: &Segment) -> bool {
    x.parent == y.parent
        && x.after == y.after
        && x.kind == y.kind
        && x.tokens == y.tokens
        && x.logprobs.iter().map(|v| v.to_bits()).eq(y.logprobs.iter().map(|v| v.to_bits()))
        && x.temperature == y.temperature
        && x.filtered == y.filtered
        && x.versions == y.versions
        && x.agent == y.agent
        && x.policy == y.policy
        && x.turn == y.turn
}

/// Checks that all numbers of a step plan are finite and that each micro-batch plan fits the
/// sequences of its update.
pub fn check_plan(plan: &StepPlan) -> Result<(), Failure> {
    for sequence in plan.sequences() {
        let numbers = [
            ("advantage", Some(&sequence.advantage)),
            ("weight", Some(&sequence.weight)),
            ("return", sequence.returns.as_ref()),
            ("value", sequence.values.as_ref()),
        ];
        for (what, numbers) in numbers {
            for number in numbers.into_iter().flat_map(PerToken::run_values) {
                let what = format!("the {what} of attempt {}", sequence.attempt);
                check_is_finite(f64::from(number), &what)?;
            }
        }
    }
    for update in plan.policies.iter().flat_map(|policy| &policy.updates) {
        for micro_batch_plan in
            [Some(&update.micro_batch_plan), update.critic_plan.as_ref()].into_iter().flatten()
        {
            let valid = micro_batch_plan.check(update.sequences.len(), micro_batch_plan.world_size);
            valid.map_err(|error| Failure::Unstorable(error.to_string()))?;
        }
    }
    for policy in &plan.policies {
        for threshold in policy.high_entropy.iter().flat_map(|high| &high.thresholds) {
            check_is_finite(*threshold, "an entropy threshold")?;
        }
        if let Some(kl) = &policy.kl {
            check_is_finite(kl.coefficient, "a KL coefficient")?;
            check_is_finite(kl.found, "a KL divergence")?;
        }
    }
    Ok(())
}

fn check_is_finite(value: f64, what: &str) -> Result<(), Failure> {
    if value.is_finite() {
        Ok(())
    } else {
        Err(Failure::Unstorable(format!("{what} in the step plan is {value}, but must be finite")))
    }
}

/// Returns whether two step plans are equal. Per-token numbers are compared by their bits, so that
/// NaN equals NaN.
pub fn are_plans_equal(a: &StepPlan, b: &StepPlan) -> bool {
    a == b
        && a.sequences()
            .map(encode_per_token_numbers)
            .eq(b.sequences().map(encode_per_token_numbers))
}

/// Returns the per-token numbers of a sequence as bytes: advantages, weights, returns and values.
/// Returns and values are `None` if the plan has no critic.
fn encode_per_token_numbers(sequence: &PlannedSequence) -> [Option<Vec<u8>>; 4] {
    [
        Some(&sequence.advantage),
        Some(&sequence.weight),
        sequence.returns.as_ref(),
        sequence.values.as_ref(),
    ]
    .map(|numbers| numbers.map(PerToken::to_bytes))
}
