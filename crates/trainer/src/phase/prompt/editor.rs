//! The editor: a policy that criticizes prompts and writes new ones.
//!
//! Each request is an attempt in the record. A resumed run reads the recorded completions and
//! repeats no request.

use std::sync::Arc;
use std::time::Duration;

use levade_agent::{
    Agent, AttemptContext, AttemptLimits, Backend, BuiltInLoop, ContextPolicy, OpeningLimit,
    Player, Teacher, Truncation,
};
use levade_policy::process_time::sleep;
use levade_policy::{PolicyError, SamplingParams};
use levade_recipe::PromptKeys;
use levade_store::{Attempt, Status};
use levade_tasks::Task;
use levade_text::Message;
use levade_tree::{AttemptSlot, Finish};
use tokio::sync::OnceCell;

use crate::TrainerError;
use crate::context::RunContext;
use crate::rollout::SlotTries;

/// Number of retries of a failed request to the editor.
const RETRIES: u32 = 2;

/// Pauses between checks of whether the editor's server accepts connections. The server may still
/// be starting.
const CHECK_PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];

/// The policy that criticizes and rewrites prompts in a prompt phase, as an agent.
pub(super) struct Editor {
    agent: Agent,
    params: SamplingParams,
    /// Set once the editor was reachable. During a later outage, requests wait as long as the
    /// policy's timeouts allow.
    reached: OnceCell<()>,
}

impl Editor {
    /// Creates the editor of a phase that improves a prompt of `agent`. The editor acts as the
    /// agent `AGENT.editor`.
    ///
    /// # Errors
    /// Returns an error if the run does not have the editor's policy.
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
        let limits = AttemptLimits {
            max_turns: 1,
            max_tokens: keys.max_tokens,
            ..agents.first().agent.limits
        };
        let params = SamplingParams {
            temperature: keys.temperature,
            max_tokens: keys.max_tokens,
            ..SamplingParams::default()
        };
        let agent = Agent::new(&format!("{agent}.editor"), player, limits);
        Ok(Editor { agent, params, reached: OnceCell::new() })
    }

    /// Checks that the editor's server is reachable. Succeeds without a check if the server was
    /// reachable before.
    ///
    /// # Errors
    /// Returns an error that names the policy and its servers if no server accepts a connection.
    pub async fn check_reachable(&self) -> Result<(), TrainerError> {
        let Some(player) = self.agent.players.first() else { return Ok(()) };
        self.reached.get_or_try_init(|| check_reachable(player)).await?;
        Ok(())
    }

    /// Sends a request to the editor as an attempt in `slot`. If the store already contains the
    /// attempt, returns it instead. A failed attempt has the status [`Failed`](Status::Failed), and
    /// its end is not recorded yet.
    ///
    /// # Errors
    /// Returns an error if the store cannot be read or written, or if the editor was never
    /// reachable.
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
        self.check_reachable().await?;
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
            store.end_attempt(&attempt.id, &attempt.end()).await?;
        }
        Ok(attempt)
    }
}

/// Checks whether the editor's servers are reachable, with several tries.
async fn check_reachable(Player { policy, backend, .. }: &Player) -> Result<(), PolicyError> {
    let Backend::Messages(api) = backend else { return Ok(()) };
    for pause in CHECK_PAUSES {
        if api.check_reachable().await.is_ok() {
            return Ok(());
        }
        sleep(pause).await;
    }
    api.check_reachable().await.map_err(|why| {
        PolicyError::Invalid(format!(
            "the editor `policy.{policy}` of the prompt phase cannot be reached: {why}; start its \
             server, or correct `policy.{policy}.url`, and continue the run with --resume"
        ))
    })
}
