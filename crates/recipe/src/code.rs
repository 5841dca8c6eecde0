//! The sandbox as a tool: `[[tool]] kind = "sandbox"`.

use std::path::PathBuf;

use levade_tools::{CodeOptions, Demand};
use serde::{Deserialize, Serialize};

/// `[[tool]] kind = "sandbox"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxKeys {
    /// Whether variables live from call to call of an attempt.
    pub persistent: bool,
    /// Most memory of a call's processes, in MiB.
    pub memory_mb: u64,
    /// Bytes of output that the model reads of a call: the beginning and the end.
    pub output_bytes: usize,
    /// Protection without which nothing runs.
    pub protection: Demand,
    /// The interpreter: a name, a file, or the folder of a virtual environment.
    pub python: PathBuf,
    /// Modules that are loaded before any code runs.
    pub preload: Vec<String>,
    /// Most calls that run at once; 0 for one on each core.
    pub concurrency: usize,
    /// Most attempts that have it open.
    pub sessions: usize,
    /// A service of SandboxFusion's API, in place of this machine.
    pub url: Option<String>,
    /// Environment variable with the key of that service.
    pub key_env: Option<String>,
}

impl Default for SandboxKeys {
    fn default() -> Self {
        let CodeOptions { sandbox, limits, .. } = CodeOptions::default();
        SandboxKeys {
            persistent: true,
            memory_mb: limits.memory_mb,
            output_bytes: 4096,
            protection: sandbox.protection,
            python: sandbox.python,
            preload: sandbox.preload,
            concurrency: 0,
            sessions: sandbox.sessions,
            url: None,
            key_env: None,
        }
    }
}

/// Time that a call may take beyond its code's, in seconds: for other calls to make room, and for the start.
const BESIDES: f64 = 120.0;

impl SandboxKeys {
    /// Longest wait for the toolbox, in seconds, where code may run for so long.
    pub(super) fn wait(seconds: Option<f64>) -> f64 {
        seconds.unwrap_or(CodeOptions::default().limits.seconds) + BESIDES
    }

    /// The toolbox's options, where code may run for so many seconds.
    pub(super) fn options(&self, seconds: Option<f64>) -> CodeOptions {
        let mut options =
            CodeOptions { persistent: self.persistent, url: self.url.clone(), ..CodeOptions::default() };
        options.limits.seconds = seconds.unwrap_or(options.limits.seconds);
        options.limits.memory_mb = self.memory_mb;
        options.limits.output_bytes = self.output_bytes;
        options.sandbox.protection = self.protection;
        options.sandbox.python = self.python.clone();
        options.sandbox.preload = self.preload.clone();
        options.sandbox.sessions = self.sessions;
        if self.concurrency > 0 {
            options.sandbox.concurrency = self.concurrency;
        }
        options
    }

    /// The options with the key of the service.
    ///
    /// # Errors
    /// When the key is missing.
    pub(super) fn with_key(&self, seconds: Option<f64>) -> Result<CodeOptions, String> {
        let key = self.key_env.as_ref().map(|variable| {
            let key = std::env::var(variable).ok().filter(|key| !key.is_empty());
            key.ok_or_else(|| format!("the environment variable {variable} has no key"))
        });
        Ok(CodeOptions { key: key.transpose()?, ..self.options(seconds) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_not_there_is_named() {
        let (url, key_env) = (Some("http://h".to_owned()), Some("LEVADE_TEST_NO_SUCH_KEY".to_owned()));
        let keys = SandboxKeys { url, key_env, ..SandboxKeys::default() };
        let error = keys.with_key(None).unwrap_err();
        assert!(error.contains("LEVADE_TEST_NO_SUCH_KEY has no key"), "{error}");
        assert_eq!(SandboxKeys::default().with_key(None).unwrap().key, None);
    }
}
