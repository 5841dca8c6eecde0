//! Implements `levade sandbox`, which runs untrusted code, either once or for HTTP clients.

use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use levade_http::Access;
use levade_sandbox::service::{Service, serve};
use levade_sandbox::{Demand, EndReason, Language, Limits, Options, Run, Sandbox, SandboxError};
use tokio::net::TcpListener;

use crate::failure::unusable;
use crate::screen::{self, Style};
use crate::stop::StopRequests;

/// Run untrusted code: from a file, or for HTTP clients
#[derive(Parser)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(ServeArgs),
    Run(RunArgs),
}

/// Serve SandboxFusion's API: /run_code and /run_jupyter
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade sandbox serve
  levade sandbox serve --python .venv --preload numpy --concurrency 8
  levade sandbox serve --bind 0.0.0.0:8080 --key-file keys.txt

  SANDBOX_FUSION_ENDPOINT=http://127.0.0.1:8080 python client.py")]
struct ServeArgs {
    /// Address to listen on; keys are required if other machines can reach it
    #[arg(long, default_value = "127.0.0.1:8080")]
    bind: SocketAddr,

    /// File with the accepted keys, one per line
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,

    /// Maximum number of concurrent runs [default: one per core]
    #[arg(long)]
    concurrency: Option<usize>,

    /// Maximum number of queued runs; additional runs are rejected with 429
    #[arg(long, default_value_t = 1024)]
    waiting: usize,

    /// Maximum timeout that a request can set, in seconds; requests with a longer timeout are
    /// rejected with 422
    #[arg(long, default_value_t = 300.0)]
    max_seconds: f64,

    /// Additional host name that the service accepts without a key [default: names of this machine]
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,

    /// Origin whose web pages can use the service without a key; `*` for all [default: none]
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,

    #[command(flatten)]
    jail: JailArgs,
}

/// Run a file, or standard input, and print its output
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade sandbox run script.py
  echo 'print(6 * 7)' | levade sandbox run -
  levade sandbox run steps.sh --seconds 60")]
struct RunArgs {
    /// File with the code; `-` for standard input
    file: PathBuf,

    /// Language of the code: python or bash [default: bash if the file name ends in .sh, else
    /// python]
    #[arg(long)]
    language: Option<String>,

    /// Timeout of the run, in seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,

    #[command(flatten)]
    jail: JailArgs,
}

/// Options of the sandbox, which `serve` and `run` share.
#[derive(clap::Args)]
struct JailArgs {
    /// Required protection, full or best-effort; code runs only if the machine supports this
    /// protection
    #[arg(long, default_value = "full")]
    protection: Demand,

    /// Python interpreter: a name, a file, or the directory of a virtual environment
    #[arg(long, default_value = "python3", value_name = "PATH")]
    python: PathBuf,

    /// Module that is imported before each run; can be repeated
    #[arg(long, value_name = "MODULE")]
    preload: Vec<String>,

    /// Additional file or directory that code can read; can be repeated
    #[arg(long, value_name = "PATH")]
    read: Vec<PathBuf>,

    /// Maximum memory of a run, in MiB
    #[arg(long, default_value_t = Limits::default().memory_mb)]
    memory_mb: u64,

    /// Limit memory by watching the runs, even if each run could have a cgroup
    #[arg(long, hide = true)]
    no_cgroup: bool,

    /// Maximum number of bytes of each output stream that are kept
    #[arg(long, default_value_t = 1 << 20)]
    output_bytes: usize,
}

impl JailArgs {
    fn sandbox_options(&self) -> Options {
        Options {
            python: self.python.clone(),
            preload: self.preload.clone(),
            read: self.read.clone(),
            protection: self.protection,
            cgroup: !self.no_cgroup,
            ..Options::default()
        }
    }

    fn run_limits(&self, seconds: f64) -> anyhow::Result<Limits> {
        let memory_mb = self.memory_mb;
        let output_bytes = self.output_bytes;
        let limits = Limits { seconds, memory_mb, output_bytes, ..Limits::default() };
        limits.check().map_err(unusable)?;
        Ok(limits)
    }
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let runtime = crate::create_runtime()?;
    match args.command {
        Command::Serve(args) => runtime.block_on(run_server(&args)),
        Command::Run(args) => runtime.block_on(run_once(&args)),
    }
}

/// Converts a sandbox error into an error of the command: a runtime failure, or an error that the
/// user can correct.
fn to_cli_error(error: SandboxError) -> anyhow::Error {
    match error {
        SandboxError::Busy { .. } | SandboxError::Broken(_) => error.into(),
        other => unusable(other.to_string()),
    }
}

async fn start_sandbox(options: Options) -> anyhow::Result<Sandbox> {
    let sandbox = Sandbox::start(options).await.map_err(to_cli_error)?;
    let style = Style::stderr();
    eprintln!("{} Python {}", style.dim("python    "), sandbox.python());
    eprintln!("{} {}", style.dim("protection"), sandbox.protection());
    let memory = if sandbox.has_cgroups() {
        "limited by a cgroup for each run"
    } else {
        "watched, without cgroups"
    };
    eprintln!("{} {memory}", style.dim("memory    "));
    for wall in &sandbox.protection().missing {
        eprintln!("{} no {}: {}", style.dim("note      "), wall.name, wall.why);
    }
    Ok(sandbox)
}

async fn run_server(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let keys = match &args.key_file {
        Some(path) => read_key_file(path)?,
        None if args.bind.ip().is_loopback() => Vec::new(),
        None => {
            return Err(unusable(format!(
                "without keys, every client that reaches {} could run code; name a file of keys \
                 with --key-file, or listen at 127.0.0.1",
                args.bind.ip()
            )));
        }
    };
    let limits = args.jail.run_limits(args.max_seconds)?;
    let access = Access::new(&args.allow_host, &args.allow_origin)
        .map_err(|error| unusable(error.to_string()))?;
    let bound = TcpListener::bind(args.bind).await;
    let listener =
        bound.with_context(|| format!("cannot listen at {}; choose another --bind", args.bind))?;
    let options = Options { waiting: args.waiting, ..args.jail.sandbox_options() };
    let options =
        Options { concurrency: args.concurrency.unwrap_or(options.concurrency), ..options };
    let service = Service::new(
        start_sandbox(options).await?,
        limits,
        &keys,
        access.with_address(args.bind.ip()),
    );
    let signals = StopRequests::listen()?;
    eprintln!("{} http://{}", Style::stderr().dim("serving   "), listener.local_addr()?);
    let first = || {
        let note = Style::stderr().dim("note      ");
        eprintln!(
            "{note} new runs are rejected; waiting for runs in flight (again to stop at once)"
        );
    };
    signals.serve(|stop| serve(&service, listener, stop), first).await
}

/// Reads API keys from a file that contains one key per line.
///
/// # Errors
/// Returns an error if the file cannot be read or contains no key.
fn read_key_file(path: &Path) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        unusable(format!("--key-file: cannot read {}: {error}", screen::path(path)))
    })?;
    let keys: Vec<String> =
        text.lines().map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect();
    if keys.is_empty() {
        return Err(unusable(format!(
            "the file {} (--key-file) contains no key; write one key per line",
            screen::path(path)
        )));
    }
    Ok(keys)
}

async fn run_once(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let name = match &args.language {
        Some(name) => name.as_str(),
        None if args.file.extension().is_some_and(|ending| ending == "sh") => "bash",
        None => "python",
    };
    let language = Language::from_name(name)
        .ok_or_else(|| unusable(format!("--language is {name:?}, but must be python or bash")))?;
    let mut code = String::new();
    let read = if args.file == Path::new("-") {
        std::io::stdin().read_to_string(&mut code).map(drop)
    } else {
        std::fs::read_to_string(&args.file).map(|text| code = text)
    };
    read.map_err(|error| unusable(format!("cannot read {}: {error}", screen::path(&args.file))))?;
    let limits = args.jail.run_limits(args.seconds)?;
    let sandbox = start_sandbox(args.jail.sandbox_options()).await?;
    let outcome =
        sandbox.run(&Run { limits, ..Run::new(language, code) }).await.map_err(to_cli_error)?;
    screen::print(&outcome.stdout.text());
    eprint!("{}", outcome.stderr.text());
    let end = match outcome.ended {
        EndReason::Exit(code) => format!("exit code {code}"),
        EndReason::Signal(signal) => format!("signal {signal}"),
        EndReason::TimeLimit => format!("stopped after {} s", limits.seconds),
        EndReason::MemoryLimit => format!("stopped: more than {} MiB of memory", limits.memory_mb),
    };
    eprintln!("{} {end}, {:.0} ms", Style::stderr().dim("ended     "), outcome.seconds * 1e3);
    Ok(if outcome.ended == EndReason::Exit(0) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
