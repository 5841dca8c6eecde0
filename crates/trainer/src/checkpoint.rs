//! Writes and reads checkpoints: directories that are complete or absent.
//!
//! A checkpoint is written to a temporary directory next to its final one, every file flushed,
//! `trainer.json` last. Then the directory is renamed and the rename flushed. So at any moment,
//! including after a power failure or with a full disk, each directory named `step-…` has a
//! checkpoint that can be loaded, and earlier ones are untouched. Incomplete directories are
//! removed at the next start, or at once if the disk is full.
//!
//! `trainer.json` has the position in the run, and sizes and checksums of all other files.
//! Checksums of weights come from the manifest of the learner that wrote them on this machine,
//! unless the file has changed since. Metrics written after the checkpoint are removed when the run
//! resumes, so no step appears twice.
//!
//! A checkpoint is a model directory: weights, configuration, tokenizer, with separate files for
//! the trainer.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use levade_policy::{Learner, Manifest, SavedFile, WeightsLocation, checksum, crash_point};
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::TrainerError;
use crate::files::{file_error, sync_dir, write_atomically};
use crate::policies::{CRITIC, REFERENCE};
use crate::prompt_version::ImprovedPrompts;

/// Version of `trainer.json` that this build reads and writes. Version 2 added checksums.
const SCHEMA: u32 = 2;
const STATE: &str = "trainer.json";
const TEMPORARY: &str = ".tmp-";

/// Version of each policy by name: the number of steps that have trained it.
pub(crate) type Versions = BTreeMap<String, u64>;

/// Position of a run in its phases and steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Position {
    /// Index of the phase, from 0.
    pub phase: u32,
    /// Number of finished steps of the current phase.
    pub step: u32,
    /// Number of finished steps over all phases, which is also the number in a checkpoint's name.
    pub global_step: u32,
    /// Whether the metrics file contains the evaluation due at this position.
    pub evaluated: bool,
}

/// Contents of the checkpoint file `trainer.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckpointState {
    schema: u32,
    position: Position,
    /// Number of steps that have trained each policy, by name. Empty in checkpoints of earlier
    /// builds, which had one policy that every step trained.
    #[serde(default)]
    versions: Versions,
    /// Prompt texts that phases have improved so far.
    #[serde(default, skip_serializing_if = "ImprovedPrompts::is_empty")]
    prompts: ImprovedPrompts,
    /// Whether a phase ended here. If so, the checkpoint is kept as the start of the next phase.
    phase_end: bool,
    /// Length of the run's metrics file when the checkpoint was written, in bytes.
    metrics_bytes: u64,
    /// Sizes and checksums of all other files of the checkpoint.
    files: Vec<SavedFile>,
}

/// Metadata of a complete checkpoint in a run directory.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Directory of the checkpoint.
    pub dir: PathBuf,
    /// Progress of the run at this checkpoint.
    pub position: Position,
    /// Number of steps that had trained each policy, by policy name.
    pub versions: BTreeMap<String, u64>,
    /// Prompt texts that phases had improved when the checkpoint was written.
    pub prompts: ImprovedPrompts,
    /// Whether the checkpoint was written at the end of a phase.
    pub phase_end: bool,
    /// Length of the run's metrics file when the checkpoint was written, in bytes.
    pub metrics_bytes: u64,
}

impl Checkpoint {
    /// Returns the weight version of a policy: the number of steps that had trained the policy.
    pub(crate) fn version(&self, policy: &str) -> u64 {
        let every_step = u64::from(self.position.global_step);
        if self.versions.is_empty() {
            every_step
        } else {
            self.versions.get(policy).copied().unwrap_or_default()
        }
    }

    /// Verifies the checksum of every file.
    ///
    /// # Errors
    /// Returns a message that names the file if a file cannot be read or has changed.
    pub(crate) fn verify_checksums(&self) -> Result<(), String> {
        for SavedFile { name, crc32c, .. } in read_state(&self.dir)?.files {
            let file =
                File::open(self.dir.join(&name)).map_err(|error| format!("{name}: {error}"))?;
            let (_, found) = checksum(file).map_err(|error| format!("{name}: {error}"))?;
            if found != crc32c {
                return Err(format!("{name} has the checksum {found:08x} instead of {crc32c:08x}"));
            }
        }
        Ok(())
    }
}

/// The directory of a run's checkpoints, in which they are written, listed and removed.
pub(crate) struct CheckpointDir {
    root: PathBuf,
}

/// Returns the complete checkpoints of the run in `dir`, oldest first.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn checkpoints(dir: &Path) -> Result<Vec<Checkpoint>, TrainerError> {
    let root = dir.join("checkpoints");
    if !root.exists() {
        return Ok(Vec::new());
    }
    Ok(CheckpointDir::open_read_only(root).find()?.complete)
}

/// Returns the prompt texts that phases had improved when a checkpoint was written.
///
/// # Errors
/// Returns a message that names the file `trainer.json` if that file cannot be read.
pub fn improved_prompts(checkpoint: &Path) -> Result<ImprovedPrompts, String> {
    read_state(checkpoint).map(|state| state.prompts)
}

/// The models of one policy that a checkpoint saves.
pub(crate) struct PolicyContent<'a> {
    /// Directory of the policy's files, relative to the checkpoint.
    pub subdir: PathBuf,
    /// The learner of the policy.
    pub learner: &'a dyn Learner,
    /// The critic of the policy. `None` if no critic is trained.
    pub critic: Option<&'a dyn Learner>,
    /// The reference model. `None` if its weights are the policy's or in a kept checkpoint.
    pub reference: Option<&'a dyn Learner>,
    /// Writes the remaining files of a model directory.
    pub write_extra_files: &'a (dyn Fn(&Path) -> io::Result<()> + Send + Sync),
}

/// Metadata that a new checkpoint records.
pub(crate) struct CheckpointMeta {
    pub position: Position,
    pub versions: Versions,
    pub prompts: ImprovedPrompts,
    pub phase_end: bool,
    pub metrics_bytes: u64,
}

/// Name of the file that contains the name of the best checkpoint.
const BEST: &str = "best";

/// The complete checkpoints of a directory, and messages about the damaged checkpoints.
pub(crate) struct FoundCheckpoints {
    /// Metadata of the complete checkpoints, oldest first.
    pub complete: Vec<Checkpoint>,
    /// Messages about the damaged checkpoints.
    pub damaged: Vec<String>,
}

impl CheckpointDir {
    /// Opens or creates the directory `root`. Removes temporary directories of earlier processes.
    pub fn open(root: PathBuf) -> Result<Self, TrainerError> {
        fs::create_dir_all(&root).map_err(|source| file_error("create", &root, source))?;
        let checkpoints = CheckpointDir { root };
        for name in checkpoints.list_names()? {
            if name.starts_with(TEMPORARY) {
                let path = checkpoints.root.join(name);
                fs::remove_dir_all(&path).map_err(|source| file_error("remove", &path, source))?;
            }
        }
        Ok(checkpoints)
    }

    /// Opens the directory `root` for reading. The directory is not changed.
    pub fn open_read_only(root: PathBuf) -> Self {
        CheckpointDir { root }
    }

    fn list_names(&self) -> Result<Vec<String>, TrainerError> {
        let failed = |source| file_error("list", &self.root, source);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// Reads the metadata of every checkpoint, and compares the sizes of the checkpoint's files.
    pub fn find(&self) -> Result<FoundCheckpoints, TrainerError> {
        let mut found = FoundCheckpoints { complete: Vec::new(), damaged: Vec::new() };
        for name in self.list_names()?.into_iter().filter(|name| name.starts_with("step-")) {
            match read_checkpoint(&self.root.join(&name)) {
                Ok(checkpoint) => found.complete.push(checkpoint),
                Err(why) => found
                    .damaged
                    .push(format!("checkpoint {name} is incomplete and is skipped: {why}")),
            }
        }
        found.complete.sort_by_key(|checkpoint| checkpoint.position.global_step);
        Ok(found)
    }

    /// Returns the directory for temporary files. [`CheckpointDir::open`] removes it.
    pub fn scratch_dir(&self) -> PathBuf {
        self.root.join(format!("{TEMPORARY}scratch"))
    }

    /// Writes a checkpoint. Its directory becomes visible only when the checkpoint is complete.
    pub async fn write(
        &self,
        contents: &[PolicyContent<'_>],
        about: CheckpointMeta,
    ) -> Result<Checkpoint, TrainerError> {
        let start = Instant::now();
        let name = format!("step-{:06}", about.position.global_step);
        let checkpoint_dir = self.root.join(&name);
        let temporary = self.root.join(format!("{TEMPORARY}{name}"));
        if temporary.exists() {
            fs::remove_dir_all(&temporary)
                .map_err(|source| file_error("remove", &temporary, source))?;
        }
        fs::create_dir(&temporary).map_err(|source| file_error("create", &temporary, source))?;
        let written = self.write_files(&temporary, contents, &about).await;
        if let Err(error) = written {
            // An incomplete checkpoint is useless, and removing it may free the space that the disk
            // lacks.
            let _ = fs::remove_dir_all(&temporary);
            return Err(error);
        }
        crash_point("before_rename");
        if checkpoint_dir.exists() {
            // The old directory was incomplete, otherwise the run would have resumed from it.
            self.remove_checkpoint(&checkpoint_dir)?;
        }
        fs::rename(&temporary, &checkpoint_dir)
            .map_err(|source| file_error("rename", &temporary, source))?;
        crash_point("after_rename");
        sync_dir(&self.root)?;
        info!(folder = %checkpoint_dir.display(), seconds = start.elapsed().as_secs_f64(), "wrote a checkpoint");
        let CheckpointMeta { position, versions, prompts, phase_end, metrics_bytes } = about;
        Ok(Checkpoint {
            dir: checkpoint_dir,
            position,
            versions,
            prompts,
            phase_end,
            metrics_bytes,
        })
    }

    async fn write_files(
        &self,
        dir: &Path,
        contents: &[PolicyContent<'_>],
        about: &CheckpointMeta,
    ) -> Result<(), TrainerError> {
        // Files that the learners wrote on this machine, as their manifests describe them, with
        // modification times.
        let mut written = BTreeMap::new();
        for PolicyContent { subdir: location, learner, critic, reference, .. } in contents {
            let location = dir.join(location);
            let models = [
                ("", Some(*learner), true),
                (CRITIC, *critic, true),
                (REFERENCE, *reference, false),
            ];
            for (name, model, with_training_state) in models {
                let Some(model) = model else { continue };
                let location = if name.is_empty() { location.clone() } else { location.join(name) };
                fs::create_dir_all(&location)
                    .map_err(|source| file_error("create", &location, source))?;
                let Manifest { location: WeightsLocation::Local(location), files, .. } =
                    model.save(&location, with_training_state).await?
                else {
                    continue;
                };
                for file in files {
                    let path = location.join(&file.name);
                    if let Ok(changed) = fs::metadata(&path).and_then(|found| found.modified()) {
                        written.insert(path, (file, changed));
                    }
                }
            }
        }
        crash_point("weights_saved");
        for PolicyContent { subdir: location, write_extra_files: extra_files, .. } in contents {
            let location = dir.join(location);
            extra_files(&location)
                .map_err(|source| file_error("write the tokenizer into", &location, source))?;
        }
        crash_point("companions_saved");
        let mut files = Vec::new();
        let found = list_files(dir).map_err(|source| file_error("list", dir, source))?;
        let mut dirs: BTreeSet<&Path> = BTreeSet::new();
        for (_, path) in &found {
            dirs.extend(path.ancestors().skip(1).take_while(|location| *location != dir));
        }
        for location in dirs {
            sync_dir(location)?;
        }
        for (name, path) in found {
            let flush = || {
                let file = File::open(&path)?;
                file.sync_all()?;
                let found = file.metadata()?;
                match written.get(&path) {
                    Some((SavedFile { bytes, crc32c, .. }, changed))
                        if (*bytes, *changed) == (found.len(), found.modified()?) =>
                    {
                        Ok((*bytes, *crc32c))
                    }
                    _ => checksum(file),
                }
            };
            let (bytes, crc32c) = flush().map_err(|source| file_error("flush", &path, source))?;
            files.push(SavedFile { name, bytes, crc32c });
        }
        let CheckpointMeta { position, phase_end, metrics_bytes, .. } = *about;
        let state = CheckpointState {
            schema: SCHEMA,
            position,
            versions: about.versions.clone(),
            prompts: about.prompts.clone(),
            phase_end,
            metrics_bytes,
            files,
        };
        let text = serde_json::to_string_pretty(&state)
            .map_err(|error| file_error("write", &dir.join(STATE), io::Error::other(error)))?;
        write_atomically(&dir.join(STATE), text.as_bytes())
    }

    /// Returns the newest checkpoint whose checksums match, and messages about newer damaged ones.
    pub fn newest_intact(&self) -> Result<(Option<Checkpoint>, Vec<String>), TrainerError> {
        let mut damaged = Vec::new();
        for checkpoint in self.find()?.complete.into_iter().rev() {
            match checkpoint.verify_checksums() {
                Ok(()) => return Ok((Some(checkpoint), damaged)),
                Err(why) => {
                    let name = checkpoint
                        .dir
                        .file_name()
                        .unwrap_or_default()
                        .to_string_lossy()
                        .into_owned();
                    damaged.push(format!("checkpoint {name} is damaged and is skipped: {why}"));
                }
            }
        }
        Ok((None, damaged))
    }

    /// Marks a checkpoint as the best so far.
    pub fn mark_best(&self, checkpoint: &Checkpoint) -> Result<(), TrainerError> {
        let name = checkpoint.dir.file_name().unwrap_or_default().to_string_lossy();
        write_atomically(&self.root.join(BEST), format!("{name}\n").as_bytes())
    }

    /// Returns the directory of the best checkpoint so far, if one is marked and exists.
    pub fn best_dir(&self) -> Option<PathBuf> {
        let name = fs::read_to_string(self.root.join(BEST)).ok()?;
        Some(self.root.join(name.trim())).filter(|path| path.is_dir())
    }

    /// Removes all checkpoints except the newest `keep` checkpoints, the best checkpoint, and the
    /// checkpoints at the end of a phase.
    pub fn prune(&self, keep: usize) -> Result<(), TrainerError> {
        let found = self.find()?.complete;
        let best = self.best_dir();
        let is_kept = |checkpoint: &Checkpoint| {
            checkpoint.phase_end || best.as_ref() == Some(&checkpoint.dir)
        };
        let passing: Vec<&Checkpoint> =
            found.iter().filter(|checkpoint| !is_kept(checkpoint)).collect();
        for old in &passing[..passing.len().saturating_sub(keep)] {
            self.remove_checkpoint(&old.dir)?;
        }
        Ok(())
    }

    /// Removes a checkpoint. It is renamed first, so that no partly removed checkpoint is visible.
    fn remove_checkpoint(&self, path: &Path) -> Result<(), TrainerError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let renamed = self.root.join(format!("{TEMPORARY}old-{name}"));
        fs::rename(path, &renamed)
            .and_then(|()| fs::remove_dir_all(&renamed))
            .map_err(|source| file_error("remove", path, source))
    }
}

/// Returns all files below `dir`, sorted, each with its relative and its full path.
fn list_files(dir: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type()?;
        if kind.is_file() {
            files.push((name, entry.path()));
        } else if kind.is_dir() {
            let within = list_files(&entry.path())?;
            files.extend(within.into_iter().map(|(file, path)| (format!("{name}/{file}"), path)));
        }
    }
    files.sort();
    Ok(files)
}

fn read_state(path: &Path) -> Result<CheckpointState, String> {
    let text = fs::read_to_string(path.join(STATE)).map_err(|error| format!("{STATE}: {error}"))?;
    let state: CheckpointState =
        serde_json::from_str(&text).map_err(|error| format!("{STATE}: {error}"))?;
    if state.schema != SCHEMA {
        return Err(format!(
            "the file {STATE} has schema version {}, but this build reads version {SCHEMA}",
            state.schema
        ));
    }
    Ok(state)
}

/// Reads a checkpoint's metadata, and checks that all of its files exist with the recorded sizes.
fn read_checkpoint(path: &Path) -> Result<Checkpoint, String> {
    let state = read_state(path)?;
    for SavedFile { name, bytes, .. } in &state.files {
        let found =
            fs::metadata(path.join(name)).map_err(|error| format!("{name}: {error}"))?.len();
        if found != *bytes {
            return Err(format!("the file {name} has {found} bytes, but {bytes} were recorded"));
        }
    }
    Ok(Checkpoint {
        dir: path.to_owned(),
        position: state.position,
        versions: state.versions,
        prompts: state.prompts,
        phase_end: state.phase_end,
        metrics_bytes: state.metrics_bytes,
    })
}

#[cfg(test)]
mod tests {
    use levade_policy::{Simulator, SimulatorConfig};

    use super::*;

    fn meta(step: u32, phase_end: bool) -> CheckpointMeta {
        let position = Position { phase: 0, step, global_step: step, evaluated: false };
        let versions = Versions::from([("default".to_owned(), u64::from(step))]);
        CheckpointMeta {
            position,
            versions,
            prompts: ImprovedPrompts::default(),
            phase_end,
            metrics_bytes: 10,
        }
    }

    fn write_tokenizer(dir: &Path) -> io::Result<()> {
        fs::write(dir.join("tokenizer.json"), "{}")
    }

    fn content<'a>(
        learner: &'a Simulator,
        extra_files: &'a (dyn Fn(&Path) -> io::Result<()> + Send + Sync),
    ) -> PolicyContent<'a> {
        PolicyContent {
            subdir: PathBuf::new(),
            learner,
            critic: None,
            reference: None,
            write_extra_files: extra_files,
        }
    }

    async fn write(checkpoints: &CheckpointDir, step: u32, phase_end: bool) -> Checkpoint {
        let simulator = Simulator::new(SimulatorConfig { rows: 8, ..SimulatorConfig::default() });
        checkpoints
            .write(&[content(&simulator, &write_tokenizer)], meta(step, phase_end))
            .await
            .unwrap()
    }

    /// A checksum comes from the manifest, unless the file changed after its learner wrote it.
    #[tokio::test]
    async fn manifest_checksum_is_recomputed_after_file_change() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = CheckpointDir::open(dir.path().to_owned()).unwrap();
        let simulator = Simulator::new(SimulatorConfig { rows: 8, ..SimulatorConfig::default() });
        write(&checkpoints, 1, false).await.verify_checksums().unwrap();
        let zeroed = |dir: &Path| {
            let file = dir.join("simulator.weights");
            let len = fs::metadata(&file)?.len() as usize;
            std::thread::sleep(std::time::Duration::from_millis(20));
            fs::write(file, vec![0; len])
        };
        let content = content(&simulator, &zeroed);
        checkpoints.write(&[content], meta(2, false)).await.unwrap().verify_checksums().unwrap();
    }

    #[tokio::test]
    async fn checkpoints_prune_old_and_report_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("checkpoints");
        let checkpoints = CheckpointDir::open(root.clone()).unwrap();
        let mut written = Vec::new();
        for (step, phase_end) in [(2, false), (4, true), (6, false), (8, false), (10, false)] {
            written.push(write(&checkpoints, step, phase_end).await);
        }
        assert_eq!(checkpoints.find().unwrap().complete, written);
        checkpoints.prune(2).unwrap();
        let steps = |found: &FoundCheckpoints| {
            found.complete.iter().map(|c| c.position.global_step).collect::<Vec<_>>()
        };
        assert_eq!(steps(&checkpoints.find().unwrap()), [4, 8, 10]);
        assert!(written[4].dir.join("tokenizer.json").exists());

        // A truncated file, a missing file and a directory without state are not taken for a
        // checkpoint.
        fs::write(written[4].dir.join("tokenizer.json"), "{").unwrap();
        fs::remove_file(written[3].dir.join("simulator.weights")).unwrap();
        fs::create_dir(root.join("step-000099")).unwrap();
        let found = checkpoints.find().unwrap();
        assert_eq!(steps(&found), [4]);
        assert!(
            found.damaged[0].contains("step-000008")
                && found.damaged[0].contains("simulator.weights")
        );
        assert!(found.damaged[1].contains("tokenizer.json has 1 bytes, but 2 were recorded"));
        assert!(found.damaged[2].contains("trainer.json"));
        // A file of the right size whose contents changed is detected before it is loaded.
        fs::write(written[1].dir.join("tokenizer.json"), "[]").unwrap();
        assert_eq!(steps(&checkpoints.find().unwrap()), [4]);
        let (newest, damaged) = checkpoints.newest_intact().unwrap();
        assert!(
            newest.is_none() && damaged[0].contains("tokenizer.json has the checksum"),
            "{damaged:?}"
        );
        fs::write(written[1].dir.join("tokenizer.json"), "{}").unwrap();
        assert_eq!(checkpoints.newest_intact().unwrap().0.as_ref(), Some(&written[1]));
        // The checkpoint can be written again over the damaged one.
        let again = write(&checkpoints, 10, false).await;
        assert_eq!(checkpoints.find().unwrap().complete.last(), Some(&again));
    }

    #[tokio::test]
    async fn prune_keeps_best_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = CheckpointDir::open(dir.path().join("checkpoints")).unwrap();
        assert_eq!(checkpoints.best_dir(), None);
        for step in 1..5 {
            let written = write(&checkpoints, step, false).await;
            if step == 2 {
                checkpoints.mark_best(&written).unwrap();
            }
            checkpoints.prune(1).unwrap();
        }
        let steps: Vec<u32> =
            checkpoints.find().unwrap().complete.iter().map(|c| c.position.step).collect();
        assert_eq!(steps, [2, 4]);
        assert!(checkpoints.best_dir().unwrap().ends_with("step-000002"));
    }

    #[tokio::test]
    async fn open_removes_incomplete_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = CheckpointDir::open(dir.path().to_owned()).unwrap();
        let whole = write(&checkpoints, 1, false).await;
        fs::create_dir(dir.path().join(".tmp-step-000002")).unwrap();
        let full = |_: &Path| Err(io::Error::from(io::ErrorKind::StorageFull));
        let simulator = Simulator::new(SimulatorConfig { rows: 8, ..SimulatorConfig::default() });
        let error =
            checkpoints.write(&[content(&simulator, &full)], meta(3, false)).await.unwrap_err();
        assert!(error.is_user_error());
        assert!(error.to_string().contains("free space"), "{error}");
        let checkpoints = CheckpointDir::open(dir.path().to_owned()).unwrap();
        assert_eq!(checkpoints.list_names().unwrap(), ["step-000001"]);
        assert_eq!(checkpoints.find().unwrap().complete, [whole]);
    }
}
