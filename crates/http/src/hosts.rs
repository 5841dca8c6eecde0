//! Rules for the hosts to which a client may send requests.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use hyper::Uri;

use crate::HttpError;

/// Hosts to which a client may send requests: all hosts, or the hosts of a list. A listed name may
/// resolve only to addresses of the public internet. Hosts of this machine or network, which have
/// loopback, private, link-local and similar addresses, must be listed as private
/// ([`Hosts::allow_private`]).
#[derive(Debug, Clone, Default)]
pub struct Hosts(Option<Arc<HostLists>>);

#[derive(Debug, Clone, Default)]
struct HostLists {
    public: Vec<HostPattern>,
    private: Vec<HostPattern>,
}

/// A pattern of hosts: one host or all subdomains of a domain, on one port or on any port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPattern {
    host: String,
    /// Whether the pattern matches subdomains of `host` but not `host` itself.
    subdomains_only: bool,
    port: Option<u16>,
}

impl HostPattern {
    pub(crate) fn parse(text: &str) -> Result<Self, HttpError> {
        let lowered = text.trim().to_ascii_lowercase();
        if lowered.contains('/') {
            return Err(host_error(text, "a host contains no slash"));
        }
        let (subdomains_only, rest) = match lowered.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, lowered.as_str()),
        };
        let (host, port) = match rest.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest
                    .split_once(']')
                    .ok_or_else(|| host_error(text, "a bracket is not closed"))?;
                let number = port.strip_prefix(':');
                // "[::1]8000" must not match every port.
                if number.is_none() && !port.is_empty() {
                    return Err(host_error(text, "the port after a bracket must follow a colon"));
                }
                (host.to_owned(), number)
            }
            None if rest.parse::<Ipv6Addr>().is_ok() => (rest.to_owned(), None),
            None => match rest.rsplit_once(':') {
                Some((host, port)) => (host.to_owned(), Some(port)),
                None => (rest.to_owned(), None),
            },
        };
        let port = port
            .map(|port| port.parse().map_err(|_| host_error(text, "the port is not a number")))
            .transpose()?;
        if host.is_empty()
            || host.contains(['*', ' ', '@', ':']) && host.parse::<Ipv6Addr>().is_err()
        {
            return Err(host_error(text, "the host name is empty or invalid"));
        }
        Ok(HostPattern { host: host.trim_end_matches('.').to_owned(), subdomains_only, port })
    }

    pub(crate) fn matches(&self, host: &str, port: u16) -> bool {
        let named = if self.subdomains_only {
            host.strip_suffix(&self.host).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
        } else {
            host == self.host
        };
        named && self.port.is_none_or(|own| own == port)
    }
}

fn host_error(text: &str, why: &str) -> HttpError {
    HttpError::Invalid(format!(
        "{text:?} is not a host: {why}; write a name or an address, such as \
                 \"api.example.org\", \"*.example.org\", \"localhost:8000\" or \"[::1]:8000\""
    ))
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostPattern { host, subdomains_only, port } = self;
        f.write_str(if *subdomains_only { "*." } else { "" })?;
        f.write_str(host)?;
        port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// Range of the IP addresses that a host may resolve to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressScope {
    /// The host may resolve to any address.
    Any,
    /// The host may resolve only to addresses of the public internet.
    Public,
}

impl Hosts {
    /// Allows every host, for URLs that a user has configured.
    pub fn allow_all() -> Self {
        Hosts(None)
    }

    /// Allows only the listed hosts, which are names or addresses on the public internet. `*.`
    /// before a domain matches all of its subdomains, and a port limits a host to that port.
    ///
    /// # Errors
    /// Returns [`HttpError::Invalid`] with the first malformed host, if there is one.
    pub fn allow_public<T: AsRef<str>>(
        hosts: impl IntoIterator<Item = T>,
    ) -> Result<Self, HttpError> {
        let public = hosts
            .into_iter()
            .map(|host| HostPattern::parse(host.as_ref()))
            .collect::<Result<_, _>>()?;
        Ok(Hosts(Some(Arc::new(HostLists { public, private: Vec::new() }))))
    }

    /// Allows the listed hosts in addition. They can have any address, including addresses of this
    /// machine.
    ///
    /// # Errors
    /// Returns [`HttpError::Invalid`] with the first malformed host, if there is one.
    pub fn allow_private<T: AsRef<str>>(
        self,
        hosts: impl IntoIterator<Item = T>,
    ) -> Result<Self, HttpError> {
        let Some(lists) = self.0 else { return Ok(Hosts(None)) };
        let mut lists = (*lists).clone();
        for host in hosts {
            lists.private.push(HostPattern::parse(host.as_ref())?);
        }
        Ok(Hosts(Some(Arc::new(lists))))
    }

    /// Checks whether requests to a URL are allowed, by its host name. Does not resolve the name.
    ///
    /// # Errors
    /// Returns [`HttpError::Invalid`] if `url` is not an HTTP URL, and [`HttpError::Denied`] if its
    /// host is not allowed.
    pub fn check(&self, url: &str) -> Result<(), HttpError> {
        self.reach(&parse_url(url)?).map(drop)
    }

    pub(crate) fn reach(&self, uri: &Uri) -> Result<AddressScope, HttpError> {
        let Some(lists) = &self.0 else { return Ok(AddressScope::Any) };
        let host = host_name(uri);
        let port =
            uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
        if lists.private.iter().any(|pattern| pattern.matches(&host, port)) {
            return Ok(AddressScope::Any);
        }
        if !lists.public.iter().any(|pattern| pattern.matches(&host, port)) {
            let all: Vec<String> =
                lists.public.iter().chain(&lists.private).map(HostPattern::to_string).collect();
            let all = if all.is_empty() {
                "no host is allowed".to_owned()
            } else {
                format!("allowed hosts: {}", all.join(", "))
            };
            return Err(HttpError::Denied(format!("{host} is not an allowed host; {all}")));
        }
        if let Ok(address) = host.parse() {
            check_address(&host, address, AddressScope::Public)?;
        }
        Ok(AddressScope::Public)
    }
}

/// Parses a URL with the scheme `http` or `https`.
///
/// # Errors
/// Returns [`HttpError::Invalid`] if `url` is not an HTTP URL, or if it contains a user name.
pub(crate) fn parse_url(url: &str) -> Result<Uri, HttpError> {
    let uri: Uri = url
        .parse()
        .map_err(|error: hyper::http::uri::InvalidUri| url_error(url, error.to_string()))?;
    match (uri.scheme_str(), uri.host()) {
        (Some("http" | "https"), Some(host)) if !host.is_empty() => {}
        (Some("http" | "https"), _) => {
            return Err(url_error(url, "the URL has no host".into()));
        }
        _ => return Err(url_error(url, "the URL must begin with http:// or https://".into())),
    }
    let authority = uri.authority().map(|authority| authority.as_str()).unwrap_or_default();
    if authority.contains('@') {
        return Err(url_error(url, "the URL must not contain a user name".into()));
    }
    Ok(uri)
}

fn url_error(url: &str, why: String) -> HttpError {
    HttpError::Invalid(format!("{url:?} is not an HTTP URL: {why}"))
}

/// Returns the host of a URI in lower case, without the brackets of an IPv6 address and without the
/// final dot.
pub(crate) fn host_name(uri: &Uri) -> String {
    let host = uri.host().unwrap_or_default().to_ascii_lowercase();
    host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.').to_owned()
}

/// Checks whether a host may resolve to an address.
///
/// # Errors
/// Returns [`HttpError::Denied`] if the address must be public and is not.
pub(crate) fn check_address(
    host: &str,
    address: IpAddr,
    reach: AddressScope,
) -> Result<(), HttpError> {
    if reach == AddressScope::Any || is_public(address) {
        return Ok(());
    }
    Err(HttpError::Denied(format!(
        "{host} resolves to {address}, an address of this machine or network, but is allowed only \
         as a public host; to allow the address, list it among the private hosts"
    )))
}

/// Returns whether an address belongs to the public internet (IANA's special-purpose registries,
/// RFC 6890).
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => {
            let [first, second, ..] = address.segments();
            if let Some(v4) = address.to_ipv4_mapped() {
                return is_public_v4(v4);
            }
            // NAT64 and 6to4 addresses contain an IPv4 address.
            if (first, second) == (0x64, 0xff9b) || first == 0x2002 {
                let octets = address.octets();
                let at = if first == 0x2002 { 2 } else { 12 };
                let v4 = Ipv4Addr::new(octets[at], octets[at + 1], octets[at + 2], octets[at + 3]);
                return is_public_v4(v4);
            }
            // Global unicast addresses, without Teredo, ORCHID and documentation.
            (first & 0xe000) == 0x2000
                && !(first == 0x2001 && second < 0x200)
                && (first, second) != (0x2001, 0xdb8)
                && first != 0x3fff
        }
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    !(address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_broadcast()
        || address.is_documentation()
        || a == 0
        || a >= 240
        // Carrier-grade NAT, protocol assignments, 6to4 relays and benchmarks.
        || (a == 100 && (64..128).contains(&b))
        || (a, b, c) == (192, 0, 0)
        || (a, b, c) == (192, 88, 99)
        || (a == 198 && (b == 18 || b == 19)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_matches_hosts_by_name_and_port() {
        let hosts =
            Hosts::allow_public(["API.example.org", "*.wiki.org", "one.example.org:8443"]).unwrap();
        let hosts = hosts.allow_private(["localhost:8000", "[::1]", "10.1.2.3"]).unwrap();
        for url in [
            "https://api.example.org/v1?q=1",
            "http://API.example.org.:80",
            "https://en.wiki.org",
            "https://a.b.wiki.org",
            "https://one.example.org:8443/x",
            "http://localhost:8000/mcp",
            "http://[::1]:9/x",
            "http://10.1.2.3",
        ] {
            assert_eq!(hosts.check(url), Ok(()), "{url}");
        }
        for url in [
            "https://example.org",
            "https://wiki.org",
            "https://evilwiki.org",
            "https://.wiki.org",
            "https://one.example.org",
            "http://localhost:8001",
            "http://127.0.0.1:8000",
            "http://api.example.org.evil.org",
            "http://user@api.example.org",
            "http://api.example.org@evil.org",
            "ftp://api.example.org",
            "file:///etc/passwd",
            "/etc/passwd",
            "",
        ] {
            assert!(hosts.check(url).is_err(), "{url}");
        }
        assert!(Hosts::allow_all().check("http://127.0.0.1").is_ok());
    }

    #[test]
    fn is_public_rejects_special_purpose_addresses() {
        for address in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.0.0.1",
            "172.16.3.4",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "192.0.0.8",
            "198.18.0.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001:db8::1",
            "2001::1",
            "fec0::1",
            "::127.0.0.1",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        for address in [
            "1.1.1.1",
            "172.32.0.1",
            "100.128.0.1",
            "2606:4700::1111",
            "::ffff:8.8.8.8",
            "2002:808:808::",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn public_hosts_reject_private_addresses() {
        let hosts = Hosts::allow_public(["127.0.0.1", "example.org"]).unwrap();
        assert!(
            hosts
                .check("http://127.0.0.1/")
                .unwrap_err()
                .to_string()
                .contains("list it among the private")
        );
        let address = "169.254.169.254".parse().unwrap();
        assert!(check_address("example.org", address, AddressScope::Public).is_err());
        assert!(check_address("example.org", address, AddressScope::Any).is_ok());
    }

    #[test]
    fn allow_public_rejects_malformed_hosts() {
        for text in [
            "",
            "http://x.org",
            "x.org/path",
            "*.",
            "a*b",
            "x.org:http",
            "[::1",
            "*.*.org",
            "a b",
            "[::1]8000",
        ] {
            let error = Hosts::allow_public([text]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{text:?} is not a host")), "{error}");
        }
    }
}
