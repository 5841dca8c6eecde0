//! Relays calls to chat APIs, and records them as messages.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use levade_policy::{FinishReason, IntervalTimer, process_time};
use levade_text::{CompletionDelta, Message, ToolSpec};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::api_error::{ApiError, ErrorKind};
use crate::chat_api::{ChatApi, ChatCompletion, ChatDelta, ChatQuery};
use crate::external::ExternalCall;
use crate::metrics::add;
use crate::options::CallOptions;
use crate::party::Party;
use crate::recorder::{CallGuard, CallRecord, Recorder};
use crate::request::{Input, Request};
use crate::transcript::{End, Event, Head, Reader, Transcript, message_parts};

/// A call in flight that is relayed to a chat API.
struct RelayedCall {
    recorder: Arc<Recorder>,
    party: Arc<Party>,
    transcript: Arc<Transcript>,
    messages: Vec<Message>,
    tools: Vec<ToolSpec>,
    /// Assistant message, as far as it has arrived.
    message: Message,
    /// Timeout for the complete response.
    timeout: Duration,
    timer: IntervalTimer,
    /// Whether the call counts toward the limits of the attempt. Summaries do not.
    is_counted: bool,
    /// Guards of the call, which are held until the call has ended.
    _guards: (CallGuard, CallOptions),
}

/// Starts a call that a chat API answers, and waits for the first event of its completion.
///
/// # Errors
/// Returns an error if the request cannot be relayed, or if the API rejects it.
pub(crate) async fn start(
    recorder: &Arc<Recorder>,
    party: &Arc<Party>,
    api: &dyn ChatApi,
    request: Request,
    options: CallOptions,
    is_counted: bool,
) -> Result<Reader, ApiError> {
    let timer = IntervalTimer::start();
    let Request { input, tools, tool_choice, parallel_calls, constraint, sampling, n, .. } =
        request;
    let Input::Messages(messages) = input else {
        return Err(party
            .tokens()
            .err()
            .unwrap_or_else(|| ApiError::field("prompt", "send messages instead of a prompt")));
    };
    if messages.is_empty() {
        return Err(ApiError::field(
            "messages",
            "messages is empty, but must have at least one message",
        ));
    }
    if n != 1 {
        let message = format!(
            "n = {n}, but must be 1, because the model {:?} returns one completion per call",
            party.model
        );
        return Err(ApiError::field("n", message));
    }
    let guard = recorder.admit(is_counted)?;
    let timeout = party.limits.timeout;
    let query = ChatQuery {
        messages: messages.clone(),
        tools: tools.clone(),
        tool_choice,
        parallel_calls,
        constraint,
        sampling,
        timeout,
    };
    let mut deltas = api.respond(query);
    let first = process_time::with_timeout(timeout, deltas.recv())
        .await
        .ok_or_else(|| timeout_error(party))?;
    let first = first.ok_or_else(|| interrupted_error(party))??;

    let metrics = &recorder.options.metrics;
    add(&metrics.calls, 1);
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let transcript = Transcript::new(Head {
        id: metrics.next_id(),
        model: party.model.clone(),
        created,
        prompt: Vec::new(),
        opens_reasoning: false,
        is_truncated: false,
        origin: None,
        n,
    });
    let reader = transcript.read();
    let relay = RelayedCall {
        recorder: Arc::clone(recorder),
        party: Arc::clone(party),
        transcript,
        messages,
        tools,
        message: Message::assistant(""),
        timeout,
        timer,
        is_counted,
        _guards: (guard, options),
    };
    tokio::spawn(relay.run(first, deltas));
    Ok(reader)
}

fn timeout_error(party: &Party) -> ApiError {
    let Party { model, limits, .. } = party;
    ApiError::new(
        ErrorKind::Deadline,
        format!("the completion of {model:?} was not finished within {:?}", limits.timeout),
    )
}

fn interrupted_error(party: &Party) -> ApiError {
    ApiError::new(
        ErrorKind::Unavailable,
        format!("the stream of {:?} stopped before the completion ended", party.model),
    )
}

impl RelayedCall {
    /// Writes the completion to the transcript as it arrives, then records the call.
    async fn run(
        mut self,
        first: ChatDelta,
        mut deltas: UnboundedReceiver<Result<ChatDelta, ApiError>>,
    ) {
        let recorder = Arc::clone(&self.recorder);
        let _ending = self.transcript.end_guard();
        let metrics = &recorder.options.metrics;
        add(&metrics.running, 1);
        metrics.first_token.observe(self.timer.elapsed());
        let remaining = self.timeout.saturating_sub(self.timer.elapsed());
        let ended = process_time::with_timeout(remaining, self.follow(first, &mut deltas)).await;
        drop(deltas);
        let ended = ended.unwrap_or_else(|| Err(timeout_error(&self.party)));
        metrics.running.fetch_sub(1, Ordering::Relaxed);
        metrics.duration.observe(self.timer.elapsed());
        let error = ended.as_ref().err().cloned();
        let completion = ended.unwrap_or_else(|_| self.partial_completion());
        add(&metrics.prompt_tokens, completion.prompt_tokens as u64);
        add(&metrics.sampled_tokens, completion.tokens as u64);
        self.record(&completion, error.as_ref());
        if let Some(error) = error {
            add(&metrics.failed, 1);
            self.transcript.push(Event::Failed(error));
            return;
        }
        let ChatCompletion { message, finish, prompt_tokens, tokens, reasoning_tokens } =
            completion;
        let calls = !message.tool_calls.is_empty();
        if calls {
            let call_deltas =
                message.tool_calls.iter().cloned().map(Ok).map(CompletionDelta::Call).collect();
            self.transcript.push(Event::Delta {
                choice: 0,
                deltas: call_deltas,
                tokens: Vec::new(),
            });
        }
        let text = message.content.as_str().to_owned();
        let parts = message_parts(&message);
        let end = End {
            message,
            parts,
            text,
            recorded_completion: None,
            finish,
            calls,
            stopped_by: None,
            prompt_tokens,
            tokens,
            reasoning_tokens,
        };
        self.transcript.push(Event::Ended { choice: 0, end: Box::new(end) });
        self.transcript.push(Event::Done);
    }

    /// Writes the chat API's events to the transcript until the completion ends or is aborted.
    async fn follow(
        &mut self,
        first: ChatDelta,
        deltas: &mut UnboundedReceiver<Result<ChatDelta, ApiError>>,
    ) -> Result<ChatCompletion, ApiError> {
        let recorder = Arc::clone(&self.recorder);
        let transcript = Arc::clone(&self.transcript);
        let mut abandoned = std::pin::pin!(recorder.wait_until_abandoned(&transcript));
        let mut next = Some(Ok(first));
        loop {
            let delta = match next.ok_or_else(|| interrupted_error(&self.party))?? {
                ChatDelta::Done(completion) => return Ok(*completion),
                ChatDelta::Reasoning(text) => {
                    self.message.reasoning_content.get_or_insert_default().push_str(&text);
                    CompletionDelta::Reasoning(text)
                }
                ChatDelta::Text(text) => {
                    self.message.content =
                        format!("{}{text}", self.message.content.as_str()).into();
                    CompletionDelta::Speech(text)
                }
            };
            self.transcript.push(Event::Delta {
                choice: 0,
                deltas: vec![delta],
                tokens: Vec::new(),
            });
            next = tokio::select! {
                next = deltas.recv() => next,
                () = &mut abandoned => return Ok(self.partial_completion()),
            };
        }
    }

    /// Returns the part of the completion that has arrived, with the finish reason of an aborted
    /// call.
    fn partial_completion(&self) -> ChatCompletion {
        ChatCompletion {
            message: self.message.clone(),
            finish: FinishReason::Aborted,
            prompt_tokens: 0,
            tokens: 0,
            reasoning_tokens: 0,
        }
    }

    fn record(&mut self, completion: &ChatCompletion, error: Option<&ApiError>) {
        let agent = self.party.agent.clone();
        let policy = self.party.policy.clone();
        let error = error.map(ToString::to_string);
        let mut state = self.recorder.state();
        let index = state.recorded.external.len();
        let (after, shared_count) =
            state.histories.note(index, &self.messages, &completion.message);
        let is_known = ExternalCall::tools(&state.recorded.external, index) == self.tools;
        let tools = (!is_known).then(|| std::mem::take(&mut self.tools));
        state.recorded.calls.push(CallRecord {
            agent: agent.clone(),
            model: self.party.model.clone(),
            external: true,
            summary: !self.is_counted,
            probe: false,
            origin: None,
            prompt: completion.prompt_tokens,
            tokens: completion.tokens,
            finish: completion.finish,
            error: error.clone(),
            turn: None,
            content: completion.message.content.as_str().to_owned(),
            calls: completion.message.tool_calls.len(),
            malformed_calls: 0,
            interval: self.timer.interval(),
        });
        state.recorded.external.push(ExternalCall {
            agent,
            policy,
            after,
            shared_messages: shared_count,
            messages: self.messages.split_off(shared_count),
            tools,
            message: completion.message.clone(),
            finish: completion.finish,
            prompt_tokens: completion.prompt_tokens,
            tokens: completion.tokens,
            error,
        });
    }
}
