//! Which agent asks, and which model answers it.

use std::sync::Arc;

use levade_conversation::Budget;
use levade_policy::SamplingParams;
use regex::Regex;

use crate::call::{Call, Input};
use crate::model::Model;

/// An agent of an attempt.
#[derive(Clone)]
pub struct Route {
    /// Name of the agent, which the segments of its calls bear.
    pub agent: String,
    /// The model that answers it.
    pub model: Arc<Model>,
    /// Calls that are its own although they do not name it.
    pub when: When,
    /// Sampling as the recipe has it, whatever a client asks for. All but `max_tokens` and stops is taken.
    pub fixed: Option<SamplingParams>,
    /// How its calls are kept within its context.
    pub context: RouteContext,
}

/// How an agent's calls are kept within its context.
#[derive(Clone)]
pub struct RouteContext {
    /// Most tokens of a prompt, and what happens to longer ones.
    pub budget: Budget,
    /// Whoever writes summaries, where the policy asks for such.
    pub summary: Option<Arc<Summary>>,
}

impl RouteContext {
    /// No policy: what is longer than the model's context is refused.
    pub const NONE: RouteContext = RouteContext { budget: Budget::NONE, summary: None };
}

/// Whoever writes summaries.
pub struct Summary {
    /// The agent, as its segments bear it.
    pub agent: String,
    /// The model.
    pub model: Arc<Model>,
    /// Sampling as the recipe has it.
    pub fixed: Option<SamplingParams>,
    /// Most tokens of a summary.
    pub tokens: usize,
    /// Words before the text to be summarised.
    pub instruction: String,
}

/// Traits of an agent's calls. All that are given must hold; with none, no call matches.
#[derive(Debug, Clone, Default)]
pub struct When {
    /// Names of models that only this agent asks for.
    pub models: Vec<String>,
    /// An expression that its instructions match, somewhere.
    pub system: Option<Regex>,
    /// Tools that it is told of, all of them.
    pub tools: Vec<String>,
    /// Whether it is told of any tool.
    pub has_tools: Option<bool>,
}

impl When {
    fn is_empty(&self) -> bool {
        self.models.is_empty() && self.system.is_none() && self.tools.is_empty() && self.has_tools.is_none()
    }

    fn holds(&self, call: &Call) -> bool {
        let has = |name: &String| call.tools.iter().any(|tool| tool.name == *name);
        !self.is_empty()
            && (self.models.is_empty() || self.models.contains(&call.model))
            && self.system.as_ref().is_none_or(|pattern| pattern.is_match(&instructions(call)))
            && self.tools.iter().all(has)
            && self.has_tools.is_none_or(|wanted| wanted != call.tools.is_empty())
    }
}

/// Texts of the messages that instruct, before anything else is said.
fn instructions(call: &Call) -> String {
    let Input::Messages(messages) = &call.input else { return String::new() };
    let texts: Vec<&str> =
        messages.iter().take_while(|m| m.role.instructs()).map(|m| m.content.as_str()).collect();
    texts.join("\n")
}

/// The route of a call, by its place: of the agent that it names, else the first whose traits it has, else
/// the one called `default`, else the first.
pub(crate) fn choose(routes: &[Route], named: Option<&str>, call: &Call) -> Option<usize> {
    let of = |name: &str| routes.iter().position(|route| route.agent == name);
    match named {
        Some(name) => of(name),
        None => routes
            .iter()
            .position(|route| route.when.holds(call))
            .or_else(|| of("default"))
            .or((!routes.is_empty()).then_some(0)),
    }
}
