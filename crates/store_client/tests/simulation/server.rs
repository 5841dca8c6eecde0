//! The store server of a simulation: the routes of `levade-store-server` over a queue in a file. A
//! kill keeps what is in the file at that moment, and nothing else.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hyper::{Request, Response};
use levade_store::open_rollouts_in_caller;
use levade_store::rollouts::{Clock, Rollouts};
use levade_store_server::{Server, ServerOptions};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::world::World;

/// Interval of the server's search for timeouts.
pub const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// A server process.
pub struct ServerProcess {
    pub store: Arc<dyn Rollouts>,
    /// Time of the start.
    pub started: f64,
    file: PathBuf,
    server: Arc<Server>,
    /// Requests in progress and the search for timeouts.
    tasks: Mutex<JoinSet<()>>,
}

impl ServerProcess {
    /// Starts a server on a file.
    pub fn start(file: PathBuf, clock: Arc<dyn Clock>) -> Arc<Self> {
        let started = clock.now();
        let store = open_rollouts_in_caller(&file, clock).unwrap();
        let options = ServerOptions { scan_interval: SCAN_INTERVAL, ..ServerOptions::default() };
        let server = Arc::new(Server::new(Arc::clone(&store), options).unwrap());
        let mut tasks = JoinSet::new();
        let scanned = Arc::clone(&server);
        tasks.spawn(async move { scanned.scan_every(SCAN_INTERVAL).await });
        Arc::new(ServerProcess { store, started, file, server, tasks: Mutex::new(tasks) })
    }

    /// Executes a request in a task of the server, checks the rules, and sends the response.
    pub fn handle(
        self: &Arc<Self>,
        world: &Arc<World>,
        node: String,
        request: Request<Bytes>,
        sender: oneshot::Sender<Response<Bytes>>,
    ) {
        let (process, world) = (Arc::clone(self), Arc::clone(world));
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let body = request.body().clone();
        let handling = async move {
            let response = process.server.call(request).await.unwrap();
            world.check_response(&process, (&node, &method, &body), &response).await;
            // The client may have been killed.
            let _ = sender.send(response);
        };
        let mut tasks = self.tasks.lock().unwrap();
        while tasks.try_join_next().is_some() {}
        // A check must see the state that the request left.
        tasks.spawn(tokio::task::unconstrained(handling));
    }

    /// Kills the process. Returns the copy of the file from which another process can start, as the
    /// disk has it at this moment.
    pub fn kill(&self, copy: &Path) -> PathBuf {
        let copy = copy.to_owned();
        for suffix in ["", "-wal"] {
            let [from, to] = [&self.file, &copy].map(|path| format!("{}{suffix}", path.display()));
            if Path::new(&from).exists() {
                std::fs::copy(from, to).unwrap();
            }
        }
        self.tasks.lock().unwrap().abort_all();
        copy
    }
}
