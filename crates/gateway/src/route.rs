//! Rules that decide which agent of an attempt a call belongs to.

use std::sync::Arc;

use levade_call::{Input, Party};
use levade_tree::parse_seat;
use regex::Regex;

use crate::call::Call;

/// Agent of an attempt, with the rule that assigns calls to the agent.
#[derive(Clone)]
pub struct Route {
    /// Party that answers the agent's calls.
    pub party: Arc<Party>,
    /// Properties of calls that belong to the agent although they do not name the agent.
    pub pattern: CallPattern,
}

/// Properties of an agent's calls. A call must have all properties that are set. If none is set, no
/// call matches.
#[derive(Debug, Clone, Default)]
pub struct CallPattern {
    /// Names of models that only this agent requests.
    pub models: Vec<String>,
    /// Regular expression that must match somewhere in the call's leading instructions.
    pub system: Option<Regex>,
    /// Names of tools that the call must have, all of them.
    pub tools: Vec<String>,
    /// Whether the call must have tools (`true`) or must have none (`false`). `None` allows both.
    pub has_tools: Option<bool>,
}

impl CallPattern {
    fn is_empty(&self) -> bool {
        self.models.is_empty()
            && self.system.is_none()
            && self.tools.is_empty()
            && self.has_tools.is_none()
    }

    fn matches(&self, Call { model, request }: &Call) -> bool {
        !self.is_empty()
            && (self.models.is_empty() || self.models.contains(model))
            && self
                .system
                .as_ref()
                .is_none_or(|pattern| pattern.is_match(&instructions(&request.input)))
            && self.tools.iter().all(|name| request.tools.iter().any(|tool| tool.name == *name))
            && self.has_tools.is_none_or(|wanted| wanted != request.tools.is_empty())
    }
}

/// Returns the text of the leading messages that instruct the model (system or developer messages).
fn instructions(input: &Input) -> String {
    let Input::Messages(messages) = input else { return String::new() };
    let texts: Vec<&str> =
        messages.iter().take_while(|m| m.role.instructs()).map(|m| m.content.as_str()).collect();
    texts.join("\n")
}

/// Returns the party that answers a call: that of its route, or if `named` is the name of a seat,
/// `AGENT@NUMBER`, that of the seat's agent under this name. Returns `None` if the attempt has no
/// such agent.
pub(crate) fn find_party(routes: &[Route], named: Option<&str>, call: &Call) -> Option<Arc<Party>> {
    if let Some(route) = choose(routes, named, call) {
        return Some(Arc::clone(&route.party));
    }
    let (agent, seat) = parse_seat(named?)?;
    let route = routes.iter().find(|route| route.party.agent == agent)?;
    Some(Arc::new(route.party.in_seat(seat)))
}

/// Returns the route of a call. If `named` is set, this is the route of that agent, or `None` if
/// the attempt has no such agent. Otherwise the first route whose rule matches is used. If no rule
/// matches, the route of the agent `default` is used, or the first route if there is no such agent.
pub(crate) fn choose<'a>(
    routes: &'a [Route],
    named: Option<&str>,
    call: &Call,
) -> Option<&'a Route> {
    let of = |name: &str| routes.iter().find(|route| route.party.agent == name);
    match named {
        Some(name) => of(name),
        None => routes
            .iter()
            .find(|route| route.pattern.matches(call))
            .or_else(|| of("default"))
            .or(routes.first()),
    }
}
