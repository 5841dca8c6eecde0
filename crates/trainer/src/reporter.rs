//! Reports a run: metrics to their file and to the sinks, failures and failed sinks to the
//! observer.

use std::time::Duration;

use levade_recipe::Recipe;
use levade_store::Attempt;
use serde_json::Value;

use crate::TrainerError;
use crate::checkpoint::Checkpoint;
use crate::metrics::{Metrics, MetricsFile};
use crate::observe::{Event, Observer};
use crate::policies::Policies;
use crate::rollout::{AttemptMaker, AttemptWarnings};
use crate::run_dir::LockedRunDir;
use crate::sink::{self, Sink};

/// Writes the metrics of a run to the metrics file and the sinks, and counts the failures of tools,
/// scorers and other components around the model.
pub(crate) struct Reporter {
    file: MetricsFile,
    sinks: Vec<Box<dyn Sink>>,
    /// Failures of components around the model since this process started.
    pub warnings: AttemptWarnings,
    /// Cumulative time of device handoffs up to the end of the last step.
    handed_over: Duration,
}

impl Reporter {
    /// Opens the metrics file and the sinks of a run. The run resumes from the checkpoint `latest`,
    /// or is new if `latest` is `None`. Lines that were written to the file after the checkpoint
    /// are removed.
    ///
    /// # Errors
    /// Returns an error if a file cannot be opened.
    pub fn open(
        recipe: &Recipe,
        dir: &LockedRunDir,
        latest: Option<&Checkpoint>,
    ) -> Result<Self, TrainerError> {
        let (bytes, step) =
            latest.map_or((0, 0), |latest| (latest.metrics_bytes, latest.position.global_step));
        Ok(Reporter {
            file: MetricsFile::open(&dir.metrics(), bytes)?,
            sinks: sink::open_sinks(recipe, dir.root(), step)?,
            warnings: AttemptWarnings::default(),
            handed_over: Duration::ZERO,
        })
    }

    /// Appends `line` to the metrics file, and sends `metrics` to the sinks as metrics of `step`. A
    /// sink that fails is removed, with a note for the user.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn report(
        &mut self,
        line: &Value,
        step: u32,
        metrics: &Metrics,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainerError> {
        self.file.append(line)?;
        self.sinks.retain_mut(|sink| match sink.log(step, metrics) {
            Ok(()) => true,
            Err(why) => {
                let note = format!("{} accepts no more metrics: {why}", sink.name());
                observer.event(&Event::Note(note));
                false
            }
        });
        Ok(())
    }

    /// Flushes the metrics file to disk and returns its length in bytes.
    ///
    /// # Errors
    /// Returns an error if the file cannot be flushed.
    pub fn sync(&mut self) -> Result<u64, TrainerError> {
        self.file.sync()
    }

    /// Counts the failures in attempts and in their superseded tries, and reports the first failure
    /// of each source. Returns the number of superseded tries.
    ///
    /// # Errors
    /// Returns an error if the superseded tries cannot be read from the store.
    pub async fn report_warnings(
        &mut self,
        rollouts: &AttemptMaker,
        attempts: &[Attempt],
        observer: &mut dyn Observer,
    ) -> Result<usize, TrainerError> {
        let earlier = rollouts.earlier_tries(attempts).await?;
        for warning in [self.warnings.add(&earlier), self.warnings.add(attempts)].concat() {
            observer.event(&Event::Note(warning));
        }
        if let Some(why) = rollouts.tracer.take_failure() {
            observer.event(&Event::Note(format!("traces are not accepted yet: {why}")));
        }
        Ok(earlier.len())
    }

    /// Adds a metric with the time of device handoffs between learner and samplers since the
    /// previous step.
    pub fn add_handoffs(&mut self, policies: &Policies, metrics: &mut Metrics) {
        let of_each = policies
            .trained()
            .filter_map(|(_, policy_learner)| policy_learner.learner.handoff_time());
        if let Some(now) = of_each.reduce(|a, b| a + b) {
            metrics
                .add("timing_s/device_handoff", now.saturating_sub(self.handed_over).as_secs_f64());
            self.handed_over = now;
        }
    }

    /// Closes the sinks. `finished` states whether all phases are finished.
    pub fn close(&mut self, finished: bool, observer: &mut dyn Observer) {
        for sink in &mut self.sinks {
            if let Err(why) = sink.close(finished) {
                observer.event(&Event::Note(format!("{}: {why}", sink.name())));
            }
        }
    }
}
