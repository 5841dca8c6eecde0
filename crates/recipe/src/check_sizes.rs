//! Checks bounds of counts, within which lists fit into memory and sums cannot overflow.

use super::RecipeError;
use super::bounds::MAX_ATTEMPTS;
use super::check::Checker;
use super::keys::{EvalKeys, Phase};
use super::rl::RlKeys;

/// Maximum number of steps of all phases together.
const MAX_STEPS: u64 = 1_000_000_000;

impl Checker<'_> {
    /// Checks that the number of attempts of an evaluation fits into memory.
    pub(super) fn check_eval_attempts(&self, eval: &EvalKeys) -> Result<(), RecipeError> {
        let max_samples = MAX_ATTEMPTS / (eval.tasks + eval.unseen_wordings).max(1);
        let range = format!(
            "at most {MAX_ATTEMPTS} / (eval.tasks + eval.unseen_wordings), which is {max_samples}"
        );
        self.check(eval.samples as usize <= max_samples.max(1), "eval.samples", eval.samples, range)
    }

    /// Checks that the attempts of a step, including attempts that run ahead, fit into memory. The
    /// error names the largest factor of their number.
    pub(super) fn check_step_attempts(
        &self,
        phase: usize,
        keys: &RlKeys,
    ) -> Result<(), RecipeError> {
        let RlKeys { groups, group_size, oversample: spare, staleness, .. } = *keys;
        let ahead = staleness as usize;
        let attempts_per_group =
            group_size.checked_add(spare).and_then(|attempts| attempts.checked_add(1));
        let attempts_per_step =
            attempts_per_group.and_then(|attempts| attempts.checked_mul(groups));
        let all =
            attempts_per_step.and_then(|attempts| attempts.checked_mul(ahead.checked_add(1)?));
        let counts = [
            ("groups", groups),
            ("group_size", group_size),
            ("oversample", spare),
            ("staleness", ahead),
        ];
        let (name, value) =
            counts.into_iter().fold(counts[0], |a, b| if b.1 > a.1 { b } else { a });
        self.check(
            all.is_some_and(|all| all <= MAX_ATTEMPTS),
            format_args!("phase.{phase}.{name}"),
            value,
            format_args!(
                "so small that groups × (group_size + oversample + 1) × (1 + staleness), the \
                 attempts in flight, is at most {MAX_ATTEMPTS}"
            ),
        )
    }

    /// Checks that the phases together have at most [`MAX_STEPS`] steps.
    pub(super) fn check_steps(&self, phases: &[Phase]) -> Result<(), RecipeError> {
        let mut before = 0;
        for (index, phase) in phases.iter().enumerate() {
            let (key, value) = match phase {
                Phase::Sft(keys) => ("epochs", keys.epochs),
                Phase::Rl(keys) => ("steps", keys.steps),
                Phase::Prompt(keys) => ("rounds", keys.rounds),
            };
            let all = phase.exact_steps().saturating_add(before);
            let range = format!("so few that all phases have at most {MAX_STEPS} steps together");
            self.check(all <= MAX_STEPS, format_args!("phase.{index}.{key}"), value, range)?;
            before = all;
        }
        Ok(())
    }
}
