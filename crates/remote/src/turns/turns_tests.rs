use std::sync::atomic::Ordering;

use levade_policy::Completion;
use tempfile::TempDir;
use tokio::sync::Notify;

use super::testing::*;
use super::*;
use crate::router::Health;
use crate::server::testing::{Behaviour, Fake, Speaks, publish, request};
use crate::server::{InFlight, ServerOptions};

#[tokio::test]
async fn handoff_releases_devices_before_acquiring_them() {
    for speaks in ALL {
        let shared = Shared::new(&[speaks], false).await;
        shared.step().await;
        let (pause, sleep, weights, read, cache, resume) = match speaks {
            Speaks::Sglang => (
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
        let all = shared.asked();
        let from = all.iter().position(|asked| asked == pause).unwrap();
        assert_eq!(all[from..], [pause, sleep, "[onload]", "[optim_step]", "[step done]"], "{speaks:?}");
        shared.publishes(1).await.unwrap();
        let moves = ["[publish]", "[offload]", weights, read, cache, resume];
        assert_eq!(shared.asked(), moves, "{speaks:?}: the probe comes after it");
        assert_eq!(version_of(&shared.draws(1).await), 1);
        // Another call while the learner owns the devices moves nothing.
        shared.step().await;
        assert!(shared.asked().contains(&"[onload]".into()));
        shared.step().await;
        assert_eq!(shared.asked(), ["[optim_step]", "[step done]"], "{speaks:?}");
        assert!(shared.turns.spent() > Duration::ZERO);
        assert_eq!(shared.learner.handed_over(), Some(shared.turns.spent()));
        shared.is_sound();
    }
}

#[tokio::test]
async fn broadcast_precedes_offload_and_caches_follow() {
    for speaks in [Speaks::NewVllm, Speaks::Sglang] {
        let shared = Shared::new(&[speaks, speaks], true).await;
        for version in 1..4 {
            shared.step().await;
            shared.asked();
            shared.publishes(version).await.unwrap();
            let all = shared.asked();
            let at = |what: &str| all.iter().position(|asked| asked == what).unwrap();
            let last = |what: &str| all.iter().rposition(|asked| asked == what).unwrap();
            let cache = match speaks {
                Speaks::Sglang => "/continue_generation",
                _ => "/wake_up?tags=kv_cache",
            };
            assert_eq!(all.iter().filter(|asked| *asked == "[send]").count(), 2, "{all:?}");
            assert!(at("[offload all but weights]") < at("[send]"), "{all:?}");
            assert!(last("[send]") < at("[offload]") && at("[offload]") < at(cache), "{all:?}");
            assert!(!all.iter().any(|asked| asked.contains("collective_rpc") || asked.contains("from_disk")));
            assert_eq!(version_of(&shared.draws(version).await), version);
            shared.is_sound();
        }
        // A server that cannot receive the push reads the directory; the other one receives it.
        *shared.trainee.sender.fault.lock().unwrap() = crate::server::testing::SendFault::Dies;
        shared.step().await;
        shared.publishes(4).await.unwrap();
        assert_eq!(version_of(&shared.draws(9).await), 4);
        assert_eq!(shared.push.as_ref().unwrap().counts(), (6, 2));
        shared.is_sound();
    }
}

#[tokio::test]
async fn request_after_checkpoint_uses_last_adopted_weights() {
    for speaks in ALL {
        let shared = Shared::new(&[speaks, Speaks::NewVllm], false).await;
        shared.publishes(1).await.unwrap();
        let folder = TempDir::new().unwrap();
        shared.learner.save(folder.path(), true).await.unwrap();
        assert!(shared.fakes.iter().all(|fake| !fake.is_awake()));
        let (a, b) = tokio::join!(shared.draws(1), shared.draws(2));
        assert_eq!((version_of(&a), version_of(&b)), (1, 1), "{speaks:?}");
        assert!(shared.fakes.iter().all(Fake::is_awake));
        shared.is_sound();
    }
}

#[tokio::test]
async fn requests_wait_for_learner_call_and_resume() {
    for speaks in ALL {
        let shared = Shared::new(&[speaks], false).await;
        shared.publishes(1).await.unwrap();
        let under_way = request(1, 40);
        let mut stream = shared.sampler.sample(under_way.clone()).await.unwrap();
        let mut begun = Completion::default();
        while begun.tokens.len() < 4 {
            if let levade_policy::SampleEvent::Tokens { tokens, logprobs, version, .. } =
                stream.next().await.unwrap().unwrap()
            {
                begun.extend(&tokens, &logprobs, version);
            }
        }
        let waits = Arc::new(Notify::new());
        *shared.trainee.waits.lock().unwrap() = Some(waits.clone());
        let learner = shared.learner.clone();
        let step = tokio::spawn(async move { learner.optim_step(ADAM).await });
        while !shared.log.lock().unwrap().iter().any(|asked| asked == "[optim_step]") {
            sleep(Duration::from_millis(5)).await;
        }
        let mut late = std::pin::pin!(shared.draws(2));
        let early = tokio::time::timeout(Duration::from_secs(3), &mut late).await;
        assert!(early.is_err() && !step.is_finished(), "nobody is asked in his sleep: {speaks:?}");
        waits.notify_one();
        step.await.unwrap().unwrap();
        assert_eq!(version_of(&tokio::time::timeout(LONG, late).await.unwrap()), 1);
        stream.gather(&mut begun).await.unwrap();
        assert_eq!(begun.tokens.len(), 40);
        shared.check(&begun, &under_way.prompt);
        assert!(shared.router.members().iter().all(|member| member.health == Health::Serving));
        shared.is_sound();
    }
}

#[tokio::test]
async fn sleeping_servers_are_not_probed() {
    let shared = Shared::new(&[Speaks::NewVllm, Speaks::Sglang], false).await;
    shared.publishes(1).await.unwrap();
    shared.step().await;
    let draws = || -> usize {
        shared.fakes.iter().map(|f| f.asked("/inference").len() + f.asked("/generate").len()).sum()
    };
    let before = draws();
    sleep(Duration::from_millis(500)).await;
    assert_eq!(draws(), before);
    assert!(shared.fakes.iter().all(|fake| !fake.is_awake()));
    shared.publishes(2).await.unwrap();
    sleep(Duration::from_millis(500)).await;
    assert!(draws() > before, "they are again when they are awake");
    assert!(shared.router.members().iter().all(|member| member.health == Health::Serving));
    shared.is_sound();
}

#[tokio::test]
async fn restarted_server_sleeps_before_next_learner_call() {
    for speaks in ALL {
        let shared = Shared::new(&[speaks, Speaks::NewVllm], false).await;
        shared.publishes(1).await.unwrap();
        shared.step().await;
        shared.fakes[0].restart().await;
        assert!(shared.fakes[0].is_awake());
        shared.step().await;
        shared.is_sound();
        // An exited server holds no device. Once it is back, it is detected again.
        shared.fakes[0].kill();
        shared.step().await;
        shared.fakes[0].restart().await;
        shared.step().await;
        shared.is_sound();
        shared.fakes[0].kill();
        shared.publishes(2).await.unwrap();
        assert_eq!(version_of(&shared.draws(1).await), 2);
        // It comes back while the samplers own the devices, with the newest weights.
        shared.fakes[0].restart().await;
        let serve = async {
            while shared.router.members().iter().any(|member| member.health != Health::Serving) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LONG, serve).await.unwrap();
        shared.step().await;
        shared.is_sound();
    }
}

#[tokio::test]
async fn unresponsive_server_delays_learner_until_timeout() {
    let shared = Shared::with(&[Speaks::NewVllm], false, Duration::from_secs(2), true).await;
    shared.publishes(1).await.unwrap();
    // The server is still starting, so its process may have allocated device memory.
    shared.fakes[0].kill();
    let error = shared.learner.optim_step(ADAM).await.unwrap_err();
    let want = "to give its devices to the learner: ";
    assert!(matches!(&error, PolicyError::Deadline(_, what) if what.contains(want)), "{error}");
    // The server answers after a while.
    let (step, ()) = tokio::join!(shared.learner.optim_step(ADAM), async {
        sleep(Duration::from_millis(700)).await;
        shared.fakes[0].restart().await;
    });
    step.unwrap();
    // The server's process has exited.
    shared.fakes[0].kill();
    shared.lives[0].send_replace(false);
    assert!(!*shared.turns.starts().borrow(), "and must not begin again before its turn");
    shared.step().await;
    shared.is_sound();
    let weights = shared.learner.publish(2).await.unwrap();
    let (adopted, ()) = tokio::join!(shared.sampler.adopt(&weights), async {
        shared.turns.starts().wait_for(|may| *may).await.unwrap();
        shared.fakes[0].restart().await;
        shared.lives[0].send_replace(true);
    });
    adopted.unwrap();
    assert_eq!(version_of(&shared.draws(1).await), 2);
    shared.is_sound();
}

#[tokio::test]
async fn managed_servers_are_checked_once_and_after_failures() {
    for started in [true, false] {
        let patience = Duration::from_secs(2);
        let shared = Shared::with(&[Speaks::NewVllm, Speaks::NewVllm], false, patience, started).await;
        shared.publishes(1).await.unwrap();
        let asked = || shared.fakes.iter().map(|fake| fake.asked("/weight_info").len()).sum::<usize>();
        shared.step().await;
        let before = asked();
        for _ in 0..5 {
            shared.step().await;
        }
        // External servers can be restarted at any time.
        assert_eq!(asked() - before, if started { 0 } else { 2 * 5 });
        shared.trainee.dies.store(true, Ordering::Relaxed);
        shared.learner.optim_step(ADAM).await.unwrap_err();
        shared.trainee.dies.store(false, Ordering::Relaxed);
        let before = asked();
        shared.step().await;
        assert_eq!(asked() - before, 2, "they are looked at again");
        // A new handoff starts without earlier knowledge.
        shared.publishes(2).await.unwrap();
        shared.step().await;
        assert!(shared.fakes.iter().all(|fake| !fake.is_awake()));
        shared.is_sound();
    }
}

#[tokio::test]
async fn sleep_failure_names_missing_flag_or_server() {
    for (speaks, without, flag) in [
        (Speaks::NewVllm, "sleep mode", "--enable-sleep-mode"),
        (Speaks::OldVllm, "sleep mode", "--enable-sleep-mode"),
        (Speaks::Sglang, "memory saver", "--enable-memory-saver"),
    ] {
        let fake = Fake::with(speaks, Behaviour { without, ..Behaviour::default() }).await;
        fake.server(InFlight::Recompute).look().await.unwrap();
        let options = ServerOptions { sleeps: true, ..fake.options(InFlight::Recompute) };
        let server = Server::new(options).unwrap();
        let error = server.look().await.unwrap_err();
        assert!(error.to_string().contains(flag) && !error.may_pass(), "{error}");
        let error = server.sleep().await.unwrap_err();
        assert!(error.to_string().contains(flag), "one that was started again is looked at, too: {error}");
        let shared = Shared::new(&[speaks], false).await;
        shared.publishes(1).await.unwrap();
        let log = Some(shared.log.clone());
        shared.asked();
        shared.fakes[0].set(Behaviour { refuses_sleep: true, log: log.clone(), ..Behaviour::default() });
        let error = shared.learner.optim_step(ADAM).await.unwrap_err().to_string();
        assert!(error.contains("Memory usage increased") && error.contains(&shared.fakes[0].url), "{error}");
        assert!(
            !shared.log.lock().unwrap().iter().any(|asked| asked == "[onload]"),
            "the learner stays away"
        );
        // Requests are served even so, and the next learner call can acquire the devices.
        assert_eq!(version_of(&shared.draws(1).await), 1);
        shared.fakes[0].set(Behaviour { log, ..Behaviour::default() });
        shared.step().await;
        shared.is_sound();
    }
}

#[tokio::test]
async fn exited_learner_fails_calls_without_hanging() {
    let shared = Shared::new(&[Speaks::NewVllm], false).await;
    shared.publishes(1).await.unwrap();
    // The learner is offloaded: servers keep sampling, and its next call reports that it has
    // exited.
    shared.trainee.dies.store(true, Ordering::Relaxed);
    assert_eq!(version_of(&shared.draws(1).await), 1);
    let error = shared.learner.optim_step(ADAM).await.unwrap_err();
    assert!(matches!(error, PolicyError::Stopped(_)), "{error}");
    // The learner owns the devices: requests for them fail.
    let reply = async { shared.sampler.sample(request(2, 4)).await?.collect(LONG).await };
    let error = tokio::time::timeout(LONG, reply).await.unwrap().unwrap_err();
    assert!(matches!(error, PolicyError::Stopped(_)), "{error}");
    let weights = publish(shared.root.path(), 2);
    let error = shared.sampler.adopt(&weights).await.unwrap_err();
    assert!(error.to_string().contains("the learner stopped"), "{error}");
}

#[tokio::test]
async fn handoff_completes_if_its_caller_is_cancelled() {
    let shared = Shared::new(&[Speaks::NewVllm, Speaks::Sglang], false).await;
    shared.publishes(1).await.unwrap();
    for version in 2..8 {
        let wait = Duration::from_millis(version * 3);
        tokio::time::timeout(wait, shared.learner.optim_step(ADAM)).await.ok();
        shared.step().await;
        let weights = shared.learner.publish(version).await.unwrap();
        tokio::time::timeout(wait, shared.sampler.adopt(&weights)).await.ok();
        assert_eq!(version_of(&shared.draws(version).await), version);
        shared.is_sound();
    }
}

/// Servers exit while they sleep, wake, fall asleep and sample, and are restarted at arbitrary
/// times.
#[tokio::test]
async fn server_exits_never_break_device_ownership() {
    for pushes in [false, true] {
        let shared = Shared::new(&[Speaks::NewVllm, Speaks::Sglang], pushes).await;
        shared.publishes(1).await.unwrap();
        let log = Some(shared.log.clone());
        let plain = || Behaviour { log: log.clone(), ..Behaviour::default() };
        for version in 2..14u64 {
            let asked = request(version, 20);
            let stream = shared.sampler.sample(asked.clone()).await.unwrap();
            let fake = &shared.fakes[(version % 2) as usize];
            match version % 6 {
                0 => fake.set(Behaviour { dies_sleeping: true, ..plain() }),
                1 => fake.kill(),
                2 => fake.set(Behaviour { dies_waking: true, ..plain() }),
                3 => fake.set(Behaviour { dies_reading: true, ..plain() }),
                4 => fake.restart().await,
                _ => {}
            }
            sleep(Duration::from_millis(20)).await;
            shared.step().await;
            if version % 6 < 2 {
                fake.restart().await;
            }
            shared.step().await;
            shared.publishes(version).await.unwrap();
            fake.set(plain());
            if (2..4).contains(&(version % 6)) {
                fake.restart().await;
            }
            let reply = stream.collect(LONG).await.unwrap();
            assert_eq!(reply.tokens.len(), 20);
            shared.check(&reply, &asked.prompt);
            assert_eq!(version_of(&shared.draws(100 + version).await), version);
            shared.is_sound();
        }
        for fake in shared.fakes.iter().filter(|fake| !fake.is_awake()) {
            fake.restart().await;
        }
        let serve = async {
            let serves = |member: &crate::MemberStatus| member.health == Health::Serving;
            let is_new = |fake: &Fake| fake.label().starts_with("levade-13-");
            while !(shared.router.members().iter().all(serves) && shared.fakes.iter().all(is_new)) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let serve = tokio::time::timeout(LONG, serve).await;
        assert!(serve.is_ok(), "{:?}", shared.router.members());
        shared.is_sound();
    }
}
