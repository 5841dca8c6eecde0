//! Grammars of the output formats that requests specify.

use std::sync::Arc;

use levade_conversation::Format;
use levade_policy::Grammar;
use levade_text::{OmittedKeyword, ToolSpec, enforceable_schema};

use crate::api_error::{ApiError, ErrorKind};
use crate::blocking::blocking;
use crate::metrics::{CallMetrics, add};
use crate::request::{Constraint, Request, ToolChoice};

/// Returns the name of the request field that specifies an output format, or `None` if the request
/// specifies no format.
pub(crate) fn format_field(call: &Request) -> Option<&'static str> {
    match (&call.constraint, &call.tool_choice) {
        (Some(_), _) => Some("response_format"),
        (None, ToolChoice::Required | ToolChoice::Named(_)) => Some("tool_choice"),
        _ => None,
    }
}

/// Returns the grammar of the output format that a request specifies, or `None` if it specifies no
/// format. Keywords of a tool's schema that a grammar cannot enforce are omitted and counted,
/// unless the tool is strict.
///
/// # Errors
/// Returns an error if a forced tool does not exist or no grammar of the model's tool calls is
/// known. Returns an error if a grammar cannot enforce a keyword in the schema of the completion or
/// of a strict tool. Returns an error if the request specifies both a format and a forced tool
/// call.
pub(crate) async fn grammar(
    metrics: &CallMetrics,
    call: &Request,
    format: &Arc<Format>,
) -> Result<Option<Grammar>, ApiError> {
    let must_call = matches!(call.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
    match &call.constraint {
        Some(_) if must_call => Err(ApiError::field(
            "response_format",
            "a completion cannot be both a tool call and another output format; leave out \
             response_format or tool_choice",
        )),
        Some(Constraint::JsonObject) => Ok(Some(Grammar::JsonObject)),
        Some(Constraint::JsonSchema(schema)) => json_schema(schema.clone()).await.map(Some),
        Some(Constraint::Regex(pattern)) => Ok(Some(Grammar::Regex(pattern.clone()))),
        Some(Constraint::Grammar(grammar)) => Ok(Some(Grammar::Lark(grammar.clone()))),
        None if must_call => calls(metrics, call, format).await.map(Some),
        None => Ok(None),
    }
}

/// Returns the grammar of a completion that matches a JSON schema.
async fn json_schema(schema: serde_json::Value) -> Result<Grammar, ApiError> {
    let followed = blocking(move || enforceable_schema(&schema)).await?;
    let (schema, ignored_keywords) =
        followed.map_err(|why| ApiError::new(ErrorKind::Internal, why))?;
    match ignored_keywords.first() {
        None => Ok(Grammar::JsonSchema(schema.to_string())),
        Some(found) => {
            let message = format!(
                "the schema has {}, which no grammar can enforce; leave it out",
                location_text(found)
            );
            Err(ApiError::field("response_format", message))
        }
    }
}

/// Returns the grammar of tool calls that the request's `tool_choice` allows.
async fn calls(
    metrics: &CallMetrics,
    call: &Request,
    format: &Arc<Format>,
) -> Result<Grammar, ApiError> {
    let tools: Vec<ToolSpec> = match &call.tool_choice {
        ToolChoice::Named(name) => {
            call.tools.iter().filter(|tool| tool.name == *name).cloned().collect()
        }
        _ => call.tools.clone(),
    };
    if tools.is_empty() {
        let message = match &call.tool_choice {
            ToolChoice::Named(name) => {
                format!("tool_choice names {name:?}, which is not among the tools")
            }
            _ => "tool_choice requires a tool call, but there are no tools; add tools or leave \
                  out tool_choice"
                .into(),
        };
        return Err(ApiError::field("tool_choice", message));
    }
    let several = call.parallel_calls && matches!(call.tool_choice, ToolChoice::Required);
    let format = Arc::clone(format);
    let found = blocking(move || format.chat().must_call(&tools, several)).await?;
    let found = found.ok_or_else(|| {
        let message = "this model writes tool calls in a format for which no grammar is known; \
                       use tool_choice = \"auto\"";
        ApiError::field("tool_choice", message)
    })?;
    if let Some(strict) = found.omitted.iter().find(|found| call.strict.contains(&found.tool)) {
        let message = format!(
            "the parameters of the strict tool {:?} have {}, which no grammar can enforce; leave \
             it out, or leave out `strict`",
            strict.tool,
            location_text(strict)
        );
        return Err(ApiError::field("tools", message));
    }
    for OmittedKeyword { tool, path, keyword } in &found.omitted {
        tracing::debug!(
            tool,
            path,
            keyword,
            "grammar of tool calls does not enforce a schema keyword"
        );
        metrics.count_ignored_field("tools", &format!("parameters.{keyword}"));
    }
    add(&metrics.ignored_keywords, found.omitted.len() as u64);
    Ok(Grammar::Lark(found.lark))
}

/// Describes an omitted keyword and its position in the schema, for an error message.
fn location_text(found: &OmittedKeyword) -> String {
    let path = if found.path.is_empty() { "the top level" } else { &found.path };
    match found.keyword.as_str() {
        "schema" => {
            format!("a value that is not a schema, or has no grammar, at {path}")
        }
        keyword => format!("the keyword {keyword:?} at {path}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Input;

    #[test]
    fn format_field_names_source_of_output_format() {
        let named = ToolChoice::Named("f".into());
        assert_eq!(
            field_of(Some(Constraint::JsonObject), ToolChoice::Auto),
            Some("response_format")
        );
        assert_eq!(field_of(None, ToolChoice::Required), Some("tool_choice"));
        assert_eq!(field_of(None, named), Some("tool_choice"));
        assert_eq!(
            [ToolChoice::Auto, ToolChoice::None].map(|choice| field_of(None, choice)),
            [None, None]
        );
    }

    fn field_of(constraint: Option<Constraint>, tool_choice: ToolChoice) -> Option<&'static str> {
        format_field(&Request {
            constraint,
            tool_choice,
            ..Request::new(Input::Text(String::new()))
        })
    }
}
