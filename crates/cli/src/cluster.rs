//! Implements `levade cluster`, which prepares environments and machines for a remote learner.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use levade_cluster::{Environment, JoinOutcome, MachinePart, find_package, join};

use crate::failure::INTERRUPTED;
use crate::host;
use crate::screen;
use crate::stop::StopRequests;

/// Prepare Python environments and machines for a remote learner
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade cluster setup --into envs/torch
  levade cluster join runs/math --node 1")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Setup(Setup),
    Join(Join),
}

/// Create a Python environment with the PyTorch learner, in a separate directory
///
/// Installs `levade_torch` with the versions of PyTorch and transformers that it was tested with.
/// Uses uv if it is installed, and otherwise venv and pip. Nothing else on the machine changes.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade cluster setup --into envs/torch                     for the CPUs of this machine
  levade cluster setup --into envs/torch --torch-index https://download.pytorch.org/whl/cu130")]
struct Setup {
    /// Directory of the new Python environment
    #[arg(long, value_name = "DIR")]
    into: PathBuf,

    /// Directory of the package levade_torch: python/levade_torch in Levade's source
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,

    /// Python interpreter that creates the environment, by name or path (3.11 or later)
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: String,

    /// Additional package index for PyTorch, besides PyPI: for another version of CUDA
    #[arg(long, value_name = "URL")]
    torch_index: Option<String>,

    /// Timeout for the installation, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    seconds: u64,
}

/// Join the learner of a run from an additional machine
///
/// Waits until the run starts its learner (with `cluster.learner.nodes` greater than 1), runs this
/// machine's processes of the learner, restarts them whenever the run restarts its learner, and
/// ends with the run. The run directory must be on a file system that both machines reach under the
/// same path.
#[derive(clap::Args)]
struct Join {
    /// Run directory, which need not exist yet
    run: PathBuf,

    /// Index of this machine, from 1; 0 is the machine that runs `levade train`
    #[arg(long, value_name = "N")]
    node: u32,

    /// Timeout for the first start of the run's learner, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    wait: u32,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Setup(args) => set_up_environment(args),
        Command::Join(args) => join_learner(args),
    }
}

fn set_up_environment(args: Setup) -> anyhow::Result<ExitCode> {
    let environment = Environment {
        package: find_package(args.from.as_deref())?,
        dir: std::path::absolute(&args.into)?,
        python: args.python,
        torch_index: args.torch_index,
        timeout: Duration::from_secs(args.seconds),
    };
    let python = crate::create_runtime()?.block_on(environment.install(&host::create_host()?))?;
    screen::print_line(&format!(
        "the learner's environment is ready: {}",
        screen::path(&environment.dir)
    ));
    screen::print_line(&format!(
        "\nuse it in a recipe:\n  [cluster.learner]\n  kind = \"torch\"\n  start = true\n  \
         python = {:?}",
        python.display().to_string()
    ));
    Ok(ExitCode::SUCCESS)
}

fn join_learner(args: Join) -> anyhow::Result<ExitCode> {
    let part =
        MachinePart { run: args.run, node: args.node, wait: Duration::from_secs(args.wait.into()) };
    let host = host::create_host()?;
    let outcome = crate::create_runtime()?
        .block_on(async { join(&part, &host, StopRequests::listen()?.into_stream()).await })?;
    match outcome {
        JoinOutcome::Finished => Ok(ExitCode::SUCCESS),
        JoinOutcome::Replaced => {
            eprintln!("another process has joined as machine {}; this process exits", part.node);
            Ok(ExitCode::SUCCESS)
        }
        JoinOutcome::Stopped => Ok(ExitCode::from(INTERRUPTED)),
    }
}
