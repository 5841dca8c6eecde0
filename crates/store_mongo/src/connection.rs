//! A connection to one database: opening with a deadline, retries, and errors that name the address
//! and a way out.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use levade_policy::process_time::{self, Stopwatch};
use levade_store::backend::Failure;
use levade_store::rollouts::{Clock, RolloutError, SystemClock};
use levade_store::{Code, MongoUrl, PASSWORD_VARIABLE, StoreError};
use mongodb::bson::{Bson, Document, doc};
use mongodb::error::{Error, ErrorKind, WriteFailure};
use mongodb::options::{Acknowledgment, ClientOptions, WriteConcern};
use mongodb::{Client, Collection, Database, IndexModel};
use tracing::{debug, trace};

/// Timeout for the first response of a MongoDB server, unless the URL sets
/// `serverSelectionTimeoutMS`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout for a database operation, including its retries while the server is unavailable.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);

/// Interval between two tries of a database operation while the server is unavailable.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Time for which the MongoDB driver searches for a server before it reports that no server is
/// available.
const SELECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// Error of a database operation, without the location and the key, which [`Connection::run`] adds.
#[derive(Debug)]
pub(crate) enum OperationError {
    /// The database operation failed.
    Failed(Failure),
    /// Another trainer has acquired the lease of the run. The text identifies the trainer.
    Fenced(String),
}

/// Result of a function that runs within a database operation.
pub(crate) type Result<T> = std::result::Result<T, OperationError>;

impl From<Failure> for OperationError {
    fn from(failure: Failure) -> Self {
        OperationError::Failed(failure)
    }
}

impl From<RolloutError> for OperationError {
    fn from(error: RolloutError) -> Self {
        OperationError::Failed(Failure::Backend(error.code(), error.into()))
    }
}

impl From<Error> for OperationError {
    fn from(error: Error) -> Self {
        OperationError::Failed(to_failure(error))
    }
}

/// Converts an error of the MongoDB driver to a failure whose message contains a remedy.
fn to_failure(error: Error) -> Failure {
    let code = classify_error(&error);
    if code == Code::Invalid {
        return Failure::Unstorable(error.to_string());
    }
    let remedy = match code {
        Code::Unavailable => "check that MongoDB runs at this address and can be reached",
        Code::Forbidden => {
            "check user, password and `authSource` in the URL, and that the user has the role \
             `readWrite` in this database"
        }
        Code::Full => "free space on the disk of the server",
        _ => return Failure::Backend(code, error.into()),
    };
    Failure::Backend(code, format!("{error}; {remedy}").into())
}

/// Maps an error of the MongoDB driver to a category of store errors.
fn classify_error(error: &Error) -> Code {
    if error.contains_label("RetryableWriteError")
        || error.contains_label("TransientTransactionError")
    {
        return Code::Unavailable;
    }
    match &*error.kind {
        ErrorKind::Io(_)
        | ErrorKind::ServerSelection { .. }
        | ErrorKind::ConnectionPoolCleared { .. }
        | ErrorKind::DnsResolve { .. } => Code::Unavailable,
        ErrorKind::Authentication { .. } => Code::Forbidden,
        ErrorKind::BsonDeserialization(_) | ErrorKind::Bson(_) => Code::Corrupt,
        ErrorKind::BsonSerialization(_) => Code::Invalid,
        _ => server_code(error).map_or(Code::Internal, |code| match code {
            // Unauthorized, AuthenticationFailed.
            13 | 18 => Code::Forbidden,
            // OutOfDiskSpace.
            14031 => Code::Full,
            // BSONObjectTooLarge, and its variants for inserted and updated documents.
            10334 | 17419 | 17420 => Code::Invalid,
            // The server stops, starts, or is no longer the primary; a write conflicted.
            6 | 7 | 50 | 89 | 91 | 112 | 189 | 262 | 9001 | 10058 | 10107 | 11600 | 11602
            | 13435 | 13436 => Code::Unavailable,
            _ => Code::Internal,
        }),
    }
}

/// Returns the error code that the server sent, or `None` if the error does not come from a server.
fn server_code(error: &Error) -> Option<i32> {
    match &*error.kind {
        ErrorKind::Command(error) => Some(error.code),
        ErrorKind::Write(WriteFailure::WriteError(error)) => Some(error.code),
        ErrorKind::Write(WriteFailure::WriteConcernError(error)) => Some(error.code),
        ErrorKind::InsertMany(error) => {
            let first = error.write_errors.as_ref().and_then(|errors| errors.first());
            first.map(|error| error.code).or(error.write_concern_error.as_ref().map(|e| e.code))
        }
        _ => None,
    }
}

/// Returns whether all failures of a write are documents whose unique key exists already.
pub(crate) fn is_duplicate(error: &Error) -> bool {
    const DUPLICATE_KEY: i32 = 11000;
    if let ErrorKind::InsertMany(error) = &*error.kind
        && let Some(errors) = &error.write_errors
    {
        let is_only_error = error.write_concern_error.is_none();
        return is_only_error && errors.iter().all(|error| error.code == DUPLICATE_KEY);
    }
    // Server NX-27017 reports a duplicate key without a code.
    server_code(error) == Some(DUPLICATE_KEY) || error.to_string().contains("UNIQUE constraint")
}

/// Connection to one MongoDB database.
pub(crate) struct Connection {
    pub database: Database,
    /// Server address and database name, without user and password.
    pub location: String,
    pub clock: Arc<ServerClock>,
}

/// Clock of the MongoDB server, so that processes on several machines agree on the time. The
/// server's time is read once, and then advanced by the local clock.
#[derive(Debug)]
pub(crate) struct ServerClock {
    clock: SystemClock,
    /// Time of the server minus the time of the local `clock`, in seconds.
    offset: f64,
}

impl Clock for ServerClock {
    fn now(&self) -> f64 {
        self.clock.now() + self.offset
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("location", &self.location).finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects to the database `name`, and waits for a first response of the MongoDB server.
    ///
    /// # Errors
    /// Returns [`StoreError::Open`] if the options of the URL are invalid or the server rejects the
    /// user, and [`StoreError::Deadline`] if no server responds in time.
    pub async fn open(url: &MongoUrl, name: &str) -> std::result::Result<Self, StoreError> {
        let location = url.location(name);
        let open_error = |error: Error| {
            let (code, source) = match to_failure(error) {
                Failure::Backend(code, source) => (code, source),
                other => (Code::Invalid, format!("{other:?}").into()),
            };
            StoreError::Open { location: location.clone(), code, source }
        };
        let password = std::env::var(PASSWORD_VARIABLE).ok();
        let driver_url = url.to_driver_url(password.as_deref());
        let mut options = ClientOptions::parse(driver_url).await.map_err(open_error)?;
        options.app_name.get_or_insert_with(|| "levade".to_owned());
        if options.write_concern.is_none() {
            let durable = WriteConcern::builder().w(Acknowledgment::Majority).journal(true);
            options.write_concern = Some(durable.build());
        }
        let timeout = options.server_selection_timeout.replace(SELECTION_TIMEOUT);
        let timeout = timeout.unwrap_or(CONNECT_TIMEOUT);
        let client = Client::with_options(options).map_err(open_error)?;
        let database = client.database(name);
        let mut watch = Stopwatch::start();
        let clock = loop {
            let left = timeout.saturating_sub(watch.elapsed());
            let error = match process_time::with_timeout(left, read_server_clock(&database)).await {
                Some(Ok(clock)) => break Arc::new(clock),
                Some(Err(error)) => Some(error),
                None => None,
            };
            if let Some(error) = error.filter(|error| classify_error(error) != Code::Unavailable) {
                return Err(open_error(error));
            }
            if watch.elapsed() >= timeout {
                let (action, key) =
                    ("open", "the database: no MongoDB server responded".to_owned());
                return Err(StoreError::Deadline { location, action, key, waited: timeout });
            }
            process_time::sleep(RETRY_INTERVAL).await;
        };
        Ok(Connection { database, location, clock })
    }

    /// Returns the collection with the name `name`.
    pub fn collection(&self, name: &str) -> Collection<Document> {
        self.database.collection(name)
    }

    /// Runs a database operation, and repeats it until a deadline while the server is unavailable.
    /// The operation must be safe to repeat.
    pub async fn run<T, F>(
        &self,
        action: &'static str,
        key: impl Into<String>,
        operation: impl Fn() -> F,
    ) -> std::result::Result<T, StoreError>
    where
        F: Future<Output = Result<T>> + Send,
    {
        let key = key.into();
        let location = self.location.as_str();
        let mut watch = Stopwatch::start();
        loop {
            let left = RESPONSE_TIMEOUT.saturating_sub(watch.elapsed());
            let Some(outcome) = process_time::with_timeout(left, operation()).await else {
                let location = location.to_owned();
                return Err(StoreError::Deadline {
                    location,
                    action,
                    key,
                    waited: RESPONSE_TIMEOUT,
                });
            };
            let seconds = watch.elapsed().as_secs_f64();
            match outcome {
                Err(OperationError::Failed(Failure::Backend(Code::Unavailable, error)))
                    if watch.elapsed() + RETRY_INTERVAL < RESPONSE_TIMEOUT =>
                {
                    debug!(%key, seconds, %error, "waiting for MongoDB to {action}");
                    process_time::sleep(RETRY_INTERVAL).await;
                }
                Err(error) => {
                    let error = match error {
                        OperationError::Failed(failure) => {
                            failure.into_error(location, action, key)
                        }
                        OperationError::Fenced(holder) => {
                            StoreError::Fenced { location: location.to_owned(), key, holder }
                        }
                    };
                    debug!(seconds, %error, "cannot {action}");
                    return Err(error);
                }
                Ok(value) => {
                    if action == "read" {
                        trace!(%key, seconds, "read");
                    } else {
                        debug!(%key, seconds, "recorded");
                    }
                    return Ok(value);
                }
            }
        }
    }

    /// Creates the indexes that do not exist yet.
    pub async fn create_indexes(
        &self,
        indexes: impl IntoIterator<Item = IndexDefinition>,
    ) -> std::result::Result<(), StoreError> {
        for IndexDefinition { collection, name, keys, is_unique, is_sparse } in indexes {
            let options = mongodb::options::IndexOptions::builder()
                .name(name.to_owned())
                .unique(is_unique.then_some(true))
                .sparse(is_sparse.then_some(true))
                .build();
            let model = IndexModel::builder().keys(keys).options(options).build();
            self.run("record", format!("the index {name} of {collection}"), || async {
                self.collection(collection).create_index(model.clone()).await?;
                Ok(())
            })
            .await?;
        }
        Ok(())
    }
}

/// Definition of an index of a MongoDB collection.
pub(crate) struct IndexDefinition {
    pub collection: &'static str,
    pub name: &'static str,
    pub keys: Document,
    pub is_unique: bool,
    /// Whether documents without the indexed field are left out of the index.
    pub is_sparse: bool,
}

impl IndexDefinition {
    /// Creates the definition of an index that is neither unique nor sparse.
    pub fn plain(collection: &'static str, name: &'static str, keys: Document) -> Self {
        IndexDefinition { collection, name, keys, is_unique: false, is_sparse: false }
    }

    /// Makes the index unique: two documents cannot have the same key.
    pub fn unique(self) -> Self {
        IndexDefinition { is_unique: true, ..self }
    }

    /// Makes the index sparse: documents without the indexed field are left out.
    pub fn sparse(self) -> Self {
        IndexDefinition { is_sparse: true, ..self }
    }
}

/// Reads the time of the MongoDB server, and creates a clock that continues it.
async fn read_server_clock(database: &Database) -> mongodb::error::Result<ServerClock> {
    // This read requires the user's permission, so that a wrong password is noticed here.
    database.collection::<Document>("run").find_one(doc! { "_id": "run" }).await?;
    let clock = SystemClock::default();
    let before = clock.now();
    let hello = database.run_command(doc! { "hello": 1 }).await?;
    let middle = (before + clock.now()) / 2.0;
    let offset = match hello.get("localTime") {
        Some(Bson::DateTime(time)) => time.timestamp_millis() as f64 / 1000.0 - middle,
        Some(Bson::Int64(millis)) => *millis as f64 / 1000.0 - middle,
        _ => 0.0,
    };
    Ok(ServerClock { clock, offset })
}

/// Inserts a document unless a document with the same `_id` exists. Returns the existing document,
/// or `None` if the new document was inserted.
pub(crate) async fn insert_new(
    to: &Collection<Document>,
    document: Document,
) -> Result<Option<Document>> {
    // An upsert would not do: of two concurrent upserts, some servers report both as the first.
    match to.insert_one(&document).await {
        Err(error) if is_duplicate(&error) => {
            Ok(to.find_one(doc! { "_id": document.get("_id") }).await?)
        }
        inserted => {
            inserted?;
            Ok(None)
        }
    }
}

/// Inserts documents, and skips documents whose `_id` exists already.
pub(crate) async fn insert_missing(
    to: &Collection<Document>,
    documents: Vec<Document>,
) -> Result<()> {
    if documents.is_empty() {
        return Ok(());
    }
    match to.insert_many(documents).ordered(false).await {
        Err(error) if !is_duplicate(&error) => Err(error.into()),
        _ => Ok(()),
    }
}

/// Reads all documents that a cursor returns.
pub(crate) async fn collect_documents(
    mut cursor: mongodb::Cursor<Document>,
) -> mongodb::error::Result<Vec<Document>> {
    let mut documents = Vec::new();
    while cursor.advance().await? {
        documents.push(cursor.deserialize_current()?);
    }
    Ok(documents)
}
