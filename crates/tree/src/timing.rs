//! Wall-clock times of the parts of an attempt: model calls, tool calls, scoring.
//!
//! A record does not depend on time, so times are not recorded with an attempt: a run that is
//! repeated has the same record. Traces and other displays use them.

use serde::{Deserialize, Serialize};

/// Start and duration of a part of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TimeInterval {
    /// Start of the interval as a Unix timestamp, in nanoseconds.
    pub start: u64,
    /// Duration of the interval, in nanoseconds.
    pub duration: u64,
}

impl TimeInterval {
    /// Returns the end of the interval as a Unix timestamp, in nanoseconds.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.duration)
    }
}

/// Part of an attempt whose time is measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimedPart {
    /// The agent loop, from its first message to its outcome.
    Attempt,
    /// A model call whose tokens are recorded.
    Call {
        /// Turn of the segments that the call recorded.
        turn: u32,
    },
    /// A call of a chat API, whose messages are recorded instead of tokens.
    External {
        /// Index among the attempt's calls of chat APIs, from 0.
        index: u32,
    },
    /// A tool call, without the wait for a concurrency permit.
    Tool {
        /// Turn of the completion that contains the call.
        turn: u32,
        /// Index of the tool call in the completion, from 0.
        index: u32,
        /// Name of the result's category, such as `ok` or `failed`.
        result: String,
    },
    /// The scoring of the attempt, by all scorers together.
    Scoring,
}

/// A part of an attempt, with its start and duration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Part of the attempt.
    pub part: TimedPart,
    /// Start and duration of the part.
    pub interval: TimeInterval,
}

/// Times of an attempt's parts, in the order in which the parts ended. All values compare as equal,
/// because the identity of an attempt does not depend on when it happened.
#[derive(Debug, Clone, Default)]
pub struct Timings(pub Vec<Timing>);

impl PartialEq for Timings {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Timings {
    /// Adds the time of a part of the attempt.
    pub fn add(&mut self, part: TimedPart, interval: TimeInterval) {
        self.0.push(Timing { part, interval });
    }

    /// Returns the interval of the first part for which `is_meant` returns true.
    pub fn find(&self, is_meant: impl Fn(&TimedPart) -> bool) -> Option<TimeInterval> {
        self.0.iter().find(|timing| is_meant(&timing.part)).map(|timing| timing.interval)
    }

    /// Returns the times of a conversation that becomes a branch of another conversation: all turns
    /// are raised by `turns`, and parts without a turn are dropped.
    pub fn as_branch(self, turns: u32) -> impl Iterator<Item = Timing> {
        self.0.into_iter().filter_map(move |mut timing| match &mut timing.part {
            TimedPart::Call { turn } | TimedPart::Tool { turn, .. } => {
                *turn += turns;
                Some(timing)
            }
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timing_round_trips_through_json() {
        let mut timings = Timings::default();
        let interval = TimeInterval { start: 1_764_422_411_123_456_789, duration: 5 };
        timings.add(TimedPart::Call { turn: 3 }, interval);
        timings.add(TimedPart::Tool { turn: 3, index: 1, result: "ok".into() }, interval);
        timings.add(TimedPart::Scoring, interval);
        let text = serde_json::to_string(&timings.0).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Timing>>(&text).unwrap(), timings.0, "{text}");
    }

    #[test]
    fn branch_raises_turns_and_drops_own_attempt() {
        let mut timings = Timings::default();
        timings.add(TimedPart::Attempt, TimeInterval::default());
        timings.add(TimedPart::Call { turn: 1 }, TimeInterval::default());
        let parts: Vec<_> = timings.as_branch(4).map(|timing| timing.part).collect();
        assert_eq!(parts, [TimedPart::Call { turn: 5 }]);
    }
}
