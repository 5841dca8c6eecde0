//! Directories of recorded sessions: a recipe, the checksums of the served model, and a store.
//!
//! The directory has the layout of a run directory, so the commands that read runs also read it.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use levade_model::AdapterConfig;
use levade_recipe::{AgentKeys, Recipe};
use levade_store::{Store, StoreAccess};
use levade_trainer::{LockedRunDir, TrainerError, record_model};

use crate::dir::RECIPE;
use crate::failure::unusable;
use crate::model::ResolvedModel;

/// Directory into which this process records sessions of agents.
pub struct SessionRecord {
    /// Store that contains the recorded sessions.
    pub store: Arc<dyn Store>,
    /// Lock that keeps other processes from writing into the directory.
    _lock: LockedRunDir,
}

impl SessionRecord {
    /// Opens the directory `dir` for recording sessions, and creates it if it does not exist. The
    /// sessions use the model `found`, whose source is `source`. `agent` contains the chat options
    /// of the model. Sessions that an earlier process left open are marked as abandoned.
    ///
    /// # Errors
    /// Returns an error if the directory contains a run or the sessions of another model, if
    /// another process uses it, or if it cannot be written.
    pub async fn open(
        dir: &Path,
        source: &str,
        found: &ResolvedModel,
        agent: Option<&AgentKeys>,
    ) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let dir = std::fs::canonicalize(dir)?;
        let file = dir.join(RECIPE);
        let is_new = !file.exists();
        let has_other =
            || dir.join("checkpoints").exists() || dir.join(crate::dir::STORE_FILE).exists();
        if is_new && has_other() || !is_new && !Recipe::load(&file, &[])?.has_sessions() {
            return Err(unusable(format!(
                "{} holds a run; name another directory for the record of sessions",
                dir.display()
            )));
        }
        let lock = LockedRunDir::lock(&dir)?;
        let recipe = create_recipe(&dir, source, agent)?;
        let mut files = found.list_read_files()?;
        if found.adapter.is_some() {
            let of_adapter = ["adapter_model.safetensors", AdapterConfig::FILE];
            files.extend(
                of_adapter.map(|name| found.path.join(name)).into_iter().filter(|f| f.is_file()),
            );
        }
        record_model(&dir, &recipe, &files).map_err(|error| match error {
            TrainerError::OtherModel { record, name } => unusable(format!(
                "the sessions in {} were sampled by another model: {name} differs; name another \
                 directory for the sessions of this model",
                record.display()
            )),
            error => error.into(),
        })?;
        let id = recipe.run.id();
        let store =
            levade_store_client::open(&recipe.run.store, &dir, StoreAccess::Resume(&id)).await?;
        // The directory is locked, so no other process records sessions.
        store.abandon_running().await?;
        if is_new {
            // Written last: it makes the directory a record.
            lock.write_recipe(&recipe)?;
        }
        Ok(SessionRecord { store, _lock: lock })
    }
}

/// Creates the recipe of a session record. It contains the served model, and the sessions as tasks.
fn create_recipe(dir: &Path, source: &str, agent: Option<&AgentKeys>) -> anyhow::Result<Recipe> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    // A JSON string is also a string of TOML.
    let text = |text: &str| serde_json::Value::from(text).to_string();
    let dir_text = dir.to_str().with_context(|| format!("{} is not UTF-8", dir.display()))?;
    let source = std::fs::canonicalize(source)
        .ok()
        .and_then(|path| path.to_str().map(str::to_owned))
        .unwrap_or_else(|| source.to_owned());
    let recipe = format!(
        "[run]\nname = {}\nfolder = {}\n[model]\nsource = {}\n[eval]\ntasks = 0\n\
         [[tasks]]\nkind = \"sessions\"\npath = {}\n",
        text(&name),
        text(dir_text),
        text(&source),
        text(dir_text)
    );
    let mut recipe = Recipe::from_other_host(&recipe, &dir.join(RECIPE), dir)?;
    if let Some(agent) = agent {
        let AgentKeys { protocol, tool_prompt, bare_calls, late_system, variables, .. } =
            agent.clone();
        recipe.agent =
            AgentKeys { protocol, tool_prompt, bare_calls, late_system, variables, ..recipe.agent };
    }
    Ok(recipe)
}
