//! Attempts of the tool loop: a model and its tools take turns on one task.
//!
//! # Guarantees
//! - Every token that the model saw or sampled is in the trajectory. A completion that a timeout interrupts
//!   is in it with the tokens sampled so far.
//! - Every wait has a timeout. Time in which the sampler's device trains does not count.
//! - Tool sessions are closed in any case.
//! - An attempt never fails other attempts: its errors are in its [`Outcome`].
//! - No text of a model breaks an attempt. If the chat template renders recorded history differently, that is
//!   counted, and the conversation forks if the format asks for it.
//!
//! A teacher can answer in place of the trained policy (`taught`). Rewards are out of scope, as is the
//! selection of tasks.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_call::{
    Backend, CallRecord, Cast, ChatApi, OpeningLimit, Party, PartyLimits, PromptRecording, Recorded,
    Recorder, RecorderOptions, SamplingRule, Summarizer, ToolCallIds, Truncation,
};
use levade_conversation::{Budget, Fork, Format, Origin};
use levade_policy::{FinishReason, Sampler, SamplingParams, within};
use levade_text::Message;
use levade_tree::{CallCounts, ContextCut, Finish, Outcome};
use tracing::{Instrument, debug, debug_span};

use crate::context::{ContextPolicy, Summariser, summary_agent};
use crate::taught::{Exchange, Pupil, finished, taught};
use crate::tool_loop::{Broken, LoopLimits, ToolLoop, add_opening};
use crate::{AgentLoop, Attempt, AttemptContext, Teacher};
use levade_tasks::Task;
use levade_tools::{ToolContext, ToolSet};

/// Timeout for calls in flight to end after the loop has ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Model, format and tools that all attempts of a run share.
#[derive(Clone)]
pub struct Agent {
    /// The name that its segments bear.
    pub name: String,
    /// The name of the policy that is sampled from.
    pub policy: String,
    /// Draws the replies.
    pub sampler: Arc<dyn Sampler>,
    /// How conversations with it are written.
    pub format: Arc<Format>,
    /// The tools.
    pub tools: ToolSet,
    /// Where an attempt ends.
    pub limits: Limits,
    /// How prompts that grow too long are kept within the context.
    pub context: ContextPolicy,
    /// Whoever writes summaries, where that is not the agent itself.
    pub summariser: Option<Summariser>,
    /// Teacher that answers in place of the policy. Its completions become demonstrations.
    pub teacher: Option<Teacher>,
}

/// Where an attempt ends if the model does not end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most replies, at least 1.
    pub turns: u32,
    /// Most sampled tokens over all replies, at least 1.
    pub tokens: usize,
    /// Longest wait for one reply, without the time in which the sampler's device trained.
    pub reply: Duration,
    /// Longest time for all of it, counted in the same way.
    pub attempt: Duration,
    /// Most tokens of instructions and task.
    pub prompt: usize,
    /// Way to shorten longer ones.
    pub truncation: Truncation,
}

/// One attempt to make.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptRequest {
    /// A name for tools and logs, unique to this try.
    pub id: String,
    /// The task, for the tools.
    pub task: Task,
    /// The conversation so far: instructions and task.
    pub messages: Vec<Message>,
    /// Seed of the run.
    pub seed: u64,
    /// The attempt's own stream of random numbers, unique in the run.
    pub stream: u64,
    /// How to draw. How long a reply may be, and which tokens end it, the agent itself says.
    pub params: SamplingParams,
}

impl Agent {
    /// Makes one attempt. Errors are in its outcome, with everything recorded before.
    pub async fn run(&self, request: AttemptRequest) -> Attempt {
        let span = debug_span!("attempt", id = %request.id);
        let attempt = self.attempt(request).instrument(span.clone()).await;
        let Outcome { turns, sampled_tokens, finish, error, .. } = &attempt.outcome;
        span.in_scope(|| debug!(turns, sampled_tokens, ?finish, error, "attempt ended"));
        attempt
    }

    async fn attempt(&self, request: AttemptRequest) -> Attempt {
        let teacher = match self.teacher.as_ref().map(|teacher| teacher.of(&request.task)).transpose() {
            Ok(teacher) => teacher,
            Err(why) => return Attempt::broken("teacher", why),
        };
        let recorder = self.recorder(&request.id, request.seed, request.stream, self.limits.tokens);
        let party = Arc::new(self.party(&request.params, teacher));
        let cast = Cast::new([party], Arc::clone(&recorder));
        let mut outcome = Outcome::begun();
        let result = open_and_loop(self, &cast, request, &mut outcome).await;
        let recorded = recorder.close(CLOSE_TIMEOUT).await;
        note_recorded(&mut outcome, &recorded);
        match result {
            Ok(finish) => outcome.finish = finish,
            Err(error) => {
                let source = if self.teacher.is_some() && matches!(error, Broken::Call(_)) {
                    "teacher"
                } else {
                    error.source()
                };
                outcome.trouble(source, error.to_string());
                outcome.error = Some(error.to_string());
            }
        }
        if self.teacher.is_none() {
            return Attempt { trajectory: recorded.trajectory, outcome };
        }
        let (format, agent, policy) = (self.format.clone(), self.name.clone(), self.policy.clone());
        finished(outcome, move || {
            let pupil = Pupil { format: &format, agent: &agent, policy: &policy };
            taught([(pupil, Exchange::of(&recorded.external, &agent))])
        })
        .await
    }

    /// Creates the recorder of an attempt.
    pub(crate) fn recorder(&self, name: &str, seed: u64, stream: u64, max_tokens: usize) -> Arc<Recorder> {
        Recorder::new(RecorderOptions {
            name: name.to_owned(),
            seed,
            stream,
            max_calls: u32::MAX,
            max_tokens,
            grace: Duration::ZERO,
            tool_call_ids: ToolCallIds::FromTurn,
            prompt_recording: PromptRecording::BeforeSampling,
            metrics: Arc::default(),
        })
    }

    /// Returns the limits of the tool loop.
    pub(crate) fn loop_limits(&self) -> LoopLimits {
        let Limits { turns, prompt, truncation, .. } = self.limits;
        LoopLimits { turns, opening: OpeningLimit { max_tokens: prompt, truncation } }
    }

    /// Returns the party that answers the agent's calls: its policy, or a teacher.
    pub(crate) fn party(&self, params: &SamplingParams, teacher: Option<Arc<dyn ChatApi>>) -> Party {
        let backend = match teacher {
            Some(teacher) => Backend::Messages(teacher),
            None => Backend::Tokens(Arc::clone(&self.sampler)),
        };
        let summarizer = self.context.summarises().then(|| Arc::new(self.summarizer(params)));
        let sampling = SamplingParams { max_tokens: self.limits.tokens, ..params.clone() };
        Party {
            agent: self.name.clone(),
            policy: self.policy.clone(),
            model: self.policy.clone(),
            backend,
            format: Some(Arc::clone(&self.format)),
            limits: self.party_limits(),
            sampling: SamplingRule::Fixed(sampling),
            budget: self.context.budget,
            summarizer,
        }
    }

    /// Returns the limits of a call. The sampler itself enforces the length of its context.
    fn party_limits(&self) -> PartyLimits {
        PartyLimits { context: usize::MAX, timeout: self.limits.reply }
    }

    /// Returns the party that summarizes the agent's turns, sampled like the agent itself.
    fn summarizer(&self, params: &SamplingParams) -> Summarizer {
        let summary = &self.context.summary;
        let own = || Summariser {
            agent: summary_agent(&self.name),
            policy: self.policy.clone(),
            sampler: self.sampler.clone(),
            format: self.format.clone(),
        };
        let Summariser { agent, policy, sampler, format } = self.summariser.clone().unwrap_or_else(own);
        let sampling = SamplingParams { max_tokens: summary.tokens, ..params.clone() };
        let party = Party {
            agent,
            model: policy.clone(),
            policy,
            backend: Backend::Tokens(sampler),
            format: Some(format),
            limits: self.party_limits(),
            sampling: SamplingRule::Fixed(sampling),
            budget: Budget::NONE,
            summarizer: None,
        };
        Summarizer {
            party: Arc::new(party),
            max_tokens: summary.tokens,
            instruction: summary.instruction.clone(),
        }
    }
}

#[async_trait]
impl AgentLoop for Agent {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let AttemptContext { name: id, task, messages, seed, stream, params, .. } = context;
        Agent::run(self, AttemptRequest { id, task, messages, seed, stream, params }).await
    }

    fn taught(&self, teacher: &Teacher) -> Option<Arc<dyn AgentLoop>> {
        // Agents that its tools ask would act by their own policies.
        let is_helped = !self.tools.helpers().is_empty();
        (!is_helped).then(|| Arc::new(Agent { teacher: Some(teacher.clone()), ..self.clone() }) as _)
    }
}

/// Adds the recorded calls to the outcome of an attempt.
fn note_recorded(outcome: &mut Outcome, recorded: &Recorded) {
    let calls = recorded.calls.iter().filter(|call| !call.summary);
    let turns = calls.clone().filter(|call| match call.external {
        true => call.error.is_none() && call.finish != FinishReason::Aborted,
        false => call.turn.is_some(),
    });
    outcome.turns = turns.count() as u32;
    outcome.sampled_tokens = calls.filter(|call| !call.external).map(|call| call.tokens).sum();
    outcome.cuts.extend(recorded.calls.iter().filter_map(context_cut));
    outcome.cuts.sort_by_key(|cut| cut.turn);
    if let Some(error) = &recorded.comparison_error {
        outcome.trouble("chat template", error.as_str());
    }
    let of_helpers = std::mem::replace(&mut outcome.drift, recorded.drift.clone());
    outcome.drift.extend(of_helpers);
}

/// Returns the note of a call whose prompt a context policy truncated.
pub(crate) fn context_cut(call: &CallRecord) -> Option<ContextCut> {
    match call.origin {
        Some(Origin::Forked(Fork { reason, .. })) if reason.is_cut() => {
            let (turn, why) = (call.turn.unwrap_or_default(), reason.words().to_owned());
            Some(ContextCut { turn, agent: call.agent.clone(), why })
        }
        _ => None,
    }
}

/// Opens the tools of an attempt, and runs its loop.
async fn open_and_loop(
    agent: &Agent,
    cast: &Cast,
    request: AttemptRequest,
    outcome: &mut Outcome,
) -> Result<Finish, Broken> {
    debug!(messages = request.messages.len(), "attempt begun");
    let longest = agent.limits.attempt;
    let AttemptRequest { id: attempt, task, mut messages, seed, stream, params } = request;
    let context = ToolContext { attempt, task, seed, stream, deadline: longest, params };
    let mut tools = agent.tools.open(&context).await?;
    add_opening(&mut messages, tools.opening());
    let (specs, mut helped) = (tools.specs().to_vec(), CallCounts::default());
    let mut tool_loop = ToolLoop {
        agent: &agent.name,
        cast,
        specs: &specs,
        limits: agent.loop_limits(),
        outcome,
        helped: &mut helped,
        observer: None,
    };
    let result = within(&*agent.sampler, longest, tool_loop.run(&mut messages, &mut tools)).await;
    let result = result.unwrap_or_else(|| {
        outcome.trouble("attempt", format!("was not done within {longest:?}"));
        Ok(Finish::Deadline)
    });
    outcome.calls = tools.counts().and(&helped);
    let (evidence, missing) = tools.evidence().await;
    outcome.evidence = evidence;
    for error in missing {
        outcome.trouble("tools", error.to_string());
    }
    if let Err(error) = tools.close().await {
        // The attempt itself is complete; an error of the loop matters more than one after it.
        outcome.trouble("tools", error.to_string());
        outcome.error = Some(error.to_string());
    }
    result
}

#[cfg(test)]
#[path = "attempt_tests.rs"]
mod tests;
