//! Connections.

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

use crate::hosts::{Reach, check_address};
use crate::{Hosts, HttpError};

/// How long a connection without questions is kept.
const KEPT: Duration = Duration::from_secs(30);

type Connector = HttpsConnector<HttpConnector<Resolver>>;

/// Connections to servers, kept between questions. Clones share them.
#[derive(Clone, Debug)]
pub struct Client(Arc<Pools>);

/// Connections by how far hosts may be trusted.
#[derive(Debug)]
struct Pools {
    /// For hosts that may be anywhere,
    any: Pool<Connector, Full<Bytes>>,
    /// and for those that must be in the public internet.
    public: Pool<Connector, Full<Bytes>>,
    hosts: Hosts,
}

impl Client {
    /// A client that trusts the roots of Mozilla's list, and the certificates of a file where one is given.
    ///
    /// # Errors
    /// When the file cannot be read or has no certificate, or TLS cannot be set up.
    pub fn new(hosts: Hosts, more_roots: Option<&Path>) -> Result<Self, HttpError> {
        let invalid = |why: String| HttpError::Invalid(format!("TLS cannot be set up: {why}"));
        let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        if let Some(file) = more_roots {
            let failed =
                |error: &dyn std::fmt::Display| invalid(format!("roots {}: {error}", file.display()));
            let found = CertificateDer::pem_file_iter(file).map_err(|error| failed(&error))?;
            let found = found.collect::<Result<Vec<_>, _>>().map_err(|error| failed(&error))?;
            if roots.add_parsable_certificates(found).0 == 0 {
                return Err(failed(&"it holds no certificate"));
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| invalid(error.to_string()))?;
        let config = config.with_root_certificates(roots).with_no_client_auth();
        let pool = |reach| {
            let mut http = HttpConnector::new_with_resolver(Resolver(reach));
            http.enforce_http(false);
            let connector = HttpsConnectorBuilder::new().with_tls_config(config.clone());
            let connector = connector.https_or_http().enable_http1().wrap_connector(http);
            let mut pool = Pool::builder(TokioExecutor::new());
            pool.pool_idle_timeout(KEPT).pool_timer(TokioTimer::new());
            pool.build(connector)
        };
        Ok(Client(Arc::new(Pools { any: pool(Reach::Any), public: pool(Reach::Public), hosts })))
    }

    /// Sends a request, without a deadline and without following redirects. Returns the answer after its
    /// head.
    ///
    /// # Errors
    /// When its host is not allowed; when it cannot be connected to, or breaks off.
    pub async fn request(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, HttpError> {
        let host = authority(request.uri());
        let Pools { any, public, hosts } = &*self.0;
        let pool = match hosts.reach(request.uri())? {
            Reach::Any => any,
            Reach::Public => public,
        };
        pool.request(request).await.map_err(|error| told(host, &error))
    }
}

/// The error of a request.
fn told(host: String, error: &Error) -> HttpError {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        // Of the resolver, which errors of this kind pass through as what they hold.
        let held = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if let Some(denied) = held.and_then(|held| held.downcast_ref::<HttpError>()) {
            return denied.clone();
        }
        cause = error.source();
    }
    let why = crate::causes(error);
    match error.is_connect() {
        true => HttpError::Connect { host, why },
        false => HttpError::Broken { host, why },
    }
}

/// Host and port of an address, as its errors name it.
pub(crate) fn authority(uri: &Uri) -> String {
    uri.authority().map(ToString::to_string).unwrap_or_default()
}

/// Finds the addresses of a name, and refuses those that may not be asked. Whoever answers for a name may
/// tell another address every time, so this is where it is checked: at each connection.
#[derive(Clone, Copy, Debug)]
struct Resolver(Reach);

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let reach = self.0;
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            for address in &found {
                check_address(name.as_str(), address.ip(), reach).map_err(std::io::Error::other)?;
            }
            Ok(found.into_iter())
        })
    }
}
