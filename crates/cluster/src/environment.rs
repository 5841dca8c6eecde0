//! The learner's Python environment: a directory with `levade_torch`, PyTorch and transformers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use levade_run::{Host, unusable};
use tokio::process::Command;

/// A Python environment to install for the learner's processes.
#[derive(Debug, Clone)]
pub struct Environment {
    /// Directory in which the environment is created.
    pub dir: PathBuf,
    /// Directory of the Python package `levade_torch` (see [`find_package`]).
    pub package: PathBuf,
    /// Python interpreter that creates the environment: a program name or a path.
    pub python: String,
    /// Additional package index from which PyTorch can be installed. `None` to use only PyPI.
    pub torch_index: Option<String>,
    /// Timeout for the installation.
    pub timeout: Duration,
}

/// Directory of the Python package `levade_torch`, relative to a checkout of Levade.
pub const PACKAGE: &str = "python/levade_torch";

impl Environment {
    /// Installs the environment with uv, or with venv and pip if uv is not installed. An earlier
    /// installation is reused. Returns the path of the environment's Python interpreter.
    ///
    /// # Errors
    /// Returns an error if a command fails or the timeout expires.
    pub async fn install(&self, host: &Host) -> anyhow::Result<PathBuf> {
        let Environment { dir, timeout, .. } = self;
        let installed = tokio::time::timeout(*timeout, self.install_steps(host)).await;
        installed.map_err(|_| {
            anyhow::anyhow!(
                "the Python environment in {} was not installed within {timeout:?}; raise \
                 --seconds and run the command again, which keeps downloaded files",
                dir.display()
            )
        })?
    }

    /// Creates an empty environment, installs the package `levade_torch`, and imports it as a test.
    /// Returns the path of the environment's Python interpreter.
    async fn install_steps(&self, host: &Host) -> anyhow::Result<PathBuf> {
        let python = self.dir.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
        let has_uv = Command::new("uv")
            .arg("--version")
            .output()
            .await
            .is_ok_and(|found| found.status.success());
        let text = |path: &Path| path.display().to_string();
        let dir = text(&self.dir);
        let package = format!("{}[lora]", text(&self.package));
        if !python.exists() {
            if has_uv {
                run_command(host, &["uv", "venv", "--python", &self.python, &dir]).await?
            } else {
                run_command(host, &[&self.python, "-m", "venv", &dir]).await?
            }
        }
        let interpreter = text(&python);
        let mut install = if has_uv {
            vec!["uv", "pip", "install", "--python", &interpreter]
        } else {
            vec![&interpreter, "-m", "pip", "install", "--disable-pip-version-check"]
        };
        if let Some(index) = &self.torch_index {
            install.extend(["--extra-index-url", index]);
            if has_uv {
                // Without this option, uv queries only one index for a package.
                install.extend(["--index-strategy", "unsafe-best-match"]);
            }
        }
        install.push(&package);
        run_command(host, &install).await?;
        let imports = "import levade_torch, torch, transformers; print('PyTorch', \
                       torch.__version__, 'transformers', transformers.__version__, 'CUDA', \
                       torch.cuda.is_available())";
        run_command(host, &[&interpreter, "-c", imports]).await?;
        Ok(python)
    }
}

async fn run_command(host: &Host, words: &[&str]) -> anyhow::Result<()> {
    host.setup("runs", words.join(" "));
    let mut command = Command::new(words[0]);
    let status = command.args(&words[1..]).kill_on_drop(true).status().await;
    let status = status.with_context(|| format!("cannot start {}", words[0]))?;
    anyhow::ensure!(
        status.success(),
        "{} failed ({status}); see its output above",
        words.join(" ")
    );
    Ok(())
}

/// Returns the directory of the Python package `levade_torch`. It is `explicit` if set, otherwise
/// the package in the checkout that contains the working directory or this binary.
///
/// # Errors
/// Returns an error if no package is found.
pub fn find_package(explicit: Option<&Path>) -> anyhow::Result<PathBuf> {
    let is_it = |dir: &PathBuf| dir.join("pyproject.toml").is_file();
    let found = match explicit {
        Some(dir) => Some(dir.to_owned()).filter(is_it),
        None => {
            let built = std::env::current_exe().ok();
            let above = built.iter().flat_map(|file| file.ancestors().skip(1)).map(Path::to_owned);
            std::iter::once(PathBuf::new()).chain(above).map(|dir| dir.join(PACKAGE)).find(is_it)
        }
    };
    let found = found.ok_or_else(|| {
        unusable(format!(
            "{} contains no package; specify the directory {PACKAGE} of Levade's source with \
             --from",
            explicit.map_or_else(|| PACKAGE.into(), |folder| folder.display().to_string())
        ))
    })?;
    Ok(std::path::absolute(found)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_package_names_missing_directory() {
        let dir = tempfile::tempdir().unwrap();
        let error = find_package(Some(dir.path())).unwrap_err().to_string();
        assert!(
            error.contains("contains no package; specify the directory python/levade_torch"),
            "{error}"
        );
        std::fs::write(dir.path().join("pyproject.toml"), "").unwrap();
        assert_eq!(find_package(Some(dir.path())).unwrap(), dir.path());
    }
}
