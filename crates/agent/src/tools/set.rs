//! The tools of a recipe, opened together, called by name, closed together.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dressage_policy::awake::within;
use dressage_text::{ToolCall, ToolSpec};
use dressage_tree::CallCounts;
use serde::{Deserialize, Serialize};
use tracing::{debug, trace};

use super::{CallError, Tool, ToolError, ToolSession};

/// The tools that an agent may use, and how long each of their verbs may take.
#[derive(Clone)]
pub struct ToolSet {
    tools: Vec<(ToolSpec, Arc<dyn Tool>)>,
    deadline: Duration,
}

impl fmt::Debug for ToolSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.tools.iter().map(|(spec, _)| spec.name.as_str()).collect();
        f.debug_struct("ToolSet").field("tools", &names).field("deadline", &self.deadline).finish()
    }
}

impl ToolSet {
    /// A set whose sessions have `deadline` for each opening, call and closing.
    ///
    /// # Errors
    /// When two tools have the same name.
    pub fn new(tools: Vec<Arc<dyn Tool>>, deadline: Duration) -> Result<Self, ToolError> {
        let tools: Vec<_> = tools.into_iter().map(|tool| (tool.spec(), tool)).collect();
        for (at, (spec, _)) in tools.iter().enumerate() {
            if tools[..at].iter().any(|(earlier, _)| earlier.name == spec.name) {
                return Err(ToolError::SameName { name: spec.name.clone() });
            }
        }
        Ok(ToolSet { tools, deadline })
    }

    /// What the model is told of the tools, in the order they were given.
    pub fn specs(&self) -> Vec<ToolSpec> {
        self.tools.iter().map(|(spec, _)| spec.clone()).collect()
    }

    /// Opens a session of every tool for the attempt with this id.
    ///
    /// # Errors
    /// When a tool cannot be opened, or not within the deadline. What was opened before it is closed again.
    pub async fn open(&self, attempt: &str) -> Result<OpenTools, ToolError> {
        let mut open =
            OpenTools { sessions: Vec::new(), deadline: self.deadline, counts: CallCounts::default() };
        for (spec, tool) in &self.tools {
            let opened = match within(self.deadline, tool.open(attempt)).await {
                Some(opened) => opened,
                None => {
                    let why = format!("not ready within {:?}", self.deadline);
                    Err(ToolError::Open { tool: spec.name.clone(), why })
                }
            };
            match opened {
                Ok(session) => open.sessions.push((spec.name.clone(), session)),
                Err(error) => {
                    // The reason it did not open matters more than one why something else did not close.
                    let _ = open.close().await;
                    return Err(error);
                }
            }
        }
        Ok(open)
    }
}

/// What the model reads after a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observation {
    /// The text.
    pub text: String,
    /// How the call went.
    pub kind: ObservationKind,
}

/// How a call went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObservationKind {
    /// It was answered.
    Ok,
    /// It could not be read as a call.
    Malformed,
    /// It names no tool of the set.
    UnknownTool,
    /// Its arguments do not fit the tool.
    BadArguments,
    /// The tool tried and could not answer.
    Failed,
    /// The tool did not answer in time.
    Timeout,
}

/// Counts a call that went so.
fn count(counts: &mut CallCounts, kind: ObservationKind) {
    *match kind {
        ObservationKind::Ok => &mut counts.ok,
        ObservationKind::Malformed => &mut counts.malformed,
        ObservationKind::UnknownTool => &mut counts.unknown_tool,
        ObservationKind::BadArguments => &mut counts.bad_arguments,
        ObservationKind::Failed => &mut counts.failed,
        ObservationKind::Timeout => &mut counts.timeout,
    } += 1;
}

/// The sessions of one attempt. Close them with [`OpenTools::close`]; what is dropped without (a cancelled attempt) is
/// closed in the background of the tokio runtime it is dropped on.
pub struct OpenTools {
    sessions: Vec<(String, Box<dyn ToolSession>)>,
    deadline: Duration,
    counts: CallCounts,
}

impl fmt::Debug for OpenTools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.sessions.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("OpenTools").field("sessions", &names).field("counts", &self.counts).finish()
    }
}

impl OpenTools {
    /// Answers a call. It never fails: what goes wrong is in the observation.
    pub async fn execute(&mut self, call: &ToolCall) -> Observation {
        let start = Instant::now();
        let (kind, text) = self.answer(call).await;
        debug!(tool = %call.name, ?kind, seconds = start.elapsed().as_secs_f64(), "tool call");
        trace!(tool = %call.name, arguments = ?call.arguments, answer = %text, "what was said");
        self.observe(kind, text)
    }

    /// The observation for something that looks like a call but cannot be read as one; `why` says what is wrong with it.
    pub fn malformed(&mut self, why: &str) -> Observation {
        self.observe(ObservationKind::Malformed, format!("the tool call cannot be read: {why}"))
    }

    /// Counts a call that was written without tags. How it went is counted besides.
    pub fn count_bare(&mut self) {
        self.counts.bare += 1;
    }

    /// How the calls went so far.
    pub fn counts(&self) -> CallCounts {
        self.counts
    }

    /// Closes every session, also when one of them fails to.
    ///
    /// # Errors
    /// The first failure.
    pub async fn close(mut self) -> Result<(), ToolError> {
        close_all(std::mem::take(&mut self.sessions), self.deadline).await
    }

    async fn answer(&mut self, call: &ToolCall) -> (ObservationKind, String) {
        let Some(at) = self.sessions.iter().position(|(name, _)| *name == call.name) else {
            let names: Vec<&str> = self.sessions.iter().map(|(name, _)| name.as_str()).collect();
            let text = match names.as_slice() {
                [] => format!("there is no tool {:?}, nor any other", call.name),
                _ => format!("there is no tool {:?}; there is {}", call.name, names.join(", ")),
            };
            return (ObservationKind::UnknownTool, text);
        };
        let (name, session) = &mut self.sessions[at];
        match within(self.deadline, session.execute(&call.arguments)).await {
            Some(Ok(text)) => (ObservationKind::Ok, text),
            Some(Err(CallError::BadArguments(why))) => (ObservationKind::BadArguments, why),
            Some(Err(CallError::Failed(why))) => (ObservationKind::Failed, why),
            None => (ObservationKind::Timeout, format!("{name} did not answer within {:?}", self.deadline)),
        }
    }

    fn observe(&mut self, kind: ObservationKind, text: String) -> Observation {
        count(&mut self.counts, kind);
        let text = if kind == ObservationKind::Ok { text } else { format!("Error: {text}") };
        Observation { text, kind }
    }
}

impl Drop for OpenTools {
    fn drop(&mut self) {
        if self.sessions.is_empty() {
            return;
        }
        let sessions = std::mem::take(&mut self.sessions);
        // Without a runtime there is nothing left to close on: the process is ending.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(close_all(sessions, self.deadline));
        }
    }
}

async fn close_all(
    sessions: Vec<(String, Box<dyn ToolSession>)>,
    deadline: Duration,
) -> Result<(), ToolError> {
    let mut first = Ok(());
    for (tool, mut session) in sessions {
        let closed = match within(deadline, session.close()).await {
            Some(closed) => closed,
            None => Err(ToolError::Close { tool, why: format!("not done within {deadline:?}") }),
        };
        first = first.and(closed);
    }
    first
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::tools::Calculator;

    /// A tool that writes down what happens to it.
    struct Logged {
        name: &'static str,
        opens: bool,
        log: Arc<Mutex<Vec<String>>>,
    }

    struct LoggedSession {
        name: &'static str,
        log: Arc<Mutex<Vec<String>>>,
    }

    impl Drop for LoggedSession {
        fn drop(&mut self) {
            self.log.lock().unwrap().push(format!("drop {}", self.name));
        }
    }

    #[async_trait]
    impl Tool for Logged {
        fn spec(&self) -> ToolSpec {
            let parameters = json!({ "type": "object" });
            ToolSpec { name: self.name.into(), description: String::new(), parameters }
        }

        async fn open(&self, attempt: &str) -> Result<Box<dyn ToolSession>, ToolError> {
            self.log.lock().unwrap().push(format!("open {} for {attempt}", self.name));
            if !self.opens {
                return Err(ToolError::Open { tool: self.name.into(), why: "no".into() });
            }
            Ok(Box::new(LoggedSession { name: self.name, log: self.log.clone() }))
        }
    }

    #[async_trait]
    impl ToolSession for LoggedSession {
        async fn execute(&mut self, arguments: &Map<String, Value>) -> Result<String, CallError> {
            if arguments.contains_key("hang") {
                std::future::pending::<()>().await;
            }
            if arguments.contains_key("fail") {
                return Err(CallError::Failed("the backend is down".into()));
            }
            Ok("done".into())
        }

        async fn close(&mut self) -> Result<(), ToolError> {
            tokio::task::yield_now().await;
            self.log.lock().unwrap().push(format!("close {}", self.name));
            Ok(())
        }
    }

    fn set(tools: &[(&'static str, bool)]) -> (ToolSet, Arc<Mutex<Vec<String>>>) {
        let log = Arc::new(Mutex::new(Vec::new()));
        let tools = tools
            .iter()
            .map(|&(name, opens)| Arc::new(Logged { name, opens, log: log.clone() }) as Arc<dyn Tool>)
            .collect();
        (ToolSet::new(tools, Duration::from_millis(50)).unwrap(), log)
    }

    fn call(name: &str, arguments: Value) -> ToolCall {
        let arguments = arguments.as_object().unwrap().clone();
        ToolCall { id: String::new(), name: name.into(), arguments }
    }

    #[tokio::test]
    async fn every_way_a_call_can_go_is_observed_and_counted() {
        let (logged, _) = set(&[("slow", true)]);
        let mut tools: Vec<Arc<dyn Tool>> = vec![Arc::new(Calculator)];
        tools.extend(logged.tools.iter().map(|(_, tool)| tool.clone()));
        let set = ToolSet::new(tools, Duration::from_millis(50)).unwrap();
        assert_eq!(set.specs().iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["calculator", "slow"]);
        let mut open = set.open("a1").await.unwrap();
        for (call, kind, text) in [
            (Calculator::call("2 * 21"), ObservationKind::Ok, "42"),
            (call("slow", json!({"fail": 1})), ObservationKind::Failed, "Error: the backend is down"),
            (
                call("calculator", json!({})),
                ObservationKind::BadArguments,
                "Error: \"expression\" is missing",
            ),
            (
                call("abacus", json!({})),
                ObservationKind::UnknownTool,
                "Error: there is no tool \"abacus\"; there is calculator, slow",
            ),
            (
                call("slow", json!({"hang": 1})),
                ObservationKind::Timeout,
                "Error: slow did not answer within 50ms",
            ),
            // A call that hung does not spoil the session.
            (call("slow", json!({})), ObservationKind::Ok, "done"),
        ] {
            assert_eq!(open.execute(&call).await, Observation { text: text.into(), kind });
        }
        let malformed = open.malformed("it is not JSON");
        assert_eq!(malformed.text, "Error: the tool call cannot be read: it is not JSON");
        let one_each = CallCounts {
            ok: 2,
            malformed: 1,
            unknown_tool: 1,
            bad_arguments: 1,
            failed: 1,
            timeout: 1,
            bare: 0,
        };
        assert_eq!(open.counts(), one_each);
        assert_eq!((one_each.total(), one_each.errors()), (7, 5));
        open.close().await.unwrap();
    }

    #[tokio::test]
    async fn sessions_are_closed_once() {
        let (set, log) = set(&[("x", true), ("y", true)]);
        set.open("a1").await.unwrap().close().await.unwrap();
        let want =
            ["open x for a1", "open y for a1", "close x", "drop x", "close y", "drop y"].map(String::from);
        assert_eq!(*log.lock().unwrap(), want);
    }

    #[tokio::test]
    async fn what_was_opened_before_a_failure_is_closed() {
        let (set, log) = set(&[("x", true), ("y", false), ("z", true)]);
        let error = set.open("a1").await.unwrap_err();
        assert_eq!(error, ToolError::Open { tool: "y".into(), why: "no".into() });
        assert_eq!(
            *log.lock().unwrap(),
            ["open x for a1", "open y for a1", "close x", "drop x"].map(String::from)
        );
    }

    #[tokio::test]
    async fn a_cancelled_attempt_closes_its_sessions() {
        let (set, log) = set(&[("x", true)]);
        let attempt = async {
            let mut open = set.open("a1").await.unwrap();
            open.execute(&call("x", json!({}))).await;
            std::future::pending::<()>().await;
            drop(open);
        };
        assert!(within(Duration::from_millis(10), attempt).await.is_none());
        for _ in 0..1000 {
            if log.lock().unwrap().iter().any(|line| line == "close x") {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("never closed: {:?}", log.lock().unwrap());
    }

    #[test]
    fn names_are_unique() {
        let tools: Vec<Arc<dyn Tool>> = vec![Arc::new(Calculator), Arc::new(Calculator)];
        let error = ToolSet::new(tools, Duration::from_secs(1)).unwrap_err();
        assert_eq!(error, ToolError::SameName { name: "calculator".into() });
    }
}
