//! The tool `python`, which runs the model's code in a local sandbox of `levade-sandbox` or in a
//! service.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use levade_process::Supervisor;
use levade_sandbox::service::{CellResponse, CommandStatus, JupyterResponse, RunJupyter};
use levade_sandbox::{
    Cell, Demand, EndReason, Limits, Options, Remote, Sandbox, SandboxError, SessionOptions,
};
use levade_text::ToolSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::sync::{Mutex, OnceCell};

use super::{
    CallError, OptionError, Session, ToolContext, ToolError, ToolOptions, ToolOutput, Toolbox,
    read_key,
};

/// Options of `[[tool]] kind = "sandbox"`, which runs Python code that the model writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxKeys {
    /// Whether variables persist between the calls of an attempt. It must be false if `url` is set.
    pub persistent: bool,
    /// Maximum memory of the processes of a call, in MiB.
    pub memory_mb: u64,
    /// Maximum output of a call that the model reads, in bytes. The middle of longer output is
    /// omitted.
    pub output_bytes: usize,
    /// Required level of protection. If it is not available, no code runs.
    pub protection: Demand,
    /// Python interpreter: a command name, a file, or the directory of a virtual environment.
    pub python: PathBuf,
    /// Names of modules that are imported before any code runs.
    pub preload: Vec<String>,
    /// Maximum number of concurrent calls; 0 means one per core.
    pub concurrency: usize,
    /// Maximum number of attempts with an open session.
    pub sessions: usize,
    /// URL of a service with the API of SandboxFusion, which runs the code instead of this machine.
    /// `None` runs the code on this machine.
    pub url: Option<String>,
    /// Name of the environment variable with the API key of the service at `url`. `None` sends no
    /// key.
    pub key_env: Option<String>,
}

impl Default for SandboxKeys {
    fn default() -> Self {
        let sandbox = Options::default();
        let limits = Limits::default();
        SandboxKeys {
            persistent: true,
            memory_mb: limits.memory_mb,
            output_bytes: 4096,
            protection: sandbox.protection,
            python: sandbox.python,
            preload: sandbox.preload,
            concurrency: 0,
            sessions: sandbox.sessions,
            url: None,
            key_env: None,
        }
    }
}

/// Time that a call may take in addition to the run time of its code, in seconds: for waiting until
/// other calls finish, and for starting the interpreter.
const MAX_OVERHEAD_SECONDS: f64 = 120.0;

impl SandboxKeys {
    /// Returns the limits of a call whose code may run for `seconds`. `None` means the default of
    /// [`Limits`].
    fn limits(&self, seconds: Option<f64>) -> Limits {
        let limits = Limits::default();
        let seconds = seconds.unwrap_or(limits.seconds);
        Limits { seconds, memory_mb: self.memory_mb, output_bytes: self.output_bytes, ..limits }
    }

    /// Returns the options of the local sandbox.
    fn sandbox(&self) -> Options {
        let options = Options::default();
        Options {
            protection: self.protection,
            python: self.python.clone(),
            preload: self.preload.clone(),
            sessions: self.sessions,
            concurrency: if self.concurrency > 0 { self.concurrency } else { options.concurrency },
            ..options
        }
    }
}

impl ToolOptions for SandboxKeys {
    fn has_effects(&self) -> bool {
        false
    }

    fn timeout(&self, seconds: Option<f64>) -> Option<f64> {
        Some(self.limits(seconds).seconds + MAX_OVERHEAD_SECONDS)
    }

    fn check(&self, seconds: Option<f64>) -> Result<(), OptionError> {
        let limits = self.limits(seconds);
        if let Err(why) = limits.check() {
            let range = why.split_once("must be ").map_or(why.as_str(), |(_, range)| range);
            let (key, value) = match why.split('`').nth(1) {
                Some("memory_mb") => ("memory_mb", self.memory_mb.to_string()),
                Some("output_bytes") => ("output_bytes", self.output_bytes.to_string()),
                _ => ("seconds", limits.seconds.to_string()),
            };
            OptionError::ensure(false, key, value, range)?;
        }
        let Some(url) = &self.url else { return Ok(()) };
        let is_http = url.starts_with("http://") || url.starts_with("https://");
        let range = "a URL that starts with http:// or https://";
        OptionError::ensure(is_http, "url", format!("\"{url}\""), range)?;
        let range = "false if `url` is set, because calls of a service are independent of each \
                     other";
        OptionError::ensure(!self.persistent, "persistent", true, range)
    }

    fn toolbox(
        &self,
        name: String,
        seconds: Option<f64>,
        _: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String> {
        Ok(Arc::new(CodeTool::new(name, self.clone(), seconds)?))
    }
}

/// Tool that runs Python code. The argument is `code`; the tool result is the printed output and
/// the value of the last expression.
///
/// Exceptions, interpreter crashes and service outages become observations. They are counted by the
/// metrics `exceptions`, `time_limits`, `memory_limits`, `crashes`, `restarts` and `unavailable`.
#[derive(Debug, Clone)]
pub struct CodeTool {
    /// Name of the toolbox. The tool itself is always called [`CodeTool::TOOL`].
    name: String,
    keys: SandboxKeys,
    /// Limits on time, memory and output of each call.
    limits: Limits,
    /// API key of the service; `None` if the service needs no key.
    key: Option<String>,
    /// Local sandbox, set at its first use. The inner value is `None` if a service runs the code.
    started: Arc<OnceCell<Option<Sandbox>>>,
}

impl CodeTool {
    /// Name of the toolbox's kind in a recipe.
    pub const NAME: &'static str = "sandbox";

    /// Name by which the model calls the tool.
    pub const TOOL: &'static str = "python";

    /// Creates the toolbox `name`, in which the code of a call may run for `seconds`. `None` means
    /// the default of [`Limits`].
    ///
    /// # Errors
    /// Returns an error if the environment variable for the API key is not set or is empty.
    pub fn new(name: String, keys: SandboxKeys, seconds: Option<f64>) -> Result<Self, String> {
        let limits = keys.limits(seconds);
        let key = read_key(keys.key_env.as_deref())?;
        Ok(CodeTool { name, keys, limits, key, started: Arc::default() })
    }

    /// Returns whether variables persist between the calls of an attempt. Calls that a service runs
    /// never share variables.
    fn is_persistent(&self) -> bool {
        self.keys.persistent && self.keys.url.is_none()
    }

    /// Returns the description of the tool for the model.
    fn spec(&self) -> ToolSpec {
        let names = if self.is_persistent() {
            "Variables are kept between calls."
        } else {
            "Each call starts afresh, without the variables of earlier ones."
        };
        let seconds = self.limits.seconds;
        ToolSpec {
            name: Self::TOOL.to_owned(),
            description: format!(
                "Runs Python code and returns what it prints and the value of its last \
                 expression. {names} There is no network. A call may take {seconds} seconds."
            ),
            parameters: json!({
                "type": "object",
                "properties": { "code": { "type": "string", "description": "The code." } },
                "required": ["code"],
                "additionalProperties": false,
            }),
        }
    }

    /// Returns the local sandbox, which is started at the first use. Returns `None` if a service
    /// runs the code.
    async fn sandbox(&self) -> Result<Option<&Sandbox>, SandboxError> {
        Ok(self
            .started
            .get_or_try_init(async || match &self.keys.url {
                Some(_) => Ok(None),
                None => Sandbox::start(self.keys.sandbox()).await.map(Some),
            })
            .await?
            .as_ref())
    }

    fn session(&self, sandbox: &Sandbox) -> Result<levade_sandbox::Session, SandboxError> {
        sandbox.session(SessionOptions { limits: self.limits, ..SessionOptions::default() })
    }

    fn open_error(&self, error: SandboxError) -> ToolError {
        ToolError::Open { tool: self.name.clone(), why: error.to_string() }
    }
}

/// Returns the code in the arguments of a tool call, or an error message for the model.
fn code_argument(arguments: &Map<String, Value>) -> Result<&str, String> {
    if let Some(extra) = arguments.keys().find(|key| *key != "code") {
        return Err(format!("{extra:?} is not an argument of this tool; its argument is \"code\""));
    }
    match arguments.get("code") {
        Some(Value::String(code)) => Ok(code),
        Some(other) => Err(format!("the argument \"code\" is {other}, but it must be a string")),
        None => Err("\"code\" is missing".to_owned()),
    }
}

#[async_trait]
impl Toolbox for CodeTool {
    fn name(&self) -> &str {
        &self.name
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![self.spec()])
    }

    async fn check_ready(&self) -> Result<(), ToolError> {
        self.sandbox().await.map(drop).map_err(|error| self.open_error(error))
    }

    async fn open(&self, _attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let kept = match self.sandbox().await.map_err(|error| self.open_error(error))? {
            Some(sandbox) if self.is_persistent() => {
                Some(self.session(sandbox).map_err(|error| self.open_error(error))?)
            }
            _ => None,
        };
        let remote = self
            .keys
            .url
            .as_ref()
            .map(|url| Remote::new(url, self.key.clone()))
            .transpose()
            .map_err(|error| self.open_error(error))?;
        Ok(Box::new(CodeSession { tool: self.clone(), session: Mutex::new(kept), remote }))
    }
}

/// Session of the code tool for one attempt.
struct CodeSession {
    tool: CodeTool,
    /// The interpreter, if variables persist.
    session: Mutex<Option<levade_sandbox::Session>>,
    remote: Option<Remote>,
}

#[async_trait]
impl Session for CodeSession {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![self.tool.spec()]
    }

    fn can_run_parallel(&self, _tool: &str) -> bool {
        !self.tool.is_persistent()
    }

    async fn call(&self, _tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let code = match code_argument(arguments) {
            Ok(code) => code,
            Err(why) => return ToolOutput::error(CallError::BadArguments, why),
        };
        let limits = &self.tool.limits;
        let cell_output = match &self.remote {
            Some(remote) => remote
                .run_jupyter(&request(code, limits))
                .await
                .map(|answer| CellOutput::from_response(&answer)),
            None if self.tool.is_persistent() => {
                self.run_persistent(code).await.map(|cell| CellOutput::from_cell(&cell))
            }
            None => self.run_fresh(code).await.map(|cell| CellOutput::from_cell(&cell)),
        };
        match cell_output {
            Ok(cell_output) => cell_output.output(limits, self.tool.is_persistent()),
            Err(error) => count_metric(
                ToolOutput::error(CallError::Unavailable, format!("the code was not run: {error}")),
                "unavailable",
            ),
        }
    }

    async fn close(&mut self) -> Result<(), ToolError> {
        let Some(session) = self.session.get_mut().take() else { return Ok(()) };
        session.finish().await.map(drop).map_err(|error| ToolError::Close {
            tool: self.tool.name.clone(),
            why: error.to_string(),
        })
    }
}

impl CodeSession {
    /// Runs code in the persistent interpreter of the attempt.
    async fn run_persistent(&self, code: &str) -> Result<Cell, SandboxError> {
        match &mut *self.session.lock().await {
            Some(session) => session.cell(code).await,
            None => Err(SandboxError::Broken("the session is closed".into())),
        }
    }

    /// Runs code in a new interpreter.
    async fn run_fresh(&self, code: &str) -> Result<Cell, SandboxError> {
        let sandbox = self.tool.sandbox().await?;
        let sandbox = sandbox.ok_or_else(|| SandboxError::Broken("it is elsewhere".into()))?;
        self.tool.session(sandbox)?.cell(code).await
    }
}

fn request(code: &str, limits: &Limits) -> RunJupyter {
    RunJupyter {
        cells: vec![code.to_owned()],
        cell_timeout: limits.seconds,
        total_timeout: limits.seconds,
        memory_limit_mb: limits.memory_mb as i64,
        kernel: "python3".into(),
        files: BTreeMap::new(),
        fetch_files: Vec::new(),
    }
}

fn count_metric(mut output: ToolOutput, metric: &str) -> ToolOutput {
    *output.metrics.entry(metric.to_owned()).or_default() += 1.0;
    output
}

/// Result of running code, from the local sandbox or from a service.
struct CellOutput {
    stdout: String,
    stderr: String,
    shown: Vec<String>,
    traceback: Option<String>,
    ended: Option<EndReason>,
    is_fresh: bool,
}

impl CellOutput {
    fn from_cell(cell: &Cell) -> Self {
        CellOutput {
            stdout: cell.stdout.text(),
            stderr: cell.stderr.text(),
            shown: cell.shown.clone(),
            traceback: cell.error.as_ref().map(|error| error.traceback.join("\n")),
            ended: cell.ended,
            is_fresh: cell.is_fresh,
        }
    }

    fn from_response(answer: &JupyterResponse) -> Self {
        let none = CellResponse {
            stdout: String::new(),
            stderr: String::new(),
            display: Vec::new(),
            error: Vec::new(),
        };
        let cell = answer.cells.first().unwrap_or(&none);
        let driver = answer.driver.as_ref();
        let ended = match driver.map(|driver| (driver.status, driver.return_code)) {
            Some((CommandStatus::TimeLimitExceeded, _)) => Some(EndReason::TimeLimit),
            Some((_, Some(0))) | None => None,
            Some((_, code @ Some(..=-1))) => code.map(|code| EndReason::Signal(-code)),
            Some((_, code)) => Some(EndReason::Exit(code.unwrap_or(1))),
        };
        CellOutput {
            stdout: cell.stdout.clone(),
            stderr: cell.stderr.clone(),
            shown: cell
                .display
                .iter()
                .map(|shown| {
                    let plain = shown.get("text/plain").and_then(Value::as_str).map(str::to_owned);
                    plain.unwrap_or_else(|| {
                        format!("[{}]", shown.keys().cloned().collect::<Vec<_>>().join(", "))
                    })
                })
                .collect(),
            traceback: cell.error.first().map(|error| error.traceback.join("\n")),
            ended,
            is_fresh: false,
        }
    }

    fn output(self, limits: &Limits, persistent: bool) -> ToolOutput {
        let mut parts: Vec<String> = Vec::new();
        if self.is_fresh {
            parts.push(
                "[the interpreter was started afresh: earlier variables are lost]".to_owned(),
            );
        }
        parts.extend([self.stdout.clone()].into_iter().filter(|text| !text.is_empty()));
        parts.extend(self.shown.clone());
        parts.extend([self.stderr.clone()].into_iter().filter(|text| !text.is_empty()));
        parts.extend(self.traceback.clone());
        let lost = if persistent { "; variables are lost" } else { "" };
        let (why, metric) = match self.ended {
            Some(EndReason::TimeLimit) => {
                (format!("stopped after {} seconds", limits.seconds), "time_limits")
            }
            Some(EndReason::MemoryLimit) => (
                format!("stopped: it held more than {} MiB of memory", limits.memory_mb),
                "memory_limits",
            ),
            Some(EndReason::Exit(code)) => {
                (format!("the interpreter ended with exit code {code}"), "crashes")
            }
            Some(EndReason::Signal(signal)) => {
                (format!("the interpreter died of signal {signal}"), "crashes")
            }
            None => (String::new(), "exceptions"),
        };
        if self.ended.is_some() {
            parts.push(format!("[{why}{lost}]"));
        }
        let text: Vec<&str> = parts.iter().map(|part| part.trim_end_matches('\n')).collect();
        let text = text.join("\n");
        let text = if text.is_empty() { "[no output]".to_owned() } else { text };
        let output = if self.ended.is_some() || self.traceback.is_some() {
            count_metric(ToolOutput::error(CallError::Failed, text), metric)
        } else {
            ToolOutput::text(text)
        };
        if self.is_fresh { count_metric(output, "restarts") } else { output }
    }
}

#[cfg(test)]
#[path = "sandbox_tests.rs"]
mod tests;
