//! A connection to one MCP server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use levade_process::{Child, Input, Tail, TailReader};
use levade_text::ToolSpec;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CallToolResult, CancelledNotification,
    CancelledNotificationParam, ClientCapabilities, ClientConfig, ClientRequest, Implementation,
    PaginatedRequestParams, ProtocolVersion, RequestId, ServerResult,
};
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, ClientServiceExt, PeerRequestOptions,
    RunningService,
};
use rmcp::transport::streamable_http_client::{
    StreamableHttpClientTransport, StreamableHttpClientTransportConfig,
};
use rmcp::{RoleClient, ServiceError};
use serde_json::Value;
use tokio::sync::Mutex;

use super::ledger::RequestLedger;
use super::lines::LineTransport;
use super::web::HttpTransport;
use super::{MAX_RESPONSE_BYTES, McpServer, ProgressTimeout, reasons};

/// Timeout for a server process to exit after its standard input has been closed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for short requests to a server: closing, checking whether the server hangs, and listing
/// tools again.
const SHORT_REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of bytes that are kept from the end of a server's standard error.
const KEPT_STDERR_BYTES: usize = 16_000;

/// Maximum number of tools that a server may list.
const MAX_TOOLS: usize = 1000;

/// Connection to an MCP server.
pub(super) struct McpConnection {
    service: Mutex<RunningService<RoleClient, ClientConfig>>,
    peer: rmcp::Peer<RoleClient>,
    /// Process of the server. `None` if the server is at a URL.
    process: Option<ServerProcess>,
    ledger: Arc<RequestLedger>,
    /// Tools of the server, as of its last listing.
    tools: std::sync::Mutex<Arc<[ToolSpec]>>,
    /// Whether a call has timed out or been dropped since the last response of the server.
    is_silent: AtomicBool,
}

/// MCP call in flight. Dropping the value cancels the call at the server.
struct PendingCall<'a> {
    connection: &'a McpConnection,
    /// Id of the request. `None` until the request is sent.
    id: Option<RequestId>,
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        self.connection.is_silent.store(true, Ordering::Relaxed);
        if let (Some(id), Ok(runtime)) = (self.id.take(), tokio::runtime::Handle::try_current()) {
            let peer = self.connection.peer.clone();
            let cancelled = CancelledNotificationParam::new(Some(id), Some("given up".into()));
            runtime.spawn(async move {
                peer.send_notification(CancelledNotification::new(cancelled).into()).await
            });
        }
    }
}

/// Error of an MCP call without a valid response.
#[derive(Debug)]
pub(super) struct CallFailure {
    pub error: ServiceError,
    /// Description of the server's exit, as a suffix for the error. Empty if the server has not
    /// exited.
    pub exit_text: String,
}

/// Error of a connection to an MCP server that could not be established.
struct OpenFailure {
    why: String,
    /// Lifecycle of the protocol to use for a second connection, if the server may support only
    /// that lifecycle.
    generation: Option<ClientLifecycleMode>,
}

impl OpenFailure {
    fn from_error(error: &ClientInitializeError, ledger: &RequestLedger) -> Self {
        let generation = ledger.was_discovered_late().then(|| ClientLifecycleMode::Discover {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
        });
        OpenFailure { why: reasons::start_reason(error, ledger), generation }
    }
}

impl From<String> for OpenFailure {
    fn from(why: String) -> Self {
        OpenFailure { why, generation: None }
    }
}

/// Connection that is being opened. If the value is dropped early, the opening has timed out.
struct PendingConnection<'a> {
    ledger: Arc<RequestLedger>,
    /// Reader of the end of the server's standard error, if the server is a process.
    stderr: Option<Arc<TailReader>>,
    /// Receives the state of the server if the opening times out. `None` after the connection has
    /// opened or failed.
    late: Option<&'a std::sync::Mutex<String>>,
}

impl Drop for PendingConnection<'_> {
    fn drop(&mut self) {
        let Some(late) = self.late else { return };
        let printed =
            self.stderr.as_ref().map(|stderr| reasons::printed_suffix(&stderr.tail().text()));
        *late.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
            self.ledger.describe_activity() + &printed.unwrap_or_default();
    }
}

/// Process of an MCP server.
struct ServerProcess {
    child: Arc<Mutex<Child>>,
    /// Reader of the end of the process's standard error.
    stderr: Arc<TailReader>,
}

impl McpConnection {
    /// Connects to a server and lists its tools.
    ///
    /// If the server does not answer the first request, which is of the newer generation, within 10
    /// s, the SDK tries a handshake. A server that answers the first request later, and rejects the
    /// handshake, is started again with the newer generation only.
    ///
    /// `wants_handshake` remembers whether the server needs a handshake. The next connection then
    /// starts with the handshake, because some servers exit or stay silent after a request of the
    /// newer generation.
    ///
    /// If the opening is cancelled, `timeout_detail` receives the state of the server.
    pub async fn open(
        server: &McpServer,
        wants_handshake: &AtomicBool,
        late: &std::sync::Mutex<String>,
    ) -> Result<Self, String> {
        let first = if wants_handshake.load(Ordering::Relaxed) {
            ClientLifecycleMode::Initialize
        } else {
            ClientLifecycleMode::Auto {
                preferred_versions: vec![ProtocolVersion::V_2026_07_28],
                legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
            }
        };
        let opened = match Self::connect(server, first, late).await {
            Err(OpenFailure { generation: Some(generation), .. }) => {
                Self::connect(server, generation, late).await
            }
            other => other,
        };
        let has_shaken =
            opened.as_ref().is_ok_and(|connection| connection.ledger.has_shaken_hands());
        wants_handshake.store(has_shaken, Ordering::Relaxed);
        opened.map_err(|failure| failure.why)
    }

    async fn connect(
        server: &McpServer,
        lifecycle: ClientLifecycleMode,
        late: &std::sync::Mutex<String>,
    ) -> Result<Self, OpenFailure> {
        let is_either = matches!(lifecycle, ClientLifecycleMode::Auto { .. });
        let mut info = ClientConfig::new(
            ClientCapabilities::default(),
            Implementation::new("levade", env!("CARGO_PKG_VERSION")),
        );
        info.protocol_version = ProtocolVersion::LATEST_WITH_INITIALIZE;
        let ledger = Arc::<RequestLedger>::default();
        let mut pending =
            PendingConnection { ledger: Arc::clone(&ledger), stderr: None, late: Some(late) };
        let (process, served) = match server {
            McpServer::Program { launch, supervisor } => {
                let mut child = supervisor.start(launch, Input::Piped)?;
                let (Some(stdin), Some(stdout)) = (child.take_stdin().await, child.take_stdout())
                else {
                    return Err(
                        "the standard input and output of the server process are not available"
                            .to_owned()
                            .into(),
                    );
                };
                let process = ServerProcess::new(child);
                pending.stderr = Some(Arc::clone(&process.stderr));
                let transport =
                    LineTransport::new(stdout, stdin, MAX_RESPONSE_BYTES, Arc::clone(&ledger));
                (Some(process), info.serve_with_lifecycle(transport, lifecycle).await)
            }
            McpServer::Address { url, headers, client } => {
                let mut config = StreamableHttpClientTransportConfig::with_uri(url.as_str());
                config.custom_headers = headers.iter().cloned().collect();
                config.max_sse_event_size = MAX_RESPONSE_BYTES;
                config.max_json_response_size = MAX_RESPONSE_BYTES;
                let web = HttpTransport::new(client.clone(), headers, Arc::clone(&ledger));
                let transport = StreamableHttpClientTransport::with_client(web, config);
                (None, info.serve_with_lifecycle(transport, lifecycle).await)
            }
        };
        let service = match (served, &process) {
            (Ok(service), _) => service,
            (Err(error), process) => {
                pending.late = None;
                let mut failure = OpenFailure::from_error(&error, &ledger);
                let has_ended = ledger.has_ended() || reasons::is_closed(&error);
                if is_either && has_ended {
                    // It may have exited or closed the connection because it expects a handshake.
                    failure.generation = Some(ClientLifecycleMode::Initialize);
                }
                match &process {
                    // A process that is still running is ended together with the connection. Its
                    // exit status explains nothing.
                    Some(process) if has_ended => {
                        failure.why.push_str(&process.describe_exit().await)
                    }
                    Some(process) if ledger.rejection().is_none() => {
                        failure.why.push_str(&process.stderr_suffix())
                    }
                    _ => {}
                }
                return Err(failure);
            }
        };
        let peer = service.peer().clone();
        let service = Mutex::new(service);
        let is_silent = AtomicBool::new(false);
        let tools = std::sync::Mutex::default();
        let connection = McpConnection { service, peer, process, ledger, tools, is_silent };
        let listed = connection.update_tools().await;
        pending.late = None;
        if let Err(why) = listed {
            let exit_text = match &connection.process {
                Some(process) if connection.ledger.has_ended() => process.describe_exit().await,
                _ => String::new(),
            };
            connection.close().await;
            return Err(format!("{why}{exit_text}").into());
        }
        Ok(connection)
    }

    /// Returns the tools of the server, as of its last listing.
    pub fn tools(&self) -> Arc<[ToolSpec]> {
        Arc::clone(&self.tools.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Lists the tools again if the server has announced a change. Waits at most
    /// [`SHORT_REQUEST_TIMEOUT`], because the result of a call waits for the list. If the list
    /// arrives too late, the next call requests it again.
    pub async fn refresh_changed_tools(&self) {
        if !self.ledger.take_list_changed() {
            return;
        }
        match tokio::time::timeout(SHORT_REQUEST_TIMEOUT, self.update_tools()).await {
            Ok(Ok(())) => {}
            Ok(Err(why)) => {
                tracing::warn!(
                    why,
                    "an MCP server announced changed tools, but listing them failed"
                );
            }
            Err(_) => self.ledger.note_list_changed(),
        }
    }

    async fn update_tools(&self) -> Result<(), String> {
        // A change that is announced after this point is listed by the next update.
        self.ledger.take_list_changed();
        let tools = self.list_tools().await?;
        *self.tools.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = tools.into();
        Ok(())
    }

    async fn list_tools(&self) -> Result<Vec<ToolSpec>, String> {
        let mut tools: Vec<ToolSpec> = Vec::new();
        let mut cursor = None;
        let mut cursors = Vec::new();
        loop {
            let page = PaginatedRequestParams::default().with_cursor(cursor.take());
            let listed = self.peer.list_tools(Some(page)).await;
            let listed = listed.map_err(|error| {
                format!("the server does not list its tools: {}", reasons::call_reason(&error))
            })?;
            for tool in listed.tools {
                let spec = ToolSpec {
                    name: tool.name.into_owned(),
                    description: tool.description.unwrap_or_default().into_owned(),
                    parameters: Value::Object(Arc::unwrap_or_clone(tool.input_schema)),
                };
                // Calls use names, so the server itself cannot distinguish two tools of the same
                // name.
                match tools.iter().find(|known| known.name == spec.name) {
                    None => tools.push(spec),
                    Some(known) if *known == spec => {}
                    Some(_) => {
                        let tool = spec.name;
                        tracing::warn!(
                            tool,
                            "an MCP server lists two tools of the same name; using the first"
                        );
                    }
                }
            }
            if tools.len() > MAX_TOOLS {
                return Err(format!("the server has more than {MAX_TOOLS} tools"));
            }
            match listed.next_cursor.filter(|next| !next.is_empty()) {
                Some(next) if !cursors.contains(&next) && cursors.len() < MAX_TOOLS => {
                    cursors.push(next.clone());
                    cursor = Some(next);
                }
                // A repeated cursor leads to the same page.
                _ => return Ok(tools),
            }
        }
    }

    /// Calls a tool. A call that is dropped is cancelled at the server. If `progress_timeout` is
    /// set, progress reports extend the call, and the call ends with [`ServiceError::Timeout`] if a
    /// report is late.
    pub async fn call(
        &self,
        request: CallToolRequestParams,
        progress_timeout: Option<ProgressTimeout>,
    ) -> Result<CallToolResult, CallFailure> {
        let mut cancel_guard = PendingCall { connection: self, id: None };
        let mut options = PeerRequestOptions::no_options();
        if let Some(ProgressTimeout { report_timeout, total_timeout }) = progress_timeout {
            options = PeerRequestOptions::with_timeout(report_timeout)
                .with_max_total_timeout(total_timeout);
            options = options.reset_timeout_on_progress();
        }
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(request));
        let response = match self.peer.send_cancellable_request(request, options).await {
            Ok(handle) => {
                cancel_guard.id = Some(handle.id.clone());
                handle.await_response().await
            }
            Err(error) => Err(error),
        };
        std::mem::forget(cancel_guard);
        let is_late = matches!(response, Err(ServiceError::Timeout { .. }));
        self.is_silent.store(is_late, Ordering::Relaxed);
        let response = match response {
            Ok(ServerResult::CallToolResult(result)) => Ok(result),
            Ok(_) => Err(ServiceError::UnexpectedResponse),
            Err(error) => Err(error),
        };
        match response {
            Ok(result) => Ok(result),
            Err(error) => {
                let closed =
                    matches!(error, ServiceError::TransportClosed | ServiceError::TransportSend(_));
                let exit_text = match &self.process {
                    Some(process) if closed => process.describe_exit().await,
                    _ => String::new(),
                };
                Err(CallFailure { error, exit_text })
            }
        }
    }

    /// Closes the connection if the server hangs: a call was dropped or timed out, and the server
    /// does not respond to a further request. Returns whether the server hangs.
    pub async fn close_if_hung(&self) -> bool {
        if !self.is_silent.load(Ordering::Relaxed) || self.has_ended() {
            return false;
        }
        if matches!(tokio::time::timeout(SHORT_REQUEST_TIMEOUT, self.list_tools()).await, Ok(Ok(_)))
        {
            self.is_silent.store(false, Ordering::Relaxed);
            return false;
        }
        self.close().await;
        true
    }

    /// Returns whether the connection is closed.
    pub fn has_ended(&self) -> bool {
        self.peer.is_transport_closed()
    }

    /// Describes what the server did instead of responding to a call, as a suffix for an error.
    pub fn describe_activity(&self) -> String {
        self.ledger.describe_activity()
    }

    /// Returns the last lines of the server's standard error as a suffix for an error. The text is
    /// empty if the server printed nothing.
    pub fn stderr_suffix(&self) -> String {
        self.process.as_ref().map(ServerProcess::stderr_suffix).unwrap_or_default()
    }

    /// Closes the connection, and with it the standard input of a server process. If the process
    /// does not exit within [`EXIT_TIMEOUT`], its supervisor ends it in the background.
    pub async fn close(&self) {
        let _ = self.service.lock().await.close_with_timeout(SHORT_REQUEST_TIMEOUT).await;
        if let Some(process) = &self.process {
            let child = Arc::clone(&process.child);
            tokio::spawn(async move {
                let mut child = child.lock().await;
                if tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await.is_err() {
                    child.stop().await;
                }
            });
        }
    }
}

impl ServerProcess {
    fn new(mut child: Child) -> Self {
        let stderr = Arc::new(child.read_stderr(Tail::new(0, KEPT_STDERR_BYTES), None));
        ServerProcess { child: Arc::new(Mutex::new(child)), stderr }
    }

    /// Describes the exit of a server process that has closed its output, after waiting for the
    /// exit for up to 2 s.
    async fn describe_exit(&self) -> String {
        let ended = tokio::time::timeout(Duration::from_secs(2), async {
            self.child.lock().await.wait().await
        });
        let ended = ended.await.ok().and_then(Result::ok);
        if ended.is_some() {
            // The last lines may still be in transit.
            self.stderr.finish(SHORT_REQUEST_TIMEOUT).await;
        }
        let ended = ended.map(|code| match code {
            Some(code) if code > 128 => format!("; its process was ended by signal {}", code - 128),
            Some(code) => format!("; its process ended with code {code}"),
            None => "; its process was killed".into(),
        });
        format!("{}{}", ended.unwrap_or_default(), self.stderr_suffix())
    }

    /// Returns the process's standard error as a suffix for a reason. The text is empty if the
    /// process printed nothing.
    fn stderr_suffix(&self) -> String {
        reasons::printed_suffix(&self.stderr.tail().text())
    }
}
