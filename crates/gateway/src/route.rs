//! Rules that decide which agent of an attempt a call belongs to.

use std::sync::Arc;

use levade_call::{Input, Party};
use regex::Regex;

use crate::call::Call;

/// Agent of an attempt, with the rule by which calls belong to it.
#[derive(Clone)]
pub struct Route {
    /// Party that answers the agent's calls.
    pub party: Arc<Party>,
    /// Properties of calls that belong to the agent although they do not name it.
    pub when: When,
}

/// Properties of an agent's calls. A call must have all that are set. Without any, no call matches.
#[derive(Debug, Clone, Default)]
pub struct When {
    /// Names of models that only this agent asks for.
    pub models: Vec<String>,
    /// Regular expression that matches somewhere in the call's instructions.
    pub system: Option<Regex>,
    /// Names of tools that the call must all have.
    pub tools: Vec<String>,
    /// Whether the call has any tools.
    pub has_tools: Option<bool>,
}

impl When {
    fn is_empty(&self) -> bool {
        self.models.is_empty() && self.system.is_none() && self.tools.is_empty() && self.has_tools.is_none()
    }

    fn holds(&self, Call { model, request }: &Call) -> bool {
        let has = |name: &String| request.tools.iter().any(|tool| tool.name == *name);
        !self.is_empty()
            && (self.models.is_empty() || self.models.contains(model))
            && self.system.as_ref().is_none_or(|pattern| pattern.is_match(&instructions(&request.input)))
            && self.tools.iter().all(has)
            && self.has_tools.is_none_or(|wanted| wanted != request.tools.is_empty())
    }
}

/// Returns the text of the leading messages that instruct the model.
fn instructions(input: &Input) -> String {
    let Input::Messages(messages) = input else { return String::new() };
    let texts: Vec<&str> =
        messages.iter().take_while(|m| m.role.instructs()).map(|m| m.content.as_str()).collect();
    texts.join("\n")
}

/// Returns the route of a call: of the agent that it names, else the first whose rule holds, else that of the
/// agent `default`, else the first.
pub(crate) fn choose<'a>(routes: &'a [Route], named: Option<&str>, call: &Call) -> Option<&'a Route> {
    let of = |name: &str| routes.iter().find(|route| route.party.agent == name);
    match named {
        Some(name) => of(name),
        None => {
            routes.iter().find(|route| route.when.holds(call)).or_else(|| of("default")).or(routes.first())
        }
    }
}
