//! Runs. A run is a task of this process that executes a recipe, reports events, and can be stopped
//! and resumed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_agent::environments::Environments;
use levade_policy::PolicyError;
use levade_policy::process_time::{Clock, with_timeout};
use levade_process::Supervisor;
use levade_recipe::{LearnerKeys, Recipe};
use levade_trainer::{LockedRunDir, RunEnd, RunParts, StartMode, StopFlag, Trainer, TrainerError};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::task::JoinHandle;

use crate::cluster_learner::{self, order};
use crate::dir::{RunDir, start_time_or_now};
use crate::events_file::EventsFile;
use crate::host::{Event, Host};
use crate::policies::{self, StartedPolicies};
use crate::source::pin_models;
use crate::{child, display, numerics, runners, scorers};

/// Timeout for the processes of learners and servers to exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Starts a run in the directory that its recipe names. This function must be called within a tokio
/// runtime.
///
/// # Errors
/// Returns an error if the directory already contains a run, or if another process works in it.
/// Later errors are returned by [`Run::end`].
pub fn start(recipe: Recipe) -> anyhow::Result<Run> {
    launch(recipe, StartMode::Fresh, Supervisor::default())
}

/// Continues the run in the directory that its recipe names, from the newest checkpoint and the
/// store. The final weights are the same as without the interruption.
///
/// # Errors
/// Returns an error if the directory contains no run, if the run's store was in memory, or if
/// another process works on the run.
pub fn resume(recipe: Recipe) -> anyhow::Result<Run> {
    launch(recipe, StartMode::Resume, Supervisor::default())
}

/// Starts or resumes a run. `supervisor` supervises the run's tools, scorers, servers and learners,
/// so that they exit even if this process is killed. A binary that calls
/// [`levade_process::supervise`] for the argument `keep` passes [`Supervisor::from_current_exe`].
///
/// # Errors
/// Returns the errors of [`start`] and [`resume`].
pub fn launch(mut recipe: Recipe, start: StartMode, supervisor: Supervisor) -> anyhow::Result<Run> {
    LockedRunDir::check(&recipe.run, start)?;
    pin_models(&mut recipe)?;
    let (sender, events) = mpsc::unbounded_channel();
    let file = EventsFile::new(&recipe.run.folder);
    let dir = recipe.run.folder.clone();
    let host = Host::new(supervisor, move |event| {
        file.record(&event);
        // Sending fails if the receiver was dropped, because no caller reads the events.
        let _ = sender.send(event);
    });
    let stop = StopFlag::default();
    let clock = Clock::default();
    // Uses a blocking thread, because fetching and opening models blocks.
    let runtime = Handle::current();
    let clocked = clock.clone();
    let flag = stop.clone();
    let task = tokio::task::spawn_blocking(move || {
        runtime.block_on(train_with_restarts(recipe, start, host, clocked, flag))
    });
    Ok(Run { dir, events, stop, clock, task })
}

/// Run that this process executes. Dropping this value requests the run to stop. Dropping the tokio
/// runtime waits until the run has ended.
pub struct Run {
    dir: PathBuf,
    events: UnboundedReceiver<Event>,
    stop: StopFlag,
    clock: Clock,
    task: JoinHandle<anyhow::Result<Option<RunEnd>>>,
}

impl Run {
    /// Waits for the next event of the run. Returns `None` after the run has ended. Unread events
    /// are kept in memory, so a caller that does not need the events calls [`end`](Self::end). This
    /// method is cancel safe.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Requests the run to stop at the next step boundary, with a checkpoint.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Returns the flag that [`stop`](Self::stop) sets, for a task that waits for a signal.
    pub fn stop_flag(&self) -> StopFlag {
        self.stop.clone()
    }

    /// Returns the clock of the run, which stops while the process is suspended.
    pub fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// Returns the path of the run directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Waits until the run ends, and discards its remaining events. Returns `None` if a stop was
    /// requested while the run was starting, or if the run's external learner exited first. A run
    /// that has checkpoints can still be resumed from the newest checkpoint.
    ///
    /// # Errors
    /// Returns the error that ended the run. The newest checkpoint, all data up to it, and every
    /// recorded attempt are kept.
    pub async fn end(mut self) -> anyhow::Result<Option<RunEnd>> {
        self.events.close();
        match (&mut self.task).await {
            Ok(ended) => ended,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

/// Trains until the run ends. If an external learner fails and can be restarted, resumes from the
/// newest checkpoint.
async fn train_with_restarts(
    recipe: Recipe,
    mut start: StartMode,
    host: Host,
    clock: Clock,
    stop: StopFlag,
) -> anyhow::Result<Option<RunEnd>> {
    let noticed = host.clone();
    let dir = recipe.run.folder.clone();
    let pauses = tokio::spawn(clock.track_pauses(move |pause| {
        let pause = display::clock(pause);
        noticed.note(format!(
            "the process was suspended for {pause}; deadlines did not run meanwhile"
        ));
    }));
    let elsewhere = recipe.cluster.learner.is_some();
    let mut restarts = RestartCounter::new(&recipe);
    let mut with_learner = false;
    let ended = loop {
        match train_once(&recipe, start, &host, &stop).await {
            // When a job is stopped, all of its processes often receive the signal at the same
            // time.
            Err(error) if elsewhere && stop.is_stopped() && is_learner_lost(&error) => {
                with_learner = true;
                break Ok(None);
            }
            Err(error) if restarts.try_restart(&error, &dir, &host) => start = StartMode::Resume,
            ended => break ended,
        }
    };
    pauses.abort();
    // Processes of the learner on other machines can exit now.
    let ended = ended.and_then(|ended| {
        order::mark_finished(&dir.join(cluster_learner::SUBDIR))?;
        Ok(ended)
    });
    host.send(match &ended {
        Ok(Some(RunEnd::Finished(summary))) => {
            Event::Finished { steps: summary.steps, checkpoint: summary.checkpoint.clone() }
        }
        Ok(Some(RunEnd::Stopped { checkpoint, done, steps })) => {
            Event::Stopped { done: *done, steps: *steps, checkpoint: checkpoint.clone() }
        }
        Ok(None) if with_learner => Event::StoppedWithLearner,
        Ok(None) => Event::StoppedBeforeStart,
        Err(error) => Event::Failed { error: format!("{error:#}") },
    });
    ended
}

/// Returns whether an error means that an external learner has exited or does not respond.
fn is_learner_lost(error: &anyhow::Error) -> bool {
    let of_policy = match error.downcast_ref::<TrainerError>() {
        Some(TrainerError::Policy(error)) => Some(error),
        _ => error.downcast_ref::<PolicyError>(),
    };
    matches!(of_policy, Some(PolicyError::Stopped(_) | PolicyError::Deadline(..)))
}

/// Waits for one part of the start of a run. Returns `None` as soon as a stop is requested.
async fn unless_stopped<T>(stop: &StopFlag, start: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        started = start => Some(started),
        () = stop.stopped() => None,
    }
}

/// Trains from the start or from the newest checkpoint, until all phases are complete, a stop is
/// requested, or the run fails. Returns `None` if a stop is requested while the run waits for its
/// stores.
async fn train_once(
    recipe: &Recipe,
    start: StartMode,
    host: &Host,
    stop: &StopFlag,
) -> anyhow::Result<Option<RunEnd>> {
    let dir = &recipe.run.folder;
    // Starting a learner would otherwise replace the learner of another process in this directory.
    LockedRunDir::check(&recipe.run, start)?;
    let started_at = start_time_or_now(dir)?;
    let mut children = Vec::new();
    let mut leased = None;
    let ended = async {
        let environments = Environments::new(recipe.environments(), host.supervisor());
        let StartedPolicies { policies, mut agents, fingerprint, model_files, teachers } =
            policies::start(recipe, started_at, &environments, host, &mut children).await?;
        let leasing = runners::lease_attempts(recipe, &mut agents, &environments, host);
        let Some(queue) = unless_stopped(stop, leasing).await else { return Ok(None) };
        leased = queue?;
        let scorers = scorers::custom_scorers(&recipe.reward, &environments, host)?;
        let parts =
            RunParts { policies, agents, scorers, environments, started_at, model_files, teachers };
        let starting = Trainer::new(recipe.clone(), parts, start);
        let Some(trainer) = unless_stopped(stop, starting).await else { return Ok(None) };
        let mut trainer = trainer?;
        numerics::compare(dir, &fingerprint, host);
        numerics::record(dir, &fingerprint)?;
        Ok(Some(trainer.run(&mut host.clone(), stop).await?))
    };
    let ended = ended.await;
    // Runners must not start attempts whose gateway is about to exit.
    if let Some(queue) = leased
        && let Some(Err(error)) = with_timeout(EXIT_TIMEOUT, queue.cancel_all()).await
    {
        host.note(format!("could not cancel the attempts of runners: {error}"));
    }
    host.stop_gateways().await;
    // Wait for the processes of the learner and the servers, because the next ones need their
    // memory.
    let running = child::wait_for_exits(children, EXIT_TIMEOUT).await;
    if !running.is_empty() {
        let running = running.join(", ");
        host.note(format!(
            "waited {EXIT_TIMEOUT:?} for {running} to exit; processes that start now may lack the \
             memory"
        ));
    }
    ended
}

/// Counter of restarts after failures of an external learner. It permits at most `max` consecutive
/// restarts. A new checkpoint resets the count.
struct RestartCounter {
    max: u32,
    /// Whether the run's store is durable, so that the run can be resumed.
    is_durable: bool,
    failures: u32,
    newest: Option<PathBuf>,
}

impl RestartCounter {
    fn new(recipe: &Recipe) -> Self {
        let max =
            recipe.cluster.learner.as_ref().map_or(0, |LearnerKeys::Torch(keys)| keys.restarts);
        RestartCounter { max, is_durable: recipe.run.store.is_durable(), failures: 0, newest: None }
    }

    /// Returns whether the run can be resumed after this error. If it can, reports the error to the
    /// user as a note.
    fn try_restart(&mut self, error: &anyhow::Error, dir: &Path, host: &Host) -> bool {
        let found = RunDir::find(dir).filter(|_| self.is_durable && is_learner_lost(error));
        let Some(run) = found else { return false };
        let newest = run.newest_checkpoint();
        if newest != self.newest {
            (self.newest, self.failures) = (newest, 0);
        }
        self.failures += 1;
        if self.failures > self.max {
            return false;
        }
        let from = match &self.newest {
            Some(checkpoint) => display::path(checkpoint),
            None => "the start".into(),
        };
        host.note(error.to_string());
        host.note(format!("resuming from {from} ({} of {} in a row)", self.failures, self.max));
        true
    }
}
