//! Receives the signals that ask a process to stop: from the keyboard, a scheduler or a closed
//! terminal.

use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::failure::INTERRUPTED;

/// Future that completes when a server must stop accepting requests.
pub type Stop = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Interval after a signal in which further signals belong to the same request to stop. A
/// supervisor forwards a signal that the keyboard has already sent to both processes, and some
/// schedulers signal both the process and its group.
const SAME_REQUEST_WINDOW: Duration = Duration::from_millis(500);

#[cfg(unix)]
pub use unix::StopRequests;

#[cfg(unix)]
mod unix {
    use std::io;
    use std::task::Poll;

    use rustix::process::Signal as Number;
    use tokio::signal::unix::{Signal, SignalKind, signal};

    /// Listener for requests to stop that arrive after this value is created:
    ///
    /// - Ctrl-C (SIGINT).
    /// - SIGTERM, which Slurm, Kubernetes, systemd and `docker stop` send.
    /// - SIGUSR1, which Slurm is often configured to send before the time limit
    ///   (`--signal=USR1@120`).
    /// - SIGHUP of a closed terminal, unless the process was started to ignore it (`nohup`).
    pub struct StopRequests(Vec<(Number, Signal)>);

    impl StopRequests {
        /// Starts to listen for the signals that request a stop.
        ///
        /// # Errors
        /// Returns an error if the system does not allow a signal handler.
        pub fn listen() -> io::Result<Self> {
            let mut numbers = vec![Number::INT, Number::TERM, Number::USR1];
            // If the system does not report ignored signals, SIGHUP keeps its default action and
            // ends the process.
            let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
            if is_not_ignored(&status, Number::HUP) {
                numbers.push(Number::HUP);
            }
            let listen =
                |number: Number| Ok((number, signal(SignalKind::from_raw(number.as_raw()))?));
            Ok(StopRequests(numbers.into_iter().map(listen).collect::<io::Result<_>>()?))
        }

        /// Waits for the next signal, and returns the signal's number.
        pub async fn next_signal(&mut self) -> Number {
            std::future::poll_fn(|context| {
                let received = |(number, signal): &mut (Number, Signal)| {
                    signal.poll_recv(context).is_ready().then_some(*number)
                };
                self.0.iter_mut().find_map(received).map_or(Poll::Pending, Poll::Ready)
            })
            .await
        }
    }

    /// Returns whether a process reacts to a signal, according to the text of its
    /// `/proc/PID/status`: the signal is not among the ignored signals. Returns `false` if the
    /// status contains no mask of ignored signals.
    fn is_not_ignored(status: &str, signal: Number) -> bool {
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.is_some_and(|mask| mask >> (signal.as_raw() - 1) & 1 == 0)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn is_not_ignored_reads_signal_mask() {
            let status =
                |mask: &str| format!("Name:\tlevade\nSigBlk:\t0000000000000001\nSigIgn:\t{mask}\n");
            assert!(is_not_ignored(&status("0000000000001000"), Number::HUP));
            assert!(!is_not_ignored(&status("0000000000001001"), Number::HUP));
            assert!(!is_not_ignored("", Number::HUP));
        }
    }
}

/// Listener for requests to stop. On this system, only Ctrl-C requests a stop.
#[cfg(not(unix))]
pub struct StopRequests;

#[cfg(not(unix))]
impl StopRequests {
    /// Starts to listen for Ctrl-C.
    ///
    /// # Errors
    /// Never returns an error on this system.
    pub fn listen() -> std::io::Result<Self> {
        Ok(StopRequests)
    }

    /// Waits for the next Ctrl-C.
    pub async fn next_signal(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}

impl StopRequests {
    /// Runs a server. On the first request to stop, calls `first` and lets the server complete its
    /// calls in flight. On the second request, drops the server.
    ///
    /// # Errors
    /// Returns an error if the server fails.
    pub async fn serve<S: Future<Output = std::io::Result<()>>>(
        self,
        server: impl FnOnce(Stop) -> S,
        first: impl FnOnce(),
    ) -> anyhow::Result<ExitCode> {
        let stop = Arc::new(Notify::new());
        let stopped = Arc::clone(&stop);
        let two = self.wait_for_second(|| {
            first();
            stop.notify_one();
        });
        tokio::select! {
            done = server(Box::pin(async move { stopped.notified().await })) => done.context("the server failed")?,
            () = two => {}
        }
        Ok(ExitCode::from(INTERRUPTED))
    }

    /// Calls `first` on the first request, and returns on the second.
    pub async fn wait_for_second(mut self, first: impl FnOnce()) {
        self.next_signal().await;
        first();
        self.drain_signals().await;
        self.next_signal().await;
    }

    /// Returns a channel that receives an item for each request.
    pub fn into_stream(mut self) -> UnboundedReceiver<()> {
        let (send, requests) = unbounded_channel();
        tokio::spawn(async move {
            loop {
                self.next_signal().await;
                if send.send(()).is_err() {
                    return;
                }
                self.drain_signals().await;
            }
        });
        requests
    }

    /// Waits until all signals of one request have arrived.
    async fn drain_signals(&mut self) {
        let deadline = tokio::time::Instant::now() + SAME_REQUEST_WINDOW;
        while tokio::time::timeout_at(deadline, self.next_signal()).await.is_ok() {}
    }
}
