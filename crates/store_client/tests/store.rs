//! Stores of runs over HTTP: the contract of every backend, and the lease of a run.
#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_store::{
    AttemptStart, Code, EvalKey, Location, Store, StoreAccess, StoreError, store_contract,
};
use levade_store_client::{HttpStore, list_runs, remove_run};
use levade_store_server::ServerOptions;
use levade_tree::{AttemptId, AttemptSlot, Purpose, RunId};
use tempfile::TempDir;
use tokio::net::TcpListener;

use support::{Server, memory, options};

/// A server with the stores of runs in a directory.
struct RunServer {
    server: Server,
    dir: TempDir,
    lease: Duration,
}

impl RunServer {
    async fn start(lease: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = Self::serve("127.0.0.1:0", dir.path(), lease).await;
        RunServer { server, dir, lease }
    }

    async fn serve(address: &str, dir: &Path, run_lease: Duration) -> Server {
        let runs_dir = Some(dir.join("runs"));
        let options = ServerOptions { runs_dir, run_lease, ..ServerOptions::default() };
        let listener = TcpListener::bind(address).await.unwrap();
        Server::start_on(listener, memory().await, options)
    }

    /// Stops the server and starts another one at the same address.
    async fn restart(self) -> Self {
        let RunServer { server, dir, lease } = self;
        let address = server.url.strip_prefix("http://").unwrap().to_owned();
        server.stop().await;
        let server = Self::serve(&address, dir.path(), lease).await;
        RunServer { server, dir, lease }
    }

    /// Returns a run directory.
    fn run_dir(&self, name: &str) -> PathBuf {
        let dir = self.dir.path().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Opens the run `sums` from the run directory `dir`.
    async fn open(&self, dir: &str, access: StoreAccess<'_>) -> Result<HttpStore, StoreError> {
        let dir = self.run_dir(dir);
        HttpStore::open(&self.server.url, Some("sums"), &dir, access, &options(10.0)).await
    }
}

const LONG: Duration = Duration::from_secs(60);

fn run() -> RunId {
    RunId("sums-1".into())
}

fn start_of(sample: u32) -> AttemptStart {
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample };
    let id = AttemptId::new(&run(), &slot, 0);
    AttemptStart { id, slot, number: 0, task: "task".into() }
}

store_contract!(over_http, async || {
    let server = RunServer::start(LONG).await;
    let store = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    (server, Arc::new(store) as Arc<dyn Store>)
});

store_contract!(over_http_in_memory, async || {
    let server = Server::start(memory().await, ServerOptions::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("a");
    std::fs::create_dir(&run_dir).unwrap();
    let access = StoreAccess::Start(&RunId("r".into()));
    let store = HttpStore::open(&server.url, None, &run_dir, access, &options(10.0)).await.unwrap();
    ((server, dir), Arc::new(store) as Arc<dyn Store>)
});

#[tokio::test]
async fn resumed_run_fences_the_earlier_trainer() {
    let server = RunServer::start(LONG).await;
    let first = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    first.start_attempt(&start_of(0)).await.unwrap();
    // The same run directory, whose lock the first trainer no longer holds.
    let second = server.open("a", StoreAccess::Resume(&RunId("ignored".into()))).await.unwrap();
    assert_eq!(*second.run(), run());
    assert_eq!(second.abandon_running().await.unwrap(), 1);
    let error = first.start_attempt(&start_of(1)).await.unwrap_err();
    assert!(matches!(&error, StoreError::Fenced { .. }), "{error}");
    assert!(error.is_user_error() && !error.is_retryable());
    assert!(error.to_string().contains("another trainer has resumed the run"), "{error}");
    assert!(error.to_string().contains(&server.server.url), "{error}");
    second.start_attempt(&start_of(1)).await.unwrap();
    assert!(first.attempt(&start_of(1).id).await.unwrap().is_some(), "reading needs no lease");
}

#[tokio::test]
async fn trainer_of_another_directory_is_rejected_while_first_trainer_runs() {
    let server = RunServer::start(Duration::from_millis(2400)).await;
    let first = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    let error = server.open("b", StoreAccess::Resume(&run())).await.err().unwrap();
    assert!(matches!(&error, StoreError::Leased { .. }), "{error}");
    let process = format!("process {}", std::process::id());
    assert!(error.is_user_error() && error.to_string().contains(&process), "{error}");
    first.start_attempt(&start_of(0)).await.unwrap();
    // The lease of a trainer that has exited ends.
    drop(first);
    let second = server.open("b", StoreAccess::Resume(&run())).await.unwrap();
    assert_eq!(second.abandon_running().await.unwrap(), 1);
}

#[tokio::test]
async fn trainer_in_copied_directory_counts_as_another_trainer() {
    let server = RunServer::start(Duration::from_millis(2400)).await;
    let first = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    let (from, to) = (server.run_dir("a"), server.run_dir("copy"));
    std::fs::copy(from.join("store-owner"), to.join("store-owner")).unwrap();
    let error = server.open("copy", StoreAccess::Resume(&run())).await.err().unwrap();
    assert!(matches!(&error, StoreError::Leased { .. }), "{error}");
    drop(first);
}

#[tokio::test]
async fn lease_and_records_survive_a_restart_of_the_server() {
    let server = RunServer::start(LONG).await;
    let first = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    first.start_attempt(&start_of(0)).await.unwrap();
    let server = server.restart().await;
    // The trainer continues with its lease, without opening the run again.
    first.start_attempt(&start_of(1)).await.unwrap();
    let reader = server.open("c", StoreAccess::Read).await.unwrap();
    assert_eq!(reader.tasks(Purpose::Train).await.unwrap(), ["task"]);
    let server = server.restart().await;
    let second = server.open("a", StoreAccess::Resume(&run())).await.unwrap();
    let server = server.restart().await;
    // The epoch did not start again, so the first trainer stays fenced.
    let error = first.start_attempt(&start_of(2)).await.unwrap_err();
    assert!(matches!(error, StoreError::Fenced { .. }), "{error}");
    second.start_attempt(&start_of(2)).await.unwrap();
    drop(server);
}

#[tokio::test]
async fn second_server_of_a_directory_writes_after_the_first_has_stopped() {
    let first = RunServer::start(LONG).await;
    let trainer = first.open("a", StoreAccess::Start(&run())).await.unwrap();
    trainer.start_attempt(&start_of(0)).await.unwrap();
    let run_dir = first.run_dir("a");
    let second = RunServer::serve("127.0.0.1:0", first.dir.path(), LONG).await;
    let open = async |seconds: f64| {
        let id = run();
        let access = StoreAccess::Resume(&id);
        HttpStore::open(&second.url, Some("sums"), &run_dir, access, &options(seconds)).await
    };
    let error = open(1.0).await.err().unwrap();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(error.to_string().contains("another store server writes the run"), "{error}");
    let reads = options(10.0);
    let reader =
        HttpStore::open(&second.url, Some("sums"), &run_dir, StoreAccess::Read, &reads).await;
    assert_eq!(reader.unwrap().tasks(Purpose::Train).await.unwrap(), ["task"]);
    trainer.start_attempt(&start_of(1)).await.unwrap();
    let RunServer { server, dir, .. } = first;
    server.stop().await;
    let resumed = open(10.0).await.unwrap();
    assert_eq!(resumed.abandon_running().await.unwrap(), 2);
    drop((trainer, dir));
}

#[tokio::test]
async fn deleted_run_file_is_not_replaced_by_empty_file() {
    let server = RunServer::start(LONG).await;
    let first = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    let file = server.dir.path().join("runs/sums.db");
    let server = server.restart().await;
    std::fs::remove_file(&file).unwrap();
    let error = first.start_attempt(&start_of(0)).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error}");
    assert!(!file.exists());
    drop(server);
}

#[tokio::test]
async fn start_rejects_run_name_with_earlier_records() {
    let server = RunServer::start(LONG).await;
    let first = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    // Nothing is recorded yet: the first start was interrupted.
    let again = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    again.record_eval(EvalKey { phase: 0, step: 0 }, &"x".into()).await.unwrap();
    let error = server.open("a", StoreAccess::Start(&run())).await.err().unwrap();
    assert!(matches!(error, StoreError::NotEmpty { .. }) && error.is_user_error(), "{error}");
    let other = RunId("other".into());
    let error = server.open("a", StoreAccess::Start(&other)).await.err().unwrap();
    assert!(matches!(error, StoreError::OtherRun { .. }), "{error}");
    drop(first);
}

#[tokio::test]
async fn reader_of_unknown_run_gets_not_found_and_cannot_write() {
    let server = RunServer::start(LONG).await;
    let error = server.open("a", StoreAccess::Read).await.err().unwrap();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.to_string().contains("/sums: the server has no run"), "{error}");
    let writer = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    let reader = server.open("b", StoreAccess::Read).await.unwrap();
    let error = reader.start_attempt(&start_of(0)).await.unwrap_err();
    assert!(matches!(error, StoreError::ReadOnly { .. }), "{error}");
    drop(writer);
}

#[tokio::test]
async fn location_opens_run_named_after_its_directory() {
    let server = RunServer::start(LONG).await;
    let location: Location = server.server.url.parse().unwrap();
    let dir = server.run_dir("tens");
    let store =
        levade_store_client::open(&location, &dir, StoreAccess::Start(&run())).await.unwrap();
    assert_eq!(store.location(), format!("{}/tens", server.server.url));
    assert!(server.dir.path().join("runs/tens.db").is_file());
    let dir = server.run_dir("a b");
    let error = levade_store_client::open(&location, &dir, StoreAccess::Read).await.err().unwrap();
    assert!(error.to_string().contains("name the run, as in http://"), "{error}");
}

#[tokio::test]
async fn removed_run_starts_anew_with_a_later_epoch() {
    let server = RunServer::start(Duration::from_millis(1200)).await;
    let url = server.server.url.clone();
    assert!(list_runs(&url).await.unwrap().is_empty());
    let error = remove_run(&url, "sums").await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error}");
    let first = server.open("a", StoreAccess::Start(&run())).await.unwrap();
    first.start_attempt(&start_of(0)).await.unwrap();
    let listed = list_runs(&url).await.unwrap();
    assert_eq!((listed.len(), listed[0].name.as_str()), (1, "sums"));
    assert!(listed[0].bytes > 0 && listed[0].idle_seconds.is_some());
    let process = format!("process {}", std::process::id());
    assert!(listed[0].trainer.as_ref().unwrap().contains(&process), "{listed:?}");
    let error = remove_run(&url, "sums").await.unwrap_err();
    assert!(matches!(&error, StoreError::Leased { .. }), "{error}");
    assert!(error.to_string().contains(&format!("{url}/sums")), "{error}");
    // The lease of a trainer that has exited ends.
    drop(first);
    let removal = async {
        while let Err(error) = remove_run(&url, "sums").await {
            assert!(matches!(&error, StoreError::Leased { .. }), "{error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, removal).await.unwrap();
    assert!(list_runs(&url).await.unwrap().is_empty());
    let runs = server.dir.path().join("runs");
    assert!(!runs.join("sums.db").exists() && !runs.join("sums.db-wal").exists());
    let error = server.open("a", StoreAccess::Read).await.err().unwrap();
    assert_eq!(error.code(), Code::NotFound, "{error}");

    // Another directory takes the name at once, also after a restart of the server.
    let server = server.restart().await;
    let other = RunId("other".into());
    let second = server.open("b", StoreAccess::Start(&other)).await.unwrap();
    assert_eq!((second.run(), second.tasks(Purpose::Train).await.unwrap()), (&other, vec![]));
    let lease = std::fs::read_to_string(runs.join("sums.lease")).unwrap();
    assert!(lease.contains("\"epoch\":3"), "the removal has the epoch 2: {lease}");
    let names: Vec<String> =
        list_runs(&url).await.unwrap().into_iter().map(|run| run.name).collect();
    assert_eq!(names, ["sums"]);
}

#[tokio::test]
async fn run_in_memory_is_listed_and_removed() {
    let options_of_server =
        ServerOptions { run_lease: Duration::from_millis(300), ..ServerOptions::default() };
    let server = Server::start(memory().await, options_of_server).await;
    let dir = tempfile::tempdir().unwrap();
    let access = StoreAccess::Start(&run());
    let store =
        HttpStore::open(&server.url, Some("m"), dir.path(), access, &options(10.0)).await.unwrap();
    let listed = list_runs(&server.url).await.unwrap();
    assert_eq!((listed[0].name.as_str(), listed[0].bytes, listed[0].idle_seconds), ("m", 0, None));
    drop(store);
    let removal = async {
        while remove_run(&server.url, "m").await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, removal).await.unwrap();
    assert!(list_runs(&server.url).await.unwrap().is_empty());
    let error = remove_run(&server.url, "m").await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error}");
    let error = remove_run(&server.url, "../m").await.unwrap_err();
    assert_eq!(error.code(), Code::Invalid, "{error}");
}
