//! One connection to a server.

use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dressage_text::ToolSpec;
use rmcp::model::{
    CallToolRequestParams, CallToolResult, ClientCapabilities, ClientConfig, Implementation,
    PaginatedRequestParams, ProtocolVersion,
};
use rmcp::service::{ClientInitializeError, ClientLifecycleMode, ClientServiceExt, RunningService};
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::streamable_http_client::{
    StreamableHttpClientTransport, StreamableHttpClientTransportConfig,
};
use rmcp::{RoleClient, ServiceError};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Child;
use tokio::sync::Mutex;

use super::web::Web;
use super::{MOST_BYTES, McpServer};
use crate::kept;

/// How long a server's keeper may take to end it.
const ENDING: Duration = Duration::from_secs(10);

/// How long a server may take to be told of the end.
const PATIENCE: Duration = Duration::from_secs(1);

/// Characters of what a server writes to its standard error that are kept: the end.
const KEPT: usize = 4000;

/// Most tools of a server.
const MOST_TOOLS: usize = 1000;

/// A connection to a server.
pub(super) struct Connection {
    service: Mutex<RunningService<RoleClient, ClientConfig>>,
    peer: rmcp::Peer<RoleClient>,
    /// The server's process, where it has one.
    process: Option<Process>,
    /// The tools that the server has.
    pub tools: Vec<ToolSpec>,
    /// Whether a call was given up since the server last said something.
    is_silent: AtomicBool,
}

/// A call under way; dropped before its end where it is given up.
struct Call<'a>(&'a Connection);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.is_silent.store(true, Ordering::Relaxed);
    }
}

/// A call that the server did not answer.
#[derive(Debug)]
pub(super) struct Failed {
    pub error: ServiceError,
    /// Words on the end of the server, to go on with; empty where it has not ended.
    pub over: String,
}

/// A connection that did not come about.
struct Refusal {
    why: String,
    /// The generation of the protocol that the server turned out to speak, where it said so too late.
    generation: Option<ClientLifecycleMode>,
}

impl Refusal {
    fn of(error: ClientInitializeError) -> Self {
        let generation = match &error {
            ClientInitializeError::ConflictInitResponseId(..) => Some(ClientLifecycleMode::Discover {
                preferred_versions: vec![ProtocolVersion::V_2026_07_28],
            }),
            ClientInitializeError::UncorrelatedErrorResponse { .. } => Some(ClientLifecycleMode::Initialize),
            _ => None,
        };
        Refusal { why: plainly(&dressage_http::causes(&error)).to_owned(), generation }
    }
}

/// An error of the SDK without the types of its own that it names.
fn plainly(why: &str) -> &str {
    let inner =
        why.strip_prefix("Send message error Transport [").and_then(|rest| rest.split_once("] error: "));
    let Some((_, why)) = inner else { return why };
    let why = why.rsplit_once(", when send ").map_or(why, |(why, _)| why);
    ["Client error: ", "unexpected server response: "]
        .iter()
        .find_map(|lead| why.strip_prefix(lead))
        .unwrap_or(why)
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Refusal { why, generation: None }
    }
}

/// The process of a server, under its keeper.
struct Process {
    keeper: Arc<Mutex<Child>>,
    /// End of what it wrote to its standard error.
    said: Arc<std::sync::Mutex<String>>,
}

impl Connection {
    /// Connects, and asks which tools there are. The SDK waits so long for the answer to its first question,
    /// and takes what comes later for an answer to the second. A server that starts slower than that is
    /// started again, and asked as its late answer says.
    pub async fn open(server: &McpServer) -> Result<Self, String> {
        let either = ClientLifecycleMode::Auto {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
            legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
        };
        match Self::connect(server, either).await {
            Err(Refusal { generation: Some(generation), .. }) => Self::connect(server, generation).await,
            other => other,
        }
        .map_err(|refusal| refusal.why)
    }

    async fn connect(server: &McpServer, lifecycle: ClientLifecycleMode) -> Result<Self, Refusal> {
        let mut info = ClientConfig::new(
            ClientCapabilities::default(),
            Implementation::new("dressage", env!("CARGO_PKG_VERSION")),
        );
        info.protocol_version = ProtocolVersion::LATEST_WITH_INITIALIZE;
        let (process, served) = match server {
            McpServer::Program { command, folder, passes, keeper } => {
                let mut child = keeper.start(dressage_policy::environment::passed(passes))?;
                let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
                    return Err("its standard input and output cannot be had".to_owned().into());
                };
                let process = Process::new(child);
                // A keeper that takes no order is gone, and its standard error says why.
                let _ = stdin.write_all(kept::order(command, folder, None).as_bytes()).await;
                let transport = AsyncRwTransport::new_client(stdout, stdin).with_max_line_length(MOST_BYTES);
                let served = info.serve_with_lifecycle(transport, lifecycle).await;
                (Some(process), served.map_err(Refusal::of))
            }
            McpServer::Address { url, headers, client } => {
                let mut config = StreamableHttpClientTransportConfig::with_uri(url.as_str());
                config.custom_headers = headers.iter().cloned().collect();
                config.max_sse_event_size = MOST_BYTES;
                config.max_json_response_size = MOST_BYTES;
                let transport = StreamableHttpClientTransport::with_client(Web(client.clone()), config);
                let served = info.serve_with_lifecycle(transport, lifecycle).await;
                (None, served.map_err(Refusal::of))
            }
        };
        let service = match (served, &process) {
            (Ok(service), _) => service,
            (Err(mut refusal), Some(process)) => {
                refusal.why.push_str(&process.end_told().await);
                return Err(refusal);
            }
            (Err(refusal), None) => return Err(refusal),
        };
        let peer = service.peer().clone();
        let (service, is_silent) = (Mutex::new(service), AtomicBool::new(false));
        let mut connection = Connection { service, peer, process, tools: Vec::new(), is_silent };
        match connection.list().await {
            Ok(tools) => connection.tools = tools,
            Err(why) => {
                let over = connection.why_over();
                connection.close().await;
                return Err(format!("{why}{over}").into());
            }
        }
        Ok(connection)
    }

    async fn list(&self) -> Result<Vec<ToolSpec>, String> {
        let mut tools = Vec::new();
        let mut cursor = None;
        loop {
            let page = PaginatedRequestParams::default().with_cursor(cursor.take());
            let listed = self.peer.list_tools(Some(page)).await;
            let listed = listed.map_err(|error| {
                format!("it does not say which tools it has: {}", dressage_http::causes(&error))
            })?;
            tools.extend(listed.tools.into_iter().map(|tool| ToolSpec {
                name: tool.name.into_owned(),
                description: tool.description.or(tool.title.map(Into::into)).unwrap_or_default().into_owned(),
                parameters: Value::Object(Arc::unwrap_or_clone(tool.input_schema)),
            }));
            if tools.len() > MOST_TOOLS {
                return Err(format!("it has more than {MOST_TOOLS} tools"));
            }
            match listed.next_cursor.filter(|next| !next.is_empty()) {
                Some(next) => cursor = Some(next),
                None => return Ok(tools),
            }
        }
    }

    /// Calls a tool. The server is told where the call is given up.
    pub async fn call(&self, request: CallToolRequestParams) -> Result<CallToolResult, Failed> {
        let given_up = Call(self);
        let answer = self.peer.call_tool(request).await;
        std::mem::forget(given_up);
        self.is_silent.store(false, Ordering::Relaxed);
        match answer {
            Ok(result) => Ok(result),
            Err(error) => {
                let closed = matches!(error, ServiceError::TransportClosed | ServiceError::TransportSend(_));
                let over = match &self.process {
                    Some(process) if closed => process.end_told().await,
                    _ => String::new(),
                };
                Err(Failed { error, over })
            }
        }
    }

    /// Ends the connection where a call was given up and the server, asked once more, does not answer: it
    /// hangs. Returns whether it does.
    pub async fn end_if_hung(&self) -> bool {
        if !self.is_silent.load(Ordering::Relaxed) || self.is_over() {
            return false;
        }
        if matches!(tokio::time::timeout(PATIENCE, self.list()).await, Ok(Ok(_))) {
            self.is_silent.store(false, Ordering::Relaxed);
            return false;
        }
        self.close().await;
        true
    }

    /// Whether nobody is at the other end any more.
    pub fn is_over(&self) -> bool {
        self.peer.is_transport_closed()
    }

    /// The end of the server in words, to go on with; empty where nothing is known.
    pub fn why_over(&self) -> String {
        self.process.as_ref().map(Process::told).unwrap_or_default()
    }

    /// Ends the connection. A process of this one, whose input has ended with it, is then ended in the
    /// background by its keeper, however long it takes.
    pub async fn close(&self) {
        let _ = self.service.lock().await.close_with_timeout(PATIENCE).await;
        if let Some(process) = &self.process {
            let keeper = Arc::clone(&process.keeper);
            tokio::spawn(async move {
                let mut keeper = keeper.lock().await;
                if tokio::time::timeout(ENDING, keeper.wait()).await.is_err() {
                    let _ = keeper.kill().await;
                }
            });
        }
    }
}

impl Process {
    fn new(mut keeper: Child) -> Self {
        let said = Arc::new(std::sync::Mutex::new(String::new()));
        if let Some(mut stderr) = keeper.stderr.take() {
            let said = Arc::clone(&said);
            tokio::spawn(async move {
                let mut buffer = vec![0; 16 << 10];
                while let Ok(count @ 1..) = stderr.read(&mut buffer).await {
                    let mut said = said.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    said.push_str(&String::from_utf8_lossy(&buffer[..count]));
                    if said.len() > 2 * KEPT {
                        let from = said.ceil_char_boundary(said.len() - KEPT);
                        said.drain(..from);
                    }
                }
            });
        }
        Process { keeper: Arc::new(Mutex::new(keeper)), said }
    }

    /// The end of a process that has closed its output, in words, once it has come.
    async fn end_told(&self) -> String {
        let ended =
            tokio::time::timeout(Duration::from_secs(2), async { self.keeper.lock().await.wait().await });
        let ended = ended.await.ok().and_then(Result::ok);
        let ended = ended.map(|status: ExitStatus| match status.code() {
            Some(code) if code > 128 => format!("; its process was ended by signal {}", code - 128),
            Some(code) => format!("; its process ended with code {code}"),
            None => "; its process was killed".into(),
        });
        format!("{}{}", ended.unwrap_or_default(), self.told())
    }

    /// The last line that it wrote to its standard error.
    fn told(&self) -> String {
        let said = self.said.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let last = said.lines().rfind(|line| !line.trim().is_empty());
        last.map(|line| format!("; the last that it said is {:?}", line.trim())).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_sdk_are_told_plainly() {
        let sent = "Send message error Transport [a::b<c::D<e::F>>] error: ";
        for (why, want) in [
            (
                format!("{sent}Client error: cannot connect to h:1: no, when send discover request"),
                "cannot connect to h:1: no",
            ),
            (
                format!("{sent}unexpected server response: HTTP 500: x, when send initialize request"),
                "HTTP 500: x",
            ),
            ("connection closed: discover response".into(), "connection closed: discover response"),
        ] {
            assert_eq!(plainly(&why), want);
        }
    }
}
