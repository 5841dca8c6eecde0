//! Tests of weights that are pushed into the memory of servers.

use super::*;

/// Returns how often a fake read a directory.
fn read(fake: &Fake) -> usize {
    fake.requests("/collective_rpc").len() + fake.requests("/update_weights_from_disk").len()
}

#[tokio::test]
async fn pushed_weights_change_token_versions() {
    for (api, in_flight) in [
        (ServerApi::NewVllm, InFlight::Keep),
        (ServerApi::NewVllm, InFlight::Recompute),
        (ServerApi::Sglang, InFlight::Keep),
        (ServerApi::Sglang, InFlight::Recompute),
    ] {
        let fake = Fake::new(api).await;
        let dir = TempDir::new().unwrap();
        let (server, _, broadcast) = sent(&fake, in_flight).await;
        server.update_weights(&publish(dir.path(), 1)).await.unwrap();
        let update = async || {
            broadcast.offer(2).await;
            server.update_weights(&publish(dir.path(), 2)).await.unwrap();
        };
        across(&server, 5, update, &format!("{api:?} {in_flight:?}")).await;
        assert_eq!(
            (broadcast.counts(), read(&fake), fake.half()),
            ((2, 0), 0, 0),
            "{api:?} {in_flight:?}"
        );
        // The learner's weights have changed since; the published ones are in the directory.
        broadcast.withdraw().await;
        server.update_weights(&publish(dir.path(), 3)).await.unwrap();
        assert_eq!((broadcast.counts(), read(&fake)), ((2, 0), 1), "{api:?} {in_flight:?}");
        assert_eq!(server.version().await.unwrap(), 3);
    }
}

#[tokio::test]
async fn failed_push_falls_back_to_directory_before_sampling() {
    let rejecting = Behavior { rejects_weights: true, ..Behavior::default() };
    for api in [ServerApi::NewVllm, ServerApi::Sglang] {
        for fault in [SendFault::HasMovedOn, SendFault::Exits, SendFault::Hangs] {
            let fake = Fake::new(api).await;
            let root = TempDir::new().unwrap();
            let (server, sender, broadcast) = sent(&fake, InFlight::Keep).await;
            server.update_weights(&publish(root.path(), 1)).await.unwrap();
            let issued = request(1, 40);
            let stream = server.sample(issued.clone()).await.unwrap();
            *sender.fault.lock().unwrap() = fault;
            broadcast.offer(2).await;
            server.update_weights(&publish(root.path(), 2)).await.unwrap();
            let completion = stream.collect(LONG).await.unwrap();
            check(&completion, &issued.prompt);
            assert_eq!(completion.versions.last().unwrap().version, 2, "{api:?} {fault:?}");
            assert_eq!(
                (broadcast.counts(), read(&fake), fake.half()),
                ((1, 1), 1, 0),
                "{api:?} {fault:?}"
            );
        }
        // A server that rejects all weights has none, and the learner does not wait for it.
        let fake = Fake::new(api).await;
        let root = TempDir::new().unwrap();
        let (server, sender, broadcast) = sent(&fake, InFlight::Recompute).await;
        fake.set(rejecting.clone());
        let start = Instant::now();
        let error = server.update_weights(&publish(root.path(), 1)).await.unwrap_err();
        assert!(error.to_string().contains("shapes differ"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        assert_eq!((broadcast.counts(), server.version().await.unwrap()), ((0, 1), 0));
        assert_eq!(sender.sending.load(std::sync::atomic::Ordering::Relaxed), 0);
    }
}

#[tokio::test]
async fn server_exit_during_push_releases_learner() {
    for api in [ServerApi::NewVllm, ServerApi::Sglang] {
        let fake = Fake::new(api).await;
        let root = TempDir::new().unwrap();
        let (server, sender, broadcast) = sent(&fake, InFlight::Recompute).await;
        fake.set(Behavior { exits_while_reading: true, ..Behavior::default() });
        let start = Instant::now();
        let error = server.update_weights(&publish(root.path(), 1)).await.unwrap_err();
        assert!(error.is_transient(), "{error}");
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        broadcast.withdraw().await;
        assert_eq!(sender.sending.load(std::sync::atomic::Ordering::Relaxed), 0);
        fake.set(Behavior::default());
        fake.restart().await;
        server.update_weights(&publish(root.path(), 1)).await.unwrap();
        assert_eq!(
            (server.version().await.unwrap(), read(&fake)),
            (1, 1),
            "it comes back by the folder"
        );
        broadcast.offer(2).await;
        server.update_weights(&publish(root.path(), 2)).await.unwrap();
        assert_eq!(
            (server.version().await.unwrap(), broadcast.counts()),
            (2, (1, 1)),
            "and gets the next push"
        );
    }
}

/// Completions continue across weight updates, while one of the servers is killed repeatedly, also
/// during loads.
#[tokio::test]
async fn fleet_never_mixes_weights_after_crashes() {
    never_mixed(false).await;
}

#[tokio::test]
async fn fleet_with_pushes_never_mixes_weights_after_crashes() {
    never_mixed(true).await;
}

async fn never_mixed(pushes: bool) {
    let root = TempDir::new().unwrap();
    let sender = Arc::new(Sender::default());
    let broadcast = Arc::new(WeightBroadcast::new(sender.clone(), GroupBackend::Gloo));
    let publish_and_update = async |router: &Router, version| {
        broadcast.offer(version).await;
        router.update_weights(&publish(root.path(), version)).await.unwrap();
        // The learner continues to train.
        broadcast.withdraw().await;
        assert_eq!(sender.sending.load(std::sync::atomic::Ordering::Relaxed), 0);
    };
    let fakes = [Fake::new(ServerApi::NewVllm).await, Fake::new(ServerApi::Sglang).await];
    let replicas = fakes.iter().map(|fake| {
        let options = ServerOptions {
            silence: Duration::from_secs(1),
            push: pushes.then(|| broadcast.clone()),
            ..fake.options(InFlight::Recompute)
        };
        (fake.url.clone(), Arc::new(Server::new(options).unwrap()) as Arc<dyn Sampler>)
    });
    let options = impatient(Duration::from_millis(200), Duration::from_secs(20));
    let router = Arc::new(Router::new(replicas.collect(), options).unwrap());
    publish_and_update(&router, 1).await;
    let all_serve = async || {
        let serve = async {
            while router.replicas().iter().any(|replica| replica.health != Health::Serving) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LONG, serve).await.unwrap();
    };
    let mut completions = tokio::task::JoinSet::new();
    for version in 2..14 {
        if version % 4 == 2 {
            // If all queried servers reject weights, the weights count as faulty, so another server
            // must be serving.
            all_serve().await;
        }
        for stream in 0..4 {
            let router = router.clone();
            let issued = request(version * 10 + stream, 20);
            let issued = SampleRequest { min_version: version - 1, ..issued };
            completions.spawn(async move { (version, complete(&*router, issued).await) });
        }
        sleep(Duration::from_millis(40)).await;
        let killed = &fakes[(version % 2) as usize];
        match version % 4 {
            0 => killed.set(Behavior { exits_while_reading: true, ..Behavior::default() }),
            1 => killed.kill(),
            2 => killed.set(Behavior { rejects_weights: true, ..Behavior::default() }),
            _ => {}
        }
        if version % 3 == 0 {
            *sender.fault.lock().unwrap() = SendFault::Exits;
        }
        publish_and_update(&router, version).await;
        *sender.fault.lock().unwrap() = SendFault::None;
        killed.set(Behavior::default());
        if version % 4 < 2 {
            killed.restart().await;
        }
        // All serving servers have these weights.
        for (replica, fake) in router.replicas().iter().zip(&fakes) {
            if replica.health == Health::Serving {
                assert!(
                    fake.label().starts_with(&format!("levade-{version}-")),
                    "{replica:?} {}",
                    fake.label()
                );
            }
        }
    }
    while let Some(done) = completions.join_next().await {
        let (version, completion) = done.unwrap();
        let completion = completion.unwrap();
        assert_eq!(completion.tokens.len(), 20);
        assert!(completion.versions.iter().all(|run| run.version >= version - 1), "{completion:?}");
        check(&completion, &[3, 1, 4]);
    }
    all_serve().await;
    assert!(fakes.iter().all(|fake| fake.label().starts_with("levade-13-")));
    assert!(fakes.iter().all(|fake| fake.half() == 0));
    let (sent, missed) = broadcast.counts();
    assert_eq!((sent > 8, missed > 3), (pushes, pushes), "{sent} {missed}");
}
