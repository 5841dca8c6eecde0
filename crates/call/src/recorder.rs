//! The recorder of an attempt: its conversation, random streams, limits and calls.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use levade_conversation::{Conversation, Counts, Origin};
use levade_policy::{CallStreams, FinishReason, run_blocking};
use levade_tree::{Drift, TimeInterval, TimedPart, Timings, Trajectory, TreeError};
use tokio::sync::{Notify, watch};

use crate::api_error::{ApiError, ErrorKind};
use crate::external::{CallHistories, ExternalCall};
use crate::metrics::{CallMetrics, add};
use crate::probes::Probes;
use crate::transcript::Transcript;

/// Settings of the recorder of an attempt.
#[derive(Debug, Clone)]
pub struct RecorderOptions {
    /// Name of the attempt in errors and logs.
    pub name: String,
    /// Random seed of the run.
    pub seed: u64,
    /// Random stream of the attempt.
    pub stream: u64,
    /// Maximum number of calls of the attempt. Summaries do not count.
    pub max_calls: u32,
    /// Maximum number of sampled tokens over all calls of the attempt. Tokens of summaries do not
    /// count.
    pub max_tokens: usize,
    /// Time for which a call continues after its last reader was dropped, so that the client can
    /// reconnect.
    pub grace: Duration,
    /// Scheme for the ids of tool calls.
    pub tool_call_ids: ToolCallIds,
    /// Time at which the prompt of a call is recorded.
    pub prompt_recording: PromptRecording,
    /// Counters that the calls update.
    pub metrics: Arc<CallMetrics>,
}

/// Scheme for the ids of tool calls in recorded completions. Some chat templates render these ids,
/// so the scheme can change tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallIds {
    /// The ids are derived from the random stream of the call.
    FromStream,
    /// The ids are derived from the turn if the format requires unique ids. Otherwise the ids are
    /// those that the model wrote.
    FromTurn,
}

/// Time at which the prompt of a call is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptRecording {
    /// The prompt is recorded before its completion is sampled, so that the prompt of a failed call
    /// is recorded, too.
    BeforeSampling,
    /// The prompt is recorded together with the completion, so that a failed call leaves no trace.
    WithCompletion,
}

/// Record of one call: its agent, its origin, its token counts and its end.
#[derive(Debug, Clone, PartialEq)]
pub struct CallRecord {
    /// Name of the agent that made the call.
    pub agent: String,
    /// Name of the model in API responses.
    pub model: String,
    /// Whether the completion comes from a chat API.
    pub external: bool,
    /// Whether the call is a summary that a context policy requested.
    pub summary: bool,
    /// Whether the call is a probe, whose completion is not trained.
    pub probe: bool,
    /// Origin of the prompt: whether it starts, continues or forks a conversation. `None` for
    /// prompts of token ids, and for chat APIs.
    pub origin: Option<Origin>,
    /// Number of prompt tokens of the call.
    pub prompt: usize,
    /// Number of completion tokens of the call.
    pub tokens: usize,
    /// Reason why the completion ended.
    pub finish: FinishReason,
    /// Error that ended the call. `None` if the call did not fail.
    pub error: Option<String>,
    /// Turn of the call in the conversation. `None` if the call is not part of the conversation.
    pub turn: Option<u32>,
    /// Text of the assistant message, as the client received it.
    pub content: String,
    /// Number of tool calls in the completion.
    pub calls: usize,
    /// Number of malformed tool calls in the completion. The client received them as text.
    pub malformed_calls: usize,
    /// Time from the request to the end of the completion.
    pub interval: TimeInterval,
}

/// Everything that a recorder has recorded of an attempt: its tokens and its calls.
#[derive(Debug, Default)]
pub struct Recording {
    /// All tokens of prompts and completions, except for calls of chat APIs.
    pub trajectory: Trajectory,
    /// Drift: the turns at which the chat template renders recorded history differently.
    pub drift: Vec<Drift>,
    /// Error of the comparison that finds drift. `None` if the comparison succeeded. `drift`
    /// contains the drift found before the error.
    pub comparison_error: Option<String>,
    /// Number of prompts by their origin.
    pub counts: Counts,
    /// Records of the calls, in the order in which the calls ended.
    pub calls: Vec<CallRecord>,
    /// Calls of chat APIs, recorded as messages.
    pub external: Vec<ExternalCall>,
    /// Number of times that the recipe overrode a client's sampling option, by the option's name.
    pub overridden: BTreeMap<String, u32>,
    /// Number of rejected calls, by the kind of error.
    pub rejected: BTreeMap<String, u32>,
}

/// Recorder of one attempt. All calls of the attempt's parties pass through it.
///
/// Calls run concurrently, each in its own task. The lock on the state is never held across an
/// await.
pub struct Recorder {
    pub(crate) options: RecorderOptions,
    state: Mutex<RecorderState>,
    closed: AtomicBool,
    /// Notified when the recorder is closed.
    closing: Notify,
    /// Number of calls in flight.
    running: watch::Sender<usize>,
}

/// Mutable state of a recorder, which calls change.
pub(crate) struct RecorderState {
    pub conversation: Conversation,
    pub streams: CallStreams,
    pub remaining_calls: u32,
    pub remaining_tokens: usize,
    /// Newest version of each policy's weights so far, by the policy's name. Later calls do not
    /// sample from older weights.
    pub versions: HashMap<String, u64>,
    pub recorded: Recording,
    /// Message histories of calls to chat APIs.
    pub histories: CallHistories,
    /// Detector of probes among the attempt's calls.
    pub probes: Probes,
}

impl Recording {
    /// Returns the time intervals of the calls that have a turn, and of the calls to chat APIs.
    pub fn timings(&self) -> Timings {
        let mut timings = Timings::default();
        let mut externals = 0..;
        for call in &self.calls {
            let external = if call.external { externals.next() } else { None };
            let part = match (external, call.turn) {
                (Some(index), _) => TimedPart::External { index },
                (None, Some(turn)) => TimedPart::Call { turn },
                (None, None) => continue,
            };
            timings.add(part, call.interval);
        }
        timings
    }
}

impl Recorder {
    /// Creates a recorder without any calls.
    pub fn new(options: RecorderOptions) -> Arc<Self> {
        let state = RecorderState {
            conversation: Conversation::new(),
            streams: CallStreams::new(options.stream),
            remaining_calls: options.max_calls,
            remaining_tokens: options.max_tokens,
            versions: HashMap::new(),
            recorded: Recording::default(),
            histories: CallHistories::default(),
            probes: Probes::default(),
        };
        Arc::new(Recorder {
            options,
            state: Mutex::new(state),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
            running: watch::Sender::new(0),
        })
    }

    /// Creates a recorder for one call outside of attempts. It has no limits and no grace period.
    /// `seed` is the client's seed; if it is `None`, the seed is random.
    pub fn standalone(seed: Option<u64>, metrics: Arc<CallMetrics>) -> Arc<Self> {
        Self::new(RecorderOptions {
            name: String::new(),
            seed: seed.unwrap_or_else(|| xxhash_rust::xxh3::xxh3_64(metrics.next_id().as_bytes())),
            stream: 0,
            max_calls: u32::MAX,
            max_tokens: usize::MAX,
            grace: Duration::ZERO,
            tool_call_ids: ToolCallIds::FromStream,
            prompt_recording: PromptRecording::WithCompletion,
            metrics,
        })
    }

    /// Locks the recorder's mutable state.
    pub(crate) fn state(&self) -> MutexGuard<'_, RecorderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a call, which is in flight until the returned guard is dropped. `is_counted` is true
    /// if the call counts toward the limits of the attempt.
    ///
    /// # Errors
    /// Returns an [`ErrorKind::AttemptEnded`] error if the recorder is closed, and an
    /// [`ErrorKind::Limit`] error if a limit of the attempt is reached.
    pub(crate) fn admit(self: &Arc<Self>, is_counted: bool) -> Result<CallGuard, ApiError> {
        let mut state = self.state();
        self.check_open()?;
        if is_counted {
            if state.remaining_calls == 0 {
                let max = self.options.max_calls;
                let message =
                    format!("this attempt has reached its limit of {max} calls (agent.max_turns)");
                return Err(ApiError::new(ErrorKind::Limit, message));
            }
            if state.remaining_tokens == 0 {
                let max = self.options.max_tokens;
                let message = format!(
                    "this attempt has reached its limit of {max} sampled tokens (agent.max_tokens)"
                );
                return Err(ApiError::new(ErrorKind::Limit, message));
            }
            state.remaining_calls -= 1;
        }
        self.running.send_modify(|running| *running += 1);
        Ok(CallGuard(Arc::clone(self)))
    }

    /// Checks that the attempt has not ended.
    ///
    /// # Errors
    /// Returns an [`ErrorKind::AttemptEnded`] error if the recorder is closed.
    pub fn check_open(&self) -> Result<(), ApiError> {
        if !self.is_closed() {
            return Ok(());
        }
        let message =
            format!("the attempt {} has ended; its key is no longer valid", self.options.name);
        Err(ApiError::new(ErrorKind::AttemptEnded, message))
    }

    /// Returns the name of the attempt.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Returns whether the recorder is closed and so admits no further calls.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until the recorder is closed.
    async fn wait_until_closed(&self) {
        let closing = self.closing.notified();
        tokio::pin!(closing);
        closing.as_mut().enable();
        if !self.is_closed() {
            closing.await;
        }
    }

    /// Waits until no call of the attempt is in flight.
    pub async fn wait_until_idle(&self) {
        let mut running = self.running.subscribe();
        // The sender is in this recorder, so it is not dropped meanwhile.
        let _ = running.wait_for(|running| *running == 0).await;
    }

    /// Waits until the transcript of a call has had no reader for the grace period, or until the
    /// recorder is closed.
    pub(crate) async fn wait_until_abandoned(&self, transcript: &Transcript) {
        let no_reader = async {
            loop {
                transcript.wait_until_abandoned().await;
                let rejoined =
                    tokio::time::timeout(self.options.grace, transcript.wait_for_reader());
                if rejoined.await.is_err() {
                    return add(&self.options.metrics.aborted, 1);
                }
            }
        };
        tokio::select! {
            // A fixed order of the branches makes simulations repeatable.
            biased;
            () = no_reader => {}
            () = self.wait_until_closed() => {}
        }
    }

    /// Counts a rejected call by the kind of its error.
    pub fn count_rejection(&self, error: &ApiError) {
        *self.state().recorded.rejected.entry(error.kind.name().to_owned()).or_default() += 1;
    }

    /// Returns the number of calls that have ended.
    pub fn ended_calls(&self) -> usize {
        self.state().recorded.calls.len()
    }

    /// Returns the origins of the prompts of ended calls, in the order in which the calls ended.
    pub fn origins(&self) -> Vec<Option<Origin>> {
        self.state().recorded.calls.iter().map(|call| call.origin).collect()
    }

    /// Returns the number of calls that the attempt can still make before it reaches its limit.
    pub fn remaining_calls(&self) -> u32 {
        self.state().remaining_calls
    }

    /// Returns the number of tokens that the attempt can still sample before it reaches its limit.
    pub fn remaining_tokens(&self) -> usize {
        self.state().remaining_tokens
    }

    /// Returns whether an ended call is recorded as the turn `turn`.
    pub fn has_turn(&self, turn: u32) -> bool {
        self.state().recorded.calls.iter().any(|call| call.turn == Some(turn))
    }

    /// Adds the trajectory of a helper's conversation as a branch of the recorded conversation.
    /// Returns the turn number of the branch's first call in the recorded conversation.
    ///
    /// # Errors
    /// Returns an error if the trajectory is inconsistent.
    pub fn append_trajectory(&self, trajectory: &Trajectory) -> Result<u32, TreeError> {
        self.state().conversation.append_trajectory(trajectory)
    }

    /// Aborts the calls in flight, without waiting for their ends. Rejects further calls.
    pub fn abort(&self) {
        {
            // The lock ensures that no call is admitted afterwards.
            let _state = self.state();
            self.closed.store(true, Ordering::Release);
        }
        self.closing.notify_waiters();
    }

    /// Closes the recorder and returns everything that it has recorded. Calls in flight are aborted
    /// and recorded with the tokens sampled so far. A call that does not end within `timeout` is
    /// not recorded.
    pub async fn close(self: &Arc<Self>, timeout: Duration) -> Recording {
        self.abort();
        let mut running = self.running.subscribe();
        let ended =
            tokio::time::timeout(timeout, running.wait_for(|running| *running == 0)).await.is_ok();
        let left = if ended { 0 } else { *self.running.borrow() };
        if left > 0 {
            let attempt = &self.options.name;
            tracing::warn!(
                attempt,
                left,
                ?timeout,
                "discarded calls that did not end within the timeout"
            );
        }
        // Comparing the conversation with its template takes time, so it runs outside of the async
        // workers.
        let recorder = Arc::clone(self);
        let drift = run_blocking(move || recorder.state().conversation.finish()).await;
        let mut state = self.state();
        let conversation = std::mem::take(&mut state.conversation);
        let mut recorded = std::mem::take(&mut state.recorded);
        let probes = std::mem::take(&mut state.probes);
        drop(state);
        recorded.drift = drift.unwrap_or_else(|error| {
            recorded.comparison_error =
                Some(format!("comparing the conversation with the chat template failed: {error}"));
            conversation.drift()
        });
        recorded.counts = conversation.counts().clone();
        recorded.trajectory = conversation.into_trajectory();
        let probes = probes.separate(&mut recorded.trajectory);
        for call in &mut recorded.calls {
            call.probe = call.turn.is_some_and(|turn| probes.contains(&turn));
        }
        recorded.calls.shrink_to_fit();
        recorded
    }
}

/// Guard that counts a call as in flight until the guard is dropped.
pub(crate) struct CallGuard(Arc<Recorder>);

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.0.running.send_modify(|running| *running -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transcript::Head;

    #[tokio::test(start_paused = true)]
    async fn call_is_abandoned_after_grace_without_readers() {
        let grace = Duration::from_secs(10);
        let recorder = Recorder::standalone(Some(1), Arc::default());
        let options = RecorderOptions { grace, ..recorder.options.clone() };
        let recorder = Recorder::new(options);
        let transcript = Transcript::new(Head {
            id: "x".into(),
            model: "m".into(),
            created: 0,
            prompt: Vec::new(),
            opens_reasoning: false,
            is_truncated: false,
            origin: None,
            n: 1,
        });
        let reader = transcript.read();
        let clients = async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            drop(reader);
            tokio::time::sleep(Duration::from_secs(9)).await;
            let reader = transcript.read();
            tokio::time::sleep(Duration::from_secs(60)).await;
            drop(reader);
        };
        let started = tokio::time::Instant::now();
        let abandoned = async {
            recorder.wait_until_abandoned(&transcript).await;
            started.elapsed()
        };
        let (elapsed, ()) = tokio::join!(abandoned, clients);
        assert_eq!(elapsed, Duration::from_secs(60 + 9 + 60 + 10));
        assert_eq!(recorder.options.metrics.aborted.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn wait_until_closed_returns_only_after_close() {
        let recorder = Recorder::standalone(Some(1), Arc::default());
        let wait = Duration::from_secs(60);
        assert!(tokio::time::timeout(wait, recorder.wait_until_closed()).await.is_err());
        let (closed, _) = tokio::join!(
            tokio::time::timeout(wait, recorder.wait_until_closed()),
            recorder.close(wait)
        );
        assert!(closed.is_ok());
        assert!(tokio::time::timeout(wait, recorder.wait_until_closed()).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn close_waits_for_calls_until_timeout() {
        let recorder = Recorder::standalone(Some(1), Arc::default());
        let guards = [recorder.admit(true).unwrap(), recorder.admit(false).unwrap()];
        let started = tokio::time::Instant::now();
        let end = async {
            for guard in guards {
                tokio::time::sleep(Duration::from_secs(5)).await;
                drop(guard);
            }
        };
        tokio::join!(recorder.close(Duration::from_secs(60)), end);
        assert_eq!(started.elapsed(), Duration::from_secs(10));
        let recorder = Recorder::standalone(Some(1), Arc::default());
        let guard = recorder.admit(true).unwrap();
        recorder.close(Duration::from_secs(60)).await;
        assert_eq!(started.elapsed(), Duration::from_secs(70));
        drop(guard);
    }
}
