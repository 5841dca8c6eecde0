//! Stores of runs, each with the lease of its trainer.
//!
//! A run `NAME` is the file `NAME.db` in one directory, or in the memory of the server. Its lease
//! is the file `NAME.lease` in the same directory.
//!
//! The epoch of a lease rises with every trainer that opens the run for writing, and a write with
//! an earlier epoch is rejected. While a trainer renews the lease, only a trainer of the same run
//! directory can take the run over. A removed run keeps its lease file, in which the lease has
//! ended, so that no epoch is used twice.
//!
//! Two servers would not see each other's leases. So a server that writes a run locks the file
//! `NAME.lock` until the server exits.
//!
//! # Concurrency
//! Calls hold the lock of their run shared. A trainer that takes the run over holds the lock
//! exclusively: no write of the earlier trainer is in progress when the epoch rises.

use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use levade_store::wire::{OpenRequest, OpenedRun, RunEntry, Trainer};
use levade_store::{Code, Location, Purpose, RunId, Store, StoreAccess, StoreError, is_run_name};
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

/// Number of lease renewals that a trainer sends within the duration of the lease.
const RENEWALS: u32 = 6;

/// The stores of all runs on the server, with their leases.
pub(crate) struct ServedRuns {
    /// Directory that contains the stores. `None` keeps the stores in memory.
    dir: Option<PathBuf>,
    /// Duration of a lease without renewal.
    ttl: Duration,
    runs: Mutex<HashMap<String, Arc<RwLock<ServedRun>>>>,
}

/// State of one run on the server.
#[derive(Default)]
pub(crate) struct ServedRun {
    /// Store of the run. `None` if no request has used the run yet.
    store: Option<Arc<dyn Store>>,
    is_writable: bool,
    lease: Option<RunLease>,
    /// Locked file, which prevents other servers from writing the run.
    lock: Option<File>,
}

struct RunLease {
    record: LeaseRecord,
    /// Time of the last renewal of the lease. `None` if the run was removed.
    renewed: Mutex<Option<Instant>>,
}

/// Persistent state of a lease, which is stored in the lease file of the run.
#[derive(Clone, Serialize, Deserialize)]
struct LeaseRecord {
    epoch: u64,
    trainer: Trainer,
    /// Whether the run was removed. The removal also ended the lease.
    #[serde(default)]
    is_removed: bool,
}

impl RunLease {
    fn new(record: LeaseRecord) -> Self {
        let renewed = (!record.is_removed).then(Instant::now);
        RunLease { record, renewed: Mutex::new(renewed) }
    }

    fn renew(&self) {
        *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Returns the remaining duration of the lease, or `None` if the lease has ended. `ttl` is the
    /// duration without renewal.
    fn remaining_time(&self, ttl: Duration) -> Option<Duration> {
        let renewed = *self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        ttl.checked_sub(renewed?.elapsed())
    }
}

/// A run with a read lock, which is held during one call.
pub(crate) type LockedRun = OwnedRwLockReadGuard<ServedRun>;

impl ServedRun {
    /// Returns the store of the run. `name` is the name of the run, for the error.
    ///
    /// # Errors
    /// Returns an error if the run does not exist.
    pub fn store(&self, name: &str) -> Result<&dyn Store, StoreError> {
        self.store.as_deref().ok_or_else(|| unknown_run_error(name))
    }

    /// Checks that a write comes from the trainer that holds the lease with the number `epoch`, and
    /// renews that lease.
    fn check_epoch(&self, name: &str, epoch: u64, key: &str) -> Result<(), StoreError> {
        match &self.lease {
            Some(lease) if lease.record.epoch == epoch => {
                lease.renew();
                Ok(())
            }
            Some(lease) if lease.record.epoch > epoch => Err(StoreError::Fenced {
                location: name.to_owned(),
                key: key.to_owned(),
                holder: lease.record.trainer.name.clone(),
            }),
            _ => Err(unknown_run_error(name)),
        }
    }
}

impl ServedRuns {
    /// Creates a collection of run stores in `dir`, or in memory if `dir` is `None`. `ttl` is the
    /// duration of a lease.
    pub fn new(dir: Option<PathBuf>, ttl: Duration) -> Self {
        ServedRuns { dir, ttl, runs: Mutex::default() }
    }

    fn run(&self, name: &str) -> Arc<RwLock<ServedRun>> {
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(runs.entry(name.to_owned()).or_default())
    }

    /// Opens the run `name`. If the request opens the run for writing, its trainer acquires the
    /// lease.
    pub async fn open(&self, name: &str, request: OpenRequest) -> Result<OpenedRun, StoreError> {
        let heartbeat = self.ttl / RENEWALS;
        let OpenRequest::Write { is_new, run: id, trainer } = request else {
            let run = self.lock_for_read(name).await?.store(name)?.run().clone();
            return Ok(OpenedRun { run, epoch: 0, heartbeat });
        };
        let mut run = self.run(name).write_owned().await;
        self.lock(&mut run, name).await?;
        self.load_lease(&mut run, name).await?;
        let access = if is_new { StoreAccess::Start(&id) } else { StoreAccess::Resume(&id) };
        self.open_store(&mut run, name, access).await?;
        let store = run.store(name)?;
        let found = store.run().clone();
        if is_new && found != id {
            return Err(StoreError::OtherRun {
                location: name.to_owned(),
                found: found.to_string(),
                expected: id.to_string(),
            });
        }
        if is_new && !has_no_records(store).await? {
            return Err(StoreError::NotEmpty { location: name.to_owned() });
        }
        if let Some(lease) = &run.lease
            && lease.record.trainer.owner != trainer.owner
            && let Some(rest) = lease.remaining_time(self.ttl)
        {
            return Err(leased_error(name, lease, rest));
        }
        let epoch = run.lease.as_ref().map_or(0, |lease| lease.record.epoch) + 1;
        self.record_lease(&mut run, name, LeaseRecord { epoch, trainer, is_removed: false })
            .await?;
        Ok(OpenedRun { run: found, epoch, heartbeat })
    }

    /// Stores a new lease of a run. The caller must have locked the run exclusively.
    async fn record_lease(
        &self,
        run: &mut ServedRun,
        name: &str,
        record: LeaseRecord,
    ) -> Result<(), StoreError> {
        if let Some(file) = self.lease_file(name) {
            let text = serde_json::to_vec(&record).unwrap_or_default();
            run_blocking(name, "record", move || replace_file_atomically(&file, &text)).await?;
        }
        run.lease = Some(RunLease::new(record));
        Ok(())
    }

    /// Returns all runs on the server, sorted by name.
    pub async fn list(&self) -> Result<Vec<RunEntry>, StoreError> {
        let mut found = match self.dir.clone() {
            Some(dir) => run_blocking("the runs", "read", move || list_run_files(&dir)).await?,
            None => Vec::new(),
        };
        let known: Vec<(String, Arc<RwLock<ServedRun>>)> = {
            let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
            runs.iter().map(|(name, run)| (name.clone(), Arc::clone(run))).collect()
        };
        for (name, run) in known {
            let run = run.read_owned().await;
            if self.dir.is_none() && run.store.is_some() {
                found.push(RunEntry {
                    name: name.clone(),
                    bytes: 0,
                    idle_seconds: None,
                    trainer: None,
                });
            }
            let active =
                run.lease.as_ref().filter(|lease| lease.remaining_time(self.ttl).is_some());
            if let Some(entry) = found.iter_mut().find(|entry| entry.name == name) {
                entry.trainer = active.map(|lease| lease.record.trainer.name.clone());
            }
        }
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// Removes the run `name` and its stored data. A later run with this name starts empty.
    ///
    /// # Errors
    /// Returns [`StoreError::Leased`] if a trainer has the lease of the run, and an error if the
    /// run does not exist or its files cannot be removed.
    pub async fn remove_run(&self, name: &str) -> Result<(), StoreError> {
        let mut run = self.run(name).write_owned().await;
        if run.store.is_none() {
            self.check_exists(name).await?;
        }
        self.lock(&mut run, name).await?;
        self.load_lease(&mut run, name).await?;
        if let Some(lease) = &run.lease
            && let Some(rest) = lease.remaining_time(self.ttl)
        {
            return Err(leased_error(name, lease, rest));
        }
        // The lease ends first, so that a trainer that still holds it cannot write into a later run
        // of this name.
        let epoch = run.lease.as_ref().map_or(0, |lease| lease.record.epoch) + 1;
        let trainer = Trainer { owner: String::new(), name: "the removal of the run".to_owned() };
        self.record_lease(&mut run, name, LeaseRecord { epoch, trainer, is_removed: true }).await?;
        let store = run.store.take();
        run.is_writable = false;
        let files = self.dir.as_ref().map(|dir| record_files(dir, name));
        run_blocking(name, "remove", move || {
            // Dropping the store closes its file.
            drop(store);
            files.into_iter().flatten().try_for_each(|file| remove_if_exists(&file))
        })
        .await
    }

    /// Locks the run `name` for a read, and returns it.
    pub async fn lock_for_read(&self, name: &str) -> Result<LockedRun, StoreError> {
        let run = self.run(name);
        let locked = Arc::clone(&run).read_owned().await;
        if locked.store.is_some() {
            return Ok(locked);
        }
        drop(locked);
        let mut locked = run.write_owned().await;
        if locked.store.is_none() {
            self.check_exists(name).await?;
            self.open_store(&mut locked, name, StoreAccess::Read).await?;
        }
        Ok(locked.downgrade())
    }

    /// Locks the run `name` for a write of the trainer that holds the lease with the number
    /// `epoch`, and returns the run.
    pub async fn lock_for_write(
        &self,
        name: &str,
        epoch: u64,
        key: &str,
    ) -> Result<LockedRun, StoreError> {
        let run = self.run(name);
        let locked = Arc::clone(&run).read_owned().await;
        if locked.is_writable {
            locked.check_epoch(name, epoch, key)?;
            return Ok(locked);
        }
        drop(locked);
        // If the run is not open for writing yet, the server was restarted after the trainer opened
        // the run.
        let mut locked = run.write_owned().await;
        if !locked.is_writable {
            // A missing file must not be created again. The new file would have another run id, and
            // the trainer would continue with an empty record.
            self.check_exists(name).await?;
        }
        self.lock(&mut locked, name).await?;
        self.load_lease(&mut locked, name).await?;
        locked.check_epoch(name, epoch, key)?;
        if !locked.is_writable {
            self.open_store(&mut locked, name, StoreAccess::Resume(&RunId(name.to_owned())))
                .await?;
        }
        Ok(locked.downgrade())
    }

    /// Locks the file of the run, so that no other server can write the run until this server
    /// exits.
    ///
    /// # Errors
    /// Returns [`Code::Unavailable`] if another server writes the run. Clients then wait for it.
    async fn lock(&self, run: &mut ServedRun, name: &str) -> Result<(), StoreError> {
        let Some(dir) = self.dir.clone().filter(|_| run.lock.is_none()) else { return Ok(()) };
        let path = dir.join(format!("{name}.lock"));
        run.lock = run_blocking(name, "open", move || {
            std::fs::create_dir_all(dir)?;
            let file = File::options().create(true).truncate(false).write(true).open(path)?;
            match file.try_lock() {
                Ok(()) => Ok(Some(file)),
                Err(TryLockError::WouldBlock) => Ok(None),
                Err(TryLockError::Error(error)) => Err(error),
            }
        })
        .await?;
        if run.lock.is_some() {
            return Ok(());
        }
        let why = "another store server writes the run; stop one of the two servers";
        Err(StoreError::Failed {
            location: name.to_owned(),
            action: "open",
            key: "the run".to_owned(),
            code: Code::Unavailable,
            source: why.into(),
        })
    }

    /// Returns an error if the run `name` has no file.
    async fn check_exists(&self, name: &str) -> Result<(), StoreError> {
        let file = self.dir.as_ref().map(|dir| dir.join(format!("{name}.db")));
        let look = move || file.map_or(Ok(false), |file| file.try_exists());
        if run_blocking(name, "read", look).await? { Ok(()) } else { Err(unknown_run_error(name)) }
    }

    /// Opens the store of the run `name`. The caller must have locked the run exclusively.
    async fn open_store(
        &self,
        run: &mut ServedRun,
        name: &str,
        access: StoreAccess<'_>,
    ) -> Result<(), StoreError> {
        let is_writable = access != StoreAccess::Read;
        if run.is_writable {
            return Ok(());
        }
        run.store = match (&self.dir, access) {
            (Some(dir), access) => {
                let created = dir.clone();
                run_blocking(name, "open", move || std::fs::create_dir_all(created)).await?;
                let file = Location::Sqlite(format!("{name}.db").into());
                Some(file.open_local(dir, access).await?)
            }
            (None, StoreAccess::Start(id) | StoreAccess::Resume(id)) => {
                Some(Location::Memory.open_local(Path::new(name), StoreAccess::Start(id)).await?)
            }
            (None, StoreAccess::Read) => return Err(unknown_run_error(name)),
        };
        run.is_writable = is_writable;
        Ok(())
    }

    fn lease_file(&self, name: &str) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(format!("{name}.lease")))
    }

    /// Reads the lease of a run from its file, unless this server has read the lease already. The
    /// trainer then has the full duration of a lease to renew it.
    async fn load_lease(&self, run: &mut ServedRun, name: &str) -> Result<(), StoreError> {
        let Some(file) = self.lease_file(name).filter(|_| run.lease.is_none()) else {
            return Ok(());
        };
        let text = run_blocking(name, "read", move || match std::fs::read(file) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            text => text.map(Some),
        });
        if let Some(text) = text.await? {
            let record = serde_json::from_slice(&text).map_err(|error| StoreError::Corrupt {
                location: name.to_owned(),
                key: "the lease of the run".to_owned(),
                what: error.to_string(),
            })?;
            run.lease = Some(RunLease::new(record));
        }
        Ok(())
    }
}

/// Returns whether a store contains no records.
async fn has_no_records(store: &dyn Store) -> Result<bool, StoreError> {
    for purpose in Purpose::ALL {
        if !store.tasks(purpose).await?.is_empty() {
            return Ok(false);
        }
    }
    Ok(store.planned_steps().await?.is_empty() && store.evals().await?.is_empty())
}

fn leased_error(name: &str, lease: &RunLease, rest: Duration) -> StoreError {
    StoreError::Leased {
        location: name.to_owned(),
        holder: lease.record.trainer.name.clone(),
        seconds: rest.as_secs() + 1,
    }
}

/// Lists the runs that have a file in `dir`. The field `trainer` of each entry is `None`.
fn list_run_files(dir: &Path) -> std::io::Result<Vec<RunEntry>> {
    let files = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        files => files?,
    };
    let mut found = Vec::new();
    for file in files {
        let path = file?.path();
        let is_record = path.extension().is_some_and(|extension| extension == "db");
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        if !is_record || !is_run_name(name) {
            continue;
        }
        // A file may have been removed since the directory was read.
        let present = record_files(dir, name).into_iter().filter_map(|file| file.metadata().ok());
        let present: Vec<std::fs::Metadata> = present.collect();
        let changed = present.iter().filter_map(|file| file.modified().ok()).max();
        found.push(RunEntry {
            name: name.to_owned(),
            bytes: present.iter().map(std::fs::Metadata::len).sum(),
            idle_seconds: changed.map(|time| time.elapsed().unwrap_or_default().as_secs_f64()),
            trainer: None,
        });
    }
    Ok(found)
}

/// Returns the paths of the files of a run's store, in the order in which they are removed. The log
/// is first: without its database, SQLite would replay the log into a later database with the same
/// name.
fn record_files(dir: &Path, name: &str) -> [PathBuf; 3] {
    ["db-wal", "db-shm", "db"].map(|extension| dir.join(format!("{name}.{extension}")))
}

fn remove_if_exists(file: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn unknown_run_error(name: &str) -> StoreError {
    StoreError::Open {
        location: name.to_owned(),
        code: Code::NotFound,
        source: "the server has no run of this name".into(),
    }
}

/// Runs the blocking file operations `work` on a thread for blocking calls.
async fn run_blocking<T: Send + 'static>(
    name: &str,
    action: &'static str,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, StoreError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other).flatten();
    done.map_err(|error| StoreError::Failed {
        location: name.to_owned(),
        action,
        key: "the files of the run".to_owned(),
        code: Code::Internal,
        source: error.into(),
    })
}

/// Replaces a file atomically. After a crash, the file has either its old or its new contents.
fn replace_file_atomically(file: &Path, contents: &[u8]) -> std::io::Result<()> {
    let new = file.with_extension("lease.new");
    let mut written = std::fs::File::create(&new)?;
    written.write_all(contents)?;
    written.sync_all()?;
    std::fs::rename(&new, file)?;
    match file.parent() {
        Some(dir) => std::fs::File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}
