//! Observations: what the model reads after a tool call.

use std::collections::BTreeMap;

use levade_text::{Message, ToolCall};
use levade_tree::{CallCounts, TimeInterval};

use super::{Branch, CallError, ResultTruncation, ToolOutput};

/// Maximum number of characters in an observation, for every tool. The middle of a longer
/// observation is left out. Models do not read that much, and tokenizing it would take long. Some
/// tools have a lower limit.
const MAX_CHARS: usize = 2_000_000;

/// Names of the metrics that every toolbox has: the number of calls, and the number of failed
/// calls.
pub const COMMON_METRICS: [&str; 2] = ["calls", "errors"];

/// Text that the model reads after a tool call, with the other effects of the call.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation {
    /// Tool call that the observation belongs to. `None` if the call was malformed.
    pub call: Option<ToolCall>,
    /// Name of the called toolbox. `None` if no toolbox has such a tool.
    pub toolbox: Option<String>,
    /// Text that the model reads. It starts with `Error: ` if the call failed.
    pub text: String,
    /// Category of the call's result.
    pub kind: ObservationKind,
    /// Reward for the turn that made the call; `None` if the tool gives no reward.
    pub reward: Option<f64>,
    /// Metrics of the call by name, except the metrics that are counted for every toolbox
    /// ([`COMMON_METRICS`]).
    pub metrics: BTreeMap<String, f64>,
    /// Final answer of the attempt, if the call ended the attempt; otherwise `None`.
    pub ends: Option<String>,
    /// Failure of the tool itself, which is reported to the user. `None` if the tool works.
    pub failure: Option<String>,
    /// Whether the attempt must end because of `failure`.
    pub breaks: bool,
    /// Conversations of the agents that the tool called.
    pub branches: Vec<Branch>,
    /// Time interval of the call, without the wait for a permit. `None` if the call was malformed.
    pub interval: Option<TimeInterval>,
}

/// Category of a call's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObservationKind {
    /// The call has succeeded.
    Ok,
    /// The call could not be parsed.
    Malformed,
    /// The call names a tool that the set does not have.
    UnknownTool,
    /// The arguments do not match the tool's schema.
    BadArguments,
    /// The tool ran and failed, or is unavailable.
    Failed,
    /// The call has timed out.
    Timeout,
}

impl ObservationKind {
    /// Returns the name of the category in metrics.
    pub fn name(self) -> &'static str {
        match self {
            ObservationKind::Ok => "ok",
            ObservationKind::Malformed => "malformed",
            ObservationKind::UnknownTool => "unknown_tool",
            ObservationKind::BadArguments => "bad_arguments",
            ObservationKind::Failed => "failed",
            ObservationKind::Timeout => "timeout",
        }
    }

    /// Increments the counter of this category in `counts`.
    pub(super) fn count(self, counts: &mut CallCounts) {
        *match self {
            ObservationKind::Ok => &mut counts.ok,
            ObservationKind::Malformed => &mut counts.malformed,
            ObservationKind::UnknownTool => &mut counts.unknown_tool,
            ObservationKind::BadArguments => &mut counts.bad_arguments,
            ObservationKind::Failed => &mut counts.failed,
            ObservationKind::Timeout => &mut counts.timeout,
        } += 1;
    }
}

impl Observation {
    /// Creates an observation that only has a text. Prefixes the text with `Error: ` unless the
    /// call succeeded or the text has the prefix already.
    pub(super) fn new(kind: ObservationKind, text: String) -> Self {
        // A server may have written this prefix itself.
        let is_marked = kind == ObservationKind::Ok || text.trim_start().starts_with("Error:");
        let text = if is_marked { text } else { format!("Error: {text}") };
        Observation {
            call: None,
            toolbox: None,
            text,
            kind,
            reward: None,
            metrics: BTreeMap::new(),
            ends: None,
            failure: None,
            breaks: false,
            branches: Vec::new(),
            interval: None,
        }
    }

    /// Creates an observation that reports a failure of the tool itself.
    pub(super) fn from_failure(kind: ObservationKind, text: String) -> Self {
        let observation = Self::new(kind, text);
        Self { failure: Some(observation.text.clone()), ..observation }
    }

    /// Creates an observation from a tool result.
    pub(super) fn from_output(output: ToolOutput) -> Self {
        let kind = match output.error {
            None => ObservationKind::Ok,
            Some(CallError::BadArguments) => ObservationKind::BadArguments,
            Some(CallError::Failed | CallError::Unavailable) => ObservationKind::Failed,
            Some(CallError::Late) => ObservationKind::Timeout,
        };
        let text = output.read();
        let text = ResultTruncation { characters: Some(MAX_CHARS), ..ResultTruncation::default() }
            .truncate(&text)
            .unwrap_or(text);
        let mut observation = Self::new(kind, text);
        if matches!(output.error, Some(CallError::Unavailable | CallError::Late)) {
            observation.failure = Some(observation.text.clone());
        }
        let ToolOutput { reward, metrics, ends, branches, .. } = output;
        let (mut fit, other): (BTreeMap<_, _>, BTreeMap<_, _>) =
            metrics.into_iter().partition(|(_, value)| value.is_finite());
        if let Some((name, value)) = other.into_iter().next() {
            observation
                .failure
                .get_or_insert_with(|| unfit_value(&format!("metric {name:?}"), value));
        }
        for name in COMMON_METRICS {
            if fit.remove(name).is_some() {
                observation.failure.get_or_insert_with(|| {
                    format!(
                        "the tool's metric {name:?} is left out, because it is counted for every \
                         toolbox"
                    )
                });
            }
        }
        if let Some(reward) = reward.filter(|reward| !reward.is_finite()) {
            observation.failure.get_or_insert_with(|| unfit_value("reward", reward));
        }
        Observation {
            reward: reward.filter(|reward| reward.is_finite()),
            metrics: fit,
            ends,
            branches,
            ..observation
        }
    }

    /// Returns the message of role `tool` with which the model reads the observation.
    pub fn message(&self) -> Message {
        let mut message = Message::tool(self.text.as_str());
        message.tool_call_id = self.call.as_ref().map(|call| call.id.clone());
        message.name = self.call.as_ref().map(|call| call.name.clone());
        message
    }
}

/// Describes a reward or metric that is left out because its value is not finite and cannot be
/// summed or recorded.
fn unfit_value(quantity: &str, value: f64) -> String {
    format!("the tool's {quantity} is {value}, but must be finite; it is left out")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_rewards_and_metrics_are_dropped_and_reported() {
        let output = ToolOutput {
            reward: Some(0.5),
            metrics: BTreeMap::from([("rows".to_owned(), 2.0), ("seconds".to_owned(), f64::NAN)]),
            ..ToolOutput::text("done")
        };
        let observation = Observation::from_output(output);
        assert_eq!(
            (observation.reward, observation.metrics),
            (Some(0.5), BTreeMap::from([("rows".to_owned(), 2.0)]))
        );
        assert!(observation.failure.unwrap().starts_with("the tool's metric \"seconds\" is NaN"));
        let output = ToolOutput { reward: Some(f64::INFINITY), ..ToolOutput::text("done") };
        let observation = Observation::from_output(output);
        assert_eq!((observation.reward, observation.kind), (None, ObservationKind::Ok));
        assert!(observation.failure.unwrap().starts_with("the tool's reward is inf"));
        let metrics = BTreeMap::from([("calls".to_owned(), 9.0)]);
        let observation =
            Observation::from_output(ToolOutput { metrics, ..ToolOutput::text("done") });
        assert_eq!((observation.metrics.len(), observation.kind), (0, ObservationKind::Ok));
        assert!(
            observation.failure.unwrap().starts_with("the tool's metric \"calls\" is left out")
        );
    }

    #[test]
    fn oversized_observation_omits_middle() {
        let flood = format!("a{}z", "x".repeat(3 * MAX_CHARS));
        let read = Observation::from_output(ToolOutput::text(flood)).text;
        assert!(read.starts_with("ax") && read.ends_with("xz") && read.len() < MAX_CHARS + 100);
        assert!(read.contains("[… 4000002 characters are left out here …]"));
    }

    #[test]
    fn observation_error_prefix_is_added_once() {
        for text in ["no city", "Error: no city"] {
            let observation = Observation::from_output(ToolOutput::error(CallError::Failed, text));
            assert_eq!(observation.text, "Error: no city");
        }
    }

    #[test]
    fn only_unavailable_tool_is_reported_as_failure() {
        assert_eq!(observation_of(CallError::BadArguments).kind, ObservationKind::BadArguments);
        let failed = observation_of(CallError::Failed);
        let unavailable = observation_of(CallError::Unavailable);
        assert_eq!((failed.kind, failed.failure), (ObservationKind::Failed, None));
        assert_eq!(unavailable.kind, ObservationKind::Failed);
        assert_eq!(
            (unavailable.text.as_str(), unavailable.failure.as_deref()),
            ("Error: no", Some("Error: no"))
        );
    }

    fn observation_of(error: CallError) -> Observation {
        Observation::from_output(ToolOutput::error(error, "no"))
    }
}
