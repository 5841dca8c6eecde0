//! Resolves the agents of an attempt to the players and parties that answer their calls.
//!
//! Agent loops do not determine which party answers. They request the [`Party`] of an agent from
//! [`PartyBuilder`], which derives it from the roster, from the mixture of policies that plays the
//! agent, and from the teacher, if any.

use std::sync::Arc;
use std::time::Duration;

use levade_call::{
    Backend, ChatApi, Party, PartyLimits, PromptRecording, Recorder, RecorderOptions, SamplingRule,
    Summarizer, ToolCallIds,
};
use levade_conversation::Budget;
use levade_policy::SamplingParams;
use levade_tasks::Task;
use levade_tools::ToolContext;

use crate::agent_loop::AttemptContext;
use crate::context::own_summarizer_name;
use crate::roster::{Agent, AttemptLimits, MixtureScope, MixtureSeats, Player, Roster};

/// Kind of agent loop that calls the parties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerKind {
    /// The tool loop, which sends no sampling parameters.
    ToolLoop,
    /// A program, whose requests have sampling parameters.
    Program,
    /// The tool loop in another process, whose requests arrive over HTTP.
    RemoteToolLoop,
}

/// Rules that determine which party answers the calls of each agent of one attempt.
pub(crate) struct PartyBuilder<'a> {
    context: &'a AttemptContext,
    caller: CallerKind,
    /// Teacher that generates completions instead of the trained policies.
    teacher: Option<Arc<dyn ChatApi>>,
}

impl<'a> PartyBuilder<'a> {
    /// Creates the rules that select the parties in the attempt of `context`.
    ///
    /// # Errors
    /// Returns a message if a teacher replays completions from the task's row, and the row lacks
    /// them.
    pub fn new(context: &'a AttemptContext, caller: CallerKind) -> Result<Self, String> {
        let teacher = context
            .teacher
            .as_ref()
            .map(|teacher| teacher.create_responder(&context.task))
            .transpose()?;
        Ok(PartyBuilder { context, caller, teacher })
    }

    /// Returns the party that answers the calls of `agent` when `player` plays it.
    ///
    /// # Errors
    /// Returns a message if the roster lacks the agent's summarizer, or if the summarizer has no
    /// player.
    pub fn create_party(&self, agent: &Agent, player: &Player) -> Result<Party, String> {
        let summarizer = if player.context_policy.is_summarizing() {
            Some(Arc::new(self.create_summarizer(agent, player)?))
        } else {
            None
        };
        Ok(Party { summarizer, ..self.create_party_without_summarizer(agent, player) })
    }

    /// Returns the party that answers for `agent` as a simulated user. A teacher never replaces
    /// this party. `timeout` limits each completion.
    ///
    /// # Errors
    /// Returns the errors of [`create_party`](Self::create_party).
    pub fn create_user_party(
        &self,
        agent: &Agent,
        player: &Player,
        timeout: Duration,
    ) -> Result<Party, String> {
        let party = self.create_party(agent, player)?;
        let limits = PartyLimits { timeout, ..party.limits };
        Ok(Party { backend: player.backend.clone(), limits, ..party })
    }

    fn is_program(&self) -> bool {
        self.caller == CallerKind::Program
    }

    fn create_party_without_summarizer(&self, agent: &Agent, player: &Player) -> Party {
        // The tool loop has only one agent, whose completions the teacher demonstrates.
        let teacher = self.teacher.as_ref().filter(|_| player.is_trained || !self.is_program());
        let backend = match (teacher, &player.backend) {
            (Some(teacher), Backend::Tokens(_)) => Backend::Messages(Arc::clone(teacher)),
            (_, backend) => backend.clone(),
        };
        let sampling = if player.is_trained || !self.is_program() {
            let max_tokens = self.context.agent_limits(agent).max_tokens;
            SamplingRule::Fixed(SamplingParams {
                max_tokens,
                ..self.context.agent_sampling_params(agent)
            })
        } else {
            SamplingRule::Default(SamplingParams {
                max_tokens: player.context,
                ..SamplingParams::default()
            })
        };
        // In the tool loop of this process, the sampler enforces its context length, and reports it
        // in the finish reason.
        let context = if self.caller == CallerKind::ToolLoop { usize::MAX } else { player.context };
        Party {
            agent: agent.name.clone(),
            policy: player.policy.clone(),
            model: player.policy.clone(),
            backend,
            format: player.format.clone(),
            limits: PartyLimits { context, timeout: self.context.limits.completion_timeout },
            sampling,
            budget: player.context_policy.budget,
            summarizer: None,
        }
    }

    /// Returns the party that summarizes an agent's removed turns: the agent that the context
    /// policy names, or the agent's own player under the name `AGENT.summary`.
    ///
    /// # Errors
    /// Returns a message if the roster has no agent of the configured name.
    fn create_summarizer(&self, agent: &Agent, player: &Player) -> Result<Summarizer, String> {
        let summary = &player.context_policy.summary;
        let (name, agent, player) = match summary.agent.as_str() {
            "" => (own_summarizer_name(&agent.name), agent, player),
            named => {
                let missing = || format!("there is no agent {named:?} to write summaries");
                let found = self.context.roster.find(named).ok_or_else(missing)?;
                (named.to_owned(), found, self.context.select_player(found)?)
            }
        };
        let party = self.create_party_without_summarizer(agent, player);
        let sampling = match party.sampling {
            SamplingRule::Fixed(params) => {
                SamplingRule::Fixed(SamplingParams { max_tokens: summary.tokens, ..params })
            }
            of_client => of_client,
        };
        // A teacher demonstrates the completions of the tool loop, but no summaries.
        let backend = if self.is_program() { party.backend } else { player.backend.clone() };
        let party = Party { agent: name, backend, sampling, budget: Budget::NONE, ..party };
        let max_tokens = summary.tokens;
        let instruction = summary.instruction.clone();
        Ok(Summarizer { party: Arc::new(party), max_tokens, instruction })
    }
}

impl AttemptContext {
    /// Creates the context of an attempt at an empty task. The first of `agents` is the attempt's
    /// own agent.
    ///
    /// # Panics
    /// Panics if `agents` is empty.
    pub fn new(name: &str, agents: Vec<Agent>) -> Self {
        AttemptContext {
            name: name.to_owned(),
            task: Task::default(),
            messages: Vec::new(),
            seed: 0,
            stream: 0,
            group_stream: 0,
            is_evaluation: false,
            params: SamplingParams::default(),
            has_own_sampling: false,
            agent: agents[0].name.clone(),
            limits: agents[0].limits,
            roster: Arc::new(Roster::new(agents)),
            teacher: None,
        }
    }

    /// Returns the attempt's own agent.
    ///
    /// # Errors
    /// Returns a message if the roster lacks the agent.
    pub fn find_own_agent(&self) -> Result<&Agent, String> {
        let known =
            || self.roster.agents().iter().map(|agent| agent.name.as_str()).collect::<Vec<_>>();
        let missing = || {
            format!("there is no agent {:?}; available agents: {}", self.agent, known().join(", "))
        };
        self.roster.find(&self.agent).ok_or_else(missing)
    }

    /// Returns the player of an agent in this attempt. In an evaluation, a trained policy plays the
    /// agent of the task if its mixture has one, because an evaluation measures trained policies.
    /// Other agents have the same players as in training.
    ///
    /// # Errors
    /// Returns a message if the mixture has no policy at the selected index.
    pub fn select_player<'a>(&self, agent: &'a Agent) -> Result<&'a Player, String> {
        self.select_player_for_role(agent, &agent.name)
    }

    /// Returns the policy that plays an agent under the recorded name `role`. A policy is picked
    /// for each seat of the agent independently, unless the agent's mixture picks one policy for
    /// all seats.
    ///
    /// # Errors
    /// Returns a message if the mixture has no policy at the selected index.
    pub(crate) fn select_player_for_role<'a>(
        &self,
        agent: &'a Agent,
        role: &str,
    ) -> Result<&'a Player, String> {
        let stream = match agent.mixture {
            MixtureScope::Attempt => self.stream,
            MixtureScope::Group => self.group_stream,
        };
        let role = match agent.mixture_seats {
            MixtureSeats::Each => role,
            MixtureSeats::Together => &agent.name,
        };
        let picked = agent.picker.as_ref().map_or(0, |pick| pick(self.seed, stream, role));
        let is_measured = self.is_evaluation && agent.name == self.agent;
        let trained: Vec<&Player> =
            agent.players.iter().filter(|player| player.is_trained).collect();
        let player = match agent.players.get(picked) {
            Some(player) if is_measured && !player.is_trained && !trained.is_empty() => {
                Some(trained[picked % trained.len()])
            }
            player => player,
        };
        player.ok_or_else(|| {
            format!("the mixture of the agent {:?} has no policy at index {picked}", agent.name)
        })
    }

    /// Returns the limits of an agent. In an evaluation, the attempt's own agent has the limits of
    /// the attempt instead of its limits in training.
    pub(crate) fn agent_limits<'a>(&'a self, agent: &'a Agent) -> &'a AttemptLimits {
        if agent.name == self.agent { &self.limits } else { &agent.limits }
    }

    /// Returns the sampling parameters of an agent, without its maximum number of tokens.
    pub(crate) fn agent_sampling_params(&self, agent: &Agent) -> SamplingParams {
        if self.has_own_sampling {
            (agent.samples)(self.params.clone())
        } else {
            self.params.clone()
        }
    }

    /// Returns the attempt's data that the tools of an agent receive. `deadline` is the time left
    /// for the attempt.
    pub(crate) fn create_tool_context(&self, agent: &Agent, deadline: Duration) -> ToolContext {
        ToolContext {
            attempt: self.name.clone(),
            task: self.task.clone(),
            seed: self.seed,
            stream: self.stream,
            deadline,
            params: self.agent_sampling_params(agent),
        }
    }

    /// Creates the recorder of a tool loop, which records at most `max_tokens` sampled tokens.
    pub(crate) fn create_recorder(&self, max_tokens: usize) -> Arc<Recorder> {
        Recorder::new(RecorderOptions {
            name: self.name.clone(),
            seed: self.seed,
            stream: self.stream,
            max_calls: u32::MAX,
            max_tokens,
            grace: Duration::ZERO,
            tool_call_ids: ToolCallIds::FromTurn,
            prompt_recording: PromptRecording::BeforeSampling,
            metrics: Arc::default(),
        })
    }
}

#[cfg(test)]
#[path = "cast_tests.rs"]
mod tests;
