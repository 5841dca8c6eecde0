//! Tool loop: a model and its tools act in turn until the model has an answer or a limit is
//! reached.

use levade_call::{ApiError, Cast, End, ErrorKind, Event, Input, OpeningLimit, Request, Token};
use levade_policy::{FinishReason, PolicyError};
use levade_text::{ContentPart, Message, ParsedCompletion, ToolSpec};
use levade_tools::{Branch, COMMON_METRICS, Observation, ObservationKind, OpenTools, ToolError};
use levade_tree::{CallCounts, Finish, Outcome, TimedPart, TreeError};
use tracing::debug;

use crate::merge_outcome::{clamp_finite, merge_outcome};
use crate::roster::Player;
use crate::user::{UserResponse, UserSession};

/// Reason why the tool loop of an attempt failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolLoopError {
    #[error("{0}")]
    Call(#[from] ApiError),
    #[error("{0}")]
    Tool(#[from] ToolError),
    #[error("{0}")]
    Outage(String),
    #[error("{0}")]
    User(String),
    #[error("the agent {agent} failed: {why}")]
    Helper { agent: String, why: String },
    #[error("{0}")]
    Tree(#[from] TreeError),
}

impl ToolLoopError {
    /// Returns the name of the component that failed: `prompt`, `sampler`, `tools` or another
    /// component of the attempt.
    pub fn failed_component(&self) -> &'static str {
        match self {
            ToolLoopError::Call(ApiError { kind: ErrorKind::TooLong, .. }) => "prompt",
            ToolLoopError::Call(error) if error.param.as_deref() == Some("messages") => {
                "chat template"
            }
            ToolLoopError::Call(_) => "sampler",
            ToolLoopError::Tool(_) | ToolLoopError::Outage(_) => "tools",
            ToolLoopError::User(_) => "user",
            ToolLoopError::Helper { .. } => "agents",
            ToolLoopError::Tree(_) => "record",
        }
    }
}

/// Observer of a tool loop. Programs that display the loop live implement this trait.
pub trait LoopObserver: Send {
    /// Notifies the observer that a completion starts. `opens_reasoning` is whether the prompt of
    /// the completion already starts its reasoning.
    fn completion_started(&mut self, opens_reasoning: bool);

    /// Notifies the observer of new sampled tokens.
    fn tokens_sampled(&mut self, tokens: &[Token]);

    /// Notifies the observer that the completion has ended.
    fn completion_ended(&mut self);

    /// Notifies the observer of the results of the completion's tool calls.
    fn tools_returned(&mut self, results: &[Observation]);
}

/// Limits of a tool loop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToolLoopLimits {
    /// Maximum number of completions in the loop.
    pub max_turns: u32,
    /// Limit for the opening prompt of the conversation.
    pub opening: OpeningLimit,
}

/// Tool loop of one agent.
pub(crate) struct ToolLoop<'a, 'b> {
    /// Name of the agent.
    pub agent: &'a str,
    pub cast: &'a Cast,
    /// Specifications of the tools in the prompt. They do not change during a conversation.
    pub specs: &'a [ToolSpec],
    pub limits: ToolLoopLimits,
    /// Outcome of the attempt so far.
    pub outcome: &'a mut Outcome,
    /// Number of tool calls that helpers of the agent have made.
    pub helped: &'a mut CallCounts,
    pub observer: Option<&'a mut dyn LoopObserver>,
    /// User who answers completions without a tool call, and the player of the agent.
    pub user: Option<(&'a mut UserSession<'b>, &'a Player)>,
}

impl ToolLoop<'_, '_> {
    /// Runs the tool loop, and appends its messages to `history`, including the last completion.
    ///
    /// # Errors
    /// Returns an error if a model call or a helper fails, or if a tool fails without which the
    /// attempt cannot continue.
    pub async fn run(
        &mut self,
        history: &mut Vec<Message>,
        tools: &mut OpenTools,
    ) -> Result<Finish, ToolLoopError> {
        for index in 0.. {
            let end = match self.request_completion(history, index == 0).await {
                // The task fits into the context, but the tool results no longer do.
                Err(error) if index > 0 && error.kind == ErrorKind::TooLong => {
                    return Ok(Finish::Context);
                }
                called => called?,
            };
            let finish = end.finish;
            let sampled = end.tokens;
            let AssistantTurn { turn, parsed, reasoning, message } = AssistantTurn::new(end, index);
            debug!(turn, sampled, ?finish, "completion sampled");
            history.push(message);
            match finish {
                FinishReason::StopId | FinishReason::StopString => {}
                FinishReason::Length => return Ok(Finish::MaxTokens),
                FinishReason::Context => return Ok(Finish::Context),
                FinishReason::Aborted => {
                    return Err(ApiError::from(PolicyError::Stopped("the sampler".into())).into());
                }
            }
            let is_last = index + 1 >= self.limits.max_turns;
            if parsed.calls.is_empty() {
                (self.outcome.final_text, self.outcome.reasoning) = (parsed.content, reasoning);
                match self.request_user_answer(turn, is_last).await? {
                    UserAnswer::Message(text) => history.push(Message::user(text)),
                    UserAnswer::End(finish) => return Ok(finish),
                }
                continue;
            }
            let before = tools.counts();
            // No call would read the results of the last turn.
            let mut results = tools.execute_calls(&parsed, !is_last).await;
            self.merge_helpers(&mut results)?;
            if let Some(observer) = &mut self.observer {
                observer.tools_returned(&results);
            }
            self.outcome.calls_by_turn.push((turn, tools.counts().subtract(&before)));
            add_timings(self.outcome, turn, &parsed, &results);
            let learned = apply_results(self.outcome, turn, &results);
            if let Some(final_answer) = learned.map_err(ToolLoopError::Outage)? {
                self.outcome.final_text = final_answer;
                return Ok(Finish::Ended);
            }
            if is_last {
                return Ok(Finish::MaxTurns);
            }
            if self.cast.recorder().remaining_tokens() == 0 {
                return Ok(Finish::MaxTokens);
            }
            history.extend(results.iter().map(Observation::message));
        }
        Ok(Finish::MaxTurns)
    }

    /// Returns the user's answer to the text of the agent's completion, or the end of the attempt.
    /// `is_last` is whether the agent has reached its maximum number of completions.
    async fn request_user_answer(
        &mut self,
        turn: u32,
        is_last: bool,
    ) -> Result<UserAnswer, ToolLoopError> {
        let Some((user, player)) = &mut self.user else {
            return Ok(UserAnswer::End(Finish::Answered));
        };
        let responded = user.respond_to(&self.outcome.final_text, player).await;
        let (response, score) = responded.map_err(ToolLoopError::User)?;
        if let Some(score) = score {
            self.outcome.rewards_by_turn.push((turn, score));
        }
        Ok(match response {
            UserResponse::End => UserAnswer::End(Finish::Ended),
            UserResponse::MaxTurns => UserAnswer::End(Finish::MaxTurns),
            UserResponse::Message(_) if is_last => UserAnswer::End(Finish::MaxTurns),
            UserResponse::Message(_) if self.cast.recorder().remaining_tokens() == 0 => {
                UserAnswer::End(Finish::MaxTokens)
            }
            UserResponse::Message(text) => UserAnswer::Message(text),
        })
    }

    /// Requests the agent's next completion.
    async fn request_completion(
        &mut self,
        history: &[Message],
        is_first: bool,
    ) -> Result<End, ApiError> {
        let request = Request {
            tools: self.specs.to_vec(),
            opening: is_first.then_some(self.limits.opening),
            ..Request::new(Input::Messages(history.to_vec()))
        };
        let reader = self.cast.call(self.agent, request).await?;
        let head = reader.head();
        self.outcome.prompt_truncated |= head.is_truncated;
        let Some(observer) = &mut self.observer else { return reader.completion().await };
        observer.completion_started(head.opens_reasoning);
        let tokens = |event: &Event| {
            if let Event::Delta { tokens, .. } = event {
                observer.tokens_sampled(tokens);
            }
        };
        let completed = reader.completion_with(tokens).await;
        observer.completion_ended();
        completed
    }

    /// Adds the conversations of helpers to the recorded conversation of the attempt.
    fn merge_helpers(&mut self, results: &mut [Observation]) -> Result<(), ToolLoopError> {
        let mut broken = None;
        for Branch { agent, trajectory, outcome } in
            results.iter_mut().flat_map(|observation| observation.branches.drain(..))
        {
            let first = self.cast.recorder().append_trajectory(&trajectory)?;
            let error = outcome.error.clone();
            merge_outcome(self.outcome, self.helped, first, outcome);
            broken = broken.or(error.map(|why| ToolLoopError::Helper { agent, why }));
        }
        broken.map_or(Ok(()), Err)
    }
}

/// Answer to a completion without a tool call.
enum UserAnswer {
    /// The simulated user has sent a message, and the agent continues.
    Message(String),
    /// The attempt has ended with this finish.
    End(Finish),
}

/// Appends the opening text of the tools to the last message of the history.
pub(crate) fn add_opening(history: &mut [Message], opening: Option<String>) {
    let (Some(opening), Some(last)) = (opening, history.last_mut()) else { return };
    let parts = match last.content.parts() {
        Some(parts) => parts.to_vec(),
        None => vec![ContentPart::Text(last.content.as_str().to_owned())],
    };
    let opening = ContentPart::Text(format!("\n\n{opening}"));
    last.content = parts.into_iter().chain([opening]).collect();
}

/// Turn of the model, whose completion has ended.
struct AssistantTurn {
    /// Index of the turn in the recorded conversation. If the completion is not recorded as tokens,
    /// this index is the number of earlier turns.
    turn: u32,
    parsed: ParsedCompletion,
    reasoning: String,
    /// Message that is added to the history, with the text exactly as the model wrote it.
    message: Message,
}

impl AssistantTurn {
    fn new(end: End, index: u32) -> Self {
        let End { message, recorded_completion, .. } = end;
        match recorded_completion {
            Some(recorded_completion) => AssistantTurn {
                turn: recorded_completion.turn,
                message: recorded_completion.raw_message(),
                parsed: recorded_completion.parsed,
                reasoning: recorded_completion.reasoning,
            },
            None => {
                let calls = message.tool_calls.iter().cloned().map(Ok).collect();
                let parsed = ParsedCompletion {
                    content: message.content.as_str().to_owned(),
                    calls,
                    bare: false,
                };
                let reasoning = message.reasoning_content.clone().unwrap_or_default();
                AssistantTurn { turn: index, parsed, reasoning, message }
            }
        }
    }
}

/// Adds the times of tool calls to the outcome. Skipped calls have no result, so they have no
/// times.
fn add_timings(
    outcome: &mut Outcome,
    turn: u32,
    completion: &ParsedCompletion,
    results: &[Observation],
) {
    let mut results = results.iter().peekable();
    for (index, call) in (0..).zip(&completion.calls) {
        let Some(result) = results.next_if(|result| result.call.as_ref() == call.as_ref().ok())
        else {
            continue;
        };
        if let Some(interval) = result.interval {
            let result = result.kind.name().to_owned();
            outcome.timings.add(TimedPart::Tool { turn, index, result }, interval);
        }
    }
}

/// Adds failures, metrics and rewards of tool calls to the outcome. Returns the final answer of the
/// first call that ended the attempt, or `None` if no call ended the attempt.
///
/// # Errors
/// Returns a message that names the tool and its failure if a tool failed without which the attempt
/// cannot continue.
pub(crate) fn apply_results(
    outcome: &mut Outcome,
    turn: u32,
    observations: &[Observation],
) -> Result<Option<String>, String> {
    for Observation { call, toolbox, kind, failure, metrics, .. } in observations {
        if let (Some(call), Some(failure)) = (call, failure) {
            outcome.add_warning(format!("tool {}", call.name), failure.as_str());
        }
        let Some(toolbox) = toolbox else { continue };
        let failed = f64::from(u8::from(*kind != ObservationKind::Ok));
        let counted = COMMON_METRICS.into_iter().zip([1.0, failed]);
        let measured = metrics.iter().map(|(name, value)| (name.as_str(), *value));
        for (name, value) in counted.chain(measured) {
            let sum = outcome.tool_metrics.entry(format!("{toolbox}/{name}")).or_default();
            *sum = clamp_finite(*sum + value);
        }
    }
    if observations.iter().any(|observation| observation.reward.is_some()) {
        let reward = observations.iter().filter_map(|observation| observation.reward).sum();
        outcome.rewards_by_turn.push((turn, clamp_finite(reward)));
    }
    if let Some(Observation { toolbox, text, .. }) =
        observations.iter().find(|observation| observation.breaks)
    {
        return Err(format!(
            "the tool {} failed, and the attempt cannot continue without it: {text}",
            toolbox.as_deref().unwrap_or_default()
        ));
    }
    Ok(observations.iter().find_map(|observation| observation.ends.clone()))
}
