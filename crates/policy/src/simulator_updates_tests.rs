//! Tests of the updates of the simulator.

use super::*;

/// An update runs the micro-batches of its plan in order and then one optimizer step. The plan of
/// another update is rejected before anything changes.
#[tokio::test]
async fn train_follows_plan_or_rejects_it_unchanged() {
    let full = Simulator::new(small());
    let reference = Simulator::new(small());
    let mut sequences = Vec::new();
    for stream in 0..5 {
        sequences.push(sequence_input(
            &[1, 2, 3],
            &complete(&full, request(stream, 1.0)).await,
            1.0,
            1.0,
        ));
    }
    let tokens = |range: std::ops::Range<usize>| {
        sequences[range].iter().map(|sequence| sequence.tokens.clone()).collect()
    };
    let update =
        UpdateSequences { groups: vec![tokens(0..3), tokens(3..5)], micro_batch_tokens: 1 };
    let micro_batch_plan = full.plan(&update).await.unwrap();
    assert_eq!(micro_batch_plan, MicroBatchPlan::from_sizes([1; 5]));
    let request = TrainRequest { sequences: sequences.clone(), loss: CLIP, params: ADAM };
    let before = full.weights();
    for tampered in [
        MicroBatchPlan::from_sizes([1; 4]),
        MicroBatchPlan { world_size: 4, ..micro_batch_plan.clone() },
    ] {
        let rejected =
            full.train(request.clone(), &tampered, &mut || panic!("nothing is learnt from")).await;
        assert!(matches!(rejected, Err(PolicyError::PlanMismatch(_))), "{rejected:?}");
    }
    assert_eq!(full.weights(), before);
    let mut done = 0;
    let trained = full.train(request, &micro_batch_plan, &mut || done += 1).await.unwrap();
    let mut sums = Vec::new();
    for sequence in sequences {
        let batch = Arc::new(TreeBatch::merge(&[sequence]).unwrap());
        sums.push(reference.forward_backward(batch, CLIP).await.unwrap());
    }
    assert_eq!(
        (done, trained.sums, trained.step),
        (5, sums, reference.optim_step(ADAM).await.unwrap())
    );
    assert_eq!(full.weights(), reference.weights());
}

/// The deadline applies to each micro-batch, and the error names the one that exceeded it.
#[tokio::test(start_paused = true)]
async fn train_timeout_names_late_micro_batch() {
    let timing = Timing { learn: Duration::from_secs(10), ..Timing::default() };
    let simulator = Arc::new(Simulator::new(SimulatorConfig { timing, ..small() }));
    let request = TrainRequest {
        sequences: [2, 2, 2, 3]
            .map(|len| SequenceInput { tokens: vec![1; len].into(), targets: Vec::new() })
            .into(),
        loss: CLIP,
        params: ADAM,
    };
    let plan = MicroBatchPlan::from_sizes([1; 4]);
    let with_deadline =
        |seconds| TimeoutPolicy::new(simulator.clone(), Duration::from_secs(seconds));
    let late = with_deadline(25).train(request.clone(), &plan, &mut || ()).await.unwrap_err();
    assert_eq!(late.to_string(), "waited 25s for the gradient of micro-batch 4 of 4");
    with_deadline(35).train(request, &plan, &mut || ()).await.unwrap();
}

/// A request waits until the weights that it requires have been published.
#[tokio::test(start_paused = true)]
async fn sample_waits_for_required_weight_version() {
    let simulator = Arc::new(Simulator::new(small()));
    let pending = SampleRequest { min_version: 2, ..request(1, 1.0) };
    let stream = simulator.sample(pending).await.unwrap();
    let other = complete(&simulator, request(2, 1.0)).await;
    assert_eq!(other.versions[0].version, 0, "others do not wait");
    let publishing = simulator.clone();
    tokio::spawn(async move {
        for version in [1, 2] {
            tokio::time::sleep(Duration::from_secs(1)).await;
            publishing.publish(version).await.unwrap();
        }
    });
    let start = tokio::time::Instant::now();
    let completion = stream.collect(Duration::from_secs(10)).await.unwrap();
    assert_eq!((start.elapsed().as_secs(), completion.versions[0].version), (2, 2));
    let never = SampleRequest { min_version: 3, ..request(1, 1.0) };
    let late =
        simulator.sample(never).await.unwrap().collect(Duration::from_secs(10)).await.unwrap_err();
    assert_eq!(late.to_string(), "waited 10s for a completion from the sampler");
}
