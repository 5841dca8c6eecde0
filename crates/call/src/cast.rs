//! Starts calls of a party, or of an agent by its name in a [`Cast`].

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use levade_text::Message;

use crate::api_error::{ApiError, ErrorKind};
use crate::generate;
use crate::metrics::add;
use crate::options::CallOptions;
use crate::party::{Backend, Party, Summarizer};
use crate::recorder::Recorder;
use crate::relay;
use crate::request::{Input, Request};
use crate::transcript::Reader;

/// Maximum number of completions of one call.
const MAX_COMPLETIONS: usize = 128;

/// Parties that answer the calls of one attempt, one party for each agent. Each party already
/// samples from a selected policy.
#[derive(Clone)]
pub struct Cast {
    parties: Arc<[Arc<Party>]>,
    recorder: Arc<Recorder>,
}

impl Cast {
    /// Creates the cast of an attempt, whose calls `recorder` records. The first party must be the
    /// party of the task's own agent.
    pub fn new(parties: impl IntoIterator<Item = Arc<Party>>, recorder: Arc<Recorder>) -> Self {
        Cast { parties: parties.into_iter().collect(), recorder }
    }

    /// Returns the parties in the order in which they were passed to [`Cast::new`].
    pub fn parties(&self) -> &[Arc<Party>] {
        &self.parties
    }

    /// Returns the recorder of the attempt.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Returns the party that answers the calls of an agent.
    ///
    /// # Errors
    /// Returns an [`ErrorKind::NotFound`] error if the cast has no such agent.
    pub fn party(&self, agent: &str) -> Result<&Arc<Party>, ApiError> {
        let found = self.parties.iter().find(|party| party.agent == agent);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.parties.iter().map(|party| party.agent.as_str()).collect();
            let message = format!(
                "this attempt has no agent {agent:?}; available agents: {}",
                names.join(", ")
            );
            ApiError::new(ErrorKind::NotFound, message)
        })
    }

    /// Starts a model call of an agent and returns a reader of its events.
    ///
    /// # Errors
    /// Returns the errors of [`call`]. Returns an [`ErrorKind::NotFound`] error if the cast has no
    /// such agent.
    pub async fn call(&self, agent: &str, request: Request) -> Result<Reader, ApiError> {
        call(&self.recorder, self.party(agent)?, request, CallOptions::default()).await
    }
}

/// Starts a model call that `party` answers, and returns a reader of its events. The call runs in
/// its own task, which writes a [`Transcript`](crate::Transcript). If all readers of the transcript
/// are dropped, the call is aborted after the grace period. Sampled tokens are recorded in any
/// case.
///
/// # Errors
/// Returns an error if the request is invalid, exceeds a limit, or is rejected by the party. In
/// this case nothing is recorded, except for the prompt with
/// [`PromptRecording::BeforeSampling`](crate::PromptRecording::BeforeSampling).
pub async fn call(
    recorder: &Arc<Recorder>,
    party: &Arc<Party>,
    request: Request,
    options: CallOptions,
) -> Result<Reader, ApiError> {
    start(recorder, party, request, options, true).await
}

/// Starts a model call that `party` answers. `is_counted` is true if the call counts toward the
/// limits of the attempt, and false for summaries.
async fn start(
    recorder: &Arc<Recorder>,
    party: &Arc<Party>,
    request: Request,
    options: CallOptions,
    is_counted: bool,
) -> Result<Reader, ApiError> {
    if !(1..=MAX_COMPLETIONS).contains(&request.n) {
        let message = format!("n = {}, but it must be in 1..={MAX_COMPLETIONS}", request.n);
        return Err(ApiError::field("n", message));
    }
    match &party.backend {
        Backend::Tokens(_) => {
            generate::start(recorder, party, request, options, is_counted, &|summarizer, text| {
                summarize(Arc::clone(recorder), summarizer, text)
            })
            .await
        }
        Backend::Messages(api) => {
            relay::start(recorder, party, &**api, request, options, is_counted).await
        }
    }
}

/// Requests a summary of `text` from the summarizer. The call is recorded, but does not count
/// toward the limits of the attempt.
///
/// # Errors
/// Returns the error with which the call failed.
fn summarize(
    recorder: Arc<Recorder>,
    summarizer: Arc<Summarizer>,
    text: String,
) -> BoxFuture<'static, Result<String, ApiError>> {
    async move {
        let Summarizer { party, max_tokens, instruction } = &*summarizer;
        let messages = vec![Message::user(format!("{instruction}\n\n{text}"))];
        let mut request = Request::new(Input::Messages(messages));
        request.sampling.max_tokens = Some(*max_tokens);
        // The call that needs the summary holds the permit. Waiting for another permit could block
        // all calls.
        let reader = start(&recorder, party, request, CallOptions::default(), false).await?;
        let end = reader.completion().await?;
        add(&recorder.options.metrics.summaries, 1);
        // The message of the recorded completion lacks the white space around the text.
        let message = end
            .recorded_completion
            .map_or(end.message, |recorded_completion| recorded_completion.message());
        Ok(message.content.as_str().to_owned())
    }
    .boxed()
}
