//! Timeouts and progress of a learner call.

use std::time::Duration;

use levade_policy::PolicyError;
use levade_policy::process_time::Stopwatch;
use serde::Deserialize;

/// Progress of a call, as a group of learners reports it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub(super) struct LearnerProgress {
    /// Id of the call in progress. `None` if no call is in progress.
    #[serde(default)]
    pub call: Option<String>,
    /// Number of completed micro-batches of this call.
    #[serde(default)]
    pub micro_batches_done: usize,
}

/// Timeouts for waiting for a learner call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallTimeouts {
    /// Maximum time in which no micro-batch completes.
    pub call: Duration,
    /// Maximum time without any response from the learner.
    pub silence: Duration,
}

/// Wait for the response to a learner call, with its timeouts.
pub(super) struct LearnerWait<'a> {
    limits: CallTimeouts,
    /// Describes the operation that the caller waits for, given the number of completed
    /// micro-batches.
    what: &'a (dyn Fn(usize) -> String + Sync),
    who: String,
    watch: Stopwatch,
    /// Time at which a micro-batch last completed, since the start of the call.
    moved: Duration,
    /// Time at which the learner last responded, since the start of the call.
    heard: Duration,
    /// Number of completed micro-batches of the call.
    pub done: usize,
}

impl<'a> LearnerWait<'a> {
    /// Starts measuring the time of a learner call. `who` names the learner in errors.
    pub fn new(
        limits: CallTimeouts,
        who: String,
        what: &'a (dyn Fn(usize) -> String + Sync),
    ) -> Self {
        let watch = Stopwatch::start();
        LearnerWait {
            limits,
            what,
            who,
            watch,
            moved: Duration::ZERO,
            heard: Duration::ZERO,
            done: 0,
        }
    }

    /// Records the progress that the learner reports. Returns the number of micro-batches of `call`
    /// that completed since the last report.
    pub fn note_progress(&mut self, call: &str, progress: &LearnerProgress) -> usize {
        let now = self.note_contact();
        let of_this = progress.call.as_deref() == Some(call);
        let more = if of_this { progress.micro_batches_done.saturating_sub(self.done) } else { 0 };
        if more > 0 {
            self.moved = now;
            self.done += more;
        }
        more
    }

    /// Records that the learner has responded. Returns the time since the start of the call.
    pub fn note_contact(&mut self) -> Duration {
        self.heard = self.watch.elapsed();
        self.heard
    }

    /// Checks the timeouts of the call. Must be called about once a second.
    ///
    /// # Errors
    /// Returns [`PolicyError::Deadline`] with the operation that was waited for if a timeout has
    /// passed.
    pub fn check_deadlines(&mut self) -> Result<(), PolicyError> {
        let now = self.watch.elapsed();
        let CallTimeouts { call, silence } = self.limits;
        if now - self.moved > call {
            return Err(PolicyError::Deadline(
                call,
                format!("{}: {}", self.who, (self.what)(self.done)),
            ));
        }
        if now - self.heard > silence {
            let what = (self.what)(self.done);
            return Err(PolicyError::Deadline(
                silence,
                format!("{} to report the progress of {what}", self.who),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn progress_extends_and_silence_shortens_deadline() {
        let limits =
            CallTimeouts { call: Duration::from_secs(30), silence: Duration::from_secs(10) };
        let mut wait = LearnerWait::new(limits, "the learner".into(), &describe_micro_batch);
        for second in 1..=25 {
            pass(1).await;
            assert_eq!(
                wait.note_progress("a", &progress_of("a", usize::from(second > 20))),
                usize::from(second == 21)
            );
            wait.check_deadlines().unwrap();
        }
        // Progress of another call does not count.
        assert_eq!(wait.note_progress("a", &progress_of("b", 3)), 0);
        for _ in 0..27 {
            pass(1).await;
            wait.note_progress("a", &LearnerProgress::default());
        }
        let error = wait.check_deadlines().unwrap_err().to_string();
        assert_eq!(error, "waited 30s for the learner: micro-batch 2 of 3");
        let mut wait = LearnerWait::new(limits, "the learner".into(), &describe_micro_batch);
        for _ in 0..11 {
            pass(1).await;
            wait.watch.elapsed();
        }
        let error = wait.check_deadlines().unwrap_err().to_string();
        assert_eq!(
            error,
            "waited 10s for the learner to report the progress of micro-batch 1 of 3"
        );
    }

    fn describe_micro_batch(done: usize) -> String {
        format!("micro-batch {} of 3", done + 1)
    }

    async fn pass(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await
    }

    fn progress_of(call: &str, micro_batches_done: usize) -> LearnerProgress {
        LearnerProgress { call: Some(call.into()), micro_batches_done }
    }
}
