//! Servers of the Model Context Protocol as toolboxes, over standard input and output or streamable HTTP.
//!
//! A server brings any number of tools. Each attempt has a connection of its own, and so, over standard input
//! and output, a process of its own; or all share one, for servers that keep nothing between calls. Both
//! generations of the protocol are spoken: with a handshake (up to 2025-11-25), and without one (2026-07-28).
//!
//! Guarantees: whatever a server sends in the place of a response, or an HTTP status, ends the call at once,
//! with the reason; only silence is waited out. A server that dies, hangs, says too much or nonsense spoils
//! the call at hand. The next one finds a server that was started anew, and says so, since what the old one
//! held is lost. A server is told of no environment variables but those named for it, and offers nothing to
//! the model but its tools: it cannot ask it for anything.

mod answer;
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

use super::web::Services;
use super::{MAX_SECONDS, OptionError, Session, ToolContext, ToolError, ToolOptions, ToolOutput, Toolbox};
use connection::Connection;

/// Most bytes of a message of a server.
pub(super) const MOST_BYTES: usize = 64 << 20;

/// Time before the deadline of a call at which a call that reports progress ends by its own.
const BEFORE_DEADLINE: Duration = Duration::from_secs(1);

/// `[[tool]] kind = "mcp"`: a server of the Model Context Protocol.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpKeys {
    /// Program of the server and its arguments, if it is one that speaks over standard input and output.
    pub command: Vec<String>,
    /// The folder that it runs in; that of the recipe if it is not given.
    pub folder: PathBuf,
    /// Names of environment variables that it gets besides the
    /// [usual ones](levade_policy::environment::PASSED).
    pub environment: Vec<String>,
    /// Address of the server, if it speaks streamable HTTP.
    pub url: String,
    /// Environment variable with a key, which is sent as `Authorization: Bearer`.
    pub key_env: String,
    /// Environment variables whose values are sent as headers, by the names of these.
    pub headers_env: BTreeMap<String, String>,
    /// The tools that agents have; all if empty.
    pub allow: Vec<String>,
    /// The tools that they do not have.
    pub deny: Vec<String>,
    /// Names that agents have for tools, by the server's names.
    pub rename: BTreeMap<String, String>,
    /// Timeout for a call that reports progress, in seconds; `seconds` then counts from its last report.
    /// Progress prolongs nothing if it is not given.
    pub progress_seconds: Option<f64>,
    /// Whether all attempts share one connection, and so, one process; for servers that keep nothing.
    pub shared: bool,
}

/// Timeout for a server, which has to start, in seconds, if the recipe does not give one.
const SECONDS: f64 = 60.0;

impl ToolOptions for McpKeys {
    fn timeout(&self, seconds: Option<f64>) -> Option<f64> {
        Some(seconds.unwrap_or(SECONDS))
    }

    fn check(&self, _seconds: Option<f64>) -> Result<(), OptionError> {
        if let Some(seconds) =
            self.progress_seconds.filter(|seconds| !(*seconds > 0.0 && *seconds <= MAX_SECONDS))
        {
            let why = format!("progress_seconds = {seconds}, but it must be in 0..={MAX_SECONDS:e}, not 0");
            return Err(why.into());
        }
        let why = match (self.command.is_empty(), self.url.is_empty()) {
            (false, true) if self.key_env.is_empty() && self.headers_env.is_empty() => return Ok(()),
            (false, true) => "key_env and headers_env are for a url; a command gets keys by environment",
            (true, false) => return Ok(Services::any().check(&self.url)?),
            _ => "give either command (a program) or url (streamable HTTP)",
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

/// Where a server is.
#[derive(Clone)]
enum McpServer {
    /// A program, spoken to over its standard input and output.
    Program { launch: Launch, supervisor: Supervisor },
    /// An address of streamable HTTP, with headers of every request, keys for instance.
    Address { url: String, headers: Vec<(HeaderName, HeaderValue)>, client: Client },
}

/// Deadlines of a call that reports progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Prolonged {
    /// Timeout for the next report.
    idle: Duration,
    /// Timeout for the call.
    longest: Duration,
}

/// A server of the Model Context Protocol, each of whose attempts has a connection of its own, or all one.
#[derive(Clone)]
pub struct Mcp {
    name: String,
    server: McpServer,
    keys: McpKeys,
    prolonged: Option<Prolonged>,
    shared: Option<Arc<Mutex<Option<Arc<Connection>>>>>,
    wants_handshake: Arc<AtomicBool>,
    /// What the server did until the last opening that was given up.
    late: Arc<std::sync::Mutex<String>>,
}

impl Mcp {
    /// Creates the toolbox `name`, whose calls may take so many seconds.
    ///
    /// # Errors
    /// Says which options do not go together, or which key is not set in the environment.
    pub fn new(
        name: impl Into<String>,
        keys: McpKeys,
        seconds: Option<f64>,
        supervisor: &Supervisor,
    ) -> Result<Self, String> {
        keys.check(seconds).map_err(|error| error.to_string())?;
        let server = match keys.url.as_str() {
            "" => {
                let (dir, passes) = (keys.folder.clone(), keys.environment.clone());
                let launch = Launch { dir, passes, ..Launch::new(&keys.command) };
                McpServer::Program { launch, supervisor: supervisor.clone() }
            }
            url => {
                let services = Services::any();
                let headers = services.headers(&keys.key_env, &keys.headers_env)?;
                let headers = headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
                McpServer::Address { url: url.to_owned(), headers, client: services.client()? }
            }
        };
        let idle = Duration::from_secs_f64(seconds.unwrap_or(SECONDS));
        let prolonged = keys.progress_seconds.map(|longest| {
            let longest = Duration::from_secs_f64(longest).max(idle);
            Prolonged { idle, longest }
        });
        Ok(Mcp {
            name: name.into(),
            server,
            prolonged,
            shared: keys.shared.then(Arc::default),
            keys,
            wants_handshake: Arc::default(),
            late: Arc::default(),
        })
    }

    /// A connection, and whether it is another one than `last`.
    async fn connect(&self, last: Option<&Arc<Connection>>) -> Result<(Arc<Connection>, bool), String> {
        let Some(shared) = &self.shared else {
            return match last.filter(|last| !last.is_over()) {
                Some(last) => Ok((Arc::clone(last), false)),
                None => Ok((self.open_connection().await?, true)),
            };
        };
        let mut shared = shared.lock().await;
        let connection = match shared.take().filter(|connection| !connection.is_over()) {
            Some(connection) => connection,
            None => self.open_connection().await?,
        };
        *shared = Some(Arc::clone(&connection));
        let is_new = last.is_some_and(|last| !Arc::ptr_eq(last, &connection));
        Ok((connection, is_new))
    }

    async fn open_connection(&self) -> Result<Arc<Connection>, String> {
        Ok(Arc::new(Connection::open(&self.server, &self.wants_handshake, &self.late).await?))
    }

    /// Returns the tools that agents have, by their names.
    ///
    /// # Errors
    /// Returns an error if a tool that is named is not there, or two would have one name.
    fn offered(&self, tools: &[ToolSpec]) -> Result<Vec<ToolSpec>, String> {
        let is_there = |name: &&String| tools.iter().any(|tool| tool.name == **name);
        let named = self.keys.allow.iter().chain(&self.keys.deny).chain(self.keys.rename.keys());
        if let Some(missing) = named.into_iter().find(|name| !is_there(name)) {
            let all: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            return Err(format!("it has no tool {missing:?}; it has {}", all.join(", ")));
        }
        let mut offered: Vec<ToolSpec> = Vec::new();
        for spec in self.selected(tools) {
            if offered.iter().any(|earlier| earlier.name == spec.name) {
                return Err(format!(
                    "two of its tools would be named {:?}: give one another name with rename",
                    spec.name
                ));
            }
            offered.push(spec);
        }
        Ok(offered)
    }

    /// Returns the tools that `allow` and `deny` leave, by their names for agents.
    fn selected<'a>(&'a self, tools: &'a [ToolSpec]) -> impl Iterator<Item = ToolSpec> + 'a {
        let McpKeys { allow, deny, rename, .. } = &self.keys;
        let is_allowed = |name: &String| allow.is_empty() || allow.contains(name);
        let kept = tools.iter().filter(move |tool| is_allowed(&tool.name) && !deny.contains(&tool.name));
        kept.map(|tool| {
            let name = rename.get(&tool.name).unwrap_or(&tool.name).clone();
            ToolSpec { name, ..tool.clone() }
        })
    }

    /// Returns the server's name of a tool.
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
        let specs = self.offered(&connection.tools()).map_err(wrong)?;
        let (toolbox, specs) = (self.clone(), std::sync::Mutex::new(specs));
        Ok(Box::new(McpSession { toolbox, specs, connection: Mutex::new(Some(connection)) }))
    }

    fn late(&self) -> String {
        self.late.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A server in use by one attempt.
struct McpSession {
    toolbox: Mcp,
    /// Tools as of the last call.
    specs: std::sync::Mutex<Vec<ToolSpec>>,
    connection: Mutex<Option<Arc<Connection>>>,
}

impl McpSession {
    /// The connection to ask, and what the model must be told of it.
    async fn connection(&self) -> Result<(Arc<Connection>, Option<String>), String> {
        let mut held = self.connection.lock().await;
        let over = match held.as_ref() {
            Some(held) if held.end_if_hung().await => Some("; it did not answer any more".to_owned()),
            Some(held) if held.is_over() => Some(held.why_over()),
            _ => None,
        };
        let (connection, is_new) = self.toolbox.connect(held.as_ref()).await?;
        *held = Some(Arc::clone(&connection));
        let told = is_new.then(|| {
            let why = over.unwrap_or_default();
            format!("[the server of this tool was started anew, and what it held is lost{why}]")
        });
        Ok((connection, told))
    }
}

#[async_trait]
impl Session for McpSession {
    fn specs(&self) -> Vec<ToolSpec> {
        self.specs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn longest_call(&self) -> Option<Duration> {
        self.toolbox.prolonged.map(|prolonged| prolonged.longest + BEFORE_DEADLINE)
    }

    /// Answers are told apart by their ids, and a server that keeps something decides itself what is done
    /// when.
    fn parallel(&self, _tool: &str) -> bool {
        true
    }

    /// A call may change something at the server.
    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let (connection, told) = match self.connection().await {
            Ok(found) => found,
            Err(why) => return answer::unavailable(&self.toolbox.name, &why),
        };
        let name = self.toolbox.server_name(tool).to_owned();
        let request = CallToolRequestParams::new(name).with_arguments(arguments.clone());
        let answer = connection.call(request, self.toolbox.prolonged).await;
        let mut output = answer::output(&self.toolbox.name, tool, answer);
        connection.follow_changes().await;
        let now = self.toolbox.selected(&connection.tools()).collect();
        *self.specs.lock().unwrap_or_else(PoisonError::into_inner) = now;
        if let Some(told) = told {
            output.parts.insert(0, levade_text::ContentPart::Text(format!("{told}\n")));
            output.metrics.insert("restarts".into(), 1.0);
        }
        output
    }

    /// A call that restarts the server holds the connection, which then has nothing to tell.
    fn late(&self) -> String {
        let connection = self.connection.try_lock().ok().and_then(|connection| connection.clone());
        connection.map(|connection| connection.instead()).unwrap_or_else(|| self.toolbox.late())
    }

    async fn close(&mut self) -> Result<(), ToolError> {
        if self.toolbox.shared.is_none()
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
