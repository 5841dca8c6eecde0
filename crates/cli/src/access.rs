//! Options of servers about web pages: the origins that can call a server, and the hosts that it answers as.

use levade_http::Access;

use crate::failure::unusable;

/// Options of a server about requests of web pages.
#[derive(clap::Args)]
pub struct Args {
    /// Origin whose web pages can call the server, such as http://localhost:3000, or * for all; can be
    /// repeated
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,

    /// Host name that the server without keys answers as, besides localhost and its address; can be repeated
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,
}

impl Args {
    /// Returns the rules that the options set.
    ///
    /// # Errors
    /// Returns an error if an origin or a host is malformed.
    pub fn rules(&self) -> anyhow::Result<Access> {
        Access::new(&self.allow_host, &self.allow_origin).map_err(|error| unusable(error.to_string()))
    }
}
