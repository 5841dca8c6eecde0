//! Guarantees of training state: checkpoints, adapters and critics.

use super::*;

async fn train(engine: &Engine, steps: u64, first: u64) -> f64 {
    let mut loss = 0.0;
    for step in first..first + steps {
        let targets = (1..40).map(|index| SequenceTarget {
            index,
            temperature: 1.0,
            term: Term { weight: 1.0 / 39.0, ..Term::default() },
        });
        let sequence =
            SequenceInput { tokens: tokens(step % 2, 40).into(), targets: targets.collect() };
        let batch = Arc::new(TreeBatch::merge(&[sequence]).unwrap());
        loss = engine.forward_backward(batch, CROSS_ENTROPY).await.unwrap().loss;
        assert!(engine.optim_step(optim()).await.unwrap().applied);
        engine.publish(step + 1).await.unwrap();
    }
    loss
}

/// Training reduces the loss. A checkpoint with optimizer state continues to the same bits.
/// Versions follow publishing.
#[tokio::test]
async fn checkpoint_restores_training_state() {
    let config = tiny_config();
    let engine = start(&config, 2, Isa::detect(), &options());
    let before = train(&engine, 2, 0).await;
    let dir = tempfile::tempdir().unwrap();
    engine.save(dir.path(), true).await.unwrap();
    let after = train(&engine, 20, 2).await;
    assert!(after < before * 0.7, "{before} {after}");

    let other = start(&config, 1, Isa::detect(), &options());
    other.load(dir.path(), true).await.unwrap();
    // A request during a change of weights waits until they are published.
    let mut early =
        other.sample(request(1, tokens(1, 5), SamplingParams::default())).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(50), early.next()).await.is_err());
    assert_eq!(train(&other, 20, 2).await.to_bits(), after.to_bits());
    let early = early.collect(DEADLINE).await.unwrap();
    assert!(early.versions.iter().all(|run| run.version >= 3), "{:?}", early.versions);
    let completion = sample(&other, request(1, tokens(1, 5), SamplingParams::default())).await;
    assert_eq!((completion.versions.len(), completion.versions[0].version), (1, 22));

    let [a, b] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    engine.save(a.path(), true).await.unwrap();
    other.save(b.path(), true).await.unwrap();
    for entry in std::fs::read_dir(a.path()).unwrap() {
        let name = entry.unwrap().file_name();
        let [x, y] = [&a, &b].map(|dir| std::fs::read(dir.path().join(&name)).unwrap());
        assert!(x == y, "{name:?} differs");
    }
    std::fs::remove_file(b.path().join("model.safetensors")).unwrap();
    assert!(other.load(b.path(), true).await.is_err());
}

/// Adapters over one base are separate policies: they are sampled in parallel, trained and
/// versioned separately, saved, loaded, and merged into a model that computes the same.
#[tokio::test]
async fn adapters_share_base_weights() {
    let config = &family_configs()[2];
    for precision in [Precision::F32, Precision::Bf16] {
        let base = start(config, 2, Isa::detect(), &EngineOptions { precision, ..options() });
        let ranks = [("q_proj".into(), 2), ("layers.1.mlp.down_proj".into(), 7)].into();
        let lora = LoraOptions { rank: 4, ranks, ..LoraOptions::default() };
        let first = base.lora(lora.clone(), 0, "a model").await.unwrap();
        let second = base.lora(lora.clone(), 5, "a model").await.unwrap();
        let before = train(&second, 1, 0).await;
        let trained = train(&second, 20, 1).await;
        assert!(trained < before * 0.8, "{before} {trained}");

        let policies = [&base, &first, &second];
        let params = SamplingParams { max_tokens: 30, ..SamplingParams::default() };
        let mut streams = Vec::new();
        for stream in 0..4 {
            for policy in policies {
                let request = request(stream, tokens(stream / 2, 33), params.clone());
                streams.push(policy.sample(request).await.unwrap());
            }
        }
        let mut completions = Vec::new();
        for stream in streams {
            completions.push(stream.collect(DEADLINE).await.unwrap());
        }
        for (i, completion) in completions.iter().enumerate() {
            let version = if i % 3 == 2 { 21 } else { 0 };
            assert!(completion.versions.iter().all(|run| run.version == version));
            let sequence = [tokens(i as u64 / 6, 33), completion.tokens.clone()].concat();
            let sampled =
                completion.logprobs.iter().enumerate().map(|(i, p)| (33 + i, *p)).collect();
            let current = policies[i % 3]
                .logprobs(Arc::new(batch_of(&[(sequence, sampled, 1.0)])))
                .await
                .unwrap();
            assert!(
                current.iter().zip(&completion.logprobs).all(|(a, b)| a.to_bits() == b.to_bits()),
                "reply {i}"
            );
        }
        for of_task in completions.chunks(3) {
            assert_eq!(
                of_task[0].logprobs, of_task[1].logprobs,
                "untrained, it does what the base does"
            );
            assert_ne!(of_task[0].logprobs, of_task[2].logprobs);
        }

        let dir = tempfile::tempdir().unwrap();
        second.save(dir.path(), true).await.unwrap();
        first.load(dir.path(), true).await.unwrap();
        first.publish(3).await.unwrap();
        let [a, b] = [train(&first, 5, 30).await, train(&second, 5, 30).await];
        assert_eq!(a.to_bits(), b.to_bits(), "with its optimiser");

        let merged = tempfile::tempdir().unwrap();
        second.save_merged(merged.path()).await.unwrap();
        let other = start(config, 1, Isa::detect(), &EngineOptions { precision, ..options() });
        other.load(merged.path(), false).await.unwrap();
        let batch = Arc::new(batch_of(&rollouts_of(&completions)));
        let [x, y] =
            [second.logprobs(batch.clone()).await.unwrap(), other.logprobs(batch).await.unwrap()];
        let distance = x.iter().zip(&y).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(distance < if precision == Precision::F32 { 1e-4 } else { 0.2 }, "{distance}");

        let rejected = base.optim_step(optim()).await.unwrap_err().to_string();
        assert!(rejected.contains("frozen"), "{rejected}");
        let rejected =
            base.lora(LoraOptions { rank: 0, ..lora.clone() }, 0, "").await.err().unwrap();
        assert!(rejected.to_string().contains("lora.rank = 0"));
        let alien = LoraOptions { targets: vec!["k_proj".into(), "router".into()], ..lora };
        let rejected = base.lora(alien, 0, "").await.err().unwrap();
        assert!(
            rejected.to_string().contains("\"router\"")
                && rejected.to_string().contains("gate_proj")
        );
    }
}

/// Returns the completions of [`adapters_share_base_weights`] as rollouts.
fn rollouts_of(completions: &[Completion]) -> Vec<Rollout> {
    completions
        .iter()
        .enumerate()
        .map(|(i, completion)| {
            let sequence = [tokens(i as u64 / 6, 33), completion.tokens.clone()].concat();
            let sampled =
                completion.logprobs.iter().enumerate().map(|(i, p)| (33 + i, *p)).collect();
            (sequence, sampled, 1.0)
        })
        .collect()
}

/// A critic learns its returns, and is restored from its files.
#[tokio::test]
async fn critic_trains_and_restores_from_files() {
    let base = start(&tiny_config(), 2, Isa::detect(), &options());
    let adapter = base.lora(LoraOptions::default(), 0, "a model").await.unwrap();
    let loss = Loss::new(PolicyLoss::Value { clip: None });
    let targets = (1..30).map(|index| SequenceTarget {
        index,
        temperature: 1.0,
        term: Term { weight: 1.0 / 29.0, returns: (index % 5) as f32 * 0.2, ..Term::default() },
    });
    let sequence = SequenceInput { tokens: tokens(1, 30).into(), targets: targets.collect() };
    let batch = Arc::new(TreeBatch::merge(&[sequence]).unwrap());
    let none = adapter.values(batch.clone()).await.unwrap_err();
    assert!(matches!(none, PolicyError::NoValueHead), "{none}");
    assert!(adapter.forward_backward(batch.clone(), loss).await.is_err());
    adapter.add_value_head().await.unwrap();
    assert!(adapter.values(batch.clone()).await.unwrap().iter().all(|value| *value == 0.0));
    let mut losses = Vec::new();
    let dir = tempfile::tempdir().unwrap();
    for step in 0..60 {
        if step == 30 {
            adapter.save(dir.path(), true).await.unwrap();
        }
        losses.push(adapter.forward_backward(batch.clone(), loss).await.unwrap().loss);
        assert!(adapter.optim_step(optim()).await.unwrap().applied);
    }
    assert!(losses[59] < 0.2 * losses[0], "{} {}", losses[0], losses[59]);
    adapter.load(dir.path(), true).await.unwrap();
    for (step, expected) in losses.iter().enumerate().skip(30) {
        let again = adapter.forward_backward(batch.clone(), loss).await.unwrap().loss;
        assert_eq!(again.to_bits(), expected.to_bits(), "step {step}");
        adapter.optim_step(optim()).await.unwrap();
    }
}

#[test]
fn engine_start_rejects_invalid_options() {
    let config = tiny_config();
    let start = |options: EngineOptions| {
        let compute = Compute::new(1);
        let weights = random_weights(&compute, &config, 3);
        Engine::start_with(compute, weights, &options, None)
            .err()
            .map(|e| e.to_string())
            .unwrap_or_default()
    };
    assert!(start(EngineOptions { context: 10_000, ..options() }).contains("10000"));
    assert!(start(EngineOptions { running: 0, ..options() }).contains("engine.running"));
    let bf16 = EngineOptions { precision: Precision::Bf16, ..options() };
    assert!(start(bf16).contains("engine.precision = bf16"));
}

/// An engine without memory for training evaluates batches, and rejects training. A malformed batch
/// is rejected as well.
#[tokio::test]
async fn engine_rejects_untrainable_batches() {
    let rollout = (tokens(1, 9), vec![(4, 0.0), (8, 0.0)], 1.0);
    let batch = Arc::new(batch_of(&[rollout]));
    let frozen =
        start(&tiny_config(), 1, Isa::detect(), &EngineOptions { trains: false, ..options() });
    assert_eq!(frozen.logprobs(batch.clone()).await.unwrap().len(), 2);
    let rejected =
        frozen.forward_backward(batch.clone(), CROSS_ENTROPY).await.unwrap_err().to_string();
    assert!(rejected.contains("trains = true"), "{rejected}");
    assert!(frozen.optim_step(optim()).await.is_err());

    let engine = start(&tiny_config(), 1, Isa::detect(), &options());
    let changes: [fn(&mut TreeBatch); 4] = [
        |batch| batch.nodes[0].parent = Some(7),
        |batch| batch.nodes[0].len = 10,
        |batch| batch.targets[0].predictor = 99,
        |batch| batch.targets[1].first_term = 2,
    ];
    for change in changes {
        let mut malformed = (*batch).clone();
        change(&mut malformed);
        let rejected =
            engine.forward_backward(Arc::new(malformed), CROSS_ENTROPY).await.unwrap_err();
        assert!(rejected.to_string().contains("malformed"), "{rejected}");
    }
    assert!(engine.forward_backward(batch, CROSS_ENTROPY).await.is_ok());
}
