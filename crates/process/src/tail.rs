//! Keeps the start and the end of a stream in bounded memory.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Default maximum number of bytes that are kept of the end of a stream.
pub const DEFAULT_TAIL_BYTES: usize = 64 << 10;

/// Start and end of an output stream, each up to a maximum size. The bytes between them are counted
/// and discarded.
#[derive(Debug, Clone)]
pub struct Tail {
    head: Vec<u8>,
    tail: Vec<u8>,
    max_head: usize,
    max_tail: usize,
    dropped: usize,
}

impl Default for Tail {
    fn default() -> Self {
        Tail::new(0, DEFAULT_TAIL_BYTES)
    }
}

impl From<&str> for Tail {
    fn from(text: &str) -> Self {
        let mut tail = Tail::new(0, text.len());
        tail.push(text.as_bytes());
        tail
    }
}

impl Tail {
    /// Creates an empty tail. It keeps at most `max_head` bytes of the stream's start and
    /// `max_tail` bytes of its end.
    pub fn new(max_head: usize, max_tail: usize) -> Self {
        Tail { head: Vec::new(), tail: Vec::new(), max_head, max_tail, dropped: 0 }
    }

    /// Appends further bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        let (head, tail) = bytes.split_at(bytes.len().min(self.max_head - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend_from_slice(tail);
        if self.tail.len() > 2 * self.max_tail {
            let excess = self.tail.len() - self.max_tail;
            self.tail.drain(..excess);
            self.dropped += excess;
        }
    }

    /// Returns whether the stream has had no bytes so far.
    pub fn is_empty(&self) -> bool {
        self.head.is_empty() && self.tail.is_empty()
    }

    /// Returns the kept text, with invalid UTF-8 replaced. If the start of the stream is kept and
    /// bytes between the start and the end are missing, a line at their position states their
    /// number.
    pub fn text(&self) -> String {
        let excess = self.tail.len().saturating_sub(self.max_tail);
        if excess == 0 && self.dropped == 0 {
            return String::from_utf8_lossy(&[&self.head[..], &self.tail].concat()).into_owned();
        }
        let head = String::from_utf8_lossy(&self.head);
        let end = String::from_utf8_lossy(&self.tail[excess..]);
        match self.max_head {
            0 => end.into_owned(),
            _ => format!("{head}\n[… {} bytes are left out here …]\n{end}", self.dropped + excess),
        }
    }

    /// Returns the last nonblank line of the stream, without surrounding white space, or `None` if
    /// there is no such line.
    pub fn last_line(&self) -> Option<String> {
        self.text().lines().rfind(|line| !line.trim().is_empty()).map(|line| line.trim().to_owned())
    }
}

/// Background reader of an output stream, so that the stream's writer never waits. Dropping the
/// reader stops reading.
#[derive(Debug)]
pub struct TailReader {
    tail: Arc<Mutex<Tail>>,
    /// Closed when the stream ends.
    reading: watch::Receiver<()>,
    task: AbortHandle,
}

impl TailReader {
    /// Starts to read `stream` into `tail`. If `name` is set, the text is also logged under this
    /// name.
    ///
    /// # Panics
    /// Panics outside of a tokio runtime.
    pub fn start(
        stream: Option<impl AsyncRead + Unpin + Send + 'static>,
        tail: Tail,
        name: Option<String>,
    ) -> Self {
        let tail = Arc::new(Mutex::new(tail));
        let writer_tail = Arc::clone(&tail);
        let (done, reading) = watch::channel(());
        let task = tokio::spawn(async move {
            let _done = done;
            let Some(mut stream) = stream else { return };
            let mut buffer = vec![0; 16 << 10];
            while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                writer_tail.lock().unwrap_or_else(PoisonError::into_inner).push(&buffer[..count]);
                if let Some(name) = &name {
                    let text = String::from_utf8_lossy(&buffer[..count]);
                    tracing::debug!(process = %name, "{}", text.trim_end());
                }
            }
        });
        TailReader { tail, reading, task: task.abort_handle() }
    }

    /// Returns a copy of the stream's text read so far.
    pub fn tail(&self) -> Tail {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the stream ends, for at most `timeout`, and returns the text read so far. A
    /// process that escaped its supervisor can hold the stream open.
    pub async fn finish(&self, timeout: Duration) -> Tail {
        let _ = tokio::time::timeout(timeout, self.reading.clone().changed()).await;
        self.tail()
    }
}

impl Drop for TailReader {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Maximum number of output lines that explain a failure.
const MAX_LINES: usize = 10;

/// Maximum number of characters that are shown of an output line.
const MAX_LINE_CHARS: usize = 300;

/// Returns the lines of a program's output that best explain its failure, indented. These are the
/// last 10 lines. If only an earlier line mentions an error, the first of these lines are replaced
/// by the last line that mentions an error and the lines after it.
pub fn explaining_lines(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines.len().saturating_sub(MAX_LINES);
    let named = lines[..last].iter().rposition(|line| mentions_error(line));
    let is_named_below = lines[last..].iter().any(|line| mentions_error(line));
    match named.filter(|_| !is_named_below) {
        Some(at) => {
            let end = at + MAX_LINES / 2;
            let rest = last + MAX_LINES / 2;
            let skipped = (end < rest).then(|| "  …".to_owned());
            let above = lines[at..end].iter().map(|line| indent_excerpt(line)).chain(skipped);
            above.chain(lines[rest..].iter().map(|line| indent_excerpt(line))).collect()
        }
        None => lines[last..].iter().map(|line| indent_excerpt(line)).collect(),
    }
}

fn indent_excerpt(line: &str) -> String {
    let line = line.trim_end();
    match line.char_indices().nth(MAX_LINE_CHARS) {
        Some((end, _)) => format!("  {}…", &line[..end]),
        None => format!("  {line}"),
    }
}

/// Returns whether a line mentions an error, as `ValueError: …` and `npm error …` do.
fn mentions_error(line: &str) -> bool {
    let line = line.trim_start().to_lowercase();
    // Stack frames mention the files of errors.
    if line.starts_with("at ") || line.starts_with("file \"") {
        return false;
    }
    ["error", "exception", "fatal", "panicked", "cannot find", "could not", "not found"]
        .into_iter()
        .any(|word| line.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_keeps_both_ends_of_long_output() {
        const KEPT_BYTES: usize = 512 << 10;
        let mut printed = Tail::new(KEPT_BYTES, KEPT_BYTES);
        for line in 0..400_000 {
            printed.push(format!("{line}\n").as_bytes());
        }
        let text = printed.text();
        assert!(text.starts_with("0\n1\n") && text.ends_with("399998\n399999\n"));
        let bytes: usize = (0..400_000).map(|line| format!("{line}\n").len()).sum();
        assert!(
            text.contains(&format!("[… {} bytes are left out here …]", bytes - 2 * KEPT_BYTES))
        );
        let mut short = Tail::new(KEPT_BYTES, KEPT_BYTES);
        short.push("ü".repeat(KEPT_BYTES - 1).as_bytes());
        assert_eq!(short.text(), "ü".repeat(KEPT_BYTES - 1));
    }

    #[test]
    fn tail_without_head_keeps_only_the_end() {
        let mut printed = Tail::new(0, 10);
        for line in 0..1000 {
            printed.push(format!("{line}\n").as_bytes());
        }
        assert_eq!(printed.text(), "7\n998\n999\n");
        assert_eq!(printed.last_line().as_deref(), Some("999"));
        assert_eq!((Tail::from(" \n").last_line(), Tail::default().is_empty()), (None, true));
    }

    #[test]
    fn explaining_lines_mark_gap_after_early_error() {
        for error in [0, 5, 9] {
            let name = |line: usize| match line {
                line if line == error => "ValueError: no".to_owned(),
                line => format!("line {line}"),
            };
            let text: String = (0..20).map(|line| name(line) + "\n").collect();
            let shown = explaining_lines(&text);
            let want = (error..error + 5).chain(15..20).map(|line| format!("  {}", name(line)));
            let mut want: Vec<String> = want.collect();
            want.insert(5, "  …".into());
            assert_eq!(shown, want, "error at {error}");
        }
    }

    #[tokio::test]
    async fn reader_returns_output_of_open_stream_at_timeout() {
        let (mut writer, stream) = tokio::io::duplex(64);
        let reader = TailReader::start(Some(stream), Tail::default(), None);
        tokio::io::AsyncWriteExt::write_all(&mut writer, b"so far").await.unwrap();
        assert_eq!(reader.finish(Duration::from_millis(100)).await.text(), "so far");
        drop(writer);
        assert_eq!(reader.finish(Duration::from_secs(60)).await.text(), "so far");
    }
}
