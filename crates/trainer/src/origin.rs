//! Records the inputs of a run other than its recipe, in `origin.json`, when the run starts.
//!
//! The file contains:
//! - the time that templates can print,
//! - checksums of the files of tasks, of the model's files, and of the tool descriptions that
//!   agents see,
//! - the numbers of steps for which schedules were made.
//!
//! If one of these inputs has changed when the run resumes, the run is rejected with an error that
//! names the change. A model that is merged from the run has a file that names the run.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use levade_policy::checksum;
use levade_recipe::{Phase, Recipe, Schedule, TaskSource};
use levade_store::Store;
use levade_tasks::MatchingRule;
use levade_tree::Purpose;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::TrainerError;
use crate::agents::Agents;
use crate::files::{file_error, write_atomically};
use crate::rules::Rules;
use crate::run_dir::RECIPE;
use crate::tasks::{ListedTasks, Tasks};

const FILE: &str = "origin.json";
/// Value of the field `of` in the record for files of the model.
const MODEL: &str = "model";
/// Name of the file in a merged model's directory that records the run of the merged adapter.
const MERGED: &str = "merged.json";

/// Schema version of `origin.json` and `merged.json` that this build reads and writes.
const SCHEMA: u32 = 1;

/// Record of a run's inputs as they were when it started, which is stored in `origin.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunOrigin {
    schema: u32,
    /// Start of the run as a Unix timestamp in seconds. Chat templates see this time as the current
    /// time, including after a resume.
    #[serde(rename = "begun")]
    started_at: u64,
    /// Version of Levade that started the run.
    version: String,
    /// Sizes and checksums of the task files, the model files and the task lists of environments.
    files: Vec<InputFile>,
    /// Tools that the agents of the tasks have. `None` if the run was started by an older build,
    /// which did not record tools.
    #[serde(default)]
    tools: Option<Vec<OfferedTool>>,
    /// Former lengths of phases whose number of steps was changed while the run was stopped.
    #[serde(default)]
    lengths: Vec<PhaseLength>,
    /// Rule that decides which tasks are duplicates or leak held-out tasks.
    #[serde(default = "legacy_matching_rule")]
    matching: MatchingRule,
    /// Rules with which the run started. Earlier builds had other rules.
    #[serde(default)]
    pub rules: Rules,
}

/// Returns the rule by which builds that did not record their rule compared tasks.
fn legacy_matching_rule() -> MatchingRule {
    MatchingRule::Questions
}

/// Returns the rule by which the run in `dir` compares tasks. If the directory contains no run,
/// returns the rule of new runs.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn task_matching_rule(dir: &Path) -> Result<MatchingRule, TrainerError> {
    if !dir.join(RECIPE).exists() {
        return Ok(MatchingRule::default());
    }
    Ok(RunOrigin::read(dir)?.map_or_else(legacy_matching_rule, |origin| origin.matching))
}

/// A file that a run reads but does not write, with its size and checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct InputFile {
    /// What the file belongs to: `model`, or a source of tasks such as `tasks.0`.
    #[serde(rename = "of")]
    source: String,
    /// Name of the file without its directory, because model caches move.
    name: String,
    bytes: u64,
    crc32c: u32,
}

/// A tool that an agent was given, with the checksum of its description as the agent sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OfferedTool {
    agent: String,
    tool: String,
    crc32c: u32,
}

impl OfferedTool {
    /// Returns the tools that the agents of `tasks` have, in the order of their first use, without
    /// duplicates. The tools must have been resolved.
    ///
    /// # Errors
    /// Returns an error if a task names an unknown agent.
    pub fn collect(tasks: &Tasks, agents: &Agents) -> Result<Vec<Self>, TrainerError> {
        let mut all: Vec<Self> = Vec::new();
        for task in tasks.tasks_to_check() {
            let agent = &agents.agent_for(&task)?.agent;
            for spec in agent.tools.specs(&task) {
                let crc32c = crc32c::crc32c(json!(spec).to_string().as_bytes());
                let offered = OfferedTool { agent: agent.name.clone(), tool: spec.name, crc32c };
                if !all.contains(&offered) {
                    all.push(offered);
                }
            }
        }
        Ok(all)
    }
}

/// A former length of a phase: the steps before `until` were scheduled for a phase of `steps`
/// steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct PhaseLength {
    phase: u32,
    until: u32,
    steps: u32,
}

/// Returns when the run in `dir` started, as a Unix timestamp in seconds, or `None` if the
/// directory contains no run. Older builds did not record the start. For a run of such a build,
/// returns the modification time of the recipe.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn started_at(dir: &Path) -> Result<Option<u64>, TrainerError> {
    let recipe = dir.join(RECIPE);
    if !recipe.exists() {
        return Ok(None);
    }
    if let Some(origin) = RunOrigin::read(dir)? {
        return Ok(Some(origin.started_at));
    }
    let written = fs::metadata(&recipe).and_then(|file| file.modified());
    Ok(Some(seconds(written.map_err(|source| file_error("read", &recipe, source))?)))
}

/// Converts a time to a Unix timestamp in seconds. Times before 1970 become 0.
pub fn seconds(moment: SystemTime) -> u64 {
    moment.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Contents of `merged.json`: the run whose adapter was merged into a model.
#[derive(Serialize, Deserialize)]
struct MergedModel {
    schema: u32,
    run: PathBuf,
}

/// Records in the directory `dir` of a merged model that the model was merged from the adapter of
/// `run`.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn record_merge_source(dir: &Path, run: &Path) -> Result<(), TrainerError> {
    let path = dir.join(MERGED);
    let failed = |source| file_error("write", &path, source);
    let merged = MergedModel { schema: SCHEMA, run: std::path::absolute(run).map_err(failed)? };
    let text = serde_json::to_string_pretty(&merged).map_err(|error| failed(error.into()))?;
    write_atomically(&path, text.as_bytes())
}

/// Returns the directory of the run whose adapter was merged into the model in `dir`, or `None` if
/// `dir` contains no record of a merge.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn read_merge_source(dir: &Path) -> Result<Option<PathBuf>, TrainerError> {
    Ok(read_versioned_json::<MergedModel>(&dir.join(MERGED))?.map(|merged| merged.run))
}

/// Reads a JSON file whose field `schema` must be the schema version of this build. Returns `None`
/// if the file does not exist.
fn read_versioned_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, TrainerError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(source) => return Err(file_error("read", path, source)),
    };
    #[derive(Deserialize)]
    struct SchemaVersion {
        schema: u32,
    }
    let damaged = |why: String| TrainerError::Damaged { path: path.to_owned(), why };
    let parsed = |error: serde_json::Error| damaged(error.to_string());
    let SchemaVersion { schema } = serde_json::from_str(&text).map_err(parsed)?;
    if schema != SCHEMA {
        let why =
            format!("the file has schema version {schema}, but this build reads version {SCHEMA}");
        return Err(damaged(why));
    }
    serde_json::from_str(&text).map(Some).map_err(parsed)
}

/// Records in `dir` which model samples the recorded sessions there. If `dir` already contains
/// sessions, checks that the same model sampled them.
///
/// # Errors
/// Returns [`TrainerError::OtherModel`] if another model sampled the existing sessions, and an
/// error if a file cannot be read or written.
pub fn record_model(dir: &Path, recipe: &Recipe, files: &[PathBuf]) -> Result<(), TrainerError> {
    let now = seconds(SystemTime::now());
    let (tools, listings) = (Vec::new(), Vec::new());
    let current = RunOrigin::collect(recipe, now, files, tools, listings, MatchingRule::default())?;
    match RunOrigin::read(dir)? {
        Some(_) => current.check_sessions(dir, true),
        None => current.write(dir),
    }
}

impl RunOrigin {
    /// Checks that the model of this run sampled the sessions in the directory `record`. If
    /// `with_weights` is false, the weights can differ, but the tokenizer and the chat template
    /// cannot.
    ///
    /// # Errors
    /// Returns [`TrainerError::OtherModel`] if another model sampled the sessions, and an error if
    /// the record cannot be read.
    pub fn check_sessions(&self, record: &Path, with_weights: bool) -> Result<(), TrainerError> {
        let served = RunOrigin::read(record)?;
        let served = served.ok_or_else(|| TrainerError::NoSessions(record.to_owned()))?;
        let [served, current] = [&served, self].map(|origin| -> Vec<InputFile> {
            let files = origin.files.iter().filter(|file| file.source == MODEL);
            files.filter(|file| with_weights || !is_weight_file(&file.name)).cloned().collect()
        });
        let other = first_missing(&served, &current).or_else(|| first_missing(&current, &served));
        match other {
            None => Ok(()),
            Some(InputFile { name, .. }) => {
                let (record, name) = (record.to_owned(), name.clone());
                Err(TrainerError::OtherModel { record, name })
            }
        }
    }

    /// Collects the current inputs of a run of `recipe`: reads every task and model file, and adds
    /// `tools` and the task lists `listings`.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn collect(
        recipe: &Recipe,
        started_at: u64,
        model: &[PathBuf],
        tools: Vec<OfferedTool>,
        listings: Vec<ListedTasks>,
        matching: MatchingRule,
    ) -> Result<Self, TrainerError> {
        let mut all: Vec<(String, PathBuf)> = Vec::new();
        for (i, source) in recipe.tasks.iter().enumerate() {
            if let TaskSource::File(options) = source {
                all.extend(
                    options.path.files()?.into_iter().map(|file| (format!("tasks.{i}"), file)),
                );
            }
        }
        for (i, tool) in recipe.tool.iter().enumerate() {
            // The manifest contains the checksums of all other files of the index.
            let manifest = tool.index_dir().map(|index| index.join("search.json"));
            all.extend(
                manifest.filter(|file| file.exists()).map(|file| (format!("tool.{i}"), file)),
            );
        }
        all.extend(model.iter().map(|file| (MODEL.to_owned(), file.clone())));
        let mut files = all
            .into_iter()
            .map(|(of, path)| {
                let summed = File::open(&path).and_then(checksum);
                let (bytes, crc32c) = summed.map_err(|source| file_error("read", &path, source))?;
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                Ok(InputFile { source: of, name, bytes, crc32c })
            })
            .collect::<Result<Vec<InputFile>, TrainerError>>()?;
        for ListedTasks { source, package: name, bytes, crc32c } in listings {
            files.push(InputFile { source, name, bytes, crc32c });
        }
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let tools = Some(tools);
        let lengths = Vec::new();
        let rules = Rules::CURRENT;
        Ok(RunOrigin {
            schema: SCHEMA,
            started_at,
            version,
            files,
            tools,
            lengths,
            matching,
            rules,
        })
    }

    /// Reads the record of inputs of the run in `dir`. Returns `None` if an older build, which made
    /// no such record, started the run.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn read(dir: &Path) -> Result<Option<Self>, TrainerError> {
        read_versioned_json(&dir.join(FILE))
    }

    pub fn write(&self, dir: &Path) -> Result<(), TrainerError> {
        let path = dir.join(FILE);
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| file_error("write", &path, std::io::Error::other(error)))?;
        write_atomically(&path, text.as_bytes())
    }

    /// Removes the former phase lengths that concern steps from `step` of `phase` on, because these
    /// steps are repeated.
    pub fn forget_steps_from(&mut self, phase: u32, step: u32) {
        self.lengths.retain(|length| length.phase <= phase);
        for length in self.lengths.iter_mut().filter(|length| length.phase == phase) {
            length.until = length.until.min(step);
        }
    }

    /// Checks that a run that started with these inputs can resume with the inputs `current`.
    /// Returns notes for the user.
    ///
    /// # Errors
    /// Returns [`TrainerError::Changed`] with the name of the file or tool if one differs.
    pub fn check_unchanged(
        &mut self,
        current: &RunOrigin,
        dir: &Path,
    ) -> Result<Vec<String>, TrainerError> {
        let changed = |of: &str, name: String| {
            Err(TrainerError::Changed { of: of.to_owned(), name, run_dir: dir.to_owned() })
        };
        let missing = first_missing(&current.files, &self.files);
        if let Some(InputFile { source: of, name, .. }) =
            missing.or_else(|| first_missing(&self.files, &current.files))
        {
            return changed(of, name.clone());
        }
        match (&self.tools, &current.tools) {
            (Some(initial_tools), Some(current)) => {
                let missing = first_missing(current, initial_tools)
                    .or_else(|| first_missing(initial_tools, current));
                // The order matters, because templates print the tools in it.
                let moved = || {
                    current
                        .iter()
                        .zip(initial_tools)
                        .find(|(current, initial_tools)| current != initial_tools)
                        .map(|(current, _)| current)
                };
                if let Some(OfferedTool { agent, tool, .. }) = missing.or_else(moved) {
                    return changed(&format!("agent {agent}"), format!("the tool {tool}"));
                }
            }
            (None, tools) => self.tools.clone_from(tools),
            (Some(_), None) => {}
        }
        let mut notes = Vec::new();
        if self.version != current.version {
            notes.push(format!(
                "this run started with Levade {} and continues with {}",
                self.version, current.version
            ));
        }
        Ok(notes)
    }

    /// Returns the number of steps for which the learning-rate schedule of step `step` was made.
    /// `steps` is the number of steps that the recipe now sets for the phase.
    pub fn scheduled_steps(&self, phase: u32, step: u32, steps: u32) -> u32 {
        let earlier =
            self.lengths.iter().find(|length| length.phase == phase && step < length.until);
        earlier.map_or(steps, |length| length.steps)
    }

    /// Records that phases have other lengths in `recipe` than in `earlier`, the former recipe of
    /// the run in `store`. Returns notes for the user.
    ///
    /// # Errors
    /// Returns [`TrainerError::PhaseFinished`] if a changed phase has ended and a later phase has
    /// started from its result.
    pub async fn update_lengths(
        &mut self,
        earlier: &Recipe,
        recipe: &Recipe,
        store: &dyn Store,
    ) -> Result<Vec<String>, TrainerError> {
        let changed: Vec<usize> =
            (0..earlier.phase.len()).filter(|&i| earlier.phase[i] != recipe.phase[i]).collect();
        let Some(&first) = changed.first() else { return Ok(Vec::new()) };
        let planned = store.planned_steps().await?;
        let mut last_phase = planned.iter().map(|(phase, _)| *phase).max();
        for purpose in [Purpose::Train, Purpose::Eval] {
            let made = store.summaries(purpose).await?;
            last_phase = last_phase.max(made.iter().map(|summary| summary.slot.phase).max());
        }
        if let Some(later) = last_phase.filter(|later| *later as usize > first) {
            return Err(TrainerError::PhaseFinished { phase: first, later });
        }
        let mut notes = Vec::new();
        for phase in changed {
            let steps = earlier.phase[phase].steps();
            let until = planned.iter().filter(|(of, _)| *of as usize == phase).count() as u32;
            if recipe.phase[phase].steps() == steps || until == 0 {
                continue;
            }
            self.lengths.push(PhaseLength { phase: phase as u32, until, steps });
            if has_learning_rate_decay(&recipe.phase[phase]) {
                notes.push(format!(
                    "the learning rate of phase {phase} decays over its steps: from step {until} \
                     on, it follows the schedule of a phase of {} steps; earlier steps followed \
                     that of a phase of {steps}",
                    recipe.phase[phase].steps()
                ));
            }
        }
        Ok(notes)
    }
}

/// Returns the first item of `all` that is not in `other_items`.
fn first_missing<'a, T: PartialEq>(all: &'a [T], other_items: &[T]) -> Option<&'a T> {
    all.iter().find(|one| !other_items.contains(one))
}

/// Returns whether a model file contains only weights, or the shapes and defaults that describe
/// weights. Such a file does not affect how text is tokenized.
fn is_weight_file(name: &str) -> bool {
    let is_config =
        ["config.json", "generation_config.json", "adapter_config.json"].contains(&name);
    is_config || name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")
}

/// Returns whether the learning rate of a phase depends on the phase's number of steps.
fn has_learning_rate_decay(phase: &Phase) -> bool {
    let critic = match phase {
        Phase::Rl(keys) if keys.needs_critic() => keys.critic.optimizer.schedule,
        _ => Schedule::Constant,
    };
    let policy = phase.optimizer().map_or(Schedule::Constant, |(keys, _)| keys.schedule);
    policy != Schedule::Constant || critic != Schedule::Constant
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_model_records_source_run() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_merge_source(dir.path()).unwrap(), None);
        assert_eq!(read_merge_source(&dir.path().join("none")).unwrap(), None);
        let run = dir.path().join("run");
        record_merge_source(dir.path(), &run).unwrap();
        assert_eq!(read_merge_source(dir.path()).unwrap(), Some(run));
        fs::write(dir.path().join(MERGED), "{\"schema\": 9}").unwrap();
        let error = read_merge_source(dir.path()).unwrap_err().to_string();
        assert!(error.contains("schema version 9"), "{error}");
    }

    fn origin_with_tools(tools: Option<Vec<OfferedTool>>) -> RunOrigin {
        let version = String::new();
        let files = Vec::new();
        let lengths = Vec::new();
        let matching = MatchingRule::default();
        let rules = Rules::CURRENT;
        RunOrigin { schema: SCHEMA, started_at: 0, version, files, tools, lengths, matching, rules }
    }

    /// A run that an older build started keeps the rules of that build.
    #[test]
    fn resumed_run_keeps_original_rules() {
        let dir = tempfile::tempdir().unwrap();
        let rules = || RunOrigin::read(dir.path()).unwrap().unwrap().rules;
        origin_with_tools(None).write(dir.path()).unwrap();
        assert_eq!(rules(), Rules::CURRENT);
        let mut older = json!(origin_with_tools(None));
        older.as_object_mut().unwrap().remove("rules");
        fs::write(dir.path().join(FILE), older.to_string()).unwrap();
        assert_eq!(rules(), Rules::default());
        assert_ne!(Rules::default(), Rules::CURRENT);
        // A build between the two had only some of the rules.
        older["rules"] = json!({ "chained_prompts": true });
        fs::write(dir.path().join(FILE), older.to_string()).unwrap();
        assert_eq!(rules(), Rules { chained_prompts: true, ..Rules::default() });
    }

    #[test]
    fn imitated_sessions_accept_other_weights_but_not_other_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        let model = |weights: u32, tokenizer: u32| {
            let file = |(name, crc32c): (&str, u32)| InputFile {
                source: MODEL.into(),
                name: name.into(),
                bytes: 1,
                crc32c,
            };
            let files = [
                ("config.json", weights),
                ("model-00001-of-00002.safetensors", weights),
                ("model.safetensors.index.json", weights),
                ("tokenizer.json", tokenizer),
                ("tokenizer_config.json", tokenizer),
            ];
            RunOrigin { files: files.map(file).to_vec(), ..origin_with_tools(None) }
        };
        model(1, 1).write(dir.path()).unwrap();
        assert!(model(1, 1).check_sessions(dir.path(), true).is_ok());
        let larger = model(2, 1);
        let error = larger.check_sessions(dir.path(), true).unwrap_err().to_string();
        assert!(error.contains("config.json differs"), "{error}");
        assert!(larger.check_sessions(dir.path(), false).is_ok());
        let error = model(1, 2).check_sessions(dir.path(), false).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json differs"), "{error}");
    }

    /// A run that an older build started trains on the tasks that it started with.
    #[test]
    fn resumed_run_keeps_original_matching() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(task_matching_rule(dir.path()).unwrap(), MatchingRule::ExactRows);
        fs::write(dir.path().join(RECIPE), "").unwrap();
        assert_eq!(task_matching_rule(dir.path()).unwrap(), MatchingRule::Questions);
        let mut older = json!(origin_with_tools(None));
        older.as_object_mut().unwrap().remove("matching");
        fs::write(dir.path().join(FILE), older.to_string()).unwrap();
        assert_eq!(task_matching_rule(dir.path()).unwrap(), MatchingRule::Questions);
        older["matching"] = json!("rows");
        fs::write(dir.path().join(FILE), older.to_string()).unwrap();
        assert_eq!(task_matching_rule(dir.path()).unwrap(), MatchingRule::Rows);
        origin_with_tools(None).write(dir.path()).unwrap();
        assert_eq!(task_matching_rule(dir.path()).unwrap(), MatchingRule::ExactRows);
    }

    #[test]
    fn resume_rejects_changed_tools() {
        let tools = |all: &[(&str, u32)]| {
            let tool = |(tool, crc32c): &(&str, u32)| OfferedTool {
                agent: "solver".into(),
                tool: (*tool).into(),
                crc32c: *crc32c,
            };
            Some(all.iter().map(tool).collect::<Vec<_>>())
        };
        let started = tools(&[("search", 1), ("open", 2)]);
        let goes_on = |now| {
            let mut known = origin_with_tools(started.clone());
            let done = known.check_unchanged(&origin_with_tools(now), Path::new("runs/x"));
            assert_eq!(known.tools, started);
            done.map_err(|error| error.to_string())
        };
        assert_eq!(goes_on(started.clone()), Ok(vec![]));
        for (now, name) in [
            (tools(&[("search", 1), ("open", 3)]), "open"),
            (tools(&[("search", 1)]), "open"),
            (tools(&[("search", 1), ("open", 2), ("click", 1)]), "click"),
            (tools(&[("open", 2), ("search", 1)]), "open"),
        ] {
            let error = goes_on(now).unwrap_err();
            let start = format!(
                "cannot resume the run in runs/x: the tool {name} of `agent solver` was changed"
            );
            assert!(error.starts_with(&start), "{error}");
        }
        // An older build did not record the tools. From now on they are recorded.
        let mut older = origin_with_tools(None);
        older.check_unchanged(&origin_with_tools(started.clone()), Path::new("runs/x")).unwrap();
        assert_eq!(older.tools, started);
    }

    #[test]
    fn scheduled_steps_preserve_lengths_of_planned_steps() {
        let lengths = vec![
            PhaseLength { phase: 1, until: 5, steps: 5 },
            PhaseLength { phase: 1, until: 7, steps: 9 },
            PhaseLength { phase: 2, until: 1, steps: 3 },
        ];
        let origin = RunOrigin { lengths, ..origin_with_tools(None) };
        let of_phase_1: Vec<u32> = (3..9).map(|step| origin.scheduled_steps(1, step, 20)).collect();
        assert_eq!(of_phase_1, [5, 5, 9, 9, 20, 20]);
        assert_eq!((origin.scheduled_steps(0, 0, 4), origin.scheduled_steps(2, 1, 4)), (4, 4));
    }
}
