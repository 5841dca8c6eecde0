//! Follows a job that a scheduler accepted: reports its states, survives outages of the scheduler,
//! and ends the job on request.

use std::cell::Cell;
use std::future::pending;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::process_time::{Clock, sleep, with_timeout};
use levade_run::Host;
use tokio::sync::mpsc::UnboundedReceiver;

use super::{INTERRUPTED, LaunchOutcome, POLL_INTERVAL};

/// Channels between this process and the user who watches a job.
pub struct Watcher {
    /// Host that receives messages for the user, as events `Setup` and `Note`.
    pub host: Host,
    /// Output to which the first machine's log is copied as it grows.
    pub log: Box<dyn Write + Send>,
    /// Receiver of the user's requests to stop. The first request asks the job to end. The second
    /// request makes this process stop following the job at once.
    pub stops: UnboundedReceiver<()>,
}

/// Waits for the next request to stop.
pub async fn stop_request(stops: &mut UnboundedReceiver<()>) {
    if stops.recv().await.is_none() {
        pending().await
    }
}

/// State of a job, as its scheduler reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobState {
    /// Description of the job's state in a few words.
    pub text: String,
    /// Exit code of the job. `None` if the job may still run.
    pub ended: Option<u8>,
}

/// Job that a scheduler has accepted. The job runs independently of this process.
pub trait SchedulerJob {
    /// Name of the scheduler in messages to the user.
    const LAUNCHER: &'static str;

    /// Returns the name of the job in messages to the user, such as "job 7".
    fn name(&self) -> String;

    /// Returns the shell command that shows the state of the job.
    fn watch_command(&self) -> String;

    /// Returns the shell command that ends the job.
    fn end_command(&self) -> String;

    /// Requests the state of the job from the scheduler.
    async fn query_state(&self) -> anyhow::Result<JobState>;

    /// Requests the end of the job from the scheduler. The request can be repeated.
    async fn request_end(&self) -> anyhow::Result<()>;
}

/// Intervals and timeouts that apply when this process follows a job.
#[derive(Debug, Clone, Copy)]
struct FollowTimeouts {
    /// Interval between two requests for the state of the job.
    poll: Duration,
    /// Timeout for one response of the scheduler.
    response_timeout: Duration,
    /// Maximum duration of an outage, in which the scheduler does not report the state of the job.
    silence: Duration,
    /// Timeout for the job to end after a request. The job may write a checkpoint first.
    ending: Duration,
}

const TIMEOUTS: FollowTimeouts = FollowTimeouts {
    poll: POLL_INTERVAL,
    response_timeout: Duration::from_secs(120),
    silence: Duration::from_secs(900),
    ending: Duration::from_secs(300),
};

/// Follows a job to its end, and forwards the first machine's log to the user. If `detach` is true,
/// returns at once.
///
/// # Errors
/// Returns an error if the scheduler does not report the job's state for too long, or if the job
/// does not end after a request.
pub async fn follow(
    job: &impl SchedulerJob,
    log: &Path,
    detach: bool,
    watcher: Watcher,
) -> anyhow::Result<LaunchOutcome> {
    if detach {
        return Ok(LaunchOutcome::Detached { watch: job.watch_command(), end: job.end_command() });
    }
    let Watcher { host, log: output, mut stops } = watcher;
    let stop_requested = Cell::new(false);
    let clock = Clock::default();
    let twice = async {
        stop_request(&mut stops).await;
        stop_requested.set(true);
        stop_request(&mut stops).await;
    };
    let log = GrowingLog::new(log, output);
    tokio::select! {
        code = watch_job(job, log, &host, &stop_requested, &clock, TIMEOUTS) => {
            Ok(LaunchOutcome::Code(code?))
        }
        () = twice => Ok(LaunchOutcome::Code(INTERRUPTED)),
        () = clock.clone().track_pauses(|_| {}) => unreachable!("the clock does not end"),
    }
}

/// Sends a message about a job's status to the user.
pub fn report_status<J: SchedulerJob>(host: &Host, text: &str) {
    host.setup(J::LAUNCHER, text);
}

/// Follows a job until it has ended, and returns its exit code.
async fn watch_job<J: SchedulerJob>(
    job: &J,
    mut log: GrowingLog,
    host: &Host,
    stop_requested: &Cell<bool>,
    clock: &Clock,
    timeouts: FollowTimeouts,
) -> anyhow::Result<u8> {
    let mut last = String::new();
    // Time of the first failed state request of an outage, and time at which the end request was
    // accepted.
    let mut silent: Option<Duration> = None;
    let mut ending: Option<Duration> = None;
    let mut rejected = false;
    loop {
        sleep(timeouts.poll).await;
        log.copy_new_text();
        if stop_requested.get() && ending.is_none() {
            match within_timeout(job.request_end(), timeouts.response_timeout).await {
                Ok(()) => {
                    report_status::<J>(host, &format!("stop requested for {}", job.name()));
                    ending = Some(clock.elapsed());
                }
                Err(error) if !rejected => {
                    report_status::<J>(
                        host,
                        &format!(
                            "the stop request for {} failed and will be retried: {error:#}",
                            job.name()
                        ),
                    );
                    rejected = true;
                }
                Err(_) => {}
            }
        }
        match within_timeout(job.query_state(), timeouts.response_timeout).await {
            Ok(state) => {
                if silent.take().is_some() {
                    report_status::<J>(host, "responds again");
                }
                if state.text != last {
                    report_status::<J>(host, &state.text);
                    last = state.text;
                }
                if let Some(code) = state.ended {
                    log.copy_new_text();
                    return Ok(code);
                }
            }
            Err(error) => {
                let since = *silent.get_or_insert_with(|| {
                    report_status::<J>(
                        host,
                        &format!("no status of {}, retrying: {error:#}", job.name()),
                    );
                    clock.elapsed()
                });
                if clock.elapsed() - since > timeouts.silence {
                    anyhow::bail!(
                        "waited {:?} for {} to report the status of {}, which may still be \
                         running: {error:#}\nwatch it  {}\nend it    {}",
                        timeouts.silence,
                        J::LAUNCHER,
                        job.name(),
                        job.watch_command(),
                        job.end_command()
                    );
                }
            }
        }
        if let Some(since) = ending.filter(|since| clock.elapsed() - *since > timeouts.ending) {
            anyhow::bail!(
                "waited {:?} for {} to end; the last reported state was: {last}\nwatch it  \
                 {}\nend it    {}",
                clock.elapsed() - since,
                job.name(),
                job.watch_command(),
                job.end_command()
            );
        }
    }
}

async fn within_timeout<T>(
    response: impl Future<Output = anyhow::Result<T>>,
    timeout: Duration,
) -> anyhow::Result<T> {
    with_timeout(timeout, response)
        .await
        .unwrap_or_else(|| anyhow::bail!("no response from the scheduler within {timeout:?}"))
}

/// Log file that another process appends to.
pub struct GrowingLog {
    path: PathBuf,
    passed: u64,
    output: Box<dyn Write + Send>,
}

impl GrowingLog {
    /// Creates the reader of a log. The text that is already in the log is skipped.
    pub fn new(path: &Path, output: Box<dyn Write + Send>) -> Self {
        let passed = std::fs::metadata(path).map_or(0, |found| found.len());
        GrowingLog { path: path.to_owned(), passed, output }
    }

    /// Copies the text that was appended since the last call to the output.
    pub fn copy_new_text(&mut self) {
        let Ok(mut file) = std::fs::File::open(&self.path) else { return };
        let mut more = Vec::new();
        let read =
            file.seek(SeekFrom::Start(self.passed)).and_then(|_| file.read_to_end(&mut more));
        if read.is_ok() {
            self.passed += more.len() as u64;
            // A closed output does not end the job.
            let _ = self.output.write_all(&more);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    type ScriptedResponse = Result<(&'static str, Option<u8>), &'static str>;

    /// A job whose scheduler returns scripted responses and repeats the last one.
    struct ScriptedJob {
        responses: RefCell<Vec<ScriptedResponse>>,
        ends: RefCell<Vec<Result<(), &'static str>>>,
    }

    impl SchedulerJob for ScriptedJob {
        const LAUNCHER: &'static str = "test";

        fn name(&self) -> String {
            "job 7".into()
        }

        fn watch_command(&self) -> String {
            "look 7".into()
        }

        fn end_command(&self) -> String {
            "cancel 7".into()
        }

        async fn query_state(&self) -> anyhow::Result<JobState> {
            let mut responses = self.responses.borrow_mut();
            let response = if responses.len() > 1 { responses.remove(0) } else { responses[0] };
            let (text, ended) = response.map_err(|why| anyhow::anyhow!(why))?;
            Ok(JobState { text: text.into(), ended })
        }

        async fn request_end(&self) -> anyhow::Result<()> {
            let mut ends = self.ends.borrow_mut();
            if ends.is_empty() {
                Ok(())
            } else {
                ends.remove(0).map_err(|why| anyhow::anyhow!(why))
            }
        }
    }

    const QUICK: FollowTimeouts = FollowTimeouts {
        poll: Duration::from_millis(1),
        response_timeout: Duration::from_millis(200),
        silence: Duration::from_millis(100),
        ending: Duration::from_millis(100),
    };

    async fn run_watch(
        responses: &[ScriptedResponse],
        ends: &[Result<(), &'static str>],
        stop_requested: bool,
    ) -> anyhow::Result<u8> {
        let job = ScriptedJob { responses: responses.to_vec().into(), ends: ends.to_vec().into() };
        let log = GrowingLog::new(Path::new("/nowhere"), Box::new(std::io::sink()));
        let code = watch_job(
            &job,
            log,
            &Host::default(),
            &Cell::new(stop_requested),
            &Clock::default(),
            QUICK,
        )
        .await;
        assert!(code.is_err() || job.ends.borrow().is_empty());
        code
    }

    #[tokio::test]
    async fn watch_continues_after_scheduler_outage() {
        let run = Ok(("runs", None));
        let responses = [run, Err("down"), Err("down"), run, Err("down"), Ok(("done", Some(3)))];
        assert_eq!(run_watch(&responses, &[], false).await.unwrap(), 3);
    }

    #[tokio::test]
    async fn watch_names_unresponsive_scheduler_at_deadline() {
        let error = run_watch(&[Ok(("runs", None)), Err("down")], &[], false)
            .await
            .unwrap_err()
            .to_string();
        for part in [
            "waited 100ms for test to report the status of job 7",
            "down",
            "watch it  look 7",
            "cancel 7",
        ] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[tokio::test]
    async fn watch_follows_job_to_end_after_stop_request() {
        let responses = [Ok(("runs", None)), Ok(("ends", None)), Ok(("gone", Some(INTERRUPTED)))];
        assert_eq!(run_watch(&responses, &[Err("down")], true).await.unwrap(), INTERRUPTED);
        let error = run_watch(&[Ok(("runs", None))], &[], true).await.unwrap_err().to_string();
        assert!(error.contains("for job 7 to end; the last reported state was: runs"), "{error}");
    }

    #[test]
    fn growing_log_forwards_only_new_text() {
        #[derive(Clone, Default)]
        struct Output(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);
        impl Write for Output {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node-0.log");
        std::fs::write(&path, "old\n").unwrap();
        let output = Output::default();
        let mut log = GrowingLog::new(&path, Box::new(output.clone()));
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        for line in ["one\n", "two\n"] {
            file.write_all(line.as_bytes()).unwrap();
            log.copy_new_text();
        }
        assert_eq!(*output.0.lock().unwrap(), b"one\ntwo\n");
    }
}
