use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use levade_policy::{Simulator, SimulatorConfig};
use levade_rl::PolicyLoss;
use levade_tree::{SequenceInput, SequenceTarget, Term};

use super::testing::{Fault, TOKEN, TestGroup};
use super::*;

const LOSS: Loss = Loss::new(PolicyLoss::Reinforce);
const ADAM: OptimParams = OptimParams {
    learning_rate: 0.01,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-8,
    weight_decay: 0.01,
    max_grad_norm: f32::INFINITY,
};

fn described() -> Value {
    json!({
        "protocol": 1, "model_type": "llama", "vocab_size": 64, "context": 1024, "world_size": 1,
        "learners": {
            "policy": { "trains": true }, "reference": {}, "critic": { "trains": true, "value_head": true },
        },
    })
}

fn expected() -> LearnerRequirements {
    LearnerRequirements {
        model_type: "llama".into(),
        vocabulary: 64,
        context: 1024,
        reference: true,
        critic: true,
        lora: None,
        dtype: "f32".into(),
        export_dtype: "f32".into(),
    }
}

fn options(url: &str) -> LearnerOptions {
    LearnerOptions {
        url: url.into(),
        token: TOKEN.into(),
        call: Duration::from_secs(20),
        silence: Duration::from_secs(6),
        reconnect: Duration::from_secs(4),
        start: Duration::from_secs(4),
    }
}

async fn start(root: &Path) -> (TestGroup, RemoteLearner) {
    let group = TestGroup::start(root.to_owned(), described()).await;
    let learner = RemoteLearner::connect(options(&group.url), None, &expected()).await.unwrap();
    (group, learner)
}

/// Returns the same learner as the group's, in this process.
fn local() -> Simulator {
    Simulator::new(SimulatorConfig { rows: 64, ..SimulatorConfig::default() })
}

fn paths() -> Vec<SequenceInput> {
    (0..4).map(sequence_input).collect()
}

fn sequence_input(number: u32) -> SequenceInput {
    SequenceInput {
        tokens: (0..9).map(|i: u32| if i < 5 { i + 3 } else { (number * 7 + i) % 64 }).collect(),
        targets: (5..9)
            .map(|index: u32| SequenceTarget {
                index,
                temperature: 1.0,
                term: Term {
                    weight: 0.125,
                    advantage: number as f32 - 1.5,
                    behavior: Some(-4.0),
                    returns: 0.5,
                    ..Term::default()
                },
            })
            .collect(),
    }
}

fn request() -> TrainRequest {
    TrainRequest { sequences: paths(), loss: LOSS, params: ADAM }
}

fn update_sequences() -> UpdateSequences {
    let tokens = paths().into_iter().map(|path| path.tokens).collect();
    UpdateSequences { groups: vec![tokens], micro_batch_tokens: 12 }
}

/// Every verb has the same result as on a local learner, to the bit.
#[tokio::test]
async fn remote_learner_matches_local_learner() {
    let dir = tempfile::tempdir().unwrap();
    let (group, remote) = start(dir.path()).await;
    let local_learner = local();
    let batch = Arc::new(TreeBatch::merge(&paths()).unwrap());
    assert_eq!(remote.logprobs(batch.clone()).await, local_learner.logprobs(batch.clone()).await);
    assert_eq!(
        remote.predictions(batch.clone()).await,
        local_learner.predictions(batch.clone()).await
    );
    let critic = remote.with_name(CRITIC);
    assert_eq!(critic.values(batch.clone()).await, local_learner.values(batch.clone()).await);
    let micro_batch_plan = remote.plan(&update_sequences()).await.unwrap();
    assert_eq!(micro_batch_plan, local_learner.plan(&update_sequences()).await.unwrap());
    assert!(micro_batch_plan.micro_batches.len() > 1);
    let mut reported = 0;
    let mut expected = 0;
    let trained = remote.train(request(), &micro_batch_plan, &mut || reported += 1).await.unwrap();
    assert_eq!(
        trained,
        local_learner.train(request(), &micro_batch_plan, &mut || expected += 1).await.unwrap()
    );
    assert_eq!(reported, expected);
    let by_hand = remote.forward_backward(batch.clone(), LOSS).await.unwrap();
    assert_eq!(by_hand, local_learner.forward_backward(batch.clone(), LOSS).await.unwrap());
    assert_eq!(remote.optim_step(ADAM).await, local_learner.optim_step(ADAM).await);
    assert_eq!(remote.logprobs(batch.clone()).await, local_learner.logprobs(batch.clone()).await);

    let saved = tempfile::tempdir().unwrap();
    let manifest = remote.save(saved.path(), true).await.unwrap();
    assert_eq!(manifest.verify(), Ok(saved.path()));
    local_learner.load(saved.path(), true).await.unwrap();
    // The reference is another learner of the group, and loads the policy's weights.
    let reference = remote.with_name(REFERENCE);
    assert_ne!(reference.logprobs(batch.clone()).await, remote.logprobs(batch.clone()).await);
    reference.load(saved.path(), false).await.unwrap();
    assert_eq!(reference.logprobs(batch.clone()).await, remote.logprobs(batch.clone()).await);
    let weights = remote.publish(3).await.unwrap();
    let WeightsAt::Manifest(manifest) = weights.at else { panic!("{weights:?}") };
    manifest.verify().unwrap();
    assert_eq!(group.state.learners.lock().unwrap()["policy"].weights(), local_learner.weights());
}

/// All learners of a group that an earlier run has trained get their initial weights back.
#[tokio::test]
async fn reset_restores_initial_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (group, remote) = start(dir.path()).await;
    let local_learner = local();
    let batch = Arc::new(TreeBatch::merge(&paths()).unwrap());
    let micro_batch_plan = remote.plan(&update_sequences()).await.unwrap();
    remote.train(request(), &micro_batch_plan, &mut || {}).await.unwrap();
    assert_ne!(remote.logprobs(batch.clone()).await, local_learner.logprobs(batch.clone()).await);
    remote.reset().await.unwrap();
    assert_eq!(remote.logprobs(batch.clone()).await, local_learner.logprobs(batch).await);
    assert_eq!(group.done("load"), 1);
}

/// A lost response, and a connection that breaks before the call, change nothing: the call is
/// executed once.
#[tokio::test]
async fn retried_calls_are_executed_once() {
    let dir = tempfile::tempdir().unwrap();
    let (group, remote) = start(dir.path()).await;
    let local_learner = local();
    remote.publish(0).await.unwrap();
    let micro_batch_plan = remote.plan(&update_sequences()).await.unwrap();
    for (step, injected_fault) in
        [Fault::LoseResponse, Fault::Break, Fault::Busy].into_iter().enumerate()
    {
        group.inject_fault("train", injected_fault);
        let mut done = 0;
        let trained = remote.train(request(), &micro_batch_plan, &mut || done += 1).await.unwrap();
        assert_eq!(
            trained,
            local_learner.train(request(), &micro_batch_plan, &mut || {}).await.unwrap(),
            "{injected_fault:?}"
        );
        assert_eq!(
            (done, group.done("train")),
            (micro_batch_plan.micro_batches.len(), step + 1),
            "{injected_fault:?}"
        );
        group.inject_fault("publish", injected_fault);
        remote.publish(step as u64 + 1).await.unwrap();
        assert_eq!(group.done("publish"), step + 2);
    }
    assert_eq!(group.state.learners.lock().unwrap()["policy"].weights(), local_learner.weights());
}

#[tokio::test]
async fn offload_is_executed_once_if_response_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let (group, remote) = start(dir.path()).await;
    group.inject_fault("offload", Fault::LoseResponse);
    let moved = remote.offload(true).await.unwrap();
    assert_eq!((moved.bytes, group.done("offload")), (8, 1));
    assert_eq!(remote.offload(false).await.unwrap().bytes, 12);
    assert_eq!(remote.onload().await.unwrap(), TransferReport { bytes: 12, seconds: 0.5 });
    group.inject_fault("onload", Fault::Fail);
    let error = remote.onload().await.unwrap_err();
    assert!(matches!(error, PolicyError::Stopped(_)), "{error}");
}

/// A restarted group has lost its state: no further call is sent, whatever it would answer.
#[tokio::test]
async fn restarted_group_gets_no_further_calls() {
    let dir = tempfile::tempdir().unwrap();
    let (group, remote) = start(dir.path()).await;
    remote.publish(2).await.unwrap();
    let batch = Arc::new(TreeBatch::merge(&paths()).unwrap());
    group.inject_fault("logprobs", Fault::StartAgain);
    let error = remote.logprobs(batch.clone()).await.unwrap_err();
    assert!(matches!(error, PolicyError::Stopped(_)), "{error}");
    assert!(
        error.to_string().contains("was restarted in the meantime and has lost its weights"),
        "{error}"
    );
    let num_executed = group.done("logprobs");
    let again = remote.with_name(CRITIC).values(batch).await.unwrap_err();
    assert!(
        matches!(again, PolicyError::Stopped(_)) && group.done("values") == 0 && num_executed == 0,
        "{again}"
    );
    // A new connection that loads the weights can use the group.
    RemoteLearner::connect(options(&group.url), None, &expected())
        .await
        .unwrap()
        .publish(2)
        .await
        .unwrap();
}

/// JSON has no NaN, so numbers that are not finite are `null`.
#[test]
fn null_sums_are_read_as_nan() {
    let reported = |change: &dyn Fn(&mut Value)| {
        let mut value =
            serde_json::to_value(ForwardBackward { tokens: 7, ..Default::default() }).unwrap();
        change(&mut value);
        serde_json::from_value::<MicroBatchSums>(value).unwrap().parse()
    };
    let sums = reported(&|value| value["loss"] = Value::Null).unwrap();
    assert!(sums.loss.is_nan() && sums.tokens == 7 && sums.nll == 0.0);
    assert!(reported(&|value| value["terms"] = Value::Null).is_err());
    assert!(
        reported(&|value| value["tokens"] = json!("many")).unwrap_err().contains("cannot be read")
    );
    let step: OptimStepResult =
        serde_json::from_value(json!({ "grad_norm": null, "applied": false })).unwrap();
    let report = OptimReport::from(step);
    assert!(report.grad_norm.is_nan() && !report.applied);
}

#[tokio::test]
async fn deadline_names_operation_in_progress() {
    let dir = tempfile::tempdir().unwrap();
    let (group, _) = start(dir.path()).await;
    let hasty = LearnerOptions { call: Duration::from_secs(3), ..options(&group.url) };
    let remote = RemoteLearner::connect(hasty.clone(), None, &expected()).await.unwrap();
    let micro_batch_plan = remote.plan(&update_sequences()).await.unwrap();
    let batches = micro_batch_plan.micro_batches.len();
    for (done, want) in [
        (1, format!("training on micro-batch 2 of {batches}")),
        (batches, "an optimizer step".into()),
    ] {
        let remote = RemoteLearner::connect(hasty.clone(), None, &expected()).await.unwrap();
        group.inject_fault("train", Fault::HangAfter(done));
        let reported = Mutex::new(0);
        let error = remote
            .train(request(), &micro_batch_plan, &mut || *reported.lock().unwrap() += 1)
            .await
            .unwrap_err();
        assert!(
            matches!(&error, PolicyError::Deadline(_, what) if what.ends_with(&want)),
            "{error}"
        );
        assert_eq!(reported.into_inner().unwrap(), done);
        let after = remote.publish(1).await.unwrap_err();
        assert!(
            matches!(after, PolicyError::Stopped(_)),
            "a learner whose state is unknown is used again: {after}"
        );
    }

    let patient = LearnerOptions { silence: Duration::from_secs(3), ..options(&group.url) };
    let remote = RemoteLearner::connect(patient, None, &expected()).await.unwrap();
    group.inject_fault("publish", Fault::Silent);
    let error = remote.publish(1).await.unwrap_err();
    let want = "to report the progress of publishing the weights as version 1";
    assert!(matches!(&error, PolicyError::Deadline(_, what) if what.ends_with(want)), "{error}");
}

#[tokio::test]
async fn rejections_keep_their_error_kind() {
    let dir = tempfile::tempdir().unwrap();
    let (group, remote) = start(dir.path()).await;
    let batch = Arc::new(TreeBatch::merge(&paths()).unwrap());
    let beyond = SequenceInput {
        tokens: vec![1, 99].into(),
        targets: vec![SequenceTarget { index: 1, temperature: 1.0, term: Term::default() }],
    };
    let beyond = Arc::new(TreeBatch::merge(&[beyond]).unwrap());
    let error = remote.logprobs(beyond).await.unwrap_err();
    assert!(
        matches!(&error, PolicyError::Invalid(why) if why.contains("token 99 is outside")),
        "{error}"
    );
    let micro_batch_plan =
        MicroBatchPlan { world_size: 2, ..remote.plan(&update_sequences()).await.unwrap() };
    let error = remote.train(request(), &micro_batch_plan, &mut || {}).await.unwrap_err();
    assert!(
        matches!(&error, PolicyError::PlanMismatch(why) if why.contains("cluster.learner.processes")),
        "{error}"
    );
    let error =
        remote.train(request(), &MicroBatchPlan::from_sizes([3]), &mut || {}).await.unwrap_err();
    assert!(
        matches!(&error, PolicyError::PlanMismatch(why) if why.contains("sequence 3 is in no")),
        "{error}"
    );
    let error = remote.with_name("teacher").values(batch.clone()).await.unwrap_err();
    assert!(error.to_string().contains("there is no learner teacher"), "{error}");
    let error = remote.load(Path::new("/nowhere/at/all"), false).await.unwrap_err();
    assert!(matches!(error, PolicyError::Storage(_)), "{error}");
    group.inject_fault("logprobs", Fault::Fail);
    let error = remote.logprobs(batch.clone()).await.unwrap_err();
    assert!(error.to_string().contains("rank 1 is out of memory"), "{error}");
    assert!(matches!(remote.logprobs(batch).await, Err(PolicyError::Stopped(_))));
}

#[tokio::test]
async fn connect_errors_name_their_cause() {
    let dir = tempfile::tempdir().unwrap();
    let (group, _) = start(dir.path()).await;
    let stranger = LearnerOptions { token: "another".into(), ..options(&group.url) };
    let error = connect_error(stranger.clone()).await;
    assert!(error.contains("does not accept the token"), "{error}");
    assert!(!format!("{stranger:?}").contains("another"));
    let unreachable =
        LearnerOptions { start: Duration::from_secs(1), ..options("http://127.0.0.1:1") };
    let error = connect_error(unreachable).await;
    assert!(error.contains("cannot connect to 127.0.0.1:1"), "{error}");
    let (send, ended) = tokio::sync::watch::channel(None);
    let processes = Processes { ended, guard: Box::new(()) };
    send.send(Some("exit code 1".into())).unwrap();
    let error =
        RemoteLearner::connect(options("http://127.0.0.1:1"), Some(processes), &expected()).await;
    let Err(PolicyError::Stopped(why)) = error else { panic!("it is over") };
    assert!(why.contains("exit code 1"), "{why}");
}

async fn connect_error(options: LearnerOptions) -> String {
    match RemoteLearner::connect(options, None, &expected()).await {
        Ok(_) => panic!("it connects"),
        Err(error) => error.to_string(),
    }
}

/// The exit of the processes ends the call in flight.
#[tokio::test]
async fn exited_group_ends_call_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let (group, _) = start(dir.path()).await;
    let (send, ended) = tokio::sync::watch::channel(None);
    let processes = Processes { ended, guard: Box::new(()) };
    let remote =
        RemoteLearner::connect(options(&group.url), Some(processes), &expected()).await.unwrap();
    group.inject_fault("publish", Fault::HangAfter(1));
    let exit = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        send.send(Some("killed by signal 9".into())).unwrap();
    };
    let (published, ()) = tokio::join!(remote.publish(1), exit);
    let error = published.unwrap_err();
    assert!(
        matches!(&error, PolicyError::Stopped(why) if why.contains("killed by signal 9")),
        "{error}"
    );
    let exit_error =
        tokio::time::timeout(Duration::from_secs(5), remote.wait_for_exit()).await.unwrap();
    assert_eq!(
        exit_error.to_string(),
        error.to_string(),
        "whoever waits for something else hears of it, too"
    );
}
