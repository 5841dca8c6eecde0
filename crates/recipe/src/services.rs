//! Toolboxes that are services of others: `[[tool]]` of the kinds `mcp`, `http` and `mcpapi`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use levade_agent::Keeper;
use levade_text::ToolSpec;
use levade_tools::{Endpoint, EndpointOptions, Mcp, McpServer, Node, Prolonged, Services};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::MOST_SECONDS;

/// `[[tool]] kind = "mcp"`: a server of the Model Context Protocol.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpKeys {
    /// Program of the server and its arguments, where it is one that speaks over standard input and output.
    pub command: Vec<String>,
    /// The folder that it runs in; that of the recipe where not given.
    pub folder: PathBuf,
    /// Names of environment variables that it gets besides the usual ones.
    pub environment: Vec<String>,
    /// Address of the server, where it speaks streamable HTTP.
    pub url: String,
    /// Environment variable with a key, which is sent as `Authorization: Bearer`.
    pub key_env: String,
    /// Environment variables whose values are sent as headers, by the names of these.
    pub headers_env: BTreeMap<String, String>,
    /// The tools that agents have; all where empty.
    pub allow: Vec<String>,
    /// The tools that they do not have.
    pub deny: Vec<String>,
    /// Names that agents have for tools, by the server's names.
    pub rename: BTreeMap<String, String>,
    /// Longest time of a call that reports progress, in seconds; `seconds` then counts from its last report.
    /// Progress prolongs nothing where not given.
    pub progress_seconds: Option<f64>,
    /// Whether all attempts share one connection, and so, one process; for servers that keep nothing.
    pub shared: bool,
}

/// `[[tool]] kind = "http"`: an endpoint of a service as one tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpKeys {
    /// Description for the model.
    pub description: String,
    /// JSON schema of its arguments.
    pub parameters: Map<String, Value>,
    /// Address; `{NAME}` in it stands for an argument. Others are the query of a GET, and the JSON body of a
    /// POST.
    pub url: String,
    /// Method.
    pub method: String,
    /// Environment variable with a key, which is sent as `Authorization: Bearer`.
    pub key_env: String,
    /// Environment variables whose values are sent as headers, by the names of these.
    pub headers_env: BTreeMap<String, String>,
    /// Hosts of the internet that may be asked, besides that of `url`: needed where an argument names it, or
    /// where it redirects to others.
    pub hosts: Vec<String>,
    /// Hosts of this machine or network that may be asked, besides that of `url`.
    pub private_hosts: Vec<String>,
    /// Part of a JSON answer that the model reads, as a JSON pointer.
    pub pointer: String,
    /// How often a request is repeated that the service has not taken.
    pub retries: u32,
}

impl Default for HttpKeys {
    fn default() -> Self {
        HttpKeys {
            description: String::new(),
            parameters: Map::new(),
            url: String::new(),
            method: "POST".into(),
            key_env: String::new(),
            headers_env: BTreeMap::new(),
            hosts: Vec::new(),
            private_hosts: Vec::new(),
            pointer: String::new(),
            retries: 2,
        }
    }
}

/// `[[tool]] kind = "mcpapi"`: a node of AgentDock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpapiKeys {
    /// Address of its routes, `http://HOST:PORT/mcpapi`.
    pub url: String,
    /// Environment variable with a key, which is sent as `Authorization: Bearer`.
    pub key_env: String,
    /// Environment variables whose values are sent as headers, by the names of these.
    pub headers_env: BTreeMap<String, String>,
    /// The tools that agents do not have.
    pub deny: Vec<String>,
    /// How often a question is repeated that the node has not taken.
    pub retries: u32,
}

impl Default for McpapiKeys {
    fn default() -> Self {
        McpapiKeys {
            url: String::new(),
            key_env: String::new(),
            headers_env: BTreeMap::new(),
            deny: Vec::new(),
            retries: 3,
        }
    }
}

impl McpKeys {
    /// Checks what needs no key.
    pub(super) fn check(&self) -> Result<(), String> {
        if let Some(seconds) =
            self.progress_seconds.filter(|seconds| !(*seconds > 0.0 && *seconds <= MOST_SECONDS))
        {
            return Err(format!(
                "progress_seconds = {seconds}, but it must be in 0..={MOST_SECONDS:e}, not 0"
            ));
        }
        match (self.command.is_empty(), self.url.is_empty()) {
            (false, true) if self.key_env.is_empty() && self.headers_env.is_empty() => Ok(()),
            (false, true) => {
                Err("key_env and headers_env are for a url; a command gets keys by environment".into())
            }
            (true, false) => Services::any().check(&self.url),
            _ => Err("give either command (a program) or url (streamable HTTP)".into()),
        }
    }

    /// The toolbox.
    ///
    /// # Errors
    /// Names a key that cannot be.
    pub(super) fn toolbox(&self, name: String, seconds: f64, keeper: &Keeper) -> Result<Mcp, String> {
        self.check()?;
        let server = match self.url.as_str() {
            "" => McpServer::Program {
                command: self.command.clone(),
                folder: self.folder.clone(),
                passes: self.environment.clone(),
                keeper: keeper.clone(),
            },
            url => Services::any().mcp(url, &self.key_env, &self.headers_env)?,
        };
        let mut toolbox = Mcp::new(name, server).denying(self.deny.clone()).renaming(self.rename.clone());
        if let Some(longest) = self.progress_seconds {
            let (idle, longest) = (Duration::from_secs_f64(seconds), Duration::from_secs_f64(longest));
            toolbox = toolbox.prolonging(Prolonged { idle, longest: longest.max(idle) });
        }
        if !self.allow.is_empty() {
            toolbox = toolbox.allowing(self.allow.clone());
        }
        Ok(if self.shared { toolbox.shared() } else { toolbox })
    }
}

impl HttpKeys {
    /// Checks what needs no key.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.url.is_empty() {
            return Err("give url, the address that is asked".into());
        }
        let services = Services::only(&self.url, &self.hosts, &self.private_hosts)?;
        Endpoint::check(&self.url, &self.schema())?;
        services.method(&self.method).map(drop)
    }

    /// The schema of the arguments.
    fn schema(&self) -> Value {
        match self.parameters.is_empty() {
            true => json!({ "type": "object", "properties": {} }),
            false => Value::Object(self.parameters.clone()),
        }
    }

    /// The toolbox.
    ///
    /// # Errors
    /// Names a key that cannot be.
    pub(super) fn toolbox(&self, name: String) -> Result<Endpoint, String> {
        self.check()?;
        let parameters = self.schema();
        let services = Services::only(&self.url, &self.hosts, &self.private_hosts)?;
        Endpoint::new(
            name.clone(),
            EndpointOptions {
                spec: ToolSpec { name, description: self.description.clone(), parameters },
                method: services.method(&self.method)?,
                url: self.url.clone(),
                headers: services.headers(&self.key_env, &self.headers_env)?,
                pointer: self.pointer.clone(),
                retries: self.retries,
                parallel: true,
                client: services.client()?,
            },
        )
    }
}

impl McpapiKeys {
    /// Checks what needs no key.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.url.is_empty() {
            return Err("give url, the address of the node's routes, which ends with /mcpapi".into());
        }
        Services::any().check(&self.url)
    }

    /// The toolbox.
    ///
    /// # Errors
    /// Names a key that cannot be.
    pub(super) fn toolbox(&self, name: String) -> Result<Node, String> {
        self.check()?;
        let services = Services::any();
        let headers = services.headers(&self.key_env, &self.headers_env)?;
        Ok(Node::new(name, &self.url, (headers, services.client()?), self.retries, self.deny.clone()))
    }
}
