//! An agent as a tool of another agent.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use levade_process::Supervisor;
use levade_text::ToolSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::helper::{HelperCaller, HelperSlot};
use super::output::Branch;
use super::{
    CallError, MAX_SECONDS, Session, ToolContext, ToolError, ToolOptions, ToolOutput, Toolbox,
};

/// Options of `[[tool]] kind = "agent"`: another agent of the run as a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubAgentKeys {
    /// Name of the agent that the tool calls.
    pub agent: String,
    /// Description of the tool for the model: what the model can request from the agent.
    pub description: String,
}

impl ToolOptions for SubAgentKeys {
    fn needs_name(&self) -> bool {
        true
    }

    /// Returns a timeout so long that the tool set never ends a call. The tool enforces its own
    /// timeout, at which the agent returns what it has.
    fn timeout(&self, _seconds: Option<f64>) -> Option<f64> {
        Some(MAX_SECONDS)
    }

    fn toolbox(
        &self,
        name: String,
        seconds: Option<f64>,
        _: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String> {
        let description = self.description.clone();
        let slot = HelperSlot::new(self.agent.as_str());
        Ok(Arc::new(SubAgent {
            name,
            description,
            slot,
            timeout: seconds.map(Duration::from_secs_f64),
        }))
    }
}

/// Name of the tool's only argument, which holds the request to the agent.
const REQUEST: &str = "request";

/// Tool that calls another agent of the run. Each call starts a separate conversation, whose final
/// answer is the tool result.
#[derive(Debug)]
pub struct SubAgent {
    /// Name of the tool and of its toolbox.
    pub name: String,
    /// Description of the tool for the model.
    pub description: String,
    /// Slot for the agent that the tool calls.
    pub slot: HelperSlot,
    /// Timeout for a call. `None` means the attempt timeout of the called agent. In both cases, the
    /// call ends shortly before the calling attempt does.
    pub timeout: Option<Duration>,
}

impl SubAgent {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: self.name.clone(),
            description: self.description.clone(),
            parameters: json!({
                "type": "object",
                "properties": {
                    REQUEST: {
                        "type": "string",
                        "description": "All that has to be known, since nothing else of this \
                                        conversation is.",
                    }
                },
                "required": [REQUEST],
                "additionalProperties": false,
            }),
        }
    }
}

#[async_trait]
impl Toolbox for SubAgent {
    fn name(&self) -> &str {
        &self.name
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![self.spec()])
    }

    fn helpers(&self) -> Vec<HelperSlot> {
        vec![self.slot.clone()]
    }

    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let caller = HelperCaller::new(self.slot.clone(), &self.name, attempt);
        Ok(Box::new(SubAgentSession {
            spec: self.spec(),
            caller,
            timeout: self.timeout,
            exchanges: Mutex::default(),
        }))
    }
}

struct SubAgentSession {
    spec: ToolSpec,
    caller: HelperCaller,
    timeout: Option<Duration>,
    /// Requests to the agent with their outcomes, as scorer input.
    exchanges: Mutex<Vec<Value>>,
}

#[async_trait]
impl Session for SubAgentSession {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![self.spec.clone()]
    }

    fn can_run_parallel(&self, _tool: &str) -> bool {
        true
    }

    async fn call(&self, _tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let Some(request) = arguments.get(REQUEST).and_then(Value::as_str) else {
            let why = format!("\"{REQUEST}\" must be given, as a text");
            return ToolOutput::error(CallError::BadArguments, why);
        };
        let branch = match self.caller.request_help(request.to_owned(), self.timeout).await {
            Ok(branch) => branch,
            Err(why) => return ToolOutput::error(CallError::Unavailable, why),
        };
        let Branch { agent, outcome, .. } = &branch;
        let exchange = json!({
            "request": request, "answer": outcome.final_text, "finish": outcome.finish, "turns": outcome.turns,
            "evidence": outcome.scorer_inputs,
        });
        self.exchanges.lock().unwrap_or_else(PoisonError::into_inner).push(exchange);
        let output = match (&outcome.error, outcome.finish.is_complete()) {
            (Some(why), _) => {
                ToolOutput::error(CallError::Unavailable, format!("{agent} broke: {why}"))
            }
            (None, true) => ToolOutput::text(outcome.final_text.clone()),
            (None, false) => {
                let why = format!(
                    "{agent} came to no answer: it was cut at a limit ({:?})",
                    outcome.finish
                );
                ToolOutput::error(CallError::Failed, why)
            }
        };
        ToolOutput { branches: vec![branch], ..output }
    }

    async fn scorer_input(&mut self) -> Result<Map<String, Value>, ToolError> {
        let requested =
            std::mem::take(self.exchanges.get_mut().unwrap_or_else(PoisonError::into_inner));
        let known = Some(requested).filter(|requested| !requested.is_empty());
        Ok(known
            .map(|requested| ("asked".to_owned(), Value::Array(requested)))
            .into_iter()
            .collect())
    }
}
