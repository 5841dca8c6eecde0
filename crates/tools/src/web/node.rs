//! A node of AgentDock: tools over its `/mcpapi` routes.
//!
//! The contract is that of AgentRL's client (`RL/rollout/mcp/mcpapi`): `GET /tools` lists tools in OpenAI's
//! shape, named `SERVER.TOOL`; `POST /tool/SERVER.TOOL` with the arguments as JSON gives `{"content": …}`.
//! Errors come with HTTP 200 and `{"status_code", "detail"}` as well.

use async_trait::async_trait;
use bytes::Bytes;
use hyper::Method;
use hyper::header::HeaderMap;
use levade_http::Client;
use levade_text::{ContentPart, ToolSpec};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Asks, unanswered};
use crate::{CallError, Session, ToolContext, ToolError, ToolOutput, Toolbox};

/// A node of AgentDock. All attempts share what it holds.
#[derive(Debug, Clone)]
pub struct Node {
    name: String,
    /// Address of its routes, `http://HOST:PORT/mcpapi`.
    url: String,
    asks: Asks,
    deny: Vec<String>,
}

#[derive(Deserialize)]
struct Listed {
    tools: Vec<ListedTool>,
}

#[derive(Deserialize)]
struct ListedTool {
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
}

impl Node {
    /// The toolbox of this name: a node at an address, which ends with `/mcpapi`, without the tools of
    /// `deny`. Questions that it has not taken are repeated `retries` times.
    pub fn new(
        name: impl Into<String>,
        url: &str,
        (headers, client): (HeaderMap, Client),
        retries: u32,
        deny: Vec<String>,
    ) -> Self {
        let url = url.trim_end_matches('/').to_owned();
        Node { name: name.into(), url, asks: Asks { client, headers, retries }, deny }
    }

    async fn tools(&self) -> Result<Vec<ToolSpec>, String> {
        let reply = self.asks.ask(Method::GET, format!("{}/tools", self.url), Bytes::new()).await;
        let reply = reply.map_err(|error| error.to_string())?;
        if !reply.status.is_success() {
            return Err(format!("{}/tools answers with HTTP {}: {}", self.url, reply.status, reply.text()));
        }
        let listed: Listed = serde_json::from_slice(&reply.body)
            .map_err(|error| format!("{}/tools is no list of tools ({error})", self.url))?;
        let specs = listed.tools.into_iter().map(|tool| ToolSpec {
            name: tool.function.name,
            description: tool.function.description.unwrap_or_default(),
            // Of a tool without arguments it may be left out.
            parameters: tool
                .function
                .parameters
                .unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        });
        // Denied by their whole name, or by that within their server, as AgentRL's `blocked_tools` are.
        let is_denied = |name: &str| {
            let bare = name.rsplit_once('.').map_or(name, |(_, bare)| bare);
            self.deny.iter().any(|deny| deny == name || deny == bare)
        };
        Ok(specs.filter(|spec| !is_denied(&spec.name)).collect())
    }
}

#[async_trait]
impl Toolbox for Node {
    fn name(&self) -> &str {
        &self.name
    }

    async fn open(&self, _attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let wrong = |why| ToolError::Open { tool: self.name.clone(), why };
        let specs = self.tools().await.map_err(wrong)?;
        Ok(Box::new(NodeSession { node: self.clone(), specs }))
    }
}

struct NodeSession {
    node: Node,
    specs: Vec<ToolSpec>,
}

#[async_trait]
impl Session for NodeSession {
    fn specs(&self) -> Vec<ToolSpec> {
        self.specs.clone()
    }

    fn parallel(&self, _tool: &str) -> bool {
        true
    }

    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let url = format!("{}/tool/{tool}", self.node.url);
        let body = Value::Object(arguments.clone()).to_string().into();
        match self.node.asks.ask(Method::POST, url, body).await {
            Ok(reply) => match serde_json::from_slice(&reply.body) {
                Ok(answer) => output(reply.status.as_u16(), answer),
                Err(_) => ToolOutput::error(
                    CallError::Unavailable,
                    format!("HTTP {} with no JSON: {}", reply.status, reply.text()),
                ),
            },
            Err(error) => unanswered(&error),
        }
    }
}

/// What an answer says.
fn output(http: u16, answer: Value) -> ToolOutput {
    // Its errors are returned, not raised, and so have the status 200.
    let told = answer.get("status_code").and_then(Value::as_u64);
    let status = told.unwrap_or(u64::from(http));
    if status >= 400 {
        let why = answer.get("detail").map_or_else(|| answer.to_string(), text);
        let kind = if status < 500 { CallError::Failed } else { CallError::Unavailable };
        return ToolOutput::error(kind, why);
    }
    let content = answer.get("content").unwrap_or(&answer);
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
    use levade_http::Hosts;

    use super::*;
    use crate::testing::context;
    use crate::web::testing::service;

    #[tokio::test]
    async fn tools_of_a_node_are_listed_and_called() {
        let (address, heard) = service(|_, path| match path {
            "/mcpapi/tools" => {
                let tool = |name: &str| {
                    json!({"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}})
                };
                let bare = json!({"type": "function", "function": {"name": "web.back", "description": null}});
                (200, json!({"tools": [tool("web.search"), tool("file.read_file"), bare]}).to_string())
            }
            "/mcpapi/tool/web.search" => (200, json!({"content": {"hits": [1]}}).to_string()),
            _ => (200, json!({"status_code": 500, "detail": "no session"}).to_string()),
        })
        .await;
        let client = Client::new(Hosts::any(), None).unwrap();
        let node = Node::new(
            "dock",
            &format!("http://{address}/mcpapi/"),
            (HeaderMap::new(), client),
            1,
            vec!["read_file".into()],
        );
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

    #[test]
    fn contents_come_in_several_forms() {
        let read = |answer: Value| output(200, answer).read();
        assert_eq!(read(json!({"content": "plain"})), "plain");
        assert_eq!(read(json!({"content": [1, 2]})), "[1,2]");
        let parts = json!({"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}]});
        assert_eq!(read(parts), "a\n[a part of type \"image_url\", which cannot be shown]\n");
        assert_eq!(output(200, json!({"content": {}})).error, Some(CallError::Failed));
        assert_eq!(output(422, json!({"detail": "bad"})).error, Some(CallError::Failed));
        assert_eq!(output(500, json!({})).error, Some(CallError::Unavailable));
    }
}
