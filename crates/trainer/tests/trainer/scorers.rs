//! Scorers in complete runs: a single scorer, several weighted scorers, group scorers, and
//! unavailable scorers.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{Sampler, Simulator};
use levade_reward::{NumericScorer, ScoreError, Scorer, ScorerInput};
use levade_store::testing::wait;
use levade_store::{Attempt, CreditTarget, Sqlite, Status, Store};
use levade_trainer::{RunEnd, RunParts, StartMode, StopFlag, Summary, Trainer, TrainerError};
use levade_tree::{AttemptId, Component, Finish, Purpose};
use serde_json::Value;

use crate::common::{Notes, metrics, parts, ranks, recipe, simulator};

/// Runs a recipe to its end. `scorers` replace the recipe's scorers with the same names.
async fn run(
    dir: &Path,
    overrides: &[&str],
    policy: &Arc<Simulator>,
    scorers: &[(&str, Arc<dyn Scorer>)],
    start: StartMode,
    notes: &mut Notes,
) -> Result<Summary, TrainerError> {
    let scorers: BTreeMap<String, Arc<dyn Scorer>> =
        scorers.iter().map(|(name, scorer)| ((*name).to_owned(), scorer.clone())).collect();
    let parts = RunParts { scorers, ..parts(policy, Duration::ZERO) };
    let mut trainer = Trainer::new(recipe(dir, overrides), parts, start).await?;
    match trainer.run(notes, &StopFlag::default()).await? {
        RunEnd::Finished(summary) => Ok(summary),
        other => panic!("{other:?}"),
    }
}

fn attempts(dir: &Path) -> Vec<Attempt> {
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let all = [Purpose::Train, Purpose::Eval]
        .into_iter()
        .flat_map(|purpose| wait(store.summaries(purpose)).unwrap());
    all.map(|summary| wait(store.attempt(&summary.id)).unwrap().unwrap()).collect()
}

/// Returns score and reward of an attempt if only numbers are scored, by the recipe of these tests.
fn by_numbers(attempt: &Attempt) -> (f64, f64) {
    let outcome = &attempt.outcome;
    let is_answered = outcome.finish == Finish::Answered;
    let score = if is_answered {
        NumericScorer::default().grade(&outcome.final_text, &attempt.task["answer"]).unwrap().value
    } else {
        0.0
    };
    let truncation_reward = if is_answered { 0.0 } else { -0.5 };
    let calls = outcome.calls_by_turn.iter().map(|(_, calls)| {
        let malformed = f64::from(calls.malformed);
        -0.1 * malformed + -0.05 * (f64::from(calls.errors()) - malformed)
    });
    (score, score + truncation_reward + calls.filter(|reward| *reward != 0.0).sum::<f64>())
}

/// Returns the attempt without the components of its score.
fn bare(mut attempt: Attempt) -> Attempt {
    attempt.outcome.components.clear();
    attempt
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_scorer_determines_score() {
    let root = tempfile::tempdir().unwrap();
    let mut bare_attempts = Vec::new();
    for (name, scorers) in
        [("numeric", &[][..]), ("right", &["reward.scorers=[{name='right', kind='numeric'}]"][..])]
    {
        let dir = root.path().join(name);
        let policy = simulator(Duration::ZERO, 0.1);
        run(&dir, scorers, &policy, &[], StartMode::Fresh, &mut Notes::default()).await.unwrap();
        let all = attempts(&dir);
        for attempt in all.iter().filter(|attempt| attempt.status == Status::Completed) {
            let (score, reward) = by_numbers(attempt);
            assert_eq!(attempt.score.map(f64::to_bits), Some(score.to_bits()));
            assert_eq!(attempt.reward.map(f64::to_bits), Some((reward + 0.0).to_bits()));
            let component = Component { weight: Some(1.0), ..Component::new(name, score) };
            assert_eq!(attempt.outcome.components, [component]);
        }
        let rewards: Vec<f64> = all.iter().filter_map(|attempt| attempt.reward).collect();
        assert!(
            rewards.iter().any(|reward| *reward != rewards[0]),
            "there is nothing to tell apart"
        );
        let of_step = |line: &Value| line.get("critic/score/mean").is_some();
        let mut lines: Vec<Value> = metrics(&dir);
        for line in lines.iter_mut().filter(|line| of_step(line)) {
            let line = line.as_object_mut().unwrap();
            let found =
                ["mean", "max", "min"].map(|what| line.remove(&format!("reward/{name}/{what}")));
            assert_eq!(found[0], Some(line["critic/score/mean"].clone()));
        }
        bare_attempts.push((
            policy.weights(),
            all.into_iter().map(bare).collect::<Vec<_>>(),
            lines,
        ));
    }
    let [one, listed] = &bare_attempts[..] else { panic!() };
    assert!(one == listed, "a list of one scorer is another one");
}

/// Short runs with a single RL phase.
const SHORT: [&str; 4] = [
    "phase=[{kind='rl', steps=3, groups=2, group_size=3, learning_rate=0.05}]",
    "eval.tasks=0",
    "eval.unseen_wordings=0",
    "agent.max_tokens=40",
];

fn short<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&SHORT[..], more].concat()
}

/// A scorer that returns the length of an answer and rewards the first turn.
#[derive(Debug)]
struct LengthScorer;

#[async_trait]
impl Scorer for LengthScorer {
    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let tokens = input.trajectory.sampled_tokens() as f64;
        let first = Component {
            credit_target: Some(CreditTarget::Turn(0)),
            ..Component::new("first", 0.5)
        };
        Ok(vec![Component::score(1.0), Component::new("tokens", tokens), first])
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scorers_are_weighted_and_selected_by_task() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let scorers = "reward.scorers=[{name='right', kind='numeric', weight=0.75, when={source=['arithmetic']}}, \
         {name='form', kind='numeric', weight=0.25, weights={first=0.5}}, \
         {name='other', kind='numeric', when={source='arithmetic', kind='none'}}]";
    let length_scorer: Arc<dyn Scorer> = Arc::new(LengthScorer);
    run(
        &dir,
        &short(&[scorers]),
        &policy,
        &[("form", length_scorer)],
        StartMode::Fresh,
        &mut Notes::default(),
    )
    .await
    .unwrap();
    for attempt in attempts(&dir) {
        let (right, reward) = by_numbers(&attempt);
        let components: Vec<(&str, Option<f64>)> =
            attempt.outcome.components.iter().map(|c| (c.name.as_str(), c.weight)).collect();
        let want = [
            ("right", Some(0.75)),
            ("form", Some(0.25)),
            ("form.tokens", None),
            ("form.first", Some(0.5)),
        ];
        assert_eq!(components, want);
        assert_eq!(attempt.score, Some(0.75 * right + 0.25 + 0.25));
        assert!(
            (attempt.reward.unwrap() - (reward - right + attempt.score.unwrap())).abs() < 1e-12
        );
        // The reward of the first turn is credited to its last token.
        let first = attempt.step_rewards.last().unwrap();
        assert_eq!((&first.credit_target, first.reward), (&CreditTarget::Turn(0), 0.25));
    }
    let lines = metrics(&dir);
    for name in ["right", "form", "form.tokens", "form.first"] {
        assert!(
            lines.iter().all(|line| line.get(format!("reward/{name}/mean")).is_some()),
            "{lines:?}"
        );
    }
    assert!(lines.iter().all(|line| line.get("reward/other/mean").is_none()));

    let no_caller = "reward.scorers=[{name='other', kind='numeric', when={kind='none'}}]";
    let dir = root.path().join("nobody");
    let error =
        run(&dir, &short(&[no_caller]), &policy, &[], StartMode::Fresh, &mut Notes::default())
            .await
            .unwrap_err();
    assert!(
        error.is_user_error() && error.to_string().contains("`when` of other excludes the task"),
        "{error}"
    );
}

/// A numeric scorer that can be unavailable: for its first calls, or for one task.
#[derive(Debug, Default)]
struct Judge {
    /// Number of calls that will still fail.
    missing: AtomicU32,
    /// Number of calls that returned a score.
    num_scored: AtomicU32,
    /// Whether only calls for the first attempt fail.
    of_first: bool,
    first: OnceLock<AttemptId>,
    /// Whether calls for the first task always fail.
    shuns: bool,
    shunned: OnceLock<Value>,
}

impl Judge {
    fn unavailable_for(calls: u32) -> Arc<Self> {
        Arc::new(Judge { missing: calls.into(), ..Judge::default() })
    }

    fn misses(&self) -> bool {
        self.missing
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
            .is_ok()
    }
}

#[async_trait]
impl Scorer for Judge {
    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let is_first = *self.first.get_or_init(|| input.attempt) == input.attempt;
        let misses = (is_first || !self.of_first) && self.misses();
        let shuns = self.shuns
            && *self.shunned.get_or_init(|| input.task["id"].clone()) == input.task["id"];
        if misses || shuns {
            return Err(ScoreError::Unavailable("the judge sleeps".into()));
        }
        self.num_scored.fetch_add(1, Ordering::SeqCst);
        Scorer::score(&NumericScorer::default(), input).await
    }
}

/// Runs with this judge as the scorer `numeric`.
async fn judged(
    dir: &Path,
    more: &[&str],
    policy: &Arc<Simulator>,
    judge: &Arc<Judge>,
    start: StartMode,
) -> Result<Vec<String>, TrainerError> {
    let (mut notes, scorer): (Notes, Arc<dyn Scorer>) = (Notes::default(), judge.clone());
    run(dir, &short(more), policy, &[("numeric", scorer)], start, &mut notes).await?;
    Ok(notes.0)
}

fn with(attempts: &[Attempt], status: Status) -> usize {
    attempts.iter().filter(|attempt| attempt.status == status).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scorer_is_retried_before_attempt_is_repeated() {
    let root = tempfile::tempdir().unwrap();
    for (missing, broken) in [(2u32, false), (3, true)] {
        let dir = root.path().join(missing.to_string());
        let policy = simulator(Duration::ZERO, 0.0);
        let judge = Arc::new(Judge { missing: missing.into(), of_first: true, ..Judge::default() });
        judged(&dir, &["agent.retries=1"], &policy, &judge, StartMode::Fresh).await.unwrap();
        let all = attempts(&dir);
        assert_eq!((all.len(), with(&all, Status::Completed)), (18, 18));
        assert!(all.iter().all(|attempt| attempt.score == Some(by_numbers(attempt).0)));
        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        let again: Vec<&Attempt> = all.iter().filter(|attempt| attempt.number > 0).collect();
        assert_eq!(again.len(), usize::from(broken));
        for attempt in again {
            let first = AttemptId::new(store.run(), &attempt.slot, 0);
            let first = wait(store.attempt(&first)).unwrap().unwrap();
            assert_eq!((first.status, first.reward, first.score), (Status::Superseded, None, None));
            assert!(first.outcome.error.unwrap().contains("the judge sleeps"));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unscored_attempts_are_dropped_or_get_value() {
    let root = tempfile::tempdir().unwrap();
    let policy = || simulator(Duration::ZERO, 0.0);
    let dir = root.path().join("drop");
    let drop = ["reward.unscored=drop", "reward.broken=-1.0"];
    judged(&dir, &drop, &policy(), &Judge::unavailable_for(2), StartMode::Fresh).await.unwrap();
    let all = attempts(&dir);
    assert_eq!(with(&all, Status::Failed), 2);
    assert!(
        all.iter().all(|attempt| attempt.reward.is_some() == (attempt.status == Status::Completed))
    );
    // If the scorer never succeeds, the run ends with an error, and no attempt counts as worthless.
    let failing = judged(
        &root.path().join("dead"),
        &drop,
        &policy(),
        &Judge::unavailable_for(9999),
        StartMode::Fresh,
    )
    .await;
    let error = failing.unwrap_err().to_string();
    assert!(
        error.contains("all 6 attempts failed") && error.contains("the judge sleeps"),
        "{error}"
    );

    let dir = root.path().join("number");
    let notes = judged(
        &dir,
        &["reward.unscored=0.25"],
        &policy(),
        &Judge::unavailable_for(4),
        StartMode::Fresh,
    )
    .await
    .unwrap();
    assert!(notes.iter().any(|note| note.contains("scorer: the judge sleeps")), "{notes:?}");
    let all = attempts(&dir);
    let with_substitute = all.iter().filter(|attempt| attempt.score == Some(0.25));
    assert_eq!((with_substitute.count(), with(&all, Status::Completed)), (4, all.len()));
}

/// While a scorer is unavailable, no attempt is lost or sampled twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_wait_for_unavailable_scorer() {
    let root = tempfile::tempdir().unwrap();
    let num_sampled =
        async |policy: &Arc<Simulator>| policy.device_stats().await.unwrap().unwrap().sampled;
    let dir = root.path().join("undisturbed");
    let undisturbed = simulator(Duration::ZERO, 0.0);
    judged(&dir, &[], &undisturbed, &Judge::unavailable_for(0), StartMode::Fresh).await.unwrap();
    let want: Vec<Attempt> = attempts(&dir);

    // The scorer becomes available again soon.
    let dir = root.path().join("back");
    let policy = simulator(Duration::ZERO, 0.0);
    let notes = judged(
        &dir,
        &["reward.unscored=defer"],
        &policy,
        &Judge::unavailable_for(5),
        StartMode::Fresh,
    )
    .await
    .unwrap();
    let reported = notes
        .iter()
        .filter(|note| note.contains("wait for the scorer numeric and are kept: the judge sleeps"));
    assert_eq!(reported.count(), 1, "{notes:?}");
    assert!(policy.weights() == undisturbed.weights() && attempts(&dir) == want);

    // The scorer is unavailable for longer than the outage timeout.
    let dir = root.path().join("away");
    let policy = simulator(Duration::ZERO, 0.0);
    let park = ["reward.unscored=defer", "reward.timeout_seconds=0.5"];
    let error = judged(&dir, &park, &policy, &Judge::unavailable_for(9999), StartMode::Fresh)
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(!error.is_user_error() && matches!(error, TrainerError::Outage { .. }), "{text}");
    assert!(
        text.contains("the scorer numeric was unavailable for the 0.5 s")
            && text.contains("--resume"),
        "{text}"
    );
    let parked = attempts(&dir);
    assert_eq!((parked.len(), with(&parked, Status::Unscored)), (6, 6));
    assert!(
        parked
            .iter()
            .all(|attempt| attempt.score.is_none() && attempt.trajectory.sampled_tokens() > 0)
    );
    // Once the scorer is available, it scores the existing attempts, and the run continues.
    let later = simulator(Duration::ZERO, 0.0);
    let judge = Judge::unavailable_for(0);
    judged(&dir, &park, &later, &judge, StartMode::Resume).await.unwrap();
    assert!(later.weights() == undisturbed.weights() && attempts(&dir) == want);
    assert_eq!(
        num_sampled(&policy).await + num_sampled(&later).await,
        num_sampled(&undisturbed).await
    );
    assert_eq!(judge.num_scored.load(Ordering::SeqCst) as usize, want.len());
}

/// Steps continue without the score as long as the staleness allows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_continues_without_score_up_to_staleness() {
    let root = tempfile::tempdir().unwrap();
    for staleness in [0, 1, 2] {
        let dir = root.path().join(staleness.to_string());
        let phase = format!(
            "phase=[{{kind='rl', steps=6, groups=2, group_size=3, learning_rate=0.05, \
             prefer='first_done', staleness={staleness}}}]"
        );
        let judge = Arc::new(Judge { shuns: true, ..Judge::default() });
        let park = [phase.as_str(), "reward.unscored=defer", "reward.timeout_seconds=0.5"];
        let policy = simulator(Duration::ZERO, 0.0);
        let error = judged(&dir, &park, &policy, &judge, StartMode::Fresh).await.unwrap_err();
        assert!(matches!(error, TrainerError::Outage { .. }), "{error}");
        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        assert_eq!(wait(store.planned_steps()).unwrap().len(), staleness);
        judged(
            &dir,
            &park,
            &simulator(Duration::ZERO, 0.0),
            &Judge::unavailable_for(0),
            StartMode::Resume,
        )
        .await
        .unwrap();
        assert_eq!(wait(store.planned_steps()).unwrap().len(), 6);
        let all = attempts(&dir);
        assert_eq!((all.len(), with(&all, Status::Completed)), (36, 36));
    }
}

/// A scorer that ranks the attempts at a task by length, after some failed calls.
#[derive(Debug)]
struct Rank(Judge);

#[async_trait]
impl Scorer for Rank {
    fn scores_groups(&self) -> bool {
        true
    }

    async fn score(&self, _: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        Err(ScoreError::Unusable("it compares".into()))
    }

    async fn score_group(&self, group: &[ScorerInput]) -> Result<Vec<Vec<Component>>, ScoreError> {
        if self.0.misses() {
            return Err(ScoreError::Unavailable("nobody compares".into()));
        }
        Ok(ranks(group))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn group_scorer_compares_attempts_of_group() {
    let root = tempfile::tempdir().unwrap();
    let scorers = "reward.scorers=[{name='right', kind='numeric', weight=0.5}, \
                   {name='rank', kind='numeric', weight=0.5}]";
    let more = [scorers, "eval.tasks=4", "eval.samples=2", "eval.temperature=1.0"];
    let ranks =
        |missing| -> Arc<dyn Scorer> { Arc::new(Rank(Judge { missing, ..Judge::default() })) };
    let mut notes = Notes::default();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.1);
    let rank = [("rank", ranks(AtomicU32::new(0)))];
    run(&dir, &short(&more), &policy, &rank, StartMode::Fresh, &mut notes).await.unwrap();
    let all = attempts(&dir);
    assert!(with(&all, Status::Failed) > 0 && with(&all, Status::Unscored) == 0);
    let key = |a: &Attempt| (a.slot.purpose, a.slot.phase, a.slot.step, a.slot.group);
    for group in all.chunk_by(|a, b| key(a) == key(b)) {
        // Failed attempts are not part of the comparison.
        let group: Vec<&Attempt> = group.iter().filter(|a| a.status == Status::Completed).collect();
        for attempt in &group {
            let length = |a: &Attempt| a.trajectory.sampled_tokens();
            let shorter =
                group.iter().filter(|other| length(other) < length(attempt)).count() as f64;
            let want = 0.5 * by_numbers(attempt).0 + 0.5 * (shorter / group.len() as f64);
            assert_eq!(attempt.score, Some(want));
        }
    }
    // An unavailable group scorer defers complete groups, which are compared after the run resumes.
    let park = [&more[..2], &["reward.unscored=defer", "reward.timeout_seconds=1.5"]].concat();
    let dir = root.path().join("away");
    let policy = simulator(Duration::ZERO, 0.1);
    let rank = [("rank", ranks(AtomicU32::new(9999)))];
    let error =
        run(&dir, &short(&park), &policy, &rank, StartMode::Fresh, &mut notes).await.unwrap_err();
    assert!(error.to_string().contains("the scorer rank was unavailable"), "{error}");
    assert!(with(&attempts(&dir), Status::Unscored) > 0);
    let rank = [("rank", ranks(AtomicU32::new(1)))];
    run(&dir, &short(&park), &policy, &rank, StartMode::Resume, &mut notes).await.unwrap();
    assert_eq!(with(&attempts(&dir), Status::Unscored), 0);
    // A greedy attempt has no group to be compared with.
    let remax = "phase=[{kind='rl', algorithm='remax', steps=1, groups=2, group_size=3, learning_rate=0.05}]";
    let dir = root.path().join("greedy");
    let rejected =
        run(&dir, &short(&[scorers, remax]), &policy, &rank, StartMode::Fresh, &mut notes).await;
    assert!(matches!(rejected.unwrap_err(), TrainerError::GreedyUnscorable { phase: 0, .. }));
}
