use std::sync::atomic::Ordering;

use levade_policy::{Completion, FinishReason, SampleEvent, SamplingParams};
use tokio::time::{Instant, sleep};

use super::testing::*;
use super::*;

fn in_turn() -> RouterOptions {
    RouterOptions { choice: Choice::RoundRobin, ..RouterOptions::default() }
}

fn health(router: &Router) -> Vec<Health> {
    router.members().into_iter().map(|member| member.health).collect()
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn failover_returns_same_completion_without_repeated_tokens() {
    let plain = undisturbed(request(3, 8)).await;
    assert_eq!(plain.tokens.len(), 8);
    for drawn in 0..=8 {
        for fails in [Fails::After(drawn, gone()), Fails::GoneAfter(drawn), Fails::HangsAfter(drawn)] {
            let (router, members) = router(3, in_turn());
            members[0].fails(fails.clone());
            members[1].fails(Fails::After(2, gone()));
            assert_eq!(ask(&router, request(3, 8)).await.unwrap(), plain, "{fails:?}");
            // Even if all tokens were sampled and only the end is missing.
            assert!(router.members()[0].failed > 0);
            let second = members[1].asked();
            // With all tokens sampled, no other replica is called.
            assert_eq!(second.len(), usize::from(drawn < 8));
            for asked in second {
                assert_eq!(asked.prompt[3..], plain.tokens[..drawn]);
                assert_eq!((asked.params.drawn_before, asked.params.max_tokens), (drawn, 8 - drawn));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn call_moves_to_other_replica_if_start_fails() {
    let plain = undisturbed(request(3, 8)).await;
    for (fails, wait) in [(Fails::Refuses(gone()), 0), (Fails::Hangs, 60)] {
        let (router, members) = router(2, in_turn());
        members[0].fails(fails);
        let start = Instant::now();
        assert_eq!(ask(&router, request(3, 8)).await.unwrap(), plain);
        assert_eq!(start.elapsed().as_secs(), wait);
        assert!(router.members()[0].failed > 0);
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
    for (asked, finish) in [(by_id, FinishReason::StopId), (by_string, FinishReason::StopString)] {
        let plain = undisturbed(asked.clone()).await;
        assert_eq!((plain.tokens.len(), plain.finish), (end + 1, finish));
        for drawn in 0..=end + 1 {
            let (router, members) = router(2, in_turn());
            members[0].fails(Fails::GoneAfter(drawn));
            assert_eq!(ask(&router, asked.clone()).await.unwrap(), plain, "after {drawn}");
        }
    }
    // A full context ends a completion too.
    let long = SampleRequest { prompt: vec![1; 1020], ..request(3, 30) };
    let plain = undisturbed(long.clone()).await;
    assert_eq!((plain.tokens.len(), plain.finish), (4, FinishReason::Context));
    let (router, members) = router(2, in_turn());
    members[0].fails(Fails::GoneAfter(4));
    assert_eq!(ask(&router, long).await.unwrap(), plain);
}

#[tokio::test(start_paused = true)]
async fn random_replica_failures_preserve_completions() {
    let mut asked = 0;
    for seed in 0..40u64 {
        let chance = |counter| levade_policy::uniform(seed, 9, counter);
        let (router, members) = router(3, RouterOptions { tries: 12, ..in_turn() });
        for (i, member) in (0..).zip(&members) {
            let after = (chance(2 * i) * 20.0) as usize;
            member.fails(match (chance(2 * i + 1) * 5.0) as usize {
                0 => Fails::Never,
                1 => Fails::Refuses(gone()),
                2 => Fails::HangsAfter(after),
                3 => Fails::After(after, PolicyError::NotFinite { position: 1 }),
                _ => Fails::GoneAfter(after),
            });
        }
        let replies = (0..6).map(|stream| ask(&router, request(stream, 12)));
        for (stream, reply) in (0..).zip(futures_util::future::join_all(replies).await) {
            let plain = undisturbed(request(stream, 12)).await;
            match reply {
                Ok(reply) => assert_eq!(reply, plain, "seed {seed}"),
                Err(_) => assert!(members.iter().all(|member| *member.fails.lock().unwrap() != Fails::Never)),
            }
            asked += 1;
        }
    }
    assert_eq!(asked, 240);
}

#[tokio::test(start_paused = true)]
async fn request_errors_are_not_retried_on_other_replicas() {
    let (router, members) = router(2, in_turn());
    let long = SampleRequest { prompt: vec![1; 2000], ..request(1, 4) };
    let error = ask(&router, long).await.unwrap_err();
    assert_eq!(error, PolicyError::PromptTooLong { prompt: 2000, context: 1024 });
    let error = ask(&router, SampleRequest { prompt: vec![900], ..request(1, 4) }).await.unwrap_err();
    assert!(error.to_string().contains("token 900"), "{error}");
    assert_eq!(members.iter().map(|member| member.asked().len()).sum::<usize>(), 2);
    assert_eq!(health(&router), [Health::Serving; 2]);
    let other = RouterOptions { policy: "p".into(), ..in_turn() };
    let (router, _) = super::testing::router(1, other);
    let wrong = SampleRequest { policy: "q".into(), ..request(1, 4) };
    assert!(
        ask(&router, wrong).await.unwrap_err().to_string().contains("policy \"q\", but the router has \"p\"")
    );
    ask(&router, SampleRequest { policy: "p".into(), ..request(1, 4) }).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn tries_limit_replicas_that_a_request_can_fail() {
    let (router, members) = router(5, in_turn());
    members.iter().for_each(|member| member.fails(Fails::After(1, gone())));
    assert_eq!(ask(&router, request(1, 8)).await.unwrap_err(), gone());
    assert_eq!(members.iter().filter(|member| !member.asked().is_empty()).count(), 3);
}

#[tokio::test(start_paused = true)]
async fn quarantined_replica_is_probed_with_backoff_and_recovers() {
    let (router, members) = router(2, in_turn());
    members[0].fails(Fails::HangsAfter(0));
    members[1].fails(Fails::Refuses(gone()));
    // The only other replica fails as well, so the call waits for a serving one.
    let answered = {
        let members = members.clone();
        tokio::spawn(async move {
            let reply = ask(&router, request(1, 8)).await;
            (reply, router, members)
        })
    };
    sleep(65 * SECOND).await;
    members[1].fails(Fails::Never);
    let (reply, router, members) = answered.await.unwrap();
    assert_eq!(reply.unwrap(), undisturbed(request(1, 8)).await);
    assert_eq!(health(&router)[1], Health::Serving);
    // The first replica samples nothing for probes either, although it answers all status queries.
    sleep(600 * SECOND).await;
    assert_eq!(health(&router)[0], Health::Quarantined);
    assert!(router.members()[0].reason.as_ref().unwrap().contains("waited 30s for a to sample a token"));
    let probed = members[0].probed();
    sleep(360 * SECOND).await;
    assert_eq!(members[0].probed() - probed, 4, "every 60 s and the 30 s that one takes");
    members[0].fails(Fails::Never);
    sleep(90 * SECOND).await;
    assert_eq!(health(&router), [Health::Serving; 2]);
    let asked = members[0].asked().len();
    for stream in 0..4 {
        ask(&router, request(stream, 2)).await.unwrap();
    }
    assert_eq!(members[0].asked().len() - asked, 2);
}

#[tokio::test(start_paused = true)]
async fn replica_that_only_passes_probes_gets_fewer_calls() {
    let (router, members) = router(2, in_turn());
    members[0].fails(Fails::After(2, gone()));
    for stream in 0..600 {
        assert_eq!(ask(&router, request(stream, 4)).await.unwrap().tokens.len(), 4);
        sleep(SECOND).await;
    }
    let asked = members[0].asked().len();
    assert!((5..30).contains(&asked), "{asked} of 600");
    members[0].fails(Fails::Never);
    for stream in 0..200 {
        ask(&router, request(stream, 4)).await.unwrap();
        sleep(SECOND).await;
    }
    assert!(members[0].asked().len() > asked + 60);
}

#[tokio::test(start_paused = true)]
async fn error_names_all_replicas_if_none_serves() {
    let (router, members) = router(2, RouterOptions { failures: 1, ..in_turn() });
    members.iter().for_each(|member| member.fails(Fails::Refuses(gone())));
    let start = Instant::now();
    let error = ask(&router, request(1, 8)).await.unwrap_err();
    let why = "every member of the router (a: it stopped; see its log for the reason; b: it stopped; see its";
    assert!(error.may_pass() && error.to_string().starts_with(why), "{error}");
    assert_eq!(start.elapsed(), 60 * SECOND);
    assert!(router.version().await.is_err());
}

#[tokio::test(start_paused = true)]
async fn recovered_replica_loads_newest_weights_before_serving() {
    let (router, members) = router(2, in_turn());
    router.adopt(&weights(3)).await.unwrap();
    assert_eq!(router.version().await.unwrap(), 3);
    // It fails, restarts with the weights on its disk, and finds no newer weights for a while.
    members[0].fails(Fails::Refuses(gone()));
    ask(&router, request(1, 4)).await.unwrap();
    sleep(SECOND).await;
    assert_eq!(health(&router)[0], Health::Quarantined);
    members[0].version.store(1, Ordering::Relaxed);
    *members[0].refuses_weights.lock().unwrap() = Some(PolicyError::NotAdopted("no such folder".into()));
    members[0].fails(Fails::Never);
    let asked = members[0].asked().len();
    sleep(20 * SECOND).await;
    assert_eq!((router.members()[0].version, health(&router)[0]), (1, Health::Quarantined));
    assert!(router.members()[0].reason.as_ref().unwrap().contains("no such folder"));
    let new = SampleRequest { least_version: 3, ..request(2, 4) };
    for _ in 0..4 {
        assert_eq!(ask(&router, new.clone()).await.unwrap().versions[0].version, 3);
    }
    assert_eq!(members[0].asked().len(), asked);
    *members[0].refuses_weights.lock().unwrap() = None;
    sleep(60 * SECOND).await;
    assert_eq!((router.members()[0].version, health(&router)[0]), (3, Health::Serving));
    assert_eq!(*members[0].adopted.lock().unwrap(), [3, 3]);
}

#[tokio::test(start_paused = true)]
async fn unnoticed_restart_is_detected_by_old_version() {
    let (router, members) = router(2, in_turn());
    router.adopt(&weights(3)).await.unwrap();
    members[0].version.store(1, Ordering::Relaxed);
    let new = SampleRequest { least_version: 3, ..request(2, 4) };
    for _ in 0..4 {
        assert_eq!(ask(&router, new.clone()).await.unwrap().versions[0].version, 3);
    }
    sleep(2 * SECOND).await;
    assert_eq!((router.members()[0].version, health(&router)[0]), (3, Health::Serving));
    // Without any call, the next probe detects it.
    members[1].version.store(2, Ordering::Relaxed);
    sleep(31 * SECOND).await;
    assert_eq!((router.members()[1].version, health(&router)[1]), (3, Health::Serving));
}

#[tokio::test(start_paused = true)]
async fn probe_during_weight_update_causes_no_second_update() {
    let (router, members) = router(1, in_turn());
    router.adopt(&weights(1)).await.unwrap();
    *members[0].adopts_in.lock().unwrap() = 40 * SECOND;
    // Meanwhile a probe is due, and an older token arrives late, as in a completion that continues
    // under new weights.
    let newer = weights(2);
    let late = async {
        sleep(SECOND).await;
        router.pool.drew_with(&router.pool.members()[0], 0);
        sleep(38 * SECOND).await;
        assert_eq!(health(&router), [Health::Serving]);
    };
    let (adopted, ()) = tokio::join!(router.adopt(&newer), late);
    adopted.unwrap();
    sleep(100 * SECOND).await;
    assert_eq!(*members[0].adopted.lock().unwrap(), [1, 2]);
    assert_eq!((router.members()[0].version, health(&router)[0]), (2, Health::Serving));
}

#[tokio::test(start_paused = true)]
async fn adopt_quarantines_replicas_that_miss_weights() {
    let (router, members) = router(3, in_turn());
    *members[1].refuses_weights.lock().unwrap() = Some(PolicyError::NotAdopted("disk full".into()));
    router.adopt(&weights(1)).await.unwrap();
    assert_eq!(health(&router), [Health::Serving, Health::Quarantined, Health::Serving]);
    assert!(router.members()[1].reason.as_ref().unwrap().contains("disk full"));
    assert_eq!(router.version().await.unwrap(), 1);
    *members[1].refuses_weights.lock().unwrap() = None;
    sleep(2 * SECOND).await;
    assert_eq!(health(&router), [Health::Serving; 3]);
    // Weights that no replica loads change nothing.
    for member in &members {
        *member.refuses_weights.lock().unwrap() = Some(PolicyError::NotAdopted("other model".into()));
    }
    let error = router.adopt(&weights(2)).await.unwrap_err().to_string();
    for name in ["a", "b", "c"] {
        assert!(
            error.contains(&format!("{name}: cannot adopt the published weights: other model")),
            "{error}"
        );
    }
    assert_eq!(health(&router), [Health::Serving; 3]);
    assert_eq!(router.version().await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn recovering_replica_loads_weights_published_meanwhile() {
    let (router, members) = router(2, RouterOptions { failures: 1, ..in_turn() });
    members[0].fails(Fails::Refuses(gone()));
    ask(&router, request(1, 4)).await.unwrap();
    members[0].fails(Fails::Never);
    *members[0].adopts_in.lock().unwrap() = 20 * SECOND;
    router.adopt(&weights(1)).await.unwrap();
    sleep(10 * SECOND).await;
    assert_eq!(health(&router), [Health::Quarantined, Health::Serving], "it adopts the first ones");
    router.adopt(&weights(2)).await.unwrap();
    sleep(15 * SECOND).await;
    assert_eq!((health(&router)[0], router.version().await.unwrap()), (Health::Quarantined, 2));
    sleep(20 * SECOND).await;
    assert_eq!((health(&router)[0], router.members()[0].version), (Health::Serving, 2));
    assert_eq!(*members[0].adopted.lock().unwrap(), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn replica_waiting_for_weights_is_not_suspected() {
    use levade_policy::{Learner, Simulator};
    let simulator = Arc::new(Simulator::new(config(Duration::from_millis(10))));
    let router = Router::new(vec![("a".into(), simulator.clone() as Arc<dyn Sampler>)], in_turn()).unwrap();
    let stream = router.sample(SampleRequest { least_version: 1, ..request(1, 4) }).await.unwrap();
    sleep(500 * SECOND).await;
    let weights = simulator.publish(1).await.unwrap();
    router.adopt(&weights).await.unwrap();
    assert_eq!(stream.collect(SECOND).await.unwrap().versions[0].version, 1);
    assert_eq!((health(&router)[0], router.members()[0].failed), (Health::Serving, 0));
}

#[tokio::test(start_paused = true)]
async fn resumed_run_can_publish_lower_versions() {
    let (router, members) = router(2, in_turn());
    router.adopt(&weights(7)).await.unwrap();
    router.adopt(&weights(4)).await.unwrap();
    sleep(100 * SECOND).await;
    assert_eq!((health(&router), router.version().await.unwrap()), (vec![Health::Serving; 2], 4));
    assert_eq!((router.members()[0].failed, members[0].probed()), (0, 3));
}

#[tokio::test(start_paused = true)]
async fn failover_requires_weights_at_least_as_new() {
    let (router, members) = router(3, in_turn());
    members[0].version.store(2, Ordering::Relaxed);
    members[2].version.store(4, Ordering::Relaxed);
    members[0].fails(Fails::GoneAfter(3));
    let reply = ask(&router, request(3, 8)).await.unwrap();
    let versions: Vec<(u64, u32)> = reply.versions.iter().map(|run| (run.version, run.len)).collect();
    assert_eq!(versions, [(2, 3), (4, 5)]);
    assert_eq!(reply.tokens, undisturbed(request(3, 8)).await.tokens, "all have the same weights");
    // Without such weights, the error names the newest ones that exist.
    members[2].version.store(1, Ordering::Relaxed);
    let error = ask(&router, SampleRequest { least_version: 9, ..request(3, 8) }).await.unwrap_err();
    assert!(matches!(error, PolicyError::Behind { least: 9, .. }), "{error}");
    assert_eq!(health(&router)[1..], [Health::Serving; 2], "to be behind is no failure");
}

#[tokio::test(start_paused = true)]
async fn paused_replica_is_not_suspected() {
    let (router, members) = router(1, in_turn());
    *members[0].stands_still.lock().unwrap() = true;
    members[0].fails(Fails::HangsAfter(2));
    let mut stream = router.sample(request(1, 8)).await.unwrap();
    let mut reply = Completion::default();
    let waited = tokio::time::timeout(300 * SECOND, stream.gather(&mut reply)).await;
    assert!(waited.is_err() && reply.tokens.len() == 2);
    assert_eq!(health(&router), [Health::Serving]);
    *members[0].stands_still.lock().unwrap() = false;
    let stopped = stream.gather(&mut reply);
    assert!(tokio::time::timeout(200 * SECOND, stopped).await.unwrap().is_err());
    assert_ne!(health(&router), [Health::Serving]);
}

#[tokio::test(start_paused = true)]
async fn shared_prefixes_use_one_replica_until_burst_spreads() {
    let (router, members) = router(4, RouterOptions::default());
    let about = |task: u32, turn: usize| {
        let prompt = [vec![task; 64], vec![60; 16 * turn]].concat();
        SampleRequest { prompt, ..request(u64::from(task), 4) }
    };
    for turn in 0..5 {
        for task in 0..12 {
            ask(&router, about(task, turn)).await.unwrap();
        }
    }
    for member in &members {
        let mut tasks: Vec<u32> = member.asked().iter().map(|asked| asked.prompt[0]).collect();
        tasks.sort_unstable();
        tasks.dedup();
        assert_eq!((tasks.len(), member.asked().len()), (3, 15), "three tasks, all their turns");
    }
    let before: Vec<usize> = members.iter().map(|member| member.asked().len()).collect();
    futures_util::future::join_all((0..40).map(|_| ask(&router, about(0, 0)))).await;
    let mut burst: Vec<usize> =
        members.iter().zip(before).map(|(member, before)| member.asked().len() - before).collect();
    burst.sort_unstable();
    assert!(burst[0] >= 3 && burst[3] <= 20, "{burst:?}");
}

#[tokio::test(start_paused = true)]
async fn slow_replica_gets_fewer_calls() {
    let options = RouterOptions { choice: Choice::LeastLoaded, most_running: 6, ..RouterOptions::default() };
    let ms = Duration::from_millis;
    let (router, members) = router_over(vec![ms(10), ms(10), ms(100)], options);
    futures_util::future::join_all((0..120).map(|stream| ask(&router, request(stream, 8)))).await;
    let asked: Vec<usize> = members.iter().map(|member| member.asked().len()).collect();
    assert!(asked[2] <= 10 && asked[0].abs_diff(asked[1]) <= 2, "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn abort_ends_call_in_every_state() {
    let (router, members) = router(2, RouterOptions { most_running: 2, ..in_turn() });
    let mut streams = Vec::new();
    for stream in 1..=3 {
        streams.push(router.sample(request(stream, 100)).await.unwrap());
    }
    sleep(Duration::from_millis(55)).await;
    assert_eq!(router.workload().await.unwrap(), Load { running: 2, waiting: 1, cache_in_use: 0.0 });
    assert_eq!(router.abort(Some(2)).await.unwrap(), 1);
    assert_eq!(router.abort(Some(7)).await.unwrap(), 0);
    let mut replies = Vec::new();
    for stream in streams {
        replies.push(stream.collect(60 * SECOND).await.unwrap());
    }
    let lengths: Vec<(usize, FinishReason)> = replies.iter().map(|r| (r.tokens.len(), r.finish)).collect();
    let whole = (100, FinishReason::Length);
    assert!(
        lengths[0] == whole && lengths[2] == whole && lengths[1].1 == FinishReason::Aborted,
        "{lengths:?}"
    );
    let plain = undisturbed(request(2, 100)).await.tokens;
    assert!((4..8).contains(&lengths[1].0) && plain.starts_with(&replies[1].tokens));
    assert_eq!(
        (&*members[0].aborted.lock().unwrap(), &*members[1].aborted.lock().unwrap()),
        (&vec![], &vec![Some(2)])
    );
    // A waiting call ends without a token; a call on a hanging replica ends once the abort has
    // timed out.
    members.iter().for_each(|member| member.fails(Fails::HangsAfter(2)));
    let streams = [router.sample(request(1, 9)).await.unwrap(), router.sample(request(2, 9)).await.unwrap()];
    let waits = router.sample(request(3, 9)).await.unwrap();
    sleep(SECOND).await;
    assert_eq!(router.abort(None).await.unwrap(), 3);
    let reply = waits.collect(SECOND).await.unwrap();
    assert_eq!((reply.tokens.len(), reply.finish), (0, FinishReason::Aborted));
    for stream in streams {
        let reply = stream.collect(11 * SECOND).await.unwrap();
        assert_eq!((reply.tokens.len(), reply.finish), (2, FinishReason::Aborted));
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_stream_frees_its_permit() {
    let (router, members) = router(1, RouterOptions { most_running: 1, most_waiting: 1, ..in_turn() });
    let first = router.sample(request(1, 1000)).await.unwrap();
    let second = router.sample(request(2, 4)).await.unwrap();
    let busy = router.sample(request(3, 4)).await.unwrap_err();
    assert_eq!(busy, PolicyError::Busy { what: "1 requests run and 1 wait".into(), retry_after: 1 });
    drop(first);
    second.collect(SECOND).await.unwrap();
    sleep(SECOND).await;
    assert_eq!(members[0].simulator.workload().await.unwrap().running, 0);
    assert_eq!(router.members()[0].running, 0);
}

#[tokio::test(start_paused = true)]
async fn busy_replicas_stay_unsuspected_and_return_hint() {
    let (router, members) = router(2, in_turn());
    let busy = PolicyError::Busy { what: "too much".into(), retry_after: 7 };
    members[0].fails(Fails::Refuses(busy.clone()));
    ask(&router, request(1, 4)).await.unwrap();
    members[1].fails(Fails::Refuses(busy.clone()));
    assert_eq!(ask(&router, request(1, 4)).await.unwrap_err(), busy);
    assert_eq!(health(&router), [Health::Serving; 2]);
}

#[tokio::test(start_paused = true)]
async fn router_pauses_resumes_and_drains() {
    let (router, _) = router(1, in_turn());
    let running = router.sample(request(1, 20)).await.unwrap();
    router.pause();
    let mut waiting = router.sample(request(2, 4)).await.unwrap();
    assert_eq!(running.collect(SECOND).await.unwrap().tokens.len(), 20, "what runs goes on");
    assert!(tokio::time::timeout(SECOND, waiting.next()).await.is_err());
    router.resume();
    assert!(matches!(waiting.next().await, Some(Ok(SampleEvent::Tokens { .. }))));
    router.drain(SECOND).await.unwrap();
    assert_eq!(waiting.collect(SECOND).await.unwrap().tokens.len(), 3);
    let refused = router.sample(request(3, 4)).await.unwrap_err();
    assert!(refused.to_string().contains("the router is being drained"), "{refused}");
    router.resume();
    ask(&router, request(3, 4)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn device_counters_survive_replica_restarts() {
    let (router, members) = router(3, RouterOptions { failures: 1, ..in_turn() });
    assert_eq!(router.device_stats().await.unwrap(), None);
    let stats = |drawn, cache_filled| DeviceStats { drawn, cache_filled, ..DeviceStats::default() };
    let told = |member: usize, stats| *members[member].stats.lock().unwrap() = Some(stats);
    let total = async || {
        let stats = router.device_stats().await.unwrap().unwrap();
        (stats.drawn, stats.cache_filled)
    };
    told(0, stats(100, 0.5));
    told(1, stats(10, 0.25));
    assert_eq!(total().await, (110, 0.375));
    // The first replica restarts, the second is unreachable for now.
    told(0, stats(7, 0.5));
    members[1].fails(Fails::Refuses(gone()));
    router.version().await.unwrap();
    assert_eq!((total().await, health(&router)[1]), ((117, 0.375), Health::Quarantined));
}

#[tokio::test(start_paused = true)]
async fn overlapping_replica_pauses_are_counted_once() {
    let (router, members) = router(2, in_turn());
    let before = router.paused().await.unwrap();
    for member in &members {
        *member.stands_still.lock().unwrap() = true;
    }
    router.paused().await.unwrap();
    let start = router.paused().await.unwrap();
    sleep(5 * SECOND).await;
    assert_eq!(router.paused().await.unwrap() - start, 5 * SECOND);
    assert_eq!(before, Duration::ZERO);
}

#[tokio::test]
async fn new_rejects_routers_that_never_serve() {
    let error = |members: &[&str], options| {
        let members = members.iter().map(|name| {
            let sampler: Arc<dyn Sampler> = Scripted::new(Duration::ZERO);
            (name.to_string(), sampler)
        });
        Router::new(members.collect(), options).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(error(&[], in_turn()).contains("has no members"));
    assert!(error(&["a", "b", "a"], in_turn()).contains("two members of the name \"a\""));
    assert!(error(&["a"], RouterOptions { tries: 0, ..in_turn() }).contains("tries = 0"));
    assert!(error(&["a"], RouterOptions { probe: vec![], ..in_turn() }).contains("probes"));
    let (router, _) = router(1, in_turn());
    let wrong =
        SampleRequest { params: SamplingParams { top_p: 2.0, ..Default::default() }, ..request(1, 1) };
    assert!(ask(&router, wrong).await.unwrap_err().to_string().contains("top_p = 2"));
}

#[tokio::test(start_paused = true)]
async fn replicas_join_with_newest_weights_and_leave_gracefully() {
    let (router, members) = router(1, in_turn());
    let newest = weights(3);
    router.adopt(&newest).await.unwrap();
    let joins = Scripted::new(Duration::from_millis(10));
    router.join("new", joins.clone()).unwrap();
    assert!(router.join("new", joins.clone()).unwrap_err().to_string().contains("\"new\" already"));
    assert_eq!(health(&router), [Health::Serving, Health::Quarantined]);
    sleep(SECOND).await;
    assert_eq!(health(&router), [Health::Serving, Health::Serving]);
    assert_eq!(*joins.adopted.lock().unwrap(), [3]);
    // The first replica has a call in flight as it leaves.
    let plain = undisturbed(request(3, 8)).await;
    let under_way = ask(&router, request(3, 8));
    let (found, left) = tokio::join!(under_way, async {
        sleep(Duration::from_millis(15)).await;
        router.leave(&router.members()[0].name)
    });
    assert_eq!((found.unwrap().tokens, left), (plain.tokens, true));
    assert_eq!(router.members().len(), 1);
    let before = members[0].asked().len();
    for _ in 0..3 {
        ask(&router, request(4, 2)).await.unwrap();
    }
    assert_eq!(members[0].asked().len(), before, "it gets no more calls");
    assert!(!router.leave("nobody"));
    assert_eq!(router.version().await.unwrap(), 3);
}
