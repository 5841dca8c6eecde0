//! Drives vLLM or SGLang servers from another program, for `conformance/samplers.py`. Commands and
//! responses are lines of JSON. The first line names the servers: `{"kind": "vllm", "urls": [...],
//! "vocabulary": 320, "context": 256, "in_flight": "recompute"}`.
//!
//! The commands are `{"do": "adopt", "version": 1, "folder": "..."}`, `{"do": "sample", "id": 1,
//! "request": {...}}`, `{"do": "abort", "stream": 7}` and `{"do": "members"}`.
//!
//! With a learner (`"learner": {"url": "...", "token": "...", "weights": "group"}`), for
//! `conformance/push.py`, `{"do": "learn", "paths": [[1, 2, 3]], "rate": 0.001}` takes a step of
//! imitation learning, and `{"do": "publish", "version": 2}` makes all servers load the resulting
//! weights.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use levade_policy::{
    Completion, Content, Learner, Manifest, OptimParams, SampleRequest, Sampler, WeightsAt,
    WeightsRef,
};
use levade_remote::{
    GroupBackend, InFlight, LearnerOptions, LearnerRequirements, PublishingLearner, RemoteLearner,
    Router, RouterOptions, Server, ServerKind, ServerOptions, TokenizerProbe, WeightBroadcast,
};
use levade_rl::{Loss, PolicyLoss};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};
use serde::Deserialize;
use serde_json::{Value, json};

/// Servers to drive, and their options.
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
    /// Text of the tokenizer probe; `tokens` are its tokens.
    text: String,
    tokens: Vec<u32>,
    silent_seconds: f64,
    #[serde(rename = "adopt_seconds")]
    update_timeout_seconds: f64,
    #[serde(default)]
    learner: Option<Group>,
}

/// A group of PyTorch learners, and how its weights reach the servers.
#[derive(Deserialize)]
struct Group {
    url: String,
    token: String,
    weights: Way,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    #[serde(rename = "folder")]
    Dir,
    Group,
}

/// A learner, and its pushes.
struct LearnerHandle {
    learner: PublishingLearner,
    push: Option<Arc<WeightBroadcast>>,
}

impl LearnerHandle {
    async fn start(fleet: &Fleet, group: &Group) -> anyhow::Result<Self> {
        let seconds = Duration::from_secs_f64;
        let options = LearnerOptions {
            url: group.url.clone(),
            token: group.token.clone(),
            call: seconds(fleet.update_timeout_seconds),
            silence: seconds(fleet.silent_seconds),
            reconnect: Duration::from_secs(10),
            start: seconds(fleet.update_timeout_seconds),
        };
        let expected = LearnerRequirements {
            model_type: "llama".into(),
            vocabulary: fleet.vocabulary,
            context: fleet.context,
            reference: false,
            critic: false,
            lora: None,
            dtype: "f32".into(),
            export_dtype: "f32".into(),
        };
        let learner = RemoteLearner::connect(options, None, &expected).await?;
        let push = (group.weights == Way::Group)
            .then(|| Arc::new(WeightBroadcast::new(Arc::new(learner.clone()), GroupBackend::Gloo)));
        let learner = PublishingLearner::new(Arc::new(learner), "unused", fleet.tokens.clone())
            .with_broadcast(push.clone());
        Ok(LearnerHandle { learner, push })
    }

    async fn learn(&self, command: &Value) -> anyhow::Result<f64> {
        let paths: Vec<Vec<u32>> = serde_json::from_value(command["paths"].clone())?;
        let batch = TreeBatch::merge(&paths.into_iter().map(sequence_input).collect::<Vec<_>>())?;
        let sums = self
            .learner
            .forward_backward(Arc::new(batch), Loss::new(PolicyLoss::CrossEntropy))
            .await?;
        let params = OptimParams {
            learning_rate: command["rate"].as_f64().context("a rate")? as f32,
            beta1: 0.9,
            beta2: 0.99,
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: f32::INFINITY,
        };
        self.learner.optim_step(params).await?;
        Ok(sums.loss)
    }

    async fn publish(&self, router: &Router, command: &Value) -> anyhow::Result<()> {
        let version = command["version"].as_u64().context("a version")?;
        let weights = self.learner.publish(version).await?;
        Ok(router.update_weights(&weights).await?)
    }
}

fn sequence_input(tokens: Vec<u32>) -> SequenceInput {
    let term = Term { weight: 0.1, ..Term::default() };
    SequenceInput {
        targets: (1..tokens.len() as u32)
            .map(|index| SequenceTarget { index, temperature: 1.0, term })
            .collect(),
        tokens: tokens.into(),
    }
}

fn print_json(value: &Value) {
    println!("{value}");
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (sender, mut lines) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    let first = lines
        .recv()
        .await
        .context("stdin is empty, but its first line must describe the servers")?;
    let fleet: Fleet = serde_json::from_str(&first)?;
    let silence = fleet.silent_seconds;
    let update_timeout = fleet.update_timeout_seconds;
    let learning = match &fleet.learner {
        Some(group) => Some(Arc::new(LearnerHandle::start(&fleet, group).await?)),
        None => None,
    };
    let push = learning.as_ref().and_then(|learning| learning.push.clone());
    let mut servers = Vec::new();
    for url in &fleet.urls {
        let options = ServerOptions {
            adapters: fleet.adapters,
            push: push.clone(),
            in_flight: fleet.in_flight,
            tolerance: fleet.tolerance,
            tokenizer: TokenizerProbe { text: fleet.text.clone(), tokens: fleet.tokens.clone() },
            silence: Duration::from_secs_f64(silence),
            update_timeout: Duration::from_secs_f64(update_timeout),
            ..ServerOptions::new(fleet.kind, url, fleet.vocabulary, fleet.context)
        };
        let server = Server::new(options)?;
        match server.inspect().await {
            Ok(what) => print_json(&json!({ "looked": url, "what": what })),
            Err(error) => print_json(&json!({ "looked": url, "error": error.to_string() })),
        }
        servers.push((url.clone(), server));
    }
    let replicas = servers
        .iter()
        .map(|(url, server)| (url.clone(), Arc::new(server.clone()) as Arc<dyn Sampler>));
    let options = RouterOptions {
        probe: fleet.tokens.clone(),
        probe_every: Duration::from_secs(5),
        probe_within: Duration::from_secs_f64(silence),
        silence: Duration::from_secs_f64(silence),
        accept: Duration::from_secs_f64(silence),
        replica_timeout: Duration::from_secs_f64(update_timeout),
        update_timeout: Duration::from_secs_f64(update_timeout),
        max_wait: Duration::from_secs(5),
        tries: 20,
        ..RouterOptions::default()
    };
    let router = Arc::new(Router::new(replicas.collect(), options)?);
    while let Some(line) = lines.recv().await {
        let command: Value = serde_json::from_str(&line)?;
        match command["do"].as_str() {
            Some("adopt") => {
                let router = Arc::clone(&router);
                let servers = servers.clone();
                tokio::spawn(async move {
                    let update_error = update_from_dir(&router, &command)
                        .await
                        .err()
                        .map(|error| error.to_string());
                    let differences: Vec<_> =
                        servers.iter().map(|(_, server)| server.probe_difference()).collect();
                    print_json(
                        &json!({ "adopted": command["version"], "error": update_error, "difference": differences }),
                    );
                });
            }
            Some("sample") => {
                let router = Arc::clone(&router);
                tokio::spawn(async move {
                    let id = command["id"].clone();
                    let completion = sample(&router, &command["request"]).await;
                    print_json(&match completion {
                        Ok(completion) => {
                            json!({ "reply": id, "tokens": completion.tokens, "logprobs": completion.logprobs,
                            "top": completion.top, "versions": completion.versions, "finish": completion.finish,
                            "prompt_logprobs": completion.prompt_logprobs })
                        }
                        Err(error) => json!({ "reply": id, "error": error.to_string() }),
                    });
                });
            }
            Some("learn") => {
                let learning = learning.clone().context("a learner")?;
                print_json(&match learning.learn(&command).await {
                    Ok(loss) => json!({ "learnt": loss }),
                    Err(error) => json!({ "learnt": null, "error": error.to_string() }),
                });
            }
            Some("publish") => {
                let router = Arc::clone(&router);
                let servers = servers.clone();
                let learning = learning.clone().context("a learner")?;
                tokio::spawn(async move {
                    let update_error = learning
                        .publish(&router, &command)
                        .await
                        .err()
                        .map(|error| error.to_string());
                    let differences: Vec<_> =
                        servers.iter().map(|(_, server)| server.probe_difference()).collect();
                    let pushes = learning.push.as_ref().map(|push| push.counts());
                    print_json(
                        &json!({ "adopted": command["version"], "error": update_error, "difference": differences,
                        "pushes": pushes }),
                    );
                });
            }
            Some("abort") => {
                let ended = router.abort(command["stream"].as_u64()).await?;
                print_json(&json!({ "aborted": ended }));
            }
            Some("members") => print_json(&json!({ "members": router.replicas() })),
            _ => anyhow::bail!("unknown command {line}"),
        }
    }
    Ok(())
}

async fn sample(router: &Router, request: &Value) -> anyhow::Result<Completion> {
    let request: SampleRequest = serde_json::from_value(request.clone())?;
    Ok(router.sample(request).await?.collect(Duration::from_secs(3600)).await?)
}

async fn update_from_dir(router: &Router, command: &Value) -> anyhow::Result<()> {
    let dir = Path::new(command["folder"].as_str().context("`folder` is missing")?);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    let content = if names.iter().any(|name| name == "adapter_config.json") {
        Content::Adapter { base: "base".into() }
    } else {
        Content::Full
    };
    let manifest = Manifest::from_files(dir, content, &names)?;
    let version = command["version"].as_u64().context("a version")?;
    Ok(router.update_weights(&WeightsRef { version, at: WeightsAt::Manifest(manifest) }).await?)
}
