use std::sync::atomic::Ordering;

use levade_policy::{Completion, FinishReason, SampleEvent, SamplingParams};
use tokio::time::{Instant, sleep};

use super::testing::*;
use super::*;

fn round_robin_options() -> RouterOptions {
    RouterOptions { choice: Choice::RoundRobin, ..RouterOptions::default() }
}

fn health(router: &Router) -> Vec<Health> {
    router.replicas().into_iter().map(|replica| replica.health).collect()
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn router_failover_returns_same_completion_without_repeated_tokens() {
    let plain = undisturbed(request(3, 8)).await;
    assert_eq!(plain.tokens.len(), 8);
    for sampled in 0..=8 {
        for fails in [
            FailureMode::After(sampled, stopped_error()),
            FailureMode::StopsAfter(sampled),
            FailureMode::HangsAfter(sampled),
        ] {
            let (router, replicas) = router(3, round_robin_options());
            replicas[0].fails(fails.clone());
            replicas[1].fails(FailureMode::After(2, stopped_error()));
            assert_eq!(complete(&router, request(3, 8)).await.unwrap(), plain, "{fails:?}");
            // Even if all tokens were sampled and only the end is missing.
            assert!(router.replicas()[0].failed > 0);
            let second = replicas[1].requests();
            // With all tokens sampled, no other replica is called.
            assert_eq!(second.len(), usize::from(sampled < 8));
            for received in second {
                assert_eq!(received.prompt[3..], plain.tokens[..sampled]);
                assert_eq!(
                    (received.params.sampled_before, received.params.max_tokens),
                    (sampled, 8 - sampled)
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn call_moves_to_other_replica_if_start_fails() {
    let plain = undisturbed(request(3, 8)).await;
    for (fails, wait) in [(FailureMode::Rejects(stopped_error()), 0), (FailureMode::Hangs, 60)] {
        let (router, replicas) = router(2, round_robin_options());
        replicas[0].fails(fails);
        let start = Instant::now();
        assert_eq!(complete(&router, request(3, 8)).await.unwrap(), plain);
        assert_eq!(start.elapsed().as_secs(), wait);
        assert!(router.replicas()[0].failed > 0);
    }
}

#[tokio::test(start_paused = true)]
async fn completion_ends_if_replica_fails_after_last_token() {
    let plain = undisturbed(request(3, 30)).await;
    let stop = plain.tokens[5];
    let end = plain.tokens.iter().position(|token| *token == stop).unwrap();
    let mut by_id = request(3, 30);
    by_id.params.stop_ids = vec![stop];
    let mut by_string = request(3, 30);
    by_string.params.stop_strings = vec![stop.to_string()];
    for (received, finish) in [(by_id, FinishReason::StopId), (by_string, FinishReason::StopString)]
    {
        let plain = undisturbed(received.clone()).await;
        assert_eq!((plain.tokens.len(), plain.finish), (end + 1, finish));
        for sampled in 0..=end + 1 {
            let (router, replicas) = router(2, round_robin_options());
            replicas[0].fails(FailureMode::StopsAfter(sampled));
            assert_eq!(
                complete(&router, received.clone()).await.unwrap(),
                plain,
                "after {sampled}"
            );
        }
    }
    // A full context ends a completion too.
    let long = SampleRequest { prompt: vec![1; 1020], ..request(3, 30) };
    let plain = undisturbed(long.clone()).await;
    assert_eq!((plain.tokens.len(), plain.finish), (4, FinishReason::Context));
    let (router, replicas) = router(2, round_robin_options());
    replicas[0].fails(FailureMode::StopsAfter(4));
    assert_eq!(complete(&router, long).await.unwrap(), plain);
}

#[tokio::test(start_paused = true)]
async fn random_replica_failures_preserve_completions() {
    let mut received = 0;
    for seed in 0..40u64 {
        let chance = |counter| levade_policy::uniform(seed, 9, counter);
        let (router, replicas) = router(3, RouterOptions { tries: 12, ..round_robin_options() });
        for (i, replica) in (0..).zip(&replicas) {
            let after = (chance(2 * i) * 20.0) as usize;
            replica.fails(match (chance(2 * i + 1) * 5.0) as usize {
                0 => FailureMode::Never,
                1 => FailureMode::Rejects(stopped_error()),
                2 => FailureMode::HangsAfter(after),
                3 => FailureMode::After(after, PolicyError::NotFinite { position: 1 }),
                _ => FailureMode::StopsAfter(after),
            });
        }
        let completions = (0..6).map(|stream| complete(&router, request(stream, 12)));
        for (stream, completion) in (0..).zip(futures_util::future::join_all(completions).await) {
            let plain = undisturbed(request(stream, 12)).await;
            match completion {
                Ok(completion) => assert_eq!(completion, plain, "seed {seed}"),
                Err(_) => {
                    assert!(
                        replicas
                            .iter()
                            .all(|member| *member.fails.lock().unwrap() != FailureMode::Never)
                    )
                }
            }
            received += 1;
        }
    }
    assert_eq!(received, 240);
}

#[tokio::test(start_paused = true)]
async fn request_errors_are_not_retried_on_other_replicas() {
    let (router, replicas) = router(2, round_robin_options());
    let long = SampleRequest { prompt: vec![1; 2000], ..request(1, 4) };
    let error = complete(&router, long).await.unwrap_err();
    assert_eq!(error, PolicyError::PromptTooLong { prompt: 2000, context: 1024 });
    let error =
        complete(&router, SampleRequest { prompt: vec![900], ..request(1, 4) }).await.unwrap_err();
    assert!(error.to_string().contains("token 900"), "{error}");
    assert_eq!(replicas.iter().map(|member| member.requests().len()).sum::<usize>(), 2);
    assert_eq!(health(&router), [Health::Serving; 2]);
    let other = RouterOptions { policy: "p".into(), ..round_robin_options() };
    let (router, _) = super::testing::router(1, other);
    let wrong = SampleRequest { policy: "q".into(), ..request(1, 4) };
    assert!(
        complete(&router, wrong)
            .await
            .unwrap_err()
            .to_string()
            .contains("policy \"q\", but the router serves \"p\"")
    );
    complete(&router, SampleRequest { policy: "p".into(), ..request(1, 4) }).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn tries_limit_replicas_that_a_request_can_fail() {
    let (router, replicas) = router(5, round_robin_options());
    replicas.iter().for_each(|replica| replica.fails(FailureMode::After(1, stopped_error())));
    assert_eq!(complete(&router, request(1, 8)).await.unwrap_err(), stopped_error());
    assert_eq!(replicas.iter().filter(|member| !member.requests().is_empty()).count(), 3);
}

#[tokio::test(start_paused = true)]
async fn quarantined_replica_is_probed_with_backoff_and_recovers() {
    let (router, replicas) = router(2, round_robin_options());
    replicas[0].fails(FailureMode::HangsAfter(0));
    replicas[1].fails(FailureMode::Rejects(stopped_error()));
    // The only other replica fails as well, so the call waits for a serving one.
    let recovery = {
        let replicas = replicas.clone();
        tokio::spawn(async move {
            let completion = complete(&router, request(1, 8)).await;
            (completion, router, replicas)
        })
    };
    sleep(65 * SECOND).await;
    replicas[1].fails(FailureMode::Never);
    let (completion, router, replicas) = recovery.await.unwrap();
    assert_eq!(completion.unwrap(), undisturbed(request(1, 8)).await);
    assert_eq!(health(&router)[1], Health::Serving);
    // The first replica samples nothing for probes either, although it answers all status queries.
    sleep(600 * SECOND).await;
    assert_eq!(health(&router)[0], Health::Quarantined);
    assert!(
        router.replicas()[0]
            .reason
            .as_ref()
            .unwrap()
            .contains("waited 30s for a to sample a token")
    );
    let probed = replicas[0].probed();
    sleep(360 * SECOND).await;
    assert_eq!(replicas[0].probed() - probed, 4, "every 60 s and the 30 s that one takes");
    replicas[0].fails(FailureMode::Never);
    sleep(90 * SECOND).await;
    assert_eq!(health(&router), [Health::Serving; 2]);
    let received = replicas[0].requests().len();
    for stream in 0..4 {
        complete(&router, request(stream, 2)).await.unwrap();
    }
    assert_eq!(replicas[0].requests().len() - received, 2);
}

#[tokio::test(start_paused = true)]
async fn replica_that_only_passes_probes_gets_fewer_calls() {
    let (router, replicas) = router(2, round_robin_options());
    replicas[0].fails(FailureMode::After(2, stopped_error()));
    for stream in 0..600 {
        assert_eq!(complete(&router, request(stream, 4)).await.unwrap().tokens.len(), 4);
        sleep(SECOND).await;
    }
    let received = replicas[0].requests().len();
    assert!((5..30).contains(&received), "{received} of 600");
    replicas[0].fails(FailureMode::Never);
    for stream in 0..200 {
        complete(&router, request(stream, 4)).await.unwrap();
        sleep(SECOND).await;
    }
    assert!(replicas[0].requests().len() > received + 60);
}

#[tokio::test(start_paused = true)]
async fn error_names_all_replicas_if_none_serves() {
    let (router, replicas) = router(2, RouterOptions { failures: 1, ..round_robin_options() });
    replicas.iter().for_each(|replica| replica.fails(FailureMode::Rejects(stopped_error())));
    let start = Instant::now();
    let error = complete(&router, request(1, 8)).await.unwrap_err();
    let why = "every replica of the router (a: it stopped; see its log for the reason; \
               b: it stopped; see its";
    assert!(error.is_transient() && error.to_string().starts_with(why), "{error}");
    assert_eq!(start.elapsed(), 60 * SECOND);
    assert!(router.version().await.is_err());
}

#[tokio::test(start_paused = true)]
async fn recovered_replica_loads_newest_weights_before_serving() {
    let (router, replicas) = router(2, round_robin_options());
    router.update_weights(&weights(3)).await.unwrap();
    assert_eq!(router.version().await.unwrap(), 3);
    // It fails, restarts with the weights on its disk, and finds no newer weights for a while.
    replicas[0].fails(FailureMode::Rejects(stopped_error()));
    complete(&router, request(1, 4)).await.unwrap();
    sleep(SECOND).await;
    assert_eq!(health(&router)[0], Health::Quarantined);
    replicas[0].version.store(1, Ordering::Relaxed);
    *replicas[0].rejects_weights.lock().unwrap() =
        Some(PolicyError::WeightsNotLoaded("no such folder".into()));
    replicas[0].fails(FailureMode::Never);
    let received = replicas[0].requests().len();
    sleep(20 * SECOND).await;
    assert_eq!((router.replicas()[0].version, health(&router)[0]), (1, Health::Quarantined));
    assert!(router.replicas()[0].reason.as_ref().unwrap().contains("no such folder"));
    let new = SampleRequest { min_version: 3, ..request(2, 4) };
    for _ in 0..4 {
        assert_eq!(complete(&router, new.clone()).await.unwrap().versions[0].version, 3);
    }
    assert_eq!(replicas[0].requests().len(), received);
    *replicas[0].rejects_weights.lock().unwrap() = None;
    sleep(60 * SECOND).await;
    assert_eq!((router.replicas()[0].version, health(&router)[0]), (3, Health::Serving));
    assert_eq!(*replicas[0].loaded_versions.lock().unwrap(), [3, 3]);
}

#[tokio::test(start_paused = true)]
async fn unnoticed_restart_is_detected_by_old_version() {
    let (router, replicas) = router(2, round_robin_options());
    router.update_weights(&weights(3)).await.unwrap();
    replicas[0].version.store(1, Ordering::Relaxed);
    let new = SampleRequest { min_version: 3, ..request(2, 4) };
    for _ in 0..4 {
        assert_eq!(complete(&router, new.clone()).await.unwrap().versions[0].version, 3);
    }
    sleep(2 * SECOND).await;
    assert_eq!((router.replicas()[0].version, health(&router)[0]), (3, Health::Serving));
    // Without any call, the next probe detects it.
    replicas[1].version.store(2, Ordering::Relaxed);
    sleep(31 * SECOND).await;
    assert_eq!((router.replicas()[1].version, health(&router)[1]), (3, Health::Serving));
}

#[tokio::test(start_paused = true)]
async fn probe_during_weight_update_causes_no_second_update() {
    let (router, replicas) = router(1, round_robin_options());
    router.update_weights(&weights(1)).await.unwrap();
    *replicas[0].update_delay.lock().unwrap() = 40 * SECOND;
    // Meanwhile a probe is due, and an older token arrives late, as in a completion that continues
    // under new weights.
    let newer = weights(2);
    let late = async {
        sleep(SECOND).await;
        router.pool.note_sampled_version(&router.pool.replicas()[0], 0);
        sleep(38 * SECOND).await;
        assert_eq!(health(&router), [Health::Serving]);
    };
    let (loaded, ()) = tokio::join!(router.update_weights(&newer), late);
    loaded.unwrap();
    sleep(100 * SECOND).await;
    assert_eq!(*replicas[0].loaded_versions.lock().unwrap(), [1, 2]);
    assert_eq!((router.replicas()[0].version, health(&router)[0]), (2, Health::Serving));
}

#[tokio::test(start_paused = true)]
async fn update_weights_quarantines_replicas_that_miss_weights() {
    let (router, replicas) = router(3, round_robin_options());
    *replicas[1].rejects_weights.lock().unwrap() =
        Some(PolicyError::WeightsNotLoaded("disk full".into()));
    router.update_weights(&weights(1)).await.unwrap();
    assert_eq!(health(&router), [Health::Serving, Health::Quarantined, Health::Serving]);
    assert!(router.replicas()[1].reason.as_ref().unwrap().contains("disk full"));
    assert_eq!(router.version().await.unwrap(), 1);
    *replicas[1].rejects_weights.lock().unwrap() = None;
    sleep(2 * SECOND).await;
    assert_eq!(health(&router), [Health::Serving; 3]);
    // Weights that no replica loads change nothing.
    for replica in &replicas {
        *replica.rejects_weights.lock().unwrap() =
            Some(PolicyError::WeightsNotLoaded("other model".into()));
    }
    let error = router.update_weights(&weights(2)).await.unwrap_err().to_string();
    for name in ["a", "b", "c"] {
        assert!(
            error.contains(&format!("{name}: cannot load the published weights: other model")),
            "{error}"
        );
    }
    assert_eq!(health(&router), [Health::Serving; 3]);
    assert_eq!(router.version().await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn recovering_replica_loads_weights_published_meanwhile() {
    let (router, replicas) = router(2, RouterOptions { failures: 1, ..round_robin_options() });
    replicas[0].fails(FailureMode::Rejects(stopped_error()));
    complete(&router, request(1, 4)).await.unwrap();
    replicas[0].fails(FailureMode::Never);
    *replicas[0].update_delay.lock().unwrap() = 20 * SECOND;
    router.update_weights(&weights(1)).await.unwrap();
    sleep(10 * SECOND).await;
    assert_eq!(health(&router), [Health::Quarantined, Health::Serving], "it loads the first ones");
    router.update_weights(&weights(2)).await.unwrap();
    sleep(15 * SECOND).await;
    assert_eq!((health(&router)[0], router.version().await.unwrap()), (Health::Quarantined, 2));
    sleep(20 * SECOND).await;
    assert_eq!((health(&router)[0], router.replicas()[0].version), (Health::Serving, 2));
    assert_eq!(*replicas[0].loaded_versions.lock().unwrap(), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn replica_waiting_for_weights_is_not_suspected() {
    use levade_policy::{Learner, Simulator};
    let simulator = Arc::new(Simulator::new(config(Duration::from_millis(10))));
    let router = Router::new(
        vec![("a".into(), simulator.clone() as Arc<dyn Sampler>)],
        round_robin_options(),
    )
    .unwrap();
    let stream = router.sample(SampleRequest { min_version: 1, ..request(1, 4) }).await.unwrap();
    sleep(500 * SECOND).await;
    let weights = simulator.publish(1).await.unwrap();
    router.update_weights(&weights).await.unwrap();
    assert_eq!(stream.collect(SECOND).await.unwrap().versions[0].version, 1);
    assert_eq!((health(&router)[0], router.replicas()[0].failed), (Health::Serving, 0));
}

#[tokio::test(start_paused = true)]
async fn resumed_run_can_publish_lower_versions() {
    let (router, replicas) = router(2, round_robin_options());
    router.update_weights(&weights(7)).await.unwrap();
    router.update_weights(&weights(4)).await.unwrap();
    sleep(100 * SECOND).await;
    assert_eq!((health(&router), router.version().await.unwrap()), (vec![Health::Serving; 2], 4));
    assert_eq!((router.replicas()[0].failed, replicas[0].probed()), (0, 3));
}

#[tokio::test(start_paused = true)]
async fn failover_requires_weights_at_least_as_new() {
    let (router, replicas) = router(3, round_robin_options());
    replicas[0].version.store(2, Ordering::Relaxed);
    replicas[2].version.store(4, Ordering::Relaxed);
    replicas[0].fails(FailureMode::StopsAfter(3));
    let completion = complete(&router, request(3, 8)).await.unwrap();
    let versions: Vec<(u64, u32)> =
        completion.versions.iter().map(|run| (run.version, run.len)).collect();
    assert_eq!(versions, [(2, 3), (4, 5)]);
    assert_eq!(
        completion.tokens,
        undisturbed(request(3, 8)).await.tokens,
        "all have the same weights"
    );
    // Without such weights, the error names the newest ones that exist.
    replicas[2].version.store(1, Ordering::Relaxed);
    let error =
        complete(&router, SampleRequest { min_version: 9, ..request(3, 8) }).await.unwrap_err();
    assert!(matches!(error, PolicyError::Behind { min_version: 9, .. }), "{error}");
    assert_eq!(health(&router)[1..], [Health::Serving; 2], "to be behind is no failure");
}

#[tokio::test(start_paused = true)]
async fn paused_replica_is_not_suspected() {
    let (router, replicas) = router(1, round_robin_options());
    *replicas[0].stands_still.lock().unwrap() = true;
    replicas[0].fails(FailureMode::HangsAfter(2));
    let mut stream = router.sample(request(1, 8)).await.unwrap();
    let mut completion = Completion::default();
    let waited = tokio::time::timeout(300 * SECOND, stream.gather(&mut completion)).await;
    assert!(waited.is_err() && completion.tokens.len() == 2);
    assert_eq!(health(&router), [Health::Serving]);
    *replicas[0].stands_still.lock().unwrap() = false;
    let stopped = stream.gather(&mut completion);
    assert!(tokio::time::timeout(200 * SECOND, stopped).await.unwrap().is_err());
    assert_ne!(health(&router), [Health::Serving]);
}

#[tokio::test(start_paused = true)]
async fn shared_prefixes_use_one_replica_until_burst_spreads() {
    let (router, replicas) = router(4, RouterOptions::default());
    for turn in 0..5 {
        for task in 0..12 {
            complete(&router, turn_request(task, turn)).await.unwrap();
        }
    }
    for replica in &replicas {
        let mut tasks: Vec<u32> =
            replica.requests().iter().map(|received| received.prompt[0]).collect();
        tasks.sort_unstable();
        tasks.dedup();
        assert_eq!(
            (tasks.len(), replica.requests().len()),
            (3, 15),
            "three tasks, all their turns"
        );
    }
    let before: Vec<usize> = replicas.iter().map(|replica| replica.requests().len()).collect();
    futures_util::future::join_all((0..40).map(|_| complete(&router, turn_request(0, 0)))).await;
    let mut burst: Vec<usize> = replicas
        .iter()
        .zip(before)
        .map(|(replica, before)| replica.requests().len() - before)
        .collect();
    burst.sort_unstable();
    assert!(burst[0] >= 3 && burst[3] <= 20, "{burst:?}");
}

fn turn_request(task: u32, turn: usize) -> SampleRequest {
    let prompt = [vec![task; 64], vec![60; 16 * turn]].concat();
    SampleRequest { prompt, ..request(u64::from(task), 4) }
}

#[tokio::test(start_paused = true)]
async fn slow_replica_gets_fewer_calls() {
    let options =
        RouterOptions { choice: Choice::LeastLoaded, max_running: 6, ..RouterOptions::default() };
    let ms = Duration::from_millis;
    let (router, replicas) = router_over(vec![ms(10), ms(10), ms(100)], options);
    futures_util::future::join_all((0..120).map(|stream| complete(&router, request(stream, 8))))
        .await;
    let received: Vec<usize> = replicas.iter().map(|replica| replica.requests().len()).collect();
    assert!(received[2] <= 10 && received[0].abs_diff(received[1]) <= 2, "{received:?}");
}

#[tokio::test(start_paused = true)]
async fn abort_ends_call_in_every_state() {
    let (router, replicas) = router(2, RouterOptions { max_running: 2, ..round_robin_options() });
    let mut streams = Vec::new();
    for stream in 1..=3 {
        streams.push(router.sample(request(stream, 100)).await.unwrap());
    }
    sleep(Duration::from_millis(55)).await;
    assert_eq!(
        router.workload().await.unwrap(),
        Load { running: 2, waiting: 1, cache_in_use: 0.0 }
    );
    assert_eq!(router.abort(Some(2)).await.unwrap(), 1);
    assert_eq!(router.abort(Some(7)).await.unwrap(), 0);
    let mut completions = Vec::new();
    for stream in streams {
        completions.push(stream.collect(60 * SECOND).await.unwrap());
    }
    let lengths: Vec<(usize, FinishReason)> =
        completions.iter().map(|r| (r.tokens.len(), r.finish)).collect();
    let complete_call = (100, FinishReason::Length);
    assert!(
        lengths[0] == complete_call
            && lengths[2] == complete_call
            && lengths[1].1 == FinishReason::Aborted,
        "{lengths:?}"
    );
    let plain = undisturbed(request(2, 100)).await.tokens;
    assert!((4..8).contains(&lengths[1].0) && plain.starts_with(&completions[1].tokens));
    assert_eq!(
        (&*replicas[0].aborted.lock().unwrap(), &*replicas[1].aborted.lock().unwrap()),
        (&vec![], &vec![Some(2)])
    );
    // A waiting call ends without a token; a call on a hanging replica ends once the abort has
    // timed out.
    replicas.iter().for_each(|replica| replica.fails(FailureMode::HangsAfter(2)));
    let streams =
        [router.sample(request(1, 9)).await.unwrap(), router.sample(request(2, 9)).await.unwrap()];
    let waits = router.sample(request(3, 9)).await.unwrap();
    sleep(SECOND).await;
    assert_eq!(router.abort(None).await.unwrap(), 3);
    let completion = waits.collect(SECOND).await.unwrap();
    assert_eq!((completion.tokens.len(), completion.finish), (0, FinishReason::Aborted));
    for stream in streams {
        let completion = stream.collect(11 * SECOND).await.unwrap();
        assert_eq!((completion.tokens.len(), completion.finish), (2, FinishReason::Aborted));
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_stream_frees_its_permit() {
    let (router, replicas) =
        router(1, RouterOptions { max_running: 1, max_waiting: 1, ..round_robin_options() });
    let first = router.sample(request(1, 1000)).await.unwrap();
    let second = router.sample(request(2, 4)).await.unwrap();
    let busy = router.sample(request(3, 4)).await.unwrap_err();
    assert_eq!(
        busy,
        PolicyError::Busy {
            what: "1 requests are running and 1 are waiting".into(),
            retry_after: 1
        }
    );
    drop(first);
    second.collect(SECOND).await.unwrap();
    sleep(SECOND).await;
    assert_eq!(replicas[0].simulator.workload().await.unwrap().running, 0);
    assert_eq!(router.replicas()[0].running, 0);
}

#[tokio::test(start_paused = true)]
async fn busy_replicas_stay_unsuspected_and_return_hint() {
    let (router, replicas) = router(2, round_robin_options());
    let busy = PolicyError::Busy { what: "too much".into(), retry_after: 7 };
    replicas[0].fails(FailureMode::Rejects(busy.clone()));
    complete(&router, request(1, 4)).await.unwrap();
    replicas[1].fails(FailureMode::Rejects(busy.clone()));
    assert_eq!(complete(&router, request(1, 4)).await.unwrap_err(), busy);
    assert_eq!(health(&router), [Health::Serving; 2]);
}

#[path = "pool_tests.rs"]
mod pool;
