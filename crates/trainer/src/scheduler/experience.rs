//! Groups whose attempts run one after another and read the final answers of earlier attempts.

use levade_recipe::ExperienceKeys;
use levade_tools::{OmittedPart, ResultTruncation};

use super::*;

impl Group {
    /// Returns whether an attempt of the group can start. If `experience` is set, all earlier
    /// samples of the group must have ended.
    pub(super) fn can_start(
        &self,
        member: GroupMember,
        experience: Option<&ExperienceKeys>,
    ) -> bool {
        experience.is_none() || self.earlier_samples(member).iter().all(Option::is_some)
    }

    /// Returns the task of an attempt. If `experience` is set, the task contains a description of
    /// the group's earlier attempts.
    pub(super) fn task_with_experience(
        &self,
        member: GroupMember,
        experience: Option<&ExperienceKeys>,
    ) -> Task {
        let experience =
            experience.and_then(|keys| describe_attempts(self.earlier_samples(member), keys));
        Task { experience, ..self.task.clone() }
    }

    /// Returns the sampled attempts of the group that start before the attempt `member`.
    fn earlier_samples(&self, member: GroupMember) -> &[Option<Attempt>] {
        match member {
            GroupMember::Sample(sample) => &self.attempts[..sample as usize],
            GroupMember::Baseline => &[],
        }
    }
}

/// Describes the final answers of earlier attempts, for the prompt of a later attempt. Returns
/// `None` if all of them failed or are still in progress.
fn describe_attempts(earlier: &[Option<Attempt>], keys: &ExperienceKeys) -> Option<String> {
    let ended = earlier.iter().zip(1..).filter_map(|(attempt, number)| {
        let attempt = attempt.as_ref().filter(|attempt| attempt.status != Status::Failed)?;
        Some((attempt, number))
    });
    let ended: Vec<(&Attempt, usize)> = ended.collect();
    let newest = &ended[ended.len().saturating_sub(keys.attempts)..];
    let truncation = ResultTruncation {
        characters: Some(keys.max_characters),
        side: OmittedPart::Middle,
        ..ResultTruncation::default()
    };
    let entry = |(attempt, number): &(&Attempt, usize)| {
        let answer = attempt.outcome.final_text.trim();
        let answer = truncation.truncate(answer).unwrap_or_else(|| answer.to_owned());
        match attempt.score.filter(|_| keys.scores) {
            // Three decimals, without zeros at the end.
            Some(score) => {
                let score = (score * 1e3).round() / 1e3 + 0.0;
                format!("Attempt {number} (score {score}):\n{answer}")
            }
            None => format!("Attempt {number}:\n{answer}"),
        }
    };
    let described: Vec<String> = newest.iter().map(entry).collect();
    (!described.is_empty()).then(|| format!("{}\n\n{}", keys.instruction, described.join("\n\n")))
}
