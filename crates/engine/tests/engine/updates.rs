//! Updates are planned, and trained as planned.

use std::sync::Arc;
use std::time::Duration;

use levade_engine::testing::{Compute, random_weights, tiny_config};
use levade_engine::{Engine, EngineOptions};
use levade_policy::{
    Completion, Content, Learner, LoraOptions, MicroBatchPlan, OptimParams, PolicyError,
    SampleRequest, Sampler, SamplingParams, SavedFile, TrainRequest, UpdateSequences, WeightsAt,
    WeightsLocation, WeightsRef, uniform,
};
use levade_rl::{Loss, PolicyLoss};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};

const DEADLINE: Duration = Duration::from_secs(60);
const LOSS: Loss = Loss::new(PolicyLoss::CrossEntropy);
const ADAM: OptimParams = OptimParams {
    learning_rate: 0.01,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-8,
    weight_decay: 0.01,
    max_grad_norm: 1.0,
};

fn start() -> Engine {
    let options = EngineOptions { kv_memory_mb: 8, batch_tokens: 512, ..EngineOptions::default() };
    let compute = Compute::with_isa(1, levade_engine::Isa::Portable, options.precision);
    let weights = random_weights(&compute, &tiny_config(), 3);
    Engine::start_with(compute, weights, &options, None).unwrap()
}

/// Returns three sequences with a common prefix, and two other sequences.
fn test_sequences() -> Vec<SequenceInput> {
    (0..5)
        .map(|number: u64| {
            let first = if number < 3 { 0 } else { number };
            let term = Term { weight: 0.125, ..Term::default() };
            SequenceInput {
                tokens: (0..12)
                    .map(|i: u64| {
                        2 + (uniform(9, if i < 6 { first } else { number }, i) * 250.0) as u32
                    })
                    .collect(),
                targets: (6..12)
                    .map(|index| SequenceTarget { index, temperature: 1.0, term })
                    .collect(),
            }
        })
        .collect()
}

fn request() -> TrainRequest {
    TrainRequest { sequences: test_sequences(), loss: LOSS, params: ADAM }
}

/// Returns the bits of log-probabilities, which identify the weights.
async fn sample_logprobs(engine: &Engine) -> Vec<u32> {
    let batch = TreeBatch::merge(&test_sequences()).unwrap();
    engine.logprobs(Arc::new(batch)).await.unwrap().into_iter().map(f32::to_bits).collect()
}

/// An update consists of the micro-batches of its plan, in order, and a step. The engine follows
/// any plan, including plans that it would not make itself.
#[tokio::test]
async fn train_follows_micro_batch_plan() {
    let of_groups = |groups: [usize; 3]| {
        let mut sequences = test_sequences().into_iter().map(|sequence| sequence.tokens);
        groups.map(|size| sequences.by_ref().take(size).collect()).to_vec()
    };
    let update = UpdateSequences { groups: of_groups([3, 1, 1]), micro_batch_tokens: 40 };
    let engine = start();
    let planned = engine.plan(&update).await.unwrap();
    // Merged, the group has 6 + 3 · 6 tokens.
    assert_eq!(planned, MicroBatchPlan::from_sizes([4, 1]));
    let mut reversed = planned.clone();
    reversed.micro_batches.reverse();
    for micro_batch_plan in [planned, reversed, MicroBatchPlan::from_sizes([1; 5])] {
        let engine = start();
        let by_hand = start();
        let mut done = 0;
        let trained = engine.train(request(), &micro_batch_plan, &mut || done += 1).await.unwrap();
        assert_eq!(done, micro_batch_plan.micro_batches.len());
        let mut sums = Vec::new();
        for batch in micro_batch_plan.apply(&test_sequences()) {
            let batch: Vec<SequenceInput> = batch.into_iter().cloned().collect();
            let batch = Arc::new(TreeBatch::merge(&batch).unwrap());
            sums.push(by_hand.forward_backward(batch, LOSS).await.unwrap());
        }
        assert_eq!(trained.sums, sums);
        assert_eq!(trained.step, by_hand.optim_step(ADAM).await.unwrap());
        assert_eq!(sample_logprobs(&engine).await, sample_logprobs(&by_hand).await);
    }
}

/// A plan that does not match the update is rejected, with the difference, before anything changes.
#[tokio::test]
async fn train_rejects_mismatched_plan() {
    let engine = start();
    let before = sample_logprobs(&engine).await;
    let mut twice = MicroBatchPlan::from_sizes([4, 1]);
    twice.micro_batches[1].paths[0] = 2;
    let tampered = [
        (MicroBatchPlan::from_sizes([4]), "sequence 4 is in no micro-batch"),
        (MicroBatchPlan::from_sizes([4, 2]), "micro-batch 1 has sequence 5, but the update has 5"),
        (twice, "micro-batch 1 has sequence 2, which an earlier position"),
        (
            MicroBatchPlan { world_size: 2, ..MicroBatchPlan::from_sizes([5]) },
            "the plan is for 2 ranks, but the learner has 1",
        ),
    ];
    for (plan, difference) in tampered {
        let rejected =
            engine.train(request(), &plan, &mut || panic!("nothing is learnt from")).await;
        let Err(PolicyError::PlanMismatch(why)) = rejected else { panic!("{rejected:?}") };
        assert!(why.contains(difference), "{why}");
    }
    engine.publish(1).await.unwrap();
    assert_eq!(sample_logprobs(&engine).await, before);
}

/// A request is never sampled from weights older than it requires, and other requests do not wait
/// for it.
#[tokio::test]
async fn request_waits_for_minimum_version() {
    let engine = start();
    let params = SamplingParams { max_tokens: 4, ..SamplingParams::default() };
    let request = |min_version| SampleRequest {
        min_version,
        prompt: vec![3, 4, 5],
        params: params.clone(),
        ..SampleRequest::default()
    };
    let mut waits = engine.sample(request(1)).await.unwrap();
    let other = engine.sample(request(0)).await.unwrap().collect(DEADLINE).await.unwrap();
    assert_eq!((other.tokens.len(), other.versions[0].version), (4, 0));
    assert_eq!(engine.workload().await.unwrap().waiting, 1);
    engine.publish(1).await.unwrap();
    let mut completion = Completion::default();
    waits.gather(&mut completion).await.unwrap();
    assert_eq!((completion.tokens, completion.versions[0].version), (other.tokens, 1));
}

/// A manifest lists every saved file, and no other file of the directory.
#[tokio::test]
async fn manifest_lists_saved_files() {
    let engine = start();
    let adapter = engine.lora(LoraOptions::default(), 1, "a-model").await.unwrap();
    adapter.train(request(), &MicroBatchPlan::from_sizes([5]), &mut || ()).await.unwrap();
    for (learner, content, num_files) in
        [(&engine, Content::Full, 2), (&adapter, Content::Adapter { base: "a-model".into() }, 5)]
    {
        let dir = tempfile::tempdir().unwrap();
        let manifest = learner.save(dir.path(), true).await.unwrap();
        assert_eq!((&manifest.content, manifest.files.len()), (&content, num_files));
        assert_eq!(manifest.location, WeightsLocation::Local(dir.path().to_owned()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), num_files);
        for file in &manifest.files {
            assert_eq!(&SavedFile::read(dir.path(), &file.name).unwrap(), file);
        }
    }
    let published = adapter.publish(1).await.unwrap();
    adapter.update_weights(&published).await.unwrap();
    let error = engine.update_weights(&published).await.unwrap_err();
    assert!(matches!(error, PolicyError::WeightsNotLoaded(_)), "{error}");
}

/// Weights that another learner published as files are sampled from once they are loaded. Files
/// that changed after they were written, or that belong to another model, change nothing.
#[tokio::test]
async fn update_weights_loads_published_files() {
    let learner = start();
    let sampler = start();
    learner.train(request(), &MicroBatchPlan::from_sizes([5]), &mut || {}).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let manifest = learner.save(dir.path(), false).await.unwrap();
    let weights = WeightsRef { version: 7, at: WeightsAt::Manifest(manifest.clone()) };
    let before = sample_logprobs(&sampler).await;
    assert_ne!(before, sample_logprobs(&learner).await);

    let damage = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let file = dir.path().join(name);
        let original = std::fs::read(&file).unwrap();
        let mut bytes = original.clone();
        change(&mut bytes);
        std::fs::write(&file, bytes).unwrap();
        move || std::fs::write(&file, &original).unwrap()
    };
    let mend = damage("model.safetensors", &|bytes| *bytes.last_mut().unwrap() ^= 1);
    let error = sampler.update_weights(&weights).await.unwrap_err();
    assert!(
        matches!(&error, PolicyError::WeightsNotLoaded(why) if why.contains("has the checksum")),
        "{error}"
    );
    mend();
    // Files of another model, with a manifest that matches them.
    let config = "config.json";
    let mend = damage(config, &|bytes| {
        let text = String::from_utf8(bytes.clone()).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config["rms_norm_eps"] = serde_json::json!(0.5);
        *bytes = config.to_string().into_bytes();
    });
    let mut other = manifest.clone();
    let changed = SavedFile::read(dir.path(), config).unwrap();
    *other.files.iter_mut().find(|file| file.name == config).unwrap() = changed;
    let error = sampler
        .update_weights(&WeightsRef { version: 7, at: WeightsAt::Manifest(other) })
        .await
        .unwrap_err();
    assert!(
        matches!(&error, PolicyError::WeightsNotLoaded(why) if why.contains("norm_epsilon")),
        "{error}"
    );
    mend();
    assert_eq!((sample_logprobs(&sampler).await, sampler.version().await.unwrap()), (before, 0));

    sampler.update_weights(&weights).await.unwrap();
    assert_eq!(sample_logprobs(&sampler).await, sample_logprobs(&learner).await);
    let params = SamplingParams { max_tokens: 4, ..SamplingParams::default() };
    let pinned =
        SampleRequest { min_version: 7, prompt: vec![3, 4, 5], params, ..Default::default() };
    let completion = sampler.sample(pinned).await.unwrap().collect(DEADLINE).await.unwrap();
    assert_eq!(completion.versions.iter().map(|run| run.version).collect::<Vec<_>>(), [7]);
}
