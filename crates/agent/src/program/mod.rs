//! Runs agents that are programs: any command that calls an OpenAI- or Anthropic-compatible API.
//!
//! A program makes one attempt, or keeps running as a worker that makes many. For each attempt it
//! receives an endpoint and a key, in its environment or in its request. The gateway behind the
//! endpoint records every token.
//!
//! # Guarantees
//! - **Named environment variables**: the program receives no other variables.
//! - **A timeout stops the program** with all processes that it has started, and so does the end of
//!   this process ([`levade_process`]).
//! - **Output** is read completely and stored in part, so that it neither blocks the program nor
//!   fills the memory.
//! - **An attempt never fails other attempts**: its errors are in its outcome.
//!
//! Out of scope: HTTP (`levade-gateway`), and the use of rewards.

mod dry_run;
mod endpoint;
mod environment;
mod outcome;
mod process;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_call::{ExternalCall, Recording};
use levade_gateway::{Gateway, Reward, Route, Session, SessionOptions};
use levade_process::{Pool, RunOutput, Supervisor};
use levade_tree::{Outcome, agent_of};
use tracing::{Instrument, debug_span};

pub use dry_run::DryRunResult;
pub use endpoint::SessionEndpoint;
pub(crate) use environment::task_to_json;
pub(crate) use outcome::{
    add_scorer_input, agent_turns, create_recorded_outcome, find_last_content,
    find_rejection_finish,
};
pub use process::create_worker_pool;

use crate::cast::{CallerKind, PartyBuilder};
use crate::roster::{Agent, Player};
use crate::teacher_demonstrations::{ImitatingPolicy, create_attempt};
use crate::{AgentLoop, Attempt, AttemptContext};

/// Timeout for calls in flight to end after the program has ended.
const CALL_END_TIMEOUT: Duration = Duration::from_secs(10);

/// Program that makes attempts by calling the model at an endpoint of the gateway.
#[derive(Clone)]
pub struct Program {
    /// Command line of the program: the executable and its arguments.
    pub command: Vec<String>,
    /// Working directory of the program. If empty, the program uses the working directory of this
    /// process.
    pub dir: PathBuf,
    /// Names of environment variables that the program receives in addition to the [usual
    /// ones](levade_policy::environment::CHILD_VARIABLES).
    pub passes: Vec<String>,
    /// Supervisor that starts the program.
    pub supervisor: Supervisor,
    /// Gateway that answers the model calls of the program.
    pub gateway: Gateway,
    /// Address of the gateway, as `http://HOST:PORT`.
    pub address: String,
    /// Whether the program may report its own rewards.
    pub rewards: bool,
    /// Whether the program selects agents by using their names as models, as an environment with
    /// several seats does.
    pub has_seats: bool,
    /// Pool of worker processes, which keep running and receive attempts as JSON lines. If `None`,
    /// each attempt starts a process.
    pub workers: Option<Arc<Pool>>,
}

#[async_trait]
impl AgentLoop for Program {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let span = debug_span!("program", id = %context.name);
        self.run_attempt(context).instrument(span).await
    }

    fn can_be_taught(&self, _: &Agent) -> bool {
        true
    }
}

/// Open session of the gateway, through which the programs of one attempt call their models.
pub(crate) struct OpenProgram<'a> {
    pub session: Arc<Session>,
    /// Agents as which the program can call, each with the policy that plays the agent. A call that
    /// names no agent is attributed to the first agent, which is the attempt's own agent.
    played: Vec<(&'a Agent, &'a Player)>,
}

impl OpenProgram<'_> {
    /// Returns the policy that plays the attempt's own agent.
    pub(crate) fn own_player(&self) -> &Player {
        self.played[0].1
    }

    /// Returns the endpoint of the session for the client that makes the attempt.
    pub(crate) fn create_endpoint(&self, program: &Program) -> SessionEndpoint {
        SessionEndpoint {
            base_url: format!("{}{}", program.address, self.session.path()),
            key: self.session.key().to_owned(),
            reward_key: program.rewards.then(|| self.session.reward_key().to_owned()),
            model: self.own_player().policy.clone(),
            agents: self.played.iter().map(|(agent, _)| agent.name.clone()).collect(),
        }
    }

    /// Closes the session. Returns its recorded model calls and the rewards that the client posted.
    pub(crate) async fn close_session(&self, gateway: &Gateway) -> (Recording, Vec<Reward>) {
        let recorded = self.session.close(CALL_END_TIMEOUT).await;
        gateway.forget_session(&self.session);
        recorded
    }

    /// Completes the attempt `made` with `external`, the recorded calls of chat APIs. If a teacher
    /// has made the attempt, the teacher's completions become demonstrations.
    pub(crate) async fn complete_attempt(
        &self,
        context: &AttemptContext,
        made: Attempt,
        external: &[ExternalCall],
    ) -> Attempt {
        let mut attempt = match &context.teacher {
            None => made,
            Some(_) => self.create_demonstrated_attempt(made.outcome, external).await,
        };
        let mixed = self.played.iter().filter(|(agent, _)| agent.picker.is_some());
        attempt.outcome.cast =
            mixed.map(|(agent, player)| (agent.name.clone(), player.policy.clone())).collect();
        attempt
    }

    /// Creates the attempt that a teacher has made, with the teacher's completions as
    /// demonstrations.
    async fn create_demonstrated_attempt(
        &self,
        outcome: Outcome,
        external: &[ExternalCall],
    ) -> Attempt {
        let trained = self.played.iter().filter(|(_, player)| player.is_trained);
        let callers: BTreeSet<&str> = external.iter().map(|call| call.agent.as_str()).collect();
        let policies = trained.flat_map(|(agent, player)| {
            let own = callers.iter().filter(move |name| agent_of(name) == agent.name);
            own.filter_map(move |name| ImitatingPolicy::new(name, player))
        });
        create_attempt(outcome, policies.collect(), external.to_vec()).await
    }
}

impl Program {
    async fn run_attempt(&self, context: AttemptContext) -> Attempt {
        let opened = match self.open_session(&context, CallerKind::Program) {
            Ok(opened) => opened,
            Err(why) => return Attempt::failed("policies", why),
        };
        let endpoint = opened.create_endpoint(self);
        let never = std::future::pending();
        let ended = self.execute_program(&context, &endpoint, opened.own_player(), never).await;
        let recorded = opened.close_session(&self.gateway).await;
        self.complete_attempt(&context, &opened, ended, recorded).await
    }

    /// Creates the attempt of a program from its output and the recorded calls.
    pub(crate) async fn complete_attempt(
        &self,
        context: &AttemptContext,
        opened: &OpenProgram<'_>,
        ended: Result<RunOutput, String>,
        recorded: (Recording, Vec<Reward>),
    ) -> Attempt {
        let external =
            context.teacher.as_ref().map_or_else(Vec::new, |_| recorded.0.external.clone());
        let made = outcome::create_attempt(self, &context.limits, ended, recorded);
        opened.complete_attempt(context, made, &external).await
    }

    /// Opens the session of an attempt at the gateway.
    ///
    /// # Errors
    /// Returns a message if the roster lacks the attempt's agent or a summarizer, or if the task's
    /// row lacks the completions of a teacher.
    pub(crate) fn open_session<'a>(
        &self,
        context: &'a AttemptContext,
        caller: CallerKind,
    ) -> Result<OpenProgram<'a>, String> {
        let own = context.find_own_agent()?;
        let is_program = caller == CallerKind::Program;
        let mut agents: Vec<&Agent> = context.roster.agents().iter().collect();
        // The tool loop calls as its own agent only.
        agents.retain(|agent| is_program || std::ptr::eq(*agent, own));
        let index = agents.iter().position(|agent| std::ptr::eq(*agent, own)).unwrap_or(0);
        agents.swap(0, index);
        let casting = PartyBuilder::new(context, caller)?;
        let play = |agent| Ok((agent, context.select_player(agent)?));
        let played: Vec<(&Agent, &Player)> =
            agents.into_iter().map(play).collect::<Result<_, String>>()?;
        let route = |(index, (agent, player)): (usize, &(&Agent, &Player))| {
            let mut pattern = agent.pattern.clone();
            if self.has_seats && index > 0 {
                pattern.models.push(agent.name.clone());
            }
            Ok(Route { party: Arc::new(casting.create_party(agent, player)?), pattern })
        };
        let routes = played.iter().enumerate().map(route).collect::<Result<_, String>>()?;
        let attempt = replace_reserved_chars(&context.name);
        // The tool loop counts its turns itself, so that a call that is repeated over HTTP does not
        // count as a turn.
        let max_calls = if is_program { context.limits.max_turns } else { u32::MAX };
        let limits = (max_calls, context.limits.max_tokens);
        let session = self.gateway.open_session(SessionOptions {
            rollout: replace_reserved_chars(&context.task.id),
            recorder: self.gateway.new_recorder(&attempt, (context.seed, context.stream), limits),
            attempt,
            routes,
            rewards: self.rewards,
        });
        Ok(OpenProgram { session, played })
    }
}

/// Replaces each character of `name` that a URL or a key cannot contain with `_`. The result is
/// never empty.
pub(crate) fn replace_reserved_chars(name: &str) -> String {
    let plain =
        |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '_' };
    let name: String = name.chars().map(plain).collect();
    if name.is_empty() { "_".into() } else { name }
}
