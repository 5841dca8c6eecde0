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
use levade_process::Supervisor;
use levade_text::ToolSpec;
use rmcp::model::CallToolRequestParams;
use serde_json::{Map, Value};
use tokio::sync::Mutex;

use super::{Session, ToolContext, ToolError, ToolOutput, Toolbox};
use connection::Connection;

/// Most bytes of a message of a server.
pub(super) const MOST_BYTES: usize = 64 << 20;

/// Time before the deadline of a call at which a call that reports progress ends by its own.
const BEFORE_DEADLINE: Duration = Duration::from_secs(1);

/// Where a server is.
#[derive(Clone)]
pub enum McpServer {
    /// A program, spoken to over its standard input and output.
    Program {
        /// The program and its arguments.
        command: Vec<String>,
        /// The folder that it runs in; this process' where empty.
        folder: PathBuf,
        /// Names of environment variables that it gets besides the [usual
        /// ones](levade_policy::environment::PASSED).
        passes: Vec<String>,
        /// Ends it with all that it has started.
        keeper: Supervisor,
    },
    /// An address of streamable HTTP.
    Address {
        /// The address.
        url: String,
        /// Headers of every request, keys for instance.
        headers: Vec<(HeaderName, HeaderValue)>,
        /// Asks.
        client: Client,
    },
}

/// Deadlines of a call that reports progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prolonged {
    /// Longest time without a report.
    pub idle: Duration,
    /// Longest time in all.
    pub longest: Duration,
}

/// A server of the Model Context Protocol, each of whose attempts has a connection of its own, or all one.
#[derive(Clone)]
pub struct Mcp {
    name: String,
    server: McpServer,
    allow: Option<Vec<String>>,
    deny: Vec<String>,
    /// Names that agents have for tools, by the server's.
    rename: BTreeMap<String, String>,
    prolonged: Option<Prolonged>,
    shared: Option<Arc<Mutex<Option<Arc<Connection>>>>>,
    wants_handshake: Arc<AtomicBool>,
    /// What the server did until the last opening that was given up.
    late: Arc<std::sync::Mutex<String>>,
}

impl Mcp {
    /// The toolbox `name`, with all tools of a server, and a connection for each attempt.
    pub fn new(name: impl Into<String>, server: McpServer) -> Self {
        let (name, deny, rename) = (name.into(), Vec::new(), BTreeMap::new());
        Mcp {
            name,
            server,
            allow: None,
            deny,
            rename,
            prolonged: None,
            shared: None,
            wants_handshake: Arc::default(),
            late: Arc::default(),
        }
    }

    /// With these tools alone.
    #[must_use]
    pub fn allowing(self, tools: Vec<String>) -> Self {
        Mcp { allow: Some(tools), ..self }
    }

    /// Without these tools.
    #[must_use]
    pub fn denying(self, tools: Vec<String>) -> Self {
        Mcp { deny: tools, ..self }
    }

    /// Names tools, by the server's names, as these.
    #[must_use]
    pub fn renaming(self, names: BTreeMap<String, String>) -> Self {
        Mcp { rename: names, ..self }
    }

    /// Lets calls that report progress take longer.
    #[must_use]
    pub fn prolonging(self, prolonged: Prolonged) -> Self {
        Mcp { prolonged: Some(prolonged), ..self }
    }

    /// With one connection for all attempts.
    #[must_use]
    pub fn shared(self) -> Self {
        Mcp { shared: Some(Arc::default()), ..self }
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
        let named = self.allow.iter().flatten().chain(&self.deny).chain(self.rename.keys());
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
        let is_allowed = |name: &String| self.allow.as_ref().is_none_or(|allow| allow.contains(name));
        let kept = tools.iter().filter(move |tool| is_allowed(&tool.name) && !self.deny.contains(&tool.name));
        kept.map(|tool| {
            let name = self.rename.get(&tool.name).unwrap_or(&tool.name).clone();
            ToolSpec { name, ..tool.clone() }
        })
    }

    /// Returns the server's name of a tool.
    fn server_name<'a>(&'a self, tool: &'a str) -> &'a str {
        self.rename.iter().find(|(_, name)| *name == tool).map_or(tool, |(own, _)| own)
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
