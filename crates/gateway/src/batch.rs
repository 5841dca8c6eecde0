//! Bodies that make several calls, which are recorded together or not at all.

use tokio::sync::watch;

/// One of the calls of a body, which waits to hear whether all of them could begin.
#[derive(Clone)]
pub(crate) struct Batch(watch::Receiver<Option<bool>>);

/// Whoever tells the calls of a body.
pub(crate) struct Verdict(watch::Sender<Option<bool>>);

impl Batch {
    /// A body whose calls are about to begin.
    pub(crate) fn new() -> (Verdict, Batch) {
        let (verdict, batch) = watch::channel(None);
        (Verdict(verdict), Batch(batch))
    }

    /// Waits until all calls have begun or one was refused: whether they count. They do where nobody will say
    /// any more, since the client has left: what was drawn for it is recorded, as that of a single call is.
    pub(crate) async fn counts(&self) -> bool {
        let mut verdict = self.0.clone();
        verdict.wait_for(Option::is_some).await.map_or(true, |said| *said != Some(false))
    }

    /// Waits until one was refused; for ever where none is.
    pub(crate) async fn refused(&self) {
        if self.counts().await {
            std::future::pending::<()>().await;
        }
    }
}

impl Verdict {
    /// Tells all calls whether every one of them has begun.
    pub(crate) fn say(&self, all: bool) {
        self.0.send_replace(Some(all));
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
