//! Checks that every backend applies to the values of a write.

use levade_tree::{AttemptId, Placement, RunId, Segment, SegmentId, Trajectory};

use crate::error::Failure;
use crate::{Attempt, Begun, Earned, End, PerToken, PlannedPath, Recorded, Status, StepPlan};

/// Checks that the id of an attempt is derived from its run, slot and try.
pub(crate) fn name(run: &RunId, id: &AttemptId, placement: &Placement, number: u32) -> Result<(), Failure> {
    if *id == AttemptId::new(run, placement, number) {
        return Ok(());
    }
    Err(Failure::Unstorable(format!("{id} is not the name of its try {number} in run {run}")))
}

/// Checks that the score, the reward and its parts are finite.
fn numbers(score: Option<f64>, reward: Option<f64>, step_rewards: &[Earned]) -> Result<(), Failure> {
    let numbers = [("score", score), ("reward", reward)];
    let step_rewards =
        step_rewards.iter().map(|step_rewards| ("part of a reward", Some(step_rewards.reward)));
    for (name, value) in numbers.into_iter().chain(step_rewards) {
        if let Some(value) = value
            && !value.is_finite()
        {
            return Err(Failure::Unstorable(format!("its {name} is {value}; it must be finite")));
        }
    }
    Ok(())
}

/// Checks that an attempt can have this end.
pub(crate) fn end(end: &End) -> Result<(), Failure> {
    if !end.status.is_end() {
        return Err(Failure::Unstorable(format!("no attempt ends as {}", end.status.name())));
    }
    numbers(end.score, end.reward, &end.earned)
}

/// Checks an attempt that is recorded in one call.
pub(crate) fn attempt(run: &RunId, attempt: &Attempt) -> Result<(), Failure> {
    name(run, &attempt.id, &attempt.placement, attempt.number)?;
    numbers(attempt.score, attempt.reward, &attempt.earned)?;
    attempt.trajectory.segments().iter().try_for_each(segment)
}

/// Checks that the temperature of a segment is finite.
fn segment(segment: &Segment) -> Result<(), Failure> {
    if segment.temperature.is_finite() {
        return Ok(());
    }
    Err(Failure::Unstorable(format!("segment {} has temperature {}", segment.id.0, segment.temperature)))
}

/// Checks a repeated start of an attempt against the stored attempt.
pub(crate) fn check_restart(stored: &Attempt, start: &Begun) -> Result<Recorded, Failure> {
    if stored.task != start.task {
        return Err(Failure::Conflict(start.placement.to_string(), "task"));
    }
    match stored.status {
        Status::Abandoned => Err(Failure::Over(stored.status)),
        _ => Ok(Recorded::Before),
    }
}

/// Checks the end of an attempt against the stored attempt. Returns [`Recorded::Now`] if the end must be
/// written, and [`Recorded::Before`] if the attempt already has this end.
pub(crate) fn ended(stored: &Attempt, end: &End) -> Result<Recorded, Failure> {
    match stored.status {
        Status::Running => Ok(Recorded::Now),
        // The attempt waited for its score.
        Status::Unscored if end.status != Status::Unscored => Ok(Recorded::Now),
        Status::Abandoned if other_end(&stored.end(), end).is_some() => Err(Failure::Over(stored.status)),
        _ => match other_end(&stored.end(), end) {
            None => Ok(Recorded::Before),
            Some(field) => Err(Failure::Conflict(stored.placement.to_string(), field)),
        },
    }
}

/// Returns those of the `given` segments that are not stored yet, in the form in which they must be
/// stored.
///
/// The attempt has `len` stored segments. `stored` returns one of them, and `tokens` returns its number
/// of tokens. Both are called only for segments that `given` refers to, by their id or as a parent.
pub(crate) fn appended(
    attempt: &Attempt,
    len: u32,
    given: &[Segment],
    mut stored: impl FnMut(SegmentId) -> Result<Option<Segment>, Failure>,
    mut tokens: impl FnMut(SegmentId) -> Result<usize, Failure>,
) -> Result<Vec<Segment>, Failure> {
    let mut new: Vec<Segment> = Vec::new();
    for one in given {
        let mut one = one.clone();
        let (id, next) = (one.id, len + new.len() as u32);
        if id.0 > next {
            let what = format!("segment {} would leave a gap after the {next} that are there", id.0);
            return Err(Failure::Unstorable(what));
        }
        if id.0 >= len && attempt.status != Status::Running {
            return Err(Failure::Over(attempt.status));
        }
        let of_parent = match one.parent.filter(|_| one.after.is_some()) {
            None => 0,
            Some(parent) if parent.0 < len => tokens(parent)?,
            Some(parent) => new.get((parent.0 - len) as usize).map_or(0, |parent| parent.tokens.len()),
        };
        one.fit(id.0, of_parent).map_err(|error| Failure::Unstorable(error.to_string()))?;
        segment(&one)?;
        let there = if id.0 < len { stored(id)? } else { new.get((id.0 - len) as usize).cloned() };
        match there {
            Some(there) if same(&there, &one) => {}
            Some(_) => return Err(Failure::Conflict(attempt.placement.to_string(), "segment")),
            None => new.push(one),
        }
    }
    Ok(new)
}

/// Returns the first field in which two ends differ, or `None` if they are equal.
fn other_end(stored: &End, end: &End) -> Option<&'static str> {
    if stored.outcome != end.outcome || stored.status != end.status {
        return Some("outcome");
    }
    if stored.score != end.score {
        return Some("score");
    }
    (stored.reward != end.reward || stored.earned != end.earned).then_some("reward")
}

/// Returns the first field in which two attempts with the same id differ, or `None` if they are equal.
pub(crate) fn difference(a: &Attempt, b: &Attempt) -> Option<&'static str> {
    if a.task != b.task {
        return Some("task");
    }
    other_end(&a.end(), &b.end())
        .or_else(|| (!same_tokens(&a.trajectory, &b.trajectory)).then_some("trajectory"))
}

fn same_tokens(a: &Trajectory, b: &Trajectory) -> bool {
    let (a, b) = (a.segments(), b.segments());
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
}

/// Returns whether two segments are equal. Log-probabilities are compared by their bits, so that a NaN
/// equals itself.
fn same(x: &Segment, y: &Segment) -> bool {
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

/// Checks that the numbers of a plan are finite and that its micro-batch plans fit their updates.
pub(crate) fn plan(plan: &StepPlan) -> Result<(), Failure> {
    let finite = |value: f64, what: &str| {
        if value.is_finite() {
            Ok(())
        } else {
            Err(Failure::Unstorable(format!("{what} {value}; it must be finite")))
        }
    };
    for path in plan.paths() {
        let numbers = [
            ("advantage", Some(&path.advantage)),
            ("weight", Some(&path.weight)),
            ("return", path.returns.as_ref()),
            ("value", path.values.as_ref()),
        ];
        for (what, numbers) in numbers {
            for number in numbers.into_iter().flat_map(PerToken::distinct) {
                finite(f64::from(number), &format!("attempt {} has {what}", path.attempt))?;
            }
        }
    }
    for update in plan.policies.iter().flat_map(|policy| &policy.updates) {
        for cut in [Some(&update.cut), update.critic.as_ref()].into_iter().flatten() {
            let complete = cut.check(update.paths.len(), cut.world_size);
            complete.map_err(|error| Failure::Unstorable(error.to_string()))?;
        }
    }
    for policy in &plan.policies {
        for threshold in policy.high_entropy.iter().flat_map(|high| &high.thresholds) {
            finite(*threshold, "there is a threshold of entropy of")?;
        }
        if let Some(kl) = &policy.kl {
            finite(kl.coefficient, "there is a coefficient of a divergence of")?;
            finite(kl.found, "there is a divergence of")?;
        }
    }
    Ok(())
}

/// Returns whether two plans are equal. Numbers per token are compared by their bits.
pub(crate) fn same_plan(a: &StepPlan, b: &StepPlan) -> bool {
    let bytes = |path: &PlannedPath| {
        let optional = |numbers: &Option<PerToken>| numbers.as_ref().map(PerToken::to_bytes);
        let critic = (optional(&path.returns), optional(&path.values));
        (path.advantage.to_bytes(), path.weight.to_bytes(), critic)
    };
    a == b && a.paths().map(bytes).eq(b.paths().map(bytes))
}
