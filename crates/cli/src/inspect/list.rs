//! Formats the lists of `levade inspect`: steps, attempts and failed attempts.

use std::fmt::Write as _;

use levade_store::{AttemptSummary, FailedAttempt, Status, Store};
use levade_tree::{AttemptId, AttemptSlot, Purpose};

use super::Args;
use crate::failure::unusable;

/// Returns the attempts that the options select, all of one phase. If the options select no phase,
/// takes the last phase that has attempts. Sessions belong to no phase and are all selected.
pub async fn select_attempts(
    args: &Args,
    store: &dyn Store,
) -> anyhow::Result<Vec<AttemptSummary>> {
    let purpose = args.selected_purpose();
    let mut summaries = store.summaries(purpose).await?;
    if purpose == Purpose::Session {
        return Ok(summaries);
    }
    let phase = args.phase.or_else(|| summaries.iter().map(|s| s.slot.phase).max());
    summaries.retain(|s| {
        Some(s.slot.phase) == phase && args.step.is_none_or(|step| s.slot.step == step)
    });
    Ok(summaries)
}

/// Returns the error message for an empty selection. `what` is the plural noun of the missing
/// items, such as "failed attempts".
pub fn no_attempts_message(args: &Args, what: &str) -> String {
    let step = args.step.map_or(String::new(), |step| format!(" in step {step}"));
    let phase = args.phase.map_or(String::new(), |phase| format!(" of phase {phase}"));
    let purpose = args.selected_purpose().name();
    format!(
        "the run has no {what} for {purpose}{step}{phase}; --eval, --demonstrations, --prompts and \
         --sessions select other attempts"
    )
}

/// Returns the failed attempts that the options select. If the options select no phase, returns the
/// failed attempts of all phases.
pub async fn select_failures(args: &Args, store: &dyn Store) -> anyhow::Result<Vec<FailedAttempt>> {
    let mut failures = store.failures(args.selected_purpose()).await?;
    failures.retain(|FailedAttempt { slot: placement, .. }| {
        args.phase.is_none_or(|phase| placement.phase == phase)
            && args.step.is_none_or(|step| placement.step == step)
    });
    Ok(failures)
}

/// Formats one line for each failed attempt: its name, try, status and error. An error that equals
/// the previous line's error is shortened to "same error".
pub fn format_failures(failures: &[FailedAttempt]) -> String {
    let mut text = String::new();
    let mut previous = None;
    for FailedAttempt { id, slot: placement, number, status, error } in failures {
        let status_note = match status {
            // The id is shown for tries that do not count, because the name of the slot selects the
            // last try.
            Status::Failed => String::new(),
            Status::Superseded => format!(", retried (id {id})"),
            _ => format!(", repeated when the run is resumed (id {id})"),
        };
        let error = error.as_deref().unwrap_or("no token was sampled");
        let error = if previous == Some(error) {
            "same error"
        } else {
            previous = Some(error);
            error
        };
        let _ = writeln!(text, "{:24} try {number}{status_note}: {error}", placement.name());
    }
    text
}

/// Returns the attempt with the largest reward if `best` is true, and otherwise the attempt with
/// the smallest reward. If rewards are equal, returns the first of the attempts.
///
/// # Errors
/// Returns an error if no attempt has a reward.
pub fn select_best_or_worst(summaries: &[AttemptSummary], best: bool) -> anyhow::Result<AttemptId> {
    let sign = if best { -1.0 } else { 1.0 };
    let rewarded = summaries.iter().filter_map(|s| s.reward.map(|reward| (sign * reward, s)));
    rewarded
        .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.slot.cmp(&b.1.slot)))
        .map(|(_, summary)| summary.id)
        .ok_or_else(|| unusable("none of these attempts has a reward; name one with --attempt"))
}

/// Formats one line for each step, with the means over the attempts of the step.
pub fn format_steps(summaries: &[AttemptSummary]) -> String {
    let mut text = String::new();
    for step in
        summaries.chunk_by(|a, b| (a.slot.phase, a.slot.step) == (b.slot.phase, b.slot.step))
    {
        let AttemptSlot { purpose, phase, step: number, .. } = step[0].slot;
        let mean = |values: Vec<f64>| {
            let n = values.len() as f64;
            if n > 0.0 { format!("{:.3}", values.iter().sum::<f64>() / n) } else { "–".into() }
        };
        let with = |status| step.iter().filter(|s| s.status == status).count();
        let failed = with(Status::Failed);
        let unscored = with(Status::Unscored);
        let _ = writeln!(
            text,
            "{} phase {} step {:>4}: {:>4} attempts · score {} · reward {} · {:.1} tokens \
             sampled{}",
            purpose.name(),
            phase,
            number,
            step.len(),
            mean(step.iter().filter_map(|s| s.score).collect()),
            mean(step.iter().filter_map(|s| s.reward).collect()),
            step.iter().map(|s| s.sampled_tokens as f64).sum::<f64>() / step.len() as f64,
            [(failed, "broken"), (unscored, "without a score")]
                .iter()
                .filter(|(count, _)| *count > 0)
                .map(|(count, what)| format!(" · {count} {what}"))
                .collect::<String>()
        );
    }
    text
}

/// Formats one line for each attempt.
pub fn format_attempts(summaries: &[AttemptSummary]) -> String {
    let mut text = String::new();
    for summary in summaries {
        let AttemptSummary {
            slot: placement, score, reward, status, sampled_tokens, tokens, ..
        } = summary;
        let number = |value: &Option<f64>| value.map_or("–".into(), |v| format!("{v:.3}"));
        let status_note = match status {
            Status::Failed => " · broken",
            Status::Unscored => " · without a score",
            _ => "",
        };
        let _ = writeln!(
            text,
            "{:24} score {:>6} · reward {:>6} · {sampled_tokens:>4} of {tokens:>5} tokens \
             sampled{status_note}",
            placement.name(),
            number(score),
            number(reward)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(group: u32, reward: Option<f64>) -> AttemptSummary {
        let placement =
            AttemptSlot { purpose: Purpose::Train, phase: 1, step: 2, group, sample: 0 };
        let id = AttemptId::from_bytes([group as u8; 16]);
        AttemptSummary {
            id,
            slot: placement,
            number: 0,
            score: reward,
            reward,
            status: Status::Completed,
            sampled_tokens: 4,
            tokens: 9,
        }
    }

    #[test]
    fn select_best_or_worst_compares_rewards() {
        let all = [
            summary(0, Some(0.5)),
            summary(1, None),
            summary(2, Some(1.0)),
            summary(3, Some(-0.1)),
        ];
        assert_eq!(select_best_or_worst(&all, true).unwrap(), all[2].id);
        assert_eq!(select_best_or_worst(&all, false).unwrap(), all[3].id);
        assert!(select_best_or_worst(&all[1..2], true).is_err());
        let list = format_attempts(&all);
        assert!(list.starts_with("train/1/2/0/0 "), "{list}");
        assert_eq!(list.lines().count(), 4);
        assert!(format_steps(&all).contains(
            "step    2:    4 attempts · score 0.467 · reward 0.467 · 4.0 tokens sampled"
        ));
    }

    #[test]
    fn format_failures_shortens_repeated_errors() {
        let failed = |group, status, error: Option<&str>| FailedAttempt {
            id: AttemptId::from_bytes([1; 16]),
            slot: summary(group, None).slot,
            number: 0,
            status,
            error: error.map(str::to_owned),
        };
        let lines = format_failures(&[
            failed(0, Status::Failed, Some("no module named x")),
            failed(1, Status::Failed, Some("no module named x")),
            failed(2, Status::Superseded, None),
            failed(3, Status::Abandoned, Some("gone")),
        ]);
        let expected = "train/1/2/0/0            try 0: no module named x\n\
                        train/1/2/1/0            try 0: same error\n\
                        train/1/2/2/0            try 0, retried (id \
                        01010101010101010101010101010101): no token was sampled\n\
                        train/1/2/3/0            try 0, repeated when the run is resumed (id \
                        01010101010101010101010101010101): gone\n";
        assert_eq!(lines, expected);
    }

    #[test]
    fn unscored_attempts_are_marked_in_both_lists() {
        let waits = AttemptSummary { status: Status::Unscored, score: None, ..summary(0, None) };
        assert!(
            format_attempts(std::slice::from_ref(&waits))
                .ends_with("tokens sampled · without a score\n")
        );
        assert!(format_steps(&[waits]).ends_with("tokens sampled · 1 without a score\n"));
    }
}
