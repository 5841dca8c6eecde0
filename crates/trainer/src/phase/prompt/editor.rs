//! The editor: a policy that criticizes prompts and writes new ones.
//!
//! Each request is an attempt in the record. A resumed run reads the recorded completions and
//! repeats no request.

use std::sync::Arc;

use levade_agent::{
    Agent, AttemptContext, Backend, BuiltInLoop, ContextPolicy, Limits, OpeningLimit, Player,
    Teacher, Truncation,
};
use levade_policy::SamplingParams;
use levade_recipe::PromptKeys;
use levade_store::{Attempt, Status};
use levade_tasks::Task;
use levade_text::Message;
use levade_tree::{AttemptSlot, Finish};

use crate::TrainerError;
use crate::context::RunContext;
use crate::rollout::SlotTries;

/// Number of repetitions of a request that failed.
const RETRIES: u32 = 2;

/// A policy that criticizes and rewrites prompts.
pub(super) struct Editor {
    agent: Agent,
    params: SamplingParams,
}

impl Editor {
    /// Creates the editor of a phase, as the agent `AGENT.editor`.
    ///
    /// # Errors
    /// Returns an error if the run lacks the policy.
    pub fn new(agent: &str, keys: &PromptKeys, run: &RunContext) -> Result<Self, TrainerError> {
        let agents = &run.rollouts.agents;
        let known = agents.roster.agents().iter().flat_map(|agent| &agent.players);
        let player = match run.teachers.get(&keys.editor) {
            Some(Teacher::Api(api)) => Player {
                policy: keys.editor.clone(),
                backend: Backend::Messages(Arc::clone(api)),
                format: None,
                context: usize::MAX,
                is_trained: false,
                opening: OpeningLimit { max_tokens: usize::MAX, truncation: Truncation::Reject },
                context_policy: ContextPolicy::UNLIMITED,
            },
            _ => {
                let found = known.clone().find(|player| player.policy == keys.editor);
                let missing = || TrainerError::MissingPart(format!("the policy {}", keys.editor));
                Player { is_trained: false, ..found.ok_or_else(missing)?.clone() }
            }
        };
        let limits =
            Limits { max_turns: 1, max_tokens: keys.max_tokens, ..agents.first().agent.limits };
        let params = SamplingParams {
            temperature: keys.temperature,
            max_tokens: keys.max_tokens,
            ..SamplingParams::default()
        };
        Ok(Editor { agent: Agent::new(&format!("{agent}.editor"), player, limits), params })
    }

    /// Makes a request, or returns the recorded attempt at it. An attempt that failed has the
    /// status [`Failed`](Status::Failed), and its end is not recorded yet.
    ///
    /// # Errors
    /// Returns an error if reading or writing the record fails.
    pub async fn complete(
        &self,
        run: &RunContext,
        slot: AttemptSlot,
        request: &str,
    ) -> Result<Attempt, TrainerError> {
        let store = &run.store;
        if let Some(recorded) = store.last_try(&slot).await? {
            return Ok(recorded);
        }
        let task = Task {
            id: slot.name(),
            question: request.to_owned(),
            source: "prompt".into(),
            agent: Some(self.agent.name.clone()),
            ..Task::default()
        };
        let tries = SlotTries {
            slot,
            retries: RETRIES,
            // A chat API returns no tokens.
            needs_tokens: false,
            agent_loop: Arc::new(BuiltInLoop),
            context: AttemptContext {
                task,
                messages: vec![Message::user(request)],
                seed: run.rollouts.seed,
                params: self.params.clone(),
                ..AttemptContext::new(&slot.name(), vec![self.agent.clone()])
            },
        };
        let (mut attempt, _) = tries.run(&**store).await?;
        if attempt.outcome.finish == Finish::Failed {
            attempt.status = Status::Failed;
        } else {
            attempt.status = Status::Completed;
            store.end(&attempt.id, &attempt.end()).await?;
        }
        Ok(attempt)
    }
}
