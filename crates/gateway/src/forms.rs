//! Forms that replies must have, as grammars.

use dressage_policy::Grammar;
use dressage_text::ToolSpec;

use crate::call::{Call, Constraint, ToolChoice};
use crate::fault::Fault;
use crate::model::TokenModel;

/// The field of a call that asks for a form; `None` where none does.
pub(crate) fn asked(call: &Call) -> Option<&'static str> {
    match (&call.constraint, &call.tool_choice) {
        (Some(_), _) => Some("response_format"),
        (None, ToolChoice::Required | ToolChoice::Named(_)) => Some("tool_choice"),
        _ => None,
    }
}

/// The grammar of the form that a call asks for.
///
/// # Errors
/// When there is no such tool, or no grammar of such a form.
pub(crate) fn grammar(call: &Call, model: &TokenModel) -> Result<Option<Grammar>, Fault> {
    let must_call = matches!(call.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
    match &call.constraint {
        Some(_) if must_call => Err(Fault::field(
            "response_format",
            "a reply cannot both be a call and have another form; leave out response_format or tool_choice",
        )),
        Some(Constraint::JsonObject) => Ok(Some(Grammar::JsonObject)),
        Some(Constraint::JsonSchema(schema)) => Ok(Some(Grammar::JsonSchema(schema.to_string()))),
        Some(Constraint::Regex(pattern)) => Ok(Some(Grammar::Regex(pattern.clone()))),
        Some(Constraint::Grammar(grammar)) => Ok(Some(Grammar::Lark(grammar.clone()))),
        None if must_call => calls(call, model).map(Some),
        None => Ok(None),
    }
}

/// The grammar of calls of the tools that may be called.
fn calls(call: &Call, model: &TokenModel) -> Result<Grammar, Fault> {
    let tools: Vec<ToolSpec> = match &call.tool_choice {
        ToolChoice::Named(name) => call.tools.iter().filter(|tool| tool.name == *name).cloned().collect(),
        _ => call.tools.clone(),
    };
    if tools.is_empty() {
        let message = match &call.tool_choice {
            ToolChoice::Named(name) => format!("tool_choice names {name:?}, which is not among the tools"),
            _ => "tool_choice asks for a call, but there are no tools".into(),
        };
        return Err(Fault::field("tool_choice", message));
    }
    let several = call.parallel_calls && matches!(call.tool_choice, ToolChoice::Required);
    let found = model.format.chat().must_call(&tools, several);
    let unknown = || {
        let message =
            "this model writes calls in a format that no grammar is known of; use tool_choice = \"auto\"";
        Fault::field("tool_choice", message)
    };
    found.map(Grammar::Lark).ok_or_else(unknown)
}
