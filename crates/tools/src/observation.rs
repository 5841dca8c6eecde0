//! Observations: what becomes of a call.

use std::collections::BTreeMap;

use levade_text::{Message, ToolCall};
use levade_tree::CallCounts;

use super::{Branch, CallError, Cut, ToolOutput};

/// Most characters of an answer, whichever tool gave it (some have a lower limit of their own); longer ones
/// lose their middle. No model reads more, and a tokenizer would take a long time for them.
const MOST: usize = 2_000_000;

/// Names of the metrics that every toolbox has: how many calls it had, and how many of these it did not
/// answer.
pub const COUNTED: [&str; 2] = ["calls", "errors"];

/// A text that the model reads after a call, and whatever the call brought besides.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation {
    /// The call, where it could be read.
    pub call: Option<ToolCall>,
    /// Name of the toolbox that was called, where there is one with such a tool.
    pub toolbox: Option<String>,
    /// The text.
    pub text: String,
    /// How the call went.
    pub kind: ObservationKind,
    /// A reward for the turn.
    pub reward: Option<f64>,
    /// Numbers to report, by name, without those that are counted of every toolbox.
    pub metrics: BTreeMap<String, f64>,
    /// The final answer of the attempt, which the call ended.
    pub ends: Option<String>,
    /// Fault of the tool, where it has one.
    pub trouble: Option<String>,
    /// Whether the attempt is not to go on after that fault.
    pub breaks: bool,
    /// Conversations of agents that helped.
    pub branches: Vec<Branch>,
}

/// How a call went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObservationKind {
    /// Answered.
    Ok,
    /// Not readable as a call.
    Malformed,
    /// Names no tool of the set.
    UnknownTool,
    /// Has arguments that do not fit the tool.
    BadArguments,
    /// Failed: the tool tried and could not answer.
    Failed,
    /// Not answered in time.
    Timeout,
}

impl ObservationKind {
    /// Counts a call that went so.
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
    /// One that is nothing but a text, `Error: ` before it once unless the call was answered.
    pub(super) fn new(kind: ObservationKind, text: String) -> Self {
        // A server may have written the word itself.
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
            trouble: None,
            breaks: false,
            branches: Vec::new(),
        }
    }

    /// Makes one of an answer.
    pub(super) fn of(output: ToolOutput) -> Self {
        let kind = match output.error {
            None => ObservationKind::Ok,
            Some(CallError::BadArguments) => ObservationKind::BadArguments,
            Some(CallError::Failed | CallError::Unavailable) => ObservationKind::Failed,
            Some(CallError::Late) => ObservationKind::Timeout,
        };
        let text = output.read();
        let text = Cut { characters: Some(MOST), ..Cut::default() }.of(&text).unwrap_or(text);
        let mut of = Self::new(kind, text);
        if matches!(output.error, Some(CallError::Unavailable | CallError::Late)) {
            of.trouble = Some(of.text.clone());
        }
        let ToolOutput { reward, metrics, ends, branches, .. } = output;
        // Neither a sum nor the record could hold it.
        let unfit =
            |what: &str, value: f64| format!("its {what} is {value}, which is left out: it must be finite");
        let (mut fit, other): (BTreeMap<_, _>, BTreeMap<_, _>) =
            metrics.into_iter().partition(|(_, value)| value.is_finite());
        if let Some((name, value)) = other.into_iter().next() {
            of.trouble.get_or_insert_with(|| unfit(&format!("metric {name:?}"), value));
        }
        for name in COUNTED {
            if fit.remove(name).is_some() {
                let why = || format!("its metric {name:?} is left out: this is counted of every toolbox");
                of.trouble.get_or_insert_with(why);
            }
        }
        if let Some(reward) = reward.filter(|reward| !reward.is_finite()) {
            of.trouble.get_or_insert_with(|| unfit("reward", reward));
        }
        Observation { reward: reward.filter(|reward| reward.is_finite()), metrics: fit, ends, branches, ..of }
    }

    /// The turn in which the model reads it.
    pub fn message(&self) -> Message {
        let mut message = Message::tool(self.text.as_str());
        message.tool_call_id = self.call.as_ref().map(|call| call.id.clone());
        message.name = self.call.as_ref().map(|call| call.name.clone());
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_do_not_fit_are_left_out_and_named() {
        let metrics = || BTreeMap::from([("rows".to_owned(), 2.0), ("seconds".to_owned(), f64::NAN)]);
        let output = ToolOutput { reward: Some(0.5), metrics: metrics(), ..ToolOutput::text("done") };
        let of = Observation::of(output);
        assert_eq!((of.reward, of.metrics), (Some(0.5), BTreeMap::from([("rows".to_owned(), 2.0)])));
        assert!(of.trouble.unwrap().starts_with("its metric \"seconds\" is NaN"));
        let output = ToolOutput { reward: Some(f64::INFINITY), ..ToolOutput::text("done") };
        let of = Observation::of(output);
        assert_eq!((of.reward, of.kind), (None, ObservationKind::Ok));
        assert!(of.trouble.unwrap().starts_with("its reward is inf"));
        let metrics = BTreeMap::from([("calls".to_owned(), 9.0)]);
        let of = Observation::of(ToolOutput { metrics, ..ToolOutput::text("done") });
        assert_eq!((of.metrics.len(), of.kind), (0, ObservationKind::Ok));
        assert!(of.trouble.unwrap().starts_with("its metric \"calls\" is left out"));
    }

    #[test]
    fn a_flood_loses_its_middle() {
        let flood = format!("a{}z", "x".repeat(3 * MOST));
        let read = Observation::of(ToolOutput::text(flood)).text;
        assert!(read.starts_with("ax") && read.ends_with("xz") && read.len() < MOST + 100);
        assert!(read.contains("[… 4000002 characters are left out here …]"));
    }

    #[test]
    fn errors_are_marked_once() {
        for text in ["no city", "Error: no city"] {
            let of = Observation::of(ToolOutput::error(CallError::Failed, text));
            assert_eq!(of.text, "Error: no city");
        }
    }

    #[test]
    fn only_a_tool_that_does_not_work_is_trouble() {
        let of = |error| Observation::of(ToolOutput::error(error, "no"));
        assert_eq!(of(CallError::BadArguments).kind, ObservationKind::BadArguments);
        let (failed, unavailable) = (of(CallError::Failed), of(CallError::Unavailable));
        assert_eq!((failed.kind, failed.trouble), (ObservationKind::Failed, None));
        assert_eq!(unavailable.kind, ObservationKind::Failed);
        assert_eq!(
            (unavailable.text.as_str(), unavailable.trouble.as_deref()),
            ("Error: no", Some("Error: no"))
        );
    }
}
