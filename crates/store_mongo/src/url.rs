//! Addresses of MongoDB: parses `mongodb://` URLs, hides their passwords, and names databases.

use std::fmt::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

/// Maximum length of the name of a database, in bytes, on every server.
const MAX_NAME: usize = 60;

/// The scheme of a URL.
const SCHEME: &str = "mongodb://";

/// The address of a server, and the database or the prefix of databases that a URL names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MongoUrl {
    /// User and password with the following `@`, or empty.
    credentials: String,
    /// Hosts, separated by commas.
    hosts: String,
    /// Path without the slash.
    path: String,
    /// Options with the preceding `?`, or empty.
    options: String,
}

impl MongoUrl {
    /// Parses `mongodb://[USER:PASSWORD@]HOST[:PORT][,…][/PATH][?OPTIONS]`.
    ///
    /// # Errors
    /// Returns a description of the problem if the text is not such a URL.
    pub fn parse(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return Err(format!(
                "\"{}\" does not start with {SCHEME}; with `mongodb+srv`, list the hosts of the \
                 cluster instead",
                text.split('@').next_back().unwrap_or_default()
            ));
        };
        let (rest, options) = rest.split_at(rest.find('?').unwrap_or(rest.len()));
        let (credentials, rest) = rest.split_at(rest.rfind('@').map_or(0, |at| at + 1));
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        if hosts.is_empty() || path.contains('/') {
            return Err(format!(
                "\"{SCHEME}{rest}\" is not the address of a server; use {SCHEME}HOST:PORT/NAME"
            ));
        }
        let [credentials, hosts, path, options] =
            [credentials, hosts, path, options].map(str::to_owned);
        Ok(MongoUrl { credentials, hosts, path, options })
    }

    /// Returns the URL for the driver. The path is left out, because the driver would look for the
    /// user in that database instead of in `admin`.
    pub(crate) fn for_driver(&self) -> String {
        let MongoUrl { credentials, hosts, options, .. } = self;
        format!("{SCHEME}{credentials}{hosts}/{options}")
    }

    /// Returns whether the options of the URL contain `name`.
    pub(crate) fn has_option(&self, name: &str) -> bool {
        let options = self.options.trim_start_matches('?').split('&');
        options
            .filter_map(|option| option.split_once('='))
            .any(|(found, _)| found.eq_ignore_ascii_case(name))
    }

    /// Returns the location of a database for messages, without user, password and options.
    pub(crate) fn location(&self, database: &str) -> String {
        format!("{SCHEME}{}/{database}", self.hosts)
    }

    /// Returns the name of the database for rollouts: the path, or `levade`.
    pub(crate) fn rollouts_database(&self) -> String {
        if self.path.is_empty() { "levade".to_owned() } else { database_name(&self.path) }
    }

    /// Returns the name of the database of the run in `run_dir`: the name of the directory, after
    /// the path and an underscore if the URL has a path.
    pub(crate) fn run_database(&self, run_dir: &Path) -> String {
        let absolute = run_dir.canonicalize().or_else(|_| std::path::absolute(run_dir));
        let absolute = absolute.unwrap_or_else(|_| run_dir.to_owned());
        let name = absolute.file_name().unwrap_or_default().to_string_lossy();
        let separator = if self.path.is_empty() { "" } else { "_" };
        database_name(&format!("{}{separator}{name}", self.path))
    }
}

/// Converts a name to one that every server accepts. A name that must be changed gets a hash, so
/// that different names stay different.
fn database_name(name: &str) -> String {
    let is_kept = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    // Servers that ignore case, as on Windows, reject names that differ only in case.
    let clean: String = name.chars().map(|c| if is_kept(c) { c } else { '_' }).collect();
    if clean == name && clean.len() <= MAX_NAME && !clean.is_empty() {
        return clean;
    }
    let mut short: String = clean.chars().take(MAX_NAME - 9).collect();
    short.push('_');
    for byte in &Sha256::digest(name.as_bytes())[..4] {
        let _ = write!(short, "{byte:02x}");
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_separates_parts_and_hides_the_password() {
        let url = MongoUrl::parse("mongodb://u:s%40cret@a:1,b:2/runs?authSource=x").unwrap();
        assert_eq!(url.for_driver(), "mongodb://u:s%40cret@a:1,b:2/?authSource=x");
        assert_eq!(url.location("d"), "mongodb://a:1,b:2/d");
        assert_eq!(url.rollouts_database(), "runs");
        assert!(url.has_option("authsource") && !url.has_option("w"));
        let plain = MongoUrl::parse("mongodb://a").unwrap();
        assert_eq!(
            (plain.rollouts_database().as_str(), plain.location("d").as_str()),
            ("levade", "mongodb://a/d")
        );
        for bad in
            ["mongodb+srv://u:secret@h/x", "mongodb://", "mongodb://u:secret@h/a/b", "http://h"]
        {
            let error = MongoUrl::parse(bad).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn database_names_are_valid_and_distinct() {
        let url = MongoUrl::parse("mongodb://h/team").unwrap();
        let name = |dir: &str| url.run_database(Path::new(dir));
        assert_eq!(name("/runs/calculator"), "team_calculator");
        let long = "x".repeat(200);
        let names = ["/r/a.b", "/r/a_b", "/r/a b", &format!("/r/{long}1"), &format!("/r/{long}2")]
            .map(name);
        for (index, one) in names.iter().enumerate() {
            assert!(one.len() <= MAX_NAME && !one.contains(['.', ' ', '/']), "{one}");
            assert!(names[..index].iter().all(|other| other != one), "{one}");
        }
    }
}
