//! `events.jsonl`: the events of a run, recorded in its directory.
//!
//! Each line is an event with its time. Progress events are omitted. Every process that worked on
//! the run adds lines. The store and the checkpoints, not this file, decide where a run continues.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::host::Event;

/// Name of the file in a run directory that records the events of the run.
pub const EVENTS: &str = "events.jsonl";

/// Line of the events file: an event with its time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedEvent {
    /// Time of the event as a Unix timestamp in seconds.
    pub time: f64,
    /// Event that was recorded at this time.
    pub event: Event,
}

/// Writer of the events file. It keeps lines in memory until the run owns its directory.
pub(crate) struct EventsFile {
    path: PathBuf,
    state: Mutex<EventsFileState>,
}

#[derive(Default)]
struct EventsFileState {
    waiting: String,
    file: Option<File>,
}

impl EventsFile {
    /// Creates the writer of the events file of a run directory. Nothing is written yet.
    pub fn new(run_dir: &Path) -> Self {
        EventsFile { path: run_dir.join(EVENTS), state: Mutex::default() }
    }

    /// Records an event. If the event cannot be written, the event is lost, but the run continues.
    pub fn record(&self, event: &Event) {
        if event.is_progress() {
            return;
        }
        let time =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let line = RecordedEvent { time, event: event.clone() };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match serde_json::to_string(&line) {
            Ok(line) => state.waiting += &(line + "\n"),
            Err(error) => tracing::warn!(%error, "cannot write an event as JSON"),
        }
        // The training loop starts once the run owns the directory.
        if matches!(event, Event::Training(levade_trainer::Event::Started { .. }))
            && state.file.is_none()
        {
            match OpenOptions::new().create(true).append(true).open(&self.path) {
                Ok(file) => state.file = Some(file),
                Err(error) => {
                    tracing::warn!(%error, path = %self.path.display(), "cannot open the events \
                                                                         file")
                }
            }
        }
        let EventsFileState { waiting, file } = &mut *state;
        if let Some(file) = file {
            if let Err(error) = file.write_all(waiting.as_bytes()) {
                tracing::warn!(%error, path = %self.path.display(), "cannot record an event");
            }
            waiting.clear();
        }
    }
}
