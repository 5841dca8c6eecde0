//! Routes together with their descriptions, from which `GET /openapi.json` is generated.
//!
//! The router and the document are built from the same table, so they have the same routes.
//! `schemas.json` defines the data; a test validates the server's responses against it.

use std::future::ready;

use axum::Router;
use axum::handler::Handler;
use axum::http::StatusCode;
use axum::routing::{MethodFilter, get, on};
use serde_json::{Map, Value, json};

use crate::response::json_response;
use crate::service::Shared;

/// Path under which the server returns its OpenAPI document.
const DOCUMENT: &str = "/openapi.json";

/// JSON schemas of request and response bodies, by name.
const SCHEMAS: &str = include_str!("schemas.json");

/// OpenAPI description of one operation: an HTTP method of a path.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    summary: &'static str,
    status: u16,
    /// Schema of the response body: `NAME`, `[NAME]` for a list, `Page<NAME>` for a page, or empty
    /// if the response has no schema.
    response: &'static str,
    /// Schema name of the request body, and whether the body is required. `None` if the operation
    /// has no body.
    body: Option<(&'static str, bool)>,
    /// Names of the permitted query parameters.
    query: &'static [&'static str],
}

/// Creates the description of an operation: what it does, the status of its response, and the
/// schema of its response.
pub(crate) fn op(summary: &'static str, status: u16, response: &'static str) -> Operation {
    Operation { summary, status, response, body: None, query: &[] }
}

impl Operation {
    /// Sets the schema of a request body that is required.
    pub fn body(mut self, schema: &'static str) -> Self {
        self.body = Some((schema, true));
        self
    }

    /// Sets the schema of a request body that may be absent.
    pub fn optional_body(mut self, schema: &'static str) -> Self {
        self.body = Some((schema, false));
        self
    }

    /// Sets the names of the permitted query parameters.
    pub fn query(mut self, names: &'static [&'static str]) -> Self {
        self.query = names;
        self
    }

    fn document(&self, tag: &str, path: &str) -> Value {
        let in_path = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let in_path = in_path.map(|name| {
            json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } })
        });
        let in_query = self.query.iter().map(|name| {
            let schema = match *name {
                "limit" | "offset" | "after" => json!({ "type": "integer" }),
                name if name.ends_with("_in") || name == "agent" => {
                    json!({ "type": "array", "items": { "type": "string" } })
                }
                _ => json!({ "type": "string" }),
            };
            json!({ "name": name, "in": "query", "schema": schema })
        });
        let response = match build_schema(self.response) {
            None => json!({ "description": self.summary }),
            Some(schema) => {
                let content = json!({ "application/json": { "schema": schema } });
                json!({ "description": self.summary, "content": content })
            }
        };
        let mut all = json!({
            "summary": self.summary,
            "tags": [tag],
            "parameters": in_path.chain(in_query).collect::<Vec<_>>(),
            "responses": {
                self.status.to_string(): response,
                "default": {
                    "description": "Error",
                    "content": { "application/json": { "schema": build_schema("Error") } },
                },
            },
        });
        if let Some((name, is_required)) = self.body {
            let content = json!({ "application/json": { "schema": build_schema(name) } });
            all["requestBody"] = json!({ "required": is_required, "content": content });
        }
        all
    }
}

fn strip_delimiters<'a>(name: &'a str, open: &str, close: &str) -> Option<&'a str> {
    name.strip_prefix(open)?.strip_suffix(close)
}

/// Returns the JSON schema for a schema name in [`Operation`], or `None` if the name is empty.
fn build_schema(name: &str) -> Option<Value> {
    if name.is_empty() {
        None
    } else if let Some(item) = strip_delimiters(name, "[", "]") {
        Some(json!({ "type": "array", "items": build_schema(item) }))
    } else if let Some(item) = strip_delimiters(name, "Page<", ">") {
        let integer = json!({ "type": "integer" });
        let items = json!({ "type": "array", "items": build_schema(item) });
        Some(json!({
            "type": "object",
            "properties": { "items": items, "limit": integer, "offset": integer, "total": integer },
            "required": ["items", "limit", "offset", "total"],
            "additionalProperties": false,
        }))
    } else if let Some(item) = name.strip_suffix('?') {
        Some(json!({ "anyOf": [build_schema(item), { "type": "null" }] }))
    } else {
        Some(json!({ "$ref": format!("#/components/schemas/{name}") }))
    }
}

/// HTTP routes together with their OpenAPI descriptions.
pub(crate) struct Routes {
    tag: &'static str,
    router: Router<Shared>,
    /// Operations of the OpenAPI document: tag, HTTP method, path and description.
    operations: Vec<(&'static str, &'static str, String, Operation)>,
}

impl Routes {
    /// Creates an empty list of routes. `tag` groups the operations of this list in the OpenAPI
    /// document.
    pub fn new(tag: &'static str) -> Self {
        Routes { tag, router: Router::new(), operations: Vec::new() }
    }

    /// Adds a route for an HTTP method and a path, with its description.
    pub fn route<H, T>(
        mut self,
        method: &'static str,
        path: &str,
        handler: H,
        of: Operation,
    ) -> Self
    where
        H: Handler<T, Shared>,
        T: 'static,
    {
        let filter = match method {
            "get" => MethodFilter::GET,
            "patch" => MethodFilter::PATCH,
            "delete" => MethodFilter::DELETE,
            _ => MethodFilter::POST,
        };
        self.router = self.router.route(path, on(filter, handler));
        self.operations.push((self.tag, method, path.to_owned(), of));
        self
    }

    /// Adds a route for GET requests.
    pub fn get<H: Handler<T, Shared>, T: 'static>(self, path: &str, to: H, of: Operation) -> Self {
        self.route("get", path, to, of)
    }

    /// Adds a route for POST requests.
    pub fn post<H: Handler<T, Shared>, T: 'static>(self, path: &str, to: H, of: Operation) -> Self {
        self.route("post", path, to, of)
    }

    /// Adds all routes of another list.
    pub fn merge(mut self, other: Routes) -> Self {
        self.router = self.router.merge(other.router);
        self.operations.extend(other.operations);
        self
    }

    /// Prepends `prefix` to the paths of all routes.
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        self.router = Router::new().nest(prefix, self.router);
        for (.., path, _) in &mut self.operations {
            path.insert_str(0, prefix);
        }
        self
    }

    /// Returns the HTTP router of these routes, which also serves the OpenAPI document.
    pub fn into_router(mut self) -> Router<Shared> {
        let describe = op("Describe all routes", 200, "Any");
        self.operations.push(("service", "get", DOCUMENT.to_owned(), describe));
        let text = self.document().to_string();
        self.router.route(DOCUMENT, get(|| ready(json_response(StatusCode::OK, text))))
    }

    /// Returns the OpenAPI 3.1 document of these routes.
    pub fn document(&self) -> Value {
        let mut paths = Map::new();
        for (tag, method, path, of) in &self.operations {
            let entry = paths.entry(path.clone()).or_insert_with(|| json!({}));
            entry[*method] = of.document(tag, path);
        }
        let schemas: Value = serde_json::from_str(SCHEMAS).unwrap_or_default();
        let key = json!({ "type": "http", "scheme": "bearer" });
        json!({
            "openapi": "3.1.0",
            "info": {
                "title": "Levade's store of rollouts",
                "version": env!("CARGO_PKG_VERSION"),
                "description": "Rollouts, leases, workers, resources and spans, in the protocols of \
                                Agent Lightning 0.1, 0.3 and 1.0, and OpenTelemetry's traces.",
            },
            "paths": paths,
            "components": { "schemas": schemas, "securitySchemes": { "key": key } },
            "security": [{}, { "key": [] }],
        })
    }
}
