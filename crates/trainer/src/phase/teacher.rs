//! Demonstrations by a policy of others: attempts in which it acts, of which those with a good score are
//! kept.
//!
//! Its attempts are made, scored and recorded like all others, so a run that goes on asks for none again.

use dressage_agent::Teacher;
use dressage_policy::SamplingParams;
use dressage_store::{Attempt, Status};
use dressage_tree::{Placement, Purpose};

use crate::TrainerError;
use crate::observe::{Observer, StopFlag};
use crate::random::order;
use crate::recipe::{SftKeys, SourceKeys};
use crate::rollout::Rollouts;
use crate::tasks::Tasks;

/// The demonstrations of a phase: attempts at training tasks in a seeded order, until there are enough with
/// the score that is asked for. `None` when stopped: what was recorded until then stays.
///
/// # Errors
/// When too few attempts reach the score, or none can be made.
pub(super) async fn demonstrations(
    phase: u32,
    (keys, source): (&SftKeys, &SourceKeys),
    teacher: &Teacher,
    tasks: &Tasks,
    rollouts: &Rollouts,
    observer: &mut dyn Observer,
    stop: &StopFlag,
) -> Result<Option<Vec<Attempt>>, TrainerError> {
    let rollouts = Rollouts { agents: rollouts.agents.taught(&source.policy, teacher)?, ..rollouts.clone() };
    let order = order(rollouts.seed, "demonstrations", &[phase], tasks.train_len());
    let mut left = order.into_iter().filter_map(|at| tasks.train(at as usize)).zip(0..);
    let (wanted, most) = (keys.demonstrations, source.most_tasks(keys.demonstrations));
    let (mut found, mut tried) = (Vec::with_capacity(wanted), 0);
    while found.len() < wanted && tried < most {
        let next = (wanted - found.len()).min(most - tried);
        let place = |group| Placement { purpose: Purpose::Demonstration, phase, step: 0, group, sample: 0 };
        let asked: Vec<_> = left.by_ref().take(next).map(|(task, group)| (place(group), task)).collect();
        if asked.is_empty() {
            break;
        }
        tried += asked.len();
        let made = rollouts.run(&asked, &SamplingParams::default(), observer, stop).await?;
        let Some(made) = made else { return Ok(None) };
        found.extend(made.into_iter().filter(|attempt| is_good(attempt, source.least_score)));
    }
    if found.len() < wanted {
        let (teacher, least) = (source.policy.clone(), source.least_score);
        let found = found.len();
        return Err(TrainerError::TooFewLessons { phase, teacher, least, found, tried, wanted });
    }
    Ok(Some(found))
}

/// Whether an attempt is one to imitate: whole, with tokens, and with such a score.
fn is_good(attempt: &Attempt, least: f64) -> bool {
    attempt.status == Status::Completed
        && attempt.outcome.finish.is_whole()
        && attempt.outcome.sampled_tokens > 0
        && attempt.score.is_some_and(|score| score >= least)
}
