//! HTTP client with host rules, and the parts that all HTTP servers of the project share.
//!
//! A [`Client`] keeps connections and speaks TLS. It sends requests either to every host or only to
//! allowed [`Hosts`]. The rules are checked for the name of a host, for every address that the name
//! resolves to, and again after every redirect. A page therefore cannot lead a model to a service
//! of this machine. [`Client::send`] sends one request and returns the complete response, with a
//! deadline and a maximum size. [`Client::request`] returns a response whose body is still to be
//! read, for streams.
//!
//! [`Access`] and [`service`] are the server's side: which requests of web pages a server accepts,
//! and how it reads keys and bodies, listens and stops.
//!
//! Out of scope: the choice of servers, formats and retries on the client's side, and the responses
//! of a server.
//!
//! ```
//! use levade_http::Hosts;
//!
//! let hosts = Hosts::allow_public(["api.example.org", "*.wikipedia.org"])?;
//! assert!(hosts.check("https://en.wikipedia.org/wiki/Levade").is_ok());
//! let error = hosts.check("http://169.254.169.254/latest/meta-data").unwrap_err();
//! assert!(error.to_string().contains("169.254.169.254 is not an allowed host"));
//! # Ok::<(), levade_http::HttpError>(())
//! ```

mod access;
mod client;
mod error;
mod hosts;
mod send;
pub mod service;
mod text;
mod unpack;

pub use access::{Access, Cors, Rejection, Verdict};
pub use client::Client;
pub use error::{HttpError, causes};
pub use hosts::Hosts;
pub use send::{Bounds, ClientRequest, ClientResponse};
pub use unpack::{UnpackError, unpack};
