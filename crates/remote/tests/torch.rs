//! Tests of `RemoteLearner` against a real `levade_torch` group.
//!
//! ```sh
//! export LEARNER_TOKEN=0123456789abcdef LEARNER_ROOT=/tmp/root LEARNER_MODEL=/tmp/model
//! torchrun --nproc-per-node 2 -m levade_torch --model $LEARNER_MODEL --critic $LEARNER_MODEL \
//!     --reference $LEARNER_MODEL --run-root $LEARNER_ROOT --token-env LEARNER_TOKEN --port 29700 \
//!     --device cpu --dtype f32 --export-dtype f32 &
//! LEARNER_URL=http://127.0.0.1:29700 cargo test -p levade-remote --test torch -- --ignored
//! ```
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_policy::{
    Learner, MicroBatchPlan, OptimParams, PolicyError, TrainRequest, UpdateSequences, WeightsAt,
};
use levade_remote::{CRITIC, LearnerOptions, LearnerRequirements, REFERENCE, RemoteLearner};
use levade_rl::{Loss, PolicyLoss};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};

const LOSS: Loss = Loss::new(PolicyLoss::CrossEntropy);
const ADAM: OptimParams = OptimParams {
    learning_rate: 1e-3,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-8,
    weight_decay: 0.01,
    max_grad_norm: f32::INFINITY,
};

/// Returns five sequences, three of which share a prefix.
fn paths() -> Vec<SequenceInput> {
    (0..5)
        .map(|number: u32| {
            let first = if number < 3 { 1 } else { 10 * number };
            let term =
                Term { weight: 1.0 / 30.0, behavior: Some(-4.0), returns: 0.5, ..Term::default() };
            SequenceInput {
                tokens: (0..12)
                    .map(|i: u32| if i < 6 { (first + i) % 60 } else { (7 * number + 3 * i) % 60 })
                    .collect(),
                targets: (6..12)
                    .map(|index| SequenceTarget { index, temperature: 0.9, term })
                    .collect(),
            }
        })
        .collect()
}

fn request() -> TrainRequest {
    TrainRequest { sequences: paths(), loss: LOSS, params: ADAM }
}

/// Returns the maximum absolute difference.
fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

async fn connect() -> RemoteLearner {
    let config = Path::new(&variable("LEARNER_MODEL")).join("config.json");
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
    let expected = LearnerRequirements {
        model_type: config["model_type"].as_str().unwrap().into(),
        vocabulary: config["vocab_size"].as_u64().unwrap() as usize,
        context: 64,
        reference: true,
        critic: true,
        lora: None,
        dtype: "f32".into(),
        export_dtype: "f32".into(),
    };
    let minutes = Duration::from_secs(300);
    let options = LearnerOptions {
        url: variable("LEARNER_URL"),
        token: variable("LEARNER_TOKEN"),
        call: minutes,
        silence: minutes,
        reconnect: minutes,
        start: minutes,
    };
    let other = LearnerRequirements { vocabulary: expected.vocabulary + 1, ..expected.clone() };
    assert!(RemoteLearner::connect(options.clone(), None, &other).await.is_err());
    RemoteLearner::connect(options, None, &expected).await.unwrap()
}

#[tokio::test]
#[ignore = "needs a group of levade_torch, named in the environment"]
async fn torch_group_supports_every_verb() {
    let policy = connect().await;
    let root = PathBuf::from(variable("LEARNER_ROOT"));
    let batch = Arc::new(TreeBatch::merge(&paths()).unwrap());
    let before = policy.logprobs(batch.clone()).await.unwrap();
    assert!(before.iter().all(|logprob| logprob.is_finite() && *logprob < 0.0));
    // A merged tree has the same log-probabilities as its separate sequences.
    for (number, path) in paths().iter().enumerate() {
        let separate = Arc::new(TreeBatch::merge(std::slice::from_ref(path)).unwrap());
        let separate = policy.logprobs(separate).await.unwrap();
        let own_targets = batch.targets.iter().enumerate().filter(|(_, target)| {
            batch.terms_of(target).iter().any(|term| term.sequence as usize == number)
        });
        let merged: Vec<f32> = own_targets.map(|(index, _)| before[index]).collect();
        assert!(max_difference(&separate, &merged) < 1e-4, "{separate:?} {merged:?}");
    }
    let predicted = policy.predictions(batch.clone()).await.unwrap();
    assert!(max_difference(&predicted.logprobs, &before) < 1e-6);
    assert!(predicted.entropies.iter().all(|entropy| *entropy > 0.0));
    assert!(matches!(policy.values(batch.clone()).await, Err(PolicyError::NoValueHead)));
    let values = policy.with_name(CRITIC).values(batch.clone()).await.unwrap();
    assert_eq!(values, vec![0.0; batch.targets.len()], "a new value head gives 0");

    let tokens = paths().into_iter().map(|path| path.tokens);
    let update = UpdateSequences { groups: vec![tokens.collect()], micro_batch_tokens: 20 };
    let micro_batch_plan = policy.plan(&update).await.unwrap();
    assert_eq!(micro_batch_plan, policy.plan(&update).await.unwrap());
    let saved = root.join("saved");
    std::fs::create_dir_all(&saved).unwrap();
    let mut losses = Vec::new();
    let mut done = 0;
    for step in 0..4 {
        let trained = policy.train(request(), &micro_batch_plan, &mut || done += 1).await.unwrap();
        assert!(trained.step.applied && trained.step.grad_norm > 0.0, "{trained:?}");
        losses.push(trained.sums.iter().map(|sums| sums.loss).sum::<f64>());
        if step == 1 {
            let manifest = policy.save(&saved, true).await.unwrap();
            assert_eq!(manifest.verify(), Ok(saved.as_path()));
        }
    }
    assert_eq!(done, 4 * micro_batch_plan.micro_batches.len());
    assert!(losses.is_sorted_by(|a, b| a > b), "{losses:?}");
    let other = MicroBatchPlan {
        world_size: policy.description().layout.world_size,
        ..MicroBatchPlan::from_sizes([4])
    };
    assert!(matches!(
        policy.train(request(), &other, &mut || {}).await,
        Err(PolicyError::PlanMismatch(_))
    ));

    // Resuming from the saved middle reaches the same end, bit for bit.
    let after = policy.logprobs(batch.clone()).await.unwrap();
    policy.load(&saved, true).await.unwrap();
    for loss in &losses[2..] {
        let trained = policy.train(request(), &micro_batch_plan, &mut || {}).await.unwrap();
        assert_eq!(
            trained.sums.iter().map(|sums| sums.loss).sum::<f64>().to_bits(),
            loss.to_bits()
        );
    }
    assert_eq!(policy.logprobs(batch.clone()).await.unwrap(), after);

    let sums = policy.forward_backward(batch.clone(), LOSS).await.unwrap();
    assert_eq!((sums.terms, sums.targets), (30, batch.targets.len() as u64));
    assert!(policy.optim_step(ADAM).await.unwrap().applied);
    assert_ne!(policy.logprobs(batch.clone()).await.unwrap(), after);

    let reference = policy.with_name(REFERENCE);
    assert!(max_difference(&reference.logprobs(batch.clone()).await.unwrap(), &before) < 1e-6);
    reference.load(&saved, false).await.unwrap();
    assert!(max_difference(&reference.logprobs(batch).await.unwrap(), &before) > 1e-3);
    let outside = policy.save(Path::new("/tmp"), false).await.unwrap_err();
    assert!(matches!(outside, PolicyError::Invalid(_)), "{outside}");
    let version = policy.description().learners["policy"].version.map_or(0, |version| version + 1);
    let weights = policy.publish(version).await.unwrap();
    let WeightsAt::Manifest(manifest) = weights.at else { panic!("{weights:?}") };
    manifest.verify().unwrap();
}
