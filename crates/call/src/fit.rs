//! Fits the prompt of a conversation to its party's context.

use std::borrow::Cow;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use levade_conversation::{FitResult, Overflow, PreparedPrompt, Request as PromptRequest};
use levade_text::{Message, ToolSpec};

use crate::api_error::{ApiError, ErrorKind};
use crate::blocking::blocking;
use crate::party::{Party, Summarizer};
use crate::recorder::Recorder;
use crate::request::OpeningLimit;

/// Function that requests a summary of a text from a summarizer.
pub(crate) type SummarizeFn<'a> =
    &'a (dyn Fn(Arc<Summarizer>, String) -> BoxFuture<'a, Result<String, ApiError>> + Send + Sync);

/// Prompt that fits into the context of the party that answers it.
pub(crate) struct FittedPrompt {
    pub prepared: Box<PreparedPrompt>,
    /// Whether the opening limit truncated the prompt.
    pub is_truncated: bool,
}

/// Renders the prompt of a conversation, and truncates it by the party's context policy and by
/// `opening`, the limit of an attempt's first prompt. `summarize` requests summaries of turns that
/// no longer fit.
///
/// # Errors
/// Returns an error if the prompt cannot be rendered, if it is too long and cannot be truncated, or
/// if a summary fails.
pub(crate) async fn fit(
    recorder: &Arc<Recorder>,
    party: &Arc<Party>,
    messages: &[Message],
    tools: &[ToolSpec],
    (opening, summarize): (Option<OpeningLimit>, SummarizeFn<'_>),
) -> Result<FittedPrompt, ApiError> {
    let backend = party.tokens()?;
    let agent = party.agent.as_str();
    let policy = party.policy.as_str();
    let budget = party.budget;
    let request = PromptRequest { agent, policy, format: backend.format, messages, tools };
    let mut fitting = recorder.state().conversation.start_fitting(&request, budget);
    // A policy that truncates prompts needs them in full.
    let max_tokens = match budget.overflow {
        Overflow::Fail if opening.is_none() => backend.context.min(budget.max_tokens),
        _ => usize::MAX,
    };
    loop {
        let kept = match fitting.messages() {
            Cow::Borrowed(_) => None,
            Cow::Owned(messages) => Some(messages),
        };
        let request = PromptRequest { messages: kept.as_deref().unwrap_or(messages), ..request };
        let recognized = recorder.state().conversation.match_request(&request);
        let prepared = blocking(move || recognized.render_within(max_tokens)).await??;
        let prepared = match fitting.judge(prepared) {
            FitResult::Fits(prepared) => prepared,
            FitResult::Rerender => continue,
            FitResult::Summarize(text) => {
                let summary = match &party.summarizer {
                    Some(summarizer) => summarize(Arc::clone(summarizer), text).await?,
                    // If there is no summarizer, the turns are dropped.
                    None => String::new(),
                };
                fitting.set_summary(&summary);
                continue;
            }
            FitResult::TooLong(prepared) if opening.is_some() => prepared,
            FitResult::TooLong(prepared) => {
                let found = prepared.prompt.len();
                let max = budget.max_tokens;
                let message = format!(
                    "the prompt has {found} tokens, more than the {max} that \
                     agent.max_context_tokens and the model's context allow, and agent.context \
                     permits no truncation of it; shorten the prompt, or raise \
                     agent.max_context_tokens"
                );
                return Err(ApiError::new(ErrorKind::TooLong, message));
            }
        };
        return match opening {
            Some(limit) => truncate_opening(prepared, limit, budget.max_tokens),
            None => Ok(FittedPrompt { prepared, is_truncated: false }),
        };
    }
}

/// Truncates the first prompt of an attempt to `limit`, and checks that it has at most `budget`
/// tokens.
fn truncate_opening(
    mut prepared: Box<PreparedPrompt>,
    limit: OpeningLimit,
    budget: usize,
) -> Result<FittedPrompt, ApiError> {
    let found = prepared.prompt.len();
    let shortened = limit.truncation.truncate(prepared.prompt.clone(), limit.max_tokens);
    prepared
        .shorten(shortened.ok_or_else(|| too_long(found, limit.max_tokens, "max_prompt_tokens"))?);
    let prompt_tokens = prepared.prompt.len();
    if prompt_tokens > budget {
        Err(too_long(prompt_tokens, budget, "max_context_tokens"))
    } else {
        Ok(FittedPrompt { prepared, is_truncated: prompt_tokens < found })
    }
}

fn too_long(found: usize, max: usize, key: &str) -> ApiError {
    let message = format!(
        "the prompt has {found} tokens, more than the {max} of agent.{key}; raise \
             agent.{key}, or set agent.truncation"
    );
    ApiError::new(ErrorKind::TooLong, message)
}
