//! Access to services as configured in a recipe: permitted hosts, and API keys from the
//! environment.

use std::collections::BTreeMap;

use hyper::Method;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use levade_http::{Client, Hosts, HttpError};

/// Hosts to which a tool may send requests. Checking a recipe creates no HTTP client.
#[derive(Debug, Clone)]
pub(crate) struct PermittedHosts(Hosts);

fn error_text(error: HttpError) -> String {
    error.to_string()
}

impl PermittedHosts {
    /// Permits every host, because the author of the recipe chooses the address.
    pub fn for_any_host() -> Self {
        PermittedHosts(Hosts::allow_all())
    }

    /// Permits the host of `url`, even if it is private, the public hosts matching `hosts`, and the
    /// hosts in `private`. If an argument determines the host of `url`, that host is not permitted
    /// by itself.
    ///
    /// # Errors
    /// Returns an error if a host is invalid, or if an argument determines the host of `url` and
    /// both lists are empty.
    pub fn for_hosts(url: &str, hosts: &[String], private: &[String]) -> Result<Self, String> {
        let own = url
            .split_once("://")
            .map(|(_, rest)| rest.split(['/', '?', '#']).next().unwrap_or_default());
        let own = own.filter(|host| !host.contains('{'));
        if own.is_none() && hosts.is_empty() && private.is_empty() {
            return Err(format!(
                "the tool's arguments set the host of {url:?}; list the permitted hosts, such as \
                 hosts = [\"*.example.org\"]"
            ));
        }
        let private = own.into_iter().chain(private.iter().map(String::as_str));
        let hosts = Hosts::allow_public(hosts).and_then(|hosts| hosts.allow_private(private));
        hosts.map(PermittedHosts).map_err(error_text)
    }

    /// Checks that an address uses HTTP and that its host is permitted.
    ///
    /// # Errors
    /// Returns an error if the address is invalid or its host is not permitted.
    pub fn check(&self, url: &str) -> Result<(), String> {
        self.0.check(url).map_err(error_text)
    }

    /// Creates an HTTP client for the permitted hosts.
    ///
    /// # Errors
    /// Returns an error if TLS cannot be set up.
    pub fn client(&self) -> Result<Client, String> {
        Client::new(self.0.clone(), None).map_err(error_text)
    }

    /// Parses the name of an HTTP method. Case is ignored.
    ///
    /// # Errors
    /// Returns an error if the method is not GET, POST, PUT, PATCH or DELETE.
    pub fn method(&self, name: &str) -> Result<Method, String> {
        let known = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
        let found = known.iter().find(|method| method.as_str().eq_ignore_ascii_case(name)).cloned();
        found.ok_or_else(|| {
            format!("method = {name:?}, but it must be GET, POST, PUT, PATCH or DELETE")
        })
    }

    /// Creates headers whose values are in environment variables. The variable `key` holds a bearer
    /// token; an empty name means no token. `extra_headers` maps header names to variables.
    ///
    /// # Errors
    /// Returns an error if a variable is not set, a value is not valid in a header, or a header
    /// name is invalid.
    pub fn headers(
        &self,
        key: &str,
        extra_headers: &BTreeMap<String, String>,
    ) -> Result<HeaderMap, String> {
        let mut headers = HeaderMap::new();
        if !key.is_empty() {
            headers.insert(AUTHORIZATION, secret_header(key, "Bearer ")?);
        }
        for (name, variable) in extra_headers {
            let header = HeaderName::try_from(name.as_str())
                .map_err(|_| format!("{name:?} is not a valid header name"))?;
            headers.insert(header, secret_header(variable, "")?);
        }
        Ok(headers)
    }
}

fn secret_header(variable: &str, before: &str) -> Result<HeaderValue, String> {
    let value = std::env::var(variable).map_err(|_| {
        format!("the environment variable {variable}, which holds a key, is not set")
    })?;
    let mut value = HeaderValue::from_str(&format!("{before}{}", value.trim())).map_err(|_| {
        format!(
            "the value of the environment variable {variable} is not valid in an \
                         HTTP header"
        )
    })?;
    value.set_sensitive(true);
    Ok::<_, String>(value)
}
