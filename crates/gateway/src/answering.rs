//! Whoever answers a call: which agent asks, which model replies, and under which rules.

use std::sync::Arc;

use levade_policy::SamplingParams;
use levade_text::Chat;

use crate::batch::Batch;
use crate::call::{Call, Input};
use crate::fault::{Fault, Kind};
use crate::gateway::Gateway;
use crate::model::Model;
use crate::route::{Route, RouteContext, choose};
use crate::session::Session;

/// Who calls.
#[derive(Clone, Default)]
pub struct Caller {
    /// The attempt, for calls that bear the key of one.
    pub session: Option<Arc<Session>>,
    /// The agent that the call names.
    pub agent: Option<String>,
    /// A key of the whole body.
    pub body: Option<u128>,
    /// Whether the client says that it asks again.
    pub retries: bool,
}

/// Whoever answers a call.
pub(crate) struct Answering {
    /// The agent that asks; empty outside of attempts.
    pub agent: String,
    /// The model that answers.
    pub model: Arc<Model>,
    /// Sampling as a recipe fixes it.
    pub fixed: Option<SamplingParams>,
    /// How long prompts may be.
    pub context: RouteContext,
    /// Whether a context policy asks, and not the program.
    pub summarises: bool,
    /// The other calls of the body, where it makes several.
    pub batch: Option<Batch>,
}

impl Gateway {
    /// Agent and model of a call, and the parameters that a recipe fixes for it.
    pub(crate) fn answering(&self, caller: &Caller, call: &Call) -> Result<Answering, Fault> {
        let Some(session) = &caller.session else {
            let (agent, model) = (String::new(), self.model(&call.model)?);
            return Ok(Answering {
                agent,
                model,
                fixed: None,
                context: RouteContext::NONE,
                summarises: false,
                batch: None,
            });
        };
        let routes = &session.options.routes;
        // Chosen once for each call, whoever asks: a rule may look through long instructions.
        let known = call.chosen.get().copied();
        let place = known.or_else(|| choose(routes, caller.agent.as_deref(), call));
        let found = place.and_then(|place| routes.get(*call.chosen.get_or_init(|| place)));
        let Some(Route { agent, model, fixed, context, .. }) = found else {
            let names: Vec<&str> = routes.iter().map(|route| route.agent.as_str()).collect();
            let asked = caller.agent.as_deref().unwrap_or_default();
            let message = format!("this attempt has no agent {asked:?}; it has: {}", names.join(", "));
            return Err(Fault::new(Kind::NotFound, message));
        };
        let (agent, model, fixed) = (agent.clone(), Arc::clone(model), fixed.clone());
        Ok(Answering { agent, model, fixed, context: context.clone(), summarises: false, batch: None })
    }

    /// The model that would answer a caller who asks for `name`.
    pub(crate) fn model_of(&self, caller: &Caller, name: &str) -> Result<Arc<Model>, Fault> {
        let call = Call::new(name, Input::Tokens(Vec::new()));
        self.answering(caller, &call).map(|answering| answering.model)
    }

    /// The model that would answer a call.
    pub(crate) fn answering_model(&self, caller: &Caller, call: &Call) -> Result<Arc<Model>, Fault> {
        self.answering(caller, call).map(|answering| answering.model)
    }

    /// The chat of the model that would answer a call.
    ///
    /// # Errors
    /// When no model would, or it is an API of others.
    pub(crate) fn chat_of(&self, caller: &Caller, call: &Call) -> Result<Arc<Chat>, Fault> {
        let model = self.answering(caller, call)?.model;
        Ok(Arc::clone(model.tokens()?.format.chat()))
    }
}
