//! Writes TensorBoard's event files: length-prefixed records with checksums, which contain protocol
//! buffers. A few of their fields suffice.
//!
//! Formats: tensorflow/core/util/event.proto and tensorflow/core/lib/io/record_writer.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use super::{Sink, wire};
use crate::TrainerError;
use crate::files::file_error;
use crate::metrics::Metrics;

/// Field numbers of TensorBoard's message `Event`. The constant of a field that is neither bytes
/// nor an integer includes the wire type.
const WALL_TIME: u8 = 1 << 3 | 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
/// Field numbers of TensorBoard's messages `Summary`, `Summary.Value` and `SessionLog`.
const VALUE: u32 = 1;
const TAG: u32 = 1;
const SIMPLE_VALUE: u8 = 2 << 3 | 5;
const STATUS: u8 = 1 << 3;
/// Value `SessionLog.SessionStatus.START`, which invalidates the data of other event files from
/// this step on.
const START: u8 = 1;

/// Sink that writes metrics to a TensorBoard event file.
pub(crate) struct TensorBoard {
    file: File,
}

impl TensorBoard {
    /// Creates an event file in `dir`, for a run that starts or resumes after `step` steps.
    pub fn open(dir: &Path, step: u32) -> Result<Self, TrainerError> {
        fs::create_dir_all(dir).map_err(|source| file_error("create", dir, source))?;
        let now = wire::unix_time().as_secs();
        let name = format!("events.out.tfevents.{now:010}.levade.{}", std::process::id());
        let path = dir.join(name);
        let failed = |source| file_error("write", &path, source);
        let mut board = TensorBoard { file: File::create(&path).map_err(failed)? };
        board.record(&encode_event(0, FILE_VERSION, b"brain.Event:2")).map_err(failed)?;
        if step > 0 {
            board.record(&encode_event(step + 1, SESSION_LOG, &[STATUS, START])).map_err(failed)?;
        }
        Ok(board)
    }

    fn record(&mut self, data: &[u8]) -> io::Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let mut bytes = Vec::with_capacity(data.len() + 16);
        bytes.extend(length);
        bytes.extend(masked_crc(&length).to_le_bytes());
        bytes.extend(data);
        bytes.extend(masked_crc(data).to_le_bytes());
        self.file.write_all(&bytes)
    }
}

impl Sink for TensorBoard {
    fn log(&mut self, step: u32, metrics: &Metrics) -> Result<(), String> {
        let mut summary = Vec::new();
        for (name, value) in metrics.iter() {
            let mut of_value = Vec::with_capacity(name.len() + 8);
            wire::write_bytes_field(&mut of_value, TAG, name.as_bytes());
            of_value.push(SIMPLE_VALUE);
            of_value.extend((value as f32).to_le_bytes());
            wire::write_bytes_field(&mut summary, VALUE, &of_value);
        }
        self.record(&encode_event(step, SUMMARY, &summary)).map_err(|error| error.to_string())
    }

    fn close(&mut self, _finished: bool) -> Result<(), String> {
        self.file.sync_all().map_err(|error| error.to_string())
    }

    fn name(&self) -> String {
        "TensorBoard".into()
    }
}

/// Encodes an `Event` message with one field in addition to time and step.
fn encode_event(step: u32, number: u32, content: &[u8]) -> Vec<u8> {
    let mut event = vec![WALL_TIME];
    event.extend(wire::unix_time().as_secs_f64().to_le_bytes());
    wire::write_integer_field(&mut event, STEP, step.into());
    wire::write_bytes_field(&mut event, number, content);
    event
}

/// Returns the masked CRC-32C of TensorBoard records: rotated and shifted, so that data that
/// contains checksums has a different checksum.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_match_tfrecord_format() {
        // The checksum of 32 zero bytes is in RFC 3720, B.4.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::open(dir.path(), 4).unwrap();
        let mut metrics = Metrics::default();
        metrics.add("a/b", 1.5);
        board.log(7, &metrics).unwrap();
        board.close(true).unwrap();
        let file = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let bytes = fs::read(file).unwrap();
        let mut rest = &bytes[..];
        let mut records = Vec::new();
        while !rest.is_empty() {
            let len = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let crc = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            assert_eq!(crc(8), masked_crc(&rest[..8]));
            let data = &rest[12..12 + len];
            assert_eq!(crc(12 + len), masked_crc(data));
            records.push(data.to_vec());
            rest = &rest[16 + len..];
        }
        assert!(records[0].ends_with(b"brain.Event:2"));
        assert!(records[1].ends_with(&[2 << 3, 5, 7 << 3 | 2, 2, STATUS, START]));
        let head = [2 << 3, 7, 5 << 3 | 2, 12, 1 << 3 | 2, 10, 1 << 3 | 2, 3];
        let value = [&head[..], b"a/b", &[SIMPLE_VALUE], &1.5f32.to_le_bytes()];
        assert!(records[2].ends_with(&value.concat()), "{:?}", records[2]);
    }
}
