//! Executes calls of parties with a sampler, from the request to the recorded completion.
//!
//! A call runs in its own task, which writes a [`Transcript`]. A dropped connection therefore does
//! not cancel the call immediately, and sampled tokens are recorded in any case.

mod parts;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::stream::FuturesOrdered;
use futures_util::{FutureExt, StreamExt};
use levade_conversation::{Conversation, Format};
use levade_policy::{
    Completion, FinishReason, Grammar, IntervalTimer, PolicyError, SampleEvent, SampleRequest,
    SampleStream, Sampler, SamplingParams, TopLogprobs, crash_point, with_sampler_timeout,
};
use levade_text::{CompletionDelta, Message, ToolSpec};
use levade_tree::TreeError;

use crate::api_error::{ApiError, ErrorKind};
use crate::completion_parser::{ChatParseOptions, CompletionParser};
use crate::constraints;
use crate::fit::SummarizeFn;
use crate::metrics::add;
use crate::options::{BatchMembership, CallOptions};
use crate::party::{Party, SamplingRule};
use crate::prompt::{Prompt, count_prompt, prompt};
use crate::recorder::{CallGuard, CallRecord, PromptRecording, Recorder, ToolCallIds};
use crate::request::{Input, Request, ToolChoice};
use crate::transcript::{End, Event, Head, Reader, Token, Transcript};
use parts::TokenParts;

/// State that all completions of one call share.
struct Generation {
    recorder: Arc<Recorder>,
    party: Arc<Party>,
    sampler: Arc<dyn Sampler>,
    format: Arc<Format>,
    transcript: Arc<Transcript>,
    tools: Arc<[ToolSpec]>,
    tool_choice: ToolChoice,
    parallel_calls: bool,
    /// Whether completions are constrained to JSON. Tags of reasoning and tool calls are then text.
    is_json: bool,
    /// Whether completions include the stop string that ended them.
    keeps_stop: bool,
    /// The only user message of the request, if the call may be a probe. Otherwise `None`.
    question: Option<String>,
    /// Whether the call counts toward the limits of the attempt. Summaries do not.
    is_counted: bool,
    timer: IntervalTimer,
    batch: Option<BatchMembership>,
    /// Permit to run, which is released when the call ends or when its batch waits for further
    /// calls.
    permit: Mutex<Option<Box<dyn Send + Sync>>>,
    /// Guard that counts the call as in flight until it has ended.
    _guard: CallGuard,
}

/// Sampling request and parameters of one completion of a call.
struct CompletionRequest {
    index: usize,
    prompt: Prompt,
    params: SamplingParams,
    stream: SampleStream,
    /// Prefix of the ids of the completion's tool calls.
    call_prefix: String,
}

/// A completion that was sampled but is not recorded yet.
struct SampledCompletion {
    index: usize,
    prompt: Prompt,
    completion: Completion,
    params: SamplingParams,
    parser: CompletionParser,
    /// Options for parsing the completion as a message. `None` if the completion is plain text.
    parsing: Option<ChatParseOptions>,
    /// Whether the client receives the text of the completion only at its end.
    withholds: bool,
    /// Error that ended the completion early. `None` if the completion did not fail.
    error: Option<ApiError>,
}

/// Starts a call that a party with a sampler answers.
///
/// # Errors
/// Returns the errors of [`call`](crate::call).
pub(crate) async fn start(
    recorder: &Arc<Recorder>,
    party: &Arc<Party>,
    request: Request,
    options: CallOptions,
    is_counted: bool,
    summarize: SummarizeFn<'_>,
) -> Result<Reader, ApiError> {
    let timer = IntervalTimer::start();
    let metrics = &recorder.options.metrics;
    let backend = party.tokens()?;
    let mut params = sampling_params(&request, party, backend.format);
    params.grammar = match party.sampling {
        SamplingRule::Fixed(_) => None,
        SamplingRule::Default(_) => constraints::grammar(metrics, &request, backend.format).await?,
    };
    params.validate()?;

    let guard = recorder.admit(is_counted)?;
    let constrained_by = constraints::format_field(&request);
    let Request { input, tools, tool_choice, parallel_calls, n, sampling, opening, .. } = request;
    let tools: Arc<[ToolSpec]> = tools.into();
    let question = match &input {
        Input::Messages(messages) if is_counted => {
            recorder.state().probes.probe_question(&party.agent, messages, &tools)
        }
        _ => None,
    };
    let rules = (opening, summarize);
    let (mut prompt, is_truncated) = prompt(recorder, party, backend, input, &tools, rules).await?;
    if prompt.opens_reasoning() && params.grammar.is_some() {
        let message = "completions of this model start with reasoning, so an output format \
                       cannot be enforced; leave it out";
        return Err(ApiError::field(constrained_by.unwrap_or("response_format"), message));
    }
    let ids: Arc<[u32]> = prompt.ids().into();
    let context = backend.context;
    if ids.len() >= context {
        return Err(PolicyError::PromptTooLong { prompt: ids.len(), context }.into());
    }
    params.max_tokens = params.max_tokens.min(context - ids.len());
    let (streams, min_version) = {
        let mut state = recorder.state();
        if let (PromptRecording::BeforeSampling, Prompt::Chat(prepared)) =
            (recorder.options.prompt_recording, &mut prompt)
        {
            state.conversation.add_context(prepared).map_err(internal_error)?;
        }
        if is_counted {
            params.max_tokens = params.max_tokens.min(state.remaining_tokens).max(1);
        }
        let streams: Vec<u64> =
            (0..n).map(|_| state.streams.next_stream(&party.agent, &ids)).collect();
        if let Some(fixed) = party.fixed_params().filter(|_| is_counted) {
            for name in sampling.overridden_options(fixed).into_iter().chain(constrained_by) {
                *state.recorded.overridden.entry(name.to_owned()).or_default() += 1;
            }
        }
        (streams, state.versions.get(&party.policy).copied().unwrap_or(0))
    };
    // `min_tokens` is bounded by `max_tokens`, which is only known now.
    params.min_tokens = params.min_tokens.min(params.max_tokens);

    let id = metrics.next_id();
    let timeout = party.limits.timeout;
    let mut requests = Vec::with_capacity(n);
    for (index, stream) in streams.into_iter().enumerate() {
        let request = SampleRequest {
            id: format!("{}/{id}/{index}", recorder.options.name),
            policy: party.policy.clone(),
            min_version,
            seed: recorder.options.seed,
            stream,
            prompt: ids.to_vec(),
            params: params.clone(),
        };
        let accepted =
            with_sampler_timeout(&**backend.sampler, timeout, backend.sampler.sample(request))
                .await;
        let call_prefix = format!("{:08x}", stream as u32);
        let mut prompt = prompt.clone();
        if let (Prompt::Chat(prepared), ToolCallIds::FromStream) =
            (&mut prompt, recorder.options.tool_call_ids)
        {
            prepared.name_calls(&call_prefix);
        }
        let stream = accepted.ok_or_else(|| {
            let message =
                format!("timed out after {timeout:?} waiting for the sampler to accept a request");
            ApiError::new(ErrorKind::Deadline, message)
        })??;
        requests.push(CompletionRequest {
            index,
            prompt,
            params: params.clone(),
            stream,
            call_prefix,
        });
    }
    crash_point("sampling");
    count_prompt(metrics, &prompt);
    let origin = prompt.origin();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let model = party.model.clone();
    let opens_reasoning = prompt.opens_reasoning();
    let head =
        Head { id, model, created, prompt: ids.to_vec(), opens_reasoning, is_truncated, origin, n };
    let transcript = Transcript::new(head);
    let reader = transcript.read();
    let generation = Generation {
        recorder: Arc::clone(recorder),
        party: Arc::clone(party),
        sampler: Arc::clone(backend.sampler),
        format: Arc::clone(backend.format),
        transcript,
        tools,
        tool_choice,
        parallel_calls,
        is_json: matches!(params.grammar, Some(Grammar::JsonObject | Grammar::JsonSchema(_))),
        keeps_stop: sampling.keeps_stop,
        question,
        is_counted,
        timer,
        batch: options.batch,
        permit: Mutex::new(options.permit),
        _guard: guard,
    };
    tokio::spawn(generation.run(requests));
    Ok(reader)
}

/// Returns the sampling parameters of a call. They do not include the limits of its attempt.
fn sampling_params(request: &Request, party: &Party, format: &Format) -> SamplingParams {
    let requested = &request.sampling;
    let (mut params, ignores_eos) = match &party.sampling {
        SamplingRule::Fixed(fixed) => {
            let params = SamplingParams {
                max_tokens: requested.max_tokens.unwrap_or(usize::MAX).min(fixed.max_tokens),
                top_logprobs: requested.logprobs.unwrap_or(0),
                stop_strings: requested.stop.clone(),
                ..fixed.clone()
            };
            (params, false)
        }
        SamplingRule::Default(defaults) => {
            (requested.with_defaults(defaults), requested.ignore_eos)
        }
    };
    if !ignores_eos {
        params.stop_ids = format.chat().stop_ids().to_vec();
    }
    params.stop_ids.extend(&requested.stop_ids);
    params
}

/// Converts an inconsistency of the recorded conversation to an API error. No request can cause an
/// inconsistency.
fn internal_error(error: TreeError) -> ApiError {
    ApiError::new(ErrorKind::Internal, error.to_string())
}

/// Waits until another call of the batch is rejected. Never returns if all calls are accepted, or
/// if there is no batch.
async fn wait_for_rejection(batch: Option<&BatchMembership>) {
    match batch {
        Some(batch) => batch.wait_for_rejection().await,
        None => std::future::pending().await,
    }
}

impl Generation {
    /// Samples all completions of the call.
    async fn run(self, requests: Vec<CompletionRequest>) {
        let metrics = Arc::clone(&self.recorder.options.metrics);
        let _ending = self.transcript.end_guard();
        add(&metrics.running, 1);
        // The completions are sampled concurrently, but recorded in order, so that the record does
        // not depend on which of them ends first.
        let mut sampled: FuturesOrdered<_> =
            requests.into_iter().map(|request| self.sample(request)).collect();
        let mut failed = None;
        while let Some(sampled) = sampled.next().await {
            if let Err(error) = sampled.and_then(|sampled| self.end(sampled)) {
                failed.get_or_insert(error);
            }
        }
        drop(sampled);
        metrics.running.fetch_sub(1, Ordering::Relaxed);
        metrics.duration.observe(self.timer.elapsed());
        match failed {
            None => self.transcript.push(Event::Done),
            Some(error) => {
                add(&metrics.failed, 1);
                self.transcript.push(Event::Failed(error));
            }
        }
    }

    /// Samples one completion until it ends, fails or is aborted.
    ///
    /// # Errors
    /// Returns an error if another call of the batch is rejected. In that case the completion is
    /// not recorded.
    async fn sample(&self, request: CompletionRequest) -> Result<SampledCompletion, ApiError> {
        let CompletionRequest { index, prompt, params, mut stream, call_prefix } = request;
        let chat = self.format.chat();
        let calls_are_text = self.tool_choice == ToolChoice::None || self.tools.is_empty();
        let parsing = ChatParseOptions {
            chat: Arc::clone(chat),
            in_reasoning: prompt.opens_reasoning(),
            tools: Arc::clone(&self.tools),
            calls_are_text,
        };
        let is_chat = matches!(prompt, Prompt::Chat(_)) && !self.is_json;
        let parsing = Some(parsing).filter(|_| is_chat);
        // Only at its end does a completion show whether it is a tool call without tags.
        let withholds = parsing.is_some() && chat.reads_bare_calls() && !calls_are_text;
        let mut parser = match &parsing {
            Some(parsing) => {
                CompletionParser::for_chat(parsing, &params.stop_strings, &call_prefix)
            }
            None => CompletionParser::for_text(chat, &params.stop_strings),
        };
        if !self.parallel_calls {
            parser.set_max_calls(1);
        }
        if self.keeps_stop {
            parser.keep_stop();
        }
        let mut completion = Completion::default();
        let timeout = self.party.limits.timeout;
        let followed = self.follow(index, &mut stream, &mut parser, &mut completion, withholds);
        let ended = with_sampler_timeout(&*self.sampler, timeout, followed).await;
        drop(stream);
        if let Some(batch) = &self.batch {
            // Calls of the batch that have not started may wait for this permit.
            self.permit.lock().unwrap_or_else(PoisonError::into_inner).take();
            if !batch.is_recorded().await {
                let message =
                    "the call was aborted, because another prompt of the same request was rejected";
                return Err(ApiError::new(ErrorKind::Invalid, message));
            }
        }
        let ended = ended.unwrap_or_else(|| Err(self.timeout_error(timeout)));
        completion.finish = *ended.as_ref().unwrap_or(&FinishReason::Aborted);
        add(&self.recorder.options.metrics.sampled_tokens, completion.tokens.len() as u64);
        let error = ended.err();
        Ok(SampledCompletion {
            index,
            prompt,
            completion,
            params,
            parser,
            parsing,
            withholds,
            error,
        })
    }

    /// Records a completion, including one that failed, and writes its end to the transcript.
    fn end(&self, sampled: SampledCompletion) -> Result<(), ApiError> {
        let SampledCompletion {
            index,
            prompt,
            completion,
            params,
            parser,
            parsing,
            withholds,
            error,
        } = sampled;
        let (rest, end) =
            self.record(prompt, completion, &params, (parser, parsing.as_ref()), error.as_ref())?;
        if let Some(error) = error {
            return Err(error);
        }
        let deltas = if withholds { end.parts.clone() } else { rest };
        if withholds || !deltas.is_empty() {
            self.transcript.push(Event::Delta { choice: index, deltas, tokens: Vec::new() });
        }
        self.transcript.push(Event::Ended { choice: index, end: Box::new(end) });
        Ok(())
    }

    fn timeout_error(&self, timeout: Duration) -> ApiError {
        ApiError::new(
            ErrorKind::Deadline,
            format!("the completion was not finished within {timeout:?}"),
        )
    }

    /// Writes the tokens of a completion to the transcript as they arrive, until the completion
    /// ends or is aborted.
    async fn follow(
        &self,
        index: usize,
        stream: &mut SampleStream,
        parser: &mut CompletionParser,
        completion: &mut Completion,
        withholds: bool,
    ) -> Result<FinishReason, ApiError> {
        let mut read = 0;
        // Created once, so that the grace period does not start again with each token.
        let mut abandoned = std::pin::pin!(self.recorder.wait_until_abandoned(&self.transcript));
        let mut rejected = std::pin::pin!(wait_for_rejection(self.batch.as_ref()));
        // An event other than tokens that arrived right after tokens.
        let mut after = None;
        loop {
            let event = match after.take() {
                Some(event) => event,
                None => tokio::select! {
                    // A fixed order of the branches makes simulations repeatable.
                    biased;
                    () = &mut abandoned => return Ok(FinishReason::Aborted),
                    () = &mut rejected => return Ok(FinishReason::Aborted),
                    event = stream.next() => event,
                },
            };
            match event {
                Some(Ok(SampleEvent::Tokens { tokens, logprobs, top, version })) => {
                    if parser.tokens() == 0 {
                        self.recorder.options.metrics.first_token.observe(self.timer.elapsed());
                    }
                    let mut parts = TokenParts::default();
                    parts.add(parser, completion, (tokens, logprobs, top, version));
                    // Tokens that are ready are sent together, because each event wakes all
                    // readers.
                    while let Some(event) = stream.next().now_or_never() {
                        let Some(Ok(SampleEvent::Tokens { tokens, logprobs, top, version })) =
                            event
                        else {
                            after = Some(event);
                            break;
                        };
                        parts.add(parser, completion, (tokens, logprobs, top, version));
                    }
                    for (deltas, tokens) in parts.into_parts() {
                        let deltas = if withholds { Vec::new() } else { deltas };
                        self.transcript.push(Event::Delta { choice: index, deltas, tokens });
                    }
                }
                Some(Ok(SampleEvent::Prompt { logprobs, top })) => {
                    read += self.push_prompt(index, read, &logprobs, &top);
                }
                Some(Ok(SampleEvent::Finished(reason))) => return Ok(reason),
                Some(Err(error)) => return Err(error.into()),
                None => {
                    let message = "the sampler stopped before the completion ended";
                    return Err(ApiError::new(ErrorKind::Unavailable, message));
                }
            }
        }
    }

    /// Writes log-probabilities of further prompt tokens to the transcript. `read` is the number of
    /// prompt tokens that have already been written. Returns the number of tokens written.
    fn push_prompt(
        &self,
        choice: usize,
        read: usize,
        logprobs: &[f32],
        top: &[TopLogprobs],
    ) -> usize {
        // No token predicts the first one.
        let first = usize::from(read == 0);
        let known = logprobs.iter().enumerate().map(|(index, logprob)| {
            let top = top.get(index).cloned().unwrap_or_default();
            (*logprob, top)
        });
        let all = std::iter::repeat_n((f32::NAN, Vec::new()), first).chain(known);
        let ids = self.transcript.head.prompt.iter().skip(read);
        let tokens: Vec<Token> = ids
            .zip(all)
            .map(|(&id, (logprob, top))| Token { id, logprob, top, version: 0 })
            .collect();
        let count = tokens.len();
        self.transcript.push(Event::Prompt { choice, tokens });
        count
    }

    /// Records a completion. Returns the deltas that readers have not received yet, and the
    /// complete completion.
    fn record(
        &self,
        prompt: Prompt,
        completion: Completion,
        params: &SamplingParams,
        (parser, parsing): (CompletionParser, Option<&ChatParseOptions>),
        error: Option<&ApiError>,
    ) -> Result<(Vec<CompletionDelta>, End), ApiError> {
        let finish = completion.finish;
        let tokens = completion.tokens.len();
        let version = completion.versions.last().map(|run| run.version);
        let origin = prompt.origin();
        let prompt_tokens = prompt.ids().len();
        let mut state = self.recorder.state();
        let conversation: &mut Conversation = &mut state.conversation;
        let mut recorded_completion = None;
        // An empty completion that failed or was aborted is not added to the conversation.
        if tokens > 0 || (error.is_none() && finish != FinishReason::Aborted) {
            match prompt {
                Prompt::Chat(prepared) => {
                    recorded_completion = Some(
                        conversation
                            .record(*prepared, completion, params)
                            .map_err(internal_error)?,
                    );
                }
                Prompt::Ids(ids) => {
                    let party = (self.party.agent.as_str(), self.party.policy.as_str());
                    conversation
                        .record_ids(party, &ids, completion, params)
                        .map_err(internal_error)?;
                }
            }
        }
        let turn = recorded_completion.as_ref().map(|recorded_completion| recorded_completion.turn);
        let segment =
            recorded_completion.as_ref().map(|recorded_completion| recorded_completion.segment);
        let (rest, mut end) = parser.end(recorded_completion, parsing, finish);
        end.prompt_tokens = prompt_tokens;
        if let Some(segment) = segment {
            if let Some(question) = self.question.clone() {
                state.probes.record_completion(&self.party.agent, question, segment);
            }
            state.conversation.note_received(segment, &end.message);
            // Some clients append the stop string that ended the completion.
            if let Some(stop) = &end.stopped_by {
                let content = format!("{}{stop}", end.message.content.as_str()).into();
                state
                    .conversation
                    .note_received(segment, &Message { content, ..end.message.clone() });
            }
        }
        if self.is_counted {
            state.remaining_tokens = state.remaining_tokens.saturating_sub(tokens);
        }
        if let Some(version) = version {
            let newest_version = state.versions.entry(self.party.policy.clone()).or_default();
            *newest_version = version.max(*newest_version);
        }
        let parsed = end.recorded_completion.as_ref().map(|completion| &completion.parsed.calls);
        let malformed_calls = parsed.into_iter().flatten().filter(|call| call.is_err()).count();
        state.recorded.calls.push(CallRecord {
            agent: self.party.agent.clone(),
            model: self.party.model.clone(),
            external: false,
            summary: !self.is_counted,
            probe: false,
            origin,
            prompt: prompt_tokens,
            tokens,
            finish,
            error: error.map(ToString::to_string),
            turn,
            content: end.message.content.as_str().to_owned(),
            calls: end.message.tool_calls.len(),
            malformed_calls,
            interval: self.timer.interval(),
        });
        Ok((rest, end))
    }
}
