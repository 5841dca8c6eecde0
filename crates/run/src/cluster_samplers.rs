//! `[cluster.samplers]`: connects to the servers that sample for a recipe. If the recipe asks for
//! it, starts and supervises them.

mod process;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use levade_model::ModelFiles;
use levade_policy::process_time::{sleep, with_timeout};
use levade_policy::{Learner, LoraOptions, PolicyError, Precision, Sampler, TokenBytes};
use levade_recipe::{InFlightKey, Placement, Recipe, SamplersKeys, ServersKeys, WeightsKey};
use levade_remote::{
    ColocatedServer, Colocation, GroupBackend, InFlight, PublishingLearner, RemoteLearner, Router,
    RouterOptions, Server, ServerKind, ServerOptions, TokenizerProbe, WeightBroadcast,
};
use levade_text::{Chat, Vocabulary};
use levade_trainer::ExtraFiles;

use crate::child::ChildTask;
use crate::display;
use crate::failure::unusable;
use crate::gpus::GpuAllocation;
use crate::host::Host;
use process::{ServerProcess, ServerSpec};

/// Text whose log-probabilities are compared to check servers. Like a completion, it contains
/// words, numbers and punctuation.
const PROBE: &str = "A farmer has 17 cows, buys 25 more, and sells 8 of them. How many are left? \
                     First 17 + 25 = 42, then 42 - 8 = 34, so the answer is 34.";

/// Name of the directory in the run directory for published weights and the logs of servers.
const SUBDIR: &str = "samplers";

/// Interval at which the file of addresses is polled.
const FOLLOW: Duration = Duration::from_secs(5);

/// Interval at which a starting server is polled. It is also the timeout for the server's
/// description of itself.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Requirements that servers must meet: the properties of the policy that they sample from.
pub struct Requirements<'a> {
    /// Name of the policy.
    pub name: &'a str,
    /// Model that the policy starts from.
    pub files: &'a ModelFiles,
    /// Maximum sequence length, in tokens.
    pub context: usize,
    /// Options of the policy's adapter. `None` if the policy has no adapter.
    pub lora: Option<&'a LoraOptions>,
    /// Chat format that renders the policy's prompts.
    pub chat: &'a Chat,
    /// Function that adds the missing files of a model directory, such as the tokenizer, to a
    /// directory of weights.
    pub companions: &'a ExtraFiles,
    /// Processes of the external learner, which hold the policy's weights. `None` if the embedded
    /// engine trains.
    pub group: Option<&'a RemoteLearner>,
    /// Handoff of the learner's devices. `None` if servers are not colocated with the learner.
    pub colocation: Option<&'a Arc<Colocation>>,
    /// GPUs of this machine, and their assignment to servers.
    pub gpus: GpuAllocation,
}

/// Creates the handoff of devices between the learner and the samplers of a recipe. Returns `None`
/// if they are not colocated.
pub fn colocation(recipe: &Recipe, group: &RemoteLearner) -> Option<Arc<Colocation>> {
    let samplers = recipe.cluster.samplers.as_ref()?.servers();
    let is_colocated = recipe.cluster.placement == Placement::Colocated;
    is_colocated.then(|| Colocation::new(Arc::new(group.clone()), samplers.start_timeout()))
}

/// Sampler and learner of a policy that servers sample from. They replace the policy's own sampler
/// and learner.
pub struct Handles {
    /// Sampler that distributes requests to all servers.
    pub sampler: Arc<dyn Sampler>,
    /// Learner that publishes its weights to the servers.
    pub learner: Arc<dyn Learner>,
}

/// Connects to the servers of a recipe under one router: running servers at configured addresses,
/// and servers that this function starts. Returns when one server responds. If devices are
/// colocated, returns when all servers respond. Started servers are added to `children`.
///
/// # Errors
/// Returns an error if a server cannot be started, if no server responds in time, or if the learner
/// exits first. Also returns an error, which names the missing flag, if a server was started with
/// unsuitable options.
pub async fn start(
    recipe: &Recipe,
    wants: &Requirements<'_>,
    learner: Arc<dyn Learner>,
    host: &Host,
    children: &mut Vec<ChildTask>,
) -> anyhow::Result<Option<Handles>> {
    let Some(samplers) = &recipe.cluster.samplers else { return Ok(None) };
    let keys = samplers.servers();
    let dir = recipe.run.folder.join(SUBDIR);
    let mut text_tokens = wants.chat.tokenizer().encode(PROBE);
    text_tokens.truncate(wants.context.saturating_sub(1).max(2));
    let push = create_broadcast(keys, wants);
    let publishing =
        PublishingLearner::new(Arc::clone(&learner), dir.join("weights"), text_tokens.clone())
            .with_broadcast(push.clone());
    let options = ServerOptions {
        push: push.clone(),
        ..create_server_options(samplers, wants, text_tokens.clone())
    };
    let mut named_servers = Vec::new();
    let mut processes = Vec::new();
    let model = dir.join("model");
    if keys.start {
        write_model(&model, wants, &learner).await?;
    }
    if let Some(colocation) = wants.colocation {
        colocation.make_room().await?;
    }
    if keys.start {
        for number in 0..keys.count {
            let backend = push.as_ref().map(|push| push.backend());
            let precision = recipe.engine.precision;
            let spec = ServerSpec::new(samplers, wants, &dir, &model, number, precision, backend)?;
            host.setup("sampler", format!("{} (log: {})", spec.name, display::path(&spec.log)));
            let server = Server::new(ServerOptions { url: spec.url.clone(), ..options.clone() })?;
            named_servers.push((spec.name.clone(), server));
            let may = wants.colocation.map(|colocation| colocation.starts());
            let name = format!("the sampler {}", spec.name);
            let (process, ended) = ServerProcess::start(spec, host.supervisor().clone(), may);
            processes.push(process);
            children.push(ChildTask { name, ended });
        }
    }
    let urls = keys.urls.iter().cloned().chain(read_urls(&keys.urls_file)?);
    for url in urls {
        let server = Server::new(ServerOptions { url: url.clone(), ..options.clone() })?;
        named_servers.push((url, server));
    }
    let start_timeout = if keys.start { keys.start_timeout() } else { options.silence };
    // A server that is still starting could not be put to sleep.
    let servers =
        wait_for_servers(&named_servers, &processes, start_timeout, wants.colocation.is_some());
    tokio::select! {
        there = servers => there?,
        // If the learner has exited, it must be restarted first.
        exit = wait_for_learner_exit(wants.group) => return Err(exit.into()),
    }
    for (name, server) in &named_servers {
        // Some servers may still be starting. Report only the servers that respond.
        if let Some(Ok(what)) = within_poll_interval(server.inspect()).await {
            host.setup("sampler", format!("{name}: {what}"));
        }
    }
    let server_names: Vec<String> = named_servers.iter().map(|(name, _)| name.clone()).collect();
    let running: Vec<_> = processes.iter().map(ServerProcess::running).collect();
    let server_handles: Vec<Server> =
        named_servers.iter().map(|(_, server)| server.clone()).collect();
    let router = Arc::new(
        create_router(keys, wants.name, text_tokens, named_servers)?.keep_alive(processes),
    );
    let learner: Arc<dyn Learner> = Arc::new(publishing);
    if let Some(colocation) = wants.colocation {
        let running = running.into_iter().map(Some).chain(std::iter::repeat(None));
        let sharer = |((name, server), running)| ColocatedServer { name, server, running };
        let sharers = server_names.into_iter().zip(server_handles).zip(running).map(sharer);
        colocation.colocate(router.clone(), sharers.collect(), push)?;
        return Ok(Some(Handles { sampler: colocation.sampler(router), learner }));
    }
    if !keys.urls_file.as_os_str().is_empty() {
        let fixed = keys.urls.iter().cloned().collect();
        let server_names = server_names.into_iter().collect();
        tokio::spawn(follow_addresses(
            keys.urls_file.clone(),
            Arc::downgrade(&router),
            options,
            fixed,
            server_names,
        ));
    }
    Ok(Some(Handles { sampler: router, learner }))
}

/// Follows a file of server addresses: adds a server to the router when its line appears, and
/// removes it when the line disappears. Ends when the router is dropped.
async fn follow_addresses(
    file: PathBuf,
    router: Weak<Router>,
    options: ServerOptions,
    fixed: BTreeSet<String>,
    mut known: BTreeSet<String>,
) {
    loop {
        tokio::time::sleep(FOLLOW).await;
        let Some(router) = router.upgrade() else { return };
        // A file that cannot be read, for example because it is being written, is read again later.
        let Ok(urls) = read_urls(&file) else { continue };
        let wanted: BTreeSet<String> = urls.into_iter().chain(fixed.iter().cloned()).collect();
        for url in wanted.difference(&known) {
            let joined = Server::new(ServerOptions { url: url.clone(), ..options.clone() })
                .and_then(|server| router.join(url.clone(), Arc::new(server)));
            match joined {
                Ok(()) => tracing::info!(url, "a sampler has joined"),
                Err(error) => tracing::warn!(url, %error, "a sampler cannot join"),
            }
        }
        for url in known.difference(&wanted) {
            router.leave(url);
        }
        known = wanted;
    }
}

async fn within_poll_interval<T>(work: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(POLL_INTERVAL, work).await.ok()
}

/// Reads server addresses from a file, one per line. Empty lines and lines that start with `#` are
/// ignored.
fn read_urls(file: &Path) -> anyhow::Result<Vec<String>> {
    if file.as_os_str().is_empty() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(file).map_err(|error| {
        unusable(format!(
            "cluster.samplers.urls_file: cannot read {}: {error}",
            display::path(file)
        ))
    })?;
    let lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(lines.map(str::to_owned).collect())
}

/// Creates the broadcast of weights into the servers' memory. Returns `None` if the recipe does not
/// enable the broadcast, or if it has no external learner.
fn create_broadcast(keys: &ServersKeys, wants: &Requirements<'_>) -> Option<Arc<WeightBroadcast>> {
    let learner = wants.group.filter(|_| keys.weights == WeightsKey::Group)?;
    let backend = if learner.description().layout.device.starts_with("cuda") {
        GroupBackend::Nccl
    } else {
        GroupBackend::Gloo
    };
    Some(Arc::new(WeightBroadcast::new(Arc::new(learner.clone()), backend)))
}

/// Creates the options of the connections to the servers.
fn create_server_options(
    samplers: &SamplersKeys,
    wants: &Requirements<'_>,
    tokens: Vec<u32>,
) -> ServerOptions {
    let keys = samplers.servers();
    let kind = match samplers {
        SamplersKeys::Vllm(_) => ServerKind::Vllm,
        SamplersKeys::Sglang(_) => ServerKind::Sglang,
    };
    let seconds = Duration::from_secs_f64;
    ServerOptions {
        key_env: (!keys.key_env.is_empty()).then(|| keys.key_env.clone()),
        adapters: wants.lora.is_some(),
        in_flight: match keys.in_flight {
            InFlightKey::Recompute => InFlight::Recompute,
            InFlightKey::Keep => InFlight::Keep,
        },
        tokens: Some(Arc::new(Vocabulary::new(wants.chat.tokenizer())) as Arc<dyn TokenBytes>),
        tokenizer: TokenizerProbe { text: wants.chat.tokenizer().decode(&tokens), tokens },
        tolerance: keys.tolerance,
        sleeps: wants.colocation.is_some(),
        response_timeout: seconds(keys.response_seconds),
        silence: seconds(keys.silent_seconds),
        update_timeout: seconds(keys.update_seconds),
        ..ServerOptions::new(kind, "", wants.files.config.vocabulary, wants.context)
    }
}

/// Writes the model directory that servers start with. It contains the learner's current weights,
/// or the base model if the learner trains an adapter.
async fn write_model(
    dir: &Path,
    wants: &Requirements<'_>,
    learner: &Arc<dyn Learner>,
) -> anyhow::Result<()> {
    if wants.lora.is_some() {
        let path = wants.files.path();
        if !path.is_dir() {
            return Err(unusable(format!(
                "{} is a single file, but servers of adapters start from a model directory; use \
                 the model in safetensors format",
                display::path(path)
            )));
        }
        // The base model never changes, so a link suffices.
        std::fs::remove_file(dir).ok();
        std::fs::create_dir_all(dir.parent().unwrap_or(dir))?;
        #[cfg(unix)]
        std::os::unix::fs::symlink(std::path::absolute(path)?, dir)?;
        return Ok(());
    }
    std::fs::create_dir_all(dir)?;
    learner.save(dir, false).await?;
    (wants.companions)(dir)?;
    Ok(())
}

/// Waits until the external learner exits. If there is no external learner, never returns.
async fn wait_for_learner_exit(group: Option<&RemoteLearner>) -> PolicyError {
    match group {
        Some(group) => group.wait_for_exit().await,
        None => std::future::pending().await,
    }
}

/// Waits until one server responds, or until all respond if `all` is true.
///
/// # Errors
/// Returns an error if a server was started with unsuitable options, exited soon after its start,
/// or did not respond before the timeout.
async fn wait_for_servers(
    named_servers: &[(String, Server)],
    processes: &[ServerProcess],
    start_timeout: Duration,
    all: bool,
) -> anyhow::Result<()> {
    let mut last = String::new();
    let found = with_timeout(start_timeout, async {
        loop {
            let mut answering = 0;
            for (name, server) in named_servers {
                match server.inspect().await {
                    Ok(_) => answering += 1,
                    Err(error) if error.is_transient() => last = format!(": {error}"),
                    Err(error) => {
                        return Err(unusable(format!(
                            "the sampler {name} cannot be used: {error}"
                        )));
                    }
                }
            }
            if answering == named_servers.len() || (answering > 0 && !all) {
                return Ok(());
            }
            if let Some(why) = processes.iter().find_map(ServerProcess::start_error) {
                return Err(unusable(why));
            }
            sleep(POLL_INTERVAL).await;
        }
    });
    let who = if all { "not every sampler" } else { "no sampler" };
    found.await.unwrap_or_else(|| {
        Err(anyhow::anyhow!("{who} responded within {} s{last}", start_timeout.as_secs()))
    })
}

fn create_router(
    keys: &ServersKeys,
    policy: &str,
    probe: Vec<u32>,
    named_servers: Vec<(String, Server)>,
) -> anyhow::Result<Router> {
    let seconds = Duration::from_secs_f64;
    let options = RouterOptions {
        policy: policy.to_owned(),
        max_waiting: usize::MAX,
        // Calls wait for a server that is being restarted.
        replica_timeout: keys.start_timeout(),
        tries: 3 + named_servers.len(),
        accept: seconds(keys.silent_seconds),
        silence: seconds(keys.silent_seconds),
        response_timeout: seconds(keys.response_seconds),
        // The sum of the timeouts for pausing, reading and probing.
        update_timeout: seconds(
            keys.update_seconds + 4.0 * keys.response_seconds + keys.silent_seconds,
        )
        .max(if keys.start { keys.start_timeout() } else { Duration::ZERO }),
        probe,
        probe_within: seconds(keys.silent_seconds),
        ..RouterOptions::default()
    };
    let named_servers = named_servers
        .into_iter()
        .map(|(name, server)| (name, Arc::new(server) as Arc<dyn Sampler>));
    Ok(Router::new(named_servers.collect(), options)?)
}

/// Returns the name of the precision that started servers use. A server's arguments can set another
/// precision.
fn dtype_name(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "float32",
        Precision::Bf16 => "bfloat16",
    }
}
