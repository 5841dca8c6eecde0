//! Tests the selection of the attempts that form a group.

use levade_tree::{AttemptId, Outcome, RunId, Trajectory};
use serde_json::Value;

use super::*;

/// Returns an attempt that ended with this reward, or failed if it is `None`.
fn attempt(sample: u32, reward: Option<f64>) -> Attempt {
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample };
    Attempt {
        id: AttemptId::new(&RunId("r".into()), &slot, 0),
        slot,
        number: 0,
        task: Value::Null,
        outcome: Outcome::demonstrated(""),
        score: reward,
        reward,
        step_rewards: Vec::new(),
        status: if reward.is_some() { Status::Completed } else { Status::Failed },
        trajectory: Trajectory::new(),
    }
}

fn keys(oversample_keep: &str) -> RlKeys {
    let text = format!(
        "steps = 1\ngroups = 1\ngroup_size = 2\nspare = 2\nlearning_rate = 1.0\noversample_keep = \"{oversample_keep}\""
    );
    toml::from_str(&text).unwrap()
}

#[test]
fn group_keeps_attempts_by_end_or_start_order() {
    // `+` is rewarded, `x` failed, `.` in progress.
    let all = |text: &str| -> Vec<Option<Attempt>> {
        let of = |(state, sample): (char, u32)| match state {
            '+' => Some(attempt(sample, Some(1.0))),
            'x' => Some(attempt(sample, None)),
            _ => None,
        };
        text.chars().zip(0..).map(of).collect()
    };
    for (states, ended, started) in [
        ("....", None, None),
        ("+...", None, None),
        ("..++", Some(4), None),
        ("+.+.", Some(4), None),
        ("++..", Some(4), Some(2)),
        ("+.++", Some(4), None),
        ("+x+.", Some(4), Some(3)),
        ("xx.+", None, None),
        ("xx++", Some(4), Some(4)),
        ("xxx+", Some(4), Some(4)),
        ("++++", Some(4), Some(2)),
    ] {
        assert_eq!(group_len(&all(states), &keys("ended")), ended, "{states}");
        assert_eq!(group_len(&all(states), &keys("started")), started, "{states}");
    }
    // Recipes without the key keep the attempts that end first.
    let text = "steps = 1\ngroups = 1\ngroup_size = 2\nlearning_rate = 1.0";
    let older: RlKeys = toml::from_str(text).unwrap();
    assert_eq!(older.oversample_keep, OversampleKeep::Ended);
}
