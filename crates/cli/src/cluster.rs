//! `levade cluster`: machines and environments of a learner elsewhere.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use levade_cluster::{Environment, Left, Part, find_package, join};

use crate::failure::INTERRUPTED;
use crate::host;
use crate::screen;
use crate::stop::Requests;

/// Environments and machines of a learner elsewhere
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

/// Make a Python environment with the learner on PyTorch, in a folder of its own
///
/// Installs `levade_torch` with the versions of PyTorch and transformers that it was tried with, by uv
/// where it is there, else by venv and pip. Nothing else of the machine changes.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade cluster setup --into envs/torch                     for the processors of this machine
  levade cluster setup --into envs/torch --torch-index https://download.pytorch.org/whl/cu130")]
struct Setup {
    /// The folder of the environment
    #[arg(long, value_name = "FOLDER")]
    into: PathBuf,

    /// The folder of the package: python/levade_torch of Levade's source
    #[arg(long, value_name = "FOLDER")]
    from: Option<PathBuf>,

    /// A Python to begin with: a program or its path (3.11 or later)
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: String,

    /// A further index to take PyTorch from, besides PyPI: for another version of CUDA
    #[arg(long, value_name = "URL")]
    torch_index: Option<String>,

    /// Longest time that it may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    seconds: u64,
}

/// Take part in the learner of a run, as another machine than the one that trains
///
/// Waits for the run to start its learner (`cluster.learner.nodes` more than 1), runs this machine's
/// processes of it, starts them again whenever the run does, and ends with the run. The folder of the run
/// must be on a file system that both machines reach under the same path.
#[derive(clap::Args)]
struct Join {
    /// The folder of the run, which need not be there yet
    run: PathBuf,

    /// Number of this machine, from 1; 0 is the one that trains
    #[arg(long, value_name = "N")]
    node: u32,

    /// Longest wait for the run to start its learner for the first time, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    wait: u32,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Setup(args) => install(args),
        Command::Join(args) => take_part(args),
    }
}

fn install(args: Setup) -> anyhow::Result<ExitCode> {
    let environment = Environment {
        package: find_package(args.from.as_deref())?,
        dir: std::path::absolute(&args.into)?,
        python: args.python,
        torch_index: args.torch_index,
        timeout: Duration::from_secs(args.seconds),
    };
    let python = crate::runtime()?.block_on(environment.install(&host::host()?))?;
    screen::say(&format!("the learner's environment is ready: {}", screen::path(&environment.dir)));
    screen::say(&format!(
        "\nin a recipe\n  [cluster.learner]\n  kind = \"torch\"\n  start = true\n  python = {:?}",
        python.display().to_string()
    ));
    Ok(ExitCode::SUCCESS)
}

fn take_part(args: Join) -> anyhow::Result<ExitCode> {
    let part = Part { run: args.run, node: args.node, wait: Duration::from_secs(args.wait.into()) };
    let host = host::host()?;
    let left =
        crate::runtime()?.block_on(async { join(&part, &host, Requests::listen()?.stream()).await })?;
    match left {
        Left::Over => Ok(ExitCode::SUCCESS),
        Left::Replaced => {
            eprintln!("another process has taken the part of machine {}; this one ends", part.node);
            Ok(ExitCode::SUCCESS)
        }
        Left::Stopped => Ok(ExitCode::from(INTERRUPTED)),
    }
}
