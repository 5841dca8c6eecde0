use std::sync::atomic::Ordering;

use levade_policy::Completion;
use tempfile::TempDir;
use tokio::sync::Notify;

use super::testing::*;
use super::*;
use crate::router::Health;
use crate::server::testing::{Behavior, Fake, ServerApi, publish, request};
use crate::server::{InFlight, ServerOptions};

#[tokio::test]
async fn handoff_releases_devices_before_acquiring_them() {
    for api in ALL {
        let fleet = ColocatedFleet::new(&[api], false).await;
        fleet.step().await;
        let (pause, sleep, weights, read, cache, resume) = match api {
            ServerApi::Sglang => (
                "/pause_generation",
                "/release_memory_occupation",
                "/resume_memory_occupation",
                "/update_weights_from_disk",
                "/resume_memory_occupation",
                "/continue_generation",
            ),
            _ => (
                "/pause?mode=abort",
                "/sleep?level=2&mode=abort",
                "/wake_up?tags=weights",
                "/collective_rpc",
                "/wake_up?tags=kv_cache",
                "/resume",
            ),
        };
        let all = fleet.requests();
        let from = all.iter().position(|issued| issued == pause).unwrap();
        assert_eq!(
            all[from..],
            [pause, sleep, "[onload]", "[optim_step]", "[step done]"],
            "{api:?}"
        );
        fleet.publishes(1).await.unwrap();
        let moves = ["[publish]", "[offload]", weights, read, cache, resume];
        assert_eq!(fleet.requests(), moves, "{api:?}: the probe comes after it");
        assert_eq!(version_of(&fleet.sample_completion(1).await), 1);
        // Another call while the learner owns the devices moves nothing.
        fleet.step().await;
        assert!(fleet.requests().contains(&"[onload]".into()));
        fleet.step().await;
        assert_eq!(fleet.requests(), ["[optim_step]", "[step done]"], "{api:?}");
        assert!(fleet.colocation.spent() > Duration::ZERO);
        assert_eq!(fleet.learner.handoff_time(), Some(fleet.colocation.spent()));
        fleet.is_sound();
    }
}

#[tokio::test]
async fn broadcast_precedes_offload_and_caches_follow() {
    for api in [ServerApi::NewVllm, ServerApi::Sglang] {
        let fleet = ColocatedFleet::new(&[api, api], true).await;
        for version in 1..4 {
            fleet.step().await;
            fleet.requests();
            fleet.publishes(version).await.unwrap();
            let all = fleet.requests();
            let at = |what: &str| all.iter().position(|issued| issued == what).unwrap();
            let last = |what: &str| all.iter().rposition(|issued| issued == what).unwrap();
            let cache = match api {
                ServerApi::Sglang => "/continue_generation",
                _ => "/wake_up?tags=kv_cache",
            };
            assert_eq!(all.iter().filter(|request| *request == "[send]").count(), 2, "{all:?}");
            assert!(at("[offload all but weights]") < at("[send]"), "{all:?}");
            assert!(last("[send]") < at("[offload]") && at("[offload]") < at(cache), "{all:?}");
            assert!(
                !all.iter()
                    .any(|request| request.contains("collective_rpc")
                        || request.contains("from_disk"))
            );
            assert_eq!(version_of(&fleet.sample_completion(version).await), version);
            fleet.is_sound();
        }
        // A server that cannot receive the push reads the directory; the other one receives it.
        *fleet.trainee.sender.fault.lock().unwrap() = crate::server::testing::SendFault::Exits;
        fleet.step().await;
        fleet.publishes(4).await.unwrap();
        assert_eq!(version_of(&fleet.sample_completion(9).await), 4);
        assert_eq!(fleet.push.as_ref().unwrap().counts(), (6, 2));
        fleet.is_sound();
    }
}

#[tokio::test]
async fn request_after_checkpoint_uses_last_loaded_weights() {
    for api in ALL {
        let fleet = ColocatedFleet::new(&[api, ServerApi::NewVllm], false).await;
        fleet.publishes(1).await.unwrap();
        let dir = TempDir::new().unwrap();
        fleet.learner.save(dir.path(), true).await.unwrap();
        assert!(fleet.fakes.iter().all(|fake| !fake.is_awake()));
        let (a, b) = tokio::join!(fleet.sample_completion(1), fleet.sample_completion(2));
        assert_eq!((version_of(&a), version_of(&b)), (1, 1), "{api:?}");
        assert!(fleet.fakes.iter().all(Fake::is_awake));
        fleet.is_sound();
    }
}

#[tokio::test]
async fn requests_wait_for_learner_call_and_resume() {
    for api in ALL {
        let fleet = ColocatedFleet::new(&[api], false).await;
        fleet.publishes(1).await.unwrap();
        let in_flight_request = request(1, 40);
        let mut stream = fleet.sampler.sample(in_flight_request.clone()).await.unwrap();
        let mut partial = Completion::default();
        while partial.tokens.len() < 4 {
            if let levade_policy::SampleEvent::Tokens { tokens, logprobs, version, .. } =
                stream.next().await.unwrap().unwrap()
            {
                partial.extend(&tokens, &logprobs, version);
            }
        }
        let waits = Arc::new(Notify::new());
        *fleet.trainee.waits.lock().unwrap() = Some(waits.clone());
        let learner = fleet.learner.clone();
        let step = tokio::spawn(async move { learner.optim_step(ADAM).await });
        while !fleet.log.lock().unwrap().iter().any(|issued| issued == "[optim_step]") {
            sleep(Duration::from_millis(5)).await;
        }
        let mut late = std::pin::pin!(fleet.sample_completion(2));
        let early = tokio::time::timeout(Duration::from_secs(3), &mut late).await;
        assert!(early.is_err() && !step.is_finished(), "a sleeping server got a request: {api:?}");
        waits.notify_one();
        step.await.unwrap().unwrap();
        assert_eq!(version_of(&tokio::time::timeout(LONG, late).await.unwrap()), 1);
        stream.gather(&mut partial).await.unwrap();
        assert_eq!(partial.tokens.len(), 40);
        fleet.check(&partial, &in_flight_request.prompt);
        assert!(fleet.router.replicas().iter().all(|member| member.health == Health::Serving));
        fleet.is_sound();
    }
}

#[tokio::test]
async fn sleeping_servers_are_not_probed() {
    let fleet = ColocatedFleet::new(&[ServerApi::NewVllm, ServerApi::Sglang], false).await;
    fleet.publishes(1).await.unwrap();
    fleet.step().await;
    let num_generate_calls = || -> usize {
        fleet
            .fakes
            .iter()
            .map(|f| f.requests("/inference").len() + f.requests("/generate").len())
            .sum()
    };
    let before = num_generate_calls();
    sleep(Duration::from_millis(500)).await;
    assert_eq!(num_generate_calls(), before);
    assert!(fleet.fakes.iter().all(|fake| !fake.is_awake()));
    fleet.publishes(2).await.unwrap();
    sleep(Duration::from_millis(500)).await;
    assert!(num_generate_calls() > before, "they are again when they are awake");
    assert!(fleet.router.replicas().iter().all(|member| member.health == Health::Serving));
    fleet.is_sound();
}

#[tokio::test]
async fn restarted_server_sleeps_before_next_learner_call() {
    for api in ALL {
        let fleet = ColocatedFleet::new(&[api, ServerApi::NewVllm], false).await;
        fleet.publishes(1).await.unwrap();
        fleet.step().await;
        fleet.fakes[0].restart().await;
        assert!(fleet.fakes[0].is_awake());
        fleet.step().await;
        fleet.is_sound();
        // An exited server holds no device. Once it is back, it is detected again.
        fleet.fakes[0].kill();
        fleet.step().await;
        fleet.fakes[0].restart().await;
        fleet.step().await;
        fleet.is_sound();
        fleet.fakes[0].kill();
        fleet.publishes(2).await.unwrap();
        assert_eq!(version_of(&fleet.sample_completion(1).await), 2);
        // It comes back while the samplers own the devices, with the newest weights.
        fleet.fakes[0].restart().await;
        let serve = async {
            while fleet.router.replicas().iter().any(|replica| replica.health != Health::Serving) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LONG, serve).await.unwrap();
        fleet.step().await;
        fleet.is_sound();
    }
}

#[tokio::test]
async fn unresponsive_server_delays_learner_until_timeout() {
    let fleet =
        ColocatedFleet::with(&[ServerApi::NewVllm], false, Duration::from_secs(2), true).await;
    fleet.publishes(1).await.unwrap();
    // The server is still starting, so its process may have allocated device memory.
    fleet.fakes[0].kill();
    let error = fleet.learner.optim_step(ADAM).await.unwrap_err();
    let want = "to release its devices for the learner: ";
    assert!(matches!(&error, PolicyError::Deadline(_, what) if what.contains(want)), "{error}");
    // The server answers after a while.
    let (step, ()) = tokio::join!(fleet.learner.optim_step(ADAM), async {
        sleep(Duration::from_millis(700)).await;
        fleet.fakes[0].restart().await;
    });
    step.unwrap();
    // The server's process has exited.
    fleet.fakes[0].kill();
    fleet.running[0].send_replace(false);
    assert!(!*fleet.colocation.starts().borrow(), "and must not begin again before its turn");
    fleet.step().await;
    fleet.is_sound();
    let weights = fleet.learner.publish(2).await.unwrap();
    let (loaded, ()) = tokio::join!(fleet.sampler.update_weights(&weights), async {
        fleet.colocation.starts().wait_for(|may| *may).await.unwrap();
        fleet.fakes[0].restart().await;
        fleet.running[0].send_replace(true);
    });
    loaded.unwrap();
    assert_eq!(version_of(&fleet.sample_completion(1).await), 2);
    fleet.is_sound();
}

#[tokio::test]
async fn managed_servers_are_checked_once_and_after_failures() {
    for started in [true, false] {
        let sleep_timeout = Duration::from_secs(2);
        let fleet = ColocatedFleet::with(
            &[ServerApi::NewVllm, ServerApi::NewVllm],
            false,
            sleep_timeout,
            started,
        )
        .await;
        fleet.publishes(1).await.unwrap();
        let issued =
            || fleet.fakes.iter().map(|fake| fake.requests("/weight_info").len()).sum::<usize>();
        fleet.step().await;
        let before = issued();
        for _ in 0..5 {
            fleet.step().await;
        }
        // External servers can be restarted at any time.
        assert_eq!(issued() - before, if started { 0 } else { 2 * 5 });
        fleet.trainee.has_exited.store(true, Ordering::Relaxed);
        fleet.learner.optim_step(ADAM).await.unwrap_err();
        fleet.trainee.has_exited.store(false, Ordering::Relaxed);
        let before = issued();
        fleet.step().await;
        assert_eq!(issued() - before, 2, "they are looked at again");
        // A new handoff starts without earlier knowledge.
        fleet.publishes(2).await.unwrap();
        fleet.step().await;
        assert!(fleet.fakes.iter().all(|fake| !fake.is_awake()));
        fleet.is_sound();
    }
}

#[tokio::test]
async fn sleep_failure_names_missing_flag_or_server() {
    for (api, without, flag) in [
        (ServerApi::NewVllm, "sleep mode", "--enable-sleep-mode"),
        (ServerApi::OldVllm, "sleep mode", "--enable-sleep-mode"),
        (ServerApi::Sglang, "memory saver", "--enable-memory-saver"),
    ] {
        let fake = Fake::with(api, Behavior { without, ..Behavior::default() }).await;
        fake.server(InFlight::Recompute).inspect().await.unwrap();
        let options = ServerOptions { sleeps: true, ..fake.options(InFlight::Recompute) };
        let server = Server::new(options).unwrap();
        let error = server.inspect().await.unwrap_err();
        assert!(error.to_string().contains(flag) && !error.is_transient(), "{error}");
        let error = server.sleep().await.unwrap_err();
        assert!(
            error.to_string().contains(flag),
            "one that was started again is looked at, too: {error}"
        );
        let fleet = ColocatedFleet::new(&[api], false).await;
        fleet.publishes(1).await.unwrap();
        let log = Some(fleet.log.clone());
        fleet.requests();
        fleet.fakes[0].set(Behavior {
            rejects_sleep: true,
            log: log.clone(),
            ..Behavior::default()
        });
        let error = fleet.learner.optim_step(ADAM).await.unwrap_err().to_string();
        assert!(
            error.contains("Memory usage increased") && error.contains(&fleet.fakes[0].url),
            "{error}"
        );
        assert!(
            !fleet.log.lock().unwrap().iter().any(|request| request == "[onload]"),
            "the learner stays away"
        );
        // Requests are served even so, and the next learner call can acquire the devices.
        assert_eq!(version_of(&fleet.sample_completion(1).await), 1);
        fleet.fakes[0].set(Behavior { log, ..Behavior::default() });
        fleet.step().await;
        fleet.is_sound();
    }
}

#[tokio::test]
async fn exited_learner_fails_calls_without_hanging() {
    let fleet = ColocatedFleet::new(&[ServerApi::NewVllm], false).await;
    fleet.publishes(1).await.unwrap();
    // The learner is offloaded: servers keep sampling, and its next call reports that it has
    // exited.
    fleet.trainee.has_exited.store(true, Ordering::Relaxed);
    assert_eq!(version_of(&fleet.sample_completion(1).await), 1);
    let error = fleet.learner.optim_step(ADAM).await.unwrap_err();
    assert!(matches!(error, PolicyError::Stopped(_)), "{error}");
    // The learner owns the devices: requests for them fail.
    let completion = async { fleet.sampler.sample(request(2, 4)).await?.collect(LONG).await };
    let error = tokio::time::timeout(LONG, completion).await.unwrap().unwrap_err();
    assert!(matches!(error, PolicyError::Stopped(_)), "{error}");
    let weights = publish(fleet.root.path(), 2);
    let error = fleet.sampler.update_weights(&weights).await.unwrap_err();
    assert!(error.to_string().contains("the learner stopped"), "{error}");
}

#[tokio::test]
async fn handoff_completes_if_its_caller_is_cancelled() {
    let fleet = ColocatedFleet::new(&[ServerApi::NewVllm, ServerApi::Sglang], false).await;
    fleet.publishes(1).await.unwrap();
    for version in 2..8 {
        let wait = Duration::from_millis(version * 3);
        tokio::time::timeout(wait, fleet.learner.optim_step(ADAM)).await.ok();
        fleet.step().await;
        let weights = fleet.learner.publish(version).await.unwrap();
        tokio::time::timeout(wait, fleet.sampler.update_weights(&weights)).await.ok();
        assert_eq!(version_of(&fleet.sample_completion(version).await), version);
        fleet.is_sound();
    }
}

/// Servers exit while they sleep, wake, fall asleep and sample, and are restarted at arbitrary
/// times.
#[tokio::test]
async fn server_exits_never_break_device_ownership() {
    for pushes in [false, true] {
        let fleet = ColocatedFleet::new(&[ServerApi::NewVllm, ServerApi::Sglang], pushes).await;
        fleet.publishes(1).await.unwrap();
        let log = Some(fleet.log.clone());
        let plain = || Behavior { log: log.clone(), ..Behavior::default() };
        for version in 2..14u64 {
            let issued = request(version, 20);
            let stream = fleet.sampler.sample(issued.clone()).await.unwrap();
            let fake = &fleet.fakes[(version % 2) as usize];
            match version % 6 {
                0 => fake.set(Behavior { exits_while_sleeping: true, ..plain() }),
                1 => fake.kill(),
                2 => fake.set(Behavior { exits_while_waking: true, ..plain() }),
                3 => fake.set(Behavior { exits_while_reading: true, ..plain() }),
                4 => fake.restart().await,
                _ => {}
            }
            sleep(Duration::from_millis(20)).await;
            fleet.step().await;
            if version % 6 < 2 {
                fake.restart().await;
            }
            fleet.step().await;
            fleet.publishes(version).await.unwrap();
            fake.set(plain());
            if (2..4).contains(&(version % 6)) {
                fake.restart().await;
            }
            let completion = stream.collect(LONG).await.unwrap();
            assert_eq!(completion.tokens.len(), 20);
            fleet.check(&completion, &issued.prompt);
            assert_eq!(version_of(&fleet.sample_completion(100 + version).await), version);
            fleet.is_sound();
        }
        for fake in fleet.fakes.iter().filter(|fake| !fake.is_awake()) {
            fake.restart().await;
        }
        let serve = async {
            while !(fleet.router.replicas().iter().all(|replica| replica.health == Health::Serving)
                && fleet.fakes.iter().all(|fake| fake.label().starts_with("levade-13-")))
            {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let serve = tokio::time::timeout(LONG, serve).await;
        assert!(serve.is_ok(), "{:?}", fleet.router.replicas());
        fleet.is_sound();
    }
}
