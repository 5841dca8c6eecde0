//! HTTP: asking servers, and what servers have in common.
//!
//! A [`Client`] keeps connections and speaks TLS. It asks either whomever it is told to, or only [`Hosts`]
//! that are allowed, which is checked by name, again for every address that a name stands for, and again
//! after every redirect: so a page cannot lead a model to a service of this machine. [`Client::ask`] asks one
//! whole question with a deadline and a most for the answer; [`Client::request`] hands over an answer as it
//! comes.
//!
//! [`Access`] and [`service`] are the server's side: which requests of web pages a server answers, and how it
//! reads keys and bodies, listens and stops.
//!
//! Not here: who is asked, in which format, and when to ask again; what a server answers.
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

mod access;
mod ask;
mod client;
mod error;
mod hosts;
pub mod service;
mod text;
mod unpack;

pub use access::{Access, Cors, Rejection, Verdict};
pub use ask::{Ask, Bounds, Reply};
pub use client::Client;
pub use error::{HttpError, causes};
pub use hosts::Hosts;
pub use unpack::{Unpack, unpack};
