//! Implements `levade completions` and `levade man`, which generate files for the shell from the
//! command definitions.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;

use crate::failure::unusable;

/// Print a script that completes commands and options in a shell
///
/// bash: levade completions bash > ~/.local/share/bash-completion/completions/levade
/// zsh:  levade completions zsh > DIR/_levade, for a DIR in $fpath
/// fish: levade completions fish > ~/.config/fish/completions/levade.fish
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct CompletionsArgs {
    /// Shell that reads the script
    shell: Shell,
}

/// Write the manual pages levade.1, levade-train.1, …
///
/// Read them with `man DIR/levade.1`, or install them in ~/.local/share/man/man1.
#[derive(clap::Args)]
pub struct ManArgs {
    /// Directory to write to; it is created if it does not exist
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

pub fn print_completions(args: &CompletionsArgs, mut command: Command) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "levade", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

pub fn write_man_pages(args: &ManArgs, command: Command) -> anyhow::Result<ExitCode> {
    let ManArgs { dir } = args;
    std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(command, dir)).map_err(
        |error| unusable(format!("cannot write manual pages to {}: {error}", dir.display())),
    )?;
    Ok(ExitCode::SUCCESS)
}
