use levade_policy::{
    Completion, FinishReason, Grammar, Manifest, PolicyError, SampleEvent, SamplingParams,
    WeightsAt,
};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use super::testing::*;
use super::*;
use crate::{GroupBackend, Health, Router, WeightBroadcast};

pub(super) const ALL: [ServerApi; 3] = [ServerApi::NewVllm, ServerApi::OldVllm, ServerApi::Sglang];
const LONG: Duration = Duration::from_secs(30);

pub(super) async fn complete(
    sampler: &dyn Sampler,
    request: SampleRequest,
) -> Result<Completion, PolicyError> {
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
    let sequence = [prompt, &completion.tokens].concat();
    let mut versions = Vec::new();
    completion.versions.iter().for_each(|run| versions.extend(vec![run.version; run.len as usize]));
    near(&completion.logprobs, &expected(&sequence, prompt.len(), |i| versions[i]));
}

#[tokio::test]
async fn completions_match_loaded_weights() {
    for api in ALL {
        let fake = Fake::new(api).await;
        let dir = TempDir::new().unwrap();
        let server = fake.server(InFlight::Recompute);
        assert!(server.inspect().await.unwrap().contains(" with m"));
        server.update_weights(&publish(dir.path(), 4)).await.unwrap();
        assert_eq!(server.version().await.unwrap(), 4, "{api:?}");
        assert!(server.probe_difference().unwrap().max < 1e-5);
        let mut issued = request(1, 12);
        issued.params.top_logprobs = 3;
        let completion = complete(&server, issued.clone()).await.unwrap();
        assert_eq!((completion.tokens.len(), completion.finish), (12, FinishReason::Length));
        assert_eq!(completion.versions.len(), 1);
        assert_eq!(completion.versions[0].version, 4);
        check(&completion, &issued.prompt);
        if api != ServerApi::Sglang {
            assert!(completion.top.iter().all(|top| top.len() == 3 && top[0].1 >= top[2].1));
        }
        // A completion ends at a stop ID, or at a stop string that its tokens spell; both are
        // included.
        let mut stopped = issued.clone();
        stopped.params.stop_ids = vec![completion.tokens[5]];
        let stopped = complete(&server, stopped).await.unwrap();
        assert_eq!(stopped.finish, FinishReason::StopId);
        let first = completion.tokens.iter().position(|id| *id == completion.tokens[5]).unwrap();
        assert_eq!(stopped.tokens[..], completion.tokens[..=first]);
        let bytes = server.0.options.tokens.clone().unwrap();
        let spelt: Vec<u8> = completion.tokens[2..4]
            .iter()
            .flat_map(|id| bytes.token_bytes(*id).unwrap().to_vec())
            .collect();
        let mut spells = issued.clone();
        spells.params.stop_strings = vec![String::from_utf8(spelt).unwrap()];
        let spelt = complete(&server, spells).await.unwrap();
        assert_eq!((spelt.tokens.len(), spelt.finish), (4, FinishReason::StopString));
        // A full context ends a longer completion.
        let long = complete(&server, request(2, 500)).await.unwrap();
        assert_eq!((long.tokens.len(), long.finish), (61, FinishReason::Context));
        // Prompt log-probabilities require temperature 1.
        let mut scored = request(3, 0);
        scored.params =
            SamplingParams { max_tokens: 0, prompt_logprobs: Some(0), ..SamplingParams::default() };
        let scored = complete(&server, scored).await.unwrap();
        assert_eq!((scored.prompt_logprobs.len(), scored.tokens.len()), (2, 0));
    }
}

#[tokio::test]
async fn request_contains_seed_and_parameters() {
    let fake = Fake::new(ServerApi::NewVllm).await;
    let server = fake.server(InFlight::Recompute);
    for stream in [1, 1, 2] {
        complete(&server, request(stream, 2)).await.unwrap();
    }
    let issued = fake.requests("/inference/v1/generate");
    let generate_calls: Vec<_> = issued.iter().filter(|body| body["stream"] == true).collect();
    let seeds: Vec<_> = generate_calls
        .iter()
        .map(|body| body["sampling_params"]["seed"].as_u64().unwrap())
        .collect();
    assert!(seeds[0] == seeds[1] && seeds[0] != seeds[2], "{seeds:?}");
    assert_eq!(generate_calls[0]["sampling_params"]["ignore_eos"], true);
    assert_eq!(generate_calls[0]["cache_salt"], "as started");
}

#[tokio::test]
async fn cpu_server_with_chunked_prefill_gets_no_seed() {
    for (without, has) in [("GPU", false), ("GPU and chunks", true), ("", true)] {
        let fake = Fake::new(ServerApi::NewVllm).await;
        fake.set(Behavior { without, ..Behavior::default() });
        complete(&fake.server(InFlight::Recompute), request(1, 2)).await.unwrap();
        let issued = fake.requests("/inference/v1/generate");
        let generate_calls = issued.iter().find(|body| body["stream"] == true).unwrap();
        assert_eq!(generate_calls["sampling_params"].get("seed").is_some(), has, "{without}");
    }
}

/// Samples 40 tokens from a server that has version 1, loads version 2 once `start` of them have
/// arrived, and checks that each token has the version that sampled it.
async fn across(server: &Server, start: usize, update: impl AsyncFnOnce(), what: &str) {
    let issued = request(1, 40);
    let mut stream = server.sample(issued.clone()).await.unwrap();
    let mut completion = Completion::default();
    while completion.tokens.len() < start {
        if let SampleEvent::Tokens { tokens, logprobs, version, .. } =
            stream.next().await.unwrap().unwrap()
        {
            completion.extend(&tokens, &logprobs, version);
        }
    }
    update().await;
    stream.gather(&mut completion).await.unwrap();
    assert_eq!(completion.tokens.len(), 40, "{what}");
    let versions: Vec<u64> = completion.versions.iter().map(|run| run.version).collect();
    assert_eq!(versions, [1, 2], "{what}");
    check(&completion, &issued.prompt);
}

#[tokio::test]
async fn weight_update_during_completion_changes_token_versions() {
    for (api, in_flight) in [
        (ServerApi::NewVllm, InFlight::Keep),
        (ServerApi::Sglang, InFlight::Keep),
        (ServerApi::NewVllm, InFlight::Recompute),
        (ServerApi::OldVllm, InFlight::Recompute),
        (ServerApi::Sglang, InFlight::Recompute),
    ] {
        let fake = Fake::new(api).await;
        let dir = TempDir::new().unwrap();
        let server = fake.server(in_flight);
        server.update_weights(&publish(dir.path(), 1)).await.unwrap();
        let update = async || server.update_weights(&publish(dir.path(), 2)).await.unwrap();
        across(&server, 8, update, &format!("{api:?} {in_flight:?}")).await;
        let generate_calls =
            |route| fake.requests(route).iter().filter(|body| body["stream"] == true).count();
        let times = generate_calls("/inference/v1/generate") + generate_calls("/generate");
        assert_eq!(times, if in_flight == InFlight::Keep { 1 } else { 2 });
        assert!(server.paused().await.unwrap() > Duration::ZERO);
    }
}

#[tokio::test]
async fn abort_ends_completion_and_hang_times_out() {
    let fake = Fake::new(ServerApi::NewVllm).await;
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
    fake.set(Behavior { hangs_after: Some(3), ..Behavior::default() });
    let start = Instant::now();
    let error = complete(&server, request(11, 50)).await.unwrap_err();
    assert!(
        error.to_string().contains("waited 2s for token 4 of a completion from vLLM at"),
        "{error}"
    );
    assert!(error.is_transient() && start.elapsed() < Duration::from_secs(10));
    fake.life_paused();
    let error = complete(&server, request(12, 50)).await.unwrap_err();
    assert!(error.to_string().contains("which reports that it is paused"), "{error}");
    fake.set(Behavior { exits_after: Some(3), ..Behavior::default() });
    fake.restart().await;
    let error = complete(&server, request(13, 50)).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
}

#[tokio::test]
async fn unsupported_parameters_are_named_in_error() {
    let penalised =
        SamplingParams { presence_penalty: 1.0, sampled_before: 1, ..SamplingParams::default() };
    let formed = SamplingParams {
        grammar: Some(Grammar::JsonObject),
        stop_ids: vec![1],
        ..SamplingParams::default()
    };
    let scored =
        SamplingParams { prompt_logprobs: Some(0), temperature: 0.5, ..SamplingParams::default() };
    let repeated = SamplingParams { repetition_penalty: 1.2, ..SamplingParams::default() };
    for api in [ServerApi::NewVllm, ServerApi::Sglang] {
        let fake = Fake::new(api).await;
        let server = fake.server(InFlight::Recompute);
        let why = async |params: &SamplingParams| {
            let issued = SampleRequest { params: params.clone(), ..request(1, 4) };
            server.sample(issued).await.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert!(why(&penalised).await.contains("presence_penalty"));
        assert!(why(&formed).await.contains("servers do not support a grammar"));
        assert!(why(&scored).await.contains("prompt_logprobs at temperature 0.5"));
        assert_eq!(
            why(&repeated).await.contains("repetition_penalty = 1.2"),
            api == ServerApi::Sglang
        );
        let outside = SampleRequest { prompt: vec![VOCABULARY as u32], ..request(1, 4) };
        assert!(
            server
                .sample(outside)
                .await
                .unwrap_err()
                .to_string()
                .contains("outside the model's vocabulary")
        );
        let long = SampleRequest { prompt: vec![1; 64], ..request(1, 4) };
        assert!(matches!(
            server.sample(long).await.unwrap_err(),
            PolicyError::PromptTooLong { .. }
        ));
    }
}

#[tokio::test]
async fn inspect_names_missing_server_flags() {
    let plain = Behavior::default;
    let vllm = ServerApi::NewVllm;
    for (behavior, adapters, want) in [
        (behavior_without("dev mode"), false, "VLLM_SERVER_DEV_MODE=1"),
        (behavior_without("scale out"), false, "--enable-scale-out"),
        (behavior_without("adapters"), true, "--enable-lora"),
        (Behavior { raw: true, ..plain() }, false, "--logprobs-mode processed_logprobs"),
        (
            Behavior { other_tokenizer: true, ..plain() },
            false,
            "the server has a different tokenizer: token 2 of \"abcdef\"",
        ),
        (Behavior { context: Some(32), ..plain() }, false, "--max-model-len 64"),
    ] {
        let found = inspect_error(vllm, behavior, InFlight::Recompute, adapters).await;
        assert!(found.contains(want), "{found}");
    }
    for (flag, want) in [("lora", "--enable-lora"), ("max loras", "--max-loras 2")] {
        let found = inspect_error(vllm, behavior_without(flag), InFlight::Recompute, true).await;
        assert!(found.contains(want), "{found}");
    }
    for (flag, want) in [
        ("weight transfer", "receives weights over no backend"),
        ("gloo", "over the backend \"nccl\""),
    ] {
        let fake = Fake::with(vllm, behavior_without(flag)).await;
        let (server, ..) = sent(&fake, InFlight::Recompute).await;
        let error = server.inspect().await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(want)
                && text.contains("--weight-transfer-config '{\"backend\": \"gloo\"}'"),
            "{text}"
        );
        assert!(!error.is_transient());
        fake.server(InFlight::Recompute).inspect().await.unwrap();
    }
    let old = inspect_error(ServerApi::OldVllm, plain(), InFlight::Keep, false).await;
    assert!(old.contains("set in_flight = \"recompute\""), "{old}");
    let short = inspect_error(
        ServerApi::Sglang,
        Behavior { context: Some(32), ..plain() },
        InFlight::Keep,
        false,
    )
    .await;
    assert!(short.contains("--context-length 64"), "{short}");
    let fake = Fake::new(ServerApi::Sglang).await;
    let other = ServerOptions { kind: ServerKind::Vllm, ..fake.options(InFlight::Recompute) };
    let error = Server::new(other).unwrap().inspect().await.unwrap_err().to_string();
    assert!(error.contains("this is not a vLLM server"), "{error}");
    fake.kill();
    assert!(fake.server(InFlight::Keep).inspect().await.unwrap_err().is_transient());
}

async fn inspect_error(
    api: ServerApi,
    behavior: Behavior,
    in_flight: InFlight,
    adapters: bool,
) -> String {
    let fake = Fake::with(api, behavior).await;
    let options = ServerOptions { adapters, ..fake.options(in_flight) };
    let error = Server::new(options).unwrap().inspect().await.unwrap_err();
    assert!(!error.is_transient(), "{error}");
    error.to_string()
}

fn behavior_without(without: &'static str) -> Behavior {
    Behavior { without, ..Behavior::default() }
}

#[tokio::test]
async fn invalid_weight_directory_never_reaches_server() {
    let fake = Fake::new(ServerApi::NewVllm).await;
    let root = TempDir::new().unwrap();
    let server = fake.server(InFlight::Recompute);
    server.update_weights(&publish(root.path(), 1)).await.unwrap();
    let num_updates = fake.requests("/collective_rpc").len();
    type Damage = (&'static str, fn(&std::path::Path));
    let damage: [Damage; 4] = [
        ("instead of", |dir| {
            let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
            std::fs::write(dir.join("model.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("cannot read", |dir| std::fs::remove_file(dir.join("config.json")).unwrap()),
        ("has the checksum", |dir| {
            let mut bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
        }),
        ("cannot read", |dir| std::fs::remove_dir_all(dir).unwrap()),
    ];
    for (version, (want, damage)) in (2..).zip(damage) {
        let weights = publish(root.path(), version);
        damage(&dir_of(&weights));
        let error = server.update_weights(&weights).await.unwrap_err();
        assert!(error.to_string().contains(want), "{want}: {error}");
    }
    // Complete according to its checksums, but of another model.
    let weights = publish(root.path(), 9);
    let config = dir_of(&weights).join("config.json");
    let text =
        std::fs::read_to_string(&config).unwrap().replace("\"hidden_size\":4", "\"hidden_size\":8");
    std::fs::write(&config, text).unwrap();
    let WeightsAt::Manifest(manifest) = &weights.at else { panic!() };
    let names: Vec<String> = manifest.files.iter().map(|file| file.name.clone()).collect();
    let manifest =
        Manifest::from_files(&parent_of(&config), manifest.content.clone(), &names).unwrap();
    let error = server
        .update_weights(&WeightsRef { at: WeightsAt::Manifest(manifest), ..weights })
        .await
        .unwrap_err();
    assert!(error.to_string().contains("model.embed_tokens.weight"), "{error}");
    assert_eq!(fake.requests("/collective_rpc").len(), num_updates);
    assert_eq!(server.version().await.unwrap(), 1);
    complete(&server, request(1, 3)).await.unwrap();
    let memory = WeightsRef { version: 3, at: WeightsAt::Memory };
    assert!(
        server
            .update_weights(&memory)
            .await
            .unwrap_err()
            .to_string()
            .contains("published in the learner's memory")
    );
}

fn parent_of(file: &std::path::Path) -> std::path::PathBuf {
    file.parent().unwrap().to_owned()
}

#[tokio::test]
async fn probe_detects_server_that_kept_old_weights() {
    let fake = Fake::new(ServerApi::NewVllm).await;
    let root = TempDir::new().unwrap();
    let server = fake.server(InFlight::Recompute);
    fake.set(Behavior { keeps_weights: true, ..Behavior::default() });
    let error = server.update_weights(&publish(root.path(), 5)).await.unwrap_err().to_string();
    assert!(error.contains("computes different log-probabilities than the learner"), "{error}");
    assert_eq!(server.version().await.unwrap(), 0);
    let error = complete(&server, request(1, 3)).await.unwrap_err();
    assert!(error.to_string().contains("has not loaded the weights completely"), "{error}");
    fake.set(Behavior::default());
    server.update_weights(&publish(root.path(), 5)).await.unwrap();
    check(&complete(&server, request(1, 3)).await.unwrap(), &[3, 1, 4]);
}

#[tokio::test]
async fn adapters_are_loaded_side_by_side_and_unloaded() {
    for in_flight in [InFlight::Recompute, InFlight::Keep] {
        let fake = Fake::new(ServerApi::NewVllm).await;
        let root = TempDir::new().unwrap();
        let server =
            Server::new(ServerOptions { adapters: true, ..fake.options(in_flight) }).unwrap();
        let adapter = |version| {
            let weights = publish(root.path(), version);
            let dir = dir_of(&weights);
            std::fs::rename(dir.join("model.safetensors"), dir.join("adapter_model.safetensors"))
                .unwrap();
            let config = serde_json::json!({
                "peft_type": "LORA", "base_model_name_or_path": "m", "r": 2, "lora_alpha": 4.0, "bias": "none",
                "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
            });
            std::fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
            let names =
                ["adapter_config.json", "adapter_model.safetensors", PROBE].map(str::to_owned);
            let content = levade_policy::Content::Adapter { base: "m".into() };
            WeightsRef {
                version,
                at: WeightsAt::Manifest(Manifest::from_files(&dir, content, &names).unwrap()),
            }
        };
        server.update_weights(&adapter(3)).await.unwrap();
        let issued = request(1, 30);
        let mut stream = server.sample(issued.clone()).await.unwrap();
        let mut completion = Completion::default();
        if let SampleEvent::Tokens { tokens, logprobs, version, .. } =
            stream.next().await.unwrap().unwrap()
        {
            completion.extend(&tokens, &logprobs, version);
        }
        server.update_weights(&adapter(4)).await.unwrap();
        stream.gather(&mut completion).await.unwrap();
        let versions: Vec<u64> = completion.versions.iter().map(|run| run.version).collect();
        // A continued request stays with the adapter that it started with.
        assert_eq!(versions, if in_flight == InFlight::Keep { vec![3] } else { vec![3, 4] });
        check(&completion, &issued.prompt);
        assert_eq!(server.version().await.unwrap(), 4);
        assert_eq!(
            fake.requests("/v1/unload_lora_adapter").len(),
            usize::from(in_flight == InFlight::Recompute)
        );
    }
}

/// Creates a server that receives pushes from a learner that offers version 1.
async fn sent(fake: &Fake, in_flight: InFlight) -> (Server, Arc<Sender>, Arc<WeightBroadcast>) {
    let sender = Arc::new(Sender::default());
    let broadcast = Arc::new(WeightBroadcast::new(sender.clone(), GroupBackend::Gloo));
    broadcast.offer(1).await;
    let options = ServerOptions { push: Some(broadcast.clone()), ..fake.options(in_flight) };
    (Server::new(options).unwrap(), sender, broadcast)
}

#[path = "push_tests.rs"]
mod pushes;
