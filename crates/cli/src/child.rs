//! Programs that serve a run: ports for them, and what they print.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{IpAddr, TcpListener};
use std::path::Path;

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
