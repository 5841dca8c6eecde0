use serde_json::json;

use super::*;

fn keys(text: &str) -> CurriculumKeys {
    toml::from_str(text).unwrap()
}

/// Returns tasks with these levels, in order.
fn tasks(levels: &[&str]) -> Vec<Task> {
    levels
        .iter()
        .enumerate()
        .map(|(index, level)| Task {
            id: format!("t-{index}"),
            row: json!({ "level": level }).as_object().unwrap().clone().into(),
            ..Task::default()
        })
        .collect()
}

fn curriculum(text: &str, levels: &[&str]) -> Curriculum {
    Curriculum::from_tasks(&keys(text), 3, 0, tasks(levels).into_iter()).unwrap()
}

/// Number of groups per step, and of attempts per group.
const GROUPS: u64 = 4;
const ATTEMPTS: u64 = 8;

/// A simulated policy: returns scores of a group, given the task and the step.
type Policy = dyn Fn(usize, u64) -> f64;

fn scores(policy: &Policy, index: usize, position: u64) -> Vec<f64> {
    let success = policy(index, position / GROUPS);
    (0..ATTEMPTS)
        .map(|attempt| f64::from(u8::from(uniform(9, position, attempt) < success)))
        .collect()
}

/// Runs steps from `first` to `last` and returns the tasks in the order of their positions. The
/// results of a step are known before the next step is chosen.
fn run(curriculum: &mut Curriculum, policy: &Policy, first: u64, last: u64) -> Vec<usize> {
    let mut chosen = Vec::new();
    for step in first..last {
        let mut busy = Vec::new();
        for position in step * GROUPS..(step + 1) * GROUPS {
            busy.push(curriculum.choose_task(position, None, &busy));
        }
        for (position, index) in (step * GROUPS..).zip(&busy) {
            curriculum.measure(position, None, &scores(policy, *index, position));
        }
        chosen.extend(busy);
    }
    chosen
}

fn count(chosen: &[usize], is_counted: impl Fn(usize) -> bool) -> usize {
    chosen.iter().filter(|index| is_counted(**index)).count()
}

/// Thirty tasks: ten always succeed, ten succeed half of the time, ten never succeed.
fn mixed_policy(index: usize, _: u64) -> f64 {
    [1.0, 0.5, 0.0][index / 10]
}

#[test]
fn band_prefers_medium_tasks() {
    let levels = ["x"; 30];
    let mut banded = curriculum("band = [0.1, 0.9]\nretest = 0.1", &levels);
    let chosen = run(&mut banded, &mixed_policy, 0, 100);
    let later = &chosen[160..];
    let medium = count(later, |index| index / 10 == 1) as f64 / later.len() as f64;
    assert!(medium > 0.8, "{medium}");
    // Tasks outside of the band are measured again, at about the rate of `retest`, in turns.
    let retested = count(later, |index| index / 10 != 1) as f64 / later.len() as f64;
    assert!((0.05..0.2).contains(&retested), "{retested}");
    let outside: std::collections::BTreeSet<usize> =
        later.iter().copied().filter(|index| index / 10 != 1).collect();
    assert!(outside.len() >= 15, "{outside:?}");
    // Without a band, all tasks are sampled equally often.
    let mut even = curriculum("", &levels);
    let chosen = run(&mut even, &mixed_policy, 0, 90);
    for index in 0..30 {
        assert_eq!(count(&chosen, |other| other == index), 12);
    }
}

#[test]
fn estimates_follow_a_policy_that_changes() {
    // The first five tasks are too hard for 40 steps, and then medium; the other five reverse it.
    let policy = |index: usize, step: u64| match (index < 5, step < 40) {
        (true, true) | (false, false) => 0.0,
        _ => 0.5,
    };
    let mut moving = curriculum("band = [0.1, 0.9]\nretest = 0.25", &["x"; 10]);
    let chosen = run(&mut moving, &policy, 0, 160);
    let fraction = |part: &[usize]| count(part, |index| index < 5) as f64 / part.len() as f64;
    let (before, after) = (fraction(&chosen[80..160]), fraction(&chosen[480..]));
    assert!(before < 0.45 && after > 0.55, "{before} {after}");
}

#[test]
fn choices_are_deterministic_and_resume() {
    let text = "pool_by = 'level'\nweights = { a = 1, b = 3 }\nband = [0.1, 0.9]";
    let levels = [["a"; 15], ["b"; 15]].concat();
    let complete = run(&mut curriculum(text, &levels), &mixed_policy, 0, 40);
    assert_eq!(complete, run(&mut curriculum(text, &levels), &mixed_policy, 0, 40));
    // A resumed run reads the groups of completed steps from the store.
    let mut resumed = curriculum(text, &levels);
    let known = tasks(&levels);
    for position in 0..20 * GROUPS {
        let index = complete[position as usize];
        let task = json!(known[index]);
        resumed.measure(position, Some(&task), &scores(&mixed_policy, index, position));
    }
    let rest = run(&mut resumed, &mixed_policy, 20, 40);
    assert_eq!(rest, complete[20 * GROUPS as usize..]);
    // This also holds without a band.
    let text = "pool_by = 'level'\nweights = { a = 1, b = 3 }";
    let complete = run(&mut curriculum(text, &levels), &mixed_policy, 0, 40);
    let mut resumed = curriculum(text, &levels);
    for position in 0..20 * GROUPS {
        let task = json!(known[complete[position as usize]]);
        resumed.measure(position, Some(&task), &[1.0]);
    }
    assert_eq!(run(&mut resumed, &mixed_policy, 20, 40), complete[20 * GROUPS as usize..]);
}

#[test]
fn recorded_task_of_a_position_is_kept() {
    let mut resumed = curriculum("band = [0.1, 0.9]", &["x"; 30]);
    for (position, index) in [(0, 7), (1, 22), (2, 7)] {
        let recorded = json!(tasks(&["x"; 30])[index]);
        assert_eq!(resumed.choose_task(position, Some(&recorded), &[]), index);
    }
    let foreign = json!({ "id": "another run's" });
    assert!(resumed.choose_task(3, Some(&foreign), &[]) < 30);
}

#[test]
fn pools_are_sampled_by_weight() {
    let levels = [["a"; 27].as_slice(), &["b"; 3]].concat();
    let text = "pool_by = 'level'\nweights = { a = 1, b = 3 }";
    let chosen = run(&mut curriculum(text, &levels), &mixed_policy, 0, 250);
    let second = count(&chosen, |index| index >= 27) as f64 / chosen.len() as f64;
    assert!((0.7..0.8).contains(&second), "{second}");
}

#[test]
fn gates_open_and_close_again() {
    let text = "pool_by = 'level'\nstages = ['a', 'b']\ngate = 0.7\nback = 0.4";
    // The stages have the order of the key `stages`, not of the tasks.
    let levels = [["b"; 10], ["a"; 10]].concat();
    // Success in the first stage rises, and is lost again after step 60.
    let policy = |index: usize, step: u64| match (index >= 10, step) {
        (true, 0..20) => 0.2,
        (true, 20..60) => 0.95,
        (true, _) => 0.05,
        (false, _) => 0.3,
    };
    let mut staged = curriculum(text, &levels);
    let chosen = run(&mut staged, &policy, 0, 20);
    assert_eq!(count(&chosen, |index| index < 10), 0, "the second stage is not reached");
    let chosen = run(&mut staged, &policy, 20, 60);
    assert!(count(&chosen, |index| index < 10) > 40, "the gate is open");
    assert_eq!(staged.reached_pools().len(), 2);
    run(&mut staged, &policy, 60, 80);
    let chosen = run(&mut staged, &policy, 80, 90);
    assert_eq!(count(&chosen, |index| index < 10), 0, "the gate is closed again");
}

#[test]
fn metrics_count_tasks_by_class() {
    let mut banded = curriculum("band = [0.1, 0.9]", &["x"; 30]);
    let before: BTreeMap<_, _> = banded.metrics().into_iter().collect();
    assert_eq!((before["unknown"], before["medium"], before["pools"]), (30.0, 0.0, 1.0));
    run(&mut banded, &mixed_policy, 0, 200);
    let after: BTreeMap<_, _> = banded.metrics().into_iter().collect();
    assert_eq!((after["easy"], after["hard"], after["unknown"]), (10.0, 10.0, 0.0));
    assert_eq!(after["medium"], 10.0);
}

#[test]
fn unsuitable_pools_are_named() {
    for (text, wrong) in [
        ("pool_by = 'depth'", "no field `depth`"),
        ("pool_by = 'level'\nstages = ['a', 'z']", "`stages` names \"z\", but the pools are a, b"),
        ("pool_by = 'level'\nweights = { a = 1 }", "`weights` does not name the pool \"b\""),
    ] {
        let made = Curriculum::from_tasks(&keys(text), 1, 0, tasks(&["a", "b"]).into_iter());
        let error = made.map(|_| ()).unwrap_err();
        assert!(error.contains(wrong), "{error}");
    }
}
