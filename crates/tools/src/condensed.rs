//! A toolbox whose long answers another agent condenses before they are read.

use std::sync::Arc;

use async_trait::async_trait;
use levade_text::{ContentPart, ToolSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::helper::{Asking, HelperSlot};
use super::output::Branch;
use super::wrapped::{Around, WrappedSession};
use super::{Cut, Session, Side, ToolContext, ToolError, ToolOutput, Toolbox};

/// `condense`: long answers of a toolbox are condensed by another agent before they are read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CondenseKeys {
    /// The agent, by name.
    pub agent: String,
    /// Answers of more characters than this are condensed.
    #[serde(default = "above")]
    pub above: usize,
    /// Words before the call and its answer.
    #[serde(default = "instruction")]
    pub instruction: String,
}

fn above() -> usize {
    2000
}

fn instruction() -> String {
    "Condense the answer of a tool for the one who called it. Keep every fact, number, name and address that the call \
     was after, in the words of the answer; compute and add nothing, and leave out the rest."
        .into()
}

/// Another toolbox whose long answers are condensed. An error is read as it is.
pub struct Condensed {
    /// The other toolbox.
    pub toolbox: Arc<dyn Toolbox>,
    /// The agent that condenses.
    pub slot: HelperSlot,
    /// Which answers are condensed, and how the agent is asked.
    pub keys: CondenseKeys,
}

impl Condensed {
    /// That toolbox with shorter answers.
    pub fn new(toolbox: Arc<dyn Toolbox>, keys: CondenseKeys) -> Self {
        Condensed { toolbox, slot: HelperSlot::new(keys.agent.as_str()), keys }
    }
}

#[async_trait]
impl Toolbox for Condensed {
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

    async fn ready(&self) -> Result<(), ToolError> {
        self.toolbox.ready().await
    }

    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let session = self.toolbox.open(attempt).await?;
        let asking = Asking::new(self.slot.clone(), self.toolbox.name(), attempt);
        let around = Arc::new(Open { asking, keys: self.keys.clone() });
        Ok(Box::new(WrappedSession { session, around }))
    }

    fn late(&self) -> String {
        self.toolbox.late()
    }
}

/// The condensing of an attempt's answers.
struct Open {
    asking: Asking,
    keys: CondenseKeys,
}

/// Name of the metric that counts answers that were condensed.
const CONDENSED: &str = "condensed";
/// Name of the metric that counts long answers whose condensing came to no end, and which were cut.
const CUT: &str = "cut";

impl Open {
    /// The answer in other words, those of the agent, or cut where it has none.
    fn shorter(&self, text: &str, branch: &Branch) -> (String, &'static str) {
        let outcome = &branch.outcome;
        if outcome.error.is_none() && outcome.finish.is_whole() && !outcome.final_text.trim().is_empty() {
            return (outcome.final_text.clone(), CONDENSED);
        }
        let cut = Cut { characters: Some(self.keys.above), tokens: None, side: Side::Middle };
        (cut.of(text).unwrap_or_else(|| text.to_owned()), CUT)
    }
}

#[async_trait]
impl Around for Open {
    async fn after(
        &self,
        session: &dyn Session,
        tool: &str,
        arguments: &Map<String, Value>,
        output: ToolOutput,
    ) -> ToolOutput {
        let mut output = session.after(tool, arguments, output).await;
        let text = output.read();
        if output.is_error() || text.chars().count() <= self.keys.above {
            return output;
        }
        let call = Value::Object(arguments.clone());
        let question = format!("{}\n\nThe call: {tool} {call}\n\nThe answer:\n{text}", self.keys.instruction);
        let branch = match self.asking.ask(question, None).await {
            Ok(branch) => branch,
            // Only where there are no agents at all, as in a check of tools.
            Err(why) => {
                tracing::debug!(why, "an answer was not condensed");
                return output;
            }
        };
        let (shorter, metric) = self.shorter(&text, &branch);
        output.parts = vec![ContentPart::Text(shorter)];
        *output.metrics.entry(metric.to_owned()).or_default() += 1.0;
        output.branches.push(branch);
        output
    }
}
