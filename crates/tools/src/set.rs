//! The toolboxes of an agent: opens them together, dispatches calls by tool name, and closes them
//! together.

use std::fmt;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream;
use levade_policy::process_time::with_timeout;
use levade_policy::{IntervalTimer, crash_point};
use levade_tasks::Task;
use levade_text::{ParsedCompletion, ToolCall, ToolSpec};
use levade_tree::CallCounts;
use serde_json::{Map, Value};
use tokio::time::Instant;
use tracing::{debug, trace};

use super::descriptions::{ToolDescriptions, tool_names};
use super::lease::acquire_leases;
use super::observation::{Observation, ObservationKind};
use super::tool_list::{NAME_SEPARATOR, ToolList, ToolLists, describe_changes};
use super::usage::{Usage, UsageMeter};
use super::{HelperSlot, Permit, Session, ToolContext, ToolError, Toolbox};
use crate::nested;

/// Maximum number of concurrent calls of one turn, whose completion can contain any number.
const MAX_CONCURRENT_CALLS: usize = 32;

/// Maximum size of the scorer input of a toolbox as JSON, in bytes. The complete input is recorded
/// with the attempt.
const MAX_SCORER_INPUT_BYTES: usize = 1 << 20;

/// Set of toolboxes that an agent can use, each with its timeout.
#[derive(Clone)]
pub struct ToolSet {
    boxes: Vec<ToolboxEntry>,
    lists: ToolLists,
}

/// Toolbox of a set, with its timeout and settings.
#[derive(Clone)]
struct ToolboxEntry {
    toolbox: Arc<dyn Toolbox>,
    deadline: Duration,
    /// Whether an attempt is aborted if this toolbox does not work.
    strict: bool,
    meter: Arc<UsageMeter>,
}

impl fmt::Debug for ToolSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let boxes = self.boxes.iter().map(|entry| (entry.toolbox.name(), entry.deadline));
        f.debug_map().entries(boxes).finish()
    }
}

impl Default for ToolSet {
    /// Creates a set without toolboxes.
    fn default() -> Self {
        ToolSet { boxes: Vec::new(), lists: ToolLists::new(Some(ToolList::default())) }
    }
}

impl ToolSet {
    /// Creates a set of toolboxes that share one timeout. The timeout applies separately to each
    /// opening, call, collection of scorer input and closing.
    ///
    /// # Errors
    /// Returns [`ToolError::SameName`] if two toolboxes have the same name, or if the names of two
    /// tools clash even with the toolbox names as prefixes.
    pub fn new(boxes: Vec<Arc<dyn Toolbox>>, deadline: Duration) -> Result<Self, ToolError> {
        Self::with_timeouts(boxes.into_iter().map(|toolbox| (toolbox, deadline)).collect())
    }

    /// Creates a set of toolboxes, each with its own timeout. A timeout applies separately to each
    /// opening, call, collection of scorer input and closing.
    ///
    /// # Errors
    /// Returns [`ToolError::SameName`] if two toolboxes have the same name, or if the names of two
    /// tools clash even with the toolbox names as prefixes.
    pub fn with_timeouts(boxes: Vec<(Arc<dyn Toolbox>, Duration)>) -> Result<Self, ToolError> {
        for (at, (toolbox, _)) in boxes.iter().enumerate() {
            if boxes[..at].iter().any(|(earlier, _)| earlier.name() == toolbox.name()) {
                return Err(ToolError::SameName {
                    of: "tools".into(),
                    name: toolbox.name().to_owned(),
                });
            }
        }
        let fixed = boxes.iter().map(|(toolbox, _)| Some((toolbox.name(), toolbox.specs()?)));
        let fixed =
            fixed.collect::<Option<Vec<_>>>().map(|fixed| ToolList::new(&fixed)).transpose()?;
        let entry = |(toolbox, deadline)| {
            let meter = Arc::default();
            ToolboxEntry { toolbox, deadline, strict: false, meter }
        };
        Ok(ToolSet { boxes: boxes.into_iter().map(entry).collect(), lists: ToolLists::new(fixed) })
    }

    /// Marks the toolboxes for which `is_strict` returns true as strict. If a strict toolbox does
    /// not work, the attempt is aborted, so that it can be repeated. For other toolboxes, the model
    /// reads the error and continues.
    #[must_use]
    pub fn with_strict_tools(mut self, is_strict: impl Fn(&str) -> bool) -> Self {
        for entry in &mut self.boxes {
            entry.strict = is_strict(entry.toolbox.name());
        }
        self
    }

    /// Replaces the toolboxes' descriptions with `descriptions`. Texts set earlier are discarded.
    #[must_use]
    pub fn with_descriptions(mut self, descriptions: &ToolDescriptions) -> Self {
        self.lists.descriptions = Arc::new(descriptions.clone());
        self
    }

    /// Returns the texts that replace the descriptions of the toolboxes.
    pub fn descriptions(&self) -> &ToolDescriptions {
        &self.lists.descriptions
    }

    /// Returns slots for the agents that the toolboxes call.
    pub fn helpers(&self) -> Vec<HelperSlot> {
        self.boxes.iter().flat_map(|entry| entry.toolbox.helpers()).collect()
    }

    /// Returns whether the set has no toolbox.
    pub fn is_empty(&self) -> bool {
        self.boxes.is_empty()
    }

    /// Returns the tools that the prompts of attempts at `task` list, in the order of the
    /// toolboxes. If a toolbox knows its tools only after opening, the set must have been opened or
    /// [inspected](Self::discover_tools) before; otherwise the list is empty.
    pub fn specs(&self, task: &Task) -> Vec<ToolSpec> {
        self.lists.list_for(task).map(|list| list.specs.clone()).unwrap_or_default()
    }

    /// Returns the usage of each toolbox by name. It covers all clones of the set since the start
    /// of the process.
    pub fn usage(&self) -> impl Iterator<Item = (&str, Usage)> {
        self.boxes.iter().map(|entry| (entry.toolbox.name(), entry.meter.read()))
    }

    /// Checks that the toolboxes work and finds out which tools they have. If a toolbox does not
    /// know its tools in advance, a session is opened and closed.
    ///
    /// # Errors
    /// Returns an error if a toolbox is not ready, if a session cannot be opened or closed, or if
    /// the task selects or the set describes an unknown tool.
    pub async fn discover_tools(&self, attempt: &ToolContext) -> Result<(), ToolError> {
        for ToolboxEntry { toolbox, .. } in &self.boxes {
            toolbox.check_ready().await?;
        }
        if self.lists.list_for(&attempt.task).is_none() {
            self.open(attempt).await?.close().await?;
        }
        self.lists.check(&attempt.task)
    }

    /// Sets the tools of each toolbox, by toolbox name, from an earlier listing, so that no toolbox
    /// is opened to list its tools.
    ///
    /// # Errors
    /// Returns an error if the names of two tools clash.
    pub fn set_known_tools(&self, found: &[(String, Vec<ToolSpec>)]) -> Result<(), ToolError> {
        let found: Vec<(&str, Vec<ToolSpec>)> =
            found.iter().map(|(name, specs)| (name.as_str(), specs.clone())).collect();
        self.lists.set_known_tools(ToolList::new(&found)?);
        Ok(())
    }

    /// Opens a session of every toolbox for an attempt.
    ///
    /// # Errors
    /// Returns an error if a session cannot be opened or times out, or if the names of two tools
    /// clash. Sessions that are already open are then closed.
    pub async fn open(&self, attempt: &ToolContext) -> Result<OpenTools, ToolError> {
        let mut open = OpenTools::default();
        let opened = self.open_into(&mut open, attempt).await;
        if let Err(error) = opened {
            // The reason for the failed opening matters more than a failed close.
            let _ = open.close().await;
            return Err(error);
        }
        Ok(open)
    }

    async fn open_into(
        &self,
        open: &mut OpenTools,
        attempt: &ToolContext,
    ) -> Result<(), ToolError> {
        let toolboxes: Vec<&Arc<dyn Toolbox>> =
            self.boxes.iter().map(|entry| &entry.toolbox).collect();
        let leases = acquire_leases(&toolboxes, attempt).await?;
        for (ToolboxEntry { toolbox, deadline, strict, meter }, lease) in
            self.boxes.iter().zip(leases)
        {
            let name = toolbox.name().to_owned();
            toolbox.check_ready().await?;
            let opened = with_timeout(*deadline, toolbox.open(attempt)).await;
            let late = || {
                let why = format!("not ready within {deadline:?}{}", toolbox.timeout_detail());
                ToolError::Open { tool: name.clone(), why }
            };
            let session = opened.unwrap_or_else(|| Err(late()))?;
            open.sessions.push(OpenToolbox {
                name,
                session,
                tools: Vec::new(),
                appeared: Vec::new(),
                deadline: *deadline,
                strict: *strict,
                permit_timeout: attempt.deadline,
                meter: meter.clone(),
                lease,
            });
        }
        open.list = self.lists.fix_list(&attempt.task, || {
            let specs = open.sessions.iter().map(|open| (open.name.as_str(), open.session.specs()));
            ToolList::new(&specs.collect::<Vec<_>>())
        })?;
        for (at, open_box) in open.sessions.iter_mut().enumerate() {
            open_box.tools = open.list.toolbox_tools(at);
        }
        open.is_selected = attempt.task.tool_selection().is_some();
        Ok(())
    }
}

/// Open tool sessions of one attempt. Close them with [`OpenTools::close`]. If the value is dropped
/// instead, as by a cancelled attempt, the sessions are closed in the background on the current
/// tokio runtime.
#[derive(Default)]
pub struct OpenTools {
    sessions: Vec<OpenToolbox>,
    list: Arc<ToolList>,
    /// Whether the task selects its tools, so that no other tool can be called.
    is_selected: bool,
    counts: CallCounts,
}

struct OpenToolbox {
    name: String,
    session: Box<dyn Session>,
    /// Tools that the model knows: the prompt's tools, updated by announcements in observations.
    tools: Vec<ToolSpec>,
    /// Tools that observations have announced: the name for the model, and the toolbox's own name.
    appeared: Vec<(String, String)>,
    deadline: Duration,
    strict: bool,
    /// Maximum wait for a permit, which equals the maximum duration of the attempt.
    permit_timeout: Duration,
    meter: Arc<UsageMeter>,
    /// Permit to have the session open.
    lease: Permit,
}

impl fmt::Debug for OpenTools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.sessions.iter().map(|open| open.name.as_str()).collect();
        f.debug_struct("OpenTools").field("sessions", &names).field("counts", &self.counts).finish()
    }
}

impl OpenTools {
    /// Returns the tools that the prompt lists. The list is fixed when the set is opened.
    pub fn specs(&self) -> &[ToolSpec] {
        &self.list.specs
    }

    /// Returns the texts that sessions append to the last message of the prompt, or `None` if no
    /// session appends a text.
    pub fn opening(&self) -> Option<String> {
        let texts: Vec<String> =
            self.sessions.iter().filter_map(|open| open.session.opening()).collect();
        (!texts.is_empty()).then(|| texts.join("\n\n"))
    }

    /// Executes the tool calls of a completion and returns their observations, in the order of the
    /// calls. Never fails: errors become observations.
    ///
    /// `is_read` is whether the model will read the observations. If not, only calls that have an
    /// effect ([`Session::has_effect`]) are executed. The other calls are skipped and have no
    /// observation.
    pub async fn execute_calls(
        &mut self,
        completion: &ParsedCompletion,
        is_read: bool,
    ) -> Vec<Observation> {
        let mut observations = Vec::with_capacity(completion.calls.len());
        let mut together: Vec<BoxFuture<'_, Observation>> = Vec::new();
        for call in &completion.calls {
            let call = match call {
                Ok(call) if is_read || self.has_effect(call) => call,
                Ok(_) => continue,
                Err(malformed) => {
                    let text = format!("the tool call cannot be read: {}", malformed.why);
                    together
                        .push(Box::pin(ready(Observation::new(ObservationKind::Malformed, text))));
                    continue;
                }
            };
            if !self.is_parallel(call) {
                observations.extend(run_concurrently(std::mem::take(&mut together)).await);
                observations.push(self.execute(call).await);
                continue;
            }
            together.push(Box::pin(self.execute(call)));
        }
        observations.extend(run_concurrently(together).await);
        self.announce_changes(&mut observations);
        for observation in &observations {
            observation.kind.count(&mut self.counts);
        }
        if completion.bare {
            self.counts.bare += observations.len() as u32;
        }
        observations
    }

    /// Returns the number of tool calls so far, by result.
    pub fn counts(&self) -> CallCounts {
        self.counts
    }

    /// Collects the scorer input of all toolboxes. Returns the non-empty inputs by toolbox name,
    /// and the errors of the toolboxes that failed.
    pub async fn scorer_input(&mut self) -> (Map<String, Value>, Vec<ToolError>) {
        let mut found = Map::new();
        let mut missing = Vec::new();
        for OpenToolbox { name, session, deadline, .. } in &mut self.sessions {
            let wrong = |why: String| ToolError::ScorerInput { tool: name.clone(), why };
            let input = with_timeout(*deadline, session.scorer_input()).await;
            let input = input.unwrap_or_else(|| Err(wrong(describe_timeout(*deadline))));
            match input.map(Value::Object) {
                Ok(Value::Object(input)) if input.is_empty() => {}
                Ok(input) if input.to_string().len() > MAX_SCORER_INPUT_BYTES => {
                    missing.push(wrong(format!(
                        "the scorer input is longer than {MAX_SCORER_INPUT_BYTES} bytes"
                    )));
                }
                Ok(input) => match nested::depth_error(&input) {
                    Some(why) => missing.push(wrong(why)),
                    None => drop(found.insert(name.clone(), input)),
                },
                Err(error) => missing.push(error),
            }
        }
        (found, missing)
    }

    /// Closes every session, even if a session fails to close or this future is dropped before it
    /// completes.
    ///
    /// # Errors
    /// Returns the first error.
    pub async fn close(mut self) -> Result<(), ToolError> {
        let sessions = std::mem::take(&mut self.sessions);
        let tool = sessions.iter().map(|open| open.name.as_str()).collect::<Vec<_>>().join(", ");
        let closed = tokio::spawn(close_all(sessions)).await;
        closed.unwrap_or_else(|panic| Err(ToolError::Close { tool, why: panic.to_string() }))
    }

    /// Appends an announcement of changed tools to the last observation of each toolbox.
    fn announce_changes(&mut self, observations: &mut [Observation]) {
        if self.is_selected {
            return;
        }
        let mut taken: Vec<String> = self
            .sessions
            .iter()
            .flat_map(|open| open.appeared.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>())
            .collect();
        taken.extend(self.list.specs.iter().map(|spec| spec.name.clone()));
        for (at, OpenToolbox { name, session, tools, appeared, .. }) in
            self.sessions.iter_mut().enumerate()
        {
            let of = |observation: &&mut Observation| observation.toolbox.as_ref() == Some(name);
            let Some(last) = observations.iter_mut().rev().find(of) else { continue };
            let now = session.specs();
            for spec in &now {
                let is_known = appeared.iter().any(|(_, own)| *own == spec.name);
                if is_known || self.list.name_of(at, &spec.name).is_some() {
                    continue;
                }
                let is_free = !taken.contains(&spec.name);
                let called = if is_free {
                    spec.name.clone()
                } else {
                    format!("{name}{NAME_SEPARATOR}{}", spec.name)
                };
                taken.push(called.clone());
                appeared.push((called, spec.name.clone()));
            }
            let called = |spec: &ToolSpec| {
                let name = self
                    .list
                    .name_of(at, &spec.name)
                    .or_else(|| Some(&appeared.iter().find(|(_, own)| *own == spec.name)?.0[..]))
                    .unwrap_or(&spec.name);
                self.list.describe(ToolSpec { name: name.to_owned(), ..spec.clone() })
            };
            let all = |specs: &[ToolSpec]| specs.iter().map(called).collect::<Vec<_>>();
            if let Some(note) = describe_changes(&all(tools), &all(&now)) {
                last.text.push_str(&note);
                *tools = now;
            }
        }
    }

    /// Returns the session that a call addresses, and the tool's own name in this session. Tools of
    /// the prompt take precedence over tools that were announced later.
    fn find<'a>(&'a self, call: &'a ToolCall) -> Option<(&'a OpenToolbox, &'a str)> {
        if let Some((at, tool)) = self.list.find(&call.name) {
            return Some((self.sessions.get(at)?, tool));
        }
        let known = || self.sessions.iter().filter(|_| !self.is_selected);
        let announced =
            known().flat_map(|open| open.appeared.iter().map(move |(name, own)| (open, name, own)));
        let by_name = announced.clone().find(|(_, name, _)| **name == call.name);
        let full = |(open, _, own): &(&OpenToolbox, &String, &String)| {
            format!("{}{NAME_SEPARATOR}{own}", open.name)
        };
        let found = by_name.or_else(|| announced.clone().find(|tool| full(tool) == call.name));
        found.map(|(open, _, own)| (open, own.as_str()))
    }

    fn has_effect(&self, call: &ToolCall) -> bool {
        self.find(call).is_some_and(|(open, tool)| open.session.has_effect(tool))
    }

    fn is_parallel(&self, call: &ToolCall) -> bool {
        self.find(call).is_none_or(|(open, tool)| open.session.can_run_parallel(tool))
    }

    async fn execute(&self, call: &ToolCall) -> Observation {
        crash_point("tool_call");
        let (observation, time, waited) = self.execute_timed(call).await;
        let Observation { text, kind, .. } = &observation;
        let seconds = time.as_secs_f64();
        let waited_seconds = waited.as_secs_f64();
        debug!(tool = %call.name, ?kind, seconds, waited_seconds, "executed a tool call");
        trace!(
            tool = %call.name,
            arguments = ?call.arguments,
            answer = %text,
            "tool call and its result"
        );
        let mut toolbox = None;
        let mut breaks = false;
        if let Some((open, _)) = self.find(call) {
            open.meter.add(time, waited);
            toolbox = Some(open.name.clone());
            breaks = open.strict && observation.failure.is_some() && *kind != ObservationKind::Ok;
        }
        Observation { call: Some(call.clone()), toolbox, breaks, ..observation }
    }

    /// Executes a tool call. Returns its observation, its duration, and its wait for a permit.
    async fn execute_timed(&self, call: &ToolCall) -> (Observation, Duration, Duration) {
        let start = Instant::now();
        let found = self.find(call);
        let permit = match found {
            Some((open, tool)) => with_timeout(open.permit_timeout, open.session.admit(tool)).await,
            None => Some(Permit::default()),
        };
        let waited = start.elapsed();
        let start = Instant::now();
        let timer = IntervalTimer::start();
        let observation = match (permit, found) {
            (Some(_permit), found) => self.execute_admitted(call, found).await,
            (None, found) => {
                let permit_timeout = found.map(|(open, _)| open.permit_timeout).unwrap_or_default();
                Observation::from_failure(
                    ObservationKind::Timeout,
                    format!(
                        "{} was not called: its turn did not come within {permit_timeout:?}",
                        call.name
                    ),
                )
            }
        };
        let interval = Some(timer.interval());
        (Observation { interval, ..observation }, start.elapsed(), waited)
    }

    /// Executes a tool call that has acquired its permit.
    async fn execute_admitted(
        &self,
        call: &ToolCall,
        found: Option<(&OpenToolbox, &str)>,
    ) -> Observation {
        let Some((OpenToolbox { session, deadline, .. }, tool)) = found else {
            let text = match self.specs() {
                [] => format!("there is no tool {:?}, nor any other", call.name),
                specs => {
                    format!("there is no tool {:?}; there is {}", call.name, tool_names(specs))
                }
            };
            return Observation::new(ObservationKind::UnknownTool, text);
        };
        if !session.specs().iter().any(|spec| spec.name == tool) {
            let text = format!("the tool {:?} is no longer there", call.name);
            return Observation::from_failure(ObservationKind::UnknownTool, text);
        }
        let deadline = session
            .max_call_timeout()
            .map_or(*deadline, |session_timeout| session_timeout.max(*deadline));
        match with_timeout(deadline, session.call(tool, &call.arguments)).await {
            Some(output) => {
                Observation::from_output(session.post_process(tool, &call.arguments, output).await)
            }
            None => {
                let text = format!(
                    "{} did not answer within {deadline:?}{}",
                    call.name,
                    session.timeout_detail()
                );
                Observation::from_failure(ObservationKind::Timeout, text)
            }
        }
    }
}

/// Runs the futures in `work`, up to [`MAX_CONCURRENT_CALLS`] concurrently, and returns their
/// results in the order of `work`.
async fn run_concurrently(work: Vec<BoxFuture<'_, Observation>>) -> Vec<Observation> {
    stream::iter(work).buffered(MAX_CONCURRENT_CALLS).collect().await
}

impl Drop for OpenTools {
    fn drop(&mut self) {
        let sessions = std::mem::take(&mut self.sessions);
        // Without a runtime the process is ending, and nothing can close the sessions.
        let runtime = tokio::runtime::Handle::try_current();
        if let (false, Ok(runtime)) = (sessions.is_empty(), runtime) {
            runtime.spawn(close_all(sessions));
        }
    }
}

fn describe_timeout(deadline: Duration) -> String {
    format!("the toolbox did not finish within {deadline:?}")
}

async fn close_all(sessions: Vec<OpenToolbox>) -> Result<(), ToolError> {
    let mut first = Ok(());
    for OpenToolbox { name, mut session, deadline, lease: _lease, .. } in sessions {
        let closed = with_timeout(deadline, session.close()).await;
        let closed = closed.unwrap_or_else(|| {
            Err(ToolError::Close { tool: name, why: describe_timeout(deadline) })
        });
        first = first.and(closed);
    }
    first
}

#[cfg(test)]
#[path = "set_tests.rs"]
mod tests;
