//! Processes that serve a run: their ports, logs and exit.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{IpAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use tokio::task::JoinHandle;

/// Child process that exits when its last owner drops it.
pub struct ChildTask {
    /// Name of the child process in messages to the user.
    pub name: String,
    /// Task that ends when all processes of the program have exited.
    pub ended: JoinHandle<()>,
}

/// Waits until the child processes that were dropped have exited, because later processes need
/// their memory. Returns the names of the processes that are still running after `timeout`.
pub async fn wait_for_exits(programs: Vec<ChildTask>, timeout: Duration) -> Vec<String> {
    let until = tokio::time::Instant::now() + timeout;
    let mut running = Vec::new();
    for ChildTask { name, ended } in programs {
        if tokio::time::timeout_at(until, ended).await.is_err() {
            running.push(name);
        }
    }
    running
}

/// Returns a port of `address` on which no process listens now.
pub fn find_free_port(address: impl Into<IpAddr>) -> io::Result<u16> {
    Ok(TcpListener::bind((address.into(), 0))?.local_addr()?.port())
}

/// Opens the log file of a process for appending. Creates the file if it does not exist.
pub fn open_log(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// Returns the last `bytes` bytes of a log file. Returns an empty string if the file cannot be
/// read.
pub fn read_log_end(log: &Path, bytes: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
        let mut end = Vec::new();
        file.read_to_end(&mut end)?;
        Ok(end)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn wait_for_exits_names_running_programs_after_timeout() {
        let child_of = |name: &str, seconds| ChildTask {
            name: name.into(),
            ended: tokio::spawn(tokio::time::sleep(Duration::from_secs(seconds))),
        };
        let programs = vec![child_of("quick", 1), child_of("slow", 30), child_of("late", 9)];
        let started = tokio::time::Instant::now();
        assert_eq!(wait_for_exits(programs, Duration::from_secs(20)).await, ["slow"]);
        assert_eq!(started.elapsed().as_secs(), 20);
    }

    #[test]
    fn log_appends_and_end_is_read() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert_eq!(read_log_end(&path, 4), "");
        write!(open_log(&path).unwrap(), "begins, ").unwrap();
        write!(open_log(&path).unwrap(), "ends").unwrap();
        assert_eq!(read_log_end(&path, 4), "ends");
        assert_eq!(read_log_end(&path, 100), "begins, ends");
    }
}
