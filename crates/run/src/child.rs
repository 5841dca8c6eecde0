//! Programs that serve a run: ports for them, and what they print.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{IpAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use tokio::task::JoinHandle;

/// A program that ends once nobody holds it any more.
pub struct Gone {
    /// Name in messages.
    pub name: String,
    /// Ends once its processes are gone.
    pub ended: JoinHandle<()>,
}

/// Waits until programs are gone, which nobody holds any more: whoever comes next needs the memory that they
/// have. Gives the names of those that are still there after `longest`.
pub async fn all_gone(programs: Vec<Gone>, longest: Duration) -> Vec<String> {
    let until = tokio::time::Instant::now() + longest;
    let mut left = Vec::new();
    for Gone { name, ended } in programs {
        if tokio::time::timeout_at(until, ended).await.is_err() {
            left.push(name);
        }
    }
    left
}

/// A port of this address that nobody listens on now.
pub fn free_port(address: impl Into<IpAddr>) -> io::Result<u16> {
    Ok(TcpListener::bind((address.into(), 0))?.local_addr()?.port())
}

/// The log of a program, which goes on where it is.
pub fn log(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// The last `bytes` of a log; nothing where it cannot be read.
pub fn end_of(log: &Path, bytes: u64) -> String {
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
    async fn programs_that_stay_are_named_at_the_deadline() {
        let of = |name: &str, seconds| Gone {
            name: name.into(),
            ended: tokio::spawn(tokio::time::sleep(Duration::from_secs(seconds))),
        };
        let programs = vec![of("quick", 1), of("slow", 30), of("late", 9)];
        let begun = tokio::time::Instant::now();
        assert_eq!(all_gone(programs, Duration::from_secs(20)).await, ["slow"]);
        assert_eq!(begun.elapsed().as_secs(), 20);
    }

    #[test]
    fn a_log_goes_on_and_its_end_is_read() {
        use std::io::Write;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        assert_eq!(end_of(&path, 4), "");
        write!(log(&path).unwrap(), "begins, ").unwrap();
        write!(log(&path).unwrap(), "ends").unwrap();
        assert_eq!(end_of(&path, 4), "ends");
        assert_eq!(end_of(&path, 100), "begins, ends");
    }
}
