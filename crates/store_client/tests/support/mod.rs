//! A server in the process of a test.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::sync::Arc;
use std::time::Duration;

use levade_store::rollouts::{Rollouts, SystemClock};
use levade_store_client::{ServiceOptions, open_rollouts};
use levade_store_server::{ServerOptions, serve};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A running server, which stops when it is dropped.
pub struct Server {
    pub url: String,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<std::io::Result<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    /// Starts a server at a free port.
    pub async fn start(store: Arc<dyn Rollouts>, options: ServerOptions) -> Self {
        Self::start_at("127.0.0.1:0", store, options).await
    }

    /// Starts a server at an address.
    pub async fn start_at(address: &str, store: Arc<dyn Rollouts>, options: ServerOptions) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let options = ServerOptions {
            // Tests move the clock and search for timeouts themselves.
            scan_interval: Duration::from_secs(3600),
            ..options
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async {
            // Dropping the sender stops the server.
            let _ = stopped.await;
        };
        let task = tokio::spawn(serve(store, options, listener, stopped));
        Server { url, stop: Some(stop), task }
    }

    /// Stops the server, and closes its connections and files.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        (&mut self.task).await.unwrap().unwrap();
    }
}

/// Returns options without a key.
pub fn options(seconds: f64) -> ServiceOptions {
    ServiceOptions { key: None, timeout: Duration::from_secs_f64(seconds) }
}

/// Opens rollouts in memory.
pub async fn memory() -> Arc<dyn Rollouts> {
    open_rollouts("memory:", Arc::new(SystemClock::default())).await.unwrap()
}
