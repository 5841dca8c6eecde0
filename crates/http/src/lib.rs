//! Sends HTTP requests to servers, and decides which requests of web pages a server answers.
//!
//! A [`Client`] keeps connections and speaks TLS. It connects to any host, or only to allowed [`Hosts`].
//! These are checked by name, again for every address of a name, and again after every redirect, so a page
//! cannot lead a model to a service of this machine. [`Client::ask`] sends one request with a deadline and a
//! maximum size of the response; [`Client::request`] returns a response as it arrives. [`Access`] is the side
//! of servers: which requests of web pages a server answers.
//!
//! ```
//! use levade_http::Hosts;
//!
//! let hosts = Hosts::only(["api.example.org", "*.wikipedia.org"])?;
//! assert!(hosts.check("https://en.wikipedia.org/wiki/Levade").is_ok());
//! let error = hosts.check("http://169.254.169.254/latest/meta-data").unwrap_err();
//! assert!(error.to_string().contains("169.254.169.254 is not an allowed host"));
//! # Ok::<(), levade_http::HttpError>(())
//! ```
//!
//! Out of scope: which servers are called, in which format, and when to retry.

mod access;
mod ask;
mod client;
mod error;
mod hosts;
mod text;
mod unpack;

pub use access::{Access, Cors, Rejection, Verdict};
pub use ask::{Ask, Bounds, Reply};
pub use client::Client;
pub use error::{HttpError, causes};
pub use hosts::Hosts;
pub use unpack::{Unpack, unpack};
