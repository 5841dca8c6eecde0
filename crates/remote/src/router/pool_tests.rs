//! Tests of pauses, counters and replicas that join or leave.

use super::*;

#[tokio::test(start_paused = true)]
async fn router_pauses_resumes_and_drains() {
    let (router, _) = router(1, round_robin_options());
    let running = router.sample(request(1, 20)).await.unwrap();
    router.pause();
    let mut waiting = router.sample(request(2, 4)).await.unwrap();
    assert_eq!(running.collect(SECOND).await.unwrap().tokens.len(), 20, "what runs goes on");
    assert!(tokio::time::timeout(SECOND, waiting.next()).await.is_err());
    router.resume();
    assert!(matches!(waiting.next().await, Some(Ok(SampleEvent::Tokens { .. }))));
    router.drain(SECOND).await.unwrap();
    assert_eq!(waiting.collect(SECOND).await.unwrap().tokens.len(), 3);
    let rejected = router.sample(request(3, 4)).await.unwrap_err();
    assert!(rejected.to_string().contains("the router is draining"), "{rejected}");
    router.resume();
    complete(&router, request(3, 4)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn device_counters_survive_replica_restarts() {
    let (router, replicas) = router(3, RouterOptions { failures: 1, ..round_robin_options() });
    assert_eq!(router.device_stats().await.unwrap(), None);
    let set_stats = |replica: usize, stats| *replicas[replica].stats.lock().unwrap() = Some(stats);
    let total = async || {
        let stats = router.device_stats().await.unwrap().unwrap();
        (stats.sampled, stats.cache_filled)
    };
    set_stats(0, device_stats(100, 0.5));
    set_stats(1, device_stats(10, 0.25));
    assert_eq!(total().await, (110, 0.375));
    // The first replica restarts, the second is unreachable for now.
    set_stats(0, device_stats(7, 0.5));
    replicas[1].fails(FailureMode::Rejects(stopped_error()));
    router.version().await.unwrap();
    assert_eq!((total().await, health(&router)[1]), ((117, 0.375), Health::Quarantined));
}

fn device_stats(sampled: u64, cache_filled: f64) -> DeviceStats {
    DeviceStats { sampled, cache_filled, ..DeviceStats::default() }
}

#[tokio::test(start_paused = true)]
async fn overlapping_replica_pauses_are_counted_once() {
    let (router, replicas) = router(2, round_robin_options());
    let before = router.paused().await.unwrap();
    for replica in &replicas {
        *replica.stands_still.lock().unwrap() = true;
    }
    router.paused().await.unwrap();
    let start = router.paused().await.unwrap();
    sleep(5 * SECOND).await;
    assert_eq!(router.paused().await.unwrap() - start, 5 * SECOND);
    assert_eq!(before, Duration::ZERO);
}

#[tokio::test]
async fn router_new_rejects_invalid_options() {
    assert!(creation_error(&[], round_robin_options()).contains("has no replicas"));
    assert!(
        creation_error(&["a", "b", "a"], round_robin_options())
            .contains("two replicas with the name \"a\"")
    );
    assert!(
        creation_error(&["a"], RouterOptions { tries: 0, ..round_robin_options() })
            .contains("tries = 0")
    );
    assert!(
        creation_error(&["a"], RouterOptions { probe: vec![], ..round_robin_options() })
            .contains("probes")
    );
    let (router, _) = router(1, round_robin_options());
    let wrong = SampleRequest {
        params: SamplingParams { top_p: 2.0, ..Default::default() },
        ..request(1, 1)
    };
    assert!(complete(&router, wrong).await.unwrap_err().to_string().contains("top_p = 2"));
}

fn creation_error(replicas: &[&str], options: RouterOptions) -> String {
    let replicas = replicas.iter().map(|name| {
        let sampler: Arc<dyn Sampler> = ScriptedSampler::new(Duration::ZERO);
        (name.to_string(), sampler)
    });
    Router::new(replicas.collect(), options)
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn replicas_join_with_newest_weights_and_leave_gracefully() {
    let (router, replicas) = router(1, round_robin_options());
    let newest = weights(3);
    router.update_weights(&newest).await.unwrap();
    let joining = ScriptedSampler::new(Duration::from_millis(10));
    router.join("new", joining.clone()).unwrap();
    assert!(
        router
            .join("new", joining.clone())
            .unwrap_err()
            .to_string()
            .contains("already has a replica with the name \"new\"")
    );
    assert_eq!(health(&router), [Health::Serving, Health::Quarantined]);
    sleep(SECOND).await;
    assert_eq!(health(&router), [Health::Serving, Health::Serving]);
    assert_eq!(*joining.loaded_versions.lock().unwrap(), [3]);
    // The first replica has a call in flight as it leaves.
    let plain = undisturbed(request(3, 8)).await;
    let in_flight = complete(&router, request(3, 8));
    let (found, has_left) = tokio::join!(in_flight, async {
        sleep(Duration::from_millis(15)).await;
        router.leave(&router.replicas()[0].name)
    });
    assert_eq!((found.unwrap().tokens, has_left), (plain.tokens, true));
    assert_eq!(router.replicas().len(), 1);
    let before = replicas[0].requests().len();
    for _ in 0..3 {
        complete(&router, request(4, 2)).await.unwrap();
    }
    assert_eq!(replicas[0].requests().len(), before, "it gets no more calls");
    assert!(!router.leave("nobody"));
    assert_eq!(router.version().await.unwrap(), 3);
}
