//! How a program that stays alive is started.

use std::path::PathBuf;

use serde_json::Value;
use tokio::process::Child;

use super::environment::shared_environment;
use crate::{Keeper, kept};

/// A program that stays alive, and takes its orders by the line.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Keeps it.
    pub keeper: Keeper,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The folder that it runs in; this process' where empty.
    pub folder: PathBuf,
    /// Names of environment variables that it gets besides the [usual ones](crate::PASSED).
    pub passes: Vec<String>,
    /// Environment variables with their values.
    pub variables: Vec<(String, String)>,
    /// A line that it reads before all orders.
    pub first: Option<Value>,
}

impl Launch {
    /// Starts the keeper of the program, and gives what it is to be told first.
    ///
    /// # Errors
    /// When it cannot be started, in words.
    pub(super) fn start(&self) -> Result<(Child, String), String> {
        let mut environment = shared_environment(&self.passes);
        environment.extend(self.variables.iter().cloned());
        let child = self.keeper.start(environment)?;
        let mut first = kept::order(&self.command, &self.folder, None);
        if let Some(line) = &self.first {
            first.push_str(&format!("{line}\n"));
        }
        Ok((child, first))
    }
}
