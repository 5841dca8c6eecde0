//! From a request with a grammar to the tokens that its reply may go on with: for samplers.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::{Allowed, Constraint, Grammars, PolicyError, SampleRequest, SamplingParams, TokenSet, awake};

/// Grammars that are compiled at a time, however many wait for it: it is never to take all processors.
const AT_ONCE: usize = 2;
/// Longest wait for one, those before it included.
const COMPILING: Duration = Duration::from_secs(60);

/// The constraint of a request that has a grammar, in the state after what was drawn of its reply before. It
/// is compiled beside, so that nobody else waits for it. The request has been validated.
///
/// # Errors
/// When the sampler has no `grammars`, the grammar is wrong, or the reply does not keep to it; when compiling
/// takes too long.
pub async fn constrain(
    grammars: Option<&Arc<dyn Grammars>>,
    request: &SampleRequest,
) -> Result<Option<Box<dyn Constraint>>, PolicyError> {
    static ROOM: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(AT_ONCE)));
    let Some(grammar) = request.params.grammar.clone() else { return Ok(None) };
    let Some(grammars) = grammars.cloned() else {
        return Err(PolicyError::Invalid(format!(
            "the request has a {}, but this sampler was started without its tokenizer's grammars; ask without one",
            grammar.kind()
        )));
    };
    let drawn = request.prompt[request.prompt.len() - request.params.drawn_before..].to_vec();
    let compiled = async {
        // One that nobody waits for any more keeps its place until it is done.
        let place = ROOM.clone().acquire_owned().await;
        let compile = move || {
            let _place = place;
            let mut constraint = grammars.start(&grammar)?;
            drawn.into_iter().try_for_each(|token| constraint.push(token))?;
            Ok(constraint)
        };
        let stopped =
            |_| PolicyError::Invalid("the grammar cannot be compiled: its compiler panicked".into());
        tokio::task::spawn_blocking(compile).await.map_err(stopped)?
    };
    match awake::within(COMPILING, compiled).await {
        Some(constraint) => constraint.map(Some),
        None => Err(PolicyError::Deadline(COMPILING, "the grammar of a request to be compiled".into())),
    }
}

impl SamplingParams {
    /// The tokens of a model's `vocabulary` that a reply under a grammar may go on with: those that its
    /// constraint allows, and where it may end, those that end it.
    ///
    /// # Errors
    /// When there are none, or as [`Constraint::allowed`] says.
    pub fn allowed(
        &self,
        constraint: &mut dyn Constraint,
        vocabulary: usize,
    ) -> Result<TokenSet, PolicyError> {
        let Allowed { mut tokens, may_end } = constraint.allowed()?;
        if may_end {
            self.stop_ids.iter().filter(|id| (**id as usize) < vocabulary).for_each(|id| tokens.insert(*id));
        }
        if tokens.has_below(vocabulary) {
            return Ok(tokens);
        }
        Err(PolicyError::Invalid(
            "the grammar of the reply allows nothing that the model has a token for; correct the grammar, or name \
             the tokens that end a reply in stop_ids"
                .into(),
        ))
    }
}
