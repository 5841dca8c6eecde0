//! A node of AgentDock: tools over its `/mcpapi` routes.
//!
//! The routes are those of AgentRL's client (`RL/rollout/mcp/mcpapi`). `GET /tools` lists tools in
//! OpenAI's format, named `SERVER.TOOL`. `POST /tool/SERVER.TOOL` with the arguments as JSON
//! returns `{"content": …}`. Errors may have HTTP status 200 and the body `{"status_code",
//! "detail"}`.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use hyper::Method;
use levade_process::Supervisor;
use levade_text::{ContentPart, ToolSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{HttpCaller, PermittedHosts, request_failure};
use crate::{
    CallError, OptionError, Session, ToolContext, ToolError, ToolOptions, ToolOutput, Toolbox,
};

/// Options of `[[tool]] kind = "mcpapi"`: a node of AgentDock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpapiKeys {
    /// URL of the node's routes, of the form `http://HOST:PORT/mcpapi`.
    pub url: String,
    /// Name of the environment variable with an API key, which is sent as `Authorization: Bearer`.
    /// If empty, no key is sent.
    pub key_env: String,
    /// Names of environment variables whose values are sent as headers, by header name.
    pub headers_env: BTreeMap<String, String>,
    /// Names of tools that agents cannot call, with or without the server's prefix.
    pub deny: Vec<String>,
    /// Maximum number of retries of a request that the node has not accepted.
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

impl ToolOptions for McpapiKeys {
    fn check(&self, _seconds: Option<f64>) -> Result<(), OptionError> {
        if self.url.is_empty() {
            return Err(
                "url is empty; set it to the address of the node's routes, which ends with \
                 /mcpapi"
                    .to_owned()
                    .into(),
            );
        }
        Ok(PermittedHosts::for_any_host().check(&self.url)?)
    }

    fn toolbox(
        &self,
        name: String,
        _: Option<f64>,
        _: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String> {
        Ok(Arc::new(AgentDockNode::new(name, self)?))
    }
}

/// Toolbox for a node of AgentDock. All attempts share the node's state.
#[derive(Debug, Clone)]
pub struct AgentDockNode {
    name: String,
    /// URL of the node's routes, without a trailing slash.
    url: String,
    caller: HttpCaller,
    deny: Vec<String>,
}

#[derive(Deserialize)]
struct ToolListing {
    tools: Vec<ListedTool>,
}

#[derive(Deserialize)]
struct ListedTool {
    function: ListedFunction,
}

#[derive(Deserialize)]
struct ListedFunction {
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
}

impl AgentDockNode {
    /// Creates the toolbox `name`.
    ///
    /// # Errors
    /// Returns an error if the URL is invalid or an environment variable with a key is not set.
    pub fn new(name: impl Into<String>, keys: &McpapiKeys) -> Result<Self, String> {
        keys.check(None).map_err(|error| error.to_string())?;
        let services = PermittedHosts::for_any_host();
        let headers = services.headers(&keys.key_env, &keys.headers_env)?;
        let caller = HttpCaller { client: services.client()?, headers, retries: keys.retries };
        let url = keys.url.trim_end_matches('/').to_owned();
        Ok(AgentDockNode { name: name.into(), url, caller, deny: keys.deny.clone() })
    }

    async fn tools(&self) -> Result<Vec<ToolSpec>, String> {
        let response =
            self.caller.send(Method::GET, format!("{}/tools", self.url), Bytes::new()).await;
        let response = response.map_err(|error| error.to_string())?;
        if !response.status.is_success() {
            return Err(format!(
                "the node's route {}/tools returned HTTP {}: {}",
                self.url,
                response.status,
                response.text()
            ));
        }
        let listed: ToolListing = serde_json::from_slice(&response.body).map_err(|error| {
            format!("the response of {}/tools is not a list of tools ({error})", self.url)
        })?;
        let specs = listed.tools.into_iter().map(|tool| ToolSpec {
            name: tool.function.name,
            description: tool.function.description.unwrap_or_default(),
            // A tool without arguments may have no schema.
            parameters: tool
                .function
                .parameters
                .unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        });
        // Tools are denied by their full name or by their name within the server, as in
        // `blocked_tools` of AgentRL.
        let is_denied = |name: &str| {
            let bare = name.rsplit_once('.').map_or(name, |(_, bare)| bare);
            self.deny.iter().any(|deny| deny == name || deny == bare)
        };
        Ok(specs.filter(|spec| !is_denied(&spec.name)).collect())
    }
}

#[async_trait]
impl Toolbox for AgentDockNode {
    fn name(&self) -> &str {
        &self.name
    }

    async fn open(&self, _attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let specs =
            self.tools().await.map_err(|why| ToolError::Open { tool: self.name.clone(), why })?;
        Ok(Box::new(NodeSession { node: self.clone(), specs }))
    }
}

struct NodeSession {
    node: AgentDockNode,
    specs: Vec<ToolSpec>,
}

#[async_trait]
impl Session for NodeSession {
    fn specs(&self) -> Vec<ToolSpec> {
        self.specs.clone()
    }

    fn can_run_parallel(&self, _tool: &str) -> bool {
        true
    }

    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let url = format!("{}/tool/{tool}", self.node.url);
        let body = Value::Object(arguments.clone()).to_string().into();
        match self.node.caller.send(Method::POST, url, body).await {
            Ok(response) => match serde_json::from_slice(&response.body) {
                Ok(result_value) => output(response.status.as_u16(), result_value),
                Err(_) => ToolOutput::error(
                    CallError::Unavailable,
                    format!("HTTP {} with no JSON: {}", response.status, response.text()),
                ),
            },
            Err(error) => request_failure(&error),
        }
    }
}

/// Converts a node's response into a tool result. `http` is the HTTP status.
fn output(http: u16, response: Value) -> ToolOutput {
    // The node returns its errors with HTTP status 200, because it does not raise them.
    let reported_status = response.get("status_code").and_then(Value::as_u64);
    let status = reported_status.unwrap_or(u64::from(http));
    if status >= 400 {
        let why = response.get("detail").map_or_else(|| response.to_string(), text);
        let kind = if status < 500 { CallError::Failed } else { CallError::Unavailable };
        return ToolOutput::error(kind, why);
    }
    let content = response.get("content").unwrap_or(&response);
    let parts: Vec<ContentPart> = match content {
        Value::Array(items) if items.iter().all(|item| item.get("type").is_some()) => {
            items.iter().map(part).collect()
        }
        Value::Object(fields) if fields.is_empty() => {
            return ToolOutput::error(CallError::Failed, "the tool said nothing");
        }
        other => vec![ContentPart::Text(text(other))],
    };
    ToolOutput { parts, ..ToolOutput::default() }
}

fn part(item: &Value) -> ContentPart {
    match (item, item.get("text").and_then(Value::as_str)) {
        (_, Some(text)) if item["type"] == "text" => ContentPart::Text(text.to_owned()),
        (Value::Object(fields), _) => ContentPart::Other(fields.clone()),
        (other, _) => ContentPart::Text(other.to_string()),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::context;
    use crate::web::testing::service;

    #[tokio::test]
    async fn agentdock_node_lists_and_calls_tools() {
        let (address, heard) = service(|_, path| match path {
            "/mcpapi/tools" => {
                let bare = json!({"type": "function", "function": {"name": "web.back", "description": null}});
                (200, json!({"tools": [listed_tool("web.search"), listed_tool("file.read_file"), bare]}).to_string())
            }
            "/mcpapi/tool/web.search" => (200, json!({"content": {"hits": [1]}}).to_string()),
            _ => (200, json!({"status_code": 500, "detail": "no session"}).to_string()),
        })
        .await;
        let url = format!("http://{address}/mcpapi/");
        let deny = vec!["read_file".into()];
        let keys = McpapiKeys { url, deny, retries: 1, ..McpapiKeys::default() };
        let node = AgentDockNode::new("dock", &keys).unwrap();
        let session = node.open(&context("a")).await.unwrap();
        let names: Vec<String> = session.specs().into_iter().map(|spec| spec.name).collect();
        assert_eq!(names, ["web.search", "web.back"]);
        assert_eq!(session.specs()[1].parameters["type"], "object");
        let arguments = json!({"query": ["x"]});
        let arguments = arguments.as_object().unwrap();
        assert_eq!(session.call("web.search", arguments).await, ToolOutput::text("{\"hits\":[1]}"));
        let failed = session.call("web.gone", arguments).await;
        assert_eq!(failed, ToolOutput::error(CallError::Unavailable, "no session"));
        assert_eq!(heard.lock().await[1].1, "{\"query\":[\"x\"]}");
    }

    fn listed_tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}})
    }

    #[test]
    fn node_output_accepts_all_content_formats() {
        assert_eq!(read_output(json!({"content": "plain"})), "plain");
        assert_eq!(read_output(json!({"content": [1, 2]})), "[1,2]");
        let parts = json!({"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}]});
        assert_eq!(
            read_output(parts),
            "a\n[a part of type \"image_url\", which cannot be shown]\n"
        );
        assert_eq!(output(200, json!({"content": {}})).error, Some(CallError::Failed));
        assert_eq!(output(422, json!({"detail": "bad"})).error, Some(CallError::Failed));
        assert_eq!(output(500, json!({})).error, Some(CallError::Unavailable));
    }

    fn read_output(response: Value) -> String {
        output(200, response).read()
    }
}
