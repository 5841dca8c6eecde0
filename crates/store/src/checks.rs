//! Rules of the record that hold whatever the backend.

use levade_tree::{AttemptId, Placement, RunId, Segment, SegmentId, Trajectory};

use crate::error::Failure;
use crate::{Attempt, Begun, Earned, End, PerToken, PlannedPath, Recorded, Status, StepPlan};

/// Checks that an attempt has the name of its try.
pub(crate) fn name(run: &RunId, id: &AttemptId, placement: &Placement, number: u32) -> Result<(), Failure> {
    if *id == AttemptId::new(run, placement, number) {
        return Ok(());
    }
    Err(Failure::Unstorable(format!("{id} is not the name of its try {number} in run {run}")))
}

/// Finds numbers of an attempt that cannot be stored.
fn numbers(score: Option<f64>, reward: Option<f64>, earned: &[Earned]) -> Result<(), Failure> {
    let numbers = [("score", score), ("reward", reward)];
    let earned = earned.iter().map(|earned| ("part of a reward", Some(earned.reward)));
    for (name, value) in numbers.into_iter().chain(earned) {
        if let Some(value) = value
            && !value.is_finite()
        {
            return Err(Failure::Unstorable(format!("its {name} is {value}; it must be finite")));
        }
    }
    Ok(())
}

/// Checks how an attempt is to end.
pub(crate) fn end(end: &End) -> Result<(), Failure> {
    if !end.status.is_end() {
        return Err(Failure::Unstorable(format!("no attempt ends as {}", end.status.name())));
    }
    numbers(end.score, end.reward, &end.earned)
}

/// Checks an attempt that is recorded at once.
pub(crate) fn attempt(run: &RunId, attempt: &Attempt) -> Result<(), Failure> {
    name(run, &attempt.id, &attempt.placement, attempt.number)?;
    numbers(attempt.score, attempt.reward, &attempt.earned)?;
    attempt.trajectory.segments().iter().try_for_each(segment)
}

/// Finds numbers of a segment that cannot be stored.
fn segment(segment: &Segment) -> Result<(), Failure> {
    if segment.temperature.is_finite() {
        return Ok(());
    }
    Err(Failure::Unstorable(format!("segment {} has temperature {}", segment.id.0, segment.temperature)))
}

/// Outcome of beginning an attempt again.
pub(crate) fn begun_again(stored: &Attempt, begun: &Begun) -> Result<Recorded, Failure> {
    if stored.task != begun.task {
        return Err(Failure::Conflict(begun.placement.to_string(), "task"));
    }
    match stored.status {
        Status::Abandoned => Err(Failure::Over(stored.status)),
        _ => Ok(Recorded::Before),
    }
}

/// Outcome of ending an attempt: nothing more to do where it has that end.
pub(crate) fn ended(stored: &Attempt, end: &End) -> Result<Recorded, Failure> {
    match stored.status {
        Status::Running => Ok(Recorded::Now),
        // It has waited for its score.
        Status::Unscored if end.status != Status::Unscored => Ok(Recorded::Now),
        Status::Abandoned if other_end(&stored.end(), end).is_some() => Err(Failure::Over(stored.status)),
        _ => match other_end(&stored.end(), end) {
            None => Ok(Recorded::Before),
            Some(field) => Err(Failure::Conflict(stored.placement.to_string(), field)),
        },
    }
}

/// The new ones among segments that are given for an attempt, as they are to be stored.
///
/// The attempt has `len` segments; `stored` gives one of them, `tokens` how many tokens it has. Both are
/// asked only for what the given segments name.
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

/// The first field in which two ends differ.
fn other_end(stored: &End, end: &End) -> Option<&'static str> {
    if stored.outcome != end.outcome || stored.status != end.status {
        return Some("outcome");
    }
    if stored.score != end.score {
        return Some("score");
    }
    (stored.reward != end.reward || stored.earned != end.earned).then_some("reward")
}

/// The first field in which two attempts of one name differ.
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

/// Whether two segments are the same, log-probabilities by their bits, so that a NaN equals itself.
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

/// Finds numbers of a plan that cannot be stored, and cuts that are not of their updates.
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
            let whole = cut.check(update.paths.len(), cut.world_size);
            whole.map_err(|error| Failure::Unstorable(error.to_string()))?;
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

/// Whether two plans are the same to the bit.
pub(crate) fn same_plan(a: &StepPlan, b: &StepPlan) -> bool {
    let bytes = |path: &PlannedPath| {
        let optional = |numbers: &Option<PerToken>| numbers.as_ref().map(PerToken::to_bytes);
        let critic = (optional(&path.returns), optional(&path.values));
        (path.advantage.to_bytes(), path.weight.to_bytes(), critic)
    };
    a == b && a.paths().map(bytes).eq(b.paths().map(bytes))
}
