//! Reads the attempts of a recorded run, with what is needed to show them.

use std::collections::HashMap;
use std::sync::Arc;

use levade_run::dir::{RunDir, policy_dir};
use levade_run::model;
use levade_store::{Attempt, Store};
use levade_traces::Chats;
use levade_trainer::chat_options;
use levade_tree::{AttemptId, AttemptSlot, Timings};

use crate::failure::unusable;
use crate::host;

/// Finds a recorded attempt by its slot, such as `train/1/3/0/2`, or by its id. For a slot, returns
/// the last try. Returns `None` if the store does not contain the attempt.
///
/// # Errors
/// Returns an error if `name` is neither a slot nor an id, or if the store cannot be read.
pub async fn find_attempt(store: &dyn Store, name: &str) -> anyhow::Result<Option<Attempt>> {
    if let Some(placement) = AttemptSlot::parse(name) {
        return Ok(store.last_try(&placement).await?);
    }
    let id: Option<AttemptId> = name.parse().ok();
    let id = id.ok_or_else(|| {
        unusable(format!(
            "--attempt {name}: an attempt is named PURPOSE/PHASE/STEP/GROUP/SAMPLE, as in \
             train/1/3/0/2, or by its id of 32 digits; the purposes are train, baseline, eval, \
             demonstration and session"
        ))
    })?;
    Ok(store.attempt(&id).await?)
}

/// Reads an attempt from the store, and adds its times, which a file of the run contains.
pub async fn read_attempt_with_times(
    store: &dyn Store,
    id: &AttemptId,
    times: &HashMap<AttemptId, Timings>,
) -> anyhow::Result<Option<Attempt>> {
    let mut attempt = store.attempt(id).await?;
    if let (Some(attempt), Some(times)) = (&mut attempt, times.get(id)) {
        attempt.outcome.timings = times.clone();
    }
    Ok(attempt)
}

/// Opens the chat formats of a run, one for each agent and policy. A format comes from the policy's
/// newest checkpoint, or from the policy's model if there is no checkpoint.
pub fn open_run_chats(run: &RunDir) -> anyhow::Result<Chats> {
    let recipe = run.recipe()?;
    let started_at = run.started()?;
    let host = host::create_host()?;
    let trained = recipe.trained_policies();
    let mut chats = Chats::default();
    for (agent, keys) in recipe.agents() {
        for policy in recipe.policy_names(keys) {
            let policies = recipe.policies();
            // Past versions have the format of the policy that they come from.
            let weights_of = recipe.weight_source(&policy).to_owned();
            let policy_keys = policies.iter().find(|(name, _)| *name == weights_of);
            // Calls of chat APIs are recorded as messages and need no format.
            let Some(model_keys) = policy_keys.and_then(|(_, keys)| keys.model(&recipe.model))
            else {
                continue;
            };
            let saved = run.newest_checkpoint();
            let saved = saved.map(|checkpoint| policy_dir(&checkpoint, &trained, &weights_of));
            let saved = saved.filter(|path| path.join("tokenizer.json").is_file());
            let base = model_keys.base.as_deref();
            let found = match saved {
                // An adapter's checkpoint names its base, which has the same tokenizer.
                Some(path) => model::open_at(path, base, &host),
                None => model::open(&model_keys.source, base, &host),
            }?;
            let chat = model::chat(&found.files, chat_options(keys, Some(started_at)))?;
            chats.insert(agent, &policy, Arc::new(chat));
        }
    }
    Ok(chats)
}

#[cfg(test)]
mod tests {
    use levade_store::Memory;
    use levade_tree::RunId;

    use super::*;

    #[tokio::test]
    async fn find_attempt_accepts_slots_and_ids() {
        let store = Memory::new(RunId("r".into()));
        for name in ["train/1/2/3/4", "0123456789abcdef0123456789abcdef"] {
            assert!(find_attempt(&store, name).await.unwrap().is_none(), "{name}");
        }
        for name in ["", "train/1/2/3", "0123"] {
            let error = find_attempt(&store, name).await.unwrap_err().to_string();
            assert!(error.contains("PURPOSE/PHASE"), "{error}");
        }
    }
}
