//! Servers of the Model Context Protocol as toolboxes, over standard input and output or streamable
//! HTTP.
//!
//! A server provides any number of tools. By default each attempt has its own connection, and over
//! standard input and output its own process. For stateless servers, all attempts can share one
//! connection. The client supports both generations of the protocol: with a handshake (up to
//! 2025-11-25) and without one (2026-07-28).
//!
//! # Guarantees
//! - **Invalid responses fail fast.** Anything that a server sends instead of a response, and any
//!   HTTP error status, ends the call at once with the reason. Only silence lasts until the
//!   timeout.
//! - **Faults stay within one call.** If a server exits, hangs, floods or sends garbage, the
//!   current call fails. The next call restarts the server if necessary and tells the model that
//!   the server's state is lost.
//! - **Isolation.** A server gets only the usual and the named environment variables. It provides
//!   tools only: it cannot send requests to the model.

mod call_result;
mod connection;
mod ledger;
mod lenient;
mod lines;
mod reasons;
mod web;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use hyper::header::{HeaderName, HeaderValue};
use levade_http::Client;
use levade_process::{Launch, Supervisor};
use levade_text::ToolSpec;
use rmcp::model::CallToolRequestParams;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::sync::Mutex;

use super::web::PermittedHosts;
use super::{
    MAX_SECONDS, OptionError, Session, ToolContext, ToolError, ToolOptions, ToolOutput, Toolbox,
};
use connection::McpConnection;

/// Maximum size of a message from a server, in bytes.
pub(super) const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Grace before the tool set's timeout: a call that reports progress ends this much earlier by its
/// own timeout.
const DEADLINE_GRACE: Duration = Duration::from_secs(1);

/// Options of `[[tool]] kind = "mcp"`: a server of the Model Context Protocol.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpKeys {
    /// Program of the server and its arguments, for a server that uses standard input and output.
    /// Exactly one of `command` and `url` must be set.
    pub command: Vec<String>,
    /// Working directory of the program. Empty means the recipe's directory.
    #[serde(rename = "folder")]
    pub dir: PathBuf,
    /// Names of environment variables that the program gets in addition to the
    /// [usual ones](levade_policy::environment::CHILD_VARIABLES).
    pub environment: Vec<String>,
    /// URL of the server, for streamable HTTP.
    pub url: String,
    /// Name of the environment variable with an API key, which is sent as `Authorization: Bearer`.
    /// If empty, no key is sent.
    pub key_env: String,
    /// Names of environment variables whose values are sent as headers, by header name.
    pub headers_env: BTreeMap<String, String>,
    /// Names of the tools that agents can call. Empty allows all tools.
    pub allow: Vec<String>,
    /// Names of the tools that agents cannot call.
    pub deny: Vec<String>,
    /// Names under which agents call tools, by the server's names of the tools.
    pub rename: BTreeMap<String, String>,
    /// Timeout for a call that reports progress, in seconds. The timeout `seconds` then applies to
    /// the time since the last report. `None` means that progress does not extend a call.
    pub progress_seconds: Option<f64>,
    /// Whether all attempts share one connection, and thus one server process. Only for stateless
    /// servers.
    pub shared: bool,
}

/// Default timeout for a call, in seconds. It includes the start of the server.
const DEFAULT_TIMEOUT_SECONDS: f64 = 60.0;

impl ToolOptions for McpKeys {
    fn timeout(&self, seconds: Option<f64>) -> Option<f64> {
        Some(seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS))
    }

    fn check(&self, _seconds: Option<f64>) -> Result<(), OptionError> {
        if let Some(seconds) =
            self.progress_seconds.filter(|seconds| !(*seconds > 0.0 && *seconds <= MAX_SECONDS))
        {
            let why = format!(
                "progress_seconds = {seconds}, but it must be more than 0 and at most \
                 {MAX_SECONDS:e}"
            );
            return Err(why.into());
        }
        let why = match (self.command.is_empty(), self.url.is_empty()) {
            (false, true) if self.key_env.is_empty() && self.headers_env.is_empty() => {
                return Ok(());
            }
            (false, true) => {
                "key_env and headers_env apply only to a url; pass keys to a command with \
                 environment"
            }
            (true, false) => return Ok(PermittedHosts::for_any_host().check(&self.url)?),
            _ => "set either command (a program) or url (streamable HTTP)",
        };
        Err(why.to_owned().into())
    }

    fn toolbox(
        &self,
        name: String,
        seconds: Option<f64>,
        supervisor: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String> {
        Ok(Arc::new(Mcp::new(name, self.clone(), seconds, supervisor)?))
    }
}

/// Transport and location of an MCP server.
#[derive(Clone)]
enum McpServer {
    /// Server that is a program and communicates over standard input and output.
    Program { launch: Launch, supervisor: Supervisor },
    /// Server at a URL for streamable HTTP, with headers for every request, such as API keys.
    Address { url: String, headers: Vec<(HeaderName, HeaderValue)>, client: Client },
}

/// Timeouts of an MCP call that reports progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProgressTimeout {
    /// Timeout for the next progress report.
    report_timeout: Duration,
    /// Timeout for the complete call.
    total_timeout: Duration,
}

/// Toolbox for a server of the Model Context Protocol. Attempts have separate connections, or share
/// a connection.
#[derive(Clone)]
pub struct Mcp {
    name: String,
    server: McpServer,
    keys: McpKeys,
    progress_timeout: Option<ProgressTimeout>,
    shared_connection: Option<Arc<Mutex<Option<Arc<McpConnection>>>>>,
    wants_handshake: Arc<AtomicBool>,
    /// Output and state of the server at the last opening that timed out, as a suffix for the
    /// error.
    late: Arc<std::sync::Mutex<String>>,
}

impl Mcp {
    /// Creates the toolbox `name`. `seconds` is the timeout for a call, or since the last progress
    /// report; `None` means 60 seconds.
    ///
    /// # Errors
    /// Returns an error if options are invalid or conflict, or if an environment variable with a
    /// key is not set.
    pub fn new(
        name: impl Into<String>,
        keys: McpKeys,
        seconds: Option<f64>,
        supervisor: &Supervisor,
    ) -> Result<Self, String> {
        keys.check(seconds).map_err(|error| error.to_string())?;
        let server = match keys.url.as_str() {
            "" => {
                let dir = keys.dir.clone();
                let passes = keys.environment.clone();
                let launch = Launch { dir, passes, ..Launch::new(&keys.command) };
                McpServer::Program { launch, supervisor: supervisor.clone() }
            }
            url => {
                let services = PermittedHosts::for_any_host();
                let headers = services.headers(&keys.key_env, &keys.headers_env)?;
                let headers =
                    headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
                McpServer::Address { url: url.to_owned(), headers, client: services.client()? }
            }
        };
        let report_timeout = Duration::from_secs_f64(seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS));
        let progress_timeout = keys.progress_seconds.map(|total_timeout| {
            let total_timeout = Duration::from_secs_f64(total_timeout).max(report_timeout);
            ProgressTimeout { report_timeout, total_timeout }
        });
        Ok(Mcp {
            name: name.into(),
            server,
            progress_timeout,
            shared_connection: keys.shared.then(Arc::default),
            keys,
            wants_handshake: Arc::default(),
            late: Arc::default(),
        })
    }

    /// Returns a working connection, and whether it replaces the connection `last`, which has
    /// ended.
    async fn connect(
        &self,
        last: Option<&Arc<McpConnection>>,
    ) -> Result<(Arc<McpConnection>, bool), String> {
        let Some(shared_connection) = &self.shared_connection else {
            return match last.filter(|last| !last.has_ended()) {
                Some(last) => Ok((Arc::clone(last), false)),
                None => Ok((self.open_connection().await?, true)),
            };
        };
        let mut shared_connection = shared_connection.lock().await;
        let connection = match shared_connection.take().filter(|connection| !connection.has_ended())
        {
            Some(connection) => connection,
            None => self.open_connection().await?,
        };
        *shared_connection = Some(Arc::clone(&connection));
        let is_new = last.is_some_and(|last| !Arc::ptr_eq(last, &connection));
        Ok((connection, is_new))
    }

    async fn open_connection(&self) -> Result<Arc<McpConnection>, String> {
        Ok(Arc::new(McpConnection::open(&self.server, &self.wants_handshake, &self.late).await?))
    }

    /// Returns the server's tools that agents can call, under their names for agents.
    ///
    /// # Errors
    /// Returns an error if `allow`, `deny` or `rename` contains an unknown tool, or if two tools
    /// would have the same name.
    fn offered_tools(&self, tools: &[ToolSpec]) -> Result<Vec<ToolSpec>, String> {
        let named = self.keys.allow.iter().chain(&self.keys.deny).chain(self.keys.rename.keys());
        if let Some(missing) =
            named.into_iter().find(|name| !tools.iter().any(|tool| tool.name == **name))
        {
            let all: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            return Err(format!("the server has no tool {missing:?}; it has {}", all.join(", ")));
        }
        let mut offered: Vec<ToolSpec> = Vec::new();
        for spec in self.selected_tools(tools) {
            if offered.iter().any(|earlier| earlier.name == spec.name) {
                return Err(format!(
                    "two tools of the server would have the name {:?}; rename one with `rename`",
                    spec.name
                ));
            }
            offered.push(spec);
        }
        Ok(offered)
    }

    /// Returns the tools that `allow` and `deny` permit, under their names for agents.
    fn selected_tools<'a>(&'a self, tools: &'a [ToolSpec]) -> impl Iterator<Item = ToolSpec> + 'a {
        let McpKeys { allow, deny, rename, .. } = &self.keys;
        let kept = tools.iter().filter(move |tool| {
            (allow.is_empty() || allow.contains(&tool.name)) && !deny.contains(&tool.name)
        });
        kept.map(|tool| {
            let name = rename.get(&tool.name).unwrap_or(&tool.name).clone();
            ToolSpec { name, ..tool.clone() }
        })
    }

    /// Returns the server's name for a tool, given its name for agents.
    fn server_name<'a>(&'a self, tool: &'a str) -> &'a str {
        self.keys.rename.iter().find(|(_, name)| *name == tool).map_or(tool, |(own, _)| own)
    }
}

#[async_trait]
impl Toolbox for Mcp {
    fn name(&self) -> &str {
        &self.name
    }

    async fn open(&self, _attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let wrong = |why| ToolError::Open { tool: self.name.clone(), why };
        let (connection, _) = self.connect(None).await.map_err(wrong)?;
        let specs = self.offered_tools(&connection.tools()).map_err(wrong)?;
        let toolbox = self.clone();
        let specs = std::sync::Mutex::new(specs);
        Ok(Box::new(McpSession { toolbox, specs, connection: Mutex::new(Some(connection)) }))
    }

    fn timeout_detail(&self) -> String {
        self.late.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Session of an MCP server for one attempt.
struct McpSession {
    toolbox: Mcp,
    /// Tools as of the last call.
    specs: std::sync::Mutex<Vec<ToolSpec>>,
    connection: Mutex<Option<Arc<McpConnection>>>,
}

impl McpSession {
    /// Returns the connection to use, and a note for the model if the server has been restarted.
    async fn current_connection(&self) -> Result<(Arc<McpConnection>, Option<String>), String> {
        let mut current = self.connection.lock().await;
        let restart_reason = match current.as_ref() {
            Some(current) if current.close_if_hung().await => {
                Some("; the server did not respond any more".to_owned())
            }
            Some(current) if current.has_ended() => Some(current.stderr_suffix()),
            _ => None,
        };
        let (connection, is_new) = self.toolbox.connect(current.as_ref()).await?;
        *current = Some(Arc::clone(&connection));
        let notice = is_new.then(|| {
            let why = restart_reason.unwrap_or_default();
            format!("[the server of this tool was restarted, and its state is lost{why}]")
        });
        Ok((connection, notice))
    }
}

#[async_trait]
impl Session for McpSession {
    fn specs(&self) -> Vec<ToolSpec> {
        self.specs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn max_call_timeout(&self) -> Option<Duration> {
        self.toolbox
            .progress_timeout
            .map(|progress_timeout| progress_timeout.total_timeout + DEADLINE_GRACE)
    }

    /// Returns true: responses are matched by their ids, and a server with state orders concurrent
    /// calls itself.
    fn can_run_parallel(&self, _tool: &str) -> bool {
        true
    }

    /// Calls a tool of the server. The call may have an effect in the server, so it is never
    /// repeated.
    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let (connection, notice) = match self.current_connection().await {
            Ok(found) => found,
            Err(why) => return call_result::unavailable_output(&self.toolbox.name, &why),
        };
        let name = self.toolbox.server_name(tool).to_owned();
        let request = CallToolRequestParams::new(name).with_arguments(arguments.clone());
        let response = connection.call(request, self.toolbox.progress_timeout).await;
        let mut output = call_result::to_tool_output(&self.toolbox.name, tool, response);
        connection.refresh_changed_tools().await;
        let now = self.toolbox.selected_tools(&connection.tools()).collect();
        *self.specs.lock().unwrap_or_else(PoisonError::into_inner) = now;
        if let Some(notice) = notice {
            output.parts.insert(0, levade_text::ContentPart::Text(format!("{notice}\n")));
            output.metrics.insert("restarts".into(), 1.0);
        }
        output
    }

    /// Describes the state of a call that timed out. A call that restarts the server holds the lock
    /// on the connection; the state of the opening is then returned.
    fn timeout_detail(&self) -> String {
        let connection = self.connection.try_lock().ok().and_then(|connection| connection.clone());
        connection
            .map(|connection| connection.describe_activity())
            .unwrap_or_else(|| self.toolbox.timeout_detail())
    }

    async fn close(&mut self) -> Result<(), ToolError> {
        if self.toolbox.shared_connection.is_none()
            && let Some(connection) = self.connection.get_mut().take()
        {
            connection.close().await;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "mcp_tests.rs"]
mod tests;
