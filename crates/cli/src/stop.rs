//! The signals that ask a process to stop: of the keyboard, of schedulers, of a terminal that is closed.

use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::failure::INTERRUPTED;

/// Ends when a server must accept no more requests.
pub type Stop = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Signals that come this close to the first are one wish: a supervisor passes on what the keyboard has sent
/// to both, and some schedulers signal the process and its group.
const ONE_WISH: Duration = Duration::from_millis(500);

#[cfg(unix)]
pub use unix::Requests;

#[cfg(unix)]
mod unix {
    use std::io;
    use std::task::Poll;

    use rustix::process::Signal as Number;
    use tokio::signal::unix::{Signal, SignalKind, signal};

    /// Requests to stop, from when this is made on: Ctrl-C; SIGTERM, which Slurm, Kubernetes, systemd and
    /// `docker stop` send; SIGUSR1, which Slurm is often told to send ahead of the end (`--signal=USR1@120`);
    /// and SIGHUP of a terminal that is closed, unless the process was started to ignore it (`nohup`).
    pub struct Requests(Vec<(Number, Signal)>);

    impl Requests {
        /// Begins to listen.
        ///
        /// # Errors
        /// When the system does not allow it.
        pub fn listen() -> io::Result<Self> {
            let mut numbers = vec![Number::INT, Number::TERM, Number::USR1];
            // Where the system does not tell, a terminal that is closed ends the process, as it always did.
            let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
            if hears(&status, Number::HUP) {
                numbers.push(Number::HUP);
            }
            let listen = |number: Number| Ok((number, signal(SignalKind::from_raw(number.as_raw()))?));
            Ok(Requests(numbers.into_iter().map(listen).collect::<io::Result<_>>()?))
        }

        /// The next signal.
        pub async fn next(&mut self) -> Number {
            std::future::poll_fn(|context| {
                let heard = |(number, signal): &mut (Number, Signal)| {
                    signal.poll_recv(context).is_ready().then_some(*number)
                };
                self.0.iter_mut().find_map(heard).map_or(Poll::Pending, Poll::Ready)
            })
            .await
        }
    }

    /// Whether a process does not ignore a signal, by its `/proc/PID/status`.
    fn hears(status: &str, signal: Number) -> bool {
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.is_some_and(|mask| mask >> (signal.as_raw() - 1) & 1 == 0)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn what_nohup_ignores_stays_ignored() {
            let status = |mask: &str| format!("Name:\tlevade\nSigBlk:\t0000000000000001\nSigIgn:\t{mask}\n");
            assert!(hears(&status("0000000000001000"), Number::HUP));
            assert!(!hears(&status("0000000000001001"), Number::HUP));
            assert!(!hears("", Number::HUP));
        }
    }
}

/// Requests to stop: here Ctrl-C alone.
#[cfg(not(unix))]
pub struct Requests;

#[cfg(not(unix))]
impl Requests {
    /// Begins to listen.
    ///
    /// # Errors
    /// Never here.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Requests)
    }

    /// The next Ctrl-C.
    pub async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}

impl Requests {
    /// Runs a server. At the first request, `first` is called and the server answers what is under way; at
    /// the second, it ends at once.
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
        let two = self.two(|| {
            first();
            stop.notify_one();
        });
        tokio::select! {
            done = server(Box::pin(async move { stopped.notified().await })) => done.context("the server failed")?,
            () = two => {}
        }
        Ok(ExitCode::from(INTERRUPTED))
    }

    /// Calls `first` at the first request, and returns at the second.
    pub async fn two(mut self, first: impl FnOnce()) {
        self.next().await;
        first();
        self.settle().await;
        self.next().await;
    }

    /// Returns a channel that receives an item for each request.
    pub fn stream(mut self) -> UnboundedReceiver<()> {
        let (send, requests) = unbounded_channel();
        tokio::spawn(async move {
            loop {
                self.next().await;
                if send.send(()).is_err() {
                    return;
                }
                self.settle().await;
            }
        });
        requests
    }

    /// Waits until all signals that mean one request have come.
    async fn settle(&mut self) {
        let settled = tokio::time::Instant::now() + ONE_WISH;
        while tokio::time::timeout_at(settled, self.next()).await.is_ok() {}
    }
}
