//! Metrics of a step, and the file that stores them.
//!
//! Names follow verl's if the meaning is the same. There is one deviation: lengths and token counts
//! of responses include sampled tokens only, never tool results, because the model did not generate
//! these.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::TrainerError;

/// Metrics of a step or an evaluation: numbers by name, in insertion order.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(from = "Map<String, Value>", into = "Map<String, Value>")]
pub struct Metrics(Vec<(String, f64)>);

impl Metrics {
    /// Adds a metric.
    pub fn add(&mut self, name: impl Into<String>, value: f64) {
        self.0.push((name.into(), value));
    }

    /// Adds the mean, maximum and minimum of `values` as the metrics `name/mean`, `name/max` and
    /// `name/min`. Adds nothing if there are no values.
    pub fn add_spread(&mut self, name: &str, values: impl IntoIterator<Item = f64>) {
        let values: Vec<f64> = values.into_iter().collect();
        if values.is_empty() {
            return;
        }
        self.add(format!("{name}/mean"), values.iter().sum::<f64>() / values.len() as f64);
        self.add(format!("{name}/max"), values.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        self.add(format!("{name}/min"), values.iter().copied().fold(f64::INFINITY, f64::min));
    }

    /// Adds the metrics `numbers` of a policy. `policy` is the prefix of the metric names: the
    /// policy's name, or `None` for no prefix if the run trains one policy.
    pub fn extend(&mut self, policy: Option<&str>, numbers: Metrics) {
        let named =
            |name| policy.map_or_else(|| String::clone(&name), |policy| format!("{policy}/{name}"));
        self.0.extend(numbers.0.into_iter().map(|(name, value)| (named(name), value)));
    }

    /// Returns the value of the metric called `name`, or `None` if there is no such metric.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }

    /// Returns the names and values of all metrics.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Converts the metrics to a JSON object with the fields of `head` before them. Non-finite
    /// numbers become null.
    pub fn to_json(&self, head: Map<String, Value>) -> Value {
        let mut object = head;
        object.extend(Map::from(self.clone()));
        Value::Object(object)
    }
}

impl From<Metrics> for Map<String, Value> {
    fn from(metrics: Metrics) -> Self {
        metrics.0.into_iter().map(|(name, value)| (name, Value::from(value))).collect()
    }
}

impl From<Map<String, Value>> for Metrics {
    fn from(object: Map<String, Value>) -> Self {
        let numbers = object.into_iter();
        Metrics(numbers.map(|(name, value)| (name, value.as_f64().unwrap_or(f64::NAN))).collect())
    }
}

/// The file `metrics.jsonl` of a run, with one JSON object per line.
pub(crate) struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Opens the file and truncates it to its first `keep` bytes, so that a resumed run does not
    /// write a step twice.
    pub fn open(path: &Path, keep: u64) -> Result<Self, TrainerError> {
        let failed = |source| TrainerError::File { action: "open", path: path.to_owned(), source };
        let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() > keep {
            file.set_len(keep).map_err(failed)?;
        }
        file.seek(SeekFrom::End(0)).map_err(failed)?;
        Ok(MetricsFile { path: path.to_owned(), file })
    }

    pub fn append(&mut self, line: &Value) -> Result<(), TrainerError> {
        let text = format!("{line}\n");
        self.file.write_all(text.as_bytes()).map_err(|source| self.to_file_error("write", source))
    }

    /// Flushes the metrics file to disk and returns its length in bytes.
    pub fn sync(&mut self) -> Result<u64, TrainerError> {
        self.file.sync_all().map_err(|source| self.to_file_error("flush", source))?;
        Ok(self.file.metadata().map_err(|source| self.to_file_error("measure", source))?.len())
    }

    fn to_file_error(&self, action: &'static str, source: std::io::Error) -> TrainerError {
        TrainerError::File { action, path: self.path.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_truncates_lines_after_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let line = |n: u32| {
            Metrics(vec![("step".into(), f64::from(n)), ("bad".into(), f64::NAN)])
                .to_json(Map::new())
        };
        let mut file = MetricsFile::open(&path, 0).unwrap();
        file.append(&line(1)).unwrap();
        let kept = file.sync().unwrap();
        file.append(&line(2)).unwrap();
        drop(file);
        let mut file = MetricsFile::open(&path, kept).unwrap();
        file.append(&line(3)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"step\":1.0,\"bad\":null}\n{\"step\":3.0,\"bad\":null}\n");
    }

    #[test]
    fn add_spread_adds_mean_max_min() {
        let mut metrics = Metrics::default();
        metrics.add_spread("x", [1.0, 4.0, 1.0]);
        metrics.add_spread("y", []);
        assert_eq!(metrics.get("x/mean"), Some(2.0));
        assert_eq!(
            (metrics.get("x/max"), metrics.get("x/min"), metrics.get("y/mean")),
            (Some(4.0), Some(1.0), None)
        );
    }
}
