use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use levade_policy::{Simulator, SimulatorConfig};
use levade_rl::PolicyLoss;
use levade_tree::{PathInput, PathTarget, Term};

use super::testing::{Fault, TOKEN, TestGroup};
use super::*;

const LOSS: Loss = Loss::of(PolicyLoss::Reinforce);
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

fn expected() -> Expected {
    Expected {
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

fn paths() -> Vec<PathInput> {
    let path = |number: u32| {
        let token = |i: u32| if i < 5 { i + 3 } else { (number * 7 + i) % 64 };
        let target = |index: u32| PathTarget {
            index,
            temperature: 1.0,
            term: Term {
                weight: 0.125,
                advantage: number as f32 - 1.5,
                behaviour: Some(-4.0),
                returns: 0.5,
                ..Term::default()
            },
        };
        PathInput { tokens: (0..9).map(token).collect(), targets: (5..9).map(target).collect() }
    };
    (0..4).map(path).collect()
}

fn request() -> TrainRequest {
    TrainRequest { paths: paths(), loss: LOSS, params: ADAM }
}

fn uncut() -> Uncut {
    let tokens = paths().into_iter().map(|path| path.tokens).collect();
    Uncut { groups: vec![tokens], micro_batch_tokens: 12 }
}

/// Every verb has the same result as on a local learner, to the bit.
#[tokio::test]
async fn remote_learner_matches_local_learner() {
    let folder = tempfile::tempdir().unwrap();
    let (group, there) = start(folder.path()).await;
    let here = local();
    let batch = Arc::new(TreeBatch::merge(&paths()).unwrap());
    assert_eq!(there.logprobs(batch.clone()).await, here.logprobs(batch.clone()).await);
    assert_eq!(there.predictions(batch.clone()).await, here.predictions(batch.clone()).await);
    let critic = there.named(CRITIC);
    assert_eq!(critic.values(batch.clone()).await, here.values(batch.clone()).await);
    let cut = there.plan(&uncut()).await.unwrap();
    assert_eq!(cut, here.plan(&uncut()).await.unwrap());
    assert!(cut.micro_batches.len() > 1);
    let (mut told, mut expected) = (0, 0);
    let trained = there.train(request(), &cut, &mut || told += 1).await.unwrap();
    assert_eq!(trained, here.train(request(), &cut, &mut || expected += 1).await.unwrap());
    assert_eq!(told, expected);
    let by_hand = there.forward_backward(batch.clone(), LOSS).await.unwrap();
    assert_eq!(by_hand, here.forward_backward(batch.clone(), LOSS).await.unwrap());
    assert_eq!(there.optim_step(ADAM).await, here.optim_step(ADAM).await);
    assert_eq!(there.logprobs(batch.clone()).await, here.logprobs(batch.clone()).await);

    let saved = tempfile::tempdir().unwrap();
    let manifest = there.save(saved.path(), true).await.unwrap();
    assert_eq!(manifest.verify(), Ok(saved.path()));
    here.load(saved.path(), true).await.unwrap();
    // The reference is another learner of the group, and loads the policy's weights.
    let reference = there.named(REFERENCE);
    assert_ne!(reference.logprobs(batch.clone()).await, there.logprobs(batch.clone()).await);
    reference.load(saved.path(), false).await.unwrap();
    assert_eq!(reference.logprobs(batch.clone()).await, there.logprobs(batch.clone()).await);
    let weights = there.publish(3).await.unwrap();
    let WeightsAt::Manifest(manifest) = weights.at else { panic!("{weights:?}") };
    manifest.verify().unwrap();
    assert_eq!(group.shared.learners.lock().unwrap()["policy"].weights(), here.weights());
}

/// All learners of a group that an earlier run has trained get their initial weights back.
#[tokio::test]
async fn begin_again_restores_initial_weights() {
    let folder = tempfile::tempdir().unwrap();
    let (group, there) = start(folder.path()).await;
    let (here, batch) = (local(), Arc::new(TreeBatch::merge(&paths()).unwrap()));
    let cut = there.plan(&uncut()).await.unwrap();
    there.train(request(), &cut, &mut || {}).await.unwrap();
    assert_ne!(there.logprobs(batch.clone()).await, here.logprobs(batch.clone()).await);
    there.begin_again().await.unwrap();
    assert_eq!(there.logprobs(batch.clone()).await, here.logprobs(batch).await);
    assert_eq!(group.done("load"), 1);
}

/// A lost response, and a connection that breaks before the call, change nothing: the call is
/// executed once.
#[tokio::test]
async fn retried_calls_are_executed_once() {
    let folder = tempfile::tempdir().unwrap();
    let (group, there) = start(folder.path()).await;
    let here = local();
    there.publish(0).await.unwrap();
    let cut = there.plan(&uncut()).await.unwrap();
    for (step, fault) in [Fault::LoseAnswer, Fault::Break, Fault::Busy].into_iter().enumerate() {
        group.fault("train", fault);
        let mut done = 0;
        let trained = there.train(request(), &cut, &mut || done += 1).await.unwrap();
        assert_eq!(trained, here.train(request(), &cut, &mut || {}).await.unwrap(), "{fault:?}");
        assert_eq!((done, group.done("train")), (cut.micro_batches.len(), step + 1), "{fault:?}");
        group.fault("publish", fault);
        there.publish(step as u64 + 1).await.unwrap();
        assert_eq!(group.done("publish"), step + 2);
    }
    assert_eq!(group.shared.learners.lock().unwrap()["policy"].weights(), here.weights());
}

#[tokio::test]
async fn offload_is_executed_once_if_response_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let (group, there) = start(folder.path()).await;
    group.fault("offload", Fault::LoseAnswer);
    let moved = there.offload(true).await.unwrap();
    assert_eq!((moved.bytes, group.done("offload")), (8, 1));
    assert_eq!(there.offload(false).await.unwrap().bytes, 12);
    assert_eq!(there.onload().await.unwrap(), Moved { bytes: 12, seconds: 0.5 });
    group.fault("onload", Fault::Fail);
    let error = there.onload().await.unwrap_err();
    assert!(matches!(error, PolicyError::Stopped(_)), "{error}");
}

/// A restarted group has lost its state: no further call is sent, whatever it would answer.
#[tokio::test]
async fn restarted_group_gets_no_further_calls() {
    let folder = tempfile::tempdir().unwrap();
    let (group, there) = start(folder.path()).await;
    there.publish(2).await.unwrap();
    let batch = Arc::new(TreeBatch::merge(&paths()).unwrap());
    group.fault("logprobs", Fault::StartAgain);
    let error = there.logprobs(batch.clone()).await.unwrap_err();
    assert!(matches!(error, PolicyError::Stopped(_)), "{error}");
    assert!(error.to_string().contains("was started again meanwhile and has lost its weights"), "{error}");
    let asked = group.done("logprobs");
    let again = there.named(CRITIC).values(batch).await.unwrap_err();
    assert!(matches!(again, PolicyError::Stopped(_)) && group.done("values") == 0 && asked == 0, "{again}");
    // A new connection that loads the weights can use the group.
    RemoteLearner::connect(options(&group.url), None, &expected()).await.unwrap().publish(2).await.unwrap();
}

/// JSON has no NaN, so numbers that are not finite are `null`.
#[test]
fn null_sums_are_read_as_nan() {
    let told = |change: &dyn Fn(&mut Value)| {
        let mut value = serde_json::to_value(ForwardBackward { tokens: 7, ..Default::default() }).unwrap();
        change(&mut value);
        serde_json::from_value::<Sums>(value).unwrap().read()
    };
    let sums = told(&|value| value["loss"] = Value::Null).unwrap();
    assert!(sums.loss.is_nan() && sums.tokens == 7 && sums.nll == 0.0);
    assert!(told(&|value| value["terms"] = Value::Null).is_err());
    assert!(told(&|value| value["tokens"] = json!("many")).unwrap_err().contains("cannot be read"));
    let step: Step = serde_json::from_value(json!({ "grad_norm": null, "applied": false })).unwrap();
    let report = OptimReport::from(step);
    assert!(report.grad_norm.is_nan() && !report.applied);
}

#[tokio::test]
async fn deadline_names_operation_in_progress() {
    let dir = tempfile::tempdir().unwrap();
    let (group, _) = start(dir.path()).await;
    let hasty = LearnerOptions { call: Duration::from_secs(3), ..options(&group.url) };
    let there = RemoteLearner::connect(hasty.clone(), None, &expected()).await.unwrap();
    let cut = there.plan(&uncut()).await.unwrap();
    let batches = cut.micro_batches.len();
    for (done, want) in [
        (1, format!("micro-batch 2 of {batches} to be learnt from")),
        (batches, "a step of the optimiser".into()),
    ] {
        let there = RemoteLearner::connect(hasty.clone(), None, &expected()).await.unwrap();
        group.fault("train", Fault::HangAfter(done));
        let told = Mutex::new(0);
        let error = there.train(request(), &cut, &mut || *told.lock().unwrap() += 1).await.unwrap_err();
        assert!(matches!(&error, PolicyError::Deadline(_, what) if what.ends_with(&want)), "{error}");
        assert_eq!(told.into_inner().unwrap(), done);
        let after = there.publish(1).await.unwrap_err();
        assert!(
            matches!(after, PolicyError::Stopped(_)),
            "a learner whose state is unknown is used again: {after}"
        );
    }

    let patient = LearnerOptions { silence: Duration::from_secs(3), ..options(&group.url) };
    let there = RemoteLearner::connect(patient, None, &expected()).await.unwrap();
    group.fault("publish", Fault::Silent);
    let error = there.publish(1).await.unwrap_err();
    let want = "to say how far it is with the weights to be published as version 1";
    assert!(matches!(&error, PolicyError::Deadline(_, what) if what.ends_with(want)), "{error}");
}

#[tokio::test]
async fn rejections_keep_their_error_kind() {
    let folder = tempfile::tempdir().unwrap();
    let (group, there) = start(folder.path()).await;
    let batch = Arc::new(TreeBatch::merge(&paths()).unwrap());
    let beyond = PathInput {
        tokens: vec![1, 99].into(),
        targets: vec![PathTarget { index: 1, temperature: 1.0, term: Term::default() }],
    };
    let beyond = Arc::new(TreeBatch::merge(&[beyond]).unwrap());
    let error = there.logprobs(beyond).await.unwrap_err();
    assert!(matches!(&error, PolicyError::Invalid(why) if why.contains("token 99 is not in")), "{error}");
    let cut = Cut { world_size: 2, ..there.plan(&uncut()).await.unwrap() };
    let error = there.train(request(), &cut, &mut || {}).await.unwrap_err();
    assert!(matches!(&error, PolicyError::Cut(why) if why.contains("cluster.learner.processes")), "{error}");
    let error = there.train(request(), &Cut::of_sizes([3]), &mut || {}).await.unwrap_err();
    assert!(matches!(&error, PolicyError::Cut(why) if why.contains("path 3 is in no")), "{error}");
    let error = there.named("teacher").values(batch.clone()).await.unwrap_err();
    assert!(error.to_string().contains("there is no learner teacher"), "{error}");
    let error = there.load(Path::new("/nowhere/at/all"), false).await.unwrap_err();
    assert!(matches!(error, PolicyError::Storage(_)), "{error}");
    group.fault("logprobs", Fault::Fail);
    let error = there.logprobs(batch.clone()).await.unwrap_err();
    assert!(error.to_string().contains("rank 1 is out of memory"), "{error}");
    assert!(matches!(there.logprobs(batch).await, Err(PolicyError::Stopped(_))));
}

#[tokio::test]
async fn connect_errors_name_their_cause() {
    let folder = tempfile::tempdir().unwrap();
    let (group, _) = start(folder.path()).await;
    let connect = async |options| match RemoteLearner::connect(options, None, &expected()).await {
        Ok(_) => panic!("it connects"),
        Err(error) => error.to_string(),
    };
    let stranger = LearnerOptions { token: "another".into(), ..options(&group.url) };
    let error = connect(stranger.clone()).await;
    assert!(error.contains("does not take the token"), "{error}");
    assert!(!format!("{stranger:?}").contains("another"));
    let nobody = LearnerOptions { start: Duration::from_secs(1), ..options("http://127.0.0.1:1") };
    let error = connect(nobody).await;
    assert!(error.contains("cannot connect to 127.0.0.1:1"), "{error}");
    let (send, ended) = tokio::sync::watch::channel(None);
    let processes = Processes { ended, held: Box::new(()) };
    send.send(Some("exit code 1".into())).unwrap();
    let error = RemoteLearner::connect(options("http://127.0.0.1:1"), Some(processes), &expected()).await;
    let Err(PolicyError::Stopped(why)) = error else { panic!("it is over") };
    assert!(why.contains("exit code 1"), "{why}");
}

/// The exit of the processes ends the call in flight.
#[tokio::test]
async fn exited_group_ends_call_in_flight() {
    let folder = tempfile::tempdir().unwrap();
    let (group, _) = start(folder.path()).await;
    let (send, ended) = tokio::sync::watch::channel(None);
    let processes = Processes { ended, held: Box::new(()) };
    let there = RemoteLearner::connect(options(&group.url), Some(processes), &expected()).await.unwrap();
    group.fault("publish", Fault::HangAfter(1));
    let dies = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        send.send(Some("killed by signal 9".into())).unwrap();
    };
    let (published, ()) = tokio::join!(there.publish(1), dies);
    let error = published.unwrap_err();
    assert!(matches!(&error, PolicyError::Stopped(why) if why.contains("killed by signal 9")), "{error}");
    let over = tokio::time::timeout(Duration::from_secs(5), there.over()).await.unwrap();
    assert_eq!(over.to_string(), error.to_string(), "whoever waits for something else hears of it, too");
}
