//! The built-in agent loop: a model and its tools take turns on one task.
//!
//! Guarantees: every token the model saw or drew is in the trajectory, exactly as it was
//! (`levade-conversation` says how); a reply that is cut by a deadline is in it as far as it came. Every
//! wait has a deadline that says what was waited for; time in which the sampler's device trained does not
//! count. Tool sessions are closed on every way out. An attempt never fails the ones beside it: what breaks
//! is in its [`Outcome`]. Nothing that a model writes breaks an attempt: where its template would print the
//! past otherwise than it was recorded, that is counted, and the conversation forks where the chat asks for
//! it.
//!
//! Not here: rewards, and who decides which tasks are tried.

mod fitting;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use levade_conversation::{Conversation, ConversationError, Format, Prepared, Reply};
use levade_policy::{
    CallStreams, Completion, FinishReason, PolicyError, SampleRequest, Sampler, SamplingParams, crash_point,
    within,
};
use levade_text::{ContentPart, Message, ToolSpec};
use levade_tree::{CallCounts, Finish, Outcome, Trajectory, TreeError};
use serde::{Deserialize, Serialize};
use tracing::{Instrument, debug, debug_span};

use self::fitting::{Draws, Prompted};
use crate::context::{ContextPolicy, Summariser};
use crate::joined::{finite, join};
use crate::tasks::Task;
use crate::tools::{
    Branch, COUNTED, Observation, ObservationKind, OpenTools, ToolContext, ToolError, ToolSet,
};

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

/// Way to shorten a prompt that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// The attempt breaks.
    #[default]
    Refuse,
    /// Leaves out the beginning, instructions first.
    Left,
    /// Leaves out the end, with the header of the reply.
    Right,
    /// Leaves out the middle.
    Middle,
}

impl Truncation {
    /// A prompt of at most `most` tokens; `None` where that is refused.
    fn cut(self, mut prompt: Vec<u32>, most: usize) -> Option<Vec<u32>> {
        let over = prompt.len().saturating_sub(most);
        let start = match self {
            _ if over == 0 => 0,
            Truncation::Refuse => return None,
            Truncation::Left => 0,
            Truncation::Right => most,
            Truncation::Middle => most / 2,
        };
        prompt.drain(start..start + over);
        Some(prompt)
    }
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

/// An attempt that was made.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// Every token.
    pub trajectory: Trajectory,
    /// How it ended.
    pub outcome: Outcome,
}

impl Attempt {
    /// One of which there is nothing, because something broke.
    pub fn broken(source: &str, why: impl Into<String>) -> Self {
        let why = why.into();
        let mut outcome = Outcome { error: Some(why.clone()), ..Outcome::begun() };
        outcome.trouble(source, why);
        Attempt { trajectory: Trajectory::new(), outcome }
    }
}

/// Reasons for an attempt to break.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("{0}")]
    Policy(#[from] PolicyError),
    #[error("{0}")]
    Conversation(#[from] ConversationError),
    #[error("{0}")]
    Tool(#[from] ToolError),
    #[error("{0}")]
    Outage(String),
    #[error("the agent {agent} broke: {why}")]
    Helper { agent: String, why: String },
    #[error("{0}")]
    Tree(#[from] TreeError),
    #[error(
        "the prompt has {found} tokens, more than the {most} of agent.max_prompt_tokens; allow more, or set agent.truncation"
    )]
    Prompt { found: usize, most: usize },
    #[error(
        "the prompt has {found} tokens, more than the {most} of agent.max_context_tokens; allow more, or set agent.truncation"
    )]
    Budget { found: usize, most: usize },
}

impl Broken {
    /// Where it happened.
    fn place(&self) -> &'static str {
        match self {
            Broken::Policy(_) => "sampler",
            Broken::Conversation(_) => "chat template",
            Broken::Tool(_) | Broken::Outage(_) => "tools",
            Broken::Helper { .. } => "agents",
            Broken::Tree(_) => "record",
            Broken::Prompt { .. } | Broken::Budget { .. } => "prompt",
        }
    }
}

impl Agent {
    /// Makes one attempt. It never fails: what breaks is in the outcome, with everything recorded up to
    /// there.
    pub async fn run(&self, request: AttemptRequest) -> Attempt {
        let mut run = Run {
            agent: self,
            specs: Vec::new(),
            conversation: Conversation::new(),
            drawing: None,
            outcome: Outcome::begun(),
            helped: CallCounts::default(),
        };
        let span = debug_span!("attempt", id = %request.id);
        let result = run.open_and_loop(request).instrument(span.clone()).await;
        let Run { conversation, mut outcome, .. } = run;
        let trajectory = finished(conversation, &mut outcome).await;
        match result {
            Ok(finish) => outcome.finish = finish,
            Err(error) => {
                outcome.trouble(error.place(), error.to_string());
                outcome.error = Some(error.to_string());
            }
        }
        let Outcome { turns, sampled_tokens, finish, error, .. } = &outcome;
        span.in_scope(|| debug!(turns, sampled_tokens, ?finish, error, "attempt ended"));
        Attempt { trajectory, outcome }
    }
}

/// An attempt being made.
struct Run<'a> {
    agent: &'a Agent,
    specs: Vec<ToolSpec>,
    conversation: Conversation,
    /// The reply that is being drawn, as far as it has come.
    drawing: Option<Drawing>,
    outcome: Outcome,
    /// Calls of tools of agents that helped.
    helped: CallCounts,
}

/// A reply, the prompt that it answers, and how it is drawn.
struct Drawing {
    prepared: Prepared,
    completion: Completion,
    params: SamplingParams,
    /// Whether it is a turn of the agent, and not a summary.
    turn: bool,
}

/// Looks for drift once more, away from the async workers: a template may take seconds until one of its
/// bounds stops it.
async fn finished(conversation: Conversation, outcome: &mut Outcome) -> Trajectory {
    let shared = Arc::new(Mutex::new(conversation));
    let lent = Arc::clone(&shared);
    let done =
        tokio::task::spawn_blocking(move || lent.lock().unwrap_or_else(PoisonError::into_inner).finish());
    let drift = done.await;
    let mut conversation = shared.lock().unwrap_or_else(PoisonError::into_inner);
    let of_helpers = std::mem::take(&mut outcome.drift);
    outcome.drift = match drift {
        Ok(drift) => drift,
        Err(error) => {
            outcome.trouble("chat template", format!("comparing the conversation came to no end: {error}"));
            conversation.drift()
        }
    };
    outcome.drift.extend(of_helpers);
    std::mem::take(&mut *conversation).into_trajectory()
}

impl Run<'_> {
    async fn open_and_loop(&mut self, request: AttemptRequest) -> Result<Finish, Broken> {
        debug!(messages = request.messages.len(), "attempt begun");
        let (sampler, longest) = (self.agent.sampler.clone(), self.agent.limits.attempt);
        let AttemptRequest { id, task, seed, stream, .. } = &request;
        let (attempt, task, seed, stream) = (id.clone(), task.clone(), *seed, *stream);
        let params = request.params.clone();
        let context = ToolContext { attempt, task, seed, stream, deadline: longest, params };
        let mut tools = self.agent.tools.open(&context).await?;
        self.specs = tools.specs().to_vec();
        let result = within(&*sampler, longest, self.turns(request, &mut tools)).await;
        let result = result.unwrap_or_else(|| {
            self.outcome.trouble("attempt", format!("was not done within {longest:?}"));
            Ok(Finish::Deadline)
        });
        // What was drawn of a reply that did not come to its end was drawn all the same.
        let cut = self.drawing.take().filter(|cut| !cut.completion.tokens.is_empty());
        let kept = cut.map_or(Ok(()), |cut| self.keep(cut).map(|_| ()));
        self.outcome.calls = tools.counts().and(&self.helped);
        let (evidence, missing) = tools.evidence().await;
        self.outcome.evidence = evidence;
        for error in missing {
            self.outcome.trouble("tools", error.to_string());
        }
        if let Err(error) = tools.close().await {
            // The attempt itself is as good as it was; what broke it matters more than what broke after.
            self.outcome.trouble("tools", error.to_string());
            self.outcome.error = Some(error.to_string());
        }
        kept?;
        result
    }

    async fn turns(&mut self, request: AttemptRequest, tools: &mut OpenTools) -> Result<Finish, Broken> {
        let Agent { format, limits, context, .. } = self.agent;
        let mut history = request.messages.clone();
        if let (Some(opening), Some(last)) = (tools.opening(), history.last_mut()) {
            let parts = match last.content.parts() {
                Some(parts) => parts.to_vec(),
                None => vec![ContentPart::Text(last.content.as_str().to_owned())],
            };
            let opening = ContentPart::Text(format!("\n\n{opening}"));
            last.content = parts.into_iter().chain([opening]).collect();
        }
        // No turn is drawn with older weights than the one before, whichever sampler draws it.
        let mut least_version = 0;
        let mut streams = CallStreams::new(request.stream);
        loop {
            let turn = self.outcome.turns;
            let draws = Draws::new(&request, &mut streams, least_version);
            let mut prepared = match self.fitted(&history, draws).await? {
                Prompted::Fits(prepared) => *prepared,
                Prompted::TooLong(_) if turn > 0 => return Ok(Finish::Context),
                Prompted::TooLong(prepared) => *prepared,
            };
            if turn == 0 {
                let (found, most) = (prepared.prompt.len(), limits.prompt);
                let opening = limits.truncation.cut(prepared.prompt.clone(), most);
                prepared.shorten(opening.ok_or(Broken::Prompt { found, most })?);
                self.outcome.prompt_cut = prepared.prompt.len() < found;
                let (found, most) = (prepared.prompt.len(), context.budget.most);
                if found > most {
                    return Err(Broken::Budget { found, most });
                }
            }
            self.conversation.give(&mut prepared)?;
            let params = SamplingParams {
                max_tokens: limits.tokens - self.outcome.sampled_tokens,
                stop_ids: format.chat().stop_ids().to_vec(),
                ..request.params.clone()
            };
            let prompt = prepared.prompt.clone();
            let (seed, stream) = (request.seed, streams.admit(&self.agent.name, &prompt));
            let (id, policy) = (format!("{}/{turn}", request.id), self.agent.policy.clone());
            let asked = SampleRequest { id, policy, least_version, seed, stream, prompt, params };
            let drawn = match self.reply(&*self.agent.sampler, asked, prepared, true).await {
                // The task fitted, but what the tools said no longer does.
                Err(PolicyError::PromptTooLong { .. }) if turn > 0 => return Ok(Finish::Context),
                drawn => drawn?,
            };
            least_version = drawn.completion.versions.last().map_or(least_version, |run| run.version);
            let reply = self.keep(drawn)?;
            let (finish, parsed, turn) = (reply.finish, &reply.parsed, reply.turn);
            match finish {
                FinishReason::StopId | FinishReason::StopString => {}
                FinishReason::Length => return Ok(Finish::MaxTokens),
                FinishReason::Context => return Ok(Finish::Context),
                FinishReason::Aborted => return Err(PolicyError::Stopped("the sampler".into()).into()),
            }

            if parsed.calls.is_empty() {
                self.outcome.final_text.clone_from(&parsed.content);
                self.outcome.thought.clone_from(&reply.thought);
                return Ok(Finish::Answered);
            }
            let last = self.outcome.turns >= limits.turns;
            let before = tools.counts();
            // Nobody would read the answers of the last turn.
            let mut answers = tools.answer(parsed, !last).await;
            self.adopt(&mut answers)?;
            self.outcome.calls_by_turn.push((turn, tools.counts().since(&before)));
            let learnt = learn_from(&mut self.outcome, turn, &answers);
            if let Some(answer) = learnt.map_err(Broken::Outage)? {
                self.outcome.final_text = answer;
                return Ok(Finish::Ended);
            }
            let observations: Vec<Message> = answers.iter().map(Observation::message).collect();
            if last {
                return Ok(Finish::MaxTurns);
            }
            if self.outcome.sampled_tokens >= limits.tokens {
                return Ok(Finish::MaxTokens);
            }
            history.push(reply.written());
            history.extend(observations);
        }
    }

    /// Draws a reply, which is a turn of the agent or none. Where this fails, or is given up, what was drawn
    /// is in `self.drawing`.
    async fn reply(
        &mut self,
        sampler: &dyn Sampler,
        request: SampleRequest,
        prepared: Prepared,
        turn: bool,
    ) -> Result<Drawing, PolicyError> {
        let deadline = self.agent.limits.reply;
        let late = |what: &str| PolicyError::Deadline(deadline, what.into());
        let params = request.params.clone();
        let accepted = within(sampler, deadline, sampler.sample(request)).await;
        let mut stream = accepted.ok_or_else(|| late("the sampler to accept a request"))??;
        crash_point("sampling");
        let completion = Completion::default();
        let drawing = self.drawing.insert(Drawing { prepared, params, completion, turn });
        let gathered = within(sampler, deadline, stream.gather(&mut drawing.completion)).await;
        gathered.ok_or_else(|| late("a reply from the sampler"))??;
        self.drawing.take().ok_or(PolicyError::Stopped("the sampler".into()))
    }

    /// Takes the conversations of agents that helped into the record.
    fn adopt(&mut self, answers: &mut [Observation]) -> Result<(), Broken> {
        let mut broken = None;
        for Branch { agent, trajectory, outcome } in answers.iter_mut().flat_map(|one| one.branches.drain(..))
        {
            let first = self.conversation.adopt(&trajectory)?;
            let error = outcome.error.clone();
            join(&mut self.outcome, &mut self.helped, first, outcome);
            broken = broken.or(error.map(|why| Broken::Helper { agent, why }));
        }
        broken.map_or(Ok(()), Err)
    }

    /// Records what was drawn.
    fn keep(&mut self, drawn: Drawing) -> Result<Reply, TreeError> {
        let Drawing { prepared, completion, params, turn: is_turn } = drawn;
        if is_turn {
            self.outcome.turns += 1;
            self.outcome.sampled_tokens += completion.tokens.len();
        }
        let turn = self.outcome.turns.saturating_sub(1);
        debug!(turn, is_turn, sampled = completion.tokens.len(), finish = ?completion.finish, "reply");
        self.conversation.record(prepared, completion, &params)
    }
}

/// Notes what calls brought besides their observations. Returns the final answer of the first that ended
/// the attempt.
///
/// # Errors
/// When a tool did not work after which the attempt is not to go on: which, and why.
pub(crate) fn learn_from(
    outcome: &mut Outcome,
    turn: u32,
    answers: &[Observation],
) -> Result<Option<String>, String> {
    for Observation { call, toolbox, kind, trouble, metrics, .. } in answers {
        if let (Some(call), Some(trouble)) = (call, trouble) {
            outcome.trouble(format!("tool {}", call.name), trouble.as_str());
        }
        let Some(toolbox) = toolbox else { continue };
        let failed = f64::from(u8::from(*kind != ObservationKind::Ok));
        let counted = COUNTED.into_iter().zip([1.0, failed]);
        let measured = metrics.iter().map(|(name, value)| (name.as_str(), *value));
        for (name, value) in counted.chain(measured) {
            let sum = outcome.tool_metrics.entry(format!("{toolbox}/{name}")).or_default();
            *sum = finite(*sum + value);
        }
    }
    if answers.iter().any(|answer| answer.reward.is_some()) {
        let reward = answers.iter().filter_map(|answer| answer.reward).sum();
        outcome.earned_by_turn.push((turn, finite(reward)));
    }
    if let Some(Observation { toolbox, text, .. }) = answers.iter().find(|answer| answer.breaks) {
        return Err(format!("the tool {} does not work: {text}", toolbox.as_deref().unwrap_or_default()));
    }
    Ok(answers.iter().find_map(|answer| answer.ends.clone()))
}

#[cfg(test)]
#[path = "attempt_tests.rs"]
mod tests;
