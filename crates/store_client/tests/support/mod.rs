//! A server in the process of a test.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::sync::Arc;
use std::time::Duration;

use levade_store::rollouts::{Rollouts, SystemClock};
use levade_store_client::{ServiceOptions, open_rollouts};
use levade_store_server::{ServerOptions, serve};
use tokio::net::{TcpListener, TcpSocket};
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
        Self::start_on(TcpListener::bind("127.0.0.1:0").await.unwrap(), store, options)
    }

    /// Starts a server that accepts the connections of a listener.
    pub fn start_on(
        listener: TcpListener,
        store: Arc<dyn Rollouts>,
        options: ServerOptions,
    ) -> Self {
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

/// Reserves a port on which no program listens yet. Returns the socket, and the URL of the port.
pub fn reserve_port() -> (TcpSocket, String) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    (socket, url)
}

/// Returns options without a key.
pub fn options(seconds: f64) -> ServiceOptions {
    ServiceOptions { key: None, timeout: Duration::from_secs_f64(seconds) }
}

/// Opens rollouts in memory.
pub async fn memory() -> Arc<dyn Rollouts> {
    open_rollouts("memory:", Arc::new(SystemClock::default())).await.unwrap()
}
