//! One HTTP endpoint of a service as a tool.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use hyper::Method;
use levade_process::Supervisor;
use levade_text::ToolSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{HttpCaller, PermittedHosts, request_failure};
use crate::arguments::ArgumentValidator;
use crate::{
    CallError, OptionError, Session, ToolContext, ToolError, ToolOptions, ToolOutput, Toolbox,
};

/// Options of `[[tool]] kind = "http"`: an HTTP endpoint as one tool. Each call sends a request
/// with the arguments of the call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpKeys {
    /// Description of the tool for the model.
    pub description: String,
    /// JSON schema of the tool's arguments. If empty, any arguments are permitted.
    pub parameters: Map<String, Value>,
    /// URL of the endpoint. `{NAME}` is replaced by the percent-encoded value of an argument. If
    /// the URL consists of one placeholder only, its value is used unencoded. The remaining
    /// arguments form the query of a GET, HEAD or DELETE request, in which the items of a list
    /// repeat the name, and the JSON body of other requests.
    pub url: String,
    /// HTTP method: GET, POST, PUT, PATCH or DELETE.
    pub method: String,
    /// Name of the environment variable with an API key, which is sent as `Authorization: Bearer`.
    /// If empty, no key is sent.
    pub key_env: String,
    /// Names of environment variables whose values are sent as headers, by header name.
    pub headers_env: BTreeMap<String, String>,
    /// Public hosts that may be requested in addition to the host of `url`. They are needed if an
    /// argument determines the host, or if the endpoint redirects to other hosts.
    pub hosts: Vec<String>,
    /// Hosts of this machine or of a private network that may be requested in addition to the host
    /// of `url`.
    pub private_hosts: Vec<String>,
    /// JSON pointer (RFC 6901) to the part of a JSON response that the model reads. If empty, the
    /// model reads the full response.
    pub pointer: String,
    /// Maximum number of retries of a request that the service has not accepted.
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

impl HttpKeys {
    /// Returns the JSON schema of the tool's arguments.
    fn schema(&self) -> Value {
        if self.parameters.is_empty() {
            json!({ "type": "object", "properties": {} })
        } else {
            Value::Object(self.parameters.clone())
        }
    }

    /// Parses the options that do not need an API key: the permitted hosts, the HTTP method, and
    /// the validator of the arguments.
    fn parts(&self) -> Result<(PermittedHosts, Method, ArgumentValidator), String> {
        if self.url.is_empty() {
            return Err("url is empty; set it to the address of the service".into());
        }
        let services = PermittedHosts::for_hosts(&self.url, &self.hosts, &self.private_hosts)?;
        let arguments = argument_validator(&self.url, &self.schema())?;
        let method = services.method(&self.method)?;
        Ok((services, method, arguments))
    }
}

impl ToolOptions for HttpKeys {
    fn needs_name(&self) -> bool {
        true
    }

    fn check(&self, _seconds: Option<f64>) -> Result<(), OptionError> {
        self.parts()?;
        Ok(())
    }

    fn toolbox(
        &self,
        name: String,
        _: Option<f64>,
        _: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String> {
        Ok(Arc::new(HttpEndpoint::new(name, self.clone())?))
    }
}

/// Toolbox with one tool, which calls the HTTP endpoint in [`HttpKeys`].
#[derive(Debug, Clone)]
pub struct HttpEndpoint {
    spec: ToolSpec,
    keys: HttpKeys,
    method: Method,
    caller: HttpCaller,
    arguments: ArgumentValidator,
}

/// Creates the validator of a tool's arguments from the JSON schema `parameters`.
///
/// # Errors
/// Returns an error if the schema is invalid, or if the URL has a placeholder that the schema does
/// not define.
fn argument_validator(url: &str, parameters: &Value) -> Result<ArgumentValidator, String> {
    let arguments = ArgumentValidator::new(parameters)
        .map_err(|why| format!("the tool's parameters are not a JSON schema: {why}"))?;
    for name in url_parts(url).filter_map(|(_, name)| name) {
        if !arguments.names().iter().any(|known| known == name) {
            let placeholders = match arguments.names() {
                [] => "the tool has none".to_owned(),
                names => format!("the tool has {}", names.join(", ")),
            };
            return Err(format!(
                "the tool's url has {{{name}}}, which is not one of its parameters; {placeholders}"
            ));
        }
    }
    Ok(arguments)
}

impl HttpEndpoint {
    /// Creates the toolbox `name` for the endpoint in `keys`.
    ///
    /// # Errors
    /// Returns an error if options are invalid or conflict, or if an environment variable with a
    /// key is not set.
    pub fn new(name: impl Into<String>, keys: HttpKeys) -> Result<Self, String> {
        let (services, method, arguments) = keys.parts()?;
        let headers = services.headers(&keys.key_env, &keys.headers_env)?;
        let caller = HttpCaller { client: services.client()?, headers, retries: keys.retries };
        let description = keys.description.clone();
        let parameters = keys.schema();
        let spec = ToolSpec { name: name.into(), description, parameters };
        Ok(HttpEndpoint { spec, keys, method, caller, arguments })
    }

    /// Substitutes the arguments of a call into the URL. Returns the URL and the arguments that the
    /// URL does not contain. A missing argument is replaced by its default.
    ///
    /// # Errors
    /// Returns an error if an argument is missing and has no default.
    fn build_url(
        &self,
        arguments: &Map<String, Value>,
    ) -> Result<(String, Map<String, Value>), String> {
        let mut rest = arguments.clone();
        let mut url = String::new();
        let is_full_url = matches!(
            url_parts(&self.keys.url).collect::<Vec<_>>()[..],
            [("", Some(_)), ("", None)]
        );
        let default = |name: &str| self.spec.parameters["properties"][name].get("default");
        for (text, name) in url_parts(&self.keys.url) {
            url.push_str(text);
            let Some(name) = name else { continue };
            // A URL cannot contain null.
            let present = arguments.get(name).filter(|value| !value.is_null());
            let value = present.or_else(|| default(name).filter(|value| !value.is_null()));
            let value = format_url_value(value.ok_or_else(|| format!("{name:?} is missing"))?);
            rest.shift_remove(name);
            url.push_str(&if is_full_url { value } else { percent_encode(&value) });
        }
        Ok((url, rest))
    }
}

/// Splits a URL into pieces, each with a literal text and the name of the placeholder that follows
/// the text; `None` if no placeholder follows.
fn url_parts(url: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    let mut remaining_url = Some(url);
    std::iter::from_fn(move || {
        let rest = remaining_url?;
        let placeholder =
            rest.split_once('{').and_then(|(text, after)| Some((text, after.split_once('}')?)));
        let (part, after) = match placeholder {
            Some((text, (name, after))) => ((text, Some(name)), Some(after)),
            None => ((rest, None), None),
        };
        remaining_url = after;
        Some(part)
    })
}

/// Formats a JSON value for a URL: strings as they are, other values as JSON.
fn format_url_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns the values of an argument in a URL query: the items of a list, or the value itself,
/// without nulls.
fn argument_values(value: &Value) -> impl Iterator<Item = &Value> {
    let all = match value {
        Value::Array(items) => items.as_slice(),
        other => std::slice::from_ref(other),
    };
    all.iter().filter(|item| !item.is_null())
}

/// Percent-encodes all bytes that are not unreserved characters (RFC 3986, section 2.3).
fn percent_encode(text: &str) -> String {
    let mut full_url = String::new();
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                full_url.push(byte as char)
            }
            _ => full_url.push_str(&format!("%{byte:02X}")),
        }
    }
    full_url
}

#[async_trait]
impl Toolbox for HttpEndpoint {
    fn name(&self) -> &str {
        &self.spec.name
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![self.spec.clone()])
    }

    async fn open(&self, _attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        Ok(Box::new(self.clone()))
    }
}

#[async_trait]
impl Session for HttpEndpoint {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![self.spec.clone()]
    }

    fn can_run_parallel(&self, _tool: &str) -> bool {
        true
    }

    async fn call(&self, _tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let HttpKeys { pointer, .. } = &self.keys;
        let (mut url, rest) =
            match self.arguments.validate(arguments).and_then(|checked| self.build_url(&checked)) {
                Ok(address) => address,
                Err(why) => return ToolOutput::error(CallError::BadArguments, why),
            };
        let mut body = Bytes::new();
        if matches!(self.method, Method::GET | Method::HEAD | Method::DELETE) {
            for (name, value) in rest
                .iter()
                .flat_map(|(name, value)| argument_values(value).map(move |item| (name, item)))
            {
                url.push(if url.contains('?') { '&' } else { '?' });
                url.push_str(&format!(
                    "{}={}",
                    percent_encode(name),
                    percent_encode(&format_url_value(value))
                ));
            }
        } else {
            body = Value::Object(rest).to_string().into();
        }
        let response = match self.caller.send(self.method.clone(), url, body).await {
            Ok(response) => response,
            Err(error) => return request_failure(&error),
        };
        let text = response.text();
        if !response.status.is_success() {
            let kind = match response.status.as_u16() {
                400 | 404 | 405 | 409 | 410 | 413 | 414 | 415 | 422 => CallError::Failed,
                _ => CallError::Unavailable,
            };
            return ToolOutput::error(kind, format!("HTTP {}: {text}", response.status));
        }
        if pointer.is_empty() {
            return ToolOutput::text(text);
        }
        match serde_json::from_str::<Value>(&text)
            .ok()
            .and_then(|value| value.pointer(pointer).map(format_url_value))
        {
            Some(part) => ToolOutput::text(part),
            None => ToolOutput::error(
                CallError::Failed,
                format!("the response has no value at the JSON pointer {pointer}: {text}"),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::web::testing::service;

    fn endpoint(method: Method, url: String) -> HttpEndpoint {
        let parameters = json!({
            "type": "object",
            "properties": {
                "id": {}, "url": {}, "n": { "type": "integer" }, "page": { "type": "integer", "default": 1 },
            },
        });
        let parameters = parameters.as_object().unwrap().clone();
        let method = method.to_string();
        let hosts = vec!["*.example.org".to_owned()];
        HttpEndpoint::new("t", HttpKeys { url, method, parameters, hosts, ..HttpKeys::default() })
            .unwrap()
    }

    async fn call_endpoint(endpoint: &HttpEndpoint, arguments: Value) -> ToolOutput {
        endpoint.call("t", arguments.as_object().unwrap()).await
    }

    #[tokio::test]
    async fn endpoint_arguments_fill_url_query_and_body() {
        let (address, heard) =
            service(|_, _| (200, "{\"a\": {\"b\": [\"found\", 7]}}".into())).await;
        let get = endpoint(Method::GET, format!("http://{address}/items/{{id}}?fixed=1"));
        let output = call_endpoint(&get, json!({"id": "a/../b c", "n": 2, "q": "ü&x=1"})).await;
        assert_eq!(output.error, None);
        let mut post = endpoint(Method::POST, format!("http://{address}/items/{{id}}"));
        post.keys.pointer = "/a/b/0".into();
        assert_eq!(call_endpoint(&post, json!({"id": 3, "n": 2})).await, ToolOutput::text("found"));
        post.keys.pointer = "/a/c".into();
        assert_eq!(call_endpoint(&post, json!({"id": 3})).await.error, Some(CallError::Failed));
        for values in [json!({"n": 2}), json!({"id": null, "n": 2})] {
            let missing = ToolOutput::error(CallError::BadArguments, "\"id\" is missing");
            assert_eq!(call_endpoint(&post, values).await, missing);
        }
        let heard = heard.lock().await;
        assert_eq!(heard[0].0, "GET /items/a%2F..%2Fb%20c?fixed=1&n=2&q=%C3%BC%26x%3D1");
        assert_eq!((heard[1].0.as_str(), heard[1].1.as_str()), ("POST /items/3", "{\"n\":2}"));
    }

    #[tokio::test]
    async fn arguments_are_validated_and_lists_repeat_name() {
        let (address, heard) = service(|_, _| (200, "\u{feff}{\"a\": 1}".into())).await;
        let mut get = endpoint(Method::GET, format!("http://{address}/pages/{{page}}"));
        get.keys.pointer = "/a".into();
        let values = json!({"id": ["x", null, 2], "n": null, "q": null});
        assert_eq!(call_endpoint(&get, values).await, ToolOutput::text("1"));
        let wrong = call_endpoint(&get, json!({"n": "two"})).await;
        assert_eq!(wrong.error, Some(CallError::BadArguments));
        assert!(wrong.read().starts_with("n: \"two\" is not of type"), "{}", wrong.read());
        let heard = heard.lock().await;
        assert_eq!((heard.len(), heard[0].0.as_str()), (1, "GET /pages/1?id=x&id=2"));
    }

    #[test]
    fn placeholder_is_encoded_unless_it_is_full_url() {
        assert_eq!(address_of("{url}"), "http://h/a b");
        assert_eq!(address_of("{url}{id}"), "http%3A%2F%2Fh%2Fa%20b..%2Fx");
        assert_eq!(address_of("http://h/{id}?p={page}#{"), "http://h/..%2Fx?p=1#{");
    }

    fn address_of(url: &str) -> String {
        let endpoint = endpoint(Method::GET, url.into());
        let values = json!({"url": "http://h/a b", "id": "../x"});
        endpoint.build_url(values.as_object().unwrap()).unwrap().0
    }

    #[test]
    fn endpoint_url_rejects_unknown_placeholders() {
        let parameters = json!({ "properties": { "city": { "type": "string" } } });
        super::argument_validator("http://h/{city}?x=1", &parameters).unwrap();
        for (url, parameters, want) in [
            (
                "http://h/{ctiy}",
                parameters,
                "the tool's url has {ctiy}, which is not one of its parameters; the tool has city",
            ),
            ("http://h/{city}", json!({}), "the tool has none"),
            (
                "http://h/",
                json!({ "type": "thing" }),
                "the tool's parameters are not a JSON schema",
            ),
        ] {
            let error = super::argument_validator(url, &parameters).unwrap_err();
            assert!(error.contains(want), "{error}");
        }
    }

    #[tokio::test]
    async fn model_cannot_reach_forbidden_hosts() {
        let (address, heard) = service(|_, _| (200, "inside".into())).await;
        let fetch = endpoint(Method::GET, "{url}".into());
        for url in [
            format!("http://{address}/"),
            "http://169.254.169.254/".into(),
            "file:///etc/passwd".into(),
        ] {
            assert_eq!(
                call_endpoint(&fetch, json!({ "url": url })).await.error,
                Some(CallError::BadArguments)
            );
        }
        assert!(heard.lock().await.is_empty());
    }

    #[tokio::test]
    async fn post_is_retried_only_if_not_accepted() {
        let (address, heard) = service(|at, _| match at {
            0 | 1 => (503, String::new()),
            2 => (200, "there".into()),
            3 => (500, "broken".into()),
            _ => (0, String::new()),
        })
        .await;
        let post = endpoint(Method::POST, format!("http://{address}/"));
        assert_eq!(call_endpoint(&post, json!({})).await, ToolOutput::text("there"));
        let failed = call_endpoint(&post, json!({})).await;
        assert_eq!(
            (failed.error, failed.read().as_str()),
            (Some(CallError::Unavailable), "HTTP 500 Internal Server Error: broken")
        );
        assert_eq!(call_endpoint(&post, json!({})).await.error, Some(CallError::Unavailable));
        assert_eq!(
            heard.lock().await.len(),
            5,
            "a POST that may have done something is not repeated"
        );
    }
}
