use async_trait::async_trait;
use levade_recipe::ScorerKeys;
use levade_store::{CreditTarget, StepReward};
use levade_tree::{AttemptId, AttemptSlot, CallCounts, Purpose, RunId, Segment, Trajectory};
use serde_json::json;

use super::*;

/// A scorer that returns these components for every attempt.
#[derive(Debug)]
struct ConstantScorer(Vec<Component>);

#[async_trait]
impl Scorer for ConstantScorer {
    async fn score(&self, _: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        Ok(self.0.clone())
    }
}

#[derive(Debug)]
struct PanickingScorer;

#[async_trait]
impl Scorer for PanickingScorer {
    async fn score(&self, _: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        panic!("a bug in the scorer")
    }
}

/// A scorer that never responds.
#[derive(Debug)]
struct HangingScorer;

#[async_trait]
impl Scorer for HangingScorer {
    async fn score(&self, _: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        std::future::pending().await
    }
}

fn attempt(task: Value) -> Attempt {
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample: 0 };
    let mut trajectory = Trajectory::new();
    trajectory.push(Segment::context(None, vec![1, 2, 3], 0)).unwrap();
    Attempt {
        id: AttemptId::new(&RunId("r".into()), &slot, 0),
        slot,
        number: 0,
        task,
        outcome: Outcome::demonstrated("it is 72"),
        score: None,
        reward: None,
        step_rewards: Vec::new(),
        status: Status::Unscored,
        trajectory,
    }
}

fn scorer(name: &str) -> ScorerKeys {
    ScorerKeys { name: name.into(), ..RewardKeys::default().single_scorer() }
}

fn when(source: &str, data_source: &str) -> WhenKeys {
    let mut table = toml::Table::new();
    for (key, value) in [("source", source), ("data_source", data_source)] {
        if !value.is_empty() {
            table.insert(key.into(), value.into());
        }
    }
    table.try_into().unwrap()
}

fn scorers(several: Vec<ScorerKeys>, custom: Vec<(&str, Arc<dyn Scorer>)>) -> Scorers {
    let keys = RewardKeys { scorers: several, timeout_seconds: 0.2, ..RewardKeys::default() };
    Scorers::new(
        &keys,
        custom.into_iter().map(|(name, scorer)| (name.to_owned(), scorer)).collect(),
    )
}

#[test]
fn scorers_apply_to_matching_and_named_tasks() {
    let maths = ScorerKeys { when: when("", "maths"), ..scorer("maths") };
    let words = ScorerKeys { when: when("file", "words"), ..scorer("words") };
    let all = scorers(vec![maths, words, scorer("form")], Vec::new());
    let of = |task: Value| -> Vec<String> {
        all.task_scorers(&task).map(|named| named.name.clone()).collect()
    };
    assert_eq!(of(json!({"source": "file", "row": {"data_source": "maths"}})), ["maths", "form"]);
    assert_eq!(of(json!({"source": "file", "row": {"data_source": "words"}})), ["words", "form"]);
    assert_eq!(of(json!({"source": "other", "row": {"data_source": "words"}})), ["form"]);
    assert_eq!(of(json!({"source": "file", "kind": null})), ["form"]);
    let of_file = ScorerKeys { when: when("rows.jsonl.gz", ""), ..scorer("file") };
    let by_file = scorers(vec![of_file], Vec::new());
    let is_scored = |source: &str| {
        by_file.check_task("t", &json!({"source": source, "answer": 1}), &[]).is_ok()
    };
    assert_eq!(["rows", "rows.jsonl.gz", "row"].map(is_scored), [true, true, false]);
    let sources = ["rows".to_owned(), "more".to_owned()];
    let error =
        by_file.check_task("t", &json!({"source": "more", "answer": 1}), &sources).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("task t of the source more has no scorer: `when` of file excludes the task"),
        "{error}"
    );
    assert!(error.to_string().ends_with("the sources are rows, more"), "{error}");
    // A task that names its scorers uses only these.
    assert_eq!(
        of(json!({"source": "file", "row": {"data_source": "maths", "scorer": "words"}})),
        ["words"]
    );
    assert_eq!(of(json!({"row": {"scorer": ["form", "maths"]}})), ["maths", "form"]);
    let error =
        all.check_task("t", &json!({"answer": 1, "row": {"scorer": "wrods"}}), &[]).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("names the scorer \"wrods\", but the scorers of the recipe are maths, words"),
        "{error}"
    );
    let error = all.check_task("t", &json!({"answer": "many"}), &[]).unwrap_err();
    assert!(matches!(error, TrainerError::AnswerKey { .. }), "{error}");
}

#[test]
fn scorers_apply_to_their_part_of_training() {
    let scorer =
        |name: &str, when: &str| ScorerKeys { when: toml::from_str(when).unwrap(), ..scorer(name) };
    let all = scorers(
        vec![
            scorer("form", "until_step = 5"),
            scorer("exact", "from_step = 5\nfrom_success = 0.5"),
            scorer("loose", "from_step = 5\nuntil_success = 0.5"),
            scorer("level", "row = { level = \"2\" }"),
        ],
        Vec::new(),
    );
    let at = |purpose, step, task: Value| -> Vec<String> {
        let unplaced = attempt(task);
        let slot = AttemptSlot { purpose, step, ..unplaced.slot };
        let attempt = Attempt { slot, ..unplaced };
        all.attempt_scorers(&attempt).map(|named| named.name.clone()).collect()
    };
    assert_eq!(at(Purpose::Train, 4, json!({"measured_success": 0.9})), ["form"]);
    assert_eq!(at(Purpose::Train, 5, json!({"measured_success": 0.4})), ["loose"]);
    assert_eq!(at(Purpose::Train, 5, json!({"measured_success": 0.5})), ["exact"]);
    // A task without a measurement counts as 0.5.
    assert_eq!(at(Purpose::Train, 9, json!({"row": {"level": 2}})), ["exact", "level"]);
    // Evaluations have the scorers of the end, whenever they are made.
    assert_eq!(at(Purpose::Eval, 0, json!({"measured_success": 0.1})), ["exact"]);
    // Prompts of all steps of a phase are compared with each other.
    assert_eq!(at(Purpose::Prompt, 9, json!({})), ["form"]);
    // A task that names its scorers uses them at any moment.
    assert_eq!(at(Purpose::Train, 9, json!({"row": {"scorer": "form"}})), ["form"]);
    assert!(all.depend_on_success());
}

#[test]
fn task_without_scorer_at_some_step_is_rejected() {
    let early = ScorerKeys { when: toml::from_str("until_step = 5").unwrap(), ..scorer("form") };
    let task = json!({"answer": 1, "source": "file"});
    let early_only = scorers(vec![early.clone()], Vec::new());
    let error = early_only.check_task("t", &task, &[]).unwrap_err().to_string();
    assert!(error.contains("no scorer applies from phase 0, step 5"), "{error}");
    assert!(!early_only.depend_on_success());
    let whole = scorers(vec![early, scorer("right")], Vec::new());
    whole.check_task("t", &task, &[]).unwrap();
}

#[tokio::test]
async fn score_is_weighted_sum_of_components() {
    let parts = vec![
        Component { extracted: Some("72".into()), ..Component::score(0.5) },
        Component { credit_target: Some(CreditTarget::Turn(0)), ..Component::new("step", -1.0) },
        Component::new("length", 9.0),
    ];
    let judged =
        ScorerKeys { weight: 0.5, weights: [("step".into(), 0.25)].into(), ..scorer("judge") };
    let compared_with = ScorerKeys { weight: 0.0, ..scorer("beside") };
    let all = scorers(
        vec![scorer("right"), judged, compared_with],
        vec![("judge", Arc::new(ConstantScorer(parts)))],
    );
    let mut made = attempt(json!({"answer": 72}));
    let before = made.trajectory.clone();
    all.score(&mut made).await.unwrap();
    assert_eq!(made.trajectory, before);
    let done = all.compute_score(made);
    let components: Vec<(&str, f64, Option<f64>)> =
        done.outcome.components.iter().map(|c| (c.name.as_str(), c.value, c.weight)).collect();
    let want = [
        ("right", 1.0, Some(1.0)),
        ("judge", 0.5, Some(0.5)),
        ("judge.step", -1.0, Some(0.25)),
        ("judge.length", 9.0, None),
        ("beside", 1.0, None),
    ];
    assert_eq!(components, want);
    // In addition to the weighted scores, a component is credited to its turn.
    assert_eq!((done.score, done.reward), (Some(1.0), Some(1.0)));
    assert_eq!(
        done.step_rewards,
        [StepReward { credit_target: CreditTarget::Turn(0), reward: -0.25 }]
    );
    assert_eq!(done.outcome.extracted.as_deref(), Some("72"));
    assert_eq!(done.status, Status::Completed);
}

#[tokio::test]
async fn invalid_scorer_results_are_handled_by_unscored_policy() {
    let gives = |components| -> Arc<dyn Scorer> { Arc::new(ConstantScorer(components)) };
    let (panics, hangs): (Arc<dyn Scorer>, Arc<dyn Scorer>) =
        (Arc::new(PanickingScorer), Arc::new(HangingScorer));
    for (scorer_of, again, want) in [
        (gives(vec![]), false, "the result has no component called `score`"),
        (
            gives(vec![Component::new("scroe", 1.0)]),
            false,
            "the result has no component called `score`",
        ),
        (gives(vec![Component::score(f64::NAN)]), false, "the component score is NaN"),
        (panics, false, "panicked"),
        (hangs, true, "did not respond within 200ms"),
    ] {
        // Either a substitute value is used, or the attempt fails, or it is deferred if a later
        // call may succeed.
        for unscored in [
            UnscoredEffect::Retry,
            UnscoredEffect::Drop,
            UnscoredEffect::Defer,
            UnscoredEffect::Value(0.5),
        ] {
            let keys = ScorerKeys { unscored: Some(unscored), ..scorer("judge") };
            let all = scorers(vec![keys], vec![("judge", scorer_of.clone())]);
            let mut made = attempt(json!({}));
            let result = all.score(&mut made).await;
            assert_eq!(made.trajectory.segments().len(), 1, "{want}");
            match unscored {
                UnscoredEffect::Value(value) => {
                    result.unwrap();
                    assert!(
                        made.outcome.warnings[0].message.contains(want),
                        "{:?}",
                        made.outcome.warnings
                    );
                    assert_eq!(all.compute_score(made).score, Some(value));
                }
                _ => {
                    let not_scored = result.unwrap_err();
                    assert!(not_scored.why.contains(want), "{not_scored:?}");
                    let fate = match unscored {
                        UnscoredEffect::Drop => FailureAction::Dropped,
                        UnscoredEffect::Defer if again => FailureAction::Deferred,
                        _ => FailureAction::Broken { retry: again },
                    };
                    assert_eq!(not_scored.action, fate, "{want}");
                    let broken = not_scored.apply_to(&all, made);
                    assert_eq!(
                        (broken.score, broken.reward, broken.status),
                        (None, None, Status::Failed)
                    );
                }
            }
        }
    }
}

/// A scorer that scores the attempts of a group by their positions in the group.
#[derive(Debug)]
struct IndexScorer;

#[async_trait]
impl Scorer for IndexScorer {
    fn scores_groups(&self) -> bool {
        true
    }

    async fn score(&self, _: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        Err(ScoreError::Unusable("it compares".into()))
    }

    async fn score_group(&self, group: &[ScorerInput]) -> Result<Vec<Vec<Component>>, ScoreError> {
        assert!(group.iter().all(|input| input.trajectory.segments().len() == 1));
        let score_at = |index: usize| (index as f64 + 1.0) / group.len() as f64;
        Ok((0..group.len()).map(|index| vec![Component::score(score_at(index))]).collect())
    }
}

#[tokio::test]
async fn score_together_includes_already_scored_attempts() {
    let all = scorers(vec![scorer("places")], vec![("places", Arc::new(IndexScorer))]);
    let member = |sample| {
        let mut member = attempt(json!({}));
        member.slot.sample = sample;
        member
    };
    let mut first = member(0);
    let mut third = member(2);
    let compared_with = [member(3), member(1)];
    all.score_together(&mut [&mut third, &mut first], &compared_with).await.unwrap();
    for (made, expected_score) in [(first, 0.25), (third, 0.75)] {
        assert_eq!(made.trajectory.segments().len(), 1);
        assert_eq!(all.compute_score(made).score, Some(expected_score));
    }
}

/// Rewards of tools are added to the penalties for the calls of their turn.
#[test]
fn tool_rewards_add_to_call_penalties_of_turn() {
    let keys = RewardKeys { malformed_call: -0.5, failed_call: -0.25, ..RewardKeys::default() };
    let all = Scorers::new(&keys, CustomScorers::new());
    let mut made = attempt(json!({"answer": 72}));
    made.outcome.components = vec![Component { weight: Some(1.0), ..Component::score(1.0) }];
    let calls = |malformed| CallCounts { malformed, ..CallCounts::default() };
    made.outcome.calls_by_turn = vec![(0, calls(2)), (1, calls(1))];
    made.outcome.rewards_by_turn = vec![(1, 2.0), (2, 0.5)];
    let done = all.compute_score(made);
    let step_rewards: Vec<(CreditTarget, f64)> =
        done.step_rewards.into_iter().map(|reward| (reward.credit_target, reward.reward)).collect();
    assert_eq!(
        step_rewards,
        [(CreditTarget::Turn(0), -1.0), (CreditTarget::Turn(1), 1.5), (CreditTarget::Turn(2), 0.5)]
    );
    assert_eq!((done.score, done.reward), (Some(1.0), Some(2.0)));
}

/// The score of an attempt at a game is the mean over the seats of one agent.
#[test]
fn score_of_agent_is_mean_over_its_seats() {
    let part = |value| Component { weight: Some(1.0), ..Component::score(value) };
    let seat = |name: &str, value| Component {
        credit_target: Some(CreditTarget::Agent(name.into())),
        ..part(value)
    };
    let components =
        vec![seat("wolf@1", 1.0), seat("wolf@4", 0.5), seat("good@2", -1.5), part(0.25)];
    let finish = |of: &str| {
        let keys = RewardKeys { of: of.into(), ..RewardKeys::default() };
        let mut attempt = attempt(Value::Null);
        attempt.outcome.components = components.clone();
        Scorers::new(&keys, CustomScorers::new()).compute_score(attempt)
    };
    let wolf = finish("wolf");
    assert_eq!((wolf.score, wolf.reward), (Some(1.0), Some(1.0)));
    assert_eq!(wolf.step_rewards.len(), 3);
    assert_eq!(finish("good").score, Some(-1.25));
    assert_eq!(finish("").score, Some(0.25));
}
