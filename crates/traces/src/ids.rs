//! Ids of traces and spans, derived from the attempt.

use levade_tree::AttemptId;
use sha2::{Digest, Sha256};

/// Returns the id of an attempt's trace. Two runs of one recipe have the same attempt ids, so the
/// start of the run, a Unix timestamp in seconds, distinguishes their traces.
pub(crate) fn trace_id(attempt: &AttemptId, started_at: u64) -> [u8; 16] {
    truncate(Sha256::new().chain_update(attempt.bytes()).chain_update(started_at.to_le_bytes()))
}

/// Returns the id of the span named `name` in a trace. Span names must be unique within a trace.
pub(crate) fn span_id(trace: &[u8; 16], name: &str) -> [u8; 8] {
    truncate(Sha256::new().chain_update(trace).chain_update(name.as_bytes()))
}

fn truncate<const N: usize>(hash: Sha256) -> [u8; N] {
    let mut id = [0; N];
    id.copy_from_slice(&hash.finalize()[..N]);
    id
}
