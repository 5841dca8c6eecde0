//! Processes of others under a keeper, which ends them with all that they have started.

use std::path::Path;
use std::process::Stdio;

use serde_json::json;
use tokio::process::{Child, Command};

/// The binary that is started as [keeper](crate::program::keeper), with its arguments.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Keeper(pub Vec<String>);

impl Keeper {
    /// This very binary, as `dressage keep`.
    ///
    /// # Errors
    /// When its file is not found.
    pub fn this() -> std::io::Result<Self> {
        let file = std::env::current_exe()?;
        Ok(Keeper(vec![file.to_string_lossy().into_owned(), "keep".into()]))
    }

    /// Starts a keeper, which waits for its order. Its environment is that of the program to come. Its
    /// program ends once its standard input does.
    ///
    /// # Errors
    /// When it cannot be started, in words.
    pub(crate) fn start(&self, environment: Vec<(String, String)>) -> Result<Child, String> {
        let Some((keeper, arguments)) = self.0.split_first() else {
            return Err("no keeper is named for programs".into());
        };
        let mut command = Command::new(keeper);
        command
            .args(arguments)
            .env_clear()
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // Ctrl-C is for this process, which then ends its programs in good order.
        #[cfg(unix)]
        command.process_group(0);
        command.spawn().map_err(|error| format!("cannot start {keeper}, which keeps programs: {error}"))
    }
}

/// The order to a keeper, the first line that it reads: a program with its arguments, the folder that it runs
/// in (the keeper's own where empty), and its whole input, or `None` where that comes after the order.
pub(crate) fn order(command: &[String], folder: &Path, input: Option<String>) -> String {
    format!("{}\n", json!({ "command": command, "folder": folder, "input": input }))
}

/// The values of [`PASSED`] variables and of those with these names, where they are set.
pub(crate) fn environment(passes: &[String]) -> Vec<(String, String)> {
    let names = PASSED.into_iter().map(str::to_owned).chain(passes.iter().cloned());
    names.filter_map(|name| std::env::var(&name).ok().map(|value| (name, value))).collect()
}

/// Variables that every program gets where they are set: where programs are found and how text is written.
pub const PASSED: [&str; 9] = ["HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"];
