//! Attempts as trees of calls and tools, and as OpenTelemetry traces.
//!
//! [`CallTree`] finds the model calls and the tool calls of a recorded attempt. [`TraceBuilder`]
//! converts an attempt to spans, with the names of OpenTelemetry's conventions for generative AI.
//! [`Exporter`] sends the spans to a collector while a run continues; [`Collector`] sends them at
//! once. [`TimesFile`] keeps the times of attempts in a file beside the record.
//!
//! # Guarantees
//! - **Tracing never delays a step and never ends a run.** A queue of fixed size separates the run
//!   from its collector. If the queue is full, attempts are dropped, counted and reported.
//! - **Traces are deterministic.** The ids of a trace and its spans depend only on the attempt and
//!   the start of its run. An attempt that is sent twice is the same trace.
//! - **No time is invented.** A span states whether its time was measured, derived from measured
//!   times, or is unknown ([`TimeSource`]).
//!
//! Out of scope: spans of other programs (`levade-store-server` receives them), and metrics.

mod call_tree;
mod chats;
mod collector;
mod exporter;
mod ids;
mod spans;
#[cfg(test)]
mod testing;
mod times;
mod times_file;

pub use call_tree::{AgentCalls, CallNode, CallTree, ToolNode, tool_calls};
pub use chats::Chats;
pub use collector::{Collector, CollectorError, CollectorOptions};
pub use exporter::{ExportReport, Exporter};
pub use spans::{TraceBuilder, TraceOptions};
pub use times::TimeSource;
pub use times_file::TimesFile;
