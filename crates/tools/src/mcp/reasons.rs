//! Descriptions of why a server does not start or respond, for the user: without the names of Rust
//! types, and with the server's own output.

use rmcp::ServiceError;
use rmcp::service::ClientInitializeError;
use rmcp::transport::DynamicTransportError;

use super::ledger::{RequestLedger, error_text};

/// Describes why a connection to a server could not be established.
pub(super) fn start_reason(error: &ClientInitializeError, ledger: &RequestLedger) -> String {
    let why = ledger.rejection().unwrap_or_else(|| initialize_reason(error));
    match ledger.last_noise().filter(|_| ledger.rejection().is_none()) {
        Some(noise) => {
            format!("{why}; the last text on its standard output is no message: {noise:?}")
        }
        None => why,
    }
}

/// Returns whether a connection failed because the server closed it.
pub(super) fn is_closed(error: &ClientInitializeError) -> bool {
    match error {
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => is_closed(fallback),
        ClientInitializeError::ConnectionClosed(_)
        | ClientInitializeError::TransportError { .. } => true,
        _ => false,
    }
}

fn initialize_reason(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => initialize_reason(fallback),
        ClientInitializeError::JsonRpcError(error) => error_text(error),
        ClientInitializeError::ConnectionClosed(_) => "the server closed the connection".into(),
        ClientInitializeError::TransportError { error, .. } => transport_reason(error),
        ClientInitializeError::ExpectedInitResponse(_)
        | ClientInitializeError::ExpectedInitResult(_) => {
            "the server's response to the handshake does not follow the protocol".into()
        }
        ClientInitializeError::ConflictInitResponseId(expected, got) => {
            format!(
                "the server's response to the handshake has the id {got}, but the request had \
                 {expected}"
            )
        }
        ClientInitializeError::UncorrelatedErrorResponse { expected, received } => {
            format!(
                "the server's response to the handshake has the id {received}, but the request \
                 had {expected}"
            )
        }
        ClientInitializeError::NoCompatibleProtocolVersion {
            client_supported,
            server_supported,
        } => {
            format!(
                "the server supports the protocol versions {}, but none of {}",
                join_versions(server_supported),
                join_versions(client_supported)
            )
        }
        other => other.to_string(),
    }
}

fn join_versions(versions: &[rmcp::model::ProtocolVersion]) -> String {
    versions.iter().map(|version| version.as_str().to_owned()).collect::<Vec<_>>().join(", ")
}

/// Describes why a request has no valid response.
pub(super) fn call_reason(error: &ServiceError) -> String {
    match error {
        ServiceError::McpError(error) => error_text(error),
        ServiceError::TransportSend(error) => transport_reason(error),
        ServiceError::TransportClosed => "the server closed the connection".into(),
        ServiceError::UnexpectedResponse => {
            "the server's response does not follow the protocol".into()
        }
        other => other.to_string(),
    }
}

/// Describes the cause of a transport error.
fn transport_reason(error: &DynamicTransportError) -> String {
    let mut why = levade_http::causes(&*error.error);
    for lead in ["Client error: ", "unexpected server response: ", "Io error: "] {
        if let Some(rest) = why.strip_prefix(lead) {
            why = rest.to_owned();
        }
    }
    match why.strip_prefix("Broken pipe") {
        Some(_) => "the server closed the connection".into(),
        None => why,
    }
}

/// Returns the most informative lines of a server's standard error, as a suffix for a reason. The
/// text is empty if there are no such lines.
pub(super) fn printed_suffix(stderr: &str) -> String {
    match &levade_process::explaining_lines(stderr)[..] {
        [] => String::new(),
        [one] => format!("; it printed: {}", one.trim()),
        lines => format!("; it printed:\n{}", lines.join("\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered_lines(from: usize, to: usize) -> String {
        (from..to).map(|line| format!("    at step {line} (/x/error.js:1)\n")).collect()
    }

    #[test]
    fn printed_suffix_shows_last_stderr_lines() {
        assert_eq!(printed_suffix(" \n"), "");
        assert_eq!(printed_suffix("a\n\n"), "; it printed: a");
        assert_eq!(printed_suffix("a\nb\n"), "; it printed:\n  a\n  b");
        let long = printed_suffix(&numbered_lines(0, 50));
        assert!(
            long.contains("step 49") && long.contains("step 40") && !long.contains("step 39"),
            "{long}"
        );
        assert!(printed_suffix(&"x".repeat(5000)).chars().count() < 400);
    }

    #[test]
    fn printed_suffix_shows_error_above_stack_trace() {
        let text = format!(
            "starting\nError: Could not locate the bindings file. Tried:\n -> /a\n -> /b\n{}\n\
             Node.js v20.20.2\n",
            numbered_lines(0, 40)
        );
        let shown = printed_suffix(&text);
        assert!(
            shown.contains("Could not locate the bindings file") && shown.contains("-> /b"),
            "{shown}"
        );
        assert!(shown.contains("Node.js v20") && !shown.contains("starting"), "{shown}");
        assert!(shown.lines().count() <= 13, "{shown}");
        let shown =
            printed_suffix(&format!("Error: old\n{}Error: new\nbye\n", numbered_lines(0, 40)));
        assert!(shown.contains("Error: new") && !shown.contains("Error: old"), "{shown}");
    }
}
