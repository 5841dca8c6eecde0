//! Origins of the times of spans.

/// Origin of a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeSource {
    /// The process that made the attempt measured the time.
    Measured,
    /// The time follows from measured times: a tool call of a program takes place between two
    /// model calls.
    Derived,
    /// The time is unknown. The span has no duration, and starts at the start of the attempt or, if
    /// that is unknown, of the run: one microsecond after the span before it, to keep their order.
    Unknown,
}

impl TimeSource {
    /// Returns the value of the attribute `levade.time`.
    pub fn name(self) -> &'static str {
        match self {
            TimeSource::Measured => "measured",
            TimeSource::Derived => "derived",
            TimeSource::Unknown => "unknown",
        }
    }
}
