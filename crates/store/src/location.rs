//! Locations of stores: parses the recipe key `run.store`, and opens stores of this machine.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use levade_tree::RunId;
use serde::{Deserialize, Serialize};

use crate::error::Code;
use crate::{Memory, MongoUrl, Sqlite, Store, StoreError};

/// Default name of the store's SQLite file in a run directory.
const FILE: &str = "run.db";

/// The location of a run's store, as the recipe key `run.store` specifies it.
///
/// ```
/// use levade_store::Location;
///
/// let location: Location = "sqlite:/records/sums.db".parse()?;
/// assert_eq!(location, Location::Sqlite("/records/sums.db".into()));
/// // An empty string selects the default.
/// assert_eq!("".parse::<Location>()?, "sqlite:run.db".parse()?);
/// assert!("http://records:4747/sums".parse::<Location>().is_ok());
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Location {
    /// An SQLite file. A relative path is resolved against the run directory.
    Sqlite(PathBuf),
    /// Memory of the process. All recorded data is lost when the process exits.
    Memory,
    /// A MongoDB database. Its name is derived from the name of the run directory.
    Mongo(MongoUrl),
    /// A store server that is reached over HTTP.
    Server {
        /// URL of the server, without a final slash.
        url: String,
        /// Name of the run on the server. `None` selects the name of the run directory.
        name: Option<String>,
    },
}

/// Purpose for which a store is opened: to start a run, to resume a run, or only to read. To write,
/// the caller must hold the lock of the run directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreAccess<'a> {
    /// Writes a new run with this id. An existing file is accepted if it belongs to a run with the
    /// same id.
    Start(&'a RunId),
    /// Continues an existing store, whatever its run id. If the process that started the run was
    /// killed before it had created the store, a store is created for the run with this id.
    Resume(&'a RunId),
    /// Reads an existing store, even while another process writes it.
    Read,
}

impl Location {
    /// Opens the store of the run in the directory `run_dir`, if it is on this machine. Only
    /// servers of stores call this: `levade_store_client::open` opens every location.
    ///
    /// # Errors
    /// - Returns [`StoreError::NotDurable`] if the location is [`Memory`](Self::Memory) and
    ///   `access` is not [`Start`](StoreAccess::Start).
    /// - For [`Read`](StoreAccess::Read), returns [`StoreError::Open`] with [`Code::NotFound`] if
    ///   the file does not exist, and otherwise the errors of [`Sqlite::open_existing`].
    /// - For [`Resume`](StoreAccess::Resume), returns the errors of [`Sqlite::resume`] if the file
    ///   exists, and the errors of [`Sqlite::open`] if it does not.
    /// - For [`Start`](StoreAccess::Start), returns the errors of [`Sqlite::open`], including
    ///   [`StoreError::OtherRun`] if the file belongs to another run.
    /// - Returns [`StoreError::Open`] with [`Code::Invalid`] if the location is a server.
    pub async fn open_local(
        &self,
        run_dir: &Path,
        access: StoreAccess<'_>,
    ) -> Result<Arc<dyn Store>, StoreError> {
        let (file, access) = match (self, access) {
            (Location::Sqlite(file), access) => (run_dir.join(file), access),
            (Location::Memory, StoreAccess::Start(run)) => {
                return Ok(Arc::new(Memory::new(run.clone())));
            }
            (Location::Memory, _) => {
                return Err(StoreError::NotDurable { run_dir: run_dir.to_owned() });
            }
            (Location::Mongo(_) | Location::Server { .. }, _) => {
                return Err(StoreError::Open {
                    location: self.to_text_without_password(),
                    code: Code::Invalid,
                    source: "it is on a server".into(),
                });
            }
        };
        let store = match access {
            StoreAccess::Read if !file.exists() => {
                let location = file.display().to_string();
                let source = std::io::ErrorKind::NotFound.into();
                return Err(StoreError::Open {
                    location,
                    code: Code::NotFound,
                    source: Box::<std::io::Error>::new(source),
                });
            }
            StoreAccess::Read => Sqlite::open_existing(&file).await?,
            StoreAccess::Resume(run) if file.exists() => Sqlite::resume(&file, run).await?,
            StoreAccess::Start(run) | StoreAccess::Resume(run) => Sqlite::open(&file, run).await?,
        };
        Ok(Arc::new(store))
    }

    /// Returns the path of the store's SQLite file, or `None` if the store is not a file on this
    /// machine.
    pub fn file(&self, run_dir: &Path) -> Option<PathBuf> {
        match self {
            Location::Sqlite(file) => Some(run_dir.join(file)),
            Location::Memory | Location::Mongo(_) | Location::Server { .. } => None,
        }
    }

    /// Returns whether recorded data survives the exit of the process that writes it.
    pub fn is_durable(&self) -> bool {
        match self {
            Location::Sqlite(_) | Location::Mongo(_) | Location::Server { .. } => true,
            Location::Memory => false,
        }
    }

    /// Returns the location as text for messages. The password of a MongoDB URL is left out.
    fn to_text_without_password(&self) -> String {
        match self {
            Location::Mongo(url) => format!("{url:?}"),
            other => other.to_string(),
        }
    }

    /// Returns whether this is the default location, which an empty `run.store` selects.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for Location {
    fn default() -> Self {
        Location::Sqlite(FILE.into())
    }
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text.is_empty() => Ok(Self::default()),
            Some(("sqlite", path)) if !path.is_empty() => Ok(Location::Sqlite(path.into())),
            Some(("memory", "")) => Ok(Location::Memory),
            Some(("http" | "https", rest)) => parse_server(text, rest),
            Some(("mongodb" | "mongodb+srv", _)) => text.parse().map(Location::Mongo),
            _ => Err(format!("\"{text}\" is not a store location; {KNOWN}")),
        }
    }
}

/// Supported forms of a location, as listed in errors.
const KNOWN: &str = "use \"sqlite:PATH\", where PATH is relative to the run's directory, \
                     \"memory:\", \"http://HOST:PORT/NAME\" for a store server, \
                     \"mongodb://HOST:PORT/PREFIX\", or \"\" for sqlite:run.db";

/// Parses the URL of a store server, with or without the name of a run. `rest` is the URL without
/// its scheme.
fn parse_server(text: &str, rest: &str) -> Result<Location, String> {
    let wrong = |why: &str| Err(format!("\"{text}\" is not a store location: {why}; {KNOWN}"));
    let Some(rest) = rest.strip_prefix("//") else { return wrong("the URL has no host") };
    let (authority, name) = rest.split_once('/').unwrap_or((rest, ""));
    let name = name.trim_end_matches('/');
    if authority.is_empty() || authority.contains(['?', '#', ' ']) {
        return wrong("the URL has no host");
    }
    if let Some((_, host)) = authority.rsplit_once('@') {
        // The error must not show the key.
        return Err(format!(
            "a store location must not contain a user or a key before \"@{host}\"; set \
             LEVADE_STORE_KEY to the key"
        ));
    }
    if !name.is_empty() && !is_run_name(name) {
        return wrong("the name of a run consists of letters, digits, \"-\", \"_\" and \".\"");
    }
    let name = Some(name).filter(|name| !name.is_empty()).map(str::to_owned);
    let url = text[..text.len() - rest.len() + authority.len()].to_owned();
    Ok(Location::Server { url, name })
}

/// Returns whether `name` is a valid name for a run on a store server: at most 128 letters, digits,
/// `-`, `_` and `.`, and no leading `.`.
pub fn is_run_name(name: &str) -> bool {
    let is_permitted = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=128).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(is_permitted)
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Sqlite(file) => write!(f, "sqlite:{}", file.display()),
            Location::Memory => f.write_str("memory:"),
            Location::Mongo(url) => url.fmt(f),
            Location::Server { url, name: None } => f.write_str(url),
            Location::Server { url, name: Some(name) } => write!(f, "{url}/{name}"),
        }
    }
}

impl From<Location> for String {
    fn from(location: Location) -> Self {
        location.to_string()
    }
}

impl TryFrom<String> for Location {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::wait;

    #[test]
    fn location_round_trips_through_text() {
        for text in [
            "sqlite:run.db",
            "sqlite:/records/a b.db",
            "memory:",
            "http://h:4747",
            "https://[::1]:9/run-1.a",
            "mongodb://u@h:1/runs?authSource=x",
        ] {
            assert_eq!(text.parse::<Location>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn parse_rejects_unknown_location_by_name() {
        for text in [
            "run.db",
            "sqlite:",
            "memory:x",
            "redis://h",
            "http:h",
            "http://",
            "http:///run",
            "http://h/a/b",
            "http://h/.a",
            "http://h/a?b",
        ] {
            let error = text.parse::<Location>().unwrap_err();
            assert!(error.contains(text) && error.contains("sqlite:PATH"), "{error}");
        }
        let error = "http://levade:secret@h/a".parse::<Location>().unwrap_err();
        assert!(error.contains("@h") && !error.contains("secret"), "{error}");
        let error = "mongodb+srv://u:secret@h/runs".parse::<Location>().unwrap_err();
        assert!(error.contains("mongodb://") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn location_opens_sqlite_file_to_start_resume_and_read_run() {
        let dir = tempfile::tempdir().unwrap();
        let location = Location::Sqlite("records.db".into());
        let run = RunId("run".into());
        let other = RunId("other".into());
        let error = wait(location.open_local(dir.path(), StoreAccess::Read)).err().unwrap();
        assert!(error.is_user_error() && error.to_string().contains("records.db"), "{error}");
        drop(wait(location.open_local(dir.path(), StoreAccess::Start(&run))).unwrap());
        assert!(location.file(dir.path()).unwrap().is_file());
        assert!(wait(location.open_local(dir.path(), StoreAccess::Start(&other))).is_err());
        for access in [StoreAccess::Resume(&other), StoreAccess::Read] {
            assert_eq!(*wait(location.open_local(dir.path(), access)).unwrap().run(), run);
        }
    }

    #[test]
    fn location_in_memory_rejects_resume_and_read() {
        let dir = Path::new("runs/a");
        let run = RunId("run".into());
        assert_eq!(
            *wait(Location::Memory.open_local(dir, StoreAccess::Start(&run))).unwrap().run(),
            run
        );
        for access in [StoreAccess::Resume(&run), StoreAccess::Read] {
            let error = wait(Location::Memory.open_local(dir, access)).err().unwrap();
            assert!(error.is_user_error() && error.to_string().contains("runs/a"), "{error}");
        }
    }
}
