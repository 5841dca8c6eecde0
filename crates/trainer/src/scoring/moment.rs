//! Moments of the training that select scorers: phase, step, and the measured success at a task.

use std::fmt;

use levade_recipe::WhenKeys;
use levade_store::Attempt;
use levade_tree::{AttemptSlot, Purpose};

/// Success that is assumed for a task without a measurement. A curriculum assumes the same value.
const UNMEASURED_SUCCESS: f64 = 0.5;

/// Moment of the training at which an attempt was started. The conditions of scorers refer to it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TrainingMoment {
    phase: u32,
    step: u32,
    /// Success at the attempt's task that was measured before, in 0..=1.
    success: f64,
}

impl TrainingMoment {
    /// Returns the moment of the training that counts for an attempt: phase and step at which it
    /// was started.
    ///
    /// Two kinds of attempts have a fixed moment, because they are compared over several steps and
    /// must have the same scorers. An evaluation counts as made after the last phase. An attempt of
    /// a prompt phase counts as made in the first step of the phase.
    pub fn of_attempt(attempt: &Attempt) -> Self {
        let success = attempt.task["measured_success"].as_f64().unwrap_or(UNMEASURED_SUCCESS);
        let AttemptSlot { purpose, phase, step, .. } = attempt.slot;
        match purpose {
            Purpose::Eval => {
                TrainingMoment { phase: u32::MAX, step: u32::MAX, success: UNMEASURED_SUCCESS }
            }
            Purpose::Prompt => TrainingMoment { phase, step: 0, success },
            _ => TrainingMoment { phase, step, success },
        }
    }

    /// Returns whether the conditions `when` of a scorer include this moment.
    pub fn satisfies(self, when: &WhenKeys) -> bool {
        when.includes(self.phase, self.step, self.success)
    }
}

impl fmt::Display for TrainingMoment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TrainingMoment { phase, step, success } = self;
        write!(f, "from phase {phase}, step {step} and a measured success of {success} on")
    }
}

/// Returns the first moment of the training that none of these conditions includes, or `None` if
/// every moment is included.
///
/// Ranges contain their start and not their end. Their bounds therefore divide the moments into
/// cells, and each cell contains its first moment.
pub(super) fn first_uncovered_moment(conditions: &[&WhenKeys]) -> Option<TrainingMoment> {
    if conditions.iter().any(|when| when.is_constant()) {
        return None;
    }
    let starts = |bounds: fn(&WhenKeys) -> [Option<u32>; 2]| {
        let found = conditions.iter().flat_map(|when| bounds(when)).flatten();
        let mut starts: Vec<u32> = std::iter::once(0).chain(found).collect();
        starts.sort_unstable();
        starts.dedup();
        starts
    };
    let phases = starts(|when| [when.from_phase, when.until_phase]);
    let steps = starts(|when| [when.from_step, when.until_step]);
    let found = conditions.iter().flat_map(|when| [when.from_success, when.until_success]);
    let mut successes: Vec<f64> = std::iter::once(0.0).chain(found.flatten()).collect();
    successes.sort_by(f64::total_cmp);
    successes.dedup();
    phases
        .iter()
        .flat_map(|phase| steps.iter().map(move |step| (*phase, *step)))
        .flat_map(|(phase, step)| {
            successes.iter().map(move |success| TrainingMoment { phase, step, success: *success })
        })
        .find(|moment| !conditions.iter().any(|when| moment.satisfies(when)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gap(conditions: &[&str]) -> Option<TrainingMoment> {
        let keys: Vec<WhenKeys> =
            conditions.iter().map(|text| toml::from_str(text).unwrap()).collect();
        first_uncovered_moment(&keys.iter().collect::<Vec<_>>())
    }

    fn at(phase: u32, step: u32, success: f64) -> Option<TrainingMoment> {
        Some(TrainingMoment { phase, step, success })
    }

    #[test]
    fn first_uncovered_moment_has_no_scorer() {
        assert_eq!(gap(&["from_step = 3", ""]), None);
        assert_eq!(gap(&["until_step = 3", "from_step = 3"]), None);
        assert_eq!(gap(&["until_step = 3", "from_step = 4"]), at(0, 3, 0.0));
        assert_eq!(gap(&["from_phase = 1"]), at(0, 0, 0.0));
        assert_eq!(gap(&["until_phase = 1"]), at(1, 0, 0.0));
        assert_eq!(gap(&["until_success = 0.4", "from_success = 0.4"]), None);
        assert_eq!(gap(&["until_success = 0.4", "from_success = 0.6"]), at(0, 0, 0.4));
        let early = "until_phase = 1\nuntil_success = 0.5";
        assert_eq!(gap(&[early, "from_phase = 1"]), at(0, 0, 0.5));
        assert_eq!(gap(&[early, "from_phase = 1", "from_success = 0.5"]), None);
    }

    #[test]
    fn display_names_phase_step_and_success() {
        let text = at(1, 3, 0.5).unwrap().to_string();
        assert_eq!(text, "from phase 1, step 3 and a measured success of 0.5 on");
    }
}
