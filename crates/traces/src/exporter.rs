//! Sends the attempts of a run to a collector while the run continues.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use levade_policy::process_time;
use levade_store::Attempt;
use opentelemetry_proto::tonic::trace::v1::ResourceSpans;
use prost::Message;

use crate::collector::{AcceptedTraces, Collector, CollectorError};
use crate::spans::TraceBuilder;

/// Maximum number of attempts in the queue for the collector. Further attempts are dropped.
const MAX_QUEUED: usize = 256;
/// Maximum number of attempts in a request, and maximum size of a request before compression, in
/// bytes. The attempt that reaches the size is included.
const MAX_BATCH: usize = 32;
const MAX_BATCH_BYTES: usize = 1 << 20;
/// Time for which a request waits for further attempts before it is sent.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Initial and maximum pause before a retry when the collector is unavailable.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(500);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Timeout for sending the remaining attempts at the end of a run.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Numbers of a run's attempts that were sent to the collector or lost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExportReport {
    /// Number of attempts that the collector accepted.
    pub sent: usize,
    /// Number of attempts that were dropped because the queue was full or the run ended.
    pub dropped: usize,
    /// Number of attempts that the collector rejected, in part or completely.
    pub rejected: usize,
    /// Message of the first failure. `None` if there was no failure.
    pub failure: Option<String>,
}

impl ExportReport {
    /// Describes the attempts that were lost, or returns `None` if the collector has every attempt.
    pub fn loss(&self) -> Option<String> {
        let ExportReport { sent, dropped, rejected, failure } = self;
        let why = failure.as_deref().unwrap_or("the collector is too slow");
        (dropped + rejected > 0).then(|| {
            format!(
                "the collector of traces has {sent} attempts; {dropped} were dropped and \
                 {rejected} rejected: {why}"
            )
        })
    }
}

/// State that the exporter and its thread share.
#[derive(Debug, Default)]
struct ExporterState {
    report: ExportReport,
    /// Number of attempts in the queue and in the current request.
    pending: usize,
}

/// Exporter that sends attempts to a collector from a thread of its own, so that no caller waits.
#[derive(Debug)]
pub struct Exporter {
    queue: Option<SyncSender<Box<Attempt>>>,
    state: Arc<Mutex<ExporterState>>,
    /// Whether [`take_failure`](Exporter::take_failure) has returned the first failure.
    is_failure_taken: bool,
    /// Receiver that is disconnected when the exporter's thread ends.
    ended: Mutex<Receiver<()>>,
}

impl Exporter {
    /// Starts the exporter's thread. `connect` returns the collector. The thread calls `connect`
    /// before the first request, and repeats the call while it returns
    /// [`CollectorError::Unavailable`].
    ///
    /// # Errors
    /// Returns an error if no thread can be started.
    pub fn start(
        builder: TraceBuilder,
        connect: impl Fn() -> Result<Collector, CollectorError> + Send + 'static,
    ) -> std::io::Result<Self> {
        let (queue, attempts) = sync_channel(MAX_QUEUED);
        let state = Arc::new(Mutex::default());
        let (is_alive, ended) = channel();
        let sender = SenderState { state: Arc::clone(&state), connect, collector: None };
        let deliver = move || {
            sender.run(&builder, &attempts);
            drop(is_alive);
        };
        std::thread::Builder::new().name("traces".into()).spawn(deliver)?;
        let ended = Mutex::new(ended);
        Ok(Exporter { queue: Some(queue), state, is_failure_taken: false, ended })
    }

    /// Adds an attempt that has ended to the queue. If the queue is full, drops the attempt and
    /// counts it.
    pub fn send(&self, attempt: &Attempt) {
        lock(&self.state).pending += 1;
        let queued = self.queue.as_ref().map(|queue| queue.try_send(Box::new(attempt.clone())));
        if !matches!(queued, Some(Ok(()))) {
            let mut state = lock(&self.state);
            state.pending -= 1;
            state.report.dropped += 1;
        }
    }

    /// Returns the message of the first failure, or `None` if there is none. Later calls return
    /// `None`.
    pub fn take_failure(&mut self) -> Option<String> {
        let failure = lock(&self.state).report.failure.clone().filter(|_| !self.is_failure_taken);
        self.is_failure_taken |= failure.is_some();
        failure
    }

    /// Sends the remaining attempts, and waits for the collector up to a timeout. Attempts that
    /// have not been sent by then count as dropped.
    pub fn close(&mut self) -> ExportReport {
        if self.queue.take().is_some() {
            let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
            let ended = process_time::receive(ended, CLOSE_TIMEOUT);
            if ended == Err(RecvTimeoutError::Timeout) {
                let mut state = lock(&self.state);
                let why = format!("not all attempts were accepted within {CLOSE_TIMEOUT:?}");
                state.report.failure.get_or_insert(why);
            }
        }
        let state = lock(&self.state);
        let dropped = state.report.dropped + state.pending;
        ExportReport { dropped, ..state.report.clone() }
    }
}

/// State of the exporter's thread.
struct SenderState<C> {
    state: Arc<Mutex<ExporterState>>,
    connect: C,
    collector: Option<Collector>,
}

impl<C: Fn() -> Result<Collector, CollectorError>> SenderState<C> {
    fn run(mut self, builder: &TraceBuilder, attempts: &Receiver<Box<Attempt>>) {
        while let Ok(first) = attempts.recv() {
            let until = Instant::now() + BATCH_INTERVAL;
            let mut batch = vec![builder.trace(&first)];
            let mut bytes = batch[0].encoded_len();
            while batch.len() < MAX_BATCH
                && bytes < MAX_BATCH_BYTES
                && let Ok(next) =
                    attempts.recv_timeout(until.saturating_duration_since(Instant::now()))
            {
                let trace = builder.trace(&next);
                bytes += trace.encoded_len();
                batch.push(trace);
            }
            self.deliver(&batch);
        }
    }

    /// Sends a batch of traces. Repeats the request while the collector is unavailable.
    fn deliver(&mut self, mut batch: &[ResourceSpans]) {
        let mut pause = MIN_RETRY_INTERVAL;
        while !batch.is_empty() {
            let outcome = self.send(batch);
            let mut state = lock(&self.state);
            let report = &mut state.report;
            let done = match outcome {
                Err(CollectorError::Unavailable(why)) => {
                    report.failure.get_or_insert(why);
                    drop(state);
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(MAX_RETRY_INTERVAL);
                    continue;
                }
                Ok(AcceptedTraces { count, dropped: None }) => {
                    report.sent += count;
                    count
                }
                Ok(AcceptedTraces { count, dropped: Some(why) }) => {
                    report.rejected += count;
                    report.failure.get_or_insert(why);
                    count
                }
                Err(CollectorError::Rejected(why)) => {
                    report.rejected += batch.len();
                    report.failure.get_or_insert(why);
                    batch.len()
                }
            };
            state.pending -= done;
            batch = &batch[done..];
            pause = MIN_RETRY_INTERVAL;
        }
    }

    /// Sends the first traces of a batch in one request, and connects to the collector if
    /// necessary.
    fn send(&mut self, batch: &[ResourceSpans]) -> Result<AcceptedTraces, CollectorError> {
        let collector = match self.collector.take() {
            Some(collector) => collector,
            None => (self.connect)()?,
        };
        self.collector.insert(collector).send(batch)
    }
}

fn lock(state: &Mutex<ExporterState>) -> MutexGuard<'_, ExporterState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "exporter_tests.rs"]
mod tests;
