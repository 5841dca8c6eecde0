//! Writes the directory of an offline run of Weights & Biases, which `wandb sync` uploads.
//!
//! Its only file is a log in blocks of 32 KiB, like LevelDB's, of protocol buffers. A few of their
//! fields suffice. Formats: wandb/proto/wandb_internal.proto and wandb/sdk/internal/datastore.py.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use levade_recipe::Recipe;
use sha2::{Digest, Sha256};

use super::{Sink, recipe_parameters, wire};
use crate::TrainerError;
use crate::files::file_error;
use crate::metrics::Metrics;

/// Header of a W&B log file: name, magic number and version.
const IDENT: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];
const BLOCK: usize = 32 * 1024;
/// Length of the header of a log chunk in bytes: checksum, length and type.
const HEADER: usize = 7;
/// Types of the chunks into which a log record is divided.
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;
/// Field numbers of W&B's message `Record`.
const NUMBER: u32 = 1;
const HISTORY: u32 = 2;
const RUN: u32 = 17;
const EXIT: u32 = 18;
/// Field numbers of W&B's message `RunRecord`.
const RUN_ID: u32 = 1;
const PROJECT: u32 = 3;
const CONFIG: u32 = 4;
const DISPLAY_NAME: u32 = 8;
const STARTING_STEP: u32 = 14;
const START_TIME: u32 = 17;
const RESUMED: u32 = 18;
/// Field numbers of W&B's messages `ConfigRecord` and its items, and of the items of
/// `HistoryRecord`.
const UPDATE: u32 = 1;
const KEY: u32 = 1;
const VALUE_JSON: u32 = 16;
/// Field numbers of W&B's message `HistoryRecord`.
const ITEM: u32 = 1;
const STEP: u32 = 2;
/// Number of the first field in W&B's messages `HistoryStep` (a number), `Timestamp` (seconds) and
/// `RunExitRecord` (the exit code).
const FIRST_FIELD: u32 = 1;

/// Sink that writes metrics to an offline log of Weights & Biases.
pub(crate) struct Wandb {
    file: File,
    /// Number of bytes written to the log file.
    written: usize,
    /// Number of records written to the log file.
    records: u64,
    /// Start of this process as a Unix timestamp in seconds.
    start: f64,
    /// Step of the newest row, with its encoded items. An evaluation after the step adds its
    /// metrics to the same row, because W&B has one row per step.
    row: Option<(u32, Vec<u8>)>,
}

impl Wandb {
    /// Creates the log in a new directory within `dir`, for a run that starts or resumes after
    /// `step` steps. The names of all log directories of a run contain the same id.
    pub fn open(recipe: &Recipe, dir: &Path, step: u32) -> Result<Self, TrainerError> {
        let now = wire::unix_time();
        let known = fs::read_dir(dir).ok().and_then(|entries| {
            entries.flatten().find_map(|entry| {
                entry.file_name().to_str()?.rsplit_once('-').map(|(_, id)| id.to_owned())
            })
        });
        let id = known.unwrap_or_else(|| {
            let name = format!("{} {} {}", dir.display(), recipe.run.seed, now.as_nanos());
            let hash = Sha256::digest(name.as_bytes());
            hash.iter()
                .take(8)
                .map(|byte| char::from(b"abcdefghijklmnopqrstuvwxyz012345"[*byte as usize % 32]))
                .collect()
        });
        let run_dir = dir.join(format!("offline-run-{}-{id}", format_timestamp(now.as_secs())));
        let files = run_dir.join("files");
        fs::create_dir_all(&files).map_err(|source| file_error("create", &files, source))?;
        let path = run_dir.join(format!("run-{id}.wandb"));
        let failed = |source| file_error("write", &path, source);
        let file = File::create(&path).map_err(failed)?;
        let mut log = Wandb { file, written: 0, records: 0, start: now.as_secs_f64(), row: None };
        log.write(&IDENT).map_err(failed)?;

        let mut config = Vec::new();
        for (key, value) in recipe_parameters(recipe) {
            wire::write_bytes_field(
                &mut config,
                UPDATE,
                &encode_item(&key, &serde_json::json!(value).to_string()),
            );
        }
        let mut time = Vec::new();
        wire::write_integer_field(&mut time, FIRST_FIELD, now.as_secs());
        let mut run = Vec::new();
        wire::write_bytes_field(&mut run, RUN_ID, id.as_bytes());
        wire::write_bytes_field(&mut run, PROJECT, recipe.metrics.wandb.as_bytes());
        wire::write_bytes_field(&mut run, CONFIG, &config);
        wire::write_bytes_field(&mut run, DISPLAY_NAME, recipe.run.name.as_bytes());
        wire::write_integer_field(&mut run, STARTING_STEP, step.into());
        wire::write_bytes_field(&mut run, START_TIME, &time);
        wire::write_integer_field(&mut run, RESUMED, u64::from(step > 0));
        log.record(RUN, &run).map_err(failed)?;
        Ok(log)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.file.write_all(bytes)
    }

    /// Writes a `Record` message with one field in addition to its number.
    fn record(&mut self, field: u32, content: &[u8]) -> io::Result<()> {
        self.records += 1;
        let mut record = Vec::with_capacity(content.len() + 16);
        wire::write_integer_field(&mut record, NUMBER, self.records);
        wire::write_bytes_field(&mut record, field, content);
        let mut rest = &record[..];
        let mut is_continued = false;
        loop {
            let room = BLOCK - self.written % BLOCK;
            if room < HEADER {
                self.write(&[0; HEADER][..room])?;
                continue;
            }
            let (fragment, remaining) = rest.split_at(rest.len().min(room - HEADER));
            let kind = match (is_continued, remaining.is_empty()) {
                (false, true) => FULL,
                (false, false) => FIRST,
                (true, false) => MIDDLE,
                (true, true) => LAST,
            };
            let mut checked = crc32fast::Hasher::new();
            checked.update(&[kind]);
            checked.update(fragment);
            let mut bytes = checked.finalize().to_le_bytes().to_vec();
            bytes.extend((fragment.len() as u16).to_le_bytes());
            bytes.push(kind);
            bytes.extend(fragment);
            self.write(&bytes)?;
            if remaining.is_empty() {
                return Ok(());
            }
            (rest, is_continued) = (remaining, true);
        }
    }
}

impl Wandb {
    /// Writes the row of the newest step to the log.
    fn finish_row(&mut self) -> io::Result<()> {
        let Some((step, mut history)) = self.row.take() else { return Ok(()) };
        let now = wire::unix_time().as_secs_f64();
        wire::write_bytes_field(&mut history, ITEM, &encode_item("_step", &step.to_string()));
        for (key, value) in [("_timestamp", now), ("_runtime", now - self.start)] {
            wire::write_bytes_field(
                &mut history,
                ITEM,
                &encode_item(key, &serde_json::json!(value).to_string()),
            );
        }
        let mut at = Vec::new();
        wire::write_integer_field(&mut at, FIRST_FIELD, step.into());
        wire::write_bytes_field(&mut history, STEP, &at);
        self.record(HISTORY, &history)
    }
}

impl Sink for Wandb {
    fn log(&mut self, step: u32, metrics: &Metrics) -> Result<(), String> {
        if self.row.as_ref().is_some_and(|(of, _)| *of != step) {
            self.finish_row().map_err(|error| error.to_string())?;
        }
        let (_, history) = self.row.get_or_insert_with(|| (step, Vec::new()));
        for (key, value) in metrics.iter().filter(|(_, value)| value.is_finite()) {
            wire::write_bytes_field(
                history,
                ITEM,
                &encode_item(key, &serde_json::json!(value).to_string()),
            );
        }
        Ok(())
    }

    fn close(&mut self, finished: bool) -> Result<(), String> {
        let mut exit = Vec::new();
        // Protocol buffers omit 0.
        if !finished {
            wire::write_integer_field(&mut exit, FIRST_FIELD, 1);
        }
        let written = self.finish_row().and_then(|()| self.record(EXIT, &exit));
        written.and_then(|()| self.file.sync_all()).map_err(|error| error.to_string())
    }

    fn name(&self) -> String {
        "Weights & Biases".into()
    }
}

/// Encodes an item of a W&B message: a key and its value as JSON.
fn encode_item(key: &str, value: &str) -> Vec<u8> {
    let mut item = Vec::new();
    wire::write_bytes_field(&mut item, KEY, key.as_bytes());
    wire::write_bytes_field(&mut item, VALUE_JSON, value.as_bytes());
    item
}

/// Formats a Unix timestamp in seconds as `YYYYMMDD_hhmmss` in UTC. Days are converted to dates by
/// the algorithm `civil_from_days` (Howard Hinnant).
fn format_timestamp(seconds: u64) -> String {
    let days = seconds / 86_400;
    let rest = seconds % 86_400;
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}_{:02}{:02}{:02}", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_timestamp_uses_utc() {
        assert_eq!(format_timestamp(0), "19700101_000000");
        assert_eq!(format_timestamp(951_827_696), "20000229_123456");
        assert_eq!(format_timestamp(1_795_219_199), "20261120_235959");
    }

    /// Reads the log back chunk by chunk, across block boundaries.
    #[test]
    fn records_are_split_at_block_boundaries() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let file = File::create(&path).unwrap();
        let mut log = Wandb { file, written: 0, records: 0, start: 0.0, row: None };
        log.write(&IDENT).unwrap();
        // The second record ends three bytes before the end of a block, so that a header does not
        // fit.
        let lengths = [10, BLOCK - 7 - 2 * HEADER - 10 - 4 - 5 - 3, 5, 2 * BLOCK, 1];
        for length in lengths {
            log.record(HISTORY, &vec![length as u8; length]).unwrap();
        }
        let bytes = fs::read(&path).unwrap();
        assert_eq!((&bytes[..7], bytes.len()), (&IDENT[..], log.written));
        let mut at = 7;
        let mut complete = Vec::new();
        let mut records = Vec::new();
        while at < bytes.len() {
            if BLOCK - at % BLOCK < HEADER {
                at += BLOCK - at % BLOCK;
                continue;
            }
            let length = u16::from_le_bytes(bytes[at + 4..at + 6].try_into().unwrap()) as usize;
            let checked =
                [&bytes[at + 6..at + 7], &bytes[at + HEADER..at + HEADER + length]].concat();
            assert_eq!(bytes[at..at + 4], crc32fast::hash(&checked).to_le_bytes());
            complete.extend(&checked[1..]);
            if [FULL, LAST].contains(&checked[0]) {
                records.push(std::mem::take(&mut complete));
            }
            assert!(at % BLOCK + HEADER + length <= BLOCK, "a chunk crosses a bound");
            at += HEADER + length;
        }
        assert_eq!(records.len(), lengths.len());
        for (i, (record, length)) in records.iter().zip(lengths).enumerate() {
            assert_eq!(record[..2], [NUMBER as u8 * 8, i as u8 + 1]);
            assert!(record.ends_with(&vec![length as u8; length]));
        }
    }
}
