//! The sandbox: a fork server with a limit on concurrent runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};

use crate::cgroup::CgroupParent;
use crate::error::SandboxError;
use crate::limits::Limits;
use crate::protection::{
    Demand, MissingWall, Protection, describe_missing_walls, missing_walls_advice,
};
use crate::python::Python;
use crate::run::{Language, Outcome, Run, check_paths_and_variables, choose_main_file, run_to_end};
use crate::zygote::{RunOrder, Zygote, ZygoteConfig};

/// Configuration of a sandbox.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The Python interpreter to use: a command name, a file, or the directory of a virtual
    /// environment.
    pub python: PathBuf,
    /// Names of Python modules that are imported before each run starts.
    pub preload: Vec<String>,
    /// Additional files and directories that code can read but not write.
    pub read: Vec<PathBuf>,
    /// Required level of protection. If it is not available, no code runs.
    pub protection: Demand,
    /// Maximum number of runs and session cells at the same time.
    pub concurrency: usize,
    /// Maximum number of runs and session cells that wait in the queue.
    pub waiting: usize,
    /// Maximum number of open sessions.
    pub sessions: usize,
    /// Whether each run gets a cgroup, if this process can create cgroups. Without a cgroup, memory
    /// is limited by observing the processes.
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

/// A sandbox for untrusted code. Clones share the same sandbox. When the last clone and the last
/// session are dropped, all its processes and files are removed.
#[derive(Clone)]
pub struct Sandbox(pub(crate) Arc<SandboxInner>);

pub(crate) struct SandboxInner {
    config: ZygoteConfig,
    options: Options,
    protection: Protection,
    zygote: Mutex<Option<Arc<Zygote>>>,
    running: Semaphore,
    waiting: AtomicUsize,
    pub(crate) sessions: Arc<Semaphore>,
    /// Parent of the work directories if there are no namespaces.
    scratch: Option<tempfile::TempDir>,
    /// Number of work directories that were created in `scratch`.
    dir_count: AtomicUsize,
}

impl std::fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandbox").field("options", &self.0.options).finish_non_exhaustive()
    }
}

impl Sandbox {
    /// Starts a sandbox and tests its protection with a run.
    ///
    /// # Errors
    /// Returns an error if the interpreter cannot be used, or [`SandboxError::Protection`] if the
    /// kernel provides less protection than requested.
    pub async fn start(options: Options) -> Result<Self, SandboxError> {
        let python = Python::find(&options.python, &options.read).await?;
        let full = options.protection == Demand::Full;
        let groups = options.cgroup.then(CgroupParent::create).transpose();
        let groups = groups.unwrap_or_else(|why| {
            tracing::debug!(%why, "runs have no cgroup; watching their memory instead");
            None
        });
        let mut config = ZygoteConfig {
            python,
            preload: options.preload.clone(),
            full,
            namespaces: true,
            groups,
        };
        let mut zygote = Zygote::start(&config).await?;
        let mut missing = std::mem::take(&mut zygote.missing);
        if !missing.is_empty() && !full {
            config.namespaces = false;
            zygote = Zygote::start(&config).await?;
        }
        // A run reveals which further walls are missing.
        config.full = false;
        let scratch = if config.namespaces {
            None
        } else {
            Some(create_scratch_dir().map_err(|error| {
                SandboxError::Broken(format!(
                    "cannot create the work directory of the sandbox: {error}"
                ))
            })?)
        };
        let mut inner = SandboxInner {
            running: Semaphore::new(options.concurrency.max(1)),
            sessions: Arc::new(Semaphore::new(options.sessions)),
            waiting: AtomicUsize::new(0),
            zygote: Mutex::new(None),
            protection: Protection::default(),
            config,
            options,
            scratch,
            dir_count: AtomicUsize::new(0),
        };
        if missing.is_empty() || !full {
            missing.extend(inner.probe_walls(&zygote).await?);
        }
        if full && !missing.is_empty() {
            return Err(SandboxError::Protection {
                missing: describe_missing_walls(&missing),
                way_out: missing_walls_advice(&missing),
            });
        }
        inner.config.full = full;
        inner.protection = Protection::with_missing(missing);
        *inner.zygote.get_mut() = Some(Arc::new(zygote));
        Ok(Sandbox(Arc::new(inner)))
    }

    /// Returns the protection under which the sandbox runs code.
    pub fn protection(&self) -> &Protection {
        &self.0.protection
    }

    /// Returns whether each run has a cgroup, by which the kernel limits its memory.
    pub fn has_cgroups(&self) -> bool {
        self.0.config.groups.is_some()
    }

    /// Returns the version of the Python interpreter.
    pub fn python(&self) -> &str {
        &self.0.config.python.version
    }

    /// Returns the options with which the sandbox was started.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// Runs code to its end. Dropping the future ends the run.
    ///
    /// # Errors
    /// Returns an error if the request is invalid, the queue is full, or the sandbox itself fails.
    /// Whatever the code does is an outcome.
    pub async fn run(&self, run: &Run) -> Result<Outcome, SandboxError> {
        run.limits.check().map_err(SandboxError::Request)?;
        check_paths_and_variables(&run.files, &run.fetch, &run.environment)?;
        let _permit = self.0.acquire_permit().await?;
        let zygote = self.0.get_zygote().await?;
        let (outcome, jail) = run_to_end(&zygote, &self.0.to_order(run, false), run).await?;
        if self.0.config.full && !jail.missing.is_empty() {
            let missing = describe_missing_walls(&jail.missing);
            return Err(SandboxError::Broken(format!(
                "the protection of the sandbox was lost, so the code was not run: {missing}"
            )));
        }
        Ok(outcome)
    }
}

impl SandboxInner {
    /// Returns whether the sandbox requires every wall of full protection.
    pub(crate) fn is_full(&self) -> bool {
        self.config.full
    }

    /// Acquires a permit to run code, after waiting in the queue if necessary.
    pub(crate) async fn acquire_permit(&self) -> Result<SemaphorePermit<'_>, SandboxError> {
        if let Ok(permit) = self.running.try_acquire() {
            return Ok(permit);
        }
        struct QueueGuard<'a>(&'a AtomicUsize);
        impl Drop for QueueGuard<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waits = QueueGuard(&self.waiting);
        if before >= self.options.waiting {
            return Err(SandboxError::Busy {
                running: self.options.concurrency,
                waiting: self.options.waiting,
            });
        }
        self.running.acquire().await.map_err(|_| SandboxError::Broken("it is closed".into()))
    }

    /// Returns the fork server. If it has exited, starts another one.
    pub(crate) async fn get_zygote(&self) -> Result<Arc<Zygote>, SandboxError> {
        let mut zygote = self.zygote.lock().await;
        if let Some(zygote) = zygote.as_ref().filter(|zygote| zygote.is_alive()) {
            return Ok(Arc::clone(zygote));
        }
        tracing::warn!("the fork server has exited; starting another one");
        let started = Arc::new(Zygote::start(&self.config).await?);
        if self.config.namespaces && !started.missing.is_empty() {
            return Err(SandboxError::Protection {
                missing: describe_missing_walls(&started.missing),
                way_out: missing_walls_advice(&started.missing),
            });
        }
        *zygote = Some(Arc::clone(&started));
        Ok(started)
    }

    /// Runs a test program, and returns the walls that are missing for it.
    async fn probe_walls(&self, zygote: &Zygote) -> Result<Vec<MissingWall>, SandboxError> {
        // The run must be long enough for the memory watch to observe it.
        let run = Run::new(Language::Python, "import time; time.sleep(0.02)");
        let (outcome, jail) = run_to_end(zygote, &self.to_order(&run, false), &run).await?;
        let mut missing: Vec<MissingWall> = jail.missing.clone();
        if !jail.was_watched {
            missing.push(MissingWall {
                name: "memory-watch".into(),
                why: "/proc does not list the children of processes".into(),
            });
        }
        if outcome.return_code() != Some(0) {
            let last_line = outcome.stderr.text();
            let last_line =
                last_line.lines().last().unwrap_or("the code printed nothing").to_owned();
            return Err(SandboxError::Broken(format!(
                "the test run of the sandbox ended with {:?}: {last_line}",
                outcome.ended
            )));
        }
        Ok(missing)
    }

    /// Creates the message that describes a run to its keeper process.
    pub(crate) fn to_order(&self, run: &Run, session: bool) -> RunOrder {
        let dir = self.scratch.as_ref().map(|scratch| {
            let number = self.dir_count.fetch_add(1, Ordering::Relaxed);
            scratch.path().join(number.to_string()).to_string_lossy().into_owned()
        });
        let main = choose_main_file(run.language, &run.files);
        let shell =
            ["/bin/bash", "/bin/sh"].into_iter().find(|path| std::path::Path::new(path).exists());
        let home = dir.clone().unwrap_or_else(|| "/work".into());
        let command = match run.language {
            Language::Python => None,
            Language::Shell => {
                Some(vec![shell.unwrap_or("/bin/sh").to_owned(), format!("{home}/{main}")])
            }
        };
        let Limits { memory_mb, processes, open_files, file_mb, disk_mb, files, .. } = run.limits;
        // A session may exist for long, so its processor time is not limited. In a run, threads may
        // use all processors until the deadline.
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let cpu =
            if session { 1 << 30 } else { (run.limits.seconds.ceil() as u64 + 2) * processors };
        let code = (main.clone(), run.code.len());
        let sizes = run.files.iter().map(|(name, content)| (name.clone(), content.len()));
        RunOrder {
            command,
            session,
            shown: run.limits.output_bytes,
            environment: run.environment.clone(),
            files: if session { sizes.collect() } else { sizes.chain([code]).collect() },
            main,
            fetch: run.fetch.clone(),
            fetch_bytes: run.limits.fetch_mb << 20,
            dir,
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
    /// Returns the exit code of a run as in Python's `subprocess`, or `None` if the run exceeded
    /// its time limit.
    pub fn return_code(&self) -> Option<i32> {
        self.ended.return_code()
    }
}

/// Creates a temporary directory through which an unprivileged user can reach its own directory.
fn create_scratch_dir() -> std::io::Result<tempfile::TempDir> {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::Builder::new().prefix("levade-sandbox-").tempdir()?;
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711))?;
    Ok(dir)
}
