//! HTTP connections, pooled and with TLS.

use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::{Request, Response, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::{Client as Pool, Error};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tower_service::Service;

use crate::hosts::{AddressScope, check_address};
use crate::{Hosts, HttpError};

/// Time after which an idle connection is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

type Connector = HttpsConnector<HttpConnector<AddressResolver>>;

/// HTTP client that keeps connections between requests. Clones share the connections.
#[derive(Clone, Debug)]
pub struct Client(Arc<ConnectionPools>);

/// Connection pools of a client, one for each set of addresses that a host may resolve to.
#[derive(Debug)]
struct ConnectionPools {
    /// Connections to hosts that may have any address.
    any: Pool<Connector, Full<Bytes>>,
    /// Connections to hosts that must have public addresses.
    public: Pool<Connector, Full<Bytes>>,
    hosts: Hosts,
}

impl Client {
    /// Creates a client for requests to `hosts`. It trusts the root certificates of Mozilla's list
    /// and, if `more_roots` is set, the certificates in this PEM file.
    ///
    /// # Errors
    /// Returns [`HttpError::Invalid`] if the file cannot be read or contains no certificate, or if
    /// TLS cannot be set up.
    pub fn new(hosts: Hosts, more_roots: Option<&Path>) -> Result<Self, HttpError> {
        let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        if let Some(file) = more_roots {
            let failed = |error: &dyn std::fmt::Display| {
                tls_error(format!(
                    "the root certificates in {} cannot be read: {error}",
                    file.display()
                ))
            };
            let found = CertificateDer::pem_file_iter(file).map_err(|error| failed(&error))?;
            let found = found.collect::<Result<Vec<_>, _>>().map_err(|error| failed(&error))?;
            if roots.add_parsable_certificates(found).0 == 0 {
                return Err(failed(&"the file contains no certificate"));
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| tls_error(error.to_string()))?;
        let config = config.with_root_certificates(roots).with_no_client_auth();
        let pool = |reach| {
            let mut http = HttpConnector::new_with_resolver(AddressResolver(reach));
            http.enforce_http(false);
            let connector = HttpsConnectorBuilder::new().with_tls_config(config.clone());
            let connector = connector.https_or_http().enable_http1().wrap_connector(http);
            let mut pool = Pool::builder(TokioExecutor::new());
            pool.pool_idle_timeout(IDLE_TIMEOUT).pool_timer(TokioTimer::new());
            pool.build(connector)
        };
        Ok(Client(Arc::new(ConnectionPools {
            any: pool(AddressScope::Any),
            public: pool(AddressScope::Public),
            hosts,
        })))
    }

    /// Sends a request, without a deadline and without following redirects. Returns the response as
    /// soon as its headers have arrived.
    ///
    /// # Errors
    /// Returns [`HttpError::Denied`] if the host is not allowed, [`HttpError::Connect`] if the
    /// connection fails, and [`HttpError::Broken`] if it breaks later.
    pub async fn request(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, HttpError> {
        let host = authority(request.uri());
        let ConnectionPools { any, public, hosts } = &*self.0;
        let pool = match hosts.reach(request.uri())? {
            AddressScope::Any => any,
            AddressScope::Public => public,
        };
        pool.request(request).await.map_err(|error| to_http_error(host, &error))
    }
}

fn tls_error(why: String) -> HttpError {
    HttpError::Invalid(format!("TLS cannot be set up: {why}"))
}

/// Converts an error of the HTTP client library. Preserves an [`HttpError`] that the resolver
/// returned.
fn to_http_error(host: String, error: &Error) -> HttpError {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        // `io::Error::source` skips the error inside, so the resolver's error is found by
        // `get_ref`.
        let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if let Some(denied) = inner.and_then(|inner| inner.downcast_ref::<HttpError>()) {
            return denied.clone();
        }
        cause = error.source();
    }
    let why = crate::causes(error);
    if error.is_connect() {
        HttpError::Connect { host, why }
    } else {
        HttpError::Broken { host, why }
    }
}

/// Returns the host and port of a URI as text, for error messages.
pub(crate) fn authority(uri: &Uri) -> String {
    uri.authority().map(ToString::to_string).unwrap_or_default()
}

/// DNS resolver that rejects addresses which are not allowed. It checks the addresses for each
/// connection, because the owner of a name can return a different address every time (DNS
/// rebinding).
#[derive(Clone, Copy, Debug)]
struct AddressResolver(AddressScope);

impl Service<Name> for AddressResolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let reach = self.0;
        Box::pin(async move {
            let found: Vec<SocketAddr> =
                tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            for address in &found {
                check_address(name.as_str(), address.ip(), reach).map_err(std::io::Error::other)?;
            }
            Ok(found.into_iter())
        })
    }
}
