//! Client of a run's store on a server.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::random_hex;
use levade_store::wire::{
    MEDIA_TYPE, OpenRequest, OpenedRun, Record, Trainer, WireError, decode, encode,
};
use levade_store::{
    Attempt, AttemptEnd, AttemptStart, AttemptSummary, Code, EvalKey, FailedAttempt, StepPlan,
    Store, StoreAccess, StoreError, TryCounts, WithdrawRequest, Withdrawal, WriteOutcome,
    is_run_name,
};
use levade_tree::{AttemptId, AttemptSlot, Purpose, RunId, Segment};
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::ServiceOptions;
use crate::service::{CallError, ServerCall, ServiceClient};

/// Name of the file in a run directory that contains a random text. A store server recognizes the
/// directory by this text.
const OWNER_FILE: &str = "store-owner";

/// Interval between two requests for a lease while another trainer has the lease.
const LEASE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// HTTP client of a run's store on a `levade store serve`.
///
/// A store that was opened for writing renews the lease of its run until it is dropped.
pub struct HttpStore {
    server: Arc<RunConnection>,
    run: RunId,
    /// Background task that renews the lease of the run. `None` if the store was opened only for
    /// reading.
    heartbeats: Option<JoinHandle<()>>,
}

/// Connection to a run on a store server, which calls and lease renewals share.
struct RunConnection {
    service: ServiceClient,
    /// Location of the run: the URL of the server, followed by the name of the run.
    location: String,
    name: String,
    epoch: Option<u64>,
}

impl fmt::Debug for HttpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpStore").field("location", &self.server.location).finish_non_exhaustive()
    }
}

impl Drop for HttpStore {
    fn drop(&mut self) {
        if let Some(heartbeats) = &self.heartbeats {
            heartbeats.abort();
        }
    }
}

impl HttpStore {
    /// Opens the store of the run `name` on the server at `url`, for the run in `run_dir`. If
    /// `name` is `None`, the run has the name of its directory.
    ///
    /// If another trainer has the lease of the run and does not renew it, waits until the lease
    /// ends.
    ///
    /// # Errors
    /// - Returns [`StoreError::Leased`] if another trainer works on the run.
    /// - For [`Start`](StoreAccess::Start), returns [`StoreError::NotEmpty`] if the run has
    ///   records, and [`StoreError::OtherRun`] if it has another id.
    /// - For [`Read`](StoreAccess::Read), returns [`StoreError::Open`] with [`Code::NotFound`] if
    ///   the run does not exist.
    /// - Returns another error if the URL, the name or the key is invalid, or if the server does
    ///   not respond before the timeout of `options`.
    pub async fn open(
        url: &str,
        name: Option<&str>,
        run_dir: &Path,
        access: StoreAccess<'_>,
        options: &ServiceOptions,
    ) -> Result<Self, StoreError> {
        let name = match name {
            Some(name) => name.to_owned(),
            None => run_name_from_dir(run_dir, url)?,
        };
        let location = format!("{url}/{name}");
        let request = match access {
            StoreAccess::Read => OpenRequest::Read,
            StoreAccess::Start(run) | StoreAccess::Resume(run) => OpenRequest::Write {
                is_new: matches!(access, StoreAccess::Start(_)),
                run: run.clone(),
                trainer: identify_trainer(run_dir).await?,
            },
        };
        let service = ServiceClient::new(url, options)?;
        let mut server = RunConnection { service, location, name, epoch: None };
        let OpenedRun { run, epoch, heartbeat } = server.open(request).await?;
        if access == StoreAccess::Read {
            return Ok(HttpStore { server: Arc::new(server), run, heartbeats: None });
        }
        server.epoch = Some(epoch);
        let server = Arc::new(server);
        let heartbeats = tokio::spawn(renew_lease(Arc::clone(&server), heartbeat));
        Ok(HttpStore { server, run, heartbeats: Some(heartbeats) })
    }

    async fn read<R: Record>(
        &self,
        method: &str,
        key: impl fmt::Display,
        arguments: &(impl Record + Sync),
    ) -> Result<R, StoreError> {
        self.server.call(method, "read", key.to_string(), arguments).await
    }

    async fn write<R: Record>(
        &self,
        method: &str,
        key: impl fmt::Display,
        arguments: &(impl Record + Sync),
    ) -> Result<R, StoreError> {
        let key = key.to_string();
        if self.server.epoch.is_none() {
            return Err(StoreError::ReadOnly { location: self.server.location.clone(), key });
        }
        self.server.call(method, "record", key, arguments).await
    }
}

impl RunConnection {
    /// Opens the run on the server. If another trainer has the lease and does not renew it, waits
    /// until the lease ends.
    async fn open(&self, request: OpenRequest) -> Result<OpenedRun, StoreError> {
        let mut rest = None;
        loop {
            let opened = self.call("open", "open", "the run".to_owned(), &request).await;
            let Err(StoreError::Leased { holder, seconds, location }) = opened else {
                return opened;
            };
            // The rest of a lease without renewal decreases by a second at least.
            if rest.is_some_and(|rest| seconds >= rest) {
                return Err(StoreError::Leased { holder, seconds, location });
            }
            if rest.is_none() {
                tracing::warn!(run = %location, %holder, seconds, "waiting for the lease of the run");
            }
            rest = Some(seconds);
            tokio::time::sleep(LEASE_POLL_INTERVAL).await;
        }
    }

    /// Calls a method of the run's store on the server. Every such method is safe to repeat.
    async fn call<R: Record>(
        &self,
        method: &str,
        action: &'static str,
        key: String,
        arguments: &impl Record,
    ) -> Result<R, StoreError> {
        let failed = |key: String, code: Code, why: String| StoreError::Failed {
            location: self.location.clone(),
            action,
            key,
            code,
            source: why.into(),
        };
        let body = match encode(arguments) {
            Ok(body) => body.into(),
            Err(why) => return Err(failed(key, Code::Invalid, why)),
        };
        let call = ServerCall {
            path: format!("/v1/runs/{}/{method}", self.name),
            body,
            content_type: MEDIA_TYPE,
            epoch: self.epoch,
            hold: Duration::ZERO,
            is_repeatable: true,
        };
        match self.service.call::<WireError>(call).await {
            Ok(body) => decode(&body).map_err(|why| failed(key, Code::Internal, why)),
            Err(CallError::Rejected(mut error)) => {
                error.location.clone_from(&self.location);
                Err(error.into())
            }
            Err(CallError::Failed(code, why)) => Err(failed(key, code, why)),
        }
    }
}

/// Renews the lease of a run periodically. Returns when another trainer has resumed the run.
async fn renew_lease(server: Arc<RunConnection>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let renewed: Result<(), _> =
            server.call("heartbeat", "record", "a heartbeat".to_owned(), &()).await;
        match renewed {
            // The next write returns this error to the trainer.
            Err(error @ StoreError::Fenced { .. }) => {
                return tracing::error!(%error, "lost the lease of the run");
            }
            Err(error) => tracing::warn!(%error, "cannot renew the lease of the run"),
            Ok(()) => {}
        }
    }
}

/// Returns the name that a run gets if none is specified: the name of its directory. An error names
/// the server at `url`.
fn run_name_from_dir(run_dir: &Path, url: &str) -> Result<String, StoreError> {
    let absolute = std::path::absolute(run_dir).unwrap_or_else(|_| run_dir.to_owned());
    let name = absolute.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if is_run_name(name) {
        return Ok(name.to_owned());
    }
    let why = format!(
        "the directory name {name:?} is not a name of a run on a server; name the run, as in \
         {url}/my-run"
    );
    Err(StoreError::Open { location: url.to_owned(), code: Code::Invalid, source: why.into() })
}

/// Returns the identity of this process as the trainer of `run_dir`. The caller must have locked
/// that directory.
async fn identify_trainer(run_dir: &Path) -> Result<Trainer, StoreError> {
    let file = run_dir.join(OWNER_FILE);
    let new = random_hex(16);
    let owner = tokio::task::spawn_blocking(move || -> std::io::Result<String> {
        let known = std::fs::read_to_string(&file).unwrap_or_default();
        let text = if known.len() == new.len() {
            known
        } else {
            // If a power failure loses the text, the next trainer must wait until the lease ends.
            std::fs::write(&file, &new)?;
            new
        };
        Ok(text + &inode_text(&file)?)
    });
    let owner = owner.await.map_err(std::io::Error::other).flatten();
    let owner = owner.map_err(|error| StoreError::Open {
        location: run_dir.join(OWNER_FILE).display().to_string(),
        code: Code::Forbidden,
        source: error.into(),
    })?;
    let dir = std::path::absolute(run_dir).unwrap_or_else(|_| run_dir.to_owned());
    let name = format!("process {} in {}", std::process::id(), dir.display());
    Ok(Trainer { owner, name })
}

/// Returns the inode number of a file as text, which distinguishes the file from a copy in another
/// directory.
#[cfg(unix)]
fn inode_text(file: &Path) -> std::io::Result<String> {
    use std::os::unix::fs::MetadataExt as _;
    Ok(format!("-{}", std::fs::metadata(file)?.ino()))
}

/// Returns an empty text. This platform has no number that distinguishes a file from its copies.
#[cfg(not(unix))]
fn inode_text(_: &Path) -> std::io::Result<String> {
    Ok(String::new())
}

fn attempt_key(id: &AttemptId) -> String {
    format!("attempt {id}")
}

fn plan_key(phase: u32, step: u32) -> String {
    format!("plan of phase {phase}/step {step}")
}

#[async_trait]
impl Store for HttpStore {
    fn run(&self) -> &RunId {
        &self.run
    }

    fn location(&self) -> &str {
        &self.server.location
    }

    async fn start_attempt(&self, started: &AttemptStart) -> Result<WriteOutcome, StoreError> {
        self.write("start", started.slot, started).await
    }

    async fn append_segments(
        &self,
        id: &AttemptId,
        segments: &[Segment],
    ) -> Result<WriteOutcome, StoreError> {
        self.write("append", attempt_key(id), &(*id, segments.to_vec())).await
    }

    async fn end_attempt(
        &self,
        id: &AttemptId,
        end: &AttemptEnd,
    ) -> Result<WriteOutcome, StoreError> {
        self.write("end", attempt_key(id), &(*id, end.clone())).await
    }

    async fn abandon_running(&self) -> Result<u64, StoreError> {
        self.write("abandon_running", "running attempts", &()).await
    }

    async fn record_attempts(&self, attempts: &[Attempt]) -> Result<WriteOutcome, StoreError> {
        let key = match attempts {
            [one] => one.slot.to_string(),
            all => format!("{} attempts", all.len()),
        };
        self.write("record_attempts", key, &attempts.to_vec()).await
    }

    async fn attempt(&self, id: &AttemptId) -> Result<Option<Attempt>, StoreError> {
        self.read("attempt", attempt_key(id), id).await
    }

    async fn last_try(&self, slot: &AttemptSlot) -> Result<Option<Attempt>, StoreError> {
        self.read("last_try", slot, slot).await
    }

    async fn count_tries(&self, slot: &AttemptSlot) -> Result<TryCounts, StoreError> {
        self.read("tries", slot, slot).await
    }

    async fn tasks(&self, purpose: Purpose) -> Result<Vec<Value>, StoreError> {
        self.read("tasks", format!("tasks for {}", purpose.name()), &purpose).await
    }

    async fn summaries(&self, purpose: Purpose) -> Result<Vec<AttemptSummary>, StoreError> {
        self.read("summaries", format!("attempts for {}", purpose.name()), &purpose).await
    }

    async fn failures(&self, purpose: Purpose) -> Result<Vec<FailedAttempt>, StoreError> {
        self.read("failures", format!("failures for {}", purpose.name()), &purpose).await
    }

    async fn record_step(&self, plan: &StepPlan) -> Result<WriteOutcome, StoreError> {
        self.write("record_step", plan_key(plan.phase, plan.step), plan).await
    }

    async fn step_plan(&self, phase: u32, step: u32) -> Result<Option<StepPlan>, StoreError> {
        self.read("step", plan_key(phase, step), &(phase, step)).await
    }

    async fn planned_steps(&self) -> Result<Vec<(u32, u32)>, StoreError> {
        self.read("planned_steps", "the planned steps", &()).await
    }

    async fn record_eval(&self, key: EvalKey, result: &Value) -> Result<WriteOutcome, StoreError> {
        self.write("record_eval", key, &(key, result.clone())).await
    }

    async fn evals(&self) -> Result<Vec<(EvalKey, Value)>, StoreError> {
        self.read("evals", "evaluations", &()).await
    }

    async fn withdraw(&self, request: &WithdrawRequest) -> Result<Vec<Withdrawal>, StoreError> {
        self.write("withdraw", "withdrawals", request).await
    }

    async fn withdrawals(&self) -> Result<Vec<Withdrawal>, StoreError> {
        self.read("withdrawals", "withdrawals", &()).await
    }
}
