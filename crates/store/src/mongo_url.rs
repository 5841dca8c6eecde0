//! Addresses of MongoDB: parses `mongodb://` URLs, hides their passwords, and names databases.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::str::FromStr;

use sha2::{Digest, Sha256};

/// Maximum length of a database name, in bytes, that every MongoDB server accepts.
const MAX_NAME: usize = 60;

/// Scheme of a MongoDB URL.
const SCHEME: &str = "mongodb://";

/// Environment variable from which the password is read if a MongoDB URL contains only a user name.
pub const PASSWORD_VARIABLE: &str = "LEVADE_MONGODB_PASSWORD";

/// A parsed MongoDB URL: the server address, and the database or database prefix that the path
/// names.
#[derive(Clone, PartialEq, Eq)]
pub struct MongoUrl {
    /// User name and password, with the `@` that follows. Empty if the URL names no user.
    credentials: String,
    /// Host names, each with an optional port, separated by commas.
    hosts: String,
    /// Path of the URL without the leading slash: a database name or prefix. Empty if the URL has
    /// no path.
    path: String,
    /// Query string of the URL, with the leading `?`. Empty if the URL has no options.
    options: String,
}

impl FromStr for MongoUrl {
    type Err = String;

    /// Parses `mongodb://[USER[:PASSWORD]@]HOST[:PORT][,…][/PATH][?OPTIONS]`. The error describes
    /// why the text is not such a URL.
    fn from_str(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix(SCHEME) else {
            let shown = text.rsplit('@').next().unwrap_or_default();
            return Err(format!(
                "\"{shown}\" does not start with {SCHEME}; with `mongodb+srv`, list the hosts of \
                 the cluster instead"
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
}

impl fmt::Display for MongoUrl {
    /// Formats the URL as it was parsed, including its password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MongoUrl { credentials, hosts, path, options } = self;
        let slash = if path.is_empty() && options.is_empty() { "" } else { "/" };
        write!(f, "{SCHEME}{credentials}{hosts}{slash}{path}{options}")
    }
}

impl fmt::Debug for MongoUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.location(&self.path))
    }
}

impl MongoUrl {
    /// Returns the URL to pass to the MongoDB driver, without the path: with a path, the driver
    /// would look for the user in that database instead of in `admin`. `password` is inserted if
    /// the URL contains only a user name.
    pub fn to_driver_url(&self, password: Option<&str>) -> String {
        let MongoUrl { credentials, hosts, options, .. } = self;
        let credentials = match (credentials.strip_suffix('@'), password) {
            (Some(user), Some(password)) if !user.contains(':') => {
                format!("{user}:{}@", percent_encode(password))
            }
            _ => credentials.clone(),
        };
        format!("{SCHEME}{credentials}{hosts}/{options}")
    }

    /// Returns the location of `database` for messages, without user name, password and options.
    pub fn location(&self, database: &str) -> String {
        format!("{SCHEME}{}/{database}", self.hosts)
    }

    /// Returns the name of the database that stores rollouts: the path of the URL, or `levade` if
    /// the path is empty.
    pub fn rollouts_database_name(&self) -> String {
        if self.path.is_empty() { "levade".to_owned() } else { to_database_name(&self.path) }
    }

    /// Returns the name of the database that stores the run in `run_dir`: the name of the
    /// directory. If the URL has a path, the path and an underscore are prepended.
    pub fn run_database_name(&self, run_dir: &Path) -> String {
        let absolute = run_dir.canonicalize().or_else(|_| std::path::absolute(run_dir));
        let absolute = absolute.unwrap_or_else(|_| run_dir.to_owned());
        let name = absolute.file_name().unwrap_or_default().to_string_lossy();
        let separator = if self.path.is_empty() { "" } else { "_" };
        to_database_name(&format!("{}{separator}{name}", self.path))
    }
}

/// Percent-encodes all bytes of a password except ASCII letters and digits.
fn percent_encode(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
        encoded
    })
}

/// Converts `name` to a database name that every MongoDB server accepts. If characters must be
/// changed, a hash is appended, so that different names stay different.
fn to_database_name(name: &str) -> String {
    // Servers that ignore case, as on Windows, reject names that differ only in case.
    let clean: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
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
    fn mongo_url_is_split_into_parts_and_errors_hide_password() {
        let text = "mongodb://u:s%40cret@a:1,b:2/runs?authSource=x";
        let url: MongoUrl = text.parse().unwrap();
        assert_eq!(url.to_string(), text);
        assert_eq!(url.to_driver_url(Some("z")), "mongodb://u:s%40cret@a:1,b:2/?authSource=x");
        assert_eq!(url.location("d"), "mongodb://a:1,b:2/d");
        assert_eq!(url.rollouts_database_name(), "runs");
        assert!(!format!("{url:?}").contains("s%40cret"));
        let plain: MongoUrl = "mongodb://u@a".parse().unwrap();
        assert_eq!(plain.to_driver_url(Some("p@:/ä")), "mongodb://u:p%40%3A%2F%C3%A4@a/");
        assert_eq!(plain.to_driver_url(None), "mongodb://u@a/");
        assert_eq!(plain.rollouts_database_name(), "levade");
        assert_eq!(plain.to_string(), "mongodb://u@a");
        for bad in
            ["mongodb+srv://u:secret@h/x", "mongodb://", "mongodb://u:secret@h/a/b", "http://h"]
        {
            let error = bad.parse::<MongoUrl>().unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn mongodb_database_names_are_valid_and_distinct() {
        let url = "mongodb://h/team".parse::<MongoUrl>().unwrap();
        assert_eq!(url.run_database_name(Path::new("/runs/calculator")), "team_calculator");
        let long = "x".repeat(200);
        let names = ["/r/a.b", "/r/a_b", "/r/a b", &format!("/r/{long}1"), &format!("/r/{long}2")]
            .map(|dir| url.run_database_name(Path::new(dir)));
        for (index, one) in names.iter().enumerate() {
            assert!(one.len() <= MAX_NAME && !one.contains(['.', ' ', '/']), "{one}");
            assert!(names[..index].iter().all(|other| other != one), "{one}");
        }
    }
}
