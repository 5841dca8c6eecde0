//! Options that control which web pages can call a server, and under which host names it responds.

use levade_http::Access;

use crate::failure::unusable;

/// Options that determine which web pages can call a server, and under which host names it
/// responds.
#[derive(clap::Args)]
pub struct Args {
    /// Origin whose web pages can call the server, such as http://localhost:3000, or * for all; can
    /// be repeated
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,

    /// Host name that a server without keys accepts, besides localhost and its address; can be
    /// repeated
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,
}

impl Args {
    /// Returns the access rules that the options set.
    ///
    /// # Errors
    /// Returns an error if an origin or a host is malformed.
    pub fn rules(&self) -> anyhow::Result<Access> {
        Access::new(&self.allow_host, &self.allow_origin)
            .map_err(|error| unusable(error.to_string()))
    }
}
