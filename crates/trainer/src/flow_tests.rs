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

/// Returns a group whose samples ended with these answers and rewards.
fn group(ended: &[(&str, Option<f64>)], size: usize) -> Group {
    let mut attempts: Vec<Option<Attempt>> = (0..)
        .zip(ended)
        .map(|(sample, (answer, reward))| {
            let outcome = Outcome::demonstrated(*answer);
            Some(Attempt { outcome, ..attempt(sample, *reward) })
        })
        .collect();
    attempts.resize(size, None);
    Group {
        task: Task { question: "3 + 5?".into(), ..Task::default() },
        task_index: 0,
        admitted: 0,
        attempts,
        full: false,
        baseline: None,
        completed: None,
        replaced: false,
        compared: Vec::new(),
        excluded: ExcludedAttempts::default(),
    }
}

#[test]
fn attempts_with_experience_start_in_order_and_read_earlier_answers() {
    let keys = levade_recipe::ExperienceKeys { attempts: 2, ..Default::default() };
    let answers = [("It is 7.", Some(0.0)), ("", None), ("It is 9.", Some(0.25)), ("8", Some(1.0))];
    let group = group(&answers, 6);
    let can_start = |sample| group.can_start(GroupMember::Sample(sample), Some(&keys));
    assert_eq!([3, 4, 5].map(can_start), [true, true, false]);
    assert!(group.can_start(GroupMember::Sample(5), None));
    assert!(group.can_start(GroupMember::Baseline, Some(&keys)));
    let experience = |sample, keys: &levade_recipe::ExperienceKeys| {
        group.task_with_experience(GroupMember::Sample(sample), Some(keys)).experience
    };
    assert_eq!(experience(0, &keys), None);
    let first = "Earlier attempts at this task:\n\nAttempt 1 (score 0):\nIt is 7.";
    assert_eq!(experience(1, &keys).as_deref(), Some(first));
    // A failed attempt has no answer to read.
    assert_eq!(experience(2, &keys).as_deref(), Some(first));
    let newest = "Earlier attempts at this task:\n\nAttempt 3 (score 0.25):\nIt is 9.\n\n\
                  Attempt 4 (score 1):\n8";
    assert_eq!(experience(4, &keys).as_deref(), Some(newest));
    let without = levade_recipe::ExperienceKeys { scores: false, ..keys };
    let text = experience(1, &without).unwrap();
    assert!(text.ends_with("Attempt 1:\nIt is 7."), "{text}");
    assert_eq!(group.task_with_experience(GroupMember::Baseline, Some(&without)).experience, None);
    assert_eq!(group.task_with_experience(GroupMember::Sample(4), None), group.task);
}

#[test]
fn group_keeps_attempts_by_end_or_start_order() {
    // `+` is rewarded, `x` failed, `.` in progress.
    let all = |text: &str| -> Vec<Option<Attempt>> {
        text.chars()
            .zip(0..)
            .map(|(state, sample)| match state {
                '+' => Some(attempt(sample, Some(1.0))),
                'x' => Some(attempt(sample, None)),
                _ => None,
            })
            .collect()
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
