//! Drives servers of vLLM or SGLang from another program, for `conformance/samplers.py`: commands come as
//! lines of JSON, and so do answers. The first line says which servers: `{"kind": "vllm", "urls": [...],
//! "vocabulary": 320, "context": 256, "in_flight": "recompute"}`.
//!
//! Then `{"do": "adopt", "version": 1, "folder": "..."}`, `{"do": "sample", "id": 1, "request": {...}}`,
//! `{"do": "abort", "stream": 7}` and `{"do": "members"}`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use dressage_policy::{Completion, Content, Manifest, SampleRequest, Sampler, WeightsAt, WeightsRef};
use dressage_remote::{InFlight, Router, RouterOptions, Server, ServerKind, ServerOptions, TokenizerProbe};
use serde::Deserialize;
use serde_json::{Value, json};

/// Which servers, and how they are asked.
#[derive(Deserialize)]
struct Fleet {
    kind: ServerKind,
    urls: Vec<String>,
    vocabulary: usize,
    context: usize,
    in_flight: InFlight,
    tolerance: f32,
    #[serde(default)]
    adapters: bool,
    /// A text and its tokens.
    text: String,
    tokens: Vec<u32>,
    silent_seconds: f64,
    adopt_seconds: f64,
}

fn say(value: &Value) {
    println!("{value}");
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (sender, mut lines) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    let first = lines.recv().await.context("the first line says which servers")?;
    let fleet: Fleet = serde_json::from_str(&first)?;
    let (silence, adopt) = (fleet.silent_seconds, fleet.adopt_seconds);
    let mut servers = Vec::new();
    for url in &fleet.urls {
        let options = ServerOptions {
            adapters: fleet.adapters,
            in_flight: fleet.in_flight,
            tolerance: fleet.tolerance,
            tokenizer: TokenizerProbe { text: fleet.text.clone(), tokens: fleet.tokens.clone() },
            silence: Duration::from_secs_f64(silence),
            adopt: Duration::from_secs_f64(adopt),
            ..ServerOptions::new(fleet.kind, url, fleet.vocabulary, fleet.context)
        };
        let server = Server::new(options)?;
        match server.look().await {
            Ok(what) => say(&json!({ "looked": url, "what": what })),
            Err(error) => say(&json!({ "looked": url, "error": error.to_string() })),
        }
        servers.push((url.clone(), server));
    }
    let members =
        servers.iter().map(|(url, server)| (url.clone(), Arc::new(server.clone()) as Arc<dyn Sampler>));
    let options = RouterOptions {
        probe: fleet.tokens.clone(),
        probe_every: Duration::from_secs(5),
        probe_within: Duration::from_secs_f64(silence),
        silence: Duration::from_secs_f64(silence),
        accept: Duration::from_secs_f64(silence),
        patience: Duration::from_secs_f64(adopt),
        adopt: Duration::from_secs_f64(adopt),
        longest_wait: Duration::from_secs(5),
        tries: 20,
        ..RouterOptions::default()
    };
    let router = Arc::new(Router::new(members.collect(), options)?);
    while let Some(line) = lines.recv().await {
        let command: Value = serde_json::from_str(&line)?;
        match command["do"].as_str() {
            Some("adopt") => {
                let (router, servers) = (Arc::clone(&router), servers.clone());
                tokio::spawn(async move {
                    let adopted = adopt_folder(&router, &command).await.err().map(|error| error.to_string());
                    let apart: Vec<_> = servers.iter().map(|(_, server)| server.difference()).collect();
                    say(&json!({ "adopted": command["version"], "error": adopted, "difference": apart }));
                });
            }
            Some("sample") => {
                let router = Arc::clone(&router);
                tokio::spawn(async move {
                    let (id, reply) = (command["id"].clone(), sample(&router, &command["request"]).await);
                    say(&match reply {
                        Ok(reply) => json!({ "reply": id, "tokens": reply.tokens, "logprobs": reply.logprobs,
                            "top": reply.top, "versions": reply.versions, "finish": reply.finish,
                            "prompt_logprobs": reply.prompt_logprobs }),
                        Err(error) => json!({ "reply": id, "error": error.to_string() }),
                    });
                });
            }
            Some("abort") => {
                let ended = router.abort(command["stream"].as_u64()).await?;
                say(&json!({ "aborted": ended }));
            }
            Some("members") => say(&json!({ "members": router.members() })),
            _ => anyhow::bail!("unknown command {line}"),
        }
    }
    Ok(())
}

async fn sample(router: &Router, request: &Value) -> anyhow::Result<Completion> {
    let request: SampleRequest = serde_json::from_value(request.clone())?;
    Ok(router.sample(request).await?.collect(Duration::from_secs(3600)).await?)
}

async fn adopt_folder(router: &Router, command: &Value) -> anyhow::Result<()> {
    let folder = Path::new(command["folder"].as_str().context("a folder")?);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    let content = match names.iter().any(|name| name == "adapter_config.json") {
        true => Content::Adapter { base: "base".into() },
        false => Content::Whole,
    };
    let manifest = Manifest::of(folder, content, &names)?;
    let version = command["version"].as_u64().context("a version")?;
    Ok(router.adopt(&WeightsRef { version, at: WeightsAt::Manifest(manifest) }).await?)
}
