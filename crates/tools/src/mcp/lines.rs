//! MCP transport over the standard input and output of a server process, with one message per line.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::model::{ClientJsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::ledger::RequestLedger;
use super::lenient;

/// Number of bytes of an oversized line that are searched for the request's id.
const MAX_ID_SEARCH_BYTES: usize = 4096;

/// Pause in a server's output after which a line without line break counts as a complete message,
/// and a doubtful message counts as the response.
const LINE_END_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of lines read after which the task yields to other tasks.
const LINES: usize = 256;

/// MCP transport over the standard streams of a server.
pub(super) struct LineTransport {
    stdout: BufReader<ChildStdout>,
    /// Bytes of the current line. If [`Transport::receive`] is cancelled, the next call continues
    /// the line.
    line: Vec<u8>,
    /// Whether the rest of the current line is dropped because the line is too long.
    is_oversized: bool,
    max_bytes: usize,
    /// Number of lines that have been read since the task last yielded.
    lines: usize,
    /// Messages that have been read from the server but not yet received by the SDK.
    received: VecDeque<ServerJsonRpcMessage>,
    stdin: Arc<Mutex<Option<ChildStdin>>>,
    ledger: Arc<RequestLedger>,
}

impl LineTransport {
    /// Creates a transport over the streams of a process. Lines of more than `max_bytes` are
    /// rejected.
    pub fn new(
        stdout: ChildStdout,
        stdin: ChildStdin,
        max_bytes: usize,
        ledger: Arc<RequestLedger>,
    ) -> Self {
        LineTransport {
            stdout: BufReader::with_capacity(64 << 10, stdout),
            line: Vec::new(),
            is_oversized: false,
            max_bytes,
            lines: 0,
            received: VecDeque::new(),
            stdin: Arc::new(Mutex::new(Some(stdin))),
            ledger,
        }
    }

    /// Consumes the next `count` buffered bytes as part of the current line. `is_end` is whether
    /// they end the line.
    fn take(&mut self, count: usize, is_end: bool) {
        if !self.is_oversized {
            let available = &self.stdout.buffer()[..count];
            if self.line.len() + count > self.max_bytes {
                self.is_oversized = true;
                let start = &self.line[..self.line.len().min(MAX_ID_SEARCH_BYTES)];
                self.received.extend(self.ledger.fail_oversized(start, self.max_bytes));
                self.line = Vec::new();
            } else {
                self.line.extend_from_slice(available);
            }
        }
        self.stdout.consume(count);
        if is_end {
            if !self.is_oversized {
                self.received.extend(self.ledger.read(&self.line, None));
                self.line.clear();
            }
            self.is_oversized = false;
        }
    }
}

impl Transport<RoleClient> for LineTransport {
    type Error = io::Error;

    fn send(
        &mut self,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        self.ledger.register(&message);
        let stdin = Arc::clone(&self.stdin);
        async move {
            let mut line = serde_json::to_vec(&message)?;
            line.push(b'\n');
            let mut stdin = stdin.lock().await;
            let stdin = stdin.as_mut().ok_or(io::ErrorKind::NotConnected)?;
            stdin.write_all(&line).await?;
            stdin.flush().await
        }
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        loop {
            if let Some(message) = self.received.pop_front() {
                return Some(message);
            }
            self.lines = (self.lines + 1) % LINES;
            if self.lines == 0 {
                // A server that prints without end must not keep timeouts from firing.
                tokio::task::yield_now().await;
            }
            let has_line = !self.line.is_empty() && !self.is_oversized;
            let available = if has_line || self.ledger.is_doubtful() {
                match timeout(LINE_END_TIMEOUT, self.stdout.fill_buf()).await {
                    Ok(available) => available,
                    // A complete message needs no line break.
                    Err(_)
                        if lenient::parse(&self.line).is_ok_and(|message| message.is_object()) =>
                    {
                        self.received.extend(self.ledger.read(&self.line, None));
                        self.line.clear();
                        continue;
                    }
                    Err(_) => {
                        self.received.extend(self.ledger.fail_doubtful());
                        continue;
                    }
                }
            } else {
                self.stdout.fill_buf().await
            };
            let available = available.unwrap_or_default();
            if available.is_empty() {
                // The last line may have no line break.
                let last = std::mem::take(&mut self.line);
                // The exit status of the process is more informative than a truncated message.
                if lenient::parse(&last).is_ok() {
                    self.received.extend(self.ledger.read(&last, None));
                }
                self.ledger.mark_ended();
                return self.received.pop_front();
            }
            let end = available.iter().position(|byte| *byte == b'\n');
            let count = end.map_or(available.len(), |end| end + 1);
            self.take(count, end.is_some());
        }
    }

    async fn close(&mut self) -> Result<(), Self::Error> {
        self.stdin.lock().await.take();
        Ok(())
    }
}
