//! A toolbox whose long tool results another agent summarizes before the model reads them.

use std::sync::Arc;

use async_trait::async_trait;
use levade_text::{ContentPart, ToolSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::helper::{HelperCaller, HelperSlot};
use super::middleware::{ToolMiddleware, WrappedSession};
use super::output::Branch;
use super::{
    OmittedPart, Permit, ResultTruncation, Session, ToolContext, ToolError, ToolOutput, Toolbox,
};

/// Options of `summarize`: another agent summarizes long tool results before the model reads them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SummaryKeys {
    /// Name of the agent that summarizes.
    pub agent: String,
    /// Length, in characters, above which a tool result is summarized.
    #[serde(default = "default_threshold")]
    pub above: usize,
    /// Instruction to the summarizing agent, placed before the call and its tool result.
    #[serde(default = "default_instruction")]
    pub instruction: String,
}

fn default_threshold() -> usize {
    2000
}

fn default_instruction() -> String {
    "Condense the answer of a tool for the one who called it. Keep every fact, number, name and \
     address that the call was after, in the words of the answer; compute and add nothing, and \
     leave out the rest."
        .into()
}

/// Toolbox whose long tool results another agent summarizes. Errors are passed on unchanged.
pub struct SummarizedToolbox {
    /// Toolbox whose results are summarized.
    pub toolbox: Arc<dyn Toolbox>,
    /// Slot for the agent that summarizes the results.
    pub slot: HelperSlot,
    /// Length above which tool results are summarized, and the instruction to the agent.
    pub keys: SummaryKeys,
}

impl SummarizedToolbox {
    /// Wraps `toolbox` so that its long tool results are summarized.
    pub fn new(toolbox: Arc<dyn Toolbox>, keys: SummaryKeys) -> Self {
        SummarizedToolbox { toolbox, slot: HelperSlot::new(keys.agent.as_str()), keys }
    }
}

#[async_trait]
impl Toolbox for SummarizedToolbox {
    fn name(&self) -> &str {
        self.toolbox.name()
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        self.toolbox.specs()
    }

    fn helpers(&self) -> Vec<HelperSlot> {
        let mut helpers = self.toolbox.helpers();
        helpers.push(self.slot.clone());
        helpers
    }

    async fn check_ready(&self) -> Result<(), ToolError> {
        self.toolbox.check_ready().await
    }

    async fn admit_session(&self) -> Permit {
        self.toolbox.admit_session().await
    }

    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let session = self.toolbox.open(attempt).await?;
        let caller = HelperCaller::new(self.slot.clone(), self.toolbox.name(), attempt);
        let middleware = Arc::new(SummaryMiddleware { caller, keys: self.keys.clone() });
        Ok(Box::new(WrappedSession { session, middleware }))
    }

    fn timeout_detail(&self) -> String {
        self.toolbox.timeout_detail()
    }
}

/// Middleware that summarizes the tool results of one attempt.
struct SummaryMiddleware {
    caller: HelperCaller,
    keys: SummaryKeys,
}

/// Name of the metric that counts summarized tool results.
const SUMMARIZED_METRIC: &str = "condensed";
/// Name of the metric that counts long tool results that were truncated because the summary failed.
const TRUNCATED_METRIC: &str = "cut";

impl SummaryMiddleware {
    /// Returns the agent's summary, or the truncated text if the agent did not finish. Also returns
    /// the name of the metric that counts this case.
    fn shorten_result(&self, text: &str, branch: &Branch) -> (String, &'static str) {
        let outcome = &branch.outcome;
        if outcome.error.is_none()
            && outcome.finish.is_complete()
            && !outcome.final_text.trim().is_empty()
        {
            return (outcome.final_text.clone(), SUMMARIZED_METRIC);
        }
        let truncation = ResultTruncation {
            characters: Some(self.keys.above),
            tokens: None,
            side: OmittedPart::Middle,
        };
        (truncation.truncate(text).unwrap_or_else(|| text.to_owned()), TRUNCATED_METRIC)
    }
}

#[async_trait]
impl ToolMiddleware for SummaryMiddleware {
    async fn post_process(
        &self,
        session: &dyn Session,
        tool: &str,
        arguments: &Map<String, Value>,
        output: ToolOutput,
    ) -> ToolOutput {
        let mut output = session.post_process(tool, arguments, output).await;
        let text = output.read();
        if output.is_error() || text.chars().count() <= self.keys.above {
            return output;
        }
        let call = Value::Object(arguments.clone());
        let question =
            format!("{}\n\nThe call: {tool} {call}\n\nThe answer:\n{text}", self.keys.instruction);
        let branch = match self.caller.request_help(question, None).await {
            Ok(branch) => branch,
            // This happens only if there are no agents at all, as in a check of tools.
            Err(why) => {
                tracing::debug!(why, "did not summarize a tool result");
                return output;
            }
        };
        let (shorter, metric) = self.shorten_result(&text, &branch);
        output.parts = vec![ContentPart::Text(shorter)];
        *output.metrics.entry(metric.to_owned()).or_default() += 1.0;
        output.branches.push(branch);
        output
    }
}
