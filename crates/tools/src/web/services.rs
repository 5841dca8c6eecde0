//! How services are reached, as a recipe says it: hosts, and keys from the environment.

use std::collections::BTreeMap;

use hyper::Method;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use levade_http::{Client, Hosts, HttpError};

/// Hosts of services that may be asked. Looking at a recipe makes no client.
#[derive(Debug, Clone)]
pub(crate) struct Services(Hosts);

fn in_words(error: HttpError) -> String {
    error.to_string()
}

impl Services {
    /// Services wherever they are: whoever writes a recipe names them.
    pub fn any() -> Self {
        Services(Hosts::any())
    }

    /// The host of an address, wherever it is, and these. Where an argument stands for the host, that of the
    /// address is none.
    ///
    /// # Errors
    /// Names what is no host.
    pub fn only(url: &str, hosts: &[String], private: &[String]) -> Result<Self, String> {
        let own =
            url.split_once("://").map(|(_, rest)| rest.split(['/', '?', '#']).next().unwrap_or_default());
        let own = own.filter(|host| !host.contains('{'));
        if own.is_none() && hosts.is_empty() && private.is_empty() {
            return Err(format!(
                "an argument names the host of {url:?}: say which ones it may name, with hosts = [\"*.example.org\"]"
            ));
        }
        let private = own.into_iter().chain(private.iter().map(String::as_str));
        let hosts = Hosts::only(hosts).and_then(|hosts| hosts.and_private(private));
        hosts.map(Services).map_err(in_words)
    }

    /// Checks that an address is one of HTTP, and of a host that may be asked.
    ///
    /// # Errors
    /// When it is not.
    pub fn check(&self, url: &str) -> Result<(), String> {
        self.0.check(url).map_err(in_words)
    }

    /// A client of them.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn client(&self) -> Result<Client, String> {
        Client::new(self.0.clone(), None).map_err(in_words)
    }

    /// A method by its name.
    ///
    /// # Errors
    /// When there is no such method.
    pub fn method(&self, name: &str) -> Result<Method, String> {
        let known = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
        let found = known.iter().find(|method| method.as_str().eq_ignore_ascii_case(name)).cloned();
        found.ok_or_else(|| format!("method = {name:?}, but it must be GET, POST, PUT, PATCH or DELETE"))
    }

    /// Headers whose values stand in environment variables: a key by the name of its variable, where that is
    /// not empty, and others by their names.
    ///
    /// # Errors
    /// Names a variable that is not set, or whose value cannot stand in a header.
    pub fn headers(&self, key: &str, others: &BTreeMap<String, String>) -> Result<HeaderMap, String> {
        let value = |variable: &str, before: &str| {
            let value = std::env::var(variable)
                .map_err(|_| format!("the environment variable {variable}, which holds a key, is not set"))?;
            let mut value = HeaderValue::from_str(&format!("{before}{}", value.trim())).map_err(|_| {
                format!("the value of the environment variable {variable} cannot be a header")
            })?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        };
        let mut headers = HeaderMap::new();
        if !key.is_empty() {
            headers.insert(AUTHORIZATION, value(key, "Bearer ")?);
        }
        for (name, variable) in others {
            let header =
                HeaderName::try_from(name.as_str()).map_err(|_| format!("{name:?} is no header's name"))?;
            headers.insert(header, value(variable, "")?);
        }
        Ok(headers)
    }
}
