//! `levade cluster setup`: an environment for the learner on PyTorch.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use tokio::process::Command;

use crate::failure::unusable;
use crate::screen::{self, Style};

/// Make a Python environment with the learner on PyTorch, in a folder of its own
///
/// Installs `levade_torch` with the versions of PyTorch and transformers that it was tried with, by uv
/// where it is there, else by venv and pip. Nothing else of the machine changes.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade cluster setup --into envs/torch                     for the processors of this machine
  levade cluster setup --into envs/torch --torch-index https://download.pytorch.org/whl/cu130")]
pub struct Args {
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

/// Where the package is in a checkout.
const PACKAGE: &str = "python/levade_torch";

pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let from = package(args.from.as_deref())?;
    let into = std::path::absolute(&args.into)?;
    crate::runtime()?.block_on(async {
        let longest = Duration::from_secs(args.seconds);
        let made = tokio::time::timeout(longest, make(args, &from, &into)).await;
        made.map_err(|_| {
            anyhow::anyhow!(
                "waited {longest:?} for the environment in {}; raise --seconds, and run it again: what was fetched \
                 is kept",
                into.display()
            )
        })?
    })?;
    let python = python_of(&into);
    screen::say(&format!("the learner's environment is ready: {}", screen::path(&into)));
    screen::say(&format!(
        "\nin a recipe\n  [cluster.learner]\n  kind = \"torch\"\n  start = true\n  python = {:?}",
        python.display().to_string()
    ));
    Ok(ExitCode::SUCCESS)
}

/// The steps: a bare environment, the package, and a look at what came of it.
async fn make(args: &Args, from: &Path, into: &Path) -> anyhow::Result<()> {
    let python = python_of(into);
    let has_uv = Command::new("uv").arg("--version").output().await.is_ok_and(|found| found.status.success());
    let text = |path: &Path| path.display().to_string();
    let (to, package) = (text(into), format!("{}[lora]", text(from)));
    if !python.exists() {
        match has_uv {
            true => run(&["uv", "venv", "--python", &args.python, &to]).await?,
            false => run(&[&args.python, "-m", "venv", &to]).await?,
        }
    }
    let interpreter = text(&python);
    let mut install = match has_uv {
        true => vec!["uv", "pip", "install", "--python", &interpreter],
        false => vec![&interpreter, "-m", "pip", "install", "--disable-pip-version-check"],
    };
    if let Some(index) = &args.torch_index {
        install.extend(["--extra-index-url", index]);
        if has_uv {
            // Else only one index is asked for a package.
            install.extend(["--index-strategy", "unsafe-best-match"]);
        }
    }
    install.push(&package);
    run(&install).await?;
    let look = "import levade_torch, torch, transformers; print('PyTorch', torch.__version__, \
                'transformers', transformers.__version__, 'CUDA', torch.cuda.is_available())";
    run(&[&interpreter, "-c", look]).await
}

async fn run(words: &[&str]) -> anyhow::Result<()> {
    eprintln!("{} {}", Style::stderr().dim("runs  "), words.join(" "));
    let mut command = Command::new(words[0]);
    let status = command.args(&words[1..]).kill_on_drop(true).status().await;
    let status = status.with_context(|| format!("cannot start {}", words[0]))?;
    anyhow::ensure!(status.success(), "{} failed ({status}); what it says is above", words.join(" "));
    Ok(())
}

fn python_of(environment: &Path) -> PathBuf {
    environment.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" })
}

/// The folder of the package.
fn package(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let is_it = |folder: &PathBuf| folder.join("pyproject.toml").is_file();
    let found = match given {
        Some(folder) => Some(folder.to_owned()).filter(is_it),
        None => {
            // In the working directory, or in the checkout that this binary was built in.
            let built = std::env::current_exe().ok();
            let above = built.iter().flat_map(|file| file.ancestors().skip(1)).map(Path::to_owned);
            std::iter::once(PathBuf::new()).chain(above).map(|folder| folder.join(PACKAGE)).find(is_it)
        }
    };
    let found = found.ok_or_else(|| {
        unusable(format!(
            "{} holds no package; give the folder {PACKAGE} of Levade's source with --from",
            given.map_or_else(|| PACKAGE.into(), |folder| folder.display().to_string())
        ))
    })?;
    Ok(std::path::absolute(found)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_package_is_found_or_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = package(Some(folder.path())).unwrap_err().to_string();
        assert!(error.contains("holds no package; give the folder python/levade_torch"), "{error}");
        std::fs::write(folder.path().join("pyproject.toml"), "").unwrap();
        assert_eq!(package(Some(folder.path())).unwrap(), folder.path());
    }
}
