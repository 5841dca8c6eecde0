//! Selects the attempts of an export.

use std::str::FromStr;

use glob::Pattern;
use levade_store::{Attempt, Status, Store, StoreError};
use levade_tree::{AttemptId, AttemptSlot, Purpose};

/// Range of numbers that includes both ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range<T> {
    /// Minimum of the range. `None` if the range has no minimum.
    pub min: Option<T>,
    /// Maximum of the range. `None` if the range has no maximum.
    pub max: Option<T>,
}

impl<T: PartialOrd> Range<T> {
    /// Returns whether the range contains a number.
    pub fn contains(&self, number: &T) -> bool {
        self.min.as_ref().is_none_or(|min| number >= min)
            && self.max.as_ref().is_none_or(|max| number <= max)
    }
}

impl<T: FromStr + Copy + PartialOrd> FromStr for Range<T> {
    type Err = String;

    /// Parses a range: `A..B`, `A..`, `..B`, or `A` for a single number.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("\"{text}\" is not a range; write A..B, A.., ..B or A, with A at most B");
        let number = |text: &str| match text {
            "" => Ok(None),
            text => text.parse::<T>().map(Some).map_err(|_| wrong()),
        };
        let range = match text.split_once("..") {
            Some((min, max)) => Range { min: number(min)?, max: number(max)? },
            None => {
                let one = number(text)?;
                Range { min: one, max: one }
            }
        };
        let is_ordered = match (range.min, range.max) {
            (None, None) => text == "..",
            // NaN is in no range.
            (Some(min), Some(max)) => min <= max,
            (Some(one), None) | (None, Some(one)) => one.partial_cmp(&one).is_some(),
        };
        if is_ordered { Ok(range) } else { Err(wrong()) }
    }
}

/// Filter that selects the attempts and sequences of an export. A field that is `None` excludes
/// nothing; `purposes` and `statuses` list everything that is included.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Purposes of the selected attempts.
    pub purposes: Vec<Purpose>,
    /// Statuses of the selected attempts.
    pub statuses: Vec<Status>,
    /// Index of the phase whose attempts are selected. `None` selects all phases.
    pub phase: Option<u32>,
    /// Range of the steps for which the selected attempts were started. `None` selects all steps.
    pub steps: Option<Range<u32>>,
    /// Range of the rewards of selected attempts. If the range is set, attempts without a reward
    /// are excluded.
    pub reward: Option<Range<f64>>,
    /// Range of the scores of selected attempts. If the range is set, attempts without a score are
    /// excluded.
    pub score: Option<Range<f64>>,
    /// Pattern that the task id of a selected attempt matches. `None` selects all tasks.
    pub task: Option<Pattern>,
    /// Name of the agent whose sequences are selected. `None` selects all agents.
    pub agent: Option<String>,
}

impl Filter {
    /// Returns the ids of the selected attempts, one list for each group, in the order of their
    /// slots and tries. The filters by task and agent are applied later, because only a complete
    /// attempt contains the task and the agents.
    ///
    /// Memory grows with the number of attempts, by about 200 bytes for each.
    ///
    /// # Errors
    /// Returns an error if the store cannot be read.
    pub async fn select(&self, store: &dyn Store) -> Result<Vec<Vec<AttemptId>>, StoreError> {
        let mut found: Vec<(AttemptSlot, u32, AttemptId)> = Vec::new();
        for &purpose in &self.purposes {
            for one in store.summaries(purpose).await? {
                if self.includes_attempt(&one.slot, one.status, one.score, one.reward) {
                    found.push((one.slot, one.number, one.id));
                }
            }
            // Tries that do not count have no score.
            let uncounted = [Status::Superseded, Status::Abandoned];
            if uncounted.iter().any(|status| self.statuses.contains(status)) {
                for one in store.failures(purpose).await? {
                    let is_uncounted = uncounted.contains(&one.status);
                    if is_uncounted && self.includes_attempt(&one.slot, one.status, None, None) {
                        found.push((one.slot, one.number, one.id));
                    }
                }
            }
        }
        found.sort_unstable();
        let groups = found.chunk_by(|(a, ..), (b, ..)| {
            AttemptSlot { sample: 0, ..*a } == AttemptSlot { sample: 0, ..*b }
        });
        Ok(groups.map(|group| group.iter().map(|(.., id)| *id).collect()).collect())
    }

    fn includes_attempt(
        &self,
        slot: &AttemptSlot,
        status: Status,
        score: Option<f64>,
        reward: Option<f64>,
    ) -> bool {
        let in_range = |range: Option<Range<f64>>, number: Option<f64>| {
            range.is_none_or(|range| number.is_some_and(|number| range.contains(&number)))
        };
        self.statuses.contains(&status)
            && self.phase.is_none_or(|phase| phase == slot.phase)
            && self.steps.is_none_or(|steps| steps.contains(&slot.step))
            && in_range(self.score, score)
            && in_range(self.reward, reward)
    }

    /// Returns whether the filter selects the task of an attempt.
    pub fn includes_task(&self, attempt: &Attempt) -> bool {
        let id = attempt.task.get("id").and_then(serde_json::Value::as_str);
        self.task.as_ref().is_none_or(|task| id.is_some_and(|id| task.matches(id)))
    }

    /// Returns whether the filter selects the sequences of an agent.
    pub fn includes_agent(&self, agent: &str) -> bool {
        self.agent.as_ref().is_none_or(|name| name == agent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_parses_open_closed_and_single_forms() {
        let parse = |text: &str| text.parse::<Range<i64>>();
        let range = |min, max| Ok(Range { min, max });
        assert_eq!(parse("2..5"), range(Some(2), Some(5)));
        assert_eq!(parse("2.."), range(Some(2), None));
        assert_eq!(parse("..-1"), range(None, Some(-1)));
        assert_eq!(parse("3"), range(Some(3), Some(3)));
        assert_eq!(parse(".."), range(None, None));
        for wrong in ["", "a", "5..2", "1..b", "1...2"] {
            assert!(parse(wrong).unwrap_err().contains("A..B"), "{wrong}");
        }
        assert!("NaN..".parse::<Range<f64>>().is_err());
        let range: Range<f64> = "-0.5..1".parse().unwrap();
        assert!(range.contains(&-0.5) && range.contains(&1.0) && !range.contains(&1.1));
    }
}
