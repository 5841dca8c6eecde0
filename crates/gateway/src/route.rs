//! Rules that decide which agent of an attempt a call belongs to.

use std::sync::Arc;

use levade_call::{Input, Party};
use levade_tree::parse_seat;
use regex::Regex;

use crate::call::Call;

/// Assignment of an attempt's calls to one of its agents.
#[derive(Clone)]
pub struct Route {
    /// Party that answers the agent's calls.
    pub party: Arc<Party>,
    /// Pattern of the calls that belong to the agent although they do not name the agent.
    pub pattern: CallPattern,
}

/// Pattern that matches an agent's calls. A call must have all properties that are set. If no
/// property is set, no call matches.
#[derive(Debug, Clone, Default)]
pub struct CallPattern {
    /// Names of models that only this agent requests. If empty, calls of any model match.
    pub models: Vec<String>,
    /// Regular expression that must match somewhere in the call's leading instructions. `None`
    /// matches any call.
    pub system: Option<Regex>,
    /// Names of tools, all of which the call must have.
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
                .is_none_or(|pattern| pattern.is_match(&leading_instructions(&request.input)))
            && self.tools.iter().all(|name| request.tools.iter().any(|tool| tool.name == *name))
            && self.has_tools.is_none_or(|wanted| wanted != request.tools.is_empty())
    }
}

/// Returns the text of the leading system and developer messages of a prompt.
fn leading_instructions(input: &Input) -> String {
    let Input::Messages(messages) = input else { return String::new() };
    let texts: Vec<&str> =
        messages.iter().take_while(|m| m.role.instructs()).map(|m| m.content.as_str()).collect();
    texts.join("\n")
}

/// Returns the party that answers a call, or `None` if the attempt has no such agent. This is the
/// party of the call's route. If `named` is the name of a seat, `AGENT@NUMBER`, this is the party
/// of the agent AGENT under the seat's name.
pub(crate) fn find_party(routes: &[Route], named: Option<&str>, call: &Call) -> Option<Arc<Party>> {
    if let Some(route) = choose_route(routes, named, call) {
        return Some(Arc::clone(&route.party));
    }
    let (agent, seat) = parse_seat(named?)?;
    let route = routes.iter().find(|route| route.party.agent == agent)?;
    Some(Arc::new(route.party.in_seat(seat)))
}

/// Returns the route of a call. If `named` is set, this is the route of the agent `named`, or
/// `None` if the attempt has no such agent. Otherwise the first route whose pattern matches is
/// used. If no pattern matches, the route of the agent `default` is used, or the first route if
/// there is no such agent.
pub(crate) fn choose_route<'a>(
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
