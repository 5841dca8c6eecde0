//! The sandbox: a fork server, and places for so many runs at once.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};

use crate::cgroup::Groups;
use crate::error::SandboxError;
use crate::limits::Limits;
use crate::protection::{Demand, Missing, Protection, reasons, way_out};
use crate::python::Python;
use crate::run::{Language, Outcome, Run, check, follow, main_file};
use crate::zygote::{Order, Setup, Zygote};

/// How a sandbox is to be.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The interpreter: a name on the path, a file, or the folder of a virtual environment.
    pub python: PathBuf,
    /// Modules that every run has loaded before it begins.
    pub preload: Vec<String>,
    /// Files and folders that code sees besides, read-only.
    pub read: Vec<PathBuf>,
    /// Protection without which nothing runs.
    pub protection: Demand,
    /// Most runs, and cells of sessions, at once.
    pub concurrency: usize,
    /// Most runs that wait for their turn.
    pub waiting: usize,
    /// Most sessions that are open.
    pub sessions: usize,
    /// Whether each run gets a cgroup, if this process can create them. Without one, memory is watched.
    pub cgroup: bool,
}

impl Default for Options {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Options {
            python: "python3".into(),
            preload: Vec::new(),
            read: Vec::new(),
            protection: Demand::default(),
            concurrency: cores,
            waiting: 1024,
            sessions: 256,
            cgroup: true,
        }
    }
}

/// A place to run code in that nobody trusts. Clones are the same sandbox; when the last is gone, and the
/// last session, nothing is left of it.
#[derive(Clone)]
pub struct Sandbox(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    setup: Setup,
    options: Options,
    protection: Protection,
    zygote: Mutex<Option<Arc<Zygote>>>,
    running: Semaphore,
    waiting: AtomicUsize,
    pub(crate) sessions: Arc<Semaphore>,
    /// Where work folders are without namespaces.
    scratch: Option<tempfile::TempDir>,
    /// Folders that were made there.
    folders: AtomicUsize,
}

impl std::fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandbox").field("options", &self.0.options).finish_non_exhaustive()
    }
}

impl Sandbox {
    /// Starts a sandbox, and tries its protection by a run.
    ///
    /// # Errors
    /// When the interpreter cannot be used, or the kernel gives less protection than is asked for.
    pub async fn start(options: Options) -> Result<Self, SandboxError> {
        let python = Python::find(&options.python, &options.read).await?;
        let full = options.protection == Demand::Full;
        let groups = options.cgroup.then(Groups::create).transpose();
        let groups = groups.unwrap_or_else(|why| {
            tracing::debug!(%why, "runs get no cgroup; memory is watched");
            None
        });
        let mut setup = Setup { python, preload: options.preload.clone(), full, namespaces: true, groups };
        let mut zygote = Zygote::start(&setup).await?;
        let mut missing = std::mem::take(&mut zygote.missing);
        if !missing.is_empty() && !full {
            setup.namespaces = false;
            zygote = Zygote::start(&setup).await?;
        }
        // What more is missing, a run has to show.
        setup.full = false;
        let folder = |error: std::io::Error| SandboxError::Broken(format!("no folder for work: {error}"));
        let scratch = if setup.namespaces { None } else { Some(scratch().map_err(folder)?) };
        let mut inner = Inner {
            running: Semaphore::new(options.concurrency.max(1)),
            sessions: Arc::new(Semaphore::new(options.sessions)),
            waiting: AtomicUsize::new(0),
            zygote: Mutex::new(None),
            protection: Protection::default(),
            setup,
            options,
            scratch,
            folders: AtomicUsize::new(0),
        };
        if missing.is_empty() || !full {
            missing.extend(inner.tried(&zygote).await?);
        }
        if full && !missing.is_empty() {
            return Err(SandboxError::Protection { missing: reasons(&missing), way_out: way_out(&missing) });
        }
        inner.setup.full = full;
        inner.protection = Protection::without(missing);
        *inner.zygote.get_mut() = Some(Arc::new(zygote));
        Ok(Sandbox(Arc::new(inner)))
    }

    /// Protection that code runs behind.
    pub fn protection(&self) -> &Protection {
        &self.0.protection
    }

    /// Whether each run has a cgroup, which limits its memory in the kernel.
    pub fn has_cgroups(&self) -> bool {
        self.0.setup.groups.is_some()
    }

    /// Version of the interpreter.
    pub fn python(&self) -> &str {
        &self.0.setup.python.version
    }

    /// Options that it was started with.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// Runs code to its end. Given up before, it ends.
    ///
    /// # Errors
    /// When the request cannot be met, all places are taken, or the sandbox itself fails. Whatever the code
    /// does is an outcome.
    pub async fn run(&self, run: &Run) -> Result<Outcome, SandboxError> {
        run.limits.check().map_err(SandboxError::Request)?;
        check(&run.files, &run.fetch, &run.environment)?;
        let _place = self.0.place().await?;
        let zygote = self.0.zygote().await?;
        let (outcome, jail) = follow(&zygote, &self.0.order(run, false), run).await?;
        if self.0.setup.full && !jail.missing.is_empty() {
            let missing = reasons(&jail.missing);
            return Err(SandboxError::Broken(format!(
                "protection was lost, and the code was not run: {missing}"
            )));
        }
        Ok(outcome)
    }
}

impl Inner {
    /// Whether all walls must stand.
    pub(crate) fn is_full(&self) -> bool {
        self.setup.full
    }

    /// A place among those that run, at once or after a wait.
    pub(crate) async fn place(&self) -> Result<SemaphorePermit<'_>, SandboxError> {
        if let Ok(place) = self.running.try_acquire() {
            return Ok(place);
        }
        struct Waits<'a>(&'a AtomicUsize);
        impl Drop for Waits<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waits = Waits(&self.waiting);
        if before >= self.options.waiting {
            return Err(SandboxError::Busy {
                running: self.options.concurrency,
                waiting: self.options.waiting,
            });
        }
        self.running.acquire().await.map_err(|_| SandboxError::Broken("it is closed".into()))
    }

    /// The fork server; another one where it has ended.
    pub(crate) async fn zygote(&self) -> Result<Arc<Zygote>, SandboxError> {
        let mut zygote = self.zygote.lock().await;
        if let Some(zygote) = zygote.as_ref().filter(|zygote| zygote.is_alive()) {
            return Ok(Arc::clone(zygote));
        }
        tracing::warn!("the fork server has ended; another one is started");
        let started = Arc::new(Zygote::start(&self.setup).await?);
        if self.setup.namespaces && !started.missing.is_empty() {
            return Err(SandboxError::Protection {
                missing: reasons(&started.missing),
                way_out: way_out(&started.missing),
            });
        }
        *zygote = Some(Arc::clone(&started));
        Ok(started)
    }

    /// Walls that a first run shows to be missing.
    async fn tried(&self, zygote: &Zygote) -> Result<Vec<Missing>, SandboxError> {
        // Long enough to be watched.
        let run = Run::new(Language::Python, "import time; time.sleep(0.02)");
        let (outcome, jail) = follow(zygote, &self.order(&run, false), &run).await?;
        let mut missing: Vec<Missing> = jail.missing.clone();
        if !jail.was_watched {
            missing.push(Missing {
                name: "memory-watch".into(),
                why: "/proc does not list the children of processes".into(),
            });
        }
        if outcome.return_code() != Some(0) {
            let said = outcome.stderr.text();
            let said = said.lines().last().unwrap_or("it said nothing").to_owned();
            return Err(SandboxError::Broken(format!("a first run ended with {:?}: {said}", outcome.ended)));
        }
        Ok(missing)
    }

    /// A run, as its keeper is told of it.
    pub(crate) fn order(&self, run: &Run, session: bool) -> Order {
        let folder = self.scratch.as_ref().map(|scratch| {
            let number = self.folders.fetch_add(1, Ordering::Relaxed);
            scratch.path().join(number.to_string()).to_string_lossy().into_owned()
        });
        let main = main_file(run.language, &run.files);
        let shell = ["/bin/bash", "/bin/sh"].into_iter().find(|path| std::path::Path::new(path).exists());
        let home = folder.clone().unwrap_or_else(|| "/work".into());
        let command = match run.language {
            Language::Python => None,
            Language::Shell => Some(vec![shell.unwrap_or("/bin/sh").to_owned(), format!("{home}/{main}")]),
        };
        let Limits { memory_mb, processes, open_files, file_mb, disk_mb, files, .. } = run.limits;
        // A session may live for long; threads may keep every processor busy for all of a run.
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let cpu = if session { 1 << 30 } else { (run.limits.seconds.ceil() as u64 + 2) * processors };
        let code = (main.clone(), run.code.len());
        let sizes = run.files.iter().map(|(name, content)| (name.clone(), content.len()));
        Order {
            command,
            session,
            shown: run.limits.output_bytes,
            environment: run.environment.clone(),
            files: if session { sizes.collect() } else { sizes.chain([code]).collect() },
            main,
            fetch: run.fetch.clone(),
            fetch_bytes: run.limits.fetch_mb << 20,
            folder,
            limits: json!({
                "memory": memory_mb << 20,
                "processes": processes,
                "open_files": open_files,
                "file": file_mb << 20,
                "disk": disk_mb << 20,
                "inodes": files,
                "cpu": cpu,
            }),
        }
    }
}

impl Outcome {
    /// Exit code as Python's `subprocess` has it; `None` where the run was stopped for time.
    pub fn return_code(&self) -> Option<i32> {
        self.ended.return_code()
    }
}

/// A folder through which a user of no rights gets to its own.
fn scratch() -> std::io::Result<tempfile::TempDir> {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::Builder::new().prefix("levade-sandbox-").tempdir()?;
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711))?;
    Ok(folder)
}
