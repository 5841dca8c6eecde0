//! Compiles the grammar of a request, and computes the tokens that its completion may continue
//! with.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::{
    AllowedTokens, Constraint, Grammars, PolicyError, SampleRequest, SamplingParams, TokenSet,
    process_time,
};

/// Maximum number of grammars compiled concurrently, so that compilation never occupies all
/// processors.
const MAX_CONCURRENT: usize = 2;
/// Timeout for the compilation of one grammar, including the wait for earlier grammars.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the constraint of a validated `request`, in the state after the tokens of its completion
/// that were sampled before, or `None` if the request has no grammar. The grammar is compiled on a
/// blocking thread, so that other requests do not wait for it.
///
/// # Errors
/// Returns [`PolicyError::Invalid`] if the sampler has no `grammars`, an error if the grammar is
/// invalid or the completion does not match it, and [`PolicyError::Deadline`] if the compilation
/// takes longer than 60 s.
pub async fn constrain(
    grammars: Option<&Arc<dyn Grammars>>,
    request: &SampleRequest,
) -> Result<Option<Box<dyn Constraint>>, PolicyError> {
    static PERMITS: LazyLock<Arc<Semaphore>> =
        LazyLock::new(|| Arc::new(Semaphore::new(MAX_CONCURRENT)));
    let Some(grammar) = request.params.grammar.clone() else { return Ok(None) };
    let Some(grammars) = grammars.cloned() else {
        return Err(PolicyError::Invalid(format!(
            "the request has a {}, but this sampler was started without support for grammars; send \
             the request without it",
            grammar.kind()
        )));
    };
    let sampled = request.prompt[request.prompt.len() - request.params.sampled_before..].to_vec();
    let compiled = async {
        // A compilation whose request was dropped keeps its permit until it is done.
        let permit = PERMITS.clone().acquire_owned().await;
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let mut constraint = grammars.start(&grammar)?;
            sampled.into_iter().try_for_each(|token| constraint.push(token))?;
            Ok(constraint)
        })
        .await
        .map_err(|_| {
            PolicyError::Invalid(
                "the grammar compiler panicked; simplify the grammar of the request".into(),
            )
        })?
    };
    match process_time::with_timeout(COMPILE_TIMEOUT, compiled).await {
        Some(constraint) => constraint.map(Some),
        None => Err(PolicyError::Deadline(
            COMPILE_TIMEOUT,
            "the compilation of a request's grammar".into(),
        )),
    }
}

impl SamplingParams {
    /// Returns the tokens of a model's `vocabulary` that may continue a completion under a grammar:
    /// those that `constraint` allows and, if the completion may end, the stop tokens.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] if there are no such tokens, and the errors of
    /// [`Constraint::allowed`].
    pub fn allowed(
        &self,
        constraint: &mut dyn Constraint,
        vocabulary: usize,
    ) -> Result<TokenSet, PolicyError> {
        let AllowedTokens { mut tokens, may_end } = constraint.allowed()?;
        if may_end {
            self.stop_ids
                .iter()
                .filter(|id| (**id as usize) < vocabulary)
                .for_each(|id| tokens.insert(*id));
        }
        if tokens.has_below(vocabulary) {
            return Ok(tokens);
        }
        Err(PolicyError::Invalid(
            "no token of the model can continue the completion under its grammar; correct the \
             grammar, or list the tokens that end a completion in stop_ids"
                .into(),
        ))
    }
}
