use levade_policy::{
    Completion, FinishReason, Grammar, Manifest, PolicyError, SampleEvent, SamplingParams, WeightsAt,
};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use super::testing::*;
use super::*;
use crate::{GroupBackend, Health, Pushing, Router};

pub(super) const ALL: [Speaks; 3] = [Speaks::NewVllm, Speaks::OldVllm, Speaks::Sglang];
const LONG: Duration = Duration::from_secs(30);

pub(super) async fn reply(sampler: &dyn Sampler, request: SampleRequest) -> Result<Completion, PolicyError> {
    sampler.sample(request).await?.collect(LONG).await
}

fn near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() < 1e-4, "{found:?}\n{expected:?}");
    }
}

/// Checks a completion's log-probabilities against the fake's table for the reported versions.
pub(super) fn check(completion: &Completion, prompt: &[u32]) {
    let path = [prompt, &completion.tokens].concat();
    let mut versions = Vec::new();
    completion.versions.iter().for_each(|run| versions.extend(vec![run.version; run.len as usize]));
    near(&completion.logprobs, &expected(&path, prompt.len(), |i| versions[i]));
}

#[tokio::test]
async fn completions_match_adopted_weights() {
    for speaks in ALL {
        let (fake, folder) = (Fake::new(speaks).await, TempDir::new().unwrap());
        let server = fake.server(InFlight::Recompute);
        assert!(server.look().await.unwrap().contains(" with m"));
        server.adopt(&publish(folder.path(), 4)).await.unwrap();
        assert_eq!(server.version().await.unwrap(), 4, "{speaks:?}");
        assert!(server.difference().unwrap().max < 1e-5);
        let mut asked = request(1, 12);
        asked.params.top_logprobs = 3;
        let completion = reply(&server, asked.clone()).await.unwrap();
        assert_eq!((completion.tokens.len(), completion.finish), (12, FinishReason::Length));
        assert_eq!(completion.versions.len(), 1);
        assert_eq!(completion.versions[0].version, 4);
        check(&completion, &asked.prompt);
        if speaks != Speaks::Sglang {
            assert!(completion.top.iter().all(|top| top.len() == 3 && top[0].1 >= top[2].1));
        }
        // A completion ends at a stop ID, or at a stop string that its tokens spell; both are
        // included.
        let mut stopped = asked.clone();
        stopped.params.stop_ids = vec![completion.tokens[5]];
        let stopped = reply(&server, stopped).await.unwrap();
        assert_eq!(stopped.finish, FinishReason::StopId);
        let first = completion.tokens.iter().position(|id| *id == completion.tokens[5]).unwrap();
        assert_eq!(stopped.tokens[..], completion.tokens[..=first]);
        let bytes = server.0.options.tokens.clone().unwrap();
        let spelt: Vec<u8> =
            completion.tokens[2..4].iter().flat_map(|id| bytes.token_bytes(*id).unwrap().to_vec()).collect();
        let mut spells = asked.clone();
        spells.params.stop_strings = vec![String::from_utf8(spelt).unwrap()];
        let spelt = reply(&server, spells).await.unwrap();
        assert_eq!((spelt.tokens.len(), spelt.finish), (4, FinishReason::StopString));
        // A full context ends a longer completion.
        let long = reply(&server, request(2, 500)).await.unwrap();
        assert_eq!((long.tokens.len(), long.finish), (61, FinishReason::Context));
        // Prompt log-probabilities require temperature 1.
        let mut scored = request(3, 0);
        scored.params =
            SamplingParams { max_tokens: 0, prompt_logprobs: Some(0), ..SamplingParams::default() };
        let scored = reply(&server, scored).await.unwrap();
        assert_eq!((scored.prompt_logprobs.len(), scored.tokens.len()), (2, 0));
    }
}

#[tokio::test]
async fn request_contains_seed_and_parameters() {
    let fake = Fake::new(Speaks::NewVllm).await;
    let server = fake.server(InFlight::Recompute);
    for stream in [1, 1, 2] {
        reply(&server, request(stream, 2)).await.unwrap();
    }
    let asked = fake.asked("/inference/v1/generate");
    let drawn: Vec<_> = asked.iter().filter(|body| body["stream"] == true).collect();
    let seeds: Vec<_> = drawn.iter().map(|body| body["sampling_params"]["seed"].as_u64().unwrap()).collect();
    assert!(seeds[0] == seeds[1] && seeds[0] != seeds[2], "{seeds:?}");
    assert_eq!(drawn[0]["sampling_params"]["ignore_eos"], true);
    assert_eq!(drawn[0]["cache_salt"], "as started");
}

#[tokio::test]
async fn cpu_server_with_chunked_prefill_gets_no_seed() {
    for (without, has) in [("GPU", false), ("GPU and chunks", true), ("", true)] {
        let fake = Fake::new(Speaks::NewVllm).await;
        fake.set(Behaviour { without, ..Behaviour::default() });
        reply(&fake.server(InFlight::Recompute), request(1, 2)).await.unwrap();
        let asked = fake.asked("/inference/v1/generate");
        let drawn = asked.iter().find(|body| body["stream"] == true).unwrap();
        assert_eq!(drawn["sampling_params"].get("seed").is_some(), has, "{without}");
    }
}

/// Samples 40 tokens from a server that has version 1, loads version 2 once `begun` of them have
/// arrived, and checks that each token has the version that sampled it.
async fn across(server: &Server, begun: usize, adopts: impl AsyncFnOnce(), what: &str) {
    let asked = request(1, 40);
    let mut stream = server.sample(asked.clone()).await.unwrap();
    let mut completion = Completion::default();
    while completion.tokens.len() < begun {
        if let SampleEvent::Tokens { tokens, logprobs, version, .. } = stream.next().await.unwrap().unwrap() {
            completion.extend(&tokens, &logprobs, version);
        }
    }
    adopts().await;
    stream.gather(&mut completion).await.unwrap();
    assert_eq!(completion.tokens.len(), 40, "{what}");
    let versions: Vec<u64> = completion.versions.iter().map(|run| run.version).collect();
    assert_eq!(versions, [1, 2], "{what}");
    check(&completion, &asked.prompt);
}

#[tokio::test]
async fn weight_update_during_completion_changes_token_versions() {
    for (speaks, in_flight) in [
        (Speaks::NewVllm, InFlight::Keep),
        (Speaks::Sglang, InFlight::Keep),
        (Speaks::NewVllm, InFlight::Recompute),
        (Speaks::OldVllm, InFlight::Recompute),
        (Speaks::Sglang, InFlight::Recompute),
    ] {
        let (fake, folder) = (Fake::new(speaks).await, TempDir::new().unwrap());
        let server = fake.server(in_flight);
        server.adopt(&publish(folder.path(), 1)).await.unwrap();
        let adopts = async || server.adopt(&publish(folder.path(), 2)).await.unwrap();
        across(&server, 8, adopts, &format!("{speaks:?} {in_flight:?}")).await;
        let drawn = |route| fake.asked(route).iter().filter(|body| body["stream"] == true).count();
        let times = drawn("/inference/v1/generate") + drawn("/generate");
        assert_eq!(times, if in_flight == InFlight::Keep { 1 } else { 2 });
        assert!(server.paused().await.unwrap() > Duration::ZERO);
    }
}

#[tokio::test]
async fn abort_ends_completion_and_hang_times_out() {
    let fake = Fake::new(Speaks::NewVllm).await;
    let server = fake.server(InFlight::Recompute);
    let mut stream = server.sample(request(9, 50)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    assert_eq!(server.abort(Some(9)).await.unwrap(), 1);
    let mut completion = Completion::default();
    stream.gather(&mut completion).await.unwrap();
    assert_eq!(completion.finish, FinishReason::Aborted);
    // A dropped stream ends the call too.
    drop(server.sample(request(10, 50)).await.unwrap());
    sleep(Duration::from_millis(200)).await;
    assert_eq!(server.0.calls.count(), 0);
    fake.set(Behaviour { hangs_after: Some(3), ..Behaviour::default() });
    let start = Instant::now();
    let error = reply(&server, request(11, 50)).await.unwrap_err();
    assert!(error.to_string().contains("waited 2s for token 4 of a reply from vLLM at"), "{error}");
    assert!(error.may_pass() && start.elapsed() < Duration::from_secs(10));
    fake.life_paused();
    let error = reply(&server, request(12, 50)).await.unwrap_err();
    assert!(error.to_string().contains("which says that somebody has paused it"), "{error}");
    fake.set(Behaviour { dies_after: Some(3), ..Behaviour::default() });
    fake.restart().await;
    let error = reply(&server, request(13, 50)).await.unwrap_err();
    assert!(error.may_pass(), "{error}");
}

#[tokio::test]
async fn unsupported_parameters_are_rejected_by_name() {
    let penalised = SamplingParams { presence_penalty: 1.0, drawn_before: 1, ..SamplingParams::default() };
    let formed =
        SamplingParams { grammar: Some(Grammar::JsonObject), stop_ids: vec![1], ..SamplingParams::default() };
    let scored = SamplingParams { prompt_logprobs: Some(0), temperature: 0.5, ..SamplingParams::default() };
    let repeated = SamplingParams { repetition_penalty: 1.2, ..SamplingParams::default() };
    for speaks in [Speaks::NewVllm, Speaks::Sglang] {
        let fake = Fake::new(speaks).await;
        let server = fake.server(InFlight::Recompute);
        let why = async |params: &SamplingParams| {
            let asked = SampleRequest { params: params.clone(), ..request(1, 4) };
            server.sample(asked).await.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert!(why(&penalised).await.contains("presence_penalty"));
        assert!(why(&formed).await.contains("a grammar is not passed on"));
        assert!(why(&scored).await.contains("prompt_logprobs at temperature 0.5"));
        assert_eq!(why(&repeated).await.contains("repetition_penalty = 1.2"), speaks == Speaks::Sglang);
        let outside = SampleRequest { prompt: vec![VOCABULARY as u32], ..request(1, 4) };
        assert!(
            server.sample(outside).await.unwrap_err().to_string().contains("outside the model's vocabulary")
        );
        let long = SampleRequest { prompt: vec![1; 64], ..request(1, 4) };
        assert!(matches!(server.sample(long).await.unwrap_err(), PolicyError::PromptTooLong { .. }));
    }
}

#[tokio::test]
async fn look_names_missing_server_flags() {
    let why = async |speaks, behaviour, in_flight, adapters| {
        let fake = Fake::with(speaks, behaviour).await;
        let options = ServerOptions { adapters, ..fake.options(in_flight) };
        let error = Server::new(options).unwrap().look().await.unwrap_err();
        assert!(!error.may_pass(), "{error}");
        error.to_string()
    };
    let without = |without| Behaviour { without, ..Behaviour::default() };
    let plain = Behaviour::default;
    let vllm = Speaks::NewVllm;
    for (behaviour, adapters, want) in [
        (without("dev mode"), false, "VLLM_SERVER_DEV_MODE=1"),
        (without("scale out"), false, "--enable-scale-out"),
        (without("adapters"), true, "--enable-lora"),
        (Behaviour { raw: true, ..plain() }, false, "--logprobs-mode processed_logprobs"),
        (
            Behaviour { other_tokenizer: true, ..plain() },
            false,
            "it has another tokenizer: token 2 of \"abcdef\"",
        ),
        (Behaviour { context: Some(32), ..plain() }, false, "--max-model-len 64"),
    ] {
        let found = why(vllm, behaviour, InFlight::Recompute, adapters).await;
        assert!(found.contains(want), "{found}");
    }
    for (flag, want) in [("lora", "--enable-lora"), ("max loras", "--max-loras 2")] {
        let found = why(vllm, without(flag), InFlight::Recompute, true).await;
        assert!(found.contains(want), "{found}");
    }
    for (flag, want) in
        [("weight transfer", "takes weights from nobody"), ("gloo", "from groups of \"nccl\"")]
    {
        let fake = Fake::with(vllm, without(flag)).await;
        let (server, ..) = sent(&fake, InFlight::Recompute).await;
        let error = server.look().await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(want) && text.contains("--weight-transfer-config '{\"backend\": \"gloo\"}'"),
            "{text}"
        );
        assert!(!error.may_pass());
        fake.server(InFlight::Recompute).look().await.unwrap();
    }
    let old = why(Speaks::OldVllm, plain(), InFlight::Keep, false).await;
    assert!(old.contains("set in_flight = \"recompute\""), "{old}");
    let short = why(Speaks::Sglang, Behaviour { context: Some(32), ..plain() }, InFlight::Keep, false).await;
    assert!(short.contains("--context-length 64"), "{short}");
    let fake = Fake::new(Speaks::Sglang).await;
    let other = ServerOptions { kind: ServerKind::Vllm, ..fake.options(InFlight::Recompute) };
    let error = Server::new(other).unwrap().look().await.unwrap_err().to_string();
    assert!(error.contains("this is no vLLM server"), "{error}");
    fake.kill();
    assert!(fake.server(InFlight::Keep).look().await.unwrap_err().may_pass());
}

#[tokio::test]
async fn invalid_weight_directory_never_reaches_server() {
    let (fake, root) = (Fake::new(Speaks::NewVllm).await, TempDir::new().unwrap());
    let server = fake.server(InFlight::Recompute);
    server.adopt(&publish(root.path(), 1)).await.unwrap();
    let given = fake.asked("/collective_rpc").len();
    type Damage = (&'static str, fn(&std::path::Path));
    let damage: [Damage; 4] = [
        ("instead of", |folder| {
            let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
            std::fs::write(folder.join("model.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("cannot read", |folder| std::fs::remove_file(folder.join("config.json")).unwrap()),
        ("has the checksum", |folder| {
            let mut bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
        }),
        ("cannot read", |folder| std::fs::remove_dir_all(folder).unwrap()),
    ];
    for (version, (want, damage)) in (2..).zip(damage) {
        let weights = publish(root.path(), version);
        damage(&folder_of(&weights));
        let error = server.adopt(&weights).await.unwrap_err();
        assert!(error.to_string().contains(want), "{want}: {error}");
    }
    // Complete according to its checksums, but of another model.
    let weights = publish(root.path(), 9);
    let config = folder_of(&weights).join("config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("\"hidden_size\":4", "\"hidden_size\":8");
    std::fs::write(&config, text).unwrap();
    let WeightsAt::Manifest(manifest) = &weights.at else { panic!() };
    let names: Vec<String> = manifest.files.iter().map(|file| file.name.clone()).collect();
    let manifest = Manifest::of(&folder_of_path(&config), manifest.content.clone(), &names).unwrap();
    let error = server.adopt(&WeightsRef { at: WeightsAt::Manifest(manifest), ..weights }).await.unwrap_err();
    assert!(error.to_string().contains("model.embed_tokens.weight"), "{error}");
    assert_eq!(fake.asked("/collective_rpc").len(), given);
    assert_eq!(server.version().await.unwrap(), 1);
    reply(&server, request(1, 3)).await.unwrap();
    let memory = WeightsRef { version: 3, at: WeightsAt::Memory };
    assert!(
        server.adopt(&memory).await.unwrap_err().to_string().contains("published in the learner's memory")
    );
}

fn folder_of_path(file: &std::path::Path) -> std::path::PathBuf {
    file.parent().unwrap().to_owned()
}

#[tokio::test]
async fn probe_detects_server_that_kept_old_weights() {
    let (fake, root) = (Fake::new(Speaks::NewVllm).await, TempDir::new().unwrap());
    let server = fake.server(InFlight::Recompute);
    fake.set(Behaviour { keeps_weights: true, ..Behaviour::default() });
    let error = server.adopt(&publish(root.path(), 5)).await.unwrap_err().to_string();
    assert!(error.contains("finds other log-probabilities than the learner"), "{error}");
    assert_eq!(server.version().await.unwrap(), 0);
    let error = reply(&server, request(1, 3)).await.unwrap_err();
    assert!(error.to_string().contains("has not adopted weights as a whole"), "{error}");
    fake.set(Behaviour::default());
    server.adopt(&publish(root.path(), 5)).await.unwrap();
    check(&reply(&server, request(1, 3)).await.unwrap(), &[3, 1, 4]);
}

#[tokio::test]
async fn adapters_are_loaded_side_by_side_and_unloaded() {
    for in_flight in [InFlight::Recompute, InFlight::Keep] {
        let (fake, root) = (Fake::new(Speaks::NewVllm).await, TempDir::new().unwrap());
        let server = Server::new(ServerOptions { adapters: true, ..fake.options(in_flight) }).unwrap();
        let adapter = |version| {
            let weights = publish(root.path(), version);
            let folder = folder_of(&weights);
            std::fs::rename(folder.join("model.safetensors"), folder.join("adapter_model.safetensors"))
                .unwrap();
            let config = serde_json::json!({
                "peft_type": "LORA", "base_model_name_or_path": "m", "r": 2, "lora_alpha": 4.0, "bias": "none",
                "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
            });
            std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
            let names = ["adapter_config.json", "adapter_model.safetensors", PROBE].map(str::to_owned);
            let content = levade_policy::Content::Adapter { base: "m".into() };
            WeightsRef { version, at: WeightsAt::Manifest(Manifest::of(&folder, content, &names).unwrap()) }
        };
        server.adopt(&adapter(3)).await.unwrap();
        let asked = request(1, 30);
        let mut stream = server.sample(asked.clone()).await.unwrap();
        let mut completion = Completion::default();
        if let SampleEvent::Tokens { tokens, logprobs, version, .. } = stream.next().await.unwrap().unwrap() {
            completion.extend(&tokens, &logprobs, version);
        }
        server.adopt(&adapter(4)).await.unwrap();
        stream.gather(&mut completion).await.unwrap();
        let versions: Vec<u64> = completion.versions.iter().map(|run| run.version).collect();
        // A continued request stays with the adapter that it started with.
        assert_eq!(versions, if in_flight == InFlight::Keep { vec![3] } else { vec![3, 4] });
        check(&completion, &asked.prompt);
        assert_eq!(server.version().await.unwrap(), 4);
        assert_eq!(
            fake.asked("/v1/unload_lora_adapter").len(),
            usize::from(in_flight == InFlight::Recompute)
        );
    }
}

/// Creates a server that receives pushes from a learner that offers version 1.
async fn sent(fake: &Fake, in_flight: InFlight) -> (Server, Arc<Sender>, Arc<Pushing>) {
    let sender = Arc::new(Sender::default());
    let pushing = Arc::new(Pushing::new(sender.clone(), GroupBackend::Gloo));
    pushing.offer(1).await;
    let options = ServerOptions { push: Some(pushing.clone()), ..fake.options(in_flight) };
    (Server::new(options).unwrap(), sender, pushing)
}

/// Returns how often a fake read a directory.
fn read(fake: &Fake) -> usize {
    fake.asked("/collective_rpc").len() + fake.asked("/update_weights_from_disk").len()
}

#[tokio::test]
async fn pushed_weights_change_token_versions() {
    for (speaks, in_flight) in [
        (Speaks::NewVllm, InFlight::Keep),
        (Speaks::NewVllm, InFlight::Recompute),
        (Speaks::Sglang, InFlight::Keep),
        (Speaks::Sglang, InFlight::Recompute),
    ] {
        let (fake, folder) = (Fake::new(speaks).await, TempDir::new().unwrap());
        let (server, _, pushing) = sent(&fake, in_flight).await;
        server.adopt(&publish(folder.path(), 1)).await.unwrap();
        let adopts = async || {
            pushing.offer(2).await;
            server.adopt(&publish(folder.path(), 2)).await.unwrap();
        };
        across(&server, 5, adopts, &format!("{speaks:?} {in_flight:?}")).await;
        assert_eq!((pushing.counts(), read(&fake), fake.half()), ((2, 0), 0, 0), "{speaks:?} {in_flight:?}");
        // The learner's weights have changed since; the published ones are in the directory.
        pushing.withdraw().await;
        server.adopt(&publish(folder.path(), 3)).await.unwrap();
        assert_eq!((pushing.counts(), read(&fake)), ((2, 0), 1), "{speaks:?} {in_flight:?}");
        assert_eq!(server.version().await.unwrap(), 3);
    }
}

#[tokio::test]
async fn failed_push_falls_back_to_directory_before_sampling() {
    let refuses = Behaviour { refuses_weights: true, ..Behaviour::default() };
    for speaks in [Speaks::NewVllm, Speaks::Sglang] {
        for fault in [SendFault::HasMovedOn, SendFault::Dies, SendFault::Hangs] {
            let (fake, root) = (Fake::new(speaks).await, TempDir::new().unwrap());
            let (server, sender, pushing) = sent(&fake, InFlight::Keep).await;
            server.adopt(&publish(root.path(), 1)).await.unwrap();
            let asked = request(1, 40);
            let stream = server.sample(asked.clone()).await.unwrap();
            *sender.fault.lock().unwrap() = fault;
            pushing.offer(2).await;
            server.adopt(&publish(root.path(), 2)).await.unwrap();
            let completion = stream.collect(LONG).await.unwrap();
            check(&completion, &asked.prompt);
            assert_eq!(completion.versions.last().unwrap().version, 2, "{speaks:?} {fault:?}");
            assert_eq!((pushing.counts(), read(&fake), fake.half()), ((1, 1), 1, 0), "{speaks:?} {fault:?}");
        }
        // A server that rejects all weights has none, and the learner does not wait for it.
        let (fake, root) = (Fake::new(speaks).await, TempDir::new().unwrap());
        let (server, sender, pushing) = sent(&fake, InFlight::Recompute).await;
        fake.set(refuses.clone());
        let begun = Instant::now();
        let error = server.adopt(&publish(root.path(), 1)).await.unwrap_err();
        assert!(error.to_string().contains("shapes differ"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        assert_eq!((pushing.counts(), server.version().await.unwrap()), ((0, 1), 0));
        assert_eq!(sender.sending.load(std::sync::atomic::Ordering::Relaxed), 0);
    }
}

#[tokio::test]
async fn server_exit_during_push_releases_learner() {
    for speaks in [Speaks::NewVllm, Speaks::Sglang] {
        let (fake, root) = (Fake::new(speaks).await, TempDir::new().unwrap());
        let (server, sender, pushing) = sent(&fake, InFlight::Recompute).await;
        fake.set(Behaviour { dies_reading: true, ..Behaviour::default() });
        let begun = Instant::now();
        let error = server.adopt(&publish(root.path(), 1)).await.unwrap_err();
        assert!(error.may_pass(), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        pushing.withdraw().await;
        assert_eq!(sender.sending.load(std::sync::atomic::Ordering::Relaxed), 0);
        fake.set(Behaviour::default());
        fake.restart().await;
        server.adopt(&publish(root.path(), 1)).await.unwrap();
        assert_eq!((server.version().await.unwrap(), read(&fake)), (1, 1), "it comes back by the folder");
        pushing.offer(2).await;
        server.adopt(&publish(root.path(), 2)).await.unwrap();
        assert_eq!(
            (server.version().await.unwrap(), pushing.counts()),
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
    let pushing = Arc::new(Pushing::new(sender.clone(), GroupBackend::Gloo));
    let adopt = async |router: &Router, version| {
        pushing.offer(version).await;
        router.adopt(&publish(root.path(), version)).await.unwrap();
        // The learner continues to train.
        pushing.withdraw().await;
        assert_eq!(sender.sending.load(std::sync::atomic::Ordering::Relaxed), 0);
    };
    let fakes = [Fake::new(Speaks::NewVllm).await, Fake::new(Speaks::Sglang).await];
    let members = fakes.iter().map(|fake| {
        let options = ServerOptions {
            silence: Duration::from_secs(1),
            push: pushes.then(|| pushing.clone()),
            ..fake.options(InFlight::Recompute)
        };
        (fake.url.clone(), Arc::new(Server::new(options).unwrap()) as Arc<dyn Sampler>)
    });
    let options = impatient(Duration::from_millis(200), Duration::from_secs(20));
    let router = Arc::new(Router::new(members.collect(), options).unwrap());
    adopt(&router, 1).await;
    let all_serve = async || {
        let serve = async {
            while router.members().iter().any(|member| member.health != Health::Serving) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LONG, serve).await.unwrap();
    };
    let mut replies = tokio::task::JoinSet::new();
    for version in 2..14 {
        if version % 4 == 2 {
            // If all queried servers reject weights, the weights count as faulty, so another server
            // must be serving.
            all_serve().await;
        }
        for stream in 0..4 {
            let (router, asked) = (router.clone(), request(version * 10 + stream, 20));
            let asked = SampleRequest { least_version: version - 1, ..asked };
            replies.spawn(async move { (version, reply(&*router, asked).await) });
        }
        sleep(Duration::from_millis(40)).await;
        let killed = &fakes[(version % 2) as usize];
        match version % 4 {
            0 => killed.set(Behaviour { dies_reading: true, ..Behaviour::default() }),
            1 => killed.kill(),
            2 => killed.set(Behaviour { refuses_weights: true, ..Behaviour::default() }),
            _ => {}
        }
        if version % 3 == 0 {
            *sender.fault.lock().unwrap() = SendFault::Dies;
        }
        adopt(&router, version).await;
        *sender.fault.lock().unwrap() = SendFault::None;
        killed.set(Behaviour::default());
        if version % 4 < 2 {
            killed.restart().await;
        }
        // All serving servers have these weights.
        for (member, fake) in router.members().iter().zip(&fakes) {
            if member.health == Health::Serving {
                assert!(
                    fake.label().starts_with(&format!("levade-{version}-")),
                    "{member:?} {}",
                    fake.label()
                );
            }
        }
    }
    while let Some(done) = replies.join_next().await {
        let (version, completion) = done.unwrap();
        let completion = completion.unwrap();
        assert_eq!(completion.tokens.len(), 20);
        assert!(completion.versions.iter().all(|run| run.version >= version - 1), "{completion:?}");
        check(&completion, &[3, 1, 4]);
    }
    all_serve().await;
    assert!(fakes.iter().all(|fake| fake.label().starts_with("levade-13-")));
    assert!(fakes.iter().all(|fake| fake.half() == 0));
    let (sent, missed) = pushing.counts();
    assert_eq!((sent > 8, missed > 3), (pushes, pushes), "{sent} {missed}");
}
