//! The file `timings.jsonl` of a run: the times of its attempts.
//!
//! A record does not contain times. This file keeps them, so that traces can be sent after a run. A
//! process that is killed loses the newest lines; the times of these attempts are then unknown.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use levade_tree::{AttemptId, Timing, Timings};
use serde::{Deserialize, Serialize};

/// A line of the timings file: the times of one attempt.
#[derive(Serialize, Deserialize)]
struct TimingsLine {
    attempt: AttemptId,
    timings: Vec<Timing>,
}

/// Writer of the timings file of a run, which appends lines in a separate thread. Clones share the
/// thread, which ends when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct TimesFile(Sender<TimingsLine>);

impl TimesFile {
    /// Name of the timings file in a run directory.
    pub const NAME: &'static str = "timings.jsonl";

    /// Opens the timings file in a run directory, to append to it.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened or no thread can be started.
    pub fn open(run: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(run.join(Self::NAME))?;
        let (sender, lines) = channel();
        let write = move || {
            if let Err(error) = write_lines(file, &lines) {
                tracing::warn!(%error, "stopped writing times of attempts");
            }
        };
        std::thread::Builder::new().name("times".into()).spawn(write)?;
        Ok(TimesFile(sender))
    }

    /// Appends the times of an attempt to the file, in the background. An attempt without times
    /// gets no line.
    pub fn append(&self, attempt: AttemptId, timings: &Timings) {
        if !timings.0.is_empty() {
            // If the thread has ended, it has logged the reason.
            let _ = self.0.send(TimingsLine { attempt, timings: timings.0.clone() });
        }
    }

    /// Reads the times of the attempts of a run. Returns an empty map if the file does not exist.
    /// Lines that a killed process has left incomplete are skipped.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn read(run: &Path) -> io::Result<HashMap<AttemptId, Timings>> {
        let file = match File::open(run.join(Self::NAME)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HashMap::new()),
            file => file?,
        };
        let mut found = HashMap::new();
        for line in BufReader::new(file).split(b'\n') {
            if let Ok(TimingsLine { attempt, timings }) = serde_json::from_slice(&line?) {
                found.insert(attempt, Timings(timings));
            }
        }
        Ok(found)
    }
}

/// Writes lines to the timings file until all senders are dropped. Flushes the buffer whenever no
/// line waits.
fn write_lines(file: File, lines: &Receiver<TimingsLine>) -> io::Result<()> {
    let mut file = BufWriter::new(file);
    // An incomplete last line of an earlier process must not corrupt the first line of this
    // process.
    if file.get_ref().metadata()?.len() > 0 {
        file.write_all(b"\n")?;
    }
    loop {
        let line = match lines.try_recv() {
            Ok(line) => line,
            Err(TryRecvError::Disconnected) => return file.flush(),
            Err(TryRecvError::Empty) => {
                file.flush()?;
                match lines.recv() {
                    Ok(line) => line,
                    Err(_) => return Ok(()),
                }
            }
        };
        serde_json::to_writer(&mut file, &line)?;
        file.write_all(b"\n")?;
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use levade_tree::{TimeInterval, TimedPart};

    use super::*;

    #[test]
    fn read_returns_appended_times_and_skips_torn_lines() {
        let dir = tempfile::tempdir().unwrap();
        assert!(TimesFile::read(dir.path()).unwrap().is_empty());
        std::fs::write(dir.path().join(TimesFile::NAME), "{\"attempt\": \"01").unwrap();
        let id = |byte| AttemptId::from_bytes([byte; 16]);
        let file = TimesFile::open(dir.path()).unwrap();
        let mut timings = Timings::default();
        timings.add(TimedPart::Call { turn: 2 }, TimeInterval { start: 7, duration: 1 });
        file.append(id(1), &timings);
        file.append(id(2), &Timings::default());
        drop(file);
        let until = Instant::now() + Duration::from_secs(20);
        let mut found = HashMap::new();
        while found.is_empty() && Instant::now() < until {
            found = TimesFile::read(dir.path()).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(found.len(), 1);
        assert_eq!(found[&id(1)].0, timings.0);
    }
}
