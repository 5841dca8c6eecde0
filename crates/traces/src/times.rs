//! Origins of the times in spans.

/// Origin of a span's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeSource {
    /// The time was measured by the process that executed the attempt.
    Measured,
    /// The time was derived from measured times. For example, a program executes a tool call
    /// between two model calls.
    Derived,
    /// The time is unknown. The span has no duration. It starts at the start of the attempt or, if
    /// that is unknown, at the start of the run. Consecutive spans start one microsecond apart, to
    /// keep their order.
    Unknown,
}

impl TimeSource {
    /// Returns the value of the span attribute `levade.time`.
    pub fn name(self) -> &'static str {
        match self {
            TimeSource::Measured => "measured",
            TimeSource::Derived => "derived",
            TimeSource::Unknown => "unknown",
        }
    }
}
