//! Agents that are programs: any command that speaks to an endpoint of OpenAI's or Anthropic's kind.
//!
//! For each attempt the program is started once, with an endpoint and a key of its own in its environment,
//! behind which the gateway records every token. Whatever else it does is its own affair.
//!
//! Guarantees: the program gets the environment variables that are named for it, and no others. A deadline
//! ends the program with everything that it has started, and so does the end of this process, however it
//! comes (see [`levade_process`]). What it prints is read to the end and kept in part, so no output blocks
//! it or fills the memory. An attempt never fails the ones beside it: what breaks is in its outcome.
//!
//! Not here: HTTP (`levade-gateway`), and what a reward is worth.

mod environment;
mod outcome;
mod process;
mod rehearsal;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_call::{Backend, ChatApi, Party, PartyLimits, Recorded, SamplingRule, Summarizer};
use levade_conversation::{Budget, Format};
use levade_gateway::{Gateway, Reward, Route, Session, SessionOptions, When};
use levade_policy::{Sampler, SamplingParams};
use levade_process::{Output, Pool, Supervisor};
use tracing::{Instrument, debug_span};

pub use process::workers;
pub use rehearsal::Rehearsal;

use crate::context::{ContextPolicy, summary_agent};
use crate::taught::{self, Exchange, Pupil};
use crate::{AgentLoop, Attempt, AttemptContext, Limits, Pick, Teacher};

/// How long calls under way may take to end once the program has ended.
const PATIENCE: Duration = Duration::from_secs(10);

/// A program that makes attempts.
#[derive(Clone)]
pub struct Program {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The folder that it runs in; this process' where empty.
    pub folder: PathBuf,
    /// Names of environment variables that it gets besides the [usual
    /// ones](levade_policy::environment::PASSED).
    pub passes: Vec<String>,
    /// Starts the program.
    pub supervisor: Supervisor,
    /// Answers its calls.
    pub gateway: Gateway,
    /// Where the gateway listens, as `http://HOST:PORT`.
    pub address: String,
    /// Agents as which it may call; the first is the one that the attempt is of, whose policy is the run's
    /// own.
    pub agents: Vec<ProgramAgent>,
    /// Where an attempt ends.
    pub limits: Limits,
    /// Whether it may give its own rewards.
    pub rewards: bool,
    /// Where it stays alive and takes attempts by the line.
    pub workers: Option<Arc<Pool>>,
    /// A policy of others that acts in the place of the trained ones, to be imitated.
    pub teacher: Option<Teacher>,
}

/// An agent as which a program may call.
#[derive(Clone)]
pub struct ProgramAgent {
    /// Name of the agent.
    pub name: String,
    /// Name of its policy, and of the model that the program asks for.
    pub policy: String,
    /// Whoever writes its replies.
    pub replies: Replies,
    /// Calls that are its own although they do not name it.
    pub when: When,
    /// Whether its policy learns: then the recipe decides how its replies are sampled, whatever the program
    /// asks for.
    pub trained: bool,
    /// Further policies that play this agent, and which of all plays it.
    pub mixture: Option<(Vec<ProgramAgent>, Pick)>,
    /// How its prompts are kept within the context.
    pub context: ContextPolicy,
}

/// Whoever writes an agent's replies.
#[derive(Clone)]
pub enum Replies {
    /// A policy of the run, by tokens.
    Tokens {
        /// How conversations with it are written.
        format: Arc<Format>,
        /// Tokens that prompt and reply can have together.
        context: usize,
    },
    /// An API of others, by messages.
    Messages(Arc<dyn ChatApi>),
}

impl ProgramAgent {
    /// This agent as it is played in an attempt.
    ///
    /// `is_of` tells whether the task names this agent. Evaluations cast other agents as training does.
    fn played(&self, context: &AttemptContext, is_of: bool) -> ProgramAgent {
        let Some((others, pick)) = &self.mixture else { return self.clone() };
        let trained: Vec<bool> =
            std::iter::once(self).chain(others).map(|agent| is_of && agent.trained).collect();
        let place = context.pick(pick, &trained);
        place.checked_sub(1).and_then(|place| others.get(place)).unwrap_or(self).clone()
    }
}

#[async_trait]
impl AgentLoop for Program {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let span = debug_span!("program", id = %context.name);
        let played = |(at, agent): (usize, &ProgramAgent)| agent.played(&context, at == 0);
        let agents: Vec<ProgramAgent> = self.agents.iter().enumerate().map(played).collect();
        let mixed = self.agents.iter().zip(&agents).filter(|(agent, _)| agent.mixture.is_some());
        let cast = mixed.map(|(agent, played)| (agent.name.clone(), played.policy.clone())).collect();
        let played = Program { agents, ..self.clone() };
        let mut made = played.attempt(context).instrument(span).await;
        made.outcome.cast = cast;
        made
    }

    fn taught(&self, teacher: &Teacher) -> Option<Arc<dyn AgentLoop>> {
        Some(Arc::new(Program { teacher: Some(teacher.clone()), ..self.clone() }))
    }
}

/// An open session of the gateway, through which the programs of one attempt call their models.
struct Opened<'a> {
    session: Arc<Session>,
    /// The agent that calls are attributed to if they name none.
    first: &'a ProgramAgent,
    /// The sampler of that agent's policy.
    sampler: Arc<dyn Sampler>,
}

impl Program {
    async fn attempt(&self, context: AttemptContext) -> Attempt {
        let Opened { session, first, sampler } = match self.open(&context) {
            Ok(opened) => opened,
            Err(why) => return Attempt::broken("policies", why),
        };
        let environment = self.environment(&session, &context, &first.policy);
        let ended = self.execute(&context, environment, &*sampler, std::future::pending()).await;
        let recorded = session.close(PATIENCE).await;
        self.gateway.forget(&session);
        match &self.teacher {
            None => outcome::attempt(self, ended, recorded),
            Some(_) => self.lesson(ended, recorded).await,
        }
    }

    /// The agents whose replies a teacher writes, with the formats that they are to be written in.
    fn pupils(&self) -> Vec<(ProgramAgent, Arc<Format>)> {
        let pupil = |agent: &ProgramAgent| match &agent.replies {
            Replies::Tokens { format, .. } if agent.trained => Some((agent.clone(), Arc::clone(format))),
            _ => None,
        };
        self.agents.iter().filter_map(pupil).collect()
    }

    /// The attempt that a teacher has made, its replies as demonstrations.
    async fn lesson(&self, ended: Result<Output, String>, recorded: (Recorded, Vec<Reward>)) -> Attempt {
        let (pupils, calls) = (self.pupils(), recorded.0.external.clone());
        let Attempt { outcome, .. } = outcome::attempt(self, ended, recorded);
        taught::finished(outcome, move || {
            taught::taught(pupils.iter().map(|(agent, format)| {
                let exchanges = Exchange::of(&calls, &agent.name);
                (Pupil { format, agent: &agent.name, policy: &agent.policy }, exchanges)
            }))
        })
        .await
    }

    /// Opens the gateway's session of an attempt.
    ///
    /// # Errors
    /// Returns an error if the program has no agent, or a policy of an agent has no sampler.
    fn open(&self, context: &AttemptContext) -> Result<Opened<'_>, String> {
        let routes = self.routes(context)?;
        let first = self.agents.first().ok_or("the program has no agent to call as")?;
        let sampler = context.samplers.get(&first.policy).cloned();
        let sampler = sampler.ok_or_else(|| format!("there is no policy {:?}", first.policy))?;
        let attempt = in_url(&context.name);
        let limits = (self.limits.turns, self.limits.tokens);
        let session = self.gateway.open(SessionOptions {
            rollout: in_url(&context.task.id),
            recorder: self.gateway.recorder(&attempt, (context.seed, context.stream), limits),
            attempt,
            routes,
            rewards: self.rewards,
        });
        Ok(Opened { session, first, sampler })
    }

    /// Returns the agents of an attempt with the rules for their calls.
    ///
    /// # Errors
    /// Returns an error if a policy has no sampler, if a summarizer is missing, or if the task's row has no
    /// replies for a teacher.
    fn routes(&self, context: &AttemptContext) -> Result<Vec<Route>, String> {
        let teacher = self.teacher.as_ref().map(|teacher| teacher.of(&context.task)).transpose()?;
        let party = |agent: &ProgramAgent| self.party(agent, context, teacher.as_ref());
        let parties = self.agents.iter().map(party).collect::<Result<Vec<Party>, String>>()?;
        let route = |(party, agent): (&Party, &ProgramAgent)| {
            let summarizer = match agent.context.summarises() {
                true => Some(Arc::new(summarizer(agent, party, &parties)?)),
                false => None,
            };
            let party = Arc::new(Party { summarizer, ..party.clone() });
            Ok(Route { party, when: agent.when.clone() })
        };
        parties.iter().zip(&self.agents).map(route).collect()
    }

    /// Returns the party of an agent, without its summarizer.
    fn party(
        &self,
        agent: &ProgramAgent,
        context: &AttemptContext,
        teacher: Option<&Arc<dyn ChatApi>>,
    ) -> Result<Party, String> {
        let taught = teacher.filter(|_| agent.trained);
        let timeout = self.limits.reply;
        let (backend, format, limits) = match &agent.replies {
            Replies::Messages(api) => {
                let limits = PartyLimits { context: usize::MAX, timeout };
                (Backend::Messages(Arc::clone(api)), None, limits)
            }
            Replies::Tokens { format, context: max } => {
                let backend = match (taught, context.samplers.get(&agent.policy)) {
                    (Some(teacher), _) => Backend::Messages(Arc::clone(teacher)),
                    (None, Some(sampler)) => Backend::Tokens(Arc::clone(sampler)),
                    (None, None) => return Err(format!("there is no policy {:?}", agent.policy)),
                };
                (backend, Some(Arc::clone(format)), PartyLimits { context: *max, timeout })
            }
        };
        let params = match agent.trained {
            true => SamplingParams { max_tokens: self.limits.tokens, ..context.params.clone() },
            false => SamplingParams { max_tokens: limits.context, ..SamplingParams::default() },
        };
        Ok(Party {
            agent: agent.name.clone(),
            policy: agent.policy.clone(),
            model: agent.policy.clone(),
            backend,
            format,
            limits,
            sampling: if agent.trained { SamplingRule::Fixed(params) } else { SamplingRule::Default(params) },
            budget: agent.context.budget,
            summarizer: None,
        })
    }
}

/// Returns the summarizer of an agent: the agent that its context policy names, or the agent's own party
/// under another name.
///
/// # Errors
/// Returns an error if there is no agent of that name.
fn summarizer(agent: &ProgramAgent, own: &Party, parties: &[Party]) -> Result<Summarizer, String> {
    let summary = &agent.context.summary;
    let (name, party) = match summary.agent.as_str() {
        "" => (summary_agent(&agent.name), own),
        named => {
            let found = parties.iter().find(|party| party.agent == named);
            (
                named.to_owned(),
                found.ok_or_else(|| format!("there is no agent {named:?} to write summaries"))?,
            )
        }
    };
    let sampling = match &party.sampling {
        SamplingRule::Fixed(params) => {
            SamplingRule::Fixed(SamplingParams { max_tokens: summary.tokens, ..params.clone() })
        }
        of_client => of_client.clone(),
    };
    let party = Party { agent: name, sampling, budget: Budget::NONE, summarizer: None, ..party.clone() };
    let (max_tokens, instruction) = (summary.tokens, summary.instruction.clone());
    Ok(Summarizer { party: Arc::new(party), max_tokens, instruction })
}

/// A name as it may stand in a URL and in a key.
fn in_url(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '_' };
    let name: String = name.chars().map(plain).collect();
    if name.is_empty() { "_".into() } else { name }
}

#[cfg(test)]
#[path = "program_tests.rs"]
mod tests;
