//! Why a server does not start or answer, in words for the user: without the names of Rust types, and with
//! what the server itself printed.

use rmcp::ServiceError;
use rmcp::service::ClientInitializeError;
use rmcp::transport::DynamicTransportError;

use super::ledger::{Ledger, in_words};

/// Lines of a server's standard error that are shown.
const LINES: usize = 10;

/// Characters of such a line that are shown.
const LINE: usize = 300;

/// Returns why a connection was not established.
pub(super) fn of_start(error: &ClientInitializeError, ledger: &Ledger) -> String {
    let why = ledger.rejection().unwrap_or_else(|| of_initialize(error));
    match ledger.noise().filter(|_| ledger.rejection().is_none()) {
        Some(noise) => format!("{why}; the last text on its standard output is no message: {noise:?}"),
        None => why,
    }
}

/// Whether a connection was not established because the server closed it.
pub(super) fn is_closed(error: &ClientInitializeError) -> bool {
    match error {
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => is_closed(fallback),
        ClientInitializeError::ConnectionClosed(_) | ClientInitializeError::TransportError { .. } => true,
        _ => false,
    }
}

fn of_initialize(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => of_initialize(fallback),
        ClientInitializeError::JsonRpcError(error) => in_words(error),
        ClientInitializeError::ConnectionClosed(_) => "it closed the connection".into(),
        ClientInitializeError::TransportError { error, .. } => of_transport(error),
        ClientInitializeError::ExpectedInitResponse(_) | ClientInitializeError::ExpectedInitResult(_) => {
            "its answer to the handshake is none of this protocol".into()
        }
        ClientInitializeError::ConflictInitResponseId(expected, got) => {
            format!("its answer to the handshake has the id {got}, and the request had {expected}")
        }
        ClientInitializeError::UncorrelatedErrorResponse { expected, received } => {
            format!("its answer to the handshake has the id {received}, and the request had {expected}")
        }
        ClientInitializeError::NoCompatibleProtocolVersion { client_supported, server_supported } => {
            let all = |versions: &[rmcp::model::ProtocolVersion]| {
                versions.iter().map(|version| version.as_str().to_owned()).collect::<Vec<_>>().join(", ")
            };
            format!(
                "it speaks the versions {} of the protocol, and none of {}",
                all(server_supported),
                all(client_supported)
            )
        }
        other => other.to_string(),
    }
}

/// Returns why a request has no response.
pub(super) fn of_call(error: &ServiceError) -> String {
    match error {
        ServiceError::McpError(error) => in_words(error),
        ServiceError::TransportSend(error) => of_transport(error),
        ServiceError::TransportClosed => "it closed the connection".into(),
        ServiceError::UnexpectedResponse => "its answer is none of this protocol".into(),
        other => other.to_string(),
    }
}

/// Returns the cause of a transport's error.
fn of_transport(error: &DynamicTransportError) -> String {
    let mut why = dressage_http::causes(&*error.error);
    for lead in ["Client error: ", "unexpected server response: ", "Io error: "] {
        if let Some(rest) = why.strip_prefix(lead) {
            why = rest.to_owned();
        }
    }
    match why.strip_prefix("Broken pipe") {
        Some(_) => "it closed the connection".into(),
        None => why,
    }
}

/// Returns the lines of a server's standard error that tell most: the last ones, after the last that names an
/// error, if that is above them.
pub(super) fn printed(stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines.len().saturating_sub(LINES);
    let named = lines[..last].iter().rposition(|line| names_error(line));
    let is_named_below = lines[last..].iter().any(|line| names_error(line));
    let shown: Vec<String> = match named.filter(|_| !is_named_below) {
        // The lines that explain an error follow it.
        Some(at) => {
            let end = (at + LINES / 2).min(last);
            let skipped = (end < last).then(|| "  …".to_owned());
            let rest = &lines[last + LINES / 2..];
            lines[at..end]
                .iter()
                .map(|line| cut(line))
                .chain(skipped)
                .chain(rest.iter().map(|line| cut(line)))
                .collect()
        }
        None => lines[last..].iter().map(|line| cut(line)).collect(),
    };
    match &shown[..] {
        [] => String::new(),
        [one] => format!("; it printed: {}", one.trim()),
        lines => format!("; it printed:\n{}", lines.join("\n")),
    }
}

fn cut(line: &str) -> String {
    let line = line.trim_end();
    match line.char_indices().nth(LINE) {
        Some((end, _)) => format!("  {}…", &line[..end]),
        None => format!("  {line}"),
    }
}

/// Whether a line begins with the name of an error, as `ValueError: …` or `npm error …`.
fn names_error(line: &str) -> bool {
    let line = line.trim_start().to_lowercase();
    // Frames of a stack name the files of errors.
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

    fn numbered(from: usize, to: usize) -> String {
        (from..to).map(|line| format!("    at step {line} (/x/error.js:1)\n")).collect()
    }

    #[test]
    fn printed_shows_last_lines() {
        assert_eq!(printed(" \n"), "");
        assert_eq!(printed("a\n\n"), "; it printed: a");
        assert_eq!(printed("a\nb\n"), "; it printed:\n  a\n  b");
        let long = printed(&numbered(0, 50));
        assert!(long.contains("step 49") && long.contains("step 40") && !long.contains("step 39"), "{long}");
        assert!(printed(&"x".repeat(5000)).chars().count() < 400);
    }

    #[test]
    fn printed_shows_error_above_stack() {
        let text = format!(
            "starting\nError: Could not locate the bindings file. Tried:\n -> /a\n -> /b\n{}\nNode.js v20.20.2\n",
            numbered(0, 40)
        );
        let shown = printed(&text);
        assert!(shown.contains("Could not locate the bindings file") && shown.contains("-> /b"), "{shown}");
        assert!(shown.contains("Node.js v20") && !shown.contains("starting"), "{shown}");
        assert!(shown.lines().count() <= LINES + 3, "{shown}");
        let shown = printed(&format!("Error: old\n{}Error: new\nbye\n", numbered(0, 40)));
        assert!(shown.contains("Error: new") && !shown.contains("Error: old"), "{shown}");
    }
}
