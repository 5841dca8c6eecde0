//! `levade cluster`: the machines and environments of parts that are elsewhere.

mod join;
mod setup;

use std::process::ExitCode;

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
    Setup(setup::Args),
    Join(join::Args),
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Setup(args) => setup::main(&args),
        Command::Join(args) => join::main(&args),
    }
}
