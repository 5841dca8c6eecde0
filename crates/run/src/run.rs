//! Runs: a recipe becomes a task of this process, with events, that can be stopped and resumed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_agent::environments::Environments;
use levade_policy::PolicyError;
use levade_policy::awake::Clock;
use levade_process::Supervisor;
use levade_recipe::{LearnerKeys, Recipe};
use levade_trainer::{Ended, Parts, RunFolder, Start, StopFlag, Trainer, TrainerError};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::task::JoinHandle;

use crate::cluster_learner::{self, order};
use crate::dir::{RunDir, begun_or_now};
use crate::events_file::EventsFile;
use crate::host::{Event, Host};
use crate::policies::{self, Started};
use crate::{child, display, numerics, scorers};

/// Maximum wait for the processes of a learner and of servers to be gone.
const LEAVING: Duration = Duration::from_secs(30);

/// Starts a run in the directory that its recipe names. Call this within a tokio runtime.
///
/// # Errors
/// Returns an error if the directory holds a run already, or if another process works there. What goes wrong
/// later is the error of [`Run::end`].
pub fn start(recipe: Recipe) -> anyhow::Result<Run> {
    launch(recipe, Start::Fresh, Supervisor::default())
}

/// Continues the run in the directory that its recipe names: from the newest checkpoint and the record, to
/// the weights that it would have had without the interruption.
///
/// # Errors
/// Returns an error if the directory holds no run, if its record was in memory, or if another process works
/// on it.
pub fn resume(recipe: Recipe) -> anyhow::Result<Run> {
    launch(recipe, Start::Resume, Supervisor::default())
}

/// Starts or continues a run whose tools, scorers, servers and learners are supervised by a program, so that
/// they end even if this process is killed. A binary that calls [`levade_process::supervise`] for the
/// argument `keep` gives [`Supervisor::this`].
///
/// # Errors
/// Errors of [`start`] and [`resume`].
pub fn launch(recipe: Recipe, start: Start, supervisor: Supervisor) -> anyhow::Result<Run> {
    RunFolder::check(&recipe.run, start)?;
    let (sender, events) = mpsc::unbounded_channel();
    let (file, dir) = (EventsFile::new(&recipe.run.folder), recipe.run.folder.clone());
    let host = Host::new(supervisor, move |event| {
        file.record(&event);
        // The receiver may be dropped: then nobody watches the run.
        let _ = sender.send(event);
    });
    let (stop, clock) = (StopFlag::default(), Clock::default());
    // On a thread of its own: models are fetched and opened without pause.
    let (runtime, clocked, flag) = (Handle::current(), clock.clone(), stop.clone());
    let task =
        tokio::task::spawn_blocking(move || runtime.block_on(drive(recipe, start, host, clocked, flag)));
    Ok(Run { dir, events, stop, clock, task })
}

/// A run of this process. Dropping it asks the run to stop; the runtime ends once the run has.
pub struct Run {
    dir: PathBuf,
    events: UnboundedReceiver<Event>,
    stop: StopFlag,
    clock: Clock,
    task: JoinHandle<anyhow::Result<Option<Ended>>>,
}

impl Run {
    /// Waits for the next event; `None` once the run has ended. Events wait here until they are read; a
    /// caller that does not read them calls [`end`](Self::end). Cancel safe.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Asks the run to stop at the next step boundary, with a checkpoint.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Returns the flag that [`stop`](Self::stop) sets, for a task that waits for a signal.
    pub fn stop_flag(&self) -> StopFlag {
        self.stop.clone()
    }

    /// Returns the clock of the run, which stands while the process does.
    pub fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// Returns the run directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Waits until the run ends, without its further events. Returns `None` if it was asked to stop and its
    /// learner elsewhere ended first: the run continues from its newest checkpoint all the same.
    ///
    /// # Errors
    /// Returns the error that ended the run. Everything up to the newest checkpoint and every recorded
    /// attempt is kept.
    pub async fn end(mut self) -> anyhow::Result<Option<Ended>> {
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

/// Trains to the end, and again from the newest checkpoint if a learner elsewhere dies and may be restarted.
async fn drive(
    recipe: Recipe,
    mut start: Start,
    host: Host,
    clock: Clock,
    stop: StopFlag,
) -> anyhow::Result<Option<Ended>> {
    let (noticed, folder) = (host.clone(), recipe.run.folder.clone());
    let pauses = tokio::spawn(clock.keep(move |pause| {
        let pause = display::clock(pause);
        noticed.note(format!("the process stood still for {pause}; no deadline has run meanwhile"));
    }));
    let elsewhere = recipe.cluster.learner.is_some();
    let mut restarts = Restarts::new(&recipe);
    let ended = loop {
        match once(&recipe, start, &host, &stop).await {
            // A job that is stopped often has all of its processes signaled at once.
            Err(error) if elsewhere && stop.is_stopped() && is_lost(&error) => break Ok(None),
            Err(error) if restarts.allow(&error, &folder, &host) => start = Start::Resume,
            ended => break ended.map(Some),
        }
    };
    pauses.abort();
    // Machines that take part elsewhere can end.
    let ended = ended.and_then(|ended| {
        order::end(&folder.join(cluster_learner::FOLDER))?;
        Ok(ended)
    });
    host.send(match &ended {
        Ok(Some(Ended::Finished(summary))) => {
            Event::Finished { steps: summary.steps, checkpoint: summary.checkpoint.clone() }
        }
        Ok(Some(Ended::Stopped { checkpoint, done, steps })) => {
            Event::Stopped { done: *done, steps: *steps, checkpoint: checkpoint.clone() }
        }
        Ok(None) => Event::StoppedWithLearner,
        Err(error) => Event::Failed { error: format!("{error:#}") },
    });
    ended
}

/// Returns whether an error means that a learner elsewhere has ended or hangs.
fn is_lost(error: &anyhow::Error) -> bool {
    let of_policy = match error.downcast_ref::<TrainerError>() {
        Some(TrainerError::Policy(error)) => Some(error),
        _ => error.downcast_ref::<PolicyError>(),
    };
    matches!(of_policy, Some(PolicyError::Stopped(_) | PolicyError::Deadline(..)))
}

/// Trains from the beginning or the newest checkpoint, until all phases are done, the run is asked to stop,
/// or it fails.
async fn once(recipe: &Recipe, start: Start, host: &Host, stop: &StopFlag) -> anyhow::Result<Ended> {
    let folder = &recipe.run.folder;
    // A learner that is started would replace the one that another process has there.
    RunFolder::check(&recipe.run, start)?;
    let begun = begun_or_now(folder)?;
    let mut children = Vec::new();
    let ended = async {
        let environments = Environments::new(recipe.environments(), host.supervisor());
        let Started { policies, agents, fingerprint, model_files, teachers } =
            policies::start(recipe, begun, &environments, host, &mut children).await?;
        let scorers = scorers::asking(&recipe.reward, &environments, host)?;
        let parts = Parts { policies, agents, scorers, environments, begun, model_files, teachers };
        let mut trainer = Trainer::new(recipe.clone(), parts, start).await?;
        numerics::compare(folder, &fingerprint, host);
        numerics::record(folder, &fingerprint)?;
        Ok(trainer.run(&mut host.clone(), stop).await?)
    };
    let ended = ended.await;
    // The processes of a learner and of servers end now; what starts next needs their memory.
    let left = child::all_gone(children, LEAVING).await;
    if !left.is_empty() {
        let left = left.join(", ");
        host.note(format!(
            "waited {LEAVING:?} for {left} to be gone; whoever is started now may miss its memory"
        ));
    }
    ended
}

/// Restarts after a learner elsewhere has died: up to `max` in a row, unless a checkpoint was written in
/// between.
struct Restarts {
    max: u32,
    /// Whether the run has a record to continue from.
    is_durable: bool,
    died: u32,
    newest: Option<PathBuf>,
}

impl Restarts {
    fn new(recipe: &Recipe) -> Self {
        let max = recipe.cluster.learner.as_ref().map_or(0, |LearnerKeys::Torch(keys)| keys.restarts);
        Restarts { max, is_durable: recipe.run.store.is_durable(), died: 0, newest: None }
    }

    /// Returns whether the run may continue after this error, and notes it.
    fn allow(&mut self, error: &anyhow::Error, folder: &Path, host: &Host) -> bool {
        let found = RunDir::find(folder).filter(|_| self.is_durable && is_lost(error));
        let Some(run) = found else { return false };
        let newest = run.newest_checkpoint();
        if newest != self.newest {
            (self.newest, self.died) = (newest, 0);
        }
        self.died += 1;
        if self.died > self.max {
            return false;
        }
        let from = match &self.newest {
            Some(checkpoint) => display::path(checkpoint),
            None => "the beginning".into(),
        };
        host.note(error.to_string());
        host.note(format!("going on from {from} ({} of {} in a row)", self.died, self.max));
        true
    }
}
