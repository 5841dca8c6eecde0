//! The unfinished part of an export, which an interrupted export continues.
//!
//! Three files beside the target `OUT` hold the state:
//! - `OUT.part`: the rows so far, as JSON lines.
//! - `OUT.part.plan`: the options, and the ids of all attempts in groups. It is written once. The
//!   set of attempts is therefore that of the start, even if the run continues.
//! - `OUT.part.position`: how many groups are complete, and how many bytes of rows belong to them.
//!   It is replaced by a rename, after the rows are flushed. Rows beyond these bytes are discarded
//!   when the export continues, so no row is written twice.
//!
//! The rows become the target in one rename, so the target is complete or absent.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use levade_tree::AttemptId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::ExportError;

/// Minimum interval between two flushes of the rows to the disk.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// Plan of an export: its options, and the attempts that it selects, in groups.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Options of the export that determine the rows, as text. An interrupted export continues only
    /// with equal options.
    pub options: String,
    /// Ids of the selected attempts, one list for each group.
    pub groups: Vec<Vec<AttemptId>>,
}

/// Progress of an export: the groups and rows that are complete.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Number of complete groups of attempts.
    pub groups: usize,
    /// Size of the rows of complete groups, in bytes.
    pub bytes: u64,
    /// Number of rows of complete groups.
    pub rows: u64,
    /// Number of attempts and sequences for which no row was written.
    pub skipped: u64,
    /// Reason for the first missing row. `None` if no row is missing.
    pub first_skipped: Option<String>,
}

/// Function that converts the file of rows at the first path into another format at the second
/// path.
pub type Convert<'a> = dyn Fn(&Path, &Path) -> Result<(), ExportError> + 'a;

/// Unfinished part of an export, as files next to the target. This process has locked it.
#[derive(Debug)]
pub struct Part {
    target: PathBuf,
    rows: BufWriter<File>,
    plan: Plan,
    progress: Progress,
    saved: Instant,
}

impl Part {
    /// Opens the part of an export to `target`. Continues an interrupted export with equal
    /// `options`, or starts a new export with the groups that `select` returns.
    ///
    /// # Errors
    /// Returns [`ExportError::Exists`] if the target exists, [`ExportError::OtherOptions`] if there
    /// is a part with other options, and [`ExportError::Busy`] if another process holds the part.
    /// Returns another error if a file cannot be read or written, or if `select` fails.
    pub fn open(
        target: &Path,
        options: &str,
        select: impl FnOnce() -> Result<Vec<Vec<AttemptId>>, ExportError>,
    ) -> Result<Self, ExportError> {
        if target.exists() {
            return Err(ExportError::Exists(target.to_owned()));
        }
        let path = sibling_path(target, ".part");
        let failed = ExportError::io_error_at(&path);
        let mut options_of_file = OpenOptions::new();
        let file = options_of_file.read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(&failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(ExportError::Busy(target.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let (plan, progress) = match read_json::<Plan>(&sibling_path(target, ".part.plan"))? {
            Some(plan) if plan.options != options => return Err(ExportError::OtherOptions(path)),
            Some(plan) => {
                (plan, read_json(&sibling_path(target, ".part.position"))?.unwrap_or_default())
            }
            None => {
                let plan = Plan { options: options.to_owned(), groups: select()? };
                replace_json(&sibling_path(target, ".part.plan"), &plan)?;
                (plan, Progress::default())
            }
        };
        let mut rows = BufWriter::new(file);
        let progress: Progress = progress;
        rows.get_ref().set_len(progress.bytes).map_err(&failed)?;
        rows.seek(SeekFrom::End(0)).map_err(&failed)?;
        Ok(Part { target: target.to_owned(), rows, plan, progress, saved: Instant::now() })
    }

    /// Returns the progress of the export.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Returns the ids of the attempts in the next group. Returns `None` if all groups are
    /// complete.
    pub fn next_group(&self) -> Option<&[AttemptId]> {
        self.plan.groups.get(self.progress.groups).map(Vec::as_slice)
    }

    /// Returns the total number of groups.
    pub fn num_groups(&self) -> usize {
        self.plan.groups.len()
    }

    /// Appends the rows of the next group of attempts, and marks the group as complete.
    ///
    /// # Errors
    /// Returns an error if a file of the part cannot be written.
    pub fn write_group(&mut self, rows: &[Value], skipped: &[String]) -> Result<(), ExportError> {
        let failed = ExportError::io_error_at(&sibling_path(&self.target, ".part"));
        for row in rows {
            let line = format!("{row}\n");
            self.rows.write_all(line.as_bytes()).map_err(&failed)?;
            self.progress.bytes += line.len() as u64;
        }
        self.progress.groups += 1;
        self.progress.rows += rows.len() as u64;
        self.progress.skipped += skipped.len() as u64;
        if self.progress.first_skipped.is_none() {
            self.progress.first_skipped = skipped.first().cloned();
        }
        if self.saved.elapsed() >= SAVE_INTERVAL {
            self.save()?;
        }
        Ok(())
    }

    /// Flushes the rows to the disk, and records the progress.
    ///
    /// # Errors
    /// Returns an error if a file of the part cannot be written.
    pub fn save(&mut self) -> Result<(), ExportError> {
        let path = sibling_path(&self.target, ".part");
        self.rows.flush().map_err(ExportError::io_error_at(&path))?;
        self.rows.get_ref().sync_data().map_err(ExportError::io_error_at(&path))?;
        replace_json(&sibling_path(&self.target, ".part.position"), &self.progress)?;
        self.saved = Instant::now();
        Ok(())
    }

    /// Returns the set of the keys that the function `key` returns for the rows that have been
    /// written.
    ///
    /// # Errors
    /// Returns an error if the rows cannot be read.
    pub fn collect_keys<K: Ord>(
        &mut self,
        key: impl Fn(&Value) -> Option<K>,
    ) -> Result<BTreeSet<K>, ExportError> {
        let mut keys = BTreeSet::new();
        self.save()?;
        for_each_row(&sibling_path(&self.target, ".part"), |row| {
            keys.extend(key(&row));
            Ok(())
        })?;
        Ok(keys)
    }

    /// Finishes the export: `convert` converts the rows from their file to a new path, which
    /// becomes the target. If `convert` is `None`, the file of rows becomes the target. Removes the
    /// part.
    ///
    /// # Errors
    /// Returns an error if the conversion fails, or if a file cannot be written. The part is then
    /// kept.
    pub fn finish(mut self, convert: Option<&Convert<'_>>) -> Result<Progress, ExportError> {
        self.save()?;
        let rows = sibling_path(&self.target, ".part");
        let failed = ExportError::io_error_at(&self.target);
        match convert {
            None => fs::rename(&rows, &self.target).map_err(&failed)?,
            Some(convert) => {
                let converted = sibling_path(&self.target, ".part.converted");
                // Left behind by a process that was killed while it converted.
                remove_path(&converted).map_err(ExportError::io_error_at(&converted))?;
                convert(&rows, &converted)?;
                fs::rename(&converted, &self.target).map_err(&failed)?;
                remove_path(&rows).map_err(ExportError::io_error_at(&rows))?;
            }
        }
        for suffix in [".part.plan", ".part.position"] {
            let path = sibling_path(&self.target, suffix);
            remove_path(&path).map_err(ExportError::io_error_at(&path))?;
        }
        Ok(self.progress)
    }
}

/// Calls `each` with every row in a file of JSON lines.
///
/// # Errors
/// Returns an error if the file cannot be read. Also returns the errors of `each`.
pub fn for_each_row(
    path: &Path,
    mut each: impl FnMut(Value) -> Result<(), ExportError>,
) -> Result<(), ExportError> {
    let failed = ExportError::io_error_at(path);
    for line in BufReader::new(File::open(path).map_err(&failed)?).lines() {
        let line = line.map_err(&failed)?;
        each(serde_json::from_str(&line).map_err(|error| failed(error.into()))?)?;
    }
    Ok(())
}

/// Returns a path next to `target`, whose name has the additional suffix `suffix`.
fn sibling_path(target: &Path, suffix: &str) -> PathBuf {
    let mut name = target.components().as_path().as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Removes a file or a directory if it exists.
fn remove_path(path: &Path) -> io::Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>, ExportError> {
    let failed = ExportError::io_error_at(path);
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| failed(error.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Writes `value` to a file as JSON. The file is replaced by a rename, so readers never see an
/// incomplete file.
fn replace_json(path: &Path, value: &impl Serialize) -> Result<(), ExportError> {
    let failed = ExportError::io_error_at(path);
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(dir).map_err(&failed)?;
    serde_json::to_writer(&mut file, value).map_err(|error| failed(error.into()))?;
    file.as_file().sync_data().map_err(&failed)?;
    file.persist(path).map(drop).map_err(|error| failed(error.error))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn ids(groups: usize) -> Vec<Vec<AttemptId>> {
        (0..groups).map(|group| vec![AttemptId::from_bytes([group as u8; 16])]).collect()
    }

    /// Rows of a group: as many as its number modulo 3.
    fn rows(group: usize) -> Vec<Value> {
        (0..group % 3).map(|row| json!({ "group": group, "row": row })).collect()
    }

    proptest! {
        /// However often an export is interrupted, before or after the rows reach the disk, its
        /// rows are those of an undisturbed export.
        #[test]
        fn interrupted_part_continues_without_duplicate_rows(
            stops in proptest::collection::vec((0usize..6, any::<bool>(), 0usize..20), 0..5)
        ) {
            const GROUPS: usize = 12;
            let dir = tempfile::tempdir().unwrap();
            let target = dir.path().join("rows.jsonl");
            for (groups, saves, garbage) in stops {
                let mut part = Part::open(&target, "a", || Ok(ids(GROUPS))).unwrap();
                for _ in 0..groups {
                    let at = part.progress().groups;
                    if part.next_group().is_some() {
                        part.write_group(&rows(at), &[]).unwrap();
                    }
                }
                if saves {
                    part.save().unwrap();
                }
                // The process is killed: what it wrote after the last flush is arbitrary.
                part.rows.write_all(&vec![b'x'; garbage]).unwrap();
            }
            // Attempts that are added later are not exported.
            let mut part = Part::open(&target, "a", || Ok(ids(GROUPS))).unwrap();
            while part.next_group().is_some() {
                let at = part.progress().groups;
                part.write_group(&rows(at), &[]).unwrap();
            }
            part.finish(None).unwrap();
            let expected: Vec<Value> = (0..GROUPS).flat_map(rows).collect();
            let mut found = Vec::new();
            for_each_row(&target, |row| { found.push(row); Ok(()) }).unwrap();
            prop_assert_eq!(found, expected);
            prop_assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        }
    }

    #[test]
    fn open_rejects_existing_target_other_options_and_second_process() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("rows.jsonl");
        let part = Part::open(&target, "a", || Ok(ids(1))).unwrap();
        let error = Part::open(&target, "a", || Ok(ids(1))).unwrap_err();
        assert!(matches!(error, ExportError::Busy(_)), "{error}");
        drop(part);
        let error = Part::open(&target, "b", || Ok(ids(1))).unwrap_err();
        assert!(error.to_string().contains("rows.jsonl.part is the unfinished part"), "{error}");
        Part::open(&target, "a", || Ok(ids(1))).unwrap().finish(None).unwrap();
        let error = Part::open(&target, "a", || Ok(ids(1))).unwrap_err();
        assert!(matches!(error, ExportError::Exists(_)), "{error}");
    }

    #[test]
    fn failed_conversion_keeps_part() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("rows");
        let mut part = Part::open(&target, "a", || Ok(ids(1))).unwrap();
        part.write_group(&[json!({ "a": 1 })], &["x".to_owned()]).unwrap();
        assert!(part.finish(Some(&|_, _| Err(ExportError::NoColumns("rows")))).is_err());
        let part = Part::open(&target, "a", || panic!("the plan exists")).unwrap();
        assert_eq!(part.next_group(), None);
        let progress = part
            .finish(Some(&|from: &Path, to: &Path| {
                fs::copy(from, to).map(drop).map_err(ExportError::io_error_at(to))
            }))
            .unwrap();
        assert_eq!((progress.rows, progress.skipped), (1, 1));
        assert_eq!(fs::read_to_string(&target).unwrap(), "{\"a\":1}\n");
    }
}
